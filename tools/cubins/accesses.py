"""Memory that several threads of a compiled kernel access, and the barriers between their accesses.

Triton distributes each tile over threads by a layout that it chooses. Where a kernel overwrites what it has
read, or reads what it has written, nothing orders different threads of a program but a barrier. So either
both accesses have one layout, in which each element belongs to one thread, or a barrier is between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

# What waits for all threads of a program: a barrier, and a reduction of a whole tile to one number.
_ORDERS = re.compile(r"^\s*(?:ttg|gpu)\.barrier|^\s*\}\) : \(tensor<[^)]*\) -> [fi]\d+")
_POINTERS = re.compile(r": (?:tensor<([\dx]+)x!tt\.ptr<\w+>, (#\w+|#ttg\..*)>|!tt\.ptr<\w+>)(?: loc\(.*\))?$")


@dataclass(frozen=True)
class Access:
    """A load or a store. shape and layout are empty for a single number, which any thread may read."""

    line: int
    op: str
    argument: str
    shape: tuple[int, ...]
    layout: str

    def owned(self) -> bool:
        """Return whether each element of the tile belongs to exactly one thread."""
        names = ("sizePerThread", "threadsPerWarp", "warpsPerCTA")
        sizes = [re.search(rf"{name} = \[([\d, ]+)\]", self.layout) for name in names]
        if not self.shape or None in sizes:
            return False
        per_dim = zip(*([int(n) for n in found[1].split(",")] for found in sizes), strict=True)
        return all(n >= a * b * c for n, (a, b, c) in zip(self.shape, per_dim, strict=True))


def accesses(ttgir: str) -> list[Access]:
    """Return the loads and stores of a kernel through pointers, and the argument of each pointer."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    source: dict[str, str] = {}
    found = []
    for number, line in enumerate(ttgir.splitlines()):
        if "tt.func" in line:
            source.update({f"%{name}": name for name in re.findall(r"%(\w+): !tt\.ptr", line)})
            continue
        for inner, outer in re.findall(r"(%[\w#]+) = (%[\w#]+)[,)]", line):  # what a loop begins with
            source[inner] = source.get(outer, "")
        parts = re.match(r"\s*(?:(%\w+)(?::\d+)? = )?([\w.]+) (%[\w#]+)", line)
        if parts is None:
            continue
        result, op, operand = parts.groups()
        if op in ("tt.load", "tt.store"):
            shape, layout = _POINTERS.search(line).groups()
            sizes = tuple(map(int, shape.split("x"))) if shape else ()
            found.append(Access(number, op, source[operand], sizes, layouts.get(layout, layout or "")))
        if result:
            source[result] = source.get(operand, "")
    return found


def unordered(ttgir: str, storages: Mapping[str, int]) -> Iterator[tuple[Access, Access]]:
    """Yield loads and stores of the same memory that nothing orders.

    storages: what tells the memory of each argument; two arguments may share it.
    """
    barriers = [n for n, line in enumerate(ttgir.splitlines()) if _ORDERS.match(line)]
    found = accesses(ttgir)
    for load, store in product(found, found):
        if (load.op, store.op) != ("tt.load", "tt.store"):
            continue
        if storages[load.argument] != storages[store.argument]:
            continue
        first, last = sorted((load.line, store.line))
        same = (load.shape, load.layout) == (store.shape, store.layout)
        if same and (load.owned() or store.line == first):  # a copy of what is read back is not stored
            continue
        if not any(first < line < last for line in barriers):
            yield load, store
