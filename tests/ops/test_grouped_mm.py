"""grouped_mm and grouped_mlp_in: routing patterns, rows of nobody, main gradients, choices, errors, costs."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_tools import DTYPES, set_programs, threads_agree
from torch import nn

from fastmp.ops import grouped_mlp_in, grouped_mm, grouped_mm_choice, grouped_mm_launch
from fastmp.ops import grouped_mm_tiles as tiles
from fastmp.ops.core import launcher
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.testing.ops import poisoned_memory

N, K = 6, 5


def ends(sizes):
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def problem(sizes, spare=0, dtype=torch.float64, n=N, k=K, seed=0):
    """x, w (leaves), offsets, and a gradient of the result."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(sizes) + spare
    x, w, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((rows, k), (len(sizes), n, k), (rows, n))
    )
    return x.requires_grad_(), w.requires_grad_(), ends(sizes), grad


def by_hand(x, w, sizes):
    """Each row's product by itself."""
    expert = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    y = torch.einsum("rk,rnk->rn", x[: len(expert)], w[expert])
    return torch.cat([y, y.new_zeros(len(x) - len(y), y.shape[1])])


PATTERNS = {
    "no tokens": ([0, 0, 0], 0),
    "no tokens, but rows": ([0, 0, 0], 4),
    "one expert": ([9], 0),
    "all on one": ([0, 7, 0, 0], 2),
    "all equal": ([3, 3, 3], 0),
    "first and last empty": ([0, 5, 1, 0], 1),
    "one row each": ([1] * 8, 0),
}


FUSED = {
    "swiglu": {"form": "silu", "gated": True},
    "geglu": {"form": "gelu_tanh", "gated": True},
    "gelu": {"form": "gelu", "gated": False},
    "silu": {"form": "silu", "gated": False},
}


