"""What the compilers make of the kernels, with no GPU: resources, access widths, exponentials, schemas.

bf16 here, the other dtypes with --full. Triton's kernels are compiled as their launchers would have it done
for rows of 8192 columns; the CUDA C++ library is taken as it was built.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fastmp

pytest.importorskip("triton", reason="Triton is not installed")

from fastmp.ops import _triton, activation
from fastmp.ops import cross_entropy_triton as cross_entropy

ARCHS = (80, 90, 100)
SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
LIBRARY = Path(fastmp.__file__).parent / "_C_cuda.so"
REGISTERS = 64 << 10  # of a multiprocessor
COLUMNS = 8192
FULL = pytest.mark.full


def _activation(dtype, tanh=True):
    block_m, block_n = activation.block_shape(COLUMNS, ITEMSIZE[dtype])
    compute = _triton.tl.float64 if dtype == "fp64" else _triton.tl.float32
    return {
        "HAS_BIAS": True,
        "TANH": tanh,
        "COMPUTE": compute,
        "VECTOR": 16 // ITEMSIZE[dtype],
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
    }


def _kernel(name, dtype):
    """(kernel, run-time argument types, constants, num_warps, logits or elements a thread)."""
    compute = "fp64" if dtype == "fp64" else "fp32"
    data, stats = f"*{dtype}", f"*{compute}"
    form = name.partition(" ")[2] == "tanh"
    block, vec, num_warps = cross_entropy.launch_sizes(COLUMNS, ITEMSIZE[dtype])
    per_thread = block // (32 * num_warps)
    if name.startswith("bias_gelu_backward"):
        tensors = {"grad": data, "x": data, "bias": data, "dx": data, "partials": stats}
        sizes = ("num_rows", "rows_per_strip", "num_vectors", "grad_pitch", "x_pitch")
        kernel, constants = activation.bias_gelu_backward_kernel, _activation(dtype, form)
    elif name.startswith("bias_gelu"):
        tensors = {"x": data, "bias": data, "y": data}
        sizes = ("num_rows", "num_vectors", "x_pitch")
        kernel, constants = activation.bias_gelu_kernel, _activation(dtype, form)
    elif name == "sum_strips":
        tensors, sizes = {"partials": stats, "dbias": data}, ("num_strips", "num_cols")
        kernel, constants = activation.sum_strips_kernel, {"BLOCK_M": 128, "BLOCK_N": 32}
    elif name.startswith("stats"):
        tensors = {"logits": data, "target": "*i64", "out": stats}
        sizes = ("row_stride", "real", "vocab_start")
        kernel = cross_entropy.stats_kernel
        constants = {"WITH_SUM": name == "stats sum", "BLOCK": block, "VEC": vec}
    elif name == "merge":
        tensors = {"stats": stats, "target": "*i64", "token_weight": stats, "loss": stats, "lse": stats}
        sizes = ("tokens", "shards", "vocab_size", "ignore_index")
        kernel = cross_entropy.merge_kernel
        constants = {"WIDTH": 4, "SMOOTHING": 0.1, "Z_LOSS": 1e-4, "BLOCK": 128}
        num_warps = 4
    else:
        tensors = {"logits": data, "out": data, "target": "*i64", "lse": stats, "grad_loss": stats}
        tensors["token_weight"] = stats
        sizes = ("row_stride", "out_stride", "columns", "real", "vocab_start", "vocab_size", "ignore_index")
        kernel = cross_entropy.grad_kernel
        constants = {"SMOOTHING": 0.1, "Z_LOSS": 1e-4, "BLOCK": block, "VEC": vec}
    if kernel.__module__ == activation.__name__:
        num_warps = activation.NUM_WARPS
    signature = {**tensors, **dict.fromkeys(sizes, "i32")}
    missing = set(kernel.arg_names) - set(signature) - set(constants)
    assert not missing, f"{name}: arguments {missing} are not described here"
    divisible = ("row_stride", "out_stride", "columns", "num_cols")
    aligned = (*tensors, *(size for size in sizes if size in divisible))
    return kernel, signature, constants, num_warps, aligned, per_thread


NAMES = (
    "bias_gelu tanh",
    "bias_gelu none",
    "bias_gelu_backward tanh",
    "bias_gelu_backward none",
    "sum_strips",
    "stats",
    "stats sum",
    "merge",
    "grad",
)
CASES = [
    pytest.param(name, dtype, arch, marks=() if dtype == "bf16" else FULL, id=f"{name}-{dtype}-sm_{arch}")
    for dtype in ITEMSIZE
    for arch in ARCHS
    for name in NAMES
    if dtype != "fp64" or name != "merge"
]


@pytest.mark.parametrize(("name", "dtype", "arch"), CASES)
def test_triton_kernel(name, dtype, arch):
    kernel, signature, constants, num_warps, aligned, per_thread = _kernel(name, dtype)
    cubin = _triton.compile_to_cubin(
        kernel, signature, constants, arch=arch, num_warps=num_warps, aligned=aligned
    )
    assert cubin.spill_bytes == 0
    assert cubin.stack == 0 or dtype == "fp64"  # f64 functions may use a table on the stack
    assert cubin.shared <= SHARED_LIMIT[arch]
    loads = re.findall(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", cubin.ptx)
    stores = re.findall(r"st\.global\S*\.v4\.b32|st\.global\S*\.v2\.b64", cubin.ptx)
    if name not in ("merge", "sum_strips"):
        assert loads, "no 16-byte load"
    if name.startswith(("bias_gelu", "grad")):
        assert stores, "no 16-byte store"
    if name.startswith(("stats", "grad")):
        vectors = per_thread // constants["VEC"]
        assert len(loads) >= 2 * vectors, "whole blocks or edges are not read 16 bytes at a time"
        assert name != "grad" or len(stores) >= 2 * vectors, "edges are not written 16 bytes at a time"
        assert 2 * 32 * num_warps * cubin.registers <= REGISTERS, "one program fills a multiprocessor"
    if dtype == "fp64":
        return
    exponentials = cubin.ptx.count("ex2.approx")
    if name == "bias_gelu tanh":
        elements = constants["BLOCK_M"] * constants["BLOCK_N"] // (32 * num_warps)
        assert exponentials == elements
    if name.startswith("stats"):
        copies = 2  # whole blocks and edges are two copies of the loop's body
        assert exponentials <= copies * 1.3 * per_thread + 32, (
            f"{exponentials} for {per_thread} logits a thread"
        )


@pytest.mark.parametrize("name", ["bias_gelu tanh", "bias_gelu_backward tanh", "stats", "merge", "grad"])
def test_sizes_of_one_and_absent_tensors_compile(name):
    """The launcher makes constants of integers that equal 1 and of None."""
    kernel, signature, constants, num_warps, aligned, _ = _kernel(name, "bf16")
    ones = {name: 1 for name, kind in signature.items() if kind == "i32"}
    absent = {name: None for name in signature if name in ("bias", "partials", "token_weight")}
    constants |= ones | absent | ({"HAS_BIAS": False} if "HAS_BIAS" in constants else {})
    signature = {name: kind for name, kind in signature.items() if name not in constants}
    aligned = [name for name in aligned if name in signature]
    cubin = _triton.compile_to_cubin(
        kernel, signature, constants, arch=90, num_warps=num_warps, aligned=aligned
    )
    assert cubin.spill_bytes == 0


@pytest.fixture(scope="module")
def library() -> Path:
    if not LIBRARY.exists():
        pytest.skip("_C_cuda.so was not built: no nvcc, or FASTMP_CUDA=0")
    return LIBRARY


def _cuobjdump(library: Path, *options: str) -> str:
    tool = _triton._tool("cuobjdump")
    return subprocess.check_output([tool, *options, library], text=True, stderr=subprocess.STDOUT)


def test_cuda_library_holds_all_architectures(library):
    code = set(re.findall(r"sm_\d+", _cuobjdump(library, "-lelf")))
    assert {"sm_80", "sm_90", "sm_100"} <= code
    assert "sm_100" in _cuobjdump(library, "-lptx")


def test_cuda_library_does_not_spill(library):
    """No local memory, and no stack but in f64 kernels; every op is there on every architecture."""
    usage = _cuobjdump(library, "-res-usage")
    kernels = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    for op in ("stats_kernel", "merge_kernel", "gradient_kernel", "forward_kernel", "backward_kernel"):
        assert sum(op in name for name, *_ in kernels) >= len(ARCHS), op
    for name, _, stack, shared, local in kernels:
        assert int(local) == 0, name
        assert int(stack) == 0 or "Id" in name, (name, stack)
        assert int(shared) <= 48 << 10, name


def test_cuda_library_reads_and_writes_sixteen_bytes(library):
    sass = _cuobjdump(library, "-sass", "-arch", "sm_90")
    functions = re.split(r"Function : ", sass)[1:]
    for op, writes in (("stats_kernel", False), ("gradient_kernel", True), ("forward_kernel", True)):
        bodies = [body for body in functions if op in body.split()[0] and "bfloat16" in body.split()[0]]
        assert bodies
        wide = [body for body in bodies if re.search(r"LDG\.E\.128", body)]
        assert wide, op
        assert not writes or any(re.search(r"STG\.E\.128", body) for body in wide), op


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
for name, op in fastmp.ops.OPS.items():
    ours = str(op.overload._schema).partition("::")[2]
    theirs = str(getattr(torch.ops.fastmp_cuda, name).default._schema).partition("::")[2]
    assert ours == theirs, (ours, theirs)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmp_cuda::{name}", "CUDA"), name
print("same", len(fastmp.ops.OPS))
"""


def test_cuda_library_exports_the_same_schemas(library, tmp_path):
    """Where torch has no CUDA, a stand-in gives the library the one symbol it lacks, so that it loads."""
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
    assert result.stdout.startswith("same 6")
