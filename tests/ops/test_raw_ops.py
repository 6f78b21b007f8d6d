"""Raw calls of torch.ops.fastmp.*, which the checks of fastmp/ops do not protect.

What does not fit is refused by an error that names the op, before anything outside a tensor is touched.
`make sanitize` repeats this file where every such access shows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from every_op_tools import op_backends
from torch import Tensor

from fastmp import ops
from fastmp.ops import OPS
from fastmp.testing.ops import run, samples

COMPILED = sorted(op for op, _ in (p.values for p in op_backends(("c++",))))
WRITTEN = {
    op: [
        i for i, a in enumerate(OPS[op].overload._schema.arguments) if a.alias_info and a.alias_info.is_write
    ]
    for op in COMPILED
}
INTEGERS = (torch.int32, torch.int64)


@cache
def tensors_of(op: str) -> list[tuple[int, str, tuple]]:
    """(place, name, sample) of each tensor argument that some sample gives, in a sample that has elements."""
    found = {}
    for sample in samples(op, device="cpu", dtype=torch.float32):
        for place, (value, argument) in enumerate(
            zip(sample, OPS[op].overload._schema.arguments, strict=True)
        ):
            if isinstance(value, Tensor) and value.numel():
                found.setdefault(place, (place, argument.name, sample))
    return list(found.values())


def replaced(sample: tuple, place: int, value: Tensor) -> tuple:
    return (*sample[:place], value, *sample[place + 1 :])


@pytest.mark.parametrize("op", sorted(OPS))
def test_a_tensor_without_memory_among_others_is_refused(op):
    for place, name, sample in tensors_of(op):
        others = [value for value in sample if isinstance(value, Tensor)]
        if len(others) > 1:
            with pytest.raises(ValueError, match=f"^{op}: .* is on cpu, but|^{op}: {name} is on meta, but"):
                OPS[op].overload(*replaced(sample, place, sample[place].to("meta")))


@pytest.mark.parametrize("op", COMPILED)
def test_a_tensor_of_another_device_does_not_reach_a_kernel(op):
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    for place, name, sample in tensors_of(op):
        with pytest.raises(RuntimeError, match=f"{op}: all tensors must be on the CPU, but {name} is not"):
            OPS[op].overload.redispatch(cpu, *replaced(sample, place, sample[place].to("meta")))


def resized(tensor: Tensor, num_bytes: int) -> Tensor:
    """A copy whose storage was then made smaller, as FSDP does with parameters."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    copy.untyped_storage().resize_(num_bytes)
    return copy


@pytest.mark.parametrize("op", sorted(OPS))
def test_a_tensor_whose_storage_was_freed_or_shrunk_is_named(op):
    """Also a view with an offset, whose address is not null."""
    for place, name, sample in tensors_of(op):
        tensor = sample[place]
        wide = torch.stack([tensor, tensor])
        view = wide[1]
        wide.untyped_storage().resize_(0)
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        for value in (resized(tensor, 0), view, resized(tensor, last * tensor.itemsize)):
            with pytest.raises(
                (RuntimeError, ValueError), match=f"^{op}: expected memory for all elements of {name} "
            ):
                OPS[op].overload(*replaced(sample, place, value))


def test_a_saved_tensor_whose_storage_was_freed_is_named():
    """Between forward and backward, in a public function."""
    x, bias = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    y = ops.bias_gelu(x, bias)
    bias.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"^bias_gelu_backward: expected memory for all elements of bias "):
        y.sum().backward()
    with pytest.raises(ValueError, match=r"^bias_gelu: expected memory for all elements of bias "):
        ops.bias_gelu(x, bias)


def test_a_tensor_without_elements_needs_no_memory():
    empty = torch.randn(0, 8)
    empty.untyped_storage().resize_(0)
    assert torch.ops.fastmp.bias_gelu(empty, torch.ones(8), "tanh").shape == (0, 8)


OTHER_DTYPES = {
    torch.float32: torch.float64,
    torch.float64: torch.float32,
    torch.int32: torch.int64,
    torch.int64: torch.int32,
}


