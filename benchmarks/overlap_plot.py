"""The picture of `benchmarks.bench_overlap`: when a rank computes and communicates in a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fastmp.plan.schedule_plot import COLOURS, INK, PAPER
from fastmp.schedule.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD

__all__ = ["draw"]

Trace = Sequence[tuple[str, float, float]]  # (kind, start, end), in ms
# Names, lane and colour of what is drawn.
_KINDS = {
    FORWARD: ("forward", 0, COLOURS[FORWARD][0]),
    BACKWARD: ("backward", 0, COLOURS[BACKWARD][0]),
    BACKWARD_INPUT: ("backward of inputs", 0, COLOURS[BACKWARD][0]),
    BACKWARD_WEIGHT: ("backward of weights", 0, COLOURS[BACKWARD_WEIGHT][0]),
    "optimizer": ("optimizer", 0, INK),
    "reduce-scatter": ("reduce-scatter of a bucket", 1, "#8a5fa8"),
    "all-gather": ("all-gather of a bucket", 2, "#c79a2b"),
}
_LANES = ("compute", "reduce-scatter", "all-gather")


def draw(traces: Sequence[tuple[str, Trace]], out: str | Path) -> None:
    """Draw a panel for each (title, trace) to `out` (png, svg or pdf, by its ending).

    ImportError without matplotlib, OSError where the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12.0, 0.7 + 1.25 * len(traces)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    seen: dict[str, Patch] = {}
    for axes, (title, trace) in zip(figure.subplots(len(traces), 1, squeeze=False)[:, 0], traces):
        for kind, (name, lane, colour) in _KINDS.items():
            spans = [(start, end - start) for each, start, end in trace if each == kind]
            if spans:
                edge = 0.4 if lane else 0.0
                axes.broken_barh(
                    spans, (lane - 0.4, 0.8), facecolors=colour, edgecolors=PAPER, linewidth=edge
                )
                seen[name] = Patch(color=colour, label=name)
        axes.set_xlim(0, max(end for _, _, end in trace))
        axes.set_ylim(len(_LANES) - 0.5, -0.5)
        axes.set_yticks(range(len(_LANES)), _LANES, color=INK)
        axes.set_facecolor("#eceff3")
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.tick_params(length=0, colors=INK, labelsize=8)
        axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.set_xlabel("ms", color=INK)
    names = [name for name, _, _ in _KINDS.values() if name in seen]
    handles = [seen[name] for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    svg = Path(out).suffix == ".svg"
    figure.savefig(out, metadata={"Date": None} if svg else None)
