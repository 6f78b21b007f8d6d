"""The code under test: a dense module, a parallel one, their data, and how their tensors correspond."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fastmp.tensor_parallel.attributes import local_shard, parallel_attributes
from fastmp.testing.differential.cases import Case
from fastmp.testing.parallel import full_tensor

__all__ = ["Ranks", "Subject"]

SUM = "sum"  # in `placements`: ranks along the axis hold partial sums
Placement = Mapping[str, Any]  # axis -> dimension that is sharded, or SUM


class Ranks:
    """The mesh of a case, as one of its ranks sees it.

    Attributes:
        case: the case.
        rank: this rank.
        mesh: `DeviceMesh` with the case's axes, outermost first.
    """

    def __init__(self, case: Case, mesh: DeviceMesh) -> None:
        self.case, self.mesh = case, mesh
        self.rank = dist.get_rank()

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the process group of this rank along `axes`; of all ranks without any."""
        if not axes:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        if len(axes) == 1:
            return self.mesh.get_group(axes[0])
        return self.mesh[axes]._flatten().get_group()

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis."""
        return self.case.axis(axis)

    def index(self, axis: str) -> int:
        """Return the index of this rank along an axis."""
        return self.case.coordinates(self.rank).get(axis, 0)

    def shard(self, full: torch.Tensor, axis: str, dim: int, stride: int = 1) -> torch.Tensor:
        """Return a detached copy of this rank's shard of `full` along `dim`; `stride` blocks are fused."""
        shard = local_shard(full.detach(), dim, stride, self.size(axis), self.index(axis))
        return shard.clone(memory_format=torch.contiguous_format)


class Subject:
    """Dense and parallel code to compare. Override `dense`, `parallel` and `inputs`; the rest has defaults.

    Attributes:
        layouts: sizes to try for each mesh axis, outermost axis first.
        sizes: values to try for each size of a case, the plainest first.
        data_axes: axes along which ranks have their own data; along all others they have the same.
        placements: for names of outputs and dense parameters (patterns of `fnmatch`): axis -> the dimension
            that is sharded along it, or "sum" where ranks hold partial sums; None leaves the tensor out.
            Without an entry a tensor is replicated, a DTensor is made full, and a parameter of a fastmp layer
            follows its `ParallelAttributes` over the axes `tp`, `ep` and `etp`.
        tolerance: largest error, relative to the largest value among tensors of the same kind.
        learning_rate: of the SGD steps.
    """

    layouts: Mapping[str, Sequence[int]] = {"tp": (1, 2, 4)}
    sizes: Mapping[str, Sequence[int]] = {"tokens": (2, 1, 3, 5)}
    data_axes: Sequence[str] = ("dp",)
    placements: Mapping[str, Placement | None] = {}
    tolerance: float = 1e-9
    learning_rate: float = 0.1

    def dense(self, case: Case) -> nn.Module:
        """Return the dense module; the generator of torch has been seeded. It is converted to float64."""
        raise NotImplementedError("dense(case): return the module to compare with")

    def parallel(self, dense: nn.Module, ranks: Ranks) -> nn.Module:
        """Return the parallel module with the weights of `dense`, a copy that it may take apart."""
        raise NotImplementedError("parallel(dense, ranks): return the parallel module with its weights")

    def inputs(self, case: Case, generator: torch.Generator) -> Mapping[str, Any] | Sequence[Any]:
        """Return the arguments of one forward: a microbatch of one part of the data."""
        raise NotImplementedError("inputs(case, generator): return the arguments of one forward")

    def forward(self, model: nn.Module, batch: Any) -> Any:
        """Return a tensor, or tensors in a dictionary or tuple, of either module."""
        return model(**batch) if isinstance(batch, Mapping) else model(*batch)

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor | None:
        """Return the sum of the loss over tokens; None: a fixed function of the outputs."""
        return None

    def count(self, batch: Any) -> float:
        """Return the number of tokens in the loss of `batch`; the sum over the step divides its loss."""
        return 1.0

    def divisor(self, local: float, ranks: Ranks) -> float:
        """Return what the parallel code divides its losses by; `local`: the count of this rank's batches."""
        total = torch.tensor(float(local), dtype=torch.float64)
        for axis in self.data_axes:
            if ranks.size(axis) > 1:
                dist.all_reduce(total, group=ranks.group(axis))
        return total.item()

    def synchronize(self, model: nn.Module, ranks: Ranks) -> None:
        """Reduce the gradients of the parallel module after the last backward of a step."""

    def norm(self, model: nn.Module, ranks: Ranks) -> float | torch.Tensor | None:
        """Return the global gradient norm as the parallel code has it; None: not compared, never clipped."""
        return None

    @property
    def clips(self) -> bool:
        """Return True if the subject has a `norm`, by which cases with `clip` scale gradients."""
        return type(self).norm is not Subject.norm

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer for either module."""
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate)

    def gradient(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return the gradient of a parameter of either module."""
        main_grad: torch.Tensor | None = getattr(param, "main_grad", None)
        return param.grad if main_grad is None else main_grad

    def dense_name(self, name: str, ranks: Ranks) -> str:
        """Return the dense module's name of a parameter of the parallel one."""
        return name

    def full(
        self, name: str, tensor: torch.Tensor, param: nn.Parameter, ranks: Ranks
    ) -> tuple[torch.Tensor, Placement]:
        """Return what to compare of a parameter or its gradient, and its placement (`placements`).

        Args:
            name: the dense name.
            tensor: the parameter or its gradient.
            param: the parameter, with its attributes.
        """
        from torch.distributed.tensor import DTensor

        placement = self.placement(name) or {}
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        marks = parallel_attributes(param)
        if not placement and (marks.tensor_model_parallel or marks.expert_parallel):
            groups = {axis: ranks.group(axis) for axis in ("tp", "ep", "etp") if axis in ranks.case.axes()}
            tensor = full_tensor(
                tensor, param, groups.get("tp"), etp_group=groups.get("etp"), ep_group=groups.get("ep")
            )
        return tensor, placement

    def placement(self, name: str) -> Placement | None:
        """Return the entry of `placements` for a name; {} without one."""
        for pattern, placement in self.placements.items():
            if fnmatchcase(name, pattern):
                return placement
        return {}

    @classmethod
    def of_module(cls, module: ModuleType) -> Subject:
        """Return the subject that a module's functions and variables of these names make."""
        given = {name: getattr(module, name) for name in _OVERRIDDEN if hasattr(module, name)}
        methods = {
            name: staticmethod(value) if inspect.isfunction(value) else value
            for name, value in given.items()
            if not callable(value) or getattr(value, "__module__", "") == module.__name__  # not an import
        }
        made: Subject = type(module.__name__, (cls,), methods)()
        return made


_FIXED = ("clips", "placement", "of_module")
_OVERRIDDEN = [name for name in vars(Subject) if not name.startswith("_") and name not in _FIXED]
