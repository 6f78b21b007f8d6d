"""`fastmp verify`: find where parallel code differs from its dense module, and name the likely cause."""

from __future__ import annotations

import importlib.util
import inspect
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fastmp.config.command_line import Parser, exit_status, number

if TYPE_CHECKING:
    from fastmp.testing.differential.cases import Case
    from fastmp.testing.differential.subject import Subject
    from fastmp.testing.differential.verification import Finding

__all__ = ["load_subject", "main"]


def load_subject(file: str) -> Subject:
    """Return the subject of `FILE` or `FILE:NAME`.

    Without a name the file has one subclass of `Subject`, or functions `dense`, `parallel` and `inputs`.

    Raises:
        ValueError: the file cannot be imported, or has no such subject.
    """
    path, _, name = file.partition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise ValueError(f"{path}: expected a Python file, such as my_layer.py or my_layer.py:MySubject")
    from fastmp.testing.differential.subject import Subject

    module = _import(Path(path))
    own = {
        key: value
        for key, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Subject) and value is not Subject
    }
    if not name:
        if hasattr(module, "dense") and hasattr(module, "parallel"):
            return Subject.of_module(module)
        local = [key for key, value in own.items() if value.__module__ == module.__name__]
        if len(local) != 1:
            raise ValueError(
                f"{path}: expected one subclass of fastmp.testing.differential.Subject, or functions dense, "
                f"parallel and inputs; got {', '.join(local) or 'neither'}"
                + (f"; name one: {path}:{local[0]}" if local else "")
            )
        name = local[0]
    if name not in own:
        raise ValueError(
            f"{path}: no subclass of Subject is named {name!r}; it has {', '.join(own) or 'none'}"
        )
    subject: Subject = own[name]()
    return subject


def _import(path: Path) -> ModuleType:
    """Return the module of a Python file, whose directory it may import from."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return module


def _layouts(words: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return {"tp": (1, 2)} for ["tp=1,2"]."""
    found = {}
    for word in words:
        axis, _, values = word.partition("=")
        if not axis.isidentifier() or not all(part.isdigit() and int(part) for part in values.split(",")):
            raise ValueError(f"--layouts: expected AXIS=SIZE,SIZE such as tp=1,2,4, got {word!r}")
        found[axis] = tuple(int(part) for part in values.split(","))
    return found


def report(file: str, found: Finding) -> str:
    """Format a finding: the wrong tensor and rank, the error, the likely cause, the command to repeat it."""
    error = f"largest error {found.error:.3g} where values reach {found.scale:.3g}"
    what = {"gradient": "gradient of ", "weight": "updated weight "}.get(found.kind, "")
    lines = [
        ("smallest case", str(found.case)),
        ("tensor", f"{what}{found.name}, step {found.step}"),
        ("rank", f"{found.rank}: {error}"),
        ("also wrong", ", ".join(found.also[:8]) + (" ..." if len(found.also) > 8 else "")),
        ("likely cause", str(found.cause)),
        ("reproduce", f"fastmp verify {shlex.quote(file)} --case {shlex.quote(str(found.case))}"),
    ]
    if found.kind == "crash":
        lines[1:4] = [("rank", f"{found.rank}, which raised, died or hung:\n{found.text}")]
    return "\n".join(f"  {name:<14}{text}" for name, text in lines if text)


def _run(options: Any) -> int:
    from fastmp.testing.differential.cases import Case

    given = _layouts(options.layouts)
    subject = load_subject(options.file)
    from fastmp.testing.differential.verification import verify

    layouts = {**subject.layouts, **given}
    cases: int | list[Case] = options.cases
    if options.case:
        cases = [Case.parse(options.case, tuple(layouts), tuple(subject.sizes))]
    started = time.perf_counter()
    verdict = verify(
        subject,
        cases=cases,
        seed=options.seed,
        layouts=layouts,
        max_ranks=options.ranks,
        shrinks=not options.case,
        timeout=options.timeout,
    )
    seconds = time.perf_counter() - started
    smallest = verdict.smallest
    if options.json:
        found = {"cases": len(verdict.cases), "failed": len(verdict.findings), "seconds": round(seconds, 2)}
        print(json.dumps({**found, "finding": smallest.to_json() if smallest else None}, indent=2))
        return 1 if smallest else 0
    plural = "" if len(verdict.cases) == 1 else "s"
    print(f"{options.file}: {len(verdict.cases)} case{plural}, {len(verdict.findings)} failed")
    if smallest:
        print(report(options.file, smallest))
    return 1 if smallest else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run `fastmp verify` with the arguments `argv`; return 1 if a difference was found, 2 for misuse."""
    parser = Parser(
        prog="fastmp verify",
        description="Test parallel code against its dense module: outputs, gradients, norms and updated "
        "weights, on forked CPU ranks in float64, over random layouts and data. Prints the smallest failing "
        "case, the tensor, the rank and the likely cause.\n\n  fastmp verify my_layer.py",
    )
    parser.add_argument(
        "file",
        metavar="FILE[:NAME]",
        help="Python file with a subclass of fastmp.testing.differential.Subject (and its name, if there are "
        "several), or with functions dense, parallel and inputs",
    )
    parser.add_argument(
        "--layouts", nargs="+", default=[], metavar="AXIS=SIZES", help="mesh axes and sizes, such as tp=1,2,4"
    )
    parser.add_argument(
        "--cases", type=number(int, 1), default=50, help="number of random cases (%(default)s)"
    )
    parser.add_argument("--seed", type=number(int, 0), default=0, help="seed of the cases (%(default)s)")
    parser.add_argument(
        "--ranks", type=number(int, 2), default=4, help="largest number of ranks (%(default)s)"
    )
    parser.add_argument("--case", metavar="CASE", help="run this case alone, as a report prints it")
    parser.add_argument(
        "--timeout",
        type=number(float, 1),
        default=120,
        help="seconds until a hang is reported; slow modules get more (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    return exit_status("fastmp verify", lambda: _run(options))
