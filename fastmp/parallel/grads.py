"""Gradients in one contiguous buffer: what data parallelism reduces and what the optimizer reads.

Every parameter gets `param.main_grad`, a view of the buffer of its main dtype (float32, or float64 for
float64 parameters). The views are in reverse order of the model, so that backward fills the buffer from its
start; vectors, which are small and which optimizers do not decay, come last. The backward passes of linear
layers, experts, routers and the fused loss add the gradients of their weights there by themselves, not
rounded to the dtype of the weight. A hook adds every other gradient as soon as autograd has it and frees
`param.grad`. Microbatches accumulate in the main dtype, and a step communicates one all-reduce per dtype,
whatever the number of microbatches. Experts have buffers of their own, because their replicas are on other
ranks than those of the dense parameters.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from fastmp.parallel.collectives import all_reduce_
from fastmp.parallel.layers import parallel_attributes

__all__ = ["GradBuffer", "is_vector", "main_dtype", "main_grad"]

_ALIGNMENT = 64  # elements: where parameters of another dtype begin within a buffer


def main_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients accumulate and master weights live: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def main_grad(param: Parameter) -> Tensor:
    """The view of its buffer in which the gradient of `param` accumulates."""
    return param.main_grad  # type: ignore[attr-defined]


def is_vector(param: Parameter) -> bool:
    """Whether `param` is a vector or a scalar, like a bias; experts have a vector for each expert."""
    return param.ndim - parallel_attributes(param).expert_parallel < 2


class GradBuffer:
    """Main gradients of `named_parameters` and their reduction over ranks.

    named_parameters: (name, parameter) pairs, as from `module.named_parameters()`. Parameters that do not
        require a gradient are left out; a parameter that appears twice (tied weights) has one place under
        its first name.
    dp_group: ranks that hold the same parameters and saw other tokens (data and context parallel); None for
        this rank alone. Gradients are summed over it, except those of experts.
    tp_group: the tensor-parallel group, over which parameters marked `sequence_parallel` are summed: each
        rank saw its part of the sequence only, so its gradient of a replicated parameter is a partial sum.
    edp_group: ranks that hold the same experts; parameters marked `expert_parallel` are summed over it.

    Attributes: `parameters` {name: parameter}, `buffers` {main dtype: (n,) tensor}, `expert_buffers` the same
    for the parameters marked `expert_parallel`, `ranges` {name: (start, end)} within the parameter's buffer.
    A parameter without a gradient in a step keeps a main gradient of zero.

    Raises ValueError for a parameter that already has a GradBuffer or leaves gaps in memory, and for
    parameters of one main dtype on two devices.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        *,
        dp_group: dist.ProcessGroup | None = None,
        tp_group: dist.ProcessGroup | None = None,
        edp_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.dp_group, self.tp_group, self.edp_group = dp_group, tp_group, edp_group
        self.parameters = _unique_trainable(named_parameters)
        self.ranges: dict[str, tuple[int, int]] = {}
        experts: dict[str, Parameter] = {}
        others: dict[str, Parameter] = {}
        for name, param in self.parameters.items():
            (experts if parallel_attributes(param).expert_parallel else others)[name] = param
        self.buffers = self._allocate(others)
        self.expert_buffers = self._allocate(experts)
        self._hooks = [p.register_post_accumulate_grad_hook(_accumulate) for p in self.parameters.values()]

    def _allocate(self, parameters: dict[str, Parameter]) -> dict[torch.dtype, Tensor]:
        sizes: dict[torch.dtype, int] = {}
        last: dict[torch.dtype, Parameter] = {}
        for name, param in _ordered(parameters):
            dtype = main_dtype(param.dtype)
            before, start = last.get(dtype, param), sizes.get(dtype, 0)
            if before.device != param.device:
                raise ValueError(
                    f"GradBuffer: parameter {name!r} is on {param.device}, others on {before.device}"
                )
            if before.dtype != param.dtype:
                start += -start % _ALIGNMENT
            last[dtype], sizes[dtype] = param, start + param.numel()
            self.ranges[name] = (start, sizes[dtype])
        buffers = {
            dtype: torch.zeros(size, dtype=dtype, device=last[dtype].device) for dtype, size in sizes.items()
        }
        for name, param in parameters.items():
            param.grad = None
            # With the parameter's strides, be it transposed or channels-last: fused kernels go by address.
            start, end = self.ranges[name]
            buffer = buffers[main_dtype(param.dtype)]
            grad = buffer[start:end].as_strided(param.shape, param.stride())
            param.main_grad = grad  # type: ignore[attr-defined]
        return buffers

    def zero(self) -> None:
        """Set all main gradients to zero: once at the start of a step."""
        for buffer in [*self.buffers.values(), *self.expert_buffers.values()]:
            buffer.zero_()

    def all_reduce(self) -> None:
        """Sum over ranks, once per step after the last backward. Every rank of all groups calls it."""
        self._reduce_sequence_parallel()
        for buffers, group in ((self.buffers, self.dp_group), (self.expert_buffers, self.edp_group)):
            if group is not None:
                for buffer in buffers.values():
                    all_reduce_(buffer, group)

    def _reduce_sequence_parallel(self) -> None:
        if self.tp_group is None:
            return
        for dtype in self.buffers:
            partial = [
                main_grad(p)
                for p in self.parameters.values()
                if parallel_attributes(p).sequence_parallel and main_grad(p).dtype == dtype
            ]
            if not partial:
                continue
            coalesced = torch.cat([g.flatten() for g in partial])
            all_reduce_(coalesced, self.tp_group)
            sums = coalesced.split([g.numel() for g in partial])
            torch._foreach_copy_(partial, [s.view_as(g) for s, g in zip(sums, partial, strict=True)])

    def remove_hooks(self) -> None:
        """Take hooks and `param.main_grad` off the parameters: gradients go to `param.grad` again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for param in self.parameters.values():
            if hasattr(param, "main_grad"):
                del param.main_grad


def _accumulate(param: Parameter) -> None:
    if param.grad is not None:  # else an op has added the gradient to main_grad by itself
        main_grad(param).add_(param.grad)
        param.grad = None


# A captured backward holds the hook, which does nothing but with tensors.
_accumulate.in_graph = True  # type: ignore[attr-defined]


def _ordered(parameters: dict[str, Parameter]) -> list[tuple[str, Parameter]]:
    """The parameters by dtype, in each the vectors last, otherwise in reverse order of the model."""
    backward = list(reversed(parameters.items()))
    dtypes = list(dict.fromkeys(param.dtype for _, param in backward))
    return sorted(backward, key=lambda item: (dtypes.index(item[1].dtype), is_vector(item[1])))


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
        seen.add(id(param))
        unique[name] = param
    return unique
