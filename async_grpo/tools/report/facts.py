"""What the report says in words and tables: how the run ended, its main numbers, settings, samples,
restarts.

Runs in: the report's process. Hides how they are chosen. Invariant: what is not known is left out.
"""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from typing import Any

from async_grpo.errors import EXIT_MEANING
from async_grpo.observe.console.status_file import condition
from async_grpo.observe.reward_hacking import EARNED
from async_grpo.runtime.text import duration
from async_grpo.tools.report.data import RunData
from async_grpo.tools.report.plots import tokens_by_fate

NO_SAMPLES = "No responses were recorded (tracking.sample_rows is 0, or the run was not evaluated)."
SAMPLES_SHOWN, TEXT_CHARS, LINES_SHOWN = 5, 1500, 60
SETTINGS = """
model.path model.dtype model.lora task.name task.train task.eval task.rewards tasks
rollout.rollout_batch_size rollout.group_size rollout.prompt_length rollout.response_length
rollout.temperature replay.max_staleness replay.order replay.on_stale
replay.filter_groups.enable algorithm.adv_estimator algorithm.policy_loss
algorithm.clip_ratio_low algorithm.clip_ratio_high algorithm.clip_schedule algorithm.anchor
algorithm.importance.level algorithm.importance.mode algorithm.loss_agg_mode
algorithm.use_kl_loss algorithm.kl_loss_coef learner.ranks learner.zero_stage learner.lr
learner.ppo_epochs learner.ppo_mini_batch_size learner.tokens_per_micro_batch
learner.gradient_checkpointing
weight_sync.backend weight_sync.every_steps weight_sync.kv_cache cluster.layout
cluster.rollout_actors cluster.engine.tensor_parallel_size cluster.engine.max_num_seqs seed
"""
"""What of the configuration is shown first."""
_FAULT = re.compile(
    r"\b(died|dies|killed|lost|dropped|restart|started again|given up|replaces|rolled back|took"
    r"|gone|silent|stalled|discard\w*|set aside|resumed|repeat\w*|SIGTERM|SIGINT|takes its place"
    r"|could not|failed|answers again|taken back|added|left)\b"
)

LEAST_STEPS, OLD = 5, 2
"""Steps of a quarter of a run, and the lag, from which on swings are looked for."""
NEAR, COMES_BACK = 0.02, 0.8
"""Shares of the effective sample size: missing so little is none; come back is less than so much of
what was missing before.
"""


def tiles(data: RunData) -> tuple[str, str, list[tuple[str, str]]]:
    """Say how the run stands, `good`, `bad` or neither, and (label, value) of its main numbers."""
    lead, kind = _state(data)
    shown: list[tuple[str, str]] = []
    if data.rows:
        last = data.rows[-1]
        total = f" of {data.status['total']:,}" if data.status.get("total") else ""
        shown.append(("learner steps", f"{last.step:,}{total}"))
        shown.append(("learner's time, pauses apart", duration(data.seconds)))
    shown += _accuracy(data)
    unit, fates = tokens_by_fate(data)
    if unit == "tokens" and (generated := sum(fates.values())):
        share = fates.get("trained", 0.0) / generated
        shown.append(("of the generated tokens were trained", f"{share:.1%}"))
    time_spent = data.learner_time
    if time_spent.total > 0:
        since = " since the last start" if data.starts > 1 else ""
        shown.append((f"tokens/s trained{since}", f"{time_spent.tokens_per_s:,.0f}"))
        shown.append((f"learner idle{since}", f"{time_spent.idle:.0%}"))
        bound = data.setting("replay.max_staleness")
        shown.append(("staleness, mean", f"{data.lag_sum / data.steps:.2f}"))
        shown.append((f"staleness, largest (bound {bound})", f"{data.lag_max:.0f}"))
    if scores := data.series("rollout/score")[1]:
        tenth = scores[-max(1, len(scores) // 10) :]
        shown.append(("reward, last tenth", f"{sum(tenth) / len(tenth):.3f}"))
    return lead, kind, shown


def origin(data: RunData) -> str:
    """Say when and where the run began, and what trains on what, as far as it is known."""
    first = next((event for event in data.events if event["kind"] == "start"), {})
    parts = []
    if "time" in first:
        parts.append(time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first["time"])))
    if first.get("host"):
        parts.append(f"host {first['host']}")
    made = "a small model made for the task" if data.setting("model.warm_start") is not None else ""
    if model := data.setting("model.path") or made:
        parts.append(f"model {model}")
    if task := ", ".join(data.setting("tasks") or ()) or data.setting("task.name"):
        parts.append(f"task {task}")
    return " · ".join(parts)


def bottleneck(data: RunData) -> str:
    """Say what limits the run, as a sentence; empty where nothing is known."""
    text = str((data.status.get("bottleneck") or {}).get("text", ""))
    return f"What limits it: {text.removesuffix('.')}." if text else ""


def alarms(data: RunData) -> str:
    """Repeat the warnings that the reward may be earned without the task."""
    notes = [str(event.get("text", "")) for event in data.events if event["kind"] == "note"]
    told = [text.removeprefix("warning: ") for text in notes if text.endswith(EARNED)]
    return "".join(f"{text[0].upper()}{text[1:]}. " for text in dict.fromkeys(told)).rstrip()


