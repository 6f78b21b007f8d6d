"""Time of a layer, of embeddings and of losses for one microbatch on named GPUs, by phase and by consumer.

GEMMs and memory-bound kernels come from `fastmp.plan.kernels`, bytes sent from `fastmp.plan.traffic` over
the links of `fastmp.plan.hardware`. `host_work` counts the launches of the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple

from fastmp.config import GPTConfig, GraphConfig
from fastmp.config.sizes import layer_flops_per_token
from fastmp.plan import traffic
from fastmp.plan.hardware import GPU, Link, link
from fastmp.plan.kernels import ATTENTION, LAUNCH, LAUNCHES, Gemm, Kernels, gemm_time
from fastmp.plan.segments import all_segments, segments
from fastmp.plan.shapes import Shapes
from fastmp.schedule.scope import captured_segments

FORWARD, REPEATED, INPUT, WEIGHT = "forward", "recomputation", "backward of inputs", "backward of weights"
_FLASH_BACKWARD = 2.5  # five GEMMs for two
_WHOLE = {"full", "full_step"}
_AFTER_A_WAIT = 2  # launches until the device has work again, after the host has waited for it


class HostWork(NamedTuple):
    """Launches of the host for a layer and microbatch. waits: of the host for the device, in a forward."""

    forward: int
    backward: int
    waits: int = 0

    def exposed_forward(self, launch: float, device: float) -> float:
        """Return the seconds that a forward of `device` seconds takes longer for the host's sake.

        launch: seconds of the host for a launch.
        """
        return max(0.0, self.forward * launch - device) + self.waits * _AFTER_A_WAIT * launch

    def exposed_backward(self, launch: float, device: float) -> float:
        """Return the same of a backward, in which the host does not wait."""
        return max(0.0, self.backward * launch - device)


NO_HOST_WORK = HostWork(0, 0)


def host_work(shapes: Shapes, kind: GPTConfig, graphs: GraphConfig) -> HostWork:
    """Return the host's work for a layer of this `kind` of the model of `shapes`."""
    of_layer = shapes.of_kind(kind)
    waits = int(kind.moe is not None and of_layer.dispatcher.host_syncs)
    if not graphs.enabled:
        captured = set[str]()
    elif _WHOLE & set(graphs.scope or ()):
        return HostWork(0, 0, waits)
    else:
        captured = captured_segments(graphs.scope, all_segments(shapes))
    forward = backward = 0
    for replayed, span in groupby(segments(of_layer), lambda part: part.name in captured):
        launches = [(1, 1)] if replayed else [LAUNCHES[part.name] for part in span]
        forward += sum(own for own, _ in launches)
        backward += sum(own for _, own in launches)
    return HostWork(forward, backward, waits)


def not_repeated(model: GPTConfig) -> float:
    """Return the FLOPs of a token in the last GEMM of an MLP, where recomputation leaves it out.

    Recomputation stops once it has every tensor that is kept, and nothing is kept behind that GEMM, unless
    there is dropout or a norm.
    """
    if model.moe is not None or model.dropout or (model.bert is not None and model.bert.post_norm):
        return 0.0
    return 2.0 * model.hidden_size * model.ffn_size


class Seconds(dict[str, float]):
    """Seconds by consumer: "GEMMs", "attention", "quantisers", "other kernels", or a group."""

    def __missing__(self, what: str) -> float:
        return 0.0

    def add(self, other: Mapping[str, float], times: float = 1.0) -> None:
        """Add the seconds of `other`, `times` over."""
        for what, took in other.items():
            self[what] += took * times

    def total(self) -> float:
        """Return the sum over all consumers."""
        return sum(self.values())


@dataclass(frozen=True)
class Phases:
    """The seconds of one microbatch, by phase and by consumer."""

    of: Mapping[str, Seconds] = field(
        default_factory=lambda: {name: Seconds() for name in (FORWARD, REPEATED, INPUT, WEIGHT)}
    )

    def total(self, *names: str) -> float:
        """Return the seconds of these phases together."""
        return sum(self.of[name].total() for name in names)

    def add(self, other: Phases) -> None:
        """Add the seconds of another part of the model."""
        for name, own in self.of.items():
            own.add(other.of[name])


