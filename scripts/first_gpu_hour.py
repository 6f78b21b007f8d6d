"""Prepare a run on a GPU machine that has no network, on a machine without a GPU.

    python scripts/first_gpu_hour.py --out build/first-gpu-hour

It makes in the folder OUT:

- venv: Python 3.12 with torch 2.11.0 and CUDA 13.0, as the GPU machine has them; it stays here (7 GB);
- fastmp: a copy of this tree with all libraries compiled for that torch, and CUTLASS's headers in
  fastmp/.gpu, to compile there again;
- fastmp.tar.gz: that copy, to carry to the GPU machine.

It tries there what needs no GPU, and prints the commands for the GPU machine, where the first one compiles
the Triton kernels: 2,551 in a minute on 16 cores. A second run builds only what has changed. nvcc must be on
the PATH. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "2.11.0"
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
COMMANDS = """\
Unpack fastmp.tar.gz on the GPU machine. Its Python must be 3.12 with torch {torch} and CUDA 13.0; nothing is
installed. In the folder fastmp, each command takes less than ten minutes. OUT names the folder of results;
put it back on a new machine, where gpu_check continues with its file:

# 1. Is it right? All Triton kernels are compiled first. An op a line, then the GPU tests.
{setup}
nvidia-smi -L; python3 -m fastmp doctor | tee $OUT/doctor.txt
timeout 300 python3 -m benchmarks.precompile --phase correctness
timeout 120 python3 -m benchmarks.smoke 2>&1 | tee $OUT/smoke.txt
timeout 300 python3 -m pytest -q -p no:cacheprovider -n 8 -m "gpu and not alone" --timeout 100 tests 2>&1 | \\
    tee $OUT/tests.txt

# 2. Right, and how fast is each op? Again until it says that nothing is left.
{setup}
python3 -m benchmarks.gpu_check --out $OUT/gpu.json --phase correctness kernels --seconds 560

# 3. How fast beside the peers that matter most? Again until it says that nothing is left.
{setup}
python3 -m benchmarks.gpu_check --out $OUT/gpu.json --phase functions --seconds 560 \\
    --families grouped_mm linear_cross_entropy cross_entropy norm moe_layer

Then pytest -n 1 -m "gpu and alone", last. Keep .triton: kernels that have not changed are found there.
FASTMP_CUTLASS_DIR=.gpu/cutlass names CUTLASS's headers, where something is compiled there.
"""
SETUP = "export PYTHONUNBUFFERED=1 PYTHONPATH=. TRITON_CACHE_DIR=.triton OUT=${OUT:-results}; mkdir -p $OUT"


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
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
        raise SystemExit(f"first_gpu_hour: status {process.returncode} of {' '.join(words)}")
    return "".join(printed)


class Preparation:
    """The folder that is prepared, step by step."""

    def __init__(self, out: Path, python: str) -> None:
        self.out, self.python = out, python
        self.venv, self.tree = out / "venv", out / "fastmp"
        self.gpu = self.tree / ".gpu"

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
        run(self.python, environment, "--venv", self.venv, "--torch", TORCH, "test", cwd=self.tree)
        headers = Path(run(self.venv_python, "-c", HEADERS, cwd=self.tree).strip()) / "source" / "include"
        shutil.copytree(headers, self.gpu / "cutlass", dirs_exist_ok=True)

    def check(self) -> None:
        """Try what needs no GPU: the libraries, and the programs' first words."""
        variables = {"PYTHONPATH": str(self.tree), "CUDA_VISIBLE_DEVICES": ""}
        run(self.venv_python, "-c", CHECK, cwd=self.tree, **variables)
        for program in ("benchmarks.smoke", "benchmarks.gpu_check"):
            command, options = [self.venv_python, "-m", program], {"capture_output": True, "text": True}
            environment = {**os.environ, **variables}
            done = subprocess.run(command, cwd=self.tree, env=environment, check=False, **options)
            if done.returncode != 2 or "no GPU" not in done.stderr:
                raise SystemExit(f"first_gpu_hour: {program} does not reach the GPU: {done.stderr}")

    def pack(self) -> None:
        """Pack the copy without what only this machine needs."""
        left_out = {"build", ".venv.lock", "__pycache__"}

        def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
            return None if left_out & set(Path(entry.name).parts) else entry

        with tarfile.open(self.out / "fastmp.tar.gz", "w:gz", compresslevel=3) as packed:
            packed.add(self.tree, arcname="fastmp", filter=kept)

    def steps(self) -> None:
        for step in (self.copy, self.build, self.check, self.pack):
            start = time.monotonic()
            print(f"{step.__name__}: {step.__doc__}", flush=True)
            step()
            print(f"{step.__name__}: {time.monotonic() - start:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        prog="first_gpu_hour.py",
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "first-gpu-hour", help="default: %(default)s"
    )
    parser.add_argument("--python", default="python3.12", help="a Python 3.12 (default: %(default)s)")
    options = parser.parse_args(arguments)
    Preparation(options.out.resolve(), options.python).steps()
    print(COMMANDS.format(setup=SETUP, torch=TORCH))
    return 0


if __name__ == "__main__":
    sys.exit(main())
