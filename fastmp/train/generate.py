"""Text from a trained model: greedy or by temperature, the same on every tensor-parallel rank.

Each step runs the model on the last `max_seq_len` tokens, padded on the right to a multiple of 64: a causal
model does not see the padding, the shapes stay few, and sequence parallelism gets a length it can divide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fastmp.parallel.collectives import gather_from_group
from fastmp.train.tokenize import Tokenizer

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
    seed: int = 0,
    group: ProcessGroup | None = None,
    together: ProcessGroup | None = None,
    pad_multiple: int = 64,
) -> list[int]:
    """Continue `prompt` (token ids, at least one) by at most `max_new_tokens` ids, which are returned.

    `next_logits(tokens (1, S) int64 on the CPU, position)` gives this rank's logits (V_local,) of what
    follows that position, the vocabulary divided over `group` (None: this rank alone). Stops before an
    end-of-text. temperature 0 takes the likeliest token (the first of equals). Draws come from a generator of
    their own, so one seed gives one text, on every rank of `group`, and the generators of training are left
    alone. `together`: ranks that can only run the model together, as replicas of attention that share experts
    do; they all take the token that the first of them drew, for rounding could send them different ways.
    `pad_multiple`: of what the sequence that the model sees is a multiple, unless it is `max_seq_len` long.
    Put the model in evaluation mode first. ValueError on an empty prompt, an id outside the vocabulary or a
    negative temperature.
    """
    vocab_size, end_of_text = tokenizer.vocab_size, tokenizer.end_of_text
    ids = [int(i) for i in prompt]
    if not ids:
        raise ValueError("generate: the prompt is empty; start with the tokenizer's end_of_text")
    if bad := [i for i in ids if not 0 <= i < vocab_size]:
        raise ValueError(f"generate: prompt id {bad[0]} is outside the vocabulary of {vocab_size}")
    if temperature < 0:
        raise ValueError(f"generate: temperature must not be negative, got {temperature}")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_new_tokens):
        window = ids[-max_seq_len:]
        length = min(max_seq_len, -(-len(window) // pad_multiple) * pad_multiple)
        logits_V, device = _logits(next_logits, window, length, end_of_text, group)
        token = _draw(logits_V[:vocab_size], temperature, generator)
        if together is not None:
            drawn = torch.tensor([token], device=device)
            dist.broadcast(drawn, group=together, group_src=0)
            token = int(drawn)
        if token == end_of_text:
            break
        ids.append(token)
    return ids[len(prompt) :]


def generate_text(next_logits: NextLogits, text: str, *, tokenizer: Tokenizer, **options) -> str:
    """The continuation of `text`, taken as the start of a document; options as for `generate`."""
    prompt = [tokenizer.end_of_text, *tokenizer.encode(text).tolist()]
    return tokenizer.decode(generate(next_logits, prompt, tokenizer=tokenizer, **options))


def _logits(
    next_logits: NextLogits, window: list[int], length: int, padding: int, group: ProcessGroup | None
) -> tuple[torch.Tensor, torch.device]:
    """Logits (V_padded,) of the token after `window`: float64, CPU, the same bits on all ranks of `group`.

    Also the device that they came from.
    """
    tokens_BS = torch.full((1, length), padding, dtype=torch.int64)
    tokens_BS[0, : len(window)] = torch.tensor(window)
    own_V = next_logits(tokens_BS, len(window) - 1)
    return gather_from_group(own_V.contiguous(), group).double().cpu(), own_V.device


def _draw(logits_V: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    shares_V = torch.softmax(logits_V / temperature, dim=-1)
    point = torch.rand((), dtype=torch.float64, generator=generator) * shares_V.sum()
    return min(int(torch.searchsorted(shares_V.cumsum(-1), point, right=True)), len(logits_V) - 1)
