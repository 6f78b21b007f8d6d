"""Next to a shared expert exchanges through shared memory have a stream of their own, and order is kept."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from dispatcher_tools import train_moe_layer
from moe_tools import hidden_states, make_moe, plain_moe, with_moe
from nn_tools import Clock
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastmp.distributed import streams
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn.moe.dispatchers import symmetric
from fastmp.testing import run_ranks

FORWARD = ["counts", "places", "push", "barrier", "take", "give", "barrier", "pull"]
BACKWARD = ["push", "barrier", "take", "give", "barrier", "pull"]


class TwoStreams(TorchDispatchMode):
    """CPU ops as if on two streams of a GPU: `exchanges` (op, stream) of each exchange, `others` of all else.

    An op that takes what another stream has touched, and has not waited for it, is an error; so are
    `record_stream` and an exchange stream that the current one has not waited for where an exchange ends.
    """

    def __init__(self, capturing=False):
        super().__init__()
        self.main, self.side = Clock("main"), Clock("exchanges")
        self.current, self.touched, self.exchanges, self.others = self.main, {}, [], set()
        self.patches = ExitStack()
        for where, name, value in (
            (torch.cuda, "current_stream", lambda device=None: self.current),
            (torch.cuda, "stream", self.on),
            (torch.cuda, "is_current_stream_capturing", lambda: capturing),
            (torch.Tensor, "record_stream", self.refuse),
            (streams, "exchange_stream", lambda device: self.side),
            (symmetric, "exchanging", self.exchanging),
        ):
            self.patches.enter_context(patch.object(where, name, value))

    def __exit__(self, *error):
        self.patches.close()
        return super().__exit__(*error)

    def refuse(self, tensor, stream):
        raise AssertionError("record_stream keeps memory from being used again until a capture ends")

    @contextmanager
    def exchanging(self, x):
        before = self.current
        with streams._exchanging(torch.device("cuda")):
            yield
        assert self.current is before
        assert before is self.side or before.knows["exchanges"] == self.side.done, "not joined"

    @contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        now = self.current
        now.done += 1
        name = func._schema.name.removeprefix("fastmp::")
        if name.startswith("exchange_"):
            self.exchanges.append((name.removeprefix("exchange_"), now.name))
        else:
            self.others.add(now.name)
        for tensor in tree_leaves((args, kwargs, made)):
            if isinstance(tensor, torch.Tensor):
                ref = StorageWeakRef(tensor.untyped_storage())
                of_streams = self.touched.setdefault(ref, {})
                for other, done in of_streams.items():
                    known = other == now.name or now.knows.get(other, 0) >= done
                    assert known, f"{name} on {now.name} has not waited for {other}"
                of_streams[now.name] = now.done
        return made


def streams_case(rank, world, shared, capturing):
    """The exchanges of a layer in order, each with its stream; the bits are those of one stream."""
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    make = with_moe if shared else plain_moe
    layer = make_moe(make(dispatcher="symmetric"), groups)

    def run():
        layer.zero_grad()
        hidden = hidden_states(6, 2, seed=rank).requires_grad_()
        output, aux, _ = layer(hidden)
        (output.square().sum() + aux).backward()
        return [output.detach(), aux.detach(), hidden.grad, *(param.grad for param in layer.parameters())]

    def check(found):
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(a, b), f"result {number}"

    expected = run()
    with TwoStreams(capturing) as apart:
        check(run())
    with TwoStreams(capturing) as together, together.on(together.side):  # as a part of overlapped layers
        check(run())
    assert not together.side.knows and not together.main.knows and together.others == {"exchanges"}
    return apart.exchanges, apart.others


@pytest.mark.parametrize("capturing", (False, True), ids=("eager", "captured"))
@pytest.mark.parametrize("shared", (False, True), ids=("alone", "next to a shared expert"))
def test_exchanges_have_a_stream_of_their_own_next_to_a_shared_expert(shared, capturing):
    """All else is on the current stream, the nodes of autograd among it; streams wait for each other."""
    stream = "exchanges" if shared else "main"
    for exchanges, others in run_ranks(streams_case, 2, shared, capturing):
        assert exchanges == [(name, stream) for name in FORWARD + BACKWARD]
        assert "main" in others


def graphs_case(rank, world):
    """Steps in graphs, captured on two streams, against eager ones on one."""
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    device = torch.device("cpu")
    eager, _ = train_moe_layer("symmetric", groups, device, graphs=False)
    with TwoStreams() as seen:
        graphed, manager = train_moe_layer("symmetric", groups, device, graphs=True)
    assert manager.num_graphs == manager.plan.num_graphs > 0
    assert ("push", "exchanges") in seen.exchanges
    for number, (a, b) in enumerate(zip(graphed, eager, strict=True)):
        assert torch.equal(a, b), f"result {number}"


def test_captured_exchanges_keep_their_bits():
    run_ranks(graphs_case, 2)
