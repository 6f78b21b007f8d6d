"""`python -m benchmarks.report FILE...`: benchmark results as Markdown tables and a roofline picture.

It reads what `pytest benchmarks/ --benchmark-json` and, with --out, `python -m benchmarks.gpu_check`,
`benchmarks.cpu_goals` and `benchmarks.bench_transformers` write. It needs no torch, and matplotlib only for a
picture. A goal that no file speaks to is "not measured".
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.goals import H200_GOALS, OURS
from fastmp.config.command_line import Parser

NOT_MEASURED = "not measured"
_PUBLISHED = Path(__file__).with_name("published.toml")


@dataclass(frozen=True)
class Timing:
    """One line of a table: a rival on a case, or one of our implementations of an op.

    `workload` is the op's or the workload's name, `direction` "kernel" for an op alone. `over_peer` is how
    many times as fast as the best peer it is. `predicted_ms` is what `benchmarks.predict` said before.
    `of_floor` is the share of the best rates, `of_sustained` that of the rates in the same rounds; it and the
    columns of `benchmarks.conditions` are None in older files and on CPUs.
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
    called_ms: float | None = None
    of_sustained: float | None = None
    modes: Sequence[float] | None = None
    state: dict[str, Any] | None = None
    changed: Sequence[str] = ()

    @property
    def share(self) -> float:
        """The share that goals bound: of sustained rates, or of the best ones in a file without them."""
        return self.of_floor if self.of_sustained is None else self.of_sustained

    @property
    def ours(self) -> bool:
        return self.direction == "kernel" or self.rival.startswith(OURS)


@dataclass(frozen=True)
class Figure:
    """A published figure of `cases`, beginnings of names, in ms, gbs (GB/s), tflops (TFLOP/s) or tokens/s."""

    cases: list[str]
    direction: str
    value: float
    unit: str
    gpu: str
    source: str


Figures = list[Figure]
Table = tuple[str, list[str], list[list[str]]]  # title, header, rows


@dataclass(frozen=True)
class Result:
    """The content of a result file."""

    path: str
    environment: dict[str, Any]
    ceilings: dict[str, Any]
    timings: list[Timing]
    remarks: list[str] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

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
    """The result in a JSON file; ValueError naming the file where it is none of these kinds."""
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
        if "transformers" in content:
            return _read_transformers(str(path), content)
    raise ValueError(
        f"{path}: neither a result of pytest-benchmark nor of gpu_check, cpu_goals or bench_transformers"
    )


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
    sensors = content["environment"].get("sensors", "not recorded")
    remarks += [f"clocks, power and temperature: {sensors}"]
    if all(timing.of_sustained is None for timing in kernels + functions):
        remarks.append("shares are of the best rates: the sustained ones were not measured")
    if changed := sum(bool(timing.changed) for timing in kernels + functions):
        remarks.append(f"{changed} rows in whose rounds the GPU changed its state: see the column")
    if left := content.get("left"):
        remarks.append(f"{len(left)} left, from {left[0]} on")
    ceilings = content.get("ceilings", {})
    tables = [*_training(content.get("recipes", ()))]
    return Result(path, content["environment"], ceilings, kernels + functions, remarks, tables=tables)


def _training(rows: Sequence[dict[str, Any]]) -> Iterator[Table]:
    """Yield the table of training runs, and the kernels of a step of those that were profiled."""
    figures = [
        [row["recipe"], row["raised"], "", ""]
        if "raised" in row
        else [
            row["recipe"],
            f"{row['tokens_per_second']:,.0f}",
            size(row["memory_bytes"]),
            f"{row['loss']:.4f}",
        ]
        for row in rows
    ]
    if figures:
        yield "Training", ["recipe", "tokens/s", "peak memory", "loss"], figures
    for row in (row for row in rows if row.get("kernels")):
        total = row["kernels_ms"]
        title = f"Kernels of a step of {row['recipe']}: {total:.1f} ms within {row['span_ms']:.1f} ms"
        yield (
            title,
            ["kernel", "time", "share"],
            [[k, _time(ms), f"{ms / total:.1%}"] for k, ms in row["kernels"]],
        )


def _read_transformers(path: str, content: dict[str, Any]) -> Result:
    """Read the rows of `benchmarks.bench_transformers`."""
    figures, rows = published() if "capability" in content else [], []
    for row in content["rows"]:
        cells = [row["case"], row["dtype"], row["by"]]
        if "raised" in row:
            rows.append([*cells, row["raised"], "", "", "", ""])
            continue
        rate = f"{row['tokens/s']:,.0f}" if "tokens/s" in row else ""
        ratio = f"{1 / row['of eager']:.2f}x" if "of eager" in row else ""
        known = (f for f in figures if f.unit == "tokens/s" and row["case"].startswith(tuple(f.cases)))
        best = max(known, key=lambda figure: figure.value, default=None)
        said = "" if best is None else f"{best.value:,.0f} tokens/s, {best.gpu}, {best.source}"
        rows.append([*cells, _time(row["ms"]), rate, ratio, size(row["peak MiB"] * 2**20), said])
    header = ["model", "dtype", "by", "forward+backward", "tokens/s", "to eager", "peak memory"]
    table = "Models of transformers", [*header, "best published, source"], rows
    return Result(path, content, {}, [], [f"transformers {content['transformers']}"], tables=[table])


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
        what = f"{entry['case']} {direction_words(goal['direction'])}, {goal['rival']}"
        wanted = f"at least {entry['wanted']:.4g} x {goal['over']}"
        if goal.get("extra_bytes") is not None:
            share = entry["ours"]["extra_bytes"] / max(entry["other"]["extra_bytes"], 1)
            wanted += f", at most {goal['extra_bytes']:.4g} of its extra memory"
            factor += f", {share:.3f}"
        rows.append(["CPU", what, wanted, factor, "met" if entry["ok"] else "missed"])
    return rows


