"""Records of transformers model families: `Conversion` (import, export) and `Acceleration` (`accelerate`).

Modules of this package list their families in FAMILIES, `fastmp.hf.families` has all. The rest of `fastmp.hf`
reads these records and never compares names of families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any, NamedTuple

from fastmp.config import GPTConfig
from fastmp.hf.patches import ModulePatch
from fastmp.hf.tp_modules import TPModule

__all__ = ["Acceleration", "Conversion", "Family", "Field", "TPTable", "SlidingWindow", "optional_int"]

# {name of a child, "" for the module itself: its class under tensor parallelism, None if replicated}
TPTable = Mapping[str, type[TPModule] | None]


class Field(NamedTuple):
    """A value of config.json that `GPTConfig` has as well.

    Args:
        ours: the name in `GPTConfig`; "moe.", "latent." and "bert." prefix those of its tables.
        default: of transformers' configuration class, for a missing key; ...: the key is required.
        values: {their value: our value}; None: the same values.
    """

    ours: str
    default: Any = ...
    values: Mapping[str, Any] | None = None


class SlidingWindow(NamedTuple):
    """Sliding-window attention of a family.

    Args:
        size: the window if config.json has no `sliding_window`.
        first_layer: the first layer with the window if config.json has no `max_window_layers`.
        opt_in: the window needs `use_sliding_window`.
        per_layer: layers may differ; otherwise the family has the window in all layers or in none.
    """

    size: int | None
    first_layer: int = 0
    opt_in: bool = False
    per_layer: bool = False


@dataclass(frozen=True)
class Conversion:
    """Mapping between config.json and safetensors files of a family and a `GPTConfig` and its parameters.

    In the weight tables, our name maps to theirs. Several of their names, separated by spaces, are
    concatenated along the rows of our parameter, except queries, keys and values, which fastmp interleaves
    by key-value head. `{e}` stands for the index of an expert.

    Args:
        architecture: `architectures` of config.json.
        layers: the prefix of layers, such as "model.layers".
        model_weights: parameters outside the layers.
        layer_weights: parameters of a layer.
        fields: keys of config.json with a counterpart in `GPTConfig`.
        model: constants of the recipe's [model].
        moe: constants of the recipe's [model.moe]; None: a family without experts.
        bert: constants of the recipe's [model.bert]; None: a decoder.
        latent: the family has latent attention.
        mtp_weights: parameters of an MTP module beside those of its layer; it has the name of a layer after
            the last. Empty: files of this family have no such modules.
        supported: {key of config.json: the values that fastmp computes}; the first one is written.
        tied_weights: {parameter that files may repeat: the parameter it is tied to}.
        transposed_linears: linear layers are stored as (in, out).
        transposed_experts: so are the experts of a layer, stacked in one tensor.
        rope_base: `rope_theta` if config.json has none.
        partial_rotary: rotary positions may turn a part of each head, `partial_rotary_factor`.
        defaults: values of keys without a `Field`, if config.json has none.
        aux_loss: `router_aux_loss_coef` if config.json has none; None: the family has no balancing loss.
        window: sliding-window attention; None: not supported in this family.
        read_keys: keys of config.json that `read` reads, or that change nothing here.
        read: adds entries to the recipe's [model] from config.json that are no `Field`.
        write: returns such entries of config.json for a configuration.
    """

    architecture: str
    layers: str
    model_weights: Mapping[str, str]
    layer_weights: Mapping[str, str]
    fields: Mapping[str, Field]
    model: Mapping[str, Any] = field(default_factory=dict)
    moe: Mapping[str, Any] | None = None
    bert: Mapping[str, Any] | None = None
    latent: bool = False
    mtp_weights: Mapping[str, str] = field(default_factory=dict)
    supported: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tied_weights: Mapping[str, str] = field(default_factory=dict)
    transposed_linears: bool = False
    transposed_experts: bool = False
    rope_base: float = 1e4
    partial_rotary: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aux_loss: float | None = 0.001
    window: SlidingWindow | None = None
    read_keys: Sequence[str] = ()
    read: Callable[[Mapping[str, Any], dict[str, Any]], None] = lambda content, model: None
    write: Callable[[GPTConfig], dict[str, Any]] = lambda config: {}


@dataclass(frozen=True)
class Acceleration:
    """Replacements of a family's modules, by the class names of transformers.

    Args:
        patches: {class: the patch that overrides its methods}.
        experts: the class of its experts; None: a family without experts.
        tp_plan: {class: its children under tensor parallelism}.
    """

    patches: Mapping[str, type[ModulePatch]]
    experts: str | None = None
    tp_plan: Mapping[str, TPTable] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A transformers model family, by its `model_type`; a part that is None is not supported."""

    model_type: str
    conversion: Conversion | None = None
    acceleration: Acceleration | None = None


def optional_int(content: Mapping[str, Any], key: str, default: int | None) -> int | None:
    """Return an integer of config.json that may be missing or null. Raises ValueError for other values."""
    value = content.get(key, default)
    if value is not None and type(value) is not int:
        raise ValueError(f"{key} must be a whole number, got {short(value)}")
    return value
