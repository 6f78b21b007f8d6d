"""Attention by every backend is the plain formula, with a mask of all pairs, in float64.

Kernels of a GPU are stood in for: operators of torch with their documented meaning, written out over whole
matrices. So what is tested is how they are called, and what is made of what they return.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from marks import full
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastmp.ops import attention
from fastmp.ops.attention import AttentionCall, Borders, attend, choose

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
B, N, D = 2, 4, 8


def draw(queries, keys, kv_heads=2, dtype=torch.float64, batch=B):
    generator = torch.Generator().manual_seed(3)
    shapes = (batch, N, queries, D), (batch, kv_heads, keys, D), (batch, kv_heads, keys, D)
    tensors = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in tensors]


def seen_by(queries, keys, causal=True, window=None):
    """Which of `keys` tokens each of the last `queries` of them sees."""
    query, key = torch.arange(keys - queries, keys).unsqueeze(1), torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal:
        seen = key <= query
    return seen if window is None else seen & (key > query - window)


def plain(q, k, v, seen, scale=None, sinks=None):
    """The formula; sinks are a further column of scores, which has no value (as in transformers' GPT-OSS)."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (D**-0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is None:
        return scores.softmax(-1) @ v
    column = sinks.view(q.shape[1], -1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1] @ v


def same(ours, expected, leaves):
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(ours, expected, **CLOSE)
    for pair in zip(torch.autograd.grad(ours, leaves, grad), torch.autograd.grad(expected, leaves, grad)):
        torch.testing.assert_close(*pair, **CLOSE)


@pytest.mark.parametrize(
    ("queries", "keys", "kv_heads"),
    [(7, 7, 2), (5, 12, 2), (160, 300, 4), *full([(1, 9, 4), (6, 7, 1), (300, 520, 2), (5, 12, 1)])],
)
def test_the_last_tokens_of_a_sequence(queries, keys, kv_heads):
    leaves = draw(queries, keys, kv_heads)
    windows = (1, 4, 600) if keys < 100 else (270, 40)
    for causal, window in ((True, None), (False, None), *((True, window) for window in windows)):
        expected = plain(*leaves, seen_by(queries, keys, causal, window), scale=0.3)
        same(attend(*leaves, causal=causal, window=window, scale=0.3), expected, leaves)
    mask = torch.rand(B, 1, queries, keys) < 0.5
    mask[..., 0] = True
    same(attend(*leaves, causal=False, mask=mask), plain(*leaves, mask), leaves)


def borders(lengths, repeated=0):
    ends = [[0, *itertools.accumulate(one)] for one in zip(*lengths)]
    tensors = (torch.tensor([*each, *each[-1:] * repeated], dtype=torch.int32) for each in ends)
    return Borders(*tensors, *(max(one) for one in zip(*lengths)))


def seen_of_documents(lengths, queries, keys, causal, window):
    blocks = torch.block_diag(
        *(seen_by(*length, causal, window).reshape(length).to(torch.uint8) for length in lengths)
    ).bool()
    rows = [blocks[b * queries : (b + 1) * queries, b * keys : (b + 1) * keys] for b in range(B)]
    return torch.stack(rows).unsqueeze(1)


CASES = (  # of documents (queries, keys): whole ones; the ends of longer ones, and some without queries
    (((5, 5), (1, 1), (8, 8), (9, 9), (5, 5)), 14, 14),
    (((0, 6), (4, 7), (10, 12), (0, 8), (3, 6), (11, 11)), 14, 25),
)


@pytest.mark.parametrize("backend", ("documents", "mask"))
@pytest.mark.parametrize("number", range(len(CASES)))
def test_documents(number, backend, monkeypatch):
    lengths, queries, keys = CASES[number]
    leaves, asked = draw(queries, keys), borders(lengths, repeated=3)
    by_device = {"documents": {}, "mask": {"device": "cuda"}}[backend]
    describe_as(monkeypatch, **by_device)
    for causal, window in ((True, None), (True, 3), (False, None)):
        if not causal and number:
            continue
        expected = plain(*leaves, seen_of_documents(lengths, queries, keys, causal, window))
        same(attend(*leaves, causal=causal, window=window, documents=asked), expected, leaves)


def describe_as(monkeypatch, **facts):
    """Let `attend` take this machine for another one."""
    describe, plan = attention.describe, attention._plan
    monkeypatch.setattr(attention, "_plan", getattr(plan, "__wrapped__", plan))  # remembers this machine
    monkeypatch.setattr(attention, "describe", lambda *x, **asked: replace(describe(*x, **asked), **facts))


HOPPER = {"device": "cuda", "capability": (9, 0), "dtype": "bfloat16"}


def flash(q, k, v, q_ends, k_ends, longest_q, longest_k, p, causal, debug, *, scale, **window):
    """torch's `_flash_attention_forward`: tokens before heads, queries and keys end together."""
    left, right = window["window_size_left"], window["window_size_right"]
    assert p == 0.0 and not debug and not (causal and left >= 0)
    if q_ends is None:
        assert (longest_q, longest_k) == (q.shape[1], k.shape[1])
        q_ends, k_ends = (torch.arange(x.shape[0] + 1) * x.shape[1] for x in (q, k))
    (q_lengths, k_lengths), B = (torch.diff(x).tolist() for x in (q_ends, k_ends)), q.shape[0]
    assert max(q_lengths) <= longest_q and max(k_lengths) <= longest_k
    outputs = []
    flat = [x.flatten(0, 1) if x.dim() == 4 else x for x in (q, k, v)]
    for one_q, one_k, one_v in zip(flat[0].split(q_lengths), *(x.split(k_lengths) for x in flat[1:])):
        ages = torch.arange(len(one_k) - len(one_q), len(one_k))[:, None] - torch.arange(len(one_k))
        seen = (ages >= 0 if causal or right == 0 else ages > -math.inf) & (
            ages <= (left if left >= 0 else math.inf)
        )
        heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (one_q, one_k, one_v))
        outputs.append(plain(*heads_first, seen, scale)[0].transpose(0, 1))
    output = torch.cat(outputs)
    return output.unflatten(0, (B, -1)) if q.dim() == 4 else output, None


