"""Linear layers sharded over a tensor-parallel group, and the base of parallel layers.

Column-parallel shards the outputs of Y = X W^T + b, row-parallel the inputs. A column-parallel layer, a
pointwise function and a row-parallel layer need one all-reduce in forward and one in backward (Shoeybi et al.
2019). With `sequence_parallel` the activations outside are sharded along the sequence (dim 0), and the
all-reduce becomes an all-gather at the column and a reduce-scatter at the row (Korthikanti et al. 2022):

                     column-parallel           row-parallel
    forward          (all-gather X)   GEMM     GEMM, all-reduce (reduce-scatter) Y
    backward dgrad   GEMM, all-reduce (reduce-scatter) dX     (all-gather dY) GEMM

A layer communicates over its `group` only, a ProcessGroup or None for this rank alone. Parameters are plain
tensors, this rank's shards; `torch.distributed.checkpoint` needs `sharded_state_dict` in place of
`state_dict`, which raises there.

S sequence, B batch, P ranks of the group.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn, Required, Self, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import nn

from fastmp.config.precision import Fp8Recipe
from fastmp.distributed.collectives import (
    gather_from_group,
    group_rank,
    group_size,
    reduce_from_group_,
    reduce_scatter_sequence,
    split_to_group,
)
from fastmp.distributed.rng import RngTracker
from fastmp.ops.wgrad import linear
from fastmp.tensor_parallel.attributes import ParallelAttributes, local_shard
from fastmp.tensor_parallel.fp8_linear import QuantizedWeight, fp8_linear, quantized
from fastmp.tensor_parallel.linear import column_linear, row_linear_scattered

__all__ = [
    "ColumnParallelLinear",
    "GroupModule",
    "LinearOptions",
    "ParallelModule",
    "RowParallelLinear",
]

InitMethod = Callable[[torch.Tensor], Any]


class LinearOptions(TypedDict, total=False):
    """Keyword arguments that column- and row-parallel layers share; see `ColumnParallelLinear`."""

    group: Required[dist.ProcessGroup | None]
    bias: bool
    skip_bias_add: bool
    sequence_parallel: bool
    overlap_rows: int | None
    stride: int
    init_method: InitMethod | None
    init: str
    rng: RngTracker | None
    device: torch.device | str | None
    dtype: torch.dtype | None
    fp8: Fp8Recipe | None


def _raise_in_dcp(name: str = "a tensor", *_: object) -> NoReturn:
    # A RuntimeError: torch catches a ValueError while it loads and raises another message.
    raise RuntimeError(
        f"{name} is one rank's shard of a parallel layer, which torch.distributed.checkpoint would take for "
        "the whole weight; give it sharded_state_dict(module) in place of module.state_dict()"
    )


# Attributes of a shard in a state dict: torch.distributed.checkpoint calls the first two before it saves or
# loads a tensor. The third drops them when a shard is pickled.
_NO_DCP = {
    "__create_write_items__": _raise_in_dcp,
    "__create_chunk_list__": _raise_in_dcp,
    "__getstate__": lambda: None,
}


class GroupModule(nn.Module):
    """A module that holds process groups; `copy.deepcopy` shares them instead of copying."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= {id(group): group for group in vars(self).values() if isinstance(group, dist.ProcessGroup)}
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))
        return twin


