"""ZeRO-1 optimizers on contiguous gradient buffers: flat layout, AdamW, Muon, loss scaling, learning rate."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "flat_layout": "bucket_layout shard_ranges",
        "grad_buffers": "GradBuffer",
        "grad_norm": "clip_coefficient global_grad_norm",
        "optimizer": "Optimizer ParameterGroup",
        "adamw": "AdamW",
        "muon": "Muon update_cost",
        "loss_scaler": "LossScale LossScaler next_loss_scale",
        "lr_schedule": "learning_rate",
    },
)
