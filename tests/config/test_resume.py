"""What a resumed run may change: every key has a mark, and another value does what the mark
says.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import resume
from async_grpo.config.choice import Chosen
from async_grpo.config.docs import settings
from async_grpo.config.load import load_config
from async_grpo.config.resume import compare, keep_chosen, marks
from async_grpo.config.schema import Config
from async_grpo.config.section import Section
from async_grpo.errors import SetupError
from async_grpo.run.checkpoint import directory as checkpoint
from async_grpo.run.trainer import Trainer

SECTIONS = ("model.warm_start", "model.lora", "evaluation.task")
ONCE = """
seed model.path model.dtype model.warm_start model.lora model.freeze model.router task.name
learner.zero_stage
"""
TOLD = """
frozen run.total_steps run.epochs model.reference model.reference_refresh_steps model.lm_head_fp32
task.train task.eval task.layout task.columns task.options task.rewards task.rewards_norm
task.streaming task.verifier.on_error task.judges tasks replay.quota
replay.max_staleness replay.order replay.on_stale replay.journal.enable environment.on_timeout
environment.max_invalid environment.tools environment.tool_parser environment.renderer
endpoint.sampling weight_sync.every_steps weight_sync.kv_cache weight_sync.lora cluster.device
cluster.engine.vllm
"""
FREE = """
model.warm_start.cache_dir model.trust_remote_code rollout.group_timeout_s
rollout.max_open_episodes replay.filter_groups.max_num_gen_batches
learner.gradient_checkpointing learner.activation_offload
"""
TRAINED = """
environment.tools rollout.repetition_times rollout.repetition_length run.total_steps run.epochs
model.reference model.reference_refresh_steps model.lm_head_fp32 task.rewards task.rewards_norm
task.judges tasks cluster.device replay.max_staleness replay.on_stale replay.order
rollout.rollout_batch_size rollout.group_size rollout.response_length rollout.turn_length
rollout.context_length rollout.max_turns rollout.temperature rollout.top_p rollout.top_k
rollout.min_p
"""


def below(*beginnings: str) -> set[str]:
    """The keys whose names begin so, without those that are free."""
    return {name for name in marks() if name.startswith(beginnings)} - set(FREE.split())


FIXED = {*ONCE.split(), *below("model.warm_start.", "model.lora.")}
WHOLE = (
    "rollout.",
    "replay.filter_groups.",
    "replay.difficulty.",
    "algorithm.",
    "learner.",
    "evaluation.task",
)
WARNED = {*TOLD.split(), *below(*WHOLE)} - FIXED - {"replay.difficulty.rates_from"}
TRAINS = FIXED | {*TRAINED.split(), *below("algorithm.", "learner.")}


def config(**sections: Any) -> Config:
    return Config.model_validate({"run": {"total_steps": 9}, "model": {"path": "m"}} | sections)


def with_sections(name: str) -> Config:
    """A configuration in which the key `name` exists."""
    if name.startswith("model.warm_start."):
        return config(model={"warm_start": {}})
    if name.startswith("evaluation.task."):
        return config(evaluation={"task": {}})
    return (
        config(model={"path": "m", "lora": {}})
        if name.startswith("model.lora.")
        else config(learner={"schedule": "cosine"})
    )


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, "x"]
    return {"x": 1.0} if isinstance(value, dict) or value is None else f"{value}-other"


def saved_with(now: Config, name: str) -> dict[str, Any]:
    """The settings `now` as a checkpoint holds them, with another value of the key `name`."""
    saved = json.loads(json.dumps(now.model_dump(mode="json")))
    *path, last = name.split(".")
    node = saved
    for key in path:
        node = node[key]
    node[last] = {} if name in SECTIONS else other(node[last])
    return saved


@pytest.mark.parametrize("name", list(marks()))
def test_every_key_does_what_its_mark_says(name: str) -> None:
    now = with_sections(name)
    changes = compare(saved_with(now, name), now)
    if name == "run.dir":
        assert changes == compare(now.model_dump(mode="json"), now), "a run may be moved"
        return
    assert [change.key for change in changes.all] == [name] and (
        changes.unknown,
        changes.missing,
    ) == ([], [])
    refusal, lines = changes.refusal(Path("ckpt")), list(changes.lines())
    if name in FIXED:
        assert (
            len(refusal.splitlines()) == 1
            and refusal.startswith(f"`{name}` is ")
            and "ckpt was made with" in refusal
        )
        assert "Set it back, or start anew with another run.dir." in refusal and lines == []
    elif name in WARNED:
        assert refusal == "" and len(lines) == 1
        assert (
            lines[0].startswith(f"resumed with another {name}: ")
            and " -> " in lines[0]
            and lines[0].endswith(")")
        )
    else:
        assert (refusal, lines) == ("", [])
    assert any(change.trains for change in changes.all) is (name in TRAINS)


def test_the_marks_cover_the_schema() -> None:
    """A key without a mark would raise in `marks`; here it is also in the table above, or free on
    purpose.
    """
    assert set(marks()) == {
        name for name, setting in settings().items() if not setting.section
    } | set(SECTIONS)
    assert all(mark.reason for mark in marks().values() if mark.level != "free")
    free = set(marks()) - FIXED - WARNED
    assert not {"seed", "algorithm"} & {name.split(".")[0] for name in free}
    judged = ("model.", "rollout.", "learner.", "replay.filter_groups.")
    assert {name for name in free if name.startswith(judged)} == set(FREE.split())


def test_a_key_without_a_mark_is_found() -> None:
    class Bare(Section):
        size: int = 3

    class Around(Section):
        bare: Bare = Bare()

    with pytest.raises(ValueError, match=r"`bare\.size` has no mark"):
        resume._collect(Around, "", None, {})


def test_the_length_of_a_run_matters_to_a_learner_with_a_schedule_only() -> None:
    for schedule, trains in (("constant", False), ("linear", True)):
        now = config(learner={"schedule": schedule})
        changes = compare(saved_with(now, "run.total_steps"), now)
        assert [str(change) for change in changes.warned] == ["run.total_steps: 10 -> 9"] and any(
            change.trains for change in changes.all
        ) is trains


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
@pytest.mark.parametrize("name", sorted(marks()))
def test_the_digest_says_the_same_as_the_comparison(name: str) -> None:
    now = with_sections(name)
    if name in SECTIONS:
        then = {
            "model.lora": config(model={"path": "m", "lora": {}}),
            "model.warm_start": config(model={"warm_start": {}}),
            "evaluation.task": config(learner={"schedule": "cosine"}, evaluation={"task": {}}),
        }[name]
    else:
        then = now.model_copy(deep=True)  # a value that no file could hold is one too
        *path, last = name.split(".")
        node = then
        for key in path:
            node = getattr(node, key)
        value = getattr(node, last)
        if settings()[name].kind:
            entry = Chosen(name="other")
            object.__setattr__(node, last, [entry] if isinstance(value, list) else entry)
        else:
            object.__setattr__(node, last, other(value))
    assert (resume.training_digest(then) != resume.training_digest(now)) is (name in TRAINS)


def test_sections_that_appear_or_disappear_are_one_change() -> None:
    plain, lora = config(), config(model={"path": "m", "lora": {"rank": 4}})
    for there, here in ((plain, lora), (lora, plain)):
        changes = compare(there.model_dump(mode="json"), here)
        assert [change.key for change in changes.fixed] == ["model.lora"] and changes.missing == []


def test_settings_of_another_version_are_noted_and_count_as_unchanged() -> None:
    now = config(replay={"order": "fifo"})
    saved = copy.deepcopy(now.model_dump(mode="json"))
    del saved["replay"]["order"], saved["watchdog"]
    saved["learner"]["momentum"], saved["learner"]["deepspeed"] = 0.9, {"anything": {"goes": 1}}
    saved["reward"] = {"kind": "x"}
    changes = compare(saved, now)
    assert [change.key for change in changes.all] == ["learner.deepspeed"]
    assert changes.unknown == ["learner.momentum", "reward"]
    assert changes.missing[0] == "replay.order" and all(
        name.startswith("watchdog.") for name in changes.missing[1:]
    )
    _, unknown, missing = changes.lines()
    assert (
        "do not exist any more learner.momentum, reward" in unknown
        and "replay.order" in missing
        and "taken as unchanged" in missing
    )
    everything = list(compare({}, now).lines())
    assert len(everything) == 1 and "seed, run.name" in everything[0] and " more" in everything[0]


def test_what_a_start_chose_replaces_auto_and_nothing_else() -> None:
    keys = ("tokens_per_micro_batch", "gradient_checkpointing")
    saved = {"learner": {"tokens_per_micro_batch": 2048, "gradient_checkpointing": True, "lr": 9.0}}
    now = config()
    kept = keep_chosen(now, saved, *keys)
    assert compare(saved | {"model": {"path": "other"}}, kept).all[0].key == "model.path"
    assert kept == config(learner={key: saved["learner"][key] for key in keys})
    assert keep_chosen(now, saved, keys[0]).learner.gradient_checkpointing == "auto"
    given = config(learner={"tokens_per_micro_batch": 4096, "gradient_checkpointing": False})
    assert keep_chosen(given, saved, *keys) == given
    for nothing in ({}, {"learner": {}}, now.model_dump(mode="json")):
        assert keep_chosen(now, nothing, *keys) == now
    assert resume.training_digest(kept) == resume.training_digest(
        config(learner={"tokens_per_micro_batch": 2048})
    )


def test_another_number_of_ranks_is_refused_where_the_parameters_are_sliced() -> None:
    for stage, refuses in ((1, False), (2, False), (3, True)):
        now = config(learner={"ranks": 2, "zero_stage": stage})
        assert bool(compare(saved_with(now, "learner.ranks"), now).refusal(Path("c"))) is refuses


def test_several_fixed_keys_are_one_message() -> None:
    now = config(seed=9, learner={"zero_stage": 2})
    changes = compare(config().model_dump(mode="json"), now)
    assert changes.refusal(Path("c")).endswith(
        "another run.dir. The same holds for learner.zero_stage."
    )


@pytest.mark.parametrize("resumed_by", ["auto", "path"])
def test_a_trainer_refuses_a_checkpoint_of_other_fixed_settings(
    tmp_path: Path, resumed_by: str
) -> None:
    (tmp_path / "c.yaml").write_text(
        f"run: {{total_steps: 5, dir: {tmp_path}/run}}\nmodel: {{warm_start: "
        f"{{}}}}\nrollout: {{response_length: 8, prompt_length: 8}}\n"
    )
    before = load_config(tmp_path / "c.yaml")
    checkpoint.begin(Path(before.run.dir), 2)
    saved = checkpoint.commit(
        checkpoint.path_for(Path(before.run.dir), 2).with_suffix(".tmp"),
        {"step": 2, "config": before.model_dump(mode="json")},
    )
    more = (
        []
        if resumed_by == "auto"
        else [f"checkpoint.resume={saved}", f"run.dir={tmp_path}/another"]
    )
    Trainer(load_config(tmp_path / "c.yaml", ["learner.lr=3e-5", *more])).check()
    for override, key in (
        ("learner.zero_stage=2", "learner.zero_stage"),
        ("model.warm_start.layers=3", "model.warm_start.layers"),
        ("seed=4", "seed"),
    ):
        with pytest.raises(SetupError, match=f"`{key}` is .*step_000002 was made with") as caught:
            Trainer(load_config(tmp_path / "c.yaml", [override, *more])).check()
        assert len(str(caught.value).splitlines()) == 1


def test_an_order_that_is_the_default_leaves_digests_as_they_were() -> None:
    marked = {name for name, mark in marks().items() if mark.trains}
    assert "replay.order" in marked
    digests = [
        resume.training_digest(config(replay={"order": order, "on_stale": "mask"}))
        for order in ("oldest", "fifo", "ready")
    ]
    assert len(set(digests)) == 3 and digests[0] == resume.training_digest(
        config(replay={"on_stale": "mask"})
    )


def test_frozen_models_of_before_have_the_defaults_of_now() -> None:
    given = {"frozen": {"big": {"path": "a/b"}}, "algorithm": {"distill": {"teacher": "big"}}}
    config = Config.model_validate({"run": {"total_steps": 1}, "model": {"path": "m"}, **given})
    saved = config.model_dump(mode="json")
    del saved["frozen"]["big"]["url"], saved["frozen"]["big"]["context_length"]
    assert not compare(saved, config).all
    saved["frozen"]["big"]["path"] = "c/d"
    assert [change.key for change in compare(saved, config).all] == ["frozen"]
