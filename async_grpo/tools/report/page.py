"""The report as one HTML file, and its texts: what each picture is called and means.

Runs in: the report's process. Hides HTML. Invariants: the file needs nothing else, and its policy
forbids the browser to ask for anything; all text from a run is escaped; every section is there,
with a sentence where the run has nothing to show in it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from async_grpo.runtime.text import visible, without_password
from async_grpo.tools.report.data import RunData
from async_grpo.tools.report.facts import (
    NO_SAMPLES,
    alarms,
    bottleneck,
    origin,
    restarts,
    sample_sections,
    settings,
    swings,
    tiles,
)
from async_grpo.tools.report.failures import failures, slowest
from async_grpo.tools.report.mismatch import COLUMNS, MEANING, NOTHING, mismatch

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --card: #f6f8fa; --ink: #24292f;
  --soft: #656d76; --faint: #d0d7de; --good: #1a7f37; --bad: #cf222e;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --card: #161b22; --ink: #e6edf3;
  --soft: #8d96a0; --faint: #30363d; --good: #3fb950;
  --bad: #f85149; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 var(--font); }
main { max-width: 1040px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; } h2 { font-size: 19px; margin: 40px 0 4px; } h3 {
  font-size: 15px; margin: 18px 0 6px; }
p { margin: 4px 0 10px; color: var(--soft); } p.lead { color: var(--ink); } p.good {
  color: var(--good); } p.bad { color: var(--bad); }
svg { display: block; width: 100%; height: auto; margin: 6px 0; } a { color: inherit; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 10px;
  margin: 18px 0; }
.tile { background: var(--card); border: 1px solid var(--faint); border-radius: 8px;
  padding: 10px 12px; }
.tile b { display: block; font-size: 19px; font-weight: 600; } .tile span { color: var(--soft);
  font-size: 13px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; vertical-align: top; padding: 5px 10px 5px 0;
  border-bottom: 1px solid var(--faint); } th { color: var(--soft); font-weight: 500; }
td.text { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
  font-size: 12.5px; white-space: pre-wrap; overflow-wrap: anywhere; min-width: 90px; }
td.text div { max-height: 190px; overflow-y: auto; } nav { font-size: 13.5px; color: var(--soft);
  margin: 10px 0; } nav a { margin-right: 12px; }
pre { background: var(--card); border: 1px solid var(--faint); border-radius: 8px; padding: 12px;
  overflow-x: auto; font-size: 12.5px; }
summary { cursor: pointer; color: var(--soft); margin: 10px 0; } .two { columns: 2;
  column-gap: 34px; } @media (max-width: 700px) { .two { columns: 1; } }
"""


@dataclass(frozen=True, slots=True)
class Plot:
    """Texts of a picture: file name, heading, meaning, and the sentence where nothing is drawn;
    without one there is no heading either.
    """

    name: str
    title: str
    meaning: str
    absent: str


def page(
    data: RunData,
    *,
    pictures: Sequence[tuple[Plot, str | None]],
    notes: Mapping[str, Sequence[str]],
    config_text: str,
) -> str:
    """Write the whole file. pictures: with their SVG; notes: sentences under those of a name."""
    title = data.status.get("run") or data.setting("run.name") or data.directory.resolve().name
    sections = [
        (plot.name, plot.title, _picture(plot, svg, notes.get(plot.name, ())))
        for plot, svg in pictures
        if svg is not None or plot.absent
    ]
    sections += [
        ("mismatch", "Learner against engines", _mismatch(data)),
        ("samples", "Sample responses", _samples(data)),
        ("failures", "What failed, and what was slow", _failures(data)),
        ("restarts", "What restarted", _restarts(data)),
        ("configuration", "Configuration", _configuration(data, without_password(config_text))),
    ]
    links = "".join(f'<a href="#{name}">{_text(heading)}</a>' for name, heading, _ in sections)
    body = "\n".join(
        f'<section id="{name}"><h2>{_text(heading)}</h2>\n{content}</section>'
        for name, heading, content in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style></head>\n<body><main>\n"
        f"<header>{_header(data, title)}</header>\n"
        f"<nav>{links}</nav>\n{body}\n</main></body></html>\n"
    )


def _header(data: RunData, title: object) -> str:
    lead, kind, shown = tiles(data)
    boxes = "".join(
        f'<div class="tile"><b>{_text(value)}</b><span>{_text(label)}</span></div>'
        for label, value in shown
    )
    sentences = filter(None, (alarms(data), bottleneck(data), swings(data)))
    said = "".join(f'<p class="lead">{_text(text)}</p>' for text in sentences)
    return (
        f"<h1>{_text(title)}</h1><p>{_text(origin(data))}</p>"
        f'<p class="lead {kind}">{_text(lead)}</p>{said}<div class="tiles">{boxes}</div>'
    )


def _picture(plot: Plot, svg: str | None, notes: Sequence[str]) -> str:
    said = "".join(f"<p>{_text(note)}</p>" for note in notes)
    drawn = f"<p>{_text(plot.meaning)}</p>{svg}"
    return (drawn if svg is not None else f"<p>{_text(plot.absent)}</p>") + said


def _mismatch(data: RunData) -> str:
    rows = mismatch(data)
    table = _table(COLUMNS, rows) if rows else ""
    return f"<p>{_text(MEANING if rows else NOTHING)}</p>{table}"


def _samples(data: RunData) -> str:
    parts = []
    for heading, columns, rows in sample_sections(data):
        parts.append(f"<h3>{_text(heading)}</h3>" + _table(columns, rows))
    return "".join(parts) or f"<p>{NO_SAMPLES}</p>"


