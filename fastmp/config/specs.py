"""Specs: the facts of a component, declared once and looked up by name.

A spec holds all that configuration, `--help`, layers, the planner, the layout check and CUDA graph scopes
need to know about an activation, a norm, an optimizer, a pipeline schedule or a token dispatcher
(`fastmp.config.dispatchers`).
Register a spec, and its name is a choice everywhere:

    NORMS.register(NormSpec("scale", "my_package.norms:ScaleNorm", ("weight",), saved_per_token=1))

Implementations are named by "module:name" and imported when a layer is built, so that plans never import
torch. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import Any, Protocol, TypeVar, cast

__all__ = [
    "ACTIVATIONS", "NORMS", "OPTIMIZERS", "PLACEMENTS", "SCHEDULES", "ActivationSpec", "NamedSpec",
    "NormSpec", "OptimizerSpec", "Registry", "ScheduleSpec", "StateSpec", "load",
]  # fmt: skip


class NamedSpec(Protocol):
    """A named component, with the phrase that `--help` shows for it."""

    @property
    def name(self) -> str: ...

    @property
    def help(self) -> str: ...


SpecT = TypeVar("SpecT", bound=NamedSpec)


class Registry(Mapping[str, SpecT]):
    """Specs of one kind by name, in the order of registration.

    Looking up an unknown name raises ValueError with the known ones; there is no default.
    """

    def __init__(self, kind: str, *specs: SpecT) -> None:
        self.kind = kind
        self._specs: dict[str, SpecT] = {}
        for spec in specs:
            self.register(spec)

    def register(self, spec: SpecT) -> SpecT:
        """Add `spec` and return it. Raises ValueError if its name is taken."""
        if spec.name in self._specs:
            raise ValueError(f"{self.kind} {spec.name!r} is registered already: choose another name")
        self._specs[spec.name] = spec
        return spec

    def __getitem__(self, name: str) -> SpecT:
        if name not in self._specs:
            known = ", ".join(self._specs)
            raise ValueError(f"unknown {self.kind} {name!r}: expected one of {known}, or register its spec")
        return self._specs[name]

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    @property
    def help(self) -> str:
        """Choices for `--help`, each with its phrase: "gelu (exact, with erf), ..."."""
        return ", ".join(f"{spec.name} ({spec.help})" for spec in self.values())


def load(target: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the implementation that a spec names: a callable, or "module:name" to import."""
    if not isinstance(target, str):
        return target
    module, _, path = target.partition(":")
    found: Any = import_module(module)
    return cast("Callable[..., Any]", reduce(getattr, path.split("."), found))


@dataclass(frozen=True)
class ActivationSpec:
    """The activation of an MLP and of experts.

    op: a function (..., num_projections * F), bias= -> (..., F); callable or "module:name".
    form: the function as fused kernels name it ("gelu" exact, "gelu_tanh", "silu"), which the grouped GEMM of
        experts applies in its epilogue; None: `op` runs after the GEMM.
    num_gates: 1 for a gated linear unit, whose first projection makes [gate | up] and which returns
        form(gate) * up; 0 for form(up).
    interleaved: the first projection makes gate and up in turns, column 2i and 2i + 1; otherwise [gate | up].
    """

    name: str
    op: str | Callable[..., Any]
    form: str | None = None
    num_gates: int = 0
    interleaved: bool = False
    help: str = ""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the first projection that ranks split one by one: 2 for [gate | up]."""
        return 1 if self.interleaved else self.num_projections

    @property
    def fused_rows(self) -> tuple[int, ...]:
        """Rows of each matrix in a group of fused ones, as in `ParallelAttributes`."""
        return (1, 1) if self.interleaved else ()

    @property
    def num_projections(self) -> int:
        """Number of ffn-wide projections of the first GEMM: 1 for [up], 2 for [gate | up]."""
        return 1 + self.num_gates


@dataclass(frozen=True)
class NormSpec:
    """The norm of hidden states.

    make: a module class, called as make(size, group=, eps=, sequence_parallel=, device=, dtype=).
    parameters: the names of its parameters, each of shape (hidden,).
    saved_per_token: float32 statistics of a row that autograd keeps for backward, besides the input.
    """

    name: str
    make: str | Callable[..., Any]
    parameters: tuple[str, ...]
    saved_per_token: int
    help: str = ""

    @property
    def params_per_hidden(self) -> int:
        """Parameters over the hidden size."""
        return len(self.parameters)


@dataclass(frozen=True)
class StateSpec:
    """The optimizer state of a parameter.

    moments: the names of its moments, each of one number an element, as checkpoints have them.
    narrow: True if `optimizer.states = "small"` stores them in bfloat16, False if they stay float32.
    """

    moments: tuple[str, ...]
    narrow: bool = False

    def bytes(self, itemsize: int, small: bool) -> int:
        """Return the bytes of state an element has: moments and, for 16-bit parameters, a master weight."""
        master = 0 if itemsize >= 4 else 2 if small else 4
        return len(self.moments) * (2 if small and self.narrow else 4) + master


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer of flat buffers (`fastmp.optim.Optimizer`).

    make: called as make(grads, config, groups, group=) with the `GradBuffer`, the `OptimizerConfig` and the
        `ParallelGroups` of a rank; returns the optimizer.
    state: the state of a parameter whose elements are updated one by one.
    matrix_state: the state of a parameter that is updated as a whole matrix by one data-parallel rank; None
        if no update needs whole matrices.
    matrix_cost: (name, parameter, tp_group=, etp_group=) -> the cost of such an update, 0 for a parameter
        that is not updated as a matrix; a callable or "module:name".
    """

    name: str
    make: str | Callable[..., Any]
    state: StateSpec
    matrix_state: StateSpec | None = None
    matrix_cost: str | Callable[..., int] | None = None
    help: str = ""

    def state_of(self, matrix: bool) -> StateSpec:
        """Return the state of a parameter; matrix: of one that is updated as a whole matrix."""
        return self.matrix_state if matrix and self.matrix_state is not None else self.state


