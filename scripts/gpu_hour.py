"""Measure on a GPU machine that has no network, in commands of nine minutes.

On a machine that has one, nvcc and Python 3.12, but need not have a GPU:

    python scripts/gpu_hour.py prepare --out build/gpu-hour

makes in that folder

- venv: Python 3.12 with torch 2.11.0 and CUDA 13.0, as the GPU machine has them; it stays here (7 GB);
- fastmp.tar.gz: a copy of this tree with all libraries compiled for that torch, CUTLASS's headers, and the
  Triton kernels that are timed on Hopper;
- peers.tar.gz: Liger, QuACK, FA4, transformers and others, which are timed beside it;
- nccl.tar.gz: NCCL 2.30, with which several ranks share a GPU, without code for other GPUs than Hopper's.

Unpack them into one folder on the GPU machine (the last two may be left out), and in its folder fastmp repeat

    python3 scripts/gpu_hour.py run --out results

until its status is 0. A call takes less than ten minutes; the most valuable steps come first, each writes its
results as they come, and the next call goes on in OUT. `--list` prints the commands. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH, NCCL, ARCH = "2.11.0", "nvidia-nccl-cu13==2.30.7", 90
# Without their dependencies, among which is torch.
PEERS = (
    "liger-kernel==0.8.5", "cut-cross-entropy==25.1.1", "quack-kernels==0.6.5", "flash-attn-4==4.0.0b36",
    "nvidia-cutlass-dsl==4.8.1", "nvidia-cutlass-dsl-libs-core==4.8.1", "nvidia-cutlass-dsl-libs-base==4.8.1",
    "nvidia-cutlass-dsl-libs-cu13==4.8.1", "apache-tvm-ffi", "torch-c-dlpack-ext", "einops",
)  # fmt: skip
HEADERS = "import cutlass_library, pathlib; print(pathlib.Path(cutlass_library.__file__).parent)"
# What must hold on a machine without a GPU before anything is carried to one.
CHECK = """
import torch
from fastmp.ops import OPS
from fastmp.host import HOST
assert torch.version.cuda, "torch is built without CUDA"
assert HOST is not None, "the host module is not built"
served = {op for op in OPS if "cuda" in OPS[op].implementations}
missing = {"grouped_mm", "cross_entropy_loss_grad_"} - served
assert not missing, f"no CUDA C++ for {', '.join(sorted(missing))}"
print(f"torch {torch.__version__}, CUDA C++ for {len(served)} ops")
"""
TIMED = "--phase functions kernels"
GPU_CHECK = "-m benchmarks.gpu_check --out {out}/gpu.json --seconds {seconds}"
PYTEST = "-m pytest -q -p no:cacheprovider --timeout 100 tests"
SECONDS = 560  # of a call
SHARED_NCCL = {"LD_PRELOAD": ".gpu/nccl/libnccl.so.2"}  # left out where there is none
LEAST = 45  # seconds with which a step is worth starting


@dataclass(frozen=True)
class Step:
    """Words after `python3`, the most seconds of one try, and variables of its environment."""

    name: str
    words: str
    seconds: int = 540
    variables: dict[str, str] = field(default_factory=dict)

    def command(self, out: Path, seconds: float) -> list[str]:
        """Return the command; gpu_check ends by itself before it is stopped."""
        return [sys.executable, *shlex.split(self.words.format(out=out, seconds=max(1, int(seconds) - 20)))]


STEPS = (
    Step("doctor", "-m fastmp doctor", 60),
    Step("experiments", "-m benchmarks.experiments --out {out}/experiments.json"),
    Step("two ranks", "-m benchmarks.one_gpu --ranks 2", variables=SHARED_NCCL),
    Step("four ranks", "-m benchmarks.one_gpu --ranks 4", variables=SHARED_NCCL),
    Step("fp8", f"{GPU_CHECK} {TIMED} --families linear_fp8 grouped_mm_fp8 moe_layer_fp8 quantize"),
    Step("attention", f"{GPU_CHECK} {TIMED} --families attention latent"),
    Step("experts", f"{GPU_CHECK} {TIMED} --families moe_layer grouped_mm wgrad router permute"),
    Step("transformers", "-m benchmarks.bench_transformers --device cuda --out {out}/transformers.json"),
    Step("training", f"{GPU_CHECK} --phase recipes"),
    Step("others", f"{GPU_CHECK} {TIMED}"),
    Step("correctness", f"{GPU_CHECK} --phase correctness"),
    Step("tests", f"{PYTEST} -n 8 -m 'gpu and not alone'"),
    Step("tests alone", f"{PYTEST} -n 1 -m 'gpu and alone'", variables=SHARED_NCCL),
)


def run(out: Path, seconds: float) -> int:
    """Take the steps that are left until the time is used up; return 0 if none is left.

    A step that was stopped takes its second try after all others, and has no third.
    """
    out.mkdir(parents=True, exist_ok=True)
    record, until = out / "hour.json", time.monotonic() + seconds
    found: dict[str, dict] = json.loads(record.read_text()) if record.exists() else {}
    tries = lambda step: found.get(step.name, {}).get("stopped", 0)  # noqa: E731
    for step in sorted(STEPS, key=tries):
        if found.get(step.name, {}).get("done"):
            continue
        start = time.monotonic()
        limit = min(step.seconds, until - start)
        # a step that cannot go on from its files begins with all of its time
        if limit < (LEAST if "{out}" in step.words else min(step.seconds, 0.9 * seconds)):
            print(f"gpu_hour: the next step is {step.name}: the same command again goes on with it")
            return 1
        status = execute(step, out, limit)
        stopped = tries(step) + (status is None and limit >= min(step.seconds, 0.9 * seconds))
        done = stopped > 1 or (status is not None and not left(step, out))
        found[step.name] = {"status": status, "stopped": stopped, "done": done}
        part = record.with_name("hour.json.part")
        part.write_text(json.dumps(found, indent=1) + "\n")
        part.replace(record)
        print(f"gpu_hour: {step.name}: status {status} after {time.monotonic() - start:.0f} s", flush=True)
    return 0 if all(found[step.name]["done"] for step in STEPS) else 1


def left(step: Step, out: Path) -> bool:
    """Return whether the file of gpu_check says that the step has not done everything."""
    path = out / "gpu.json"
    return "gpu_check" in step.words and path.exists() and bool(json.loads(path.read_text())["left"])


def execute(step: Step, out: Path, seconds: float) -> int | None:
    """Run a step, print what it prints and add it to a file; return its status, None where it was stopped."""
    environment = {**os.environ, **variables(), **step.variables}
    if preloaded := step.variables.get("LD_PRELOAD"):
        environment["LD_PRELOAD"] = str(ROOT / preloaded) if (ROOT / preloaded).exists() else ""
    command = step.command(out, seconds)
    options = {"cwd": ROOT, "env": environment, "start_new_session": True, "text": True, "errors": "replace"}
    with (
        (out / f"{step.name.replace(' ', '-')}.txt").open("a") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as process,
    ):
        stopped = threading.Event()

        def stop() -> None:
            stopped.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, stop)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
            log.flush()
        status = process.wait()
        timer.cancel()
    return None if stopped.is_set() else status


def variables() -> dict[str, str]:
    """Return the environment of all steps; unpacks NCCL at the first one."""
    peers, nccl = ROOT / ".gpu" / "peers", ROOT / ".gpu" / "nccl" / "libnccl.so.2"
    packed = nccl.with_name("libnccl.so.2.xz")
    if packed.exists() and not nccl.exists():
        nccl.write_bytes(lzma.decompress(packed.read_bytes()))
    # CuTe's packages are found by a .pth file, which PYTHONPATH does not read.
    paths = [ROOT, peers, *(peers / "nvidia_cutlass_dsl").glob("*packages")]
    path = os.pathsep.join(map(str, paths))
    return {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path, "TRITON_CACHE_DIR": str(ROOT / ".triton")}


def call(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command and return what it prints, which is also printed; SystemExit where it fails."""
    words = list(map(str, command))
    printed = []
    environment = {**os.environ, **variables}
    with subprocess.Popen(
        words, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"    {line}", end="", flush=True)
            printed.append(line)
    if process.returncode:
        raise SystemExit(f"gpu_hour: status {process.returncode} of {' '.join(words)}")
    return "".join(printed)


