"""Whether model, tokenizer and prompts fit each other, before anything starts.

Runs in: the driver. Hides which files of a model say so, and transformers, whose automatic classes
take seconds to import. Invariant: nothing is refused that the run's processes would take; what they
would refuse later is refused here where files alone tell.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from async_grpo.config.schema import WARM_START_POSITIONS, Config
from async_grpo.environments.base import HasEnvironment, HasPlayers
from async_grpo.environments.tools import TaskWithTools, with_tools
from async_grpo.errors import SetupError
from async_grpo.rollout.chat_format import ChatFormat, chat_format_of
from async_grpo.rollout.engine.base import stop_tokens
from async_grpo.rollout.frozen import FrozenFailed, engine_config, teacher_prompt
from async_grpo.run.preflight.architecture import check_architecture
from async_grpo.runtime.parts import needed
from async_grpo.runtime.text import ERROR_CHARS, counted, shortened
from async_grpo.tasks.base import Problem, Problems, Task
from async_grpo.tasks.chat import prompt_ids
from async_grpo.tasks.data import RowTask
from async_grpo.tasks.mixture import naming, parts_of
from async_grpo.tasks.registry import create_task
from async_grpo.tasks.sources import quiet_hub

SAMPLE = 256
"""Prompts that are looked at, spread evenly over the problems."""
SHOWN = 3
"""Prompts that are shown."""
TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tokenizer_config.json",
)
"""Files of which a tokenizer has at least one, the usual one first."""
_LFS = b"version https://git-lfs"
"""How a file begins that Git LFS has not replaced by its contents."""
_OTHER_HEAD = re.compile(
    r"For(MaskedLM|PreTraining|\w*Classification|\w*Answering|MultipleChoice|\w*Prediction"
    r"|\w*Retrieval|\w*Embedding|MaskedImageModeling|ObjectDetection)$"
)
"""Ends of the names of architectures whose head does not predict the next token."""
_PLAIN_ROPE = (None, "default", "llama3", "mrope")
"""Position embeddings that reach no further than `max_position_embeddings`; the others stretch it.
"""
_SWITCHED_ROPE = {
    "dynamic": "max_position_embeddings",
    "longrope": "original_max_position_embeddings",
    "su": "original_max_position_embeddings",
}
"""Those that change in all of a row when it gets longer than this: in transformers by the longest
row of a batch, in vLLM by the longest that may come.
"""

LOOKED_AT, SOME_ROWS = 8 * 2**30, 16
"""Bytes of weights up to which every value is looked at; the rows of each tensor beyond that."""
LARGE_LAG = 8
"""A bound from which on a constant learning rate is warned of."""


def look(
    config: Config, task: Problems, *, model_dir: str | None = None, of_evaluation: bool = False
) -> list[str] | None:
    """Check model and prompts as `check_fit`; None while the model is still to be made."""
    for own, one in parts_of(config, task):
        with naming(own):
            _check_episodes(own, one)
    model = model_dir or known_model(config, task)
    if model is not None:
        return list(check_fit(config, model, task, of_evaluation=of_evaluation))
    _check_warm_start(config, task)
    return None


def check_metric(config: Config, components: list[str]) -> None:
    """Check what a filter looks at, which only the task knows. Raises SetupError."""
    filters, known = config.replay.filter_groups, ["score", "acc", "seq_reward", *components]
    if filters.enable and filters.metric not in known:
        raise SetupError(
            f"`replay.filter_groups.metric` is {filters.metric!r}; for task "
            f"{config.task.name} it is one of {', '.join(known)}."
        )


def check_journal(config: Config) -> None:
    """Check the journal's place. Raises SetupError."""
    journal = Path(config.run.dir) / "journal"
    if journal.exists() and not journal.is_dir():
        raise SetupError(
            f"{journal} is no directory, and the replay queue keeps its journal there: move it away"
        )


