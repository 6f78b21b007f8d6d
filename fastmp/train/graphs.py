"""The graphs of a model in training: a manager over its layers, with what the device captures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastmp.config import GraphConfig
from fastmp.graphs.manager import GraphManager
from fastmp.graphs.recording import RecordingBackend
from fastmp.nn.segment import LayerChain
from fastmp.parallel.schedule import Step

if TYPE_CHECKING:
    from fastmp.parallel.rng import RngTracker

__all__ = ["make_graphs"]


def make_graphs(
    chunks: Sequence[nn.Module],
    order: Sequence[Step],
    config: GraphConfig,
    *,
    rng: RngTracker | None,
    device: torch.device,
) -> GraphManager | None:
    """A manager for `chunks`, each with one `LayerChain`, that run in `order`; None if `config` wants none.

    ValueError for a chunk with none or several, and for a scope that names no segment.
    """
    if not config.enabled:
        return None
    chains = [[m for m in chunk.modules() if isinstance(m, LayerChain)] for chunk in chunks]
    for chunk, own in zip(chunks, chains, strict=True):
        if len(own) != 1:
            raise ValueError(
                f"Trainer: graphs need a model whose layers are one LayerChain; {type(chunk).__name__} has "
                f"{len(own)}"
            )
    if device.type == "cuda":
        from fastmp.graphs.cuda import CudaBackend

        backend = CudaBackend(rng)
    else:
        backend = RecordingBackend(rng)
    return GraphManager(
        [own[0] for own in chains],
        order,
        backend=backend,
        scope=config.scope,
        warmup=config.warmup,
        verify_every=config.verify_every,
    )
