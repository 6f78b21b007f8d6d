"""Raw calls of torch.ops.fastmp.*, which the checks of fastmp/ops do not protect.

What does not fit is refused by an error that names the op, before anything outside a tensor is touched.
`make sanitize` repeats this file where every such access shows.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from every_op_tools import op_backends
from torch import Tensor

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
    for place, _, sample in tensors_of(op):
        with pytest.raises(
            RuntimeError, match=f"{op}: all tensors must be on the CPU, but argument {place} is not"
        ):
            OPS[op].overload.redispatch(cpu, *replaced(sample, place, sample[place].to("meta")))


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
    for place, _, sample in tensors_of(op):
        if place in WRITTEN[op] and sample[place].numel() > 1:
            given = sample[place].new_ones(1)
            expanded = given.reshape((1,) * sample[place].dim()).expand(sample[place].shape)
            with pytest.raises(
                RuntimeError, match=f"{op}: argument {place} is written to, but several of its"
            ):
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
                RuntimeError, match=f"{op}: argument .* is written to, but shares memory with arg"
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
    with pytest.raises(
        RuntimeError, match="rope_: argument 0 is written to, but shares memory with argument 1"
    ):
        torch.ops.fastmp.rope_(q, q, turn, turn, False, False)


@pytest.mark.skipif("permute" not in COMPILED, reason="no compiled kernels")
def test_memory_that_is_not_there_is_named():
    x, row_of = torch.zeros(1, 1).expand(1, 1 << 30), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"^permute: .*(can't allocate memory|aoti_torch_empty)"):
        torch.ops.fastmp.permute(x, row_of, 1 << 20)
