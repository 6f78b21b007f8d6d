"""The rivals of a benchmark compute the same: outputs, gradients, losses of a few steps, on a tiny shape."""

from __future__ import annotations

import importlib
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch

from benchmarks import bench_attention, bench_grouped_mm, report
from benchmarks.goals import H200_GOALS
from fastmp.ops.attention import Borders, attend

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in (ROOT / "benchmarks").glob("bench_*.py"))


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else [t for part in result for t in tensors(part)]


def results(work, rival):
    """Return the results of a rival on inputs of its own: some overwrite theirs."""
    case = work.case(work.tiny, torch.float32, "cpu")
    if "step" in work.directions:
        step = case.step(rival)
        return [step().clone() for _ in range(3)]
    direction = "both" if "both" in work.directions else work.directions[0]
    found = [tensor.detach() for tensor in tensors(case.results(rival, direction)())]
    narrow = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
    return [tensor.float() if tensor.dtype in narrow else tensor.clone() for tensor in found]


QUICK = ("bench_cross_entropy", "bench_grouped_mm", "bench_norm")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in NAMES]
)
def test_rivals_agree(name):
    module = importlib.import_module(f"benchmarks.{name}")
    for work in (work for work in module.WORKLOADS if work.tiny is not None):
        case = work.case(work.tiny, torch.float32, "cpu")
        if case.random:
            continue
        reference = "torch eager" if "torch eager" in case.rivals else list(case.rivals)[-1]
        expected = results(work, reference)
        for rival in case.rivals:
            if rival == reference or "compile" in rival:  # compiling takes seconds, and is torch's affair
                continue
            for value, want in zip(results(work, rival), expected, strict=True):
                torch.testing.assert_close(value, want, rtol=2e-4, atol=2e-5, check_dtype=False)


def test_every_family_names_its_rivals_and_goals_rightly():
    for name in NAMES:
        module = importlib.import_module(f"benchmarks.{name}")
        works = {work.name: work for work in module.WORKLOADS}
        assert all(work.cpu and work.cuda for work in works.values()), name
        for goal in getattr(module, "GOALS", ()):
            work = works[goal.workload]
            assert {goal.rival, goal.over} <= set(work.rivals) and goal.direction in work.directions, goal
            assert getattr(torch, goal.dtype) in (*work.dtypes, torch.float32), goal


def test_a_gpu_run_would_speak_to_every_goal():
    """The names of ops, workloads and rivals in the goals of `benchmarks.report` are those timed here."""

    def timing(case, workload, direction, rival):
        return report.Timing(case, workload, "bfloat16", direction, rival, 1.0, 0.9, "copy", 0, 1, 1)

    timings = []
    for module in (importlib.import_module(f"benchmarks.{name}") for name in NAMES):
        shapes = getattr(module, "SHAPES", {})
        timings += [timing(f"{op} {list(s)}", op, "kernel", "triton") for op in shapes for s in shapes[op]]
        for work in module.WORKLOADS:
            timings += [
                timing(f"{work.name} {list(shape)} bfloat16", work.name, direction, rival)
                for shape in work.cuda
                for direction in work.directions
                for rival in work.rivals
            ]
    forward = [replace(t, ms=0.5) if t.direction == "forward" else t for t in timings]
    silent = {goal.what for goal in H200_GOALS if goal.worst(forward) is None}
    assert silent <= (set() if "bench_linear_cross_entropy" in NAMES else {"linear + cross-entropy"})


@pytest.mark.parametrize("kind", ["causal", "last", "window", "packed", "window, sinks", "latent"])
def test_costs_of_attention_count_what_its_mask_shows(kind, monkeypatch):
    (work,) = [work for work in bench_attention.WORKLOADS if work.name == f"attention {kind}"]
    shown, eager = [], bench_attention._eager
    monkeypatch.setattr(bench_attention, "_eager", lambda *args: shown.append(args[3]) or eager(*args))
    case = work.case(work.tiny, torch.float32, "cpu")
    case.rivals["torch eager"]()
    (_, k, v), (batch, heads, *_) = case.leaves[:3], work.tiny
    each = 2 * batch * heads * int(shown[0].sum())
    assert case.flops == (each * (k.shape[3] + v.shape[3]), each * (3 * k.shape[3] + 2 * v.shape[3]))


def flash_attn(q, k, v, *, causal, window_size=(-1, -1), cu_seqlens_q=None, **rest):
    """FA3 in form: tokens before heads, documents without a batch, and a second result."""
    borders, window = None, None if window_size[0] < 0 else window_size[0] + 1
    if cu_seqlens_q is not None:
        q, k, v = (tensor.unsqueeze(0) for tensor in (q, k, v))
        borders = Borders(cu_seqlens_q, rest["cu_seqlens_k"], rest["max_seqlen_q"], rest["max_seqlen_k"])
    heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
    sees = {"causal": causal, "window": window, "documents": borders, "sinks": rest.get("learnable_sink")}
    out = attend(*heads_first, **sees).transpose(1, 2)
    return out if borders is None else out.squeeze(0), "log-sum-exp"


@pytest.mark.parametrize(
    "options", [{}, {"queries": 8}, {"window": 8}, {"length": 8}, {"window": 8, "sinks": True}], ids=str
)
def test_packages_of_attention_are_called_rightly(options, monkeypatch):
    call = bench_attention.Call(**{"tokens": 32, "queries": 32} | options)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, t, 16) for n, t in ((4, call.queries), (2, 32), (2, 32)))
    borders = None
    if call.length:
        ends = torch.arange(0, 33, call.length, dtype=torch.int32)
        borders = Borders(ends, ends, call.length, call.length)
    monkeypatch.setattr(bench_attention, "peer", lambda *which: flash_attn)
    monkeypatch.setattr(bench_attention, "compiled", lambda function: function)
    sinks = torch.randn(4) if call.sinks else None
    found = bench_attention._on_gpu(call, q, k, v, borders, sinks, "cpu")
    want = attend(q, k, v, window=call.window, documents=borders, sinks=sinks)
    packages = {"FA4"} if call.sinks else {"flex_attention", "FA3", "FA4"}
    assert packages == found.keys() - {"cuDNN", "FA2", "efficient"}
    for name in packages:
        torch.testing.assert_close(found[name](), want)


def test_quack_multiplies_rows_by_their_expert_in_both_directions():
    """With a stand-in for its GEMM: rows or terms between two starts belong to an expert."""

    def gemm(a, b, *, cu_seqlens_m=None, cu_seqlens_k=None):
        spans = pairwise((cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m).tolist())
        if cu_seqlens_m is not None:
            return torch.cat([a[i:j] @ each for (i, j), each in zip(spans, b, strict=True)])
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in spans])

    case = bench_grouped_mm.grouped_mm_case(4, 36, 16, 8, "skewed", torch.float32, "cpu")
    x, w = case.leaves
    sizes = bench_grouped_mm.sizes_of(4, 36, "skewed")
    offsets = torch.tensor([*accumulate(sizes)], dtype=torch.int32)
    quack = bench_grouped_mm.by_quack(gemm, offsets)
    case.rivals["quack"] = lambda: quack(x, w)
    for value, want in zip(case.both("quack")(), case.both("torch eager")(), strict=True):
        torch.testing.assert_close(value, want)