def misfits(value: Any, type_: str) -> Iterator[tuple[str, Any]]:
    """Values of other sizes, dimensions and dtypes than an argument has, and other numbers."""
    if isinstance(value, Tensor) and value.numel():
        yield "with a dimension more", torch.stack([value, value])
        yield "in another dtype", value.to(OTHER_DTYPES.get(value.dtype, torch.int64))
        if value.is_floating_point():
            yield "in int64", value.float().nan_to_num().long()
        for dim in range(value.dim()):
            yield f"one shorter in dimension {dim}", value.narrow(dim, 0, value.shape[dim] - 1).contiguous()
            yield f"one longer in dimension {dim}", torch.cat([value, value.narrow(dim, 0, 1)], dim)
        if value.dim():
            yield "with a dimension less", value[0].clone()
    elif isinstance(value, torch.dtype):
        yield from ((str(dtype), dtype) for dtype in (torch.int32, torch.bool, torch.complex64))
    elif isinstance(value, str):
        yield "an unknown word", "nonsense"
    elif type_ in ("int", "SymInt") and not isinstance(value, bool):
        yield from ((str(number), number) for number in (-1, 0, 1, 3, 127, 1 << 62))
    elif type_ in ("float", "Optional[float]"):
        yield from ((str(number), number) for number in (-1.0, 0.0, 1.5))


# refused for the values of a tensor, which no fake kernel knows
VALUES = "must lie in|offsets of at most|inside the ring|not decrease|offsets must|row_of .* got"


def outcome(call: Callable, arguments: tuple) -> Exception | None:
    """Call with copies of the arguments; return what it raises."""
    copies = [value.clone() if isinstance(value, Tensor) else value for value in arguments]
    try:
        call(*copies)
    except Exception as error:  # of any type: the caller looks at it
        return error
    return None


def misfit_calls(op: str) -> Iterator[tuple[str, tuple]]:
    """Yield calls with one argument that may not fit, and what it is."""
    seen = set()
    for sample in samples(op, device="cpu", dtype=torch.float32):
        for place, argument in enumerate(OPS[op].overload._schema.arguments):
            for what, value in misfits(sample[place], str(argument.type)):
                if (place, what) not in seen:
                    seen.add((place, what))
                    yield f"{argument.name} {what}", replaced(sample, place, value)


def assert_named(op: str, error: Exception | None, what: str) -> None:
    named = type(error) in (ValueError, RuntimeError) and str(error).startswith(f"{op}:")
    assert error is None or named, (what, error)


@pytest.mark.parametrize("op", sorted(OPS))
def test_an_argument_that_does_not_fit_is_refused_by_kernel_and_fake(op):
    """What a kernel refuses, its fake refuses too: code would fail under torch.compile at run time only.

    Numbers and words that a fake refuses, a CPU kernel refuses too: a result would depend on how the op is
    called. Of tensors a kernel may take more, as a weight of another dtype, which it converts.
    """
    types = {argument.name: str(argument.type) for argument in OPS[op].overload._schema.arguments}
    for what, arguments in misfit_calls(op):
        meta = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in arguments)
        error, fake_error = outcome(OPS[op].overload, arguments), outcome(OPS[op].overload, meta)
        assert_named(op, error, what)
        assert_named(op, fake_error, what)
        if error is not None and not re.search(VALUES, str(error)):
            assert fake_error is not None, (what, error)
        if fake_error is not None and "Tensor" not in types[what.split()[0]]:
            assert error is not None, (what, fake_error)


@pytest.mark.interpret
@pytest.mark.parametrize("op", sorted(op for op in OPS if op.startswith("stash_")))
def test_an_argument_that_does_not_fit_is_refused_by_the_launch(op):
    """Where a kernel would read or write beyond a tensor: no public function checks these ops' arguments."""
    refused = 0
    for what, arguments in misfit_calls(op):
        meta = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in arguments)
        if outcome(OPS[op].overload, meta) is not None:
            error = outcome(OPS[op].implementations["triton"], arguments)
            assert error is not None, what
            assert_named(op, error, what)
            refused += 1
    assert refused > 2


