"""Scheduler for Triton's interpreter: the programs of a kernel take turns in a seeded random order.

The interpreter runs one program after another, and a store is seen at once. So it shows no mistake of
programs that meet in memory: a ticket, sums that several programs add to, a tensor that is read and
overwritten. Here each program is a greenlet, which may be stopped before any load, store or atomic while
others go on. Each launch draws how long a program stays in turn: in some orders programs switch at every
access, in others hardly ever.

With `late`, a store is seen no sooner than a GPU promises:

- A thread sees its own stores. Element i of a tile is taken to belong to the same thread wherever a tile has
  the same shape, which the tests of compiled kernels show. A tile of fewer elements than the program has
  threads, a scalar above all, is read by threads that have not written it.
- Other threads of the program see a store after `tl.debug_barrier()`. Until then a tile that is read back at
  shifted places may hold old values.
- Other programs see a store after a barrier and then an atomic that releases (`sem` "release" or "acq_rel").
- Apart from that, parts of stores become visible at random times, in any order, at the latest at the end.

Launches of several ranks, which wait for each other, run together in `together`. What a rank's kernels have
left in memory that the ranks share is seen by its own later ones, and by others once one of these releases.

A program that overwrites without a barrier what other threads of it have read (a scalar, neighbours) raises
`Race`: threads that are behind would read the new value. A sum over a whole tile counts as a barrier there,
because it needs all threads.

It needs TRITON_INTERPRET=1 and greenlet.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter
from greenlet import getcurrent, greenlet
from torch import Tensor

_PERSISTENCE = (0.0, 0.5, 0.9, 0.99)  # probabilities that a program which could be stopped goes on
# All of the interpreter's loads and stores end in the first two, those of blocks and descriptors as well.
_ACCESSES = ("masked_load", "masked_store", "atomic_rmw", "atomic_cas", "barrier")
_FLUSHED = 0.25  # probability that an access finds a late store become visible


class Race(Exception):
    """Threads of one program read and write the same place, and nothing orders the two."""


@dataclass
class Turns:
    """Counts of a schedule: launches, programs of the largest launch, and switches between programs."""

    launches: int = 0
    programs: int = 0
    switches: int = 0


@contextlib.contextmanager
def interleaved(seed: int, *, late: bool = False) -> Iterator[Turns]:
    """Run the programs of all kernels launched inside in a random order drawn from `seed`.

    Args:
        late: stores become visible no sooner than a GPU promises (see the module).

    Raises:
        Race: with `late`, a program overwrites what other threads of it may yet have to read.
    """
    builder, random_state, turns = interpreter.interpreter_builder, random.Random(seed), Turns()
    launch, reduce = interpreter.GridExecutor.__call__, interpreter.ReduceOps.apply_impl

    def scheduled(executor: Any, *args: Any, **kwargs: Any) -> None:
        kernel = executor.fn
        rank = getcurrent()
        memory = rank.memory if isinstance(rank, _RankHost) else _Memory(random_state, late)
        threads = 32 * kwargs.get("num_warps", 4)
        executor.fn = _Launch(kernel, builder, random_state, turns, memory, threads)
        try:
            launch(executor, *args, **kwargs)
        except interpreter.InterpreterError as error:
            if isinstance(error.__cause__, Race):
                raise error.__cause__ from None
            raise
        finally:
            executor.fn = kernel

    def reduced(self: Any, tiles: Any) -> Any:
        result = reduce(self, tiles)
        first = result[0] if isinstance(result, (tuple, list)) else result
        if isinstance(program := getcurrent(), _Program) and first.handle.data.size == 1:
            program.reads.clear()
        return result

    interpreter.GridExecutor.__call__ = scheduled
    interpreter.ReduceOps.apply_impl = reduced
    for name in _ACCESSES:
        original = getattr(builder, f"create_{name}")
        setattr(builder, f"create_{name}", _stopping(original, getattr(_Memory, name)))
    try:
        yield turns
    finally:
        interpreter.GridExecutor.__call__ = launch
        interpreter.ReduceOps.apply_impl = reduce
        for name in _ACCESSES:
            delattr(builder, f"create_{name}")


def together(
    seed: int, programs: Sequence[Callable[[], Any]], *, shared: Tensor, late: bool = False
) -> list[Any]:
    """Run `programs`, the ranks of a group, interleaved by `seed`; return their results in order.

    Kernels that one of them launches run one after the other, beside those of all others. See `interleaved`.

    Args:
        shared: the memory that the ranks reach of each other. With `late`, a rank's stores there outlive its
            kernels. What it stores elsewhere is its own.
    """
    with interleaved(seed, late=late) as turns, _patched_once():
        memory = _Memory(random.Random(seed), late, shared)
        ranks = [_RankHost(program, memory) for program in programs]
        draw, waiting, rank = random.Random(seed), [*ranks], None
        persistence = draw.choice(_PERSISTENCE)
        while waiting:
            if rank is None or draw.random() >= persistence:
                rank = draw.choice(waiting)
                turns.switches += 1
            if rank.launch is None:
                rank.switch()
            else:
                rank.launch.turn()
            if rank.launch is not None and not rank.launch.programs:
                memory.leave(rank)
                rank.launch = None
            if rank.dead:
                waiting.remove(rank)
                rank = None
        memory.flush_all()
    return [rank.result for rank in ranks]


class _RankHost(greenlet):
    """A rank's host program, which stops at each launch until its kernel has ended."""

    def __init__(self, program: Callable[[], Any], memory: _Memory) -> None:
        super().__init__(self.go)
        self.program, self.memory = program, memory
        self.launch: _Launch | None = None
        self.result: Any = None

    def go(self) -> None:
        self.result = self.program()


