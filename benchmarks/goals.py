"""Goals on an H200: bounds of shares, times and speed-ups, judged by `benchmarks.report`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.report import Timing

OURS = "fastmp"
Values = Callable[["Sequence[Timing]"], dict[str, float]]


@dataclass(frozen=True)
class GpuGoal:
    """A required bound on an H200 in bfloat16, for every timed shape.

    `values` returns {case: our best figure}. `wanted` bounds the figures from below, or from above if `most`.
    """

    what: str
    wanted: float
    values: Values
    unit: str
    most: bool = False

    def worst(self, timings: Sequence[Timing]) -> float | None:
        values = self.values([timing for timing in timings if timing.dtype == "bfloat16"]).values()
        return (max if self.most else min)(values, default=None)

    def met(self, value: float) -> bool:
        return value <= self.wanted if self.most else value >= self.wanted


def _best(
    timings: Iterable[Timing], attribute: str = "ms", best: Callable[..., float] = min
) -> dict[str, float]:
    found: dict[str, float] = {}
    for timing in timings:
        value = getattr(timing, attribute)
        found[timing.case] = best(found.get(timing.case, value), value)
    return found


def _ours(
    direction: str, names: Sequence[str], attribute: str = "share", best: Callable[..., float] = max,
    *, shapes: Sequence[str] = ("",), unit: float = 1.0,
) -> Values:  # fmt: skip
    """Read an attribute of our rows, by default `share`, where a case has one of `shapes`."""

    def values(timings: Sequence[Timing]) -> dict[str, float]:
        ours = (t for t in timings if t.ours and t.direction == direction and t.workload in names)
        found = _best((t for t in ours if any(shape in t.case for shape in shapes)), attribute, best)
        return {case: value / unit for case, value in found.items()}

    return values


def _kernel(*ops: str, shapes: Sequence[str] = ("",)) -> Values:
    return _ours("kernel", ops, shapes=shapes)


def _ms(op: str) -> Values:
    return _ours("kernel", (op,), "ms", min)


def _times_as_fast(workload: str, rival: str, direction: str) -> Values:
    """Compute the speed-up over a rival; "backward" is the time of both directions less the forward's."""

    def values(timings: Sequence[Timing]) -> dict[str, float]:
        def times(ours: bool, direction: str) -> dict[str, float]:
            if direction == "backward":
                both, forward = times(ours, "both"), times(ours, "forward")
                return {case: ms - forward[case] for case, ms in both.items() if case in forward}
            rows = (t for t in timings if (t.workload, t.direction) == (workload, direction))
            return _best(t for t in rows if (t.ours if ours else t.rival == rival))

        ours, theirs = times(True, direction), times(False, direction)
        return {case: theirs[case] / ms for case, ms in ours.items() if case in theirs and ms > 0}

    return values


