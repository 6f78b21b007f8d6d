"""Build a release wheel that installs without a compiler and serves several versions of torch.

    python scripts/build_wheels.py           # dist/fastmp-VERSION+cpu-cp311-cp311-manylinux_2_N_x86_64.whl
    python scripts/build_wheels.py --cuda    # +cu130 (by nvcc): also _C_cuda for sm_80, sm_90, sm_100 and PTX

`_C_cpu` and `_C_cuda` use torch's stable ABI: they are compiled once, against the oldest torch. `_C_autograd`
and `_replay` use its C++ interface: they are compiled against each torch, under names such as
`_replay_torch2_13`, and `fastmp.ops.core.built` chooses one at import. These and `_host` are for the Python
that runs this script, hence one wheel for each version of Python.

pip downloads each torch (0.5 to 0.9 GB); its headers and linked libraries stay in build/torch. Every symbol
that a library takes from torch is looked up in each torch that it is to serve; the symbol versions that it
takes from glibc and libstdc++ give N of manylinux_2_N. Needs setuptools, pybind11, cmake, ninja and binutils.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")  # newest patch release of each
CUTLASS = "nvidia-cutlass==4.2.0.0"
PER_TORCH = ("_C_autograd", "_replay")
LINKED = ("libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so")
SYSTEM = r"(libstdc\+\+|libgcc_s|libc|libm|libdl|libpthread|librt|ld-linux-x86-64|ld-linux-aarch64)\.so\.\d+"
# Newest symbol versions of libstdc++ of GCC 8, 10, 11 and 12, and glibc 2.N of distributions that have it.
LIBSTDCXX = (
    ((3, 4, 25), (1, 3, 11), 28),
    ((3, 4, 28), (1, 3, 12), 31),
    ((3, 4, 29), (1, 3, 13), 34),
    ((3, 4, 30), (1, 3, 13), 35),
)


def say(message: str) -> None:
    print(f"wheel: {message}", flush=True)


def fail(message: str) -> SystemExit:
    return SystemExit(f"wheel: error: {message}")


def output(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def fetch(requirement: str, kept: str, directory: Path) -> Path:
    """Download the wheel of `requirement` and extract the members that match `kept` into `directory`."""
    if directory.exists():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        say(f"downloading {requirement}")
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet")
        subprocess.run([*pip, "--no-deps", "--only-binary=:all:", "-d", scratch, requirement], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if re.fullmatch(kept, name)]
            archive.extractall(Path(scratch, "kept"), names)
        os.replace(Path(scratch, "kept"), directory)
    return directory


def fetch_torch(version: str) -> Path:
    """Return the directory of a torch package that has its headers and linked libraries only."""
    libraries = "|".join(re.escape(name) for name in LINKED)
    kept = rf"torch/(version\.py|include/.*|lib/({libraries}))"
    return fetch(f"torch=={version}", kept, ROOT / "build" / "torch" / version) / "torch"


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fastmp_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def versioned(library: str, torch_version: str) -> str:
    """Return the file name of `library` for a version of torch."""
    major, minor = torch_version.split(".")[:2]
    return f"{library}_torch{major}_{minor}{sysconfig.get_config_var('EXT_SUFFIX')}"


def build_base(directory: Path, torch: Path) -> Path:
    """Build the wheel of one torch by setup.py and unpack it; returns the folder."""
    environment = {**os.environ, "FASTMP_TORCH_DIR": str(torch)}
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(directory)!r})"
    if subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=False).returncode:
        raise fail("setup.py failed; its output is above")
    (wheel,) = directory.glob("fastmp-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "unpacked")
    return directory / "unpacked"


def build_for(version: str, torch: Path, package: Path) -> None:
    """Compile the libraries of one torch into `package`, under their versioned names."""
    os.environ["FASTMP_TORCH_DIR"] = str(torch)
    setup = load_setup()
    plan = setup.make_plan()
    off = dict.fromkeys(("FASTMP_BUILD_CPU", "FASTMP_BUILD_CUDA", "FASTMP_BUILD_HOST"), "OFF")
    plan.definitions |= off
    cmake_dir = ROOT / "build" / "wheel" / f"{sys.implementation.cache_tag}-torch{version}"
    setup.run_cmake(plan, cmake_dir, list(PER_TORCH))
    for library in PER_TORCH:
        shutil.copy2(cmake_dir / "lib" / f"{library}.so", package / versioned(library, version))


def missing_symbols(library: Path, provided: set[str]) -> list[str]:
    """Return the symbols that `library` expects from torch and that are not among `provided`.

    Those of glibc and libstdc++ carry a version, those of Python are of its own ABI. libtorch_cuda.so is not
    extracted, so its few symbols are not compared.
    """
    found = re.findall(r"^\s+U (\S+)$", output("nm", "-D", library), re.MULTILINE)
    ours = [name for name in found if "@" not in name and not re.match(r"_?Py[A-Z_]", name)]
    return [name for name in ours if name not in provided and "cuda" not in name]


def glibc_minor(symbol_versions: Iterable[str], here: int) -> int:
    """Return N of the manylinux_2_N that has all of `symbol_versions` ("GLIBC_2.34", "GLIBCXX_3.4.29").

    here: N of this machine, which counts where libstdc++ is newer than `LIBSTDCXX` knows.
    """
    newest = {"GLIBC": (2, 17), "GLIBCXX": (3, 4, 19), "CXXABI": (1, 3, 7)}
    for item in symbol_versions:
        kind, _, number = item.partition("_")
        newest[kind] = max(newest[kind], tuple(int(part) for part in number.split(".")))
    fits = (n for cxx, abi, n in LIBSTDCXX if newest["GLIBCXX"] <= cxx and newest["CXXABI"] <= abi)
    return max(newest["GLIBC"][1], next(fits, here))


def check(package: Path, torches: dict[str, Path]) -> str:
    """Check what every library of `package` needs; returns the platform tag.

    Raises:
        SystemExit: a symbol is in no library of a torch, or a library is needed that is not part of Linux.
    """
    libraries = sorted(package.glob("*.so"))
    symbol_versions = set()
    for library in libraries:
        needed = re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", library))
        foreign = [name for name in needed if name not in LINKED and not re.fullmatch(SYSTEM, name)]
        if foreign:
            raise fail(f"{library.name} needs {', '.join(foreign)}")
        symbol_versions |= set(
            re.findall(r"\b(?:GLIBC|GLIBCXX|CXXABI)_\d[\d.]*\b", output("objdump", "-T", library))
        )
    for version, torch in torches.items():
        listed = [output("nm", "-D", "--defined-only", torch / "lib" / name) for name in LINKED]
        provided = {
            line.rpartition(" ")[2].partition("@")[0] for text in listed for line in text.splitlines()
        }
        mine = [versioned(library, version) for library in PER_TORCH]
        for library in libraries:
            if "_torch" in library.name and library.name not in mine:
                continue
            if missing := missing_symbols(library, provided):
                names = "\n  ".join(missing[:10])
                raise fail(f"torch {version} lacks {len(missing)} symbols of {library.name}:\n  {names}")
        say(f"torch {version} has every symbol of {', '.join(mine)} and of the stable-ABI libraries")
    here = int(os.confstr("CS_GNU_LIBC_VERSION").rpartition(".")[2])
    return f"manylinux_2_{glibc_minor(symbol_versions, here)}_{platform.machine()}"


def pack(unpacked: Path, label: str, tag: str, out: Path) -> Path:
    """Write the wheel of `unpacked` under a local version label ("cpu") and platform tag."""
    (info,) = unpacked.glob("*.dist-info")
    about = (info / "METADATA").read_text()
    version = re.search(r"^Version: (.*)$", about, re.MULTILINE)[1]
    name = f"fastmp-{version}+{label}"
    (info / "METADATA").write_text(about.replace(f"Version: {version}", f"Version: {version}+{label}", 1))
    wheel = (info / "WHEEL").read_text()
    (python_tag,) = re.findall(r"^Tag: (\w+-\w+)-", wheel, re.MULTILINE)
    (info / "WHEEL").write_text(re.sub(r"^(Tag: \w+-\w+)-.*$", rf"\1-{tag}", wheel, flags=re.MULTILINE))
    (info / "RECORD").unlink()
    info = info.rename(unpacked / f"{name}.dist-info")
    rows = []
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}-{python_tag}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for file in sorted(file for file in unpacked.rglob("*") if file.is_file()):
            inside, data = file.relative_to(unpacked).as_posix(), file.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{inside},sha256={digest},{len(data)}")
            archive.write(file, inside)
        rows.append(f"{info.name}/RECORD,,")
        archive.writestr(f"{info.name}/RECORD", "\n".join(rows) + "\n")
    return path


def cuda_label() -> str:
    """Return "cu130" for nvcc 13.0."""
    nvcc = load_setup().find_nvcc()
    if nvcc is None:
        raise fail("--cuda needs nvcc (CUDACXX, CUDA_HOME, PATH or /usr/local/cuda)")
    return "cu" + "".join(re.search(r"release (\d+)\.(\d+)", output(nvcc, "--version")).groups())


def main() -> None:
    """Build one wheel; see the docstring of the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuda", action="store_true", help="with CUDA C++ kernels (default: without)")
    parser.add_argument(
        "--torch", nargs="+", default=VERSIONS, metavar="VERSION", help="default: %(default)s"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheel (default: dist)")
    options = parser.parse_args()
    versions = sorted(options.torch, key=lambda text: [int(part) for part in text.split(".")])
    if len({version.rpartition(".")[0] for version in versions}) < len(versions):
        raise fail("--torch: name one release of each minor version")
    label = cuda_label() if options.cuda else "cpu"
    os.environ |= {"FASTMP_CPP": "1", "FASTMP_CUDA": str(int(options.cuda)), "FASTMP_ISA": "all"}
    if options.cuda and not os.environ.get("FASTMP_CUTLASS_DIR"):
        headers = fetch(CUTLASS, "cutlass_library/source/include/.*", ROOT / "build" / "cutlass")
        os.environ["FASTMP_CUTLASS_DIR"] = str(headers / "cutlass_library" / "source" / "include")

    torches = {version: fetch_torch(version) for version in versions}
    with tempfile.TemporaryDirectory() as scratch:
        say(f"compiling the stable-ABI libraries against torch {versions[0]}")
        unpacked = build_base(Path(scratch), torches[versions[0]])
        package = unpacked / "fastmp"
        for library in PER_TORCH:
            next(package.glob(f"{library}.*so")).rename(package / versioned(library, versions[0]))
        for version in versions[1:]:
            say(f"compiling {' and '.join(PER_TORCH)} against torch {version}")
            build_for(version, torches[version], package)
        record = json.loads((package / "_build.json").read_text())
        record["torch"] = versions
        if not options.cuda:
            record["cuda"] = "this is the wheel without CUDA C++"
        (package / "_build.json").write_text(json.dumps(record, indent=2) + "\n")
        path = pack(unpacked, label, check(package, torches), options.out)
    say(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
