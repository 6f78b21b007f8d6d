"""Whatever a graph cannot hold is explained, with the line that does it; what it can is not blamed."""

from __future__ import annotations

import inspect
import random
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from graph_tools import DENSE, MOE
from marks import full
from torch import nn

from fastmp.cuda_graphs.explanation.report import explain
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import GPT, LayerChain, Placement, SingleSegment, TransformerLayer
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.testing.ranks import run_ranks

KINDS = {}
SETTINGS = {"scale": 1.0, "side": object()}


def unsafe(kind, words):
    """A module that a graph cannot hold; the line that is to be named ends in `# here`."""

    def register(module):
        KINDS[module.__name__] = (module, kind, words)
        return module

    return register


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls, self.seen, self.last = 0, [], None
        self.table = torch.ones(4)
        self.generator = torch.Generator()


@unsafe("host sync", "item() reads values")
class Item(Base):
    def forward(self, x):
        return self.linear(x) * x.max().item()  # here


@unsafe("host sync", "float() reads values")
class FloatOf(Base):
    def forward(self, x):
        scale = float(x.detach().norm())  # here
        return self.linear(x) * scale


@unsafe("host sync", "cpu() reads values")
class Cpu(Base):
    def forward(self, x):
        y = self.linear(x)
        y.detach().sum().cpu()  # here
        return y


@unsafe("host sync", 'to("cpu") copies to the host')
class ToCpu(Base):
    def forward(self, x):
        return self.linear(x) + x.detach().to("cpu").mean()  # here


@unsafe("host sync", "tolist() reads values")
class Tolist(Base):
    def forward(self, x):
        rows = (x.detach() > 0).sum(0).tolist()  # here
        return self.linear(x) * len(rows)


@unsafe("host sync", "numpy() reads values")
class Numpy(Base):
    def forward(self, x):
        x.detach().numpy()  # here
        return self.linear(x)


@unsafe("host sync", "array() reads values")
class AsArray(Base):
    def forward(self, x):
        np.asarray(x.detach())  # here
        return self.linear(x)


@unsafe("host sync", "bool() reads values")
class Branch(Base):
    def forward(self, x):
        y = self.linear(x)
        if y.abs().max() > 3:  # here
            y = y.tanh()
        return y


@unsafe("host sync", "reads a value")
class Slice(Base):
    def forward(self, x):
        length = (x > -100).sum(0)[0]
        return self.linear(x[:length])  # here


@unsafe("host sync", "aten::equal reads a value")
class Equal(Base):
    def forward(self, x):
        assert not torch.equal(x, self.linear.weight)  # here
        return self.linear(x)


@unsafe("host sync", "reads a value")
class OneHot(Base):
    def forward(self, x):
        return self.linear(F.one_hot(x.argmax(-1)).float().sum() + x)  # here


@unsafe("host sync", "prints a tensor")
class Print(Base):
    def forward(self, x):
        y = self.linear(x)
        print(f"mean {y.mean()}")  # here
        return y


@unsafe("host sync", "waits for the device")
class Synchronize(Base):
    def forward(self, x):
        y = self.linear(x)
        torch.cuda.synchronize()  # here
        return y


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * len(grad.tolist())  # here


@unsafe("host sync", "tolist() reads values")
class Backward(Base):
    def forward(self, x):
        return ReadsInBackward.apply(self.linear(x))


@unsafe("shape", "aten::nonzero makes a shape that depends on data")
class Nonzero(Base):
    def forward(self, x):
        rows = x[:, 0].nonzero()  # here
        return self.linear(x) + rows.sum()


@unsafe("shape", "aten::index makes a shape")
class Mask(Base):
    def forward(self, x):
        return self.linear(x)[x[:, 0] > 0]  # here


@unsafe("shape", "index_put")
class MaskWrite(Base):
    def forward(self, x):
        y = self.linear(x)
        mask = x > 100
        y[mask] = x.flatten()[:0]  # here
        return y


@unsafe("shape", "unique")
class Unique(Base):
    def forward(self, x):
        return self.linear(x) + x.argmax(-1).unique().sum()  # here


@unsafe("shape", "aten::bincount")
class Bincount(Base):
    def forward(self, x):
        return self.linear(x) + torch.bincount(x.argmax(-1)).sum()  # here


@unsafe("shape", "aten::repeat_interleave")
class Repeat(Base):
    def forward(self, x):
        counts = torch.ones_like(x[:, 0], dtype=torch.int64)
        return self.linear(x.repeat_interleave(counts, 0))  # here


@unsafe("shape", "aten::masked_select")
class Select(Base):
    def forward(self, x):
        return self.linear(x) + x.masked_select(x > 0).sum()  # here


@unsafe("side effect", "sets calls")
class Counter(Base):
    def forward(self, x):
        self.calls += 1  # here
        return self.linear(x)


@unsafe("side effect", "sets seen")
class Appends(Base):
    def forward(self, x):
        y = self.linear(x)
        self.seen.append(y.detach().mean())  # here
        return y


