"""Build record of the compiled libraries, and the GPUs that their CUDA C++ kernels support."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

_RECORD = Path(__file__).resolve().parents[2] / "_build.json"


def build_record() -> dict[str, Any]:
    """Return the record setup.py wrote when it built the libraries, or {} if nothing was built."""
    return json.loads(_RECORD.read_text()) if _RECORD.exists() else {}


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