class Links:
    """The links of a recipe's groups on servers of one kind of GPU."""

    def __init__(self, gpu: GPU, shapes: Shapes) -> None:
        self.gpu, self._grid, self._shapes = gpu, shapes.grid, shapes
        self._made: dict[str, Link] = {}

    def __getitem__(self, group: str) -> Link:
        if group not in self._made:
            ranks, crossing = self._grid.first(group), None
            if self._shapes.model.moe is not None and group == self._shapes.dispatcher.exchange_group:
                crossing = partial(self._shapes.dispatcher.crossing, self._shapes.dispatch_sizes)
            self._made[group] = link(self.gpu, ranks, crossing=crossing)
        return self._made[group]

    @property
    def between_stages(self) -> Link:
        """Slowest link between neighbours of a pipeline."""
        ranks = self._grid.first("pp")
        return min((link(self.gpu, pair) for pair in pairwise(ranks)), key=lambda each: each.bandwidth)


def _add_gemms(found: Phases, gpu: GPU, gemms: Sequence[Gemm], itemsize: int, kernels: Kernels) -> None:
    """Add the seconds of GEMMs, and of the two GEMMs of the backward of each."""
    for each in gemms:
        found.of[FORWARD]["GEMMs"] += gemm_time(gpu, each, itemsize)
        found.of[INPUT]["GEMMs"] += gemm_time(gpu, each.backward_input(), itemsize)
        found.of[WEIGHT]["GEMMs"] += gemm_time(gpu, kernels.wgrad(each), itemsize)


