"""A mixture of experts in place of an MLP, as segments that a graph manager can run one by one.

    router, preprocess, shared_experts | dispatch, experts, combine

The first three have fixed shapes and never wait for the device. With experts on several ranks, `dispatch`
begins with the one copy to the host that tells how many rows go where, and what follows it has shapes that
depend on the data. With all of them on every rank, whole or divided over a tensor-parallel group, all six can
be captured.

Inside the layer tokens are divided over the tensor-parallel group. Under sequence parallelism they are so
already; otherwise a rank takes its part of the sequence, the last ranks perhaps less, and the results are
gathered. Attention runs on tp-cp-dp, experts on etp-ep-edp, over the same ranks.

S sequence (of this rank under sequence parallelism), B batch, H hidden, T tokens of this rank, E experts, k
chosen of each token.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fastmp.config import GPTConfig
from fastmp.nn.moe.dispatch import make_dispatcher
from fastmp.nn.moe.experts import GroupedExperts, SharedExperts
from fastmp.nn.moe.router import Router, moe_config
from fastmp.nn.segment import Segment, SegmentedLayer, Tensors
from fastmp.ops import apply_capacity
from fastmp.parallel.collectives import gather_from_group, group_rank, group_size, split_to_group
from fastmp.parallel.groups import ParallelGroups
from fastmp.parallel.rng import RngTracker

__all__ = ["MoELayer"]


class MoELayer(SegmentedLayer):
    """Router, experts and, on request, a shared expert: hidden states in, hidden states out.

    forward(hidden_SBH) returns

    - the output (S, B, H);
    - `aux` (), the auxiliary losses of this rank's tokens, a sum over tokens to be added to the sum of the
      model's losses. A tensor-parallel rank has its part only: `reduce_from_group(aux, groups.tp)`, once for
      the sum over all layers, gives a value that is equal on the ranks, with the right gradient. Zero in
      evaluation mode;
    - `counts` (E,) int32, how many of this rank's tokens chose each expert, before anything is dropped. Added
      over microbatches and the ranks of `groups.tp_cp_dp` it is what `router.update_expert_bias` takes.

    Each segment takes further tensors after its own and hands them on, so that a layer around this one can
    carry its residual through: router(hidden, *carried), ..., combine -> (output, aux, counts, *carried).

    Args:
        config: sizes, activation, the `moe` table, and the spread of the initial weights.
        groups: process groups of this rank; `ParallelGroups.alone()` without other ranks.
        rng: generator states, for jitter and for shared experts drawn as shards.
        sequence_parallel: input and output are this rank's part of the sequence, (S/TP, B, H).
        init: "full" (bitwise the same on any layout) or "sharded", as in the parallel layers.

    Capacity holds while training; in evaluation mode nothing is dropped.

    Raises ValueError where ranks do not divide the experts or their hidden units, where the ranks that share
    experts have layers of another kind (the same error on all of them), and in forward for a capacity of
    less than one token.
    """

    def __init__(
        self,
        config: GPTConfig,
        *,
        groups: ParallelGroups,
        rng: RngTracker | None = None,
        sequence_parallel: bool = False,
        init: str = "full",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.moe = moe_config("MoELayer", config)
        self.groups, self.sequence_parallel = groups, sequence_parallel
        _agree(config, groups, torch.get_default_dtype() if dtype is None else dtype)
        place = {"device": device, "dtype": dtype}
        self.router = Router(config, groups=groups, rng=rng, **place)
        self.experts = GroupedExperts(config, ep_group=groups.ep, etp_group=groups.etp, init=init, **place)
        self.shared_experts = None
        if self.moe.shared_expert_ffn_hidden_size:
            self.shared_experts = SharedExperts(
                config, group=self.tp_group, sequence_parallel=sequence_parallel, rng=rng, init=init, **place
            )
        self.dispatcher = make_dispatcher(self.moe, groups)

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        return self.groups.tp

    def segments(self) -> tuple[Segment, ...]:
        run = {
            "router": self._router,
            "preprocess": self._preprocess,
            **({} if self.shared_experts is None else {"shared_experts": self._shared}),
            "dispatch": self._dispatch,
            "experts": self._experts,
            "combine": self._combine,
        }
        why = dict.fromkeys(self.dispatcher.eager, "sizes of what other ranks send are known at run time")
        return tuple(
            Segment(name, function, capturable=name not in why, reason=why.get(name, ""))
            for name, function in run.items()
        )

    # From segment to segment, before what is carried: the dispatcher's tensors, aux, counts, and the layer's
    # input, in whose place the output of the shared expert goes.

    def _router(self, hidden_SBH: Tensor, *carried: Tensor) -> Tensors:
        self._capacity(hidden_SBH)  # an error comes before the router's collectives
        tokens_SBH = self._own_tokens(hidden_SBH)
        indices_Tk, probs_Tk, aux, counts_E = self.router(tokens_SBH)
        return tokens_SBH.flatten(0, 1), indices_Tk, probs_Tk, aux, counts_E, hidden_SBH, *carried

    def _preprocess(self, tokens_TH: Tensor, indices_Tk: Tensor, probs_Tk: Tensor, *rest: Tensor) -> Tensors:
        room, capacity = self._room(rest[2]), self._capacity(rest[2])
        if capacity is not None:
            indices_Tk, probs_Tk = apply_capacity(
                indices_Tk, probs_Tk, self.moe.num_experts, max(capacity, 1), self.moe.drop_policy
            )
        return tokens_TH, *self.dispatcher.preprocess(indices_Tk, probs_Tk, room, capacity == 0), *rest

    def _shared(self, *tensors: Tensor) -> Tensors:
        before = tensors[: self._shared_place]
        hidden_SBH, *carried = tensors[self._shared_place :]
        stream = side_stream(hidden_SBH)
        if stream is None:
            return *before, self.shared_experts(hidden_SBH), *carried
        # On a stream of its own the shared expert fills the device while rows travel; `combine` joins it.
        stream.wait_stream(torch.cuda.current_stream(hidden_SBH.device))
        with torch.cuda.stream(stream):
            output_SBH = self.shared_experts(hidden_SBH)
        hidden_SBH.record_stream(stream)
        return *before, output_SBH, *carried

    @property
    def _shared_place(self) -> int:
        """Where the layer's input is between preprocess and dispatch: after tokens, plan, aux and counts."""
        return 1 + self.dispatcher.num_planned + 2

    def _dispatch(self, *tensors: Tensor) -> Tensors:
        own = 1 + self.dispatcher.num_planned
        return *self.dispatcher.dispatch(*tensors[:own]), *tensors[own:]

    def _experts(self, rows_MH: Tensor, offsets_L: Tensor, *rest: Tensor) -> Tensors:
        sizes = self.dispatcher.sizes(*rest[: self.dispatcher.num_kept])
        return self.experts(rows_MH, offsets_L, sizes), *rest

    def _combine(self, *tensors: Tensor) -> Tensors:
        own = 1 + self.dispatcher.num_kept
        aux, counts_E, hidden_SBH, *carried = tensors[own:]
        output_TH = self.dispatcher.combine(*tensors[:own])
        output_SBH = self._all_tokens(output_TH, hidden_SBH)
        if self.shared_experts is not None:
            stream = side_stream(hidden_SBH)
            if stream is not None:
                current = torch.cuda.current_stream(hidden_SBH.device)
                current.wait_stream(stream)
                hidden_SBH.record_stream(current)
            output_SBH = output_SBH + hidden_SBH
        return output_SBH, aux, counts_E, *carried

    def _capacity(self, hidden_SBH: Tensor) -> int | None:
        """Tokens that an expert takes of one rank, the same on all TP ranks; None for all there are.

        ValueError for less than one. Where ranks wait for each other it is 0, and all of them will raise.
        """
        moe, tokens = self.moe, self._room(hidden_SBH)
        if not self.training or moe.capacity_factor is None or not hidden_SBH.numel():
            return None
        share = moe.capacity_factor * tokens * moe.top_k / moe.num_experts
        if share >= 1.0:
            return math.ceil(share)
        if self.dispatcher.eager:  # the next that ranks do is to tell each other their counts
            return 0
        raise ValueError(
            f"MoELayer: a capacity of {share:g} tokens is less than one: capacity_factor "
            f"{moe.capacity_factor:g} x {tokens} tokens x top_k {moe.top_k} / {moe.num_experts} experts"
        )

    def _room(self, hidden_SBH: Tensor) -> int:
        """The most tokens that a TP rank has."""
        return self._part(hidden_SBH.shape[0]) * hidden_SBH.shape[1]

    def _part(self, S: int) -> int:
        """Positions of the sequence that are a rank's, except on the last ranks of a length that TP does not
        divide."""
        return S if self.sequence_parallel else -(-S // group_size(self.tp_group))

    def _own_tokens(self, hidden_SBH: Tensor) -> Tensor:
        size, S = group_size(self.tp_group), hidden_SBH.shape[0]
        if size == 1 or self.sequence_parallel:
            return hidden_SBH
        part = self._part(S)
        if S % size:
            hidden_SBH = F.pad(hidden_SBH, (0, 0, 0, 0, 0, part * size - S))
        tokens_SBH = split_to_group(hidden_SBH, self.tp_group, dim=0)
        return tokens_SBH[: max(S - group_rank(self.tp_group) * part, 0)]

    def _all_tokens(self, output_TH: Tensor, hidden_SBH: Tensor) -> Tensor:
        size, (S, B, H) = group_size(self.tp_group), hidden_SBH.shape
        missing = self._room(hidden_SBH) - len(output_TH)
        if missing < 0:  # other ranks have more tokens
            output_TH = output_TH[:missing]
        if size == 1 or self.sequence_parallel:
            return output_TH.view(S, B, H)
        if missing > 0:
            output_TH = F.pad(output_TH, (0, 0, 0, missing))
        return gather_from_group(output_TH, self.tp_group, dim=0)[: S * B].view(S, B, H)

    def extra_repr(self) -> str:
        return f"dispatcher={self.moe.dispatcher}, capacity_factor={self.moe.capacity_factor}"


def side_stream(x: Tensor) -> torch.cuda.Stream | None:
    """The stream for what may run beside the current one; None where there is none, or work is recorded for
    later: a graph has to end with all its streams joined."""
    if not x.is_cuda or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return None
    return _stream(x.device)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _agree(config: GPTConfig, groups: ParallelGroups, dtype: torch.dtype) -> None:
    """Refuse layers of different kinds on ranks that share experts, on all of them and before any rank waits
    for rows that will not come."""
    group = groups.etp_ep
    if group is None:
        return
    shape = {"hidden_size": config.hidden_size, "activation": config.activation, "dtype": str(dtype)}
    own = {**shape, **asdict(config.moe)}
    everyones: list[dict] = [{}] * group.size()
    dist.all_gather_object(everyones, own, group=group)
    for name, value in everyones[0].items():
        values = [other[name] for other in everyones]
        if any(other != value for other in values):
            raise ValueError(f"MoELayer: ranks of one expert group have different {name}: {values}")
