"""A setting that names one of several, with the options of the one that it names.

    policy_loss: sapo                        its options have their defaults
    policy_loss: {name: sapo, tau_pos: 2.0}  an option of that loss, and of no other

Runs in: any process (imports pydantic and the catalogue only). Hides that a bare name is short for
a mapping. Invariants: a function of ours and one of a plugin are chosen in the same form; the
options of a built-in one are complete once they are loaded; `plugins` checks the names and options
of both.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import (
    AfterValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from async_grpo.algo.catalog import CLIP_SCHEDULES, KINDS, Registry
from async_grpo.config.section import Section
from async_grpo.config.transports import BACKENDS

REGISTRIES: dict[str, Registry[Any]] = {
    **KINDS,
    "clip_schedule": CLIP_SCHEDULES,
    "transport": BACKENDS,
}
"""What there is to choose from, by kind."""


class Chosen(Section):
    """The name of one of several, and its options."""

    model_config = ConfigDict(extra="allow")
    name: str

    @property
    def values(self) -> dict[str, Any]:
        """The options by name; those of a plugin as they were given."""
        return dict(self.model_extra or {})

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _plain(self) -> Chosen:
        for key, value in self.values.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError):
                raise ValueError(
                    f"`{key}` of {self.name} is of the type {type(value).__name__}; allowed are "
                    "numbers, text, true, false, null, and lists and mappings of them."
                ) from None
        return self

    @model_serializer
    def written(self) -> str | dict[str, Any]:
        """Return the form of a file: the bare name where there are no options."""
        return {"name": self.name, **self.values} if self.values else self.name


@dataclass(frozen=True, slots=True)
class OneOf:
    """Makes a `Chosen` one of a `kind` (`REGISTRIES`); plugins may add to the kinds of `KINDS`."""

    kind: str

    @property
    def built_in(self) -> list[str]:
        """The names that need no plugin."""
        registry = REGISTRIES[self.kind]
        return [name for name in registry if name in registry.built_in]

    def complete(self, choice: Chosen) -> Chosen:
        """Fill in the options that a built-in one has by default; wrong ones stay as they are, for
        `plugins` to name.
        """
        options = self.options(choice.name)
        if options is None:
            return choice
        try:
            made = TypeAdapter(options).validate_json(json.dumps(choice.values), strict=True)
        except ValidationError:
            return choice
        return Chosen.model_validate({"name": choice.name, **asdict(made)})

    def options(self, name: str) -> type[Any] | None:
        """Return the class of the options of a built-in one, if it has some."""
        return REGISTRIES[self.kind][name].options if name in self.built_in else None

    def written(self, given: Any) -> Any:
        """Return the complete form of what a file says, to be compared; anything else as it is."""
        try:
            return self.complete(Chosen.model_validate(given)).written()
        except ValidationError:
            return given

    def __get_pydantic_core_schema__(self, source: type[Any], handler: GetCoreSchemaHandler) -> Any:
        return AfterValidator(self.complete).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, *_: Any) -> dict[str, Any]:
        return {"enum": self.built_in, "kind": self.kind}