def test_flash_operators_are_called_as_they_are_meant(monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    describe_as(monkeypatch, **HOPPER)
    for queries, keys in ((7, 7), (5, 12)):
        leaves = draw(queries, keys)
        for window in (None, 1, 4):
            expected = plain(*leaves, seen_by(queries, keys, True, window))
            same(attend(*leaves, window=window), expected, leaves)
    describe_as(monkeypatch, **HOPPER, flash="FA3")
    same(attend(*leaves, causal=False), plain(*leaves, seen_by(queries, keys, False)), leaves)
    for lengths, queries, keys in CASES:
        leaves = draw(queries, keys)
        for window in (None, 3):
            expected = plain(*leaves, seen_of_documents(lengths, queries, keys, True, window))
            same(attend(*leaves, window=window, documents=borders(lengths, 2)), expected, leaves)


def whole_call(q, k, v, seen):
    """Torch is called once: with a mask of what is seen, or over as many queries as there are keys."""
    if seen is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    queries, keys = q.shape[2], k.shape[2]
    whole = torch.cat((q.new_zeros(*q.shape[:2], keys - queries, D), q), 2)
    return F.scaled_dot_product_attention(whole, k, v, is_causal=True, enable_gqa=True)[:, :, -queries:]


@pytest.mark.parametrize(
    ("queries", "keys", "window"),
    [(64, 256, None), *full([(128, 144, None), (512, 512, 100)]), (256, 512, 100)],
)
def test_16_bit_results_are_rounded_once(queries, keys, window):
    """Against float64, beside one call of torch over all tokens, or with a mask."""
    exact, rounded = (draw(queries, keys, dtype=dtype, batch=8) for dtype in (torch.float64, torch.bfloat16))
    grad = torch.randn(exact[0].shape, generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        for wide, narrow in zip(exact, rounded):
            wide.copy_(narrow)
    q, k, v = rounded
    seen = seen_by(queries, keys, True, window)
    try:
        theirs = whole_call(q, k, v, seen if window else None)
    except RuntimeError as error:
        if "pack_vnni2" not in str(error):
            raise
        pytest.skip(f"torch's own call fails where ATEN_CPU_CAPABILITY hides AVX-512 beside AMX: {error}")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = attend(q, k, v, window=window)
    outputs = plain(*exact, seen), ours, theirs
    results = [
        (output, *torch.autograd.grad(output, leaves, grad.to(output.dtype)))
        for output, leaves in zip(outputs, (exact, rounded, rounded))
    ]
    for true, found, usual in zip(*results):
        error, usual_error = ((each.double() - true).square().mean().sqrt() for each in (found, usual))
        assert error <= 1.1 * usual_error


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gpu_merges_no_16_bit_parts(dtype):
    fields = {
        "capability": [(7, 5), (8, 0), (9, 0), (10, 0)],
        "flash": ["", "FA2", "FA3", "FA4"],
        "cudnn_first": [False, True],
        "dropout": [False, True],
        "head_dim": [20, 64, 256],
    }
    for values in itertools.product(*fields.values()):
        call = replace(GPU, dtype=dtype, **dict(zip(fields, values)))
        assert choose(call).backend in ("flash", "mask"), call


GPU = AttentionCall("cuda", "bfloat16", 128, 1024, 4096, capability=(9, 0), cudnn_first=True)
CPU = AttentionCall("cpu", "float32", 64, 1024, 4096)


@pytest.mark.parametrize(
    ("call", "backend", "reason"),
    [
        (replace(GPU, queries=4096), "sdpa", "cuDNN first"),
        (replace(GPU, causal=False), "sdpa", "cuDNN first"),
        (GPU, "flash", "FA2 counts from the end, in one call"),
        (replace(GPU, head_dim=256), "flash", "FA2 counts from the end"),
        (replace(GPU, dropout=True), "flash", "FA2 counts"),
        (replace(GPU, capability=(8, 0), cudnn_first=False), "flash", "FA2 counts"),
        (replace(GPU, dtype="float32"), "mask", "16-bit dtypes only, not float32"),
        (replace(GPU, head_dim=20), "mask", "multiple of 8 up to 256 elements, not 20"),
        (replace(GPU, value_dim=64), "mask", "equal heads"),
        (replace(GPU, flash="FA3"), "flash", "FA3 has been activated"),
        (replace(GPU, flash="FA3", queries=4096), "flash", "FA3 has been activated"),
        (replace(GPU, flash="FA3", dropout=True), "mask", r"no dropout \(FA3\)"),
        (replace(GPU, flash="FA3", capability=(10, 0)), "mask", r"other GPUs \(FA3\)"),
        (replace(GPU, flash="FA4", capability=(10, 0)), "flash", "FA4 has been activated"),
        (replace(GPU, flash="", cudnn_first=False), "mask", "where it is enabled"),
        (replace(GPU, capability=(7, 5), cudnn_first=False), "mask", r"other GPUs \(FA2\)"),
        (replace(GPU, window=True), "flash", "FA2 knows windows"),
        (replace(GPU, window=True, dtype="float32"), "blocks", "16-bit"),
        (replace(GPU, documents=True, window=True), "flash", "by their borders"),
        (replace(GPU, documents=True, flash="FA3", dropout=True), "mask", "no dropout"),
        (replace(GPU, mask=True, causal=False), "sdpa", "take a mask"),
        (replace(GPU, dtype="float32", queries=1), "sdpa", "one query"),
        (CPU, "merged", "need no mask"),
        (replace(CPU, dropout=True), "mask", "has no dropout"),
        (replace(CPU, dtype="bfloat16"), "merged", "need no mask"),
        (replace(CPU, queries=1), "sdpa", "one query"),
        (replace(CPU, window=True), "blocks", "CUDA tensors only"),
        (replace(CPU, documents=True), "documents", "lengths"),
        (replace(CPU, documents=True, readable=False), "mask", "CUDA tensors"),
        (replace(GPU, sinks=True), "flash", "log-sum-exp of FA2"),
        (replace(GPU, sinks=True, queries=4096, window=True), "flash", "log-sum-exp of FA2"),
        (replace(GPU, sinks=True, mask=True, causal=False), "plain", "no mask"),
        (replace(GPU, sinks=True, dtype="float32"), "plain", "16-bit dtypes only"),
        (replace(CPU, sinks=True, queries=4096), "merged", "sinks join"),
        (replace(CPU, sinks=True, mask=True, causal=False), "merged", "sinks join"),
        (replace(CPU, sinks=True, window=True), "blocks", "CUDA tensors only"),
        (replace(CPU, sinks=True, documents=True, window=True), "documents", "lengths"),
        (replace(CPU, sinks=True, documents=True, window=True, readable=False), "merged", "sinks join"),
        (replace(CPU, sinks=True, dropout=True), "plain", "no dropout"),
    ],
)
def test_the_choice_and_its_reason(call, backend, reason):
    choice = choose(call)
    assert choice.backend == backend and re.search(reason, choice.reason)


def test_what_does_not_fit_is_refused():
    q, k, v = draw(6, 4)
    for call, match in (
        (lambda: attend(q, k, v), "6 queries are not the last of 4 keys"),
        (lambda: attend(q, k[:, :, :2], v), r"k and v \(B, G, E, D\), got .*\(2, 2, 2, 8\)"),
        (lambda: attend(q[:, :3], k, v), r"divide query heads, got q \(2, 3, 6, 8\) and k \(2, 2, 4, 8\)"),
        (lambda: attend(q, q, q, causal=False, window=2), "positive and causal, got 2 and causal=False"),
        (lambda: attend(q, q, q, window=0), "positive and causal, got 0"),
        (lambda: attend(q, q, q, mask=torch.ones(6, 6, dtype=torch.bool)), "a mask says all"),
        (
            lambda: attend(q, q, q, sinks=torch.zeros(3)),
            r"sinks must be \(4,\), .* got \(3,\)",
        ),
    ):
        with pytest.raises(ValueError, match=f"attend: .*{match}"):
            call()


def test_a_plan_is_of_shapes_options_and_settings():
    def plan(q, window=None):
        given = True, window, False, False, False, True, 0.0, None
        return attention._plan(q, k, v, *given, attention._machine(q.device))

    q, k, v = draw(8, 8)
    assert plan(q).backend == "sdpa" and plan(q) is plan(q + 1)
    assert plan(q, 3).backend == "blocks" and plan(q, 8).window is None
    assert plan(q[:, :, :4]).backend == "merged"
    with sdpa_kernel([SDPBackend.MATH]):  # disables the flash kernels whose results are merged
        assert plan(q[:, :, :4]).backend == "mask"


@pytest.mark.full
def test_one_graph_of_a_compiler():
    for queries, window in ((7, None), (5, None), (5, 3)):
        leaves = draw(queries, 7)
        compiled = torch.compile(
            lambda *x, w=window: attend(*x, window=w), backend="aot_eager", fullgraph=True
        )
        same(compiled(*leaves), attend(*leaves, window=window), leaves)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", (4, 2))
def test_kernels_of_a_gpu(kv_heads):
    """The stand-ins of the tests above, by themselves; in bfloat16, beside float32."""
    lengths = ((0, 64), (64, 128), (64, 64), (128, 256))
    queries, keys = 128, 256
    wide = [x.float().cuda().detach().requires_grad_() for x in draw(queries, keys, kv_heads)]
    narrow = [x.detach().bfloat16().requires_grad_() for x in wide]
    for window in (None, 40):
        for documents in (None, Borders(*(x.cuda() for x in borders(lengths)[:2]), queries, keys)):
            seen = seen_by(queries, keys, True, window)
            if documents is not None:
                seen = seen_of_documents(lengths, queries, keys, True, window)
            expected = plain(*wide, seen.cuda())
            ours = attend(*narrow, window=window, documents=documents)
            results = [(y, *torch.autograd.grad(y.sum(), x)) for y, x in ((ours, narrow), (expected, wide))]
            for one, exact in zip(*results):
                assert (one.float() - exact).norm() <= 2e-2 * exact.norm()
