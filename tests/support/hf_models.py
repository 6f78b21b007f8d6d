"""Models of transformers for tests: tiny random ones, in memory and on disk, and stored results.

`model_of(family)` makes a model in memory, `save(name, path)` a directory as `save_pretrained` writes it, and
`load_bundle(family)` reads what tests/data/make_transformers_reference.py has stored. `Float64` makes
transformers compute in float64.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.overrides import TorchFunctionMode

import fastmp
from fastmp.config import GPTConfig, MoEConfig
from fastmp.hf.logits import LazyLogits
from fastmp.tensor_parallel.attributes import parallel_attributes
from fastmp.testing.parallel import full_tensor

VOCAB = 128
_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
_GROUPED = {
    **{"num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    **{"moe_intermediate_size": 24, "first_k_dense_replace": 1},
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
# {family: (class of its configuration, its options)}
CONFIGS = {
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        },
    ),
    "bert": (
        "BertConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        },
    ),
    "llama": ("LlamaConfig", _DECODER),
    "mistral": ("MistralConfig", {**_DECODER, "sliding_window": 8}),
    "qwen2": ("Qwen2Config", _DECODER),
    "qwen3": ("Qwen3Config", {**_DECODER, "head_dim": 8, "tie_word_embeddings": True}),
    "mixtral": ("MixtralConfig", {**_DECODER, **_EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_DECODER,
            **_EXPERTS,
            "head_dim": 8,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
            "moe_intermediate_size": 24,
            "num_experts": 4,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_DECODER,
            **_EXPERTS,
            "head_dim": 8,
            "num_local_experts": 4,
            "swiglu_limit": 0.1,  # which some of the numbers of so small a model pass
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **{**_DECODER, **_LATENT, **_GROUPED, "num_key_value_heads": 4, "n_shared_experts": 1},
            **{"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0, "head_dim": 8},
        },
    ),
    "deepseek_v3": ("DeepseekV3Config", {**_DECODER, **_LATENT, **_GROUPED, "num_key_value_heads": 4}),
    "dots1": ("Dots1Config", {**_DECODER, **_GROUPED, "head_dim": 8, "n_shared_experts": 1}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **_DECODER,
            **_GROUPED,
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
        },
    ),
}


def model_of(family: str, dtype: torch.dtype = torch.float32, **options):
    """A model of the family in training mode; the same weights at every call. Its experts take any dtype."""
    import transformers

    name, configured = CONFIGS[family]
    config = getattr(transformers, name)(**{**copy.deepcopy(configured), **options})
    auto = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or name.endswith(("bias", "sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.1)  # they are ones and zeros at first
    return model.to(dtype).train()


def batch_of(family: str, samples: int = 2, tokens: int = 16) -> dict[str, torch.Tensor]:
    """Ids and labels, some of which do not count."""
    ids = torch.randint(3, VOCAB, (samples, tokens), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels}


def step(model, **batch):
    """The output of a training step, and its gradients by name."""
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    return output, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def are_lazy(logits) -> bool:
    """Return True if logits of a training step are there, and not computed yet."""
    return isinstance(logits, LazyLogits) and logits.computed is None


def assert_same(found, expected, tolerance: float) -> None:
    """Compare losses, and gradients relative to the largest one of all parameters."""
    (output, grads), (wanted, wanted_grads) = found, expected
    assert abs(output.loss.item() - wanted.loss.item()) <= tolerance * abs(wanted.loss.item())
    assert grads.keys() == wanted_grads.keys()
    largest = max(grad.abs().max() for grad in wanted_grads.values())
    for name, grad in wanted_grads.items():
        assert (grads[name] - grad).abs().max() <= tolerance * largest, name


def whole_gradients(model, group):
    """The whole gradients, by name; those that every rank has are the same bits on all."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad, marks = parameter.grad.contiguous(), parallel_attributes(parameter)
            if not marks.tensor_model_parallel:
                others = [torch.empty_like(grad) for _ in range(group.size())]
                dist.all_gather(others, grad, group=group)
                assert all(torch.equal(other, grad) for other in others), name
            grad = full_tensor(grad, parameter, group)
            if marks.num_valid_rows:
                assert not grad[marks.num_valid_rows :].any()
                grad = grad[: marks.num_valid_rows]
            found[name] = grad
    return found


def tp_model(family: str, dtype: torch.dtype = torch.float64, group=None, **options):
    """Return `model_of`, sharded over a group, by default over all ranks."""
    model = model_of(family, dtype, **options)
    fastmp.accelerate(model, group=dist.group.WORLD if group is None else group)
    return model


