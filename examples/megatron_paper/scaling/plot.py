"""The pictures of `python -m examples.megatron_paper scaling`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastmp.plan.schedule_plot import INK
from tools.study.plot import COLOURS, figure, plain


def draw_residuals(rows: Sequence[Any], out: Path) -> None:
    """Draw published and predicted efficiencies and speed-ups: rows of `study`."""
    made = figure(9.0, 3.6)
    panels = {"%": "efficiency", "x": "times as fast as one GPU"}
    for axes, (unit, title) in zip(made.subplots(1, 2, width_ratios=[2, 1]), panels.items(), strict=True):
        own = [row for row in rows if row.unit == unit]
        for at, name, colour in ((-0.2, "published", COLOURS[0]), (0.2, "predicted", COLOURS[1])):
            places = [i + at for i in range(len(own))]
            axes.bar(places, [getattr(row, name) for row in own], 0.4, color=colour, label=name)
        names = [row.what.split(" on ")[1].replace(", ", "\n").replace(" (", "\n(") for row in own]
        axes.set_xticks(range(len(own)), names)
        plain(axes, title)
        axes.tick_params(axis="x", labelsize=6)
    axes.legend(frameon=False, fontsize=8)
    made.savefig(out)


def draw_hardware(modern: Mapping[str, Sequence[tuple[int, Any, float]]], out: Path) -> None:
    """Draw the weak scaling of Table 1 on each GPU, {name: [(GPUs, step, efficiency)]}."""
    made = figure(9.0, 3.4)
    axes = made.subplots(1, 1)
    for colour, (name, jobs) in zip(COLOURS, modern.items(), strict=True):
        shares, half = [share for *_, share in jobs], len(jobs) // 2
        axes.plot(range(half), shares[:half], "o-", color=colour, label=name.upper(), markersize=4)
        axes.plot(range(half, 2 * half), shares[half:], "o-", color=colour, markersize=4)
    axes.set_xticks(range(len(jobs)), [str(gpus) for gpus, *_ in jobs])
    axes.set_xlabel("GPUs: 1 to 8 divide a model, and 64 such groups", color=INK, fontsize=9)
    axes.set_ylim(0, 1.2)
    plain(axes, "FLOP/s of a GPU over those of one GPU alone (predicted)")
    axes.legend(frameon=False, fontsize=8)
    made.savefig(out)
