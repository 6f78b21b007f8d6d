"""Expert parallelism and FSDP2 of a transformers model over a device mesh; every rank brings its own tokens.

The mesh has the dimensions ("dp_shard", "ep"), or ("dp_replicate", "dp_shard", "ep"). With world size W:

    experts             ep: a rank holds E / ep of them; FSDP2 shards those over dp_shard
    other parameters    FSDP2 shards them over all ranks of dp_shard and ep
    both                HSDP replicates them over dp_replicate

A rank dispatches its tokens to the experts' ranks of its ep group. The gradients of experts are sums over the
tokens of that group already, while FSDP2 takes the mean over its own ranks; they are divided by ep once more.
Gradients of all parameters are then means over the W ranks, as in data parallelism.

Expert weights are DTensors over ep, and FSDP2 makes them DTensors over (dp_shard, ep), so that optimizers and
torch.distributed.checkpoint see full shapes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fastmp.config import MoEConfig
from fastmp.distributed.deepep_buffer import DeepEPBuffer
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import DEFAULT_TIMEOUT, ParallelGroups
from fastmp.distributed.symmetric_memory import SymmetricExchange
from fastmp.hf import experts_interface
from fastmp.hf.mesh import dense_mesh, is_replicated, own_class
from fastmp.hf.mesh_saving import save_pretrained, save_state_dict, together, trainable_state_dict
from fastmp.hf.patches import ModulePatch, patched_class
from fastmp.nn.moe.dispatchers.dispatcher import Dispatcher
from fastmp.nn.moe.dispatchers.factory import make_dispatcher
from fastmp.ops.core.registry import compute_dtype

_FSDP_OPTIONS = {"mp_policy", "reshard_after_forward"}  # of `fully_shard`


class DispatchedExperts(ModulePatch):
    """This rank's experts: tokens of all ranks of the ep group are dispatched to them.

    Attributes:
        dispatcher: brings this rank's tokens to their experts, and the outputs back.
    """

    dispatcher: Any

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums (T, H) of the experts' outputs for this rank's tokens (T, H)."""
        dispatcher = self.dispatcher
        probs = top_k_weights.to(compute_dtype(hidden_states.dtype))
        # 1. Sort the assignments by expert and all-gather their counts over ep.
        prepared = dispatcher.preprocess(top_k_index.to(torch.int32), probs, len(hidden_states))
        # 2. Dispatch: tokens go to the ranks of their experts, which sort them by expert.
        tokens = hidden_states.to(self.down_proj.dtype)  # as gathered, BF16 in mixed precision
        rows, offsets, state = dispatcher.dispatch(tokens, prepared)
        # 3. The MLPs of this rank's experts.
        rows = experts_interface.expert_mlps(self, rows, offsets)
        # 4. Combine: outputs return to the ranks of their tokens and are summed with their weights.
        return dispatcher.combine(rows, state).to(hidden_states.dtype)


class MeshModel(ModulePatch):
    """Model that is sharded over a mesh.

    Attributes:
        mesh: the mesh.
    """

    mesh: DeviceMesh

    def save_pretrained(
        self: Any, save_directory: Any, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any
    ) -> None:
        """Write the model from all ranks, or a full `state_dict` from the first rank, which needs no others.

        See `fastmp.hf.mesh_saving`.
        """
        if others := [name for name, value in kwargs.items() if value and name != "safe_serialization"]:
            raise ValueError(
                f"save_pretrained: {', '.join(others)} of a model over a mesh is not supported; leave it out"
            )
        if state_dict is None:
            save_pretrained(self, save_directory)
        elif state_dict and is_main_process:  # `whole_state_dict` is empty on all ranks but the first
            save_state_dict(self, save_directory, state_dict)

    @property
    def peft_config(self: Any) -> Any:
        """The adapters that the model had before it was sharded."""
        try:
            return self.__dict__["peft_config"]
        except KeyError:
            raise AttributeError("peft_config") from None

    @peft_config.setter
    def peft_config(self, value: Any) -> NoReturn:
        raise ValueError(
            f"{type(self).__name__} is sharded over a mesh; call get_peft_model before "
            "accelerate(model, mesh=...)"
        )