class ParallelModule(GroupModule):
    """Base of parallel layers: their group, the marks on their parameters, and weight initialisation."""

    weight: nn.Parameter

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.num_valid_rows = 0
        self.tp_size = group_size(group)
        self.tp_rank = group_rank(group)

    def _part(self, name: str, total: int, stride: int = 1) -> int:
        """Return this rank's part of `total`. Raises ValueError if ranks (times stride) do not divide it."""
        if total % (self.tp_size * stride):
            blocks = f" times stride {stride}" if stride != 1 else ""
            raise ValueError(
                f"{type(self).__name__}: {name} {total} is not divisible by the {self.tp_size} "
                f"ranks of its group{blocks}"
            )
        return total // self.tp_size

    def _marks(self) -> dict[str, ParallelAttributes]:
        """Return the attributes of each parameter, by name."""
        raise NotImplementedError

    def _mark(self) -> None:
        for name, marks in self._marks().items():
            param = getattr(self, name)
            if param is not None:
                for field, value in marks._replace(num_valid_rows=self.num_valid_rows)._asdict().items():
                    setattr(param, field, value)

    def mark_padding(self, num_valid_rows: int) -> None:
        """Mark rows of the full parameters from `num_valid_rows` on as padding."""
        self.num_valid_rows = num_valid_rows
        self._mark()

    def _is_shard(self, marks: ParallelAttributes) -> bool:
        """Return True if other ranks hold other shards of a parameter with these marks."""
        return marks.tensor_model_parallel and self.tp_size > 1

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, marks in self._marks().items():
            shard = destination.get(prefix + name)
            if shard is not None and not keep_vars and self._is_shard(marks):
                shard.__dict__.update(_NO_DCP)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ParallelModule:
        super()._apply(fn, recurse)
        self._mark()  # a conversion may replace a parameter by a new one
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._mark()  # load_state_dict(assign=True) puts new parameters in place

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = super().__deepcopy__(memo)
        twin._mark()
        return twin

    def _slice(self, full: torch.Tensor, marks: ParallelAttributes) -> torch.Tensor:
        if not marks.tensor_model_parallel:
            return full
        return local_shard(full, marks.partition_dim, marks.partition_stride, self.tp_size, self.tp_rank)

    def _take(self, module: nn.Module, **full: torch.Tensor | None) -> None:
        """Set the parameters to this rank's shards of `full`; keep requires_grad and training mode."""
        for name, tensor in full.items():
            if tensor is not None:
                part = self._slice(tensor.detach(), self._marks()[name])
                part = part.clone(memory_format=torch.contiguous_format)
                setattr(self, name, nn.Parameter(part, requires_grad=tensor.requires_grad))
        self._mark()
        self.train(module.training)

    @torch.no_grad()
    def _init_weight(
        self,
        full_shape: tuple[int, ...],
        init_method: InitMethod,
        init: str,
        rng: RngTracker | None,
        parameter: str = "weight",
    ) -> None:
        """Initialise a parameter: as a shard of the full one (init "full") or by itself ("sharded")."""
        name, weight, marks = type(self).__name__, getattr(self, parameter), self._marks()[parameter]
        if init not in ("full", "sharded"):
            raise ValueError(f'{name}: expected init "full" or "sharded", got {init!r}')
        if init == "sharded" and self.tp_size > 1:
            if rng is None:
                raise ValueError(
                    f'{name}: init="sharded" needs rng=: without its tensor-parallel stream the '
                    f"{self.tp_size} ranks of the group would draw equal shards"
                )
            function = getattr(init_method, "func", init_method)  # inside a functools.partial
            if function in _SHAPE_DEPENDENT:
                raise ValueError(
                    f"{name}: init_method {function.__name__} takes its scale from the shape, "
                    f"and the shard's is {tuple(weight.shape)}, the weight's {full_shape}; use "
                    'init="full", or a method that knows the full shape'
                )
        if weight.is_meta:
            return
        if init == "full":
            dtype = torch.promote_types(weight.dtype, torch.float32)
            master = torch.empty(full_shape, dtype=dtype, device=weight.device)
            init_method(master)
            weight.copy_(self._slice(master, marks))
        elif rng is None:
            init_method(weight)
        else:
            with rng.fork("tensor-parallel", device=weight.device):
                init_method(weight)


_SHAPE_DEPENDENT = (
    nn.init.xavier_normal_,
    nn.init.xavier_uniform_,
    nn.init.kaiming_normal_,
    nn.init.kaiming_uniform_,
    nn.init.orthogonal_,
)


