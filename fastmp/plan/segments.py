"""The segments of a recipe's layers, with the tensors between them, and the captured spans.

Attention, MLP and router are described here by their shapes; dispatch and combine come from the
`DispatcherSpec`. Tests hold the plan and the segments of `fastmp.nn` together. Where ranks of a
tensor-parallel group have unequal slices of a sequence, the plan is the first rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from fastmp.config import MoEConfig
from fastmp.config.dispatchers import TensorFact
from fastmp.plan.parameters import layer_size
from fastmp.plan.shapes import Shapes
from fastmp.schedule.buffer_plan import SpanSpec, TensorSpec
from fastmp.schedule.program import Span
from fastmp.schedule.scope import captured_segments, layer_groups
from fastmp.schedule.stage_map import StageMap
from fastmp.schedule.stream_schedule import SegmentCost, SegmentFacts, partition_segments


class CrossingTensor:
    """A tensor between two segments; passed through unchanged, it is the same object."""

    def __init__(self, shape: Sequence[int], dtype: str, grad: bool = False) -> None:
        self.spec, self.grad = TensorSpec(tuple(shape), dtype), grad


CrossingTensors = tuple[CrossingTensor, ...]


class PlannedSegment(NamedTuple):
    name: str
    capturable: bool
    run: Callable[..., CrossingTensors]
    exchanges: bool = False


def segments(shapes: Shapes) -> list[PlannedSegment]:
    """Return the segments of one layer; it has experts if the model of `shapes` does."""
    parts = _Parts(shapes)
    found = [PlannedSegment("attention", True, parts.new_hidden)]
    if shapes.model.moe is None:
        found.append(PlannedSegment("mlp", True, parts.new_hidden))
    else:
        spec = shapes.dispatcher
        front: dict[str, Callable[..., CrossingTensors]] = {
            "router": parts.router,
            "preprocess": parts.preprocess,
        }
        if shapes.model.moe.shared_expert_ffn_hidden_size:
            front["shared_experts"] = parts.shared
        back: dict[str, Callable[..., CrossingTensors]] = {
            "dispatch": parts.dispatch,
            "experts": parts.experts,
            "combine": parts.combine,
        }
        found += [
            PlannedSegment(name, name not in spec.eager, run, name in spec.exchanges)
            for name, run in (*front.items(), *back.items())
        ]
    return found


def all_segments(shapes: Shapes) -> dict[str, bool]:
    """Return {segment: True if it can be captured} of all layers."""
    return {segment.name: segment.capturable for segment in _of_kinds(shapes)}


def exchange_segments(shapes: Shapes) -> list[str]:
    """Return the segments that communicate between expert-parallel ranks."""
    return list(dict.fromkeys(each.name for each in _of_kinds(shapes) if each.exchanges))


def _of_kinds(shapes: Shapes) -> list[PlannedSegment]:
    """Return the segments of each kind of layer."""
    return [each for kind in dict.fromkeys(shapes.model.layers) for each in segments(shapes.of_kind(kind))]


def stage_segment_costs(shapes: Shapes, layers: range) -> list[tuple[range, SegmentCost]]:
    """Return the parts of a stage with EP communication overlap: their segments by place, and their costs."""
    return partition_segments(chain_facts(shapes, layers))


def chain_facts(shapes: Shapes, layers: range, span_size: int | None = None) -> list[SegmentFacts]:
    """Return the facts of the segments of these layers; captured spans end at `span_size` parameters."""
    group_of = layer_groups([layer_size(shapes, layer) for layer in layers], span_size)
    return [
        SegmentFacts(f"{layer}.{each.name}", each.exchanges, each.capturable, group)
        for layer, group in zip(layers, group_of, strict=True)
        for each in segments(shapes.of_layer(layer))
    ]


def span_specs(shapes: Shapes, layers: Iterable[int], spans: Iterable[Span]) -> list[SpanSpec]:
    """Return the tensors of the captured spans of a chunk with these layers, in order.

    spans: of the chunk, eager ones included; layer chains that are not cut may be left out.
    """
    own = {layer: segments(shapes.of_layer(layer)) for layer in layers}
    links = [(layer, segment) for layer, parts in own.items() for segment in parts]
    found: list[SpanSpec] = []
    tensors: CrossingTensors = (_Parts(shapes).hidden(),)
    for span in spans:
        given, others, run = tensors, CrossingTensors(), [links[place] for place in span.segments or ()]
        for layer, segment in run:
            tensors = segment.run(*tensors)
            if segment is own[layer][-1]:
                tensors, others = tensors[:1], others + tensors[1:]
        if span.captured:
            if any(segment is own[layer][0] for layer, segment in run):
                given = (*given, *_Parts(shapes).documents())
            made = [each for each in (*tensors, *others) if not any(each is before for before in given)]
            grads = tuple(each.spec for each in made if each.grad) or None
            found.append(SpanSpec(span.name, tuple(each.spec for each in given), grads))
    return found


def full_scope_spans(shapes: Shapes, stage: int, stages: StageMap, layers: range) -> list[list[SpanSpec]]:
    """Return the captured spans of a stage under scope "full", and of the loss if it is the last stage.

    Raises ValueError as `captured_segments`.
    """
    captured_segments(("full",), all_segments(shapes))
    parts, experts = _Parts(shapes), any(shapes.model.layers[layer].moe is not None for layer in layers)
    batch = (shapes.tokens // shapes.length, shapes.length * shapes.grid.cp)
    ids, hidden = TensorSpec(batch, "int64"), parts.hidden().spec
    documents = tuple(each.spec for each in parts.documents())
    scalar, depth = TensorSpec((), "float32"), shapes.model.mtp_depth
    last = stage == stages.last
    experts = experts or (last and depth > 0 and shapes.model.layers[-1].moe is not None)
    aux = (scalar,) if experts and parts.balanced else ()
    if len(stages) == 1:
        return [[SpanSpec("0.microbatch", (ids, ids, *documents), (scalar, *aux, *[scalar] * (depth > 0)))]]
    own = ids._replace(shape=(batch[0], shapes.length))
    given, states = (hidden if stage else own, *documents), [hidden] * (1 + depth * last)
    if depth and stages.rank(stage) == stages.rank(stages.last):  # the tokens ahead, for MTP modules
        given = (*given, own._replace(shape=(depth, *own.shape)))
    made = states[1:] if stage and not layers else states  # without layers it returns what it gets
    found = [[SpanSpec("0.stage", given, (*made, *aux))]] if made else [[]]
    if last:
        found.append([SpanSpec("0.loss", (*states, ids, ids, *documents), (scalar, *[scalar] * (depth > 0)))])
    return found


def step_inputs(shapes: Shapes) -> list[TensorSpec]:
    """Return the static inputs of every rank under scope "full_step": all batches of a step.

    Raises ValueError as `captured_segments`.
    """
    captured_segments(("full_step",), all_segments(shapes))
    ids = TensorSpec((shapes.tokens // shapes.length, shapes.length * shapes.grid.cp), "int64")
    batch = [ids, ids, *(each.spec for each in _Parts(shapes).documents())]
    if shapes.model.bert is not None:
        batch += [ids, ids._replace(dtype="bool"), ids._replace(shape=ids.shape[:1])]
    return batch * shapes.num_microbatches


def update_inputs(layers: int, experts: int, pp: int, ep: int) -> list[TensorSpec]:
    """Return the static inputs of the graph of an update: the sums of a step, where the host reads some.

    These are `fastmp.training.train_step.ReducedSums`, with one request for each reason to stop.
    """
    totals, requests = TensorSpec((4,), "float64"), TensorSpec((4,), "float64")
    counts, moments = TensorSpec((layers, experts), "int64"), TensorSpec((pp, 3, ep), "float64")
    return [totals, requests, counts, TensorSpec((), "int64"), TensorSpec((2,), "int64"), moments]


class _Parts:
    """The tensors that each segment returns, as those of `fastmp.nn`."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes, self.dtype = shapes, "float32" if shapes.itemsize == 4 else "bfloat16"

    @property
    def moe(self) -> MoEConfig:
        assert self.shapes.model.moe is not None
        return self.shapes.model.moe

    @property
    def balanced(self) -> bool:
        """True if the layer has auxiliary losses."""
        return bool(self.moe.aux_loss or self.moe.sequence_aux_loss or self.moe.z_loss)

    def hidden(self) -> CrossingTensor:
        batch = self.shapes.tokens // self.shapes.length
        return CrossingTensor(
            (self.shapes.rows // batch, batch, self.shapes.model.hidden_size), self.dtype, grad=True
        )

    def documents(self) -> CrossingTensors:
        """Return the tensors of packed documents that all layers share: positions and borders."""
        shapes, batch = self.shapes, self.shapes.tokens // self.shapes.length
        positions = CrossingTensor((batch, shapes.length * shapes.grid.cp), "int64")
        return (positions, CrossingTensor((shapes.documents + 1,), "int32")) if shapes.documents else ()

    def new_hidden(self, *_: CrossingTensor) -> CrossingTensors:
        return (self.hidden(),)

    def router(self, hidden: CrossingTensor) -> CrossingTensors:
        shapes, moe = self.shapes, self.moe
        choices = (shapes.routed, moe.top_k)
        tokens = CrossingTensor((shapes.routed, shapes.model.hidden_size), self.dtype, grad=True)
        indices, probs = CrossingTensor(choices, "int32"), CrossingTensor(choices, "float32", grad=True)
        aux, counts = (
            CrossingTensor((), "float32", grad=self.balanced),
            CrossingTensor((moe.num_experts,), "int32"),
        )
        given = CrossingTensor(hidden.spec.shape, self.dtype, grad=bool(moe.shared_expert_ffn_hidden_size))
        return tokens, indices, probs, aux, counts, given, hidden

    def preprocess(
        self, tokens: CrossingTensor, indices: CrossingTensor, probs: CrossingTensor, *rest: CrossingTensor
    ) -> CrossingTensors:
        shapes, moe = self.shapes, self.moe
        if moe.capacity_factor is not None:
            choices = (shapes.routed, moe.top_k)
            indices, probs = CrossingTensor(choices, "int32"), CrossingTensor(choices, "float32", grad=True)
        earlier = {"indices": indices, "probs": probs}
        return tokens, *_named(shapes.dispatcher.prepared(shapes.dispatch_sizes), earlier).values(), *rest

    def shared(self, *tensors: CrossingTensor) -> CrossingTensors:
        *before, _, residual = tensors
        return *before, self.hidden(), residual

    def dispatch(self, tokens: CrossingTensor, *tensors: CrossingTensor) -> CrossingTensors:
        """Return the tensors of a capturable dispatch; an eager one crosses no graph."""
        spec, sizes = self.shapes.dispatcher, self.shapes.dispatch_sizes
        prepared, rest = spec.prepared(sizes), tensors[-4:]
        if spec.dispatched is None:
            return tokens, tokens, *rest
        return *_named(spec.dispatched(sizes), dict(zip(prepared, tensors))).values(), *rest

    def experts(
        self, rows: CrossingTensor, offsets: CrossingTensor, *rest: CrossingTensor
    ) -> CrossingTensors:
        return CrossingTensor(rows.spec.shape, self.dtype, grad=True), *rest

    def combine(self, *tensors: CrossingTensor) -> CrossingTensors:
        aux, counts, _, _ = tensors[-4:]
        return self.hidden(), aux, counts


def _named(
    facts: Mapping[str, TensorFact | None], earlier: Mapping[str, CrossingTensor]
) -> dict[str, CrossingTensor]:
    """Return the tensors that a spec declares; those without a fact are the `earlier` ones of their names."""
    return {name: earlier[name] if fact is None else CrossingTensor(*fact) for name, fact in facts.items()}