def known_model(config: Config, task: Problems | None = None) -> str | None:
    """Directory or hub name of the model; None for a warm-started one of this task that is not in
    the cache.
    """
    if config.model.path is None:
        warm_start = needed("warm_start", "`model.warm_start`")
        made = warm_start.cache_path(config, task)
        return str(made) if warm_start.is_cached(made) else None
    local = Path(config.model.path).expanduser()
    return str(local) if local.exists() else config.model.path


def made_model(config: Config, *, note: Callable[[str], None], check: Callable[[], None]) -> str:
    """Directory or hub name of the model, which is made where there is none. note: told of the
    progress; check: called meanwhile, what it raises ends it.
    """
    if config.model.path is not None and (known := known_model(config)):
        return known
    made = needed("warm_start", "`model.warm_start`")
    return made.ensure_warm_start(config, progress=note, check=check)


def rate_notes(config: Config) -> Iterator[str]:
    """Warn of a learning rate that stays as it is with old data: accuracy swings to the end."""
    bound = config.replay.max_staleness
    if bound >= LARGE_LAG and config.learner.schedule == "constant":
        yield (
            f"note: replay.max_staleness is {bound} and learner.schedule is constant: with data "
            "so stale the policy oscillates to the end of the run; set learner.schedule: linear "
            "(the recipe large_staleness, docs/explanation/staleness.md), or settle where the end "
            "is not known"
        )


def rendered(config: Config, task: Problems) -> tuple[list[tuple[str, int]], list[int]]:
    """Return the first prompts as the model sees them with their tokens, and how many tokens each
    of a sample has; nothing while the model is still to be made. Raises SetupError.
    """
    model = known_model(config, task)
    if model is None:
        return [], []
    with quiet_hub():
        tokenizer = _tokenizer(model, trust_remote_code=config.model.trust_remote_code)
    shown, lengths = list[tuple[str, int]](), list[int]()
    for own, one in parts_of(config, task):
        chat, sample = _chat(own, tokenizer, one), list(_sample(own, one).values())
        ids = [_encoded(own, model, tokenizer, problem, chat) for problem in sample]
        shown += [(tokenizer.decode(each), len(each)) for each in ids[:SHOWN]]
        lengths += map(len, ids)
    return shown, sorted(lengths)


def check_fit(
    config: Config, model: str, task: Problems, *, of_evaluation: bool = False
) -> Iterator[str]:
    """Check that `model` and the prompts of `task` fit; lines for the user. Raises SetupError.
    of_evaluation: look at held-out problems, since nothing is trained.
    """
    yield from rate_notes(config)
    with quiet_hub():
        architecture = _architecture(model)
        tokenizer = _tokenizer(model, trust_remote_code=config.model.trust_remote_code)
    _check_positions(config, model, architecture)
    if Path(model).is_dir():
        yield from _check_weights(Path(model))
    try:
        ends = stop_tokens(model, tokenizer.eos_token_id)
    except ValueError as error:
        raise SetupError(str(error)) from error
    rows = architecture.get("vocab_size")
    if isinstance(rows, int):
        _check_vocabulary(model, tokenizer, rows, ends)
    for own, one in parts_of(config, task):
        with naming(own):
            yield from _check_task(own, model, one, tokenizer, rows, of_evaluation=of_evaluation)
    _check_trained(config, model)
    if config.evaluation.task is not None:
        try:
            evaluated = config.unchecked_copy(update={"task": config.evaluated_task, "tasks": {}})
            other = create_task(evaluated.task, config.seed)
            problem, chat = other.evaluation(1)[0], _chat(config, tokenizer, other)
            _encoded(evaluated, model, tokenizer, problem, chat)
        except SetupError as error:
            raise SetupError(f"evaluation.task: {error}") from error
    if config.model.path is not None:
        yield from check_architecture(config, model, learner=not of_evaluation)
    for name in config.frozen_here:
        try:
            _check_frozen(config, name, model, tokenizer)
        except SetupError as error:
            raise SetupError(f"frozen.{name}: {error}") from error


