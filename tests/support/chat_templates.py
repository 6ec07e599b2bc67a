"""Chat templates of several forms over one small tokenizer."""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import cache

from transformers import Qwen2Tokenizer

_SPACES = {" ": "\u0120", "\n": "\u010a"}
END, START = "<|im_end|>", "<|im_start|>"


@dataclass(frozen=True)
class Template:
    """A template, the roles that it knows, and whether it keeps every turn as it was said."""

    text: str
    roles: tuple[str, ...] = ("user", "tool")
    keeps: bool = True


_LOOP = "{% for m in messages %}"
_PROMPT = "{% if add_generation_prompt %}"
HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<tool_call></tool_call><|im_end|>\n{% endif %}"
    + _LOOP
    + "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    f"{_PROMPT}<|im_start|>assistant\n{{% endif %}}"
)
TEMPLATES = {
    "hermes": Template(HERMES),
    "other_end_of_calls": Template(
        _LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ '[/CALLS]' if m.tool_calls else '<|im_end|>' }}\n{% endfor %}"
        f"{_PROMPT}<|im_start|>assistant\n{{% endif %}}"
    ),
    "chatml": Template(
        _LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        f"{_PROMPT}<|im_start|>assistant\n{{% endif %}}"
    ),
    "no_newline": Template(
        _LOOP + "[{{ m.role }}]{{ m.content }}<|im_end|>{% endfor %}" + _PROMPT + "[assistant]"
        "{% endif %}"
    ),
    "strips_spaces": Template(
        _LOOP + "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        f"{_PROMPT}<|im_start|>assistant\n{{% endif %}}"
    ),
    "turns_in_brackets": Template(
        _LOOP + "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'tool' %}"
        "[TOOL]{{ m.content }}[/TOOL]{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    ),
    "tools_grouped": Template(
        "{% set ns = namespace(tool=false) %}"
        + _LOOP
        + "{% if m.role == 'tool' %}{% if not ns.tool %}<|im_start|>user{% endif %}"
        "\n<response>{{ m.content }}</response>{% if loop.last or "
        "messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
        "{% set ns.tool = true %}{% else %}{% set ns.tool = false %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        f"{_PROMPT}<|im_start|>assistant\n{{% endif %}}"
    ),
    "strips_thoughts": Template(
        _LOOP + "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}" + f"{_PROMPT}<|im_start|>assistant\n{{% endif %}}"
    ),
    "counts_messages": Template(
        "({{ messages | length }})" + _LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endfor %}" + f"{_PROMPT}<|im_start|>assistant\n{{% endif %}}",
        keeps=False,
    ),
    "only_the_last_user": Template(
        _LOOP + "{% if m.role != 'user' or loop.last %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}" + f"{_PROMPT}<|im_start|>assistant\n{{% endif %}}",
        keeps=False,
    ),
}


@cache
def tokenizer_of(name: str) -> Qwen2Tokenizer:
    """A tokenizer of single characters with this template."""
    letters = [_SPACES.get(one, one) for one in string.printable if one not in "\t\r\x0b\x0c"]
    tokens = [END, START, *letters, "Ã", "©"]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        unk_token=END,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[START],
    )
    tokenizer.chat_template = TEMPLATES[name].text
    return tokenizer
