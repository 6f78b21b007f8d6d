"""Facts about the code of a kernel, as the compiler made it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """Facts expected of a kernel's compiled code.

    loads, stores, copies (to shared memory): accesses of 16 bytes, at least so many for each 16 bytes
    of a block that a thread has. quantizes: results are FP8, whose stores are counted of 16-bit data alone.
    exps: exponentials for each of its elements, exactly (in a pair: the fewest, the most); not for float64.
    registers, stack: at most so many, and so many bytes, a thread.
    threads: at least so many fit on a multiprocessor (16-bit data).
    bytes: at least so many are in flight on one, which is what Hopper's latency asks for (an A100: half).
    barriers: at most so many barriers of a program stand in the code.
    has, lacks: regular expressions that are found, or not found, in the PTX; not for float64.
    """

    loads: float = 0
    stores: float = 0
    copies: float = 0
    exps: float | tuple[float, float] | None = None
    registers: int = 255
    stack: int = 0
    threads: int = 0
    bytes: int = 0
    barriers: int = 255
    quantizes: bool = False
    has: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
