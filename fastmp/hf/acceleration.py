"""`accelerate(model)`: a model of transformers computes the same with fastmp's ops, and `restore(model)`
undoes it.

A family says which part takes the place of which class, and how its modules are divided over a group. The
plan is made first, without touching the model: it finds the modules, checks that they have what the parts
read, and says what stays and why. Only a whole plan is carried out.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from fastmp.hf import experts, varlen
from fastmp.hf.heads import (
    CausalLM,
    CausalLMWithCrossAttention,
    CausalLMWithRouters,
    LossHead,
    MaskedLM,
    MoeCausalLM,
)
from fastmp.hf.patches import (
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
from fastmp.hf.tp_modules import (
    Columns,
    EnteredColumns,
    ExpertsOfRank,
    FusedColumns,
    Heads,
    LatentHeads,
    Region,
    Rows,
    Summed,
)
from fastmp.hf.tp_plan import (
    Share,
    Table,
    agree,
    divide,
    group_of,
    join,
    plan_division,
    rows_of,
)

_PLAN = "_fastmp_accelerated"  # the attribute of a model that has the plan it was accelerated by


@dataclass(frozen=True)
class Family:
    """Which parts take the places of a family's classes, by the names that transformers gives them."""

    file: str
    parts: Mapping[str, type[Part]]
    experts: str | None = None  # the class of its experts
    divided: Mapping[str, Table] = field(default_factory=dict)  # its classes, over a group


_QKV = dict.fromkeys(("q_proj", "k_proj", "v_proj"), Columns)
_HEADS: Table = {"": Heads, **_QKV, "o_proj": Rows, "q_norm": Summed, "k_norm": Summed}
_LATENT: Table = {
    "": LatentHeads,
    **dict.fromkeys(("q_proj", "q_b_proj"), EnteredColumns),
    **{"kv_b_proj": Columns, "o_proj": Rows},
    **dict.fromkeys(("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")),
}
_MLP: Table = {"": Region, "gate_proj": Columns, "up_proj": Columns, "down_proj": Rows}
_EXPERTS: Table = {"": ExpertsOfRank}


def _like_llama(file: str, prefix: str, head: type[Part] = CausalLM, **others: type[Part]) -> Family:
    """The family of a decoder whose classes are named as Llama's are."""
    parts: dict[str, type[Part]] = {"RMSNorm": RMSNorm, "Attention": Attention, "MLP": GatedMLP}
    parts |= {"ForCausalLM": head, **others}
    divided = {f"{prefix}Attention": _HEADS, f"{prefix}MLP": _MLP}
    return Family(file, {f"{prefix}{name}": part for name, part in parts.items()}, divided=divided)


def _with_experts(file: str, prefix: str, *, dense: bool = False, norm: type[Part] = RMSNorm) -> Family:
    """The family of a decoder with experts; `dense`: some layers have none."""
    like = _like_llama(file, prefix, MoeCausalLM, RMSNorm=norm)
    parts, divided = dict(like.parts), {**like.divided, f"{prefix}Experts": _EXPERTS}
    if not dense:
        del parts[f"{prefix}MLP"], divided[f"{prefix}MLP"]
    return Family(file, parts, f"{prefix}Experts", divided=divided)


