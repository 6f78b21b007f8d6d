"""Batched generation: continue prompts with a `Decoder` until each one has ended."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fastmp.apps.generation.incremental import NO_TOKEN, NOT_ACCEPTED, Decoder
from fastmp.apps.generation.sample_text import check_choice, choose_tokens
from fastmp.config import GPTConfig
from fastmp.cuda_graphs.backends.cuda import CudaBackend
from fastmp.cuda_graphs.backends.interface import Backend
from fastmp.distributed.collectives import communication_device, gather_objects, group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.gpt import GPT
from fastmp.training.data.tokenize import Tokenizer

__all__ = ["Continuation", "Generated", "check_prompts", "generate"]

CONTEXT = 8  # tokens of a prompt that are decoded together with new ones
LOST = "not finite"  # why a row ends that raises in the end, on all ranks
STEPS_AHEAD = 16  # of a GPU before the host reads what it has chosen


class Continuation(NamedTuple):
    """Continuation of a prompt.

    Args:
        ids: new tokens, including those of a stop string, without an end-of-text token.
        text: of these tokens, up to the stop string; "" without a tokenizer.
        reason: "end of text", "stop string" or "length".
        routing: (L, n, k) int16 on the CPU, the experts of the prompt's and the new tokens in the L layers
            with experts, as `Routing.padded` takes them; the last new token was not given to the model. None
            unless recorded.
    """

    ids: list[int]
    text: str
    reason: str
    routing: Tensor | None = None


class Generated(NamedTuple):
    """Continuations of all prompts, and the time of prefill and decoding.

    Args:
        rows: the continuations, in the order of the prompts.
        prompt_tokens: of all prompts.
        decoded_tokens: new tokens after the first one of each prompt; padding after the end of a row does not
            count.
        decode_steps: forwards after the first new tokens. Without speculation each gives a row one token.
        prefill_seconds: for the prompts and the first new token of each.
        decode_seconds: for the decoded tokens.
    """

    rows: list[Continuation]
    prompt_tokens: int
    decoded_tokens: int
    decode_steps: int
    prefill_seconds: float
    decode_seconds: float


def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    tokenizer: Tokenizer | None = None,
    stop: Sequence[str] = (),
    ends: Collection[int] | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    speculative: bool = False,
    groups: ParallelGroups = ParallelGroups.alone(),
    backend: Backend | None = None,
    record_routing: bool = False,
) -> Generated:
    """Continue all `prompts` (token ids, of any lengths) at once, each by at most `max_new_tokens` tokens.

    Args:
        model: a GPT in evaluation mode, or this rank's pipeline stage.
        prompts: token ids, at least one a prompt.
        max_new_tokens: for each prompt.
        tokenizer: decodes texts; ids beyond its vocabulary are not sampled.
        stop: strings that end a text; they may span several tokens.
        ends: end-of-text ids; None: that of the tokenizer, if any.
        temperature: see `fastmp.apps.generation.sample_text.choose_tokens`.
        top_k: as `temperature`.
        top_p: as `temperature` (nucleus sampling, Holtzman et al. 2020).
        seed: row i draws from its own generator with seed + i, so that other prompts and the parallel layout
            affect a text by rounding only.
        speculative: draft tokens with the model's MTP modules. The texts are those without.
        groups: process groups of the model. Data-parallel ranks share the rows; all return all of them.
        backend: captures decode steps as graphs; None: CUDA graphs on a GPU, eager on a CPU.
        record_routing: return the experts of each row, to be replayed in training. Steps are then eager.

    Returns:
        The continuations and timings. The host reads tokens after every step on a CPU and after 16 steps on a
        GPU. KV cache and static shapes follow Pope et al. 2022, arXiv 2211.05102.

    Raises:
        ValueError: a prompt is empty, has an id outside of the vocabulary, or leaves no positions for
            `max_new_tokens`; a stop string is empty or there is no tokenizer; and as `choose_tokens` and
            `Decoder`. On all ranks, also for logits that are not finite.

    Example (needs a checkpoint):
        >>> reader, config = open_weights("runs/gpt", None, None)
        >>> model = load_model(reader, config, ParallelGroups.alone())
        >>> tokenizer = load_tokenizer("byte")
        >>> ids = tokenizer.encode_prompt("The ")
        >>> print(generate(model, [ids], max_new_tokens=20, tokenizer=tokenizer).rows[0].text)
    """
    check_choice(temperature, top_k, top_p)
    if not all(stop) or (stop and tokenizer is None):
        raise ValueError(f"generate: stop strings need a tokenizer and a character each, got {list(stop)}")
    vocab_size = model.config.vocab_size
    if tokenizer is not None:
        vocab_size = min(vocab_size, tokenizer.vocab_size)
        ends = (tokenizer.end_of_text,) if ends is None else ends
    drafts = model.config.mtp_depth if speculative else 0
    check_prompts(model.config, prompts, max_new_tokens, vocab_size, drafts=drafts)
    device = next(model.parameters()).device
    if backend is None and device.type == "cuda" and not record_routing:
        backend = cast(Backend, CudaBackend())
    choose = partial(choose_tokens, temperature=temperature, top_k=top_k, top_p=top_p)
    longest = max(map(len, prompts))
    decoder = Decoder(
        model,
        groups,
        places=longest + max_new_tokens - 1,
        choose=choose,
        vocab_size=vocab_size,
        speculative=speculative,
        backend=backend,
        record_routing=record_routing,
    )
    size = -(-len(prompts) // group_size(groups.dp))
    own = range(group_rank(groups.dp) * size, (group_rank(groups.dp) + 1) * size)
    rows = [
        Completion(prompts[i], max_new_tokens, tokenizer, tuple(stop), frozenset(ends or ()))
        if i < len(prompts)
        else Completion(prompts[0][:1], 0)  # padding: equally many rows on all ranks
        for i in own
    ]
    decoder.reserve(longest, size)
    steps, *seconds = _run(decoder, rows, longest, _points(own, max_new_tokens, seed).to(device), groups.dp)
    found = [(row.continuation(_routing_of(decoder, i, row)), row.taken) for i, row in enumerate(rows)]
    found = list(chain.from_iterable(gather_objects(found, groups.dp)))[: len(prompts)]
    for number, (row, _) in enumerate(found, 1):
        if row.reason == LOST:
            raise ValueError(
                f"generate: prompt {number} has logits that are not finite after {len(row.ids)} new tokens: "
                "the weights are not, or a number is too large for their dtype"
            )
    decoded = sum(taken for _, taken in found) - len(found)
    return Generated([row for row, _ in found], sum(map(len, prompts)), decoded, steps, *seconds)


def check_prompts(
    config: GPTConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    vocab_size: int,
    *,
    drafts: int = 0,
) -> None:
    """Raise ValueError for prompts that a model cannot continue by so many tokens.

    drafts: of a step of speculative decoding, which need positions, too.
    """
    if max_new_tokens < 1:
        raise ValueError(f"generate: max_new_tokens must be positive, got {max_new_tokens}")
    if not prompts or not all(prompts):
        raise ValueError("generate: a prompt is empty; start with the tokenizer's end_of_text")
    for prompt in prompts:
        if bad := [i for i in prompt if not 0 <= i < vocab_size]:
            raise ValueError(f"generate: prompt id {bad[0]} is outside the vocabulary of {vocab_size}")
    longest, most = max(map(len, prompts)), config.max_seq_len
    if longest + max_new_tokens - 1 + drafts > most:
        drafted = f" next to {drafts} drafts" if drafts else ""
        raise ValueError(
            f"generate: a prompt of {longest} tokens and {max_new_tokens} new ones are too many for a model "
            f"of {most} positions; at most {max(most + 1 - drafts - longest, 0)} new ones fit{drafted}"
        )


def _points(rows: range, number: int, seed: int) -> Tensor:
    """Return the random numbers (B, number) in [0, 1) of these rows, float64."""
    return torch.stack(
        [
            torch.rand(number, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + i))
            for i in rows
        ]
    )


@dataclass
class Completion:
    """Row of the batch that takes tokens until it ends; `taken` counts them."""

    prompt: Sequence[int]
    room: int
    tokenizer: Tokenizer | None = None
    stop: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()
    ids: list[int] = field(default_factory=list)
    taken: int = 0
    text: str | None = None  # up to a stop string
    ended: bool = False
    lost: bool = False

    @property
    def done(self) -> bool:
        return self.ended or self.lost or self.text is not None or self.taken == self.room

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token == NOT_ACCEPTED:
                continue
            if self.done:
                return
            self.taken += 1
            self.ended, self.lost = token in self.ends, token == NO_TOKEN
            if not (self.ended or self.lost):
                self.ids.append(token)
                self.text = self._stopped() if self.stop else None

    def _stopped(self) -> str | None:
        """Return the text before the first stop string; None if there is none.

        The whole text is decoded only where the last tokens hold what the newest has completed. In front of
        the newest they have a longest stop string, and some more: characters cut in two, a space dropped.
        """
        assert self.tokenizer is not None
        reach, tail = max(map(len, self.stop)) + CONTEXT, CONTEXT
        while tail < len(self.ids) and len(self.tokenizer.decode(self.ids[-tail:-1])) < reach:
            tail *= 2
        if tail < len(self.ids):
            latest = self.tokenizer.decode(self.ids[-tail:])
            if not any(each in latest for each in self.stop):
                return None
        text = self._text()
        found = [at for each in self.stop if (at := text.find(each)) >= 0]
        return text[: min(found)] if found else None

    def continuation(self, routing: Tensor | None = None) -> Continuation:
        reason = "length" if self.text is None else "stop string"
        reason = "end of text" if self.ended else LOST if self.lost else reason
        return Continuation(self.ids, self._text() if self.text is None else self.text, reason, routing)

    def _text(self) -> str:
        """Return the text that the new tokens add to the last tokens of the prompt.

        Decoders may treat the beginning of a text otherwise, and drop its space.
        """
        if self.tokenizer is None:
            return ""
        before = list(self.prompt[-CONTEXT:])
        start, whole = self.tokenizer.decode(before), self.tokenizer.decode(before + self.ids)
        return whole[len(start) :] if whole.startswith(start) else self.tokenizer.decode(self.ids)


def _routing_of(decoder: Decoder, number: int, row: Completion) -> Tensor | None:
    """Return the experts (L, n, k) of a row's tokens that the model was given."""
    if decoder.routing_LBNk is None:
        return None
    given = max(len(row.prompt) + row.taken - 1, 0)
    return decoder.routing_LBNk[:, number, :given].cpu().clone()


