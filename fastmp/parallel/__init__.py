"""Deprecated names of fastmp 0.2's `fastmp.parallel`; each warns and names its new package.

They go with the next release. `from fastmp.parallel import AdamW` becomes `from fastmp.optim import AdamW`.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

_PACKAGES = {
    "distributed": "ParallelGroups RankGrid RngTracker Runtime all_to_all copy_to_group gather_from_group "
    "gather_sequence group_rank group_size init main_guard reduce_from_group reduce_scatter_sequence "
    "split_to_group",
    "optim": "AdamW GradBuffer LossScale LossScaler Muon ParameterGroup bucket_layout clip_coefficient "
    "global_grad_norm next_loss_scale shard_ranges update_cost",
    "pipeline": "Pipeline PipelineError PipelineResult StageOutput",
    "schedule": "Costs Schedule Step",
    "tensor_parallel": "ColumnParallelLinear ParallelAttributes RowParallelLinear VocabParallelEmbedding "
    "cut_sequence join_sequence parallel_attributes parallel_logits sharded_state_dict "
    "vocab_parallel_cross_entropy vocab_parallel_linear_cross_entropy vocab_parallel_linear_log_probs",
    "watchdog": "HangReport PeerLost RankRecord Watchdog diagnose",
}
# Classes and functions that have a new name as well.
_RENAMED = {"Verdict": "HangReport", "Watch": "Watchdog", "judge": "diagnose"}
_HOMES = {name: package for package, names in _PACKAGES.items() for name in names.split()}

__all__ = sorted({*_HOMES, *_RENAMED} - {*_RENAMED.values()})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new_name = _RENAMED.get(name, name)
    package = f"fastmp.{_HOMES[new_name]}"
    warnings.warn(f"fastmp.parallel.{name} is now {package}.{new_name}", DeprecationWarning, stacklevel=2)
    return getattr(import_module(package), new_name)


def __dir__() -> list[str]:
    return __all__
