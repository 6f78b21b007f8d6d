"""Segments: run in order, everything between them in the tuple, stoppable anywhere from outside."""

from __future__ import annotations

import pytest
import torch

from fastmp.nn import LayerChain, Segment, SegmentedLayer, TransformerLayer
from fastmp.nn.segment import run_segments
from tools.small_models import SMALL


class Routed(SegmentedLayer):
    """The shape of an expert layer: a capturable front, an eager back, values crossing in the tuple."""

    def __init__(self):
        super().__init__()
        self.ran = []

    def segments(self):
        return (
            Segment("router", self._router),
            Segment("dispatch", self._dispatch, capturable=False),
            Segment("combine", self._combine, capturable=False),
        )

    def _router(self, x):
        self.ran.append("router")
        return x, x.argmax(-1)

    def _dispatch(self, x, expert):
        self.ran.append("dispatch")
        return x, x * expert.unsqueeze(-1), expert

    def _combine(self, x, y, expert):
        self.ran.append("combine")
        return (x + y,)


def test_forward_runs_the_segments_in_order():
    layer, x = Routed(), torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 1.0]])
    assert torch.equal(layer(x), torch.tensor([[2.0, 6.0, 4.0], [5.0, 0.0, 1.0]]))
    assert layer.ran == ["router", "dispatch", "combine"]
    assert [segment.capturable for segment in layer.segments()] == [True, False, False]


def test_a_layer_that_ends_in_several_tensors_returns_their_tuple():
    class Pair(SegmentedLayer):
        def segments(self):
            return (Segment("both", lambda x: (x, -x)),)

    first, second = Pair()(torch.ones(2))
    assert first.sum() == 2 and second.sum() == -2


def test_a_layer_without_segments_says_so():
    with pytest.raises(NotImplementedError, match="SegmentedLayer does not define its segments"):
        SegmentedLayer()(torch.ones(1))


def test_segments_are_values():
    segment = Segment("attention", torch.nn.Identity())
    with pytest.raises(AttributeError):
        segment.name = "mlp"


def test_a_transformer_layer_is_attention_then_mlp_and_can_be_run_from_outside():
    torch.manual_seed(0)
    layer = TransformerLayer(SMALL)
    x_SBH = torch.randn(6, 2, SMALL.hidden_size)
    tensors = (x_SBH,)
    assert [segment.name for segment in layer.segments()] == ["attention", "mlp"]
    for segment in layer.segments():
        tensors = segment.run(*tensors)
        assert isinstance(tensors, tuple) and segment.capturable
    assert torch.equal(tensors[0], layer(x_SBH))


def test_segments_of_a_layer_that_follow_each_other_are_called_as_one():
    called = []

    def twice(function, *tensors):
        """Call twice, like a recomputation."""
        called.append(len(tensors))
        function(*tensors)
        return function(*tensors)

    chain, x = LayerChain([Routed(), Routed()], call=twice), torch.tensor([[1.0, 3.0, 2.0]])
    plain = LayerChain(list(chain))
    links, asked = chain.bound_segments(), []
    assert [link.full_name for link in links] == [
        f"{i}.{name}" for i in (0, 1) for name in ("router", "dispatch", "combine")
    ]
    for start, stop, sizes in ((0, 6, [1, 1]), (1, 4, [2, 1]), (0, 1, [1])):
        part, given = links[start:stop], run_segments(links[:start], (x,))[0]
        expected = run_segments(part, given)
        called.clear()
        asked.clear()
        seen = run_segments(part, given, chain.call, begun=asked)
        assert called == sizes and asked == part
        assert all(torch.equal(a, b) for a, b in zip(seen[0], expected[0], strict=True))
    assert torch.equal(chain(x)[0], plain(x)[0])


def test_only_the_first_call_of_a_segment_writes_where_it_may_land():
    made = []

    def double(x, out=None):
        return (torch.mul(x, 2, out=out),)

    class Lands(SegmentedLayer):
        def segments(self):
            return (Segment("double", double, accepts_out=True),)

    def twice(function, *tensors):
        made.extend((*function(*tensors), *function(*tensors)))
        return made[-2]

    out, x = torch.empty(2), torch.ones(2)
    chain = LayerChain([Lands(), Lands()], call=twice)
    (last,), _ = run_segments(chain.bound_segments(), (x,), chain.call, out=out)
    assert last is out and out.tolist() == [4.0, 4.0]
    assert [tensor is out for tensor in made] == [False, False, True, False]


class Sum(torch.nn.Module):
    def forward(self, *tensors):
        return sum(tensors), len(tensors) * torch.ones(())


@pytest.mark.parametrize("call", (None, lambda layer, *tensors: layer(*tensors)))
def test_the_first_layer_of_a_chain_takes_several_tensors(call):
    chain = LayerChain([Sum(), Sum()], call=call)
    x, first, second = chain(torch.ones(2), torch.ones(2), torch.ones(2))
    assert x.tolist() == [3, 3] and (first, second) == (3, 1)
    assert LayerChain()(x, first) == (x, first)
