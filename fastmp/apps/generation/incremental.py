"""A model, or a stage of one, that continues a batch of rows by one token at a time.

The step is a function of tensors that stay where they are: last tokens, positions, random numbers, and the
cache of keys and values. It never waits for the device, so its parts are captured as graphs; what no graph
can hold, such as an all-to-all of tokens, runs between them. Graphs of experts with a limited receive
capacity may drop tokens: `steps` reads the count once, and repeats its steps by all-to-all.

Shapes: S tokens of the longest prompt, B rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from fastmp.cuda_graphs.backends.base import Backend, Graph
from fastmp.distributed.collectives import gather_from_group, group_rank, group_size
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.gpt import GPT
from fastmp.nn.kv_cache import KeyValueCache
from fastmp.nn.moe.layer import MoELayer
from fastmp.nn.moe.lossless import LosslessForwards
from fastmp.nn.segment import BoundSegment, Tensors

__all__ = ["NO_TOKEN", "Decoder"]

NO_TOKEN = -1  # of a row whose largest logit is no finite number

Choose = Callable[[Tensor, Tensor], Tensor]
Work = Callable[..., Tensors]


class Decoder:
    """Continues the rows of one batch: `prefill` once, then `steps` for further tokens.

    Args:
        model: a GPT in evaluation mode, or this rank's only stage of one, over `groups`.
        places: the most tokens that a row will have before its last one is chosen.
        choose: from logits (B, vocab_size) and random numbers (B,) the tokens (B,).
        vocab_size: ids that may be chosen; None: those of the model.
        backend: captures the second step, and replays it from then on; None: every step runs eagerly.

    All ranks of a tensor-parallel and of a pipeline group have the same rows, and return the same tokens:
    the ranks of the last stage choose, each from the logits of all of them. Stages work one after the other.
    A row whose largest logit is not finite gets NO_TOKEN.

    ValueError for context or sequence parallelism, and for more places than the model has positions.
    """

    def __init__(
        self,
        model: GPT,
        groups: ParallelGroups,
        *,
        places: int,
        choose: Choose,
        vocab_size: int | None = None,
        backend: Backend | None = None,
    ) -> None:
        if group_size(groups.cp) > 1 or model.sequence_parallel:
            raise ValueError(
                "generate: needs a model without context and sequence parallelism, got "
                f"cp {group_size(groups.cp)} and sequence_parallel={model.sequence_parallel}"
            )
        if places > model.config.max_seq_len:
            raise ValueError(
                f"generate: {places} tokens are more than max_seq_len {model.config.max_seq_len}"
            )
        self.model, self.choose, self.backend = model, choose, backend
        self.vocab_size = model.config.vocab_size if vocab_size is None else vocab_size
        self.pp, self.tp = groups.pp, groups.tp
        self.cache = KeyValueCache(places)
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
                    layer.reserve(seq_len, rows)

    @torch.no_grad()
    def prefill(self, prompts_BS: Tensor, lengths_B: Tensor, points_B: Tensor) -> Tensor:
        """Return the first new token (B,) of each row, from prompts (B, S), int64, padded on the right.

        lengths_B: int64, of the prompts. points_B: random numbers, or anything that `choose` takes.
        """
        B, S = prompts_BS.shape
        self._tokens_B, self._positions_B = torch.zeros_like(lengths_B), lengths_B.clone()
        self._points_B, self._longest = points_B.clone(), S
        self._hidden = self._buffer(1, B)
        given = self._receive(self._buffer(S, B)) if not self.model.stage_spec.first else None
        hidden_SBH = self.model.embed(prompts_BS, cache=self.cache) if given is None else given
        hidden_SBH, *_ = self.model.layers(hidden_SBH, cache=self.cache)
        if self.model.stage_spec.last:
            rows_B = torch.arange(B, device=lengths_B.device)
            hidden_SBH = hidden_SBH[lengths_B - 1, rows_B].unsqueeze(0)
        return self._hand_on(*self._end(hidden_SBH, advance=False))

    def step(self, points_B: Tensor) -> Tensor:
        """Return the next token (B,) of each row; the next step may overwrite the tensor."""
        if self._lossless is None or not self._lossless.needed:
            return self._step(points_B, self._parts)
        return self.steps(points_B.unsqueeze(1)).squeeze(1)

    @torch.no_grad()
    def steps(self, points_BN: Tensor) -> Tensor:
        """Return the next N tokens (B, N) of each row; the host waits only where experts may drop tokens."""
        if self._lossless is None or not self._lossless.needed:
            return self._steps(points_BN, self._parts)
        state, longest = (self._tokens_B.clone(), self._positions_B.clone()), self._longest
        with self._lossless.limited():
            before = self._lossless.count()
            chosen_BN = self._steps(points_BN, self._parts)
            dropped = self._lossless.dropped_since(before)
        if not int(dropped):
            return chosen_BN
        # Later keys and values overwrite those of the void steps.
        self._tokens_B.copy_(state[0])
        self._positions_B.copy_(state[1])
        self._longest = longest
        return self._steps(points_BN, self._eager_parts)

    def _steps(self, points_BN: Tensor, parts: Sequence[Work]) -> Tensor:
        return torch.stack([self._step(points_B, parts).clone() for points_B in points_BN.unbind(1)], 1)

    @torch.no_grad()
    def _step(self, points_B: Tensor, parts: Sequence[Work]) -> Tensor:
        self._points_B.copy_(points_B)
        self._longest += 1
        if not self.model.stage_spec.first:
            self._receive(self._hidden)
        if not parts:
            hidden_1BH, *_ = self.model.layers(*self._begin(self._longest), cache=self.cache)
            return self._hand_on(*self._end(hidden_1BH))
        return self._hand_on(*_in_turn(parts))

    def _begin(self, columns: int | None = None) -> Tensors:
        """Return the hidden states of the last tokens before this stage's layers."""
        self.cache.follow(self._positions_B, columns)
        if not self.model.stage_spec.first:
            return (self._hidden,)
        return (self.model.embed(self._tokens_B.clamp(min=0).unsqueeze(1), cache=self.cache),)

    def _layer(self, link: BoundSegment, first: bool, *tensors: Tensor) -> Tensors:
        made = link.segment.run(*tensors, **({"cache": self.cache} if first else {}))
        return made[:1] if link.last else made

    def _end(self, hidden_1BH: Tensor, advance: bool = True) -> Tensors:
        """Choose tokens on the last stage, and move on to the next position."""
        if self.model.stage_spec.last:
            logits_BV = gather_from_group(self.model.head(hidden_1BH).squeeze(0), self.tp)
            logits_BV = logits_BV[:, : self.vocab_size]
            chosen_B = self.choose(logits_BV, self._points_B)
            self._tokens_B.copy_(chosen_B.where(logits_BV.amax(-1).isfinite(), NO_TOKEN))
        if advance:
            self._positions_B += 1
        return (hidden_1BH,)

    def _cut(self, backend: Backend) -> None:
        """Make the parts of a step: consecutive capturable segments as graphs, the others eager."""
        links = self.model.layers.bound_segments()
        begins = [True, *(link.last for link in links[:-1])]
        work: list[tuple[bool, Work]] = [
            (True, self._begin),
            *(
                (link.segment.capturable, partial(self._layer, link, first))
                for link, first in zip(links, begins)
            ),
            (True, self._end),
        ]
        for captured, own in groupby(work, lambda each: each[0]):
            functions = [function for _, function in own]
            self._parts.append(_Graphed(functions, backend) if captured else partial(_in_turn, functions))
            self._eager_parts += functions

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
        """Send hidden states to the next stage; return the tokens of the last stage on all of them."""
        if self.pp is not None:
            if not self.model.stage_spec.last:
                dist.send(hidden_SBH.contiguous(), group=self.pp, group_dst=group_rank(self.pp) + 1)
            dist.broadcast(self._tokens_B, group=self.pp, group_src=group_size(self.pp) - 1)
        return self._tokens_B


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