@contextlib.contextmanager
def _patched_once() -> Iterator[None]:
    """Patch Triton's language once: overlapping launches would undo each other's patch."""
    patch, scopes = interpreter._patch_lang, []

    def patched(fn: Any) -> Any:
        scopes.append(patch(fn))
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patched
    try:
        yield
    finally:
        interpreter._patch_lang = patch
        for scope in reversed(scopes):
            scope.restore()


def _stopping(original: Callable, access: Callable) -> Callable:
    """Wrap a method of the interpreter's builder through which all accesses of one kind go."""

    def run(*args: Any, **kwargs: Any) -> Any:
        program = getcurrent()
        if not isinstance(program, _Program):
            return original(*args, **kwargs)
        program.parent.switch()
        return access(program.memory, program, original, *args, **kwargs)

    return run


@dataclass(eq=False)
class _Store:
    """A store that others may not have seen. `fenced`: a barrier of its program came after it.

    program: whose it is; of a kernel that has ended, its rank.
    """

    program: _Program | _RankHost
    pointers: np.ndarray
    values: np.ndarray
    mask: np.ndarray
    fenced: bool = False

    def at(self, pointers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the addresses are among those stored to, and the values there (elsewhere anything)."""
        known = self.pointers[self.mask]
        order = np.argsort(known, kind="stable")
        if not len(order):
            return np.zeros(pointers.shape, bool), np.zeros(pointers.shape, self.values.dtype)
        place = order[np.searchsorted(known, pointers, sorter=order).clip(max=len(order) - 1)]
        return known[place] == pointers, self.values[self.mask][place]

    def by_same_threads(self, pointers: np.ndarray, threads: int) -> np.ndarray:
        """Return a mask of the pointers in a tile that the same thread stored to before."""
        if pointers.shape != self.pointers.shape or pointers.size < threads:
            return np.zeros(pointers.shape, bool)
        return (pointers == self.pointers) & self.mask

    def changes(self, pointers: np.ndarray, mask: np.ndarray) -> bool:
        """Return whether it goes to an address that a tile was read from by another thread."""
        same = pointers.size > 1 and pointers.shape == self.pointers.shape
        mine = self.pointers[self.mask & (pointers != self.pointers) if same else self.mask]
        read = pointers[mask]
        if not mine.size or not read.size or mine.max() < read.min() or read.max() < mine.min():
            return False
        return bool(np.isin(mine, read).any())


class _Memory:
    """Memory accesses of a launch's programs, with delayed stores.

    Methods named after those of the interpreter's builder get the program, that method and its arguments.
    """

    def __init__(self, random_state: random.Random, late: bool, shared: Tensor | None = None) -> None:
        self.random, self.late, self.shared = random_state, late, (0, 0)
        if shared is not None:
            self.shared = shared.data_ptr(), shared.data_ptr() + shared.nbytes
        self.stores: list[_Store] = []
        self.bits = np.random.default_rng(random_state.getrandbits(32))

    def masked_load(
        self, program: _Program, load: Callable, pointers: Any, mask: Any, *rest: Any, **k: Any
    ) -> Any:
        self.flush_some()
        result = load(pointers, mask, *rest, **k)
        if not self.late:
            return result
        where = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        program.reads.append((pointers.data, where))
        for store in self.of(program):
            found, values = store.at(pointers.data)
            if not store.fenced:
                found = found & store.by_same_threads(pointers.data, program.threads)
            found = found & where
            if found.any():
                result.data = np.where(found, values.view(result.data.dtype), result.data)
        return result

    def masked_store(
        self, program: _Program, store: Callable, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> None:
        self.flush_some()
        if not self.late:
            store(pointers, value, mask, *rest)
            return
        where = np.broadcast_to(mask.data, pointers.data.shape).astype(bool)
        new = _Store(program, pointers.data.copy(), np.broadcast_to(value.data, where.shape).copy(), where)
        if any(new.changes(*read) for read in program.reads):
            raise Race("other threads of a program read what it overwrites, without a barrier in between")
        for old in self.of(program):
            found, _ = old.at(new.pointers[where])
            if found.any() and (
                old.fenced or old.by_same_threads(new.pointers, program.threads)[where].any()
            ):
                self.flush(old)
        self.stores.append(new)

    def atomic_rmw(
        self,
        program: _Program,
        change: Callable,
        op: Any,
        pointers: Any,
        value: Any,
        mask: Any,
        sem: Any,
        scope: Any,
    ) -> Any:
        self.synchronize(program, pointers, sem)
        return change(op, pointers, value, mask, sem, scope)

    def atomic_cas(
        self, program: _Program, change: Callable, pointers: Any, old: Any, new: Any, sem: Any, scope: Any
    ) -> Any:
        self.synchronize(program, pointers, sem)
        return change(pointers, old, new, sem, scope)

    def barrier(self, program: _Program, barrier: Callable) -> None:
        program.reads.clear()
        for store in self.stores:
            store.fenced |= store.program is program

    def synchronize(self, program: _Program, pointers: Any, sem: Any) -> None:
        """Flush stores released by an atomic, and the program's earlier stores to its addresses."""
        self.flush_some()
        releases = sem.name in ("RELEASE", "ACQUIRE_RELEASE")
        for store in self.of(program):
            if store.fenced and (releases or store.at(pointers.data)[0].any()):
                self.flush(store)

    def of(self, program: _Program) -> list[_Store]:
        """Return the pending stores of a program, and of earlier kernels of its rank."""
        return [s for s in self.stores if s.program is program or s.program is program.rank]

    def leave(self, rank: _RankHost) -> None:
        """Hand pending stores to shared memory over to the rank at the end of its kernel."""
        first, last = self.shared
        for store in [s for s in self.stores if isinstance(s.program, _Program) and s.program.rank is rank]:
            if ((store.pointers >= first) & (store.pointers < last) & store.mask).any():
                store.program, store.fenced = rank, True
            else:
                self.flush(store)

    def flush_some(self) -> None:
        """Make a random part of a random store visible, with some probability."""
        if self.stores and self.random.random() < _FLUSHED:
            store = self.random.choice(self.stores)
            part = store.mask & (self.bits.random(store.mask.shape) < self.random.choice((0.5, 1.0)))
            interpreter._interpreter.store(store.pointers, store.values, part)
            store.mask = store.mask & ~part
            if not store.mask.any():
                self.stores.remove(store)

    def flush(self, store: _Store) -> None:
        interpreter._interpreter.store(store.pointers, store.values, store.mask)
        self.stores.remove(store)

    def flush_all(self) -> None:
        """Make all pending stores visible, in an order that barriers and threads allow."""
        while self.stores:
            self.flush(self.random.choice(self.stores))


class _Program(greenlet):
    """A program of a grid at its place."""

    def __init__(self, run: Callable, place: tuple[int, int, int], memory: _Memory, threads: int) -> None:
        starter = getcurrent()
        self.rank = starter if isinstance(starter, _RankHost) else None
        super().__init__(run, self.rank.parent if self.rank else starter)
        self.place, self.memory, self.threads = place, memory, threads
        self.reads: list[tuple[np.ndarray, np.ndarray]] = []  # (pointers, mask) since a barrier


@dataclass
class _Launch:
    """A stand-in for a kernel's function: it collects a grid's programs, and runs them once all are there."""

    kernel: Callable
    builder: Any
    random: random.Random
    turns: Turns
    memory: _Memory
    threads: int
    programs: list[_Program] = field(default_factory=list)
    now: _Program | None = None  # whose turn it was last

    def __post_init__(self) -> None:
        self.__name__, self.__globals__ = self.kernel.__name__, self.kernel.__globals__
        self.__signature__ = inspect.signature(self.kernel)

    def __call__(self, **arguments: Any) -> None:
        run = lambda: self.kernel(**arguments)  # noqa: E731
        self.programs.append(_Program(run, self.builder.grid_idx, self.memory, self.threads))
        if len(self.programs) == math.prod(self.builder.grid_dim):
            self.run()

    def run(self) -> None:
        self.turns.launches += 1
        self.turns.programs = max(self.turns.programs, len(self.programs))
        self.dims, self.persistence = self.builder.grid_dim, self.random.choice(_PERSISTENCE)
        rank = getcurrent()
        if isinstance(rank, _RankHost):
            rank.launch = self
            rank.parent.switch()  # comes back when all programs have ended
            return
        while self.programs:
            self.turn()
        self.memory.flush_all()

    def turn(self) -> None:
        """Let one program go on until it could be stopped, or ends."""
        if self.now is None or self.random.random() >= self.persistence:
            self.now, before = self.random.choice(self.programs), self.now
            self.turns.switches += self.now is not before
        self.builder.set_grid_dim(*self.dims)
        self.builder.set_grid_idx(*self.now.place)
        self.now.switch()
        if self.now.dead:
            self.programs.remove(self.now)
            self.now = None
