"""The planned order of each rank beside the order in which a pipeline of small layers really runs."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.overlap import OverlappedLayers
from fastmp.nn.segment import LayerChain, Segment, SegmentedLayer
from fastmp.pipeline.runner import Pipeline
from fastmp.schedule.planner import make_program
from fastmp.schedule.schedule import Schedule
from fastmp.testing.ranks import run_ranks

LOG: list[tuple] = []


class Note(torch.autograd.Function):
    """The identity. Its forward and backward note the microbatch, whose number x holds, and the place."""

    @staticmethod
    def forward(ctx, x, place):
        ctx.place = int(x[0]), *place
        LOG.append(("forward", *ctx.place))
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        LOG.append(("backward", *ctx.place))
        return grad.clone(), None


class Layer(SegmentedLayer):
    """Four segments; the first has number `first` in its chunk."""

    def __init__(self, chunk, first):
        super().__init__()
        self.chunk, self.first = chunk, first

    def segments(self):
        return tuple(
            Segment(name, self._at(self.first + i), capturable=i % 2 == 0, exchanges=i % 2 == 1)
            for i, name in enumerate(("attention", "dispatch", "experts", "combine"))
        )

    def _at(self, number):
        return lambda x: (Note.apply(x, (self.chunk, number)),)


class Chunk(nn.Module):
    """Two layers in a chain, `further` chains of one layer, and code around them; `code` is their order."""

    def __init__(self, chunk, further):
        super().__init__()
        self.chunk = chunk
        layers = [Layer(chunk, 4 * i) for i in range(2 + further)]
        self.chains = nn.ModuleList(map(LayerChain, (layers[:2], *([each] for each in layers[2:]))))
        own = [[*range(4 * i, 4 * i + 4)] for i in range(2 + further)]
        self.code = ["before", *own[0], *own[1], *(part for each in own[2:] for part in ("between", *each))]
        self.code.append("behind")

    def forward(self, x):
        for chain, name in zip(self.chains, ("before", *["between"] * len(self.chains))):
            (x,) = chain(Note.apply(x, (self.chunk, name)))
        return Note.apply(x, (self.chunk, "behind"))


def noting(op, post, peer):
    """Return `isend` or `irecv` that notes messages; those of specs have odd tags."""

    def noted(tensor, *, tag, **options):
        if tag % 2 == 0:
            LOG.append((op, options[peer], tag // 2))
        return post(tensor, tag=tag, **options)

    return noted


def run(rank, world, schedule, further, scope, evaluates):
    """Run a step or an evaluation; return what has run, and what is planned."""
    grid = RankGrid(world_size=world, pp=world)
    groups = ParallelGroups.alone() if world == 1 else ParallelGroups.create(grid)
    stages = schedule.stages
    chunks = [Chunk(i, further * (stage == stages.last)) for i, stage in enumerate(stages.stages(rank))]
    layers = OverlappedLayers([each.chains[0] for each in chunks]) if schedule.overlap else None
    pipeline = Pipeline(
        chunks,
        schedule.orders(),
        group=groups.pp,
        backward_group=groups.pp_backward,
        inputs=lambda number: torch.full((1,), float(number), requires_grad=True),
        loss=lambda x, _: Note.apply(x, (len(chunks) - 1, "loss")).sum(),
        pairs=schedule.all_pairs(),
        overlap=layers,
        placement=schedule.placement,
    )
    LOG.clear()
    with (
        mock.patch.object(dist, "isend", noting("send", dist.isend, "group_dst")),
        mock.patch.object(dist, "irecv", noting("recv", dist.irecv, "group_src")),
    ):
        (pipeline.evaluate if evaluates else pipeline.train)(range(schedule.num_microbatches))
    facts = [[[link.facts for link in chain.bound_segments()] for chain in each.chains] for each in chunks]
    program = make_program(schedule, rank, facts, scope, forward_only=evaluates)
    code = [each.code + ["loss"] * (stage == stages.last) for each, stage in zip(chunks, stages.stages(rank))]
    return list(LOG), [*events(program, code)]


def events(program, code):
    """Yield the events of a program; weight gradients leave no note."""
    held, spans = [], program.spans
    for span, after in zip(spans, [*spans[1:], None], strict=True):
        own = code[span.chunk]
        end = len(own)
        if span.segments:
            end = own.index(span.segments[-1]) + 1
        elif after is not None and after.chunk == span.chunk:
            end = own.index(after.segments[0] if after.segments else "loss")
        held.append(own[:end])
        del own[:end]
    for now in program.instructions:
        if now.kind:
            yield now.op, now.peer, now.tag
        elif now.span >= 0 and now.op != "wgrad":
            forward, chunk = now.op == "forward", spans[now.span].chunk
            for place in held[now.span][:: 1 if forward else -1]:
                yield "forward" if forward else "backward", now.microbatch, chunk, place


CASES = [
    *(((pp, 4), 0, scope, evaluates) for pp in (1, 2) for scope in ((), None) for evaluates in (False, True)),
    *(((pp, 4, 2, None, "zero_bubble"), 0, None, False) for pp in (1, 2)),
    *(((pp, 4, 2), 2, None, evaluates) for pp in (1, 2) for evaluates in (False, True)),
    *(((pp, 4, 2, None, "1f1b", True), 1, (), False) for pp in (1, 2)),
    *(
        ((pp, 5, 2, None, "dualpipe_v", overlap), 1, None, False)
        for pp in (1, 2)
        for overlap in (False, True)
    ),
]


@pytest.mark.parametrize(("sizes", "further", "scope", "evaluates"), CASES, ids=str)
def test_what_runs_is_what_is_planned(sizes, further, scope, evaluates):
    schedule = Schedule(*sizes)
    arguments = (schedule, further, scope, evaluates)
    for ran, planned in run_ranks(run, sizes[0], *arguments) if sizes[0] > 1 else [run(0, 1, *arguments)]:
        assert ran == planned
        assert sum(event[0] == "forward" for event in ran) >= 10 * schedule.num_microbatches * schedule.vpp
