"""`python -m benchmarks.report FILE...`: benchmark results as Markdown tables and a roofline picture.

It reads what `pytest benchmarks/ --benchmark-json`, `python -m benchmarks.gpu_check --out` and `python -m
benchmarks.cpu_goals --out` write. It needs no torch, and matplotlib only for a picture. A goal that no file
speaks to is "not measured".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastmp.config.command_line import Parser

OURS = "fastmp"
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Timing:
    """One line of a table: a rival on a case, or one of our implementations of an op.

    `workload` is the op's or the workload's name, `direction` "kernel" for an op alone. `over_peer` is how
    many times as fast as the best peer it is. `predicted_ms` is what `benchmarks.predict` said before.
    """

    case: str
    workload: str
    dtype: str
    direction: str
    rival: str
    ms: float
    of_floor: float
    floor_of: str
    extra_bytes: int | None
    bytes: int
    flops: int
    best_peer: str | None = None
    over_peer: float | None = None
    predicted_ms: float | None = None

    @property
    def ours(self) -> bool:
        return self.direction == "kernel" or self.rival.startswith(OURS)


@dataclass(frozen=True)
class Result:
    """The content of a result file."""

    path: str
    environment: dict[str, Any]
    ceilings: dict[str, Any]
    timings: list[Timing]
    remarks: list[str] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)

    @property
    def title(self) -> str:
        described = self.environment
        where = [described.get("device", "unknown device")]
        if "threads" in described:
            where.append(f"{described['threads']} threads")
        versions = described.get("versions", {})
        where += [f"{name} {versions[name]}" for name in ("torch", "triton") if versions.get(name)]
        return ", ".join([*where, f"commit {described.get('commit', 'unknown')}"])

    @property
    def on_gpu(self) -> bool:
        return "capability" in self.environment


def read(path: str | Path) -> Result:
    """The result in a JSON file; ValueError naming the file where it is none of the three kinds."""
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if isinstance(content, dict):
        if "benchmarks" in content:
            return _read_pytest(str(path), content)
        if "correctness" in content:
            return _read_gpu_check(str(path), content)
        if "goals" in content:
            return _read_cpu_goals(str(path), content)
    raise ValueError(f"{path}: neither a result of pytest-benchmark nor of gpu_check or cpu_goals")


def _timing(row: dict[str, Any], **more: Any) -> Timing:
    names = Timing.__dataclass_fields__
    values = {name: value for name, value in {**row, **more}.items() if name in names}
    words = values["case"].split()
    values.setdefault("workload", words[0])
    values.setdefault("dtype", words[-1])
    return Timing(**values)


def _read_pytest(path: str, content: dict[str, Any]) -> Result:
    rows = [entry["extra_info"] for entry in content["benchmarks"] if "rival" in entry.get("extra_info", {})]
    if not rows:
        raise ValueError(f"{path}: holds no benchmark of fastmp")
    timings = [_timing(row) for row in rows]
    return Result(path, content.get("environment", {}), content.get("ceilings", {}), timings)


def predictions(device: str) -> dict[tuple[str, str, str], float]:
    """Return the predicted ms of (case, direction, rival) on a device, of kernels (case, "kernel", "")."""
    found = {}
    for path in sorted((Path(__file__).parent / "results").glob("predicted_*.json")):
        content = json.loads(path.read_text())
        if device.startswith(content["predicted"]["device"]):
            for row in content["rows"]:
                found[_case(row), row.get("direction", "kernel"), row.get("rival", "")] = row["ms"]
    return found


def _case(row: dict[str, Any]) -> str:
    return row.get("case") or f"{row['op']} {row['shape']} {row['dtype']}"


def _read_gpu_check(path: str, content: dict[str, Any]) -> Result:
    said = predictions(content["environment"]["device"])
    kernels = [
        _timing(
            row,
            predicted_ms=said.get((_case(row), "kernel", "")),
            case=_case(row),
            workload=row["op"],
            direction="kernel",
            rival=row["backend"],
        )
        for row in content.get("kernels", ())
        if "raised" not in row
    ]
    functions = [
        _timing(row, predicted_ms=said.get((row["case"], row["direction"], row["rival"])))
        for row in content.get("functions", ())
        if "raised" not in row
    ]
    checked = content["correctness"]
    remarks = [f"{sum(row['ok'] for row in checked)} of {len(checked)} checks against float64 are right"]
    for row in content.get("sanitizer", ()):
        remarks.append(f"compute-sanitizer {row['tool']}: {row.get('raised') or row['errors']} errors")
    if left := content.get("left"):
        remarks.append(f"{len(left)} left, from {left[0]} on")
    ceilings = content.get("ceilings", {})
    return Result(path, content["environment"], ceilings, kernels + functions, remarks)


def _read_cpu_goals(path: str, content: dict[str, Any]) -> Result:
    goals = content["goals"]
    if any("ours" not in entry for entry in goals):
        raise ValueError(f"{path}: an older form of cpu_goals; run it again")
    timings = {}
    for entry in goals:
        for row in filter(None, (entry["ours"], entry["other"], entry["compile"])):
            timing = _timing(row, case=entry["case"], direction=entry["goal"]["direction"])
            timings.setdefault((timing.case, timing.direction, timing.rival), timing)
    return Result(path, content, content.get("ceilings", {}), list(timings.values()), goals=goals)


Values = Callable[[Sequence[Timing]], dict[str, float]]


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
    *ops: str, attribute: str = "of_floor", best: Callable[..., float] = max, shapes: Sequence[str] = ("",)
) -> Values:
    """Read an attribute of ops alone, by default the share of the floor, where a case has one of `shapes`."""

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
_LARGE_EXPERTS = ("[4, ", "[8, ", "[16, ")
_LIGER_MEGATRON, _MEGATRON = "Liger for Megatron", "as Megatron, compiled"
H200_GOALS = (
    GpuGoal("cross-entropy forward", 0.92, _kernel("cross_entropy_stats"), "of floor"),
    GpuGoal("cross-entropy backward, in place", 0.93, _kernel("cross_entropy_grad_"), "of floor"),
    GpuGoal("cross-entropy", 3.2, _times_as_fast(_CE, _LIGER_MEGATRON, "both"), f"x {_LIGER_MEGATRON}"),
    GpuGoal("cross-entropy", 7.0, _times_as_fast(_CE, _MEGATRON, "both"), f"x {_MEGATRON}"),
    GpuGoal("linear + cross-entropy", 0.93, _used(_LCE, "of_floor", max), "of floor"),
    GpuGoal("linear + cross-entropy", 17.6, _used(_LCE, "ms", min, "[4096, 4096, 128256]"), "ms", most=True),
    GpuGoal("linear + cross-entropy", 1.1, _used(_LCE, "extra_bytes", min, unit=1e9), "GB extra", most=True),
    GpuGoal("bias-GeLU forward", 0.95, _kernel("bias_gelu"), "of floor"),
    GpuGoal("bias-GeLU backward with bias gradient", 0.92, _kernel("bias_gelu_backward"), "of floor"),
    GpuGoal("SwiGLU and GeGLU forward", 0.95, _kernel("gated_activation"), "of floor"),
    GpuGoal("SwiGLU and GeGLU backward", 0.92, _kernel("gated_activation_backward"), "of floor"),
    GpuGoal("norms forward", 0.94, _kernel("rms_norm", "layer_norm"), "of floor"),
    GpuGoal("norms backward", 0.88, _kernel("rms_norm_backward", "layer_norm_backward"), "of floor"),
    GpuGoal("RMSNorm backward", 1.5, _times_as_fast("rms_norm", "Liger", "backward"), "x Liger"),
    GpuGoal("LayerNorm backward", 1.5, _times_as_fast("layer_norm", "Liger", "backward"), "x Liger"),
    GpuGoal("RoPE in place", 0.92, _kernel("rope_"), "of floor"),
    GpuGoal("bias-dropout-add forward", 0.92, _kernel("bias_dropout_add"), "of floor"),
    GpuGoal("bias-dropout-add backward", 0.95, _kernel("bias_dropout_add_backward"), "of floor"),
    GpuGoal("AdamW", 0.95, _kernel("adamw_"), "of floor"),
    GpuGoal("rows to and from peers, one device", 0.8, _kernel("exchange_push", "exchange_pull"), "of floor"),
    GpuGoal("rows into and out of own memory", 0.8, _kernel("exchange_give", "exchange_take"), "of floor"),
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
    GpuGoal("permute", 0.90, _kernel("permute"), "of floor"),
    GpuGoal("unpermute forward and backward", 0.88, _kernel("unpermute", "unpermute_backward"), "of floor"),
    GpuGoal("unpermute", 2.0, _times_as_fast("unpermute", "torch eager", "both"), "x torch eager"),
    GpuGoal(
        "grouped products, large experts", 0.90, _kernel("grouped_mm", shapes=_LARGE_EXPERTS), "of floor"
    ),
    GpuGoal("grouped products, all shapes", 0.80, _kernel("grouped_mm"), "of floor"),
    GpuGoal(
        "grouped products", 1.02, _times_as_fast("grouped_mm", "torch fused", "forward"), "x torch fused"
    ),
    GpuGoal("grouped products, weight gradient added", 0.88, _kernel("grouped_mm_wgrad_"), "of floor"),
    GpuGoal("experts in graphs", 1.3, _times_as_fast("graphed_moe_layer", OURS, "step"), "x eager"),
)


def goal_rows(results: Sequence[Result]) -> list[list[str]]:
    """Return a row (on, what, goal, measured, state) for each goal of a device that has a file."""
    on_h200 = [r for r in results if r.on_gpu and "H200" in r.environment["device"]]
    timings = [timing for result in on_h200 for timing in result.timings]
    rows = []
    for goal in H200_GOALS if on_h200 else ():
        value = goal.worst(timings)
        sign = "at most" if goal.most else "at least"
        state = NOT_MEASURED if value is None else "met" if goal.met(value) else "missed"
        measured = "" if value is None else f"{value:.4g}"
        rows.append(["H200", goal.what, f"{sign} {goal.wanted:.4g} {goal.unit}", measured, state])
    entries = [entry for result in results for entry in result.goals]
    for entry in entries:
        goal, factor = entry["goal"], f"{entry['factor']:.2f}"
        what = f"{entry['case']} {_direction(goal['direction'])}, {goal['rival']}"
        wanted = f"at least {entry['wanted']:.4g} x {goal['over']}"
        if goal.get("extra_bytes") is not None:
            share = entry["ours"]["extra_bytes"] / max(entry["other"]["extra_bytes"], 1)
            wanted += f", at most {goal['extra_bytes']:.4g} of its extra memory"
            factor += f", {share:.3f}"
        rows.append(["CPU", what, wanted, factor, "met" if entry["ok"] else "missed"])
    return rows


def _direction(name: str) -> str:
    return {"both": "forward+backward"}.get(name, name)


def _time(ms: float) -> str:
    return f"{ms * 1e3:.1f} us" if ms < 0.1 else f"{ms:.3f} ms" if ms < 10 else f"{ms:.1f} ms"


def size(num_bytes: float | None) -> str:
    """Return a size in the unit that leaves a few digits: 512 B, 33 KiB, 1.6 GiB."""
    if num_bytes is None:
        return NOT_MEASURED
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} GiB"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def markdown(results: Sequence[Result]) -> str:
    """Return the goals of the devices in the files, then every file's own table."""
    lines = ["# Benchmarks"]
    if rows := goal_rows(results):
        lines += ["", "## Goals", "", *_table(["on", "what", "goal", "measured", "state"], rows)]
    for result in results:
        lines += ["", f"## {result.title}", "", f"`{Path(result.path).name}`"]
        lines += [f"- {remark}" for remark in (*_ceilings(result), *result.remarks)]
        if not result.timings:
            lines += ["", f"Times: {NOT_MEASURED}."]
            continue
        header = ["case", "direction", "by", "time", "of floor", "to best peer", "extra memory"]
        header += ["predicted"] if (predicted := any(t.predicted_ms for t in result.timings)) else []
        lines += ["", *_table(header, (_cells(t)[: 8 if predicted else 7] for t in result.timings))]
    return "\n".join(lines) + "\n"


