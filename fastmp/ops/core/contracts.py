"""Requirements of an op on its arguments, checked by every implementation.

`ArgumentCheck` follows from the schema alone: no None for a tensor, memory for all elements, finite numbers.
C++ kernels make the same checks in csrc/op.h.

`Contract` is declared with the op: clauses in order, separated by semicolons.

    x (..., N) floating          a tensor: sizes and dtype. The first use of a name defines it
    bias (N) x|wide(x)           sizes named before must agree; the dtype of x, or the one x is computed in
    state (3T+8) int64           so many entries; T is what is left
    step (#1) int64              a tensor of so many elements, in any shape; (?): any shape
    s (M, *) any                 M is the product of "..."; any size; any dtype
    k (k..., N) x                leading sizes of their own, named k...
    cos (~k..., R) x             leading sizes 1 or those of k..., perhaps fewer
    mask (~) bool                broadcastable to the first tensor, which has `dims` dimensions
    s (M, K/block) any           a size in whole blocks
    state contiguous             no gaps between elements
    B of s                       B is the block of the scales s, from their dtype
    0 <= rank < R                a comparison of arguments and sizes, in Python's syntax
    form in silu gelu            a string, an integer, or a dtype among `floating` or `fp8`
    gated ? w (L, 2N, K) x       a clause that holds if the argument `gated` is neither None nor False
    no up ? x (..., 2N) any      the opposite

A clause of an argument that is None holds, and so does a comparison with it.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from fastmp.ops.core import backends

__all__ = [
    "DTYPES",
    "LARGEST",
    "ArgumentCheck",
    "Contract",
    "check_finite",
    "check_memory",
    "check_number",
    "has_memory",
    "memoized",
]

DTYPES = {
    "floating": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "fp8": (torch.float8_e4m3fn, torch.float8_e5m2),
}
# columns that share a scale of each dtype
BLOCKS = {torch.float32: 128, torch.float8_e8m0fnu: 32}
LARGEST = torch.finfo(torch.float32).max  # a number that is finite in any arithmetic of kernels
_FIRST, _DIMS = "(first)", "(dims)"  # shape of the first tensor, its length; no argument has such a name
_Result = TypeVar("_Result")
_UNKNOWN: Any = object()  # what a memoized check returns for arguments that it has not seen
_MAX_PASSED = 4096  # calls a check remembers; sizes that never repeat would fill memory
_Clause: TypeAlias = Callable[[tuple, dict[str, Any]], None]  # checks arguments; knows the sizes of names


def check_finite(op: str, dtype: torch.dtype, **numbers: float | None) -> None:
    """Check that numbers are finite in the arithmetic dtype of `dtype` (float64, or else float32).

    None is skipped.
    """
    for name, value in numbers.items():
        if value is None or -LARGEST <= value <= LARGEST:
            continue
        wide = dtype == torch.float64
        if not (wide and math.isfinite(value)):
            arithmetic = "float64" if wide else "float32"
            raise ValueError(f"{op}: expected {name} to be finite in {arithmetic}, got {value}")


def has_memory(tensor: Tensor) -> bool:
    """Return True if the storage holds all elements: not if it was freed or shrunk, as FSDP does."""
    if tensor.numel() == 0:
        return True
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (tensor.storage_offset() + last + 1) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def check_number(op: str, integer: bool = False, **numbers: Any) -> None:
    """Check that options are numbers, or integers: not None, nor a string."""
    kinds = (int, torch.SymInt) if integer else (int, float, torch.SymInt, torch.SymFloat)
    for name, value in numbers.items():  # others, such as those of NumPy, convert
        if not (isinstance(value, kinds) or hasattr(value, "__index__" if integer else "__float__")):
            expected = "an integer" if integer else "a number"
            raise ValueError(f"{op}: expected {name} to be {expected}, got {value!r}")


def check_memory(op: str, **tensors: Tensor | None) -> None:
    """Check that tensors have memory for their elements; None is skipped."""
    for name, tensor in tensors.items():
        if tensor is not None and not has_memory(tensor):
            raise ValueError(
                f"{op}: expected memory for all elements of {name} {tuple(tensor.shape)}, got a storage of "
                f"{tensor.untyped_storage().nbytes()} bytes, freed or shrunk after the tensor was made "
                "(FSDP frees parameters outside of their forward)"
            )


def memoized(check: Callable[..., _Result]) -> Callable[..., _Result]:
    """Memoize a check and its result: arguments that have passed cost a single lookup.

    The check may read shapes, dtypes and devices of tensors, nothing else. Under a compiler, and for
    subclasses of Tensor, it always runs.

    Example:

        from fastmp.ops.core.checks import check_shape

        @memoized
        def check(x: Tensor, weight: Tensor) -> None:
            check_shape("scale", x.shape[-1:], to=("x", x), weight=weight)

        check(torch.ones(2, 3), torch.ones(3))
    """
    passed: dict[tuple, _Result] = {}

    @functools.wraps(check)
    def checked(*arguments: Any) -> _Result:
        key = None if torch.compiler.is_compiling() else backends.signature(*arguments)
        if key is None:
            return check(*arguments)
        try:
            result = passed.get(key, _UNKNOWN)
        except TypeError:  # not hashable, say a list for a number: let the check report it
            return check(*arguments)
        if result is _UNKNOWN:
            result = check(*arguments)
            if len(passed) >= _MAX_PASSED:
                passed.clear()
            passed[key] = result
        return result

    return checked


class ArgumentCheck:
    """The checks that follow from a schema. Raises ValueError that names the op and the argument.

    numbers: positions of floating-point arguments.
    """

    def __init__(self, schema: Any) -> None:
        arguments = list(enumerate(schema.arguments))
        self.op, self.names = schema.name.removeprefix("fastmp::"), [a.name for _, a in arguments]
        self.defaults = tuple(a.default_value for _, a in arguments)
        self.tensors = [i for i, a in arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]
        self.required = [i for i, a in arguments if str(a.type) == "Tensor"]
        self.numbers = [i for i, a in arguments if str(a.type) in ("float", "Optional[float]")]

    def completed(self, arguments: tuple) -> tuple:
        """Return the arguments with defaults, which the dispatcher leaves out."""
        return (*arguments, *self.defaults[len(arguments) :])

    def types(self, arguments: tuple) -> None:
        """Check that no required tensor is None."""
        for i in self.required:
            if arguments[i] is None:
                raise ValueError(f"{self.op}: expected {self.names[i]} to be a tensor, got None")

    def finite(self, arguments: tuple) -> None:
        """Check that numbers are finite in the arithmetic dtype: float64 for a float64 tensor, or float32."""
        for i in self.numbers:
            value = arguments[i]
            if isinstance(value, float) and not -LARGEST <= value <= LARGEST:
                given = [arguments[place] for place in self.tensors]
                wide = any(t is not None and t.dtype == torch.float64 for t in given)
                check_finite(self.op, torch.float64 if wide else torch.float32, **{self.names[i]: value})

    def memory(self, arguments: tuple) -> None:
        """Check that tensors have memory for their elements."""
        check_memory(self.op, **{self.names[i]: arguments[i] for i in self.tensors})

    def __call__(self, arguments: tuple) -> None:
        arguments = self.completed(arguments)
        self.types(arguments)
        self.finite(arguments)
        self.memory(arguments)


class Contract:
    """The clauses of one op. Calling it with the op's arguments raises ValueError for the first that fails.

    Example:

        schema = torch._C.parse_schema("fastmp::scale(Tensor x, Tensor w) -> Tensor")
        contract = Contract(schema, "x (..., N) floating; w (N) x")
        contract((torch.ones(2, 3), torch.ones(3)))
    """

    def __init__(self, schema: Any, text: str) -> None:
        self.op = schema.name.removeprefix("fastmp::")
        self.places = {argument.name: i for i, argument in enumerate(schema.arguments)}
        clauses = [each.strip() for each in text.split(";")]
        gapless = [each.removesuffix(" contiguous") for each in clauses if each.endswith(" contiguous")]
        self.gapless = {name: self._place(name) for name in gapless}
        self.clauses = [self._clause(each) for each in clauses if not each.endswith(" contiguous")]
        self.check = memoized(self._check)

    def __call__(self, arguments: tuple) -> None:
        self.check(*arguments)
        for name, place in self.gapless.items():  # strides are not part of the key of a memoized check
            if not arguments[place].is_contiguous():
                given = tuple(arguments[place].shape), arguments[place].stride()
                raise ValueError(
                    f"{self.op}: expected contiguous {name}, got {given[0]} with strides {given[1]}"
                )

    def _check(self, *arguments: Any) -> None:
        known = {
            n: v for n, v in zip(self.places, arguments) if not isinstance(v, (Tensor, torch.dtype, str))
        }
        for clause in self.clauses:
            clause(arguments, known)

    def _clause(self, text: str) -> _Clause:
        """Parse one clause."""
        if condition := re.fullmatch(r"(no )?(\w+) \? (.+)", text):
            place, wanted, clause = self._place(condition[2]), not condition[1], self._clause(condition[3])

            def check(arguments: tuple, known: dict) -> None:
                given = arguments[place]
                if (given is not None and given is not False) == wanted:
                    clause(arguments, known)

            return check
        if tensor := re.fullmatch(r"(\w+) \((.*)\) (\S+)", text):
            return self._tensor(self._place(tensor[1]), *tensor.groups())
        if choice := re.fullmatch(r"(\w+) in (.+)", text):
            return self._choice(self._place(choice[1]), *choice.groups())
        if blocks := re.fullmatch(r"([A-Z]) of (\w+)", text):
            return self._block(self._place(blocks[2]), *blocks.groups())
        return self._comparison(text)

    def _place(self, name: str) -> int:
        if name not in self.places:
            raise ValueError(f"{self.op}: its contract names {name!r}; expected one of {list(self.places)}")
        return self.places[name]

    def _tensor(self, place: int, name: str, sizes: str, dtypes: str) -> _Clause:
        dims, names = sizes.split(", ") if sizes else [], dtypes.split("|")

        def check(arguments: tuple, known: dict) -> None:
            tensor = arguments[place]
            if tensor is None:
                return
            if not (_fits(tensor, dims, known) and self._has_dtype(tensor.dtype, names, arguments)):
                given = ", ".join(f"{key} = {known[key]}" for key in known if key.isupper())
                raise ValueError(
                    f"{self.op}: expected {name} ({sizes}) {dtypes}, got {tuple(tensor.shape)} {tensor.dtype}"
                    + (f" for {given}" if given else "")
                )

        return check

    def _has_dtype(self, dtype: torch.dtype, names: list[str], arguments: tuple) -> bool:
        for name in names:
            like = name.removeprefix("wide(").removesuffix(")")
            if like in self.places:
                other = arguments[self.places[like]]
                if other is None:
                    return True
                same = other if isinstance(other, torch.dtype) else other.dtype
                if like != name:
                    same = torch.float64 if same == torch.float64 else torch.float32
                if dtype == same:
                    return True
            elif name == "any" or dtype in DTYPES.get(name, (getattr(torch, name, None),)):
                return True
        return False

    def _choice(self, place: int, name: str, options: str) -> _Clause:
        values: tuple = tuple(int(each) if each.isdigit() else each for each in options.split())
        values = DTYPES.get(options, values)

        def check(arguments: tuple, known: dict) -> None:
            if arguments[place] not in values:
                raise ValueError(
                    f"{self.op}: expected {name} to be one of {values}, got {arguments[place]!r}"
                )

        return check

    def _block(self, place: int, size: str, name: str) -> _Clause:
        def check(arguments: tuple, known: dict) -> None:
            if arguments[place] is None:
                return
            dtype = arguments[place].dtype
            if dtype not in BLOCKS:
                raise ValueError(f"{self.op}: expected {name} to be one of {tuple(BLOCKS)}, got {dtype}")
            known[size] = BLOCKS[dtype]

        return check

    def _comparison(self, text: str) -> _Clause:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.Compare):
            raise ValueError(f"{self.op}: expected a clause of a contract, got {text!r}")
        names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        keys = {name: _DIMS if name == "dims" and name not in self.places else name for name in names}
        sides = [tree.left, *tree.comparators]
        pairs = [
            compile(ast.unparse(ast.Compare(left, [sign], [right])), text, "eval")
            for left, sign, right in zip(sides, tree.ops, sides[1:], strict=False)
        ]  # one by one: a chain would ask for the truth of a symbolic comparison

        def check(arguments: tuple, known: dict) -> None:
            values = {name: known.get(key) for name, key in keys.items()}
            if None in values.values():
                return
            for pair in pairs:
                if _is_false(eval(pair, {"__builtins__": {}}, values)):
                    got = ", ".join(f"{name} = {value}" for name, value in values.items())
                    raise ValueError(f"{self.op}: expected {text}, got {got}")

        return check


def _fits(tensor: Tensor, dims: list[str], known: dict) -> bool:
    """Return True if a tensor has the sizes of a clause; names that are new get their values."""
    shape = tuple(tensor.shape)
    if dims == ["?"]:
        return True
    if dims and dims[0][0] == "#":
        return _unified(dims[0][1:], math.prod(shape), known)
    if dims == ["~"]:
        first = known[_FIRST]
        pairs = zip(reversed(shape), reversed(first), strict=False)
        return len(shape) <= len(first) and not any(_is_false(a == b) and a != 1 for a, b in pairs)
    if known.setdefault(_FIRST, shape) is shape:
        known[_DIMS] = len(shape)
    at = next((i for i, dim in enumerate(dims) if dim.endswith("...")), None)
    if at is not None:
        group, end = dims[at], len(shape) - (len(dims) - at - 1)
        if end < at:
            return False
        lead, shape = shape[at:end], shape[:at] + shape[end:]
        dims = [*dims[:at], *dims[at + 1 :]]
        if group[0] == "~":
            expected = known.get(group[1:], lead)
            pairs = zip(lead, expected, strict=False)
            if len(lead) > len(expected) or any(_is_false(a == b) and a != 1 for a, b in pairs):
                return False
        else:
            expected = known.setdefault(group, lead)
            if group == "...":
                known.setdefault("M", math.prod(lead))
            if len(lead) != len(expected) or any(_is_false(a == b) for a, b in zip(lead, expected)):
                return False
    return len(shape) == len(dims) and all(
        _unified(dim, size, known) for dim, size in zip(dims, shape, strict=True)
    )


def _unified(dim: str, size: Any, known: dict) -> bool:
    """Return True if a size matches a clause, which binds new names."""
    if dim == "*":
        return True
    parts = re.fullmatch(r"(\d*)([A-Z]?)(?:\+(\d+))?(?:/(\w+))?", dim)
    assert parts is not None, f"expected a size such as 2N+1 or K/block, got {dim!r}"
    factor, name, more = int(parts[1] or 1), parts[2], int(parts[3] or 0)
    blocks = known[parts[4]] if parts[4] else 1
    if not name or name in known:
        value = factor * known[name] + more if name else factor
        return not _is_false(size * blocks == value)
    if factor + more > 1 and (_is_false(size >= more) or _is_false((size - more) % factor == 0)):
        return False
    known[name] = (size - more) // factor
    return True


def _is_false(condition: Any) -> bool:
    """Return True if a condition is false for all values of its symbolic sizes."""
    if isinstance(condition, bool):
        return not condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(torch.sym_not(condition))
