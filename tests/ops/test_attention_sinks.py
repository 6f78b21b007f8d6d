"""Attention sinks are a further column of the scores, in float64; kernels of a GPU are stood in for."""

from __future__ import annotations

import pytest
import torch
from marks import full
from test_attention_backends import (
    CASES,
    HOPPER,
    B,
    N,
    borders,
    describe_as,
    draw,
    plain,
    same,
    seen_by,
    seen_of_documents,
)  # fmt: skip

from fastmp.ops import attention
from fastmp.ops.attention import attend


def sinks_of(*shape):
    generator = torch.Generator().manual_seed(6)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.fixture(params=["kernel", "plain"])
def backend(request, monkeypatch):
    """The CPU's kernel by its log-sum-exp, or matrix products."""
    if request.param == "plain":
        describe_as(monkeypatch, flash="")
    return request.param


@pytest.mark.parametrize(
    ("queries", "keys", "kv_heads"), [(7, 7, 2), (5, 12, 2), *full([(160, 300, 4), (1, 9, 4), (6, 7, 1)])]
)
@pytest.mark.parametrize("window", [None, 4, 20])
def test_the_last_tokens_of_a_sequence(backend, queries, keys, kv_heads, window):
    leaves, sinks = draw(queries, keys, kv_heads), sinks_of(N)
    expected = plain(*leaves, seen_by(queries, keys, True, window), sinks=sinks)
    same(attend(*leaves, window=window, sinks=sinks), expected, [*leaves, sinks])


def test_all_keys_and_masks(backend):
    leaves, sinks, of_queries = draw(5, 12), sinks_of(N), sinks_of(N, 5)
    seen = torch.rand(B, 1, 5, 12, generator=torch.Generator().manual_seed(7)) < 0.7
    everything = torch.ones(5, 12, dtype=torch.bool)
    same(
        attend(*leaves, causal=False, sinks=sinks), plain(*leaves, everything, sinks=sinks), [*leaves, sinks]
    )
    for given in (sinks, of_queries):
        ours = attend(*leaves, causal=False, mask=seen, sinks=given, scale=0.3)
        same(ours, plain(*leaves, seen, 0.3, sinks=given), [*leaves, given])


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("static", [False, True])
def test_documents(backend, number, static):
    lengths, queries, keys = CASES[number]
    leaves, sinks = draw(queries, keys), sinks_of(N)
    packed = borders(lengths, 2)._replace(static=static)
    for window in (None, 3):
        expected = plain(*leaves, seen_of_documents(lengths, queries, keys, True, window), sinks=sinks)
        same(attend(*leaves, window=window, documents=packed, sinks=sinks), expected, [*leaves, sinks])


def test_a_very_low_sink_changes_nothing_and_a_high_one_silences(backend):
    leaves = draw(7, 7)
    low, high = torch.full((N,), -1e4, dtype=torch.float64), torch.full((N,), 1e4, dtype=torch.float64)
    torch.testing.assert_close(attend(*leaves, sinks=low), plain(*leaves, seen_by(7, 7)))
    assert not attend(*leaves, sinks=high).any()


def test_16_bit_outputs_and_gradients():
    exact = [*draw(64, 256), sinks_of(N)]
    rounded = [x.detach().bfloat16().requires_grad_() for x in exact]
    with torch.no_grad():
        for wide, narrow in zip(exact, rounded):
            wide.copy_(narrow)
    expected = plain(*exact[:3], seen_by(64, 256), sinks=exact[3])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = attend(*rounded[:3], sinks=rounded[3])
    assert ours.dtype == torch.bfloat16
    results = [(y, *torch.autograd.grad(y.sum(), x)) for y, x in ((ours, rounded), (expected, exact))]
    for found, true in zip(*results):
        assert (found.double() - true).norm() <= 1e-2 * true.norm()


def flash_parts(q, k, v, borders_q, borders_k, options, causal):
    """Queries, keys and values of each sequence, heads first, and what its queries see."""
    if borders_q is None:
        pieces = [[x[b] for x in (q, k, v)] for b in range(len(q))]
    else:
        sizes = [each.diff().tolist() for each in (borders_q, borders_k, borders_k)]
        pieces = list(zip(*(x.split(of) for x, of in zip((q, k, v), sizes))))
    for piece in pieces:
        heads = [x.transpose(0, 1).unsqueeze(0) for x in piece]
        left = options["window_size_left"]
        bounded = causal or options["window_size_right"] == 0
        seen = seen_by(heads[0].shape[2], heads[1].shape[2], bounded, left + 1 if left >= 0 else None)
        yield heads, seen