def _failures(data: RunData) -> str:
    kinds, slow = failures(data), slowest(data)
    parts = [] if kinds else ["<p>Nothing failed.</p>"]
    if kinds:
        how = (
            "An episode that failed was not scored while training: its group was issued again, "
            "and one that fails replay.max_attempts times is listed by "
            "async-grpo inspect RUN_DIR --state failed. Held-out ones count as wrong. Requests are "
            "those of programs and workers, and the answers that they got instead."
        )
        parts += [f"<p>{_text(how)}</p>", _table(("what", "times", "which means"), kinds)]
    if slow:
        named = "group, episode, turns, sampled tokens, ended by, correct, actor"
        columns = ("seconds", *named.split(", "))
        rows = [
            (f"{seconds:.1f}", *said, "" if verdict is None else f"{verdict:g}", actor)
            for seconds, *said, verdict, actor in slow
        ]
        what = (
            "The slowest of the newest episodes, from the ticket of their group to their end; one "
            "in full: async-grpo inspect RUN_DIR --group GROUP."
        )
        parts += [f"<p>{_text(what)}</p>", _table(columns, rows)]
    return "".join(parts)


def _restarts(data: RunData) -> str:
    counts, lines = restarts(data)
    summary = f"<p>{_text(counts)}</p>"
    return summary + (_table(("when", "what"), lines) if lines else "")


def _configuration(data: RunData, config_text: str) -> str:
    rows = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in settings(data)
    )
    return (
        f"<table>{rows}</table><details><summary>every "
        f"setting</summary><pre>{_text(config_text)}</pre></details>"
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table; prompts and responses, which may be long, in boxes that scroll."""
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    boxes = [' class="text"' if column in ("prompt", "response") else "" for column in columns]
    lines = (
        "".join(
            f"<td{box}><div>{_text(cell)}</div></td>" for box, cell in zip(boxes, row, strict=True)
        )
        for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _text(text: object) -> str:
    """Escape text from anywhere: no markup, and nothing that a reader does not see."""
    return html.escape(visible(str(text)))


PLOTS = (
    Plot(
        "learning",
        "Reward and held-out accuracy",
        "Above, the mean reward of the groups that each step trained (thin) and its "
        "running mean; with filtered groups it is not the reward of the policy on "
        "all prompts. Below, accuracy on problems that are never trained: dots with 95 % "
        "intervals are measured. This says whether the policy learns.",
        "No learner step was logged, and nothing was evaluated.",
    ),
    Plot(
        "rewards",
        "Reward components, and groups that teach little",
        "Above, the mean of each raw reward component: one that rises while another falls "
        "points to reward hacking. Below, of the trained groups, those whose responses are all "
        "right or all wrong, which have no advantage, and responses that the limit cut off. "
        "Groups that replay.filter_groups rejected are not among them.",
        "No learner step reported its rewards.",
    ),
    Plot(
        "episodes",
        "Episodes",
        "Above, the turns of the trained episodes. Below, shares: of what ended them, and of the "
        "tokens after the prompts that the policy sampled. Only sampled tokens are trained; what "
        "environments said is not.",
        "",
    ),
    Plot(
        "pass_rates",
        "Problems by their pass rate",
        "How many problems were answered right how often, so far. Problems at both ends teach "
        "little; replay.difficulty poses them less often.",
        "",
    ),
    Plot(
        "throughput",
        "Throughput and step time",
        "Above, trained response tokens per second. Below, the seconds of a learner step, and of "
        "those that it waited for groups and trained.",
        "No learner step reported its throughput.",
    ),
    Plot(
        "staleness",
        "Staleness of the trained tokens",
        "How many learner steps old the tokens were when they were trained, as shares of "
        "each step's tokens. Staleness 0 is on-policy; the bound is "
        "replay.max_staleness.",
        "No learner step reported the staleness of its tokens.",
    ),
    Plot(
        "length_by_staleness",
        "Response length by staleness",
        "Mean tokens per response, by the staleness of its oldest token. Long answers take "
        "longer, so they are staler. Lines that drift apart while the dashed mean falls "
        "point to a bias toward short answers.",
        "No learner step reported response lengths by staleness.",
    ),
    Plot(
        "clip_ess",
        "Clipping and effective sample size by staleness",
        "Above, the share of tokens whose ratio was clipped. Below, the effective sample "
        "size of the importance ratios as a share: 1 is on-policy, below 0.5 the data "
        "is too old for the step size. Older tokens clip more; a gap that grows says that "
        "max_staleness is too large, or the learning rate.",
        "No learner step reported clipping or sample size by staleness.",
    ),
    Plot(
        "health",
        "Loss, entropy, gradients and step size",
        "The loss is what was minimised; its size says little. Entropy that falls to 0 early ends "
        "exploration; gradient norms above learner.grad_clip are cut; the KL of the updates of a "
        "step stays below a few hundredths.",
        "No learner step was logged.",
    ),
    Plot(
        "goodput",
        "Where tokens and time went",
        "What became of all generated tokens, and how learner and engines spent "
        "their time. Only trained tokens and working time bring the run forward.",
        "No learner step was logged.",
    ),
    Plot(
        "timeline",
        "Timeline",
        "A few learner steps in detail. Engines: groups being generated and scored at "
        "each moment. Queue: groups that are ready and wait for their step. "
        "Learner: waiting for its batch, training, waiting for a weight sync. Weights: "
        "from staging until every engine serves them, evaluations and checkpoints. "
        "Another window: async-grpo report RUN_DIR --steps 100-110.",
        "No learner step was logged.",
    ),
)
