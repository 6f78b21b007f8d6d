"""Autograd formulas: parsing, errors, and equal gradients from the interpreters in Python and C++."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fastmp
from fastmp.ops import OPS, bias_gelu
from fastmp.ops.core.formulas import AutogradFormula, FormulaBranch, Source, Target, Value, ValueKind
from fastmp.ops.core.registry import Differentiable, Op
from fastmp.testing.ops import samples

BUILD = Path(fastmp.__file__).with_name("_build.json")
WITH_FORMULAS = sorted(name for name, op in OPS.items() if op.autograd_formula is not None)


def schema(text: str) -> torch._C.FunctionSchema:
    return torch._C.parse_schema(f"fastmp::{text}")


def test_a_formula_names_inputs_outputs_gradients_and_numbers():
    op = schema("scale(Tensor x, Tensor? bias, int n, bool flag) -> (Tensor y, Tensor sums)")
    formula = AutogradFormula(
        op,
        {
            "bias": "back(grad_y, grad_sums?, sums, n, -2, not flag, has(bias)) -> x, [bias _]",
            "": "grad_y -> x",
        },
    )
    arguments = (
        Value(ValueKind.GRAD, 0), Value(ValueKind.GRAD, 1, 1), Value(ValueKind.OUTPUT, 1),
        Value(ValueKind.INPUT, 2), Value(ValueKind.INTEGER, -2), Value(ValueKind.NOT, 3),
        Value(ValueKind.HAS, 1),
    )  # fmt: skip
    assert formula.branches == [
        FormulaBranch(1, "back", arguments, (Target(0, Source.RESULT, 0), Target(1, Source.RESULT, 1, 0))),
        FormulaBranch(-1, "", (), (Target(0, Source.GRAD, 0),)),
    ]
    assert formula.differentiable == [0, 1]
    (target,) = AutogradFormula(op, "back(x) -> x!").branches[0].targets
    assert target == Target(0, Source.RESULT, 0, into=True)
    into = AutogradFormula(schema("scale_into(Tensor x, Tensor(a!) out) -> ()"), "back(grad_out) -> x")
    assert into.in_place and into.branches[0].arguments == (Value(ValueKind.GRAD, 0),)
    written = AutogradFormula(op, "back_(x, grad_y, size(x, 1), dtype(x), None, True) -> ; x -> x bias")
    assert written.branches[0].targets == (Target(0, Source.ARGUMENT, 0), Target(1, Source.ARGUMENT, 0))
    assert written.branches[0].arguments[2:4] == (Value(ValueKind.SIZE, 0, 1), Value(ValueKind.DTYPE, 0))


def test_python_and_cpp_number_kinds_and_sources_alike():
    text = (Path(fastmp.__file__).parents[1] / "csrc/autograd/formulas.cpp").read_text()
    for enum in (ValueKind, Source):
        (body,) = re.findall(rf"enum class {enum.__name__} : int64_t {{(.*?)}};", text, re.DOTALL)
        numbers = {name: int(number) for name, number in re.findall(r"^ *(\w+) = (\d+),", body, re.MULTILINE)}
        assert numbers == {member.name: member.value for member in enum}


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("back(grad, z) -> x", "scale: its autograd formula names 'z'; expected one of the inputs"),
        ("back(grad, x) -> z", "scale: its autograd formula names 'z'"),
        (
            "back grad -> x",
            r"scale: expected an autograd formula 'op\(arguments\) -> inputs', got 'back grad -> x'",
        ),
        ({"z": "grad -> x"}, "scale: its autograd formula names 'z'"),
        ("back(grad, size(z, 0)) -> x", "scale: its autograd formula names 'z'"),
    ],
)
def test_a_wrong_formula_says_what_is_wrong(formula, message):
    with pytest.raises(ValueError, match=message):
        AutogradFormula(schema("scale(Tensor x) -> Tensor"), formula)


def leaves(arguments: tuple) -> tuple[list, list[Tensor]]:
    """Copies of an op's arguments, and the floating-point ones among them, which require gradients."""
    copies = [a.detach().clone() if isinstance(a, Tensor) else a for a in arguments]
    found = [c for c in copies if isinstance(c, Tensor) and c.is_floating_point()]
    return copies, [c.requires_grad_() for c in found]


