"""The verifier pool against a task that hangs, crashes, prints, lies and eats memory, and against
parents that vanish.
"""

import ast
import asyncio
import hashlib
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import msgpack
import pytest
import pytest_asyncio

from async_grpo.config import schema
from async_grpo.tasks import pipe
from async_grpo.tasks.base import Problem, Score
from async_grpo.tasks.children import _ONE_THREAD
from async_grpo.tasks.verifier import VerifierError, VerifierPool
from tests.support.waiting import alive, wait_until_gone

pytestmark = pytest.mark.asyncio(loop_scope="module")
TIMEOUT_S = 1.5


class Misbehaving:
    """Does what the response says."""

    weights: ClassVar[dict[str, float]] = {"value": 1.0}
    fingerprint = "misbehaving"

    def __init__(self, settings, seed):
        print("task code may print while it is constructed")
        if settings.options.get("refuse"):
            raise ValueError("refused by its options")

    def __len__(self):
        return 1

    def train(self, index):
        return Problem("do something", None)

    def evaluation(self, n):
        return []

    def score(self, response, reference):
        verb, _, argument = response.partition(" ")
        value = getattr(self, verb)(argument) if verb else 0.0
        return value if verb == "give" else Score({"value": value}, None)

    def echo(self, argument):
        return float(argument)

    def length(self, argument):
        return float(len(argument))

    def pid(self, argument):
        return float(os.getpid())

    def sleep(self, argument):
        time.sleep(float(argument))
        return 1.0

    def crash(self, argument):
        os._exit(3)

    def abort(self, argument):
        os.kill(os.getpid(), signal.SIGSEGV)

    def leave(self, argument):
        sys.exit(0)

    def fail(self, argument):
        raise KeyError("no such thing")

    def bomb(self, argument):
        return float(len(bytearray(2**36)))

    def text(self, argument):
        return argument

    def give(self, argument):
        return {
            "nothing": None,
            "number": 1.0,
            "other": Score({"other": 1.0}, None),
            "missing": Score({"value": None}, 1.0),
        }[argument]

    def print(self, argument):
        print("x" * 100_000, flush=True)
        os.write(1, b"\x05\x00\x00\x00hello")
        return 1.0

    def read(self, argument):
        return float(len(sys.stdin.read()))

    def scribble(self, argument):
        for fd in range(3, 32):
            try:
                os.write(fd, b"garbage " * 4)
            except OSError:
                continue
        return 1.0

    def scribble_frame(self, argument):
        frame = bytes.fromhex(argument)
        for fd in range(3, 32):
            try:
                os.write(fd, len(frame).to_bytes(4, "little") + frame)
            except OSError:
                continue
        return 1.0

    def burn(self, argument):
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # one call in C that does not come back

    def variables(self, argument):
        return float(
            len(set(os.environ) - {"PATH", "HOME", "LANG", "LC_CTYPE", "PYTHONPATH", *_ONE_THREAD})
        )

    def environment(self, argument):
        return float(argument in os.environ)

    def cores(self, argument):
        return float(sum(1 << core for core in os.sched_getaffinity(0)))


def settings(*, options=None, **verifier):
    return schema.TaskConfig(
        name=f"{__name__}:Misbehaving",
        options=options or {},
        verifier=schema.Verifier(**({"timeout_s": TIMEOUT_S} | verifier)),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    pool = VerifierPool(settings(workers=1), seed=0, cpu=None)
    await pool.start()
    yield pool
    await pool.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair():
    pool = VerifierPool(settings(workers=2), seed=0, cpu=None)
    await pool.start()
    yield pool
    await pool.close()


def block(seconds):
    """Block the event loop, as a long step of the engine would."""
    time.sleep(seconds)


def start_parent():
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=root, text=True
    )


def start_child():
    command = [sys.executable, "-m", "async_grpo.tasks.verifier_child", str(os.getpid())]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )


async def value(pool, response):
    return (await pool.score(response, None)).rewards["value"]


async def gone(pids):
    await asyncio.to_thread(wait_until_gone, pids)


