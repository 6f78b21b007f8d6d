"""Space of layouts: what `fastmp plan search` varies, and the recipe of each candidate.

A candidate is a full assignment of the axes below. Sequence parallelism follows tp, where that divides the
sequence. Layers are divided so that the ranks of a pipeline have equal work, heads and MTP modules included.
What does not divide the model, the sequence or the batch is no candidate; `fastmp.plan.layout.problems` has
the last word.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from fastmp.config import DISPATCHERS, GPTConfig, GraphConfig, Recipe
from fastmp.config.dispatchers import select_dispatcher
from fastmp.config.sizes import head_flops_per_token, layer_flops_per_token, projection_flops_per_token
from fastmp.config.specs import SCHEDULES
from fastmp.plan.hardware import GPU
from fastmp.plan.layout import smallest_groups
from fastmp.schedule.stage_map import StageMap

CHUNKS, MOST_STAGES, MOST_TP = (1, 2, 4, 8), 64, 16
MICRO_BATCH_SIZES = (1, 2, 4, 8)
LEAST_TOKENS = 2048  # of a sequence on a context-parallel rank
RECOMPUTE = ("none", "kv", "full")
GRAPHS = ("none", "layers", "full_step")
STATES = {
    "classic": ("classic", "float32"),
    "small": ("small", "float32"),
    "small, bf16 grads": ("small", "bfloat16"),
}
PRECISIONS = ("dtype", "fp8")


class Layout(NamedTuple):
    """Sizes of the parallel axes."""

    tp: int
    cp: int
    pp: int
    ep: int
    etp: int

    def __str__(self) -> str:
        return " ".join(f"{name}{size}" for name, size in self._asdict().items() if size > 1) or "dp only"


@dataclass(frozen=True, order=True)
class Candidate:
    """A layout and all else that a search varies. Candidates compare in a fixed order, which breaks ties.

    recompute: "none", "kv" (latent attention's keys and values) or "full". graphs: "none", "layers" (all that
    can be captured in layers) or "full_step". states: a key of `STATES`, with the dtype of gradients.
    """

    tp: int
    cp: int
    pp: int
    ep: int
    etp: int
    micro_batch_size: int
    dispatcher: str
    precision: str
    recompute: str
    vpp: int
    schedule: str
    overlap: bool
    graphs: str
    states: str

    @property
    def layout(self) -> Layout:
        return Layout(self.tp, self.cp, self.pp, self.ep, self.etp)

    def facts(self) -> dict[str, Any]:
        """Return {axis: value}."""
        return {field.name: value for field, value in zip(fields(self), astuple(self), strict=True)}


AXES = tuple(field.name for field in fields(Candidate))


class Space:
    """The candidates of `recipe` on `gpus` GPUs, of which `fixed` keeps some values: {axis: values}."""

    def __init__(
        self, recipe: Recipe, gpus: int, gpu: GPU, fixed: Mapping[str, Collection[Any]] | None = None
    ) -> None:
        self.recipe, self.gpus, self.gpu, self.fixed = recipe, gpus, gpu, fixed or {}
        for axis in self.fixed:
            if axis not in AXES:
                raise ValueError(f"unknown axis {axis!r}: expected one of {', '.join(AXES)}")
        self._models: dict[tuple[str, str], GPTConfig] = {}
        kinds = list(dict.fromkeys(recipe.model.layers))
        # The kind of each layer, by number, and the first layer of each kind.
        self.kind_of = tuple(kinds.index(kind) for kind in recipe.model.layers)
        self.first_of = tuple(self.kind_of.index(number) for number in range(len(kinds)))

    def kept(self, axis: str, values: Collection[Any]) -> list[Any]:
        """Return the values of an axis that `fixed` keeps."""
        return [value for value in values if axis not in self.fixed or value in self.fixed[axis]]

    def layouts(self) -> Iterator[Layout]:
        """Yield the layouts that divide the GPUs, the heads, the sequence, the layers and the experts.

        Groups of tp and of etp are in one server, where the smaller ones divide the larger ones; those of tp
        and cp together, and of etp and ep, divide a server, or are whole servers.
        """
        model, length = self.recipe.model, self.recipe.data.seq_len
        moe = model.moe
        divisors = _divisors(self.gpus)
        sizes = [each for each in divisors if each <= MOST_TP and self._in_server(each)]
        contexts = [each for each in divisors if each == 1 or length // each >= LEAST_TOKENS]
        depths = [each for each in divisors if each <= min(model.num_layers, MOST_STAGES)]
        groups = [1] if moe is None else _divisors(moe.num_experts)
        for tp, cp, pp in product(self.kept("tp", sizes), self.kept("cp", contexts), self.kept("pp", depths)):
            if self.gpus % (tp * cp * pp) or not _divides(model, tp, length, cp):
                continue
            if not self._lie_alike(tp * cp):
                continue
            if moe is None:
                yield from (Layout(tp, cp, pp, 1, etp) for etp in self.kept("etp", [tp]))
                continue
            nested = [each for each in sizes if each % tp == 0 or tp % each == 0]
            for ep, etp in product(self.kept("ep", groups), self.kept("etp", nested)):
                fits = self.gpus % (pp * ep * etp) == 0 and moe.expert_ffn_hidden_size % etp == 0
                if fits and self._lie_alike(etp * ep):
                    yield Layout(tp, cp, pp, ep, etp)

    def _in_server(self, ranks: int) -> bool:
        """Return True if every group of so many neighbouring ranks is in one server."""
        return ranks <= self.gpu.per_server and (
            self.gpus <= self.gpu.per_server or self.gpu.per_server % ranks == 0
        )

    def _lie_alike(self, ranks: int) -> bool:
        """Return True if groups of so many neighbouring ranks cross as many servers as the first one."""
        return self._in_server(ranks) or ranks % self.gpu.per_server == 0

    def micro_batches(self, layout: Layout) -> list[int]:
        """Return the microbatch sizes that divide a replica's samples of a step."""
        dp = self.gpus // (layout.tp * layout.cp * layout.pp)
        batch = self.recipe.train.global_batch_size
        return [each for each in self.kept("micro_batch_size", MICRO_BATCH_SIZES) if batch % (each * dp) == 0]

    def num_microbatches(self, layout: Layout, micro_batch_size: int) -> int:
        """Return the microbatches of a replica in a step."""
        dp = self.gpus // (layout.tp * layout.cp * layout.pp)
        return self.recipe.train.global_batch_size // (micro_batch_size * dp)

    def dispatchers(self, layout: Layout) -> list[str]:
        """Return the token dispatchers; without expert parallelism, only that of the recipe.

        Symmetric memory is that of a server.
        """
        moe = self.recipe.model.moe
        if moe is None:
            return [""]
        if layout.ep == 1:
            return self.kept("dispatcher", [moe.dispatcher])
        near = self._in_server(layout.ep * layout.etp)
        return self.kept(
            "dispatcher", [name for name, spec in DISPATCHERS.items() if near or not spec.symmetric_memory]
        )

    def precisions(self) -> list[str]:
        """Return the precisions of GEMMs that the GPU has."""
        return self.kept("precision", PRECISIONS if self.gpu.eight else PRECISIONS[:1])

    def recomputations(self) -> list[str]:
        """Return the kinds of recomputation that the model has."""
        kinds = [each for each in RECOMPUTE if each != "kv" or self.recipe.model.latent is not None]
        return self.kept("recompute", kinds)

    def orders(self, layout: Layout, recompute: str) -> Iterator[tuple[int, str, bool]]:
        """Yield (chunks of a rank, schedule, EP communication overlap)."""
        layers, travels = self.recipe.model.num_layers, layout.ep * layout.etp > 1
        may_overlap = self.recipe.model.moe is not None and travels and recompute != "full"
        for vpp in self.kept("vpp", CHUNKS):
            if layout.pp * vpp > layers or (vpp > 1 and layout.pp == 1):
                continue
            for name in self.kept("schedule", SCHEDULES):
                spec = SCHEDULES[name]
                if spec.vpp not in (None, vpp) or (layout.pp == 1 and name != "1f1b"):
                    continue
                yield from (
                    (vpp, name, overlap)
                    for overlap in self.kept("overlap", (False, True))
                    if not overlap or (may_overlap and spec.overlaps)
                )

    def graphs(self, layout: Layout, dispatcher: str, overlap: bool) -> list[str]:
        """Return the scopes of CUDA graphs; whole steps need a dispatcher without eager segments."""
        whole = not overlap
        if self.recipe.model.moe is not None:
            tp, _, _, ep, etp = layout
            spec = select_dispatcher(dispatcher, ep=ep, etp=etp, one_sequence=etp <= tp)
            whole = whole and spec.capturable
        return self.kept("graphs", GRAPHS if whole else GRAPHS[:2])

    def states(self) -> list[str]:
        """Return the kinds of optimizer state and gradients."""
        small = self.recipe.train.dtype in ("auto", "bfloat16")
        return self.kept("states", [*STATES] if small else ["classic"])

    def candidates(self) -> Iterator[Candidate]:
        """Yield all candidates, in a fixed order; a search visits few of them."""
        for layout in self.layouts():
            for size, dispatcher, precision, recompute in product(
                self.micro_batches(layout), self.dispatchers(layout), self.precisions(), self.recomputations()
            ):
                for order in self.orders(layout, recompute):
                    for graphs, states in product(self.graphs(layout, dispatcher, order[2]), self.states()):
                        yield Candidate(
                            *layout, size, dispatcher, precision, recompute, *order, graphs, states
                        )

    def recipe_of(self, own: Candidate) -> Recipe:
        """Return the recipe of a candidate."""
        recipe, (states, grad_dtype) = self.recipe, STATES[own.states]
        model = self._model_of(own.dispatcher, own.precision)
        placement = SCHEDULES[own.schedule].placement
        number = self.num_microbatches(own.layout, own.micro_batch_size)
        return replace(
            recipe,
            model=model,
            parallel=replace(
                recipe.parallel,
                tp=own.tp,
                cp=own.cp,
                pp=own.pp,
                ep=own.ep,
                etp=None if own.etp == own.tp or model.moe is None else own.etp,
                vpp=own.vpp,
                schedule=own.schedule,
                overlap_experts=own.overlap,
                microbatch_group_size=smallest_groups(own.pp, number, own.vpp, own.schedule),
                stage_layers=divide_layers(model, recipe.data.seq_len, own.pp, own.vpp, placement),
                sequence_parallel=own.tp > 1 and recipe.data.seq_len % (own.tp * own.cp) == 0,
                recompute=own.recompute == "full",
                recompute_kv=own.recompute == "kv",
                shard_recompute_input=False,
                tp_overlap=False,
            ),
            data=replace(recipe.data, micro_batch_size=own.micro_batch_size),
            optimizer=replace(recipe.optimizer, states=states, grad_dtype=grad_dtype),
            train=replace(recipe.train, precision=own.precision),
            graphs=graphs_of(own.graphs),
        )

    def _model_of(self, dispatcher: str, precision: str) -> GPTConfig:
        """Return the model with a token dispatcher, the same object each time."""
        model, key = self.recipe.model, (dispatcher, precision)
        if model.moe is None:
            return model
        if key not in self._models:
            changed = dict[str, Any](dispatcher=dispatcher)
            if not DISPATCHERS[dispatcher].symmetric_memory:
                changed.update(symmetric_capacity=None, symmetric_overflow="drop")
            elif precision == "fp8" or model.moe.linear_bias:
                changed.update(activation_stash=0.0)  # which has no FP8, and no biases of experts
            self._models[key] = replace(model, moe=replace(model.moe, **changed))
        return self._models[key]


