"""Settings of before the options stood beside the name that they belong to: what runs have stored
goes on, what a user writes is answered.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_grpo.config import yaml12
from async_grpo.config.load import ConfigError, dump, load_config
from async_grpo.config.resume import compare, training_digest
from async_grpo.config.schema import Config
from async_grpo.config.stored import answers, read_settings, renewed
from async_grpo.replay.journal import Segment, segments
from async_grpo.replay.resume import JournalSettings
from async_grpo.run.trainer import Trainer
from async_grpo.tasks.registry import load_task
from tests.support import typed
from tests.support.verbs import migrate

RECORDED = Path(__file__).resolve().parents[1] / "data" / "recorded"
BASE = ["run.total_steps=3", "model.path=some/model"]
APART = {"device": "cuda", "layout": "split"}
ALONE = {"kind": "constant", "rate": 1.0, "floor": 0.0}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # what was written before -> the same now, as sections of a file
    "a loss": (
        {"algorithm": {"policy_loss": "sapo", "sapo": {"tau_pos": 2.0}, "m2po": {"budget": 0.04}}},
        {"algorithm": {"policy_loss": {"name": "sapo", "tau_pos": 2.0}}},
    ),
    "a loss without options": (
        {"algorithm": {"policy_loss": "ppo_clip", "sapo": {"tau_pos": 1.0}}},
        {"algorithm": {"policy_loss": "ppo_clip"}},
    ),
    "an estimator": (
        {"algorithm": {"adv_estimator": "asymre", "asymre_shift": -0.3}},
        {"algorithm": {"adv_estimator": {"name": "asymre", "shift": -0.3}}},
    ),
    "another estimator": (
        {"algorithm": {"adv_estimator": "rloo", "asymre_shift": -0.1}},
        {"algorithm": {"adv_estimator": "rloo"}},
    ),
    "a schedule": (
        {"algorithm": {"clip_schedule": {"kind": "harmonic", "rate": 0.5}}},
        {"algorithm": {"clip_schedule": {"name": "harmonic", "rate": 0.5}}},
    ),
    "no schedule": (
        {"algorithm": {"clip_schedule": ALONE}},
        {"algorithm": {"clip_schedule": "constant"}},
    ),
    "plugins": (
        {
            "algorithm": {
                "policy_loss": "mine",
                "reward_shaping": ["short", "plain"],
                "importance": {"level": "token", "mode": "fading"},
                "options": {
                    "mine": {"x": 1},
                    "short": {"y": 2},
                    "fading": {"z": 3},
                    "rambling": {"tokens": 4},
                },
            },
            "replay": {"filter_groups": {"enable": True, "custom": "rambling"}},
        },
        {
            "algorithm": {
                "policy_loss": {"name": "mine", "x": 1},
                "reward_shaping": [{"name": "short", "y": 2}, "plain"],
                "importance": {"level": "token", "mode": {"name": "fading", "z": 3}},
            },
            "replay": {
                "filter_groups": {"enable": True, "custom": {"name": "rambling", "tokens": 4}}
            },
        },
    ),
    "a transport": (
        {"weight_sync": {"backend": "nccl", "senders": "one"}},
        {"weight_sync": {"backend": {"name": "nccl", "senders": "one"}}},
    ),
    "senders of whatever fits": (
        {"weight_sync": {"backend": "auto", "senders": "auto"}},
        {"weight_sync": {"backend": "auto"}},
    ),
    "senders, so NCCL": (
        {"weight_sync": {"senders": "every_rank"}, "cluster": APART},
        {"weight_sync": {"backend": {"name": "nccl", "senders": "every_rank"}}, "cluster": APART},
    ),
    "senders of what may be no NCCL": (
        {"weight_sync": {"senders": "one"}, "cluster": {"device": "auto"}},
        {"weight_sync": {}, "cluster": {"device": "auto"}},
    ),
    "what is no mapping": (
        {"algorithm": {"policy_loss": "sapo", "sapo": 3, "options": [1]}},
        {"algorithm": {"policy_loss": "sapo"}},
    ),
    "senders without effect": (
        {"weight_sync": {"backend": "auto", "senders": "one"}, "cluster": {"device": "cpu"}},
        {"weight_sync": {"backend": "auto"}, "cluster": {"device": "cpu"}},
    ),
    "a metric": (
        {"run": {"callbacks": {"early_stopping": {"metric": "train/lag_max", "patience": 2}}}},
        {
            "run": {
                "callbacks": {"early_stopping": {"metric": "train/staleness_max", "patience": 2}}
            }
        },
    ),
    "a callback that is gone": (
        {"run": {"callbacks": {"metric_stream": {"to": "a"}, "mine:Mine": {}}}},
        {"run": {"callbacks": {"mine:Mine": {}}}},
    ),
    "a rejection": (
        {"algorithm": {"rejection": {"level": "token", "upper": 3.0}}},
        {
            "algorithm": {
                "rejection": [{"score": "w", "reduce": "token", "lower": 0.5, "upper": 3.0}]
            }
        },
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_settings_of_before_mean_the_same_now(form: str) -> None:
    before, now = FORMS[form]
    assert renewed(before) == now
    assert renewed(now) == now


@pytest.mark.parametrize(
    ("overrides", "told"),
    typed.refused(
        """\
