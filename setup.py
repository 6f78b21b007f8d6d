"""Build of the compiled parts: decides what can be built here, then drives CMakeLists.txt with Ninja.

FASTMP_CPP (`_C_cpu`, `_C_autograd`, `_host` and `_replay`) and FASTMP_CUDA (`_C_cuda`) are auto (build where
the tools are), 0 (do not) or 1 (fail rather than skip); auto leaves out `_C_cuda` with FASTMP_CPP=0, and
where torch is built without CUDA. `_C_autograd` and `_replay` serve the version of torch that they are built
against; scripts/build_wheels.py packs those of several. FASTMP_ISA=native compiles `_C_cpu` for the oldest
instruction set and this machine's best.
TORCH_CUDA_ARCH_LIST lists the GPU architectures, FASTMP_TORCH_DIR names the torch package to build against,
FASTMP_CUTLASS_DIR the headers of CUTLASS 4.2 (default: those of the package nvidia-cutlass; without them the
products for sm_90a are left out), CXX and CUDACXX the compilers, MAX_JOBS limits parallel compilation.
FASTMP_SANITIZE=1 builds with sanitizers (`make sanitize`). What was built, or why not, is written to
fastmp/_build.json. No GPU is looked for.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
MINIMUM_TORCH = (2, 10)
DEFAULT_ARCHS = "8.0;9.0;10.0+PTX"
LIBRARIES = {
    "cpp": "_C_cpu",
    "autograd": "_C_autograd",
    "cuda": "_C_cuda",
    "host": "_host",
    "replay": "_replay",
}
PYTHON_MODULES = ("_C_autograd", "_host", "_replay")  # the others are loaded by torch


class BuildError(SystemExit):
    """Ends the build with one readable line."""

    def __init__(self, message: str):
        super().__init__(f"fastmp: error: {message}")


@dataclass(frozen=True, order=True)
class Arch:
    """A GPU architecture: capability as one number (90 is 9.0), suffix "", "a" or "f", with PTX or not."""

    number: int
    suffix: str = ""
    ptx: bool = False

    def gencode(self, suffix: str = "") -> list[str]:
        name = f"{self.number}{suffix}"
        flags = [f"-gencode=arch=compute_{name},code=sm_{name}"]
        if self.ptx and not suffix:
            flags.append(f"-gencode=arch=compute_{name},code=compute_{name}")
        return flags

    def __str__(self) -> str:
        return f"{self.number // 10}.{self.number % 10}{self.suffix}{'+PTX' if self.ptx else ''}"


def parse_archs(text: str) -> list[Arch]:
    """Architectures of a list such as "8.0;9.0a 100+PTX" (dots, suffixes and separators as one likes).

    Raises:
        ValueError: names the item that is not an architecture, or an empty list.
    """
    archs = {}
    for item in filter(None, re.split(r"[;,\s]+", text)):
        match = re.fullmatch(r"(?:(\d+)\.(\d)|(\d+)(\d))([af]?)(\+PTX)?", item, flags=re.IGNORECASE)
        if match is None:
            raise ValueError(f"TORCH_CUDA_ARCH_LIST: {item!r} is no architecture; write 9.0, 90a or 10.0+PTX")
        major, minor = match[1] or match[3], match[2] or match[4]
        arch = Arch(int(major) * 10 + int(minor), match[5].lower(), bool(match[6]))
        archs[arch.number, arch.suffix] = arch
    if not archs:
        raise ValueError(f"TORCH_CUDA_ARCH_LIST: {text!r} names no architecture")
    return sorted(archs.values())


def gencode_flags(archs: list[Arch]) -> dict[str, list[str]]:
    """nvcc options by kind of source: "" ordinary files (no suffix: portable within a generation and beyond),
    "SM90A" and "SM100F" files that need instructions of just that architecture, where it is in the list."""
    flags: dict[str, list[str]] = {"": [], "SM90A": [], "SM100F": []}
    for arch in archs:
        flags[""] += [flag for flag in arch.gencode() if flag not in flags[""]]
        if arch.number == 90:
            flags["SM90A"] = arch.gencode("a")
        if arch.number == 100:
            flags["SM100F"] = arch.gencode("f")
    return flags


def setting(name: str) -> str:
    """FASTMP_CPP, FASTMP_CUDA or FASTMP_SANITIZE: auto, 0 or 1."""
    value = os.environ.get(name, "auto").strip().lower() or "auto"
    if value not in ("auto", "0", "1"):
        raise BuildError(f"{name} must be auto, 0 or 1, got {value!r}")
    return value


def instruction_sets() -> list[str]:
    """The instruction sets to compile for: all, or the oldest and this machine's best (FASTMP_ISA=native)."""
    every = ["base", "avx2", "avx512"]
    choice = os.environ.get("FASTMP_ISA", "").strip().lower() or "all"
    if choice not in ("all", "native"):
        raise BuildError(f"FASTMP_ISA must be all or native, got {choice!r}")
    cpus = Path("/proc/cpuinfo")
    if choice == "all" or not cpus.exists():
        return every
    has = set(cpus.read_text().partition("\nflags")[2].partition("\n")[0].split())
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= has:
        return ["base", "avx512"]
    return ["base", "avx2"] if {"avx2", "fma", "f16c"} <= has else ["base"]


