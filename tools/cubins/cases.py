"""Cases of every Triton kernel: arguments of its op, and facts expected of the compiled code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from fastmp.ops.core.fp8 import E4M3, E5M2, SCALE, scale_strides
from tools.cubins.facts import Facts

ANY = Facts()
NARROW = r"\b(?:ld|st)\.global(?!\S*\.(?:v4\.b32|v2\.b64))"
ATOMICS = r"\b(?:atom|red)\.global"
LATENCY = 29_000  # bytes: 4.8 TB/s times 0.8 us over 132 multiprocessors
ELEMENTWISE = Facts(loads=1, stores=1)
GATED = Facts(2, 1, exps=1, registers=128)  # one exponential, for the activation and its slope
GATED_BACKWARD = Facts(3, 2, exps=1, registers=128)
GATED_ERF = replace(GATED_BACKWARD, exps=None)
WARP = r"redux\.sync"  # a token is reduced within a warp
SORT = Facts(registers=128, lacks=(ATOMICS,))  # which would lose the order
# what a rank has written is released to all devices, and what others have is acquired, or time is up
MEETING = Facts(
    registers=64,
    has=(
        r"atom\.global\.sys\.release\.exch\.b32",
        r"(?s)atom\.global\.sys\.acquire\.add\.u32.*mov\.u64 %rd\d+, %globaltimer;.*trap;",
    ),
)
SOFTMAX = Facts(1, 1, exps=1, registers=64, threads=1024)
ROPE = Facts(8, 4, registers=64, lacks=(NARROW,))
# the narrow accesses are those of weights and statistics
LATENT = Facts(3, 1.5, registers=64, threads=1024, lacks=(r"global\S*\.b16",))
LATENT_BACKWARD = Facts(stores=1.5, copies=4, registers=128, threads=512, lacks=(ATOMICS, r"global\S*\.b16"))
# which rows do not need; the numbers of rows are loaded as narrow
SHORT_STORES = (r"st\.global\S*\.v2\.b32|st\.global\S*\.v4\.b16",)
MOVING = Facts(8, 1, threads=512, lacks=SHORT_STORES)  # eight rows in, one row out
PUSH = Facts(1, 1, threads=1024, lacks=(*SHORT_STORES, ATOMICS))
SCALARS = Facts(registers=64, lacks=(ATOMICS,))  # one program, on which later launches wait
# one product of a step with a sum of its own, which is then added in float32
PROMOTED = Facts(has=(r"(?s)wgmma\.mma_async\S*k32\.f32\.e4m3\.e4m3|kind::f8f6f4",))
PROMOTED_E5M2 = Facts(has=(r"wgmma\.mma_async\S*k32\.f32\.e5m2\.e4m3|kind::f8f6f4",))
MXFP8 = Facts(has=(r"kind::mxf8f6f4\.block_scale",))
ADAMW = Facts(
    3, 3, threads=512, has=(r"atom\.global\.gpu\.relaxed\.add\.u64",), lacks=(r"(?:div|sqrt|fma)\.\S*f64",)
)
# all is 16 bits wide, in vectors of four numbers, which share a call of Philox
ADAMW_SMALL = Facts(threads=512, has=(r"ld\.global\.v2\.b32",), lacks=(*ADAMW.lacks, r"global\S*\.b16"))
# whole blocks and those that stick out of the row are loaded by different code; four exponentials rescale
STATS = Facts(2, exps=(1, 1.5), bytes=LATENCY)
# three exponentials and a logarithm a column take as many cycles as its bytes do: fewer have to be in flight
MIXTURE = Facts(4, exps=(3, 3.5), bytes=16_000)
# the second read of a row asks the cache for it
LOSS_GRAD = Facts(4, 2, exps=(2, 2.5), bytes=LATENCY, has=(r"L2::evict_last", r"L2::evict_first"))
TWO = Facts(threads=512)  # programs of eight warps
ROUTER_SUMS = Facts(3, registers=128, barriers=17, lacks=(ATOMICS,))
# the narrow accesses are those of the scales
QUANTIZE = Facts(1, 0.5, registers=128, quantizes=True, lacks=(ATOMICS,))
GATED_QUANTIZED = Facts(2, 0.5, exps=1, registers=128, quantizes=True, lacks=(ATOMICS,))
NORM_QUANTIZED = Facts(2, 0.5, registers=128, quantizes=True, lacks=(ATOMICS,))
DEQUANTIZE = Facts(0.5, 1, registers=128, lacks=(ATOMICS,))
QUANTIZE_WEIGHT = Facts(1, 0.5, registers=128, quantizes=True, lacks=(ATOMICS,))
ALONE = Facts(loads=1, stores=1, registers=128, lacks=(r"bar\.sync", r"\.shared"))  # threads exchange nothing


@dataclass(frozen=True, eq=False)
class T:
    """A tensor argument: its shape, and its dtype ("wide": that of sums), by default that of the case."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str | None = None