@pytest.mark.parametrize(
    ("response", "reason", "detail", "replaced"),
    [
        ("sleep 600", "timeout", "timeout_s", True),
        ("burn", "timeout", "timeout_s", True),
        ("crash", "crash", "exit code 3", True),
        ("abort", "crash", "signal 11", True),
        ("leave", "crash", "the verifier child", True),
        ("scribble", "crash", "verifier child", True),
        ("bomb", "memory", "memory_mb", True),
        ("fail", "exception", "KeyError: 'no such thing'", False),
        ("echo nan", "non_finite", "value must be finite", False),
        ("echo -inf", "non_finite", "value must be finite", False),
        ("text hello", "wrong_type", "value must be a number, got str", False),
        ("give nothing", "wrong_type", "got NoneType", False),
        ("give number", "wrong_type", "got float", False),
        ("give other", "wrong_type", "the components", False),
        ("give missing", "wrong_type", r"no value for any of \['value'\]", False),
    ],
)
async def test_one_bad_response_harms_nothing_else(pool, response, reason, detail, replaced):
    before, counted = await value(pool, "pid"), pool.errors[reason]
    with pytest.raises(VerifierError, match=detail) as caught:
        await pool.score(response, None)
    assert caught.value.reason == reason and reason in VerifierPool.REASONS
    assert pool.errors[reason] == counted + 1
    assert (await value(pool, "pid") != before) is replaced
    if replaced:
        await gone([int(before)])


async def test_batch_keeps_its_order_around_failures(pair):
    responses = [f"echo {i}" for i in range(200)]
    responses[20], responses[21], responses[90], responses[150] = (
        "crash",
        "fail",
        "echo nan",
        "bomb",
    )
    before = pair.errors.total()
    outcomes = await pair.score_many(
        [(response, {"index": i}) for i, response in enumerate(responses)]
    )
    failed = {
        i: outcome.reason
        for i, outcome in enumerate(outcomes)
        if isinstance(outcome, VerifierError)
    }
    assert failed == {20: "crash", 21: "exception", 90: "non_finite", 150: "memory"}
    assert all(
        outcomes[i] == Score({"value": float(i)}, None) for i in range(200) if i not in failed
    )
    assert pair.errors.total() == before + 4
    assert await pair.score_many([]) == []


async def test_concurrent_batches_get_their_own_answers(pair):
    batches = [[(f"echo {100 * k + i}", None) for i in range(8)] for k in range(40)]
    outcomes = await asyncio.gather(*(pair.score_many(batch) for batch in batches))
    assert [[score.rewards["value"] for score in batch] for batch in outcomes] == [
        [100.0 * k + i for i in range(8)] for k in range(40)
    ]


async def test_deadline_counts_per_response_not_per_batch(pool):
    naps = [(f"sleep {TIMEOUT_S / 5}", None)] * 6
    assert all(isinstance(outcome, Score) for outcome in await pool.score_many(naps))


async def test_output_of_task_code_stays_out_of_the_protocol(pool):
    before = await value(pool, "pid")
    assert await value(pool, "print") == 1.0 and await value(pool, "read") == 0.0
    assert await value(pool, "pid") == before


async def test_large_and_odd_text_crosses_and_unsendable_references_do_not():
    pool, long = VerifierPool(settings(timeout_s=120.0), seed=0, cpu=None), "ä" * 5_000_000
    await pool.start()
    try:
        outcomes = await pool.score_many(
            [(f"length {long}", None)] * 3
            + [("length \ud800\n", None), ("echo 1", object()), ("echo 1", 2**70)]
        )
        assert [outcome.rewards["value"] for outcome in outcomes[:4]] == [5e6, 5e6, 5e6, 2.0]
        assert [outcome.reason for outcome in outcomes[4:]] == ["not_sendable"] * 2
        with pytest.raises(VerifierError, match="not_sendable"):
            await pool.score("x" * (20 * 2**20), None)
    finally:
        await pool.close()


async def test_a_busy_parent_does_not_blame_the_child():
    pool = VerifierPool(settings(timeout_s=0.2), seed=0, cpu=None)
    await pool.start()
    try:
        scoring = asyncio.create_task(pool.score("echo 4", None))
        while not scoring.done():
            await asyncio.sleep(0)
            block(0.3)
        assert scoring.result().rewards["value"] == 4.0
    finally:
        await pool.close()


async def test_cancelled_scoring_leaves_no_answer_behind(pool):
    scoring = asyncio.create_task(pool.score_many([("sleep 1", None), ("echo 7", None)]))
    await asyncio.sleep(0.2)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert await value(pool, "echo 8") == 8.0


async def test_environment_is_clean_and_close_is_final(monkeypatch):
    for name in (
        "A_SECRET_OF_THE_PARENT",
        "MY_API_KEY",
        "HF_TOKEN",
        "AWS_SESSION_TOKEN",
        "MLFLOW_TRACKING_PASSWORD",
        "RAY_AUTH_TOKEN",
    ):
        monkeypatch.setenv(name, "1")
    core = min(os.sched_getaffinity(0))
    pool = VerifierPool(settings(workers=1), seed=0, cpu={core})
    await pool.start()
    try:
        assert (
            await value(pool, "variables") == 0.0
            and await value(pool, "environment HF_TOKEN") == 0.0
        )
        assert await value(pool, "environment OMP_NUM_THREADS") == 1.0
        assert await value(pool, "cores") == float(1 << core)
        pid = await value(pool, "pid")
        running = asyncio.create_task(pool.score("sleep 600", None))
        await asyncio.sleep(0.2)
    finally:
        await pool.close()
    with pytest.raises(VerifierError):
        await running
    await gone([int(pid)])
    with pytest.raises(VerifierError, match="closed"):
        await pool.score("echo 1", None)