def torch_candidates() -> list[Path]:
    """Where torch may be: FASTMP_TORCH_DIR, an importable torch, the environment that is installed into.

    pip's isolated build hides that environment from imports, but sysconfig still names it; directories listed
    in its .pth files count as well.
    """
    if os.environ.get("FASTMP_TORCH_DIR"):
        return [Path(os.environ["FASTMP_TORCH_DIR"])]
    candidates = []
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin:
        candidates.append(Path(spec.origin).parent)
    for site in dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))):
        candidates.append(Path(site, "torch"))
        for pth in sorted(Path(site).glob("*.pth")):
            lines = pth.read_text(errors="replace").splitlines()
            candidates += [Path(line, "torch") for line in lines if os.path.isabs(line)]
    return candidates


def find_torch() -> tuple[Path | None, str, str]:
    """(directory, version, "") of the torch to build against, or (None, "", why there is none)."""
    reason = "no torch in this environment (set FASTMP_TORCH_DIR to the directory of the torch package)"
    for path in torch_candidates():
        if not (path / "version.py").is_file():
            if os.environ.get("FASTMP_TORCH_DIR"):
                reason = f"FASTMP_TORCH_DIR={path} holds no torch package"
            continue
        version = re.search(r"^__version__\s*=\s*['\"]([^'\"]+)", (path / "version.py").read_text(), re.M)
        number = tuple(int(n) for n in re.findall(r"\d+", version[1])[:2]) if version else (0, 0)
        if number < MINIMUM_TORCH:
            reason = f"torch {version[1] if version else '?'} at {path} is older than 2.10"
        elif not (path / "include" / "torch" / "headeronly").is_dir():
            reason = f"torch {version[1]} at {path} has no C++ headers"
        else:
            return path.resolve(), version[1], ""
    return None, "", reason


def is_without_cuda(torch_dir: Path) -> bool:
    """Whether that torch says of itself that it is built without CUDA."""
    return bool(re.search(r"^cuda\b[^=]*=\s*None", (torch_dir / "version.py").read_text(), re.M))


def find_cutlass(torch_dir: Path) -> str:
    """The directory of CUTLASS's headers, "" without: FASTMP_CUTLASS_DIR, or that of a package."""
    named = os.environ.get("FASTMP_CUTLASS_DIR", "")
    spec = importlib.util.find_spec("cutlass_library")
    packages = [Path(spec.origin).parent] if spec and spec.origin else []
    packages.append(torch_dir.parent / "cutlass_library")
    for found in [Path(named)] if named else [package / "source" / "include" for package in packages]:
        if (found / "cutlass" / "cutlass.h").is_file():
            return str(found)
    if named:
        raise BuildError(f"FASTMP_CUTLASS_DIR={named} holds no cutlass/cutlass.h")
    return ""


def find_tool(name: str, directory: str) -> str | None:
    """`name` from the package of that name (its attribute `directory`), else from PATH."""
    with contextlib.suppress(ImportError, AttributeError):
        path = Path(getattr(__import__(name), directory), name)
        if path.is_file():
            return str(path)
    return shutil.which(name)


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    choices = [os.environ.get("CUDACXX"), home and f"{home}/bin/nvcc", "nvcc", "/usr/local/cuda/bin/nvcc"]
    return next((found for choice in choices if choice and (found := shutil.which(choice))), None)


