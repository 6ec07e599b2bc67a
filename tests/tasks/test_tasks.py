"""Problems and scores of the built-in tasks, where data come from, and the order in which problems
are posed.
"""

import ast
import dataclasses
import json
import pickle
import re
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies

from async_grpo.config import schema
from async_grpo.config.schema import Config
from async_grpo.environments.base import Observation
from async_grpo.tasks import answers
from async_grpo.tasks.arithmetic import TRAIN_PROBLEMS, Arithmetic, is_held_out
from async_grpo.tasks.base import Score, TaskError, check_score, task_weights
from async_grpo.tasks.gsm8k import final_answer, has_format
from async_grpo.tasks.registry import BUILT_IN, create_task, held_out, load_task, problem_index

DATA = Path(__file__).parents[1] / "data"
GSM8K = schema.TaskConfig(
    name="gsm8k", train=str(DATA / "gsm8k_train.jsonl"), eval=str(DATA / "gsm8k_test.jsonl")
)


@pytest.fixture(scope="module")
def gsm8k():
    task = load_task(GSM8K, 0)
    task.warm_up()
    return task


def jsonl(path, rows):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return str(path)


def total(task, response, reference):
    score = task.score(response, reference)
    return sum(task.weights[name] * value for name, value in score.rewards.items())


# --- the order of problems


@settings(max_examples=60)
@given(
    n=strategies.integers(1, 300),
    epoch=strategies.integers(0, 5),
    seed=strategies.integers(0, 2**40),
)
def test_every_epoch_poses_every_problem_once(n, epoch, seed):
    assert sorted(problem_index(seed, "data", epoch * n + i, n) for i in range(n)) == list(range(n))


def test_order_depends_on_seed_data_and_epoch():
    orders = {
        tuple(problem_index(seed, data, epoch * 50 + i, 50) for i in range(50))
        for seed in (0, 1)
        for data in ("a", "b")
        for epoch in (0, 1)
    }
    assert len(orders) == 8
    assert problem_index(3, "data", 10**12 + 7, 2**20) == problem_index(
        3, "data", 10**12 + 7, 2**20
    )


def test_order_is_spread_over_all_positions():
    # Position of problem 0 over 1,000 epochs of 10 problems: about 100 each.
    counts = [0] * 10
    for epoch in range(1000):
        counts[[problem_index(0, "data", epoch * 10 + i, 10) for i in range(10)].index(0)] += 1
    assert min(counts) > 60 and max(counts) < 140


# --- arithmetic


def test_arithmetic_held_out_pairs_are_never_trained():
    task = Arithmetic(schema.TaskConfig(), 0)
    held_out = {problem.prompt for problem in task.evaluation(1500)}
    assert len(held_out) == 1500
    trained = [task.train(index) for index in [*range(4000), TRAIN_PROBLEMS - 1]]
    for problem in trained:
        a, b = map(int, re.fullmatch(r"(\d+)\+(\d+)=", problem.prompt).groups())
        assert not is_held_out(a, b) and problem.prompt not in held_out
        assert problem.reference == problem.solution == str(a + b)[::-1]
    for prompt in held_out:
        assert is_held_out(*map(int, prompt[:-1].split("+")))
    lengths = {(len(a), len(b)) for a, b in (problem.prompt[:-1].split("+") for problem in trained)}
    assert lengths == {(a, b) for a in (1, 2, 3) for b in (1, 2, 3)}


def test_arithmetic_is_deterministic_and_checks_its_options():
    first, second = Arithmetic(schema.TaskConfig(), 0), Arithmetic(schema.TaskConfig(), 9)
    assert [first.train(i) for i in range(20)] == [second.train(i) for i in range(20)]
    assert first.evaluation(10) == second.evaluation(30)[:10]
    assert len(Arithmetic(schema.TaskConfig(options={"max_digits": 2}), 0).evaluation(1000)) == 1000
    assert (
        first.fingerprint != Arithmetic(schema.TaskConfig(options={"max_digits": 2}), 0).fingerprint
    )
    with pytest.raises(TaskError, match=r"task\.options\.digits.*max_digits"):
        create_task(schema.TaskConfig(options={"digits": 2}), 0)


