"""What every section of the configuration is made of.

Runs in: any process (imports pydantic only). Hides pydantic's settings. Invariants: unknown keys,
wrong types and non-finite numbers are errors in every section; every key of the configuration has a
`Mark`, its own (`Annotated[..., mark]`), or that of its section (`on_resume`) or of the section
around that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[
    float, Field(gt=0, le=1e8)
]  # three years; what waits counts in 64-bit nanoseconds
Fraction = Annotated[float, Field(ge=0, le=1)]
Above0 = Annotated[float, Field(gt=0)]
AtLeast0 = Annotated[float, Field(ge=0)]
ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


@dataclass(frozen=True, slots=True)
class Mark:
    """May a resumed run have another value of the key: `free` (yes), `warn` (yes, with a line that
    says what it changes), `fixed` (no).
    """

    level: Literal["free", "warn", "fixed"]
    reason: str = ""
    """What another value changes (`warn`), or why there can be none (`fixed`)."""
    trains: bool = False
    """Whether the learner computes something else from recorded groups, were it only the last bit.
    """


FREE = Mark("free")


def warn(changes: str, *, trains: bool = False) -> Mark:
    """Mark a key that a resumed run may change; the user is told what that `changes`."""
    return Mark("warn", changes, trains)


def fixed(reason: str) -> Mark:
    """Mark a key that a resumed run cannot change."""
    return Mark("fixed", reason, trains=True)


class Section(BaseModel):
    """A strict, immutable group of settings: unknown keys and wrong types are errors, also in a
    section that comes as an object.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        revalidate_instances="always",
        use_attribute_docstrings=True,
    )
    on_resume: ClassVar[Mark | None] = None
    """Mark of the keys without one of their own."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy with other values, checked like any. Raises pydantic's ValidationError."""
        if update is None:
            return super().model_copy(deep=deep)
        whole = super().model_copy(deep=deep)
        given = {name: getattr(whole, name) for name in self.model_fields_set}
        return type(self).model_validate(given | dict(update))

    def copy(self, **options: Any) -> Self:
        """Copy as `model_copy` does, where pydantic's own `copy` would check nothing."""
        return self.model_copy(**options)

    def unchecked_copy(self, *, update: Mapping[str, Any]) -> Self:
        """Copy with values that together no file could have, for a part that is looked at alone."""
        return super().model_copy(update=update)


def overlaid(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `own`, with what it does not say from `common`, also inside mappings."""
    both = {
        name: overlaid(common[name], value)
        for name, value in own.items()
        if isinstance(value, Mapping) and isinstance(common.get(name), Mapping)
    }
    return {**common, **own, **both}