def swings(data: RunData) -> str:
    """Say that what is learnt from old data does not settle, where the effective sample size of the
    second half of a run does not come closer to 1; empty otherwise.
    """
    steps, shares = data.series("train/ess")
    quarter = len(shares) // 4
    if quarter < LEAST_STEPS or data.lag_max < OLD:
        return ""
    third, last = shares[2 * quarter : 3 * quarter], shares[3 * quarter :]
    missing, left = (1 - sum(part) / len(part) for part in (third, last))
    if left < NEAR or left < COMES_BACK * missing:
        return ""
    return (
        f"The effective sample size does not come back: {1 - missing:.0%} in the third quarter of "
        f"these {len(steps)} steps, {1 - left:.0%} in the last. The policy oscillates on stale "
        "data; a learning rate that falls (learner.schedule: linear, or settle) ends it."
    )


def _state(data: RunData) -> tuple[str, str]:
    status = data.status
    if "exit_code" in status:
        code = status["exit_code"]
        message = status.get("message") or EXIT_MEANING.get(code, "")
        return f"Ended with exit code {code}: {message}.", "good" if code == 0 else "bad"
    if not status:
        return "How the run ended is not known.", ""
    state = condition(status, now=time.time())
    if state.kind in ("running", "slow"):
        return f"Under way ({status['phase']}).", ""
    return state.text, "bad"


def _accuracy(data: RunData) -> list[tuple[str, str]]:
    name = "eval/accuracy_greedy"
    known = [row for row in data.evaluations if name in row.values]
    if not known:
        return []
    first, last = known[0], known[-1]
    change = f"{first.values[name]:.1%} → " if first is not last else ""
    return [(f"held-out accuracy, step {last.step}", f"{change}{last.values[name]:.1%}")]


def settings(data: RunData) -> list[tuple[str, str]]:
    """List the configuration's main points that are set."""
    found = [(name, data.setting(name)) for name in SETTINGS.split()]
    return [(name, _plain(value)) for name, value in found if value not in (None, {}, [])]


def restarts(data: RunData) -> tuple[str, list[tuple[str, str]]]:
    """Count faults in a sentence; list (when, what) of starts, faults and what was said."""
    counts = [
        f"{data.totals[name]:.0f} {what}"
        for name, what in (
            ("cluster/restarts", "rollout actors replaced"),
            ("cluster/learner_restarts", "learner restarts"),
            ("replay/restarts", "restarts of the queue"),
            ("weights/repeated", "transfers repeated"),
            ("weights/dropped_engines", "engines dropped in a weight sync"),
        )
        if data.totals.get(name)
    ]
    errors = "rollout/verifier_errors_"
    counts += [
        f"{count:.0f} verifier errors ({name.removeprefix(errors)})"
        for name, count in sorted(data.totals.items())
        if name.startswith(errors)
    ]
    starts = sum(event["kind"] == "start" for event in data.events)
    if starts > 1:
        counts.insert(0, f"the run was started {starts} times")
    lines = [
        (time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(event["time"])), text)
        for event in data.events
        if (text := _told(event))
    ]
    nothing = "Nothing: no process of the run had to be replaced."
    said = f"{'; '.join(counts).capitalize()}." if counts else nothing
    return said, lines[-LINES_SHOWN:]


def _told(event: dict[str, Any]) -> str:
    if event["kind"] == "start":
        return f"started on {event.get('host')} (process {event.get('pid')})"
    if event["kind"] == "end":
        message = f": {event['message']}" if event.get("message") else ""
        return f"ended with exit code {event.get('exit_code')}{message}"
    text = str(event.get("text", ""))
    if event["kind"] == "phase" and event.get("failed"):
        return f"{text}: failed"
    return text if event["kind"] == "note" and (event.get("error") or _FAULT.search(text)) else ""


def sample_sections(data: RunData) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield (heading, columns, rows) of the start, the middle and the end of the samples."""
    for source, what in (("training", "trained"), ("evaluation", "held out"), (None, "held out")):
        yield from _of_source([row for row in data.samples if row.get("source") == source], what)


def _of_source(
    samples: list[dict[str, Any]], what: str
) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    steps = sorted({row["step"] for row in samples})
    if not steps:
        return
    middle = min(steps, key=lambda step: abs(step - (steps[0] + steps[-1]) / 2))
    places = {steps[0]: "Start"}
    for step, label in ((steps[-1], "End"), (middle, "Middle")):
        places.setdefault(step, label)
    for step, label in sorted(places.items()):
        rows = [_rewards(row) for row in samples if row["step"] == step]
        chosen = rows[:: max(1, len(rows) // SAMPLES_SHOWN)][:SAMPLES_SHOWN]
        names = dict.fromkeys(name for row in chosen for name in row)
        columns = [name for name in names if name not in ("step", "source")]
        cells = [[_short(_plain(row.get(column, ""))) for column in columns] for row in chosen]
        yield f"{label}: step {step}, {what}", columns, cells


def _short(text: str) -> str:
    return text if len(text) <= TEXT_CHARS else f"{text[:TEXT_CHARS]}... ({len(text)} characters)"


def _rewards(row: dict[str, Any]) -> dict[str, Any]:
    rewards = row.get("rewards")
    if isinstance(rewards, str):
        try:
            rewards = ast.literal_eval(rewards)
        except (ValueError, SyntaxError):
            return row
    if not isinstance(rewards, dict):
        return row
    return {key: value for key, value in row.items() if key != "rewards"} | {
        f"reward {name}": value for name, value in rewards.items()
    }


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        named = [_plain(value["name"])] if "name" in value else []
        rest = (f"{name} {_plain(part)}" for name, part in value.items() if name != "name")
        return ", ".join([*named, *rest])
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)
