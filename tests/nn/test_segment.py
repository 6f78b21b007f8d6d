"""Segments: run in order, everything between them in the tuple, stoppable anywhere from outside."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from nn_tools import SMALL

from fastmp.nn import Segment, SegmentedLayer, TransformerLayer


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
    with pytest.raises(dataclasses.FrozenInstanceError):
        segment.name = "mlp"


def test_a_transformer_layer_is_attention_then_mlp_and_can_be_run_from_outside():
    torch.manual_seed(0)
    layer = TransformerLayer(SMALL, group=None)
    x_SBH = torch.randn(6, 2, SMALL.hidden_size)
    tensors = (x_SBH,)
    assert [segment.name for segment in layer.segments()] == ["attention", "mlp"]
    for segment in layer.segments():
        tensors = segment.run(*tensors)
        assert isinstance(tensors, tuple) and segment.capturable
    assert torch.equal(tensors[0], layer(x_SBH))