def activated(h, form, gated):
    gate, up = h.chunk(2, -1) if gated else (h, 1)
    if form == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if form == "gelu_tanh" else "none") * up


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    spare=st.integers(0, 3),
    transposed=st.booleans(),
    known=st.booleans(),
)
def test_any_routing(sizes, spare, transposed, known):
    x, w, offsets, grad = problem(sizes, spare)
    leaves = (grad.requires_grad_(), w) if transposed else (x, w)
    truth = by_hand(grad, w.transpose(1, 2), sizes) if transposed else by_hand(x, w, sizes)
    back = torch.randn(truth.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = grouped_mm(leaves[0], w, offsets, transposed=transposed, sizes=sizes if known else None)
    got = [y, *torch.autograd.grad(y, leaves, back)]
    want = [truth, *torch.autograd.grad(truth, leaves, back)]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
def test_biases_are_those_of_the_experts(transposed):
    """Values and gradients; an expert without rows has none, and rows of nobody stay zeros."""
    sizes, spare = [3, 0, 4], 2
    x, w, offsets, grad = problem(sizes, spare)
    x, w = x.detach().requires_grad_(), (w.detach().mT.contiguous() if transposed else w.detach())
    w, bias = w.requires_grad_(), torch.randn(3, grad.shape[1], dtype=torch.float64, requires_grad=True)
    known = grouped_mm(x, w, offsets, transposed=transposed, bias=bias, sizes=sizes)
    y = grouped_mm(x, w, offsets, transposed=transposed, bias=bias)
    plain = by_hand(x, w.mT if transposed else w, sizes)
    expert = torch.tensor([0] * 3 + [2] * 4)
    truth = torch.cat((plain[:7] + bias[expert], plain[7:]))
    got = [y, *torch.autograd.grad(y, (x, w, bias), grad)]
    want = [truth, *torch.autograd.grad(truth, (x, w, bias), grad)]
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(known, y) and not got[3][1].any()
    with pytest.raises(ValueError, match=r"grouped_mm: expected bias of shape .* for w"):
        grouped_mm(x, w, offsets, transposed=transposed, bias=bias[:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neither_nan_of_another_expert_nor_of_nobody_comes_through(dtype):
    sizes = [3, 4, 2]
    x, w, offsets, grad = problem(sizes, 2, dtype)
    with torch.no_grad():
        x[3:7], x[9:] = torch.nan, torch.inf
        grad[3:7], grad[9:] = torch.inf, torch.nan
    y = grouped_mm(x, w, offsets)
    dx, dw = torch.autograd.grad(y, (x, w), grad)
    for rows in (y, dx):
        assert rows[:3].isfinite().all() and rows[7:].isfinite().all() and not rows[9:].any()
    assert dw[[0, 2]].isfinite().all() and dw[1].isnan().all()
    h = grouped_mlp_in(x, w, offsets, form="silu", gated=True)
    assert h[[0, 1, 2, 7, 8]].isfinite().all() and not h[9:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ("grouped_mm", "transposed", "swiglu", "gelu"))
def test_main_gradients_are_summed(name, dtype):
    """Two microbatches: `main_grad` is what autograd would sum up, rounded less often; autograd gets none."""
    sizes = [0, 6, 11, 1]
    param = nn.Parameter(problem(sizes, dtype=dtype)[1].detach())
    GradBuffer([("w", param)])
    total = torch.zeros_like(param, dtype=torch.float64)

    def call(x, w, offsets):
        if name in ("grouped_mm", "transposed"):
            return grouped_mm(x, w, offsets, transposed=name == "transposed")
        return grouped_mlp_in(x, w, offsets, **FUSED[name])

    for seed in (1, 2):
        x, _, offsets, grad = problem(sizes, 2, dtype, seed=seed)
        x, back = (grad, x) if name == "transposed" else (x, grad)
        x = x.detach().requires_grad_()
        y = call(x, param, offsets)
        y.backward(back[:, : y.shape[1]])
        assert param.grad is None and x.grad is not None
        wide = param.detach().double().requires_grad_()
        y = call(x.detach().double(), wide, offsets)
        (dw,) = torch.autograd.grad(y, wide, back.double()[:, : y.shape[1]])
        total += dw
    eps = torch.finfo(dtype).eps
    assert param.main_grad.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(param.main_grad.double(), total, rtol=8 * eps, atol=32 * eps)


def test_under_autocast_the_gradient_reaches_the_parameter():
    x, w, offsets, grad = problem([4, 5], dtype=torch.float32)
    param = nn.Parameter(w.detach().clone())
    GradBuffer([("w", param)])
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_mm(x, param, offsets)
        y.backward(grad.bfloat16())
    assert y.dtype == torch.bfloat16 and x.grad.dtype == torch.float32 and param.grad is None
    narrow = [t.detach().bfloat16().requires_grad_() for t in (x, w)]
    dx, dw = torch.autograd.grad(grouped_mm(*narrow, offsets), narrow, grad.bfloat16())
    assert torch.equal(x.grad, dx.float())
    torch.testing.assert_close(param.main_grad, dw.float(), rtol=1e-2, atol=1e-2)


def test_autocast_does_not_narrow_the_sums_of_wider_ops():
    """The ops below autocast keep their dtype, also where torch's product would change it."""
    x, w, offsets, _ = problem([4, 5], dtype=torch.float32)
    plain = torch.ops.fastmp.grouped_mm(x.detach(), w.detach(), offsets, False)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.ops.fastmp.grouped_mm(x.detach(), w.detach(), offsets, False), plain)


def test_the_op_itself_checks_the_bias():
    x, w, offsets, _ = problem([4, 5])
    short = torch.zeros(w.shape[0], w.shape[1] - 2, dtype=x.dtype)
    with pytest.raises(RuntimeError, match=r"bias must be|must match|broadcast"):
        torch.ops.fastmp.grouped_mlp_in(x.detach(), w.detach(), short, offsets, "silu", True, False)


def test_without_gradients_the_pre_activation_is_not_kept():
    x, w, offsets, _ = problem([4, 5])
    with torch.no_grad():
        y = grouped_mlp_in(x, w, offsets, form="silu", gated=True)
    assert torch.equal(y, grouped_mlp_in(x, w, offsets, form="silu", gated=True).detach())
    out, h = torch.ops.fastmp.grouped_mlp_in(x.detach(), w.detach(), None, offsets, "silu", True, False)
    assert torch.equal(out, y) and h.shape == (0,)


class TestLoop:
    """A loop of GEMMs, for sizes known to the host; forced, for no CPU chooses it."""

    @pytest.fixture(autouse=True)
    def loop(self, monkeypatch):
        module = sys.modules["fastmp.ops.grouped_mm"]  # the package's name is the function's
        monkeypatch.setattr(module, "grouped_mm_choice", lambda *arguments: "loop")

    @pytest.mark.parametrize("pattern", PATTERNS)
    @pytest.mark.parametrize("transposed", (False, True))
    def test_equals_one_launch(self, pattern, transposed):
        sizes, spare = PATTERNS[pattern]
        x, w, offsets, grad = problem(sizes, spare)
        x, back = (grad, x.detach()) if transposed else (x.detach(), grad)
        x.requires_grad_()
        results = []
        for known in (None, sizes):
            param = nn.Parameter(w.detach().clone())
            param.main_grad = torch.ones_like(param)
            with poisoned_memory():
                y = grouped_mm(x, param, offsets, transposed=transposed, sizes=known)
                y.backward(back)
                z = grouped_mm(x, w, offsets, transposed=transposed, sizes=known)
                results.append([y, x.grad, param.main_grad, *torch.autograd.grad(z, (x, w), back)])
            x.grad = None
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("name", FUSED)
    def test_first_gemm(self, name):
        """The activation comes after the loop; with a bias of each expert there is none."""
        sizes, spare = PATTERNS["first and last empty"]
        x, w, offsets, _ = problem(sizes, spare)
        x, w = x.detach(), w.detach()[:, : w.shape[1] // 2 * 2].contiguous()
        results = []
        for known in (None, sizes):
            param, rows = nn.Parameter(w.clone()), x.clone().requires_grad_()
            param.main_grad = torch.ones_like(param)
            y = grouped_mlp_in(rows, param, offsets, **FUSED[name], sizes=known)
            y.square().sum().backward()
            assert param.grad is None
            results.append([y, rows.grad, param.main_grad])
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
        bias = torch.randn(w.shape[:2], dtype=w.dtype)
        pair = [grouped_mlp_in(x, w, offsets, **FUSED[name], bias=bias, sizes=s) for s in (None, sizes)]
        assert torch.equal(*pair)


def test_choice():
    """Few large experts are worth a loop before Hopper and without tensor cores, many small ones never."""
    mixtral, qwen = ([2048] * 8, 28672, 4096), ([256] * 128, 1536, 2048)
    assert grouped_mm_choice(*mixtral, torch.bfloat16, 80) == "loop"
    for arch in (90, 100):
        assert grouped_mm_choice(*mixtral, torch.bfloat16, arch) == "grouped"
    assert grouped_mm_choice(*mixtral, torch.float32, 100) == "loop"
    assert grouped_mm_choice(*mixtral, torch.bfloat16, 0) == "grouped"
    assert grouped_mm_choice([2048, 0, 1], *mixtral[1:], torch.bfloat16, 80) == "grouped"
    assert grouped_mm_choice([2048, 0, 2048], *mixtral[1:], torch.bfloat16, 80) == "loop"
    for arch in (80, 90, 100):
        assert grouped_mm_choice(*qwen, torch.bfloat16, arch) == "grouped"
        assert grouped_mm_choice([0, 0], 8192, 8192, torch.bfloat16, arch) == "grouped"


def test_tiles_follow_the_tokens_of_an_expert():
    def rows(each, arch=90, itemsize=2):
        return tiles.gemm_tiles(each, 4096, 7168, itemsize, arch).block_m

    assert [rows(each) for each in (0, 1, 16, 64, 127, 128, 8192)] == [16, 16, 16, 64, 64, 128, 128]
    for arch in (80, 90, 100, 103, 120):
        limit = {80: 163, 120: 99}.get(arch, 227) << 10
        for itemsize in (2, 4, 8):
            for each in (1, 16, 17, 64, 65, 200, 1000, 1e6):
                for gated in (False, True):
                    tile = tiles.gemm_tiles(each, 4096, 7168, itemsize, arch, gated)
                    columns = tile.block_n * (2 if gated else 1)
                    assert tile.num_stages * (tile.block_m + columns) * tile.block_k * itemsize <= limit
                    assert tile.block_m * columns <= 128 * tile.num_warps * 32
            tile = tiles.wgrad_tiles(4096, 7168, itemsize, arch)
            stored = tile.block_m * tile.block_n * 2
            assert tile.num_stages * (tile.block_m + tile.block_n) * tile.block_k * itemsize + stored <= limit
    small = tiles.gemm_tiles(1000, 40, 24, 2, 90)
    assert (small.block_n, small.block_k) == (64, 32)


ERRORS = {
    "x must be (M, K), got shape (3,)": {"x": torch.zeros(3)},
    "w must be (E, N, K), got shape (6, 5)": {"w": torch.zeros(6, 5)},
    "x (9, 5) does not fit w (2, 6, 4)": {"w": torch.zeros(2, 6, 4)},
    "x is torch.float32 but w is torch.bfloat16": {"w": torch.zeros(2, 6, 5).bfloat16()},
    "x must have one of the dtypes": {"x": torch.zeros(9, 5).long()},
    "x is on cpu but w is on meta": {"w": torch.zeros(2, 6, 5, device="meta")},
    "offsets must be int32, got torch.int64": {"offsets": torch.tensor([4, 9])},
    "offsets of shape (3,) do not fit the 2 experts of w": {"offsets": ends([1, 2, 3])},
    "x is on cpu but offsets is on meta": {"offsets": ends([4, 5]).to("meta")},
    "offsets [5, 4] must not be negative, fall, or pass the 9 rows of x": {"offsets": ends([5, -1])},
    "offsets [4, 10] must not be negative, fall, or pass the 9 rows of x": {"offsets": ends([4, 6])},
    "offsets [-1, 4] must not be negative, fall, or pass the 9 rows of x": {"offsets": ends([-1, 5])},
}
SIZES = {
    "3 sizes do not fit the 2 experts of w": [1, 2, 3],
    "sizes [5, 5] must not be negative, nor sum to more than the 9 rows of x": [5, 5],
    "sizes [-1, 5] must not be negative, nor sum to more than the 9 rows of x": [-1, 5],
    "sizes [5, 4] do not add up to offsets [4, 9]": [5, 4],
}
MLP = {
    "form must be one of gelu_tanh, gelu, silu, got 'relu'": {"form": "relu"},
    "w (2, 7, 5) has an odd number of rows: no [gate | up]": {"w": torch.zeros(2, 7, 5)},
    "expected bias of shape (2, 6) for w of shape (2, 6, 5), got (6,)": {"bias": torch.zeros(6)},
    "x is torch.float32 but bias is torch.float64": {"bias": torch.zeros(2, 6).double()},
    "x is on cpu but bias is on meta": {"bias": torch.zeros(2, 6, device="meta")},
}


def arguments():
    return {"x": torch.zeros(9, 5), "w": torch.zeros(2, 6, 5), "offsets": ends([4, 5])}


@pytest.mark.parametrize("message", ERRORS)
@pytest.mark.parametrize("name", ("grouped_mm", "grouped_mlp_in"))
def test_errors(name, message):
    call, more = (grouped_mm, {}) if name == "grouped_mm" else (grouped_mlp_in, FUSED["swiglu"])
    with pytest.raises(ValueError) as caught:
        call(**arguments() | ERRORS[message], **more)
    assert str(caught.value).startswith(f"{name}: {message}")


@pytest.mark.parametrize("message", SIZES)
def test_errors_of_sizes(message):
    with pytest.raises(ValueError) as caught:
        grouped_mm(**arguments(), sizes=SIZES[message])
    assert str(caught.value) == f"grouped_mm: {message}"


@pytest.mark.parametrize("message", MLP)
def test_errors_of_the_fused_form(message):
    with pytest.raises(ValueError) as caught:
        grouped_mlp_in(**arguments() | FUSED["swiglu"] | MLP[message])
    assert str(caught.value) == f"grouped_mlp_in: {message}"


_MOST = (1 << 31) - (1 << 16)


@pytest.mark.parametrize(
    ("rows", "n", "k", "what"),
    [
        (_MOST, 64, 64, None),
        (_MOST + 1, 64, 64, "rows, or 2147483648 and more, got 2147418113"),
        (1 << 31, 64, 64, None),  # kernels take it as int64
        (_MOST, 128 * 256, 64, "tiles, or 2147483648 and more, got 21474"),
        (_MOST, 64, 128 * 256, "steps of a program, or 2147483648 and more, got 21474"),
    ],
)
def test_counts_that_overflow_int32_are_refused(rows, n, k, what, monkeypatch):
    """Rows, and the products of counts that a kernel forms, at the launch itself."""
    tile = tiles.TileConfig(128, 256, 256, 8, 2)
    monkeypatch.setattr(grouped_mm_launch, "gemm_tiles", lambda *_: tile)
    monkeypatch.setattr(grouped_mm_launch, "plan_gemm", grouped_mm_launch.plan_gemm.__wrapped__)
    set_programs(monkeypatch, 1)
    x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((rows, k), (2, n, k)))
    offsets, launches = torch.empty(2, dtype=torch.int32, device="meta"), []
    with launcher.intercept_launches(lambda *launch: launches.append(launch), 90):
        if what is None:
            grouped_mm_launch.launch(x, w, offsets, False)
        else:
            with pytest.raises(ValueError, match=f"grouped_mm: expected at most {_MOST} {what}"):
                grouped_mm_launch.launch(x, w, offsets, False)
    assert len(launches) == (what is None)


@given(
    rows=st.integers(0, _MOST),
    experts=st.integers(1, 512),
    across=st.integers(1, 300),
    k=st.integers(0, 1 << 20),
    programs=st.integers(1, 1000),
)
def test_no_count_overflows_up_to_the_rows_of_a_plan(rows, experts, across, k, programs):
    tile = tiles.TileConfig(64, 128, 64, 4, 3)
    most = grouped_mm_launch.max_rows(tile, across, experts, k)
    assume(most >= 0)
    for fewer in {most, min(rows, most)}:
        all_tiles = across * (-(-fewer // tile.block_m) + experts)
        assert max(fewer, all_tiles, -(-all_tiles // programs) * -(-k // tile.block_k)) <= _MOST


def test_transposed_errors_name_the_other_dimension():
    with pytest.raises(ValueError, match=r"x \(9, 5\) does not fit w \(2, 6, 5\)"):
        grouped_mm(**arguments(), transposed=True)


@pytest.mark.parametrize("shape", [(0,), (2, 6), (2, 5, 6)], ids=str)
@pytest.mark.parametrize("call", (grouped_mm, lambda *a: grouped_mlp_in(*a, form="silu", gated=True)))
def test_a_main_gradient_has_the_shape_of_its_weight(call, shape):
    """A `main_grad` of no elements would lose the gradient without a word."""
    given = arguments()
    weight = nn.Parameter(given["w"])
    weight.main_grad = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"expected main_grad of shape .* for w of shape \(2, 6, 5\)"):
        call(given["x"], weight, given["offsets"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.full
def test_a_few_rows_of_an_expert_are_not_packed(kind, dtype):
    """Products of up to eight rows and of more: near float64, and the same on any number of threads."""
    sizes = (1, 8, 3, 9, 0, 20)
    x, w, offsets, _ = problem(sizes, dtype=dtype, n=22, k=133)
    with torch.no_grad():
        y, h = grouped_mm(x, w, offsets), grouped_mlp_in(x, w, offsets, **FUSED[kind])
        expected = by_hand(x.double(), w.double(), sizes)
        close = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        for found, wanted in ((y, expected), (h, activated(expected, **FUSED[kind]))):
            assert (found.double() - wanted).norm() <= close * wanted.norm()
        assert threads_agree(lambda: [grouped_mm(x, w, offsets)])
