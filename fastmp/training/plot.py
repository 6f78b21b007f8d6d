"""Plots of a run: loss and expert load from its metrics.jsonl, and its learning rate."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastmp.config import OptimizerConfig
from fastmp.config.console import to_stderr
from fastmp.optim.lr_schedule import learning_rate
from fastmp.training.metrics import read_metrics

TRAIN, HELD_OUT, ENTROPY, INK, MUTED = "#3b6fb6", "#c4572e", "#6b7280", "#1f2937", "#9ca3af"
CURVES = (TRAIN, HELD_OUT, "#5b8c5a", "#8a5aa8")


def plot_loss(metrics: str | Path, out: str | Path, *, title: str = "") -> Path | None:
    """Plot training and held-out loss over steps to the PNG `out`; return its path.

    The unit is nats per byte, next to the unigram entropy of the held-out text, if the run recorded bytes,
    else nats per token. Without matplotlib, print a line on stderr and return None.

    Raises:
        ValueError: the metrics have no loss.
    """
    records = read_metrics(metrics)
    key = "loss_per_byte" if any(r.get("loss_per_byte") is not None for r in records) else "loss"
    train = _points(records, "train", key)
    held_out = _points(records, "eval", key)
    if not train and not held_out:
        raise ValueError(f"{metrics}: no loss to draw")
    entropies = [r["unigram_entropy"] for r in records if r["kind"] == "eval" and r.get("unigram_entropy")]
    entropy = entropies[-1] if key == "loss_per_byte" and entropies else None

    def draw(axes: Any) -> None:
        _draw(axes, train, held_out, entropy)
        axes.set_ylabel(
            "loss, nats per byte" if key == "loss_per_byte" else "loss, nats per token", color=INK
        )

    return _picture("loss", draw, out, title)


def plot_loads(metrics: str | Path, out: str | Path, *, title: str = "") -> Path | None:
    """Plot the load of each layer's busiest and idlest expert over steps to the PNG `out`, as `plot_loss`.

    The load of an expert is its number of tokens over the mean of its layer.
    """
    records = [r for r in read_metrics(metrics) if r["kind"] == "experts"]
    if not records:
        raise ValueError(f"{metrics}: no load of experts to draw")
    return _picture("load", lambda axes: _draw_loads(axes, records), out, title)


def plot_runs(runs: Mapping[str, str | Path], out: str | Path, *, title: str = "") -> Path | None:
    """Plot the loss of several runs, {name: metrics.jsonl}, over steps to the PNG `out`, as `plot_loss`.

    Lines are smoothed training losses, dots held-out losses, in nats per token.
    """
    curves = {name: read_metrics(metrics) for name, metrics in runs.items()}

    def draw(axes: Any) -> None:
        for number, (name, records) in enumerate(curves.items()):
            color, train = CURVES[number % len(CURVES)], _points(records, "train", "loss")
            axes.plot(*zip(*_smooth(train)), color=color, linewidth=1.4, label=name)
            held_out = _points(records, "eval", "loss")
            if held_out:
                axes.plot(*zip(*held_out), color=color, linestyle="", marker="o", markersize=4)
        axes.set_ylabel("loss, nats per token", color=INK)
        axes.legend(frameon=False, fontsize=9, loc="upper right", labelcolor=INK)

    return _picture("loss", draw, out, title)


def plot_learning_rates(
    optimizers: Mapping[str, OptimizerConfig], total_steps: int, out: str | Path, *, title: str = ""
) -> Path | None:
    """Plot the learning rate of each of `optimizers`, {name: config}, to the PNG `out`, as `plot_loss`."""

    def draw(axes: Any) -> None:
        for number, (name, config) in enumerate(optimizers.items()):
            rates = [learning_rate(step, config, total_steps) for step in range(total_steps)]
            width = 1.4 + 0.8 * (len(optimizers) - 1 - number)  # where curves are one, all of them are seen
            axes.plot(rates, color=CURVES[number % len(CURVES)], linewidth=width, label=name)
        axes.set_ylim(bottom=0.0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        axes.set_ylabel("learning rate", color=INK)
        axes.legend(frameon=False, fontsize=9, loc="lower center", labelcolor=INK)

    return _picture("learning rate", draw, out, title)


def _picture(name: str, draw: Callable[[Any], None], out: str | Path, title: str) -> Path | None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        to_stderr(f"fastmp: no {name} plot: matplotlib is missing (pip install matplotlib)")
        return None
    figure = Figure(figsize=(8.0, 4.5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _frame(axes)
    draw(axes)
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
    """Return the means over windows centred on each point, about a twentieth of the run wide."""
    half, smooth = len(points) // 40, []
    for i, (step, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        window = [loss for _, loss in points[i - reach : i + reach + 1]]
        smooth.append((step, sum(window) / len(window)))
    return smooth


def _frame(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("step", color=INK)
    axes.margins(x=0.02)


def _draw_loads(axes: Any, records: list[dict[str, Any]]) -> None:
    from matplotlib import colormaps

    steps = [r["step"] for r in records]
    num_layers = len(records[0]["max_load"])
    named = {*range(num_layers)} if num_layers <= 8 else {0, num_layers - 1}
    for layer in range(num_layers):
        colour = colormaps["viridis"](0.9 * layer / max(num_layers - 1, 1))
        highest, lowest = ([r[key][layer] for r in records] for key in ("max_load", "min_load"))
        label = f"layer {layer + 1}" if layer in named else None
        axes.plot(steps, highest, color=colour, linewidth=1.6, label=label)
        axes.plot(steps, lowest, color=colour, linewidth=1.0, linestyle=(0, (2, 2)))
    axes.axhline(1.0, color=ENTROPY, linewidth=1.0, zorder=1)
    axes.set_ylim(bottom=0.0)
    axes.set_ylabel("load of the busiest (dotted: idlest) expert", color=INK)
    axes.legend(frameon=False, fontsize=9, loc="upper right", labelcolor=INK)


def _draw(
    axes: Any, train: list[tuple[int, float]], held_out: list[tuple[int, float]], entropy: float | None
) -> None:
    if train:
        smooth = _smooth(train)
        if len(train) >= 60:
            axes.plot(*zip(*train), color=TRAIN, linewidth=0.8, alpha=0.3)
        axes.plot(*zip(*smooth), color=TRAIN, linewidth=1.8, label="training")
    if held_out:
        dots = {"marker": "o", "markersize": 5, "linewidth": 1.2, "zorder": 3}
        axes.plot(*zip(*held_out), color=HELD_OUT, label="held-out", **dots)
        step, loss = held_out[-1]
        place = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{loss:.2f}", (step, loss), color=HELD_OUT, fontsize=10, **place)
    if entropy is not None:
        axes.axhline(entropy, color=ENTROPY, linewidth=1.2, linestyle=(0, (5, 4)))
        text = f"unigram entropy of the held-out text, {entropy:.2f}"
        place = {"xycoords": ("axes fraction", "data"), "xytext": (0, 5), "textcoords": "offset points"}
        axes.annotate(text, (1.0, entropy), ha="right", color=ENTROPY, fontsize=9, **place)
    axes.legend(frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1.0, 0.9), labelcolor=INK)
