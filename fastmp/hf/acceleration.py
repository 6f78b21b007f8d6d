"""`accelerate(model)` replaces modules of a transformers model by fastmp ops, and `restore(model)` undoes it.

A family's record names the patch of each class and its tensor-parallel plan. The complete plan is made first,
without modifying the model: find the modules, check that they have the attributes that the patches read, and
note which ones are kept and why.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fastmp.config.precision import Fp8Recipe
from fastmp.hf import experts_interface, fp8_modules, lora, varlen
from fastmp.hf.expert_parallel import MeshOptions, MeshPlan, plan_mesh, shard_over_mesh
from fastmp.hf.families import ACCELERATIONS
from fastmp.hf.families.family import TPTable
from fastmp.hf.heads import CausalLM, LossHead
from fastmp.hf.mesh import all_ranks, check_mesh, own_class
from fastmp.hf.patches import ModulePatch, patched_class
from fastmp.hf.tp_plan import (
    ModulePlan,
    agree,
    count_modules,
    group_of,
    plan_tensor_parallel,
    shard_model,
    unshard_model,
)

_PLAN = "_fastmp_accelerated"  # attribute of an accelerated model: its `Accelerated`


@dataclass(frozen=True)
class ReplacedModule:
    """Modules of one class: the ops that replace them, or the reason why they are kept."""

    name: str
    count: int
    by: str | None
    why: str | None = None


@dataclass(frozen=True)
class Accelerated:
    """Table of the modules that `accelerate` replaced, kept and sharded; `print` it."""

    model: str
    modules: tuple[ReplacedModule, ...]
    experts_before: str | None = None
    ranks: int = 1
    sharded_modules: tuple[ReplacedModule, ...] = ()  # with a group or a mesh
    fp8: Fp8Recipe | None = None
    mesh: DeviceMesh | None = None

    @property
    def replaced(self) -> dict[str, str]:
        """Return {class: the ops that replace it}."""
        return {row.name: row.by for row in self.modules if row.by is not None}

    @property
    def kept(self) -> dict[str, str]:
        """Return {class: the reason why it is kept}."""
        return {row.name: row.why for row in self.modules if row.why is not None}

    @property
    def sharded(self) -> dict[str, str]:
        """Return {module: the dimension that is sharded over the ranks of the group or mesh}."""
        return {row.name: row.by for row in self.sharded_modules if row.by is not None}

    divided = sharded  # the name in 0.2

    def __str__(self) -> str:
        text = [self.model, *_lines(self.modules, "kept: ")]
        if self.sharded_modules:
            text += [f"sharded over {self.ranks} ranks", *_lines(self.sharded_modules, "")]
        return "\n".join(text)


def _lines(rows: tuple[ReplacedModule, ...], kept: str) -> list[str]:
    cells = [(row.name, str(row.count), row.by or f"{kept}{row.why}") for row in rows]
    widths = [max(len(cell[i]) for cell in cells) for i in (0, 1)]
    return [f"{name:{widths[0]}}  {count:>{widths[1]}}  {what}" for name, count, what in cells]


def accelerate(
    model: nn.Module,
    *,
    group: ProcessGroup | None = None,
    precision: str | Fp8Recipe = "dtype",
    mesh: DeviceMesh | None = None,
    dispatcher: str = "alltoall",
    shard_dense: bool = True,
    fsdp: Mapping[str, Any] = {},
) -> Accelerated:
    """Replace modules of a transformers model by fastmp ops, in place; outputs and gradients are the same.

    Norms, activations, rotary embeddings, experts, and the head with its loss are replaced. In training with
    labels, `outputs.logits` is lazy: the logits are computed when they are first read. Parameters, hooks and
    names in the state_dict are unchanged. Call it before `fully_shard`; DDP, PEFT and torch.compile may come
    before or after.

    With a group, the model is sharded over its ranks (tensor parallelism): attention by heads, MLPs by
    columns and rows, embedding and head by the vocabulary, experts by their number. All ranks call this with
    the same model, and then the model with the same tokens; they get the same loss, logits and gradients of
    replicated parameters. Sharded parameters keep their names and have the shape of this rank's shard.

    With a mesh, every rank has its own tokens (data parallelism): experts are sharded over the mesh's "ep"
    and tokens dispatched to them, and FSDP2 shards all parameters, see `fastmp.hf.expert_parallel`. Gradients
    are means over all ranks.

    Args:
        model: a transformers model, or a module that holds one, such as a PEFT model. Its family must be in
            `fastmp.hf.families.ACCELERATIONS`.
        group: the tensor-parallel process group; None: no sharding.
        precision: "fp8": linear layers of attention and MLPs, and experts, multiply in FP8, forward and
            dgrad, see `fastmp.hf.fp8_modules`; an `Fp8Recipe` says how; "dtype": all GEMMs are in the dtype
            of the weights. Without a group or mesh only, and outside `fully_shard`.
        mesh: a device mesh with the dimensions ("dp_shard", "ep") or ("dp_replicate", "dp_shard", "ep"), for
            a family with experts. Apply PEFT before.
        dispatcher: with a mesh, "alltoall", "symmetric" or "deepep", see `fastmp.nn.moe.dispatchers`.
        shard_dense: with a mesh, apply `fully_shard` to layers, embedding and model. Pass False to do so
            yourself afterwards, over `fastmp.hf.mesh.dense_mesh(mesh)`. You may also have done so
            before, except for `expert_parameters(model)`.
        fsdp: with a mesh, options of `fully_shard`, such as {"mp_policy": MixedPrecisionPolicy(...)}.

    Returns:
        The table of replaced and kept modules. A second call returns the same table.

    Raises:
        ValueError: there is no transformers model or several, its family is not supported, it is sharded
            already (DTensor), or its classes lack an attribute (another version of transformers). With a
            group, on all ranks: sizes not divisible by the number of ranks, dropout, weights that differ
            between ranks or are on the meta device, a PEFT adapter, a model wrapped by another module
            (DDP), or a model accelerated for another group. With a mesh, on all ranks: other dimensions, a
            model without experts, experts not divisible by ep. The model is not modified then.

    Example (needs a pretrained model):
        >>> model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
        >>> print(fastmp.accelerate(model))
        >>> model.train()(input_ids=tokens, labels=tokens).loss.backward()
    """
    if group is not None and not isinstance(group, ProcessGroup):  # dist.new_group gives other ranks a number
        raise ValueError(
            f"accelerate: expected a ProcessGroup that this rank is in, got {group!r}; of a DeviceMesh, pass "
            "mesh.get_group()"
        )
    if group is not None and group.size() == 1:
        group = None
    options = None
    if mesh is not None:
        check_mesh(mesh, group)
        options = MeshOptions(mesh, dispatcher, shard_dense, fsdp)
    pretrained, plan = _agreed_plan(model, group, precision, options)
    if _PLAN in pretrained.__dict__:
        return plan.table
    if plan.table.experts_before is not None:
        pretrained.set_experts_implementation(experts_interface.NAME)
    for module, replacement in plan.classes:
        module.__class__ = replacement
    for module, names in plan.quantized:
        assert plan.table.fp8 is not None
        fp8_modules.quantize(module, names, plan.table.fp8)
    if group is not None:
        shard_model(pretrained, plan.tp, group)
    if plan.mesh is not None:
        shard_over_mesh(pretrained, plan.mesh, model)
    pretrained.__dict__[_PLAN] = plan.table
    return plan.table


def restore(model: nn.Module) -> None:
    """Undo `accelerate`: give every module its original class.

    The weights of a sharded model are gathered, bitwise as before; gradients of sharded parameters are
    dropped. All ranks of its group call this.

    Args:
        model: a model after `accelerate`.

    Raises:
        ValueError: the model is not accelerated, or its classes were replaced since (`fully_shard`).
    """
    pretrained = _pretrained("restore", model)
    table = pretrained.__dict__.get(_PLAN)
    if table is None:
        raise ValueError(f"restore: {type(pretrained).__name__} is not accelerated")
    for module in pretrained.modules():
        if isinstance(module, ModulePatch) and "original" not in vars(type(module)):
            raise ValueError(
                f"restore: the class {type(module).__name__} was derived from an accelerated one, as "
                "fully_shard does; restore is not supported then"
            )
    unshard_model(pretrained)
    for module in pretrained.modules():
        fp8_modules.drop_copies(module)
    replaced: list[Any] = [module for module in pretrained.modules() if isinstance(module, ModulePatch)]
    for module in replaced:
        patched_forward = type(module).forward
        module.__class__ = type(module).original
        for name, value in vars(module).items():  # hooks of Accelerate keep the bound `forward`
            if isinstance(value, MethodType) and value == MethodType(patched_forward, module):
                vars(module)[name] = MethodType(type(module).forward, module)
    if table.experts_before is not None:
        pretrained.set_experts_implementation(table.experts_before)
    del pretrained.__dict__[_PLAN]


def _pretrained(caller: str, model: nn.Module) -> Any:
    """Return the outermost transformers model in `model`. Raises ValueError if there is none or several."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":  # one of its own imports
            raise
        raise ValueError(f"{caller}: transformers is not installed; pip install 'transformers>=5'") from None
    if isinstance(model, type | str):
        make = f"AutoModelForCausalLM.from_pretrained({model!r})" if isinstance(model, str) else "an instance"
        raise ValueError(f"{caller}: expected a transformers model, got {model!r}; pass {make}")
    if not isinstance(model, nn.Module):
        raise ValueError(f"{caller}: expected a transformers model, got {type(model).__name__}")
    name = type(model).__name__
    found = [module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)]
    if not found:
        raise ValueError(f"{caller}: expected a transformers model or a module that holds one, got {name}")
    if set(found) - set(found[0].modules()):
        raise ValueError(f"{caller}: {name} holds several transformers models; {caller} each")
    return found[0]


