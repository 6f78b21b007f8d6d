"""Brings .venv up to date for a purpose: extras of pyproject.toml such as `train` or `test`.

Standard library only, run by the Python that .venv is made from. Where that Python already has a torch of
2.10 or later, .venv sees its packages through a .pth file and nothing that is there is downloaded again;
otherwise torch is installed. Each step leaves a stamp that names the content it was done for, so that a
second run does nothing: the requirements, and for fastmp itself the sources and variables of the build.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

try:
    import tomllib
except ImportError:
    raise SystemExit(f"environment: Python >= 3.11 is needed, this is {sys.version.split()[0]}") from None

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
TORCH = "torch==2.13.0"
OUTER = "outer.pth"
BUILD_VARIABLES = ("FASTMP_CPP", "FASTMP_CUDA", "FASTMP_TORCH_DIR", "TORCH_CUDA_ARCH_LIST")
BUILD_TOOLS = ("CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH")

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


def say(message: str) -> None:
    print(f"environment: {message}", flush=True)


def run(*command: str | Path, silent: bool = False) -> bool:
    output = subprocess.DEVNULL if silent else None
    words = [str(part) for part in command]
    return subprocess.run(words, cwd=ROOT, stdout=output, stderr=output, check=False).returncode == 0


def pip(*arguments: str, silent: bool = False) -> bool:
    return run(PYTHON, "-m", "pip", "--disable-pip-version-check", "install", *arguments, silent=silent)


def probe(python: str | Path) -> tuple[str, list[str]]:
    """(version of its torch if 2.10 or later else "", its site directories)."""
    command = [str(python), "-c", PROBE]
    output = subprocess.run(command, cwd=VENV.parent, capture_output=True, text=True, check=True).stdout
    version, sites = json.loads(output.splitlines()[-1])
    recent = bool(version) and tuple(int(part) for part in version.split(".")[:2]) >= (2, 10)
    return version if recent else "", [site for site in sites if os.path.isdir(site)]


def make_venv() -> None:
    say(f"making .venv with {sys.executable} (Python {sys.version.split()[0]})")
    version, sites = probe(sys.executable)
    # Seen through the .pth, the pip and setuptools that are there serve; those of a new venv are older.
    bare = ["--without-pip"] if version and importlib.util.find_spec("pip") else []
    if not run(sys.executable, "-m", "venv", *bare, VENV):
        raise SystemExit("environment: python -m venv failed (on Debian and Ubuntu: install python3-venv)")
    if version:
        say(f"torch {version} is there already: .venv sees the packages of {', '.join(sites)}")
        library = VENV / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (library / OUTER).write_text("\n".join(sites) + "\n")


def requirements(project: dict, names: list[str]) -> list[str]:
    """What fastmp, its build and some extras need, the extras they name included; torch is apart."""
    listed = project["build-system"]["requires"] + ["wheel"] + project["project"]["dependencies"]
    extras = project["project"]["optional-dependencies"]
    waiting = list(names)
    while waiting:
        for requirement in extras[waiting.pop()]:
            if requirement.startswith("fastmp["):
                waiting.append(requirement[len("fastmp[") : -1])
            else:
                listed.append(requirement)
    return [requirement for requirement in dict.fromkeys(listed) if not requirement.startswith("torch>")]


def install(wanted: list[str]) -> bool:
    """Install what can be had; False if something is missing that fastmp can do without."""
    if pip("--quiet", *wanted):
        return True
    absent = [one for one in wanted if not pip("--no-index", "--no-deps", one, silent=True)]
    if not next(VENV.glob(f"lib/*/site-packages/{OUTER}"), None):
        raise SystemExit(f"environment: could not install {', '.join(absent)}")
    say(f"going on without {', '.join(absent)}: what needs them will say so")
    return not absent


def digest(parts: list[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def build_digest(torch_version: str) -> str:
    files = [ROOT / name for name in ("setup.py", "CMakeLists.txt", "pyproject.toml", "MANIFEST.in")]
    files += sorted(path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    variables = sorted(
        f"{key}={value}" for key, value in os.environ.items() if key in BUILD_VARIABLES + BUILD_TOOLS
    )
    parts = [part for path in files for part in (str(path.relative_to(ROOT)).encode(), path.read_bytes())]
    return digest([*parts, *map(str.encode, variables), torch_version.encode(), str(ROOT).encode()])


def outputs_present() -> bool:
    record = ROOT / "fastmp" / "_build.json"
    built = json.loads(record.read_text()) if record.exists() else {}
    patterns = {"cpp": "_C_cpu.so", "cuda": "_C_cuda.so", "host": "_host.*.so"}
    needed = [pattern for part, pattern in patterns.items() if built.get(part) == "built"]
    return bool(built) and all(any(record.parent.glob(pattern)) for pattern in needed)


def main() -> None:
    extras = sys.argv[1:]
    stamps = VENV / "stamps"
    if not stamps.exists():  # made last: without it a .venv is one that was interrupted, or not ours
        make_venv()
        stamps.mkdir()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = requirements(project, extras)
    name = "-".join(["requirements", *extras, digest([item.encode() for item in wanted])[:16]])
    stamp = stamps / name
    if not stamp.exists():
        if not probe(PYTHON)[0]:
            say(f"installing {TORCH}")
            if not pip(TORCH):
                raise SystemExit(f"environment: could not install {TORCH}")
        say(f"installing {', '.join(wanted)}")
        if install(wanted):
            stamp.write_text(probe(PYTHON)[0])

    build = stamps / "build"
    want = build_digest(stamp.read_text() if stamp.exists() else probe(PYTHON)[0])
    if not (build.exists() and build.read_text() == want and outputs_present()):
        say("building fastmp in place")
        build.unlink(missing_ok=True)
        if not pip("--no-build-isolation", "--no-deps", "--editable", "."):
            raise SystemExit("environment: the build failed")
        build.write_text(want)


if __name__ == "__main__":
    with open(ROOT / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two makes at once take turns
        main()
