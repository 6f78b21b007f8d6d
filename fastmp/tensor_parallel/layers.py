"""Linear layers and an embedding table divided over a tensor-parallel group.

Column-parallel divides the outputs of Y = X W^T + b, row-parallel the inputs: column, pointwise function, row
needs one all-reduce forward and one backward (Shoeybi et al. 2019). With `sequence_parallel` the activations
outside are sharded along the sequence (dim 0), and the all-reduce becomes an all-gather at the column and a
reduce-scatter at the row (Korthikanti et al. 2022). A layer communicates over its `group` only: a
ProcessGroup, or None for this rank alone. Parameters are plain tensors, this rank's shards:
`torch.distributed.checkpoint` needs `sharded_state_dict` in place of `state_dict`, which it refuses.

S sequence, B batch, P ranks of the group.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fastmp.distributed.collectives import (
    gather_from_group,
    group_rank,
    group_size,
    reduce_from_group_,
    reduce_scatter_sequence,
    split_to_group,
)
from fastmp.distributed.rng import RngTracker
from fastmp.ops.core.registry import can_read_values
from fastmp.ops.wgrad import linear
from fastmp.tensor_parallel.attributes import ParallelAttributes, local_shard
from fastmp.tensor_parallel.linear import column_linear, row_linear_scattered

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
]

InitMethod = Callable[[torch.Tensor], Any]


def _refuse(name: str = "a tensor", *_: object) -> NoReturn:
    # Not a ValueError, which torch catches while it loads, to say something else.
    raise RuntimeError(
        f"{name} is one rank's shard of a parallel layer, which torch.distributed.checkpoint would take for "
        "the whole weight; give it sharded_state_dict(module) in place of module.state_dict()"
    )


# Attributes of a shard in a state dict: torch.distributed.checkpoint asks a tensor for the first two before
# it saves or loads it. By the third, a pickled shard is a tensor like any other.
_NO_DCP = {"__create_write_items__": _refuse, "__create_chunk_list__": _refuse, "__getstate__": lambda: None}


class GroupModule(nn.Module):
    """A module that holds process groups. Its copies work in the same groups."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo |= {id(group): group for group in vars(self).values() if isinstance(group, dist.ProcessGroup)}
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__dict__, memo))
        return twin


