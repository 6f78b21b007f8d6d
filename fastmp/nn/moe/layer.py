"""The mixture-of-experts layer, as segments that a graph manager can run one by one.

    router, preprocess, shared_experts | dispatch, experts, combine

The first three have fixed shapes and no host-device synchronisation. With expert parallelism by all-to-all,
`preprocess` starts the copy of all ranks' counts to the host, `dispatch` waits for it, and every later shape
depends on the data. With all experts on every rank, replicated or sharded over a tensor-parallel group, and
with a capturable dispatcher such as "symmetric", a CUDA graph can hold all six.

Dropping tokens is for training. In evaluation mode a dispatcher that may drop tokens is replaced by an
all-to-all, so that a token's output depends neither on other tokens nor on the parallel layout. A caller that
reads the number of dropped assignments and repeats such forwards keeps the dispatcher, see `lossless.py`.

Inside the layer, tokens are sharded over the tensor-parallel group. Under sequence parallelism they are
already; otherwise each rank takes its slice of the sequence, the last ranks perhaps less, and the results are
gathered. Attention is sharded over tp-cp-dp, experts over etp-ep-edp, of the same ranks.

S sequence (of this rank under sequence parallelism), B batch, H hidden, T tokens of this rank, E experts, k
chosen of each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from fastmp.config import GPTConfig, MoEConfig
from fastmp.config.dispatchers import DROPLESS, capturable_dispatchers
from fastmp.distributed import streams
from fastmp.distributed.collectives import gather_from_group, group_rank, group_size, split_to_group
from fastmp.nn.moe.activation_stash import ActivationStash, keeps_activations, stashed_experts
from fastmp.nn.moe.dispatchers.dispatcher import Dispatcher, no_compile
from fastmp.nn.moe.dispatchers.factory import make_dispatcher
from fastmp.nn.moe.experts import GroupedExperts, SharedExperts
from fastmp.nn.moe.layer_routing import LayerRouting, Part
from fastmp.nn.moe.router import Router, moe_config
from fastmp.nn.placement import Placement
from fastmp.nn.recompute import once
from fastmp.nn.segment import Segment, SegmentedLayer, Tensors
from fastmp.ops import apply_capacity

__all__ = ["MoELayer"]


class Beside(NamedTuple):
    """Tensors that segments hand on beside tokens or rows; `tensors` flattens them, `of` restores them.

    dispatch: the router's indices and probabilities (T, k), then the tensors of the dispatcher's state.
    aux, counts_E: see `MoELayer`.
    hidden_SBH: the layer's input, from the segment `shared_experts` on the output of the shared expert.
    carried: the tensors of a layer around this one.
    """

    dispatch: Tensors
    aux: Tensor
    counts_E: Tensor
    hidden_SBH: Tensor
    carried: Tensors

    @classmethod
    def of(cls, tensors: Tensors, carried: int) -> Beside:
        end = len(tensors) - carried  # a dispatcher's state may have any number of tensors
        aux, counts_E, hidden_SBH = tensors[end - 3 : end]
        return cls(tensors[: end - 3], aux, counts_E, hidden_SBH, tensors[end:])

    def tensors(self, **changed: Any) -> Tensors:
        dispatch, aux, counts_E, hidden_SBH, carried = self._replace(**changed) if changed else self
        return *dispatch, aux, counts_E, hidden_SBH, *carried


def _run(function: Callable[..., Tensors], count: int, carried: int, *tensors: Tensor) -> Tensors:
    """Run a segment whose own tensors are the first `count`."""
    return function(*tensors[:count], Beside.of(tensors[count:], carried))


class MoELayer(SegmentedLayer):
    """A router, experts and optionally a shared expert, in place of an MLP.

    forward(hidden_SBH) returns

    - the output (S, B, H);
    - `aux` (), the auxiliary losses of this rank's tokens, a sum over tokens to be added to the sum of the
      model's losses; zero in evaluation mode. A tensor-parallel rank has only its part:
      `reduce_from_group(aux, groups.tp)`, once for the sum over all layers, gives the same value on all
      ranks, with the right gradient;
    - `counts` (E,) int32, how many of this rank's tokens chose each expert, before anything is dropped.
      `router.update_expert_bias` takes their sum over microbatches and the ranks of `groups.tp_cp_dp`.

    Segments can carry further tensors after their own, such as the residual of a layer around this one:
    router(hidden, *carried), ..., combine -> (output, aux, counts, *carried); see `segments`.

    Args:
        config: sizes, activation, the `moe` table, and the spread of the initial weights.
        on: experts are sharded over `groups.ep` and `groups.etp`, tokens and the shared expert over
            `groups.tp`. `rng` is for jitter, and for a shared expert with init="sharded".

    `capacity_factor` and `symmetric_capacity` hold while training; in evaluation mode nothing is dropped.

    Attributes:
        dropped_pairs: () int64, (token, expert) assignments of this rank that a dispatcher of limited
            capacity did not send, in all microbatches whose gradient was computed (inside
            `limited_capacity`: in all forwards); None if it sends all.
        dispatcher: the dispatcher of the layer's mode, training or evaluation.
        stash: where experts keep their activations, if the dispatcher receives into symmetric memory; None:
            autograd keeps them. Set by `Trainer`, which reruns the steps that overflow it.
        routing: what `routed` records or replays; None: neither.

    Raises:
        ValueError: ranks do not divide the experts or their hidden units; ranks of an expert group have
            layers of different kinds (the same error on all of them) or rows that the dispatcher does not
            support; in forward, the capacity is less than one token.

    Example:
        >>> moe = MoEConfig(num_experts=8, top_k=2, expert_ffn_hidden_size=32)
        >>> layer = MoELayer(GPTConfig(hidden_size=64, num_heads=4, moe=moe))
        >>> output, aux, counts = layer(torch.randn(8, 2, 64))
        >>> output.shape, int(counts.sum())
        (torch.Size([8, 2, 64]), 32)
    """

    dropped_pairs: Tensor | None

    def __init__(self, config: GPTConfig, on: Placement = Placement()) -> None:
        super().__init__()
        self.moe = moe_config("MoELayer", config)
        self.groups, self.sequence_parallel = on.groups, on.sequence_parallel
        _agree(config, self.moe, on)
        self.router = Router(config, on)
        self.experts = GroupedExperts(config, on)
        self.shared_experts: SharedExperts | None = None
        if self.moe.shared_expert_ffn_hidden_size:
            self.shared_experts = SharedExperts(config, on)
        self._fp8 = on.fp8
        self._dispatcher = self._make_dispatcher(self.moe)
        self._dispatcher.check(torch.empty(0, config.hidden_size, **on.tensor_options))
        self._all_to_all: Dispatcher[Any, Any] | None = None
        self._limited = False  # in evaluation mode, too
        number: Tensor | None = None
        if self._dispatcher.may_drop:
            self._all_to_all = self._make_all_to_all()
            number = torch.zeros((), dtype=torch.int64, device=on.device)
        self.register_buffer("dropped_pairs", number, persistent=False)
        self.stash: ActivationStash | None = None
        self.routing: LayerRouting | None = None

    def _make_all_to_all(self) -> Dispatcher[Any, Any]:
        """Return the dispatcher of this layer with which nothing is dropped and nothing is reserved."""
        ordinary = replace(self.moe, dispatcher=DROPLESS, symmetric_capacity=None, symmetric_overflow="drop")
        return self._make_dispatcher(ordinary)

    def _make_dispatcher(self, moe: MoEConfig) -> Dispatcher[Any, Any]:
        dispatcher = make_dispatcher(moe, self.groups)
        dispatcher.fp8 = self._fp8
        return dispatcher

    @property
    def dispatcher(self) -> Dispatcher[Any, Any]:
        if self.training or self._limited or not self._dispatcher.may_drop:
            return self._dispatcher
        assert self._all_to_all is not None
        return self._all_to_all

    def segments(self, carried: int = 0) -> tuple[Segment, ...]:
        """Return the segments; each takes `carried` tensors after its own, and returns them."""
        run: dict[str, Callable[..., Tensors]] = {
            "router": self._router,
            "preprocess": partial(_run, self._preprocess, 1, carried),
            "shared_experts": partial(_run, self._shared, 1, carried),
            "dispatch": partial(_run, self._dispatch, 1, carried),
            "experts": partial(_run, self._experts, 2, carried),
            "combine": partial(_run, self._combine, 1, carried),
        }
        if self.shared_experts is None:
            del run["shared_experts"]
        spec = self.dispatcher.spec
        why = dict.fromkeys(spec.eager, self._reason()) if spec.eager else {}
        return tuple(
            Segment(name, function, name not in why, why.get(name, ""), name in spec.exchanges)
            for name, function in run.items()
        )

    def _reason(self) -> str:
        """Return why segments must run eagerly."""
        if self.dispatcher is not self._dispatcher:
            return "evaluations drop none, so with a symmetric_capacity they send by all-to-all"
        sizes = "sizes of what other ranks send are known at run time"
        if "preprocess" in self.dispatcher.spec.eager:
            return sizes
        return f"{sizes}, except with {capturable_dispatchers()}"

    def _router(self, hidden_SBH: Tensor, *carried: Tensor) -> Tensors:
        self._capacity(hidden_SBH)  # raises before the router's collectives
        # this TP rank's tokens: (S, B, H), or a slice of S without sequence parallelism
        tokens_SBH = self._own_tokens(hidden_SBH)
        # a recomputation, after the context of `routed`, replays what the forward did
        routing = once(lambda: self.routing)
        part = None if routing is None else self._routing_part(hidden_SBH)
        chosen_SBk = None if routing is None else routing.experts_of(tokens_SBH, self.moe.top_k, part)
        # experts (T, k) and probabilities (T, k) of each token; the all-reduce of losses is deferred
        indices_Tk, probs_Tk, aux, counts_E = self.router(tokens_SBH, late=True, chosen_SBk=chosen_SBk)
        if routing is not None:
            shape = (*tokens_SBH.shape[:2], self.moe.top_k)
            once(lambda: routing.add(indices_Tk.view(shape), part))
        if self.shared_experts is None:  # only its shape is asked for
            hidden_SBH = hidden_SBH.detach()
        return tokens_SBH.flatten(0, 1), indices_Tk, probs_Tk, aux, counts_E, hidden_SBH, *carried

    def _preprocess(self, tokens_TH: Tensor, beside: Beside) -> Tensors:
        indices_Tk, probs_Tk = beside.dispatch
        max_tokens, capacity = self._max_tokens(beside.hidden_SBH), self._capacity(beside.hidden_SBH)
        if capacity is not None:  # drop tokens beyond the capacity of an expert: index -1
            indices_Tk, probs_Tk = apply_capacity(
                indices_Tk, probs_Tk, self.moe.num_experts, max(capacity, 1), self.moe.drop_policy
            )
        state = self.dispatcher.preprocess(indices_Tk, probs_Tk, max_tokens, capacity == 0)
        return tokens_TH, *beside.tensors(dispatch=state.tensors())

    def _shared(self, tokens_TH: Tensor, beside: Beside) -> Tensors:
        assert self.shared_experts is not None
        hidden_SBH = beside.hidden_SBH
        stream = side_stream(hidden_SBH)
        if stream is None:
            return tokens_TH, *beside.tensors(hidden_SBH=self.shared_experts(hidden_SBH))
        # The side stream runs the shared expert while dispatch communicates; `combine` waits for it.
        stream.wait_stream(torch.cuda.current_stream(hidden_SBH.device))
        with torch.cuda.stream(stream):
            output_SBH = self.shared_experts(hidden_SBH)
        if torch.cuda.is_current_stream_capturing():
            # record_stream would keep the memory until the capture ends; this until the output is added
            output_SBH.made_of = hidden_SBH
        else:
            hidden_SBH.record_stream(stream)
        return tokens_TH, *beside.tensors(hidden_SBH=output_SBH)

    def _dispatch(self, tokens_TH: Tensor, beside: Beside) -> Tensors:
        dispatcher = self.dispatcher
        state = dispatcher.prepared.with_tensors(beside.dispatch)
        rows_MH, offsets_L, state = dispatcher.dispatch(tokens_TH, state)
        return rows_MH, offsets_L, *beside.tensors(dispatch=state.tensors())

    def _experts(self, rows_MH: Tensor, offsets_L: Tensor, beside: Beside) -> Tensors:
        dispatcher, stash, exchange = self.dispatcher, self.stash, self.groups.exchange
        if dispatcher.spec.symmetric_memory and keeps_activations(self.experts):
            if stash is not None and exchange is not None:
                balanced = exchange.balanced_rows
                outputs_MH = stashed_experts(self.experts, rows_MH, offsets_L, stash, balanced)
                return outputs_MH, *beside.tensors()
        state = dispatcher.dispatched.with_tensors(beside.dispatch)
        return self.experts(rows_MH, offsets_L, dispatcher.sizes(state)), *beside.tensors()

    def _combine(self, outputs_MH: Tensor, beside: Beside) -> Tensors:
        dispatcher = self.dispatcher
        state = dispatcher.dispatched.with_tensors(beside.dispatch)
        output_TH = dispatcher.combine(outputs_MH, state)
        if self.dropped_pairs is not None and dispatcher.may_drop:
            count = _counted if self.training else _counted_now
            output_TH = count(output_TH, dispatcher.dropped(state), self.dropped_pairs)
        # all-gather over TP, unless under sequence parallelism: (T, H) -> (S, B, H)
        output_SBH = self._all_tokens(output_TH, beside.hidden_SBH)
        if self.shared_experts is not None:
            shared_SBH = beside.hidden_SBH
            stream = side_stream(shared_SBH)
            if stream is not None:
                streams.join(stream, shared_SBH.device)
                if not torch.cuda.is_current_stream_capturing():  # there, the next fork waits for this stream
                    shared_SBH.record_stream(torch.cuda.current_stream(shared_SBH.device))
            output_SBH = output_SBH + shared_SBH
        return output_SBH, beside.aux, beside.counts_E, *beside.carried

    def combine_onto(self, out: Tensor | None, outputs_MH: Tensor, *tensors: Tensor) -> Tensors | None:
        """Run the segment `combine`, with the only tensor that is carried added by the same kernel.

        out: where to write the sum, if it fits. None where the dispatcher or the layer has more to do.
        """
        dispatcher = self.dispatcher
        if not dispatcher.adds_residual or self.shared_experts is not None:
            return None
        beside = Beside.of(tensors, carried=1)
        (residual_SBH,) = beside.carried
        undivided = group_size(self.groups.tp) == 1 or self.sequence_parallel
        if not undivided or residual_SBH.dtype != outputs_MH.dtype:
            return None
        if out is not None and (out.shape, out.dtype) != (residual_SBH.shape, residual_SBH.dtype):
            out = None
        flat_TH = None if out is None else out.view(-1, out.shape[-1]).detach()
        state = dispatcher.dispatched.with_tensors(beside.dispatch)
        total_TH = dispatcher.combine_onto(residual_SBH.flatten(0, 1), flat_TH, outputs_MH, state)
        return total_TH.view(residual_SBH.shape), beside.aux, beside.counts_E

    def reserve(self, seq_len: int, batch_size: int) -> None:
        """Grow symmetric memory to hold hidden states (seq_len, batch_size, H) from the next forward on.

        Call it with the same sizes on all ranks of the expert group. All layers share the memory; where it
        has to grow and graphs hold it, that forward raises ValueError. Other dispatchers ignore the call.
        """
        self.dispatcher.reserve(self._part(seq_len) * batch_size)

    @contextmanager
    def all_to_all(self) -> Iterator[None]:
        """Enter a context that dispatches by all-to-all in place of symmetric memory: nothing is dropped.

        All ranks of the expert group enter it together.
        """
        own = self._dispatcher
        if own.may_drop or own.spec.symmetric_memory:
            if self._all_to_all is None:
                self._all_to_all = self._make_all_to_all()
            self._dispatcher = self._all_to_all
        try:
            yield
        finally:
            self._dispatcher = own

    @contextmanager
    def limited_capacity(self) -> Iterator[None]:
        """Enter a context that keeps a dispatcher of limited capacity in evaluation mode.

        `dropped_pairs` counts in the forward what it drops; if there is anything, the output is void. Call it
        through `fastmp.nn.moe.lossless.LosslessForwards`, which repeats such forwards.
        """
        before, self._limited = self._limited, True
        try:
            yield
        finally:
            self._limited = before

    def _capacity(self, hidden_SBH: Tensor) -> int | None:
        """Return how many tokens an expert takes from one rank, the same on all TP ranks; None: no limit.

        Raises ValueError if it is less than one; where ranks wait for each other it is 0, and all raise
        later.
        """
        moe, tokens = self.moe, self._max_tokens(hidden_SBH)
        if not self.training or moe.capacity_factor is None or not hidden_SBH.numel():
            return None
        share = moe.capacity_factor * tokens * moe.top_k / moe.num_experts
        if share >= 1.0:
            return math.ceil(share)
        if self.dispatcher.spec.eager:  # ranks exchange counts next, and the rejection with them
            return 0
        raise ValueError(
            f"MoELayer: a capacity of {share:g} tokens is less than one: capacity_factor "
            f"{moe.capacity_factor:g} x {tokens} tokens x top_k {moe.top_k} / {moe.num_experts} experts"
        )

    def _max_tokens(self, hidden_SBH: Tensor) -> int:
        """Return the most tokens that a TP rank has."""
        return self._part(hidden_SBH.shape[0]) * hidden_SBH.shape[1]

    def _part(self, S: int) -> int:
        """Return the positions of a TP rank; if TP does not divide S, the last ranks have fewer."""
        return S if self.sequence_parallel else -(-S // group_size(self.groups.tp))

    def _routing_part(self, hidden_SBH: Tensor) -> Part:
        """Return the place of this rank's tokens in the sequence (of this CP rank)."""
        S = hidden_SBH.shape[0] * (group_size(self.groups.tp) if self.sequence_parallel else 1)
        return Part(self.groups.tp, S, hidden_SBH.shape[0] if self.sequence_parallel else self._part(S))

    def _own_tokens(self, hidden_SBH: Tensor) -> Tensor:
        size, S = group_size(self.groups.tp), hidden_SBH.shape[0]
        if size == 1 or self.sequence_parallel:
            return hidden_SBH
        part = self._part(S)
        if S % size:
            hidden_SBH = F.pad(hidden_SBH, (0, 0, 0, 0, 0, part * size - S))
        tokens_SBH = split_to_group(hidden_SBH, self.groups.tp, dim=0)
        return tokens_SBH[: max(S - group_rank(self.groups.tp) * part, 0)]

    def _all_tokens(self, output_TH: Tensor, hidden_SBH: Tensor) -> Tensor:
        size, (S, B, H) = group_size(self.groups.tp), hidden_SBH.shape
        missing = self._max_tokens(hidden_SBH) - output_TH.shape[0]
        if missing < 0:  # other ranks have more tokens
            output_TH = output_TH[:missing]
        if size == 1 or self.sequence_parallel:
            return output_TH.view(S, B, H)
        if missing > 0:
            output_TH = F.pad(output_TH, (0, 0, 0, missing))
        return gather_from_group(output_TH, self.groups.tp, dim=0)[: S * B].view(S, B, H)

    def extra_repr(self) -> str:
        return f"dispatcher={self.moe.dispatcher}, capacity_factor={self.moe.capacity_factor}"