def test_arithmetic_scores_reversed_digits():
    task = Arithmetic(schema.TaskConfig(), 0)
    assert task.score("131\n", "131") == Score({"correct": 1.0, "format": 1.0}, 1.0)
    assert task.score("131 ", "31").correct == 0.0


# --- GSM8K


def test_worked_example_of_four_answers(gsm8k):
    responses = [
        "<reasoning>5+3-2=6</reasoning><answer>6</answer>",
        "<reasoning>5+3=8, 8-2=6</reasoning><answer>6</answer>",
        "我思考一下，5+3=8，然后8-2=6，所以答案是6个苹果",
        "<reasoning>5+3=8, 8-2=5</reasoning><answer>5</answer>",
    ]
    assert [total(gsm8k, response, "6") for response in responses] == [2.8, 2.8, 2.0, 0.8]


def test_gsm8k_solutions_earn_everything(gsm8k):
    assert (
        len(gsm8k) == 200
        and len(gsm8k.evaluation(1000)) == 200
        and gsm8k.evaluation(3) == gsm8k.evaluation(5)[:3]
    )
    for index in range(200):
        problem = gsm8k.train(index)
        assert gsm8k.score(problem.solution, problem.reference) == Score(
            {"correct": 1.0, "format": 1.0}, 1.0
        )
        assert "<<" not in problem.solution
    assert [message["role"] for message in gsm8k.train(0).prompt] == ["system", "user"]
    plain = (
        create_task(GSM8K.unchecked_copy(update={"options": {"style": "plain", "system": ""}}), 0)
        .train(0)
        .prompt
    )
    assert plain.startswith("Natalia sold clips") and plain.endswith("?\n\n")


@pytest.mark.parametrize(
    ("response", "reference", "correct"),
    [
        ("<answer>$1,234.00</answer>", "1234", 1.0),
        ("<answer>12/2</answer>", "6", 1.0),
        ("<answer>\\boxed{6}</answer>", "6", 1.0),
        ("<answer>6 apples</answer>", "6", 1.0),
        ("<answer>6</answer><answer>7</answer>", "6", 0.0),
        ("<answer>six</answer> 6", "6", 0.0),
        ("so 8-2=6.", "6", 1.0),
        ("it fell to -6", "-6", 1.0),
        ("it is 5-6", "6", 1.0),
        ("1,2,6", "6", 1.0),
        ("", "6", 0.0),
        ("6 of them, not 7", "6", 0.0),
        ("<answer></answer>", "6", 0.0),
    ],
)
def test_gsm8k_final_answers(gsm8k, response, reference, correct):
    assert gsm8k.score(response, reference).rewards["correct"] == correct


@pytest.mark.parametrize(
    ("response", "good"),
    [
        ("\n<reasoning>r</reasoning>\n\n<answer>a</answer>\n", True),
        ("x<reasoning>r</reasoning><answer>a</answer>", False),
        ("<reasoning>r</reasoning>x<answer>a</answer>", False),
        ("<reasoning>r</reasoning><answer>a</answer>x", False),
        ("<reasoning>r</reasoning><answer> </answer>", False),
        ("<answer>a</answer><reasoning>r</reasoning>", False),
        ("<reasoning>r<reasoning></reasoning><answer>a</answer>", False),
        ("<reasoning>r</reasoning><answer>a</answer><answer>a</answer>", False),
    ],
)
def test_gsm8k_format(response, good):
    assert has_format(response) is good


