"""Everything that knows ranks: the grid and its groups, collectives, layers, loss, gradients, optimizer.

Names are loaded when first used: `RankGrid` and `fastmp plan` never import torch.
"""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "grid": "RankGrid",
        "schedule": "Schedule Step",
        "simulate": "Costs",
        "shards": "bucket_layout shard_ranges",
        "pipeline": "Pipeline PipelineError PipelineResult StageOutput",
        "groups": "ParallelGroups",
        "runtime": "Runtime init main_guard",
        "verdict": "RankRecord Verdict judge",
        "watch": "PeerLost Watch",
        "collectives": "all_to_all copy_to_group gather_from_group gather_sequence group_rank group_size "
        "reduce_from_group reduce_scatter_sequence split_to_group",
        "context": "cut_sequence join_sequence",
        "rng": "RngTracker",
        "attributes": "ParallelAttributes parallel_attributes",
        "layers": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding",
        "linear": "parallel_logits",
        "sharded_state": "sharded_state_dict",
        "loss": "vocab_parallel_cross_entropy",
        "linear_loss": "vocab_parallel_linear_cross_entropy vocab_parallel_linear_log_probs",
        "grads": "GradBuffer",
        "optimizer": "AdamW ParameterGroup clip_coefficient global_grad_norm",
        "muon": "Muon update_cost",
        "scaler": "LossScale LossScaler next_loss_scale",
    },
)
