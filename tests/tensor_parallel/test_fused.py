"""Products that are one with their communication: torch's own plain versions of these ops, on a CPU.

What layers make of them is held against the layers without, in float64: outputs and all gradients.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from dispatch_modes import CalledOps
from marks import full
from torch.distributed import _symmetric_memory as symmetric

import fastmp
from fastmp.config import ParallelConfig
from fastmp.cuda_graphs.backends.recording import Pool, RecordedGraph
from fastmp.distributed import streams
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import GPT, Placement
from fastmp.ops.wgrad import WgradQueue, defer_wgrad
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.status import process_status
from fastmp.tensor_parallel import fused_linear as fused
from fastmp.tensor_parallel.fused_linear import is_fused
from fastmp.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from fastmp.testing.ranks import run_ranks
from tools.small_models import SMALL

S, B, I, O = 8, 3, 12, 24  # sequence, batch, inputs, outputs
GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


def plain_versions():
    """Register what torch computes where these ops have no kernels; what is returned keeps it so."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl(GATHER, symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl(SCATTER, symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    return library


def close(actual, expected):
    if expected is None:
        assert actual is None
    else:
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


LAYERS = {
    "column": (ColumnParallelLinear, {"gather_output": False}),
    "column, bias apart": (ColumnParallelLinear, {"gather_output": False, "skip_bias_add": True}),
    "column, joined": (ColumnParallelLinear, {"bias": False, "stride": 2}),
    "row": (RowParallelLinear, {"input_is_parallel": True}),
    "row, split": (RowParallelLinear, {"bias": False}),
}


def result(layer, x, dy, kind):
    """The output and all gradients, and the ops of forward and backward.

    kind: "main": gradients in main_grad; "deferred": made later; "frozen", "data": none of weight, of x.
    """
    x = x.detach().clone().requires_grad_(kind != "data")
    if kind == "frozen":
        layer.weight.requires_grad_(False)
    buffer = GradBuffer(layer.named_parameters()) if kind in ("main", "main, deferred") else None
    queue = WgradQueue() if "deferred" in kind else None
    with defer_wgrad(queue), CalledOps("symm_mem") as seen:
        y = layer(x)
        y, bias = y if isinstance(y, tuple) else (y, None)
        forward, seen.names = seen.names, []
        (y if bias is None else y + bias).backward(dy[..., : y.shape[-1]][: len(y)])
        if queue is not None:
            assert layer.weight.grad is None
            assert buffer is None or not layer.weight.main_grad.any()
            WgradQueue.run(queue.take())
    weights = [p.main_grad if buffer is not None else p.grad for p in layer.parameters()]
    return [y.detach(), x.grad, *weights], (forward, seen.names)


def layers_case(rank, tp, name):
    kept = plain_versions()
    compare_layers(rank, tp, name, "cpu")
    del kept


def compare_layers(rank, tp, name, device):
    group, on = dist.group.WORLD, {"dtype": torch.float64, "device": device}
    kind, options = LAYERS[name]
    column = kind is ColumnParallelLinear
    generator = torch.Generator().manual_seed(rank)
    dy = torch.randn(S, B, O, dtype=torch.float64, generator=generator).to(device)
    given = S // tp if column else S
    width = I if column or not options.get("input_is_parallel") else I // tp
    x = torch.randn(given, B, width, dtype=torch.float64, generator=generator).to(device)
    counted = {}
    for how in ("plain", "main", "deferred", "main, deferred", "frozen", "data"):
        results = []
        for rows in (None, S * B):
            torch.manual_seed(0)
            layer = kind(
                *(I, O),
                **{"group": group, "sequence_parallel": True, "overlap_rows": rows},
                **on,
                **options,
            )
            values, ops = result(layer, x, dy, how)
            results.append(values)
            assert rows is not None or ops == ([], [])
        for actual, expected in zip(*reversed(results), strict=True):
            close(actual, expected)
        counted[how] = ops
        with CalledOps("symm_mem") as seen:  # one row too few
            layer.overlap_rows = S * B + 1
            layer(x)
        assert not seen.names
    back = {"data": []} if column else {}
    first, second = (GATHER, SCATTER) if column else (SCATTER, GATHER)
    assert counted == {how: ([first], back.get(how, [second])) for how in counted} | (
        {} if column else {"data": ([first], [])}
    )