def _check_task(
    config: Config, model: str, task: Task, tokenizer: Any, rows: int | None, *, of_evaluation: bool
) -> Iterator[str]:
    """Check the prompts of one task. rows: of the model's vocabulary, where they are known."""
    yield from _outside_notes(config, task)
    if isinstance(task, RowTask):
        yield from task.notes
    sample = _held_out_sample(config, task) if of_evaluation else _sample(config, task)
    chat = _chat(config, tokenizer, task)
    yield from _check_prompts(config, model, sample, tokenizer, rows, chat)
    if getattr(tokenizer, "chat_template", None) and all(
        isinstance(problem.prompt, str) for problem in sample.values()
    ):
        yield (
            f"note: {model} has a chat template, but the prompts of task {config.task.name} "
            "are plain text: the template is applied to lists of messages only"
        )
    yield from _check_answers(config, list(sample.values()), tokenizer)
    if not of_evaluation:
        plays = isinstance(with_tools(task, config.environment.tools), HasEnvironment)
        _check_given(config, sample, tokenizer, plays=plays)


def _check_frozen(run: Config, name: str, policy: str, tokenizer: Any) -> None:
    """Check a frozen model for what it is used for. Raises SetupError."""
    config = engine_config(run, name)
    model = str(config.model.path)
    kinds = {judge.kind for judge in run.judges.values() if judge.model == name}
    with quiet_hub():
        architecture = _architecture(model, scores="reward_model" in kinds)
        other = _tokenizer(model, trust_remote_code=config.model.trust_remote_code)
    mine, theirs = tokenizer.get_vocab(), other.get_vocab()
    if name in (*run.algorithm.distill.teachers, run.algorithm.sft_model) and mine != theirs:
        differ = len(mine.items() ^ theirs.items())
        raise SetupError(
            f"{model} has another vocabulary than {policy} ({counted(differ, 'token')} of one "
            "mean something else in the other): use a model with the policy's tokenizer"
        )
    if kinds - {"reward_model"} and not getattr(other, "chat_template", None):
        raise SetupError(
            f"{model} is asked as a judge, in chat messages, and its tokenizer has no chat "
            "template: use an instruction-tuned model"
        )
    limit = _limit(architecture)
    if kinds and isinstance(limit, int) and config.rollout.longest_row > limit:
        raise SetupError(
            f"it is asked texts of {config.rollout.longest_row - 1} tokens, and {model} has "
            f"{limit} positions: set frozen.{name}.context_length to at most {limit - 1}"
        )
    _check_positions(config, model, architecture)
    if Path(model).is_dir():
        list(_check_weights(Path(model)))
    if "reward_model" not in kinds:  # a trial generates
        list(check_architecture(config, model, learner=False))


def _outside_notes(config: Config, task: Task) -> Iterator[str]:
    """Say what a task says whose episodes are played from outside. Raises TaskError, SetupError."""
    if isinstance(task, HasPlayers):
        yield from task.notes(config)


