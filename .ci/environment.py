"""Brings .venv up to date for a purpose: extras of pyproject.toml such as `train` or `test`.

Standard library only, run by the Python that .venv is made from. Where that Python already has a torch of
2.10 or later, .venv sees its packages through a .pth file and nothing that is there is downloaded again;
otherwise torch is installed. Each step leaves a stamp that names the content it was done for, so that a
second run does nothing: the requirements, and for fastmp itself the sources and variables of the build.

Another environment beside .venv: --venv names its directory, --torch the version it is to have. With --torch
newest, it gets the newest releases of torch, Triton and NumPy instead of those that tests are pinned to.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

try:
    import tomllib
except ImportError:
    raise SystemExit(f"environment: Python >= 3.11 is needed, this is {sys.version.split()[0]}") from None

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"
NEWEST = "newest"
UNPINNED = ("triton", "numpy")  # with the newest torch
CUTLASS = "nvidia-cutlass==4.2.0.0"
OUTER = "outer.pth"
BUILD_VARIABLES = ("FASTMP_ISA", "FASTMP_CPP", "FASTMP_CUDA", "FASTMP_TORCH_DIR", "TORCH_CUDA_ARCH_LIST")
BUILD_TOOLS = ("FASTMP_CUTLASS_DIR", "CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH")

PROBE = """
import json, site, sys
try:
    import torch
    found = str(torch.__version__)
except ImportError:
    found = ""
