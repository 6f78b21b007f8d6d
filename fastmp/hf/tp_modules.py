"""Parts of a model of transformers that is divided over a group: what a rank has of a module, and sends.

All ranks of the group compute the same tokens. Linear layers are divided by outputs, then by inputs (Shoeybi
et al. 2019), attention thereby by heads, embedding and head by the vocabulary, experts by their number.
Inside such a region ranks differ; outside, tensors and their gradients are the same on all of them, to the
bit. What enters a region is copied (its gradient is summed over the group), what leaves it is summed or
gathered.

These parts come on top of those that compute: `class_with` is applied twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fastmp.distributed.collectives import all_gather, copy_to_group, gather_from_group, reduce_from_group_
from fastmp.hf.patches import Part
from fastmp.ops.core.registry import can_read_values
from fastmp.tensor_parallel.attributes import (
    ParallelAttributes,
    join_shards,
    local_shard,
    parallel_attributes,
)
from fastmp.tensor_parallel.layers import GroupModule, ParallelModule, VocabParallelEmbedding
from fastmp.tensor_parallel.linear_loss import vocab_parallel_linear_cross_entropy
from fastmp.training.replicas import checksum

_OUTPUTS, _INPUTS = ParallelAttributes(True, 0), ParallelAttributes(True, 1)
_LINEAR = ("torch.nn.modules.linear.Linear", "transformers.pytorch_utils.Conv1D")


class Divided(Part, ParallelModule):
    """A module of which a rank has a part, or through which tensors enter or leave a region.

    As with every `ParallelModule`, parameters have marks that say how they are cut, copies work in the same
    group, and torch.distributed.checkpoint takes `sharded_state_dict` alone.
    """

    by = ""  # how it is divided, for the table, where it says something
    of: tuple[str, ...] = ()  # the classes that it divides; any, where there are none
    counts: tuple[str, ...] = ()  # attributes that count what is divided
    padded = False  # whether zeros fill the last parts where ranks do not divide the rows
    division: Mapping[str, ParallelAttributes]

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        if cls.of and kind not in cls.of:
            return f"is {kind}, not {cls.of[0]}"
        return "has a forward of its own, set on the module" if "forward" in vars(module) else None

    @classmethod
    def cut(cls, module: nn.Module) -> dict[str, ParallelAttributes]:
        """How the module's own parameters are divided; those that are not there stay whole."""
        return {}

    def divide_(self: Any, group: ProcessGroup) -> None:
        """Keep this rank's parts of a module that is whole, and has this class already."""
        division, size = type(self).cut(self), group.size()
        rows = (parallel_attributes(self.weight).num_valid_rows or len(self.weight)) if self.padded else 0
        self.__dict__.update(
            group=group, tp_size=size, tp_rank=group.rank(), num_valid_rows=rows, division=division
        )
        for name in self._counts():
            setattr(self, name, getattr(self, name) // size)
        for name, marks in division.items():
            parameter = getattr(self, name)
            if not parallel_attributes(parameter).tensor_model_parallel:  # a tied one may be a part already
                _put(parameter, self._part_of(parameter.data, marks))
        self._mark()

    def join_(self: Any) -> None:
        """Gather the parts again, in this module and in those it shares them with; its class is as before."""
        for name, marks in self.division.items():
            parameter = getattr(self, name)
            if parallel_attributes(parameter).tensor_model_parallel:
                _put(parameter, self.whole(parameter.data, marks))
                for mark in ParallelAttributes._fields:
                    delattr(parameter, mark)
        for name in self._counts():
            setattr(self, name, getattr(self, name) * self.tp_size)
        for name in ("group", "tp_size", "tp_rank", "num_valid_rows", "division"):
            del self.__dict__[name]
        self.__class__ = type(self).original

    def whole(self: Any, part: Tensor, marks: ParallelAttributes) -> Tensor:
        """The tensor of which all ranks of the group give their parts."""
        parts = all_gather(part[None], self.group)[0].unbind()
        joined = join_shards(parts, marks.partition_dim, marks.partition_stride)
        return joined[: self.num_valid_rows].clone() if self.num_valid_rows else joined

    def _part_of(self: Any, whole: Tensor, marks: ParallelAttributes) -> Tensor:
        if not self.num_valid_rows:
            shard = local_shard(
                whole, marks.partition_dim, marks.partition_stride, self.tp_size, self.tp_rank
            )
            return shard.contiguous()
        rows = -(-self.num_valid_rows // self.tp_size)
        own = whole[self.tp_rank * rows :][:rows]
        return torch.cat((own, own.new_zeros(rows - len(own), *own.shape[1:])))

    def _counts(self) -> list[str]:
        return [name for name in self.counts if name in vars(self)]

    def _marks(self) -> dict[str, ParallelAttributes]:
        return dict(self.division)


def _put(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data of another shape, and no gradient.

    While a loss of before is alive, autograd keeps the shape that gradients had; another dtype ends that.
    """
    parameter.grad = None
    another = torch.float16 if data.dtype == torch.bfloat16 else torch.bfloat16
    parameter.data = data.new_empty(0, dtype=another)
    parameter.data = data


class Region(Divided):
    """A module whose input enters a region: every rank computes its part of it."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (copy_to_group(args[0], self.group), *args[1:])
        else:
            kwargs["hidden_states"] = copy_to_group(kwargs["hidden_states"], self.group)
        return super().forward(*args, **kwargs)


class Heads(Region):
    """Attention over this rank's heads; its own parameters are one for each head, as sinks are."""

    by = "heads"
    counts = ("split_size",)

    @classmethod
    def cut(cls, module: nn.Module) -> dict[str, ParallelAttributes]:
        return dict.fromkeys(module._parameters, _OUTPUTS)


class LatentHeads(Divided):
    """Attention of DeepSeek-V3 over this rank's heads, which share latent keys and values.

    What is latent is whole on every rank. It enters the region where it is expanded to heads.
    """

    by = "heads"
    needs = ("expand_kv",)

    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor) -> Any:
        return super().expand_kv(  # type: ignore[misc]
            copy_to_group(kv_nope, self.group), copy_to_group(k_rot, self.group)
        )


def _is_transposed(linear: nn.Module) -> bool:
    """Whether the weight of a linear layer is (in, out)."""
    return type(linear).__name__ == "Conv1D"


class Columns(Divided):
    """A linear layer that makes this rank's outputs, inside a region."""

    by = "outputs"
    of: tuple[str, ...] = _LINEAR
    counts = ("nf",)
    blocks = 1

    @classmethod
    def cut(cls, module: Any) -> dict[str, ParallelAttributes]:
        weight = ParallelAttributes(True, int(_is_transposed(module)), cls.blocks)
        bias = {"bias": ParallelAttributes(True, 0, cls.blocks)} if module.bias is not None else {}
        return {"weight": weight, **bias}


class FusedColumns(Columns):
    """Queries, keys and values in one: each is divided by itself."""

    by = "outputs, in 3 blocks"
    blocks = 3


class EnteredColumns(Columns, Region):
    """A linear layer that makes this rank's outputs, and whose input is that of no other."""


class Rows(Divided):
    """A linear layer over this rank's inputs, whose output is summed; the bias is added once."""

    by = "inputs"
    of = _LINEAR

    @classmethod
    def cut(cls, module: nn.Module) -> dict[str, ParallelAttributes]:
        return {"weight": _OUTPUTS if _is_transposed(module) else _INPUTS}

    def forward(self: Any, input: Tensor) -> Tensor:
        weight = self.weight.t() if _is_transposed(self) else self.weight
        output = reduce_from_group_(F.linear(input, weight), self.group)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class Summed(Divided):
    """A norm of single heads: every rank has its weight, and the gradient of its own heads."""

    by = "whole; its gradient is summed"
    needs = ("normalised",)

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return self.normalised(hidden_states, copy_to_group(self.weight, self.group))


class ExpertsOfRank(Divided):
    """This rank's experts; every rank routes all tokens, and the experts' sums are added over the group."""

    by = "experts"
    counts = ("num_experts",)

    @classmethod
    def cut(cls, module: nn.Module) -> dict[str, ParallelAttributes]:
        return dict.fromkeys(module._parameters, _OUTPUTS)

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        own = top_k_index - self.tp_rank * self.num_experts
        own = own.where((own >= 0) & (own < self.num_experts), self.num_experts)  # those of no expert here
        hidden_states, top_k_weights = (copy_to_group(x, self.group) for x in (hidden_states, top_k_weights))
        output = super().forward(hidden_states, own, top_k_weights)
        return reduce_from_group_(output, self.group)


class VocabularyRows(Divided, VocabParallelEmbedding):
    """This rank's rows of the embedding; ids of other rows give zeros, which are added up over the group.

    DDP and the Trainer take ranks for replicas where nobody says otherwise, and begin by giving all of them
    the parameters and buffers of the first one. `part` is a buffer that would tell: it is looked at in the
    first call, and on a CPU in each. Other tokens on each rank would give numbers without a meaning, so the
    first call compares those, too.
    """

    by = "vocabulary"
    of = ("torch.nn.modules.sparse.Embedding",)
    padded = True

    @classmethod
    def cut(cls, module: nn.Module) -> dict[str, ParallelAttributes]:
        return {"weight": _OUTPUTS}

    def divide_(self: Any, group: ProcessGroup) -> None:
        super().divide_(group)
        rows = len(self.weight)
        start = self.tp_rank * rows
        self.__dict__.update(vocab_start=start, vocab_end=start + rows, sequence_parallel=False, seen=False)
        part = torch.tensor(self.tp_rank, device=self.weight.device)
        self.register_buffer("part", part, persistent=False)

    def join_(self: Any) -> None:
        for name in ("vocab_start", "vocab_end", "sequence_parallel", "seen", "part"):
            delattr(self, name)
        super().join_()

    def forward(self: Any, ids: Tensor) -> Tensor:
        first = not (self.seen or torch.compiler.is_compiling())
        if can_read_values(ids) or first:
            if (part := int(self.part)) != self.tp_rank:
                raise ValueError(
                    f"accelerate: part {self.tp_rank} of the model is overwritten by part {part}, as by "
                    "DDP; give DDP, as its process_group, the ranks that have the same part"
                )
        if first:
            self.seen = True
            self._compare(ids)
        return super().forward(ids)

    def _compare(self: Any, ids: Tensor) -> None:
        """Raise ValueError, on all ranks, where one has other tokens."""
        sums = all_gather(checksum(ids)[None], self.group)[0].tolist()
        other = next((rank for rank, found in enumerate(sums) if found != sums[0]), None)
        if other is not None:
            raise ValueError(
                f"accelerate: rank {other} of the group has other tokens than rank 0; ranks that divide a "
                "model take the same batches (a DistributedSampler of them counts the groups, not all ranks)"
            )


class VocabularyColumns(Columns):
    """This rank's rows of the head: logits are gathered, and the loss is made without gathering any."""

    by = "vocabulary"
    of = _LINEAR[:1]
    padded = True

    def forward(self: Any, input: Tensor, *loss: Any, **options: Any) -> Any:
        if loss or options:
            return super().forward(input, *loss, **options)
        logits = super().forward(copy_to_group(input, self.group))
        return gather_from_group(logits, self.group)[..., : self.num_valid_rows]

    def cross_entropy(self: Any, hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return vocab_parallel_linear_cross_entropy(
            hidden, weight, labels, group=self.group, vocab_size=self.num_valid_rows, **options
        )


class DividedModel(Part, GroupModule):
    """The model itself, without what would take one rank's part for the whole."""

    group: ProcessGroup

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} is divided over ranks and cannot be pickled: restore it first"
        )

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(f"resize_token_embeddings: {type(self).__name__} is divided; restore it first")

    def save_pretrained(self: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> None:
        if state_dict is None or any(
            parallel_attributes(parameter).tensor_model_parallel and state_dict[name].shape == parameter.shape
            for name, parameter in self.named_parameters()
            if name in state_dict
        ):
            raise ValueError(
                f"save_pretrained: this rank has one of {self.group.size()} parts of {type(self).__name__}; "
                "call whole_state_dict(model) on all ranks, and give save_pretrained its result as state_dict"
            )
        super().save_pretrained(*args, state_dict=state_dict, **kwargs)  # type: ignore[misc]

    @property
    def peft_config(self) -> Any:
        raise AttributeError("peft_config")

    @peft_config.setter
    def peft_config(self, value: Any) -> NoReturn:
        raise ValueError(f"{type(self).__name__} is divided over ranks, and takes no adapter of PEFT")