algorithm.sapo.tau_pos=2.0
    Write `algorithm.policy_loss: {name: sapo, tau_pos: 2.0}`
algorithm.asymre_shift=-0.3
    `algorithm.adv_estimator: {name: asymre, shift: -0.3}`
'algorithm={policy_loss: topr, sapo: {}}'
    Leave it out: it belongs to sapo, and `algorithm.policy_loss` is topr
'algorithm.clip_schedule={kind: constant, rate: 1.0, floor: 0.0}'
    Write `algorithm.clip_schedule: constant`
'algorithm.clip_schedule={kind: null}'
    Write `algorithm.clip_schedule: null`
algorithm.options={}
    Leave it out
'weight_sync={backend: ipc, senders: one}'
    Leave it out: it belongs to nccl, and `weight_sync.backend` is ipc
weight_sync.senders=auto
    Leave it out
algorithm.clip_schedule.kind=harmonic
    `algorithm.clip_schedule: harmonic`
'algorithm.clip_schedule={kind: harmonic, rate: 0.5}'
    `algorithm.clip_schedule: {name: harmonic, rate: 0.5}`
'algorithm.options={mine: {x: 1}}'
    `{name: mine, x: 1}` where mine is chosen
run.callbacks.early_stopping.metric=train/lag_max
    Write `metric: train/staleness_max`
weight_sync.senders=one
    `weight_sync.backend: {name: nccl, senders: one}`