def _wide(*shape):
    return T(shape, "wide")


def _ids(*shape, dtype=torch.int32):
    return T(shape, dtype)


def _op(op, *given):
    """Return (case, facts) of an op with these arguments, of which a `T` is made anew; facts come last.

    `case(t, wide)` returns the op and its arguments: tensors that `t` makes, in the dtype of the case unless
    `t` is passed another, such as `wide`. The facts are those of each kernel in turn.
    """

    def case(t, wide):
        dtypes = {None: t().dtype, "wide": wide}
        tensors = dict.fromkeys(each for each in plain if isinstance(each, T))
        made = {each: t(*each.shape, dtype=dtypes.get(each.dtype, each.dtype)) for each in tensors}
        return op, tuple(made[each] if isinstance(each, T) else each for each in plain)

    plain = [each for each in given if not isinstance(each, Facts)]
    return case, tuple(each for each in given if isinstance(each, Facts))


def _case(arguments):
    """Turn `arguments(*given, t, wide)`, whose shapes depend on the dtype, into a function like `_op`."""

    def make(*given, **options):
        plain = [each for each in given if not isinstance(each, Facts)]
        facts = tuple(each for each in given if isinstance(each, Facts))
        return partial(arguments, *plain, **options), facts

    return make


E8M0 = SCALE[32]
_QUANTIZED = T((8192, 4096), E4M3), T((8192, 32), torch.float32)
_QUANTIZED_32 = T((8192, 4096), E4M3), T((8192, 128), E8M0)
_GELU = T((4096, 8192)), T((8192,))
_GELU_BACKWARD = T((4096, 8192)), *_GELU


@_case
def _norm(op, columns, t, wide, residual=True, block=None):
    if wide == torch.float64 and columns <= 16384:
        columns = min(columns, 4096)
    x, w = t(4096, columns), t(columns)
    extra = (w,) if op == "layer_norm" else ()
    return op, (x, x if residual else None, w, *extra, 1e-5, *((block, E4M3) if block else ()))


@_case
def _norm_backward(op, columns, t, wide):
    x, w = t(4096, columns), t(columns)
    shorter = x.element_size() >= 4 and columns < 12288
    x, w = (t(4096, 4096), t(4096)) if shorter else (x, w)
    stats = t(2 if op == "layer_norm" else 1, 4096, dtype=wide)
    return f"{op}_backward", (x, x, x, w, stats, *((True,) if op == "layer_norm" else ()))


def _softmax(keys, causal, *facts):
    mask = None if causal else T((2, 1, 4096, keys), torch.bool)
    return _op("scaled_masked_softmax", T((2, 8, 4096, keys)), mask, 0.125, causal, *facts)


def _softmax_backward(keys, causal, *facts):
    x, grad = T((2, 8, 4096, keys)), T((2, 8, 4096, keys))
    return _op("scaled_masked_softmax_backward", grad, x, 0.125, causal, *facts)


@_case
def _dropout(form, t, wide):
    """form: "plain" (p = 0), "wide" (a residual in float32) or ""."""
    residual = t(4096, 8192, dtype=torch.float32 if form == "wide" else t().dtype)
    seed = None if form == "plain" else t(dtype=torch.int64)
    return "bias_dropout_add", (t(4096, 8192), t(8192), residual, 0.1 if seed is not None else 0.0, seed)


@_case
def _dropout_backward(form, t, wide):
    dtype = t().dtype
    grad = t(4096, 8192, dtype=torch.float32 if form == "wide" else dtype)
    return "bias_dropout_add_backward", (grad, 0.1, t(dtype=torch.int64), dtype, form != "no bias")