def _run(
    decoder: Decoder,
    rows: Sequence[Completion],
    longest: int,
    points_BN: Tensor,
    dp: dist.ProcessGroup | None,
) -> tuple[int, float, float]:
    """Continue all rows until they are done, on all ranks of `dp`.

    Returns:
        The steps of decoding, and the seconds of prefill and of decoding.
    """
    device = points_BN.device
    lengths_B = torch.tensor([len(row.prompt) for row in rows])
    prompts_BS = torch.zeros(len(rows), longest, dtype=torch.int64)
    for row, prompt_S in zip(rows, prompts_BS):
        prompt_S[: len(row.prompt)] = torch.tensor(row.prompt)
    began = time.perf_counter()
    chosen_BN = decoder.prefill(prompts_BS.to(device), lengths_B.to(device), points_BN).unsqueeze(1)
    interval, done, decoding = STEPS_AHEAD if device.type == "cuda" else 1, 1, 0.0
    while True:
        for row, tokens in zip(rows, chosen_BN.tolist()):
            row.take(tokens)
        decoding = decoding or time.perf_counter()
        if _everywhere(all(row.done for row in rows), dp):
            return done - 1, decoding - began, time.perf_counter() - decoding
        number = min(interval, points_BN.shape[1] - done)
        chosen_BN = decoder.steps(number)
        done += number


def _everywhere(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Return True if `flag` is set on all ranks."""
    if group is None:
        return flag
    number = torch.tensor(int(flag), device=communication_device())
    dist.all_reduce(number, dist.ReduceOp.MIN, group=group)
    return bool(number)