@dataclass(frozen=True)
class _Changes:
    """The changes of a model.

    classes: (module, new class) pairs. tp: with a group, the modules that are sharded. quantized: (module,
    parameters) that are quantised. mesh: with a mesh, how the model is sharded over it.
    """

    table: Accelerated
    classes: list[tuple[Any, type]] = field(default_factory=list)
    tp: list[ModulePlan] = field(default_factory=list)
    quantized: list[tuple[Any, tuple[str, ...]]] = field(default_factory=list)
    mesh: MeshPlan | None = None


def _agreed_plan(
    model: nn.Module, group: ProcessGroup | None, precision: str | Fp8Recipe, options: MeshOptions | None
) -> tuple[Any, _Changes]:
    """Return the transformers model and its `_plan`, with nothing to change if it is accelerated already.

    An error of one rank is raised on all ranks of the group or mesh.
    """
    error = None
    try:
        pretrained = _pretrained("accelerate", model)
        if group is not None and pretrained is not model:
            raise ValueError(
                f"accelerate: expected the transformers model with a group, got a {type(model).__name__}; "
                "accelerate the model before wrapping it"
            )
        if options is not None and pretrained is not model and not hasattr(model, "peft_config"):
            raise ValueError(
                "accelerate: expected the transformers model or a PEFT model with a mesh, got a "
                f"{type(model).__name__}; accelerate the model before wrapping it"
            )
        if options is not None and pretrained is not model:
            inside = {id(parameter) for parameter in pretrained.parameters()}
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and id(parameter) not in inside:
                    raise ValueError(
                        f"accelerate: {name} is trained outside of the transformers model, as by prompt "
                        "tuning, which is not supported with a mesh; use LoRA"
                    )
        recipe = fp8_modules.recipe_of(precision, pretrained)
        if recipe is not None and (group is not None or options is not None):
            raise ValueError(
                'accelerate: precision "fp8" is not supported with a group or mesh; pass one of them'
            )
        if _PLAN in pretrained.__dict__:
            return pretrained, _Changes(_same(pretrained, group, precision, recipe, options))
        plan = _plan(pretrained, 1 if group is None else group.size(), recipe, options)
        if plan.table.experts_before is not None:
            _require(pretrained, ("set_experts_implementation",))
            experts_interface.register()
            lora.register(experts_interface.NAME)
        varlen.register()
    except (AttributeError, ImportError) as missing:  # of transformers outside its models
        error = _changed(type(pretrained), f"attribute or function as fastmp knows it ({missing})")
    except ValueError as found:
        error = found
    ranks = group if options is None else all_ranks(options.mesh)
    if ranks is not None:
        agree(model, ranks, error)
    if error is not None:
        raise error from None
    return pretrained, plan


