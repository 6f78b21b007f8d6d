"""Sharded checkpoints: resharding on load, atomic against kills, without pickle."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "checkpointer": "Checkpointer Loaded described",
        "format": "CheckpointError",
        "storage": "CheckpointReader CheckpointWriter ShardedTensorRef",
    },
)