@pytest.mark.parametrize("tp", (2, *full([4])))
@pytest.mark.parametrize("name", ("column", "row", *full(list(LAYERS)[1:3] + list(LAYERS)[4:])))
def test_layers_are_what_they_are_without(tp, name):
    run_ranks(layers_case, tp, name)


def compare(rank, world):
    """Torch's kernels against layers without them."""
    for name in LAYERS:
        compare_layers(rank, world, name, fastmp.init().device)


@pytest.mark.gpu
@pytest.mark.alone
def test_two_gpus():
    """Each rank has its own: there is no multicast between ranks on one."""
    if torch.cuda.device_count() < 2 or not fused._has_kernels(torch.device("cuda", 0)):
        pytest.skip("needs two GPUs that a switch of NVLink connects")
    run_ranks(compare, 2, device="cuda", timeout=240)


def model_case(rank, tp, recompute):
    kept = plain_versions()
    groups = ParallelGroups.create(RankGrid(world_size=tp, tp=tp))
    ids = torch.randint(0, SMALL.vocab_size, (2, 8), generator=torch.Generator().manual_seed(1))
    results = []
    for rows in (None, 1):
        torch.manual_seed(0)
        on = Placement(groups, sequence_parallel=True, overlap_rows=rows, dtype=torch.float64)
        model = GPT(replace(SMALL, dropout=0.0, attention_dropout=0.0), on, recompute=recompute)
        with CalledOps("symm_mem") as seen:
            loss = model.loss(ids, ids).sum()
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for actual, expected in zip(*results, strict=True):
        close(actual, expected)
    del kept
    return len(seen.names) / SMALL.num_layers


@pytest.mark.full
@pytest.mark.parametrize(("recompute", "ops"), ((False, 8), (True, 11)))
def test_a_model_is_what_it_is_without(recompute, ops):
    """Four products of a layer, twice; of a recomputation's four, the last one is left out."""
    assert run_ranks(model_case, 2, recompute) == [ops, ops]