def _same(
    pretrained: Any,
    group: ProcessGroup | None,
    precision: str | Fp8Recipe,
    recipe: Fp8Recipe | None,
    options: MeshOptions | None,
) -> Accelerated:
    """Return the table of a model that is accelerated. Raises ValueError if it was with other arguments."""
    before: Accelerated = pretrained.__dict__[_PLAN]
    name = type(pretrained).__name__
    if before.fp8 != recipe:
        raise ValueError(
            f"accelerate: {name} is accelerated with precision {before.fp8 or 'dtype'}, got {precision!r}; "
            "restore it first"
        )
    if options is not None and options.mesh != before.mesh:
        raise ValueError(f"accelerate: {name} is accelerated without this mesh; load it again")
    if group is not None and group is not group_of(pretrained):
        raise ValueError(f"accelerate: {name} is accelerated for another group; restore it first")
    return before


def _plan(model: Any, ranks: int, recipe: Fp8Recipe | None, options: MeshOptions | None) -> _Changes:
    """Plan the changes of a transformers model without modifying it."""
    from transformers import PreTrainedModel

    name, model_type = type(model).__name__, model.config.model_type
    if model_type not in ACCELERATIONS:
        raise ValueError(
            f"accelerate: {name} (model_type {model_type!r}) is not supported; expected one of "
            f"{', '.join(ACCELERATIONS)}"
        )
    _check_unsharded(model, options is not None)
    family = ACCELERATIONS[model_type]
    names = [*family.patches, *([family.experts] if family.experts else [])]
    classes = _classes(model_type, names)
    changes: list[tuple[Any, type]] = []
    found: Counter[tuple[str, str | None, str | None]] = Counter()  # of (class, ops, reason)
    for module in model.modules():
        own = own_class(module)
        named = own.__name__
        if classes.get(named) is not own:
            known = [base.__name__ for base in own.__mro__ if classes.get(base.__name__) is base]
            if known:
                found[named, None, f"a subclass of {known[0]}, which may compute something else"] += 1
            elif isinstance(module, PreTrainedModel) and module.base_model is not module:
                found[named, None, "its head and loss have no patch"] += 1
            continue
        if named == family.experts:
            _require(module, experts_interface.FLAGS)
            _require(module, experts_interface.reads(module))
            found[named, experts_interface.by(module), None] += 1
        elif why := _why_not(patch := family.patches[named], module):
            found[named, None, why] += 1
        else:
            found[named, patch.by, None] += 1
            changes.append((module, _replacement(type(module), patch)))
            if issubclass(patch, CausalLM):
                head = patch.head(module)
                changes.append((head, patched_class(type(head), LossHead)))
    found["attention", None, f"transformers' interface, {model.config._attn_implementation}"] += 1
    tables: dict[type, TPTable] = {}
    if recipe is not None or ranks > 1:
        tables = {cls: family.tp_plan[named] for named, cls in _classes(model_type, family.tp_plan).items()}
    quantized = []
    for each in [] if recipe is None else fp8_modules.plan(model, tables, family.experts, recipe):
        found[each.label, None if each.why else each.by, each.why] += 1
        if each.why is None:
            quantized.append((each.module, each.parameters))
            if each.patch is not None:
                changes.append((each.module, patched_class(type(each.module), each.patch)))
    rows = tuple(ReplacedModule(named, count, by, why) for (named, by, why), count in found.items())
    has_experts = any(row.name == family.experts for row in rows)
    before = model.config._experts_implementation if has_experts else None
    if options is not None:
        mesh_plan = plan_mesh(model, classes.get(family.experts or ""), options)
        mesh_rows = tuple(ReplacedModule(*row) for row in mesh_plan.rows())
        mesh = options.mesh
        table = Accelerated(name, rows, before, mesh.size(), mesh_rows, mesh=mesh)
        return _Changes(table, changes, mesh=mesh_plan)
    if ranks == 1:
        return _Changes(Accelerated(name, rows, before, fp8=recipe), changes, quantized=quantized)
    plans = plan_tensor_parallel(model, tables, ranks, dict(changes))
    tp_rows = tuple(
        ReplacedModule(label, count, by, None if by else "replicated")
        for label, count, by in count_modules(model, plans)
    )
    return _Changes(Accelerated(name, rows, before, ranks, tp_rows), changes, plans, quantized)


