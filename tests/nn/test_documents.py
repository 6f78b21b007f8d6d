"""Packed documents are computed as each of them alone: losses and every gradient, on any layout."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from context_tools import BY_LENGTH, MODELS, run_step
from marks import full
from nn_tools import assert_same_gradients, text

from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.cuda_graphs.explanation.report import explain
from fastmp.cuda_graphs.manager import GraphManager
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import Documents, Placement, SelfAttention
from fastmp.schedule.schedule import Schedule
from fastmp.tensor_parallel.context import cut_sequence
from fastmp.testing.ranks import run_ranks
from tools.small_models import make_gpt

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
LENGTHS = ((5, 1, 9, 17), (20, 12))  # of the documents of two rows of 32 tokens
POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def losses_of(model, tokens, targets, documents=None):
    loss = model.loss(tokens, targets, documents=documents)
    return loss if model.config.moe is None else loss.tokens


QUICK = [("gpt2", False), ("window", True), ("moe", False)]


@pytest.mark.parametrize(
    ("name", "recompute"),
    [*QUICK, *full(case for case in product(MODELS, (False, True)) if case not in QUICK)],
)
def test_packed_is_each_alone(name, recompute):
    config = MODELS[name]
    model = make_gpt(config, recompute=recompute)
    tokens_BS, targets_BS = text(config, batch=2, sequence=32)
    packed = losses_of(model, tokens_BS, targets_BS, Documents.from_position_ids(POSITIONS))
    grads = torch.autograd.grad(packed.sum(), list(model.parameters()))
    alone, pieces = [], zip(tokens_BS, targets_BS, LENGTHS)
    for tokens, targets, lengths in pieces:
        for piece in zip(tokens.split(lengths), targets.split(lengths)):
            alone.append(losses_of(model, *(x.unsqueeze(0) for x in piece)).squeeze(0))
    torch.testing.assert_close(packed.flatten(), torch.cat(alone), **CLOSE)
    expected = torch.autograd.grad(sum(loss.sum() for loss in alone), list(model.parameters()))
    for (path, _), *pair in zip(model.named_parameters(), grads, expected):
        torch.testing.assert_close(*pair, msg=lambda text, path=path: f"{path}: {text}", **CLOSE)


class Packed(torch.nn.Module):
    """A model whose loss always takes the same documents, for `run_step`."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def loss(self, tokens, targets):
        return self.model.loss(tokens, targets, documents=Documents.from_position_ids(POSITIONS))


def divided_case(rank, world, layout, name, options):
    config = (MODELS | BY_LENGTH)[name]
    groups = ParallelGroups.create(RankGrid(world_size=world, **layout))
    batch = (*text(config, batch=2, sequence=32), torch.ones(2, 32, dtype=torch.float64))
    one, many = Packed(make_gpt(config)), Packed(make_gpt(config, groups, **options))
    expected = run_step(one, [batch], ParallelGroups.alone())
    actual = run_step(many, [[cut_sequence(x, groups.cp) for x in batch]], groups)
    torch.testing.assert_close(actual[0][0], cut_sequence(expected[0][0], groups.cp), **CLOSE)
    assert_same_gradients(many, one, groups, "main_grad")


SEQUENCE = {"sequence_parallel": True}


@pytest.mark.parametrize(
    ("name", "world", "layout", "options"),
    [
        ("window", 2, {"cp": 2}, {"recompute": True}),
        ("gpt2", 4, {"cp": 2, "tp": 2}, SEQUENCE),
        *(pytest.param(name, 2, {"cp": 2}, {}, marks=pytest.mark.full) for name in BY_LENGTH),
        pytest.param("qwen3", 4, {"cp": 4}, {}, marks=pytest.mark.full),
        pytest.param("window", 4, {"cp": 4}, {}, marks=pytest.mark.full),
        pytest.param("llama", 2, {"tp": 2}, {"recompute": True} | SEQUENCE, marks=pytest.mark.full),
        pytest.param(
            *("llama", 2, {"tp": 2}, {"recompute": True, "shard_recompute_input": True}),
            marks=pytest.mark.full,
        ),
        pytest.param("moe", 2, {"cp": 2, "ep": 2}, {}, marks=pytest.mark.full),
    ],
)
def test_divided_documents_are_the_whole_ones(name, world, layout, options):
    run_ranks(divided_case, world, layout, name, options)