@_case
def _adamw(t, wide, n=1 << 20, *, grouped=False, small=False):
    """Gradients of the dtype, a copy of the parameters in it where that is 16 bits, scalars as tensors."""
    main = t(n, dtype=torch.bfloat16 if small else wide)
    scalars = [t(dtype=torch.float32) for _ in range(3)]
    copy = t(n) if t().element_size() == 2 and not small else None
    state = (main, t(n), main, main, t(dtype=torch.int64))
    numbers = 1e-3, 0.9, 0.95, 1e-8, 0.1
    groups = t(n // 64, dtype=torch.uint8), *(t(4, dtype=torch.float32) for _ in range(2))
    table = (*groups, 64) if grouped else (None, None, None, 0)
    split = t(n, dtype=torch.int16) if small else None, 0
    return "adamw_", (*state, copy, *scalars, t(dtype=torch.bool), *numbers, *table, *split)


def _rope(width, rotated, interleaved, in_place, *facts):
    q, k, angles = T((2048, 4, 32, width)), T((2048, 4, 8, width)), _wide(2048, rotated // 2)
    return _op("rope_" if in_place else "rope", q, k, angles, angles, interleaved, True, *facts)


def _latent(rank, half, interleaved, own, *facts):
    x, angles = T((4096, 2, rank + 2 * half)), _wide(*((4096, 2) if own else (4096,)), half)
    return _op("latent_norm_rope", x, T((rank,)), angles, angles, 1e-6, interleaved, *facts)


def _latent_backward(rank, half, interleaved, *facts):
    grads, x = (T((4096, 2, rank)), T((4096, 2, 2 * half))), T((4096, 2, rank + 2 * half))
    angles, rstd = _wide(4096, half), _wide(4096, 2)
    return _op("latent_norm_rope_backward", *grads, x, T((rank,)), angles, angles, rstd, interleaved, *facts)


_TARGET, _ONE, _MERGED = _ids(4096, dtype=torch.int64), _wide(4096), _wide(4096, 2)  # of each token
_LOSS = (-100, 0.1, 1e-4)  # the ignored target, label smoothing, z-loss


def _stats(columns, with_sum, *facts):
    return _op("cross_entropy_stats", T((4096, columns)), _TARGET, 0, columns, with_sum, *facts)


def _loss(columns, *facts):
    logits = T((4096, columns))
    return _op("cross_entropy", logits, _TARGET, None, _ONE, 0, columns, *_LOSS, False, *facts)


def _grad(columns, *facts):
    logits = T((4096, columns))
    return _op("cross_entropy_grad", logits, _TARGET, _MERGED, _ONE, _ONE, 0, columns, *_LOSS, *facts)


def _loss_grad(columns, *facts):
    logits = T((4096, columns))
    return _op("cross_entropy_loss_grad_", logits, _TARGET, _ONE, _ONE, columns, *_LOSS, *facts)


def _log_probs_stats(columns, with_entropy, *facts):
    logits = T((4096, columns))
    return _op("log_probs_stats", logits, _TARGET, _wide(4096), 0, columns, with_entropy, *facts)


def _log_probs_grad(columns, with_entropy, *facts):
    entropy = (_ONE, _ONE) if with_entropy else (None, None)
    per_token = (_TARGET, _ONE, _ONE, _ONE, *entropy, _ONE)
    return _op("log_probs_grad_", T((4096, columns)), *per_token, 0, columns, -100, *facts)


def _distillation_sums(columns, beta, *facts):
    pair = T((4096, columns)), T((4096, columns))
    return _op("distillation_sums", *pair, _wide(4096, 4), _ONE, beta, 0, columns, *facts)


def _distillation_grad(columns, beta, *facts):
    pair = T((4096, columns)), T((4096, columns))
    return _op("distillation_grad_", *pair, _wide(4096, 4), _ONE, _ONE, _ONE, beta, 0, columns, *facts)


_GATED = T((4096, 2 * 14336)), T((2 * 14336,))
_GATED_BACKWARD = T((4096, 14336)), *_GATED
_CLAMPED = T((8192, 2 * 2880)), 1.702, 7.0


ROWS_EACH = {"decode": 1, "few": 48, "fine": 100, "large": 128}
EXPERTS, N, K = 255, 4096, 7168


def _offsets(t):
    return t(EXPERTS, dtype=torch.int32)


@_case
def _grouped(rows, t, wide, *, transposed=False, apart=False):
    """apart: rows lie where TMA cannot reach them, and are read through pointers."""
    gap = 8 // t().element_size() if apart else 0
    columns = N if transposed else K
    x = t(ROWS_EACH[rows] * EXPERTS, columns, pitch=columns + gap or None)
    return "grouped_mm", (x, t(EXPERTS, N, K), _offsets(t), transposed)


@_case
def _grouped_bias(rows, t, wide, *, transposed=False):
    columns, width = (N, K) if transposed else (K, N)
    x, bias = t(ROWS_EACH[rows] * EXPERTS, columns), t(EXPERTS, width)
    return "grouped_mm_bias", (x, t(EXPERTS, N, K), bias, _offsets(t), transposed)


@_case
def _grouped_lora(rows, r, t, wide, *, transposed=False, bias=False):
    """r: the rank; transposed: the dgrad."""
    columns, width = (N, K) if transposed else (K, N)
    m = ROWS_EACH[rows] * EXPERTS
    v = t(EXPERTS, r, width) if transposed else t(EXPERTS, width, r)
    shift = t(EXPERTS, width) if bias else None
    operands = t(m, columns), t(EXPERTS, N, K), shift, t(m, r), v, _offsets(t)
    return "grouped_mm_lora", (*operands, transposed, transposed)


@_case
def _lora_factor(r, t, wide, *, transposed=False):
    """x a^T, or dy b if transposed: as many columns as the rank."""
    columns, shape = (N, (EXPERTS, N, r)) if transposed else (K, (EXPERTS, r, K))
    return "grouped_mm", (t(ROWS_EACH["large"] * EXPERTS, columns), t(*shape), _offsets(t), transposed)


@_case
def _lora_wgrad(r, t, wide, *, of_a=False):
    m = ROWS_EACH["large"] * EXPERTS
    return "grouped_mm_wgrad", (t(m, r if of_a else N), t(m, K if of_a else r), _offsets(t))


@_case
def _grouped_mlp_in(form, gated, rows, t, wide):
    x = t(ROWS_EACH[rows] * EXPERTS, K)
    return "grouped_mlp_in", (x, t(EXPERTS, N, K), t(EXPERTS, N), _offsets(t), form, gated, True)


@_case
def _wgrad(t, wide, *, accumulate, apart=False, narrow=False):
    """narrow: what the gradients are added to has their dtype."""
    rows, gap = ROWS_EACH["large"] * EXPERTS, 8 // t().element_size() if apart else 0
    operands = (t(rows, N), t(rows, K, pitch=K + gap or None), _offsets(t))
    if accumulate:
        return "grouped_mm_wgrad_", (t(EXPERTS, N, K, **{} if narrow else {"dtype": wide}), *operands)
    return "grouped_mm_wgrad", operands


@_case
def _fp8(op, rows, block, t, wide, *, n=N, e5m2=False, apart=False, form=None):
    """rows of all experts; apart: rows of q lie where TMA cannot reach them."""
    dtype = E5M2 if e5m2 else E4M3
    experts = () if op == "linear_fp8" else (EXPERTS,)
    q = t(rows, K, dtype=dtype, pitch=K + 8 if apart else None)
    s = q.new_empty_strided((rows, K // block), scale_strides(rows, block), dtype=SCALE[block])
    w, w_scale = t(*experts, n, K, dtype=E4M3), t(*experts, n // block, K // block, dtype=SCALE[block])
    more = (_offsets(t),) if experts else ()
    more += (form,) if form else ()
    return op, (q, s, w, w_scale, *more, t().dtype)


#                 experts, k, score, groups, of them open, bias, normalised
ROUTERS = {
    "mixtral": (8, 2, "softmax", 1, 1, False, True),
    "qwen3": (128, 8, "softmax", 1, 1, False, True),
    "deepseek-v2": (160, 6, "softmax", 8, 3, False, False),
    "deepseek-v3": (256, 8, "sigmoid", 8, 4, True, True),
    "sqrtsoftplus": (256, 6, "sqrtsoftplus", 1, 1, True, True),
    "many": (512, 36, "logits", 1, 1, True, True),
}


def _router(name, *facts):
    experts, k, score, groups, opened, with_bias, normalize = ROUTERS[name]
    bias = _wide(experts) if with_bias else None
    options = (k, score, groups, opened, normalize, 2.5, True)
    return _op("topk_router", T((8192, experts)), bias, *options, *facts)


def _router_backward(name, *facts):
    experts, k, score, _, _, _, normalize = ROUTERS[name]
    grads = (_wide(8192, k), _wide(experts), _wide())
    inputs = T((8192, experts)), _ids(8192, k)
    return _op("topk_router_backward", *grads, *inputs, score, normalize, 2.5, *facts)


_X_FP8 = T((8192, 7168), E4M3), T((8192, 56), torch.float32)
_X, _ROW_OF, _PROBS = T((8192, 7168)), _ids(8192, 8), _wide(8192, 8)  # eight experts for each token
_PERMUTED = _ROW_OF, 8192 * 8 + 100
_ROWS, _MORE = T((8192 * 8, 7168)), T((8192 * 8 + 100, 7168))


@_case
def _exchange(op, t, wide, etp=1, ep=8):
    """An op of a rank with 8 of 256 experts for each token; `op` may end with what a push is given.

    Tokens in FP8 are "narrow": their bytes and scales fill about half a row of the buffer.
    """
    epochs, peer_offsets = t(etp * ep + 1, dtype=torch.int32), t(etp, ep, dtype=torch.int64)
    rows, where = t(2, 65536, 7168), t(8192, 8, dtype=torch.int32)
    name, _, form = op.partition(" ")
    width = 7392 // rows.element_size() if form == "narrow" else 7168
    probs = t(8192, 8, dtype=wide) if form and form != "narrow" else None
    y = t(8192, 8, 7168) if form == "backward" else None
    counts, local = t(2, etp * ep, 256, dtype=torch.int32), t(256 // ep, dtype=torch.int32)
    arguments = {
        "barrier": (epochs, peer_offsets, 1, 60.0),
        "counts": (t(256, dtype=torch.int32), epochs, counts, peer_offsets, 1, 60.0),
        "places": (where, where, counts[0], 1, ep, 65536),
        "push": (t(8192, width), where, probs, y, epochs, rows, peer_offsets),
        "take": (rows, epochs, local, width),
        "give": (t(65536, 7168), local, epochs, rows),
        "pull": (rows, epochs, peer_offsets, where, probs, form == "kept"),
    }
    return f"exchange_{name}", arguments[name]


@_case
def _stash(op, t, wide):
    """A rank with 16 of 128 experts (Qwen3-30B-A3B), and room for 65,536 rows."""
    state, rows = t(8 + 3 * 4096, dtype=torch.int64), t(400_000, 2048)
    h, y, fc1, fc2 = t(400_000, 1536), t(400_000, 768), t(16, 1536, 2048), t(16, 2048, 768)
    offsets, start, x = t(16, dtype=torch.int32), t(dtype=torch.int64), t(65536, 2048)
    arguments = {
        "reserve": (offsets, state, 400_000, 17),
        "push": (x, rows, start, offsets),
        "pull": (rows, start, offsets, 65536),
        "release": (state, 17),
        "mlp_in": (x, fc1, offsets, start, h, y, "silu"),
        "mm": (y, fc2, offsets, start, False, 65536),
        "gate_backward_": (t(65536, 768), h, start, offsets, "silu"),
        "wgrad": (x, y, offsets, None, start, 65536),
        "wgrad_": (t(16, 1536, 2048, dtype=wide), h, rows, offsets, start, start, 65536),
    }
    return f"stash_{op}", arguments[op]


CASES = {
    "bias_gelu tanh": _op("bias_gelu", *_GELU, "tanh", Facts(1, 1, exps=1)),
    "bias_gelu none": _op("bias_gelu", *_GELU, "none", ELEMENTWISE),
    "bias_gelu_backward tanh": _op("bias_gelu_backward", *_GELU_BACKWARD, "tanh", ELEMENTWISE, ANY),
    "bias_gelu_backward none": _op("bias_gelu_backward", *_GELU_BACKWARD, "none", ELEMENTWISE, ANY),
    "norm rms": _norm("rms_norm", 8192, Facts(3, 2, threads=512)),
    "norm layer": _norm("layer_norm", 8192, Facts(4, 2)),
    "norm rms long": _norm("rms_norm", 16384, Facts(3, 2, threads=1024)),
    "norm layer wide": _norm("layer_norm", 20480, Facts(5, 1), residual=False),
    "norm rms several rows": _norm("rms_norm", 128, ELEMENTWISE),
    "norm layer odd": _norm("layer_norm", 4095, Facts(lacks=(r"cp\.async",))),
    "norm rms quantized": _norm(
        "rms_norm_quantized", 8192, replace(NORM_QUANTIZED, loads=3, stores=1.5), block=128
    ),
    "norm rms quantized long": _norm("rms_norm_quantized", 16384, NORM_QUANTIZED, residual=False, block=128),
    "norm rms quantized 32": _norm("rms_norm_quantized", 4096, NORM_QUANTIZED, residual=False, block=32),
    "norm rms backward": _norm_backward("rms_norm", 4096, Facts(stores=1, copies=3, threads=512), ANY),
    "norm layer backward": _norm_backward("layer_norm", 8192, Facts(stores=1, copies=3, threads=512), ANY),
    "norm rms backward wide": _norm_backward("rms_norm", 12288, Facts(stores=1, threads=512), ANY),
    "norm layer backward wide": _norm_backward("layer_norm", 12288, Facts(stores=1, threads=512), ANY),
    "norm layer backward several rows": _norm_backward("layer_norm", 2048, Facts(stores=1, copies=3), ANY),
    "softmax 4096": _softmax(4096, False, SOFTMAX),
    "softmax 4096 causal": _softmax(4096, True, SOFTMAX),
    "softmax 16384": _softmax(16384, False, SOFTMAX),
    "softmax 65536 causal": _softmax(65536, True, Facts(2, 1, exps=(2, 2.1))),
    "softmax backward 128 causal": _softmax_backward(128, True, Facts(2, 1, exps=0)),
    "softmax backward 4096": _softmax_backward(4096, False, Facts(2, 1, exps=0, registers=64, threads=1024)),
    "softmax backward 65536": _softmax_backward(65536, False, Facts(4, 1, exps=0)),
    "dropout": _dropout("", ALONE),
    "dropout plain": _dropout("plain", ALONE),
    "dropout wide": _dropout("wide", Facts(1, 1, registers=128)),
    "dropout backward": _dropout_backward("", replace(ELEMENTWISE, registers=64, threads=1024), ANY),
    "dropout backward no bias": _dropout_backward("no bias", ALONE),
    "dropout backward wide": _dropout_backward("wide", Facts(1, 0.5, registers=128), ANY),
    "first_not_finite": _op("first_not_finite", T((1 << 20,)), T((), torch.bool), Facts(1)),
    "adamw": _adamw(ADAMW),
    "adamw groups": _adamw(ADAMW, grouped=True),
    "adamw small": _adamw(ADAMW_SMALL, grouped=True, small=True),
    "rope halves 64": _rope(64, 64, False, False, ROPE),
    "rope halves 128": _rope(128, 128, False, False, ROPE),
    "rope halves 256 in place": _rope(256, 256, False, True, Facts(8, 4, registers=80, lacks=ROPE.lacks)),
    "rope pairs 128": _rope(128, 128, True, False, ROPE),
    "rope pairs 64 in place": _rope(64, 64, True, True, ROPE),
    "rope part of 128": _rope(128, 32, False, False, ROPE),
    "rope 20 of 80": _rope(80, 20, False, False, Facts(lacks=(r"global\S*\.b16",))),
    "rope pairs 20 of 80": _rope(80, 20, True, False, Facts(lacks=(r"global\S*\.b16",))),
    "latent pairs": _latent(512, 32, True, False, LATENT),
    "latent halves": _latent(512, 32, False, True, LATENT),
    "latent 1536": _latent(1536, 32, True, False, LATENT),
    "latent small": _latent(32, 8, True, False, Facts(lacks=(r"global\S*\.b16",))),
    "latent odd": _latent(129, 5, False, False, ANY),
    "latent backward pairs": _latent_backward(512, 32, True, LATENT_BACKWARD, ANY),
    "latent backward halves": _latent_backward(512, 32, False, LATENT_BACKWARD, ANY),
    "latent backward 1536": _latent_backward(1536, 32, True, LATENT_BACKWARD, ANY),
    "cross_entropy stats": _stats(8192, False, replace(STATS, stack=8)),
    "cross_entropy stats sum": _stats(8192, True, STATS),
    "cross_entropy stats odd": _stats(50257, True, STATS),
    "cross_entropy loss": _loss(128256, STATS),
    "cross_entropy loss odd": _loss(50257, STATS),
    "cross_entropy merge": _op("cross_entropy_merge", _wide(8, 4096, 5), _TARGET, _ONE, 128256, *_LOSS, ANY),
    "cross_entropy grad": _grad(8192, Facts(2, 2, exps=1, bytes=LATENCY)),
    "cross_entropy grad odd": _grad(50257, Facts(2, 2, exps=1, bytes=LATENCY)),
    "cross_entropy loss_grad": _loss_grad(128256, LOSS_GRAD),
    "cross_entropy loss_grad odd": _loss_grad(50257, replace(LOSS_GRAD, stack=16)),
    "cross_entropy loss_grad long": _loss_grad(151936, LOSS_GRAD),
    "log_probs stats": _log_probs_stats(128256, False, STATS),
    "log_probs stats entropy": _log_probs_stats(50257, True, STATS),
    "log_probs grad": _log_probs_grad(128256, False, Facts(2, 2, exps=1, bytes=LATENCY)),
    "log_probs grad entropy": _log_probs_grad(50257, True, Facts(2, 2, exps=1, bytes=LATENCY)),
    "distillation sums forward_kl": _distillation_sums(128256, 0.0, Facts(4, exps=(2, 2.5), bytes=LATENCY)),
    "distillation sums reverse_kl": _distillation_sums(50257, 1.0, Facts(4, exps=(2, 2.5), bytes=LATENCY)),
    "distillation sums jsd": _distillation_sums(128256, 0.5, MIXTURE),
    "distillation grad forward_kl": _distillation_grad(128256, 0.0, Facts(4, 2, exps=2, bytes=LATENCY)),
    "distillation grad reverse_kl": _distillation_grad(50257, 1.0, Facts(4, 2, exps=1, bytes=LATENCY)),
    "distillation grad jsd": _distillation_grad(128256, 0.5, Facts(4, 2, exps=2, bytes=LATENCY)),
    "gated silu": _op("gated_activation", *_GATED, "silu", GATED),
    "gated gelu": _op("gated_activation", *_GATED, "gelu", Facts(2, 1, registers=128, stack=8)),
    "gated gelu_tanh": _op("gated_activation", *_GATED, "gelu_tanh", GATED),
    "gated backward silu": _op("gated_activation_backward", *_GATED_BACKWARD, "silu", GATED_BACKWARD, ANY),
    "gated backward gelu": _op("gated_activation_backward", *_GATED_BACKWARD, "gelu", GATED_ERF, ANY),
    "gated backward gelu_tanh": _op(
        "gated_activation_backward", *_GATED_BACKWARD, "gelu_tanh", GATED_BACKWARD, ANY
    ),
    "clamped": _op("clamped_swiglu", *_CLAMPED, GATED),
    "clamped backward": _op("clamped_swiglu_backward", T((8192, 2880)), *_CLAMPED, GATED_BACKWARD),
    "gated quantized": _op("gated_activation_quantized", *_GATED, "silu", None, 128, E4M3, GATED_QUANTIZED),
    "quantize rows": _op("quantize_rows", T((8192, 4096)), 128, E4M3, QUANTIZE),
    "quantize rows e5m2": _op("quantize_rows", T((8192, 4096)), 128, E5M2, QUANTIZE),
    "quantize rows 32": _op("quantize_rows", T((8192, 4096)), 32, E4M3, QUANTIZE),
    "dequantize rows": _op("dequantize_rows", *_QUANTIZED, torch.bfloat16, DEQUANTIZE),
    "dequantize rows 32": _op("dequantize_rows", *_QUANTIZED_32, torch.bfloat16, DEQUANTIZE),
    "quantize weight": _op("quantize_weight", T((8, 4096, 2048)), 128, QUANTIZE_WEIGHT),
    "quantize weight 32": _op("quantize_weight", T((8, 4096, 2048)), 32, QUANTIZE_WEIGHT),
    "grouped decode": _grouped("decode", ANY),
    "grouped few": _grouped("few", ANY),
    "grouped fine": _grouped("fine", ANY),
    "grouped large": _grouped("large", ANY),
    "grouped decode transposed": _grouped("decode", ANY, transposed=True),
    "grouped large transposed": _grouped("large", ANY, transposed=True),
    "grouped decode apart": _grouped("decode", ANY, apart=True),
    "grouped large apart": _grouped("large", ANY, apart=True),
    "grouped bias fine": _grouped_bias("fine", ANY),
    "grouped bias large": _grouped_bias("large", ANY),
    "grouped bias large transposed": _grouped_bias("large", ANY, transposed=True),
    "grouped lora decode": _grouped_lora("decode", 16, ANY),
    "grouped lora fine": _grouped_lora("fine", 16, ANY),
    "grouped lora large": _grouped_lora("large", 16, ANY),
    "grouped lora large bias": _grouped_lora("large", 64, ANY, bias=True),
    "grouped lora large transposed": _grouped_lora("large", 16, ANY, transposed=True),
    "grouped lora odd rank": _grouped_lora("large", 12, ANY),
    "grouped lora rank 32": _grouped_lora("large", 32, ANY),
    "grouped lora a": _lora_factor(16, ANY),
    "grouped lora b": _lora_factor(16, ANY, transposed=True),
    "grouped lora wgrad a": _lora_wgrad(64, ANY, of_a=True),
    "grouped lora wgrad b": _lora_wgrad(64, ANY),
    "grouped swiglu fine": _grouped_mlp_in("silu", True, "fine", ANY),
    "grouped swiglu large": _grouped_mlp_in("silu", True, "large", ANY),
    "grouped geglu fine": _grouped_mlp_in("gelu", True, "fine", ANY),
    "grouped geglu large": _grouped_mlp_in("gelu", True, "large", ANY),
    "grouped gelu fine": _grouped_mlp_in("gelu_tanh", False, "fine", ANY),
    "grouped gelu large": _grouped_mlp_in("gelu_tanh", False, "large", ANY),
    "fp8 linear": _fp8("linear_fp8", 8192, 128, PROMOTED),
    "fp8 linear few": _fp8("linear_fp8", 48, 128, PROMOTED),
    "fp8 grouped fine": _fp8("grouped_mm_fp8", 48 * EXPERTS, 128, PROMOTED),
    "fp8 grouped large": _fp8("grouped_mm_fp8", 512 * EXPERTS, 128, PROMOTED),
    "fp8 grouped e5m2": _fp8("grouped_mm_fp8", 512 * EXPERTS, 128, PROMOTED_E5M2, e5m2=True),
    "fp8 grouped apart": _fp8("grouped_mm_fp8", 512 * EXPERTS, 128, PROMOTED, apart=True),
    "fp8 grouped swiglu": _fp8("grouped_mlp_in_fp8", 512 * EXPERTS, 128, PROMOTED, form="silu"),
    "fp8 grouped geglu": _fp8("grouped_mlp_in_fp8", 512 * EXPERTS, 128, PROMOTED, form="gelu"),
    "mxfp8 linear": _fp8("linear_fp8", 8192, 32, MXFP8, n=4000),
    "mxfp8 grouped fine": _fp8("grouped_mm_fp8", 48 * EXPERTS, 32, MXFP8),
    "mxfp8 grouped large": _fp8("grouped_mm_fp8", 512 * EXPERTS, 32, MXFP8),
    "mxfp8 grouped e5m2": _fp8("grouped_mm_fp8", 512 * EXPERTS, 32, MXFP8, e5m2=True),
    "grouped wgrad writing": _wgrad(ANY, accumulate=False),
    "grouped wgrad accumulating": _wgrad(ANY, accumulate=True),
    "grouped wgrad accumulating apart": _wgrad(TWO, accumulate=True, apart=True),
    "grouped wgrad accumulating narrow": _wgrad(ANY, accumulate=True, narrow=True),
    # four barriers a step, where a token does not need two warps; the others are in the sums at the end
    "router mixtral": _router("mixtral", Facts(exps=(1, 3), barriers=16), ANY),
    "router qwen3": _router("qwen3", Facts(1, exps=(1, 2), barriers=22), ROUTER_SUMS),
    "router deepseek-v2": _router("deepseek-v2", Facts(exps=(1, 2), barriers=22, has=(WARP,)), ROUTER_SUMS),
    "router deepseek-v3": _router(
        "deepseek-v3", Facts(1, exps=(2, 3), barriers=23, has=(WARP,)), ROUTER_SUMS
    ),
    "router sqrtsoftplus": _router(
        "sqrtsoftplus", Facts(1, exps=(1, 4), barriers=23, has=(WARP,)), ROUTER_SUMS
    ),
    "router many": _router("many", Facts(1, exps=(1, 2), barriers=38, has=(WARP,)), ROUTER_SUMS),
    "router backward mixtral": _router_backward("mixtral", Facts(exps=2, barriers=3)),
    "router backward qwen3": _router_backward("qwen3", Facts(exps=2, barriers=5)),
    "router backward deepseek-v2": _router_backward("deepseek-v2", Facts(1, 1, exps=1, barriers=3)),
    "router backward deepseek-v3": _router_backward("deepseek-v3", Facts(1, 1, exps=2, barriers=7)),
    "router backward sqrtsoftplus": _router_backward("sqrtsoftplus", Facts(1, 1, exps=3, barriers=7)),
    "router backward many": _router_backward("many", Facts(1, 1, exps=2, stack=8, barriers=9)),
    "block rows": _op("block_rows", _ids(1024), _ids(1024), 32768, SORT),
    "permutation 32": _op("permutation", _ids(8192, 8), 32, SORT, SORT, SORT),
    "permutation 256": _op("permutation", _ids(8192, 8), 256, SORT, SORT, SORT),
    "permutation 512": _op("permutation", _ids(8192, 8), 512, SORT, SORT, SORT),
    "permute": _op("permute", _X, *_PERMUTED, SORT, Facts(1, 2, threads=1024, lacks=SHORT_STORES)),
    "permute quantized": _op("permute_quantized", _X, None, *_PERMUTED, 128, E4M3, SORT, QUANTIZE),
    "permute quantized 32": _op("permute_quantized", _X, None, *_PERMUTED, 32, E4M3, SORT, QUANTIZE),
    "permute FP8": _op(
        "permute_quantized", *_X_FP8, *_PERMUTED, 128, E4M3, SORT, replace(QUANTIZE, loads=0.5)
    ),
    "unpermute": _op("unpermute", _ROWS, _ROW_OF, None, MOVING),
    "unpermute weighted": _op("unpermute", _ROWS, _ROW_OF, _PROBS, MOVING),
    "unpermute weighted added": _op("unpermute_add", _ROWS, _ROW_OF, _PROBS, _X, replace(MOVING, loads=9)),
    "unpermute backward": _op(
        "unpermute_backward", _X, _MORE, _ROW_OF, _PROBS, SORT, replace(MOVING, loads=2, stores=2)
    ),
    "exchange barrier": _exchange("barrier", MEETING),
    "exchange counts": _exchange("counts", MEETING),
    "exchange places": _exchange("places", SORT),
    "exchange push": _exchange("push", PUSH),
    "exchange push narrow": _exchange("push narrow", PUSH),
    "exchange push etp": _exchange("push", replace(PUSH, stores=2, threads=512), etp=2),
    "exchange push backward": _exchange("push backward", replace(PUSH, loads=2, threads=512)),
    "exchange take": _exchange("take", Facts(1, 1, threads=1024, lacks=SHORT_STORES)),
    "exchange take narrow": _exchange("take narrow", Facts(1, 1, threads=1024, lacks=SHORT_STORES)),
    "exchange give": _exchange("give", Facts(1, 1, threads=1024, lacks=SHORT_STORES)),
    "exchange pull": _exchange("pull", Facts(8, 1, threads=512, lacks=(*SHORT_STORES, ATOMICS))),
    "exchange pull kept": _exchange("pull kept", Facts(8, 9, threads=384, lacks=(*SHORT_STORES, ATOMICS))),
    "exchange pull etp": _exchange("pull", Facts(16, 1, threads=256, lacks=(*SHORT_STORES, ATOMICS)), etp=2),
    "stash reserve": _stash("reserve", SCALARS),
    "stash push": _stash("push", Facts(1, 1, threads=1024, lacks=SHORT_STORES)),
    "stash pull": _stash("pull", Facts(1, 1, threads=1024, lacks=SHORT_STORES)),
    "stash release": _stash("release", SCALARS),
    "stash mlp_in": _stash("mlp_in", ANY),
    "stash mm": _stash("mm", ANY),
    "stash gate backward": _stash("gate_backward_", replace(GATED_BACKWARD, lacks=SHORT_STORES)),
    "stash wgrad": _stash("wgrad", ANY),
    "stash wgrad accumulating": _stash("wgrad_", ANY),
}
WIDE = ("dropout wide", "dropout backward wide")
# Those that take no other dtype, or mix bf16 with float32.
ONE_DTYPE = (
    "fp8", "mxfp8",
    "adamw small", "block rows", "permutation", "cross_entropy merge", "exchange barrier", "exchange counts",
    "dequantize rows", "dequantize rows 32", "exchange places", "permute FP8", "stash reserve",
    "stash release", *WIDE,
)  # fmt: skip


def least_architecture(name: str) -> int:
    """Return the compute capability, as one number, from which GPUs can run a case."""
    return {"fp8": 90, "mxfp8": 100}.get(name.partition(" ")[0], 0)
