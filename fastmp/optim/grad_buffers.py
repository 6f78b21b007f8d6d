"""Main gradients in flat buffers, reduced over data-parallel ranks bucket by bucket during backward.

Every parameter gets `param.main_grad`, as in Megatron-LM: a view of a flat buffer in which microbatches
accumulate, in float32 (float64 for float64 parameters) or, if asked, in the parameters' own 16 bits.

1. The wgrad GEMMs of linear layers, experts, routers and the fused loss add to `main_grad` themselves, not
   rounded to the dtype of the weight. A hook adds every other gradient when autograd has it, and frees
   `param.grad`.
2. A second hook counts. When the last gradient of a bucket has arrived, and all buckets before it in `order`
   are sent, the bucket is sent: all-reduced over the tensor-parallel group if its gradients are partial sums,
   then reduce-scattered (ZeRO-1) or all-reduced over the data-parallel group. That happens on a stream of its
   own, which waits for all streams that compute gradients; compute does not wait.
3. `reduce` sends the rest and makes the current stream wait for all buckets.

`fastmp.optim.flat_layout` plans the places of parameters: in buckets, in reverse order of the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fastmp.config.training import BUCKET_SIZE, BUCKET_UNIT
from fastmp.distributed.collectives import all_reduce_, group_rank, group_size, reduce_scatter_
from fastmp.distributed.streams import beside
from fastmp.ops import first_not_finite
from fastmp.ops.wgrad import FirstGradient, add_gradient
from fastmp.optim.flat_layout import (
    BucketLayout,
    Buffer,
    ParamSpec,
    fill_order,
    plan_buffers,
)
from fastmp.tensor_parallel.attributes import HookTraits, mark_hook, parallel_attributes
from fastmp.tensor_parallel.fp8_linear import QuantizedWeight

__all__ = ["FlatBuffer", "GradBuffer", "is_vector", "main_dtype", "main_grad", "param_spec"]


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of main gradients and master weights: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def main_grad(param: Parameter) -> Tensor:
    """Return the view of a flat buffer in which the gradient of `param` accumulates."""
    return param.main_grad  # type: ignore[attr-defined]


def is_vector(param: Parameter) -> bool:
    """Return True for a vector or a scalar such as a bias; experts have one dimension more."""
    return param.ndim - parallel_attributes(param).expert_parallel < 2


def param_spec(
    param: Parameter,
    tp_group: dist.ProcessGroup | None,
    cost: int = 0,
    copies: QuantizedWeight | None = None,
) -> ParamSpec:
    """Return the `ParamSpec` of `param`; tied embeddings of two stages have a bucket to themselves.

    cost: see `ParamSpec`.
    copies: the FP8 copies of a weight that only FP8 GEMMs read.
    """
    marks = parallel_attributes(param)
    return ParamSpec(
        param.numel(),
        str(param.dtype).removeprefix("torch."),
        experts=marks.expert_parallel,
        partial=marks.sequence_parallel and group_size(tp_group) > 1,
        own_bucket=marks.pipeline_shared,
        cost=cost,
        fp8=copies.recipe.block if copies is not None and param.is_contiguous() else 0,
    )


class FlatBuffer:
    """The main gradients of parameters of one kind, laid out by a `Buffer`.

    Args:
        plan: the layout.
        parameters: {name: parameter}.
        dtype: of the gradients.
        group: the ranks over which gradients are summed; None: this rank alone.
        copies: the FP8 copies of weights that only FP8 GEMMs read.
        store_first: see `GradBuffer`.

    Attributes:
        grad: (layout.size,), of which every `main_grad` is a view.
        rank: this rank's number among those that share the buffer; 0 if the buffer is not sharded.
        shards: the range of this rank's shard of each bucket.
        pieces: {name: the piece of a parameter that this rank owns}.
        own: {name: the gradient of that piece, flat}.
        firsts: {name: its `FirstGradient`} with `store_first`, else empty.
        copies: {name: FP8 copies} of weights that are gathered in FP8; empty for other buffers. After a step
            such a parameter has its own numbers in this rank's piece, and dequantised ones elsewhere.
    """

    def __init__(
        self,
        plan: Buffer,
        parameters: dict[str, Parameter],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        copies: Mapping[Parameter, QuantizedWeight],
        store_first: bool,
    ) -> None:
        self.plan, self.parameters, self.group = plan, parameters, group
        self.rank = group_rank(group) if self.layout.num_ranks > 1 else 0
        self.copies = {name: copies[param] for name, param in parameters.items()} if plan.gathers_fp8 else {}
        device = next(iter(parameters.values())).device
        self.grad = torch.zeros(self.layout.size, dtype=dtype, device=device)
        self.firsts: dict[str, FirstGradient] = {}
        self._stored: list[str] = []  # what the last `zero` has left out
        self._rest = [self.grad]  # all else
        for view, (name, param) in zip(self.views(self.grad), parameters.items(), strict=True):
            param.grad = None
            param.main_grad = view  # type: ignore[attr-defined]
            if store_first:
                self.firsts[name] = FirstGradient(view)
        self.shards = self.layout.shards(self.rank)
        self.pieces = self.layout.pieces(self.rank)
        self.own = {name: self.grad[slice(*piece.global_range)] for name, piece in self.pieces.items()}

    @property
    def layout(self) -> BucketLayout:
        return self.plan.layout

    @cached_property
    def own_by_replicas(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return `own` in three: tensor-parallel shards, their replicas, and replicas of another stage."""
        found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        for name, grad in self.own.items():
            marks = parallel_attributes(self.parameters[name])
            found[2 if marks.pipeline_replica else 0 if marks.tensor_model_parallel else 1].append(grad)
        return found

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of `flat` (layout.size,) at the place of each parameter, in its shape and strides.

        Transposed or channels-last strides are kept, because fused kernels go by address.
        """
        ranges, params = self.layout.ranges, self.parameters
        return [flat[slice(*ranges[name])].as_strided(p.shape, p.stride()) for name, p in params.items()]

    def bucket(self, number: int) -> Tensor:
        """Return the gradients of a bucket, flat."""
        bucket = self.layout.buckets[number]
        return self.grad[bucket.start : bucket.end]

    def zero(self) -> None:
        """Set to zero all gradients but those that the first one of a step is going to overwrite."""
        stored = [name for name, first in self.firsts.items() if first.state == first.STORED]
        if stored != self._stored:
            self._stored, self._rest, end = stored, [], 0
            for start, stop in sorted(self.layout.ranges[name] for name in stored):
                self._rest.append(self.grad[end:start])
                end = stop
            self._rest.append(self.grad[end:])
        torch._foreach_zero_(self._rest)
        for first in self.firsts.values():
            if first.state != first.SUM:
                first.state = first.UNDEFINED if first.state == first.STORED else first.ZEROS

    def zero_unwritten(self, number: int) -> None:
        """Set to zero the gradients of a bucket that `zero` has left out and nothing has overwritten."""
        for name in self.layout.buckets[number].names if self.firsts else ():
            if self.firsts[name].state == FirstGradient.UNDEFINED:
                main_grad(self.parameters[name]).zero_()
                self.firsts[name].state = FirstGradient.ZEROS

    def start_reduce(self, number: int) -> dist.Work | None:
        """Start to reduce-scatter or all-reduce a bucket over the group; None if nothing is sent."""
        if group_size(self.group) == 1 or not self.bucket(number).numel():
            return None
        reduce = reduce_scatter_ if self.layout.num_ranks > 1 else all_reduce_
        return reduce(self.bucket(number), self.group, overlap=True)


class GradBuffer:
    """The main gradients of a model and their sums over ranks.

    Args:
        named_parameters: (name, parameter) pairs, as from `module.named_parameters()`. Parameters that do not
            require a gradient are left out; a parameter that appears twice (tied weights) has one place,
            under its first name.
        dp_group: ranks that hold the same parameters and see other tokens (data and context parallel); None:
            this rank alone. All gradients but those of experts are summed over it.
        tp_group: the tensor-parallel group. Parameters marked `sequence_parallel` are summed over it: each
            rank sees a part of the sequence, so its gradient of a replicated parameter is a partial sum.
        edp_group: ranks that hold the same experts; parameters marked `expert_parallel` are summed over it.
        shard: True: each rank of `dp_group` or `edp_group` gets the sums of its own shard of each bucket
            (ZeRO-1); False: every rank gets all sums.
        bucket_size: the number of elements at which a bucket is full.
        bucket_unit: bucket sizes are multiples of it.
        grad_dtype: the dtype of gradients of 16-bit parameters; None: float32.
        overlap: True: buckets are reduced while backward runs, see below.
        cost: (name, parameter) -> the cost of its update if one rank must own all of it, 0 if it may be
            sharded anywhere; `Muon` needs `muon.update_cost`. None: all parameters may be sharded anywhere.
        fp8: {parameter: FP8 copies} of weights that only FP8 GEMMs read, see `quantized_weights`. A sharded
            optimizer gathers their bytes, except for weights with a cost.
        store_first: the first gradient of a step overwrites `main_grad` where the op that makes it can, which
            saves setting it to zero and reading the zeros: 8 of 12 bytes a weight with one microbatch a step.
            Between `zero` and that gradient, or `reduce`, such a `main_grad` is undefined. Code of your own
            that adds to one, or captures a backward in a graph without `zero`, calls
            `fastmp.ops.wgrad.always_add(main_grad)` first. The trainer uses it.

    With `overlap`, the number of gradients that arrive for each parameter is counted in the first step, in
    which nothing overlaps. Every further step must have as many, so the number of microbatches cannot vary.
    Call `recount` before a step that has another number. Buckets are sent in the same order on all ranks.

    A parameter without a gradient in a step keeps a main gradient of zero. A rank without trainable
    parameters, such as a frozen pipeline stage, has a buffer of nothing and joins the collectives of others.

    Attributes:
        parameters: {name: parameter}.
        device: the device of the first parameter, trainable or not.
        flats: the buffers.
        order: the order in which backward fills their buckets, as (buffer, bucket).

    Raises:
        ValueError: a parameter that is in another GradBuffer, is a DTensor or leaves gaps in memory;
            parameters of one kind on two devices; a `grad_dtype` other than float32 or the parameters' own.

    Example:
        grads = GradBuffer(model.named_parameters())
        grads.zero()
        model(x).sum().backward()  # adds to param.main_grad
        grads.reduce()
        assert all(param.grad is None for param in model.parameters())
        grads.remove_hooks()
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
        fp8: Mapping[Parameter, QuantizedWeight] | None = None,
        store_first: bool = False,
    ) -> None:
        copies = {} if fp8 is None else fp8
        self.tp_group, self.shard, self.overlap = tp_group, shard, overlap
        named = list(named_parameters)
        self.parameters = _unique_trainable(named)
        self.device = named[0][1].device if named else torch.get_default_device()
        plans = plan_buffers(
            {
                name: param_spec(param, tp_group, 0 if cost is None else cost(name, param), copies.get(param))
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
            group = edp_group if plan.experts else dp_group
            self.flats.append(FlatBuffer(plan, members, dtype, group, copies, store_first))
        self.order = fill_order(plans, list(self.parameters))
        self._hooks = [p.register_post_accumulate_grad_hook(_accumulate) for p in self.parameters.values()]
        self._readiness = GradReadiness(self.flats, self.order, self._start)
        if self.communicates:
            self._hooks += self._readiness.hooks()
        self._works: list[dist.Work] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # from which buckets are sent
        self._sending: set[torch.device] = set()  # whose stream the step has not waited for yet
        self._compute: dict[torch.device, torch.cuda.Stream] = {}  # on which the step runs

    @property
    def communicates(self) -> bool:
        """True if gradients are summed over more than this rank."""
        return any(group_size(flat.group) > 1 for flat in self.flats)

    @property
    def gathered_in_fp8(self) -> dict[str, QuantizedWeight]:
        """Return {name: FP8 copies} of the weights that an optimizer gathers in FP8, see `FlatBuffer`."""
        return {name: copies for flat in self.flats for name, copies in flat.copies.items()}

    def zero(self) -> None:
        """Set all main gradients to zero, see `store_first`; call it once, at the start of a step."""
        self._wait()  # for collectives that a failed step has left
        for flat in self.flats:
            flat.zero()
            if flat.grad.is_cuda:
                self._begin_on(flat.grad.device)
        self._readiness.begin(self.overlap)

    def _begin_on(self, device: torch.device) -> None:
        """Record the stream of the step, and make the streams next to it wait for it, also in captures."""
        self._compute[device] = torch.cuda.current_stream(device)
        for other in beside(device):
            other.wait_stream(self._compute[device])

    def recount(self) -> None:
        """Count gradients again in the next step; call it if their number changes."""
        self._readiness.forget()

    def reduce(self) -> None:
        """Sum over ranks; call it once a step, after the last backward, on every rank of all groups."""
        for at in self._readiness.end():
            self._start(at)
        self._wait()

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        for device in self._sending:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])
        self._sending.clear()

    def _start(self, at: tuple[int, int]) -> None:
        flat, number = self.flats[at[0]], at[1]
        with self._after_gradients(flat.grad.device):
            flat.zero_unwritten(number)
            # Over tensor-parallel ranks, which have partial sums, then over data-parallel ranks.
            if flat.plan.partial and self.tp_group is not None:
                all_reduce_(flat.bucket(number), self.tp_group)
            work = flat.start_reduce(number)
        if work is not None:
            self._works.append(work)

    def _after_gradients(self, device: torch.device) -> AbstractContextManager:
        """Return a context whose kernels wait for all gradients so far, on a stream for collectives.

        Autograd makes the current stream wait for gradients that it receives, but not for a wgrad GEMM on
        another stream that has added to `main_grad`; and the current stream, that of the last gradient, may
        be another than that of compute. Compute does not wait.
        """
        if device.type != "cuda":
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._sending.add(device)
        stream, current = self._streams[device], torch.cuda.current_stream(device)
        for other in (self._compute.get(device, current), current, *beside(device)):
            stream.wait_stream(other)
        return torch.cuda.stream(stream)

    def own(self, param: Parameter) -> Tensor:
        """Return the part of a main gradient, flat, that this rank has the sum of after `reduce`."""
        for flat in self.flats:
            for name, each in flat.parameters.items():
                if each is param:
                    return flat.own.get(name, flat.grad[:0])
        raise ValueError(f"GradBuffer.own: a parameter of shape {tuple(param.shape)} is not in the buffer")

    def first_not_finite(self, wanted: Tensor) -> Tensor:
        """Return the first non-finite element of each buffer, if the flag `wanted` is set.

        Call it after `reduce` and before `zero`. Returns (buffers,) int64 on the device, the argument of
        `first_nonfinite_param`.
        """
        found = [first_not_finite(flat.grad, wanted) for flat in self.flats]
        return torch.stack(found) if found else torch.zeros(0, dtype=torch.int64, device=self.device)

    def first_nonfinite_param(self, places: list[int]) -> tuple[str, bool] | None:
        """Return the parameter nearest to the loss among the `places` that `first_not_finite` returned.

        Returns (name, certain). `certain` is False if the element lies in this rank's shard: it is a sum over
        ranks, and another rank may be the cause. None if all gradients were finite.
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
        """Remove the hooks and `param.main_grad`: gradients go to `param.grad` again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for param in self.parameters.values():
            if hasattr(param, "main_grad"):
                del param.main_grad


