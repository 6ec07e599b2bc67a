"""From a YAML file and overrides to a complete `Config`; a mistake becomes at most two lines.

Runs in: driver (imports pydantic and yaml only). Hides YAML's and pydantic's error reports,
did-you-mean, and where a run may write. Invariants: a user's mistake leaves `load_config`,
`resolve` and `preflight_files` as `ConfigError` only; after `resolve`, `run.dir` is absolute, has
no placeholders, and lies outside the package that a Ray job unpacks and throws away.
"""

from __future__ import annotations

import copy
import difflib
import glob
import itertools
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from async_grpo.config import yaml12
from async_grpo.config.checks import RuleError
from async_grpo.config.docs import Setting, options, settings, show, single_line, spelled
from async_grpo.config.plugins import SettingError
from async_grpo.config.recipes import locate, suggestion
from async_grpo.config.schema import Config, MixedTask, TaskConfig
from async_grpo.config.section import Section
from async_grpo.config.stored import answers, renewed
from async_grpo.config.unused import unused
from async_grpo.errors import SetupError
from async_grpo.runtime.parts import part

UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
"""What pydantic calls an unknown key of a section and of options."""


class ConfigError(SetupError, ValueError):
    """A mistake in the configuration, in at most two lines, with what to do."""


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    now: datetime | None = None,
    cwd: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Read `path` (a file, or a recipe's name; empty is no settings), apply `section.key=value`
    overrides in order (YAML; the whole value is replaced), check everything and resolve `run.dir`.
    Raises ConfigError.
    """
    path = Path(locate(path))
    data, lines = _read_file(path)
    if _is_stored(path):
        data = renewed(data)
    places = {key: f"{path}, line {line}" for key, line in lines.items()}
    return _built(data, places, str(path), overrides, now=now, cwd=cwd, environ=environ)


def load_settings(
    settings: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    source: str = "settings",
    cwd: str | Path | None = None,
) -> Config:
    """Build a configuration from a mapping of sections as `load_config` does from a file. source:
    what messages call it. Raises ConfigError.
    """
    return _built(copy.deepcopy(dict(settings)), {}, source, overrides, cwd=cwd)


def _built(
    data: dict[str, Any],
    places: dict[tuple[str, ...], str],
    path: str,
    overrides: Sequence[str],
    **where: Any,
) -> Config:
    _refuse_common(data, overrides)
    for text in overrides:
        _apply_override(data, text, places)
    for setting in settings().values():
        if setting.section and setting.default is not None:
            _empty_section(data, setting.path)
    for key, told in answers(data):
        raise ConfigError(
            f"{_place(key, places, path)}: `{_dotted(key)}` is of an earlier version.\n"
            f"{told}. (`async-grpo migrate FILE` writes a whole file anew.)"
        )
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(error, data, places, path)) from None
    try:
        resolved = resolve(config, **where)
    except OSError as error:  # a name that no file can have
        raise ConfigError(f"{path}: {error.filename}: {error.strerror}.") from None
    _refuse_unused(resolved, places, path)
    return resolved


def dump(config: Config) -> str:
    """`config` as YAML with every setting; `load_config` reads it back equal."""
    return yaml12.write(config.model_dump(mode="python"))


# ---- reading ----


def _refuse_common(data: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Refuse what would not reach stored `tasks`, each of which has all of its values."""
    tasks = data.get("tasks") or {}
    given = [text.partition("=")[0].strip() for text in overrides]
    common = any(key.partition(".")[0] == "task" for key in given)
    if common and "tasks" not in given and isinstance(tasks, Mapping):
        for name, one in tasks.items():
            if isinstance(one, Mapping) and TaskConfig.model_fields.keys() <= one.keys():
                raise ConfigError(
                    "`task` would not change the tasks of this run, which have stored all of their "
                    f"values: say tasks.{name}.KEY=value, for each of them."
                )


def _read_file(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"The configuration file {path} does not exist (current directory: {os.getcwd()})."
            + suggestion(path)
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"The configuration file {path} cannot be read: {reason}.") from None
    if path.suffix in (".toml", ".ini", ".py"):
        raise ConfigError(f"{path}: a configuration is YAML (`run:`, then its keys, indented).")
    try:
        data, lines = yaml12.read(text)
    except yaml12.YamlError as error:
        raise ConfigError(
            f"{path}{f', line {error.line}' if error.line else ''}: this is not valid "
            f"YAML: {single_line(str(error))}."
        ) from None
    if data is None:
        return {}, {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: a configuration is a mapping of sections (`run:`, `rollout:`, ...), not "
            f"{show(data)}."
        )
    return data, lines


def _apply_override(data: dict[str, Any], text: str, places: dict[tuple[str, ...], str]) -> None:
    name, equals, raw = text.partition("=")
    path = tuple(name.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(
            f"The override {show(text)} is not of the form section.key=value (for example "
            "rollout.group_size=8)."
        )
    try:
        value, _ = yaml12.read(raw)
    except yaml12.YamlError as error:
        raise ConfigError(
            f"The value of the override {show(text)} is not valid YAML: {single_line(str(error))}."
        ) from None
    node = data
    for end, key in enumerate(path[:-1], 1):
        inner, setting = node.get(key), settings().get(".".join(path[:end]))
        if isinstance(inner, str) and setting is not None and setting.kind:
            inner = {"name": inner}  # an option of what is chosen by its bare name
        # a copy: aliases in the file share their mapping
        node[key] = dict(inner) if isinstance(inner, dict) else {}
        node = node[key]
    setting, before = settings().get(".".join(path)), node.get(path[-1])
    if setting is not None and setting.kind and isinstance(before, dict) and "name" not in before:
        value = {"name": value, **before} if isinstance(value, str) else value  # in either order
    node[path[-1]] = value
    for depth in range(1, len(path) + 1):
        places[path[:depth]] = f"override {show(text)}"


def _empty_section(data: dict[str, Any], path: tuple[str, ...]) -> None:
    """Take a section whose keys are all commented out (read as null) as empty."""
    node: Any = data
    for key in path[:-1]:
        node = node.get(key) if isinstance(node, dict) else None
    if isinstance(node, dict) and path[-1] in node and node[path[-1]] is None:
        node[path[-1]] = {}


# ---- explaining ----


def _explain(
    error: ValidationError, data: dict[str, Any], places: Mapping[tuple[str, ...], str], file: str
) -> str:
    """Say the first problem in full, unknown keys first (often the cause), and how many others."""
    problems = sorted(
        error.errors(include_url=False), key=lambda problem: problem["type"] not in UNKNOWN_KEY
    )
    first = problems[0]
    path = _at(first)
    more = len({_at(problem) for problem in problems}) - 1
    place = _place(tuple(str(part) for part in path if not isinstance(part, int)), places, file)
    if first["type"] in UNKNOWN_KEY:
        lines = [
            f"{place}: `{_dotted(path)}` is not a setting.",
            _suggest(tuple(map(str, path)), first["input"]),
        ]
    elif first["type"] == "value_error":
        rule = first["ctx"]["error"]
        if isinstance(rule, SettingError):
            return f"{_place(rule.path, places, file)}: {rule}"
        more += len(rule.sentences) - 1 if isinstance(rule, RuleError) else 0
        lines = [f"{place}: {single_line(str(rule))}"]
    else:
        given = "missing" if first["type"] == "missing" else show(first["input"])
        lines = [f"{place}: `{_dotted(path)}` is {given}; allowed is {_known(path).allowed}."]
    if more:
        lines[-1] += f" ({more} more problem{'s' if more > 1 else ''} in this configuration.)"
    return "\n".join(lines)


_KIND = re.compile(r"\w+\[.*\]|bool|int|constrained-int|constrained-float")
"""How pydantic names the kinds of value of a setting that has several."""


def _at(problem: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return where the value is, without the kinds that pydantic tried for it one by one."""
    path = problem["loc"]
    kinds = (end for end, part in enumerate(path) if _KIND.fullmatch(str(part)))
    return next((path[:end] for end in kinds if _dotted(path[:end]) in settings()), path)


def _place(path: tuple[str, ...], places: Mapping[tuple[str, ...], str], file: str) -> str:
    """Where the setting, or the mapping that holds it, was written."""
    ends = range(len(path), 0, -1)
    return next((places[path[:end]] for end in ends if path[:end] in places), file)


def _known(path: tuple[Any, ...]) -> Setting:
    """Return the setting that holds `path`: itself, or the list or mapping that it lies in."""
    for end in range(len(path), 0, -1):
        found = settings().get(_dotted(path[:end]))
        if found is not None:
            return found
    raise AssertionError(f"an error about {path}, which is no setting")


def _suggest(path: tuple[str, ...], value: Any) -> str:
    """One line that helps with the unknown key `path`."""
    known = settings()
    if odd := next(
        (letter for letter in path[-1] if letter != " " and not letter.isprintable()), ""
    ):
        return f"There is a character U+{ord(odd):04X} in it: write a plain space, or nothing."
    if len(path) == 1 and path[0] in known:
        section, _, key = path[0].rpartition(".")
        return f"In a file, it is `{key}:` inside `{section}:` (with a dot it is an override)."
    if any(part.isdigit() for part in path[:-1]):  # in an entry of a list
        return f"`{_known(path).name}` is {_known(path).allowed}."
    parent = ".".join(path[:-1])
    siblings = [name for name in known if name.rpartition(".")[0] == parent]
    siblings = siblings or [f"{parent}.{key}" for key in _keys_inside(path[:-1])]
    by_leaf: dict[str, list[str]] = {}
    for name in (*known, *options()):
        by_leaf.setdefault(name.rpartition(".")[2], []).append(name)
    answer, elsewhere = part("peer_answer"), part("peer_names")
    peers: Mapping[str, str] = {} if elsewhere is None else elsewhere.PEERS
    for inner in (path, *_leaves(path, value)):
        said: str = "" if answer is None else answer(inner, _inside(value, inner[len(path) :]))
        if said:
            return said
    leaf = path[-1].strip().lower().replace("-", "_")
    close = difflib.get_close_matches(
        leaf, [name.rpartition(".")[2] for name in siblings], n=1, cutoff=0.84
    )
    if not close or leaf in peers:
        for inner in (path, *_leaves(path, value)):
            ours = spelled(peers.get(inner[-1], "")) or _one_home(by_leaf.get(inner[-1], []), path)
            if ours:
                key = inner[-1] if inner == path else _dotted(inner)
                return f"`{key}` is `{ours}` here."
        close = difflib.get_close_matches(
            leaf, [name.rpartition(".")[2] for name in siblings], n=1, cutoff=0.6
        )
    if close:
        return f"Did you mean `{_dotted((*path[:-1], close[0]))}`?"
    near = difflib.get_close_matches(leaf, [*by_leaf, *peers], n=1, cutoff=0.8)
    if near:
        ours = spelled(peers.get(near[0], "")) or " or ".join(by_leaf[near[0]][:3]).replace(
            " or ", "` or `"
        )
        return f"Did you mean `{ours}`?"
    keys = ", ".join(name.rpartition(".")[2] for name in siblings)
    return f"The keys of `{parent}` are {keys}." if parent else f"The sections are {keys}."


def _keys_inside(path: tuple[str, ...]) -> list[str]:
    """Return the keys of the section at `path`, which is in a mapping of sections (`frozen`)."""
    here: Any = Config
    for key in path:
        if get_origin(here) is dict:
            here = get_args(here)[1]
        elif isinstance(here, type) and issubclass(here, Section) and key in here.model_fields:
            here = here.model_fields[key].annotation
    return list(here.model_fields) if isinstance(here, type) and issubclass(here, Section) else []


def _one_home(homes: list[str], path: tuple[str, ...]) -> str:
    """Return the setting meant by a known key in the wrong place; empty where several sections have
    it.
    """
    near = [name for name in homes if name.split(".")[0] == path[0]] or homes
    shallow = [name for name in near if name.count(".") == min(name.count(".") for name in near)]
    return "` or `".join(map(spelled, shallow)) if 1 <= len(shallow) <= 2 else ""


def _leaves(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, ...]]:
    """Paths of the values inside an unknown section."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(inner, dict) and inner:
            yield from _leaves((*path, key), inner)
        else:
            yield (*path, key)


def _inside(value: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _dotted(path: Sequence[Any]) -> str:
    return single_line(".".join(str(part) for part in path))


def _refuse_unused(config: Config, places: Mapping[tuple[str, ...], str], file: str) -> None:
    stored = Path(config.run.dir) / "config.yaml"  # a run that has begun goes on as it began
    before = renewed(_read_file(stored)[0]) if os.path.isfile(stored) else {}
    overridden = {path for path, place in places.items() if place.startswith("override ")}
    found = list(unused(config, before=before, overridden=overridden))
    for path, sentence in found[:1]:
        more = len(found) - 1
        others = f" ({more} more problem{'s' if more > 1 else ''} in this configuration.)"
        raise ConfigError(f"{_place(path, places, file)}: {sentence}{others if more else ''}")


# ---- resolving ----


def resolve(
    config: Config,
    *,
    now: datetime | None = None,
    cwd: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Fill `run.dir`: `{name}`, `{time}` (YYYYmmdd-HHMMSS), `~`, and make it absolute. Idempotent.
    Raises ConfigError.

    A relative directory is relative to `cwd`; inside the throw-away package of a Ray job to
    `$ASYNC_GRPO_HOME`, else `~/async_grpo`. Models and data that exist under `cwd` become absolute
    too, since the run's processes have other current directories; not inside such a package, which
    every node unpacks in a place of its own and runs in.
    """
    now = now or datetime.now()
    here = Path(cwd) if cwd is not None else Path.cwd()
    env = os.environ if environ is None else environ
    values = {"name": config.run.name, "time": now.strftime("%Y%m%d-%H%M%S")}
    _check_run_dir(config.run.dir, values)
    directory = _expand(re.sub(r"\{(\w+)\}", lambda match: values[match[1]], config.run.dir), env)
    if not directory.is_absolute():
        directory = (_home(env) if _throw_away(here) else here) / directory
    directory = Path(os.path.normpath(directory))
    if _throw_away(directory):
        raise ConfigError(
            f"`run.dir` is {show(str(directory))}, inside the package that Ray deletes after the "
            "job.\nGive a directory outside it (run.dir=/path/that/stays), or a relative one "
            "with ASYNC_GRPO_HOME set."
        )
    changes: dict[str, dict[str, Any]] = {"run": {"dir": str(directory)}}
    tasks = dict(config.tasks)
    if not _throw_away(here):
        for section, names in (("model", ("path", "reference")), ("task", ("train", "eval"))):
            given = getattr(config, section).model_dump(include=set(names))
            changes[section] = {
                name: str(here / path)
                for name, path in given.items()
                if path and _is_there(here / path)
            }
        tasks = {name: _absolute(one, here) for name, one in config.tasks.items()}
        other = config.evaluation.task
        if other is not None and other.eval is not None and _is_there(here / other.eval):
            changes["evaluation"] = {
                "task": other.model_copy(update={"eval": str(here / other.eval)})
            }
    sections = {
        section: getattr(config, section).model_copy(update=values)
        for section, values in changes.items()
    }
    return config.model_copy(update={**sections, "tasks": tasks})


def _absolute(task: MixedTask, here: Path) -> MixedTask:
    data = {"train": task.train, "eval": task.eval}
    there = {key: str(here / path) for key, path in data.items() if path and _is_there(here / path)}
    return task.model_copy(update=there)


def _home(env: Mapping[str, str]) -> Path:
    home = _expand(env.get("ASYNC_GRPO_HOME") or "~/async_grpo", env)
    if not home.is_absolute():
        raise ConfigError(
            f"ASYNC_GRPO_HOME is {show(str(home))}; inside a Ray job it must be an absolute "
            "directory."
        )
    return home


def _expand(path: str, env: Mapping[str, str]) -> Path:
    if path == "~" or path.startswith("~/"):
        return Path(env.get("HOME") or os.path.expanduser("~")) / path[2:]
    return Path(os.path.expanduser(path))


def _throw_away(path: Path) -> bool:
    """Whether `path` lies where Ray unpacks a job's package, deleted when the job ends."""
    for parts in (path.parts, Path(os.path.realpath(path)).parts):
        if any(part.startswith("_ray_pkg_") for part in parts):
            return True
        if any(
            a.startswith("session_") and b == "runtime_resources"
            for a, b in itertools.pairwise(parts)
        ):
            return True
    return False


# ---- files ----


_OF_A_RUN = ("status.json", "lock.json", "metrics.jsonl", "journal", "checkpoints")
"""What a run has written beside its `config.yaml`, one of them at least."""


def _is_stored(path: Path) -> bool:
    """Whether a start of a run wrote this file."""
    return path.name == "config.yaml" and any(
        os.path.exists(path.parent / name) for name in _OF_A_RUN
    )


def preflight_files(config: Config) -> None:
    """Check the files that a resolved `config` names: models (hub names by form only), data, the
    checkpoint to resume, and whether the run directory can be made. Raises ConfigError.
    """
    for key, model in (
        ("model.path", config.model.path),
        ("model.reference", config.model.reference),
        *((f"frozen.{name}.path", one.path) for name, one in config.frozen.items()),
    ):
        if model is not None:
            _check_model(key, model)
    other = config.evaluation.task
    for key, data in (
        ("task.train", config.task.train),
        ("task.eval", config.task.eval),
        ("evaluation.task.eval", None if other is None else other.eval),
        *((f"tasks.{name}.train", one.train) for name, one in config.tasks.items()),
        *((f"tasks.{name}.eval", one.eval) for name, one in config.tasks.items()),
    ):
        if data is not None:
            _check_data(key, data)
    run_dir = Path(config.run.dir)
    resume, named = config.checkpoint.resume, config.checkpoint.resume_path
    if resume == "never":
        for name in ("config.yaml", "checkpoints"):
            if os.path.exists(run_dir / name):
                raise ConfigError(
                    f"`checkpoint.resume` is never, but {run_dir} already holds a run "
                    f"({name}).\nChoose another run.name or run.dir, remove that directory, or "
                    "set checkpoint.resume=auto to continue it."
                )
    elif named is not None and not os.path.exists(os.path.expanduser(named)):
        raise ConfigError(
            f"`checkpoint.resume` is {show(resume)}; allowed is auto, never, the path of an "
            "existing checkpoint, or the address of a copy (scheme://...)."
        )
    if os.path.exists(run_dir / "config.yaml") and not _is_stored(run_dir / "config.yaml"):
        raise ConfigError(
            f"`run.dir` is {show(str(run_dir))}, which holds a config.yaml that no run wrote; a "
            "run would replace it. Choose another directory."
        )
    existing = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(
            f"`run.dir` is {show(str(run_dir))}, which cannot be created or written: "
            f"{error.strerror}."
        ) from None


def _check_run_dir(text: str, values: Mapping[str, str]) -> None:
    unknown = [name for name in re.findall(r"\{([^{}]*)\}", text) if name not in values]
    if unknown or not text.strip() or "\0" in text:
        raise ConfigError(
            f"`run.dir` is {show(text)}; allowed is a directory, with {{name}} and "
            "{time} as placeholders."
        )
    if "://" in text:
        raise ConfigError(
            f"`run.dir` is {show(text)}; allowed is a directory of this machine, or of "
            "storage that is mounted in its file system."
        )
    if re.search(r"\$\w", text):
        raise ConfigError(
            f"`run.dir` is {show(text)}, and variables of the environment are not "
            "replaced: write the path, or begin it with ~."
        )


def _is_there(path: str | Path) -> bool:
    """Whether a file or directory has this name, or matches this pattern."""
    return Path(path).exists() or any(glob.iglob(str(path), recursive=True))


def _looks_local(text: str) -> bool:
    return text.startswith(("/", ".", "~"))


def _check_data(key: str, data: str) -> None:
    local = data.endswith((".jsonl", ".json")) or _looks_local(data)
    path = os.path.expanduser(data).partition(":")[0]
    if local and "://" not in data and not _is_there(path):
        raise ConfigError(
            f"`{key}` is {show(data)}, and there is no such file (current directory: "
            f"{os.getcwd()})."
        )


def _check_model(key: str, model: str) -> None:
    path = os.path.expanduser(model)
    if _looks_local(model) or os.path.exists(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            what = "has no config.json" if os.path.isdir(path) else "is not a directory"
            if path.endswith(".gguf") or glob.glob(os.path.join(glob.escape(path), "*.gguf")):
                what = "is GGUF, with quantised weights that cannot be trained"
            raise ConfigError(
                f"`{key}` is {show(model)}, which {what}; allowed is a directory of a Hugging "
                "Face model, or a hub name."
            )
    elif not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model):
        raise ConfigError(
            f"`{key}` is {show(model)}; allowed is an existing directory, or a hub name of the "
            "form organisation/name."
        )