class _ParallelLinear(ParallelModule):
    """A linear layer whose weight (output_size, input_size) is sharded along `_shard_dim`."""

    _shard_dim: int

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: dist.ProcessGroup | None,
        bias: bool = True,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        overlap_rows: int | None = None,
        stride: int = 1,
        init_method: InitMethod | None = None,
        init: str = "full",
        rng: RngTracker | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fp8: Fp8Recipe | None = None,
    ) -> None:
        super().__init__(group)
        self.overlap_rows = overlap_rows
        self.input_size, self.output_size, self.stride = input_size, output_size, stride
        self.skip_bias_add, self.sequence_parallel = skip_bias_add, sequence_parallel
        shape = [output_size, input_size]
        name = ("output_size", "input_size")[self._shard_dim]
        shape[self._shard_dim] = self._part(name, shape[self._shard_dim], stride)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(shape[0], device=device, dtype=dtype)) if bias else None
        self._mark()
        if init_method is None:  # Xavier normal with the fans of the full weight
            std = math.sqrt(2.0 / (input_size + output_size))
            init_method = functools.partial(nn.init.normal_, std=std)
        self._init_weight((output_size, input_size), init_method, init, rng)
        self.fp8: dict[str, QuantizedWeight] = {}
        if fp8 is not None:
            self.use_fp8(fp8)

    def use_fp8(self, recipe: Fp8Recipe) -> None:
        """Multiply in FP8 from now on: forward and dgrad, see `fastmp.tensor_parallel.fp8_linear`.

        Raises:
            ValueError: the block does not divide this rank's sizes of the weight.
        """
        sizes = list(self.weight.shape)
        sizes[self._shard_dim] //= self.stride
        if wrong := recipe.misfit(dict(zip(("output_size", "input_size"), sizes, strict=True))):
            raise ValueError(
                f"{type(self).__name__}: {wrong} of this rank's shard; change the sizes or block"
            )
        self.fp8 = quantized(self, recipe, "weight")

    @classmethod
    def from_linear(
        cls, linear: nn.Module, *, group: dist.ProcessGroup | None, stride: int = 1, **options: Any
    ) -> Self:
        """Return a layer with this rank's shard of `linear`; no memory is shared, no random number drawn.

        Args:
            linear: an nn.Linear, or a `transformers` Conv1D, whose weight is (in, out).
            options: those of the constructor; dtype and device are those of `linear`.

        Example:
            >>> up = ColumnParallelLinear.from_linear(nn.Linear(8, 32), group=None, gather_output=False)
            >>> up(torch.ones(2, 8)).shape
            torch.Size([2, 32])
        """
        weight, bias = getattr(linear, "weight", None), getattr(linear, "bias", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not weight.is_floating_point():
            raise ValueError(
                f"{cls.__name__}.from_linear: expected an nn.Linear, got {type(linear).__name__}, "
                "which has no floating-point matrix named weight"
            )
        if type(linear).__name__ == "Conv1D":
            weight = weight.t()
        options |= {"stride": stride, "bias": bias is not None, "dtype": weight.dtype}
        layer = cls(weight.shape[1], weight.shape[0], group=group, device="meta", **options)
        layer._take(linear, weight=weight, bias=bias)
        return layer

    def extra_repr(self) -> str:
        names = "input_size output_size gather_output input_is_parallel skip_bias_add sequence_parallel"
        text = [f"{name}={getattr(self, name)}" for name in names.split() if hasattr(self, name)]
        place = f"stride={self.stride}, tp_rank={self.tp_rank}, tp_size={self.tp_size}"
        return ", ".join([*text, place, f"bias={self.bias is not None}"])


class ColumnParallelLinear(_ParallelLinear):
    """Y = X W^T + b with the outputs sharded over `group`: weight (output_size/P, input_size), bias too.

    Input (..., input_size), the same on every rank; with `sequence_parallel` this rank's sequence shard (S/P,
    ..., input_size). Output (..., output_size) with `gather_output`, else this rank's shard (...,
    output_size/P).

    In backward the all-reduce of the input gradient (the reduce-scatter with `sequence_parallel`) overlaps
    with the wgrad GEMM; a gathered input is not saved but gathered again.

    Args:
        gather_output: all-gather the output.
        skip_bias_add: return (output without bias, bias), for an op that fuses the addition.
        overlap_rows: rows (sequence times batch) from which a GEMM under `sequence_parallel` is fused with
            its collective, forward and backward, on devices with such ops, see
            `fastmp.tensor_parallel.fused_linear`. Sums over ranks may then differ in their last bits. None:
            never.
        stride: number of blocks fused in the outputs (query-key-value 3, gate-up 2), each sharded by itself.
        fused_rows: see `ParallelAttributes`.
        init_method: fills the weight in place. None: Xavier normal of the full shape. The bias starts at
            zero.
        init: "full" draws the full weight in fp32 (float64 for a float64 layer) from the default generator,
            which must be in the same state on all ranks, and keeps the shard: the same bits for every P.
            "sharded" draws the shard only, from the tensor-parallel stream of `rng`, with an `init_method`
            that does not depend on the shape.
        fp8: multiply in FP8 by this recipe; None: in the dtype of the layer.

    Raises:
        ValueError: P times stride does not divide output_size, or the FP8 block this rank's sizes.

    Example:
        >>> up = ColumnParallelLinear(8, 32, group=None, gather_output=False)
        >>> down = RowParallelLinear(32, 8, group=None, input_is_parallel=True)
        >>> down(torch.relu(up(torch.ones(2, 8)))).shape
        torch.Size([2, 8])
    """

    _shard_dim = 0

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        gather_output: bool = True,
        fused_rows: tuple[int, ...] = (),
        **options: Unpack[LinearOptions],
    ) -> None:
        self.fused_rows = fused_rows
        super().__init__(input_size, output_size, **options)
        self.gather_output = gather_output

    def _marks(self) -> dict[str, ParallelAttributes]:
        marks = ParallelAttributes(True, 0, self.stride, fused_rows=self.fused_rows)
        return dict.fromkeys(("weight", "bias"), marks)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        bias: torch.Tensor | None = self.bias
        fused = x, self.weight, None if self.skip_bias_add else bias
        if self.fp8:
            y = fp8_linear(*fused, self.fp8["weight"], self.group, self.sequence_parallel)
        else:
            y = column_linear(*fused, self.group, self.sequence_parallel, self.overlap_rows)
        if self.gather_output:
            y = self._join(y)
            if self.skip_bias_add and bias is not None:
                bias = self._join(bias)
        return (y, bias) if self.skip_bias_add else y

    def _join(self, part: torch.Tensor) -> torch.Tensor:
        """All-gather the parts of all ranks, in the order of the full layer's outputs."""
        parts = gather_from_group(part, self.group)
        if self.stride == 1 or self.tp_size == 1:
            return parts
        return parts.unflatten(-1, (self.tp_size, self.stride, -1)).transpose(-3, -2).flatten(-3)


