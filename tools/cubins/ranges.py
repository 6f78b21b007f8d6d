"""Interval analysis of a kernel's TTIR: 32-bit integer arithmetic that may leave the range of int32.

Triton types an integer argument as i32 whenever its value fits, and computes products and sums of i32 values
in i32. An overflow wraps silently, at sizes that no test allocates; the analysis reads text and needs no GPU.

Every integer value has an interval. Arguments lie between 0 and what their kernel declares in
`_triton.limits`; where it declares nothing they are any int32. Program ids, `tl.arange` and constants are
known. Values from memory, and values that a loop changes from one iteration to the next, are unknown, and
arithmetic on them is not reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

Interval = tuple[int, int] | None

INT32 = (-(1 << 31), (1 << 31) - 1)
_LOCATION = re.compile(r"\s*\bloc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_OPERATION = re.compile(r"(?:(%[\w#:, %]+) = )?\"?([a-z_]+\.[\w.]+)\"?(.*)$")
_VALUES = re.compile(r"%[\w#]+")
_INTEGERS = re.compile(r"(?:tensor<([\dx]+)x)?i(\d+)>?$")
# Operations that return elements of their first operand.
_MOVES = {"tt.splat", "tt.expand_dims", "tt.broadcast", "tt.reshape", "tt.trans", "tt.gather", "tt.split"}


@dataclass
class _Operation:
    """An operation: its text, the SSA values it defines and reads, and its regions."""

    text: str
    name: str
    results: list[str] = field(default_factory=list)
    operands: list[str] = field(default_factory=list)
    regions: list[list[_Operation]] = field(default_factory=list)

    def width(self) -> int:
        """Return the bits of its integer result, 0 for anything else."""
        found = _INTEGERS.search(re.split(r" : | -> ", self.text)[-1].strip())
        return int(found[2]) if found else 0


def _expand(results: str) -> list[str]:
    """Return the results `%a:2, %b` as `%a#0`, `%a#1`, `%b`."""
    found = []
    for name, count in re.findall(r"(%\w+)(?::(\d+))?", results):
        found += [f"{name}#{i}" for i in range(int(count))] if count else [name]
    return found


def _parse(lines: Iterator[str]) -> tuple[list[_Operation], str]:
    """Parse a region; return its operations and the line that closes it."""
    found: list[_Operation] = []
    for line in lines:
        text = _LOCATION.sub("", line).strip()
        if text.startswith("}"):
            return found, text
        parts = _OPERATION.match(text)
        if parts is None:
            continue
        results, name, rest = parts.groups()
        op = _Operation(text, name, _expand(results or ""), _VALUES.findall(rest))
        closing = text
        while closing.endswith("{"):  # the operation's regions: `} else {` and `} do {` open another one
            region, closing = _parse(lines)
            op.regions.append(region)
        op.text = closing if closing.startswith("})") else text  # tt.reduce has its types behind the region
        found.append(op)
    return found, ""


def _corners(function: Callable[[int, int], int], a: Interval, b: Interval) -> Interval:
    """Apply a function that is monotonic in each argument."""
    if a is None or b is None:
        return None
    values = [function(x, y) for x in a for y in b]
    return min(values), max(values)


def _union(a: Interval, b: Interval) -> Interval:
    return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))


def _quotient(x: int, y: int) -> int:
    """Return the quotient rounded towards zero, as hardware does."""
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _divided(a: Interval, b: Interval) -> Interval:
    if b is None or b[0] <= 0 <= b[1]:
        b = None if b is None or b[1] <= 0 else (1, b[1])  # a kernel divides by no zero
    return _corners(_quotient, a, b)


def _remainder(a: Interval, b: Interval) -> Interval:
    if b is None:
        return None
    most = max(map(abs, b)) - 1
    return (0 if a is not None and a[0] >= 0 else -most, most if a is None else min(most, max(a[1], 0)))


def _minimum(a: Interval, b: Interval) -> Interval:
    if a is None or b is None:
        known = a or b
        return None if known is None else (INT32[0], known[1])
    return min(a[0], b[0]), min(a[1], b[1])


def _maximum(a: Interval, b: Interval) -> Interval:
    if a is None or b is None:
        known = a or b
        return None if known is None else (known[0], INT32[1])
    return max(a[0], b[0]), max(a[1], b[1])


def _masked(a: Interval, b: Interval) -> Interval:
    """Return the range of a bitwise `and`, `or` or `xor`: non-negative operands do not gain bits."""
    if a is None or b is None or min(a[0], b[0]) < 0:
        return None
    return 0, (1 << max(a[1], b[1]).bit_length()) - 1


_ARITHMETIC: dict[str, Callable[[Interval, Interval], Interval]] = {
    "arith.addi": lambda a, b: _corners(lambda x, y: x + y, a, b),
    "arith.subi": lambda a, b: _corners(lambda x, y: x - y, a, b),
    "arith.muli": lambda a, b: _corners(lambda x, y: x * y, a, b),
    "arith.shli": lambda a, b: _corners(lambda x, y: x << min(y, 64), a, b),
}
_OTHER: dict[str, Callable[[Interval, Interval], Interval]] = {
    "arith.divsi": _divided,
    "arith.divui": _divided,
    "arith.remsi": _remainder,
    "arith.remui": _remainder,
    "arith.minsi": _minimum,
    "arith.maxsi": _maximum,
    "arith.andi": _masked,
    "arith.ori": _masked,
    "arith.xori": _masked,
    "arith.shrsi": lambda a, b: _corners(lambda x, y: x >> min(y, 64), a, b),
}


class _Kernel:
    """The intervals of a kernel's values, and what overflows."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.known: dict[str, Interval] = {}
        self.found: dict[str, None] = {}
        self.limits = limits
        self.programs = limits.get("programs", INT32[1])

    def run(self, operations: list[_Operation]) -> list[Interval]:
        """Evaluate a region in order; return the intervals that it yields."""
        yielded: list[Interval] = []
        for op in operations:
            values = [self.known.get(name) for name in op.operands]
            if op.name == "scf.yield":
                yielded = values
            elif op.regions and op.name != "tt.func":
                self._with_regions(op, values)
            elif op.results:
                variable = re.sub(r"_\d+$", "", op.results[0][1:])
                limit = self.limits.get(variable, self.limits.get(op.results[0][1:]))
                bounded = limit is not None and op.width() in (32, 64)
                result = (0, limit) if bounded else self._value(op, values)
                self.known.update(dict.fromkeys(op.results, result))
        return yielded

    def _value(self, op: _Operation, values: list[Interval]) -> Interval:
        """Return the interval of the results of an operation without regions."""
        width, name = op.width(), op.name
        if name == "arith.constant":
            found = re.search(r"arith\.constant (?:dense<)?(-?\d+|true|false)>? : ", op.text)
            number = {"true": "1", "false": "0"}.get(found[1], found[1]) if found and width else None
            return None if number is None else (int(number), int(number))
        if name in ("tt.get_program_id", "tt.get_num_programs"):
            return (0, self.programs - 1) if name == "tt.get_program_id" else (1, self.programs)
        if name == "tt.make_range":
            start, end = (int(re.search(rf"{word} = (\d+)", op.text)[1]) for word in ("start", "end"))
            return start, end - 1
        if name in _MOVES or name in ("arith.extsi", "arith.extui", "arith.trunci", "tt.join"):
            result = values[0] if len(values) < 2 or name == "tt.gather" else _union(*values[:2])
            narrow = name == "arith.trunci" and result is not None
            lost = narrow and not -(1 << width - 1) <= result[0] <= result[1] < 1 << width - 1
            lost |= name == "arith.extui" and result is not None and result[0] < 0
            return None if lost else result
        if name == "arith.select":
            return _union(values[1], values[2])
        if name == "arith.cmpi":
            return 0, 1
        if name in _OTHER:
            return _OTHER[name](*values[:2])
        if name in _ARITHMETIC:
            result = _ARITHMETIC[name](*values[:2])
            if result is not None and width == 32 and not INT32[0] <= result[0] <= result[1] <= INT32[1]:
                operands = " and ".join(map(str, values[:2]))
                self.found[f"{name} {op.results[0]}: {operands} give {result}, beyond int32"] = None
                return None
            return result
        return None

    def _with_regions(self, op: _Operation, values: list[Interval]) -> None:
        if op.name == "scf.for":
            self._loop(op)
        elif op.name == "scf.if":
            branches = [self.run(region) for region in op.regions]
            for at, result in enumerate(op.results):
                self.known[result] = _union(*(branch[at] for branch in branches))
        elif op.name in ("tt.reduce", "tt.scan"):
            combined = [each.name for each in op.regions[0]]
            kept = combined[:-1] in (["arith.maxsi"], ["arith.minsi"])
            result = values[0] if kept else self._summed(op, values[0]) if "arith.addi" in combined else None
            self.known.update(dict.fromkeys(op.results, result))
        else:  # scf.while: all that it changes is unknown
            self._forget(op)
            for region in op.regions:
                self.run(region)

    def _summed(self, op: _Operation, value: Interval) -> Interval:
        """Return the interval of a sum along an axis, unknown where it may be as large as any."""
        shape = re.search(r"tensor<([\dx]+)xi", op.text)
        if value is None or shape is None:
            return None
        terms = max(map(int, shape[1].split("x")))
        low, high = min(value[0], terms * value[0]), max(value[1], terms * value[1])
        return (low, high) if INT32[0] <= low <= high <= INT32[1] else None

    def _forget(self, op: _Operation) -> None:
        for region in op.regions:
            for each in region:
                self.known.update(dict.fromkeys(each.results))
                self._forget(each)
        self.known.update(dict.fromkeys(op.results))

    def _loop(self, op: _Operation) -> None:
        """Evaluate a loop: values it carries are unknown once an iteration widens them."""
        counter, start, end, step = re.search(
            r"(%\w+) = (%[\w#]+) to (%[\w#]+) step (%[\w#]+)", op.text
        ).groups()
        first, last, each = (self.known.get(name) for name in (start, end, step))
        self.known[counter] = None
        if first is not None and last is not None and each is not None:
            self.known[counter] = first[0], max(first[0], last[1] - 1)
            if op.text.endswith(": i32 {") and last[1] - 1 + each[1] > INT32[1]:
                self.found[f"scf.for {counter} to {last} in steps of {each}: beyond int32"] = None
        carried = re.findall(r"(%[\w#]+) = (%[\w#]+)[,)]", op.text)
        before = [self.known.get(initial) for _, initial in carried]
        found = dict(self.found)
        while True:
            self.known.update(zip((name for name, _ in carried), before, strict=True))
            after = self.run(op.regions[0])
            wider = [
                at for at, (old, new) in enumerate(zip(before, after, strict=True))
                if old is not None and _union(old, new) != old
            ]  # fmt: skip
            if not wider:
                break
            before = [None if at in wider else old for at, old in enumerate(before)]
            self.found = dict(found)
        self.known.update(zip(op.results, before, strict=True))


def overflows(ttir: str, limits: Mapping[str, int]) -> list[str]:
    """Return the i32 arithmetic of a kernel, including loop counters, that may overflow.

    Args:
        ttir: text of the kernel, as `compiled.asm["ttir"]`.
        limits: highest values, as `_triton.limits` declares them.
    """
    kernel = _Kernel(limits)
    header = next(line for line in ttir.splitlines() if "tt.func" in line)
    for name, bits in re.findall(r"%(\w+): i(\d+)", header):
        limit = 1 << int(bits) - 1
        kernel.known[f"%{name}"] = (0, limits[name]) if name in limits else (-limit, limit - 1)
    body = iter(ttir.partition(header)[2].splitlines())
    kernel.run(_parse(body)[0])
    return list(kernel.found)
