"""Plugin of `pytest benchmarks/ --benchmark-only`; its last table has the columns that count.

All rivals of a case run in turn in one process; the figures are in each test's `extra_info` and in that
table. pytest-benchmark's own table has a few rounds of one rival after the other, by the wall clock, launches
included. By default each family runs its first workload, forward and backward at one shape and dtype, which
takes minutes; `--full` runs the rest. Benchmarks have no time limit, and after every test
.benchmarks/last.json has all rows so far.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from benchmarks import peers
from benchmarks.cases import EAGER, Case, is_first, is_ours, sweep
from benchmarks.compare import Comparison, compare
from benchmarks.conditions import Conditions
from benchmarks.measure import environment, measure_ceilings, synchronize, write_json
from benchmarks.report import markdown, read

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SECONDS, SECONDS_FULL = 2.0, 8.0  # of rounds for a case in one direction, after the third; --full
PEDANTIC_ROUNDS = 3  # of a rival in pytest-benchmark's own table


CEILINGS = pytest.StashKey()


def pytest_addoption(parser):
    with suppress(ValueError):  # tests/conftest.py has it as well
        parser.addoption("--full", action="store_true", help="all workloads, shapes and dtypes")


def pytest_report_header(config):
    which = "all workloads" if config.getoption("--full") else "a workload of each family (--full: all)"
    return f"fastmp: {which} on {DEVICE}; results so far are in {_results_path(config)}"


class Family(pytest.Module):
    """A bench_<family>.py. The test of its workloads is the same for all families, and made here."""

    def collect(self):
        def compared(compare, case, rival, direction):
            compare(case(), rival, direction)

        if getattr(self.obj, "WORKLOADS", ()):
            setattr(self.obj, self.path.stem.replace("bench", "test", 1), compared)
        return super().collect()


def pytest_pycollect_makemodule(module_path, parent):
    return Family.from_parent(parent, path=module_path) if module_path.name.startswith("bench_") else None


def pytest_collect_file(file_path, parent):
    named = parent.session.isinitpath(file_path)  # on the command line: pytest collects it by itself
    if file_path.name.startswith("bench_") and file_path.suffix == ".py" and not named:
        return Family.from_parent(parent, path=file_path)
    return None


def pytest_generate_tests(metafunc):
    """Parametrise the benchmark of a family by the workloads of its module."""
    if "direction" in metafunc.fixturenames:
        cases = sweep(metafunc.module.WORKLOADS, DEVICE)
        metafunc.parametrize(("case", "rival", "direction"), cases)


def pytest_collection_modifyitems(config, items):
    ours = [item for item in items if item.path.name.startswith("bench_")]
    for item in ours:
        if config.pluginmanager.hasplugin("timeout"):
            item.add_marker(pytest.mark.timeout(0))  # none: that of pyproject.toml would end the process
    if config.getoption("--full"):
        return
    swept = [(item, item.callspec.params) for item in ours if hasattr(item, "callspec")]
    more = {i for i, chosen in swept if not is_quick(chosen["case"], chosen["direction"], i.module)}
    if more:
        config.hook.pytest_deselected(items=list(more))
        items[:] = [item for item in items if item not in more]


def is_quick(case: partial, direction: str, family: ModuleType) -> bool:
    """Return whether a case is of the family's first workload, at its first shape and dtype, and all of it.

    The last direction of a workload has the others in it: forward and backward.
    """
    work = case.args[0]
    return is_first(case) and work is family.WORKLOADS[0] and direction == work.directions[-1]


class Results:
    """A file of all benchmarks so far, which `benchmarks.report` reads; whole whenever the process ends."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.environment = config, environment(DEVICE)

    def write(self) -> None:
        made = [b.as_dict(include_data=False) for b in self.config._benchmarksession.benchmarks if b]
        if not made:
            return
        content = {"environment": self.environment, "benchmarks": made}
        if ceilings := self.config.stash.get(CEILINGS, None):
            content["ceilings"] = vars(ceilings)
        path = _results_path(self.config)
        path.parent.mkdir(exist_ok=True)
        write_json(path, content)


def _results_path(config: pytest.Config) -> Path:
    return config.rootpath / ".benchmarks" / "last.json"


@pytest.fixture(scope="session")
def _results(request):
    return Results(request.config)


@pytest.fixture(autouse=True)
def _written(_results):
    """Write the results after each benchmark."""
    yield
    _results.write()


@pytest.fixture(scope="session")
def ceilings():
    return measure_ceilings(DEVICE)


class _Comparisons:
    """The last comparison, for the rivals of one case and direction are tests that follow each other."""

    def __init__(self, ceilings, seconds):
        self.ceilings, self.seconds = ceilings, seconds
        self.conditions = Conditions(DEVICE) if DEVICE == "cuda" else None
        self.case: Case | None = None
        self.by_direction: dict[str, Comparison] = {}

    def of(self, case: Case, direction: str) -> Comparison:
        if case is not self.case:
            self.case, self.by_direction = case, {}
        if direction not in self.by_direction:
            seconds = self.seconds if DEVICE == "cpu" else 2 * self.seconds  # as called, and in a graph
            options = {"seconds": seconds, "conditions": self.conditions}
            compared = compare(case, direction, self.ceilings, DEVICE, **options)
            self.by_direction[direction] = compared
        return self.by_direction[direction]


@pytest.fixture(scope="session")
def comparisons(ceilings, request):
    request.config.stash[CEILINGS] = ceilings
    return _Comparisons(ceilings, SECONDS_FULL if request.config.getoption("--full") else SECONDS)


@pytest.fixture(name="compare")
def _compare(benchmark, comparisons):
    """Benchmark one rival of a case in one direction, beside its floor and the other rivals."""

    def run(case: Case, rival: str, direction: str) -> None:
        benchmark.skipped = rival not in case.rivals
        if benchmark.skipped:
            pytest.skip(peers.why_absent(rival, DEVICE))
        if benchmark.enabled:
            compared = comparisons.of(case, direction)
            if rival in compared.failed:
                benchmark.skipped = True
                (pytest.fail if is_ours(rival) or rival == EAGER else pytest.skip)(compared.failed[rival])
            what = {"both": "forward+backward"}.get(direction, direction)
            benchmark.group = f"{case.name} {what} on {DEVICE}"
            columns = compared.rows[rival].columns()
            benchmark.extra_info.update(case=case.name, direction=direction, **columns)

        call = getattr(case, direction)(rival)  # not before the rivals are timed: it may hold tensors

        def wait_for_call() -> None:
            call()
            synchronize(DEVICE)

        benchmark.pedantic(wait_for_call, rounds=PEDANTIC_ROUNDS)

    return run


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info.pop("node", None)  # a result says what it ran on, not whose machine it was


def pytest_benchmark_update_json(config, benchmarks, output_json):
    output_json["environment"] = environment(DEVICE)
    if ceilings := config.stash.get(CEILINGS, None):
        output_json["ceilings"] = vars(ceilings)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    session = getattr(config, "_benchmarksession", None)
    rows = [b for b in session.benchmarks if b.extra_info.get("rival")] if session else []
    if not rows:
        return
    terminalreporter.section("fastmp: all rivals of a case in turn")
    path = _results_path(config)
    terminalreporter.write(markdown([read(path)]))
    for reason in sorted(set(peers.ABSENT.values())):
        terminalreporter.write_line(f"absent: {reason}")
    terminalreporter.write_line(f"python -m benchmarks.report {path} prints these results again")
