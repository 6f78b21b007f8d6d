"""A model, or a stage of one, that continues a batch of rows, by one token or a few at a time.

A step takes a window of W tokens a row: the last token, and W - 1 drafts of the MTP modules if it speculates
(arXiv 2211.17192). The model chooses a token after each of them; as long as a draft is what was chosen in its
place, the next choice counts, too. Each row has its random number for each of its tokens, so the text is that
of decoding one token at a time, greedy or sampled. Without drafts W is 1.

The step is a function of tensors that stay where they are: windows, positions, random numbers, and the cache
of keys and values. It never waits for the device, so its parts are captured as graphs; what no graph can
hold, such as an all-to-all of tokens, runs between them. Graphs of experts with a limited receive capacity
may drop tokens: `steps` reads the count once, and repeats its steps by all-to-all.

Shapes: S tokens of the longest prompt, B rows, W tokens of a window, D = W - 1 drafts, H hidden,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from fastmp.config import GPTConfig
from fastmp.cuda_graphs.backends.interface import Backend, Graph
from fastmp.distributed.collectives import gather_from_group, group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.gpt import GPT
from fastmp.nn.kv_cache import KeyValueCache
from fastmp.nn.moe.layer import MoELayer
from fastmp.nn.moe.lossless import LosslessForwards
from fastmp.nn.moe.routing import RoutingRecorder, routed
from fastmp.nn.mtp import MTPModule
from fastmp.nn.segment import BoundSegment, LayerChain, Tensors

__all__ = ["NOT_ACCEPTED", "NO_TOKEN", "Decoder", "check_speculation"]

NO_TOKEN = -1  # of a row whose largest logit is no finite number
NOT_ACCEPTED = -2  # in place of a token after a draft that was not chosen

Choose = Callable[[Tensor, Tensor], Tensor]
Work = Callable[..., Tensors]


class Decoder:
    """Continues the rows of one batch: `prefill` once, then `steps` for further tokens.

    Args:
        model: a GPT in evaluation mode, or this rank's only stage of one, over `groups`.
        places: the most tokens that a row will have before its last one is chosen.
        choose: from logits (B, vocab_size) and random numbers (B,) the tokens (B,).
        vocab_size: ids that may be chosen; None: those of the model.
        speculative: draft a token with each MTP module of the model, and verify them together.
        backend: captures the second step, and replays it from then on; None: every step runs eagerly.
        record_routing: keep the experts of every token in `routing_LBNk`.

    All ranks of a tensor-parallel and of a pipeline group have the same rows, and return the same tokens:
    the ranks of the last stage choose, each from the logits of all of them. Stages work one after the other.
    A row whose largest logit is not finite gets NO_TOKEN.

    Attributes:
        routing_LBNk: int16, the experts of the tokens at the N places of each row, see `Routing`; -1 where
            there was no token yet. None unless recorded.

    Raises:
        ValueError: routing is recorded with graphs, speculation, a pipeline, or without experts; context or
            sequence parallelism; more places, drafts included, than the model has
            positions; speculation with a model without MTP modules, or with rotary positions by length.
    """

    def __init__(
        self,
        model: GPT,
        groups: ParallelGroups,
        *,
        places: int,
        choose: Choose,
        vocab_size: int | None = None,
        speculative: bool = False,
        backend: Backend | None = None,
        record_routing: bool = False,
    ) -> None:
        if record_routing and (backend is not None or speculative or group_size(groups.pp) > 1):
            raise ValueError(
                "generate: record_routing needs eager steps, no speculation and no pipeline, got "
                f"{'no ' * (backend is None)}graphs, speculative={speculative} and pp {group_size(groups.pp)}"
            )
        if group_size(groups.cp) > 1 or model.sequence_parallel:
            raise ValueError(
                "generate: needs a model without context and sequence parallelism, got "
                f"cp {group_size(groups.cp)} and sequence_parallel={model.sequence_parallel}"
            )
        depth, most = model.config.mtp_depth if speculative else 0, model.config.max_seq_len
        check_speculation(model.config, speculative)
        if places + depth > most:
            drafts = f" and {depth} drafts" if depth else ""
            raise ValueError(f"generate: {places} tokens{drafts} are more than max_seq_len {most}")
        self.model, self.choose, self.backend = model, choose, backend
        self.vocab_size = model.config.vocab_size if vocab_size is None else vocab_size
        self.pp, self.tp, self.places, self.width = groups.pp, groups.tp, places, 1 + depth
        self.modules = [cast(MTPModule, module) for module in model.mtp][:depth]
        self.cache = KeyValueCache(places + depth)
        self.record_routing = record_routing
        self.routing_LBNk: Tensor | None = None
        self._parts: list[Work] = []  # of a step, some in graphs
        self._eager_parts: list[Work] = []
        self._lossless: LosslessForwards | None = None
        if backend is not None:
            self._lossless = LosslessForwards([model], groups)
            with self._lossless.limited():
                self._cut(backend)

    def reserve(self, seq_len: int, rows: int) -> None:
        """Grow the symmetric memory of experts to hold (seq_len, rows) tokens, if they use it."""
        with nullcontext() if self._lossless is None else self._lossless.limited():
            for layer in self.model.modules():
                if isinstance(layer, MoELayer):
                    layer.reserve(max(seq_len, self.width), rows)

    @torch.no_grad()
    def prefill(self, prompts_BS: Tensor, lengths_B: Tensor, points_BN: Tensor) -> Tensor:
        """Return the first new token (B,) of each row, from prompts (B, S), int64, padded on the right.

        lengths_B: int64, of the prompts. points_BN: random numbers, of each new token that may be chosen, or
        anything that `choose` takes.
        """
        B, S = prompts_BS.shape
        self._window_BW = lengths_B.new_zeros(B, self.width)
        self._lengths_B, self._positions_B = lengths_B.clone(), lengths_B.clone()
        self._points_BN, self._longest = points_BN.clone(), S
        self._chosen_BW = torch.zeros_like(self._window_BW)
        self._hidden = self._buffer(self.width, B)
        given = self._receive(self._buffer(S, B)) if not self.model.stage_spec.first else None
        hidden_SBH = self.model.embed(prompts_BS, cache=self.cache) if given is None else given
        hidden_SBH = self._run_layers(hidden_SBH, torch.arange(S, device=lengths_B.device).expand(B, S))
        if self.model.stage_spec.last:
            rows_B, last_B = torch.arange(B, device=lengths_B.device), lengths_B - 1
            hidden_SBH = self._normed(hidden_SBH)
            first_B1 = self._choices(hidden_SBH[last_B, rows_B].unsqueeze(0), last_B.unsqueeze(1))
            # The prompts, one place ahead, and the first new token
            self._ahead_BX = torch.cat((prompts_BS[:, 1:], first_B1.expand(-1, self.width)), 1)
            self._ahead_BX.scatter_(1, last_B.unsqueeze(1), first_B1)
            self._last_B = last_B.clone()
            self._window_BW[:, :1], self._chosen_BW[:, :1] = first_B1, first_B1
            self._draft(hidden_SBH)
            self._ahead_BX = torch.zeros_like(self._window_BW).repeat(1, 2)
        self._hand_on(hidden_SBH)
        return self._chosen_BW[:, 0]

    def step(self) -> Tensor:
        """Return the next tokens (B, W) of each row, see `steps`; the next step may overwrite the tensor."""
        if self._lossless is None or not self._lossless.needed:
            return self._step(self._parts)
        return self.steps(1)

    @torch.no_grad()
    def steps(self, number: int) -> Tensor:
        """Return the tokens (B, number * W) of the next steps; the host waits if experts may drop tokens.

        A step gives a row one token or more; the others are NOT_ACCEPTED.
        """
        if self._lossless is None or not self._lossless.needed:
            return self._steps(number, self._parts)
        state = self._window_BW, self._positions_B
        before_them, longest = [each.clone() for each in state], self._longest
        with self._lossless.limited():
            before = self._lossless.count()
            chosen_BX = self._steps(number, self._parts)
            dropped = self._lossless.dropped_since(before)
        if not int(dropped):
            return chosen_BX
        # Later keys and values overwrite those of the void steps.
        for each, value in zip(state, before_them):
            each.copy_(value)
        self._longest = longest
        return self._steps(number, self._eager_parts)

    def _steps(self, number: int, parts: Sequence[Work]) -> Tensor:
        return torch.cat([self._step(parts).clone() for _ in range(number)], 1)

    @torch.no_grad()
    def _step(self, parts: Sequence[Work]) -> Tensor:
        self._longest = min(self._longest + self.width, self.cache.places)
        if not self.model.stage_spec.first:
            self._receive(self._hidden)
        if parts:
            (hidden_WBH,) = _in_turn(parts)
        else:
            (hidden_WBH,) = self._begin(self._longest)
            hidden_WBH = self._run_layers(hidden_WBH, self._positions_B.unsqueeze(1))
            (hidden_WBH,) = self._verify(hidden_WBH)
            self._draft(hidden_WBH)
            self._advance()
        return self._hand_on(hidden_WBH)

    def _run_layers(self, hidden_SBH: Tensor, places_BS: Tensor) -> Tensor:
        """Run the layers; record the experts of tokens at `places_BS`."""
        recorder = RoutingRecorder() if self.record_routing else None
        with routed(self.model, recorder):
            hidden_SBH, *_ = self.model.layers(hidden_SBH, cache=self.cache)
        if recorder is not None:
            found_LBSk = recorder.routing().experts
            L, B, _, k = found_LBSk.shape
            if self.routing_LBNk is None:
                self.routing_LBNk = found_LBSk.new_full((L, B, self.cache.places, k), -1)
            index_LBSk = places_BS[None, :, :, None].expand(found_LBSk.shape)
            self.routing_LBNk.scatter_(2, index_LBSk, found_LBSk)
        return hidden_SBH

    def _begin(self, columns: int | None = None) -> Tensors:
        """Return the hidden states of the window before this stage's layers."""
        self.cache.follow(self._positions_B, columns, self.width)
        if not self.model.stage_spec.first:
            return (self._hidden,)
        return (self.model.embed(self._window_BW.clamp(min=0), cache=self.cache),)

    def _verify(self, hidden_WBH: Tensor) -> Tensors:
        """Choose a token after each of the window, on the last stage; accept drafts while they are chosen.

        Returns the states of the window, there after the final norm.
        """
        if self.model.stage_spec.last:
            hidden_WBH = self._normed(hidden_WBH)
            numbers_W = torch.arange(self.width, device=self._positions_B.device)
            chosen_BW = self._choices(hidden_WBH, self._positions_B.unsqueeze(1) + numbers_W)
            agree_BD = chosen_BW[:, :-1] == self._window_BW[:, 1:]
            self._last_B.copy_(agree_BD.cumprod(1).sum(1))  # the last place of the window that counts
            self._chosen_BW.copy_(chosen_BW.where(numbers_W <= self._last_B.unsqueeze(1), NOT_ACCEPTED))
            self._window_BW[:, :1] = chosen_BW.gather(1, self._last_B.unsqueeze(1))
            self._ahead_BX[:, : self.width] = chosen_BW
        return (hidden_WBH,)

    def _normed(self, hidden_SBH: Tensor) -> Tensor:
        assert self.model.final_norm is not None
        return self.model.final_norm(hidden_SBH)

    def _choices(self, normed_SBH: Tensor, places_BS: Tensor) -> Tensor:
        """Return the token (B, S) that follows each state; places_BS: of the states in their rows."""
        logits_SBV = gather_from_group(self.model.logits(normed_SBH), self.tp)[..., : self.vocab_size]
        numbers_BS = places_BS + 1 - self._lengths_B.unsqueeze(1)  # of the new tokens
        points_BS = self._points_BN.gather(1, numbers_BS.clamp(0, self._points_BN.shape[1] - 1))
        rows_XV = logits_SBV.transpose(0, 1).flatten(0, 1)
        chosen_X = self.choose(rows_XV, points_BS.flatten())
        return chosen_X.where(rows_XV.amax(-1).isfinite(), NO_TOKEN).view_as(places_BS)

    def _draft(self, state_SBH: Tensor) -> None:
        """Draft a token with each MTP module, on the last stage, from the states of the tokens that count."""
        if self.width > 1 and self.model.stage_spec.last:
            for depth, module in enumerate(self.modules):
                (input_SBH,) = self._join(depth, state_SBH)
                last_SBH, *_ = module.layers(input_SBH, cache=self.cache)
                (state_SBH,) = self._drafted(depth, last_SBH)

    def _join(self, depth: int, state_SBH: Tensor) -> Tensors:
        """Return the input of an MTP module's layer: states, and the tokens so many places ahead."""
        tokens_BS = self._ahead_BX[:, depth : depth + len(state_SBH)].clamp(min=0)
        return (self.modules[depth].join(state_SBH, self.model.embed(tokens_BS, cache=self.cache)),)

    def _drafted(self, depth: int, last_SBH: Tensor) -> Tensors:
        """Choose a module's draft for the row's next place; return the module's states."""
        state_SBH = self.modules[depth].final_norm(last_SBH)
        rows_B, at_B1 = torch.arange(last_SBH.shape[1], device=last_SBH.device), self._last_B.unsqueeze(1)
        first = self.cache.positions
        begins_B1 = torch.zeros_like(at_B1) if first is None else first.position_ids_BT[:, :1]
        draft_B1 = self._choices(state_SBH[self._last_B, rows_B].unsqueeze(0), begins_B1 + at_B1 + depth + 1)
        self._ahead_BX.scatter_(1, at_B1 + depth + 1, draft_B1)
        self._window_BW[:, depth + 1 : depth + 2] = draft_B1
        return (state_SBH,)

    def _advance(self, *hidden: Tensor) -> Tensors:
        """Move on to the next window; rows that have all their tokens stay at their last place."""
        if self.model.stage_spec.last:
            self._positions_B += self._last_B + 1
            self._positions_B.clamp_(max=self.places - 1)
        return hidden

    def _layer(self, link: BoundSegment, first: bool, *tensors: Tensor) -> Tensors:
        made = link.segment.run(*tensors, **({"cache": self.cache} if first else {}))
        return made[:1] if link.last else made

    def _cut(self, backend: Backend) -> None:
        """Make the parts of a step: consecutive capturable segments as graphs, the others eager."""
        work: list[tuple[bool, Work]] = [(True, self._begin), *self._segments(self.model.layers)]
        work.append((True, self._verify))
        if self.width > 1 and self.model.stage_spec.last:
            for depth, module in enumerate(self.modules):
                work += [(True, partial(self._join, depth)), *self._segments(module.layers)]
                work.append((True, partial(self._drafted, depth)))
        work.append((True, self._advance))
        for captured, own in groupby(work, lambda each: each[0]):
            functions = [function for _, function in own]
            self._parts.append(_Graphed(functions, backend) if captured else partial(_in_turn, functions))
            self._eager_parts += functions

    def _segments(self, layers: LayerChain) -> Iterator[tuple[bool, Work]]:
        """Yield the segments of layers, and whether a graph can hold each."""
        first = True
        for link in layers.bound_segments():
            yield link.segment.capturable, partial(self._layer, link, first)
            first = link.last

    def _buffer(self, S: int, B: int) -> Tensor:
        """Return a buffer (S, B, H) for the previous stage's hidden states; empty on the first stage."""
        if self.model.stage_spec.first:
            return torch.empty(0)
        like = next(self.model.parameters())
        return like.new_empty(S, B, self.model.config.hidden_size)

    def _receive(self, hidden_SBH: Tensor) -> Tensor:
        dist.recv(hidden_SBH, group=self.pp, group_src=group_rank(self.pp) - 1)
        return hidden_SBH

    def _hand_on(self, hidden_SBH: Tensor) -> Tensor:
        """Send hidden states to the next stage; return the chosen tokens of the last stage on all of them."""
        if self.pp is not None:
            if not self.model.stage_spec.last:
                dist.send(hidden_SBH.contiguous(), group=self.pp, group_dst=group_rank(self.pp) + 1)
            state = self._chosen_BW, self._window_BW, self._positions_B.unsqueeze(1)
            together = torch.cat(state, 1)
            dist.broadcast(together, group=self.pp, group_src=group_size(self.pp) - 1)
            for own, found in zip(state, together.split([each.shape[1] for each in state], 1)):
                own.copy_(found)
        return self._chosen_BW


