"""Test markers and a deterministic process.

`@triton.jit` chooses the compiler or the interpreter when it decorates, so one process can only do one of
them: tests marked `interpret` run where TRITON_INTERPRET=1, all others where it is not set (`make test` runs
both). Tests marked `gpu` are skipped without a GPU and run last, because a process that has used CUDA must
not fork.

A GPU test that exceeds its time limit fails alone. Among several workers the limit ends the worker, which
xdist replaces: this also ends a kernel that never returns, so `make test` runs them that way. In one process
a signal ends the test; a call of CUDA that no signal interrupts ends the process a minute later.

Every op, layer and layout family has a test without a mark: `make test` runs those. Tests marked `full` need
--full (continuous integration), tests marked `exhaustive` need --exhaustive (`make test-full`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import json
import os
import platform
import re
import sys
import tempfile
import threading
from pathlib import Path

import pytest

# Set before torch is imported: two threads (one in each of several workers, see pytest_configure), no compile
# workers (tests fork), and a look at the GPUs through NVML, which leaves CUDA uninitialised.
THREADS_GIVEN = "OMP_NUM_THREADS" in os.environ
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if "ATEN_CPU_CAPABILITY" in os.environ:  # inductor keeps code for other vectors under the same name
    cache = f"torchinductor-{os.getuid()}-{os.environ['ATEN_CPU_CAPABILITY']}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), cache)))
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# A file with tests marked `interpret` has one of these words; other files are not imported to be interpreted.
MARKS_INTERPRETED = re.compile(r"mark\.interpret|TRITON|KERNELS")
GRACE = 60.0  # seconds between the signal that ends a GPU test and the end of the process

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
if INTERPRET:
    os.environ["FASTMP_OPS"] = "triton"  # public functions then run through the interpreted kernels

try:
    import hypothesis
except ImportError:  # the op tests also run where only torch, numpy, triton and pytest are
    pass
else:
    hypothesis.settings.register_profile(
        "fastmp",
        deadline=None,
        derandomize=True,
        database=None,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("fastmp")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full")
    parser.addoption("--exhaustive", action="store_true", help="run all tests")
    parser.addoption("--record", metavar="FILE", help="add counts, versions and fuzz draws to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker one thread: of two on a core, one spins at every barrier until the other has run.

    Workers inherit the environment of the process that starts them, so it is set there.
    """
    if config.getoption("numprocesses", None) and not THREADS_GIVEN:
        os.environ["OMP_NUM_THREADS"] = "1"


def pytest_report_header(config: pytest.Config) -> str:
    kernels = "interpreted (only tests marked interpret)" if INTERPRET else "compiled"
    return f"fastmp: Triton kernels are {kernels}, {os.environ['OMP_NUM_THREADS']} threads"


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage meanwhile: imports leave little, and each time walks through all of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    is_left_out = INTERPRET and collection_path.suffix == ".py" and not _may_be_interpreted(collection_path)
    return True if is_left_out else None


