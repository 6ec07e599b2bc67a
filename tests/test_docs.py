"""The pages agree with each other and with the product: links lead somewhere, settings and modules
that they name exist.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from async_grpo.config.docs import options, settings
from async_grpo.config.recipes import recipes
from async_grpo.old_names import COMMANDS
from tests.support.metric_page import NAME, documented
from tests.support.models import write_model
from tests.support.verbs import check

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
README = ROOT / "README.md"
SECTIONS = {name for name, setting in settings().items() if setting.section and "." not in name}
FREE = tuple(
    name
    for name, setting in settings().items()
    if not setting.section and setting.allowed.startswith("a mapping")
)
"""Settings that hold keys of others: `learner.deepspeed`, `task.options`, `task.rewards`."""


def name_of(page: Path) -> str:
    """From the root of the checkout."""
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """README's example of one's own model and rows, in a directory of its own."""
    example = README.read_text(encoding="utf-8").partition("## Your model, your rows")[2]
    [row, settings_of_it] = re.findall(r"```(?:json|yaml)\n(.*?)```", example, re.DOTALL)[:2]
    for name, numbers in (("rows.jsonl", range(30, 60)), ("held_out.jsonl", range(60, 70))):
        lines = [row.replace("17", str(number)) for number in numbers]
        (tmp_path / name).write_text("".join(lines))
    (tmp_path / "own.yaml").write_text(settings_of_it)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("memory", "fits"), [("24", True), ("22.5", True), ("12", False)])
def test_the_example_fits_a_small_gpu(
    example: Path,
    memory: str,
    fits: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Cards that are sold as 24 GB have 22.5 to 24 GiB."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no hub")

    monkeypatch.setattr("transformers.utils.cached_file", refuse)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", refuse)
    assert check(["own.yaml", "--assume", f"gpus=1,memory={memory}"]) == (0 if fits else 2)
    said = capsys.readouterr().out
    chosen = f" with gradient checkpointing, chosen to fit {memory} GiB (about "
    assert (chosen in said) is fits
    written = said.partition("# resolved configuration")[2].partition("\n\n")[0]
    assert "\n  gradient_checkpointing: true\n" in written, "in numbers"
    assert ("`async-grpo check` shows the parts" in said) is not fits
    assert "gradient_checkpointing=true" not in said, "it is on"


def test_the_example_of_ones_own_model_and_rows_passes_a_dry_run(
    example: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path = example
    model = Path(write_model(tmp_path / "model"))
    told = json.loads((model / "tokenizer_config.json").read_text())
    told["chat_template"] = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(told))
    assert check(["own.yaml", f"model.path={model}"]) == 0
    said = capsys.readouterr().out
    assert "16 groups x 8 responses" in said and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), (
            f"{page.name} links to {target}, and there is no such heading"
        )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"))
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    if page.name == "migrate.md":  # its other columns are other systems'
        text = "\n".join(
            line if not line.startswith("|") else line.split("|")[1] for line in text.splitlines()
        )
    choices = {f"{name.rsplit('.', 2)[0]}.{name.rsplit('.', 1)[1]}" for name in options()}
    for name in re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:[:=][^`]*)?`", text):
        if name.partition(".")[0] in SECTIONS and not name.endswith(
            (".py", ".md", ".yaml", ".json", ".jsonl", ".db")
        ):
            assert name in {*settings(), *choices} or name.startswith(
                tuple(f"{free}." for free in FREE)
            ), f"{page.name} names {name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_commands_that_are_named_exist(page: Path) -> None:
    text, ours = page.read_text(encoding="utf-8"), "(?:async_grpo|benchmarks|configs|tests)"
    files = rf"(?<![\w/])(?:{ours}/[\w./]+\.(?:py|yaml)|(?:\w+/)*test_\w+\.py)\b"
    homes = [ROOT, ROOT / "tests"] if page.name == "testing.md" else [ROOT]
    for name in re.findall(files, text):
        assert any((home / name).is_file() for home in homes), f"{page.name} names {name}"
    for name in re.findall(rf"python -m ({ours}[.\w]*\w)", text):
        module = ROOT / name.replace(".", "/")
        found = module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
        old = name.partition(".")[2].removesuffix(".__main__")
        answers = {one.removesuffix(".__main__") for one in COMMANDS}
        assert found or (page.name == "CHANGELOG.md" and old in answers), (
            f"{page.name} names python -m {name}"
        )


def test_every_page_is_found_from_the_start() -> None:
    """From README.md or the first page of the site; many alike from their index."""
    homes = [README, *(page for page in PAGES if page.name == "index.md")]
    linked = {
        (home.parent / target.partition("#")[0]).resolve()
        for home in homes
        for target in re.findall(r"\]\(([^)\s]+)\)", home.read_text(encoding="utf-8"))
    }
    assert [name_of(page) for page in PAGES if page != README and page not in linked] == []


def test_the_pages_are_short() -> None:
    """What nobody reads to its end helps nobody: 330 KB, of which the reference may have 150."""
    sizes = {page: page.stat().st_size for page in (ROOT / "docs").rglob("*.md")}
    assert sum(sizes.values()) <= 330_000
    assert sum(size for page, size in sizes.items() if "reference" in page.parts) <= 150_000


def test_the_readme_is_short_and_its_commands_exist() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 160
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    recipe = re.findall(r"async_grpo\.run ([a-z]\w+)(?= |$)", text, re.MULTILINE)
    named = [*recipe, *re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)]
    assert set(named) <= set(recipes()), named
    assert all(f"`{name}`" in text for name in recipes())


def test_every_picture_is_drawn_by_a_script_and_shown() -> None:
    scripts = [
        ROOT / "docs" / "generate" / "pictures.py",
        ROOT / "docs" / "generate" / "screenshots.py",
        ROOT / "benchmarks" / "async_vs_sync" / "__main__.py",
        ROOT / "benchmarks" / "learning.py",
    ]
    drawn = "".join(script.read_text(encoding="utf-8") for script in scripts)
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    pictures = sorted((ROOT / "docs" / "assets").iterdir())
    assert len(pictures) > 5
    for picture in pictures:
        assert picture.name in drawn or f'"{picture.stem}"' in drawn, f"no script makes {picture}"
        assert f"assets/{picture.name})" in shown, f"no page shows {picture}"


def test_pages_that_the_product_names_exist() -> None:
    for source in sorted((ROOT / "async_grpo").rglob("*.py")):
        for page in re.findall(r"docs/[\w/-]+\.md", source.read_text(encoding="utf-8")):
            assert (ROOT / page).is_file(), f"{source.relative_to(ROOT)} names {page}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_metrics_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for name in re.findall(rf"`({NAME.pattern})`", text):
        assert documented(name) or page.name == "CHANGELOG.md", f"{page.name} names {name}"