def check_speculation(config: GPTConfig, speculative: bool) -> None:
    """Raise ValueError for speculative decoding with a model that does not support it.

    Rotary angles that depend on the length would follow the end of a window, and differ from those of plain
    decoding.
    """
    if not speculative:
        return
    if not config.mtp_depth:
        raise ValueError("generate: speculative decoding needs a model with MTP modules, got mtp_depth 0")
    if config.rope_scaling is not None and config.rope_scaling.by_length:
        raise ValueError(
            "generate: speculative decoding needs rotary positions that do not depend on the length, got "
            f"rope_scaling.kind {config.rope_scaling.kind!r}; leave speculative decoding out"
        )


def _in_turn(functions: Sequence[Work], *tensors: Tensor) -> Tensors:
    for function in functions:
        tensors = function(*tensors)
    return tensors


class _Graphed:
    """A chain of functions, each taking the previous result: eager once, then a graph.

    The first call loads kernels and makes what they keep. What the graph reads and returns stays where it is.
    """

    def __init__(self, functions: Sequence[Work], backend: Backend) -> None:
        self._run, self._backend = partial(_in_turn, functions), backend
        self._begun = False
        self._graph: Graph | None = None
        self._static: list[Tensor] = []
        self._made: Tensors = ()

    def __call__(self, *tensors: Tensor) -> Tensors:
        if not self._begun:
            self._begun = True
            return self._run(*tensors)
        if self._graph is None:
            self._backend.prepare()
            self._static = [tensor.clone() for tensor in tensors]
            self._graph = self._backend.graph()
            with self._graph.capture():
                self._made = self._run(*self._static)
            if self._backend.runs_at_capture:
                return self._made
        for static, tensor in zip(self._static, tensors):
            static.copy_(tensor)
        self._graph.replay()
        return self._made