class MeshAdapters(ModulePatch):
    """PEFT model around a model that is sharded over a mesh."""

    def save_pretrained(
        self: Any, save_directory: str, *args: Any, state_dict: Any = None, **kwargs: Any
    ) -> None:
        """Gather the adapters and write them from the first rank. Collective, except with a `state_dict`."""
        if state_dict is not None:  # such as that of `trainable_state_dict`, which is empty on other ranks
            if dist.get_rank() == 0:
                super().save_pretrained(save_directory, *args, state_dict=state_dict, **kwargs)  # type: ignore[misc]
            return
        state_dict = trainable_state_dict(self)
        assert dist.group.WORLD is not None
        with together(dist.group.WORLD):
            if dist.get_rank() == 0:
                super().save_pretrained(save_directory, *args, state_dict=state_dict, **kwargs)  # type: ignore[misc]


class MeshOptions(NamedTuple):
    """The mesh, and the arguments of `fastmp.accelerate` that go with it."""

    mesh: DeviceMesh
    dispatcher: str
    shard_dense: bool
    fsdp: Mapping[str, Any]


@dataclass(frozen=True)
class MeshPlan:
    """The sharding of a model over a mesh; made before the model is modified.

    Args:
        options: the arguments of `fastmp.accelerate`.
        experts: the modules of experts, and their dispatchers.
        units: the modules outside of experts that FSDP2 shards, in this order; empty: the user shards them.
        kept: modules in these units of another dtype, such as float32 routers in a BF16 model. They are
            sharded before, for themselves, since a unit of FSDP2 has gradients of one dtype.
    """

    options: MeshOptions
    experts: tuple[tuple[Any, Dispatcher[Any, Any]], ...]
    units: tuple[nn.Module, ...]
    kept: tuple[nn.Module, ...] = ()

    def rows(self) -> Iterator[tuple[str, int, str]]:
        """Yield (class, number of modules, their sharding) for the table of `accelerate`."""
        mesh = self.options.mesh
        ep, ranks = mesh["ep"].size(), mesh["dp_shard"].size()
        yield type(self.experts[0][0]).__name__, len(self.experts), f"experts over {ep}, FSDP2 over {ranks}"
        dense = (*self.kept, *self.units)
        for name, count in Counter(own_class(unit).__name__ for unit in dense).items():
            yield name, count, f"FSDP2 over {ep * ranks}"


def plan_mesh(model: Any, experts: type | None, options: MeshOptions) -> MeshPlan:
    """Plan the sharding of a model over a mesh; the model is not modified.

    Args:
        model: the transformers model.
        experts: the class of experts of its family.
        options: the arguments of `fastmp.accelerate`.

    Raises:
        ValueError: a model without experts, experts that ep does not divide, or that are sharded already; a
            model of which `fully_shard` has a part; an unknown dispatcher, or one that cannot be here; an
            option of `fully_shard` that is taken.
    """
    if others := sorted(options.fsdp.keys() - _FSDP_OPTIONS):
        raise ValueError(
            f"accelerate: fsdp has {', '.join(others)}; expected some of {', '.join(sorted(_FSDP_OPTIONS))}"
        )
    name, ep = type(model).__name__, options.mesh["ep"].size()
    found: dict[str, Any] = {
        where: module for where, module in model.named_modules() if type(module) is experts
    }
    if not found:
        raise ValueError(
            f"accelerate: {name} has no experts to shard over a mesh; call accelerate(model) without mesh, "
            "then fully_shard"
        )
    for where, module in found.items():
        if module.num_experts % ep:
            raise ValueError(
                f"accelerate: the {module.num_experts} experts of {where} are not divisible by the {ep} ranks"
                " of ep"
            )
        if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
            raise ValueError(
                f"accelerate: the experts of {where} are sharded already; leave them out with fully_shard("
                "layer, ..., ignored_params=set(expert_parameters(model))), and accelerate shards them"
            )
    groups, dispatchers = _groups(options.mesh), []
    for module in found.values():
        moe = MoEConfig(
            num_experts=module.num_experts,
            top_k=model.config.num_experts_per_tok,
            dispatcher=options.dispatcher,
        )
        dispatchers.append(make_dispatcher(moe, groups))
    of_experts = {id(parameter) for module in found.values() for parameter in module.parameters()}
    units = _dense_units(model, of_experts) if options.shard_dense else ()
    kept = [module for unit in units for module in _of_other_dtypes(unit, of_experts)]
    return MeshPlan(options, tuple(zip(found.values(), dispatchers)), units, tuple(dict.fromkeys(kept)))


