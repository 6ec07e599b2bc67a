"""The command line: `async-grpo VERB ...`, also as `python -m async_grpo VERB ...`.

Runs in: a terminal, or a job of Ray. Hides where a verb's code is: it is imported when the verb is
asked for, by name, so that the core does without the tools. Each home has

    DESCRIPTION                 a sentence, of `VERB --help`
    arguments(parser)           what the verb takes; imports nothing large
    run(options) -> int         what it does; its exit code

Invariants: exit codes are those of `async_grpo.errors`, by one mapping (`ended`); the spellings of
before answer for one release, with the new one.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from importlib import metadata

from async_grpo.config.command_line import OPTIONS_OF_BEFORE, Parser
from async_grpo.errors import EXIT_MEANING, RunError
from async_grpo.runtime.stopping import stop_early

PROGRAM = "async-grpo"
VERBS = {
    "train": ("async_grpo.run.command", "train what a YAML file says; resumes by itself"),
    "check": ("async_grpo.tools.check.command", "say what a run would be, and start nothing"),
    "predict": ("async_grpo.tools.predict.command", "predict throughput, idle time and staleness"),
    "status": ("async_grpo.tools.status", "show how a run is doing, from another shell"),
    "watch": ("async_grpo.tools.watch.command", "show runs in a browser, live, side by side"),
    "report": ("async_grpo.tools.report.command", "write a run's report, a page with pictures"),
    "inspect": ("async_grpo.tools.inspect.command", "show what became of a run's groups"),
    "retrain": ("async_grpo.run.retrain", "train the learner alone on a run's recorded batches"),
    "eval": ("async_grpo.tools.evaluate.command", "measure accuracy on held-out problems"),
    "export": ("async_grpo.tools.export", "copy a checkpoint's model to a separate directory"),
    "serve": ("async_grpo.tools.serve.command", "serve a policy to an agent, and show episodes"),
    "migrate": ("async_grpo.tools.migrate.command", "convert a configuration of another system"),
    "recipes": ("async_grpo.config.recipes", "list the recipes"),
    "doctor": ("async_grpo.tools.doctor.command", "say what this machine has, and what is missing"),
}
"""Verb -> the module that has it, and what it does."""
_SHORT = {*VERBS} - {"train", "retrain"}
"""What a signal may end at any moment."""
_CANNOT_BE_FINALISED = ("eval", "serve")
"""vLLM's client cannot be finalised by an interpreter that ends."""


def script() -> None:
    """Run the command line of this process, and end it."""
    verb = "".join(sys.argv[1:2])
    if as_now("train", sys.argv[1:])[0] == "train" and verb not in _SHORT:
        stop_early()  # what follows takes a second to import
    with process(verb) as ending:
        ending.code = main()


def old_command(old: str, verb: str, words: Sequence[str]) -> None:
    """Do what a command of before says, say the new one, and end the process."""
    with process(verb) as ending:
        ending.code = main(old_spelling(old, verb, words))


@contextlib.contextmanager
def process(verb: str) -> Iterator[SystemExit]:
    """Inside the block do what this process is for, and set the exit code with which it ends."""
    ending = SystemExit()
    try:
        try:
            yield ending
        except SystemExit as end:  # of --help, or of words that make no sense
            ending.code = end.code
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        ending.code = _unread()
    code = ending.code
    if isinstance(code, str):  # as an interpreter does that ends
        print(code, file=sys.stderr)
        code = 1
    if verb in _CANNOT_BE_FINALISED:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code or 0)
    sys.exit(code)


def _unread() -> int:
    """Write no more, where `| head` has read enough; the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Do what the words say; return the exit code, whatever happens."""
    verb, words = verb_of(list(sys.argv[1:] if words is None else words))
    if isinstance(verb, int):
        return verb
    name, _ = VERBS[verb]
    try:
        home = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        return _said(f"`{PROGRAM} {verb}` is not installed here: there is no {error.name}")
    parser = Parser(prog=f"{PROGRAM} {verb}", description=home.DESCRIPTION)
    home.arguments(parser)
    options = parser.read(words)
    try:
        return int(home.run(options))
    except BrokenPipeError:
        return _unread()
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # noqa: BLE001 - every error ends the verb, explained
        return ended(error)


