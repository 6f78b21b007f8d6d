"""A plot of layers' segments in execution order, and the CUDA graphs around them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path

_INK, _PAPER, _GRAPH, _EAGER = "#1f2937", "#ffffff", "#3b6fb6", "#c4572e"


def draw(
    segments: Mapping[str, bool],
    layers: Sequence[int],
    out: str | Path,
    *,
    ends: Collection[str] = (),
    title: str = "",
) -> None:
    """Draw forward and backward of `layers`, with the segments {name: captured or not}, to `out` (png, svg or
    pdf, by its ending).

    ends: the last segments of runs, as "0.combine", behind which another one begins.

    ImportError without matplotlib, ValueError for an ending that it does not know, OSError where the file
    cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    names = [f"{layer}.{name}" for layer in layers for name in segments]
    ended = [0, *accumulate(name in ends for name in names)]  # runs before each segment
    links = [
        (name, (captured, before if captured else 0))
        for name, captured, before in zip(names, [*segments.values()] * len(layers), ended)
    ]
    num_runs = sum(captured for (captured, _), _ in groupby(links, lambda link: link[1]))
    figure = Figure(figsize=(max(1.15 * len(links), 5.0), 2.9), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, (what, order) in enumerate((("forward", links), ("backward", links[::-1]))):
        place = graph = 0
        for (captured, _), own in groupby(order, lambda link: link[1]):
            names = [name for name, _ in own]
            if captured:
                frame = FancyBboxPatch((place - 0.46, row - 0.40), len(names) - 0.08, 0.66, "round,pad=0")
                frame.set(facecolor="#dbe6f5", edgecolor=_GRAPH, linewidth=1.5)
                axes.add_patch(frame)
                label = f"graph: {what} of run {graph if row == 0 else num_runs - 1 - graph}"
                graph += 1
            else:
                label = "eager"
            colour = _GRAPH if captured else _EAGER
            axes.text(place - 0.42, row - 0.33, label, fontsize=8, va="center", color=colour)
            for i, name in enumerate(names):
                box = FancyBboxPatch(
                    (place + i - 0.40, row - 0.22), 0.80, 0.40, "round,pad=0,rounding_size=0.05"
                )
                box.set(facecolor=colour, edgecolor=_PAPER)
                axes.add_patch(box)
                text = name.replace(".", "\n").replace("_", "\n")
                axes.text(place + i, row - 0.02, text, ha="center", va="center", fontsize=7.5, color=_PAPER)
            place += len(names)
        axes.annotate(
            "",
            xytext=(-0.5, row + 0.36),
            xy=(len(links) - 0.5, row + 0.36),
            arrowprops={"arrowstyle": "->", "color": _INK},
        )
    axes.set_xlim(-0.6, len(links) - 0.4)
    axes.set_ylim(1.5, -0.5)
    axes.set_yticks([0, 1], ["forward", "backward"])
    axes.set_xticks([])
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=_INK)
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    svg = Path(out).suffix == ".svg"
    figure.savefig(out, metadata={"Date": None} if svg else None)
