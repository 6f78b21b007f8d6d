"""A pipeline is the undivided model: losses and gradients, on any order; it holds no more than planned."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import full
from pipeline_tools import (
    CLOSE,
    SIZE,
    Block,
    accepted_schedules,
    batches,
    check_parity,
    first,
    make,
    reference,
    schedules_of,
    square,
)
from torch import nn

from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.pipeline.runner import Pipeline, StageOutput
from fastmp.schedule.schedule import Schedule, Step
from fastmp.status import process_status
from fastmp.tensor_parallel.layers import ColumnParallelLinear
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks


def parity_case(rank, world, microbatches):
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=world))
    for vpp in (1, 2):
        for number in microbatches:
            for schedule in schedules_of(vpp):
                check_parity(groups, vpp, number, schedule)


def test_one_rank_with_any_number_of_chunks():
    for vpp in (1, 2, 3):
        for schedule in schedules_of(vpp):
            check_parity(ParallelGroups.alone(), vpp, 4, schedule)


def test_a_loss_that_calls_the_only_stage_itself():
    """Of batches that are made when they are needed; no step but its own backward is in between."""
    block, data, events = Block(0), batches(3), []

    def fetch(microbatch):
        events.append(microbatch)
        return data[microbatch]

    def loss(batch):
        events.append("loss")
        return square(block(first(batch)), batch), batch["x"].sum()

    options = {"group": None, "inputs": None, "loss": loss}
    pipeline = Pipeline([block], Schedule(1, 3).orders(), **options)
    result = pipeline.train(fetch, torch.tensor(2.0))
    expected, (grads,) = reference(1, data)
    torch.testing.assert_close(result.loss, expected, **CLOSE)
    for param, grad in zip(block.parameters(), grads, strict=True):
        torch.testing.assert_close(param.grad, 2 * grad, **CLOSE)
    assert events == [0, "loss", 1, "loss", 2, "loss"]
    assert (result.trace, result.peak, len(result.stats)) == (Schedule(1, 3).order(0), 1, 3)
    torch.testing.assert_close(pipeline.evaluate(data).loss, expected, **CLOSE)
    with pytest.raises(ValueError, match="inputs=None is for one stage, got 2; pass inputs="):
        Pipeline([block, Block(1)], Schedule(1, 3, 2).orders(), **options)


@pytest.mark.parametrize(("world", "microbatches"), [(2, (4, 8)), *full([(4, (4, 8))])])
def test_losses_gradients_trace_and_peak(world, microbatches):
    run_ranks(parity_case, world, microbatches)


@st.composite
def accepted(draw: st.DrawFn) -> tuple:
    """Arguments of `check_parity`, after the number of ranks: any that the orders accept."""
    of = draw(accepted_schedules(most_ranks=4, most_chunks=3))
    stages = len(of.stages)
    depths = draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages))
    return of.pp, (of.vpp, of.num_microbatches, of.name, of.group_size, depths)


def drawn_case(rank, world, arguments):
    check_parity(ParallelGroups.create(RankGrid(world_size=world, pp=world)), *arguments)


def check_drawn(drawn):
    pp, arguments = drawn
    if pp == 1:
        check_parity(ParallelGroups.alone(), *arguments)
    else:
        run_ranks(drawn_case, pp, arguments)


@pytest.mark.full
@settings(max_examples=12)
@given(drawn=accepted())
def test_whatever_is_accepted_runs(drawn):
    check_drawn(drawn)


@pytest.mark.exhaustive
@settings(max_examples=150)
@given(drawn=accepted())
def test_more_of_whatever_is_accepted(drawn):
    check_drawn(drawn)


def without_tags_case(rank, world):
    """Train over a backend that matches messages between two ranks in the order of their posting."""
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=world))
    tags = set()

    def transfer(post, tensor, *, tag, **peer):
        tags.add(tag)
        return post(tensor, tag=0, **peer)

    dist.isend, dist.irecv = partial(transfer, dist.isend), partial(transfer, dist.irecv)
    for vpp in (2, 3):
        for schedule in schedules_of(vpp):
            check_parity(groups, vpp, 4 * world, schedule)
    assert len(tags) > 8


@pytest.mark.parametrize("world", [2, *full([3])])
def test_both_ends_agree_on_the_order_of_crossing_messages(world):
    run_ranks(without_tags_case, world)


def directions_case(rank, world):
    """Messages by group and stage that sends them; the shapes travel ahead of the activations."""
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=world))
    seen = []

    def send(x, *, group, tag, group_dst, post=dist.isend):
        seen.append((group is groups.pp_backward, group is groups.pp, group_dst))
        return post(x, group=group, tag=tag, group_dst=group_dst)

    dist.isend = send
    pipeline = make(groups, 2, 4, schedule="zero_bubble")
    pipeline.train(batches(4))
    trained = Counter(seen)
    seen.clear()
    pipeline.evaluate(batches(4))
    return trained, Counter(seen)


def test_activations_and_gradients_travel_over_groups_of_their_own():
    """Also between two ranks, each of which is behind the other and before it."""
    activations, gradients = (False, True), (True, False)
    for rank, (trained, evaluated) in enumerate(run_ranks(directions_case, 2)):
        stages = 2 if rank == 0 else 1  # that hand on activations: not the last one
        assert trained == {(*activations, 1 - rank): 5 * stages, (*gradients, 1 - rank): 4 * (3 - stages)}
        assert evaluated == {(*activations, 1 - rank): 5 * stages}


def other_ranks_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=2))
    options = {"inputs": first, "loss": square}
    for backward in (dist.group.WORLD, groups.dp):
        with pytest.raises(
            ValueError, match=r"Pipeline: group has the ranks \[\d, \d\], but backward_group \["
        ):
            Pipeline([Block(0)], Schedule(2, 2).orders(), group=groups.pp, backward_group=backward, **options)
    with pytest.raises(ValueError, match=r"group has the ranks None, but backward_group"):
        Pipeline([Block(0)], Schedule(1, 2).orders(), group=None, backward_group=groups.pp, **options)


def test_a_group_for_gradients_has_the_ranks_of_the_pipeline():
    run_ranks(other_ranks_case, 4)


class Watched(Block):
    """Remembers what it has returned, without keeping it alive."""

    def __init__(self, stage):
        super().__init__(stage)
        self.returned = []
        self.most = 0

    def forward(self, x):
        y = super().forward(x)
        self.returned.append(weakref.ref(y))
        self.most = max(self.most, sum(ref() is not None for ref in self.returned))
        return y


def released_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=world))
    chunk = Watched(rank)
    result = make(groups, 1, 8, chunks=[chunk]).train(batches(8))
    evaluated = make(groups, 1, 4, chunks=[chunk])
    evaluated.evaluate(batches(12))
    assert not [ref for ref in chunk.returned if ref() is not None]
    return result.peak, chunk.most


def test_what_is_sent_is_released_while_its_graph_is_kept():
    """Four forwards are in flight on the first rank, and outputs that are not yet sent are the one just made
    and three at most before it, two of them on their way."""
    (peak, most), *_ = run_ranks(released_case, 4)
    assert peak == 4 and most <= 4


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_neither_batches_nor_chunks_outlive_their_use(no_collector):
    """They would, in what the next step overwrites, in a cycle, or in the status of the process."""
    block = Block(0)
    pipeline, chunk = make(ParallelGroups.alone(), 1, 2, chunks=[block]), weakref.ref(block)
    for number in (2, 3):
        data = batches(number)
        kept = [weakref.ref(each["x"]) for each in data]
        pipeline.train(data) if number == 2 else pipeline.evaluate(data)
        del data
        assert not [ref for ref in kept if ref() is not None]
    del pipeline, block
    assert chunk() is None
    assert str(process_status.phase) == "instruction 8 of 9, forward m2 loss"


class Several(nn.Module):
    """Takes and returns a tensor with a gradient, one without and integers, and has a loss of its own."""

    def __init__(self, stage):
        super().__init__()
        self.block, self.stage = Block(stage), stage

    def forward(self, x, scale=None, ids=None):
        if scale is None:
            scale, ids = torch.full((1,), 0.5, dtype=x.dtype), torch.arange(x.shape[0])
        y = self.block(x) * scale
        loss = 0.1 * self.block.weight.square().sum() + 0.01 * y.pow(4).sum()
        return StageOutput((y, scale.detach() + 1, ids + 1), loss, stats=(self.stage, ids.tolist()))


def several_loss(y, scale, ids, batch):
    return ((y - batch["y"]) * ids[:, None]).square().sum() * scale.item(), torch.tensor(len(ids))


def several_case(rank, world, schedule):
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=world))
    data, blocks = batches(4), [Several(stage) for stage in range(4)]
    final = own = 0.0
    for batch in data:
        tensors = (batch["x"],)
        for block in blocks:
            tensors, loss, _ = block(*tensors)
            own = own + loss
        final = final + several_loss(*tensors, batch)[0]
    (final + own).backward()
    vpp = 4 // world
    stages = Schedule(world, 4, vpp, name=schedule).stages
    mine = stages.stages(rank)
    chunks = [Several(stage) for stage in mine]
    result = make(groups, vpp, 4, chunks=chunks, schedule=schedule, loss=several_loss).train(data)
    for chunk, block in enumerate(chunks):
        stage = mine[chunk]
        for param, expected in zip(block.parameters(), blocks[stage].parameters()):
            torch.testing.assert_close(param.grad, expected.grad, **CLOSE)
        for microbatch in range(4):
            assert result.stats[microbatch, chunk] == (stage, [stage, stage + 1, stage + 2])
    if stages.last in mine:
        torch.testing.assert_close(result.loss, final.detach(), **CLOSE)
        assert all(int(result.stats[microbatch, vpp]) == 3 for microbatch in range(4))
    return float(result.stage_loss), float(own.detach())


@pytest.mark.parametrize(
    ("world", "schedule"), [*product((1, 2), ("1f1b", "zero_bubble")), (2, "dualpipe_v")]
)
def test_several_tensors_and_losses_of_stages(world, schedule):
    results = [several_case(0, 1, schedule)] if world == 1 else run_ranks(several_case, world, schedule)
    assert sum(own for own, _ in results) == pytest.approx(results[0][1], rel=1e-12)


def odd_stages_case(rank, world):
    """A frozen first stage gives nothing to send back; an empty one passes on; a tensor may go unused."""
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=world))

    class Drop(nn.Module):
        def forward(self, x):
            return torch.ones_like(x)

    for kinds in (("frozen", "block"), ("block", "empty"), ("empty", "block"), ("block", "drop")):
        for schedule in schedules_of(1):
            blocks = {"empty": nn.Identity(), "drop": Drop()}
            stages = [blocks.get(kind) or Block(i) for i, kind in enumerate(kinds)]
            if kinds[0] == "frozen":
                stages[0].requires_grad_(False)
            data = batches(4)
            make(groups, 1, 4, chunks=[stages[rank]], schedule=schedule).train(data)
            mine = [p.grad for p in stages[rank].parameters()]
            stages = [blocks.get(kind) or Block(i) for i, kind in enumerate(kinds)]
            unused = kinds[1] == "drop"
            grads = [torch.zeros_like(g) for g in mine] if unused else reference(2, data, stages)[1][rank]
            if kinds[rank] == "frozen":
                assert mine == [None, None]
                continue
            for grad, expected in zip(mine, grads, strict=True):
                torch.testing.assert_close(grad, expected, **CLOSE)


def test_stages_without_parameters_or_gradients():
    run_ranks(odd_stages_case, 2)


def reports_case(rank, world):
    """Ranges for profilers, and how much is communicated."""
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=world))
    pipeline = make(groups, 2, 4)
    pipeline.train(batches(4))
    with torch.profiler.profile() as profile:
        result = pipeline.train(batches(4))
    names = {event.name for event in profile.events()}
    for kind, microbatch, chunk in result.trace:
        assert f"fastmp.pipeline.{kind}[microbatch {microbatch}, chunk {chunk}]" in names
    assert ("fastmp.pipeline.backward[microbatch 3, loss]" in names) == (rank == 1)
    with count_collectives() as calls:
        pipeline.train(batches(4))
    return calls.counts


def test_reports():
    for counts in run_ranks(reports_case, 2):
        assert set(counts) == {"send", "recv"}
        assert sum(counts.values()) == 3 * 2 * 4  # three borders, both ways, no header any more


def shapes_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=world))
    pipeline = make(groups, 2, 4)
    pipeline.train(batches(4))
    pipeline.forget_shapes()
    pipeline.train(batches(4, rows=5))
    return True


def test_shapes_change_where_all_ranks_forget_them():
    assert all(run_ranks(shapes_case, 2))


def collectives_of_making(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=world))
    with count_collectives() as seen:
        make(groups, 1, 2)
    return seen.calls[-1]


def test_the_first_communication_on_the_device_is_by_all_ranks():
    """NCCL makes a communicator in it: a message between two ranks alone would leave the others out."""
    assert run_ranks(collectives_of_making, 2) == [("all_reduce", [(1,)])] * 2


def disagree_case(rank, world, what):
    groups = ParallelGroups.create(RankGrid(world_size=world, pp=world))
    number, vpp = 4 + 2 * (what == "orders" and rank == 1), 1 + (what == "chunks" and rank == 1)
    try:
        make(groups, vpp, number)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("orders", "ranks 0 and 1 have different orders"),
        ("chunks", r"ranks 0 and 1 have different numbers of chunks: \[1, 2\]"),
    ],
)
def test_ranks_that_disagree(what, message):
    errors = run_ranks(disagree_case, 2, what)
    assert errors[0] == errors[1]
    with pytest.raises(ValueError, match=message):
        raise ValueError(errors[0])


def test_a_pipeline_goes_when_nobody_holds_it():
    """What a hang report reads of the last step holds no model."""
    pipeline = make(ParallelGroups.alone(), 1, 2)
    pipeline.train(batches(2))
    assert str(process_status.phase) == "instruction 9 of 10, backward m1 chunk 0"
    chunk = weakref.ref(pipeline.chunks[0])
    del pipeline
    gc.collect()
    assert chunk() is None


def inputs_case(rank, world):
    """Only the first stage calls `inputs`: the other rank may leave it out, and fails with the first."""
    group = ParallelGroups.create(RankGrid(world_size=world, pp=world)).pp
    orders, errors = Schedule(world, 4).orders(), []
    for given_on in (0, 1):
        inputs = first if rank == given_on else None
        try:
            Pipeline([Block(rank)], orders, group=group, inputs=inputs, loss=square)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_the_first_stage_needs_inputs():
    assert run_ranks(inputs_case, 2) == [["Pipeline: inputs=None is for one stage, got 2; pass inputs="]] * 2


def test_wrong_arguments():
    with pytest.raises(ValueError, match="1 orders for a group of"):
        pipeline = make(ParallelGroups.alone(), 1, 2)
        pipeline.size = 2
        pipeline._agree()
    with pytest.raises(ValueError, match="3 batches for orders of 2 microbatches"):
        make(ParallelGroups.alone(), 1, 2).train(batches(3))
    with pytest.raises(ValueError, match="2 chunks for orders of 1 chunks a rank"):
        make(ParallelGroups.alone(), 1, 2, chunks=[Block(0), Block(1)])
    with pytest.raises(ValueError, match="forward of microbatch 0 chunk 0: its backward is missing"):
        Pipeline([Block(0)], [[Step("forward", 0, 0)]], group=None, inputs=first, loss=square)


def test_split_backwards_leave_weights_for_later():
    """Between the two backwards of microbatch 0 only the bias has its gradient."""
    layer = ColumnParallelLinear(SIZE, SIZE, group=None, dtype=torch.float64)
    seen, data = [], batches(2)

    def inputs(batch):
        seen.append((layer.weight.grad is None, layer.bias.grad is None))
        return batch["x"]

    kinds = [("forward", 0), ("backward_input", 0), ("forward", 1), ("backward_weight", 0)]
    kinds += [("backward_input", 1), ("backward_weight", 1)]
    order = [Step(kind, microbatch, 0) for kind, microbatch in kinds]
    Pipeline([layer], [order], group=None, inputs=inputs, loss=square).train(data)
    assert seen == [(True, True), (True, False)]
    same = ColumnParallelLinear(SIZE, SIZE, group=None, dtype=torch.float64)
    same.load_state_dict(layer.state_dict())
    sum(square(same(batch["x"]), batch) for batch in data).backward()
    torch.testing.assert_close(layer.weight.grad, same.weight.grad, **CLOSE)
    torch.testing.assert_close(layer.bias.grad, same.bias.grad, **CLOSE)
