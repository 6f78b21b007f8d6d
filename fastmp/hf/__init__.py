"""Interoperability with Hugging Face transformers: `accelerate` their models, import and export weights.

Names are imported on first use. transformers is imported by the functions that need it.
"""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "acceleration": "accelerate restore",
        "expert_parallel": "expert_parameters reserve",
        "mesh": "dense_mesh",
        "mesh_loading": "from_pretrained",
        "mesh_saving": "trainable_state_dict",
        "tp_plan": "clip_grad_norm_ whole_state_dict",
        "weight_io": "TransformersReader export_weights",
    },
)
