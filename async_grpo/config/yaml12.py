"""YAML as people expect it: version 1.2 scalars, no duplicate keys, nothing executable.

Runs in: any process (imports yaml only). Hides PyYAML, which reads YAML 1.1: there `1e-4` is text,
`on` is true, `010` is eight, `1:30` is ninety, and the first of two equal keys disappears. The
tables of scalars are all that ruamel.yaml would replace, and it reads `1_000` as a number.
Invariant: what `write` writes, `read` reads back equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from typing import Any

import yaml

_DIGITS = 4300
"""Python shows no integer with more digits than these, and would read one in hexadecimal."""
_LARGEST = 100_000
"""Most values of a document, those of aliases counted wherever they stand."""
_INT = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_MERGE = "tag:yaml.org,2002:merge"
_SCALARS = (
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789")),
    (_MERGE, re.compile(r"^<<$"), ["<"]),
)


class _Loader(yaml.SafeLoader):
    """A safe loader with YAML 1.2's scalars; mappings have unique text keys and never recurse."""

    def plain_mapping(self, node: yaml.MappingNode) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:  # of YAML 1.1, in use: `<<: *defaults`
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is not text", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key `{key}` is given twice", key_node.start_mark
                )
            seen.add(key)
        return self.construct_mapping(node, deep=True)

    def plain_list(self, node: yaml.SequenceNode) -> list[Any]:
        return self.construct_sequence(node, deep=True)

    def plain_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        if len(text) > _DIGITS:
            raise ValueError("too many digits")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML version would misread as something other than text."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML loses some line breaks (U+0085) in any other style.
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"'
    )


_Loader.yaml_implicit_resolvers = {}  # without those of YAML 1.1
_Dumper.add_representer(str, _text)
for _tag, _pattern, _first in _SCALARS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.plain_mapping)
_Loader.add_constructor("tag:yaml.org,2002:seq", _Loader.plain_list)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.plain_int)


_WORDS = (
    ("character '\\t'", "a tab; YAML is indented with spaces"),
    (
        "mapping values are not allowed here",
        "this line, or the one before, has a colon too many or too few, or another "
        "indentation than its neighbours",
    ),
    ("unexpected end of stream", "a quotation mark or a bracket is not closed before the end"),
    ("could not find expected ':'", "a key without a colon after it"),
)
"""What a parser says, and what it means to somebody who looks at the line."""


def _in_words(problem: str) -> str:
    return next((words for said, words in _WORDS if said in problem), problem)


class YamlError(ValueError):
    """The text is not usable YAML. `line` counts from 1, 0 when the place is unknown."""

    def __init__(self, problem: str, line: int = 0) -> None:
        super().__init__(problem)
        self.line = line


def read(text: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Return the document in `text` (None when empty) and the line, from 1, of every mapping key by
    its path. Raises YamlError.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, {}
            if _size(node, {}) > _LARGEST:
                raise YamlError(f"it holds more than {_LARGEST:,} values")
            value = loader.construct_document(node)
        finally:
            loader.dispose()
    except YamlError:
        raise
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise YamlError(_in_words(error.problem or "it cannot be parsed"), line) from error
    except yaml.YAMLError as error:
        raise YamlError("it contains characters that YAML does not allow") from error
    except RecursionError as error:
        raise YamlError("it is nested too deeply") from error
    except (
        ValueError
    ) as error:  # an integer with more digits than Python converts, or `!!float` before a word
        raise YamlError("a number in it cannot be read") from error
    except (LookupError, AttributeError) as error:  # `!!bool x`, `!!timestamp x`
        raise YamlError("a value in it is not what its tag says") from error
    lines: dict[tuple[str, ...], int] = {}
    _collect_lines(node, (), lines)
    return value, lines


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many values the node holds, those of aliases counted wherever they stand."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 1  # what holds itself is refused when it is constructed
        inner = [part for pair in node.value for part in (pair if type(pair) is tuple else [pair])]
        known[id(node)] += sum(_size(part, known) for part in inner)
    return known[id(node)]


def _collect_lines(
    node: yaml.Node, path: tuple[str, ...], lines: dict[tuple[str, ...], int]
) -> None:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here = (*path, str(key.value))
            lines[here] = key.start_mark.line + 1  # what is merged comes first, and counts less
            _collect_lines(value, here, lines)


def write(value: Any) -> str:
    """`value` (mappings, lists and scalars) as YAML, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def flow(value: Any) -> str:
    """`value` as YAML on one line, as an override takes it."""
    if not isinstance(value, list | dict):
        return flow([value])[1:-1]  # brackets keep yaml's end of a document away
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=math.inf,
        default_flow_style=True,
    )
    return text.strip()
