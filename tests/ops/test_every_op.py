"""Every op, whoever serves it, writes what its schema says, and the same bits on any number of threads."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from every_op_tools import implementation, op_backends
from kernel_tools import bits, threads_agree
from marks import full
from torch import Tensor

from fastmp.ops import OPS
from fastmp.testing.functions import Draw, evaluate, functions
from fastmp.testing.ops import run, samples

FUNCTIONS = functions()
# torch's product sums in an order that depends on the threads
WITH_MATMUL = {
    *(
        "grouped_mlp_in",
        "grouped_mm",
        "grouped_mm_bias",
        "grouped_mm_lora",
        "linear_fp8",
        "grouped_mm_fp8",
        "grouped_mlp_in_fp8",
    ),
    *("linear_cross_entropy", "linear_log_probs", "linear_distillation", "linear_topk_distillation"),
}
ON_CPU = pytest.mark.parametrize(("op", "backend"), op_backends(("c++", "reference")))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, *full([torch.bfloat16])], ids=str)


@DTYPES
@ON_CPU
def test_arguments_are_read_only(op, backend, dtype):
    """Also what lies between the rows of an argument that the op does overwrite."""
    schema = OPS[op].overload._schema.arguments
    for arguments in samples(op, device="cpu", dtype=dtype):
        before = copy.deepcopy(arguments)
        implementation(op, backend)(*arguments)
        for now, then, argument in zip(arguments, before, schema, strict=True):
            if not isinstance(now, Tensor):
                continue
            if argument.alias_info is None or not argument.alias_info.is_write:
                assert torch.equal(bits(now), bits(then)), argument.name
            whole, was = (torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()) for t in (now, then))
            if whole.numel() > now.numel() > 0:
                for storage, tensor in ((whole, now), (was, then)):
                    storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).zero_()
                assert torch.equal(bits(whole), bits(was)), f"{argument.name}, between rows"


@DTYPES
@ON_CPU
def test_results_do_not_depend_on_the_number_of_threads(op, backend, dtype):
    if backend == "reference" and op in WITH_MATMUL:
        pytest.skip("torch's product sums in an order that depends on the threads")
    for arguments in samples(op, device="cpu", dtype=dtype):
        assert threads_agree(lambda: run(op, implementation(op, backend), arguments))  # noqa: B023


@DTYPES
@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - WITH_MATMUL))
def test_functions_do_not_depend_on_the_number_of_threads(name, dtype):
    """Outputs and gradients of 100,000 elements, which several threads share."""
    positional, keywords = FUNCTIONS[name].draw(Draw(random.Random(6), dtype, large=True))
    assert threads_agree(lambda: evaluate(FUNCTIONS[name].call, positional, keywords))
