"""Model parts for tensor parallelism: segments, attention, MLP, transformer layer, recomputation, GPT."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "segment": "LayerChain Segment SegmentedLayer SingleSegment",
        "attention": "SelfAttention",
        "kv_cache": "KeyValueCache",
        "documents": "Documents",
        "mlp": "MLP",
        "placement": "Placement",
        "replicated": "LayerNorm PositionEmbedding RMSNorm RotaryPositions",
        "transformer": "TransformerLayer",
        "gpt": "GPTLosses GPT flops_per_token num_parameters pad_vocab",
        "bert": "Bert BertLosses BertStage bert_stages",
        "bert_tasks": "BertForTask task_stages",
        "stages": "GPTStage gpt_stages sum_tied_gradients",
    },
)
