"""What is noticed of a model between two steps, by C++ and by Python alike."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from fastmp.cuda_graphs import replay_program
from fastmp.cuda_graphs.snapshot import ModelSnapshot
from fastmp.nn import LayerChain, SingleSegment


def ignored(*arguments):
    pass


def replayed(*arguments):
    pass


replayed.replayed = True


def like(layer):
    """A parameter of its own on the same memory."""
    weight = nn.Parameter(layer.weight.data)
    weight.main_grad = layer.weight.main_grad
    layer.weight = weight


def moved_main_grad(layer):
    layer.weight.main_grad.data = torch.zeros(3, 3)


# What is done to a layer, and what comes of it: nothing, a change, or the name of what has moved.
CHANGES = {
    "nothing": (lambda layer: None, None),
    "values": (lambda layer: layer.weight.data.fill_(7.0), None),
    "mode": (lambda layer: layer.eval(), True),
    "trained": (lambda layer: layer.bias.requires_grad_(False), True),
    "hook": (lambda layer: layer.register_forward_hook(ignored), True),
    "replayed hook": (lambda layer: layer.register_forward_pre_hook(replayed), None),
    "hook before": (lambda layer: layer.register_forward_pre_hook(ignored), True),
    "hook of a gradient": (lambda layer: layer.weight.register_hook(ignored), True),
    "memory": (lambda layer: setattr(layer.weight, "data", torch.zeros(3, 3)), "weight"),
    "like": (like, None),
    "another parameter": (lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(3, 3))), "weight"),
    "no bias": (lambda layer: setattr(layer, "bias", None), "bias"),
    "main gradient": (lambda layer: setattr(layer.weight, "main_grad", torch.zeros(3, 3)), "weight"),
    "main gradient gone": (lambda layer: delattr(layer.weight, "main_grad"), "weight"),
    "main gradient's memory": (moved_main_grad, "weight"),
    "first main gradient": (lambda layer: setattr(layer.bias, "main_grad", torch.zeros(3)), "bias"),
    "buffer": (lambda layer: setattr(layer, "scale", torch.ones(3)), "scale"),
    "another buffer": (lambda layer: layer.register_buffer("shift", torch.zeros(3)), "shift"),
    "module": (lambda layer: setattr(layer, "part", nn.ReLU()), "part"),
    "number": (lambda layer: setattr(layer, "factor", 0.25), True),
    "number's type": (lambda layer: setattr(layer, "count", 1.0), True),
    "sign of zero": (lambda layer: setattr(layer, "zero", -0.0), True),
    "equal number": (lambda layer: setattr(layer, "factor", 0.1 + 0.4), None),
    "flag": (lambda layer: setattr(layer, "count", True), True),
    "text": (lambda layer: setattr(layer, "form", "tanh"), True),
    "sizes": (lambda layer: setattr(layer, "sizes", (3, 4)), True),
    "no number": (lambda layer: setattr(layer, "factor", None), True),
    "number gone": (lambda layer: delattr(layer, "factor"), True),
    "new number": (lambda layer: setattr(layer, "other", 1), True),
    "another object": (lambda layer: setattr(layer, "kept", []), None),
    "new object": (lambda layer: setattr(layer, "more", []), None),
}


@pytest.fixture(params=["C++", "Python"])
def by(request, monkeypatch):
    if request.param == "Python":
        monkeypatch.setattr(replay_program, "REPLAY", None)
    elif replay_program.REPLAY is None:
        pytest.skip("fastmp._replay is not built for this torch")
    return request.param


def watched():
    layer = nn.Linear(3, 3)
    layer.weight.main_grad = torch.zeros(3, 3)
    layer.register_buffer("scale", torch.ones(3))
    layer.factor, layer.count, layer.zero, layer.form, layer.sizes, layer.kept = (
        0.5,
        1,
        0.0,
        "relu",
        (3,),
        [],
    )
    return layer, ModelSnapshot([LayerChain([SingleSegment(nn.Linear(3, 3)), SingleSegment(layer)])])


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_noticed(by, change):
    (do, expected), (layer, snapshot) = CHANGES[change], watched()
    assert snapshot.changed() == (False, None)
    kept = do(layer)
    changed, moved = snapshot.changed()
    assert changed == (expected is not None) and bool(moved) == isinstance(expected, str)
    assert moved is None or (expected in moved and "of chunk 0" in moved)
    numbers = [*CHANGES][[*CHANGES].index("number") :]
    assert snapshot.modes_changed() == (bool(expected) and change in ("mode", "trained", *numbers))
    assert bool(snapshot.changed_number()) == bool(expected and change in numbers)
    assert kept is None or snapshot.changed() == (changed, moved)


@pytest.mark.skipif(replay_program.REPLAY is None, reason="fastmp._replay is not built for this torch")
def test_python_is_asked_once_about_what_has_come_in_place_of_its_like(monkeypatch):
    layer, snapshot = watched()
    like(layer)
    layer.register_forward_pre_hook(replayed)
    assert snapshot.changed() == (False, None)
    monkeypatch.setattr(ModelSnapshot, "_moved", None)
    monkeypatch.setattr(ModelSnapshot, "_now", None)
    assert snapshot.changed() == (False, None)
    assert not snapshot.modes_changed()


def test_a_watched_model_is_not_kept(by):
    """Not where a module refers to the snapshot, either."""
    layer, snapshot = watched()
    layer.snapshot = snapshot
    layer.register_forward_hook(partial(ignored, snapshot))
    snapshot.changed()
    gone = weakref.ref(layer)
    del layer, snapshot
    gc.collect()
    assert gone() is None
