"""Gradients in contiguous buffers: what data parallelism reduces and what the optimizer reads.

Every parameter gets `param.main_grad`, a view of a flat buffer in which microbatches accumulate: in float32
(float64 for float64 parameters), or in the parameters' own 16 bits if asked. The backward passes of linear
layers, experts, routers and the fused loss add the gradients of their weights there by themselves, not
rounded to the dtype of the weight. A hook adds every other gradient as soon as autograd has it and frees
`param.grad`. Where parameters lie is planned by `fastmp.optim.flat_layout`: in buckets, in reverse order of
the model. A bucket is reduced once a step, as soon as the last gradient in it has come: reduce-scattered, so
that each rank has the sums of its own shard, or all-reduced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fastmp.config.training import BUCKET_SIZE, BUCKET_UNIT
from fastmp.distributed.collectives import all_reduce_, group_rank, group_size, reduce_scatter_
from fastmp.distributed.streams import beside
from fastmp.ops import first_not_finite
from fastmp.optim.flat_layout import (
    BucketLayout,
    Buffer,
    ParamSpec,
    fill_order,
    plan_buffers,
)
from fastmp.tensor_parallel.attributes import HookTraits, mark_hook, parallel_attributes

__all__ = ["FlatBuffer", "GradBuffer", "is_vector", "main_dtype", "main_grad", "param_spec"]


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients accumulate and master weights live: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def main_grad(param: Parameter) -> Tensor:
    """The view of its buffer in which the gradient of `param` accumulates."""
    return param.main_grad  # type: ignore[attr-defined]


def is_vector(param: Parameter) -> bool:
    """Whether `param` is a vector or a scalar, like a bias; experts have a vector for each expert."""
    return param.ndim - parallel_attributes(param).expert_parallel < 2


def param_spec(param: Parameter, tp_group: dist.ProcessGroup | None, cost: int = 0) -> ParamSpec:
    """What decides where `param` lies, from its marks: tables that stages share have buckets of their own.

    cost: see `ParamSpec`.
    """
    marks = parallel_attributes(param)
    return ParamSpec(
        param.numel(),
        str(param.dtype).removeprefix("torch."),
        experts=marks.expert_parallel,
        partial=marks.sequence_parallel and group_size(tp_group) > 1,
        own_bucket=marks.pipeline_shared,
        cost=cost,
    )


class FlatBuffer:
    """The parameters of one kind and their gradients, in the places that a `Buffer` gives them.

    plan: the plan. parameters: {name: parameter}. dtype: of the gradients. group: the ranks that share the
    buffer, or hold it alike; None: this rank alone.

    Attributes: `grad` (layout.size,), of which every `main_grad` is a view; `rank`, the number of this one
    among those that share the buffer, 0 where all hold all of it; `shards`, where this rank's part of each
    bucket lies; `pieces`, what it has of each parameter, and `own` {name: the gradient of that, flat}.
    """

    def __init__(
        self,
        plan: Buffer,
        parameters: dict[str, Parameter],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.plan, self.parameters, self.group = plan, parameters, group
        self.rank = group_rank(group) if self.layout.num_ranks > 1 else 0
        device = next(iter(parameters.values())).device
        self.grad = torch.zeros(self.layout.size, dtype=dtype, device=device)
        for view, param in zip(self.views(self.grad), parameters.values(), strict=True):
            param.grad = None
            param.main_grad = view  # type: ignore[attr-defined]
        self.shards = self.layout.shards(self.rank)
        self.pieces = self.layout.pieces(self.rank)
        self.own = {name: self.grad[slice(*piece.global_range)] for name, piece in self.pieces.items()}

    @property
    def layout(self) -> BucketLayout:
        return self.plan.layout

    def views(self, flat: Tensor) -> list[Tensor]:
        """The view of `flat`, as large as the buffer, at each parameter's place, with its shape and strides.

        Be they transposed or channels-last: fused kernels go by address.
        """
        ranges, params = self.layout.ranges, self.parameters
        return [flat[slice(*ranges[name])].as_strided(p.shape, p.stride()) for name, p in params.items()]

    def bucket(self, number: int) -> Tensor:
        """The gradients of a bucket."""
        bucket = self.layout.buckets[number]
        return self.grad[bucket.start : bucket.end]

    def start_reduce(self, number: int) -> dist.Work | None:
        """Start to sum a bucket over the group."""
        if group_size(self.group) == 1 or not self.bucket(number).numel():
            return None
        reduce = reduce_scatter_ if self.layout.num_ranks > 1 else all_reduce_
        return reduce(self.bucket(number), self.group, overlap=True)


class GradBuffer:
    """Main gradients of `named_parameters` and their sums over ranks.

    named_parameters: (name, parameter) pairs, as from `module.named_parameters()`. Parameters that do not
        require a gradient are left out; a parameter that appears twice (tied weights) has one place under
        its first name.
    dp_group: ranks that hold the same parameters and saw other tokens (data and context parallel); None for
        this rank alone. Gradients are summed over it, except those of experts.
    tp_group: the tensor-parallel group, over which parameters marked `sequence_parallel` are summed: each
        rank saw its part of the sequence only, so its gradient of a replicated parameter is a partial sum.
    edp_group: ranks that hold the same experts; parameters marked `expert_parallel` are summed over it.
    shard: each rank of `dp_group` or `edp_group` gets the sums of its own part of each bucket (ZeRO-1); else
        every rank gets all sums.
    bucket_size: elements after which a bucket is full. bucket_unit: its size is a multiple of that.
    grad_dtype: the dtype of gradients of 16-bit parameters; None: float32.
    overlap: whether buckets are reduced while backward runs, see below.
    cost: (name, parameter) -> the cost of its update where one rank must own all of it, 0 where it may be
        cut. `Muon` needs one, `muon.update_cost`; None: all may be cut.

    With `overlap`, a bucket is sent once its gradients are complete. How many arrive in a step for each
    parameter is counted in the first step between `zero` and `reduce`, in which nothing overlaps; every
    further step must have as many, so the number of microbatches cannot vary. Buckets are sent in one order,
    the same on all ranks.

    Attributes: `parameters` {name: parameter}, `flats` the buffers, `order` in which backward fills their
    buckets, as (buffer, bucket). A parameter without a gradient in a step keeps a main gradient of zero.

    Raises ValueError for a parameter that already has a GradBuffer or leaves gaps in memory, for parameters
    of one kind on two devices, and for a `grad_dtype` that is neither float32 nor the parameters' own.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        *,
        dp_group: dist.ProcessGroup | None = None,
        tp_group: dist.ProcessGroup | None = None,
        edp_group: dist.ProcessGroup | None = None,
        shard: bool = False,
        bucket_size: int = BUCKET_SIZE,
        bucket_unit: int = BUCKET_UNIT,
        grad_dtype: torch.dtype | None = None,
        overlap: bool = False,
        cost: Callable[[str, Parameter], int] | None = None,
    ) -> None:
        self.tp_group, self.shard, self.overlap = tp_group, shard, overlap
        self.parameters = _unique_trainable(named_parameters)
        plans = plan_buffers(
            {
                name: param_spec(param, tp_group, 0 if cost is None else cost(name, param))
                for name, param in self.parameters.items()
            },
            num_ranks=group_size(dp_group) if shard else 1,
            num_expert_ranks=group_size(edp_group) if shard else 1,
            bucket_size=bucket_size,
            unit=bucket_unit,
        )
        self.flats: list[FlatBuffer] = []
        for plan in plans:
            members = {name: self.parameters[name] for name in plan.layout.ranges}
            dtype = _grad_dtype(members, grad_dtype)
            self.flats.append(FlatBuffer(plan, members, dtype, edp_group if plan.experts else dp_group))
        self.order = fill_order(plans, list(self.parameters))
        self._hooks = [p.register_post_accumulate_grad_hook(_accumulate) for p in self.parameters.values()]
        self._readiness = GradReadiness(self.flats, self.order, self._start)
        if self.communicates:
            self._hooks += self._readiness.hooks()
        self._works: list[dist.Work] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # from which buckets are sent
        self._compute: dict[torch.device, torch.cuda.Stream] = {}  # on which the step runs

    @property
    def communicates(self) -> bool:
        """Whether there are buckets to sum over ranks."""
        return any(group_size(flat.group) > 1 for flat in self.flats)

    def zero(self) -> None:
        """Set all main gradients to zero: once at the start of a step."""
        self._wait()  # for what a step that failed has left
        for flat in self.flats:
            flat.grad.zero_()
            if flat.grad.is_cuda:
                self._begin_on(flat.grad.device)
        self._readiness.begin(self.overlap)

    def _begin_on(self, device: torch.device) -> None:
        """Note the stream of the step; a capture that holds all of it has to know those beside it, too."""
        self._compute[device] = torch.cuda.current_stream(device)
        for other in beside(device):
            other.wait_stream(self._compute[device])

    def recount(self) -> None:
        """Count gradients anew in the next step: their number changes where a model is run in another way."""
        self._readiness.forget()

    def reduce(self) -> None:
        """Sum over ranks, once a step after the last backward. Every rank of all groups calls it."""
        for at in self._readiness.end():
            self._start(at)
        self._wait()

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def _start(self, at: tuple[int, int]) -> None:
        flat, number = self.flats[at[0]], at[1]
        with self._behind_gradients(flat.grad.device):
            if flat.plan.partial and self.tp_group is not None:
                all_reduce_(flat.bucket(number), self.tp_group)
            work = flat.start_reduce(number)
        if work is not None:
            self._works.append(work)

    def _behind_gradients(self, device: torch.device) -> AbstractContextManager:
        """Let what a GPU is given inside wait for all gradients so far, of every stream.

        Autograd makes the current stream wait for gradients that it is handed, but not for those that a
        product on another stream has added to `main_grad` by itself; and the current stream, of the last
        gradient, may be one beside compute. Compute itself does not wait here.
        """
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream, current = self._streams[device], torch.cuda.current_stream(device)
        for other in (self._compute.get(device, current), current, *beside(device)):
            stream.wait_stream(other)
        return torch.cuda.stream(stream)

    def own(self, param: Parameter) -> Tensor:
        """The part of a parameter's main gradient that this rank has the sum of after `reduce`, flat."""
        for flat in self.flats:
            for name, each in flat.parameters.items():
                if each is param:
                    return flat.own.get(name, flat.grad[:0])
        raise ValueError(f"GradBuffer.own: a parameter of shape {tuple(param.shape)} is not in the buffer")

    def first_not_finite(self, wanted: Tensor) -> Tensor:
        """Find, where the flag `wanted` is set, the first element of each buffer that is not finite.

        Call it after `reduce` and before `zero`. Returns (buffers,) int64 on the device, the argument of
        `first_nonfinite_param`.
        """
        return torch.stack([first_not_finite(flat.grad, wanted) for flat in self.flats])

    def first_nonfinite_param(self, places: list[int]) -> tuple[str, bool] | None:
        """Name the parameter nearest to the loss among the `places` that `first_not_finite` has found.

        Returns (name, whether this rank's own gradient was not finite): where the element lies in this rank's
        shard, it is a sum over ranks, and another may be the cause. None: all were finite.
        """
        found = []
        for flat, place in zip(self.flats, places, strict=True):
            for name, (start, end) in flat.layout.ranges.items():
                if start <= place < end:
                    summed = any(first <= place < last for first, last in flat.shards)
                    found.append((name, not summed or group_size(flat.group) == 1))
        order = list(self.parameters)
        return max(found, key=lambda each: order.index(each[0]), default=None)

    def remove_hooks(self) -> None:
        """Take hooks and `param.main_grad` off the parameters: gradients go to `param.grad` again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for param in self.parameters.values():
            if hasattr(param, "main_grad"):
                del param.main_grad


class GradReadiness:
    """Counts the gradients that arrive in a step, and says which buckets are complete.

    A bucket is started once all before it in `order` are, so that ranks agree on the order.
    """

    def __init__(
        self,
        flats: list[FlatBuffer],
        order: list[tuple[int, int]],
        start: Callable[[tuple[int, int]], None],
    ) -> None:
        self._flats, self._order, self._start = flats, order, start
        self._where: dict[str, tuple[int, int]] = {}
        for at in order:
            for name in flats[at[0]].layout.buckets[at[1]].names:
                self._where[name] = at
        self._expected: dict[str, int] = {}  # by parameter; empty until a step has been counted
        self._counts = dict.fromkeys(self._where, 0)
        self._missing: dict[tuple[int, int], int] = {}  # gradients of each bucket; empty: nothing overlaps
        self._started = 0  # buckets of `order`

    def hooks(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Register a hook behind each accumulated gradient, also those that an op or a graph has added."""
        return [
            param.register_post_accumulate_grad_hook(self._hook(name))
            for flat in self._flats
            for name, param in flat.parameters.items()
        ]

    def _hook(self, name: str) -> Callable[[Parameter], None]:
        counts, at = self._counts, self._where[name]
        # torch keeps hooks where no garbage collector looks: one that kept the buffer, which has the
        # parameter, would keep both for ever.
        weak = weakref.ref(self)

        def arrived(param: Parameter) -> None:
            counts[name] += 1
            arrivals = weak()
            if arrivals is not None and arrivals._missing:
                arrivals._note(name, at)

        return mark_hook(arrived, HookTraits(in_step=True))

    def forget(self) -> None:
        """Expect nothing until a step has been counted again."""
        self._expected = {}

    def begin(self, overlap: bool) -> None:
        """Begin a step."""
        self._counts.update(dict.fromkeys(self._counts, 0))
        self._started, self._missing = 0, {}
        if overlap and self._expected:
            for name, number in self._expected.items():
                at = self._where[name]
                self._missing[at] = self._missing.get(at, 0) + number

    def _note(self, name: str, at: tuple[int, int]) -> None:
        self._missing[at] -= 1
        if self._counts[name] > self._expected[name]:
            raise ValueError(
                f"GradBuffer: parameter {name!r} got its gradient number {self._counts[name]} of a step; the "
                f"first step had {self._expected[name]}, after which it is sent. With overlap=True all steps "
                "need as many; where they vary, use overlap=False (optimizer.overlap of a recipe)"
            )
        while self._started < len(self._order) and not self._missing[self._order[self._started]]:
            self._started += 1
            self._start(self._order[self._started - 1])

    def end(self) -> list[tuple[int, int]]:
        """End the step; the buckets that are still to be started."""
        if not self._expected and any(self._counts.values()):
            self._expected = dict(self._counts)
        rest, self._started, self._missing = self._order[self._started :], 0, {}
        self._counts.update(dict.fromkeys(self._counts, 0))
        return rest