class RowParallelLinear(_ParallelLinear):
    """Y = X W^T + b with the inputs sharded over `group`: weight (output_size, input_size/P), bias
    replicated.

    Input this rank's shard (..., input_size/P) with `input_is_parallel`, else (..., input_size), of which the
    layer takes its shard. Output (..., output_size), the same on every rank: all-reduced, then the bias is
    added. With `sequence_parallel` the input has the full sequence and the output is reduce-scattered to this
    rank's sequence shard (S/P, ..., output_size); the bias gradient is then that of this rank's tokens, and
    the bias is marked so.

    Args:
        input_is_parallel: the input is this rank's shard.
        stride: number of blocks fused in the inputs, each sharded by itself.
        options: the others are those of `ColumnParallelLinear`.

    Raises:
        ValueError: P times stride does not divide input_size.
    """

    _shard_dim = 1

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        input_is_parallel: bool = False,
        **options: Unpack[LinearOptions],
    ) -> None:
        super().__init__(input_size, output_size, **options)
        self.input_is_parallel = input_is_parallel

    def _marks(self) -> dict[str, ParallelAttributes]:
        return {
            "weight": ParallelAttributes(True, 1, self.stride),
            "bias": ParallelAttributes(sequence_parallel=self.sequence_parallel),
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        bias = None if self.skip_bias_add else self.bias
        if self.tp_size == 1:
            y = self._multiply(x, bias)
        else:
            # 1. Each rank multiplies its slice of the inputs; 2. the partial sums are added over the group.
            x = x if self.input_is_parallel else self._split(x)
            y = self._reduced(x)
            if bias is not None:
                y = y + bias.to(y.dtype)  # keep y's lower precision under autocast
        return (y, self.bias) if self.skip_bias_add else y

    def _reduced(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply this rank's inputs by its shard, and add the products over the group."""
        if not self.sequence_parallel:
            return reduce_from_group_(self._multiply(x, None), self.group)
        if self.fp8 or self.group is None:
            return reduce_scatter_sequence(self._multiply(x, None), self.group)
        return row_linear_scattered(x, self.weight, self.group, self.overlap_rows)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Multiply this rank's inputs by its shard, in FP8 or in their dtype."""
        if self.fp8:
            return fp8_linear(x, self.weight, bias, self.fp8["weight"])
        return linear(x, self.weight, bias)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        if self.stride > 1:  # order by rank, then by fused block
            x = x.unflatten(-1, (self.stride, self.tp_size, -1)).transpose(-3, -2).flatten(-3)
        return split_to_group(x, self.group)