class _Letters:
    """Stand for the tokenizer of a warm-started model: a character is a token."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self(text)["input_ids"]


def _check_episodes(config: Config, task: Task) -> None:
    """Refuse what plain responses have and episodes do not, and tools that cannot be described."""
    if isinstance(task, HasPlayers) and config.posed and config.tasks[config.posed].response_length:
        raise SetupError("task.response_length has no effect on episodes that are played outside")
    played = with_tools(task, config.environment.tools)
    environment = played.environment() if isinstance(played, HasEnvironment) else None
    stays = environment is None or getattr(environment, "replayable", False)
    if config.checkpoint.partial_rollouts and not stays:
        raise SetupError(
            "`checkpoint.partial_rollouts` is true, but the environment of task "
            f"{config.task.name} is not marked `replayable = True` (the same actions lead to the "
            "same answers). Set it to false; then a resume generates groups under way again"
        )
    tools = played.tools if isinstance(played, TaskWithTools) else []
    if tools and len(task) and isinstance(task.train(0).prompt, str):
        raise SetupError(
            f"there are tools ({', '.join(tool['function']['name'] for tool in tools)}), but task "
            f"{config.task.name} has plain-text prompts, which cannot describe them: use "
            "chat messages (for built-in tasks task.options.style=chat)"
        )


def _check_warm_start(config: Config, task: Problems) -> None:
    """Check what is known before the model is made. Raises SetupError."""
    model, letters = "a warm-started model", _Letters()
    warm_start = needed("warm_start", "`model.warm_start`")
    for own, one in parts_of(config, task):
        with naming(own):
            list(_outside_notes(own, one))
            sample = _sample(own, one)
            for place, problem in sample.items():
                if why := warm_start.unfit(problem):
                    raise SetupError(f"task {own.task.name}, {place}: {why}")
            # their notes come again when the model is there
            list(_check_prompts(own, model, sample, letters, None, None))
            list(_check_answers(own, list(sample.values()), letters))
    _check_positions(config, model, {"max_position_embeddings": WARM_START_POSITIONS})
    _check_trained(config, None)
    existing = next(path for path in warm_start.cache_path(config, task).parents if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise SetupError(
            f"`model.warm_start.cache_dir` needs {existing}, which cannot be written: "
            f"{error.strerror}"
        ) from error


def _check_weights(model: Path) -> Iterator[str]:
    """Check that a directory holds whole weight files, those that its index names where it has one,
    and finite weights; a note where not all were looked at. Raises SetupError.
    """
    from safetensors import SafetensorError, safe_open

    index = model / "model.safetensors.index.json"
    files = _indexed(index) if index.is_file() else sorted(model.glob("*.safetensors"))
    if lacking := [file.name for file in files if not file.exists()]:
        others = f" and {counted(len(lacking) - 1, 'other')}" if lacking[1:] else ""
        raise SetupError(
            f"{model} lacks {lacking[0]}{others}, which {index.name} names: fetch the model again"
        )
    if not files and not any(model.glob("*.bin")):
        raise SetupError(
            f"`model.path` is {model}, which has no weights: no *.safetensors and no *.bin file"
        )
    size = sum(file.stat().st_size for file in files)
    for file in files:
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118 - it is no mapping
                    if not _finite(weights.get_slice(name), whole=size <= LOOKED_AT):
                        raise SetupError(
                            f"{file} holds a weight that is not a finite number, in {name}: fetch "
                            "the model again, or take a checkpoint from before"
                        )
        except (SafetensorError, OSError) as error:
            with open(file, "rb") as opened:
                pointer = opened.read(len(_LFS)) == _LFS
            what = (
                f"a pointer of Git LFS instead of the weights: run `git lfs pull` in {model}"
                if pointer
                else f"no whole file of weights ({_one_line(error)}): fetch it again"
            )
            raise SetupError(f"{file} is {what}") from error

    if size > LOOKED_AT:
        yield (
            f"note: {model} has {size / 2**30:.0f} GiB of weights: only the first "
            f"{SOME_ROWS} rows of each tensor were looked at for values that are not finite"
        )


def _finite(weights: Any, *, whole: bool) -> bool:
    """Whether a tensor of a file is finite, or its first rows are."""
    values = weights[:SOME_ROWS] if weights.get_shape() and not whole else weights[...]
    if not values.is_floating_point() or not values.numel():
        return True
    if values.element_size() == 1:  # torch compares no float8
        values = values.float()
    return all(bool(one.isfinite()) for one in values.aminmax())


def _indexed(index: Path) -> list[Path]:
    """Return the files that an index of weights names. Raises SetupError."""
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SetupError(f"{index} cannot be read: {_one_line(error)}; fetch it again") from error
    return sorted(index.with_name(name) for name in names)


def _architecture(model: str, *, scores: bool = False) -> dict[str, Any]:
    """Return the model's `config.json`, of its language model where it has several. scores: whether
    it is to be a sequence classifier with one label.
    """
    from transformers.utils import cached_file

    try:
        path = cached_file(model, "config.json")
    except OSError as error:
        reason = _one_line(error).partition(". ")[0]
        raise SetupError(
            f"`model.path` is {model}, which cannot be loaded: {reason}. Name a model of "
            "the hub, or a local directory"
        ) from error
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SetupError(
            f"`model.path` is {model}, whose config.json cannot be read: {_one_line(error)}"
        ) from error
    if not isinstance(values, dict):
        raise SetupError(f"`model.path` is {model}, whose config.json is no JSON object")
    names = [name for name in values.get("architectures") or [] if isinstance(name, str)]
    labels = values.get("num_labels", len(values.get("id2label", "12")))
    classifies = any(name.endswith("ForSequenceClassification") for name in names)
    if scores and not (classifies and labels == 1):
        found = f"with {counted(labels, 'label')}" if classifies else ", ".join(names)
        raise SetupError(
            f"{model} is a model {found}: a reward model is a sequence classifier with one label"
        )
    if scores:
        return values
    if values.get("is_encoder_decoder") or (names and all(map(_OTHER_HEAD.search, names))):
        raise SetupError(
            f"`model.path` is {model}, a {', '.join(names) or values.get('model_type')}, which "
            "does not continue a text: name a causal language model"
        )
    inner = values.get("text_config")
    return inner if isinstance(inner, dict) else values


def _tokenizer(model: str, *, trust_remote_code: bool) -> Any:
    """Load the tokenizer from `tokenizer.json`, or else from the model's other files or code."""
    from transformers import PreTrainedTokenizerFast
    from transformers.utils import cached_file

    try:
        look_up = partial(cached_file, model, _raise_exceptions_for_missing_entries=False)
        found = next((name for name in TOKENIZERS if look_up(name) is not None), None)
        if found == TOKENIZERS[0]:
            return PreTrainedTokenizerFast.from_pretrained(model)
        if found is None:  # the library would make an empty one
            raise FileNotFoundError(f"there is none of {', '.join(TOKENIZERS)}")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    # the library's parsers raise anything, plain Exception included, for files that are not a
    # tokenizer's
    except Exception as error:
        raise SetupError(
            f"the tokenizer of {model} cannot be loaded: {_one_line(error)}; a model needs "
            "its tokenizer in the same directory"
        ) from error


