"""From a figure to something that a page or a file can hold.

Runs in: the report's process. Hides matplotlib's output. Invariant: a picture in the page has no colour of its own for text and frames, so that it follows
the page from light to dark; the PNG is on white.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

_INK, _FAINT = "#010203", "#040506"
"""Colours that nothing else has; the page replaces them by its own."""
_PNG_INK, _PNG_FAINT = "#24292f", "#d8dee4"


def _style(ink: str, faint: str) -> dict[str, object]:
    return {
        "text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink, "axes.titlecolor": ink, "axes.edgecolor": faint,
        "xtick.labelcolor": ink, "ytick.labelcolor": ink, "grid.color": faint, "grid.linewidth": 0.6, "axes.linewidth": 0.8,
        "font.size": 9.0, "axes.titlesize": 9.0, "axes.labelsize": 9.0, "legend.fontsize": 8.0, "legend.frameon": False,
        "legend.handlelength": 1.0, "legend.handletextpad": 0.4, "legend.columnspacing": 1.2, "axes.spines.top": False, "axes.spines.right": False,
        "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "svg.fonttype": "none", "axes.axisbelow": True,
    }


def as_svg(draw: Callable[[], Figure | None], *, name: str) -> str | None:
    """The picture as an element of a page; None where there is nothing to draw."""
    with mpl.rc_context(_style(_INK, _FAINT) | {"svg.hashsalt": name}):
        figure = draw()
        if figure is None:
            return None
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = text.replace(_INK, "var(--ink)").replace(_FAINT, "var(--faint)")
    # Names inside a picture must differ from those in another one; a definition is used in its own only.
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(r'font: [^;"]*?(\d+(?:\.\d+)?px) [^;"]*', r"font: \1 var(--font)", text)
    return re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg xmlns:xlink="http://www.w3.org/1999/xlink" \1 role="img" aria-label="{name}">', text, count=1)


def write_png(draw: Callable[[], Figure | None], path: Path) -> bool:
    """Write the picture; whether there was one."""
    with mpl.rc_context(_style(_PNG_INK, _PNG_FAINT)):
        figure = draw()
        if figure is None:
            return False
        figure.savefig(path, format="png", dpi=130, facecolor="white")
    return True