# --- mathematics


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("1/2", "0.5", True),
        ("\\frac12", "\\dfrac{1}{2}", True),
        ("2\\sqrt{2}", "\\sqrt{8}", True),
        ("1+x^2", "x^2+1", True),
        ("\\{2,1\\}", "\\{1,2\\}", True),
        ("\\left[0,1\\right)", "[0,1)", True),
        ("Evelyn", "\\text{Evelyn}", True),
        ("90^\\circ", "90", True),
        ("10!", "10!", True),
        ("\\frac{1}{0}", "1", False),
        ("x^2", "x^3", False),
        ("", "", False),
    ],
)
def test_math_equality(gsm8k, answer, reference, same, monkeypatch):
    monkeypatch.setattr(answers, "_MATH_SECONDS", 60)  # the machine may be busy
    assert answers.equal(answer, reference) is same


@pytest.mark.parametrize(
    "hostile",
    [
        "9**9**9",
        "9^{9^9}",
        "9^9^9",
        "9^{9}^{9}",
        "(((9^{99})^{99})^{99})^{99}",
        "9^{(9^9)}",
        "99999!",
        "\\exp(\\exp(\\exp(99)))",
        "exp(exp(99))",
        "factorial(99999)",
        "__import__('os')",
        "(" * 5000 + "1" + ")" * 5000,
        "\\frac{1}{" * 50 + "2" + "}" * 50,
        "9" * 5000,
        "1+" * 2_000_000 + "1",
        "\\sum_{i=1}^{99}i",
        "10^{10^{10}}",
        "١" * 10,
    ],
)
def test_hostile_mathematics_never_reaches_the_library(monkeypatch, hostile):
    def unreachable():
        raise AssertionError("reached math-verify")

    monkeypatch.setattr(answers, "_engine", unreachable)
    task = create_task(schema.TaskConfig(name="math"), 0)
    began = time.process_time()
    assert task.score(f"so \\boxed{{{hostile}}}", "1").correct == 0.0
    assert (
        final_answer(f"<answer>{hostile}</answer>") is None
        or len(final_answer(f"<answer>{hostile}</answer>")) < 10**4
    )
    assert has_format("<reasoning>" * 100_000) is False
    assert (
        time.process_time() - began < 5
    )  # CPU seconds: each of them would take minutes if it were evaluated


def test_math_rows(tmp_path, gsm8k):
    rows = [
        {"problem": "one half?", "solution": "It is $\\boxed{\\frac{1}{2}}$."},
        {"problem": "two?", "solution": "$\\boxed 2$", "level": "1"},
        {"problem": "three?", "solution": "obvious", "answer": "3"},
    ]
    task = load_task(schema.TaskConfig(name="math", train=jsonl(tmp_path / "train.jsonl", rows)), 0)
    assert [task.train(i).reference for i in range(3)] == ["\\frac{1}{2}", "2", "3"]
    assert task.score("\\boxed{1} then \\boxed{0.5}", "\\frac{1}{2}").correct == 1.0
    assert (
        task.score("0.5", "\\frac{1}{2}").correct == 0.0
        and task.score("\\boxed{0.5", "\\frac{1}{2}").correct == 0.0
    )
    assert task.evaluation(10) == []


# --- data


def test_malformed_rows_are_named_or_skipped(tmp_path):
    good = {"prompt": "capital of France?", "answer": "Paris"}
    path = jsonl(
        tmp_path / "rows.jsonl",
        [
            good,
            "{broken",
            {"prompt": "x"},
            good | {"prompt": "y"},
            "[1]",
            "",
            good | {"prompt": "z"},
        ],
    )
    config = schema.TaskConfig(name="jsonl", train=path)
    with pytest.raises(
        TaskError,
        match=r"rows\.jsonl: 3 of 6 rows .*line 2: not JSON.*line 3: no key 'answer'.*line 5: "
        r"not a JSON object",
    ):
        load_task(config, 0)
    task = load_task(config.unchecked_copy(update={"max_bad_fraction": 0.5}), 0)
    assert len(task) == 3 and "3 of 6 rows" in task.notes[0]
    with pytest.raises(TaskError):
        load_task(config.unchecked_copy(update={"max_bad_fraction": 0.49}), 0)


