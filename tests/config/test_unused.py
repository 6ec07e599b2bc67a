"""Settings without effect are refused, with the setting that they belong to."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.config.docs import settings
from async_grpo.config.load import ConfigError, dump, load_config
from async_grpo.config.unused import unused, value_of

ROOT = Path(__file__).resolve().parents[2]
BASE = [
    "run.total_steps=2",
    "evaluation.n=0",
    "model.warm_start={blur_max_steps: 0}",
    "rollout.group_size=4",
]
KL, FILTER = "algorithm.use_kl_loss=true", "replay.filter_groups.enable=true"
IN_REWARD, SIDES = "algorithm.add_token_level_kl=true", "algorithm.clip_ratio_low=0.1"
RECOMPUTED = "algorithm.anchor=recomputed"
CASES = {
    # the setting with another value -> its owner, what makes it effective
    "algorithm.kl_loss_coef=0.2": ("algorithm.use_kl_loss", [KL]),
    "algorithm.kl_loss_type=mse": ("algorithm.use_kl_loss", [KL]),
    "algorithm.clip_ratio_c=4": ("algorithm.dual_clip_loss", ["algorithm.dual_clip_loss=true"]),
    "algorithm.overlong_buffer.len=3": (
        "algorithm.overlong_buffer.enable",
        ["algorithm.overlong_buffer.enable=true"],
    ),
    "algorithm.kl_ctrl.kl_coef=0.2": ("algorithm.add_token_level_kl", [IN_REWARD]),
    "algorithm.kl_ctrl.kl_type=mse": ("algorithm.add_token_level_kl", [IN_REWARD]),
    "algorithm.kl_ctrl.target_kl=0.2": (
        "algorithm.kl_ctrl.type",
        [IN_REWARD, "algorithm.kl_ctrl.type=adaptive"],
    ),
    "algorithm.importance.upper=3": (
        "algorithm.importance.level",
        [RECOMPUTED, "algorithm.importance.level=token"],
    ),
    "algorithm.opsm_against=anchor": (
        "algorithm.opsm_delta",
        [RECOMPUTED, "algorithm.opsm_delta=0.5"],
    ),
    **{
        f"model.warm_start.blur_{key}=0.4": (
            "model.warm_start.blur_max_steps",
            ["model.warm_start.blur_max_steps=5"],
        )
        for key in ("accuracy", "sampled_accuracy", "noise")
    },
    "evaluation.temperature=0.5": ("evaluation.n", ["evaluation.n=2"]),
    "replay.filter_groups.metric=acc": ("replay.filter_groups.enable", [FILTER]),
    "replay.filter_groups.max_num_gen_batches=2": ("replay.filter_groups.enable", [FILTER]),
    "replay.filter_groups.tolerance=0.1": ("replay.filter_groups.enable", [FILTER]),
}


@pytest.fixture
def empty(tmp_path: Path) -> str:
    (tmp_path / "c.yaml").write_text("")
    return str(tmp_path / "c.yaml")


@pytest.mark.parametrize("text", CASES)
def test_a_setting_whose_owner_is_off_is_refused(empty, text) -> None:
    owner, effective = CASES[text]
    with pytest.raises(ConfigError) as caught:
        load_config(empty, [*BASE, text])
    message = str(caught.value)
    assert f"`{text.partition('=')[0]}` is" in message and f"`{owner}` is" in message
    assert "has no effect" in message and f"`{owner}: " in message and "\n" not in message
    config = load_config(empty, [*BASE, text, *effective])
    key, default = text.partition("=")[0], settings()[text.partition("=")[0]].default
    assert value_of(config, key) != default


def test_all_that_belongs_to_tracking_and_journal_is_named(empty) -> None:
    config = load_config(empty, BASE)
    off = config.unchecked_copy(
        update={
            "tracking": config.tracking.unchecked_copy(
                update={"mlflow": False, "uri": "http://there", "offline_ok": True}
            ),
            "replay": config.replay.unchecked_copy(
                update={
                    "journal": config.replay.journal.unchecked_copy(
                        update={"enable": False, "fsync": "never"}
                    )
                }
            ),
        }
    )
    named = {".".join(path) for path, _ in unused(off, before={}, overridden=set())}
    assert named == {"tracking.uri", "tracking.offline_ok", "replay.journal.fsync"}


def test_a_half_width_that_no_side_uses(empty) -> None:
    both = [SIDES, "algorithm.clip_ratio_high=0.3"]
    load_config(empty, [*BASE, "algorithm.clip_ratio=0.3", SIDES])
    for extra, owner in (
        (both, "while `algorithm.clip_ratio_low` is 0.1"),
        (["algorithm.policy_loss=reinforce"], 'while `algorithm.policy_loss` is "reinforce"'),
    ):
        with pytest.raises(ConfigError, match=r"`algorithm\.clip_ratio` is 0\.3") as caught:
            load_config(empty, [*BASE, "algorithm.clip_ratio=0.3", *extra])
        assert owner in str(caught.value)


def test_the_place_and_the_number_of_others_are_told(tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "run: {total_steps: 2}\nmodel: {warm_start: {}}\nalgorithm:\n  kl_loss_coef: 0.3\n"
        "  kl_loss_type: mse\n"
    )
    with pytest.raises(ConfigError, match=r"c\.yaml, line 4: .*\(1 more problem in this"):
        load_config(path)


def test_an_override_may_turn_an_owner_off(tmp_path) -> None:
    """An ablation is one override: what the file says for the owner is no mistake then."""
    dapo = str(ROOT / "configs" / "dapo.yaml")
    config = load_config(dapo, ["algorithm.overlong_buffer.enable=false"])
    assert config.algorithm.overlong_buffer.len != 16
    with pytest.raises(ConfigError, match=r"overlong_buffer\.len"):
        load_config(
            dapo, ["algorithm.overlong_buffer.enable=false", "algorithm.overlong_buffer.len=5"]
        )


def test_a_stored_run_goes_on_as_it_began(empty, tmp_path) -> None:
    """Its stored configuration may be of a version that did not refuse such settings."""
    run = tmp_path / "run"
    run.mkdir()
    config = load_config(empty, [*BASE, f"run.dir={run}"])
    algorithm = config.algorithm.unchecked_copy(update={"kl_loss_coef": 0.2})
    stored = run / "config.yaml"
    stored.write_text(dump(config.unchecked_copy(update={"algorithm": algorithm})))
    assert load_config(stored).algorithm.kl_loss_coef == 0.2
    with pytest.raises(ConfigError, match="kl_loss_coef"):
        load_config(stored, ["algorithm.kl_loss_coef=0.3"])
    with pytest.raises(ConfigError, match="kl_loss_coef"):
        load_config(stored, [f"run.dir={tmp_path / 'another'}"])
