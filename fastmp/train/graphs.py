"""The graphs of a model in training: a manager over its layers, with what the device captures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from fastmp.config import GraphConfig
from fastmp.graphs.cuda import CudaBackend
from fastmp.graphs.manager import GraphManager
from fastmp.graphs.recording import RecordingBackend
from fastmp.graphs.transformer_engine import TransformerEngineManager
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

    ValueError for a chunk with none or several, for a scope that names no segment, and where Transformer
    Engine is asked for and cannot be had.
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
    layers = [own[0] for own in chains]
    if config.impl == "transformer_engine":
        return TransformerEngineManager(layers, order, rng=rng, scope=config.scope, warmup=config.warmup)
    return GraphManager(
        layers,
        order,
        backend=CudaBackend(rng) if device.type == "cuda" else RecordingBackend(rng),
        scope=config.scope,
        warmup=config.warmup,
        verify_every=config.verify_every,
    )
