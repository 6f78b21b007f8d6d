"""Autograd formulas: the backward of an op as one line of text, as in torch's derivatives.yaml.

A formula names the op that computes the gradients, its arguments, and the inputs that its results belong to:

    CALL -> TARGETS; GRADIENT -> INPUTS          CALL is op(ARGUMENT, ...); either half may be left out

    ARGUMENT      x                an input of the op
                  out, y           an output: its name in the schema, "out" if it has none
                  grad, grad_y     the gradient of that output; zeros if autograd passes none
                  grad_y?          the same, but None if autograd passes none
                  None True 3      a constant
                  has(x), not x    True if input x is not None; the opposite of flag x
                  dtype(x)         the dtype of input x
                  size(x, d)       the size of input x in dimension d
    TARGETS       x, weight        result 0 is the gradient of x, result 1 that of weight
                  x residual       one result, the gradient of both inputs
                  [weight bias]    row 0 of the result is the gradient of weight, row 1 that of bias
                  _                a result that no input needs
                  x!               written directly to where the next node wants it, by the op `<op>_into`
    GRADIENT      grad -> x y      the gradient of an output is passed on to x and y unchanged
                  x -> x           the call has overwritten its argument x with the gradient of x
    {"x": F, "": G}                F if input x is neither None nor False, else G

Three examples:

    1. "bias_gelu_backward(grad, x, bias, approximate) -> x, bias"
    2. {"residual": "rms_norm_backward(grad_y, grad_total?, total, weight, stats) -> x residual, [weight]",
        "": "rms_norm_backward(grad_y, None, x, weight, stats) -> x, [weight]"}
    3. "bias_dropout_add_backward(grad, p, seed, dtype(x), has(bias)) -> x, bias; grad -> residual"

Autograd casts each gradient to the dtype of its input and sums over the dimensions in which the input was
broadcast. Outputs whose gradient no formula names are not differentiable.

In-place ops. An input that the op overwrites becomes one more output of the node. A gradient that arrives
there raises, because the values it belongs to are gone. If the gradient is an argument that CALL has
overwritten, it exists once: a second backward raises, too. An op without returns writes its result to its
argument "out", whose gradient is "grad_out".

`<op>_into` takes the arguments of `<op>` and, last, the tensor to write in place of that result.

csrc/autograd/formulas.cpp interprets the same formulas without Python; it alone implements "x!".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

__all__ = ["AutogradFormula", "FormulaBranch", "Source", "Target", "Value", "ValueKind", "encode"]


class ValueKind(IntEnum):
    """Kinds of arguments, numbered as `ValueKind` in csrc/autograd/formulas.cpp."""

    INPUT = 0
    OUTPUT = 1
    GRAD = 2
    NONE = 3
    INTEGER = 4
    BOOLEAN = 5
    HAS = 6
    NOT = 7
    DTYPE = 8
    SIZE = 9


class Source(IntEnum):
    """Origins of a gradient, numbered as `Source` in csrc/autograd/formulas.cpp."""

    RESULT = 0  # a result of the call
    GRAD = 1  # the gradient of an output, passed on
    ARGUMENT = 2  # an argument that the call has overwritten with a gradient


@dataclass(frozen=True)
class Value:
    """An argument of the backward op.

    index: of the input or output; the constant itself for INTEGER and BOOLEAN.
    extra: the dimension of a SIZE; 1 for a GRAD that may be None.
    """

    kind: ValueKind
    index: int = 0
    extra: int = 0


@dataclass(frozen=True)
class Target:
    """The gradient of input `input`: entry `index` of its source, or row `row` of that if `row` is not -1.

    into: the "_into" form of the op may write the gradient to the next node's buffer.
    """

    input: int
    source: Source
    index: int
    row: int = -1
    into: bool = False


@dataclass(frozen=True)
class FormulaBranch:
    """A backward for calls whose input `condition` is neither None nor False; -1: for all calls.

    op: the backward op; "" where gradients are only passed on.
    """

    condition: int
    op: str
    arguments: tuple[Value, ...]
    targets: tuple[Target, ...]


class _Parser:
    """Parse formulas of one op, whose schema defines the names they may use."""

    def __init__(self, schema: Any) -> None:
        self.op = schema.name.removeprefix("fastmp::")
        self.inputs = [argument.name for argument in schema.arguments]
        self.outputs = [each.name or "out" for each in schema.returns]
        grads = [f"grad_{name}" for name in self.outputs]
        self.grads = ["grad"] if grads == ["grad_out"] else grads or ["grad_out"]

    def input(self, name: str) -> int:
        if name not in self.inputs:
            raise ValueError(
                f"{self.op}: its autograd formula names {name!r}; expected one of the inputs {self.inputs}"
            )
        return self.inputs.index(name)

    def value(self, text: str) -> Value:
        if call := re.fullmatch(r"(has|dtype|size)\((\w+)(?:, *(\d+))?\)", text):
            return Value(ValueKind[call[1].upper()], self.input(call[2]), int(call[3] or 0))
        if text.startswith("not "):
            return Value(ValueKind.NOT, self.input(text[4:]))
        if text == "None":
            return Value(ValueKind.NONE)
        if text in ("True", "False"):
            return Value(ValueKind.BOOLEAN, int(text == "True"))
        if re.fullmatch(r"-?\d+", text):
            return Value(ValueKind.INTEGER, int(text))
        if (grad := text.removesuffix("?")) in self.grads:
            return Value(ValueKind.GRAD, self.grads.index(grad), int(text.endswith("?")))
        if text in self.outputs:
            return Value(ValueKind.OUTPUT, self.outputs.index(text))
        return Value(ValueKind.INPUT, self.input(text))

    def branch(self, condition: str, text: str) -> FormulaBranch:
        op = ""
        arguments: list[Value] = []
        targets: list[Target] = []
        for half in text.split(";"):
            source, _, names = (each.strip() for each in half.partition("->"))
            if source in self.grads:
                index = self.grads.index(source)
                targets += [Target(self.input(name), Source.GRAD, index) for name in names.split()]
                continue
            if op and source in self.inputs:
                index = arguments.index(Value(ValueKind.INPUT, self.input(source)))
                targets += [Target(self.input(name), Source.ARGUMENT, index) for name in names.split()]
                continue
            call = re.fullmatch(r"(\w+)\((.*)\)", source)
            if call is None or op:
                raise ValueError(
                    f"{self.op}: expected an autograd formula 'op(arguments) -> inputs', got {text!r}"
                )
            op = call[1]
            arguments = [self.value(each.strip()) for each in re.split(r",(?![^(]*\))", call[2])]
            targets += self.results(names)
        return FormulaBranch(self.input(condition) if condition else -1, op, tuple(arguments), tuple(targets))

    def results(self, names: str) -> Iterator[Target]:
        """Yield the targets of the call's results."""
        for result, each in enumerate(names.split(",")):
            rows = each.strip().startswith("[")
            for row, name in enumerate(each.strip(" []").split()):
                if name != "_":
                    input_ = self.input(name.removesuffix("!"))
                    yield Target(input_, Source.RESULT, result, row if rows else -1, name.endswith("!"))


