"""Derivatives of ops as text: the op that computes gradients, what it takes, and whose gradients it gives.

    "bias_gelu_backward(grad, x, bias, approximate) -> x, bias"

Arguments are names of the op's inputs and outputs, `grad_<output>` (`grad` and `out` where an op has one
output without a name), None, True, False, whole numbers, and

    has(x)  whether input x is not None      dtype(x)    its dtype
    not x   the opposite of a flag           size(x, d)  its size in dimension d

A gradient that is not there is zeros, or None where its name ends in "?".

A result of the call goes to the input at its place behind the arrow, to several with a space between them, or
to nobody: "_". Rows of a result go to the inputs in brackets: "[weight bias]". Beside the call, after a
semicolon, or without one, a gradient may be handed on: "grad -> residual". Autograd brings it to the dtype of
the input, and adds up dimensions in which that was broadcast. So may an argument over which the call has
written a gradient: "cross_entropy_grad_(logits, ...) -> ; logits -> logits". The derivative may depend on the
inputs: {"residual": "...", "": "..."} takes the first whose input is neither None nor False.

"x!" behind the arrow: where the node that takes the gradient of x has a place for it, the op with "_into"
behind its name writes it there. That takes the same arguments and one more, in place of that result.

An op that writes into an argument has that for a further output: a gradient which comes back through it is an
error, for the values that it belongs to are gone. Autograd keeps what has been written there. But an op that
writes its result into its one argument "out", which has no gradient before, has "grad_out".

Outputs whose gradient no formula names are not differentiable. csrc/autograd/derivatives.cpp does the same as
`Derivative.setup` and `Derivative.backward` without Python, and it alone knows of places.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Derivative", "Formula", "Value", "encode"]

KINDS = ("input", "output", "grad", "none", "integer", "boolean", "has", "not", "dtype", "size")
SOURCES = ("result", "grad", "argument")


@dataclass(frozen=True)
class Value:
    """An argument of the op that computes gradients: one of `KINDS`, with an index and a further number.

    further: the dimension of a size; 1 for a gradient that may be None.
    """

    kind: str
    index: int = 0
    further: int = 0


@dataclass(frozen=True)
class Target:
    """Where a gradient goes, to input `input`, and whence: one of `SOURCES`, the one with that index.

    A source is a result of the call, or its row `row` unless that is -1; the gradient of an output; or an
    argument of the call. placed: whether the call may write it where it is wanted.
    """

    input: int
    source: str
    index: int
    row: int = -1
    placed: bool = False


@dataclass(frozen=True)
class Formula:
    """One way to the gradients, for calls whose input `condition` is neither None nor False (-1: for all)."""

    condition: int
    op: str
    arguments: tuple[Value, ...]
    targets: tuple[Target, ...]


class _Names:
    """The names that formulas of an op may use."""

    def __init__(self, schema: Any) -> None:
        self.op = schema.name.removeprefix("fastmp::")
        self.inputs = [argument.name for argument in schema.arguments]
        self.outputs = [each.name or "out" for each in schema.returns]
        grads = [f"grad_{name}" for name in self.outputs]
        self.grads = ["grad"] if grads == ["grad_out"] else grads or ["grad_out"]

    def input(self, name: str) -> int:
        if name not in self.inputs:
            raise ValueError(f"{self.op}: its derivative names {name!r}, which is none of its inputs")
        return self.inputs.index(name)

    def value(self, text: str) -> Value:
        if call := re.fullmatch(r"(has|dtype|size)\((\w+)(?:, *(\d+))?\)", text):
            return Value(call[1], self.input(call[2]), int(call[3] or 0))
        if text.startswith("not "):
            return Value("not", self.input(text[4:]))
        if text == "None":
            return Value("none")
        if text in ("True", "False"):
            return Value("boolean", text == "True")
        if re.fullmatch(r"-?\d+", text):
            return Value("integer", int(text))
        if text.removesuffix("?") in self.grads:
            return Value("grad", self.grads.index(text.removesuffix("?")), text.endswith("?"))
        if text in self.outputs:
            return Value("output", self.outputs.index(text))
        return Value("input", self.input(text))

    def formula(self, condition: str, text: str) -> Formula:
        op = ""
        arguments: list[Value] = []
        targets: list[Target] = []
        for part in text.split(";"):
            source, _, names = (each.strip() for each in part.partition("->"))
            if source in self.grads:
                index = self.grads.index(source)
                targets += [Target(self.input(name), "grad", index) for name in names.split()]
                continue
            if op and source in self.inputs:
                index = arguments.index(Value("input", self.input(source)))
                targets += [Target(self.input(name), "argument", index) for name in names.split()]
                continue
            call = re.fullmatch(r"(\w+)\((.*)\)", source)
            if call is None or op:
                raise ValueError(f"{self.op}: its derivative must be 'op(arguments) -> inputs', got {text!r}")
            op = call[1]
            arguments = [self.value(each.strip()) for each in re.split(r",(?![^(]*\))", call[2])]
            targets += self.results(names)
        return Formula(self.input(condition) if condition else -1, op, tuple(arguments), tuple(targets))

    def results(self, names: str) -> Iterator[Target]:
        """Where the results of the call go."""
        for result, each in enumerate(names.split(",")):
            rows = each.strip().startswith("[")
            for place, name in enumerate(each.strip(" []").split()):
                if name != "_":
                    row, placed = place if rows else -1, name.endswith("!")
                    yield Target(self.input(name.removesuffix("!")), "result", result, row, placed)


class Derivative:
    """The derivative of one op: the formulas, in order, and which outputs are differentiable.

    in_place: the op returns nothing; its result is its argument "out".
    """

    def __init__(self, schema: Any, text: str | Mapping[str, str]) -> None:
        names = _Names(schema)
        given = {"": text} if isinstance(text, str) else text
        self.op, self.num_inputs, self.num_outputs = names.op, len(names.inputs), len(names.grads)
        self.in_place = not names.outputs
        self.written = {i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write}
        self.formulas = [names.formula(condition, each) for condition, each in given.items()]
        wanted = {value.index for f in self.formulas for value in f.arguments if value.kind == "grad"}
        wanted |= {t.index for f in self.formulas for t in f.targets if t.source == "grad"}
        self.differentiable = sorted(wanted)

    def forward(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The op `run`, which also returns what it has overwritten where autograd can make that an output."""
        if not self.written:
            return run
        first = slice(1 if self.in_place else 0, None)
        return lambda *inputs: (run(*inputs), *self._overwritten(inputs))[first]

    def _overwritten(self, inputs: Sequence[Any]) -> list[Tensor]:
        written = [inputs[i] for i in self.written]
        if self.in_place:
            return written
        return [t for t in written if t.requires_grad and not (t.is_leaf or t._is_view())]

    def _check_own(self, out: Tensor) -> None:
        # A write to another view of the same tensor would silently take the history of a view from it.
        if out.requires_grad or out._is_view():
            what = "requires a gradient" if out.requires_grad else "is a view; pass out.detach()"
            raise ValueError(f"{self.op}: out {list(out.shape)} {what}")

    def setup(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        """Keep what the formula takes, as `torch.autograd.Function` has it."""
        outputs = output if isinstance(output, tuple) else (output,)
        formula = next(f for f in self.formulas if f.condition < 0 or _is_there(inputs[f.condition]))
        ctx.set_materialize_grads(False)
        overwritten = self._overwritten(inputs)
        if self.in_place:
            self._check_own(*overwritten)
        ctx.mark_dirty(*overwritten)
        outputs = outputs[: self.num_outputs]
        inputs = [each.detach() if i in self.written else each for i, each in enumerate(inputs)]
        ctx.mark_non_differentiable(*(t for i, t in enumerate(outputs) if i not in self.differentiable))
        kept = [_kept(value, inputs, outputs) for value in formula.arguments]
        ctx.formula, ctx.zeros = formula, [(t.shape, t.dtype) for t in outputs]
        ctx.numbers = [None if isinstance(each, Tensor) else each for each in kept]
        ctx.save_for_backward(*(each if isinstance(each, Tensor) else None for each in kept))

    def backward(self, ops: Mapping[str, Any], refusal: str) -> Callable[..., tuple[Tensor | None, ...]]:
        """The backward of `torch.autograd.Function`, which calls one of `ops`.

        Nothing would lead from what it writes in place to a second derivative: that is an error, `refusal`.
        """

        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            formula, found = ctx.formula, [None] * self.num_inputs
            wanted = [target for target in formula.targets if ctx.needs_input_grad[target.input]]
            if all(grad is None for grad in grads):
                return tuple(found)
            if any(grad is not None for grad in grads[self.num_outputs :]):
                raise RuntimeError(f"{self.op}: an argument is overwritten, but was used again afterwards")
            arguments = [
                number if tensor is None else tensor for tensor, number in zip(ctx.saved_tensors, ctx.numbers)
            ]
            results: Any = ()
            if any(target.source != "grad" for target in wanted):
                arguments = [
                    _gradient(value, grads, ctx.zeros) if value.kind == "grad" else argument
                    for value, argument in zip(formula.arguments, arguments, strict=True)
                ]
                op = ops[formula.op]
                if op.overload._schema.is_mutable and torch.is_grad_enabled():
                    raise RuntimeError(refusal)
                results = op(*arguments)
                results = results if isinstance(results, tuple) else (results,)
            sources = {"result": results, "grad": grads, "argument": arguments}
            for target in wanted:
                grad = sources[target.source][target.index]
                grad = grad.detach() if target.source == "argument" else grad
                found[target.input] = grad if target.row < 0 else grad[target.row]
            return tuple(found)

        return backward


def _is_there(given: Any) -> bool:
    return given is not None and given is not False


def _kept(value: Value, inputs: Sequence[Any], outputs: Sequence[Tensor]) -> Any:
    given: Any = inputs[value.index] if value.kind in ("input", "has", "not", "dtype", "size") else None
    return {
        "input": lambda: given,
        "output": lambda: outputs[value.index],
        "grad": lambda: None,
        "none": lambda: None,
        "integer": lambda: value.index,
        "boolean": lambda: bool(value.index),
        "has": lambda: given is not None,
        "not": lambda: not given,
        "dtype": lambda: given.dtype,
        "size": lambda: given.shape[value.further],
    }[value.kind]()


def _gradient(value: Value, grads: Sequence[Tensor | None], outputs: Sequence[tuple]) -> Tensor | None:
    grad = grads[value.index]
    if grad is not None or value.further:
        return grad
    shape, dtype = outputs[value.index]
    there = next(grad for grad in grads if grad is not None)
    return there.new_zeros(shape, dtype=dtype)  # a DTensor like that one


def encode(derivative: Derivative) -> tuple[list[str], list[int], list[int]]:
    """(ops, differentiable outputs, numbers), as csrc/autograd/derivatives.cpp reads them."""
    numbers: list[int] = []
    for formula in derivative.formulas:
        numbers += [formula.condition, len(formula.arguments)]
        for value in formula.arguments:
            numbers += [KINDS.index(value.kind), int(value.index), int(value.further)]
        numbers.append(len(formula.targets))
        for target in formula.targets:
            numbers += [target.input, SOURCES.index(target.source), target.index, target.row, target.placed]
    ops = [formula.op and f"fastmp::{formula.op}" for formula in derivative.formulas]
    return ops, derivative.differentiable, numbers
