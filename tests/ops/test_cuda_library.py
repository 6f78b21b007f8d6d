"""The library nvcc made of csrc/cuda, without a GPU: architectures, resources, access widths, schemas."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastmp

pytest.importorskip("triton", reason="cuobjdump ships with Triton, which is not installed")

from tools.cubins.compiled import tool

# compiling takes minutes
pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(fastmp.__file__).parent / "_C_cuda.so"


CUTLASS = "nvidia-cutlass==4.2.0.0"


NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def _cutlass_headers(base: Path) -> Path:
    """The directory that FASTMP_CUTLASS_DIR names, or that of CUTLASS's package, installed in `base`."""
    if named := os.environ.get("FASTMP_CUTLASS_DIR"):
        return Path(named)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps"]
    subprocess.run([*pip, "--target", base / "cutlass", CUTLASS], check=True)
    return base / "cutlass" / "cutlass_library" / "source" / "include"


@pytest.fixture(scope="module")
def library(request) -> Path:
    """The library of this install; without one, in the exhaustive set, one that is compiled here."""
    if LIBRARY.exists():
        return LIBRARY
    if not (NVCC and request.config.getoption("--exhaustive")):
        pytest.skip(
            "_C_cuda.so was not built: no nvcc, a torch without CUDA (then --exhaustive), or FASTMP_CUDA=0"
        )
    base = ROOT / "build" / "cuda"
    headers = _cutlass_headers(base)
    variables = {"FASTMP_CPP": "0", "FASTMP_CUDA": "1", "FASTMP_CUTLASS_DIR": str(headers)}
    command = [sys.executable, "setup.py", "-q", "build", "--build-base", base, "--build-lib", base / "lib"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=True)
    return base / "lib" / "fastmp" / "_C_cuda.so"


def _cuobjdump(library: Path, *options: str) -> str:
    command = [tool("cuobjdump"), *options, library]
    return subprocess.check_output(command, text=True, stderr=subprocess.STDOUT)


def test_cuda_library_holds_all_architectures(library):
    code = set(re.findall(r"sm_\d+", _cuobjdump(library, "-lelf")))
    assert {"sm_80", "sm_90", "sm_100"} <= code
    assert "sm_100" in _cuobjdump(library, "-lptx")


# Number of instances over all architectures, and blocks of how many threads a multiprocessor holds at once.
KERNELS = {
    "loss_gradient_kernel": (24, 2, 512),
    "route_kernel": (36, 1, 256),
    "router_sums_kernel": (6, 8, 256),
}
# for sm_90a alone, where the library was built with CUTLASS
GEMMS = {
    "GemmUniversal": (10, 1, 384),
    "make_problems_kernel": (2, 1, 256),
    "zero_rest_kernel": (4, 1, 256),
    "12terms_kernel": (6, 1, 256),
    "11rows_kernel": (8, 1, 256),
}


def test_cuda_library_does_not_spill(library):
    """No local memory, little stack but in f64 kernels, and registers for as many blocks as are meant."""
    usage = _cuobjdump(library, "-res-usage")
    kernels = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    known = KERNELS | (GEMMS if "GemmUniversal" in usage else {})
    for name, registers, stack, shared, local in kernels:
        assert int(local) == 0, name
        assert int(stack) <= 24 * ("route_kernel" in name) or "Id" in name, (name, stack)
        assert int(shared) <= 4096, name
        (_, blocks, threads) = next(facts for kernel, facts in known.items() if kernel in name)
        assert blocks * threads * int(registers) <= 65536, name
    for kernel, (instances, *_) in known.items():
        assert sum(kernel in name for name, *_ in kernels) == instances, kernel


def test_cuda_library_reads_and_writes_sixteen_bytes(library):
    """From memory to shared memory and back."""
    sass = _cuobjdump(library, "-sass", "-arch", "sm_90")
    functions = re.split(r"Function : ", sass)[1:]
    bodies = [body for body in functions if re.search("loss_gradient_kernel.*bfloat16", body.split()[0])]
    assert bodies
    for access in ("LDG.E.128", "STS.128", "LDS.128", "STG.E.128"):
        assert all(access in body for body in bodies), access


