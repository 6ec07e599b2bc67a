"""Names and options of plugins: found in a child process, checked as strictly as our own settings,
before anything starts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from async_grpo.algo import catalog
from async_grpo.config import plugins
from async_grpo.config.load import ConfigError, dump, load_config
from tests.support import typed
from tests.support.verbs import train

ROOT = Path(__file__).resolve().parents[2]
MODULE = """\
from dataclasses import dataclass
from typing import Literal
from async_grpo.algo.catalog import (
    register_estimator, register_group_filter, register_importance, register_policy_loss,
    register_reward_shaping,
)

@dataclass(frozen=True)
class Mine:
    alpha: float
    size: int = 3
    mode: Literal["soft", "hard"] = "soft"

@register_policy_loss("my_loss", clipped=True, options=Mine)
def my_loss(terms):
    return -terms.advantages * terms.current, {}

@register_estimator("alone", compares=False)
def alone(rewards, groups, options):
    return rewards

@register_importance("halved")
def halved(ratios):
    return ratios.ratio / 2

@register_reward_shaping("doubled")
def doubled(reward, response, options):
    return 2 * reward

@register_group_filter("never")
def never(group, options):
    return None
"""
LOSS = ["algorithm.plugins=[mine]", "algorithm.policy_loss=my_loss"]
ALPHA = "algorithm.policy_loss.alpha=0.5"


def _loss(options: str) -> list[str]:
    return [LOSS[0], f"algorithm.policy_loss={{name: my_loss, {options}}}"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, and modules beside it."""
    directory = tmp_path_factory.mktemp("plugins")
    (directory / "base.yaml").write_text("run: {total_steps: 3}\nmodel: {warm_start: {}}\n")
    (directory / "mine.py").write_text(MODULE)
    (directory / "heavy.py").write_text("import torch\n" + MODULE)
    (directory / "broken.py").write_text("\nraise KeyError('what is this')\n")
    (directory / "taken.py").write_text(MODULE.replace('"alone"', '"grpo"'))
    (directory / "dying.py").write_text("import os\nos._exit(9)\n")
    return directory


@pytest.fixture(autouse=True)
def importable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(home))


