"""`async-grpo export [CHECKPOINT] OUT`: a checkpoint's model in a directory of its own, and with
`--push owner/name` on the hub.

Runs in: a process of its own, on any machine that sees the checkpoint; it only reads there. Exit
code 2 with one sentence for what cannot be exported. Invariants: every file is what the manifest of
the checkpoint says it is; OUT is there whole or not at all.

A checkpoint of a run with adapters has both: the adapters alone, for peft, and the model with the
adapters merged into its weights.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

from async_grpo.config.command_line import RUNS, Parser
from async_grpo.errors import SetupError
from async_grpo.observe.console.status_file import newest_run
from async_grpo.run.checkpoint import directory
from async_grpo.run.checkpoint.directory import CheckpointError
from async_grpo.runtime.text import counted

ADAPTER = f"{directory.MODEL}/adapter"


DESCRIPTION = "Copy the model of a checkpoint into a directory that Hugging Face tools load."


def arguments(parser: Parser) -> None:
    """Take a checkpoint or a run, and where to."""
    source = "a checkpoint (.../checkpoints/step_000250), or a run directory: its newest"
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        nargs="?",
        default=RUNS,
        help=f"{source} (default: of the newest run in {RUNS})",
    )
    out = "directory to make; with --push it may be left out"
    parser.add_argument("out", metavar="OUT", type=Path, nargs="?", help=out)
    merge = "of a run with adapters (model.lora), the model with them merged, not them alone"
    parser.add_argument("--merge-lora", action="store_true", help=merge)
    parser.add_argument("--push", metavar="owner/name", help="repository of the hub that gets it")
    private = "make that repository private, if it is not there yet"
    parser.add_argument("--private", action="store_true", help=private)


def run(options: argparse.Namespace) -> int:
    """Export it; the exit code. Raises SetupError."""
    from async_grpo.tools import hub

    source, out, name = options.checkpoint, options.out, options.push
    if name is not None:
        hub.check_target(name)
    elif out is None:
        source, out = RUNS, source
    if source == RUNS:
        source = newest_run(source)
    with tempfile.TemporaryDirectory() as place:
        print(export(source, out or Path(place, "model"), options))
    return 0


def export(source: Path, out: Path, options: argparse.Namespace) -> str:
    """Copy the model of a checkpoint to `out`, and push it if asked to; return a line that says how
    to load it. Raises SetupError.
    """
    from async_grpo.tools import hub

    path, out, name = directory.find(source), out.absolute(), options.push
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SetupError(f"{out} is there already: give a directory that is empty or new")
    try:
        manifest = directory.verify(path)
    except (CheckpointError, OSError) as error:
        raise SetupError(f"{path} cannot be exported: {error}") from error
    has_adapter = any(file.startswith(f"{ADAPTER}/") for file in manifest["files"])
    if options.merge_lora and not has_adapter:
        raise SetupError(f"{path} has no adapters to merge: leave --merge-lora out")
    part = ADAPTER if has_adapter and not options.merge_lora else directory.MODEL
    draft = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        leave = None if part == ADAPTER else shutil.ignore_patterns("adapter")
        copy = shutil.copy2 if options.out or not name else os.symlink
        shutil.copytree(path.absolute() / part, draft, ignore=leave, copy_function=copy)
        if out.exists():
            out.rmdir()
        os.replace(draft, out)
    except OSError as error:
        raise SetupError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    copied = [file for file in out.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in copied) / 2**20
    load = (
        f"PeftModel.from_pretrained(base_model, {name or str(out)!r})"
        if part == ADAPTER
        else f"AutoModelForCausalLM.from_pretrained({name or str(out)!r})"
    )
    where = f"in {out}"
    if name:
        model = {"path": path, "manifest": manifest, "load": load}
        where = f"at {hub.push(out, name, private=options.private, **model)}"
    what = "adapters" if part == ADAPTER else "model"
    return (
        f"{what} of step {manifest['step']}: {counted(len(copied), 'file')}, {size:,.1f} "
        f"MiB, {where}; load with {load}"
    )