def test_what_is_wrong_with_rows_is_told_by_kind(tmp_path):
    rows = [
        *([{"question": "q", "level": 1}] * 7),
        *([{"prompt": "p", "answer": None}] * 2),
        "[",
        {"prompt": "p", "answer": float("nan")},
        {"prompt": "p", "answer": "a", "rewards": {"b": float("inf")}},
    ]
    with pytest.raises(TaskError) as caught:
        load_task(schema.TaskConfig(name="jsonl", train=jsonl(tmp_path / "rows.jsonl", rows)), 0)
    message = str(caught.value)
    assert (
        "12 of 12 rows are malformed: line 1, line 2, line 3, line 4 and 3 more: no key "
        "'answer' (its keys are 'question', 'level')" in message
    )
    assert (
        "; line 8, line 9: 'answer' must be non-empty text, got None; line 10: not JSON on one line"
        in message
    )
    assert (
        "got nan; and 1 other kinds. Mend them, or leave them out (task.max_bad_fraction, now 0)"
        in message
        and "\n" not in message
    )
    whole = tmp_path / "whole.json"
    whole.write_text('["p", "a"]')
    with pytest.raises(TaskError, match="row 0, row 1: not a JSON object"):
        load_task(schema.TaskConfig(name="jsonl", train=str(whole)), 0)


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        (
            "gsm8k",
            {"question": "q", "answer": "three"},
            "'answer' must end in '#### ' and a number",
        ),
        ("math", {"problem": "p", "solution": "obvious"}, "no key 'answer' and no \\\\boxed"),
        ("jsonl", {"messages": [], "answer": "a"}, "'messages' must be a non-empty list"),
        (
            "jsonl",
            {"messages": [{"role": "user", "content": 1}], "answer": "a"},
            "must have the texts 'role' and 'content'",
        ),
        ("jsonl", "[" * 100_000, "nested too deeply"),
    ],
)
def test_what_each_task_asks_of_a_row(tmp_path, name, row, says):
    with pytest.raises(TaskError, match=says):
        load_task(schema.TaskConfig(name=name, train=jsonl(tmp_path / "rows.jsonl", [row])), 0)


def test_messages_may_stand_in_prompt(tmp_path):
    messages = [{"role": "user", "content": "What is 1 + 1?"}]
    source = jsonl(tmp_path / "rows.jsonl", [{"prompt": messages, "answer": "2"}])
    assert load_task(schema.TaskConfig(name="jsonl", train=source), 0).train(0).prompt == messages


def test_files_as_editors_leave_them(tmp_path):
    row = json.dumps({"prompt": "p", "answer": "a"}).encode()
    (tmp_path / "rows.jsonl").write_bytes(
        b"\xef\xbb\xbf" + row + b"\r\n\r\n   \n" + row.replace(b'"p"', b'"q"')
    )
    task = load_task(schema.TaskConfig(name="jsonl", train=str(tmp_path / "rows.jsonl")), 0)
    assert [task.train(i).prompt for i in range(len(task))] == ["p", "q"]
    (tmp_path / "latin.jsonl").write_bytes(row.replace(b'"p"', b'"\xe9"'))
    with pytest.raises(TaskError, match="line 1: not UTF-8 text"):
        load_task(schema.TaskConfig(name="jsonl", train=str(tmp_path / "latin.jsonl")), 0)
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(TaskError, match=r"task\.eval \(.*none\.jsonl\) has no problem"):
        load_task(
            schema.TaskConfig(
                name="jsonl", train=str(tmp_path / "rows.jsonl"), eval=str(tmp_path / "none.jsonl")
            ),
            0,
        ).evaluation(1)