_CE, _LCE, _EXTRA = "cross_entropy", "linear_cross_entropy", "extra_bytes"
_SHARE, _EAGER, _COMPILE = "of sustained", "torch eager", "torch.compile"
_LLAMA = ("[4096, 4096, 128256]",)
_LARGE_EXPERTS = ("[4, ", "[8, ", "[16, ")
_LIGER_MEGATRON, _MEGATRON = "Liger for Megatron", "as Megatron, compiled"
H200_GOALS = (
    GpuGoal("cross-entropy forward", 0.92, _kernel("cross_entropy_stats"), _SHARE),
    GpuGoal("cross-entropy backward, in place", 0.93, _kernel("cross_entropy_grad_"), _SHARE),
    GpuGoal("cross-entropy", 3.2, _times_as_fast(_CE, _LIGER_MEGATRON, "both"), f"x {_LIGER_MEGATRON}"),
    GpuGoal("cross-entropy", 7.0, _times_as_fast(_CE, _MEGATRON, "both"), f"x {_MEGATRON}"),
    GpuGoal("linear + cross-entropy", 0.93, _ours("both", [_LCE]), _SHARE),
    GpuGoal("linear + cross-entropy", 17.6, _ours("both", [_LCE], "ms", min, shapes=_LLAMA), "ms", most=True),
    GpuGoal(
        "linear + cross-entropy", 1.1, _ours("both", [_LCE], _EXTRA, min, unit=1e9), "GB extra", most=True
    ),
    GpuGoal("bias-GeLU forward", 0.95, _kernel("bias_gelu"), _SHARE),
    GpuGoal("bias-GeLU backward with bias gradient", 0.92, _kernel("bias_gelu_backward"), _SHARE),
    GpuGoal("SwiGLU and GeGLU forward", 0.95, _kernel("gated_activation"), _SHARE),
    GpuGoal("SwiGLU and GeGLU backward", 0.92, _kernel("gated_activation_backward"), _SHARE),
    GpuGoal("norms forward", 0.94, _kernel("rms_norm", "layer_norm"), _SHARE),
    GpuGoal("norms backward", 0.88, _kernel("rms_norm_backward", "layer_norm_backward"), _SHARE),
    GpuGoal("RMSNorm backward", 1.5, _times_as_fast("rms_norm", "Liger", "backward"), "x Liger"),
    GpuGoal("LayerNorm backward", 1.5, _times_as_fast("layer_norm", "Liger", "backward"), "x Liger"),
    GpuGoal("RoPE in place", 0.92, _kernel("rope_"), _SHARE),
    GpuGoal("bias-dropout-add forward", 0.92, _kernel("bias_dropout_add"), _SHARE),
    GpuGoal("bias-dropout-add backward", 0.95, _kernel("bias_dropout_add_backward"), _SHARE),
    GpuGoal("AdamW", 0.95, _kernel("adamw_"), _SHARE),
    GpuGoal("rows to and from peers, one device", 0.8, _kernel("exchange_push", "exchange_pull"), _SHARE),
    GpuGoal("rows into and out of own memory", 0.8, _kernel("exchange_give", "exchange_take"), _SHARE),
    GpuGoal("router forward", 0.005, _ms("topk_router"), "ms", most=True),
    GpuGoal("router backward", 0.007, _ms("topk_router_backward"), "ms", most=True),
    GpuGoal("router", 6.0, _times_as_fast("router", _EAGER, "both"), f"x {_EAGER}"),
    GpuGoal("router", 2.5, _times_as_fast("router", _COMPILE, "both"), f"x {_COMPILE}"),
    GpuGoal("grouped router", 6.0, _times_as_fast("router grouped", _EAGER, "both"), f"x {_EAGER}"),
    GpuGoal("grouped router", 2.5, _times_as_fast("router grouped", _COMPILE, "both"), f"x {_COMPILE}"),
    GpuGoal("permutation", 0.012, _ms("permutation"), "ms", most=True),
    GpuGoal("permute", 0.90, _kernel("permute"), _SHARE),
    GpuGoal("unpermute forward and backward", 0.88, _kernel("unpermute", "unpermute_backward"), _SHARE),
    GpuGoal("unpermute", 2.0, _times_as_fast("unpermute", _EAGER, "both"), f"x {_EAGER}"),
    GpuGoal(
        "grouped products, large experts", 0.90, _kernel("grouped_mm", shapes=_LARGE_EXPERTS), "of floor"
    ),
    GpuGoal("grouped products, all shapes", 0.80, _kernel("grouped_mm"), _SHARE),
    GpuGoal(
        "grouped products", 1.02, _times_as_fast("grouped_mm", "torch fused", "forward"), "x torch fused"
    ),
    GpuGoal("grouped products, weight gradient added", 0.88, _kernel("grouped_mm_wgrad_"), _SHARE),
    GpuGoal("experts in graphs", 1.3, _times_as_fast("graphed_moe_layer", OURS, "step"), "x eager"),
)
