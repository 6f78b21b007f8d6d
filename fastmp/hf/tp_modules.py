"""Tensor-parallel modules for transformers models.

All ranks of the group have the same tokens. Linear layers are column-parallel, then row-parallel (Shoeybi et
al. 2019), which shards attention by heads; embedding and head are sharded by the vocabulary, experts by their
number. Between a column- and a row-parallel layer (the tensor-parallel region) activations differ between
ranks; outside, tensors and gradients are bitwise identical on all of them. Entering the region copies the
tensor and all-reduces its gradient; leaving it all-reduces or gathers.

These mixins come before those that replace ops: `patched_class` is applied twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fastmp.distributed.collectives import (
    all_gather,
    copy_to_group,
    gather_from_group,
    reduce_from_group_,
    split_to_group,
)
from fastmp.hf.hooks import has_user_hooks
from fastmp.hf.patches import ModulePatch
from fastmp.ops.core.registry import can_read_values
from fastmp.tensor_parallel.attributes import (
    ParallelAttributes,
    join_shards,
    local_shard,
    parallel_attributes,
)
from fastmp.tensor_parallel.embedding import VocabParallelEmbedding
from fastmp.tensor_parallel.layers import GroupModule, ParallelModule
from fastmp.tensor_parallel.linear_loss import vocab_parallel_linear_cross_entropy
from fastmp.training.replicas import checksum

_OUTPUTS, _INPUTS = ParallelAttributes(True, 0), ParallelAttributes(True, 1)
_LINEAR = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D")


class TPModule(ModulePatch, ParallelModule):
    """Sharded module, or one through which tensors enter or leave the tensor-parallel region.

    As in every `ParallelModule`, parameters carry `ParallelAttributes`, copies use the same group, and
    torch.distributed.checkpoint needs `sharded_state_dict`.

    Attributes:
        by: the sharded dimension, for the table that `accelerate` returns; "": not in the table.
        supported: the classes that can be sharded; empty: any.
        sizes: attributes of the module that `shard_` divides by the number of ranks.
        padded: the rows are padded with zeros if they are not divisible by the number of ranks.
        shard_attributes: {parameter: its sharding}, set by `shard_`.
    """

    by = ""
    supported: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    padded = False
    shard_attributes: Mapping[str, ParallelAttributes]

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        if cls.supported and kind not in cls.supported:
            return f"is {kind}, not {cls.supported[0]}"
        return "has a forward of its own, set on the module" if "forward" in vars(module) else None

    @classmethod
    def sharding(cls, module: nn.Module) -> dict[str, ParallelAttributes]:
        """Return {parameter: its sharding}; the other parameters of the module are replicated."""
        return {}

    def shard_(self: Any, group: ProcessGroup) -> None:
        """Keep this rank's shards of an unsharded module that has this class already."""
        sharding, size = type(self).sharding(self), group.size()
        rows = (parallel_attributes(self.weight).num_valid_rows or len(self.weight)) if self.padded else 0
        self.__dict__.update(
            group=group, tp_size=size, tp_rank=group.rank(), num_valid_rows=rows, shard_attributes=sharding
        )
        for name in self._own_sizes():
            setattr(self, name, getattr(self, name) // size)
        for name, attributes in sharding.items():
            parameter = getattr(self, name)
            if not parallel_attributes(parameter).tensor_model_parallel:  # a tied one may be sharded already
                _set_data(parameter, self._local_shard(parameter.data, attributes))
        self._mark()

    def unshard_(self: Any) -> None:
        """Gather the shards and restore the class; tied parameters are gathered once."""
        for name, attributes in self.shard_attributes.items():
            parameter = getattr(self, name)
            if parallel_attributes(parameter).tensor_model_parallel:
                _set_data(parameter, self.gather(parameter.data, attributes))
                for field in ParallelAttributes._fields:
                    delattr(parameter, field)
        for name in self._own_sizes():
            setattr(self, name, getattr(self, name) * self.tp_size)
        for name in ("group", "tp_size", "tp_rank", "num_valid_rows", "shard_attributes"):
            del self.__dict__[name]
        self.__class__ = type(self).original

    def gather(self: Any, shard: Tensor, attributes: ParallelAttributes) -> Tensor:
        """Return the full tensor of all ranks' shards. Collective."""
        shards = all_gather(shard[None], self.group)[0].unbind()
        full = join_shards(shards, attributes.partition_dim, attributes.partition_stride)
        return full[: self.num_valid_rows].clone() if self.num_valid_rows else full

    def _local_shard(self: Any, full: Tensor, attributes: ParallelAttributes) -> Tensor:
        if not self.num_valid_rows:
            dim, stride = attributes.partition_dim, attributes.partition_stride
            return local_shard(full, dim, stride, self.tp_size, self.tp_rank).contiguous()
        rows = -(-self.num_valid_rows // self.tp_size)
        local = full[self.tp_rank * rows :][:rows]
        return torch.cat((local, local.new_zeros(rows - len(local), *local.shape[1:])))

    def _own_sizes(self) -> list[str]:
        return [name for name in self.sizes if name in vars(self)]

    def _marks(self) -> dict[str, ParallelAttributes]:
        return dict(self.shard_attributes)


def _set_data(parameter: nn.Parameter, data: Tensor) -> None:
    """Replace a parameter's data by a tensor of another shape, and drop its gradient.

    While an earlier loss is alive, autograd keeps the gradient's shape; assigning another dtype resets it.
    """
    parameter.grad = None
    another = torch.float16 if data.dtype == torch.bfloat16 else torch.bfloat16
    parameter.data = data.new_empty(0, dtype=another)
    parameter.data = data


class CopyToTPRegion(TPModule):
    """Module whose input enters the tensor-parallel region: copy forward, all-reduce backward."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (copy_to_group(args[0], self.group), *args[1:])
        else:
            kwargs["hidden_states"] = copy_to_group(kwargs["hidden_states"], self.group)
        return super().forward(*args, **kwargs)


class InRegion(TPModule):
    """Module inside the tensor-parallel region, whose hooks get the full tensors nevertheless.

    With user hooks, `__call__` gathers a sharded input before they run and takes this rank's part of the
    output after them; `forward`, which runs between them, does the reverse. Gradients follow: those that
    backward hooks get are full as well. All ranks of the group need the same hooks.

    Attributes:
        input_dim: the dimension of the first argument that is sharded, None: it is not.
        output_dim: the dimension of the output, or of the first of several, that is sharded.
        blocks: stacked parts along `output_dim`, each of which is sharded by itself.
        is_copied: the first argument has been copied into the region, and its gradient is a partial sum.
    """

    input_dim: int | None = None
    output_dim: int | None = None
    blocks = 1
    is_copied = False

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_user_hooks(self):
            return super().__call__(*args, **kwargs)
        if self.input_dim is not None:
            args = (gather_from_group(args[0], self.group, self.input_dim), *args[1:])
        elif self.is_copied:  # `forward` all-reduces the gradient, and so does what has copied the input
            fixed = args[0].detach()
            args = (fixed + (args[0] - fixed) / self.tp_size, *args[1:])
        output = super().__call__(*args, **kwargs)
        return output if self.output_dim is None else _on_first(output, self._own_part)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_user_hooks(self):
            return self.local_forward(*args, **kwargs)
        if self.input_dim is not None:
            args = (split_to_group(args[0], self.group, self.input_dim), *args[1:])
        elif self.is_copied:
            args = (copy_to_group(args[0], self.group), *args[1:])
        output = self.local_forward(*args, **kwargs)
        return output if self.output_dim is None else _on_first(output, self._full)

    def local_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the module on this rank's shards."""
        return super().forward(*args, **kwargs)

    def _full(self: Any, part: Tensor) -> Tensor:
        full = gather_from_group(part, self.group, self.output_dim)
        return self._reordered(full, (self.tp_size, self.blocks))

    def _own_part(self: Any, full: Tensor) -> Tensor:
        full = self._reordered(full, (self.blocks, self.tp_size))
        return split_to_group(full, self.group, self.output_dim)

    def _reordered(self: Any, full: Tensor, sizes: tuple[int, int]) -> Tensor:
        """Exchange the order of ranks and blocks along the last dimension."""
        return full if self.blocks == 1 else full.unflatten(-1, (*sizes, -1)).transpose(-3, -2).flatten(-3)


def _on_first(output: Any, function: Any) -> Any:
    return (function(output[0]), *output[1:]) if isinstance(output, tuple) else function(output)


class Elementwise(InRegion):
    """Activation of a sharded tensor."""

    input_dim = output_dim = -1

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        return None  # a forward set on the module gets full tensors, as hooks do


class PerHeadScores(Elementwise):
    """Dropout of attention weights (B, N, S, E), whose heads are sharded."""

    input_dim = output_dim = 1


class ShardedInput(InRegion):
    """Module whose first argument is sharded, and whose children enter and leave the region."""

    input_dim = -1


class ShardedOutput(InRegion):
    """Module whose output is sharded, and whose children enter the region."""

    output_dim = -1


class Heads(CopyToTPRegion):
    """Attention over this rank's heads; parameters of the module itself (sinks) have one value a head."""

    by = "heads"
    sizes = ("split_size",)

    @classmethod
    def sharding(cls, module: nn.Module) -> dict[str, ParallelAttributes]:
        return dict.fromkeys(module._parameters, _OUTPUTS)


class HeadsAlone(ShardedOutput, Heads):
    """Attention without its output projection, which another module has: BERT."""


class LatentHeads(TPModule):
    """Multi-head latent attention of DeepSeek-V3 over this rank's heads.

    Latent keys and values are replicated; they enter the tensor-parallel region where they are expanded to
    heads.
    """

    by = "heads"
    needs = ("expand_kv",)

    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> Any:
        return super().expand_kv(  # type: ignore[misc]
            copy_to_group(kv_nope, self.group), copy_to_group(k_rot, self.group)
        )


def _is_transposed(linear: nn.Module) -> bool:
    """Return True if the weight of a linear layer is (in, out)."""
    return type(linear).__name__ == "Conv1D"


class ColumnParallel(InRegion):
    """Column-parallel linear; the input is already in the tensor-parallel region."""

    by = "outputs"
    supported: tuple[str, ...] = _LINEAR
    sizes = ("nf",)
    output_dim: int | None = -1
    is_copied = True

    @classmethod
    def sharding(cls, module: Any) -> dict[str, ParallelAttributes]:
        weight = ParallelAttributes(True, int(_is_transposed(module)), cls.blocks)
        bias = {"bias": ParallelAttributes(True, 0, cls.blocks)} if module.bias is not None else {}
        return {"weight": weight, **bias}


class FusedColumnParallel(ColumnParallel):
    """Column-parallel linear of stacked queries, keys and values, each of which is sharded by heads."""

    by = "outputs, in 3 blocks"
    blocks = 3


class ColumnParallelWithCopy(ColumnParallel, CopyToTPRegion):
    """Column-parallel linear that copies its own input into the tensor-parallel region."""

    is_copied = False


class RowParallel(InRegion):
    """Row-parallel linear: all-reduce the output, then add the bias."""

    by = "inputs"
    supported = _LINEAR
    input_dim = -1

    @classmethod
    def sharding(cls, module: nn.Module) -> dict[str, ParallelAttributes]:
        return {"weight": _OUTPUTS if _is_transposed(module) else _INPUTS}

    def local_forward(self: Any, input: Tensor) -> Tensor:
        weight = self.weight.t() if _is_transposed(self) else self.weight
        output = reduce_from_group_(F.linear(input, weight), self.group)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class PerHeadNorm(InRegion):
    """Replicated norm of queries or keys; the gradient of its weight is all-reduced over the heads."""

    by = "replicated; its gradient is all-reduced"
    needs = ("normalised",)
    input_dim = output_dim = -2  # (B, S, N, D)

    def local_forward(self: Any, hidden_states: Tensor) -> Tensor:
        return self.normalised(hidden_states, copy_to_group(self.weight, self.group))


class ExpertParallel(TPModule):
    """This rank's experts: every rank routes all tokens, and the outputs are all-reduced."""

    by = "experts"
    sizes = ("num_experts",)

    @classmethod
    def sharding(cls, module: nn.Module) -> dict[str, ParallelAttributes]:
        return dict.fromkeys(module._parameters, _OUTPUTS)

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        # 1. local expert indices; num_experts, which no expert has, for experts of other ranks
        local = top_k_index - self.tp_rank * self.num_experts
        local = local.where((local >= 0) & (local < self.num_experts), self.num_experts)
        # 2. enter the tensor-parallel region, compute, and all-reduce the experts' outputs
        hidden_states, top_k_weights = (copy_to_group(x, self.group) for x in (hidden_states, top_k_weights))
        output = super().forward(hidden_states, local, top_k_weights)
        return reduce_from_group_(output, self.group)


class TPEmbedding(TPModule, VocabParallelEmbedding):
    """Vocabulary-parallel embedding: ids of other ranks give zeros, and the outputs are all-reduced.

    DDP and the Trainer assume that all ranks are data-parallel replicas and broadcast the parameters and
    buffers of the first one. The buffer `part` detects that: it is checked in the first call, and on a CPU
    in every call. The first call also checks that all ranks have the same tokens.
    """

    by = "vocabulary"
    supported = ("torch.nn.modules.sparse.Embedding",)
    padded = True

    @classmethod
    def sharding(cls, module: nn.Module) -> dict[str, ParallelAttributes]:
        return {"weight": _OUTPUTS}

    def shard_(self: Any, group: ProcessGroup) -> None:
        super().shard_(group)
        rows = len(self.weight)
        start = self.tp_rank * rows
        self.__dict__.update(vocab_start=start, vocab_end=start + rows, sequence_parallel=False, seen=False)
        part = torch.tensor(self.tp_rank, device=self.weight.device)
        self.register_buffer("part", part, persistent=False)

    def unshard_(self: Any) -> None:
        for name in ("vocab_start", "vocab_end", "sequence_parallel", "seen", "part"):
            delattr(self, name)
        super().unshard_()

    def forward(self: Any, ids: Tensor) -> Tensor:
        first = not (self.seen or torch.compiler.is_compiling())
        if can_read_values(ids) or first:
            if (part := int(self.part)) != self.tp_rank:
                raise ValueError(
                    f"accelerate: shard {self.tp_rank} of the model is overwritten by shard {part}, as by "
                    "DDP; pass DDP the group of ranks with the same shard (process_group=)"
                )
        if first:
            self.seen = True
            self._compare(ids)
        return super().forward(ids)

    def _compare(self: Any, ids: Tensor) -> None:
        """Raise ValueError on all ranks if one of them has other tokens. Collective."""
        sums = all_gather(checksum(ids)[None], self.group)[0].tolist()
        other = next((rank for rank, found in enumerate(sums) if found != sums[0]), None)
        if other is not None:
            raise ValueError(
                f"accelerate: rank {other} of the group has other tokens than rank 0; all ranks of the group "
                "need the same batches (let a DistributedSampler count the groups, not all ranks)"
            )


class TPHead(ColumnParallel):
    """Vocabulary-parallel head: logits are gathered; the loss is computed without gathering."""

    by = "vocabulary"
    supported = _LINEAR[:1]
    padded = True
    output_dim, is_copied = None, False  # it gathers the logits itself

    def forward(self: Any, input: Tensor, *loss: Any, **options: Any) -> Any:
        if loss or options:
            return super().forward(input, *loss, **options)
        logits = super().forward(copy_to_group(input, self.group))
        return gather_from_group(logits, self.group)[..., : self.num_valid_rows]

    def cross_entropy(self: Any, hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return vocab_parallel_linear_cross_entropy(
            hidden, weight, labels, group=self.group, vocab_size=self.num_valid_rows, **options
        )


class TPModel(ModulePatch, GroupModule):
    """Sharded model; raises an error in methods that would take this rank's shards for full tensors."""

    group: ProcessGroup

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is sharded over ranks and cannot be pickled; call fastmp.restore first"
        )

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(
            f"resize_token_embeddings: {type(self).__name__} is sharded over ranks; call fastmp.restore first"
        )

    def save_pretrained(self: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> None:
        if state_dict is not None and not state_dict:
            return  # a rank that is not the first, by `whole_state_dict`
        if state_dict is None or any(
            parallel_attributes(parameter).tensor_model_parallel and state_dict[name].shape == parameter.shape
            for name, parameter in self.named_parameters()
            if name in state_dict
        ):
            raise ValueError(
                f"save_pretrained: this rank has one of {self.group.size()} shards of {type(self).__name__}; "
                "call whole_state_dict(model) on all ranks, and pass the result as state_dict"
            )
        if self.group.rank() == 0:  # ranks that have it all would write the same files at once
            super().save_pretrained(*args, state_dict=state_dict, **kwargs)  # type: ignore[misc]

    @property
    def peft_config(self) -> Any:
        raise AttributeError("peft_config")

    @peft_config.setter
    def peft_config(self, value: Any) -> NoReturn:
        raise ValueError(f"{type(self).__name__} is sharded over ranks; PEFT adapters are not supported")