async def test_start_says_why_it_failed():
    with pytest.raises(VerifierError, match="ValueError: refused by its options") as caught:
        await VerifierPool(settings(options={"refuse": True}), seed=0, cpu=None).start()
    assert caught.value.reason == "start"
    with pytest.raises(VerifierError, match="start: "):
        await VerifierPool(settings(memory_mb=1), seed=0, cpu=None).start()


@pytest.mark.parametrize("judges", [{}, {"nice": {"model": "critic"}}])
async def test_a_response_without_any_reward_is_for_judges_alone(judges):
    given = {"name": "jsonl", "train": "x", "judges": judges}
    pool = VerifierPool(schema.TaskConfig.model_validate(given), seed=0)
    await pool.start()
    try:
        [outcome] = await pool.score_many([("a poem", None)])
    finally:
        await pool.close()
    if judges:
        assert outcome == Score({"correct": None}, None)
    else:
        assert outcome.reason == "wrong_type"


async def test_built_in_task_through_the_pool():
    pool = VerifierPool(
        schema.TaskConfig(name="gsm8k", verifier=schema.Verifier(timeout_s=30.0)), seed=0, cpu=None
    )
    await pool.start()
    try:
        outcomes = await pool.score_many(
            [("<reasoning>r</reasoning><answer>0.5</answer>", "1/2"), ("9**9**9**9", "1")]
        )
        assert outcomes == [
            Score({"correct": 1.0, "format": 1.0}, 1.0),
            Score({"correct": 0.0, "format": 0.0}, 0.0),
        ]
    finally:
        await pool.close()


