"""Makes gpt2_reference.safetensors: what `transformers` GPT-2 computes in float64 for random weights.

    python tests/data/make_gpt2_reference.py            (needs `transformers`; writes next to this file)

Weights are drawn here, in float32, so that they do not depend on that package's initialisation, and large
enough that attention is far from uniform; every gradient is of the mean loss over all tokens. transformers
computes its own loss in float32 whatever the dtype, so the loss here is taken from its float64 logits. The
vocabulary (300) is not a multiple of 128, so that padding is exercised. Metadata: sizes, seed and the version
of transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

PATH = Path(__file__).with_name("gpt2_reference.safetensors")
SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 300, "n_positions": 32}
SEED, BATCH, SEQUENCE = 20190917, 3, 24


def random_gpt2(seed: int = SEED):
    """A GPT2LMHeadModel (float32, dropout off) of SIZES, every parameter drawn from `seed`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout_off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    config = GPT2Config(**SIZES, **dropout_off, bos_token_id=0, eos_token_id=0, attn_implementation="eager")
    model = GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.normal_(0.0, 0.15, generator=generator)
            if ".ln_" in name and name.endswith("weight"):
                param.add_(1.0)
    return model


def run(model, tokens_BS: torch.Tensor, targets_BS: torch.Tensor):
    """Logits (B, S, V), loss per token (B, S) and the gradients of its mean, by parameter name."""
    logits_BSV = model(tokens_BS).logits
    loss_BS = F.cross_entropy(logits_BSV.transpose(1, 2), targets_BS, reduction="none")
    model.zero_grad()
    loss_BS.mean().backward()
    return (
        logits_BSV.detach(),
        loss_BS.detach(),
        {name: param.grad for name, param in model.named_parameters()},
    )


def main() -> None:
    import transformers

    model = random_gpt2()
    weights = {f"weight.{name}": param.detach().clone() for name, param in model.named_parameters()}
    generator = torch.Generator().manual_seed(SEED + 1)
    text = torch.randint(SIZES["vocab_size"], (BATCH, SEQUENCE + 1), generator=generator)
    tokens_BS, targets_BS = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    logits_BSV, loss_BS, grads = run(model.double(), tokens_BS, targets_BS)
    tensors = weights | {f"grad.{name}": grad for name, grad in grads.items()}
    tensors |= {"tokens": tokens_BS, "targets": targets_BS, "logits": logits_BSV, "loss": loss_BS}
    metadata = {"sizes": json.dumps(SIZES), "seed": str(SEED), "transformers": transformers.__version__}
    save_file(tensors, PATH, metadata)
    size, loss = PATH.stat().st_size, float(loss_BS.mean())
    print(f"{PATH.name}: {size} bytes, transformers {transformers.__version__}, loss {loss:.6f}")


if __name__ == "__main__":
    main()