class Float64(TorchFunctionMode):
    """Give float64 for float32, which norms, softmax, routers and losses of transformers ask for."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        def wide(value):
            return torch.float64 if value is torch.float32 else value

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        kwargs = {name: wide(value) for name, value in (kwargs or {}).items()}
        return function(*[wide(value) for value in args], **kwargs)


# Directories, one for each form that a family has.

SIZES = {
    **{"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 24, "vocab_size": 131, "max_position_embeddings": 64},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 6}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 12},
    **{"short_factor": [1.0, 1.5], "long_factor": [2.0, 6.0], "factor": 4.0},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 16, "n_layer": 3, "n_head": 4, "vocab_size": 131, "n_positions": 64}),
    "gpt2, exact": (
        "GPT2",
        {
            **{"n_embd": 16, "n_layer": 3, "n_head": 4, "vocab_size": 131, "n_positions": 64, "n_inner": 40},
            **{"activation_function": "gelu", "tie_word_embeddings": False},
        },
    ),
    "llama": ("Llama", SIZES),
    "llama 3.1": ("Llama", SIZES | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama, linear": (
        "Llama",
        SIZES | {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    # prompts of 16 tokens and more are long, and some continuations become so
    "llama, longrope": ("Llama", SIZES | {"rope_parameters": LONGROPE}),
    "llama, dynamic": (
        "Llama",
        SIZES
        | {"max_position_embeddings": 16}
        | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama, geglu": ("Llama", SIZES | {"hidden_act": "gelu_pytorch_tanh", "head_dim": 8}),
    "llama, exact": ("Llama", SIZES | {"hidden_act": "gelu"}),
    "mistral": ("Mistral", SIZES | {"sliding_window": None}),
    "mistral, window": ("Mistral", SIZES | {"sliding_window": 5}),
    "qwen2, window": (
        "Qwen2",
        SIZES | {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0},
    ),
    "qwen2, window above": (
        "Qwen2",
        SIZES | {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3, every second window": (
        "Qwen3",
        SIZES
        | {"sliding_window": 7, "use_sliding_window": True, "head_dim": 6}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen2": ("Qwen2", SIZES),
    "qwen2, yarn": ("Qwen2", SIZES | {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 6}),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 4, "router_aux_loss_coef": 0.02}),
    "qwen3_moe": ("Qwen3Moe", SIZES | EXPERTS | {"num_experts": 4, "norm_topk_prob": True}),
    "qwen3_moe, some dense": (
        "Qwen3Moe",
        SIZES | EXPERTS | {"num_experts": 4, "mlp_only_layers": [2], "decoder_sparse_step": 1},
    ),
    "qwen3_moe, every second": ("Qwen3Moe", SIZES | EXPERTS | {"num_experts": 4, "decoder_sparse_step": 2}),
    "qwen3_moe, window": (
        "Qwen3Moe",
        SIZES | EXPERTS | {"num_experts": 4, "sliding_window": 7, "use_sliding_window": True},
    ),
    "dots1": (
        "Dots1",
        {
            **(SIZES | EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}),
            **{"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **(SIZES | EXPERTS | {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}),
            **{"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "head_dim": 8},
            **{"use_qk_norm": True, "attention_bias": True},
        },
    ),
    "glm4_moe, a quarter": (
        "Glm4Moe",
        SIZES
        | EXPERTS
        | {"n_routed_experts": 4, "head_dim": 8}
        | {"rope_parameters": YARN | {"partial_rotary_factor": 0.25, "factor": 2.0}},
    ),
}
LATENT = {
    **(SIZES | {"num_key_value_heads": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 8}),
    **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
    **{"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1},
}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
MODELS |= {
    "deepseek_v3": ("DeepseekV3", LATENT | GROUPS),
    "deepseek_v3, yarn": (
        "DeepseekV3",
        (LATENT | GROUPS | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    ),
    "deepseek_v3, kimi": (  # one group of experts; YaRN between two equal numbers of rotations
        "DeepseekV3",
        LATENT
        | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0}},
    ),
    "deepseek_v3, halves": ("DeepseekV3", LATENT | GROUPS | {"rope_interleave": False, "q_lora_rank": None}),
    "deepseek_v2": (
        "DeepseekV2",
        (
            (LATENT | GROUPS | {"topk_method": "group_limited_greedy"})
            | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}}
        ),
    ),
    "deepseek_v2, lite": ("DeepseekV2", LATENT | {"q_lora_rank": None, "topk_method": "greedy"}),
}
OSS = SIZES | {"num_experts_per_tok": 2, "head_dim": 6, "num_local_experts": 4, "sliding_window": 5}
MODELS |= {
    "gpt_oss": ("GptOss", OSS | {"rope_parameters": YARN | {"truncate": False}}),
    "gpt_oss, no windows": (
        "GptOss",
        (OSS | {"sliding_window": 64, "attention_bias": False, "tie_word_embeddings": True}),
    ),
}
_BERT = {
    **{"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40},
    **{"vocab_size": 131, "max_position_embeddings": 64},
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForPreTraining", _BERT),
    "bert, masked alone": ("BertForMaskedLM", _BERT | {"type_vocab_size": 3}),
}


def save(name: str, path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Write the model to the directory `path`; returns it. options: of save_pretrained."""
    import transformers

    family, values = (MODELS | ENCODERS)[name]
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    if name in ENCODERS:
        family, kind = "Bert", family
    config = getattr(transformers, f"{family}Config")(**values)
    torch.manual_seed(5)
    model = getattr(transformers, kind)(config).to(dtype)
    with torch.no_grad():
        for tensor_name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and "inv_freq" not in tensor_name:
                spread = 0.2 if tensor.ndim > 1 else 0.5
                tensor.normal_(1.0 if "norm.weight" in tensor_name or "ln" in tensor_name else 0.0, spread)
    model.save_pretrained(path, **options)
    return model


