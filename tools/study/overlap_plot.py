"""The picture of `python -m tools.study overlap`: what the two streams of a rank do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastmp.plan.schedule_plot import INK, PAPER
from tools.study.plot import COLOURS, figure, plain

_COLOUR = {"forward": COLOURS[0], "backward": COLOURS[1], "weights": COLOURS[2]}


def draw(timelines: Sequence[tuple[str, Sequence[tuple[str, bool, str, float, float]]]], out: Path) -> None:
    """Draw the (title, parts) of `tools.study.overlap.drawn`, a panel each, over the same milliseconds."""
    from matplotlib.patches import Patch

    made = figure(12.0, 3.6)
    last = max(end for _, events in timelines for *_, end in events)
    for axes, (title, events) in zip(made.subplots(len(timelines), 1, sharex=True), timelines, strict=True):
        for name, exchange, chain, start, end in events:
            axes.barh(int(exchange), end - start, 0.84, start, color=_COLOUR[chain], edgecolor=PAPER)
            if end - start > last / 30:
                place = {"ha": "center", "va": "center", "fontsize": 7, "color": PAPER}
                axes.text((start + end) / 2, int(exchange), name, **place)
        plain(axes, title)
        axes.set_xlim(0, last)
        axes.set_ylim(1.5, -0.5)
        axes.set_yticks([0, 1], ["compute", "exchanges"])
    axes.set_xlabel("milliseconds, predicted", color=INK, fontsize=9)
    legend = [Patch(color=colour, label=name) for name, colour in _COLOUR.items()]
    legend[-1].set_label("gradients of weights")
    made.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    made.savefig(out)