@pytest.mark.interpret
@pytest.mark.parametrize("op", sorted(op for op in OPS if "triton" in OPS[op].implementations))
def test_a_launch_refuses_none_and_numbers_that_are_not_finite(op):
    sample = next(iter(samples(op, device="cpu", dtype=torch.float32)))
    for place, argument in enumerate(OPS[op].overload._schema.arguments):
        if str(argument.type) in ("float", "Optional[float]"):
            error = outcome(OPS[op].implementations["triton"], replaced(sample, place, math.nan))
            assert f"{op}: expected {argument.name} to be finite in float32, got nan" in str(error)
    required = next(i for i, a in enumerate(OPS[op].overload._schema.arguments) if str(a.type) == "Tensor")
    error = outcome(OPS[op].implementations["triton"], replaced(sample, required, None))
    assert str(error).startswith(f"{op}: expected ")


@pytest.mark.parametrize("op", sorted(OPS))
def test_none_for_a_tensor_is_named(op):
    schema = OPS[op].overload._schema.arguments
    required = [(place, name) for place, name, _ in tensors_of(op) if str(schema[place].type) == "Tensor"]
    samples_of = {place: sample for place, _, sample in tensors_of(op)}
    for place, name in required:
        arguments = replaced(samples_of[place], place, None)
        for device in ("cpu", "meta"):
            given = tuple(a.to(device) if isinstance(a, Tensor) else a for a in arguments)
            if any(isinstance(value, Tensor) for value in given):  # else torch knows no kernel, and says so
                error = outcome(OPS[op].overload, given)
                assert_named(op, error, name)
                assert f"expected {name} to be a tensor, got None" in str(error)


@pytest.mark.parametrize("op", sorted(OPS))
def test_numbers_are_finite(op):
    """In the dtype of arithmetic."""
    schema = OPS[op].overload._schema.arguments
    sample = next(iter(samples(op, device="cpu", dtype=torch.float32)))
    meta = tuple(a.to("meta") if isinstance(a, Tensor) else a for a in sample)
    for place, argument in enumerate(schema):
        if str(argument.type) not in ("float", "Optional[float]"):
            continue
        for value in (math.nan, math.inf, -math.inf, 1e308):
            for arguments in (sample, meta):
                expected = f"^{op}: expected {argument.name} to be finite in float32"
                with pytest.raises((ValueError, RuntimeError), match=expected):
                    OPS[op].overload(*replaced(arguments, place, value))
    wide = torch.randn(4, 8, dtype=torch.float64)
    assert torch.ops.fastmp.scaled_masked_softmax(wide, None, 1e300, False).isfinite().all()


def test_offsets_without_memory_of_a_peer_are_refused():
    for op in ("exchange_push", "exchange_pull", "exchange_barrier", "exchange_counts"):
        names = [argument.name for argument in OPS[op].overload._schema.arguments]
        sample = next(iter(samples(op, device="cpu", dtype=torch.float32)))
        place = names.index("peer_offsets")
        wrong = sample[place].clone()
        wrong.view(-1)[-1] = 1 << 44
        with pytest.raises(RuntimeError, match=f"^{op}: there is no memory of rank"):
            OPS[op].overload(*replaced(sample, place, wrong))


def is_fp8(tensor: Tensor) -> bool:
    """Return True for a dtype that `assert_close` compares bit by bit only."""
    return tensor.is_floating_point() and tensor.itemsize == 1