def graph_case(rank, tp):
    kept, options = plain_versions(), {"group": dist.group.WORLD, "sequence_parallel": True}
    layer = ColumnParallelLinear(I, O, gather_output=False, overlap_rows=1, **options)
    x = torch.randn(S // tp, B, I)
    layer(x)  # hosts agree outside of a graph
    graph = RecordedGraph(Pool())
    with graph.capture(), torch.no_grad(), CalledOps("symm_mem") as seen:
        y = layer(x)
    x.copy_(torch.randn(S // tp, B, I))
    graph.replay()
    assert seen.names == [GATHER] and torch.equal(y, layer(x))
    del kept


@pytest.mark.full
def test_a_graph_holds_them():
    run_ranks(graph_case, 2)


@pytest.fixture
def able(monkeypatch):
    monkeypatch.setattr(fused, "_can_fuse", lambda group, device: True)
    return SimpleNamespace(size=lambda: 4)


def test_what_is_not_fused(able):
    x, weight = torch.randn(S, B, I), torch.randn(O, I)
    assert is_fused(x, weight, able, 4 * S * B, gathers=True)
    assert not is_fused(x, weight, able, 4 * S * B + 1, gathers=True)
    assert is_fused(x, weight, able, S * B, gathers=False)
    assert not is_fused(x, weight, able, S * B + 1, gathers=False)
    assert not is_fused(x, weight, able, None, gathers=True)
    assert not is_fused(x, weight, None, 1, gathers=True)
    assert not is_fused(x.double(), weight, able, 1, gathers=True)
    assert not is_fused(x[:6], weight, able, 1, gathers=False)  # the layer says what is wrong with it
    assert not torch.func.vmap(lambda each: torch.tensor(is_fused(each, weight, able, 1, gathers=True)))(
        x[None]
    ).any()


def test_two_streams_do_not_share_the_workspace(able, monkeypatch):
    class OnDevice(torch.Tensor):
        is_cuda = True

    x, weight = torch.randn(S, B, I).as_subclass(OnDevice), torch.randn(O, I)
    side, exchanges = object(), object()
    monkeypatch.setattr(streams, "side_stream", lambda device: side)
    monkeypatch.setattr(streams, "exchange_stream", lambda device: exchanges)
    for current, fused_there in ((object(), True), (side, False), (exchanges, False)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, current=current: current)
        assert is_fused(x, weight, able, 1, gathers=True) == fused_there


class Captured:
    """Stands in for a graph."""


@pytest.fixture
def workspaces(monkeypatch):
    """torch's workspaces of groups by name, and ops that compute nothing but ask for them as torch's do."""

    def grow(group_name, nbytes):
        if group_name not in held or held[group_name].nbytes < nbytes:
            held[group_name] = torch.empty(nbytes, dtype=torch.uint8)

    def gather(x, weights, dim, group_name, return_A):
        grow(group_name, x.nbytes if return_A or 4 * S * B > 2048 else 4 * x.nbytes)
        return None, [x]

    def scatter(x, weight, op, dim, group_name):
        grow(group_name, 2 * x[: len(x) // 4, ..., 0].numel() * weight.shape[1] * x.itemsize)

    held = {}
    monkeypatch.setattr(symmetric, "_group_name_to_workspace_tensor", held)
    monkeypatch.setattr(fused, "_graphs", {})
    ops = SimpleNamespace(fused_all_gather_matmul=gather, fused_matmul_reduce_scatter=scatter)
    monkeypatch.setattr(torch.ops, "symm_mem", ops)
    return held


@pytest.mark.parametrize("op", (GATHER, SCATTER))
def test_a_workspace_does_not_grow_under_a_graph(workspaces, op):
    group, other = (SimpleNamespace(group_name=name, size=lambda: 4) for name in ("tp", "other"))

    def run(batch, group=group):
        x = torch.zeros(S, batch, I)
        if op == GATHER:
            fused.gather_matmul(x, torch.zeros(I, O), group, keep=True)
        else:
            fused.matmul_scatter(x, torch.zeros(I, O), group)
        return workspaces[group.group_name]

    run(1), run(B)  # grows as long as nothing is captured
    captured = run(B)
    graph = Captured()
    with process_status.capturing(graph):
        assert run(B) is captured
    small, needed = captured.nbytes, captured.nbytes // B * (B + 1)
    with pytest.raises(RuntimeError, match=rf"group tp would grow from {small} to {needed} bytes.*largest"):
        run(B + 1)
    assert run(B) is captured and run(B + 1, other).nbytes == needed
    graph.itself = graph  # for the garbage collector
    del graph
    assert run(B + 1).nbytes == needed


def test_few_rows_are_gathered_by_multicast(workspaces):
    """The workspace has all ranks' rows then."""
    group, x = SimpleNamespace(group_name="tp", size=lambda: 4), torch.zeros(S, B, I)
    fused.gather_matmul(x, torch.zeros(I, O), group, keep=True)
    graph = Captured()
    with process_status.capturing(graph):
        fused.gather_matmul(x, torch.zeros(I, O), group, keep=True)
    with pytest.raises(RuntimeError, match=f"from {x.nbytes} to {4 * x.nbytes} bytes"):
        fused.gather_matmul(x, torch.zeros(I, O), group, keep=False)
    del graph


def has_kernels_case(rank, world):
    return fused._can_fuse(dist.group.WORLD, torch.device("cpu"))


def test_a_device_without_kernels():
    assert run_ranks(has_kernels_case, 2) == [False, False]


def test_ranks_that_share_a_gpu_have_no_kernels(monkeypatch):
    supported = SimpleNamespace(has_multicast_support=lambda kind, index: True)
    monkeypatch.setattr(symmetric, "_SymmetricMemory", supported)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: True)
    assert fused._has_kernels(torch.device("cuda", 0))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert not fused._has_kernels(torch.device("cuda", 0))


def test_the_option():
    groups = ParallelGroups.alone()
    assert Placement.of(groups, ParallelConfig()).overlap_rows is None
    layout = ParallelConfig(tp=2, sequence_parallel=True, tp_overlap=True, tp_overlap_rows=4096)
    assert Placement.of(groups, layout).linear_options["overlap_rows"] == 4096