def without_causality_case(rank, world):
    groups = ParallelGroups.create(RankGrid(world_size=world, cp=world))
    x_TBH = torch.randn(32, 2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    documents, results = Documents.from_position_ids(POSITIONS), []
    for over in (ParallelGroups.alone(), groups):
        torch.manual_seed(1)
        layer = SelfAttention(MODELS["qwen3"], Placement(over, dtype=torch.float64), causal=False)
        results.append(layer(cut_sequence(x_TBH, over.cp, dim=0), documents=documents)[0])
    torch.testing.assert_close(results[1], cut_sequence(results[0], groups.cp, dim=0), **CLOSE)


@pytest.mark.full
def test_documents_without_causality():
    run_ranks(without_causality_case, 2)


def test_borders_and_more_room_than_documents():
    exact = Documents.from_position_ids(POSITIONS)
    assert exact.borders_n.tolist() == [0, 5, 6, 15, 32, 52, 64] and exact.longest == 20
    roomy = Documents.from_position_ids(POSITIONS, max_documents=9)
    assert roomy.borders_n.tolist() == [0, 5, 6, 15, 32, 52, 64, 64, 64, 64]
    own = roomy.borders(range(8, 16), range(4, 16))
    assert own.queries.tolist() == [0, 0, 0, 7, 8, 16, 16, 16, 16, 16]
    assert own.keys.tolist() == [0, 1, 2, 11, 12, 24, 24, 24, 24, 24]
    assert own.longest_queries == 8 and own is roomy.borders(range(8, 16), range(4, 16))
    model, batch = make_gpt(MODELS["qwen3"]), text(MODELS["qwen3"], batch=2, sequence=32)
    with torch.no_grad():
        losses = (model.loss(*batch, documents=documents) for documents in (exact, roomy))
        torch.testing.assert_close(*losses, **CLOSE)


def test_graphs_can_hold_them_where_there_is_more_room():
    model, (tokens_BS, _) = make_gpt(MODELS["window"]), text(MODELS["window"], batch=2, sequence=32)
    report = explain(model, tokens_BS, Documents.from_position_ids(POSITIONS, max_documents=9))
    assert report.num_spans == 1 and all(segment.captured for segment in report.segments), report
    manager = GraphManager([model.layers], Schedule(1, 1).order(0), backend=RecordingBackend(), warmup=1)
    manager.begin_step()
    with pytest.raises(ValueError, match="shared by all layers must consist of tensors, got 'abc'"):
        model.layers(torch.zeros(32, 2, 32, dtype=torch.float64), documents="abc")


@pytest.mark.full
def test_they_compile_in_one_graph_whatever_their_borders():
    model, batch = make_gpt(MODELS["qwen3"]), text(MODELS["qwen3"], batch=2, sequence=32)
    compiled = torch.compile(model.loss, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for positions in (POSITIONS, POSITIONS.flip(0)):
            documents = Documents.from_position_ids(positions, max_documents=9)
            expected = model.loss(*batch, documents=documents)
            torch.testing.assert_close(compiled(*batch, documents=documents), expected, **CLOSE)


def test_documents_on_a_gpu_take_no_values():
    """On the meta device, where there are none: any look at them would raise."""
    with pytest.raises(
        ValueError, match=r"make this from a CPU's tensor and move it .* or give max_documents"
    ):
        Documents.from_position_ids(POSITIONS.to("meta"))
    documents = Documents.from_position_ids(POSITIONS.to("meta"), max_documents=8)
    own = documents.borders(range(8, 16), range(16))
    assert own.queries.shape == own.keys.shape == (9,) and own.longest_keys == 16


def test_what_documents_do_not_go_with_is_refused():
    documents, config = Documents.from_position_ids(POSITIONS), MODELS["gpt2"]
    tokens_BS, _ = text(config, batch=2, sequence=32)
    model = make_gpt(config)
    with pytest.raises(ValueError, match="Documents: the batch has 6 documents, more than max_documents 4"):
        Documents.from_position_ids(POSITIONS, max_documents=4)
    with pytest.raises(ValueError, match=r"Documents: position_ids must be integers .*float32 of shape \(2,"):
        Documents.from_position_ids(POSITIONS.float())
    with pytest.raises(ValueError, match=r"GPT: position_ids of documents must be \(2, 16\) .*\(2, 32\)"):
        model(tokens_BS[:, :16], documents)
    with pytest.raises(ValueError, match="GPT: position 36 of documents is not in max_seq_len 32"):
        model(tokens_BS, Documents.from_position_ids(POSITIONS + 17))
    with pytest.raises(ValueError, match="expected key_padding_mask or documents, got both"):
        hidden_SBH = torch.zeros(32, 2, config.hidden_size, dtype=torch.float64)
        model.layers[0](hidden_SBH, POSITIONS > 0, documents=documents)