def graphs_of(name: str) -> GraphConfig:
    """Return the configuration of CUDA graphs that a value of `GRAPHS` names."""
    return GraphConfig(enabled=name != "none", scope=("full_step",) if name == "full_step" else None)


@cache
def divide_layers(
    model: GPTConfig, seq_len: int, pp: int, vpp: int, placement: str
) -> tuple[int, ...] | None:
    """Return the layers of each stage; None where all have equally many.

    Each layer goes to the rank with the least work so far, and there to the emptiest stage. The last stage
    begins with its head and MTP modules, counted in layers by their FLOPs.

    Example:
        >>> from fastmp.config import GPTConfig
        >>> divide_layers(GPTConfig(num_layers=7, vocab_size=64), 256, pp=2, vpp=2, placement="looped")
        (2, 2, 2, 1)
    """
    stages, places = pp * vpp, StageMap(pp, vpp, placement)
    if stages == 1:
        return None
    layer = sum(layer_flops_per_token(model.layers[-1], seq_len, causal=True))
    head = sum(head_flops_per_token(model, seq_len, model.vocab_size, seq_len))
    ahead = model.mtp_depth * (layer + projection_flops_per_token(model) + head)
    extra = [0.0] * (stages - 1) + [(head + ahead) / layer]
    ranks, found = [places.rank(stage) for stage in range(stages)], [0] * stages
    work = [0.0] * pp
    for rank, own in zip(ranks, extra, strict=True):
        work[rank] += own
    for _ in range(model.num_layers):
        least = min(range(stages), key=lambda i: (round(work[ranks[i]], 6), found[i] + extra[i], i))
        found[least] += 1
        work[ranks[least]] += 1.0
    return None if len(set(found)) == 1 else tuple(found)


def _divides(model: GPTConfig, tp: int, length: int, cp: int) -> bool:
    """Return True if tp and cp divide the heads, the widths and the sequence."""
    moe = model.moe
    widths = [model.num_heads, model.kv_heads]
    if moe is None or model.dense_layers:
        widths.append(model.ffn_size)
    if moe is not None:
        widths.append(moe.shared_expert_ffn_hidden_size)
    if any(width % tp for width in widths):
        return False
    return cp == 1 or (model.bert is None and length % (2 * cp) == 0)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
