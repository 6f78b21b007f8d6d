"""`accelerate(model)`: a model of transformers computes the same with fastmp's ops, and `restore(model)`
undoes it.

A family says which part takes the place of which class. The plan is made first, without touching the model:
it finds the modules, checks that they have what the parts read, and says what stays and why. Only a whole
plan is carried out.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from fastmp.integrations.huggingface import experts
from fastmp.integrations.huggingface.heads import (
    CausalLM,
    CausalLMWithCrossAttention,
    CausalLMWithRouters,
    LossHead,
    MaskedLM,
    MoeCausalLM,
)
from fastmp.integrations.huggingface.parts import (
    GELU,
    Attention,
    GatedMLP,
    GroupedRouter,
    LatentAttention,
    LayerNorm,
    Part,
    RMSNorm,
    RMSNormOfItsDtype,
    class_with,
)

_PLAN = "_fastmp_accelerated"  # the attribute of a model that has the plan it was accelerated by


@dataclass(frozen=True)
class Family:
    """Which parts take the places of a family's classes, by the names that transformers gives them."""

    file: str
    parts: Mapping[str, type[Part]]
    experts: str | None = None  # the class of its experts


def _like_llama(file: str, prefix: str, head: type[Part] = CausalLM, **others: type[Part]) -> Family:
    """The family of a decoder whose classes are named as Llama's are."""
    parts: dict[str, type[Part]] = {"RMSNorm": RMSNorm, "Attention": Attention, "MLP": GatedMLP}
    parts |= {"ForCausalLM": head, **others}
    return Family(file, {f"{prefix}{name}": part for name, part in parts.items()})


def _with_experts(file: str, prefix: str, *, dense: bool = False, norm: type[Part] = RMSNorm) -> Family:
    """The family of a decoder with experts; `dense`: some layers have none."""
    parts = dict(_like_llama(file, prefix, MoeCausalLM, RMSNorm=norm).parts)
    if not dense:
        del parts[f"{prefix}MLP"]
    return Family(file, parts, f"{prefix}Experts")


_GELUS = {"NewGELUActivation": GELU, "GELUActivation": GELU, "GELUTanh": GELU}
FAMILIES = {
    "bert": Family("bert", {"LayerNorm": LayerNorm, **_GELUS, "BertForMaskedLM": MaskedLM}),
    "gpt2": Family("gpt2", {"LayerNorm": LayerNorm, **_GELUS, "GPT2LMHeadModel": CausalLMWithCrossAttention}),
    "llama": _like_llama("llama", "Llama"),
    "mistral": _like_llama("mistral", "Mistral"),
    "qwen2": _like_llama("qwen2", "Qwen2"),
    "qwen3": _like_llama("qwen3", "Qwen3"),
    "mixtral": _with_experts("mixtral", "Mixtral"),
    "qwen3_moe": _with_experts("qwen3_moe", "Qwen3Moe", dense=True),
    "gpt_oss": _with_experts("gpt_oss", "GptOss", norm=RMSNormOfItsDtype),
    "deepseek_v3": Family(
        "deepseek_v3",
        _like_llama(
            "deepseek_v3",
            "DeepseekV3",
            CausalLMWithRouters,
            Attention=LatentAttention,
            TopkRouter=GroupedRouter,
        ).parts,
        experts="DeepseekV3Experts",
    ),
}


@dataclass(frozen=True)
class Row:
    """Modules of one class: who computes them now, or why they stay as they are."""

    name: str
    count: int
    by: str | None
    why: str | None = None


@dataclass(frozen=True)
class Accelerated:
    """What `accelerate` replaced in a model, and what not; printed, a table."""

    model: str
    rows: tuple[Row, ...]
    experts_before: str | None = None

    @property
    def replaced(self) -> dict[str, str]:
        """{class: who computes it}."""
        return {row.name: row.by for row in self.rows if row.by is not None}

    @property
    def kept(self) -> dict[str, str]:
        """{class: why it stays}."""
        return {row.name: row.why for row in self.rows if row.why is not None}

    def __str__(self) -> str:
        cells = [(row.name, str(row.count), row.by or f"kept: {row.why}") for row in self.rows]
        widths = [max(len(cell[i]) for cell in cells) for i in (0, 1)]
        lines = [f"{name:{widths[0]}}  {count:>{widths[1]}}  {what}" for name, count, what in cells]
        return "\n".join([self.model, *lines])


def accelerate(model: nn.Module) -> Accelerated:
    """Let a model of transformers compute with fastmp's ops, in place: what it computes stays the same.

    Norms, activations, rotary embeddings, experts, and the head with its loss are replaced. In training with
    labels the model returns its loss without logits; it returns them as before in evaluation and without
    labels. Names in the state_dict, parameters and hooks stay. Call it before `fully_shard`, DDP, PEFT or
    torch.compile, though only the first needs it.

    Args:
        model: a model of transformers, or a module that holds one, such as PEFT's. Families: `FAMILIES`.

    Returns:
        What was replaced, by what, and what stays and why: `print` it. A second call returns the same.

    Raises:
        ValueError: no model of transformers or several, one of another family, one with shards (DTensor),
            or one whose classes lack an attribute (another version of transformers). It is untouched then.
    """
    pretrained = _pretrained("accelerate", model)
    if _PLAN in pretrained.__dict__:
        return pretrained.__dict__[_PLAN]
    try:
        rows, changes, has_experts = _plan(pretrained)
        if has_experts:
            _require(pretrained, ("set_experts_implementation",))
            experts.register()
    except (AttributeError, ImportError) as error:  # of what transformers has beside its models
        raise _changed(type(pretrained), f"what is read of it ({error})") from None
    before = pretrained.config._experts_implementation if has_experts else None
    plan = Accelerated(type(pretrained).__name__, rows, before)
    if has_experts:
        pretrained.set_experts_implementation(experts.NAME)
    for module, replacement in changes:
        module.__class__ = replacement
    pretrained.__dict__[_PLAN] = plan
    return plan


