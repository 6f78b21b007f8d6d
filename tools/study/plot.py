"""Colours, figures and axes of the studies' pictures."""

from __future__ import annotations

from typing import Any

from fastmp.plan.schedule_plot import INK

COLOURS = ("#3b6fb6", "#c4572e", "#5b8c5a", "#8a5fa8", "#c79a2b", "#4f9da6", "#7a6a5a", "#b0567c")


def figure(width: float, height: float) -> Any:
    """Return a figure that needs no display. ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(made)
    return made


def plain(axes: Any, title: str) -> None:
    """Take away what a picture does not need."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=INK, labelsize=8)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
