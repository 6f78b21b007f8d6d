"""Optional peers; the only module that imports them, and that says why one is absent.

    if (liger := peer(LIGER, "liger_kernel.ops.rms_norm:LigerRMSNormFunction", device)) is not None:
        rivals[LIGER] = lambda: liger.apply(x, weight, eps)

None of them is a dependency of fastmp, and all of them run on a GPU only.
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

LIGER = "Liger"
CCE = "cut-cross-entropy"
QUACK = "quack"
TE = "Transformer Engine"
DEEPGEMM = "DeepGEMM"
TORCHAO = "torchao"
FA3, FA4 = "FA3", "FA4"
DISTRIBUTIONS = {
    LIGER: "liger-kernel",
    CCE: "cut-cross-entropy",
    QUACK: "quack-kernels",
    TE: "transformer-engine",
    DEEPGEMM: "deep-gemm",
    TORCHAO: "torchao",
    FA3: "flash-attn-3",
    FA4: "flash-attn-4",
}
ABSENT: dict[str, str] = {}  # peer: why the last look for it found nothing


def installed(name: str) -> str | None:
    """Return the version of a peer, None if it is not installed."""
    try:
        return version(DISTRIBUTIONS[name])
    except PackageNotFoundError:
        return None


def peer(name: str, target: str, device: str) -> Any | None:
    """The object `module:attribute` of the peer `name`; None where it cannot run, `why_absent` says why."""
    found, reason = _look(name, target, device)
    if reason:
        ABSENT[name] = reason
    return found


def _look(name: str, target: str, device: str) -> tuple[Any | None, str]:
    module, _, attribute = target.partition(":")
    if torch.device(device).type != "cuda":
        return None, f"{name} runs on a GPU only"
    if (number := installed(name)) is None:
        return None, f"{name} is not installed (pip install {DISTRIBUTIONS[name]})"
    try:
        return getattr(importlib.import_module(module), attribute), ""
    except Exception as error:  # a peer built for another torch raises whatever it likes
        return None, f"{name} {number} has no {target} here: {type(error).__name__}: {error}".splitlines()[0]


def why_absent(name: str, device: str = "cuda") -> str:
    """Return one line that says why a peer, a form of a peer or a rival of ours is not timed."""
    for peer_name, reason in ABSENT.items():
        if name.startswith(peer_name):
            return reason
    if torch.device(device).type == "cpu":
        return f"{name} is timed on a GPU only"
    return f"{name} does not run at this shape"


def versions() -> dict[str, str | None]:
    """Return the versions of all peers, None for one that is not installed."""
    return {name: installed(name) for name in DISTRIBUTIONS}
