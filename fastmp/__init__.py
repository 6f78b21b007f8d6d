"""fastmp: kernels and model parallelism for training large transformers.

Importing the package is free: torch is loaded when a name that needs it is first used.
"""

from __future__ import annotations

from fastmp._lazy import exports

__version__ = "0.2.0"

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "distributed.runtime": "init",
        "hf.acceleration": "accelerate restore",
        "hf.router_replay": "record_routing replay_routing",
        **dict.fromkeys(("config", "nn", "ops", "parallel", "training"), ""),
    },
)