@pytest.mark.parametrize("op", COMPILED)
@pytest.mark.parametrize("value", [-1, 1 << 20, torch.iinfo(torch.int32).max, torch.iinfo(torch.int32).min])
def test_an_index_out_of_range_is_refused_or_means_what_the_reference_says(op, value):
    reference = OPS[op].implementations["reference"]
    for place, name, sample in tensors_of(op):
        if sample[place].dtype not in INTEGERS or sample[place].dim() == 0:
            continue
        if name == "peer_offsets":
            continue  # bytes to other ranks' memory, of which nobody knows where it is
        wrong = sample[place].clone()
        wrong.view(-1)[wrong.numel() // 2] = value
        arguments = replaced(sample, place, wrong)
        try:
            truth = run(op, reference, arguments)
        except (RuntimeError, IndexError, ValueError):
            with pytest.raises(RuntimeError, match=rf"^{op}: .*{value}"):
                run(op, OPS[op].overload, arguments)
        else:
            outputs = run(op, OPS[op].overload, arguments)
            outputs, truth = ([t.float() if is_fp8(t) else t for t in some] for some in (outputs, truth))
            torch.testing.assert_close(outputs, truth, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", [op for op in COMPILED if WRITTEN[op]])
def test_elements_that_share_memory_are_not_written(op):
    for place, name, sample in tensors_of(op):
        if place in WRITTEN[op] and sample[place].numel() > 1:
            given = sample[place].new_ones(1)
            expanded = given.reshape((1,) * sample[place].dim()).expand(sample[place].shape)
            with pytest.raises(RuntimeError, match=f"{op}: {name} is written to, but several of its"):
                OPS[op].overload(*replaced(sample, place, expanded))
            assert given == 1


def overlapping(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of which the second begins within the last elements of the first."""
    sizes = [t.numel() * t.element_size() for t in (one, two)]
    start = (sizes[0] - 1) // 8 * 8
    memory = torch.zeros(start + sizes[1] + 8, dtype=torch.uint8)
    parts = (memory[: sizes[0]], memory[start : start + sizes[1]])
    return tuple(part.view(t.dtype).view(t.shape) for part, t in zip(parts, (one, two), strict=True))


@pytest.mark.parametrize("op", [op for op in COMPILED if WRITTEN[op]])
def test_what_is_written_does_not_reach_into_another_argument(op):
    given = {place: sample for place, _, sample in tensors_of(op)}
    asked = 0
    for place in WRITTEN[op]:
        for other in given:
            if other == place or place not in given or not isinstance(given[place][other], Tensor):
                continue
            arguments = list(given[place])
            if (
                arguments[place].numel() * arguments[place].element_size() < 16
                or not arguments[other].numel()
            ):
                continue
            arguments[place], arguments[other] = overlapping(arguments[place], arguments[other])
            if other in WRITTEN[op] and arguments[other].numel() == 1:
                continue
            with pytest.raises(
                RuntimeError, match=rf"{op}: \w+ is written to, but shares memory with \w+; pass a copy"
            ):
                OPS[op].overload(*arguments)
            asked += 1
    assert asked


def test_a_tensor_and_itself():
    """In and out may be the same tensor, but not both written; views that interleave are apart."""
    x = torch.randn(3, 8)
    wanted = torch.ops.fastmp.bias_dropout_add(x, None, x, 0.0, None)
    torch.ops.fastmp.bias_dropout_add_into(x, None, x, 0.0, None, x)
    assert torch.equal(x, wanted)
    both, turn = torch.randn(5, 2, 16), torch.randn(5, 1, 4)
    q, k = both[..., :8], both[..., 8:]
    wanted = torch.ops.fastmp.rope(q, k, turn, turn, False, False)
    torch.ops.fastmp.rope_(q, k, turn, turn, False, False)
    assert torch.equal(q, wanted[0]) and torch.equal(k, wanted[1])
    q = q.contiguous()
    with pytest.raises(RuntimeError, match="rope_: q is written to, but shares memory with k"):
        torch.ops.fastmp.rope_(q, q, turn, turn, False, False)


@pytest.mark.skipif("permute" not in COMPILED, reason="no compiled kernels")
def test_memory_that_is_not_there_is_named():
    x, row_of = torch.zeros(1, 1).expand(1, 1 << 30), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"^permute: .*(can't allocate memory|aoti_torch_empty)"):
        torch.ops.fastmp.permute(x, row_of, 1 << 20)
