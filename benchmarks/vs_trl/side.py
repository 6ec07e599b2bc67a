"""TRL's GRPOTrainer on the work that a JSON file describes: `python -I benchmarks/vs_trl/side.py
WORK.json OUT.jsonl`.

Runs in: the environment that `benchmarks.vs_trl.environment` makes, which has TRL and not
async_grpo. Hides how settings are called in TRL. Writes a line per learner step (`step`, `time`:
seconds since training began, without evaluations, `samples`, `tokens`) and per evaluation (`step`,
`accuracy`).
"""

from __future__ import annotations

import copy
import json
import sys
import time
import zlib
from pathlib import Path
from typing import Any, TextIO

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback

# TRL itself is imported where it is used: the project's tests look at the rules below, and its
# environment has no TRL.

Work = dict[str, Any]


def exact(response: str, reference: Any) -> float:
    """As `async_grpo.tasks.arithmetic` scores."""
    return float(response.strip() == reference)


def checksum(response: str, reference: Any) -> float:
    """As `benchmarks.tails.Tails` scores."""
    return float(zlib.crc32(response.encode()) & 1)


def contains(response: str, reference: Any) -> float:
    """As `async_grpo.tasks.jsonl` scores with `match: contains`."""
    return float(reference["answer"].strip() in response.strip())


RULES = {"exact": exact, "checksum": checksum, "contains": contains}


def rendered(prompt: Any, tokenizer: Any) -> str:
    """The text of a prompt; of messages, as the trainer writes them for the model."""
    if isinstance(prompt, str):
        return prompt
    text: str = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return text


class Clock:
    """Seconds since training began, without those in which it was stopped."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._stopped = 0.0

    def now(self) -> float:
        return time.perf_counter() - self._started - self._stopped

    def leave_out(self, seconds: float) -> None:
        self._stopped += seconds


class Recorder(TrainerCallback):
    """Writes a line at the end of every step; evaluates now and then, with the clock stopped."""

    def __init__(self, work: Work, out: TextIO) -> None:
        self._work, self._out = work, out
        self.tokenizer: Any = None
        self.generation: GenerationConfig | None = None
        self.generated = {"samples": 0, "tokens": 0}

    def write(self, **line: Any) -> None:
        self._out.write(json.dumps(line) + "\n")
        self._out.flush()

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.write(began=time.time())
        self._evaluate(0, rest["model"])
        self._clock = Clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.write(step=state.global_step, time=self._clock.now(), **self.generated)
        self.generated = {"samples": 0, "tokens": 0}
        every = self._work["evaluate_every"]
        if every and state.global_step % every == 0:
            started = time.perf_counter()
            self._evaluate(state.global_step, rest["model"])
            self._clock.leave_out(time.perf_counter() - started)

    def _evaluate(self, step: int, model: Any) -> None:
        problems, work = self._work["held_out"], self._work
        if not problems:
            return
        with torch.no_grad():
            model.eval()
            inputs = self.tokenizer(
                [rendered(one["prompt"], self.tokenizer) for one in problems],
                add_special_tokens=isinstance(problems[0]["prompt"], str),
                return_tensors="pt",
                padding=True,
                padding_side="left",
            )
            settings = copy.deepcopy(self.generation)  # the end tokens above all
            settings.do_sample = False
            found = model.generate(**inputs, generation_config=settings)[
                :, inputs["input_ids"].shape[1] :
            ]
            model.train()
        texts = self.tokenizer.batch_decode(found, skip_special_tokens=True)
        rule = RULES[work["rule"]]
        right = [rule(text, one["reference"]) for text, one in zip(texts, problems, strict=True)]
        self.write(step=step, accuracy=sum(right) / len(right))


def settings(work: Work) -> Any:
    """The same algorithm as the other side's, in TRL's words; what is left decides only how fast it
    is on a CPU.
    """
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=work["output"],
        seed=work["seed"],
        max_steps=work["steps"],
        num_generations=work["group_size"],
        generation_batch_size=work["samples"],
        per_device_train_batch_size=work["micro_batch"],
        gradient_accumulation_steps=work["samples"] // work["micro_batch"],
        max_completion_length=work["response_length"],
        temperature=work["temperature"],
        shuffle_dataset=False,
        beta=0.0,
        num_iterations=1,
        epsilon=work["clip_low"],
        epsilon_high=work["clip_high"],
        scale_rewards="group",
        loss_type="dapo",  # the mean over the tokens of the whole batch
        learning_rate=work["lr"],
        lr_scheduler_type="constant",
        weight_decay=work["weight_decay"],
        max_grad_norm=work["grad_clip"],
        adam_beta1=work["betas"][0],
        adam_beta2=work["betas"][1],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        use_transformers_continuous_batching=work["continuous"],
        report_to="none",
        save_strategy="no",
        logging_steps=10,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    from datasets import Dataset
    from trl import GRPOTrainer

    work = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(work["threads"])
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    with open(sys.argv[2], "w", encoding="utf-8") as out:
        recorder = Recorder(work, out)
        recorder.tokenizer, rule = tokenizer, RULES[work["rule"]]

        def reward(
            completions: list[Any],
            completion_ids: list[list[int]],
            reference: list[Any],
            **rest: Any,
        ) -> list[float]:
            recorder.generated["samples"] += len(completions)
            recorder.generated["tokens"] += sum(map(len, completion_ids))
            texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
            return [rule(text, right) for text, right in zip(texts, reference, strict=True)]

        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32),
            reward_funcs=reward,
            args=settings(work),
            train_dataset=Dataset.from_list(work["problems"]),
            processing_class=tokenizer,
            callbacks=[recorder],
        )
        recorder.generation = trainer.generation_config
        trainer.train()


if __name__ == "__main__":
    main()