def direction_words(name: str) -> str:
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
        lines += ["", "## Goals", "", "Files without sustained rates are judged by the best ones.", ""]
        lines += _table(["on", "what", "goal", "measured", "state"], rows)
    for result in results:
        lines += ["", f"## {result.title}", "", f"`{Path(result.path).name}`"]
        lines += [f"- {remark}" for remark in (*_ceilings(result), *result.remarks)]
        for title, header, rows in result.tables:
            lines += ["", f"### {title}", "", *_table(header, rows)]
        if not result.timings:
            lines += [] if result.tables else ["", f"Times: {NOT_MEASURED}."]
            continue
        figures = published() if result.on_gpu else []
        columns = {name: [cell(t, figures) for t in result.timings] for name, cell in _COLUMNS.items()}
        columns = {name: cells for name, cells in columns.items() if any(cells) or name == _TO_PEER}
        lines += ["", *_table([*columns], zip(*columns.values(), strict=True))]
    return "\n".join(lines) + "\n"


def _ceilings(result: Result) -> Iterator[str]:
    if "copy_gbs" in result.ceilings:
        yield f"copy {result.ceilings['copy_gbs']:.4g} GB/s"
    for dtype, rate in result.ceilings.get("gemm_tflops", {}).items():
        yield f"{dtype} matrix products {rate:.4g} TFLOP/s"


def _share(timing: Timing, figures: Figures) -> str:
    return f"{timing.of_floor:.1%}" + ("" if timing.floor_of == "copy" else f" ({timing.floor_of})")


def _called(timing: Timing, figures: Figures) -> str:
    """Return the time with launches, where another one is the time that counts."""
    return "" if timing.called_ms in (None, timing.ms) else _time(timing.called_ms)


def _state(timing: Timing, figures: Figures) -> str:
    """Return clocks and power as least and most, throttle reasons, and in bold what changed."""
    state, words = timing.state or {}, []
    for name, unit in (("sm_mhz", "MHz"), ("watts", "W"), ("celsius", "C")):
        if state.get(name):
            words.append(" to ".join(dict.fromkeys(f"{value:.0f}" for value in state[name])) + f" {unit}")
    words += state.get("throttle", ())
    return ", ".join([*words, *(f"**{change}**" for change in timing.changed)])


def published() -> Figures:
    """Return the best published figures, with the GPU and the source of each."""
    return [Figure(**entry) for entry in tomllib.loads(_PUBLISHED.read_text())["figure"]]


def _published(timing: Timing, figures: Figures) -> str:
    """Return the least published time of the same work, and its source."""
    costs = {"gbs": timing.bytes / 1e6, "tflops": timing.flops / 1e9}
    found = [
        (figure.value if figure.unit == "ms" else costs[figure.unit] / figure.value, figure)
        for figure in figures
        if timing.ours
        and figure.direction == timing.direction
        and timing.case.startswith(tuple(figure.cases))
    ]
    if not found:
        return ""
    ms, figure = min(found, key=lambda pair: (pair[1].unit != "ms", pair[0]))
    rate = "" if figure.unit == "ms" else f" at {figure.value:,.4g} {_UNITS[figure.unit]}"
    return f"{_time(ms)}{rate}, {figure.gpu}, {figure.source}"


_UNITS = {"gbs": "GB/s", "tflops": "TFLOP/s"}
_TO_PEER = "to best peer"
# A column without a cell is left out, apart from that of peers.
_COLUMNS: dict[str, Callable[[Timing, Figures], str]] = {
    "case": lambda t, _: t.case,
    "direction": lambda t, _: direction_words(t.direction),
    "by": lambda t, _: t.rival,
    "time": lambda t, _: " and ".join(map(_time, t.modes or [t.ms])),
    "as called": _called,
    "of best": _share,
    "of sustained": lambda t, _: "" if t.of_sustained is None else f"{t.of_sustained:.1%}",
    _TO_PEER: lambda t, _: "" if t.over_peer is None else f"{t.over_peer:.2f}x {t.best_peer}",
    "extra memory": lambda t, _: size(t.extra_bytes),
    "state": _state,
    "predicted": lambda t, _: "" if t.predicted_ms is None else _time(t.predicted_ms),
    "best published, source": _published,
}


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
                from benchmarks.roofline import roofline

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