class AutogradFormula:
    """The parsed formula of one op, and its interpreter for `torch.autograd.Function`.

    branches: in order; the first whose condition holds is used.
    differentiable: indices of the outputs that have a gradient.
    in_place: the op returns nothing; its result is its argument "out".

    Example:

        schema = torch._C.parse_schema("fastmp::scale(Tensor x, Tensor w) -> Tensor")
        formula = AutogradFormula(schema, "scale_backward(grad, x) -> x, w")
        assert formula.branches[0].op == "scale_backward" and formula.differentiable == [0]
    """

    def __init__(self, schema: Any, text: str | Mapping[str, str]) -> None:
        parser = _Parser(schema)
        branches = {"": text} if isinstance(text, str) else text
        self.op, self.num_inputs, self.num_outputs = parser.op, len(parser.inputs), len(parser.grads)
        self.in_place = not parser.outputs
        self.written = {i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write}
        self.branches = [parser.branch(condition, each) for condition, each in branches.items()]
        grads = {v.index for b in self.branches for v in b.arguments if v.kind == ValueKind.GRAD}
        grads |= {t.index for b in self.branches for t in b.targets if t.source == Source.GRAD}
        self.differentiable = sorted(grads)

    def forward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `run` so that tensors mutated in place are returned as outputs, as autograd requires."""
        if not self.written:
            return run
        first = slice(1 if self.in_place else 0, None)
        return lambda *inputs: (run(*inputs), *self._overwritten(inputs))[first]

    def _overwritten(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the overwritten inputs that can become outputs: neither leaves nor views."""
        written = [inputs[i] for i in self.written]
        if self.in_place:
            return written
        return [t for t in written if t.requires_grad and not (t.is_leaf or t._is_view())]

    def _check_out(self, out: Tensor) -> None:
        # A write to another view of the same tensor would silently replace the history of a view.
        if out.requires_grad or out._is_view():
            problem = "requires a gradient" if out.requires_grad else "is a view; pass out.detach()"
            raise ValueError(f"{self.op}: out {list(out.shape)} {problem}")

    def setup(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        """Save the arguments of the backward op: `setup_context` of `torch.autograd.Function`."""
        # 1. Choose the branch.
        outputs = output if isinstance(output, tuple) else (output,)
        branch = next(b for b in self.branches if b.condition < 0 or _is_set(inputs[b.condition]))
        ctx.set_materialize_grads(False)
        ctx.spent = False
        # 2. Mark overwritten inputs, and outputs without a gradient.
        overwritten = self._overwritten(inputs)
        if self.in_place:
            self._check_out(*overwritten)
        ctx.mark_dirty(*overwritten)
        outputs = outputs[: self.num_outputs]
        inputs = [each.detach() if i in self.written else each for i, each in enumerate(inputs)]
        ctx.mark_non_differentiable(*(t for i, t in enumerate(outputs) if i not in self.differentiable))
        # 3. Save tensors through autograd, which checks their versions, and the rest as they are.
        saved = [_saved(value, inputs, outputs) for value in branch.arguments]
        ctx.branch, ctx.zeros = branch, [(t.shape, t.dtype) for t in outputs]
        ctx.constants = [None if isinstance(each, Tensor) else each for each in saved]
        ctx.save_for_backward(*(each if isinstance(each, Tensor) else None for each in saved))

    def backward(self, ops: Mapping[str, Any], no_double: str) -> Callable[..., tuple[Tensor | None, ...]]:
        """Return the `backward` of `torch.autograd.Function`, which calls one of `ops`.

        no_double: message of the RuntimeError raised under create_graph=True where the backward op writes in
        place, for it has no second derivative.
        """

        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            branch, found = ctx.branch, [None] * self.num_inputs
            targets = [target for target in branch.targets if ctx.needs_input_grad[target.input]]
            # 1. Without any gradient there is nothing to do; raise for a second backward after the first has
            # handed out the memory of an argument, and for a gradient of an overwritten input.
            if all(grad is None for grad in grads):
                return tuple(found)
            if ctx.spent:
                raise RuntimeError(
                    f"{self.op}: its gradient lies in the memory of an argument and was handed out once: "
                    "there is no second backward; to run two, leave out grad_in_place or loss_grad"
                )
            if any(grad is not None for grad in grads[self.num_outputs :]):
                raise RuntimeError(f"{self.op}: an argument is overwritten, but was used again afterwards")
            arguments = [
                constant if tensor is None else tensor
                for tensor, constant in zip(ctx.saved_tensors, ctx.constants)
            ]
            # 2. Call the backward op, unless all gradients are passed on.
            results: Any = ()
            if any(target.source != Source.GRAD for target in targets):
                arguments = [
                    _gradient(value, grads, ctx.zeros) if value.kind == ValueKind.GRAD else argument
                    for value, argument in zip(branch.arguments, arguments, strict=True)
                ]
                op = ops[branch.op]
                if op.overload._schema.is_mutable and torch.is_grad_enabled():
                    raise RuntimeError(no_double)
                results = op(*arguments)
                results = results if isinstance(results, tuple) else (results,)
                ctx.spent = any(target.source == Source.ARGUMENT for target in branch.targets)
            # 3. Distribute results, gradients and overwritten arguments over the inputs.
            sources = {Source.RESULT: results, Source.GRAD: grads, Source.ARGUMENT: arguments}
            for target in targets:
                grad = sources[target.source][target.index]
                grad = grad.detach() if target.source == Source.ARGUMENT else grad
                found[target.input] = grad if target.row < 0 else grad[target.row]
            return tuple(found)

        return backward


def _is_set(condition: Any) -> bool:
    return condition is not None and condition is not False


def _saved(value: Value, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Any:
    """Return the argument that `value` describes, or None for a gradient, known only in the backward."""
    match value.kind:
        case ValueKind.INPUT:
            return inputs[value.index]
        case ValueKind.OUTPUT:
            return outputs[value.index]
        case ValueKind.INTEGER:
            return value.index
        case ValueKind.BOOLEAN:
            return bool(value.index)
        case ValueKind.HAS:
            return inputs[value.index] is not None
        case ValueKind.NOT:
            return not inputs[value.index]
        case ValueKind.DTYPE:
            return inputs[value.index].dtype
        case ValueKind.SIZE:
            return inputs[value.index].shape[value.extra]
    return None


def _gradient(value: Value, grads: Sequence[Tensor | None], outputs: Sequence[tuple]) -> Tensor | None:
    """Return the gradient that `value` names: zeros if there is none, or None if it may be None."""
    grad = grads[value.index]
    if grad is not None or value.extra:
        return grad
    shape, dtype = outputs[value.index]
    other = next(grad for grad in grads if grad is not None)
    return other.new_zeros(shape, dtype=dtype)  # a DTensor if the other gradient is one


def encode(formula: AutogradFormula) -> tuple[list[str], list[int], list[int]]:
    """Return (ops, differentiable outputs, code) as `read_branch` in csrc/autograd/formulas.cpp decodes them.

    code: for each branch its condition, the number of arguments with (kind, index, extra) of each, and the
    number of targets with (input, source, index, row, into) of each.
    """
    code: list[int] = []
    for branch in formula.branches:
        code += [branch.condition, len(branch.arguments)]
        for value in branch.arguments:
            code += [int(value.kind), value.index, value.extra]
        code.append(len(branch.targets))
        for target in branch.targets:
            code += [target.input, int(target.source), target.index, target.row, int(target.into)]
    ops = [branch.op and f"fastmp::{branch.op}" for branch in formula.branches]
    return ops, formula.differentiable, code
