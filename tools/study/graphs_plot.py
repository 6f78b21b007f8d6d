"""The picture of `python -m tools.study graphs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fastmp.plan.schedule_plot import INK
from tools.study.plot import COLOURS, figure, plain


def draw_hosts(host_us: Mapping[str, Mapping[str, float]], gpu_us: Mapping[int, float], out: Path) -> None:
    """Draw microseconds of a layer: the host's {kind: {scope: us}}, and the GPU's {tokens: us}."""
    made = figure(9.0, 3.2)
    axes = made.subplots(1, 1)
    bars = [(f"{kind}: {name}", took) for kind, scopes in host_us.items() for name, took in scopes.items()]
    colours = [COLOURS[list(host_us).index(name.split(":")[0])] for name, _ in bars]
    axes.barh([name for name, _ in bars], [took for _, took in bars], color=colours)
    axes.invert_yaxis()
    most = max(took for _, took in bars)
    for tokens, took in gpu_us.items():
        if took < 1.2 * most:
            axes.axvline(took, color=INK, linewidth=0.8, linestyle=":")
            axes.text(took, -0.6, f" H100, {tokens} tokens", fontsize=7, color=INK, va="bottom")
    axes.set_xlabel("host us of a layer and microbatch, forward and backward", color=INK, fontsize=9)
    plain(axes, "")
    made.savefig(out)