def default_archs(nvcc: str) -> str:
    """DEFAULT_ARCHS, less those an older nvcc does not know; the newest left carries the PTX."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=False).stdout
    known = {int(number) for number in re.findall(r"compute_(\d+)\b", listed)}
    archs = [arch for arch in parse_archs(DEFAULT_ARCHS) if not known or arch.number in known]
    return ";".join(str(arch) for arch in archs).removesuffix("+PTX") + "+PTX"


@dataclass
class Plan:
    """What is made: for each of cpp, cuda, host "built" or the reason why not; and what CMake is told."""

    parts: dict[str, str]
    torch_version: str = ""
    archs: list[str] = field(default_factory=list)
    cmake: str = ""
    definitions: dict[str, str] = field(default_factory=dict)

    def libraries(self) -> list[str]:
        return [LIBRARIES[part] for part, state in self.parts.items() if state == "built"]

    def record(self) -> dict[str, object]:
        return {**self.parts, "torch": self.torch_version, "archs": self.archs}


def make_plan() -> Plan:
    """Look at the environment and decide what to build.

    Raises:
        BuildError: FASTMP_CPP=1 or FASTMP_CUDA=1 and something is missing.
    """
    cpp, cuda = setting("FASTMP_CPP"), setting("FASTMP_CUDA")
    torch_dir, torch_version, no_torch = find_torch()
    cxx = shutil.which(os.environ.get("CXX") or "c++") or shutil.which("g++") or shutil.which("clang++")
    cmake, ninja, nvcc = find_tool("cmake", "CMAKE_BIN_DIR"), find_tool("ninja", "BIN_DIR"), find_nvcc()
    pybind11 = importlib.util.find_spec("pybind11")
    python_include = sysconfig.get_path("include")
    no_tools = ""
    if not cxx:
        no_tools = "no C++ compiler (CXX, c++, g++ or clang++)"
    elif not cmake or not ninja:
        no_tools = f"no {'ninja' if cmake else 'cmake'} (pip install cmake ninja)"
    no_cpp = "FASTMP_CPP=0" if cpp == "0" else no_tools or no_torch
    no_python = "" if Path(python_include, "Python.h").is_file() else f"no Python.h in {python_include}"
    no_host = "FASTMP_CPP=0" if cpp == "0" else no_tools
    if not no_host and pybind11 is None:
        no_host = "no pybind11 (pip install pybind11)"
    no_host = no_host or no_python
    no_module = no_cpp or no_python
    no_nvcc = "" if nvcc else "no nvcc (CUDACXX, CUDA_HOME, PATH or /usr/local/cuda)"
    no_cuda = no_tools or no_torch or no_nvcc
    if cuda == "0" or (cuda == "auto" and cpp == "0"):
        no_cuda = f"{'FASTMP_CUDA' if cuda == '0' else 'FASTMP_CPP'}=0"
    elif cuda == "auto" and torch_dir and is_without_cuda(torch_dir):
        no_cuda = f"torch {torch_version} is built without CUDA (FASTMP_CUDA=1 compiles it all the same)"
    for name, asked, missing in (("FASTMP_CPP", cpp, no_cpp or no_host), ("FASTMP_CUDA", cuda, no_cuda)):
        if asked == "1" and missing:
            raise BuildError(f"{name}=1, but {missing}")

    missing = {"cpp": no_cpp, "autograd": no_module, "cuda": no_cuda, "host": no_host, "replay": no_module}
    plan = Plan({part: reason or "built" for part, reason in missing.items()}, torch_version)
    plan.cmake = cmake or ""
    plan.definitions = {
        "CMAKE_MAKE_PROGRAM": ninja or "",
        "CMAKE_CXX_COMPILER": cxx or "",
        "FASTMP_ISAS": ";".join(instruction_sets()),
        "FASTMP_TORCH_DIR": str(torch_dir or ""),
        "FASTMP_BUILD_CPU": "OFF" if no_cpp else "ON",
        "FASTMP_BUILD_AUTOGRAD": "OFF" if no_module else "ON",
        "FASTMP_BUILD_CUDA": "OFF" if no_cuda else "ON",
        "FASTMP_BUILD_HOST": "OFF" if no_host else "ON",
        "FASTMP_BUILD_REPLAY": "OFF" if no_module else "ON",
        "FASTMP_PYTHON_INCLUDE": python_include,
        "FASTMP_SANITIZE": "ON" if setting("FASTMP_SANITIZE") == "1" else "OFF",
    }
    if not no_host:
        plan.definitions["FASTMP_PYBIND11_INCLUDE"] = str(Path(pybind11.origin).parent / "include")
    if not no_cuda:
        try:
            archs = parse_archs(os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip() or default_archs(nvcc))
        except ValueError as error:
            raise BuildError(str(error)) from None
        plan.archs = [str(arch) for arch in archs]
        plan.definitions |= {"CMAKE_CUDA_COMPILER": nvcc, "CMAKE_CUDA_HOST_COMPILER": cxx}
        plan.definitions["FASTMP_CUTLASS_DIR"] = find_cutlass(torch_dir)
        for kind, flags in gencode_flags(archs).items():
            plan.definitions["FASTMP_GENCODE" + (kind and f"_{kind}")] = ";".join(flags)
    return plan


def write_record(plan: Plan, package: Path) -> None:
    """Write _build.json next to the libraries, say what it says, and drop libraries of an earlier build."""
    package.mkdir(parents=True, exist_ok=True)
    (package / "_build.json").write_text(json.dumps(plan.record(), indent=2) + "\n")
    for part, library in LIBRARIES.items():
        print(f"fastmp: {library}: {plan.parts[part]}", file=sys.stderr)
        if plan.parts[part] != "built":
            for stale in package.glob(f"{library}.*so"):
                stale.unlink()
    if plan.parts["cuda"] == "built" and not plan.definitions["FASTMP_CUTLASS_DIR"]:
        advice = "pip install --no-deps nvidia-cutlass==4.2.0.0"
        print(f"fastmp: _C_cuda: no products for sm_90a, for want of CUTLASS ({advice})", file=sys.stderr)


def run_cmake(plan: Plan, directory: Path, libraries: list[str]) -> None:
    """Configure CMake in `directory` and compile `libraries` to `directory`/lib.

    Raises:
        BuildError: CMake or a compiler failed; its own output says why.
    """
    jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
    definitions = [f"-D{name}={value}" for name, value in plan.definitions.items()]
    configure = [plan.cmake, "-S", str(ROOT), "-B", str(directory), "-G", "Ninja", *definitions]
    build = [plan.cmake, "--build", str(directory), "--parallel", jobs, "--target"]
    for command in (configure, [*build, *libraries]):
        if subprocess.run(command, check=False).returncode:
            raise BuildError(
                f"failed: {' '.join(command[:5])} ... (FASTMP_CPP=0 installs without compiled code, "
                "FASTMP_CUDA=0 without CUDA C++)"
            )


class BuildPy(build_py):
    """Copies the Python files; an install with nothing compiled gets its record here."""

    def run(self) -> None:
        package = ROOT / "fastmp" if self.editable_mode else Path(self.build_lib, "fastmp")
        if not self.editable_mode:
            shutil.rmtree(package, ignore_errors=True)  # modules since deleted must not reach a wheel
        super().run()
        if not PLAN.libraries():
            write_record(PLAN, package)


class BuildExt(build_ext):
    """Builds the libraries of the plan, each one Extension with an exact file name."""

    def get_ext_filename(self, fullname: str) -> str:
        path = fullname.replace(".", "/")
        return path + (sysconfig.get_config_var("EXT_SUFFIX") if path.endswith(PYTHON_MODULES) else ".so")

    def run(self) -> None:
        inplace = self.inplace
        package = ROOT / "fastmp" if inplace else Path(self.build_lib, "fastmp")
        if not PLAN.libraries():
            return write_record(PLAN, package)
        compilers = zlib.crc32(f"{PLAN.definitions['CMAKE_CXX_COMPILER']} {find_nvcc()}".encode())
        tag = f"{sys.implementation.cache_tag}-torch{PLAN.torch_version or 'none'}-{compilers:08x}"
        kind = "sanitize" if PLAN.definitions["FASTMP_SANITIZE"] == "ON" else "cmake"
        self.cmake_dir = ROOT / "build" / kind / tag
        self.cmake_dir.mkdir(parents=True, exist_ok=True)
        with open(self.cmake_dir / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two builds in one tree take turns
            run_cmake(PLAN, self.cmake_dir, PLAN.libraries())
            super().run()
        write_record(PLAN, package)

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        shutil.copy2(self.cmake_dir / "lib" / f"{ext.name.rpartition('.')[2]}.so", partial)
        os.replace(partial, target)  # a process that has the old library mapped keeps it


if __name__ == "__main__":
    PLAN = make_plan()
    setup(
        license="Apache-2.0",
        ext_modules=[Extension(f"fastmp.{library}", sources=[]) for library in PLAN.libraries()],
        cmdclass={"build_py": BuildPy, "build_ext": BuildExt},
    )