# Stored results, in fastmp's names and layout.

DATA = Path(__file__).parent.parent / "data"
BUNDLED = ("Llama", "Qwen3", "Mixtral", "Qwen3Moe")
_BUNDLE_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn.o_proj": "attention.proj",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.down_proj": "mlp.down",
    "mlp.gate": "moe.router",
    "mlp.experts.gate_up_proj": "moe.experts.fc1",
    "mlp.experts.down_proj": "moe.experts.fc2",
}
_BUNDLE_ENDS = {
    "model.embed_tokens.weight": "word_embedding.weight",
    "model.norm.weight": "final_norm.weight",
    "lm_head.weight": "output_layer.weight",
}


def bundle_of(family: str) -> Path:
    return DATA / f"transformers_{family.lower()}.safetensors"


def to_fastmp(tensors: dict[str, torch.Tensor], config: GPTConfig) -> dict[str, torch.Tensor]:
    """Parameters of a ...ForCausalLM, or their gradients, as full tensors of `fastmp.nn.GPT` on one rank."""
    renamed = {_BUNDLE_ENDS[name]: tensor for name, tensor in tensors.items() if name in _BUNDLE_ENDS}
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        layer = {
            name.removeprefix(prefix).removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        q, k, v = (
            layer.pop(f"self_attn.{x}_proj").unflatten(0, (config.kv_heads, -1, config.head_dim))
            for x in "qkv"
        )
        renamed[f"layers.{i}.attention.qkv.weight"] = torch.cat([q, k, v], dim=1).flatten(0, 2)
        if config.moe is None:
            gate_up = [layer.pop(f"mlp.{part}_proj") for part in ("gate", "up")]
            renamed[f"layers.{i}.mlp.up.weight"] = torch.cat(gate_up)
        for name, tensor in layer.items():
            suffix = "" if "experts" in name else ".weight"
            renamed[f"layers.{i}.{_BUNDLE_NAMES[name]}{suffix}"] = tensor
    return renamed


def gpt_config(family: str, sizes: dict) -> GPTConfig:
    return GPTConfig(
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        num_heads=sizes["num_attention_heads"],
        num_kv_heads=sizes["num_key_value_heads"],
        head_size=sizes.get("head_dim"),
        ffn_hidden_size=sizes["intermediate_size"],
        moe=moe_config(sizes),
        vocab_size=sizes["vocab_size"],
        max_seq_len=sizes["max_position_embeddings"],
        layernorm_epsilon=sizes["rms_norm_eps"],
        rope_base=sizes["rope_theta"],
        norm="rmsnorm",
        position="rope",
        activation="swiglu",
        linear_bias=False,
        tie_embeddings=sizes["tie_word_embeddings"],
        qk_norm=family.startswith("Qwen3"),
    )


def moe_config(sizes: dict) -> MoEConfig | None:
    num_experts = sizes.get("num_local_experts", sizes.get("num_experts"))
    if num_experts is None:
        return None
    return MoEConfig(
        num_experts=num_experts,
        top_k=sizes["num_experts_per_tok"],
        expert_ffn_hidden_size=sizes.get("moe_intermediate_size", sizes["intermediate_size"]),
        normalize_topk=sizes.get("norm_topk_prob", True),
    )


def from_tensors(family: str, sizes: dict, tensors: dict[str, torch.Tensor]) -> dict:
    """config, weights and grads (full, fastmp's names), and the other tensors by their names."""
    parts: dict = {"config": gpt_config(family, sizes)}
    for kind in ("weight", "grad"):
        chosen = {k.removeprefix(kind + "."): t for k, t in tensors.items() if k.startswith(kind + ".")}
        parts[kind + "s"] = to_fastmp(chosen, parts["config"])
    return parts | {name: tensor for name, tensor in tensors.items() if "." not in name}


def load_bundle(family: str) -> dict:
    with safe_open(bundle_of(family), "pt") as file:
        sizes = json.loads(file.metadata()["sizes"])
        return from_tensors(family, sizes, {name: file.get_tensor(name) for name in file.keys()})
