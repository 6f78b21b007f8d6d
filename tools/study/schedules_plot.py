"""The picture of `python -m tools.study schedules`: idle time over microbatches, and what the fullest
rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastmp.plan.schedule_plot import INK
from tools.study.plot import COLOURS, figure, plain

_LINES = {"1f1b": "-", "zero_bubble": "--", "dualpipe_v": ":"}


def draw_bubbles(cells: Sequence[Any], out: Path) -> None:
    """Draw cells of `tools.study.schedules`: a panel for each number of ranks, and one for memory."""
    made = figure(12.0, 3.8)
    pipelines = sorted({cell.schedule.pp for cell in cells})
    *panels, memory = made.subplots(1, len(pipelines) + 1)
    for axes, pp in zip(panels, pipelines, strict=True):
        lines: dict[tuple[str, int], list[Any]] = {}
        for cell in cells:
            if cell.schedule.pp == pp:
                lines.setdefault((cell.schedule.name, cell.schedule.vpp), []).append(cell)
        chunks = sorted({vpp for _, vpp in lines})
        for (name, vpp), own in lines.items():
            axes.plot(
                [cell.schedule.num_microbatches for cell in own],
                [100 * cell.run.bubble for cell in own],
                _LINES[name],
                marker="o",
                markersize=3,
                color=COLOURS[chunks.index(vpp)],
                label=f"{name}, {vpp} chunk{'s' if vpp > 1 else ''}",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(0.3, 120)
        plain(axes, f"{pp} ranks")
        axes.set_xlabel("microbatches", color=INK, fontsize=9)
    panels[0].set_ylabel("idle time in % of the work", color=INK, fontsize=9)
    held = [own[-1] for own in lines.values()]
    names = [f"{cell.schedule.name}, {cell.schedule.vpp}" for cell in held]
    shares = [max(cell.run.peak_activations) / (cell.schedule.pp * cell.schedule.vpp) for cell in held]
    memory.barh(names, shares, color=[COLOURS[chunks.index(cell.schedule.vpp)] for cell in held])
    memory.invert_yaxis()
    plain(memory, f"fullest of {pipelines[-1]} ranks")
    memory.set_xlabel("activations, in those of a model", color=INK, fontsize=9)
    lines_of = panels[0].get_legend_handles_labels()
    made.legend(*lines_of, loc="outside lower center", ncols=7, frameon=False, fontsize=8)
    made.savefig(out)