"""
    ),
)
def test_a_key_of_before_is_answered_with_what_to_write(
    overrides: list[str], told: list[str], tmp_path: Path
) -> None:
    (tmp_path / "c.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "c.yaml", [*BASE, *overrides])
    message = str(caught.value)
    assert f'override "{overrides[0]}"' in message and f"{told[0]}. (`async-grpo" in message
    assert "is of an earlier version" in message and len(message.splitlines()) == 2


def test_a_file_of_before_is_answered_with_its_line_and_a_stored_one_is_read(
    tmp_path: Path,
) -> None:
    old = "run: {total_steps: 3}\nmodel: {path: m}\nalgorithm:\n  policy_loss: sapo\n  sapo:\n"
    old += "    tau_pos: 2.0\n"
    (tmp_path / "config.yaml").write_text(old)
    with pytest.raises(ConfigError, match=r"config\.yaml, line 5: `algorithm\.sapo` is of"):
        load_config(tmp_path / "config.yaml")
    (tmp_path / "status.json").write_text("{}")  # a start of a run was here
    loss = load_config(tmp_path / "config.yaml").algorithm.policy_loss
    assert loss.written() == {"name": "sapo", "tau_pos": 2.0, "tau_neg": 1.05}


@pytest.mark.parametrize("run", ["ended", "killed"])
def test_a_recorded_run_goes_on_with_the_settings_that_it_had(run: str) -> None:
    path = RECORDED / run / "config.yaml"
    stored, config = read_settings(path), load_config(path)
    assert not compare(stored, config).all and not compare(stored, config).unknown
    before, _ = yaml12.read(path.read_text(encoding="utf-8"))
    assert not compare(before, config).all
    assert config.algorithm.clip_schedule.name == before["algorithm"]["clip_schedule"]["kind"]
    # what was computed at a2108c3, of these settings in their form of then
    assert training_digest(config).startswith("218420e07099e5b2")
    task = load_task(config.task, config.seed)
    journal = JournalSettings.of(config, start="x", fingerprint=task.fingerprint)
    directory = RECORDED / run / "journal"
    recorded = Segment(directory, segments(directory)[-1]).snapshot
    assert (journal.identity, journal.training) == (recorded["identity"], recorded["training"])


def test_groups_that_were_sampled_from_other_tokens_are_not_taken_over() -> None:
    """And those of runs before sampling could be cut are."""

    def identity(**rollout: float) -> str:
        values = {"run": {"total_steps": 1}, "model": {"path": "m/m"}, "rollout": rollout}
        config = Config.model_validate(values)
        return JournalSettings.of(config, start="x", fingerprint="data").identity

    cuts = [
        {},
        {"top_p": 0.9},
        {"top_p": 0.8},
        {"top_k": 20},
        {"top_p": 0.9, "top_k": 20},
        {"min_p": 0.1},
    ]
    assert len({identity(**one) for one in cuts}) == len(cuts)
    assert identity(top_p=1.0, top_k=0, min_p=0.0) == identity()


def test_what_a_teacher_changes_of_the_groups_that_can_be_taken_over() -> None:
    def identity(
        teacher: str | list[str],
        top_k: int = 0,
        *,
        prompt: str | None = None,
        sft: tuple[float, str | None] = (0.0, None),
        **paths: str,
    ) -> str:
        models = {"big": "a/b", "small": "c/d"} | paths
        used = [teacher] if isinstance(teacher, str) else teacher
        distill = {"teacher": teacher, "teacher_top_k": top_k, "teacher_prompt": prompt}
        coef, by = sft
        used = [name for name in {*used, by} if name in models]
        config = Config.model_validate(
            {
                "run": {"total_steps": 1},
                "model": {"path": "m/m"},
                "frozen": {name: {"path": models[name]} for name in used},
                "algorithm": {"distill": distill, "sft_loss_coef": coef, "sft_model": by},
            }
        )
        return JournalSettings.of(config, start="x", fingerprint="data").identity

    alone = identity("big")
    assert alone.startswith("e9bfb96c1d844c5d")  # as it was at 88436176
    assert alone == identity(["big"])
    others = [
        identity("big", 4),
        identity("big", big="e/f"),
        identity(["big", "small"]),
        identity(["small", "big"]),
        identity(["big", "small"], 4),
        identity("big", prompt="{prompt}!"),
        identity("big", prompt="{prompt}?"),
        identity("policy", prompt="{prompt}!"),
        identity("big", sft=(0.1, None)),
        identity("big", sft=(0.1, "big")),
        identity("big", sft=(0.1, "small")),
    ]
    assert len({alone, *others}) == 12
    assert identity("big", sft=(0.2, "big")) == others[-2], "the groups are the same"


def test_what_is_answered_for_a_whole_file_of_before_can_be_obeyed(tmp_path: Path) -> None:
    """One answer after the other: what it says is done, until the file is one of now."""
    data, _ = yaml12.read((RECORDED / "ended" / "config.yaml").read_text(encoding="utf-8"))
    data["run"]["dir"] = str(tmp_path / "run")
    data["cluster"]["engine"]["kv_cache_gb"] = "auto"  # null, which says the same, may stay
    wanted = renewed(data)
    for _ in range(20):
        found = next(iter(answers(data)), None)
        if found is None:
            break
        (*parents, leaf), told = found
        node = data
        for key in parents:
            node = node[key]
        if told.startswith("Write `algorithm.clip_schedule: "):
            data["algorithm"]["clip_schedule"] = told.removesuffix("`").rpartition(": ")[2]
        else:
            assert told.startswith("Leave it out"), told
            del node[leaf]
    assert data == wanted
    (tmp_path / "c.yaml").write_text(yaml12.write(data), encoding="utf-8")
    load_config(tmp_path / "c.yaml")


def test_keys_of_both_forms_at_once_are_answered(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{}")
    (tmp_path / "config.yaml").write_text(
        "run: {total_steps: 3}\nmodel: {path: m}\n"
        "algorithm:\n  policy_loss: {name: sapo, tau_pos: 1.0}\n  sapo: {tau_pos: 2.0}\n"
    )
    with pytest.raises(ConfigError, match=r"`algorithm\.sapo` is of an earlier version"):
        load_config(tmp_path / "config.yaml")


def test_different_choices_have_different_digests(tmp_path: Path, monkeypatch: Any) -> None:
    """Also where one name is registered for several kinds, or stands in a list twice."""
    (tmp_path / "both.py").write_text(
        "from dataclasses import dataclass\nfrom async_grpo.algo.catalog import *\n\n"
        "@dataclass(frozen=True)\nclass Own:\n    x: float = 1.0\n\n"
        "register_policy_loss('mine', options=Own)(lambda terms: terms)\n"
        "register_estimator('mine')(lambda rewards, groups, options: rewards)\n"
        "register_reward_shaping('mine', options=Own)(lambda reward, response, own: reward)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "c.yaml").write_text("algorithm: {plugins: [both], adv_estimator: mine}\n")
    digests = [
        training_digest(load_config(tmp_path / "c.yaml", [*BASE, *map("algorithm.".__add__, more)]))
        for more in (
            ["policy_loss={name: mine, x: 2}"],
            ["policy_loss={name: mine, x: 3}"],
            ["reward_shaping=[{name: mine, x: 2}, {name: mine, x: 1}]"],
            ["reward_shaping=[{name: mine, x: 3}, {name: mine, x: 1}]"],
            ["policy_loss={name: mine, x: 2}", "reward_shaping=[{name: mine, x: 3}]"],
            ["policy_loss={name: mine, x: 3}", "reward_shaping=[{name: mine, x: 2}]"],
        )
    ]
    assert len(set(digests)) == len(digests)


def test_a_trainer_from_a_checkpoint_of_before_has_its_settings(tmp_path: Path) -> None:
    trainer = Trainer.from_checkpoint(
        RECORDED / "ended" / "checkpoints" / "step_000004", [f"run.dir={tmp_path}"]
    )
    stored = read_settings(RECORDED / "ended" / "config.yaml")["algorithm"]
    distill = {"teacher": None, "coef": 1.0, "reward_coef": 1.0, "teacher_top_k": 0}
    distill |= {"teacher_prompt": None}
    given = {"sft_loss_coef": 0.0, "sft_model": None}
    since = {"calculate_entropy": True, "distill": distill, **given}
    assert trainer.config.model_dump(mode="json")["algorithm"] == stored | since


def test_an_option_that_a_run_has_not_stored_counts_as_unchanged(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("")
    config = load_config(tmp_path / "c.yaml", [*BASE, "algorithm.policy_loss=sapo"])
    saved = config.model_dump(mode="json")
    saved["algorithm"]["policy_loss"] = {"name": "sapo", "tau_pos": 1.0}
    assert not compare(saved, config).all
    saved["algorithm"]["policy_loss"] = {"name": "sapo", "tau_pos": 3.0}
    [change] = compare(saved, config).all
    assert change.key == "algorithm.policy_loss" and change.trains
    assert str(change).endswith(
        '{"name": "sapo", "tau_pos": 3.0, "tau_neg": 1.05} -> '
        '{"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.05}'
    )


def test_migrate_writes_a_file_of_before_in_the_form_of_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    before, _ = yaml12.read((RECORDED / "ended" / "config.yaml").read_text(encoding="utf-8"))
    old.write_text(yaml12.write(before), encoding="utf-8")
    assert migrate([str(old), "-o", str(new)]) == 0
    assert "an earlier version" in capsys.readouterr().err
    assert dump(load_config(new)) == dump(load_config(RECORDED / "ended" / "config.yaml"))
    old.write_text("algorithm: {policy_loss: topr, sapo: {tau_pos: 2.0}, asymre_shift: -0.1}\n")
    assert migrate([str(old)]) == 0
    said = capsys.readouterr().out
    assert "sapo.tau_pos: 2.0" in said and "asymre" not in said  # what is lost is named
    assert migrate([str(new)]) == 2  # nothing to do: it is one of ours already
