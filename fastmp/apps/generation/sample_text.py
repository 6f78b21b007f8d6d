"""Text from a trained model, the same on every tensor-parallel rank: tokens that are likeliest, or drawn.

Each step runs the model on the last `max_seq_len` tokens, padded on the right to a multiple of 64: a causal
model does not see the padding, the shapes stay few, and sequence parallelism gets a length it can divide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fastmp.distributed.collectives import gather_from_group
from fastmp.training.data.tokenize import Tokenizer

NextLogits = Callable[[torch.Tensor, int], torch.Tensor]


@torch.no_grad()
def generate(
    next_logits: NextLogits,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    max_seq_len: int,
    tokenizer: Tokenizer,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    group: ProcessGroup | None = None,
    together: ProcessGroup | None = None,
    pad_multiple: int = 64,
) -> list[int]:
    """Continue `prompt` (token ids, at least one) by at most `max_new_tokens` ids, which are returned.

    `next_logits(tokens (1, S) int64 on the CPU, position)` gives this rank's logits (V_local,) of what
    follows that position, the vocabulary divided over `group` (None: this rank alone). Stops before an
    end-of-text. temperature, top_k and top_p: see `choose_tokens`. Draws come from a generator of
    their own, so one seed gives one text, on every rank of `group`, and the generators of training are left
    alone. `together`: ranks that can only run the model together, as replicas of attention that share experts
    do; they all take the token that the first of them drew, for rounding could send them different ways.
    `pad_multiple`: of what the sequence that the model sees is a multiple, unless it is `max_seq_len` long.
    Put the model in evaluation mode first. ValueError on an empty prompt, an id outside the vocabulary, or as
    `choose_tokens`.
    """
    vocab_size, end_of_text = tokenizer.vocab_size, tokenizer.end_of_text
    ids = [int(i) for i in prompt]
    if not ids:
        raise ValueError("generate: the prompt is empty; start with the tokenizer's end_of_text")
    if bad := [i for i in ids if not 0 <= i < vocab_size]:
        raise ValueError(f"generate: prompt id {bad[0]} is outside the vocabulary of {vocab_size}")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_new_tokens):
        window = ids[-max_seq_len:]
        length = min(max_seq_len, -(-len(window) // pad_multiple) * pad_multiple)
        logits_V, device = _logits(next_logits, window, length, end_of_text, group)
        points_1 = torch.rand(1, dtype=torch.float64, generator=generator)
        choice: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        token = int(choose_tokens(logits_V[:vocab_size].unsqueeze(0), points_1, **choice))
        if together is not None:
            drawn = torch.tensor([token], device=device)
            dist.broadcast(drawn, group=together, group_src=0)
            token = int(drawn)
        if token == end_of_text:
            break
        ids.append(token)
    return ids[len(prompt) :]


def generate_text(next_logits: NextLogits, text: str, *, tokenizer: Tokenizer, **options) -> str:
    """Return a continuation of `text` as the start of a document; options as for `generate`."""
    prompt = [tokenizer.end_of_text, *tokenizer.encode(text).tolist()]
    return tokenizer.decode(generate(next_logits, prompt, tokenizer=tokenizer, **options))


def _logits(
    next_logits: NextLogits, window: list[int], length: int, padding: int, group: ProcessGroup | None
) -> tuple[torch.Tensor, torch.device]:
    """Return the logits (V_padded,) of the token after `window`: float64 on the CPU, bitwise equal on
    `group`.

    Also the device that they came from.
    """
    tokens_BS = torch.full((1, length), padding, dtype=torch.int64)
    tokens_BS[0, : len(window)] = torch.tensor(window)
    own_V = next_logits(tokens_BS, len(window) - 1)
    return gather_from_group(own_V.contiguous(), group).double().cpu(), own_V.device


def choose_tokens(
    logits_BV: torch.Tensor,
    points_B: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> torch.Tensor:
    """Return the next token of each row, (B,) int64, from logits (B, V) and random numbers (B,) in [0, 1).

    temperature: logits are divided by it; 0 takes the likeliest token (the first of equals).
    top_k: only the k likeliest tokens may be chosen (Fan et al. 2018); 0: all may.
    top_p: of these only the likeliest whose shares add up to at least p (Holtzman et al. 2020), one or more.
    A token as likely as the last one that may be chosen may be chosen, too.

    It has fixed shapes and never waits for the device. A row depends on its own numbers alone. ValueError for
    a negative temperature or top_k, and for a top_p outside of (0, 1].
    """
    check_choice(temperature, top_k, top_p)
    if temperature == 0:
        return logits_BV.argmax(-1)
    scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)).double() / temperature
    if 0 < top_k < scaled_BV.shape[-1]:
        least_B1 = scaled_BV.topk(top_k).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B1, -torch.inf)
    shares_BV = torch.softmax(scaled_BV, dim=-1)
    if top_p < 1:
        sorted_BV = shares_BV.sort(-1, descending=True).values
        needed_BV = sorted_BV.cumsum(-1) - sorted_BV < top_p  # those before it are not enough
        least_B1 = sorted_BV.masked_fill(~needed_BV, 1.0).amin(-1, keepdim=True)
        shares_BV = shares_BV.masked_fill(shares_BV < least_B1, 0.0)
    sums_BV = shares_BV.cumsum(-1)
    reached_B1 = points_B.to(sums_BV).unsqueeze(1) * sums_BV[:, -1:]
    last_B1 = sums_BV.argmax(-1, keepdim=True)  # rounding may reach beyond the last that has a share
    return torch.minimum(torch.searchsorted(sums_BV, reached_B1, right=True), last_B1).squeeze(1)


def check_choice(temperature: float, top_k: int, top_p: float) -> None:
    """Raise ValueError for what `choose_tokens` cannot choose by."""
    if not temperature >= 0:
        raise ValueError(f"generate: temperature must not be negative, got {temperature}")
    if top_k < 0:
        raise ValueError(f"generate: top_k must not be negative, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"generate: top_p must be above 0 and at most 1, got {top_p}")
