"""`fastmp trace diff`: rank the gaps between a measured step and its estimate."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fastmp.config.command_line import Parser, exit_status
from fastmp.config.console import printable
from fastmp.config.file_access import FOREIGN_ERRORS
from fastmp.plan.resources import table
from fastmp.plan.step_gaps import Gap, StepTable, estimated_step, gaps, measured_step, read_trace


def main(arguments: list[str]) -> int:
    """Print the gaps, largest first; return 0, or 2 with an error on stderr."""
    parser = Parser(
        prog="fastmp trace diff",
        usage="fastmp trace diff MEASURED ESTIMATE [options]",
        description=(
            "Rank the gaps between a measured step and its estimate, by phase and by kernel.\n\n"
            "  fastmp trace diff runs/gpt/profile-10-13.json step.json"
        ),
    )
    parser.add_argument(
        "measured",
        metavar="MEASURED",
        type=Path,
        help="trace of torch.profiler (fastmp train --profile torch), or kernels of nsys stats --report "
        "cuda_gpu_trace --format json",
    )
    parser.add_argument(
        "estimate", metavar="ESTIMATE", type=Path, help="what fastmp plan time --trace has written"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers, as JSON")
    options = parser.parse_args(arguments)

    def work() -> None:
        measured = _of(options.measured, measured_step)
        estimated = _of(options.estimate, estimated_step)
        found = gaps(estimated, measured)
        if options.json:
            print(json.dumps(_facts(estimated, measured, found)))
        else:
            print("\n".join(_lines(estimated, measured, found)))

    return exit_status(parser.prog, work)


def _of(path: Path, reduce: Callable[[Any], StepTable]) -> StepTable:
    content = read_trace(path)
    try:
        return reduce(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except FOREIGN_ERRORS as error:
        raise ValueError(f"{path}: an event of another form than in the traces of torch: {error!r}") from None


def _facts(estimated: StepTable, measured: StepTable, found: list[Gap]) -> dict[str, object]:
    rows = [
        {
            "phase": row.phase,
            "what": row.what,
            "estimated": row.estimated,
            "measured": row.measured,
            "gap": row.gap,
        }
        for row in found
    ]
    return {"estimated": estimated.seconds, "measured": measured.seconds, "gaps": rows}


def _lines(estimated: StepTable, measured: StepTable, found: list[Gap]) -> Iterator[str]:
    ratio = measured.seconds / estimated.seconds
    yield (
        f"a step    measured {measured.seconds * 1e3:.4g} ms, estimated {estimated.seconds * 1e3:.4g} ms: "
        f"{ratio:.2f} of the estimate"
    )
    yield ""
    rows = [
        [
            printable(f"{row.what} ({row.phase})"),
            f"{row.estimated * 1e3:.3f}",
            f"{row.measured * 1e3:.3f}",
            f"{row.gap * 1e3:+.3f}",
            f"{row.gap / measured.seconds:+.1%}",
        ]
        for row in found
    ]
    yield from table(["ms", "estimated", "measured", "gap", "of the step"], rows)
