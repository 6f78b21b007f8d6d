"""The picture of a schedule: a row for each rank, a box for each step, its colour by kind and chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from fastmp.schedule.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from fastmp.schedule.simulate import Event

INK, PAPER = "#1f2937", "#ffffff"
# The first and the last chunk's colour; those in between are mixed.
COLOURS = {
    FORWARD: ("#3b6fb6", "#b9cfea"),
    BACKWARD: ("#c4572e", "#f0c3af"),
    BACKWARD_INPUT: ("#c4572e", "#f0c3af"),
    BACKWARD_WEIGHT: ("#5b8c5a", "#c6dcc4"),
}
_MAX_LABELS = 1500  # more boxes than this have no room for the number of their microbatch


def draw(timelines: Sequence[Iterable[Event]], out: str | Path, *, title: str = "") -> None:
    """Draw `timelines[rank]`, simulated or measured, to `out` (png, svg or pdf, by its ending).

    A box says the number of its microbatch; of two steps at once each has half the height. ImportError
    without matplotlib, ValueError for an ending that it does not know, OSError where the file cannot be
    written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    events = [event for timeline in timelines for event in timeline]
    ranks = len(timelines)
    end = max((event.end for event in events), default=0.0) or 1.0
    chunks = 1 + max((event.step.chunk for event in events), default=0)
    begun = Counter((event.rank, event.start) for event in events if event.start < event.end)
    at_once = {event for event in events if begun[event.rank, event.start] > 1}
    rows: dict[tuple[str, int], list[Event]] = {}  # by colour
    for event in events:
        rows.setdefault((event.step.kind, event.step.chunk), []).append(event)

    figure = Figure(figsize=(12.0, min(1.1 + 0.42 * ranks, 12.0)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    legend = []
    for kind in COLOURS:
        for chunk in range(chunks):
            if boxes := rows.get((kind, chunk)):
                colour = _mixed(*COLOURS[kind], chunk / max(chunks - 1, 1))
                _boxes(axes, boxes, at_once, colour)
                name = kind.replace("_", ", ")
                legend.append(Patch(color=colour, label=f"{name}, chunk {chunk}" if chunks > 1 else name))
    if len(events) <= _MAX_LABELS:
        size = max(3.0, min(9.0, 9.0 * 70 / end * min(event.end - event.start for event in events)))
        for event in events:
            middle = (event.start + event.end) / 2
            dark = event.step.chunk < (chunks - 1) / 2 or chunks == 1
            place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size}
            colour = PAPER if dark else INK
            axes.text(
                middle, sum(_height(event, at_once)) / 2, str(event.step.microbatch), color=colour, **place
            )
    axes.set_xlim(0, end)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks) if ranks <= 32 else range(0, ranks, ranks // 16))
    axes.set_xlabel("time", color=INK)
    axes.set_ylabel("pipeline rank", color=INK)
    axes.set_facecolor("#eceff3")
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=INK)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    figure.legend(
        handles=legend, loc="outside lower center", ncols=min(len(legend), 6), frameon=False, fontsize=8
    )
    svg = Path(out).suffix == ".svg"
    figure.savefig(out, metadata={"Date": None} if svg else None)


def _height(event: Event, at_once: Collection[Event]) -> tuple[float, float]:
    """Return the top and the bottom of a box."""
    top, bottom = event.rank - 0.42, event.rank + 0.42
    if event not in at_once:
        return top, bottom
    return (top, event.rank - 0.01) if event.step.kind == FORWARD else (event.rank + 0.01, bottom)


def _boxes(axes: Any, events: list[Event], at_once: Collection[Event], colour: str) -> None:
    from matplotlib.collections import PolyCollection

    corners = []
    for event in events:
        (top, bottom), start, end = _height(event, at_once), event.start, event.end
        corners.append(((start, top), (end, top), (end, bottom), (start, bottom)))
    edge = 0.6 if len(events) <= _MAX_LABELS else 0.0
    axes.add_collection(PolyCollection(corners, facecolors=colour, edgecolors=PAPER, linewidths=edge))


def _mixed(first: str, last: str, share: float) -> str:
    """Return a colour between two, #rrggbb."""
    pairs = ((int(first[i : i + 2], 16), int(last[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)