@functools.cache
def _may_be_interpreted(path: Path) -> bool:
    return MARKS_INTERPRETED.search(path.read_text()) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {"exhaustive", "full"}
    if config.getoption("--exhaustive"):
        left_out.clear()
    elif config.getoption("--full"):
        left_out.remove("full")
    selected, deselected = [], []
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "interpret" in marks and not _may_be_interpreted(item.path):
            raise pytest.UsageError(
                f"{item.nodeid} is marked interpret but its file would not be imported in that run: "
                f"expected {MARKS_INTERPRETED.pattern!r} in it; add what it uses to MARKS_INTERPRETED"
            )
        wanted = ("interpret" in marks) == INTERPRET and not marks & left_out
        (selected if wanted else deselected).append(item)
    selected.sort(key=lambda item: item.get_closest_marker("gpu") is not None)
    items[:] = selected
    if deselected:
        config.hook.pytest_deselected(items=deselected)

    on_gpu = [item for item in items if item.get_closest_marker("gpu") is not None]
    if on_gpu and (reason := _reason_without_gpu()):
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))
    elif seconds := _limit_by_signal(config):
        for item in on_gpu:
            item.add_marker(pytest.mark.timeout(seconds, method="signal"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep modules and tests out of garbage collections, which in forked ranks would copy their pages."""
    if INTERPRET:
        from interpreter_tools import cache_lookups

        cache_lookups()
    gc.collect()
    gc.freeze()


def _reason_without_gpu() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"no GPU: torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "no GPU: torch.cuda.is_available() is False"


def _limit_by_signal(config: pytest.Config) -> float:
    """Return the time limit of a GPU test in seconds; 0 in a worker of xdist, or without pytest-timeout."""
    if "PYTEST_XDIST_WORKER" in os.environ or not config.pluginmanager.hasplugin("timeout"):
        return 0.0
    return float(config.getoption("timeout") or config.getini("timeout") or 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    """End the process if a GPU test outlives the signal of its time limit."""
    seconds = _limit_by_signal(item.config) if item.get_closest_marker("gpu") is not None else 0.0
    if not seconds:
        return (yield)
    ends = threading.Timer(seconds + GRACE, _end_process, (item,))
    ends.daemon = True
    ends.start()
    try:
        return (yield)
    finally:
        ends.cancel()


def _end_process(item: pytest.Item) -> None:
    with contextlib.suppress(AttributeError):  # run with -p no:capture
        item.config.pluginmanager.getplugin("capturemanager").suspend_global_capture(in_=True)
    print(f"\n{item.nodeid}: no signal ends it; run GPU tests with -n 1 or more", file=sys.stderr, flush=True)
    faulthandler.dump_traceback()
    os._exit(1)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Add counts, versions and fuzz draws of this run to the file of --record (tests/results/full.json)."""
    if not config.getoption("--record"):
        return
    import torch

    from fastmp.ops.core import _triton

    path = Path(config.getoption("--record"))
    record = json.loads(path.read_text()) if path.exists() else {}
    stats = terminalreporter.stats
    counts = {kind: len(stats.get(kind, ())) for kind in ("passed", "failed", "error", "skipped")}
    draws = {
        report.nodeid.rpartition("::")[2]: value
        for report in stats.get("passed", ())
        for key, value in report.user_properties
        if key == "draws"
    }
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": _triton.VERSION}
    kernels = "interpreted" if INTERPRET else config.getoption("-m") or "all"
    path.write_text(
        json.dumps(record | {kernels: {**counts, "versions": versions, "draws": draws}}, indent=1) + "\n"
    )


@pytest.fixture(scope="module")
def one_thread():
    """Give torch one thread, like forked ranks: models are tiny, and a second would cost time."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def captures_may_load():
    """Let a GPU test launch a Triton kernel for the first time in a capture."""


@pytest.fixture(autouse=True)
def _captures_load_nothing(request: pytest.FixtureRequest):
    """Fail a GPU test that captures a Triton kernel which it has not launched before."""
    if request.node.get_closest_marker("gpu") is None or "captures_may_load" in request.fixturenames:
        yield
        return
    import torch
    from capture_tools import loads_in_captures

    with loads_in_captures(torch.cuda.is_current_stream_capturing) as loaded:
        yield
    assert not loaded, f"launched for the first time in a capture: {loaded}"


@pytest.fixture(scope="session")
def warm_compiler():
    """The 600 modules a first torch.compile imports: seconds, which every forked rank would spend anew."""
    import torch

    compiled = torch.compile(lambda x: x.sin(), fullgraph=True, backend="aot_eager")
    compiled(torch.ones(1, requires_grad=True)).sum().backward()


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A small directory of token files: 256 bytes and end-of-text."""
    from fastmp.training.data.corpus import build

    folder = tmp_path_factory.mktemp("text")
    text = folder / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(400)))
    return build([str(text)], folder / "tokens")