def slim(library: bytes, arch: int) -> bytes:
    """Overwrite device code of others than `arch` with zeros: offsets stay, so the library still loads."""
    slimmed, at = bytearray(library), library.find(_FATBIN)
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", library, at + 4)
        entry, end = at + header, at + header + size
        while (version, header) == (1, 16) and entry < end:
            kind, _, own_header, length = struct.unpack_from("<HHIQ", library, entry)
            (target,) = struct.unpack_from("<I", library, entry + 28)
            if (kind, target) != (_CUBIN, arch):
                slimmed[entry + own_header : entry + own_header + length] = bytes(length)
            entry += own_header + length
        at = library.find(_FATBIN, at + 4)
    return bytes(slimmed)


_FATBIN, _CUBIN = struct.pack("<I", 0xBA55ED50), 2


class Preparation:
    """The folder that is prepared, step by step."""

    def __init__(self, out: Path, python: str) -> None:
        self.out, self.python = out, python
        self.venv, self.tree = out / "venv", out / "fastmp"
        self.gpu = self.tree / ".gpu"
        self.variables = {"PYTHONPATH": str(self.tree), "CUDA_VISIBLE_DEVICES": ""}

    @property
    def venv_python(self) -> Path:
        return self.venv / "bin" / "python"

    def copy(self) -> None:
        """Copy what git tracks, as it is now; libraries that were built there stay."""
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in names.decode().split("\0")[:-1]:
            target = self.tree / name
            if (ROOT / name).is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        self.gpu.mkdir(exist_ok=True)

    def build(self) -> None:
        """Make the environment, and compile all libraries in the copy."""
        environment = self.tree / ".ci" / "environment.py"
        call(self.python, environment, "--venv", self.venv, "--torch", TORCH, "test", cwd=self.tree)
        headers = Path(call(self.venv_python, "-c", HEADERS, cwd=self.tree).strip()) / "source" / "include"
        shutil.copytree(headers, self.gpu / "cutlass", dirs_exist_ok=True)

    def check(self) -> None:
        """Try what needs no GPU: the libraries, and the programs' first words."""
        call(self.venv_python, "-c", CHECK, cwd=self.tree, **self.variables)
        for program in ("benchmarks.experiments", "benchmarks.gpu_check"):
            command, options = [self.venv_python, "-m", program], {"capture_output": True, "text": True}
            environment = {**os.environ, **self.variables}
            done = subprocess.run(command, cwd=self.tree, env=environment, check=False, **options)
            if done.returncode != 2 or "no GPU" not in done.stderr:
                raise SystemExit(f"gpu_hour: {program} does not reach the GPU: {done.stderr}")

    def kernels(self) -> None:
        """Compile the Triton kernels that are timed."""
        cache = {"TRITON_CACHE_DIR": str(self.tree / ".triton"), "TRITON_STORE_BINARY_ONLY": "1"}
        words = ["-m", "benchmarks.precompile", "--arch", str(ARCH), *TIMED.split()]
        call(self.venv_python, *words, cwd=self.tree, **self.variables, **cache)

    def peers(self) -> None:
        """Download what is timed beside fastmp, but for torch and NumPy, which the GPU machine has."""
        install = [
            self.venv_python,
            "-m",
            "pip",
            "install",
            "-q",
            "--upgrade",
            "--target",
            self.gpu / "peers",
        ]
        call(*install, "transformers>=5", cwd=self.tree)
        call(*install, "--no-deps", *PEERS, cwd=self.tree)
        for path in (self.gpu / "peers").glob("numpy*"):
            shutil.rmtree(path)

    def nccl(self) -> None:
        """Download NCCL and keep its code for Hopper; for tests on your own machine, not to be published."""
        folder = self.gpu / "nccl"
        call(
            self.venv_python, "-m", "pip", "download", "-q", "--no-deps", "-d", self.out, NCCL, cwd=self.tree
        )
        (wheel,) = self.out.glob("nvidia_nccl*.whl")
        library = zipfile.ZipFile(wheel).read("nvidia/nccl/lib/libnccl.so.2")
        folder.mkdir(exist_ok=True)
        (folder / "libnccl.so.2.xz").write_bytes(lzma.compress(slim(library, ARCH), preset=3))

    def pack(self) -> None:
        """Pack the copy without what only this machine needs; peers and NCCL by themselves."""
        left_out = {"build", ".venv.lock", "__pycache__"}
        apart = {"peers": self.gpu / "peers", "nccl": self.gpu / "nccl"}
        apart_names = {str(path.relative_to(self.out)) for path in apart.values()}

        def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
            return None if left_out & set(Path(entry.name).parts) or entry.name in apart_names else entry

        with tarfile.open(self.out / "fastmp.tar.gz", "w:gz", compresslevel=3) as packed:
            packed.add(self.tree, arcname="fastmp", filter=kept)
        for name, path in apart.items():
            with tarfile.open(self.out / f"{name}.tar.gz", "w:gz", compresslevel=6) as packed:
                packed.add(path, arcname=str(path.relative_to(self.out)))
        for name in ("fastmp", *apart):
            size = (self.out / f"{name}.tar.gz").stat().st_size
            print(f"{name}.tar.gz: {size / 2**20:.1f} MiB")

    def steps(self) -> None:
        for step in (self.copy, self.build, self.check, self.kernels, self.peers, self.nccl, self.pack):
            start = time.monotonic()
            print(f"{step.__name__}: {step.__doc__}", flush=True)
            step()
            print(f"{step.__name__}: {time.monotonic() - start:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="gpu_hour.py"
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    prepare = modes.add_parser("prepare", help="on a machine with a network and nvcc")
    prepare.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-hour", help="default: %(default)s")
    prepare.add_argument("--python", default="python3.12", help="a Python 3.12 (default: %(default)s)")
    on_gpu = modes.add_parser("run", help="on the GPU machine, again until the status is 0")
    on_gpu.add_argument("--out", type=Path, default=Path("results"), help="default: %(default)s")
    on_gpu.add_argument("--seconds", type=float, default=SECONDS, help="of this call (default %(default)s)")
    on_gpu.add_argument("--list", action="store_true", help="print the commands alone")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    if options.mode == "prepare":
        Preparation(out, options.python).steps()
    elif options.list:
        for step in STEPS:
            print(
                shlex.join(
                    [*(f"{n}={v}" for n, v in step.variables.items()), *step.command(out, step.seconds)]
                )
            )
    else:
        return run(out, options.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