def _dense_units(model: Any, of_experts: Set[int]) -> tuple[nn.Module, ...]:
    """Return the modules that FSDP2 shards: layers, embedding and model; none if the user has done so.

    Raises ValueError if the user has sharded some of them: gradients of the others would not be averaged.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        for name, parameter in model.named_parameters():
            sharded = isinstance(parameter, DTensor) or id(parameter) in of_experts
            if parameter.requires_grad and not sharded:
                raise ValueError(
                    f"accelerate: fully_shard has left out {name}; apply it to the whole model, to nothing, "
                    "or pass shard_dense=False and apply it to the rest afterwards"
                )
        return ()
    layers = set(model._no_split_modules)
    units = [module for module in model.modules() if type(module).__name__ in layers]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is not embedding.weight:
        units.append(embedding)  # its weight is not needed until the head, as a tied one is
    return (*units, model)


def _of_other_dtypes(unit: nn.Module, of_experts: Set[int]) -> Iterator[nn.Module]:
    """Yield the modules whose trainable parameters have another dtype than most of the unit's."""
    trained = [
        (module, parameter)
        for module in unit.modules()
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad and id(parameter) not in of_experts
    ]
    numbers = Counter[torch.dtype]()
    for _, parameter in trained:
        numbers[parameter.dtype] += parameter.numel()
    for module, parameter in trained:
        if parameter.dtype != numbers.most_common(1)[0][0] and module is not unit:
            yield module


