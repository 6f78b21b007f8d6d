"""Parameters: the names and sizes of those that a rank of each pipeline stage has, and their flat buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from fastmp.config import NORMS, OPTIMIZERS, BertConfig, GPTConfig, ParallelConfig, Recipe
from fastmp.config.precision import Fp8Recipe
from fastmp.optim.flat_layout import Buffer, ParamSpec, matrix_cost, plan_buffers
from fastmp.plan.shapes import Shapes
from fastmp.schedule.stage_map import StageMap

__all__ = [
    *("expert_chunks", "expert_stages", "is_mtp_projection", "layer_size", "rank_buffers", "rank_parameters"),
    *("stage_kinds", "stage_layers", "stage_map", "stage_ranges"),
]


def stage_map(layout: ParallelConfig) -> StageMap:
    """Return the placement of the stages on the pipeline ranks."""
    return StageMap(layout.pp, layout.vpp, layout.placement)


def stage_layers(recipe: Recipe) -> list[int]:
    """Return how many layers each stage has, first to last."""
    layout = recipe.parallel
    stages = layout.pp * layout.vpp
    if layout.stage_layers is not None:
        return list(layout.stage_layers)
    return [recipe.model.num_layers // stages] * stages


def stage_ranges(recipe: Recipe) -> list[range]:
    """Return the layers of each stage, first to last."""
    ends = [0, *accumulate(stage_layers(recipe))]
    return [range(start, end) for start, end in pairwise(ends)]


def stage_kinds(recipe: Recipe) -> list[tuple[GPTConfig, ...]]:
    """Return the configuration of each layer of each stage; layers of MTP modules end the last stage."""
    *before, last = (recipe.model.layers[stage.start : stage.stop] for stage in stage_ranges(recipe))
    return [*before, last + recipe.model.layers[-1:] * recipe.model.mtp_depth]


def expert_stages(recipe: Recipe) -> tuple[int, ...]:
    """Return the pipeline rank of each layer with experts."""
    kinds, rank_of = stage_kinds(recipe), stage_map(recipe.parallel).rank
    return tuple(rank_of(stage) for stage, own in enumerate(kinds) for kind in own if kind.moe is not None)


def expert_chunks(recipe: Recipe, rank: int) -> list[range]:
    """Return the layers of each chunk of pipeline rank `rank`, numbered among the layers with experts."""
    numbers = [sum(kind.moe is not None for kind in own) for own in stage_kinds(recipe)]
    ends = [0, *accumulate(numbers)]
    ranges = [range(start, end) for start, end in pairwise(ends)]
    return stage_map(recipe.parallel).of_rank(ranges, rank)


class _Division(NamedTuple):
    """Key of the parameters of a rank: layers of the stages, their placement, optimizer and FP8."""

    stages: tuple[range, ...]
    places: StageMap
    optimizer: str
    fp8: Fp8Recipe | None


def rank_parameters(recipe: Recipe, shapes: Shapes, rank: int) -> Mapping[str, ParamSpec]:
    """Return {name: facts} of what a rank of pipeline rank `rank` has, in the order of its chunks."""
    return _rank_parameters(*_without_microbatch(recipe, shapes), rank)


def _without_microbatch(recipe: Recipe, shapes: Shapes) -> tuple[_Division, Shapes]:
    """Return what parameters depend on, equal for all microbatch sizes and kinds of recomputation."""
    division = _Division(
        tuple(stage_ranges(recipe)),
        stage_map(recipe.parallel),
        recipe.optimizer.name,
        recipe.train.fp8(),
    )
    own = replace(shapes, num_microbatches=0, length=0, tokens=0, rows=0, routed=0, documents=0, predicted=0)
    return division, replace(own, recompute_kv=False)


@lru_cache(maxsize=1024)
def _rank_parameters(division: _Division, shapes: Shapes, rank: int) -> Mapping[str, ParamSpec]:
    stages, places, optimizer, fp8 = division
    found: dict[str, ParamSpec] = {}
    for stage in places.stages(rank):
        ends = stage == 0, stage == places.last
        found |= _stage(shapes, stages[stage], *ends, shared=not places.ends_meet)
    if OPTIMIZERS[optimizer].matrix_state is not None:
        costs: dict[str, int] = {}
        for kind in set(shapes.model.layers):
            costs |= _update_costs(replace(shapes, model=kind))
        for name, facts in found.items():
            in_layer = name.rpartition("layers.")[2].partition(".")[2]
            found[name] = replace(facts, cost=costs.get(in_layer, 0))
            if is_mtp_projection(name):
                whole = matrix_cost(shapes.model.hidden_size, 2 * shapes.model.hidden_size)
                found[name] = replace(facts, cost=whole * shapes.grid.tp)
    if fp8 is not None:
        split = (each.name for each in shapes.model.attention.projections if each.split)
        quantized = (*(f"attention.{name}.weight" for name in split), *_QUANTIZED)
        for name, facts in found.items():
            if name.endswith(quantized):
                found[name] = replace(facts, fp8=fp8.block)
    return found


def rank_buffers(recipe: Recipe, shapes: Shapes, rank: int) -> tuple[Buffer, ...]:
    """Return the flat buffers that the parameters of a rank of pipeline rank `rank` lie in."""
    own = recipe.optimizer
    buckets = own.shard, own.bucket_size, own.bucket_unit
    return _rank_buffers(*_without_microbatch(recipe, shapes), rank, *buckets)


@lru_cache(maxsize=1024)
def _rank_buffers(
    division: _Division, shapes: Shapes, rank: int, shard: bool, bucket_size: int, unit: int
) -> tuple[Buffer, ...]:
    grid = shapes.grid
    return plan_buffers(
        _rank_parameters(division, shapes, rank),
        num_ranks=grid.dp * grid.cp if shard else 1,
        num_expert_ranks=grid.edp if shard else 1,
        bucket_size=bucket_size,
        unit=unit,
    )


# Weights of linear layers and experts, which have FP8 copies where GEMMs are in FP8.
_QUANTIZED = ("mlp.up.weight", "mlp.down.weight", "moe.experts.fc1", "moe.experts.fc2")


def fp8_copies(recipe: Recipe, shapes: Shapes, rank: int) -> int:
    """Return the bytes of the FP8 copies of weights, in both orientations, with their scales.

    Copies that ranks gather lie in a flat buffer, with its padding.
    """
    fp8 = recipe.train.fp8()
    if fp8 is None:
        return 0
    total = 0
    for buffer, sizes in fp8_buffers(recipe, shapes, rank):
        if buffer.gathers_fp8:
            total += buffer.layout.size + sum(sizes) + fp8.scale_bytes(buffer.num_tiles)
        else:
            total += sum(map(fp8.weight_bytes, sizes))
    return total


def fp8_buffers(recipe: Recipe, shapes: Shapes, rank: int) -> Iterator[tuple[Buffer, list[int]]]:
    """Yield the flat buffers of a rank, each with the sizes of those weights that have FP8 copies."""
    facts = rank_parameters(recipe, shapes, rank)
    for buffer in rank_buffers(recipe, shapes, rank):
        yield buffer, [facts[name].size for name in buffer.layout.ranges if facts[name].fp8]


def layer_size(shapes: Shapes, layer: int) -> int:
    """Return how many parameters a rank has of a layer."""
    of_layer = _stage(shapes, [layer], first=False, last=False, shared=False)
    return sum(facts.size for facts in of_layer.values())


def _stage(
    shapes: Shapes, layers: Sequence[int], first: bool, last: bool, *, shared: bool
) -> dict[str, ParamSpec]:
    """Return {name: facts} of a stage; shared: another rank has a copy of its tied embedding."""
    model, tp = shapes.model, shapes.grid.tp
    dtype = "float32" if shapes.itemsize == 4 else "bfloat16"
    split = shapes.sequence_parallel
    shared = shared and model.shares_embedding
    table = ParamSpec(shapes.vocab * model.hidden_size, dtype, own_bucket=shared)

    def facts(size: int, partial: bool = False) -> ParamSpec:
        return ParamSpec(size, dtype, partial=partial and tp > 1)

    found: dict[str, ParamSpec] = {}
    if first or (last and model.shares_embedding):
        found["word_embedding.weight"] = table
    if first and model.position == "learned":
        found["position_embedding.weight"] = facts(model.max_seq_len * model.hidden_size, split)

    of_kinds: dict[GPTConfig, dict[str, ParamSpec]] = {}

    def of_layer(layer: int) -> dict[str, ParamSpec]:
        sizes = shapes.of_layer(layer)
        if sizes.model not in of_kinds:
            own = of_kinds[sizes.model] = {}
            for name, (size, partial) in _layer(sizes):
                experts = name.startswith("moe.experts.")
                own[name] = ParamSpec(size, dtype, experts=True) if experts else facts(size, partial)
        return {f"layers.{layer}.{name}": each for name, each in of_kinds[sizes.model].items()}

    for layer in layers:
        found |= of_layer(layer)
    if last and not (model.bert is not None and model.bert.post_norm):
        found |= {name: facts(*of) for name, of in _norm(shapes, "final_norm", model.hidden_size)}
    if last and not model.tie_embeddings:
        found["output_layer.weight"] = ParamSpec(table.size, dtype)
    if model.bert is not None:
        found |= {name: facts(*of) for name, of in _bert(shapes, model.bert, first, last)}
    for depth in range(model.mtp_depth if last else 0):
        own = {name: facts(*of) for name, of in _mtp(shapes)} | of_layer(model.num_layers + depth)
        own |= {name: facts(*of) for name, of in _norm(shapes, "final_norm", model.hidden_size)}
        found |= {f"mtp.{depth}.{name}": each for name, each in own.items()}
    return found


def is_mtp_projection(name: str) -> bool:
    """Return True for the projection of an MTP module, which is replicated over tensor-parallel ranks."""
    return name.startswith("mtp.") and name.endswith(".proj.weight") and ".layers." not in name


def _mtp(shapes: Shapes) -> Iterator[tuple[str, tuple[int, bool]]]:
    """Yield what an MTP module has before its layer, as `_layer` does."""
    h = shapes.model.hidden_size
    yield from _norm(shapes, "embedding_norm", h)
    yield from _norm(shapes, "hidden_norm", h)
    yield "proj.weight", (2 * h * h, shapes.sequence_parallel)


def _bert(
    shapes: Shapes, bert: BertConfig, first: bool, last: bool
) -> Iterator[tuple[str, tuple[int, bool]]]:
    """Yield the parameters of BERT alone: token types and heads of a stage, as `_layer` does."""
    h, split = shapes.model.hidden_size, shapes.sequence_parallel
    if first and bert.num_token_types:
        yield "token_type_embedding.weight", (bert.num_token_types * h, split)
    if first and bert.post_norm:
        yield from _norm(shapes, "embedding_norm", h)
    if not last:
        return
    heads = [("lm_head.dense", h)]
    if bert.sentence_order:
        heads += [("sentence_head.pooler", h), ("sentence_head.order", 2)]
    yield "lm_head.bias", (shapes.vocab, False)
    for name, outputs in heads:
        yield from ((f"{name}.weight", (outputs * h, False)), (f"{name}.bias", (outputs, False)))
        if name == "lm_head.dense":
            yield from _norm(replace(shapes, sequence_parallel=False), "lm_head.norm", h)


def _layer(shapes: Shapes) -> Iterator[tuple[str, tuple[int, bool]]]:
    """Yield (name, (elements, whether the gradient is a partial sum)) of a layer."""
    model, split = shapes.model, shapes.sequence_parallel
    h, moe = model.hidden_size, model.moe
    yield from _norm(shapes, "attention_norm", h)
    yield from _attention(shapes)
    yield from _norm(shapes, "mlp_norm", h)
    ffn = model.ffn_size if moe is None else moe.shared_expert_ffn_hidden_size
    mlp = "mlp" if moe is None else "moe.shared_experts.mlp"
    if moe is not None:
        yield "moe.router.weight", (moe.num_experts * h, True)
        if moe.router_bias:
            yield "moe.router.bias", (moe.num_experts, True)
        each = moe.num_experts * h * moe.expert_ffn_hidden_size // (shapes.grid.ep * shapes.grid.etp)
        yield from (
            ("moe.experts.fc1", (each * shapes.projections, False)),
            ("moe.experts.fc2", (each, False)),
        )
        if moe.linear_bias:
            held, etp = moe.num_experts // shapes.grid.ep, shapes.grid.etp
            columns = shapes.projections * moe.expert_ffn_hidden_size // etp
            yield from (
                ("moe.experts.fc1_bias", (held * columns, False)),
                ("moe.experts.fc2_bias", (held * h, False)),
            )
        if moe.shared_expert_gate:
            yield "moe.shared_experts.gate", (h, split)
    if ffn:
        yield from _linear(shapes, f"{mlp}.up", h, shapes.projections * ffn // shapes.grid.tp)
        yield from _linear(shapes, f"{mlp}.down", ffn // shapes.grid.tp, h, row=True)


def _attention(shapes: Shapes) -> Iterator[tuple[str, tuple[int, bool]]]:
    """Yield what the attention of a layer has, as `_layer` does."""
    spec, tp, split = shapes.model.attention, shapes.grid.tp, shapes.sequence_parallel
    if spec.sinks:
        yield "attention.sinks", (spec.sinks // tp, False)
    for each in spec.projections:
        name, own = f"attention.{each.name}", each.elements // (tp if each.split else 1)
        yield f"{name}.weight", (own, split and not each.split)
        if each.bias:
            row = each.split == "rows"
            yield f"{name}.bias", (each.outputs if row else each.outputs // tp, row and split)
    yield from ((f"attention.{name}.weight", (size, spec.per_head or split)) for name, size in spec.norms)


def _update_costs(shapes: Shapes) -> dict[str, int]:
    """Return the cost of Muon's update, over all tensor-parallel ranks, by parameter name in the layer."""
    model, h, moe = shapes.model, shapes.model.hidden_size, shapes.model.moe
    costs = {}
    for proj in model.attention.projections:  # all ranks update what all of them have
        whole = sum(matrix_cost(rows, proj.inputs) for rows in proj.parts or (proj.outputs,))
        costs[f"attention.{proj.name}.weight"] = whole * (1 if proj.split else shapes.grid.tp)
    ffn = model.ffn_size if moe is None else moe.shared_expert_ffn_hidden_size
    mlp, each = "mlp" if moe is None else "moe.shared_experts.mlp", matrix_cost(ffn, h)
    costs |= {f"{mlp}.up.weight": shapes.projections * each, f"{mlp}.down.weight": each}
    if moe is not None:
        each = matrix_cost(moe.expert_ffn_hidden_size, h) * (moe.num_experts // shapes.grid.ep)
        costs |= {"moe.experts.fc1": shapes.projections * each, "moe.experts.fc2": each}
    return costs


def _linear(
    shapes: Shapes, name: str, inputs: int, outputs: int, row: bool = False, bias: bool | None = None
) -> Iterator[tuple[str, tuple[int, bool]]]:
    yield f"{name}.weight", (inputs * outputs, False)
    if shapes.model.linear_bias if bias is None else bias:
        yield f"{name}.bias", (outputs, row and shapes.sequence_parallel)


def _norm(shapes: Shapes, name: str, size: int) -> Iterator[tuple[str, tuple[int, bool]]]:
    for each in NORMS[shapes.model.norm].parameters:
        yield f"{name}.{each}", (size, shapes.sequence_parallel)