def _check_positions(config: Config, model: str, architecture: dict[str, Any]) -> None:
    rope = architecture.get("rope_scaling") or architecture.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
    if kind in _SWITCHED_ROPE:
        key = _SWITCHED_ROPE[kind]
        limit = rope.get(key, architecture.get(key))
        if isinstance(limit, int) and config.rollout.longest_row > limit:
            raise SetupError(
                f"{config.rollout.longest_row_in_words} tokens, but {model} has {key} {limit} and "
                f"rope type {kind}: behind that, engine and learner would compute short sequences "
                "with different positions. Make them shorter, or train another model"
            )
        return
    limit = _limit(architecture)
    if kind in _PLAIN_ROPE and isinstance(limit, int) and config.rollout.longest_row > limit:
        raise SetupError(
            f"{config.rollout.longest_row_in_words} tokens, but {model} has "
            f"max_position_embeddings {limit}: make them shorter, or train another model"
        )


def positions(model: str) -> int:
    """Return how many positions a model has; as good as any number where it does not say."""
    with quiet_hub():
        found = _limit(_architecture(model))
    return found if isinstance(found, int) else sys.maxsize


def _limit(architecture: dict[str, Any]) -> Any:
    return architecture.get("max_position_embeddings", architecture.get("n_positions"))


