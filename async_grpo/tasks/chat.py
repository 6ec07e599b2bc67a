"""Makes prompts of questions (chat messages with a system prompt, or plain text), and their tokens.

Runs in: the driver and the rollout actors. Hides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from async_grpo.config.section import Section
from async_grpo.tasks.base import Prompt

TAGS = (
    "Think about the question, then answer it. Respond in exactly this form:\n"
    "<reasoning>your reasoning</reasoning>\n<answer>the final answer alone</answer>"
)
BOXED = "Solve the problem step by step and put the final answer in \\boxed{}."


class PromptOptions(Section):
    """Options of tasks that ask a question."""

    style: Literal["chat", "plain"] = "chat"
    """Chat messages for the model's chat template, or plain text for a model without one."""
    system: str | None = None
    """Instruction before the question; null means the task's own, empty means none."""

    def prompt(self, question: str, *, system: str) -> Prompt:
        """Return the prompt of `question`; `system` is the task's own instruction."""
        instruction = system if self.system is None else self.system
        if self.style == "chat":
            first = [{"role": "system", "content": instruction}] if instruction else []
            return [*first, {"role": "user", "content": question}]
        return f"{instruction}\n\n{question}\n\n" if instruction else f"{question}\n\n"


def prompt_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a prompt: chat messages through the chat template, text with its bos token."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(
        tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )


def answered_ids(tokenizer: Any, prompt: Prompt, response: str) -> list[int]:
    """Token ids of a prompt with its response: chat messages through the chat template, if there is
    one.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt + response)["input_ids"])
    messages = [*prompt, {"role": "assistant", "content": response}]
    if not tokenizer.chat_template:
        return list(tokenizer("\n".join(one["content"] for one in messages))["input_ids"])
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))


def solved_ids(tokenizer: Any, prompt: Prompt, solution: str, ends: Sequence[int]) -> list[int]:
    """Token ids of a solution and its end: of a chat the one of `ends` with which its template ends
    what an assistant says, else the tokenizer's.
    """
    ids = list(tokenizer(solution, add_special_tokens=False)["input_ids"])
    end = ends[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if not isinstance(prompt, str):
        said = reversed(answered_ids(tokenizer, prompt, solution))
        end = next((one for one in said if one in ends), end)
    return [*ids, end]


def plain(tokenizer: Any, text: str) -> str:
    """Return a text in which nothing is a special token, so that it cannot end its own turn."""
    for token in tokenizer.get_added_vocab():
        if len(token) > 1:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text