def _ceilings(result: Result) -> Iterator[str]:
    if "copy_gbs" in result.ceilings:
        yield f"copy {result.ceilings['copy_gbs']:.4g} GB/s"
    for dtype, rate in result.ceilings.get("gemm_tflops", {}).items():
        yield f"{dtype} matrix products {rate:.4g} TFLOP/s"


def _cells(timing: Timing) -> list[str]:
    peer = "" if timing.over_peer is None else f"{timing.over_peer:.2f}x {timing.best_peer}"
    floor = f"{timing.of_floor:.1%}" + ("" if timing.floor_of == "copy" else f" ({timing.floor_of})")
    direction = _direction(timing.direction)
    time = _time(timing.ms)
    said = "" if timing.predicted_ms is None else _time(timing.predicted_ms)
    return [timing.case, direction, timing.rival, time, floor, peer, size(timing.extra_bytes), said]


INK, MUTED, FAINT = "#1f2937", "#9ca3af", "#e5e7eb"
PALETTE = ("#3b6fb6", "#c4572e", "#4d9a5b", "#8a5bb0", "#b8860b", "#2aa0a4", "#c2508a", "#6b7280")
_MAX_POINTS = 28  # in one panel


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
        label = f"{number}  {timing.case} {_direction(timing.direction)}  {timing.of_floor:.0%}"
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


_NEAR = {"textcoords": "offset points"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables or write them to --out; return 1, with one line on stderr, on failure."""
    parser = Parser(prog="python -m benchmarks.report", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE", help="JSON of the benchmarks")
    parser.add_argument(
        "--out",
        action="append",
        default=[],
        metavar="PATH",
        help="write tables (.md) or a roofline picture (.png, .svg), repeatable; else tables are printed",
    )
    options = parser.parse_args(argv)
    try:
        results = [read(path) for path in options.files]
        for out in map(Path, options.out):
            if out.suffix == ".md":
                out.write_text(markdown(results))
            else:
                roofline(results, out)
            print(out)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    if not options.out:
        print(markdown(results), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
