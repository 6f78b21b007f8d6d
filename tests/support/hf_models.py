"""Tiny models of transformers with random weights, and transformers' own arithmetic in float64."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import fastmp
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
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **_DECODER,
            **_LATENT,
            "num_key_value_heads": 4,
            "num_experts_per_tok": 2,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
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


def divided(family: str, dtype: torch.dtype = torch.float64, group=None, **options):
    """`model_of`, divided over a group, or over all ranks."""
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
