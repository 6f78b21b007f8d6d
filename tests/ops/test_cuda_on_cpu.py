"""The kernels of csrc/cuda, run on a CPU in many orders, and mistakes that this shows."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from cuda_on_cpu_tools import CUDA, HERE, SANITIZE, SHARED_BYTES, Kernels, compile_cuda, kernels
from marks import full

from fastmp.ops import OPS
from fastmp.ops.grouped_mm import reference_mlp_in
from fastmp.testing import ops
from fastmp.testing.ops import check_op, run, samples


@dataclass(frozen=True)
class Source:
    """A file of csrc/cuda: its ops, and options to compile it.

    small: bytes of shared memory of a multiprocessor, too few for the rows of some samples, or just enough.
    """

    ops: tuple[str, ...]
    options: tuple[str, ...] = ()
    small: int = SHARED_BYTES


CUTLASS = ("-include", str(HERE / "gemm.h"))
SOURCES = {
    "cross_entropy": Source(("cross_entropy_loss_grad_",), small=16 << 10),
    "router": Source(("topk_router",)),
    "grouped_mm_sm90a": Source(("grouped_mm", "grouped_mlp_in"), options=CUTLASS),
    "grouped_wgrad_sm90a": Source(("grouped_mm_wgrad", "grouped_mm_wgrad_"), options=CUTLASS),
}
FILES = pytest.mark.parametrize("name", SOURCES)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Kernels]:
    """By name of the file; each is compiled once."""
    folder = tmp_path_factory.mktemp("cuda_on_cpu")

    class Built(dict):
        def __missing__(self, name: str) -> Kernels:
            self[name] = kernels(CUDA / f"{name}.cu", folder, *SOURCES[name].options)
            return self[name]

    return Built()


def errors(
    compiled: Kernels, name: str, monkeypatch: pytest.MonkeyPatch, dtypes: Iterable[torch.dtype] = ops.DTYPES
) -> list[str]:
    """Results of all samples that are not those of float64."""
    monkeypatch.setattr(ops, "DTYPES", dtypes)
    results = []
    for op in SOURCES[name].ops:
        monkeypatch.setitem(OPS[op].implementations, "cuda", compiled.op(op))
        results += check_op(op, "cpu", backend="cuda")
    return [str(result) for result in results if not result.ok]


def test_every_file_is_run():
    assert {path.stem for path in CUDA.glob("*.cu")} == set(SOURCES)
    assert {path.name for path in CUDA.iterdir() if BARRIER.search(path.read_text())} == set(NEEDS_BARRIERS)


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("cross_entropy", (torch.float32, torch.bfloat16)),
        ("router", (torch.float32, torch.bfloat16)),
        *full((name, ops.DTYPES) for name in sorted(SOURCES)),
    ],
    ids=lambda value: value if isinstance(value, str) else len(value),
)
def test_results_are_those_of_float64(name, dtypes, built, monkeypatch):
    built[name].set(0)
    assert not errors(built[name], name, monkeypatch, dtypes)


@pytest.mark.full
@FILES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_do_not_depend_on_the_order_of_threads(name, dtype, built):
    for op in SOURCES[name].ops:
        for arguments in samples(op, device="cpu", dtype=dtype):
            built[name].set(0)
            first = run(op, built[name].op(op), arguments)
            for seed in range(1, 4):
                built[name].set(seed)
                for a, b in zip(run(op, built[name].op(op), arguments), first, strict=True):
                    assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)), (
                        op,
                        seed,
                    )


def listed(compiled: Kernels, op: str, seed: int, number: int = 610) -> bool:
    """Return True if results are right for more experts than threads, of which `number` rows are there.

    Ends fall, are negative or beyond the rows, and the last rows have no expert.
    """
    generator = torch.Generator().manual_seed(0)
    ends = torch.arange(0, 600, 2, dtype=torch.int32)[torch.randperm(300, generator=generator)].sort()[0]
    ends[[3, 40, 256, 257]], rows = torch.tensor([-5, 400, 2, 540], dtype=torch.int32), 610
    x, w = torch.randn(rows, 8, generator=generator), torch.randn(300, 16, 8, generator=generator)
    arguments = {
        "grouped_mm": (x, w, ends, False),
        "grouped_mm_wgrad": (torch.randn(rows, 16, generator=generator), x, ends),
        "grouped_mlp_in": (x, w, None, ends, "silu", True, True),
    }[op]
    compiled.set(seed)
    if op != "grouped_mm_wgrad":
        arguments = (x[:number], *arguments[1:])
    found, expected = (
        run(op, compiled.op(op), arguments),
        run(op, OPS[op].implementations["reference"], arguments),
    )
    return all(torch.allclose(a, b, rtol=1.3e-6, atol=1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("op", ["grouped_mm", "grouped_mm_wgrad", "grouped_mlp_in"])
def test_more_experts_than_threads_are_listed(op, built):
    name = next(name for name, source in SOURCES.items() if op in source.ops)
    assert listed(built[name], op, 0) and listed(built[name], op, 1, 500)


@pytest.mark.exhaustive
@FILES
def test_every_line_is_run(name, tmp_path, monkeypatch):
    """In every instance of a template: of the file itself, and of what it uses of common.cuh."""
    if shutil.which("gcov") is None:
        pytest.skip("no gcov")
    compiled = kernels(
        CUDA / f"{name}.cu", tmp_path, "-O0", "--coverage", "-Wl,-u,__gcov_dump", *SOURCES[name].options
    )
    for seed, shared_bytes in ((0, SHARED_BYTES), (1, SOURCES[name].small)):
        compiled.set(seed, shared_bytes)
        assert not errors(compiled, name, monkeypatch)
    compiled.library.__gcov_dump()
    command = ["gcov", "--json-format", "--stdout", *tmp_path.glob("*.gcda")]
    report = json.loads(subprocess.check_output(command, cwd=tmp_path, stderr=subprocess.DEVNULL))
    lines = [
        (Path(file["file"]).name, line)
        for file in report["files"]
        if Path(file["file"]).parent == CUDA
        for line in file["lines"]
    ]
    assert len({line["line_number"] for file, line in lines if file == f"{name}.cu"}) > 20
    missed = [(f, line["line_number"], line["function_name"]) for f, line in lines if line["count"] == 0]
    assert not missed, missed


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("terms", [8, 0])
@pytest.mark.parametrize("gated", [True, False])
def test_activated_products_of_many_tiles(gated, terms, dtype, built):
    """Tiles of two experts that end beyond rows and columns; or products without terms."""
    built["grouped_mm_sm90a"].set(0)
    generator = torch.Generator().manual_seed(0)
    x, w, bias = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((150, terms), (3, 528, terms), (3, 528))
    )
    offsets = torch.tensor((130, 130, 141), dtype=torch.int32)
    for form in ("silu", "gelu", "gelu_tanh"):
        wide = [t.double() for t in (x, w, bias)]
        expected = reference_mlp_in(*wide, offsets, form, gated, True)
        results = built["grouped_mm_sm90a"].op("grouped_mlp_in")(x, w, bias, offsets, form, gated, True)
        for result, right in zip(results, expected, strict=True):
            torch.testing.assert_close(result.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-4)


# Files with barriers, and a source that needs them.
BARRIER = re.compile(r"__syncthreads\(\);")
NEEDS_BARRIERS = {
    "cross_entropy.cu": "cross_entropy",
    "problems.cuh": "grouped_mm_sm90a",
    "router.cu": "router",
}


def without_barrier(file: str, folder: Path) -> list[Path]:
    """Copies of csrc/cuda; in each, the file lacks one of its barriers."""
    source, twins = (CUDA / file).read_text(), []
    for number, place in enumerate(BARRIER.finditer(source)):
        twins.append(shutil.copytree(CUDA, folder / f"without_{number}"))
        (twins[-1] / file).write_text(source[: place.start()] + ";" + source[place.end() :])
    return twins


def is_wrong(compiled: Kernels, name: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return True if a result is wrong in some order. In a child, for it may write anywhere, or hang."""
    child = os.fork()
    if child == 0:
        try:
            faulthandler.disable()
            signal.alarm(120)
            torch.set_num_threads(1)  # a pool of threads does not survive the fork
            for seed in range(3):
                compiled.set(seed)
                if errors(compiled, name, monkeypatch, (torch.float32, torch.bfloat16)):
                    break
                if name == "grouped_mm_sm90a" and not listed(compiled, "grouped_mm", seed):
                    break
            else:
                os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] != 0