sites = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
print(json.dumps([found, sites]))
"""


def say(message: str, end: str = "\n") -> None:
    print(f"environment: {message}", end=end, flush=True)


def run(*command: str | Path, watch: str = "") -> tuple[bool, str]:
    """Whether the command succeeds, and all it printed. With `watch`, says how far its "[n/m]" are."""
    words = [str(part) for part in command]
    printed, last = [], time.monotonic()
    process = subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    for line in process.stdout:
        printed.append(line)
        done = re.match(r"\[(\d+)/(\d+)\]", line) if watch else None
        if done and sys.stdout.isatty():
            say(f"{watch}: {done[1]} of {done[2]}", end="\n" if done[1] == done[2] else "\r")
        elif done and (done[1] == done[2] or time.monotonic() > last + 10):
            say(f"{watch}: {done[1]} of {done[2]}")
            last = time.monotonic()
    return process.wait() == 0, "".join(printed)


class Environment:
    """A virtual environment in `directory`.

    `torch` is the version of its torch. `NEWEST` installs the newest release; None takes Python's own torch
    if that is recent enough.
    """

    def __init__(self, directory: Path, torch: str | None):
        self.directory = directory
        self.python = directory / "bin" / "python"
        self.stamps = directory / "stamps"
        self.torch = torch

    def pip(self, *arguments: str) -> tuple[bool, str]:
        """Install, and leave it to the first import to compile what is imported: a tenth of torch is."""
        options = ("--disable-pip-version-check", "install", "--quiet", "--no-compile")
        return run(self.python, "-m", "pip", *options, *arguments)

    def probe(self, python: str | Path) -> tuple[str, list[str]]:
        """(version of its torch if it is one to be used else "", its site directories)."""
        output = subprocess.run(
            [str(python), "-c", PROBE], cwd=self.directory.parent, capture_output=True, text=True, check=True
        ).stdout
        version, sites = json.loads(output.splitlines()[-1])
        if self.torch == NEWEST:
            fits = bool(version) and python == self.python
        elif self.torch:
            fits = version.partition("+")[0] == self.torch
        else:
            fits = bool(version) and tuple(int(part) for part in version.split(".")[:2]) >= (2, 10)
        return version if fits else "", [site for site in sites if os.path.isdir(site)]

    def make(self) -> None:
        say(f"making {self.directory.name} with {sys.executable} (Python {sys.version.split()[0]})")
        version, sites = self.probe(sys.executable)
        # Seen through the .pth, the pip and setuptools that are there serve; those of a new venv are older.
        bare = ["--without-pip"] if version and importlib.util.find_spec("pip") else []
        made, printed = run(sys.executable, "-m", "venv", *bare, self.directory)
        if not made:
            hint = "on Debian and Ubuntu: install python3-venv"
            raise SystemExit(f"{printed}environment: python -m venv failed ({hint})")
        if version:
            say(f"torch {version} is there already: packages are taken from {', '.join(sites)}")
            library = f"python{sys.version_info.major}.{sys.version_info.minor}"
            (self.directory / "lib" / library / "site-packages" / OUTER).write_text("\n".join(sites) + "\n")
        self.stamps.mkdir()  # last: without it an environment is one that was interrupted, or not ours

    def install_torch(self) -> None:
        wanted = "torch" if self.torch == NEWEST else f"torch=={self.torch or TORCH}"
        say(f"installing {wanted} (about a minute, three for one with CUDA)")
        installed, printed = self.pip(wanted)
        if not installed:
            raise SystemExit(f"{printed}environment: could not install {wanted}")

    def install(self, wanted: list[str], purpose: str) -> bool:
        """Install what can be had; False if something is missing that fastmp can do without."""
        say(f"installing {len(wanted)} packages to build fastmp and to {purpose} (about a minute)")
        installed, printed = self.pip(*wanted)
        if installed:
            return True
        absent = [one for one in wanted if not self.pip("--no-index", "--no-deps", one)[0]]
        if not next(self.directory.glob(f"lib/*/site-packages/{OUTER}"), None):
            raise SystemExit(f"{printed}environment: could not install {', '.join(absent)}")
        say(f"going on without {', '.join(absent)}: what needs them will say so")
        return not absent

    def build(self) -> None:
        """Compile in place, where progress can be seen, then install editable, which finds all compiled."""
        say("compiling C++ (about a minute on two cores; three more for CUDA C++, where torch has CUDA)")
        options = ("--no-build-isolation", "--no-deps", "--editable", ".")
        if "+cu" in self.probe(self.python)[0] and not self.pip("--no-deps", CUTLASS)[0]:
            say(f"going on without {CUTLASS}: CUDA C++ will have no products for sm_90a")
        built, printed = run(self.python, "setup.py", "-q", "build_ext", "--inplace", watch="compiled")
        if built:
            built, printed = self.pip(*options)
        if not built:
            raise SystemExit(f"{printed}environment: the build failed")
        record = json.loads((ROOT / "fastmp" / "_build.json").read_text())
        for part, library in (
            ("cpp", "_C_cpu"),
            ("autograd", "_C_autograd"),
            ("cuda", "_C_cuda"),
            ("host", "_host"),
            ("replay", "_replay"),
        ):
            if record[part] != "built":
                say(f"no {library}: {record[part]}")


def requirements(project: dict, names: list[str]) -> list[str]:
    """What fastmp, its build and some extras need, the extras they name included; torch is apart."""
    listed = project["build-system"]["requires"] + ["wheel"] + project["project"]["dependencies"]
    extras = project["project"]["optional-dependencies"]
    waiting = list(names)
    while waiting:
        for requirement in extras[waiting.pop()]:
            if requirement.startswith("fastmp["):
                waiting += requirement[len("fastmp[") : -1].split(",")
            else:
                listed.append(requirement)
    return [requirement for requirement in dict.fromkeys(listed) if not requirement.startswith("torch>")]


def unpinned(wanted: list[str]) -> list[str]:
    """Drop the versions that requirements pin `UNPINNED` packages to."""
    pin = re.compile(rf"^({'|'.join(UNPINNED)})\b[^;]*")
    return list(dict.fromkeys(pin.sub(r"\1", requirement) for requirement in wanted))


def digest(parts: list[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def build_digest(environment: Path, torch_version: str) -> str:
    files = [ROOT / name for name in ("setup.py", "CMakeLists.txt", "pyproject.toml", "MANIFEST.in")]
    files += sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    variables = sorted(
        f"{key}={value}" for key, value in os.environ.items() if key in BUILD_VARIABLES + BUILD_TOOLS
    )
    parts = [part for path in files for part in (str(path.relative_to(ROOT)).encode(), path.read_bytes())]
    return digest([*parts, *map(str.encode, variables), torch_version.encode(), str(environment).encode()])


def outputs_present() -> bool:
    record = ROOT / "fastmp" / "_build.json"
    built = json.loads(record.read_text()) if record.exists() else {}
    patterns = {
        **{"cpp": "_C_cpu.so", "cuda": "_C_cuda.so"},
        **{"autograd": "_C_autograd.*.so", "host": "_host.*.so", "replay": "_replay.*.so"},
    }
    needed = [pattern for part, pattern in patterns.items() if built.get(part) == "built"]
    return bool(built) and all(any(record.parent.glob(pattern)) for pattern in needed)


def main(directory: Path, torch: str | None, extras: list[str]) -> None:
    started = time.monotonic()
    environment = Environment(directory, torch)
    if not environment.stamps.exists():
        environment.make()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = requirements(project, extras)
    if torch == NEWEST:
        wanted = unpinned(wanted)
    name = "-".join(["requirements", *extras, digest([item.encode() for item in wanted])[:16]])
    stamp = environment.stamps / name
    if not stamp.exists():
        if not environment.probe(environment.python)[0]:
            environment.install_torch()
        if environment.install(wanted, " and ".join(extras)):
            stamp.write_text(environment.probe(environment.python)[0])

    # beside what is built, not in the environment: there is one set of libraries for all environments
    build = ROOT / "build" / "stamp"
    version = stamp.read_text() if stamp.exists() else environment.probe(environment.python)[0]
    want = enough = build_digest(directory, version)
    if extras == ["train"] and "FASTMP_ISA" not in os.environ:  # which runs here only
        os.environ["FASTMP_ISA"] = "native"
        want = build_digest(directory, version)
    if not (build.exists() and build.read_text() in (want, enough) and outputs_present()):
        build.unlink(missing_ok=True)
        environment.build()
        build.parent.mkdir(exist_ok=True)
        build.write_text(want)
        minutes, seconds = divmod(round(time.monotonic() - started), 60)
        say(f"ready after {minutes} min {seconds} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--venv", default=".venv", help="directory of the environment (default: %(default)s)")
    parser.add_argument(
        "--torch", help=f"version of torch, or {NEWEST} (default: Python's own if recent, else {TORCH})"
    )
    parser.add_argument("extras", nargs="*", help="extras of pyproject.toml")
    given = parser.parse_args()
    with open(ROOT / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once take turns
        main(ROOT / given.venv, given.torch, given.extras)