def layer_time(
    shapes: Shapes,
    links: Links,
    kernels: Kernels,
    recompute: bool,
    host: HostWork = NO_HOST_WORK,
) -> Phases:
    """Return the time of a layer, of the kind that the model of `shapes` is, for one microbatch."""
    gpu, itemsize, found = links.gpu, shapes.itemsize, Phases()
    forward, repeated, inputs = (found.of[name] for name in (FORWARD, REPEATED, INPUT))
    column, row = layer_gemms(shapes)
    _add_gemms(found, gpu, (*column, *row), itemsize, kernels)
    forward["attention"], inputs["attention"] = _attention(shapes, gpu, kernels)
    forward["other kernels"], inputs["other kernels"] = _other_kernels(shapes, gpu, kernels)
    if shapes.fp8:
        forward["quantisers"], inputs["quantisers"] = _quantisers(shapes, gpu, kernels)
    sent = traffic.layer(shapes)
    forward.add(communication(shapes, links, sent.forward, kernels.late))
    backward = communication(shapes, links, sent.backward, kernels.late)
    if kernels.overlap:  # with the wgrads of column-parallel layers, or with dgrads
        beside = sum(gemm_time(gpu, kernels.wgrad(each), itemsize) for each in column)
        share = 1.0
        if shapes.sequence_parallel:
            share, beside = 2 / 3, beside + inputs["GEMMs"] / 2
        backward["tp"] -= min(backward["tp"] * share, beside) * beside_compute(gpu, kernels.collective)
    inputs.add(backward)
    if shapes.recompute_kv:
        up = next(each for each in shapes.model.attention.projections if each.name == "kv_up")
        gemm = Gemm(shapes.tokens * shapes.grid.cp, up.outputs // shapes.grid.tp, up.inputs, fp8=shapes.fp8)
        repeated["GEMMs"] += gemm_time(gpu, gemm, itemsize)
        keys = shapes.grid.cp * shapes.tokens * shapes.heads * shapes.model.attention.query_size * itemsize
        repeated["other kernels"] += 2 * keys / bandwidth(gpu, kernels) + LAUNCH
    if recompute:
        repeated.add(forward)
        repeated.add(communication(shapes, links, sent.forward - sent.repeated, kernels.late), -1.0)
        if not_repeated(shapes.model):
            repeated["GEMMs"] -= gemm_time(gpu, row[-1], itemsize)
        repeated["host"] = host.exposed_forward(kernels.host, repeated.total())
    forward["host"] = host.exposed_forward(kernels.host, forward.total())
    inputs["host"] = host.exposed_backward(kernels.host, found.total(INPUT, WEIGHT))
    return found


def layer_gemms(shapes: Shapes) -> tuple[list[Gemm], list[Gemm]]:
    """Return the GEMMs of a layer's linear layers: (column-parallel, row-parallel)."""
    model, grid, moe = shapes.model, shapes.grid, shapes.model.moe
    h, linear = model.hidden_size, partial(Gemm, fp8=shapes.fp8)
    column, row = list[Gemm](), list[Gemm]()
    for each in model.attention.projections:
        if each.split == "rows":
            row.append(linear(shapes.tokens, each.outputs, each.inputs // grid.tp))
        elif each.split:
            column.append(linear(shapes.tokens, each.outputs // grid.tp, each.inputs))
        else:  # of this rank's hidden states
            column.append(Gemm(shapes.rows, each.outputs, each.inputs))
    width = model.ffn_size if moe is None else moe.shared_expert_ffn_hidden_size
    if width:
        column.append(linear(shapes.tokens, shapes.projections * width // grid.tp, h))
        row.append(linear(shapes.tokens, h, width // grid.tp))
    if moe is not None:
        own, expert = moe.num_experts // grid.ep, moe.expert_ffn_hidden_size // grid.etp
        rows = max(1, shapes.pairs * grid.etp // own)
        column.append(Gemm(shapes.routed, moe.num_experts, h))
        column.append(linear(rows, shapes.projections * expert, h, own))
        row.append(linear(rows, h, expert, own))
    return column, row


def _quantisers(shapes: Shapes, gpu: GPU, kernels: Kernels) -> tuple[float, float]:
    """Return the seconds in which operands of FP8 GEMMs are quantised, (forward, backward).

    Forward quantises inputs; backward quantises gradients, and dequantises inputs for wgrad.
    """
    gemms = [gemm for part in layer_gemms(shapes) for gemm in part if gemm.fp8]
    inputs = sum(gemm.batch * gemm.rows * gemm.sum for gemm in gemms)
    outputs = sum(gemm.batch * gemm.rows * gemm.columns for gemm in gemms)
    moved = 1 + shapes.itemsize
    rate, launches = bandwidth(gpu, kernels), len(gemms) * LAUNCH
    return moved * inputs / rate + launches, moved * (inputs + outputs) / rate + 2 * launches


def _attention(shapes: Shapes, gpu: GPU, kernels: Kernels) -> tuple[float, float]:
    """Return the seconds of attention between its projections, (forward, backward)."""
    model, itemsize, length = shapes.model, shapes.itemsize, shapes.length * shapes.grid.cp
    if kernels.scores is None:
        _, flops = layer_flops_per_token(model, length, causal=True)
        flops *= shapes.tokens / shapes.grid.tp
        forward = flops / (ATTENTION * gpu.gemms * gpu.peak(itemsize))
        return LAUNCH + forward, 2 * LAUNCH + _FLASH_BACKWARD * forward
    batch = shapes.heads * shapes.tokens // shapes.length
    gemms = (
        Gemm(shapes.length, length, model.attention.query_size, batch),
        Gemm(shapes.length, model.attention.value_size, length, batch),
    )
    element = batch * shapes.length * length * itemsize / bandwidth(gpu, kernels)
    backward = [each for of in gemms for each in (of.backward_input(), of.backward_weight())]
    of_scores, of_gradients = kernels.scores
    return (
        sum(gemm_time(gpu, each, itemsize) for each in gemms) + of_scores * element,
        sum(gemm_time(gpu, each, itemsize) for each in backward) + of_gradients * element,
    )


def _other_kernels(shapes: Shapes, gpu: GPU, kernels: Kernels) -> tuple[float, float]:
    """Return the seconds of memory-bound kernels, (forward, backward)."""
    model, moe, projections = shapes.model, shapes.model.moe, shapes.projections
    spec = model.attention
    widths = (shapes.heads + shapes.kv_heads) * spec.query_size + shapes.kv_heads * spec.value_size
    projected = shapes.tokens * widths * shapes.itemsize
    width = model.ffn_size if moe is None else moe.shared_expert_ffn_hidden_size
    ffn = shapes.tokens * width // shapes.grid.tp * shapes.itemsize
    rows = 0
    if moe is not None:  # rows are sorted and brought back
        ffn += shapes.pairs * moe.expert_ffn_hidden_size * shapes.itemsize
        rows = shapes.pairs * shapes.grid.etp * model.hidden_size * shapes.itemsize
    rate = bandwidth(gpu, kernels)
    return tuple(  # type: ignore[return-value]
        (
            kernels.hidden[i] * shapes.hidden
            + kernels.projected[i] * projected
            + (kernels.ffn[i] + (2 * projections if i else projections) + 1) * ffn
            + 4 * rows
        )
        / rate
        + (kernels.launches[i] + (0 if moe is None else 8)) * LAUNCH
        for i in (0, 1)
    )


def embedding_time(shapes: Shapes, links: Links, kernels: Kernels) -> Phases:
    found, sent = Phases(), traffic.embedding(shapes)
    rows = 4 * shapes.hidden / bandwidth(links.gpu, kernels) + 2 * LAUNCH  # a lookup, dropout
    found.of[FORWARD]["other kernels"] += rows
    found.of[WEIGHT]["other kernels"] += rows
    found.of[FORWARD].add(communication(shapes, links, sent.forward))
    found.of[INPUT].add(communication(shapes, links, sent.backward))
    return found


def loss_time(shapes: Shapes, links: Links, kernels: Kernels) -> Phases:
    """Return the time of the output layer and the loss."""
    found, gpu, itemsize, h = Phases(), links.gpu, shapes.itemsize, shapes.model.hidden_size
    gemms = [Gemm(shapes.predicted, shapes.vocab, h)]
    if shapes.model.bert is not None:  # on every tensor-parallel rank
        gemms.append(Gemm(shapes.predicted, h, h))
    _add_gemms(found, gpu, gemms, itemsize, kernels)
    nbytes = shapes.predicted * shapes.vocab * kernels.logits
    found.of[FORWARD]["other kernels"] = nbytes / bandwidth(gpu, kernels) + 8 * LAUNCH
    found.of[INPUT].add(communication(shapes, links, traffic.loss(shapes).forward))
    return found


def mtp_time(shapes: Shapes, links: Links, kernels: Kernels) -> Phases:
    """Return the time of an MTP module without its layer: embedding, norms, projection and loss."""
    found, h, gpu = Phases(), shapes.model.hidden_size, links.gpu
    _add_gemms(found, gpu, [Gemm(shapes.rows, h, 2 * h)], shapes.itemsize, kernels)
    for name, passes in ((FORWARD, 12), (INPUT, 18)):  # over hidden states: four norms, two inputs joined
        moved = passes * shapes.hidden / bandwidth(gpu, kernels)
        found.of[name]["other kernels"] += moved + passes / 2 * LAUNCH
    found.add(embedding_time(shapes, links, kernels))
    found.add(loss_time(shapes, links, kernels))
    return found


def communication(shapes: Shapes, links: Links, sent: Mapping[str, int], late: float = 0.0) -> Seconds:
    """Return the seconds of the collectives in which a rank sends the bytes `sent` of a layer, by group."""
    found = Seconds()
    whole = shapes.tokens * shapes.model.hidden_size * shapes.itemsize
    for group, nbytes in sent.items():
        joined = links[group]
        if joined.ranks == 1 or not nbytes:
            continue
        ring = whole * (joined.ranks - 1) / joined.ranks
        if group == "tp" and not shapes.sequence_parallel:
            found[group] += nbytes / (2 * ring) * (joined.all_reduce(whole) + late * joined.last)
        elif group == "tp":
            found[group] += joined.passes(nbytes, nbytes / ring) + nbytes / ring * late * joined.last
        else:
            found[group] += joined.passes(nbytes, 1 if group == "cp" else 2)
    return found


def beside_compute(gpu: GPU, held: int) -> float:
    """Return the share of overlapped time that is saved, if the collective holds `held` multiprocessors.

    GEMMs beside it have the others, and end as much later.
    """
    return 1.0 - held / gpu.processors


def bandwidth(gpu: GPU, kernels: Kernels) -> float:
    return kernels.memory * gpu.memory_bandwidth