class Touches:
    """Leaves a file when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path(os.environ["TOUCHED"]),)


FORGED = {
    "a pickle": lambda: pickle.dumps(Touches()),
    "a pickle inside": lambda: msgpack.packb(
        ["ok", msgpack.ExtType(1, pickle.dumps(Touches())), None]
    ),
    "a map with a list as key": lambda: b"\x93\xa2ok\x81\x91\x01\x01\xc0",
    "not a finite number": lambda: msgpack.packb(["ok", {"value": math.nan}, None]),
    "another component": lambda: msgpack.packb(["ok", {"value": 1.0, "bonus": 1e9}, None]),
    "no component": lambda: msgpack.packb(["ok", {}, None]),
    "a text for a number": lambda: msgpack.packb(["ok", {"value": "1"}, None]),
    "a number without end": lambda: msgpack.packb(["ok", {"value": 1.0}, [1] * 100_000]),
    "no answer at all": lambda: msgpack.packb([]),
    "an unknown kind": lambda: msgpack.packb(["great", "x" * 100_000]),
    "a deep nest": lambda: b"\x91" * 100_000,
    "half a message": lambda: b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("payload", FORGED)
async def test_what_a_child_could_not_have_said_is_a_crash(pool, payload, tmp_path, monkeypatch):
    monkeypatch.setenv("TOUCHED", str(tmp_path / "touched"))
    frame = FORGED[payload]()
    with pytest.raises(VerifierError) as caught:
        await pool.score(f"scribble_frame {frame.hex()}", None)
    assert caught.value.reason == "crash" and len(str(caught.value)) < 2000
    assert await value(pool, "echo 1") == 1.0 and not (tmp_path / "touched").exists()


async def test_the_kernel_ends_a_busy_child_whose_parent_is_not_there_to_do_it():
    setup = pipe.pack(
        {
            "settings": settings(timeout_s=1.0).model_dump(),
            "seed": 0,
            "cpu": None,
            "memory_mb": 2048,
        }
    )
    child = start_child()
    try:
        child.stdin.write(pipe.frame(setup) + pipe.frame(pipe.pack([["burn", None]])))
        child.stdin.flush()
        assert await asyncio.to_thread(child.wait, 120) == -signal.SIGXCPU
    finally:
        child.kill()
        child.wait(timeout=10)
        child.stdin.close()
        child.stdout.close()


HOSTILE_ANSWERS = [
    "9**9**9",
    "9^{9^{9^9}}",
    "9^9^9^9",
    "(" * 100_000,
    "(" * 5000 + "1" + ")" * 5000,
    "\\frac{1}{" * 100_000 + "2" + "}" * 100_000,
    "\\sqrt{" * 40 + "2" + "}" * 40,
    "1" * 10_000_000,
    "1+" * 2_000_000 + "1",
    "__import__('os').system('true')",
    "().__class__.__base__",
    "99999999!",
    "10^{999999999}",
    "(((9^{99})^{99})^{99})^{99}",
    "2^{-99999999}",
    "1e999999999",
    "\u0661\u0662\u0663",
    "\uff11",
    "\u00b2",
    "\\sum_{i=1}^{999999999}i",
    "\\int_0^1 x^{999}dx",
    "\\binom{99999}{5000}",
    "\\prod_{i=1}^{9999}i",
    "{" * 100_000,
    "\\text{" * 1000,
    "$" * 10_000_000,
    "1/0",
    "\\frac{1}{0}",
    "0/0",
    "\x00",
    "\ud800",
    "\\begin{pmatrix}" * 20,
    "x" * 299,
    "x^{99}+y^{99}=z^{99}",
    "(x+1)^{99}(y+1)^{99}",
    "\\sin(\\cos(\\tan(\\sin(\\cos(\\tan(x))))))",
    "\\{1,2,3,\\ldots,99999999\\}",
    "[0,1)\\cup(2,3)" * 20,
    "1,2,3," * 50,
    "50\\%\\%\\%",
]


async def test_no_answer_takes_the_machine_or_the_next_answer():
    """Under a verifier's usual limits every one is judged wrong, or is an error of its own; the
    honest answer after it is right.
    """
    pool = VerifierPool(
        schema.TaskConfig(name="math", verifier=schema.Verifier(workers=1)), seed=0, cpu=None
    )
    await pool.start()
    try:
        for answer in HOSTILE_ANSWERS:
            async with asyncio.timeout(60):
                [hostile, honest] = await pool.score_many(
                    [(f"\\boxed{{{answer}}}", "7"), ("\\boxed{\\frac{14}{2}}", "7")]
                )
            assert isinstance(hostile, VerifierError) or hostile.correct == 0.0, answer[:80]
            assert isinstance(honest, Score) and honest.correct == 1.0, answer[:80]
    finally:
        await pool.close()


NO_CODE_FROM_DATA = ("wire", "groups", "replay/*", "tasks/*")
REFUSED_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "multiprocessing",
}
REFUSED_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "fork",
    "forkpty",
    "system",
    "popen",
    "load_module",
}


async def test_wire_journal_and_verifiers_make_no_code_of_data_and_never_fork():
    package = Path(pipe.__file__).parents[1]
    files = [path for pattern in NO_CODE_FROM_DATA for path in package.glob(f"{pattern}.py")]
    assert len(files) > 20
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                {alias.name.split(".")[0] for alias in node.names}
                if isinstance(node, ast.Import)
                else set()
            )
            names |= (
                {(node.module or "").split(".")[0]} if isinstance(node, ast.ImportFrom) else set()
            )
            assert not names & REFUSED_MODULES, f"{path.name}:{node.lineno}"
            if isinstance(node, ast.Call):
                called = (
                    node.func.id
                    if isinstance(node.func, ast.Name)
                    else getattr(node.func, "attr", "")
                )
                owner = getattr(getattr(node.func, "value", None), "id", "")
                assert called not in REFUSED_CALLS or owner == "re", (
                    f"{path.name}:{node.lineno} calls {called}"
                )
                assert not [
                    k for k in node.keywords if k.arg in ("allow_pickle", "preexec_fn", "shell")
                ], f"{path.name}:{node.lineno}"


PARENT = """
import asyncio, sys
from async_grpo.config import schema
from async_grpo.tasks.verifier import VerifierPool

async def main():
    verifier = schema.Verifier(workers=2, timeout_s=600.0)
    task = schema.TaskConfig(name="tests.tasks.test_verifier:Misbehaving", verifier=verifier)
    pool = VerifierPool(task, seed=0, cpu=None)
    await pool.start()
    pids = [int(score.rewards["value"]) for score in await pool.score_many([("pid", None)] * 2)]
    busy = asyncio.create_task(pool.score("sleep 600", None))
    await asyncio.sleep(0.5)
    print(*pids, flush=True)
    await busy

asyncio.run(main())
"""


async def test_children_die_with_a_killed_parent():
    parent = start_parent()
    try:
        pids = [
            int(word) for word in parent.stdout.readline().split()
        ]  # one of them idle, one busy
        assert len(pids) == 2 and all(map(alive, pids))
    finally:
        parent.kill()
        parent.wait(timeout=20)
        parent.stdout.close()
    await gone(pids)