_GELUS = {"NewGELUActivation": GELU, "GELUActivation": GELU, "GELUTanh": GELU}
FAMILIES = {
    "bert": Family(
        "bert",
        {"LayerNorm": LayerNorm, **_GELUS, "BertForMaskedLM": MaskedLM},
        divided={
            "BertSelfAttention": {"": Heads, "query": Columns, "key": Columns, "value": Columns},
            "BertSelfOutput": {"dense": Rows, "LayerNorm": None},
            "BertIntermediate": {"dense": EnteredColumns},
            "BertOutput": {"dense": Rows, "LayerNorm": None},
        },
    ),
    "gpt2": Family(
        "gpt2",
        {"LayerNorm": LayerNorm, **_GELUS, "GPT2LMHeadModel": CausalLMWithCrossAttention},
        divided={
            "GPT2Attention": {"": Heads, "c_attn": FusedColumns, "c_proj": Rows},
            "GPT2MLP": {"c_fc": EnteredColumns, "c_proj": Rows},
        },
    ),
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
        divided={
            "DeepseekV3Attention": _LATENT,
            "DeepseekV3MLP": _MLP,
            "DeepseekV3Experts": _EXPERTS,
        },
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
    ranks: int = 1
    shares: tuple[Row, ...] = ()  # of several ranks

    @property
    def replaced(self) -> dict[str, str]:
        """{class: who computes it}."""
        return {row.name: row.by for row in self.rows if row.by is not None}

    @property
    def kept(self) -> dict[str, str]:
        """{class: why it stays}."""
        return {row.name: row.why for row in self.rows if row.why is not None}

    @property
    def divided(self) -> dict[str, str]:
        """{module: how it is divided over the ranks of the group}."""
        return {row.name: row.by for row in self.shares if row.by is not None}

    def __str__(self) -> str:
        text = [self.model, *_lines(self.rows, "kept")]
        if self.shares:
            text += [f"divided over {self.ranks} ranks", *_lines(self.shares, "whole")]
        return "\n".join(text)


def _lines(rows: tuple[Row, ...], stays: str) -> list[str]:
    cells = [(row.name, str(row.count), row.by or f"{stays}: {row.why}") for row in rows]
    widths = [max(len(cell[i]) for cell in cells) for i in (0, 1)]
    return [f"{name:{widths[0]}}  {count:>{widths[1]}}  {what}" for name, count, what in cells]


def accelerate(model: nn.Module, *, group: ProcessGroup | None = None) -> Accelerated:
    """Let a model of transformers compute with fastmp's ops, in place: what it computes stays the same.

    Norms, activations, rotary embeddings, experts, and the head with its loss are replaced. In training with
    labels the logits of the output are computed when something reads them; they are made as before in
    evaluation and without labels. Names in the state_dict, parameters and hooks stay. Call it before
    `fully_shard`, DDP, PEFT or torch.compile, though only the first needs it.

    With a group, its ranks divide the model: attention by heads, MLPs by columns and rows, embedding and head
    by the vocabulary, experts by their number. All ranks call this with the same whole model, and the model
    then with the same tokens. They get the same loss, logits and gradients of what each has whole. Parameters
    that are divided keep their names, and have this rank's part of their shape.

    Args:
        model: a model of transformers, or a module that holds one, such as PEFT's. Families: `FAMILIES`.
        group: the ranks that divide it; None: this rank alone.

    Returns:
        What was replaced, by what, and what stays and why: `print` it. A second call returns the same.

    Raises:
        ValueError: no model of transformers or several, one of another family, one with shards (DTensor),
            or one whose classes lack an attribute (another version of transformers). With a group, also, and
            then the same on all ranks: sizes that they do not divide, dropout, weights that differ between
            them or are not there, an adapter of PEFT, a model inside another module, such as DDP, and one
            that was accelerated for other ranks. It is untouched then.
    """
    if group is not None and not isinstance(group, ProcessGroup):  # dist.new_group gives other ranks a number
        raise ValueError(
            f"accelerate: group is {group!r}, not a ProcessGroup that this rank is in; of a DeviceMesh, give "
            "mesh.get_group()"
        )
    if group is not None and group.size() == 1:
        group = None
    pretrained, plan, changes, shares = _agreed_plan(model, group)
    if _PLAN in pretrained.__dict__:
        return plan
    if plan.experts_before is not None:
        pretrained.set_experts_implementation(experts.NAME)
    for module, replacement in changes:
        module.__class__ = replacement
    if group is not None:
        divide(pretrained, shares, group)
    pretrained.__dict__[_PLAN] = plan
    return plan


def restore(model: nn.Module) -> None:
    """Undo `accelerate`: every module has its own class again.

    A divided model is whole again, to the bit, without the gradients of what was divided; all ranks of its
    group call this.

    Raises:
        ValueError: the model is not accelerated, or something has replaced its classes since (`fully_shard`).
    """
    pretrained = _pretrained("restore", model)
    plan = pretrained.__dict__.get(_PLAN)
    if plan is None:
        raise ValueError(f"restore: {type(pretrained).__name__} is not accelerated")
    for module in pretrained.modules():
        if isinstance(module, Part) and "original" not in vars(type(module)):
            raise ValueError(
                f"restore: the class {type(module).__name__} was made since, of an accelerated one"
            )
    join(pretrained)
    replaced: list[Any] = [module for module in pretrained.modules() if isinstance(module, Part)]
    for module in replaced:
        module.__class__ = type(module).original
    if plan.experts_before is not None:
        pretrained.set_experts_implementation(plan.experts_before)
    del pretrained.__dict__[_PLAN]


def _pretrained(caller: str, model: nn.Module) -> Any:
    """The outermost model of transformers in `model`."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":  # one of its own imports
            raise
        raise ValueError(f"{caller}: transformers is not installed; pip install 'transformers>=5'") from None
    name = type(model).__name__
    found = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    if not found:
        raise ValueError(f"{caller}: {name} is not a model of transformers and holds none")
    if set(found) - set(found[0].modules()):
        raise ValueError(f"{caller}: {name} holds several models of transformers; {caller} each")
    return found[0]


_Plan = tuple[Accelerated, list[tuple[Any, type]], list[Share]]


def _agreed_plan(model: nn.Module, group: ProcessGroup | None) -> tuple[Any, *_Plan]:
    """The model of transformers and its `_plan`, or on all ranks of the group the error that one of them has.

    Of a model that is accelerated already, what it was accelerated by.
    """
    error = None
    try:
        pretrained = _pretrained("accelerate", model)
        if group is not None and pretrained is not model:
            raise ValueError(
                f"accelerate: ranks divide a model before a {type(model).__name__} is made of it; give the "
                "model"
            )
        if _PLAN in pretrained.__dict__:
            if group is None or group is group_of(pretrained):
                return pretrained, pretrained.__dict__[_PLAN], [], []
            raise ValueError(
                f"accelerate: {type(pretrained).__name__} is accelerated for other ranks; restore it first"
            )
        plan = _plan(pretrained, 1 if group is None else group.size())
        if plan[0].experts_before is not None:
            _require(pretrained, ("set_experts_implementation",))
            experts.register()
        varlen.register()
    except (AttributeError, ImportError) as missing:  # of what transformers has beside its models
        error = _changed(type(pretrained), f"attribute or function as fastmp knows it ({missing})")
    except ValueError as found:
        error = found
    if group is not None:
        agree(model, group, error)
    if error is not None:
        raise error from None
    return pretrained, *plan


def _plan(model: Any, ranks: int) -> _Plan:
    """What is returned, the new classes of modules, and what is divided over ranks. Changes nothing."""
    from transformers import PreTrainedModel

    name, kind = type(model).__name__, model.config.model_type
    if kind not in FAMILIES:
        raise ValueError(
            f"accelerate: no family for {name} (model_type {kind!r}); there are {', '.join(FAMILIES)}"
        )
    _refuse_shards(model)
    family = FAMILIES[kind]
    classes = _classes(family, [*family.parts, *([family.experts] if family.experts else [])])
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
            found[named, experts.by(module), None] += 1
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
    has_experts = any(row.name == family.experts for row in rows)
    before = model.config._experts_implementation if has_experts else None
    if ranks == 1:
        return Accelerated(name, rows, before), changes, []
    tables = {cls: family.divided[named] for named, cls in _classes(family, family.divided).items()}
    shares = plan_division(model, tables, ranks, dict(changes))
    cells = [
        Row(label, count, how, None if how else "every rank computes it alike")
        for label, count, how in rows_of(model, shares)
    ]
    return Accelerated(name, rows, before, ranks, tuple(cells)), changes, shares


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


def _classes(family: Family, names: Iterable[str]) -> dict[str, Any]:
    """The classes of these names, from transformers' file, its activations, or torch."""
    import transformers

    file = f"transformers.models.{family.file}.modeling_{family.file}"
    places = importlib.import_module(file), importlib.import_module("transformers.activations"), nn
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