class _Counted(Function):
    """The identity; backward adds `number` to `total`, once a microbatch, recomputed or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(number)
        ctx.total = total
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (number,) = ctx.saved_tensors
        ctx.total.add_(number)
        return grad, None, None


_counted = no_compile(_Counted.apply)


@no_compile
def _counted_now(x: Tensor, number: Tensor, total: Tensor) -> Tensor:
    """Return `x`, and add `number` to `total`."""
    total.add_(number)
    return x


def side_stream(x: Tensor) -> torch.cuda.Stream | None:
    """Return the stream for the shared expert; None on a CPU and while compiling."""
    return streams.side_stream(x.device) if x.is_cuda and not torch.compiler.is_compiling() else None


def _agree(config: GPTConfig, moe: MoEConfig, on: Placement) -> None:
    """Raise ValueError on all ranks of an expert group if their layers are of different kinds.

    Otherwise a rank would wait for rows that are never sent.
    """
    group = on.groups.etp_ep
    if group is None:
        return
    dtype = torch.get_default_dtype() if on.dtype is None else on.dtype
    shape = {"hidden_size": config.hidden_size, "activation": config.activation, "dtype": str(dtype)}
    own = {**shape, **asdict(moe)}
    everyones: list[dict[str, Any]] = [{}] * group.size()
    dist.all_gather_object(everyones, own, group=group)
    for name, value in everyones[0].items():
        values = [other[name] for other in everyones]
        if any(other != value for other in values):
            raise ValueError(f"MoELayer: ranks of one expert group have different {name}: {values}")