def test_options_are_answered_in_words():
    with pytest.raises(
        TaskError,
        match=r"^task\.options\.mach is not an option \(the options of task jsonl are match\)$",
    ):
        create_task(schema.TaskConfig(name="jsonl", options={"mach": "exact"}), 0)
    with pytest.raises(TaskError, match=r"^task\.options\.dataset is missing"):
        create_task(schema.TaskConfig(name="reasoning_gym"), 0)
    with pytest.raises(
        TaskError,
        match=r"^task\.options\.max_digits is 12: Input should be less than or equal to 9 \(",
    ):
        create_task(schema.TaskConfig(options={"max_digits": 12}), 0)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "class Mine:\n    def __init__(self, settings, seed):\n        self.x = {}['x']\n",
            r"cannot be made: KeyError: 'x' \(.*own_task\.py, line 3\)",
        ),
        ("def Mine(:\n", r"cannot be imported: SyntaxError: .*own_task\.py, line 1"),
        ("import numpy\nnumpy.nothing\n", "cannot be imported: AttributeError"),
        ("import no_such_library\n", "cannot be imported: ModuleNotFoundError: No module named"),
        ("import sys\nsys.exit('usage: --width')\n", "cannot be imported: SystemExit: usage"),
        (
            "class Mine:\n    def __init__(self, settings, seed): ...\n    def "
            "train(self, i): ...\n",
            "own_task:Mine is no task: it has no weights, fingerprint, __len__, evaluation",
        ),
        (
            "class Mine:\n    def __init__(self, settings, seed): ...\n"
            "    weights = {'correct': 1.0}\n    __len__ = train = evaluation = score = len\n",
            r"own_task:Mine is no task: it has no fingerprint \(docs/how-to/data\.md shows one\)",
        ),
    ],
)
def test_a_task_of_ones_own_that_does_not_work(source, message, tmp_path, monkeypatch):
    (tmp_path / "own_task.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_task", raising=False)
    with pytest.raises(TaskError, match=message) as caught:
        create_task(schema.TaskConfig(name="own_task:Mine"), 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("length", "evaluation", "message"),
    [
        ("2.5", "[]", "cannot say how many problems it has: TypeError: 'float' object"),
        ("2", "None", "cannot pose its held-out problems: TypeError: object of type 'NoneType'"),
        ("2", "{}['x']", r"cannot pose its held-out problems: KeyError: 'x' \(.*counted\.py, line"),
    ],
)
def test_a_task_of_ones_own_that_cannot_be_counted(
    length, evaluation, message, tmp_path, monkeypatch
):
    (tmp_path / "counted.py").write_text(
        "class Mine:\n    def __init__(self, settings, seed): ...\n    weights = {}\n"
        f"    fingerprint = ''\n    train = score = None\n    def __len__(self): return {length}\n"
        f"    def evaluation(self, n): return {evaluation}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "counted", raising=False)
    config = Config.model_validate(
        {"run": {"total_steps": 1}, "model": {"path": "m"}, "task": {"name": "counted:Mine"}}
    )
    with pytest.raises(TaskError, match=f"^task counted:Mine {message}") as caught:
        held_out(config, load_task(config.task, 0))
    assert "\n" not in str(caught.value)


def test_missing_data_is_one_sentence(tmp_path):
    with pytest.raises(TaskError, match=r"there is no file .*absent\.jsonl") as caught:
        load_task(schema.TaskConfig(name="gsm8k", train=str(tmp_path / "absent.jsonl")), 0)
    assert "\n" not in str(caught.value)
    with pytest.raises(TaskError, match=r"gsm8k needs task\.train"):
        load_task(schema.TaskConfig(name="gsm8k"), 0)
    with pytest.raises(TaskError, match="no training problem"):
        load_task(schema.TaskConfig(name="jsonl", train=jsonl(tmp_path / "empty.jsonl", [])), 0)


def test_held_out_problems_are_not_in_training(tmp_path):
    rows = [{"prompt": f"q{i}", "answer": "a"} for i in range(6)]
    train = jsonl(tmp_path / "train.jsonl", rows[:4])
    task = load_task(
        schema.TaskConfig(name="jsonl", train=train, eval=jsonl(tmp_path / "eval.jsonl", rows[2:])),
        0,
    )
    assert [problem.prompt for problem in task.evaluation(9)] == ["q4", "q5"]
    assert "2 of 4 held-out problems have the prompt of a training problem" in task.notes[0]
    with pytest.raises(TaskError, match=r"also in task.train"):
        load_task(schema.TaskConfig(name="jsonl", train=train, eval=train), 0).evaluation(1)


def test_fingerprint_follows_data_and_options(tmp_path):
    rows = [{"prompt": "q", "answer": "a"}, {"prompt": "r", "answer": "b"}]
    prints = [
        load_task(
            schema.TaskConfig(
                name="jsonl", train=jsonl(tmp_path / f"{i}.jsonl", data), options=options
            ),
            0,
        ).fingerprint
        for i, (data, options) in enumerate(
            [(rows, {}), (rows, {}), (rows[::-1], {}), (rows, {"match": "contains"})]
        )
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 3


def test_hugging_face_data_sets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        jsonl(
            folder / f"{split}.jsonl", [{"prompt": f"{split} {i}", "answer": "a"} for i in range(3)]
        )
    task = load_task(
        schema.TaskConfig(name="jsonl", train=str(folder), eval=f"{folder}:default:test"), 0
    )
    assert [task.train(i).prompt for i in range(3)] == ["train 0", "train 1", "train 2"]
    assert [problem.prompt for problem in task.evaluation(2)] == ["test 0", "test 1"]
    with pytest.raises(TaskError, match=r"could not load data set .* split 'other'"):
        load_task(schema.TaskConfig(name="jsonl", train=f"{folder}:default:other"), 0)


# --- jsonl, reasoning-gym, the registry


def test_jsonl_matching(tmp_path):
    messages = [{"role": "user", "content": "capital of France?"}]
    rows = [
        {"messages": messages, "answer": "Paris", "rewards": {"Lyon": 0.2}},
        {"prompt": "n?", "answer": 4, "solution": "2+2 is 4"},
    ]
    config = schema.TaskConfig(name="jsonl", train=jsonl(tmp_path / "rows.jsonl", rows))
    task = load_task(config, 0)
    reference = task.train(0).reference
    assert (
        task.train(0).prompt == messages
        and task.train(0).solution == "Paris"
        and task.train(1).solution == "2+2 is 4"
    )
    assert [task.score(text, reference) for text in (" Paris\n", "Lyon", "in Paris")] == [
        Score({"correct": 1.0}, 1.0),
        Score({"correct": 0.2}, 0.0),
        Score({"correct": 0.0}, 0.0),
    ]
    assert task.score("4", task.train(1).reference).correct == 1.0
    contains = create_task(config.unchecked_copy(update={"options": {"match": "contains"}}), 0)
    assert contains.score("in Paris", reference).correct == 1.0
    regex = create_task(config.unchecked_copy(update={"options": {"match": "regex"}}), 0)
    assert regex.score("in Paris", {"answer": "P.r[a-i]s$", "rewards": {}}).correct == 1.0
    with pytest.raises(TaskError, match="not a regular expression"):
        load_task(
            schema.TaskConfig(
                name="jsonl",
                train=jsonl(tmp_path / "bad.jsonl", [{"prompt": "p", "answer": "("}]),
                options={"match": "regex"},
            ),
            0,
        )


def test_reasoning_gym():
    config = schema.TaskConfig(
        name="reasoning_gym",
        options={"dataset": "chain_sum", "params": {"min_terms": 3, "max_terms": 3}, "size": 500},
    )
    task = load_task(config, 0)
    problem = task.train(3)
    assert task.train(3) == problem and len(task) == 500
    assert task.score(problem.solution, problem.reference) == Score({"correct": 1.0}, 1.0)
    assert task.score("<answer>no</answer>", problem.reference).correct == 0.0
    held_out = task.evaluation(20)
    assert (
        held_out == load_task(config, 7).evaluation(20) and load_task(config, 7).train(3) != problem
    )
    assert not {json.dumps(p.prompt) for p in held_out} & {
        json.dumps(task.train(i).prompt) for i in range(500)
    }
    for options, message in [
        ({"dataset": "chain_sums"}, "no data set 'chain_sums'"),
        (
            {"dataset": "chain_sum", "params": {"min_terms": 9, "max_terms": 3}},
            "params does not fit",
        ),
        ({"dataset": "chain_sum", "params": {"seed": 3}}, "may not hold seed"),
    ]:
        with pytest.raises(TaskError, match=message):
            load_task(config.unchecked_copy(update={"options": options}), 0)


def test_partial_scores_and_unusual_metadata_survive():
    # knights_knaves carries numpy strings, which have no Python literal, and gives partial credit.
    task = load_task(
        schema.TaskConfig(name="reasoning_gym", options={"dataset": "knights_knaves", "size": 5}), 0
    )
    problem = task.train(0)
    assert task.score(problem.solution, problem.reference).correct == 1.0
    flipped = problem.solution.split("<answer>")[1].split("</answer>")[0]
    terms = ast.literal_eval(problem.reference)["metadata"]["knight_knave_terms"]
    flipped = (
        flipped.replace(terms["a_knight"], "KNAVE", 1)
        if terms["a_knight"] in flipped
        else flipped.replace(terms["a_knave"], "KNIGHT", 1)
    )
    flipped = flipped.replace("KNAVE", terms["a_knave"]).replace("KNIGHT", terms["a_knight"])
    partial = task.score(f"<answer>{flipped}</answer>", problem.reference)
    assert 0.0 < partial.rewards["correct"] < 1.0 and partial.correct == 0.0


def test_registry_errors():
    with pytest.raises(TaskError, match=r"no task 'gsm8'.*did you mean 'gsm8k'"):
        create_task(schema.TaskConfig(name="gsm8"), 0)
    with pytest.raises(TaskError, match="no module 'nowhere_to_be_found'"):
        create_task(schema.TaskConfig(name="nowhere_to_be_found.tasks:Mine"), 0)
    with pytest.raises(TaskError, match=r"no class 'Arithmetics' \(did you mean 'Arithmetic'\?\)"):
        create_task(schema.TaskConfig(name="async_grpo.tasks.arithmetic:Arithmetics"), 0)


def test_weights():
    task = Arithmetic(schema.TaskConfig(), 0)
    assert task_weights(schema.TaskConfig(), task) == {"correct": 1.0, "format": 0.0}
    weighted = create_task(GSM8K, 0)
    assert task_weights(schema.TaskConfig(rewards={"format": 0.5}), weighted) == {
        "correct": 0.0,
        "format": 0.5,
    }
    with pytest.raises(
        TaskError, match="names formal; the components of this task are correct, format"
    ):
        task_weights(schema.TaskConfig(rewards={"formal": 1.0}), weighted)


def test_the_field_of_before_is_answered():
    with pytest.raises(TypeError, match="`verdict` of Score is called `correct` now"):
        Score(rewards={"a": 1.0}, verdict=1.0)
    with pytest.raises(TypeError, match="`verdict` of Observation is called `correct` now"):
        Observation("", done=True, verdict=1.0)
    score = Score({"a": 1.0}, correct=1.0)
    assert pickle.loads(pickle.dumps(score)) == dataclasses.replace(score) == score


def test_check_score():
    assert check_score(Score({"a": 1, "b": True}, None), {"a", "b"}) == Score(
        {"a": 1.0, "b": 1.0}, None
    )
    missing = Score({"a": None, "b": 2.0}, 1.0)
    assert check_score(missing, {"a", "b"}) == check_score(missing, {"a", "b"}, ["b"]) == missing
    with pytest.raises(TypeError, match=r"no value for any of \['a'\]"):
        check_score(missing, {"a", "b"}, ["a"])
    for bad in (
        1.0,
        Score({"a": None, "b": None}, None),
        Score({"a": 1.0}, None),
        Score({"a": 1.0, "b": "x"}, None),
        Score({"a": 1.0, "b": 0.0}, "yes"),
    ):
        with pytest.raises(TypeError):
            check_score(bad, {"a", "b"})
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite"):
            check_score(Score({"a": 1.0, "b": number}, None), {"a", "b"})
    assert check_score(Score({"a": 1.0}, True), {"a"}).correct == 1.0
    with pytest.raises(ValueError, match=r"correct must be 0, 1 or None, got 0\.5"):
        check_score(Score({"a": 1.0}, 0.5), {"a"})


def test_the_documented_task_works(tmp_path, monkeypatch):
    document = (Path(__file__).parents[2] / "docs" / "how-to" / "data.md").read_text()
    (tmp_path / "word_count.py").write_text(
        re.search(r"```python\n(# word_count.*?)```", document, re.DOTALL)[1]
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "word_count", raising=False)
    task = load_task(schema.TaskConfig(name="word_count:WordCount", options={"longest": 8}), 0)
    assert len(task) == 5 and len(task.evaluation(5)) == 2
    assert not {p.prompt for p in task.evaluation(2)} & {
        task.train(i).prompt for i in range(len(task))
    }
    score = check_score(task.score("Just four words here.", 4), task.weights)
    assert score == Score({"count": 1.0, "ends": 1.0}, 1.0)
    for name in BUILT_IN:
        assert f"`{name}`" in document


@pytest.mark.parametrize("key", ["train", "eval"])
@pytest.mark.parametrize("name", ["arithmetic", "reasoning_gym"])
def test_a_task_that_makes_its_problems_takes_no_rows(key, name):
    options = {"dataset": "chain_sum"} if name == "reasoning_gym" else {}
    settings = schema.TaskConfig(name=name, options=options, **{key: "rows.jsonl"})
    with pytest.raises(
        TaskError, match=rf"task\.{key} is 'rows\.jsonl', but task {name} generates its problems"
    ):
        load_task(settings, 0)


def test_judges_are_components_with_weight_1_unless_another_is_set():
    task = Arithmetic(schema.TaskConfig(), 0)
    judges = {"nice": {"model": "critic"}}
    given = schema.TaskConfig.model_validate({"judges": judges})
    assert task_weights(given, task) == {"correct": 1.0, "format": 0.0, "nice": 1.0}
    weighed = schema.TaskConfig.model_validate({"judges": judges, "rewards": {"correct": 1.0}})
    assert task_weights(weighed, task) == {"correct": 1.0, "format": 0.0, "nice": 0.0}
    both = schema.TaskConfig.model_validate({"judges": {"format": {"model": "critic"}}})
    with pytest.raises(TaskError, match=r"task.judges.format has the name of a component"):
        task_weights(both, task)


def test_judged_rows_need_no_answer(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a poem"}\n{"prompt": "b", "answer": "c"}\n')
    plain = {"name": "jsonl", "train": str(rows)}
    with pytest.raises(TaskError, match="answer"):
        len(load_task(schema.TaskConfig(**plain), 0))
    judged = {**plain, "judges": {"nice": {"model": "critic"}}}
    looks_on = {**judged, "rewards": {"correct": 1.0}}
    with pytest.raises(TaskError, match="answer"):
        len(load_task(schema.TaskConfig.model_validate(looks_on), 0))
    task = load_task(schema.TaskConfig.model_validate(judged), 0)
    assert [task.train(index).reference for index in range(2)] == [
        None,
        {"answer": "c", "rewards": {}},
    ]
    assert task.score("anything", None) == Score({"correct": None}, None)


def test_weights_that_are_all_nothing_are_refused():
    task = load_task(schema.TaskConfig(), 0)
    with pytest.raises(TaskError, match="gives every component the weight 0"):
        task_weights(schema.TaskConfig(rewards={"correct": 0.0, "format": 0.0}), task)
