"""A small tokenizer for every model family that `renderers` knows: bytes, and the special tokens
which that family's code looks up.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = re.compile(r"<[^<>\s]{1,60}>")
_MISSING = re.compile(r"token (?:for )?'([^']+)'")


def families() -> list[str]:
    """Names of all renderers but the fallback, and the one that brings its tokens along: gpt-oss,
    whose library does not ask a tokenizer.
    """
    import renderers.base as library

    library._populate_registry()
    return sorted(name for name in library.RENDERER_REGISTRY if name not in ("default", "gpt-oss"))


@cache
def renderer_of_family(name: str) -> tuple[Any, PreTrainedTokenizerFast]:
    """The renderer, and its tokenizer: bytes, and the special tokens that the renderer asks for."""
    import renderers.base as library
    from renderers.configs import config_from_name

    library._populate_registry()
    special: dict[str, None] = {}
    for base in library.RENDERER_REGISTRY[name].__mro__:
        if base.__module__.startswith("renderers."):
            source = inspect.getsource(importlib.import_module(base.__module__))
            special |= dict.fromkeys(_special_tokens(source))
    while True:
        tokenizer = _tokenizer(list(special), name)
        try:
            return library.create_renderer(tokenizer, config_from_name(name)), tokenizer
        except (AssertionError, ValueError) as error:
            missing = _MISSING.search(str(error))
            if missing is None or missing[1] in special:
                raise
            special[missing[1]] = None


def _tokenizer(special: list[str], name: str) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    return PreTrainedTokenizerFast(tokenizer_object=core, name_or_path=f"tests/{name}")


def _special_tokens(source: str) -> list[str]:
    texts: list[Any] = [
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)
    ]
    return [token for text in texts if isinstance(text, str) for token in _SPECIAL.findall(text)]
