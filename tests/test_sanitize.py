"""`make sanitize`: the C++ kernels, those of CUDA on a CPU, replays of graphs and the host module, under the
address and undefined-behaviour sanitizers; exchanges between threads, under the thread sanitizer.

The libraries are built into build/sanitize beside a copy of the package, and loaded into a Python that has
the sanitizers' library before all others. The first report ends that process. A machine serves its widest
instruction set only, unless ATEN_CPU_CAPABILITY names a narrower one; each has its turn. Instructions that
multiply bfloat16 serve only without that variable.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitize"
PACKAGE = BUILD / "lib"
OP_TESTS = ("test_every_op.py", "test_large_offsets.py", "test_functions.py", "test_raw_ops.py")
# what calls kernels; torch.compile and the profiler have code of their own under way
SELECTED = "not compiles and not profiler and not waits"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=sys")  # a report goes to the real stderr

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3000)]


def isas() -> list[str]:
    best = torch.backends.cpu.get_cpu_capability()
    return ["default", *["avx2"] * (best in ("AVX2", "AVX512")), *["avx512"] * (best == "AVX512")]


@pytest.fixture(scope="module")
def preloaded() -> str:
    """The libraries that come before all others: the sanitizers', and that of the exceptions they watch."""
    compiler = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    found = []
    for library in ("libasan.so", "libubsan.so", "libstdc++.so"):
        command = [compiler, f"-print-file-name={library}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not os.path.isabs(path):
            pytest.skip(f"{compiler} has no {library}")
        found.append(path)
    return " ".join(found)


@pytest.fixture(scope="module")
def built(preloaded) -> None:
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", BUILD, "--build-lib", PACKAGE]
    variables = {"FASTMP_SANITIZE": "1", "FASTMP_CPP": "1", "FASTMP_CUDA": "0"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for pattern in ("_C_cpu.so", "_C_autograd.*.so", "_host.*.so", "_replay.*.so"):
        (library,) = (PACKAGE / "fastmp").glob(pattern)
        code = library.read_bytes()
        assert b"__asan_report" in code and b"__ubsan_handle" in code, f"{library.name} is not instrumented"


def succeed(preloaded: str, isa: str | None, *arguments: str | Path) -> None:
    """Run Python on the instrumented copy, with the instruction set `isa`; None: all that the machine has.

    Memory that torch never gives back is no error, nor is a demand for more than there is.
    """
    variables = {
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        **({"ATEN_CPU_CAPABILITY": isa} if isa else {}),
    }
    dropped = ("ATEN_CPU_CAPABILITY", "FASTMP_OPS", "TRITON_INTERPRET", "PYTHONPATH")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=PACKAGE, env={**kept, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    output = done.stdout + done.stderr
    report = max(output.find("ERROR: AddressSanitizer"), output.find("runtime error:"))
    assert done.returncode == 0 and report < 0, output[report:][:8000] if report >= 0 else output[-8000:]


@pytest.mark.parametrize("isa", isas())
def test_samples_of_every_op(isa, preloaded, built):
    succeed(preloaded, isa, "-m", "fastmp", "doctor", "--check")


@pytest.mark.parametrize("isa", isas())
def test_functions_and_offsets(isa, preloaded, built):
    paths = [ROOT / "tests" / "ops" / name for name in OP_TESTS]
    succeed(preloaded, isa, *PYTEST, "-k", SELECTED, *paths)


def test_products_of_bfloat16(preloaded, built):
    names = ("test_every_op.py", "test_functions.py", "test_grouped_mm.py", "test_wgrad.py")
    paths = [ROOT / "tests" / "ops" / name for name in names]
    succeed(preloaded, None, *PYTEST, "-k", f"(grouped or weight_grad or wgrad) and {SELECTED}", *paths)


def test_cuda_kernels_on_a_cpu(preloaded, built):
    """They are compiled by the tests, with the sanitizers in a process that has them."""
    path = ROOT / "tests" / "ops" / "test_cuda_on_cpu.py"
    selected = (
        "float64 or order_of_threads"  # not what is wrong on purpose, nor gcov, which keeps files of its own
    )
    succeed(preloaded, isas()[-1], *PYTEST, "--full", "-k", selected, path)


def test_replays(preloaded, built):
    """Of steps, also where a hook ends one, and what is noticed of a model before each."""
    names = ("autograd", "aliasing", "copies", "hooks", "lifetime", "faults")
    files = [*(f"test_graph_{name}.py" for name in names), "test_replay_program.py", "test_snapshot.py"]
    paths = [ROOT / "tests" / "cuda_graphs" / file for file in files]
    succeed(preloaded, isas()[-1], *PYTEST, "--full", "-k", "not training and not thousand", *paths)


@pytest.mark.parametrize("isa", isas())
def test_exchanges(isa, preloaded, built):
    """Of ranks on threads, and of forked ones."""
    path = ROOT / "tests" / "ops" / "test_exchange.py"
    succeed(preloaded, isa, *PYTEST, "--full", "-k", "not reference", path)


# What is written in place of what in exchange.cpp.
MISTAKES = {
    "none": ("", ""),
    "no release": ("memory_order_release", "memory_order_relaxed"),
    "no acquire": ("memory_order_acquire", "memory_order_relaxed"),
    "one half": ("(epoch & 1) * bytes", "0 * bytes"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_threads_that_exchange(mistake, tmp_path):
    """The thread sanitizer sees an order that is not promised, though the processor at hand may keep it."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    sources = shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    changed, (old, new) = sources / "cpu" / "exchange.cpp", MISTAKES[mistake]
    code = changed.read_text()
    assert old in code
    changed.write_text(code.replace(old, new) if old else code)
    program, source = tmp_path / "exchange_threads", ROOT / "tests/support/exchange_threads.cpp"
    package = Path(torch.__file__).parent
    libraries = package / "lib"
    done = subprocess.run(
        [
            compiler, "-std=c++20", "-O1", "-g1", "-w", "-fvisibility=hidden", "-fsanitize=thread",
            "-DFASTMP_ISA=base", "-DFASTMP_ISA_BASE", "-DFASTMP_WITH_BASE",
            f"-I{sources}", f"-isystem{package / 'include'}", source, "-o", program,
            libraries / "libtorch_cpu.so", libraries / "libc10.so", f"-Wl,-rpath,{libraries}",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    variables = {"OMP_NUM_THREADS": "1", "TSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [program], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    found = [said for said in ("data race", "wrong numbers") if said in done.stderr]
    assert bool(found) == (done.returncode != 0) == (mistake != "none"), done.stderr[:8000]


def test_host_module(preloaded, built):
    paths = [ROOT / "tests/training/data/test_sampling.py", ROOT / "tests/ops/core/test_launcher.py"]
    succeed(preloaded, isas()[-1], *PYTEST, "-k", "not what_triton_would or driver", *paths)
