"""Expert load of transformers models in training: tokens of the busiest expert over the mean of its layer.

Forward pre-hooks on experts add counts on the device. Neither forward nor `step` waits for the device; `read`
does, once. With several ranks `step` sums the counts over all of them, so that the load is that of the step.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastmp.hf.tp_plan import group_of


class LayerLoad(NamedTuple):
    """Expert load (max/mean) of a layer, over the steps since the last `read`: 1 is balanced."""

    mean: float
    highest: float


class ExpertLoad:
    """Counts the tokens of each expert of a transformers model in training.

    Forwards in evaluation and recomputations of gradient checkpointing are not counted.

    Args:
        model: a transformers model, or a module that holds one; after `accelerate`.

    Raises:
        ValueError: the model has no experts.

    Example (needs a model with experts):
        >>> load = ExpertLoad(model)
        >>> for batch in batches:
        ...     model(**batch).loss.backward()
        ...     optimizer.step()
        ...     load.step()
        >>> print(load.read())  # {"model.layers.0.mlp.experts": LayerLoad(mean=1.31, highest=1.52), ...}
        >>> load.remove()
    """

    def __init__(self, model: nn.Module) -> None:
        found = {
            name: module
            for name, module in model.named_modules()
            if hasattr(module, "num_experts") and isinstance(getattr(module, "down_proj", None), Tensor)
        }
        if not found:
            raise ValueError(f"ExpertLoad: expected a model with experts, got {type(model).__name__}")
        group = group_of(model)
        self._ranks = 1 if group is None else group.size()  # over which experts are sharded by accelerate
        self.layers = tuple(found)
        self._counts: list[Tensor | None] = [None] * len(found)
        self._sums: Tensor | None = None  # (2, layers) float64: sum and maximum over the steps
        self._steps = 0
        self._handles = [
            module.register_forward_pre_hook(partial(self._count, layer), with_kwargs=True)
            for layer, module in enumerate(found.values())
        ]

    @torch.no_grad()
    def _count(self, layer: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Add the tokens of a forward: a pre-hook of the experts."""
        compiling = torch.compiler.is_compiling()
        if not module.training or (not compiling and torch._C._current_graph_task_id() != -1):
            return  # inside of a backward pass, forward is a recomputation
        index = (args[1] if len(args) > 1 else kwargs["top_k_index"]).reshape(-1)
        counts = self._counts[layer]
        if counts is None:
            counts = index.new_zeros(module.num_experts * self._ranks, dtype=torch.int64)
            self._counts[layer] = counts
        counts.scatter_add_(0, index.long(), torch.ones_like(index, dtype=torch.int64))

    @torch.no_grad()
    def step(self) -> None:
        """End a training step; on all ranks. The device works on, the host does not wait."""
        counts = [each for each in self._counts if each is not None]
        if not counts:
            return
        # 1. Counts of the step over all ranks.
        tokens = torch.stack([each.to(counts[0].device) for each in counts])
        torch._foreach_zero_(counts)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(tokens)
        # 2. Load of each layer; 0 without tokens.
        tokens = tokens.double()
        load = tokens.amax(1) / tokens.mean(1).clamp(min=1 / tokens.shape[1])
        # 3. Sum and maximum over the steps.
        if self._sums is None:
            self._sums = torch.stack([torch.zeros_like(load)] * 2)
        self._sums = torch.stack([self._sums[0] + load, torch.maximum(self._sums[1], load)])
        self._steps += 1

    def read(self) -> dict[str, LayerLoad]:
        """Return {name of the experts: load} over the steps since the last call; waits for the device."""
        if self._sums is None:
            return {}
        total, highest = self._sums.tolist()
        found = {
            name: LayerLoad(a / self._steps, b)
            for name, a, b in zip(self._named(), total, highest, strict=True)
        }
        self._sums, self._steps = None, 0
        return found

    def _named(self) -> list[str]:
        return [name for name, each in zip(self.layers, self._counts, strict=True) if each is not None]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