def test_products_use_what_only_hopper_has(library):
    """A warp group gives registers away and multicasts tiles, the others multiply. Results leave from
    registers, sixteen bytes a thread and through the activation; or memory adds pairs of them."""
    functions = re.split(r"Function : ", _cuobjdump(library, "-sass", "-arch", "sm_90a"))[1:]
    bodies = {body.split()[0]: body for body in functions if "GemmUniversal" in body.split()[0]}
    if not bodies:
        pytest.skip(f"_C_cuda.so was built without CUTLASS (pip install --no-deps {CUTLASS})")
    # CUTLASS speaks of half_t in its bf16 kernels too
    for store, number in (("AddTile", 2), ("StoreTileILb0E", 6), ("StoreTileILb1E", 2)):
        names = [name for name in bodies if store in name]
        assert len(names) == 2 * sum("bfloat16_t" in name for name in names) == number
    for name, body in bodies.items():
        products = re.findall(r"\bHGMMA[.\w]*", body)
        shape = "HGMMA.64x256x16.F32" + (".BF16" if "bfloat16_t" in name else "")
        assert len(products) >= 8 and set(products) == {shape}
        assert re.search(r"USETMAXREG\.DEALLOC\.CTAPOOL 0x28", body)
        assert re.search(r"USETMAXREG\.TRY_ALLOC\.CTAPOOL UP\d+, 0xe8", body)
        assert not re.search(r"\b(LDL|STL)\b", body)
        # one tensor map an operand, never rewritten: rows move in four dimensions, weights lie in three
        assert not re.search(r"\b(UTMACCTL|UTMASTG)\b", body)
        terms = re.search(r"TileEpilogueI\w+ELb1EE", name)
        assert set(re.findall(r"\bUTMALDG[.\w]*", body)) == {
            "UTMALDG.4D",
            f"UTMALDG.{4 if terms else 3}D.MULTICAST",
        }
        # y and h: a thread has 128 sums, two rows of 64 or 32 columns
        adds, gated = "AddTile" in name, "StoreTileILb1E" in name
        stores = 0 if adds else 24 if gated else 32
        assert re.findall(r"\bSTG[.\w]*", body) == ["STG.E.128"] * stores
        assert len(re.findall(r"\bREDG\.E\.ADD\.F32x2\b", body)) == 64 * adds
        # exponentials of eight activations at once, without a branch between them
        exponentials = "".join(op[0] for op in re.findall(r"\b(?:MUFU\.EX2|BRA)\b", body))
        assert all(len(at_once) == 8 for at_once in re.findall("M+", exponentials))


@pytest.mark.exhaustive
@pytest.mark.skipif(NVCC is None, reason="no nvcc, which compiles CUTLASS")
def test_tensor_maps_lead_to_the_numbers_of_every_tile(tmp_path):
    """The zeros beyond an expert's rows included; maps.cu stands in for the driver and the TMA unit."""
    torch = Path(importlib.util.find_spec("torch").origin).parent
    folders = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'cuda'}", f"-isystem={torch / 'include'}"]
    folders.append(f"-isystem={_cutlass_headers(ROOT / 'build' / 'cuda')}")
    options = ["-std=c++20", "-arch=sm_90a", "--expt-relaxed-constexpr", "--extended-lambda", "-DUSE_CUDA"]
    options += ["-DCUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL=1", "-Xlinker", "--unresolved-symbols=ignore-all"]
    source, program = ROOT / "tests" / "cuda_on_cpu" / "maps.cu", tmp_path / "maps"
    subprocess.run([NVCC, *options, *folders, source, "-o", program], check=True, capture_output=True)
    wrong, checked = map(int, re.findall(r"\d+", subprocess.check_output([program], text=True)))
    assert wrong == 0 and checked > 1_000_000


STUB = """
extern "C" __attribute__((visibility("default"))) int aoti_torch_get_current_cuda_stream(int, void** stream) {
  *stream = nullptr;
  return 0;
}
"""
SCHEMAS = """
import ctypes, sys
ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
import torch
import fastmp.ops
torch.ops.load_library(sys.argv[2])
exported = {name: op for name, op in fastmp.ops.OPS.items() if hasattr(torch.ops.fastmp_cuda, name)}
for name, op in exported.items():
    ours = str(op.overload._schema).partition("::")[2]
    theirs = str(getattr(torch.ops.fastmp_cuda, name).default._schema).partition("::")[2]
    assert ours == theirs, (ours, theirs)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmp_cuda::{name}", "CUDA"), name
print("same", len(exported))
"""


def test_cuda_library_exports_the_same_schemas(library, tmp_path):
    """Without CUDA in torch, a stand-in gives the library the one symbol it lacks, so that it loads."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler for the stand-in")
    source, stub = tmp_path / "stub.cpp", tmp_path / "stub.so"
    source.write_text(STUB)
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", stub], check=True)
    result = subprocess.run(
        [sys.executable, "-c", SCHEMAS, stub, library], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() in (["same", "2"], ["same", "6"])  # without CUTLASS, and with it
