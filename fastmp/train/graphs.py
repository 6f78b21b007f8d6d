"""The graphs of a model in training: a manager over its layers or all of it, on what the device captures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fastmp.config import Environment, GraphConfig
from fastmp.graphs.cuda import CudaBackend
from fastmp.graphs.manager import GraphManager
from fastmp.graphs.pieces import cut
from fastmp.graphs.recording import RecordingBackend
from fastmp.graphs.transformer_engine import TransformerEngineManager
from fastmp.nn.segment import LayerChain

if TYPE_CHECKING:
    from fastmp.parallel.rng import RngTracker
    from fastmp.train.microbatches import Chunks, WholeModel

__all__ = ["make_graphs"]


def make_graphs(
    runner: WholeModel | Chunks,
    num_microbatches: int,
    config: GraphConfig,
    *,
    rng: RngTracker | None,
    device: torch.device,
    group: ProcessGroup | None = None,
) -> GraphManager | None:
    """A manager for what `runner` does with the microbatches of a step; None if `config` wants none.

    group: the ranks of a pipeline stage, which verify steps together.

    Under scope "full" it holds whole chunks and the loss function, else the one `LayerChain` of each chunk.

    ValueError for a chunk with none or several, for a scope that names no segment or one that cannot be
    captured, where Transformer Engine is asked for and cannot be had, and where NCCL would read memory that
    torch's allocator has given back.
    """
    if not config.enabled:
        return None
    environment = Environment.read()
    if device.type == "cuda" and environment.world_size > 1 and environment.registers_segments:
        raise ValueError(
            "Trainer: graphs of collectives and expandable_segments:True for torch's allocator need "
            "NCCL_GRAPH_REGISTER=0 in the environment: NCCL would read memory that is gone"
        )
    scope = config.scope
    if scope is not None and "full" in scope:
        for chain in (chain for chunk in runner.chunks for chain in _chains(chunk)):
            cut(chain, scope)
        chains, order = runner.whole(num_microbatches)
        scope = None
    else:
        chains, order = _layers(runner.chunks), runner.order(num_microbatches)
    if config.impl == "transformer_engine":
        return TransformerEngineManager(chains, order, rng=rng, scope=scope, warmup=config.warmup)
    return GraphManager(
        chains,
        order,
        backend=CudaBackend(rng) if device.type == "cuda" else RecordingBackend(rng),
        scope=scope,
        warmup=config.warmup,
        verify_every=config.verify_every,
        group=group,
    )


def _chains(chunk: nn.Module) -> list[LayerChain]:
    return [module for module in chunk.modules() if isinstance(module, LayerChain)]


def _layers(chunks: Sequence[nn.Module]) -> list[LayerChain]:
    """The layers of each chunk."""
    for chunk in chunks:
        if len(_chains(chunk)) != 1:
            raise ValueError(
                f"Trainer: graphs need a model whose layers are one LayerChain, or scope 'full'; "
                f"{type(chunk).__name__} has {len(_chains(chunk))}"
            )
    return [_chains(chunk)[0] for chunk in chunks]
