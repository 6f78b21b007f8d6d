"""The layout check of a recipe against a number of ranks: all problems at once, before processes start.

Layers and the trainer raise for each of these mistakes as well, one at a time. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from fastmp.config import DISPATCHERS, ParallelConfig, Recipe
from fastmp.config.dispatchers import DispatchSizes
from fastmp.config.specs import SCHEDULES
from fastmp.distributed.grid import RankGrid
from fastmp.schedule.schedule import Schedule
from fastmp.schedule.stage_map import StageMap

__all__ = [
    "Problem",
    "check_layout",
    "fewest_ranks",
    "make_grid",
    "make_schedule",
    "other_schedules",
    "problems",
    "schedule_name",
    "smallest_groups",
]

MAX_MICROBATCHES = 1 << 16  # schedules list them


class Problem(NamedTuple):
    """Something that does not fit: a message with all values, and the fields to change, likeliest first."""

    fields: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{self.message}; change {' or '.join(self.fields)}"


def make_grid(recipe: Recipe, world_size: int) -> RankGrid:
    """Make the grid of `recipe`'s ranks; ValueError where its layout does not divide them."""
    layout = recipe.parallel
    return RankGrid(
        world_size=world_size, tp=layout.tp, cp=layout.cp, pp=layout.pp, ep=layout.ep, etp=layout.etp
    )


def make_schedule(layout: ParallelConfig, num_microbatches: int) -> Schedule:
    """Return the schedule of `layout`. Raises ValueError if it has no order for so many microbatches."""
    sizes = (layout.pp, num_microbatches, layout.vpp, layout.microbatch_group_size)
    return Schedule(*sizes, layout.schedule, layout.overlap_experts)


def other_schedules(layout: ParallelConfig, num_microbatches: int) -> Iterator[ParallelConfig]:
    """Yield `layout` with each other schedule that runs so many microbatches through the same chunks.

    Microbatch groups are the smallest that the schedule accepts. EP communication overlap is left out where
    the schedule has none.
    """
    for spec in SCHEDULES.values():
        if spec.name == layout.schedule or spec.vpp not in (None, layout.vpp):
            continue
        overlap = layout.overlap_experts and spec.overlaps
        other = replace(layout, schedule=spec.name, overlap_experts=overlap)
        groups = smallest_groups(layout.pp, num_microbatches, layout.vpp, spec.name)
        other = replace(other, microbatch_group_size=groups)
        if not _refused(other, num_microbatches):
            yield other


@cache
def smallest_groups(pp: int, num_microbatches: int, vpp: int, schedule: str) -> int | None:
    """Return the smallest microbatch groups that run so many microbatches through interleaved chunks.

    None: pp, the default, or no group size at all: `Schedule` raises then.

    Example:
        >>> smallest_groups(pp=4, num_microbatches=10, vpp=2, schedule="1f1b")
        5
    """
    sizes = [None] if SCHEDULES[schedule].vpp is not None else [None, *range(pp, num_microbatches + 1)]
    for size in sizes:
        try:
            Schedule(pp, num_microbatches, vpp, size, schedule)
        except ValueError:
            continue
        return size
    return None


def schedule_name(schedule: str, overlap_experts: bool, microbatch_group_size: int | None) -> str:
    """Return the schedule with its options, as reports name it."""
    groups = f" in groups of {microbatch_group_size}" if microbatch_group_size else ""
    return schedule + " with overlap" * overlap_experts + groups


def fewest_ranks(layout: ParallelConfig) -> int:
    """Return the smallest world size that `layout` fits; more ranks are data-parallel replicas."""
    return layout.pp * math.lcm(layout.tp * layout.cp, layout.ep * (layout.etp or layout.tp))