def _check_vocabulary(model: str, tokenizer: Any, rows: int, ends: list[int]) -> None:
    """Refuse ids without an embedding row, except unused added tokens, which some models have."""
    added = set(tokenizer.added_tokens_decoder)
    beyond = {
        index: token
        for token, index in tokenizer.get_vocab().items()
        if index >= rows and (index not in added or index in ends)
    }
    if beyond:
        index = min(beyond)
        raise SetupError(
            f"model and tokenizer of {model} do not fit: the tokenizer gives token ids up to "
            f"{max(beyond)} ({beyond[index]!r} is {index}), the model has {rows} (vocab_size in "
            "config.json): use the tokenizer that the model was trained with"
        )


def _check_prompts(
    config: Config,
    model: str,
    sample: dict[str, Problem],
    tokenizer: Any,
    rows: int | None,
    chat: ChatFormat | None,
) -> Iterator[str]:
    limit = config.rollout.prompt_length
    too_long: list[tuple[int, str, Problem]] = []
    for place, problem in sample.items():
        ids = _encoded(config, model, tokenizer, problem, chat)
        if isinstance(rows, int) and max(ids, default=0) >= rows:
            raise SetupError(
                f"model and tokenizer of {model} do not fit: {place} has "
                f"token id {max(ids)}, the model has {rows} "
                "(vocab_size in config.json): use the tokenizer that the model was trained with"
            )
        if not ids:
            raise SetupError(
                f"{place} of task {config.task.name} is an empty prompt: "
                "there is no token to begin with"
            )
        if len(ids) > limit:
            too_long.append((len(ids), place, problem))
    if not too_long:
        return
    longest, place, problem = max(too_long, key=lambda entry: entry[0])
    found = (
        f"{len(too_long)} of {len(sample)} sampled prompts have more than `rollout.prompt_length` "
        f"{limit} tokens, {place} has {longest} ({_start(problem)})"
    )
    if len(too_long) > config.task.max_bad_fraction * len(sample):
        raise SetupError(
            f"{found}: raise rollout.prompt_length, take them out of the data, or leave them out "
            f"(task.max_bad_fraction, now {config.task.max_bad_fraction:g})"
        )
    yield (
        f"note: {found}; they will be left out, as task.max_bad_fraction "
        f"{config.task.max_bad_fraction:g} allows"
    )


def _check_answers(config: Config, sample: list[Problem], tokenizer: Any) -> Iterator[str]:
    """Compare `rollout.response_length` with the answers that are known: the reference, where it is
    a text, and the worked solution, each with the token that ends a response.
    """
    limit, shortest, cut, known = config.rollout.response_length, None, 0, 0
    for problem in sample:
        answers = [text for text in (problem.reference, problem.solution) if isinstance(text, str)]
        if not answers:
            return  # what an answer looks like is the task's own business
        lengths = [len(tokenizer.encode(text, add_special_tokens=False)) + 1 for text in answers]
        shortest = min([*lengths, *([] if shortest is None else [shortest])])
        known += problem.solution is not None
        cut += problem.solution is not None and lengths[-1] > limit
    if shortest is not None and shortest > limit:
        raise SetupError(
            f"`rollout.response_length` is {limit}, but the shortest answer of the sampled "
            f"problems has {shortest} tokens with its end: no response could be finished; raise it"
        )
    if 2 * cut > known:
        yield (
            f"note: {cut} of {known} sampled solutions have more than `rollout.response_length` "
            f"{limit} tokens with their end"
        )