def scores_of(q, k, seen, scale):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return (q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)


def flash_forward(q, k, v, borders_q, borders_k, most_q, most_k, dropout, causal, debug, **options):
    """torch's operator: the output as q, and the log-sum-exp (B, N, C) or (N, tokens)."""
    outputs, sums = [], []
    for heads, seen in flash_parts(q, k, v, borders_q, borders_k, options, causal):
        outputs.append(plain(*heads, seen, options["scale"])[0].transpose(0, 1))
        sums.append(scores_of(*heads[:2], seen, options["scale"]).logsumexp(-1)[0])
    if borders_q is None:
        return torch.stack(outputs), torch.stack(sums), q.new_empty(0), q.new_empty(0), None
    return torch.cat(outputs), torch.cat(sums, -1), q.new_empty(0), q.new_empty(0), None


def flash_backward(
    grad, q, k, v, output, lse, borders_q, borders_k, most_q, most_k, dropout, causal, rng, unused, **options
):
    """torch's operator: probabilities by the log-sum-exp it is given, row sums by the output."""
    of_grad = flash_parts(grad, output, output, borders_q, borders_q, options, causal)
    sums = lse.unbind() if borders_q is None else lse.split(borders_q.diff().tolist(), -1)
    found = []
    for (heads, seen), ((dy, y, _), _), total in zip(
        flash_parts(q, k, v, borders_q, borders_k, options, causal), of_grad, sums
    ):
        weights = (scores_of(*heads[:2], seen, options["scale"]) - total[None, :, :, None]).exp()
        group = heads[0].shape[1] // heads[1].shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in heads[1:])
        scale = q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
        dscores = weights * (dy @ values.transpose(-1, -2) - (dy * y).sum(-1, keepdim=True)) * scale
        of_keys = (dscores.transpose(-1, -2) @ heads[0], weights.transpose(-1, -2) @ dy)
        summed = [x.unflatten(1, (-1, group)).sum(2) for x in of_keys]
        found.append([x[0].transpose(0, 1) for x in (dscores @ keys, *summed)])
    join = torch.stack if borders_q is None else torch.cat
    return tuple(join(parts) for parts in zip(*found))


def test_flash_operators_are_called_as_they_are_meant(monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash_backward)
    describe_as(monkeypatch, **HOPPER)
    sinks = sinks_of(N)
    for queries, keys in ((7, 7), (5, 12)):
        leaves = draw(queries, keys)
        for window in (None, 1, 4):
            expected = plain(*leaves, seen_by(queries, keys, True, window), sinks=sinks)
            same(attend(*leaves, window=window, sinks=sinks), expected, [*leaves, sinks])
        everything = torch.ones(queries, keys, dtype=torch.bool)
        ours = attend(*leaves, causal=False, sinks=sinks)
        same(ours, plain(*leaves, everything, sinks=sinks), [*leaves, sinks])
    for lengths, queries, keys in CASES:
        leaves = draw(queries, keys)
        for window in (None, 3):
            expected = plain(*leaves, seen_of_documents(lengths, queries, keys, True, window), sinks=sinks)
            ours = attend(*leaves, window=window, documents=borders(lengths, 2), sinks=sinks)
            same(ours, expected, [*leaves, sinks])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 40])
def test_kernels_of_a_gpu(window):
    """The stand-ins of the tests above, by themselves; in bfloat16, beside float32."""
    wide = [x.float().cuda().detach().requires_grad_() for x in (*draw(128, 256), sinks_of(N))]
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    expected = plain(*wide[:3], seen_by(128, 256, True, window).cuda(), sinks=wide[3])
    ours = attend(*narrow[:3], window=window, sinks=narrow[3])
    assert attention.choose(attention.describe(*narrow[:3], sinks=True)).backend == "flash"
    results = [(y, *torch.autograd.grad(y.sum(), x)) for y, x in ((ours, narrow), (expected, wide))]
    for one, exact in zip(*results):
        assert (one.float() - exact).norm() <= 2e-2 * exact.norm()
