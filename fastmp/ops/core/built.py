"""Build record of the compiled libraries, and the GPUs that their CUDA C++ kernels support."""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fastmp.config.file_access import read_json

PACKAGE = Path(__file__).resolve().parents[2]
_RECORD = PACKAGE / "_build.json"
_RELEASE = re.compile(r"(\d+)\.(\d+)(\.\d+)?(\+[\w.]+)?")  # not 2.14.0a0, not 2.14.0.dev20260101


def build_record() -> dict[str, Any]:
    """Return the record setup.py wrote when it built the libraries, or {} if nothing was built."""
    return read_json(_RECORD, 1 << 20) if _RECORD.exists() else {}


def choose_library(library: str, built_for: str | Sequence[str], running: str) -> tuple[str, str]:
    """Return (file name without suffix, "") of a library on torch's C++ interface, or ("", why none serves).

    A library serves every release of the minor version of torch that it was compiled against; one that was
    compiled against a pre-release serves that only.

    Args:
        library: `_C_autograd` or `_replay`.
        built_for: a version of torch, where setup.py compiled `library`; several, where a release wheel has
            a file such as `_replay_torch2_13` for each.
        running: the version of torch that is imported.
    """
    minor = _RELEASE.fullmatch(running)
    for version in [built_for] if isinstance(built_for, str) else built_for:
        built = _RELEASE.fullmatch(version)
        if version == running or (built and minor and built.groups()[:2] == minor.groups()[:2]):
            if isinstance(built_for, str):
                return library, ""
            return "{}_torch{}_{}".format(library, *version.split(".")[:2]), ""
    versions = built_for if isinstance(built_for, str) else ", ".join(built_for)
    return "", f"{library} is compiled for torch {versions}, this is {running}"


def load_for_this_torch(library: str, part: str, needed: str) -> tuple[ModuleType | None, str]:
    """Return (a compiled module, ""), or (None, why there is none for this torch and these sources).

    part: its name in the build record. needed: a function of the module, which one of older sources lacks.
    """
    record = build_record()
    name, reason = choose_library(library, record.get("torch", ""), torch.__version__)
    path = PACKAGE / f"{name or library}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if record.get(part) != "built":
        return None, str(record.get(part, f"{path.name} was not built"))
    if reason or not path.exists():
        return None, reason or f"{path.name} is missing"
    spec = importlib.util.spec_from_file_location(f"fastmp.{library}", path)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        return None, f"{library} does not load: {error}"
    if not hasattr(module, needed):
        return None, f"{library} is of other sources"
    sys.modules[spec.name] = module
    return module, ""


def supports(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return True if code built for `archs` ("9.0", "9.0a", "10.0+PTX") runs on a GPU of `capability`.

    - Machine code ("9.0") runs on its major version, from its minor version on.
    - PTX ("9.0+PTX") runs on any later version.
    - An `a` target ("9.0a") runs on that version only, an `f` target ("10.0f") on its major version.
    """
    for arch in archs:
        number, _, ptx = arch.partition("+")
        major, minor = (int(part) for part in number.rstrip("af").split("."))
        if number[-1] == "a":
            if (major, minor) == capability:
                return True
        elif (major == capability[0] and minor <= capability[1]) or (ptx and (major, minor) <= capability):
            return True
    return False


@cache
def has_code_for(device: int, oldest: float = 0.0) -> bool:
    """Return True if `_C_cuda` contains code for the GPU with index `device`.

    oldest: lowest compute capability (9.0) of code that counts; PTX for older GPUs does not.
    """
    archs = build_record().get("archs", [])
    recent = [arch for arch in archs if float(arch.partition("+")[0].rstrip("af")) >= oldest]
    return supports(recent, torch.cuda.get_device_capability(device))