@unsafe("side effect", "sets last")
class Keeps(Base):
    def forward(self, x):
        y = self.linear(x)
        self.last = y.detach()  # here
        return y


@unsafe("branch", "aten.tanh.default")
class Alternates(Base):
    def forward(self, x):
        self.calls += 1
        if self.calls % 2:
            x = x.tanh()  # here
        return self.linear(x)


@unsafe("constant", "in one pass,")
class Schedule(Base):
    def forward(self, x):
        SETTINGS["scale"] *= 0.99
        return self.linear(x) * SETTINGS["scale"]  # here


@unsafe("constant", "replay would repeat the first")
class PythonRandom(Base):
    def forward(self, x):
        return self.linear(x).mul(random.random())  # here


@unsafe("outside", "replay would use the memory of the first")
class Outside(Base):
    def forward(self, x):
        table = np.ones(4, np.float32)
        return self.linear(x) + torch.Tensor(table)  # here


@unsafe("host data", "tensor() makes a tensor of what the host has")
class Constant(Base):
    def forward(self, x):
        return self.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])  # here


@unsafe("host data", "new_tensor() makes a tensor")
class NewTensor(Base):
    def forward(self, x):
        return self.linear(x) * x.new_tensor([1.0, 2.0, 3.0, 4.0])  # here


@unsafe("host data", "makes a tensor of what the host has")
class FromNumpy(Base):
    def forward(self, x):
        return self.linear(x) + torch.from_numpy(np.ones(4, np.float32))  # here


@unsafe("generator", "aten::rand draws from a generator of its own")
class Generator(Base):
    def forward(self, x):
        return self.linear(x) + torch.rand(4, generator=self.generator)  # here


@unsafe("moved", "parameter linear.weight gets other memory")
class Moves(Base):
    def forward(self, x):
        self.linear.weight.data = self.linear.weight.data.clone()  # here
        return self.linear(x)


@unsafe("moved", "parameter linear.weight gets other memory")
class Casts(Base):
    def forward(self, x):
        return self.linear.double()(x.double()).to(self.linear.float().weight)  # here


@unsafe("input changed", "aten.add_.Tensor writes to an input")
class InPlace(Base):
    def forward(self, x):
        x += 1  # here
        return self.linear(x)


@unsafe("hook", "register_hook")
class TensorHook(Base):
    def forward(self, x):
        y = self.linear(x)
        y.register_hook(lambda grad: self.seen.clear())  # here
        return y


@unsafe("hook", "a hook of Linear")
class ForwardHook(Base):
    def __init__(self):
        super().__init__()
        self.linear.register_forward_hook(lambda module, x, y: SETTINGS.update(scale=1.0))  # here

    def forward(self, x):
        return self.linear(x)


@unsafe("hook", "a hook of Linear")
class PreHook(Base):
    def __init__(self):
        super().__init__()
        self.linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,))  # here

    def forward(self, x):
        return self.linear(x)


@unsafe("stream", "without a wait_stream")
class SideStream(Base):
    def forward(self, x):
        with torch.cuda.stream(SETTINGS["side"]):  # here
            return self.linear(x)


def line_of_here(module):
    source, first = inspect.getsourcelines(ReadsInBackward if module is Backward else module)
    (offset,) = [i for i, line in enumerate(source) if "# here" in line]
    return first + offset, source[offset].strip()


@pytest.mark.parametrize("name", KINDS)
def test_unsafe_code_is_explained_with_its_line(name):
    module, kind, words = KINDS[name]
    report = explain(module(), torch.randn(3, 4))
    (segment,) = report.segments
    found = [problem for problem in segment.problems if problem.kind == kind]
    assert found and not report.captured, report
    number, text = line_of_here(module)
    places = [f"{__file__}:{number}, {text}", f"backward of {__file__}:{number}, {text}"]
    assert any(words in problem.message and problem.line in places for problem in found), report
    assert words in str(report) and f"{__file__}:{number}" in str(report)


def tokens(device=None):
    return torch.zeros(2, 8, dtype=torch.int64, device=device)


@pytest.mark.parametrize(
    ("config", "segments", "recompute"),
    [(DENSE, 2, True), (MOE, 7, False), *full([(DENSE, 2, False), (MOE, 7, True)])],
    ids=("dense-recomputed", "experts-kept", "dense-kept", "experts-recomputed"),
)
def test_models_are_captured_as_a_whole(config, segments, recompute):
    model = GPT(config, Placement(rng=RngTracker(1)), recompute=recompute)
    report = explain(model, tokens())
    assert report.captured and report.num_spans == 1, report
    assert len(report.segments) == 3 * segments
    assert "layers.0.attention to layers.2.attention (3 identical): captured" in str(report)