@pytest.mark.parametrize(
    ("overrides", "fragments"),
    [
        *typed.refused(
            """\
algorithm.policy_loss=my_loss
    policy_loss` is "my_loss" | one of ppo_clip, gspo
algorithm.policy_loss=my_los PLUGIN
    "my_los" | opmd, topr, my_loss.
PLUGIN algorithm.adv_estimator=x
    "x" | one of grpo, | turn_grpo, alone.
PLUGIN algorithm.importance.mode=x
    `algorithm.importance.mode` is | one of truncate, mask, halved
algorithm.reward_shaping=[x]
    reward_shaping.0` is | `algorithm.plugins` registers
PLUGIN 'algorithm.adv_estimator={name: alone, beta: 1}'
    `algorithm.adv_estimator.beta` is not a setting | options of alone are none
PLUGIN 'algorithm.reward_shaping=[{name: doubled, x: 1}]'
    `algorithm.reward_shaping.0.x` is not a setting | options of doubled are none
'algorithm.policy_loss={name: sapo, tau_pso: 2.0}'
    `algorithm.policy_loss.tau_pso` is not a setting | `algorithm.policy_loss.tau_pos`
'algorithm.policy_loss={name: sapo, tau_pos: !!timestamp 2024-01-01}'
    `tau_pos` of sapo is of the type date | numbers, text
algorithm.tau_pos=2
    `algorithm.policy_loss: {name: sapo, tau_pos: ...}` here
'algorithm.policy_loss={tau_pos: 2.0}'
    `algorithm.policy_loss.name` is missing
algorithm.policy_loss.kappa=2
    `algorithm.policy_loss.name` is missing
'weight_sync.backend={name: ipc, senders: one}'
    `weight_sync.backend.senders` is not a setting | option of nccl, and ipc is chosen
algorithm.plugins=[missing_one]
    names missing_one, which is neither in the working directory (/ | nor on PYTHONPATH
algorithm.plugins=[broken]
    KeyError: 'what is this' | broken.py, line 2
algorithm.plugins=[taken]
    'grpo' is built in | another name
algorithm.plugins=[dying]
    dying | ended with code 9
"algorithm.plugins=['no module']"
    plugins | text that matches
replay.plugins=[heavy]
    `replay.plugins` names heavy, which imports torch | plain Python
PLUGIN 'replay.filter_groups={enable: true, custom: never}'
    filter_groups.custom` is | of a module in `replay.plugins`
'replay.filter_groups={enable: true, custom: never}'
    filter_groups.custom` is | `replay.plugins` registers
replay.plugins=[mine] replay.filter_groups.custom=never
    `enable` is false
algorithm.plugins=[mine] algorithm.reward_shaping=[doubled] 'replay.filter_groups={enable: true, \
metric: seq_reward}'
    seq_reward` needs the reward shaping | `replay.plugins`
algorithm.plugins=[mine] algorithm.adv_estimator=alone replay.filter_groups.enable=true
    zero_variance | alone | carries signal
algorithm.adv_estimator=alone LOSS ALPHA algorithm.gamma=0.9
    gamma` is 0.9 | alone
""",
            LOSS=" ".join(LOSS),
            PLUGIN=LOSS[0],
            ALPHA=ALPHA,
        ),
        (LOSS, ["`algorithm.policy_loss.alpha` is missing", "a number"]),
        (_loss("alfa: 1"), ["`algorithm.policy_loss.al", "algorithm.policy_loss.alpha`"]),
        (_loss("alpha: '1'"), ['`algorithm.policy_loss.alpha` is "1"', "allowed is a number"]),
        (_loss("alpha: .inf"), ["policy_loss.alpha` is", "allowed is a number"]),
        (_loss("alpha: 1, size: true"), ["policy_loss.size` is true", "allowed is an integer"]),
        (_loss("alpha: 1, mode: x"), ['policy_loss.mode` is "x"', "one of soft, hard"]),
        (
            _loss("alpha: 1, tau_pos: 2"),
            ["`algorithm.policy_loss.tau_pos` is not a setting", "option of sapo, and my_loss is"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_refused(overrides: list[str], fragments: list[str], home: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(home / "base.yaml", overrides)
    message = str(caught.value)
    assert len(message.splitlines()) <= 2, message
    assert all(fragment in message for fragment in fragments), message


def test_what_is_registered_is_admitted_and_survives_a_dump(home: Path) -> None:
    config = load_config(
        home / "base.yaml",
        [
            *LOSS,
            ALPHA,
            "replay.plugins=[mine]",
            "replay.filter_groups={enable: true, custom: never, zero_variance: false}",
            "algorithm.adv_estimator=alone",
            "algorithm.reward_shaping=[doubled]",
            "algorithm.anchor=recomputed",
            "algorithm.importance={level: token, mode: halved}",
            "algorithm.clip_schedule=harmonic",
            "rollout.group_size=1",
        ],
    )
    (home / "copy.yaml").write_text(dump(config))
    assert load_config(home / "copy.yaml") == config
    assert "my_loss" not in catalog.POLICY_LOSSES and "mine" not in sys.modules


def test_a_wrong_option_ends_the_command_with_exit_code_2(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(
        "run: {total_steps: 3}\nmodel: {warm_start: {}}\nalgorithm:\n  plugins: [mine]\n"
        "  policy_loss:\n    name: my_loss\n    alpha: much\n"
    )
    assert train([str(tmp_path / "c.yaml")]) == 2
    assert "c.yaml, line 7: `algorithm.policy_loss.alpha`" in capsys.readouterr().out


def test_a_module_that_was_edited_is_asked_again(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "edited.py"
    module.write_text("from async_grpo.algo.catalog import *\n")
    overrides = ["algorithm.plugins=[edited]", "algorithm.adv_estimator=late"]
    with pytest.raises(ConfigError, match="late"):
        load_config(home / "base.yaml", overrides)
    module.write_text(
        "from async_grpo.algo.catalog import register_estimator\n"
        "register_estimator('late')(lambda rewards, groups, options: rewards)\n"
    )
    assert load_config(home / "base.yaml", overrides).algorithm.adv_estimator.name == "late"


def test_without_plugins_no_process_is_started(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a child was started")

    monkeypatch.setattr(plugins.subprocess, "run", refuse)
    load_config(home / "base.yaml", ["algorithm.policy_loss=sapo"])


def test_the_queue_imports_its_plugin_and_no_torch(home: Path) -> None:
    code = (
        "import sys\n"
        "from async_grpo.algo.rewards import Shaping\n"
        "from async_grpo.replay.queue import ReplayQueue\n"
        "from async_grpo.replay.rules import QueueSettings\n"
        "ReplayQueue(QueueSettings(rollout_batch_size=1, max_staleness=0, total_steps=1, "
        "group_size=2, max_attempts=1, max_num_gen_batches=0, shaping=Shaping({}, 8), "
        "plugins=('mine',)))\n"
        "assert 'mine' in sys.modules\n"
        "assert not {'torch', 'vllm', 'ray', 'pydantic'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=home,
        env={"PYTHONPATH": f"{ROOT}:{home}", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr


def test_two_modules_cannot_register_one_name() -> None:
    registry = catalog.Registry("thing", catalog.Traits)
    registry.declare("ours")

    def first() -> None: ...

    def second() -> None: ...

    registry.register("x")(first)
    registry.register("x")(first)  # a module that is imported again
    with pytest.raises(ValueError, match="thing 'x' is registered twice"):
        registry.register("x")(second)
    with pytest.raises(ValueError, match="thing 'ours' is built in"):
        registry.register("ours")(first)
    with pytest.raises(ValueError, match="unknown thing 'z'; choose one of"):
        registry.function("z")


@pytest.mark.parametrize("orders", [(0, 1), (1, 0)])
def test_an_option_may_be_given_before_the_name(home: Path, orders: tuple[int, int]) -> None:
    both = ["algorithm.policy_loss=sapo", "algorithm.policy_loss.tau_pos=2.0"]
    config = load_config(home / "base.yaml", [both[index] for index in orders])
    assert config.algorithm.policy_loss.values == {"tau_pos": 2.0, "tau_neg": 1.05}


def test_an_option_cannot_be_called_as_what_chooses() -> None:
    @dataclass(frozen=True)
    class Named:
        name: str = ""

    registry = catalog.Registry("thing", catalog.Traits)
    with pytest.raises(ValueError, match="'x' cannot have an option `name`"):
        registry.register("x", options=Named)(lambda: None)


def test_traits_that_need_code_elsewhere_are_not_open() -> None:
    for register, traits in (
        (catalog.register_estimator, {"returns": True}),
        (catalog.register_estimator, {"baseline": True}),
        (catalog.register_estimator, {"scale": "vanishes"}),
        (catalog.register_policy_loss, {"selects": "tokens"}),
    ):
        with pytest.raises(ValueError, match="only built-in"):
            register("x", **traits)


def test_reading_what_is_built_in_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from async_grpo.algo import catalog\n"
        "from async_grpo.config.docs import options\n"
        "assert all(map(len, (catalog.ESTIMATORS, catalog.POLICY_LOSSES, catalog.IMPORTANCE)))\n"
        "assert options() and 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_loss_with_an_option_is_one_file(home: Path, tmp_path: Path) -> None:
    """A built-in one: its formula, traits and options, added to a copy of their module, and nothing
    else, are a setting with its range, its default and its place in the reference.
    """
    package = tmp_path / "async_grpo"
    shutil.copytree(ROOT / "async_grpo", package, ignore=shutil.ignore_patterns("__pycache__"))
    with open(package / "algo" / "losses.py", "a", encoding="utf-8") as file:
        file.write(
            "\n\n@dataclass(frozen=True)\nclass Soft(Constants):\n"
            '    width: float = number(0.2, "Where the ratio saturates.", gt=0)\n\n\n'
            '@POLICY_LOSSES.register("soft", options=Soft)\n'
            "def soft(terms):\n"
            "    width = terms.options.width\n"
            "    return -terms.advantages * width * torch.tanh(terms.log_ratio / width), {}\n"
        )
    with open(package / "algo" / "estimators.py", "a", encoding="utf-8") as file:
        file.write(
            "\n\n@dataclass(frozen=True)\nclass Lifted(Constants):\n"
            '    by: float = number(0.5, "Added to every reward.", ge=0)\n\n\n'
            '@ESTIMATORS.register("lifted", compares=False, options=Lifted)\n'
            "def _lifted(rewards, groups, options):\n"
            "    return rewards + options.own.by\n"
        )
    code = (
        "import torch\n"
        "from async_grpo.algo.advantages import row_advantages\n"
        "from async_grpo.algo.losses import Clip, policy_loss\n"
        "from async_grpo.config.docs import options\n"
        "from async_grpo.config.load import ConfigError, load_config\n"
        "loss = 'algorithm.policy_loss={name: soft, width: 0.4}'\n"
        "config = load_config('base.yaml', [loss, 'algorithm.adv_estimator=lifted'])\n"
        "assert config.algorithm.policy_loss.values == {'width': 0.4}\n"
        "assert config.algorithm.adv_estimator.values == {'by': 0.5}\n"
        "assert options()['algorithm.policy_loss.soft.width'].allowed == 'a number > 0'\n"
        "try:\n"
        "    load_config('base.yaml', ['algorithm.policy_loss={name: soft, width: 0}'])\n"
        "except ConfigError as error:\n"
        "    assert 'policy_loss.width` is 0; allowed is a number > 0' in str(error)\n"
        "else:\n"
        "    raise AssertionError('accepted')\n"
        "one = torch.ones(1, 2)\n"
        "value, _ = policy_loss('soft', one, anchor_logprobs=0 * one, behavior_logprobs=one, "
        "advantages=one, loss_mask=one, staleness=one, clip=Clip(0.2, 0.2))\n"
        "assert torch.allclose(value, -0.2 * torch.tanh(one / 0.2))\n"
        "worth = row_advantages('lifted', torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))\n"
        "assert worth.tolist() == [1.5, 0.5]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