class GradReadiness:
    """Count the gradients that arrive in a step, and start each bucket when it is complete.

    A bucket is started after all buckets before it in `order`, so that ranks agree on the order.
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
        """Register a hook after each accumulated gradient, including those added by an op or a graph."""
        return [
            param.register_post_accumulate_grad_hook(self._hook(name))
            for flat in self._flats
            for name, param in flat.parameters.items()
        ]

    def _hook(self, name: str) -> Callable[[Parameter], None]:
        counts, at = self._counts, self._where[name]
        # torch keeps hooks out of sight of the garbage collector: a strong reference to the buffer, which
        # holds the parameter, would leak both.
        weak = weakref.ref(self)

        def arrived(param: Parameter) -> None:
            counts[name] += 1
            arrivals = weak()
            if arrivals is not None and arrivals._missing:
                arrivals._note(name, at)

        return mark_hook(arrived, HookTraits(in_step=True))

    def forget(self) -> None:
        """Forget the expected counts until a step has been counted again."""
        self._expected = {}

    def begin(self, overlap: bool) -> None:
        """Start a step; overlap: send buckets during its backward."""
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
                f"GradBuffer: expected {self._expected[name]} gradients of parameter {name!r} in a step, as "
                f"in the first, got number {self._counts[name]} after its bucket was sent; call recount() "
                "before such a step, or use overlap=False (optimizer.overlap of a recipe)"
            )
        while self._started < len(self._order) and not self._missing[self._order[self._started]]:
            self._started += 1
            self._start(self._order[self._started - 1])

    def end(self) -> list[tuple[int, int]]:
        """End the step and return the buckets that are not started yet."""
        if not self._expected and any(self._counts.values()):
            self._expected = dict(self._counts)
        rest, self._started, self._missing = self._order[self._started :], 0, {}
        self._counts.update(dict.fromkeys(self._counts, 0))
        return rest


def _accumulate(param: Parameter) -> None:
    if param.grad is not None:  # else an op has added the gradient to main_grad by itself
        add_gradient(main_grad(param), param.grad)
        param.grad = None


# It works on tensors alone, so a captured backward may contain it.
mark_hook(_accumulate, HookTraits(in_graph=True, in_step=True))


def _grad_dtype(members: dict[str, Parameter], wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the main gradients of `members`, which have one dtype. Checks their device."""
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
