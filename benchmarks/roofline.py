"""Roofline picture of benchmark results: FLOP/s over FLOPs a byte, under the best rates of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Result, Timing, direction_words

INK, MUTED, FAINT = "#1f2937", "#9ca3af", "#e5e7eb"
PALETTE = ("#3b6fb6", "#c4572e", "#4d9a5b", "#8a5bb0", "#b8860b", "#2aa0a4", "#c2508a", "#6b7280")
_MAX_POINTS = 28  # in one panel
_NEAR = {"textcoords": "offset points"}


def roofline(results: Sequence[Result], out: str | Path) -> Path:
    """Draw FLOP/s over FLOPs a byte under the measured roofs, a panel a file, to the PNG or SVG file `out`.

    A filled mark is ours, a hollow one below or above it the best peer. ValueError for another file type,
    where nothing can be drawn, and without matplotlib.
    """
    out = Path(out)
    if out.suffix not in (".png", ".svg"):
        raise ValueError(f"a picture is a .png or .svg file, got {out.name}")
    drawn = [(result, _points(result)) for result in results if "copy_gbs" in result.ceilings]
    drawn = [(result, points) for result, points in drawn if points]
    if not drawn:
        raise ValueError("no file holds times beside measured ceilings: nothing to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(11.0, 5.6 * len(drawn)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (result, points) in zip(figure.subplots(len(drawn), squeeze=False)[:, 0], drawn):
        _draw(axes, result, points)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format=out.suffix[1:])
    return out


Point = tuple[Timing, Timing | None]


def _points(result: Result) -> list[Point]:
    """Return our fastest on each case and direction, with the best peer if it was timed, by FLOPs a byte."""
    points: dict[tuple[str, str], Point] = {}
    by_name = {(t.case, t.direction, t.rival): t for t in result.timings}
    for timing in result.timings:
        if timing.ours and timing.flops and timing.bytes:
            key = timing.case, timing.direction
            if key not in points or timing.ms < points[key][0].ms:
                points[key] = timing, by_name.get((*key, timing.best_peer))
    ordered = sorted(points.values(), key=lambda point: point[0].flops / point[0].bytes)
    step = -(-len(ordered) // _MAX_POINTS)
    return ordered[:: max(step, 1)]


def _draw(axes: Any, result: Result, points: Sequence[Point]) -> None:
    copy = result.ceilings["copy_gbs"] * 1e9
    rates = {name: rate * 1e12 for name, rate in result.ceilings.get("gemm_tflops", {}).items()}
    intensities = [timing.flops / timing.bytes for timing, _ in points]
    left, right = min(intensities) / 3, max([*intensities, *(rate / copy for rate in rates.values())]) * 4
    for name, rate in rates.items():
        knee = min(rate / copy, right)
        axes.plot([left, knee, right], [left * copy, knee * copy, rate], color=MUTED, linewidth=1.4)
        axes.annotate(
            f"{name} products", (right, rate), (-4, 4), ha="right", color=MUTED, fontsize=8, **_NEAR
        )
    if not rates:
        axes.plot([left, right], [left * copy, right * copy], color=MUTED, linewidth=1.4)
    names: dict[str, str] = {}
    for number, (timing, peer) in enumerate(points, start=1):
        color = names.setdefault(timing.workload, PALETTE[len(names) % len(PALETTE)])
        x = timing.flops / timing.bytes
        y = timing.flops / timing.ms * 1e3
        label = f"{number}  {timing.case} {direction_words(timing.direction)}  {timing.of_floor:.0%}"
        axes.plot([x], [y], "o", color=color, markersize=7, label=label, zorder=3)
        axes.annotate(str(number), (x, y), (5, 4), color=color, fontsize=8, **_NEAR)
        if peer is not None:
            theirs = timing.flops / peer.ms * 1e3
            axes.plot([x, x], [y, theirs], color=color, linewidth=0.8, alpha=0.5, zorder=2)
            axes.plot([x], [theirs], "o", markerfacecolor="white", markeredgecolor=color, markersize=6)
    axes.set(xscale="log", yscale="log", xlim=(left, right))
    axes.set_xlabel("FLOPs a byte that must move", color=INK)
    axes.set_ylabel("FLOP/s", color=INK)
    axes.set_title(result.title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    title = "share of the floor; filled: fastmp, hollow: the best peer"
    legend = {"frameon": False, "fontsize": 7.5, "labelcolor": INK, "title_fontsize": 8}
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), title=title, alignment="left", **legend)