def _why_not(patch: type[ModulePatch], module: Any) -> str | None:
    """Return the reason why a module is kept, or None."""
    if "forward" in vars(module):  # hooks of Accelerate set it, and the class's forward is not called
        return "has a forward of its own, set on the module"
    _require(module, patch.needs)
    if issubclass(patch, CausalLM):
        _require(module, (module.base_model_prefix,))  # without it, `base_model` returns the module itself
    return patch.why_not(module)


def _check_unsharded(model: Any, over_mesh: bool) -> None:
    """Raise ValueError for a sharded model: its head would compute the loss of local ids only.

    over_mesh: `fully_shard` may have come before; `plan_mesh` checks that the experts are left out.
    """
    from torch.distributed.tensor import DTensor

    sharded = any(type(module).__name__.startswith("FSDP") for module in model.modules())
    if over_mesh and sharded:
        return
    if sharded or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            f"accelerate: {type(model).__name__} is sharded already; accelerate it before fully_shard,"
            " and without transformers' tensor parallelism"
        )


def _classes(model_type: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the classes of these names, from transformers' file of the family, its activations, or torch."""
    import transformers

    file = f"transformers.models.{model_type}.modeling_{model_type}"
    places = importlib.import_module(file), importlib.import_module("transformers.activations"), nn
    classes = {name: next((vars(p)[name] for p in places if name in vars(p)), None) for name in names}
    for name, found in classes.items():
        if found is None:
            raise ValueError(
                f"accelerate: transformers {transformers.__version__} has no class {name} in {file}"
            )
    return classes


def _require(module: Any, attributes: tuple[str, ...]) -> None:
    """Raise ValueError if the module lacks one of these attributes ("a.b": b of its attribute a)."""
    for attribute in attributes:
        try:
            attrgetter(attribute)(module)
        except AttributeError:
            raise _changed(type(module), attribute) from None


def _replacement(original: type[Any], patch: type[ModulePatch]) -> type[Any]:
    try:
        return patched_class(original, patch)
    except AttributeError as error:  # `ModulePatch.members` names the attribute
        raise _changed(original, str(error)) from None


def _changed(original: type, what: str) -> ValueError:
    import transformers

    version = transformers.__version__
    return ValueError(
        f"accelerate: {original.__name__} of transformers {version} has no {what}; nothing was changed"
    )