def restore(model: nn.Module) -> None:
    """Undo `accelerate`: every module has its own class again.

    Raises:
        ValueError: the model is not accelerated, or something has replaced its classes since (`fully_shard`).
    """
    pretrained = _pretrained("restore", model)
    plan = pretrained.__dict__.get(_PLAN)
    if plan is None:
        raise ValueError(f"restore: {type(pretrained).__name__} is not accelerated")
    parts: list[Any] = [module for module in pretrained.modules() if isinstance(module, Part)]
    for module in parts:
        if "original" not in vars(type(module)):
            raise ValueError(
                f"restore: the class {type(module).__name__} was made since, of an accelerated one"
            )
    for module in parts:
        module.__class__ = type(module).original
    if plan.experts_before is not None:
        pretrained.set_experts_implementation(plan.experts_before)
    del pretrained.__dict__[_PLAN]


def _pretrained(caller: str, model: nn.Module) -> Any:
    """The outermost model of transformers in `model`."""
    import transformers

    name = type(model).__name__
    found = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    if not found:
        raise ValueError(f"{caller}: {name} is not a model of transformers and holds none")
    if set(found) - set(found[0].modules()):
        raise ValueError(f"{caller}: {name} holds several models of transformers; {caller} each")
    return found[0]


def _plan(model: Any) -> tuple[tuple[Row, ...], list[tuple[Any, type]], bool]:
    """What the table says, the new classes of modules, and whether there are experts. Changes nothing."""
    from transformers import PreTrainedModel

    name, kind = type(model).__name__, model.config.model_type
    if kind not in FAMILIES:
        raise ValueError(
            f"accelerate: no family for {name} (model_type {kind!r}); there are {', '.join(FAMILIES)}"
        )
    _refuse_shards(model)
    family = FAMILIES[kind]
    classes = _classes(family)
    changes: list[tuple[Any, type]] = []
    found: Counter[tuple[str, str | None, str | None]] = Counter()
    for module in model.modules():
        named = type(module).__name__
        if classes.get(named) is not type(module):
            known = [base.__name__ for base in type(module).__mro__ if classes.get(base.__name__) is base]
            if known:
                found[named, None, f"a subclass of {known[0]}, which may compute something else"] += 1
            elif isinstance(module, PreTrainedModel) and module.base_model is not module:
                found[named, None, "there is no part for its head and its loss"] += 1
            continue
        if named == family.experts:
            _require(module, experts.FLAGS)
            _require(module, experts.reads(module))
            found[named, "fastmp.ops.grouped_mm, grouped_mlp_in, permute", None] += 1
        elif why := _why_not(part := family.parts[named], module):
            found[named, None, why] += 1
        else:
            found[named, part.by, None] += 1
            changes.append((module, _replacement(type(module), part)))
            if issubclass(part, CausalLM):
                head = part.head(module)
                changes.append((head, class_with(type(head), LossHead)))
    found["attention", None, f"transformers' interface, {model.config._attn_implementation}"] += 1
    rows = tuple(Row(named, count, by, why) for (named, by, why), count in found.items())
    return rows, changes, any(row.name == family.experts for row in rows)


def _why_not(part: type[Part], module: Any) -> str | None:
    """The reason why a module stays as it is, if there is one."""
    if "forward" in vars(module):  # as hooks of Accelerate leave it: the class's forward is not called
        return "has a forward of its own, set on the module"
    _require(module, part.needs)
    if issubclass(part, CausalLM):
        _require(module, (module.base_model_prefix,))  # without it, `base_model` is the module itself
    return part.why_not(module)


def _refuse_shards(model: Any) -> None:
    """A sharded head would make the loss of its own ids, and classes of FSDP2 cannot be replaced."""
    from torch.distributed.tensor import DTensor

    sharded = any(type(module).__name__.startswith("FSDP") for module in model.modules())
    if sharded or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            f"accelerate: {type(model).__name__} is sharded already; accelerate it before fully_shard,"
            " and without transformers' tensor parallelism"
        )


def _classes(family: Family) -> dict[str, Any]:
    """The classes that the family's table names, from transformers' file, its activations, or torch."""
    import transformers

    file = f"transformers.models.{family.file}.modeling_{family.file}"
    places = importlib.import_module(file), importlib.import_module("transformers.activations"), nn
    names = [*family.parts, *([family.experts] if family.experts else [])]
    classes = {name: next((vars(p)[name] for p in places if name in vars(p)), None) for name in names}
    for name, found in classes.items():
        if found is None:
            raise ValueError(
                f"accelerate: transformers {transformers.__version__} has no class {name} in {file}"
            )
    return classes


def _require(module: Any, attributes: tuple[str, ...]) -> None:
    """Raise ValueError where the module lacks one of these attributes; a dot goes on in that attribute."""
    for attribute in attributes:
        try:
            attrgetter(attribute)(module)
        except AttributeError:
            raise _changed(type(module), attribute) from None


def _replacement(original: type[Any], part: type[Part]) -> type[Any]:
    try:
        return class_with(original, part)
    except AttributeError as error:  # the part says what its methods are made from
        raise _changed(original, str(error)) from None


def _changed(original: type, what: str) -> ValueError:
    import transformers

    version = transformers.__version__
    return ValueError(
        f"accelerate: {original.__name__} of transformers {version} has no {what}; nothing was changed"
    )
