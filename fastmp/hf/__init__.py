"""transformers on both sides: their models with fastmp's parts, and weights in and out.

Names are imported when first used; of other libraries, transformers alone is imported, by what needs it.
"""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "acceleration": "accelerate restore",
        "tp_plan": "clip_grad_norm_ whole_state_dict",
        "weights": "TransformersReader export_weights",
    },
)
