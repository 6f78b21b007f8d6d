"""Makes transformers_<family>.safetensors: what dense and MoE models of `transformers` compute in float64.

    python tests/data/make_transformers_reference.py       (needs `transformers`; writes next to this file)

As in make_gpt2_reference.py, whose parts it uses, weights are drawn here and the loss is taken from float64
logits. These models compute norms, rotary angles, attention and routing in float32 whatever the dtype of the
model: here `float32` means float64 while they are made and run, so that the formulas are theirs and the
precision is that of the comparison. Of models with experts, `experts` (L, B, S, k) are those that each token
chose in each layer, and `bf16_logits` and `bf16_experts` come from the same model in bfloat16, unaltered.
Metadata: sizes, seed and the version of transformers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from make_gpt2_reference import run
from safetensors.torch import save_file

SEED, BATCH, SEQUENCE = 20260917, 2, 20
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 150,
    "max_position_embeddings": 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "Llama": SIZES,
    "Qwen3": {**SIZES, "head_dim": 12, "tie_word_embeddings": True, "rope_theta": 1e6},
    "Mixtral": {**SIZES, "intermediate_size": 24, "num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        **SIZES,
        "head_dim": 12,
        "moe_intermediate_size": 16,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
    },
}


def path_of(family: str) -> Path:
    return Path(__file__).with_name(f"transformers_{family.lower()}.safetensors")


@contextmanager
def float32_is_float64() -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, value in (
            (torch, "float32", torch.float64),
            (torch, "float", torch.float64),
            (torch.Tensor, "float", torch.Tensor.double),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def random_model(family: str, seed: int = SEED):
    """A <family>ForCausalLM of its sizes in float64, every parameter drawn from `seed` in float32."""
    import transformers

    fields = dict(FAMILIES[family])
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta")}
    forms = {"attn_implementation": "eager", "experts_implementation": "eager"}  # no fused float32 products
    with float32_is_float64():
        config = getattr(transformers, f"{family}Config")(
            **fields, **forms, rope_parameters=rope, pad_token_id=None
        )
        model = getattr(transformers, f"{family}ForCausalLM")(config).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            drawn = torch.randn(param.shape, generator=generator) * 0.15
            param.copy_(drawn + 1.0 if "norm" in name else drawn)
    return model


def reference(family: str, seed: int = SEED) -> dict[str, torch.Tensor]:
    """Weights, tokens, and what the model makes of them, as in the bundle."""
    model = random_model(family, seed)
    weights = {f"weight.{name}": param.detach().float() for name, param in model.named_parameters()}
    generator = torch.Generator().manual_seed(seed + 1)
    text = torch.randint(SIZES["vocab_size"], (BATCH, SEQUENCE + 1), generator=generator)
    tokens_BS, targets_BS = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    with float32_is_float64(), chosen_experts(model, tokens_BS.shape) as experts:
        logits_BSV, loss_BS, grads = run(model, tokens_BS, targets_BS)
    tensors = weights | {f"grad.{name}": grad for name, grad in grads.items()}
    tensors |= {"tokens": tokens_BS, "targets": targets_BS, "logits": logits_BSV, "loss": loss_BS}
    if experts:
        half = copy.deepcopy(model).bfloat16()
        with torch.no_grad(), chosen_experts(half, tokens_BS.shape) as bf16_experts:
            tensors["bf16_logits"] = half(tokens_BS).logits
        tensors |= {"experts": torch.stack(experts), "bf16_experts": torch.stack(bf16_experts)}
    return tensors


@contextmanager
def chosen_experts(model, shape: torch.Size) -> Iterator[list[torch.Tensor]]:
    """What the routers of `model`, run once inside, choose: (*shape, k) of each layer, in ascending order."""
    chosen: list[torch.Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [
        router.register_forward_hook(
            lambda module, args, output: chosen.append(output[2].sort(-1).values.view(*shape, -1))
        )
        for router in routers
    ]
    yield chosen
    for hook in hooks:
        hook.remove()


def main() -> None:
    import transformers

    for family, sizes in FAMILIES.items():
        tensors, path = reference(family), path_of(family)
        metadata = {"sizes": json.dumps(sizes), "seed": str(SEED), "transformers": transformers.__version__}
        save_file(tensors, path, metadata)
        loss = float(tensors["loss"].mean())
        print(f"{path.name}: {path.stat().st_size} bytes, {metadata['transformers']}, loss {loss:.6f}")


if __name__ == "__main__":
    main()
