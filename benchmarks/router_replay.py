"""How close log-probabilities of generation and of training are, with and without router replay.

`python -m benchmarks.router_replay` generates with a KV cache from a random mixture of experts in BF16 on
this CPU, records the experts, and computes the same tokens as whole sequences, as training does. It prints
the share of (token, layer) pairs whose experts differ, and the differences of the log-probabilities. There is
no baseline.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from fastmp.apps.generation import Decoder
from fastmp.apps.generation.sample_text import choose_tokens
from fastmp.config import GPTConfig, MoEConfig
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import GPT, Placement
from fastmp.nn.moe import Routing, RoutingRecorder
from fastmp.objectives import token_log_probs
from fastmp.ops import linear_log_probs

WORKLOADS = ()
CONFIG = GPTConfig(
    num_layers=6,
    hidden_size=128,
    num_heads=8,
    vocab_size=1024,
    max_seq_len=160,
    norm="rmsnorm",
    position="rope",
    activation="swiglu",
    linear_bias=False,
    tie_embeddings=False,
    init_std=0.08,
    moe=MoEConfig(num_experts=32, top_k=4, expert_ffn_hidden_size=64, normalize_topk=True),
)
ROWS, PROMPT, NEW = 16, 32, 96


@torch.no_grad()
def generated(model: GPT) -> tuple[Tensor, Tensor, Routing]:
    """Return tokens (B, S), the log-probabilities (B, NEW) of the new ones, and the experts (B, S - 1)."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(CONFIG.vocab_size, (ROWS, PROMPT), generator=generator)
    points = torch.rand(ROWS, NEW, dtype=torch.float64, generator=generator)
    states: list[Tensor] = []  # (S, B, H) after the final norm
    log_probs: list[Tensor] = []

    def choose(logits_BV: Tensor, points_B: Tensor) -> Tensor:
        tokens_B = choose_tokens(logits_BV, points_B, temperature=1.0, top_k=0, top_p=1.0)
        log_probs.append(
            linear_log_probs(states[-1][-1], model.output_weight, tokens_B, vocab_size=CONFIG.vocab_size)
        )
        return tokens_B

    assert model.final_norm is not None
    hook = model.final_norm.register_forward_hook(lambda module, args, output: states.append(output))
    places = PROMPT + NEW - 1
    decoder = Decoder(model, ParallelGroups.alone(), places=places, choose=choose, record_routing=True)
    first = decoder.prefill(prompts, torch.full((ROWS,), PROMPT), points)
    new = torch.cat((first[:, None].clone(), decoder.steps(NEW - 1)), 1)
    hook.remove()
    assert decoder.routing_LBNk is not None
    return torch.cat((prompts, new), 1), torch.stack(log_probs, 1), Routing(decoder.routing_LBNk)


@torch.no_grad()
def trained(model: GPT, ids: Tensor, routing: Routing | RoutingRecorder) -> Tensor:
    """Return the log-probabilities (B, NEW) of the new tokens, from whole sequences."""
    assert model.final_norm is not None
    hidden = model.final_norm(model.hidden(ids[:, :-1], routing=routing))
    mask = torch.zeros_like(ids[:, 1:], dtype=torch.bool)
    mask[:, PROMPT - 1 :] = True
    found = token_log_probs(
        hidden, model.output_weight, ids[:, 1:], mask, sequence_first=True, vocab_size=CONFIG.vocab_size
    )
    return found[:, PROMPT - 1 :]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    dtype = getattr(torch, parser.parse_args(arguments).dtype)
    torch.manual_seed(0)
    model = GPT(CONFIG, Placement(dtype=dtype)).eval()
    ids, generation, routing = generated(model)
    recorder = RoutingRecorder()
    pairs = {
        "experts chosen again": (generation, trained(model, ids, recorder)),
        "experts replayed": (generation, trained(model, ids, routing)),
    }
    own = recorder.routing().experts.sort(-1).values
    other = (own != routing.experts.sort(-1).values).any(-1)
    print(f"{ids.shape[0]} sequences of {PROMPT} + {NEW} tokens, {dtype}, {CONFIG.num_layers} layers")
    print(f"(token, layer) pairs with other experts: {other.float().mean():.2%}")
    print("| | mean | 99th percentile | largest |\n|---|---|---|---|")
    for name, (generation, training) in pairs.items():
        gap = (training - generation).abs().flatten()
        print(f"| {name} | {gap.mean():.1e} | {gap.quantile(0.99):.1e} | {gap.max():.1e} |")


if __name__ == "__main__":
    main()
