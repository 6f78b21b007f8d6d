"""What setup.py recorded about the compiled libraries, and which GPUs their CUDA C++ kernels run on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

_RECORD = Path(__file__).resolve().parents[2] / "_build.json"


def build_record() -> dict[str, Any]:
    """Return the record that setup.py wrote when it built the libraries, or {} if nothing was built."""
    return json.loads(_RECORD.read_text()) if _RECORD.exists() else {}


def fits(archs: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return True if code built for `archs` ("9.0", "9.0a", "10.0+PTX") runs on a GPU of `capability`.

    Machine code runs on its own major version from its minor version on, PTX on any later version, code for
    an `a` target on that version only and for an `f` target on its major version.
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
    """Return True if `_C_cuda` is known to have been compiled for the GPU of this index.

    oldest: a compute capability (9.0); PTX for older GPUs, which a newer one would compile, does not count.
    """
    archs = build_record().get("archs", [])
    recent = [arch for arch in archs if float(arch.partition("+")[0].rstrip("af")) >= oldest]
    return fits(recent, torch.cuda.get_device_capability(device))
