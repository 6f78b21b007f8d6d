"""BERT (Devlin et al. 2019): an encoder with norms after the residual additions (post-norm)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastmp.config import GPTConfig
from fastmp.hf.families.family import Acceleration, Conversion, Family, Field
from fastmp.hf.heads import MaskedLM
from fastmp.hf.patches import GELUS, LayerNormPatch
from fastmp.hf.tp_modules import (
    ColumnParallel,
    ColumnParallelWithCopy,
    Elementwise,
    HeadsAlone,
    RowParallel,
    ShardedInput,
    ShardedOutput,
)

_MASKED_ALONE = ["BertForMaskedLM"]  # without the head for the order of sentences
_MODEL_MODULES = {
    "embedding_norm": "bert.embeddings.LayerNorm",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.norm": "cls.predictions.transform.LayerNorm",
    "sentence_head.pooler": "bert.pooler.dense",
    "sentence_head.order": "cls.seq_relationship",
}
_LAYER_MODULES = {
    "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.proj": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "mlp.up": ("intermediate.dense",),
    "mlp.down": ("output.dense",),
    "mlp_norm": ("output.LayerNorm",),
}


def _read(content: Mapping[str, Any], model: dict[str, Any]) -> None:
    model["bert"]["sentence_order"] = content.get("architectures") != _MASKED_ALONE
    if model["bert"]["num_token_types"] == 0:
        raise ValueError("type_vocab_size is 0, bert has token types")


def _write(config: GPTConfig) -> dict[str, Any]:
    assert config.bert is not None
    return {} if config.bert.sentence_order else {"architectures": _MASKED_ALONE}


BERT = Family(
    "bert",
    Conversion(
        architecture="BertForPreTraining",
        layers="bert.encoder.layer",
        model_weights={
            "word_embedding.weight": "bert.embeddings.word_embeddings.weight",
            "position_embedding.weight": "bert.embeddings.position_embeddings.weight",
            "token_type_embedding.weight": "bert.embeddings.token_type_embeddings.weight",
            "output_layer.weight": "cls.predictions.decoder.weight",
            "lm_head.bias": "cls.predictions.bias",
            **{
                f"{ours}.{kind}": f"{theirs}.{kind}"
                for kind in ("weight", "bias")
                for ours, theirs in _MODEL_MODULES.items()
            },
        },
        layer_weights={
            f"{ours}.{kind}": " ".join(f"{each}.{kind}" for each in theirs)
            for kind in ("weight", "bias")
            for ours, theirs in _LAYER_MODULES.items()
        },
        fields={
            "vocab_size": Field("vocab_size", 30522),
            "hidden_size": Field("hidden_size", 768),
            "intermediate_size": Field("ffn_hidden_size", 3072),
            "num_hidden_layers": Field("num_layers", 12),
            "num_attention_heads": Field("num_heads", 12),
            "max_position_embeddings": Field("max_seq_len", 512),
            "type_vocab_size": Field("bert.num_token_types", 2),
            "layer_norm_eps": Field("layernorm_epsilon", 1e-12),
            "initializer_range": Field("init_std", 0.02),
            "hidden_dropout_prob": Field("dropout", 0.1),
            "attention_probs_dropout_prob": Field("attention_dropout", 0.1),
            "tie_word_embeddings": Field("tie_embeddings", True),
            # also the activation of the masked-token head
            "hidden_act": Field("activation", "gelu", {"gelu": "gelu"}),
        },
        bert={"post_norm": True},
        supported={
            "position_embedding_type": ("absolute",),
            "is_decoder": (False,),
            "add_cross_attention": (False,),
        },
        tied_weights={"cls.predictions.decoder.bias": "cls.predictions.bias"},
        read=_read,
        write=_write,
    ),
    Acceleration(
        {"LayerNorm": LayerNormPatch, **GELUS, "BertForMaskedLM": MaskedLM},
        tp_plan={
            "BertSelfAttention": {
                "": HeadsAlone,
                "query": ColumnParallel,
                "key": ColumnParallel,
                "value": ColumnParallel,
            },
            "BertSelfOutput": {"": ShardedInput, "dense": RowParallel, "LayerNorm": None},
            "BertIntermediate": {
                "": ShardedOutput,
                "dense": ColumnParallelWithCopy,
                "intermediate_act_fn": Elementwise,
            },
            "BertOutput": {"": ShardedInput, "dense": RowParallel, "LayerNorm": None},
        },
    ),
)
FAMILIES = (BERT,)