@dataclass(frozen=True)
class ScheduleSpec:
    """A pipeline schedule.

    make: (`PipelineSizes`, rank) -> `RankOrder`, see `fastmp.schedule.steps`, or "module:name" of it.
    splits: True if backwards are two steps, dgrad and wgrad; at least some of them.
    overlaps: True if forwards can overlap backwards, for EP communication overlap.
    placement: one of `PLACEMENTS`.
    vpp: the number of chunks of a rank, without microbatch groups; None: any number.
    """

    name: str
    make: str | Callable[..., Any]
    splits: bool = False
    overlaps: bool = False
    placement: str = "looped"
    vpp: int | None = None
    help: str = ""


PLACEMENTS = ("looped", "v")  # of stages on pipeline ranks, see `fastmp.schedule.stage_map`

_OPS = "fastmp.nn.activation:"
ACTIVATIONS: Registry[ActivationSpec] = Registry(
    "activation",
    ActivationSpec("gelu", _OPS + "gelu", "gelu", help="exact, with erf"),
    ActivationSpec("gelu_tanh", _OPS + "gelu_tanh", "gelu_tanh", help="tanh form, as in GPT-2"),
    ActivationSpec("swiglu", _OPS + "swiglu", "silu", num_gates=1, help="gated SiLU, as in Llama"),
    ActivationSpec("geglu", _OPS + "geglu", "gelu_tanh", num_gates=1, help="gated, tanh form, as in Gemma"),
    ActivationSpec("geglu_erf", _OPS + "geglu_erf", "gelu", num_gates=1, help="gated, exact"),
    ActivationSpec(
        "clamped_swiglu",
        _OPS + "clamped_swiglu",
        num_gates=1,
        interleaved=True,
        help="clamped at 7, as in GPT-OSS, gate and up in turns",
    ),
)

NORMS: Registry[NormSpec] = Registry(
    "norm",
    NormSpec("layernorm", "fastmp.nn.replicated:LayerNorm", ("weight", "bias"), 2, help="mean and variance"),
    NormSpec("rmsnorm", "fastmp.nn.replicated:RMSNorm", ("weight",), 1, help="root mean square, as in Llama"),
)

_ADAM = StateSpec(("exp_avg", "exp_avg_sq"), narrow=True)
OPTIMIZERS: Registry[OptimizerSpec] = Registry(
    "optimizer",
    OptimizerSpec("adamw", "fastmp.optim.adamw:AdamW.from_config", _ADAM, help="decoupled weight decay"),
    OptimizerSpec(
        "muon",
        "fastmp.optim.muon:Muon.from_config",
        _ADAM,
        matrix_state=StateSpec(("momentum",)),
        matrix_cost="fastmp.optim.muon:update_cost",
        help="orthogonal updates of the matrices between hidden states, AdamW for all else",
    ),
)

SCHEDULES: Registry[ScheduleSpec] = Registry(
    "pipeline schedule",
    ScheduleSpec(
        "1f1b",
        "fastmp.schedule.interleaved:one_forward_one_backward",
        overlaps=True,
        help="interleaved with vpp",
    ),
    ScheduleSpec(
        "zero_bubble",
        "fastmp.schedule.interleaved:zero_bubble",
        splits=True,
        help="delays weight gradients to fill the bubble",
    ),
    ScheduleSpec(
        "dualpipe_v",
        "fastmp.schedule.dualpipe:dualpipe_v",
        splits=True,
        overlaps=True,
        placement="v",
        vpp=2,
        help="from rank 0 to the last and back, for overlap_experts",
    ),
)