class ParallelModule(GroupModule):
    """The base of the layers: the group, the marks on parameters, and how a weight is filled."""

    weight: nn.Parameter

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        self.num_valid_rows = 0
        self.tp_size = group_size(group)
        self.tp_rank = group_rank(group)

    def _part(self, name: str, total: int, stride: int = 1) -> int:
        """This rank's part of `total`; ValueError where the ranks (times the stride) do not divide it."""
        if total % (self.tp_size * stride):
            blocks = f" times stride {stride}" if stride != 1 else ""
            raise ValueError(
                f"{type(self).__name__}: {name} {total} is not divisible by the {self.tp_size} "
                f"ranks of its group{blocks}"
            )
        return total // self.tp_size

    def _marks(self) -> dict[str, ParallelAttributes]:
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
        """Whether other ranks hold other parts of a parameter with these marks."""
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
        """Make the parameters this rank's slices of `full`; trainable, and in training mode, as they were."""
        for name, tensor in full.items():
            if tensor is not None:
                part = self._slice(tensor.detach(), self._marks()[name])
                part = part.clone(memory_format=torch.contiguous_format)
                setattr(self, name, nn.Parameter(part, requires_grad=tensor.requires_grad))
        self._mark()
        self.train(module.training)

    @torch.no_grad()
    def _init_weight(
        self, full_shape: tuple[int, int], init_method: InitMethod, init: str, rng: RngTracker | None
    ) -> None:
        """Fill `self.weight`: its slice of a full weight from the default stream, or drawn as a shard."""
        name, weight, marks = type(self).__name__, self.weight, self._marks()["weight"]
        if init not in ("full", "sharded"):
            raise ValueError(f'{name}: init is "full" or "sharded", not {init!r}')
        if init == "sharded" and self.tp_size > 1:
            if rng is None:
                raise ValueError(
                    f'{name}: init="sharded" needs rng=: without its tensor-parallel stream the '
                    f"{self.tp_size} ranks of the group would draw equal shards"
                )
            function = getattr(init_method, "func", init_method)  # of a functools.partial
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
    """A linear layer whose weight (output_size, input_size) is cut along `_cut_dim`."""

    _cut_dim: int

    def __init__(
        self,
        input_size: int,
        output_size: int,
        group: dist.ProcessGroup | None,
        bias: bool,
        skip_bias_add: bool,
        sequence_parallel: bool,
        overlap_rows: int | None,
        stride: int,
        init_method: InitMethod | None,
        init: str,
        rng: RngTracker | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(group)
        self.overlap_rows = overlap_rows
        self.input_size, self.output_size, self.stride = input_size, output_size, stride
        self.skip_bias_add, self.sequence_parallel = skip_bias_add, sequence_parallel
        shape = [output_size, input_size]
        name = ("output_size", "input_size")[self._cut_dim]
        shape[self._cut_dim] = self._part(name, shape[self._cut_dim], stride)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(shape[0], device=device, dtype=dtype)) if bias else None
        self._mark()
        if init_method is None:  # Xavier normal, with the fans of the undivided weight
            std = math.sqrt(2.0 / (input_size + output_size))
            init_method = functools.partial(nn.init.normal_, std=std)
        self._init_weight((output_size, input_size), init_method, init, rng)

    @classmethod
    def from_linear(
        cls, linear: nn.Module, *, group: dist.ProcessGroup | None, stride: int = 1, **options: Any
    ) -> Self:
        """This rank's slice of `linear`, an nn.Linear or a `transformers` Conv1D; same dtype and device.

        A class named Conv1D stores its weight as (in, out). `options` are those of the constructor. `linear`
        is not changed and shares no memory with the layer; no random number is drawn.
        """
        weight, bias = getattr(linear, "weight", None), getattr(linear, "bias", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not weight.is_floating_point():
            raise ValueError(
                f"{cls.__name__}.from_linear: {type(linear).__name__} has no floating-point "
                "matrix named weight"
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
    """Y = X W^T + b with the outputs divided over `group`: weight (output_size/P, input_size), bias too.

    Input (..., input_size), the same on every rank; with `sequence_parallel` this rank's sequence shard (S/P,
    ..., input_size). Output (..., output_size) with `gather_output`, else this rank's part (...,
    output_size/P); with `skip_bias_add` the pair (output without bias, bias), for an op that fuses the
    addition. Backward: the input gradient's all-reduce (with `sequence_parallel` reduce-scatter) runs behind
    the product that makes the weight gradient; the gathered input is not kept but gathered again.

    `overlap_rows`: from so many rows on (sequence times batch) a product under `sequence_parallel` is fused
    with its communication, forward and backward, where the device has such ops, see
    `fastmp.tensor_parallel.fused_linear`; None: never. Sums over ranks may then differ in their last bits.

    `stride`: the number of blocks fused in the outputs (query-key-value 3, gate-up 2), each divided by
    itself. `fused_rows`: see `ParallelAttributes`. `init_method(tensor)` fills the weight in place (default:
    Xavier normal of the full shape); the bias starts at zero. `init="full"` draws the whole weight in fp32
    (float64 for a float64 layer) from the default stream, which must be equal on all ranks, and keeps this
    rank's slice: the same bits for every P.
    `init="sharded"` draws the shard only, in the tensor-parallel stream of `rng`, with an `init_method` that
    may not depend on the shape.

    ValueError where P times stride does not divide output_size.
    """

    _cut_dim = 0

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: dist.ProcessGroup | None,
        bias: bool = True,
        gather_output: bool = True,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        overlap_rows: int | None = None,
        stride: int = 1,
        fused_rows: tuple[int, ...] = (),
        init_method: InitMethod | None = None,
        init: str = "full",
        rng: RngTracker | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.fused_rows = fused_rows
        options = (bias, skip_bias_add, sequence_parallel, overlap_rows, stride, init_method, init, rng)
        super().__init__(input_size, output_size, group, *options, device, dtype)
        self.gather_output = gather_output

    def _marks(self) -> dict[str, ParallelAttributes]:
        marks = ParallelAttributes(True, 0, self.stride, fused_rows=self.fused_rows)
        return dict.fromkeys(("weight", "bias"), marks)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        bias: torch.Tensor | None = self.bias
        y = column_linear(
            *(x, self.weight, None if self.skip_bias_add else bias, self.group, self.sequence_parallel),
            self.overlap_rows,
        )
        if self.gather_output:
            y = self._join(y)
            if self.skip_bias_add and bias is not None:
                bias = self._join(bias)
        return (y, bias) if self.skip_bias_add else y

    def _join(self, part: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks, in the order of the undivided layer's outputs."""
        parts = gather_from_group(part, self.group)
        if self.stride == 1 or self.tp_size == 1:
            return parts
        return parts.unflatten(-1, (self.tp_size, self.stride, -1)).transpose(-3, -2).flatten(-3)


class RowParallelLinear(_ParallelLinear):
    """Y = X W^T + b with the inputs divided over `group`: weight (output_size, input_size/P), bias
    (output_size,).

    Input this rank's part (..., input_size/P) with `input_is_parallel`, else (..., input_size), of which it
    takes its part. Output (..., output_size), the same on every rank; with `sequence_parallel` this rank's
    sequence shard (S/P, ..., output_size) of it, for an input of the full sequence. The bias is replicated
    and added after the sum; with `skip_bias_add` the result is the pair (output without bias, bias). Under
    `sequence_parallel` the bias gradient is that of this rank's tokens, and the bias is marked so.

    `stride`: the number of blocks fused in the inputs, each divided by itself. The other options: see
    ColumnParallelLinear. ValueError where P times stride does not divide input_size.
    """

    _cut_dim = 1

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        group: dist.ProcessGroup | None,
        bias: bool = True,
        input_is_parallel: bool = False,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        overlap_rows: int | None = None,
        stride: int = 1,
        init_method: InitMethod | None = None,
        init: str = "full",
        rng: RngTracker | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        options = (bias, skip_bias_add, sequence_parallel, overlap_rows, stride, init_method, init, rng)
        super().__init__(input_size, output_size, group, *options, device, dtype)
        self.input_is_parallel = input_is_parallel

    def _marks(self) -> dict[str, ParallelAttributes]:
        return {
            "weight": ParallelAttributes(True, 1, self.stride),
            "bias": ParallelAttributes(sequence_parallel=self.sequence_parallel),
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        bias = None if self.skip_bias_add else self.bias
        if self.tp_size == 1:
            y = linear(x, self.weight, bias)
        else:
            x = x if self.input_is_parallel else self._split(x)
            if self.sequence_parallel:
                assert self.group is not None
                y = row_linear_scattered(x, self.weight, self.group, self.overlap_rows)
            else:
                y = reduce_from_group_(linear(x, self.weight), self.group)
            if bias is not None:
                y = y + bias.to(y.dtype)  # under autocast y has the lower precision, and keeps it
        return (y, self.bias) if self.skip_bias_add else y

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        if self.stride > 1:  # bring each rank's parts of the fused blocks together
            x = x.unflatten(-1, (self.stride, self.tp_size, -1)).transpose(-3, -2).flatten(-3)
        return split_to_group(x, self.group)


class VocabParallelEmbedding(ParallelModule):
    """An embedding table (num_embeddings, embedding_dim) whose rows are divided over `group`.

    Rank r holds rows [r * num_embeddings/P, (r+1) * num_embeddings/P). Input: ids of any shape (int64), the
    same on every rank; output (*ids.shape, embedding_dim), the same on every rank. With `sequence_parallel`
    ids (S, B) give this rank's sequence shard (S/P, B, embedding_dim). A rank contributes zeros for ids
    outside its rows, and the contributions are summed. The row of `padding_idx`, which `from_embedding` sets,
    has no gradient. Options: see ColumnParallelLinear; the default `init_method` is N(0, 1).

    ValueError where P does not divide num_embeddings, and on a CPU for an id outside [0, num_embeddings); on
    a GPU such an id is the same error as in nn.Embedding (a device assertion).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: dist.ProcessGroup | None,
        sequence_parallel: bool = False,
        init_method: InitMethod | None = None,
        init: str = "full",
        rng: RngTracker | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx: int | None = None
        self.sequence_parallel = sequence_parallel
        self.pipeline_shared = self.pipeline_replica = False
        part = self._part("num_embeddings", num_embeddings)
        self.vocab_start, self.vocab_end = self.tp_rank * part, (self.tp_rank + 1) * part
        self.weight = nn.Parameter(torch.empty(part, embedding_dim, device=device, dtype=dtype))
        self._mark()
        self._init_weight((num_embeddings, embedding_dim), init_method or nn.init.normal_, init, rng)

    def _marks(self) -> dict[str, ParallelAttributes]:
        shared, replica = self.pipeline_shared, self.pipeline_replica
        return {"weight": ParallelAttributes(True, 0, pipeline_shared=shared, pipeline_replica=replica)}

    def mark_pipeline_shared(self, *, replica: bool) -> None:
        """Say that another stage of the pipeline has this table too; `replica`: and counts it."""
        self.pipeline_shared, self.pipeline_replica = True, replica
        self._mark()

    @classmethod
    def from_embedding(
        cls, embedding: nn.Embedding, *, group: dist.ProcessGroup | None, **options: Any
    ) -> VocabParallelEmbedding:
        """This rank's rows of `embedding`; same dtype and device, no memory shared.

        ValueError for an nn.Embedding with max_norm, scale_grad_by_freq or sparse: not supported.
        """
        for name in ("max_norm", "scale_grad_by_freq", "sparse"):
            value = getattr(embedding, name, None)
            if value is not None and value is not False:
                raise ValueError(f"{cls.__name__}.from_embedding: {name}={value!r} is not supported")
        layer = cls(
            *embedding.weight.shape, group=group, device="meta", dtype=embedding.weight.dtype, **options
        )
        layer._take(embedding, weight=embedding.weight)
        layer.padding_idx = embedding.padding_idx
        return layer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if can_read_values(ids):
            self._check(ids)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - self.vocab_start if self.vocab_start <= padding < self.vocab_end else None
        if self.tp_size == 1:
            return F.embedding(ids, self.weight, padding)
        # The first rank lets ids below 0 through, the last those beyond the table: they fail in the lookup.
        if self.tp_rank == 0:
            outside = ids >= self.vocab_end
        elif self.tp_rank == self.tp_size - 1:
            outside = ids < self.vocab_start
        else:
            outside = (ids < self.vocab_start) | (ids >= self.vocab_end)
        rows = F.embedding((ids - self.vocab_start).masked_fill(outside, 0), self.weight, padding)
        rows.masked_fill_(outside.unsqueeze(-1), 0)
        return (reduce_scatter_sequence if self.sequence_parallel else reduce_from_group_)(rows, self.group)

    def _check(self, ids: torch.Tensor) -> None:
        if ids.numel():
            low, high = (int(bound) for bound in ids.aminmax())
            if low < 0 or high >= self.num_embeddings:
                raise ValueError(
                    f"VocabParallelEmbedding: token id {low if low < 0 else high} is outside "
                    f"the vocabulary of {self.num_embeddings}"
                )

    def extra_repr(self) -> str:
        return (
            f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}, "
            f"sequence_parallel={self.sequence_parallel}, tp_rank={self.tp_rank}, tp_size={self.tp_size}"
        )