def expert_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of all experts of a transformers model, for `ignored_params` of `fully_shard`.

    Args:
        model: a transformers model of a family with experts.

    Example (needs several ranks):
        >>> ignored = set(expert_parameters(model))
        >>> for layer in model.model.layers:
        ...     fully_shard(layer, mesh=dense_mesh, ignored_params=ignored)
        >>> fully_shard(model, mesh=dense_mesh, ignored_params=ignored)
        >>> fastmp.accelerate(model, mesh=mesh)
    """
    for module in model.modules():
        if "num_experts" in vars(module) and "down_proj" in module._parameters:
            yield from module.parameters()


def reserve(model: nn.Module, max_tokens: int) -> None:
    """Reserve symmetric memory for `max_tokens` tokens of a rank from the next forward on.

    Call it on all ranks if the first batch is not the largest one of a rank. Other dispatchers ignore it.

    Args:
        model: a model after `accelerate(model, mesh=mesh, dispatcher="symmetric")`.
        max_tokens: the most tokens of a batch, padding included.
    """
    for module in model.modules():
        if isinstance(module, DispatchedExperts):
            module.dispatcher.reserve(max_tokens)


def shard_over_mesh(model: Any, plan: MeshPlan, around: Any) -> None:
    """Shard the experts over ep, give them dispatchers, and apply `fully_shard`. Collective.

    around: the model itself, or the PEFT model that holds it.
    """
    if around is not model and hasattr(around, "peft_config"):
        around.__class__ = patched_class(type(around), MeshAdapters)
    mesh, options = plan.options.mesh, plan.options.fsdp
    over = mesh["dp_replicate", "dp_shard"] if is_replicated(mesh) else mesh["dp_shard"]
    for module, dispatcher in plan.experts:
        # 1. Experts of this ep rank, and their dispatcher.
        _shard_experts(module, mesh["ep"])
        module.__class__ = patched_class(type(module), DispatchedExperts)
        module.dispatcher = dispatcher
        # 2. FSDP2 over dp_shard. It takes the mean over its ranks of gradients, each a sum over an ep group.
        policy = options.get("mp_policy", MixedPrecisionPolicy())
        policy = replace(policy, cast_forward_inputs=False)  # which would round the routers' weights
        placed = {**options, "mp_policy": policy, "shard_placement_fn": _placement(module, mesh)}
        fully_shard(module, mesh=over, **placed)
        module.set_all_reduce_hook(functools.partial(_divide_, mesh["ep"].size()))
    model.__class__ = patched_class(type(model), MeshModel)
    model.mesh = mesh
    # 3. FSDP2 of everything else over all ranks.
    dense = dense_mesh(mesh) if plan.units else None
    for module in plan.kept:
        policy = options.get("mp_policy", MixedPrecisionPolicy())
        policy = replace(policy, param_dtype=None, output_dtype=None)
        fully_shard(module, mesh=dense, **{**options, "mp_policy": policy})
    for unit in plan.units:
        fully_shard(unit, mesh=dense, **options)
    _describe(model, mesh)


def _divide_(ranks: int, grad: Tensor) -> None:
    grad.div_(ranks)
    if grad.is_cuda:  # allocated on the stream of reduce-scatters, while this one reads it until it is freed
        grad.record_stream(torch.cuda.current_stream(grad.device))


def _shard_experts(module: Any, mesh: DeviceMesh) -> None:
    """Keep the experts of this ep rank: dimension 0 of each parameter."""
    for name, parameter in list(module._parameters.items()):
        local = parameter.data.chunk(mesh.size())[mesh.get_local_rank()].clone()
        shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        setattr(module, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))


def _placement(module: Any, mesh: DeviceMesh) -> Any:
    """Return a function to the dimension that FSDP2 shards: whole experts if ranks divide them, else 1."""
    ranks, experts = mesh["dp_shard"].size(), module.num_experts // mesh["ep"].size()

    def place(parameter: nn.Parameter) -> Shard | None:
        whole = experts % ranks == 0 and ranks > 1
        return None if whole or parameter.shape[1] % ranks else Shard(1)

    return place


def _groups(mesh: DeviceMesh) -> ParallelGroups:
    """Return the process groups that dispatchers use: the ep group of the mesh."""
    size = mesh["ep"].size()
    grid = RankGrid(world_size=size, ep=size)
    if size == 1:
        return ParallelGroups(grid=grid, rank=0)
    group = mesh["ep"].get_group()
    exchange = SymmetricExchange(
        group, etp=1, ep=size, etp_varies_first=True, timeout=DEFAULT_TIMEOUT.total_seconds()
    )
    return ParallelGroups(
        grid=grid, rank=group.rank(), ep=group, etp_ep=group, exchange=exchange, deepep=DeepEPBuffer(group)
    )


def _describe(model: Any, mesh: DeviceMesh) -> None:
    """Tell transformers' Trainer that the model is sharded; it wraps others in DDP."""
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError:  # an older transformers, whose Trainer does not ask
        return
    ranks = mesh["dp_shard"].size() * mesh["ep"].size()
    replicas = mesh.size() // ranks
    model.config.distributed_config = DistributedConfig(
        fsdp_size=ranks, dp_replicate_size=replicas, ep_size=mesh["ep"].size()
    )
    model._is_distributed_loading_by_transformers = model._is_fsdp_managed_module = True
