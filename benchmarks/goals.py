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


def _best(timings: Iterable[Timing], attribute: str, best: Callable[..., float]) -> dict[str, float]:
    found: dict[str, float] = {}
    for timing in timings:
        value = getattr(timing, attribute)
        found[timing.case] = value if timing.case not in found else best(found[timing.case], value)
    return found


def _kernel(
    *ops: str, attribute: str = "share", best: Callable[..., float] = max, shapes: Sequence[str] = ("",)
) -> Values:
    """Read an attribute of ops alone, by default `share`, where a case has one of `shapes`."""

    def values(timings: Sequence[Timing]) -> dict[str, float]:
        kernels = (t for t in timings if t.direction == "kernel" and t.workload in ops)
        return _best((t for t in kernels if any(shape in t.case for shape in shapes)), attribute, best)

    return values


def _used(
    workload: str, attribute: str, best: Callable[..., float], shape: str = "", unit: float = 1.0
) -> Values:
    """Read an attribute of a public function, forward and backward."""

    def values(timings: Sequence[Timing]) -> dict[str, float]:
        wanted = (t for t in timings if (t.workload, t.direction, t.ours) == (workload, "both", True))
        found = _best((t for t in wanted if shape in t.case), attribute, best)
        return {case: value / unit for case, value in found.items()}

    return values


def _times_as_fast(workload: str, rival: str, direction: str) -> Values:
    """Compute the speed-up over a rival; "backward" is the time of both directions less the forward's."""

    def values(timings: Sequence[Timing]) -> dict[str, float]:
        rows = [t for t in timings if t.workload == workload]

        def times(direction: str, ours: bool) -> dict[str, float]:
            chosen = (t for t in rows if t.direction == direction and (t.ours if ours else t.rival == rival))
            return _best(chosen, "ms", min)

        if direction != "backward":
            ours, theirs = times(direction, True), times(direction, False)
        else:
            ours, theirs = (
                {case: ms - forward[case] for case, ms in times("both", side).items() if case in forward}
                for side, forward in ((True, times("forward", True)), (False, times("forward", False)))
            )
        return {case: theirs[case] / ms for case, ms in ours.items() if case in theirs and ms > 0}

    return values


_CE, _LCE = "cross_entropy", "linear_cross_entropy"
_SHARE = "of sustained"
_LARGE_EXPERTS = ("[4, ", "[8, ", "[16, ")
_LIGER_MEGATRON, _MEGATRON = "Liger for Megatron", "as Megatron, compiled"
H200_GOALS = (
    GpuGoal("cross-entropy forward", 0.92, _kernel("cross_entropy_stats"), _SHARE),
    GpuGoal("cross-entropy backward, in place", 0.93, _kernel("cross_entropy_grad_"), _SHARE),
    GpuGoal("cross-entropy", 3.2, _times_as_fast(_CE, _LIGER_MEGATRON, "both"), f"x {_LIGER_MEGATRON}"),
    GpuGoal("cross-entropy", 7.0, _times_as_fast(_CE, _MEGATRON, "both"), f"x {_MEGATRON}"),
    GpuGoal("linear + cross-entropy", 0.93, _used(_LCE, "share", max), _SHARE),
    GpuGoal("linear + cross-entropy", 17.6, _used(_LCE, "ms", min, "[4096, 4096, 128256]"), "ms", most=True),
    GpuGoal("linear + cross-entropy", 1.1, _used(_LCE, "extra_bytes", min, unit=1e9), "GB extra", most=True),
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
    GpuGoal("router forward", 0.005, _kernel("topk_router", attribute="ms", best=min), "ms", most=True),
    GpuGoal(
        "router backward", 0.007, _kernel("topk_router_backward", attribute="ms", best=min), "ms", most=True
    ),
    GpuGoal("router", 6.0, _times_as_fast("router", "torch eager", "both"), "x torch eager"),
    GpuGoal("router", 2.5, _times_as_fast("router", "torch.compile", "both"), "x torch.compile"),
    GpuGoal("grouped router", 6.0, _times_as_fast("router grouped", "torch eager", "both"), "x torch eager"),
    GpuGoal(
        "grouped router",
        2.5,
        _times_as_fast("router grouped", "torch.compile", "both"),
        "x torch.compile",
    ),
    GpuGoal("permutation", 0.012, _kernel("permutation", attribute="ms", best=min), "ms", most=True),
    GpuGoal("permute", 0.90, _kernel("permute"), _SHARE),
    GpuGoal("unpermute forward and backward", 0.88, _kernel("unpermute", "unpermute_backward"), _SHARE),
    GpuGoal("unpermute", 2.0, _times_as_fast("unpermute", "torch eager", "both"), "x torch eager"),
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
