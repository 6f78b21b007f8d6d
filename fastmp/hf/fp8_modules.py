"""FP8 linears and experts of transformers models: `accelerate(model, precision="fp8")`.

The linear layers of attention and MLPs, which are those that the family's tensor-parallel plan shards by
columns or rows, and experts multiply in FP8, see `fastmp.tensor_parallel.fp8_linear`. Routers, norms,
embeddings and the head do not. The copies in FP8 are no parameters: names in the state_dict stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastmp.config import ActivationSpec
from fastmp.config.precision import Fp8Recipe
from fastmp.hf.families.family import TPTable
from fastmp.hf.hooks import activation_form, form_of
from fastmp.hf.patches import ModulePatch
from fastmp.hf.tp_modules import ColumnParallel, RowParallel
from fastmp.nn.moe.fp8_experts import fp8_experts
from fastmp.tensor_parallel.fp8_linear import QuantizedWeight, fp8_linear, native_block

_COPIES = "_fastmp_fp8"  # attribute of a module: {name of a parameter: its copies}


class Fp8Linear(ModulePatch):
    """nn.Linear whose forward and dgrad are FP8 GEMMs."""

    by = "FP8: fastmp.ops.linear_fp8"

    def forward(self: Any, input: Tensor) -> Tensor:
        copies = self.__dict__[_COPIES]["weight"]
        copies.refresh(self.weight)
        return fp8_linear(input, self.weight, self.bias, copies)


def recipe_of(precision: str | Fp8Recipe, model: nn.Module) -> Fp8Recipe | None:
    """Return the FP8 recipe that `accelerate` was asked for, None for "dtype".

    Raises:
        ValueError: another precision.
    """
    if isinstance(precision, Fp8Recipe) or precision == "dtype":
        return precision if isinstance(precision, Fp8Recipe) else None
    if precision != "fp8":
        raise ValueError(
            f'accelerate: expected precision "dtype", "fp8" or an Fp8Recipe, got {precision!r}; '
            "pass the dtype of the weights to from_pretrained"
        )
    return Fp8Recipe(native_block(next(model.parameters()).device))


class QuantizedModule(NamedTuple):
    """A module that multiplies in FP8, its parameters to quantise, and its patch; or the reason why not."""

    label: str
    module: Any
    parameters: tuple[str, ...]
    by: str
    patch: type[ModulePatch] | None
    why: str | None


def plan(
    model: nn.Module, tables: Mapping[type, TPTable], experts: str | None, recipe: Fp8Recipe
) -> Iterator[QuantizedModule]:
    """Yield the linear layers of attention and MLPs, and experts.

    tables: the family's tensor-parallel plan, by class. experts: the name of the class of experts.
    """
    for module in model.modules():
        name = type(module).__name__
        for child, kind in tables.get(type(module), {}).items():
            if child and kind is not None and issubclass(kind, ColumnParallel | RowParallel):
                linear, label = getattr(module, child), f"{name}.{child}"
                why = _why_not(linear, recipe)
                yield QuantizedModule(label, linear, ("weight",), Fp8Linear.by, Fp8Linear, why)
        if name == experts:
            parameters, why = ("gate_up_proj", "down_proj"), _why_not_experts(module, recipe)
            by = "FP8: fastmp.ops.grouped_mm_fp8"
            yield QuantizedModule(f"{name}, its GEMMs", module, parameters, by, None, why)


def _why_not(module: Any, recipe: Fp8Recipe) -> str | None:
    """Return the reason why a linear layer does not multiply in FP8, or None."""
    if type(module) is not nn.Linear:
        return f"not FP8: a {type(module).__name__}"
    if "forward" in vars(module):
        return "not FP8: it has a forward of its own, set on the module"
    return recipe.misfit({"out_features": module.out_features, "in_features": module.in_features})


def _why_not_experts(module: Any, recipe: Fp8Recipe) -> str | None:
    """Return the reason why experts do not multiply in FP8, or None."""
    if module.is_transposed or module.has_bias or not module.has_gate:
        return "not FP8: they have biases, transposed weights or no gate"
    if not module.is_concatenated or form_of(type(getattr(module, "act_fn", None))) is None:
        return "not FP8: they have a gate of their own"
    _, hidden, ffn = module.down_proj.shape
    return recipe.misfit({"hidden_size": hidden, "intermediate_size": ffn})


def quantize(module: nn.Module, names: tuple[str, ...], recipe: Fp8Recipe) -> None:
    """Give a module copies of its parameters `names`, which it quantises before it multiplies."""
    module.__dict__[_COPIES] = {name: QuantizedWeight(recipe) for name in names}


def drop_copies(module: nn.Module) -> None:
    """Undo `quantize`."""
    module.__dict__.pop(_COPIES, None)


def experts_are_fp8(module: nn.Module) -> bool:
    """Return True if `quantize` has given a module of experts its copies."""
    return _COPIES in module.__dict__


def experts_in_fp8(module: Any, rows: Tensor, offsets: Tensor) -> Tensor | None:
    """Return the outputs of experts with FP8 copies for rows sorted by expert; None for others.

    An activation with hooks, or one that was replaced, has no FP8 epilogue: None as well.
    """
    copies = module.__dict__.get(_COPIES)
    if copies is None or (form := activation_form(module.act_fn)) is None or "_apply_gate" in module.__dict__:
        return None
    first, second = copies["gate_up_proj"], copies["down_proj"]
    first.refresh(module.gate_up_proj)
    second.refresh(module.down_proj)
    spec = ActivationSpec("gated", "", form, 1)

    def activate(h: Tensor) -> Tensor:
        return torch.ops.fastmp.gated_activation(h, None, form)

    return fp8_experts(
        rows, offsets, (module.gate_up_proj, module.down_proj), (first, second), activate, spec
    )