def verb_of(words: list[str]) -> tuple[str | int, list[str]]:
    """Return the verb and its words; the exit code in its place where that is all."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        return _said("the current directory was removed: change to one that exists"), []
    if not {"", here} & set(sys.path):  # as `python -m` does; a console script does not
        sys.path.insert(0, here)
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0, []
    if words[0] == "--version":
        print(f"async_grpo {_version()}")
        return 0, []
    if words[0] in VERBS:
        return words[0], words[1:]
    return _no_verb(words)


def ended(error: Exception) -> int:
    """Say what ended a verb; its exit code. What nobody foresaw has its traceback."""
    if isinstance(error, RunError):
        return _said(str(error), error.exit_code)
    traceback.print_exception(error)
    return _said(f"exit code 1: {EXIT_MEANING[1]}", 1)


def overview() -> str:
    """Return the help without a verb."""
    lines = [f"  {verb:10}{text}" for verb, (_, text) in VERBS.items()]
    return "\n".join(
        [
            f"usage: {PROGRAM} VERB ...   (also: python -m async_grpo VERB ...)",
            "",
            "Asynchronous reinforcement learning of language models.",
            "",
            *lines,
            "",
            f"{PROGRAM} VERB --help says what a verb takes; {PROGRAM} --version says the version.",
        ]
    )


def _no_verb(words: list[str]) -> tuple[str | int, list[str]]:
    """Answer a first word that is no verb: a configuration is trained, as it was before."""
    from async_grpo.config.recipes import recipes

    first = words[0]
    is_option = as_now("train", words)[0] != "train"
    if is_option or first.endswith((".yaml", ".yml")) or first in recipes():
        verb, *words = old_spelling(PROGRAM, "train", words)
        return verb, words
    close = difflib.get_close_matches(first, [*VERBS, *recipes()], n=1)
    meant = ""
    if close:
        meant = f" Did you mean `{PROGRAM} {'train ' if close[0] not in VERBS else ''}{close[0]}`?"
    return _said(f"{first} is no verb.{meant} The verbs are {', '.join(VERBS)}."), []


def old_spelling(old: str, verb: str, words: Sequence[str]) -> list[str]:
    """Return the words of now for a spelling of before, and say them."""
    given, (verb, words) = verb, as_now(verb, words)
    if verb != given:
        old = next(option for option, now in OPTIONS_OF_BEFORE.items() if now == verb)
    print(f"note: `{old}` is `{PROGRAM} {verb}` now", file=sys.stderr)
    return [verb, *words]


def as_now(verb: str, words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the verb and the words for options of `train` that are verbs now."""
    words = list(words)
    options = [word.split("=")[0] for word in words]
    option = next((one for one in OPTIONS_OF_BEFORE if one in options), None)
    if verb != "train" or option is None:
        return verb, words
    at = options.index(option)
    if words[at:] == ["--replay"]:  # of which run?
        return verb, words
    _, given, run_dir = words.pop(at).partition("=")
    if option == "--replay":
        run_dir = run_dir if given else "".join(words[at : at + 1])
        del words[at : at + (not given)]
        values = [i + 1 for i, word in enumerate(words) if word == "--after"]
        for i, word in enumerate(words):
            if i not in values and "=" not in word and not word.startswith("-"):
                words[i : i + 1] = ["--config", word]
                break
        words.insert(0, run_dir)
    return OPTIONS_OF_BEFORE[option], [] if option == "--recipes" else words


def _version() -> str:
    try:
        return metadata.version("async_grpo")
    except metadata.PackageNotFoundError:  # on PYTHONPATH, as on the nodes of a cluster
        return "(not installed)"


def _said(message: str, code: int = 2) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
