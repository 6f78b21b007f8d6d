"""What is copied when graphs are replayed: nothing that can be made, or left, where a graph reads it."""

from __future__ import annotations

import pytest
import torch
from graph_tools import DENSE, MOE, train_gpt

from fastmp.cuda_graphs import executor, graph_set, manager, replay_program
from fastmp.cuda_graphs.executor import StepExecutor
from fastmp.cuda_graphs.graph_set import copy_together
from fastmp.nn.segment import run_segments

SOME = ("attn", "moe_router", "moe_preprocess")
HIDDEN = (8, 2, 32)


@pytest.fixture
def copies(monkeypatch):
    """Record the copies of the Python executor, in order, by destination; C++ makes the same."""
    monkeypatch.setattr(replay_program, "REPLAY", None)
    seen = {"into graphs": [], "out of chains": [], "to what keeps gradients": []}
    others = []  # copies under way that are not into graphs

    def note(into, tensors):
        if not others:
            seen["into graphs"].append([tuple(tensor.shape) for tensor in tensors])
        copy_together(into, tensors)

    monkeypatch.setattr(graph_set, "copy_together", note)
    for name, module, function, copy in (
        ("out of chains", manager, "_copy_out", manager._copy_out),
        ("to what keeps gradients", executor, "copies_of", executor.copies_of),
    ):

        def named(tensors, name=name, copy=copy):
            seen[name].append([tuple(tensor.shape) for tensor in tensors])
            others.append(name)
            own = copy(tensors)
            others.pop()
            return own

        monkeypatch.setattr(module, function, named)
    return seen


def of_last_microbatch(copies, config, **options):
    """What went into graphs; between the runs of a layer with experts there is eager code."""
    train_gpt(config, graphs=True, num_microbatches=2, steps=4, **options)
    each = len(copies["into graphs"]) // (2 * 2)  # of two steps that had graphs, two microbatches
    return copies["into graphs"][-each:]


def test_one_run_takes_its_input_and_the_gradient_of_its_output(copies):
    assert of_last_microbatch(copies, DENSE) == [[HIDDEN], [HIDDEN]]
    assert copies["out of chains"][-1] == copies["to what keeps gradients"][-1] == [HIDDEN]


def test_between_runs_hidden_states_and_their_gradients_are_where_the_next_graph_reads(copies):
    made = of_last_microbatch(copies, MOE, scope=SOME)
    assert made[0] == [HIDDEN] and len(made) == 1 + MOE.num_layers
    # Eager code makes gradients of tokens, probabilities, losses and the shared expert's output.
    made_eagerly = [(), (16, 2), HIDDEN, (16, 32)]
    last, *others = map(sorted, made[1:])
    assert last == sorted([*made_eagerly, HIDDEN])  # that of hidden states, from the loss
    assert others == [sorted(made_eagerly)] * (MOE.num_layers - 1)
    assert (
        len(copies["out of chains"][-1]) == 2 * MOE.num_layers
    )  # losses and counts: the rest is eager's own


def test_without_landing_and_in_place_reading_there_are_more(copies, monkeypatch):
    few = sum(map(len, of_last_microbatch(copies, MOE, scope=SOME)))
    copies["into graphs"].clear()

    def nowhere(links, tensors, call, out=None, **options):
        return run_segments(links, tensors, call, **options)

    monkeypatch.setattr(executor, "run_segments", nowhere)
    monkeypatch.setattr(StepExecutor, "_left_by_graphs", lambda self, slot, grads: {})
    many = sum(map(len, of_last_microbatch(copies, MOE, scope=SOME)))
    assert many == few + 2 * (MOE.num_layers - 1)


@pytest.mark.parametrize("shape", ((6,), (3, 2), ()))
def test_tensors_of_all_dtypes_are_copied_together(shape, monkeypatch):
    launches = []
    foreach = torch._foreach_copy_

    def note(into, tensors):
        launches.append(len(into))
        foreach(into, tensors)

    monkeypatch.setattr(torch, "_foreach_copy_", note)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64)
    tensors = [torch.randint(0, 2, shape).to(dtype) for dtype in dtypes]
    strange = torch.rand(4, 6).t()
    into = [torch.full_like(each, 1) for each in (*tensors, strange)]
    copy_together(into, (*tensors, strange))
    assert all(torch.equal(a, b) for a, b in zip(into, (*tensors, strange), strict=True))
    words = [t.nbytes % 4 == 0 for t in tensors]
    assert launches[0] == sum(words) and sum(launches) == len(into)
    assert len(launches) == 2 + words.count(False)
