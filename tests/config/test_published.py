"""Recipes named after a published model have its published values, each written down here with its source."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from examples.megatron_paper.scaling.paper import TRAINED

CONFIGS = Path(__file__).parents[2] / "configs"
NOT_PUBLISHED = {"bert-small", "gpt-small", "gpt-small-stdlib", "mla-small", "moe-small"}

# GPT-2 by Shoeybi et al. 2019 (arXiv 1909.08053v4), compared with the paper's text. Section 4.2: dropout 0.1,
# AdamW with decay 0.01, clipping at 1.0; 300,000 steps of 512 sequences of 1024 tokens; 1.5e-4 after 3,000
# steps, a cosine over the other 297,000 to 1e-5. Section 5.1: 50,257 tokens. The paper gives no betas, so
# there are none here.
GPT_2 = {
    "model": {"vocab_size": 50257, "max_seq_len": 1024, "dropout": 0.1, "attention_dropout": 0.1},
    "data": {"seq_len": 1024},
    "optimizer": {
        "lr": 1.5e-4, "min_lr": 1e-5, "warmup_steps": 3000, "weight_decay": 0.01, "clip_grad_norm": 1.0,
        "schedule": "cosine",
    },
    "train": {"steps": 300_000, "global_batch_size": 512},
}  # fmt: skip
# BERT by the same paper. Section 4.2: 30,522 tokens, batches of 1024; 1e-4 after 10,000 steps, linear decay
# over 2,000,000 (section 5.3: the 3.9 B model had trained for 1,500,000 and went on); decay, clipping and
# dropout as above, all else as Devlin et al. 2018 (arXiv 1810.04805, A.2): 512 tokens, betas 0.9 and 0.999.
# That the line ends at zero is in Devlin's optimization.py (github.com/google-research/bert).
BERT = {
    "model": {"vocab_size": 30522, "max_seq_len": 512, "dropout": 0.1, "attention_dropout": 0.1},
    "data": {"seq_len": 512},
    "optimizer": {
        "lr": 1e-4, "min_lr": 0.0, "warmup_steps": 10_000, "weight_decay": 0.01, "clip_grad_norm": 1.0,
        "betas": [0.9, 0.999], "schedule": "linear",
    },
    "train": {"steps": 2_000_000, "global_batch_size": 1024},
}  # fmt: skip
# Layers, hidden size, heads: tables 2 (GPT-2) and 4 (BERT) of the same paper.
SHAPES = {
    "gpt2-355m": (GPT_2, 24, 1024, 16),
    "gpt2-2.5b": (GPT_2, 54, 1920, 20),
    "gpt2-8.3b": (GPT_2, 72, 3072, 24),
    "bert-336m": (BERT, 24, 1024, 16),
    "bert-1.3b": (BERT, 24, 2048, 32),
    "bert-3.9b": (BERT, 48, 2560, 40),
}
# config.json of the models on Hugging Face, by the names there, compared with copies in public repositories:
# meta-llama/Meta-Llama-3-8B, mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-30B-A3B. Besides:
# - Llama: Dubey et al. 2024 (arXiv 2407.21783), table 3, which also has the peak of the learning rate. It
#   rounds the vocabulary to 128,000.
# - Mixtral: Jiang et al. 2024 (arXiv 2401.04088), section 2.1: a softmax over the two chosen logits, which is
#   what normalising the chosen probabilities gives; keras_hub/src/models/mixtral/README.md prints its layers.
# - Qwen3: scripts/models/qwen3-30B-A3B.sh of slime, arguments of Megatron-LM, among them the norms of queries
#   and keys.
# Nothing else of their training is published: other values of `optimizer` and `train` are the recipes' own.
OTHERS = {
    "llama-3-8b": {
        "model": {
            "num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8,
            "ffn_hidden_size": 14336, "vocab_size": 128256, "max_seq_len": 8192, "rope_base": 500000.0,
            "activation": "swiglu", "norm": "rmsnorm", "tie_embeddings": False,
        },
        "optimizer": {"lr": 3e-4},
    },
    "mixtral-8x7b": {
        "model": {
            "num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 32000,
            "rope_base": 1000000.0, "activation": "swiglu", "norm": "rmsnorm", "tie_embeddings": False,
        },
        "model.moe": {"num_experts": 8, "top_k": 2, "expert_ffn_hidden_size": 14336, "normalize_topk": True},
    },
    "qwen3-30b-a3b": {
        "model": {
            "num_layers": 48, "hidden_size": 2048, "num_heads": 32, "num_kv_heads": 4, "head_size": 128,
            "vocab_size": 151936, "rope_base": 1000000.0, "layernorm_epsilon": 1e-6, "qk_norm": True,
            "activation": "swiglu", "norm": "rmsnorm", "tie_embeddings": False,
        },
        "model.moe": {"num_experts": 128, "top_k": 8, "expert_ffn_hidden_size": 768, "normalize_topk": True},
    },
    "deepseek-v3": {  # arXiv 2412.19437, sections 3.2 and 4.2; of the first 14.3 T tokens
        "model": {
            "num_layers": 61, "hidden_size": 7168, "num_heads": 128, "ffn_hidden_size": 18432,
            "vocab_size": 129280, "max_seq_len": 4096, "layernorm_epsilon": 1e-6, "init_std": 0.006,
            "activation": "swiglu", "norm": "rmsnorm", "tie_embeddings": False, "dense_layers": [0, 1, 2],
            "mtp_depth": 1, "mtp_weight": 0.3,
        },
        "model.latent": {
            "kv_rank": 512, "q_rank": 1536, "nope_size": 128, "rope_size": 64, "value_size": 128,
        },
        "model.moe": {
            "num_experts": 256, "top_k": 8, "expert_ffn_hidden_size": 2048, "score": "sigmoid",
            "shared_expert_ffn_hidden_size": 2048, "routed_scale": 2.5, "num_groups": 8, "group_topk": 4,
            "bias_update_rate": 1e-3, "sequence_aux_loss": 1e-4, "normalize_topk": True,
        },
        "parallel": {"pp": 16, "ep": 64},
        "optimizer": {"lr": 2.2e-4, "warmup_steps": 2000, "weight_decay": 0.1},
        "train": {"global_batch_size": 15360},
    },
    "kimi-k2": {  # config.json of moonshotai/Kimi-K2-Instruct, in copies; arXiv 2507.20534
        "model": {
            "num_layers": 61, "hidden_size": 7168, "num_heads": 64, "ffn_hidden_size": 18432,
            "vocab_size": 163840, "max_seq_len": 4096, "layernorm_epsilon": 1e-6, "rope_base": 50000.0,
            "activation": "swiglu", "norm": "rmsnorm", "tie_embeddings": False, "dense_layers": [0],
        },
        "model.latent": {
            "kv_rank": 512, "q_rank": 1536, "nope_size": 128, "rope_size": 64, "value_size": 128,
        },
        "model.moe": {
            "num_experts": 384, "top_k": 8, "expert_ffn_hidden_size": 2048, "score": "sigmoid",
            "shared_expert_ffn_hidden_size": 2048, "routed_scale": 2.827, "normalize_topk": True,
        },
        "parallel": {"pp": 16, "ep": 16},
    },
    "glm-4.5-air": {  # config.json of zai-org/GLM-4.5-Air, in copies; arXiv 2508.06471
        "model": {
            "num_layers": 46, "hidden_size": 4096, "num_heads": 96, "num_kv_heads": 8, "head_size": 128,
            "ffn_hidden_size": 10944, "vocab_size": 151552, "layernorm_epsilon": 1e-5, "qkv_bias": True,
            "rope_base": 1000000.0, "rotary_fraction": 0.5, "activation": "swiglu", "norm": "rmsnorm",
            "tie_embeddings": False, "dense_layers": [0],
        },
        "model.moe": {
            "num_experts": 128, "top_k": 8, "expert_ffn_hidden_size": 1408, "score": "sigmoid",
            "shared_expert_ffn_hidden_size": 1408, "normalize_topk": True,
        },
    },
    "gpt-oss-20b": {  # config.json of openai/gpt-oss-20b, in copies; arXiv 2508.10925
        "model": {
            "num_layers": 24, "hidden_size": 2880, "num_heads": 64, "num_kv_heads": 8, "head_size": 64,
            "vocab_size": 201088, "max_seq_len": 131072, "layernorm_epsilon": 1e-5, "linear_bias": True,
            "rope_base": 150000.0, "activation": "clamped_swiglu", "norm": "rmsnorm", "sliding_window": 128,
            "tie_embeddings": False, "attention_sinks": True, "full_attention_layers": list(range(1, 24, 2)),
        },
        "model.rope_scaling": {
            "kind": "yarn", "factor": 32.0, "original_max_seq_len": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False,
        },
        "model.moe": {
            "num_experts": 32, "top_k": 4, "expert_ffn_hidden_size": 2880, "pre_softmax": False,
            "linear_bias": True, "router_bias": True,
        },
    },
}  # fmt: skip


def published():
    for name, (common, layers, hidden, heads) in SHAPES.items():
        shape = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads}
        yield name, {**common, "model": {**common["model"], **shape}}
    yield from OTHERS.items()


def test_every_recipe_is_published_or_said_not_to_be():
    names = {path.stem for path in CONFIGS.glob("*.toml")}
    assert names == {name for name, _ in published()} | NOT_PUBLISHED


@pytest.mark.parametrize(("name", "values"), [pytest.param(*each, id=each[0]) for each in published()])
def test_recipes_have_the_published_values(name, values):
    recipe = tomllib.loads((CONFIGS / f"{name}.toml").read_text())
    for table, expected in values.items():
        given = recipe
        for key in table.split("."):
            given = given[key]
        defaults = {"schedule": "cosine"}
        assert {key: given.get(key, defaults.get(key)) for key in expected} == expected, table


def test_the_study_has_the_same_shapes():
    shapes = [[shape.layers, shape.hidden, shape.heads] for shape, _, _ in TRAINED]
    assert shapes == [shape for name, (_, *shape) in SHAPES.items() if name.startswith("gpt2")]
