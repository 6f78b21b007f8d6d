"""Places for sums of rows and for gradients of probabilities that lie where another argument does."""

from __future__ import annotations

import pytest
import torch
from every_op_tools import implementation, op_backends

from fastmp.ops import OPS, unpermute

TOKENS = 1100  # for several programs
ROW_OF = torch.stack((torch.arange(TOKENS).flip(0), torch.full((TOKENS,), -1)), 1).int()
OPS_INTO = ("unpermute_into", "unpermute_add_into", "unpermute_backward_into")


def cases(backend):
    return [case for case in op_backends((backend,)) if case.values[0] in OPS_INTO]


def check(op, backend):
    """Check `out` as that argument itself, and between the rows of an argument with gaps."""
    names = [argument.name for argument in OPS[op].overload._schema.arguments]
    shapes = {name: (TOKENS, 2 if name == "probs" else 4) for name in names}
    shapes["out"] = shapes["probs" if "grad" in names else "y"]
    count = 0
    for shared in sorted({*names} - {"row_of", "out"}):
        for is_it in (True, False):
            if is_it and shapes[shared] != shapes["out"]:
                continue
            given = {name: torch.randn(shape) for name, shape in shapes.items()} | {"row_of": ROW_OF}
            memory, shape = torch.randn(8 * TOKENS + 8), shapes["out"]
            given["out"] = memory[8 : 8 + shape[0] * shape[1]].view(shape)
            given[shared] = given["out"] if is_it else memory.as_strided(shapes[shared], (8, 1))
            apart = {name: tensor.clone() for name, tensor in given.items()}
            expected = OPS[op].implementations["reference"](*(apart[name] for name in names))
            made = implementation(op, backend)(*(given[name] for name in names))
            torch.testing.assert_close((made, given["out"]), (expected, apart["out"]))
            count += 1
    assert count == {"unpermute_into": 3, "unpermute_add_into": 5, "unpermute_backward_into": 4}[op]


@pytest.mark.parametrize(("op", "backend"), cases("c++"))
def test_all_is_read_before_it_is_written(op, backend):
    check(op, backend)


@pytest.mark.interpret
@pytest.mark.parametrize(("op", "backend"), cases("triton"))
def test_all_is_read_before_a_triton_kernel_writes(op, backend):
    check(op, backend)


def test_the_memory_of_another_argument_is_refused():
    memory, residual, row_of = torch.randn(24), torch.randn(3, 4), ROW_OF[-3:]
    y, probs = memory[:12].view(3, 4), memory[12:18].view(3, 2)
    for start, name in ((0, "y"), (8, "y"), (12, "probs")):
        out = memory[start : start + 12].view(3, 4)
        with pytest.raises(ValueError, match=rf"^unpermute: out \(3, 4\) shares memory with {name} \(3"):
            unpermute(y, row_of, probs, residual=residual, out=out)
    expected = unpermute(y, row_of, probs, residual=residual)
    assert torch.equal(unpermute(y, row_of, probs, residual=residual, out=residual), expected)


def test_a_transform_has_no_memory_to_look_at():
    """Its tensors have none that can be asked for."""
    y, residual = torch.randn(3, 4), torch.randn(3, 4)

    def total(y):
        return unpermute(y, ROW_OF[-3:], residual=residual, out=torch.empty_like(y)).sum()

    assert torch.equal(torch.func.grad(total)(y), torch.ones(3, 4))
