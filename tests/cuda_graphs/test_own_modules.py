"""Modules that know nothing of segments or graphs, trained through graphs: bit for bit as without."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from graph_tools import DENSE
from torch import nn

from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.errors import CaptureError
from fastmp.cuda_graphs.explanation.report import explain
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.nn import GPT, LayerChain, Segment, SingleSegment
from fastmp.schedule.schedule import Schedule


class Block(nn.Module):
    """An encoder layer as people write them."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, width))

    def forward(self, x):
        B, S, H = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(B, S, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, H)
        x = x + self.proj(y)
        return x + self.mlp(self.norms[1](x))


class Thresholded(nn.Module):
    def forward(self, x):
        return x if x.abs().max() > 1 else 2 * x  # the host reads a value


MODELS = {
    "blocks": lambda: nn.Sequential(Block(), Block(), Block()),
    "torch's own": lambda: nn.Sequential(
        *(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(2))
    ),
}


def train(layers, manager=None, steps=5):
    """Losses and parameters; two microbatches a step, of different weight."""
    params = list(layers.parameters())
    optimizer, data, losses = torch.optim.SGD(params, lr=0.1), torch.Generator().manual_seed(1), []
    torch.manual_seed(2)
    for _ in range(steps):
        optimizer.zero_grad()
        if manager is not None:
            manager.begin_step()
        for weight in (1, 10):
            y = layers(torch.randn(2, 5, 16, generator=data).double())
            loss = weight * (y[0] if isinstance(y, tuple) else y).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    return torch.stack(losses), *params


def assert_equal(graphed, eager):
    assert all(torch.equal(a, b) for a, b in zip(graphed, eager, strict=True))


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_training_is_that_of_the_modules_themselves(make):
    model = make().double()
    chain = LayerChain(copy.deepcopy(list(model)))
    manager = GraphManager([chain], Schedule(1, 2).order(0), backend=RecordingBackend())
    assert explain(chain, torch.randn(2, 5, 16).double()).captured  # which leaves the manager in its place
    assert_equal(train(chain, manager), train(model))
    assert manager.plan.num_graphs == 2


def test_a_module_that_cannot_be_captured_runs_between_graphs():
    model = nn.Sequential(Block(), Thresholded(), Block()).double()
    first, eager, last = copy.deepcopy(list(model))
    chain = LayerChain([first, SingleSegment(eager, reason="reads a value"), last])
    manager = GraphManager([chain], Schedule(1, 2).order(0), backend=RecordingBackend())
    assert_equal(train(chain, manager), train(model))
    assert manager.plan.num_graphs == 4
    assert [(link.segment.name, link.segment.reason) for link in chain.bound_segments()] == [
        *(("Block", ""), ("Thresholded", "reads a value"), ("Block", "")),
    ]


class Language(nn.Module):
    """Tokens and targets in, the loss out, and how many tokens it is of."""

    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(32, 16), nn.Sequential(Block(), Block())

    def forward(self, tokens, targets):
        logits = self.blocks(self.words(tokens)) @ self.words.weight.t()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return (losses * (targets >= 3).flatten()).sum(), (targets >= 3).sum()


def test_a_whole_model_with_its_loss():
    torch.manual_seed(0)
    whole = Language().double()
    chain = LayerChain([SingleSegment(copy.deepcopy(whole))])
    manager = GraphManager([chain], Schedule(1, 2).order(0), backend=RecordingBackend(), verify_every=4)

    def train(model, before_step=lambda: None):
        optimizer, data, seen = torch.optim.SGD(model.parameters(), lr=1e-3), torch.Generator(), []
        torch.manual_seed(1)
        for step in range(6):
            optimizer.zero_grad()
            before_step()
            for _ in range(2):
                ids = torch.randint(32, (2, 9 if step == 4 else 5), generator=data)
                loss, count = model(ids[:, :-1], ids[:, 1:])
                loss.backward()
                seen += [loss.detach(), count]
            optimizer.step()
        return *seen, *model.parameters()

    ids = torch.zeros(2, 4, dtype=torch.int64)
    assert explain(chain, ids, ids).captured
    assert_equal(train(chain, manager.begin_step), train(whole))
    assert manager.plan.num_graphs == 2 and manager.plan.inputs() == 2


def test_ids_that_do_not_fit_are_refused_also_in_graphs():
    model = GPT(DENSE)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens, targets):
            return self.model.loss(tokens, targets).sum()

    chain, ids = LayerChain([SingleSegment(Loss())]), torch.zeros(1, 8, dtype=torch.int64)
    manager = GraphManager([chain], Schedule(1, 1).order(0), backend=RecordingBackend())
    assert explain(chain, ids, ids).captured  # the chain of layers is a part of it
    wrong = torch.full_like(ids, 4096)
    with pytest.raises(ValueError, match="GPT: token id 4096 is outside the vocabulary of 64"):
        chain(wrong, ids)
    for step in range(5):
        manager.begin_step()
        if step == 3:
            with pytest.raises(IndexError, match="index out of range"):
                chain(wrong, ids)
        else:
            chain(ids, ids)[0].backward()
    assert manager.num_graphs == manager.plan.num_graphs == 2


def test_an_error_of_a_capture_names_run_segment_and_line():
    chain = LayerChain([Block(), Thresholded(), Block()]).double()
    manager = GraphManager([chain], Schedule(1, 2).order(0), backend=RecordingBackend())
    with pytest.raises(
        CaptureError,
        match=r"capture of the forward of microbatch 0 chunk 0, span '0.Block to 2.Block', segment "
        r"'1.Thresholded': graph: aten::_local_scalar_dense reads a value on the host.*called in "
        r".*test_own_modules.py:\d+, return x if x.abs.*; fastmp.cuda_graphs.explain\(model, \*inputs\)",
    ):
        train(chain, manager)


def test_an_error_in_a_backward_names_run_and_line():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()  # on the host

    class Layer(nn.Linear):
        def forward(self, x):
            return Reads.apply(super().forward(x))

    chain = LayerChain([Layer(16, 16)]).double()
    manager = GraphManager([chain], Schedule(1, 2).order(0), backend=RecordingBackend())
    with pytest.raises(CaptureError, match=r"backward of microbatch 0 .* '0.Layer': .*py:\d+, .*on the host"):
        train(chain, manager)


def test_an_error_of_a_capture_names_the_segment_of_a_layer_that_is_called():
    class Two(SingleSegment):
        def segments(self):
            return (
                Segment("first", lambda x: (2 * x,)),
                *super().segments(),
                Segment("last", lambda x: (x,)),
            )

    chain = LayerChain([Two(Thresholded())], call=lambda function, *tensors: function(*tensors))
    manager = GraphManager([chain], Schedule(1, 1).order(0), backend=RecordingBackend(), warmup=1)
    x = torch.ones(3, requires_grad=True)
    manager.begin_step()
    chain(x)[0].sum().backward()
    manager.begin_step()
    with pytest.raises(CaptureError, match=r"span '0.first to 0.last', segment '0.Thresholded': graph: aten"):
        chain(x)
