"""What the pages show works: code runs, settings load, commands are such that their programs take
them. A new page or block is covered by being there.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import ray

from async_grpo.agents.program import Program
from async_grpo.config.schema import TaskConfig
from async_grpo.environments.base import Action
from async_grpo.environments.tools import with_tools
from async_grpo.tasks.base import Score, check_score
from async_grpo.tasks.registry import load_task
from tests.support import commands
from tests.support.answering_endpoint import answering_endpoint
from tests.support.reader import Reader, settings
from tests.support.real_parsers import Incomplete, Refused
from tests.support.snippets import EXECUTED, LANGUAGES, PAGES, ROOT, Snippet, of_pages, prose

SNIPPETS = of_pages()
UNCHECKED: dict[str, str] = {}
"""`page: first line` of a block that cannot be checked -> why. At most three."""


def page_name(page: Path) -> str:
    """From the root of the checkout."""
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def token_tensors() -> Iterator[dict[str, Any]]:
    """What docs/reference/algorithms.md trains on: two groups of two rows of three tokens."""
    import torch

    logprobs = torch.full((4, 3), -1.0, requires_grad=True)
    rewards = torch.zeros(4, 3)
    rewards[::2, -1] = 1.0
    yield {
        "token_level_rewards": rewards,
        "response_mask": torch.ones(4, 3),
        "group_index": torch.tensor([0, 0, 1, 1]),
        "logprobs": logprobs,
        "old_logprobs": torch.full((4, 3), -1.1),
    }
    assert logprobs.grad.abs().sum() > 0


@contextmanager
def an_episode() -> Iterator[dict[str, Any]]:
    """What the program in docs/how-to/external-agents.md finds: a problem, and a policy that
    answers. It is played
    below as a run plays it.
    """
    pytest.importorskip("openai")  # not where vLLM is missing
    problem = {"prompt": "What is 6 * 7?", "reference": {"answer": "42"}, "seed": 1}
    with (
        answering_endpoint("42") as address,
        mock.patch.dict(os.environ, OPENAI_BASE_URL=address, OPENAI_API_KEY="key"),
        mock.patch.object(sys, "stdin", io.StringIO(json.dumps(problem))),
    ):
        yield {"index": {}}  # of the tool `search`


@contextmanager
def wandb() -> Iterator[dict[str, Any]]:
    """A fake of the package that docs/how-to/tracking.md sends metrics to."""
    fake = mock.MagicMock(spec_set=["init"])
    fake.init.return_value = mock.Mock(spec_set=["log", "finish"])
    with mock.patch.dict(sys.modules, wandb=fake):
        yield {}


GIVEN = {
    "docs/how-to/tracking.md": wandb,
    "docs/reference/algorithms.md": token_tensors,
    "docs/how-to/external-agents.md": an_episode,
    "docs/how-to/tools-and-environments.md": an_episode,
}
"""What the code of a page takes as given."""


def an_agent_scores(blocks: list[Snippet], row: str) -> None:
    """The program of docs/how-to/external-agents.md in its own task, with rows of both forms."""
    [posed] = [settings(block.code).task for block in blocks if "my_agent.py]" in block.code]
    Path("rows.jsonl").write_text(row + '\n{"prompt": "What is 17 + 25?", "answer": 42}\n')
    Path("held_out.jsonl").write_text('{"prompt": "What is 1 + 1?", "answer": 2}\n')
    task = load_task(posed, 0)
    assert isinstance(task, Program)
    task.check(60.0)

    async def worth(index: int, address: str) -> tuple[float, float | None]:
        environment = task.environment()
        problem = task.train(index).reference
        await environment.reset({**problem, "url": address, "key": f"{address} {index}"}, 0)
        try:
            seen = await asyncio.wait_for(environment.step(Action("")), 120)
        finally:
            await environment.close()
        return seen.rewards["correct"], seen.correct

    async def all_of_them() -> list[tuple[float, float | None]]:
        with answering_endpoint("42") as right, answering_endpoint("41") as wrong:
            return await asyncio.gather(worth(0, right), worth(1, right), worth(1, wrong))

    assert asyncio.run(all_of_them()) == [(1.0, 1.0), (1.0, 1.0), (0.0, 0.0)]


def a_tool_is_called(blocks: list[Snippet], row: str) -> None:
    """The function of docs/how-to/tools-and-environments.md with the schema of its docstring."""
    tool = sys.modules["my_module"]
    tool.index = SimpleNamespace(find=lambda query: [query] * 5)
    task = with_tools(load_task(TaskConfig(name="arithmetic"), 0), ["my_module.search"])
    assert "What to look for." in json.dumps(task.tools)
    assert tool.search("a") == ["a"] * 3


def rows_are_scored(blocks: list[Snippet], row: str) -> None:
    """The rows of README.md, with its settings."""
    for name in ("rows.jsonl", "held_out.jsonl"):
        Path(name).write_text(row if name == "rows.jsonl" else row.replace("17", "18"))
    [config] = [settings(block.code) for block in blocks if "rows.jsonl" in block.code]
    task = load_task(config.task, config.seed)
    problem = task.train(0)
    assert problem.prompt[0]["content"].startswith("What is 17 + 25?")
    worth = [task.score(said, problem.reference).correct for said in ("It is 42.", "It is 43.")]
    assert worth == [1.0, 0.0]


def rewards_are_given(blocks: list[Snippet], row: str) -> None:
    """The tasks of docs/how-to/rewards.md with their settings; the judge by its own server."""
    mine, judged = (settings(block.code).task for block in blocks if block.language == "yaml")
    Path("rows.jsonl").write_text('{"prompt": "What is 1 + 1?", "answer": "2"}')
    task = load_task(mine, 0)
    score = check_score(task.score("It is 2.", task.train(0).reference), task.weights)
    assert score == Score({"correct": 1.0, "short": 1.0}, 1.0)
    server = ThreadingHTTPServer(("127.0.0.1", 0), sys.modules["judge_server"].Judge)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
    try:
        options = {"url": f"http://127.0.0.1:{server.server_port}/"}
        task = load_task(judged.model_copy(update={"options": options}), 0)
        with mock.patch.dict(os.environ, dict.fromkeys(judged.env_vars, "secret")):
            task.warm_up()
        reference = task.train(0).reference

        async def scored() -> list[Score]:
            return [await task.score(said, reference) for said in ("2 ", "3")]

        worth = asyncio.run(scored())
    finally:
        server.shutdown()
        server.server_close()
    assert worth == [Score({"judge": 1.0}, 1.0), Score({"judge": 0.0}, 0.0)]


SHOWN = {
    "docs/how-to/rewards.md": (rewards_are_given,),
    "docs/how-to/external-agents.md": (an_agent_scores,),
    "docs/how-to/tools-and-environments.md": (a_tool_is_called,),
    "README.md": (rows_are_scored,),
}
"""What has come out when the code of a page has been tried. Others are in the tests of their parts:
docs/how-to/extend.md, docs/how-to/data.md, the environment of
docs/how-to/tools-and-environments.md.
"""


def executed(page: str) -> list[Snippet]:
    """Blocks of the page that a reader can try."""
    blocks = [block for block in SNIPPETS[page] if block.language in EXECUTED]
    return [block for block in blocks if block.name not in UNCHECKED]


def complain(place: object, problem: object) -> None:
    pytest.fail(f"{place}: {problem}", pytrace=False)


def test_every_block_says_what_it_is() -> None:
    assert len(UNCHECKED) <= 3
    blocks = [block for page in SNIPPETS.values() for block in page]
    assert set(UNCHECKED) <= {block.name for block in blocks}
    for block in blocks:
        if block.language not in LANGUAGES:
            complain(block, f"a block of {block.language!r}; the languages are {LANGUAGES}")
        starts = r"^(\$ |python -m |make |ray (start|job)|pip install|import |from \w+ import )"
        if block.language == "text" and (found := re.search(starts, block.code, re.MULTILINE)):
            complain(block, f"`{found[0]}...` can be checked, so it is no ```text")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_code_is_fenced(page: Path) -> None:
    for number, line in enumerate(prose(page.read_text(encoding="utf-8")).splitlines(), 1):
        if re.match(r" {4}(?! *([-*]|\d+\.) )", line):  # items of lists may be that far right
            complain(f"{page.name}, line {number}", f"indented, not in a block: {line.strip()}")


@pytest.mark.parametrize("page", [page for page in SNIPPETS if executed(page)])
def test_the_examples_work(page: str, home: Path) -> None:
    with GIVEN.get(page, nullcontext)() as on_hand:
        reader = Reader(page, on_hand or {})
        with reader.at_work():
            for block in executed(page):
                reader.read(block)
            [row] = [one.code for one in SNIPPETS["README.md"] if '"messages"' in one.code]
            for outcome in SHOWN.get(page, ()):
                outcome(SNIPPETS[page], row)


@pytest.mark.parametrize("page", SNIPPETS)
def test_the_programs_would_take_the_commands(page: str, home: Path) -> None:
    for block in SNIPPETS[page]:
        if block.language == "yaml" and "\nmodel:" in block.code:
            (home / "own.yaml").write_text(block.code)
        for line in block.commands() if block.name not in UNCHECKED else ():
            try:
                commands.check(line, home)
            except Refused as refusal:
                complain(block, f"`{line.strip()}`: {refusal}")


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_in_sentences_have_real_options(page: Path, home: Path) -> None:
    text = prose(page.read_text(encoding="utf-8"))
    for line in re.findall(r"`((?:python -m|make|ray|async-grpo) [^`]+)`", text):
        try:
            commands.check(" ".join(line.split()), home)
        except Incomplete:  # it is spoken of
            continue
        except Refused as refusal:
            complain(page.name, f"`{line}`: {refusal}")


BUILT = (
    "from async_grpo import Trainer, load_config\ntrainer = Trainer(load_config('quickstart'))\n"
)
CALLBACK = "from async_grpo import Callback\nclass Mine(Callback):\n"
OVERRIDES = "from async_grpo.environments.base import Environment\nclass Mine(Environment):\n"


@pytest.mark.parametrize(
    ("language", "code", "fault"),
    [
        ("python", "from async_grpo import Trainor", "Trainor"),
        ("python", BUILT + "trainer.trane()", "Trainer has no trane"),
        ("python", BUILT + "trainer.train(stepz=1)", "unexpected keyword argument 'stepz'"),
        ("python", BUILT + "trainer.train()['rollout/scoer']", "no metric rollout/scoer"),
        ("python", BUILT + "trainer.save(keep=1)", "unexpected keyword argument 'keep'"),
        ("python", "def f():\n    return nowhere.a", "nobody knows nowhere"),
        ("python", OVERRIDES + "    def resett(self): ...", "no resett"),
        ("python", OVERRIDES + "    def step(self): ...", "too many positional"),
        ("python", CALLBACK + "    def on_steps(self, trainer, result): ...", "no on_steps"),
        ("python", CALLBACK + "    def on_step(self, trainer): ...", "too many positional"),
        ("python", CALLBACK + "    def on_step(self, t, r): t.stop_now()", "no stop_now"),
        ("python", CALLBACK + "    def on_step(self, t, r): r['done'], r['dun']", "metric dun"),
        ("python", BUILT + "trainer.system.learner.get_wieghts()", "no get_wieghts"),
        ("python", "import ray\nray.init()\nray.cluster_resources(1)", "too many positional"),
        ("python", "from ray import tune\ntune.Tuner(len, tune_confg=1)", "'tune_confg'"),
        ("yaml", "learner: {lrr: 1}", "is not a setting"),
        ("yaml", "environment: {tools: [math.sqroot]}", "sqroot"),
        ("yaml", "algorithm: {plugins: [nowhere]}", "neither in the working directory"),
        ("json", '{"a" 1}', "delimiter"),
    ],
)
def test_a_wrong_example_is_found(language: str, code: str, fault: str, home: Path) -> None:
    reader = Reader("wrong.md", {})
    with reader.at_work(), pytest.raises(Exception, match=fault):
        reader.read(Snippet("wrong.md", 1, language, code))


def test_a_script_that_drives_a_run_is_tried_with_doubles(home: Path) -> None:
    code = BUILT + (
        "with trainer, trainer.draining() as same:\n"
        '    seen = [f\'{one["done"]:d} {one["train/loss"]:.1f}\' for one in trainer]\n'
        "    found = trainer.call(trainer.system.actors.foreach_actor(len))['actor-0.0']\n"
        "again = type(trainer), trainer.from_checkpoint(trainer.save(), ['learner.lr=1e-5'])\n"
        "assert same is trainer and seen == ['1 0.5'] * 2\n"
        "texts = [one.text for some in again[1].generate(['a'], n=2) for one in some]\n"
        "assert again[1].config.run and trainer.config.run.name == 'quickstart'\n"
    )
    reader = Reader("script.md", {})
    with reader.at_work():
        reader.read(Snippet("script.md", 1, "python", code))


def test_what_a_page_doubles_is_real_again_afterwards(home: Path) -> None:
    (home / "holder.py").write_text("from async_grpo.run.trainer import Trainer\n")
    reader = Reader("held.md", {})
    with reader.at_work():
        reader.read(
            Snippet("held.md", 1, "python", "import holder, ray; ray.init()\nheld = holder.Trainer")
        )
    from async_grpo.run.trainer import Trainer

    assert not ray.is_initialized() and ray.init.__module__ == "ray._private.worker"
    assert reader.main.held is not Trainer and "holder" not in sys.modules
    assert (
        Trainer.__module__ == "async_grpo.run.trainer" and reader.main.__name__ not in sys.modules
    )


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("python -m async_grpo.rnu quickstart", "no async_grpo.rnu"),
        ("python -m async_grpo.run quikstart", "Did you mean the recipe `quickstart`"),
        ("python -m async_grpo.run quickstart --dryrun", "--dryrun is no option"),
        ("python -m async_grpo.run quickstart learner.lrr=1", "is not a setting"),
        ("python -m async_grpo.run my.yaml learner.lrr=1  # so", "is not a setting"),
        ("async-grpo check quickstart --assume gpu=8", "is not understood"),
        ("python -m async_grpo.run configs/quick.yaml", "there is no configs/quick.yaml"),
        ("async-grpo inspect RUN_DIR --sort size", "invalid choice: 'size'"),
        ("async-grpo predict CONFIG [--frm RUN_DIR]", "--frm is no option"),
        ("python -m benchmarks.rollout --sizes 2M", "invalid choice: '2M'"),
        ("A=1 make tset && make test", "no tset"),
        ("make test ARG=1", "no ARG"),
        ("ray start --heads", "No such option"),
        ("ray jobs submit -- ls", "no command jobs"),
        ("ray job submit --working-dir . -- python -m async_grpo.run a --now", "is no option"),
        ('pip install ".[gpus]"', "no extras"),
        ("python examples/workers/worker.py RUN_DIR --slot few -- agent", "invalid int"),
        ("sbatch examples/slurm/nowhere.sbatch", "no examples/slurm/nowhere.sbatch"),
        ("docker build --tag a --build-arg SETS=cpu .", "the Dockerfile has no SETS=cpu"),
        ("docker run --rm async_grpo async-grpo train nowhere", "nowhere"),
        ("sky jobs launch examples/skypilot/nowhere.yaml", "no examples/skypilot/nowhere.yaml"),
        ("sbatch --nodes=2 examples/slurm/train.sbatch quickstart a.c=1", "is not a setting"),
        ("kubectl exec POD -- ray job halt", "no command halt"),
        ("step 1/250 score 0.10", "nobody knows how to check `step`"),
    ],
)
def test_a_wrong_command_is_found(line: str, fault: str, home: Path) -> None:
    with pytest.raises(Refused, match=fault):
        commands.check(line, home)