def gradients(call, op: Op, arguments: tuple) -> list[Tensor | None]:
    """Gradients of all floats, for random ones of the outputs, or for those that an argument announces."""
    copies, wanted = leaves(arguments)
    if op.autograd_formula.in_place:
        copies[-1].requires_grad_(False)
        del wanted[-1]
    elif op.overload._schema.is_mutable:
        copies[0] = copies[0] * 1  # no leaf: what is overwritten becomes an output
    results = call(*copies)
    results = copies[-1] if op.autograd_formula.in_place else results
    results = results if isinstance(results, tuple) else (results,)
    results = results[: op.autograd_formula.num_outputs]
    outputs = op.autograd_formula.differentiable
    assert [i for i, result in enumerate(results) if result.requires_grad] == outputs
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(results[i].shape, generator=generator).to(results[i].dtype) for i in outputs]
    names = [argument.name for argument in op.overload._schema.arguments]
    if "loss_grad" in names:
        grads = [arguments[names.index("loss_grad")]]
    return torch.autograd.grad([results[i] for i in outputs], wanted, grads, allow_unused=True)


@pytest.mark.parametrize("name", WITH_FORMULAS)
def test_python_and_cpp_give_the_same_gradients(name):
    """Of every op with a formula, on all samples; where C++ is not built, Python's twice."""
    op = OPS[name]
    forward, backward = (
        op.autograd_formula.forward(op.overload),
        op.autograd_formula.backward(OPS, "no double"),
    )
    function = Differentiable(name, forward, op.autograd_formula.setup, backward)
    defaults = [argument.default_value for argument in op.overload._schema.arguments]
    for arguments in samples(name, device="cpu", dtype=torch.float64):
        arguments = (*arguments, *defaults[len(arguments) :])
        ours, theirs = (gradients(call, op, arguments) for call in (op, function))
        assert any(grad is not None for grad in ours)
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.full
def test_the_library_serves_the_torch_that_it_was_compiled_for():
    """With another one the same derivatives are Python's: the same bits, and the same refusals."""
    if json.loads(BUILD.read_text())["autograd"] != "built":
        pytest.skip("no _C_autograd: " + json.loads(BUILD.read_text())["autograd"])
    code = """
import torch
torch.__version__ = type(torch.__version__)("2.99.0")
from fastmp.ops import bias_dropout_add, bias_gelu, cross_entropy
from fastmp.ops.core import backends
print(backends.AUTOGRAD_ABSENT)
torch.manual_seed(0)
x, bias = torch.randn(3, 4).requires_grad_(), torch.randn(4).requires_grad_()
print(torch.stack([g.sum() for g in torch.autograd.grad(bias_gelu(x, bias).sum(), (x, bias))]).tolist())
print(torch.func.grad(lambda x: bias_gelu(x).sum())(x.detach()).sum().item())
logits = torch.randn(3, 4).requires_grad_()
loss = cross_entropy(logits * 1, torch.tensor([0, 1, 3]), reduction="none", grad_in_place=True).sum()
print(torch.autograd.grad(loss, logits, retain_graph=True)[0].abs().sum().item())
def upstream(factor=1, used=False):
    overwritten = logits * 1
    target = torch.tensor([0, 1, 3])
    loss = cross_entropy(overwritten, target, reduction="none", loss_grad=torch.ones(3)).sum()
    loss = factor * loss + (overwritten.sum() if used else 0)
    return torch.autograd.grad(loss, logits)[0].abs().sum().item()
print(upstream())
for again in (lambda: torch.autograd.grad(loss, logits), lambda: torch.autograd.grad(
        bias_gelu(x).sum(), x, create_graph=True)[0].sum().backward(), lambda: upstream(2),
        lambda: upstream(1, True),
        lambda: bias_dropout_add(x, None, x.detach(), p=0, out=torch.empty(2, 3, 4)[0])):
    try:
        again()
    except (RuntimeError, ValueError) as error:
        print(str(error)[:40])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    record = json.loads(BUILD.read_text())["torch"]
    assert lines[0] == f"_C_autograd is compiled for torch {record}, this is 2.99.0"
    torch.manual_seed(0)
    x, bias = torch.randn(3, 4).requires_grad_(), torch.randn(4).requires_grad_()
    here = torch.autograd.grad(bias_gelu(x, bias).sum(), (x, bias))
    assert json.loads(lines[1]) == [grad.sum().item() for grad in here]
    assert float(lines[2]) == torch.autograd.grad(bias_gelu(x).sum(), x)[0].sum().item()
    assert float(lines[3]) > 0
    assert float(lines[4]) == pytest.approx(float(lines[3]), rel=1e-6)
    assert lines[5].startswith("cross_entropy: its gradient lies in the")
    assert lines[6].startswith("bias_gelu: its backward is not")
    assert lines[7].startswith("cross_entropy: the loss received an up")
    assert lines[8].startswith("cross_entropy_loss_grad_: an argument is")
    assert lines[9].startswith("bias_dropout_add_into: out [3, 4] is a v")