def _accumulate(param: Parameter) -> None:
    if param.grad is not None:  # else an op has added the gradient to main_grad by itself
        main_grad(param).add_(param.grad)
        param.grad = None


# It works on tensors alone, so a captured backward may contain it.
mark_hook(_accumulate, HookTraits(in_graph=True, in_step=True))


def _grad_dtype(members: dict[str, Parameter], wanted: torch.dtype | None) -> torch.dtype:
    """The dtype of the gradients of parameters of one dtype, which must be on one device."""
    (first_name, first), *others = members.items()
    for name, param in others:
        if param.device != first.device:
            raise ValueError(
                f"GradBuffer: parameter {name!r} is on {param.device}, {first_name!r} on {first.device}"
            )
    if wanted is None or first.dtype.itemsize > 2:
        return main_dtype(first.dtype)
    if wanted not in (torch.float32, first.dtype):
        raise ValueError(
            f"GradBuffer: grad_dtype is {wanted}, but parameter {first_name!r} is {first.dtype}; give "
            "torch.float32 or the parameters' own"
        )
    return wanted


def _unique_trainable(named_parameters: Iterable[tuple[str, Parameter]]) -> dict[str, Parameter]:
    unique: dict[str, Parameter] = {}
    seen: set[int] = set()
    for name, param in named_parameters:
        if id(param) in seen or not param.requires_grad:
            continue
        if not torch.ops.aten.is_non_overlapping_and_dense(param):
            raise ValueError(
                f"GradBuffer: parameter {name!r} of shape {tuple(param.shape)} and strides {param.stride()} "
                "leaves gaps in memory; make it contiguous"
            )
        if hasattr(param, "main_grad"):
            raise ValueError(
                f"GradBuffer: parameter {name!r} is already in one; call its remove_hooks() first"
            )
        if hasattr(param, "placements"):
            raise ValueError(
                f"GradBuffer: parameter {name!r} is a DTensor, as fully_shard makes them, which sums "
                "gradients by itself; see docs/fsdp2.md"
            )
        seen.add(id(param))
        unique[name] = param
    return unique