def _check_given(
    config: Config, sample: dict[str, Problem], tokenizer: Any, *, plays: bool
) -> None:
    """Check what problems must have for demonstrations, and for a teacher that is told more."""
    algorithm, limit = config.algorithm, config.rollout.prompt_length
    template = algorithm.distill.teacher_prompt
    for key, used in (
        ("sft_loss_coef", bool(algorithm.sft_loss_coef)),
        ("distill.teacher_prompt", template is not None),
    ):
        if used and plays:
            raise SetupError(
                f"`algorithm.{key}` needs plain prompts, and task {config.task.name} has episodes"
            )
    solved = any(isinstance(problem.solution, str) for problem in sample.values())
    if algorithm.sft_loss_coef and algorithm.sft_model is None and not solved:
        raise SetupError(
            f"no sampled problem of task {config.task.name} has a `solution`, which "
            "`algorithm.sft_loss_coef` imitates: add it to the rows, or set `algorithm.sft_model`"
        )
    if template is None:
        return
    bad: list[str] = []
    for place, problem in sample.items():
        try:
            length = len(prompt_ids(tokenizer, teacher_prompt(problem, template)))
        except FrozenFailed:
            bad.append(f"{place} has no `solution`, add it to the rows")
            continue
        if length >= limit >= len(prompt_ids(tokenizer, problem.prompt)):
            bad.append(f"{place} has {length} tokens with it, raise `rollout.prompt_length`")
    if len(bad) > config.task.max_bad_fraction * len(sample):
        raise SetupError(
            f"`algorithm.distill.teacher_prompt` does not fit {len(bad)} of {len(sample)} sampled "
            f"problems: {bad[-1]}"
        )


def _check_trained(config: Config, model: str | None) -> None:
    """Where only a part is trained, build the model without its weights, and look for the layers
    that settings name.
    """
    chosen = config.model
    if not chosen.freeze and chosen.lora is None and chosen.router != "frozen":
        return
    from async_grpo.run.preflight.memory import shape_of

    try:
        shape_of(config, model)
    except SetupError:  # what `model.freeze` or `model.lora` names
        raise
    except (OSError, ValueError) as error:
        raise SetupError(
            f"`model.path` is {model}, of which no model can be made: {_one_line(error)}"
        ) from error


def _sample(config: Config, task: Task) -> dict[str, Problem]:
    """At most `SAMPLE` training problems, spread evenly, by their names."""
    found = {}
    for index in range(0, len(task), -(-len(task) // SAMPLE)):
        place = f"training problem {index}"
        try:
            found[place] = task.train(index)
        except Exception as error:
            raise SetupError(
                f"task {config.task.name} cannot pose {place}: {type(error).__name__}: "
                f"{_one_line(error)}"
            ) from error
    return found


def _held_out_sample(config: Config, task: Task) -> dict[str, Problem]:
    """At most `SAMPLE` problems of the evaluation, spread evenly, by their names."""
    problems = task.evaluation(config.evaluation.max_samples)
    step = max(1, -(-len(problems) // SAMPLE))
    return {f"held-out problem {n}": problems[n] for n in range(0, len(problems), step)}


def _chat(config: Config, tokenizer: Any, task: Task) -> ChatFormat | None:
    """Return how the chats of episodes are written, which may describe tools."""
    played = with_tools(task, config.environment.tools)
    if not isinstance(played, HasEnvironment):
        return None
    return chat_format_of(config, tokenizer, played, reads=False)


def _encoded(
    config: Config, model: str, tokenizer: Any, problem: Problem, chat: ChatFormat | None
) -> list[int]:
    if not isinstance(problem.prompt, str) and tokenizer.chat_template is None:
        raise SetupError(
            f"task {config.task.name} asks in chat messages, but the tokenizer of {model} "
            "has no chat template; "
            "use an instruction-tuned model, or the task's plain style (task.options.style=plain)"
        )
    try:
        if chat is not None and not isinstance(problem.prompt, str):
            return chat.prompt(problem.prompt)
        return prompt_ids(tokenizer, problem.prompt)
    # templates are programs: some refuse a system prompt, or roles that they do not know
    except Exception as error:
        raise SetupError(
            f"the tokenizer of {model} cannot make a prompt of task {config.task.name}: "
            f"{_one_line(error)}; is its chat template made for "
            "these messages (task.options.system='' leaves the system prompt out)?"
        ) from error


def _start(problem: Problem) -> str:
    """Return the beginning of a prompt, of its last message."""
    text = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]
    return repr(shortened(text, 60))


def _one_line(error: BaseException) -> str:
    return shortened(" ".join(str(error).split()) or type(error).__name__, ERROR_CHARS)
