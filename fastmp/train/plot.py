"""The loss picture of a run, from its metrics.jsonl."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from fastmp.train.metrics import read_metrics

TRAIN, HELD_OUT, ENTROPY, INK, MUTED = "#3b6fb6", "#c4572e", "#6b7280", "#1f2937", "#9ca3af"


def plot_loss(metrics: str | Path, out: str | Path, *, title: str = "") -> Path | None:
    """Draw training and held-out loss over steps to the PNG `out`, which is replaced whole; returns its path.

    In nats per byte with the unigram entropy of the held-out text where the run knows its bytes, else in
    nats per token. Without matplotlib: one line on stderr, and None. ValueError if there is nothing to
    draw.
    """
    records = read_metrics(metrics)
    key = "loss_per_byte" if any(r.get("loss_per_byte") is not None for r in records) else "loss"
    train = _points(records, "train", key)
    held_out = _points(records, "eval", key)
    if not train and not held_out:
        raise ValueError(f"{metrics}: no loss to draw")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        print('fastmp: no loss plot: matplotlib is missing (pip install "fastmp[viz]")', file=sys.stderr)
        return None
    entropies = [r["unigram_entropy"] for r in records if r["kind"] == "eval" and r.get("unigram_entropy")]
    figure = Figure(figsize=(8.0, 4.5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    _draw(
        figure.add_subplot(), train, held_out, entropies[-1] if key == "loss_per_byte" and entropies else None
    )
    axes = figure.axes[0]
    axes.set_ylabel("loss, nats per byte" if key == "loss_per_byte" else "loss, nats per token", color=INK)
    if title:
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=12)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        figure.savefig(unfinished, format="png")
        unfinished.replace(out)
    finally:
        unfinished.unlink(missing_ok=True)
    return out


def _points(records: list[dict[str, Any]], kind: str, key: str) -> list[tuple[int, float]]:
    return [(r["step"], r[key]) for r in records if r["kind"] == kind and r.get(key) is not None]


def _smooth(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Mean over a window centred on each point (so it does not lag), about a twentieth of the run wide."""
    half, smooth = len(points) // 40, []
    for i, (step, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        window = [loss for _, loss in points[i - reach : i + reach + 1]]
        smooth.append((step, sum(window) / len(window)))
    return smooth


def _draw(
    axes: Any, train: list[tuple[int, float]], held_out: list[tuple[int, float]], entropy: float | None
) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("step", color=INK)
    if train:
        smooth = _smooth(train)
        if len(train) >= 60:
            axes.plot(*zip(*train), color=TRAIN, linewidth=0.8, alpha=0.3)
        axes.plot(*zip(*smooth), color=TRAIN, linewidth=1.8, label="training")
    if held_out:
        axes.plot(
            *zip(*held_out),
            color=HELD_OUT,
            linewidth=1.2,
            marker="o",
            markersize=5,
            label="held-out",
            zorder=3,
        )
        step, loss = held_out[-1]
        axes.annotate(
            f"{loss:.2f}",
            (step, loss),
            (6, 0),
            textcoords="offset points",
            va="center",
            color=HELD_OUT,
            fontsize=10,
        )
    if entropy is not None:
        axes.axhline(entropy, color=ENTROPY, linewidth=1.2, linestyle=(0, (5, 4)))
        axes.annotate(
            f"unigram entropy of the held-out text, {entropy:.2f}",
            (1.0, entropy),
            (0, 5),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            color=ENTROPY,
            fontsize=9,
        )
    axes.margins(x=0.02)
    axes.legend(frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1.0, 0.9), labelcolor=INK)