@pytest.mark.full
@pytest.mark.parametrize("file", NEEDS_BARRIERS)
def test_no_barrier_can_be_left_out(file, built, tmp_path, monkeypatch):
    name = NEEDS_BARRIERS[file]
    assert not is_wrong(built[name], name, monkeypatch)
    for twin in without_barrier(file, tmp_path):
        compiled = kernels(twin / f"{name}.cu", tmp_path, "-iquote", str(twin), *SOURCES[name].options)
        assert is_wrong(compiled, name, monkeypatch), f"{file} {twin.name}: it is not missed"


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cuda_on_cpu") / "broken"
    compile_cuda(HERE / "broken.cu", path, *SANITIZE)
    return path


def outcome(broken: Path, kernel: str) -> tuple[int, str, str]:
    """Status, results and complaints."""
    done = subprocess.run([broken, kernel], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.full
def test_wrong_kernels_are_found(broken):
    for kernel, said in {
        "barrier_for_some": r"thread .* waits for ever at .*broken.cu:\d+, where thread .* does not come",
        "barriers_in_two_places": r"waits at .*broken.cu:\d+, but thread .* at .*broken.cu:\d+",
        "return_before_barrier": r"where thread \(3, 0, 0\) of block .* does not come",
        "shuffle_in_half_a_warp": r"waits for ever at .*broken.cu:\d+",
        "write_beyond_dynamic": "wrote beyond its 256 bytes of dynamic shared memory",
        "write_beyond_static": "index 64 out of bounds",
        "read_unaligned_vector": "misaligned address",
    }.items():
        status, _, text = outcome(broken, kernel)
        assert status != 0 and re.search(said, text), (kernel, text)


def test_races_differ_from_order_to_order(broken):
    for kernel, racy in (
        ("hand_on", False),
        ("hand_on_without_barrier", True),
        ("order_of_blocks", True),
    ):
        status, sums, text = outcome(broken, kernel)
        assert status == 0 and len(sums.split()) == 20, (kernel, text)
        assert (len(set(sums.split())) > 1) == racy, (kernel, sums)