@pytest.mark.parametrize("config", (DENSE, *full([MOE])), ids=("dense", "experts"))
def test_on_the_meta_device_nothing_is_computed(config):
    model = GPT(config, Placement(rng=RngTracker(1), device="meta", dtype=torch.bfloat16))
    assert explain(model, tokens("meta")).captured
    assert all(param.is_meta for param in model.parameters())


def test_what_cannot_go_on_without_a_value_ends_there():
    report = explain(nn.Sequential(Branch(), nn.Linear(4, 4)).to("meta"), torch.ones(2, 4, device="meta"))
    first, second = report.segments
    assert [problem.kind for problem in first.problems] == ["host sync"]
    assert second.reason.startswith("not looked at after RuntimeError in 0.Branch: ")


def ranks_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, ep=world))
    rng = RngTracker(1)
    return explain(GPT(MOE, Placement(groups, rng=rng)), tokens() + rank)


def test_experts_over_ranks_are_captured_in_part():
    for report in run_ranks(ranks_case, 2):
        assert report.num_spans == 3 and not report.captured
        eager = ["dispatch", "experts", "combine"]
        for segment in report.segments:
            assert not segment.problems
            assert (segment.name.rpartition(".")[2] in eager) == bool(segment.reason), report
        reason = "not captured, sizes of what other ranks send are known at run time"
        assert f"layers.0.dispatch to layers.2.dispatch (3 identical): {reason}" in str(report)


class Turns(nn.Module):
    """A collective every other time."""

    def __init__(self, group):
        super().__init__()
        self.group, self.calls = group, 0

    def forward(self, x):
        self.calls += 1
        y = x * 2
        if self.calls % 2 == 0:
            dist.all_reduce(y.detach(), group=self.group)  # here
        return y


class Barrier(nn.Module):
    def forward(self, x):
        dist.barrier()  # here
        return x * 2


def collectives_case(rank, world):
    x = torch.ones(2, requires_grad=True)
    return [explain(module, x) for module in (Turns(dist.group.WORLD), Barrier())]


def test_collectives_that_differ_or_wait():
    for differ, wait in run_ranks(collectives_case, 2):
        for report, kind, module in ((differ, "collective", Turns), (wait, "host sync", Barrier)):
            (problem,) = [each for each in report.segments[0].problems if each.kind == kind]
            number, text = line_of_here(module)
            assert problem.line == f"{__file__}:{number}, {text}" and "c10d" in problem.message


def test_arguments_that_are_no_tensors():
    class Scaled(Base):
        def forward(self, x, scale):
            return self.linear(x) * scale

    report = explain(Scaled(), torch.ones(2, 4), 0.5)
    (problem,) = report.segments[0].problems
    assert problem.kind == "argument" and "input 1 is 0.5, no tensor" in problem.message


def test_what_is_joined_registered_or_run_by_hand_is_not_blamed():
    class Joined(Base):
        def forward(self, x):
            side, main = SETTINGS["side"], object()
            with torch.cuda.stream(side):
                y = self.linear(F.dropout(x, 0.5))
            try:
                torch.cuda.Stream.wait_stream(main, side)
            except Exception:  # there is no GPU: what counts is that it was called
                pass
            return torch.where(y > 0, y, -y)

    model = Joined()

    def gather(module, args):
        SETTINGS.update(scale=1.0)

    gather.replayed = True
    model.linear.register_forward_pre_hook(gather)
    model.linear.weight.register_post_accumulate_grad_hook(lambda param: SETTINGS.update(scale=1.0))
    assert explain(model, torch.randn(3, 4)).captured


def test_a_chain_may_have_segments_that_say_why_they_are_eager():
    chain = LayerChain([Item(), SingleSegment(Mask(), reason="rows depend on data"), Plain()])
    report = explain(chain, torch.randn(3, 4))
    assert [segment.captured for segment in report.segments] == [False, False, True]
    assert report.segments[1] == ("1.Mask", "rows depend on data", ())


class Plain(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)


def test_nothing_is_left_behind():
    model = nn.Sequential(Plain(), nn.BatchNorm1d(4), nn.Dropout(0.5))
    grads = GradBuffer(model.named_parameters())
    for buffer in (flat.grad for flat in grads.flats):
        buffer.fill_(3)
    before, random_state = [buffer.clone() for buffer in model.buffers()], torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert explain(model, torch.randn(3, 4, generator=torch.Generator().manual_seed(1))).captured
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(bool((flat.grad == 3).all()) for flat in grads.flats)
    assert all(param.grad is None for param in model.parameters())
    layer = TransformerLayer(DENSE, Placement(rng=RngTracker(1)))
    assert [each.name for each in explain(layer, torch.randn(4, 2, 32)).segments] == ["0.attention", "0.mlp"]


def test_evaluation_mode_is_refused():
    with pytest.raises(ValueError, match="explain: the model is in evaluation mode"):
        explain(Plain().eval(), torch.ones(4))


def test_a_model_that_is_wrong_says_so_itself():
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        explain(Plain(), torch.ones(2, 5))
