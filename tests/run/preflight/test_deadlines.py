"""Which deadlines are said to be too short for a model, by arithmetic."""

from __future__ import annotations

import pytest

from async_grpo.config.schema import Config
from async_grpo.run.preflight.deadlines import LEARNER_FLOPS_S, step_seconds, too_short
from async_grpo.run.preflight.memory import Shape, shape_of
from async_grpo.tools.check.known_models import known_config


def case(model: str, **sections: object) -> tuple[Config, Shape]:
    values = {"run": {"total_steps": 1}, "model": {"path": model}, **sections}
    config = Config.model_validate(values)
    return config, shape_of(config, known_config(model))


def named(config: Config, shape: Shape) -> list[str]:
    """The settings that the sentences begin with."""
    return [sentence.split("`")[1] for sentence in too_short(config, shape)]


def test_the_defaults_do_for_a_small_model_and_short_answers() -> None:
    assert named(*case("Qwen/Qwen2.5-0.5B-Instruct")) == []


def test_weights_that_take_long_to_copy_and_to_send_are_named() -> None:
    config, shape = case(
        "meta-llama/Llama-3.1-70B-Instruct", rollout={"rollout_batch_size": 1, "group_size": 2}
    )
    assert named(config, shape) == [
        "weight_sync.deadlines.stage_s",
        "weight_sync.deadlines.acknowledge_s",
    ]
    [first, _] = too_short(config, shape)
    assert "131 GiB of weights may take 141 s" in first
    raised = {"deadlines": {"stage_s": 142, "acknowledge_s": 142}}
    assert named(*case(str(config.model.path), rollout=config.rollout, weight_sync=raised)) == []


def test_a_step_of_long_answers_is_named() -> None:
    """2,048 responses of 16,000 tokens on 4 ranks of 7B."""
    rollout = {"rollout_batch_size": 128, "group_size": 16, "response_length": 16_000}
    learner = {"ranks": 4, "tokens_per_micro_batch": 20_000}
    config, shape = case("Qwen/Qwen2.5-7B-Instruct", rollout=rollout, learner=learner)
    assert named(config, shape) == ["watchdog.step_timeout_s"]
    sampled, trained = step_seconds(config, shape)
    assert sampled == pytest.approx(480)
    tokens = 2048 * 16_512
    assert trained == pytest.approx(6 * 7.6e9 * tokens / 4 / LEARNER_FLOPS_S, rel=0.01)


@pytest.mark.parametrize(
    ("sections", "factor"),
    [
        ({"learner": {"gradient_checkpointing": True}}, 8 / 6),
        ({"learner": {"ppo_epochs": 2}}, 2),
        ({"algorithm": {"use_kl_loss": True, "kl_loss_coef": 0.1}}, 8 / 6),
        ({"algorithm": {"anchor": "recomputed"}}, 8 / 6),
        ({"learner": {"ppo_epochs": 2, "routing_replay": "r2"}}, 14 / 6),
    ],
)
def test_passes_over_the_tokens_are_counted(sections: dict[str, object], factor: float) -> None:
    plain = step_seconds(*case("Qwen/Qwen2.5-7B-Instruct"))[1]
    assert step_seconds(*case("Qwen/Qwen2.5-7B-Instruct", **sections))[1] == pytest.approx(
        factor * plain
    )


def test_a_group_limit_below_its_longest_answer_is_named() -> None:
    rollout = {"response_length": 20_000, "group_timeout_s": 500, "rollout_batch_size": 1}
    learner = {"tokens_per_micro_batch": 30_000}
    found = named(*case("Qwen/Qwen2.5-0.5B-Instruct", rollout=rollout, learner=learner))
    assert found == ["rollout.group_timeout_s"]