def problems(recipe: Recipe, world_size: int | None) -> list[Problem]:
    """List all that keeps `recipe` from running on `world_size` ranks; None: on any number of ranks."""
    parts = (
        *(_axis_problems, _sequence_problems, _schedule_problems, _layer_problems, _expert_problems),
        _overlap_problems,
        _dtype_problems,
        _fp8_problems,
        _bert_problems,
    )
    found = [problem for part in parts for problem in part(recipe)]
    return found if world_size is None else [*_rank_problems(recipe, world_size), *found]


def check_layout(recipe: Recipe, world_size: int | None) -> None:
    """Raise a ValueError with all `problems`, one a line."""
    found = problems(recipe, world_size)
    if found:
        alone = problems(recipe, None)  # these have nothing to do with the number of ranks
        ranks = "" if len(found) == len(alone) else f" does not fit {_counted(world_size or 0, 'rank')}"
        raise ValueError(f"recipe {recipe.train.name!r}{ranks}: " + _listed(list(map(str, found))))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _listed(messages: list[str]) -> str:
    """Join messages: one as it is, several one a line."""
    return messages[0] if len(messages) == 1 else "".join(f"\n  {message}" for message in messages)


def _rank_problems(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    """Check the world size against the axes of both grids, and a step's samples against dp."""
    layout = recipe.parallel
    if world_size < 1:
        yield Problem(("world_size",), f"world_size must be positive, got {world_size}")
        return
    etp = layout.tp if layout.etp is None else layout.etp
    grids = (
        {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp},
        {"etp" if layout.etp is not None else "tp": etp, "ep": layout.ep, "pp": layout.pp},
    )
    fits = True
    for sizes in grids[: 1 if recipe.model.moe is None else 2]:
        fields = tuple(f"parallel.{axis}" for axis, size in sizes.items() if size > 1)
        product = 1
        for size in sizes.values():
            product *= size
        if world_size % product:
            fits = False
            formula = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            yield Problem(fields, f"world_size {world_size} is not a multiple of {formula} = {product}")
    if fits:
        yield from _microbatch_problems(recipe, world_size // (layout.tp * layout.cp * layout.pp))


def _microbatch_problems(recipe: Recipe, dp: int) -> Iterator[Problem]:
    layout, batch, samples = recipe.parallel, recipe.train.global_batch_size, recipe.data.micro_batch_size
    if batch % (samples * dp):
        yield Problem(
            ("train.global_batch_size", "data.micro_batch_size"),
            f"global_batch_size {batch} is not divisible by micro_batch_size {samples} x {dp} data-parallel "
            "ranks",
        )
        return
    if (number := batch // (samples * dp)) > MAX_MICROBATCHES:
        yield Problem(
            ("train.global_batch_size", "data.micro_batch_size"),
            f"global_batch_size {batch} is {number} microbatches of a rank, more than {MAX_MICROBATCHES}",
        )
        return
    if number == 1 and layout.overlap_experts:
        yield Problem(
            ("parallel.overlap_experts", "train.global_batch_size", "data.micro_batch_size"),
            "overlap_experts runs two microbatches at once, but a step has 1 of a rank",
        )
    message = _refused(layout, number)
    if message and not _refused(layout):
        fields = ("train.global_batch_size", "parallel.microbatch_group_size", "parallel.vpp")
        yield Problem(fields, message)


def _schedule_problems(recipe: Recipe) -> Iterator[Problem]:
    """Check the schedule, where no number of microbatches would help."""
    if message := _refused(recipe.parallel):
        layout = recipe.parallel
        if layout.overlap_experts and not SCHEDULES[layout.schedule].overlaps:
            yield Problem(("parallel.overlap_experts", "parallel.schedule"), message)
        elif layout.microbatch_group_size is None:
            yield Problem(("parallel.vpp",), message)
        else:
            yield Problem(("parallel.microbatch_group_size", "parallel.vpp"), message)


def _refused(layout: ParallelConfig, num_microbatches: int | None = None) -> str | None:
    """Say why so many microbatches (one group by default) have no schedule; None where they have one."""
    whole_group = layout.microbatch_group_size or layout.pp
    try:
        make_schedule(layout, whole_group if num_microbatches is None else num_microbatches)
    except ValueError as error:
        return (
            str(error)
            .removeprefix("Schedule: ")
            .replace("group_size", "microbatch_group_size")
            .replace("overlap is", "overlap_experts is")
        )
    return None


def _axis_problems(recipe: Recipe) -> Iterator[Problem]:
    """Check the sizes that the ranks of an axis divide between them."""
    model, layout, moe = recipe.model, recipe.parallel, recipe.model.moe
    etp = layout.tp if layout.etp is None else layout.etp
    divided = [("num_heads", model.num_heads, "tp", layout.tp)]
    if model.kv_heads != model.num_heads:
        divided.append(("num_kv_heads", model.kv_heads, "tp", layout.tp))
    if moe is None or model.dense_layers:
        divided.append(("ffn_hidden_size", model.ffn_size, "tp", layout.tp))
    if moe is not None:
        shared = moe.shared_expert_ffn_hidden_size
        divided += [
            ("moe.num_experts", moe.num_experts, "ep", layout.ep),
            (
                "moe.expert_ffn_hidden_size",
                moe.expert_ffn_hidden_size,
                "tp" if layout.etp is None else "etp",
                etp,
            ),
            ("moe.shared_expert_ffn_hidden_size", shared, "tp", layout.tp),
        ]
    for name, number, axis, size in divided:
        if number % size:
            yield Problem(
                (f"parallel.{axis}", f"model.{name}"),
                f"{name.removeprefix('moe.')} {number} is not divisible by {axis} {size}",
            )


def _sequence_problems(recipe: Recipe) -> Iterator[Problem]:
    """Check the sequence against context-parallel ranks, then tensor-parallel ones."""
    layout, S, tp, cp = recipe.parallel, recipe.data.seq_len, recipe.parallel.tp, recipe.parallel.cp
    longest = recipe.model.max_seq_len
    if longest < S:
        yield Problem(
            ("data.seq_len", "model.max_seq_len"),
            f"data.seq_len {S} is longer than model.max_seq_len {longest}",
        )
    if cp > 1 and S % (2 * cp):
        yield Problem(
            ("data.seq_len", "parallel.cp"),
            f"seq_len {S} is not divisible by 2 x cp {cp}: a rank has two of the {2 * cp} slices",
        )
    if layout.sequence_parallel and S % (cp * tp):
        over_cp = f" x cp {cp}" if cp > 1 else ""
        yield Problem(
            ("data.seq_len", "parallel.tp", "parallel.sequence_parallel"),
            f"seq_len {S} is not divisible by tp {tp}{over_cp} under sequence parallelism",
        )
    if layout.tp_overlap and not layout.sequence_parallel:
        yield Problem(
            ("parallel.tp_overlap", "parallel.sequence_parallel"),
            "tp_overlap=True needs sequence_parallel=True, got sequence_parallel=False",
        )
    if layout.recompute_kv and (recipe.model.latent is None or layout.recompute):
        attention = "other" if recipe.model.latent is None else "latent"
        yield Problem(
            ("parallel.recompute_kv", "parallel.recompute"),
            "recompute_kv=True needs latent attention and recompute=False, got "
            f"{attention} attention and recompute={layout.recompute}",
        )
    if not layout.shard_recompute_input:
        return
    elements = S // cp * recipe.data.micro_batch_size * recipe.model.hidden_size
    if layout.sequence_parallel or not layout.recompute:
        yield Problem(
            ("parallel.shard_recompute_input",),
            "shard_recompute_input=True needs recompute=True and sequence_parallel=False, got "
            f"recompute={layout.recompute} and sequence_parallel={layout.sequence_parallel}",
        )
    elif elements % tp:
        yield Problem(
            ("parallel.shard_recompute_input", "parallel.tp"),
            f"the input of a layer, {elements} elements, is not divisible by tp {tp}, as "
            "shard_recompute_input needs",
        )


def _layer_problems(recipe: Recipe) -> Iterator[Problem]:
    """Check the layers against the stages of the pipeline."""
    layout, layers = recipe.parallel, recipe.model.num_layers
    stages = layout.pp * layout.vpp
    if layout.stage_layers is not None:
        total = sum(layout.stage_layers)
        places = StageMap(layout.pp, layout.vpp, layout.placement)
        for rank in places.without_parameters(layout.stage_layers):
            yield Problem(
                ("parallel.stage_layers",),
                f"stage_layers {list(layout.stage_layers)} leave pipeline rank {rank} without a layer",
            )
        if total != layers:
            yield Problem(
                ("parallel.stage_layers", "model.num_layers"),
                f"stage_layers {list(layout.stage_layers)} sum to {total}, but num_layers is {layers}",
            )
    elif layers % stages:
        yield Problem(
            ("parallel.stage_layers", "parallel.pp", "parallel.vpp"),
            f"num_layers {layers} is not divisible by pp {layout.pp} x vpp {layout.vpp} = {stages} stages; "
            "stage_layers can say how many each has",
        )


def _overlap_problems(recipe: Recipe) -> Iterator[Problem]:
    """Check EP communication overlap: experts over several ranks, and layers that can run in parts."""
    layout = recipe.parallel
    if not layout.overlap_experts:
        return
    etp = layout.tp if layout.etp is None else layout.etp
    if recipe.model.moe is None or layout.ep * etp == 1:
        experts = "has no experts" if recipe.model.moe is None else f"has ep {layout.ep} x etp {etp}"
        yield Problem(
            ("parallel.overlap_experts", "parallel.ep"),
            f"overlap_experts has no exchange to overlap: the model {experts}",
        )
    if layout.recompute:
        yield Problem(
            ("parallel.overlap_experts", "parallel.recompute"),
            "overlap_experts runs layers in parts, but parallel.recompute is set: it would run them whole",
        )
    graphs = recipe.graphs
    if graphs.enabled and ("full" in (graphs.scope or ()) or graphs.impl != "fastmp"):
        whole = ("graphs.scope", "'full'") if graphs.impl == "fastmp" else ("graphs.impl", repr(graphs.impl))
        yield Problem(
            ("parallel.overlap_experts", whole[0]),
            f"overlap_experts runs layers in parts, which {' '.join(whole)} would run whole: leave it out",
        )


def _dtype_problems(recipe: Recipe) -> Iterator[Problem]:
    optimizer, dtype = recipe.optimizer, recipe.train.dtype
    if dtype != "float16":
        return
    for name, value in (("states", "small"), ("grad_dtype", "bfloat16")):
        if getattr(optimizer, name) == value:
            yield Problem(
                (f"optimizer.{name}", "train.dtype"),
                f"optimizer.{name} {value!r} is for bfloat16 parameters, but train.dtype is {dtype!r}",
            )


def _fp8_problems(recipe: Recipe) -> Iterator[Problem]:
    """Check FP8 blocks against each rank's sizes of linear layers and experts, and features without FP8."""
    model, layout, fp8 = recipe.model, recipe.parallel, recipe.train.fp8()
    if fp8 is None:
        return
    sizes = {"hidden_size": model.hidden_size}
    for each in model.attention.projections:
        if each.split == "columns":
            sizes[f"inputs of attention.{each.name}"] = each.inputs
            sizes[f"rows of attention.{each.name} / tp {layout.tp} ="] = each.outputs // layout.tp
        elif each.split:
            sizes[f"columns of attention.{each.name} / tp {layout.tp} ="] = each.inputs // layout.tp
    if model.moe is None or model.dense_layers:
        sizes[f"ffn_hidden_size / tp {layout.tp} ="] = model.ffn_size // layout.tp
    if (moe := model.moe) is not None:
        etp = layout.tp if layout.etp is None else layout.etp
        if DISPATCHERS[moe.dispatcher].symmetric_memory and moe.activation_stash:
            yield Problem(
                ("model.moe.activation_stash", "train.precision"),
                f"experts in FP8 have no activation stash: expected activation_stash 0, got "
                f"{moe.activation_stash}",
            )
        if moe.linear_bias:
            yield Problem(
                ("model.moe.linear_bias", "train.precision"),
                "experts in FP8 have no biases: expected linear_bias false, got true",
            )
        sizes[f"expert_ffn_hidden_size / etp {etp} ="] = moe.expert_ffn_hidden_size // etp
        if moe.shared_expert_ffn_hidden_size:
            shared = moe.shared_expert_ffn_hidden_size // layout.tp
            sizes[f"shared_expert_ffn_hidden_size / tp {layout.tp} ="] = shared
    if wrong := fp8.misfit(sizes):
        yield Problem(("train.fp8_block", "parallel.tp", "train.precision"), wrong)
    if layout.tp_overlap:
        yield Problem(
            ("parallel.tp_overlap", "train.precision"),
            "precision 'fp8' has no GEMMs that overlap their collective, but tp_overlap is on",
        )


def _bert_problems(recipe: Recipe) -> Iterator[Problem]:
    """Check an encoder against its data and its ranks."""
    encoder, masked, cp = recipe.model.bert, recipe.data.masked_lm, recipe.parallel.cp
    if (encoder is None) is not (masked is None):
        there, missing = (
            ("model.bert", "data.masked_lm") if masked is None else ("data.masked_lm", "model.bert")
        )
        yield Problem(
            ("model.bert", "data.masked_lm"),
            f"an encoder is trained on masked tokens: {there} is given, but {missing} is absent",
        )
    if encoder is None:
        return
    if cp > 1:
        yield Problem(
            ("parallel.cp", "model.bert"),
            f"cp {cp} would divide the sequence, of which a token of model.bert sees all",
        )
    if encoder.num_token_types == 1:
        yield Problem(
            ("model.bert.num_token_types",),
            "num_token_types is 1, but a sample has two parts: 2 or more, or 0 for none",
        )


def _expert_problems(recipe: Recipe) -> Iterator[Problem]:
    layout, data, moe = recipe.parallel, recipe.data, recipe.model.moe
    if moe is None:
        for axis, size in (("ep", layout.ep), ("etp", layout.etp)):
            if size is not None and (axis, size) != ("ep", 1):
                yield Problem(
                    (f"parallel.{axis}", "model.moe"),
                    f"parallel.{axis} is {size}, but the model has no experts: model.moe is absent",
                )
        return
    if moe.training_problem:
        fields = ("model.moe.top_k", "model.moe.normalize_topk", "model.moe.aux_loss")
        yield Problem(fields, moe.training_problem)
    tokens = -(-(data.seq_len // layout.cp) // layout.tp) * data.micro_batch_size
    sizes = DispatchSizes(
        tokens=tokens,
        pairs=tokens * moe.top_k,
        hidden_size=recipe.model.hidden_size,
        itemsize=4 if recipe.train.dtype == "float32" else 2,
        top_k=moe.top_k,
        num_experts=moe.num_experts,
        ep=layout.ep,
        etp=layout.tp if layout.etp is None else layout.etp,
        symmetric_capacity=moe.symmetric_capacity,
    )
    yield from (Problem(*each) for each in DISPATCHERS[moe.dispatcher].problems(sizes))
    if moe.capacity_factor is None:
        return
    share = moe.capacity_factor * tokens * moe.top_k / moe.num_experts
    if share < 1.0:
        yield Problem(
            ("model.moe.capacity_factor", "data.micro_batch_size"),
            f"a capacity of {share:g} tokens is less than one: capacity_factor {moe.capacity_factor:g} x "
            f"{tokens} tokens x top_k {moe.top_k} / {moe.num_experts} experts",
        )
