"""Ranks on one machine: gloo processes forked from the warm parent.

A forked child has torch and the test module already imported, so a case on four ranks costs a third of a
second, while spawning costs seconds. Rules that make it safe: the first act of a child is
`torch.set_num_threads(1)` (the parent's thread pool does not survive the fork), the parent never holds a
process group nor a CUDA context, and a child leaves through `os._exit`. Children never outlive the call:
hung ones dump their stacks and are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import pickle
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastmp.config.console import flush_quietly
from fastmp.config.file_access import open_writable, read_file

__all__ = ["RankError", "run_ranks"]

SEED = 1234  # every rank starts from this seed: a case that wants ranks to differ says so
GRACE = 3.0  # seconds the other ranks get to report after the first one failed
_PR_SET_PDEATHSIG = 1
_AUTOGRAD_FORK = "Unable to handle autograd's threading in combination with fork"
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None

# Autograd counts GPUs at its first use; where it finds one, no forked rank can use it. On a machine without
# GPUs, FakeTensorMode (and so torch.compile) makes a CUDA build of torch pretend to one: count before that.
if not torch.cuda.is_available():
    torch.zeros((), requires_grad=True).backward()


class RankError(RuntimeError):
    """Failure of a rank; `rank` failed first, and the message holds its traceback or its stack."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass
class _Child:
    rank: int
    pid: int
    fd: int  # read end of the pipe on which the child sends its outcome
    stack_path: Path
    received: bytearray = field(default_factory=bytearray)
    outcome: tuple[str, float, Any] | None = None  # ("ok" | "error", time, value | traceback text)
    done: bool = False  # the pipe is at its end: it has reported, or it is dead
    status: int | None = None  # wait status, known once it has been reaped


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on `world_size` forked ranks joined by gloo; results in rank order.

    Each rank computes on one thread, starts from the same seed, and finds `torch.distributed` initialised (no
    device-bound default group, loopback only).

    Args:
        fn: may be a closure; its result must be picklable.
        timeout: seconds for the whole call.

    Raises:
        RankError: a rank raised (with its traceback), died (with its signal) or hung (with its stack).
        ValueError: `world_size` is below 1.
        RuntimeError: the parent holds a process group or CUDA, and may not fork.

    Example:
        >>> run_ranks(lambda rank, world_size: (rank, world_size), 2)
        [(0, 2), (1, 2)]
    """
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size must be at least 1, got {world_size}")
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError("run_ranks: the parent holds a process group; ranks cannot be forked from it")
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "run_ranks: CUDA is initialised in this process and does not survive a fork; "
            "run the multi-rank tests in a process that does not touch the GPU"
        )
    folder = Path(tempfile.mkdtemp(prefix="fastmp-ranks-"))
    release_read, release_write = os.pipe()  # closed by the parent: every rank has reported, leave
    children: list[_Child] = []
    try:
        for rank in range(world_size):
            children.append(_fork(fn, rank, world_size, args, timeout, folder, (release_read, release_write)))
        failure = _collect(children, time.monotonic() + timeout)
    finally:
        os.close(release_write)
        os.close(release_read)
        _reap(children)
        stacks = {
            child.rank: read_file(child.stack_path, 1 << 30).decode(errors="replace")
            for child in children
            if child.stack_path.exists()
        }
        shutil.rmtree(folder, ignore_errors=True)
    if failure:
        _raise(children, stacks, timeout)
    return [child.outcome[2] for child in children if child.outcome is not None]


def _fork(fn, rank, world_size, args, timeout, folder, release) -> _Child:
    read_fd, write_fd = os.pipe()
    parent, stack_path = os.getpid(), folder / f"stack-{rank}"
    flush_quietly()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process that has threads
        pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            os.close(read_fd)
            os.close(release[1])
            _child(fn, rank, world_size, args, timeout, folder, stack_path, parent, write_fd, release[0])
        finally:
            os._exit(1)
    os.close(write_fd)
    os.set_blocking(read_fd, False)
    return _Child(rank, pid, read_fd, stack_path)


def _child(fn, rank, world_size, args, timeout, folder, stack_path, parent, write_fd, release_fd) -> None:
    """Run one rank: join, run, report, wait for the others (peers may still read its memory), leave."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed parent leaves no orphans
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    stack_file = open_writable(stack_path, "wb")  # open until the process ends
    faulthandler.enable(file=stack_file)
    faulthandler.dump_traceback_later(timeout, file=stack_file)
    code = 0
    try:
        torch.manual_seed(SEED)
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(folder / "store"), world_size)
        # Longer than the harness's own limit: at a hang the stacks speak, not a collective's timeout.
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=2 * timeout + 10)
        )
        dist.barrier()  # a rank that fails at once would cut off peers that are still connecting
        payload = pickle.dumps(("ok", time.monotonic(), fn(rank, world_size, *args)))
    except BaseException:
        payload = pickle.dumps(("error", time.monotonic(), traceback.format_exc()))
        code = 1
    with os.fdopen(write_fd, "wb") as pipe:
        pipe.write(payload)
    flush_quietly()
    if code == 0:
        os.read(release_fd, 1)  # returns at the end of file: all have reported
    os._exit(code)  # a failed rank leaves at once, so that its peers' collectives fail and do not wait


def _collect(children: list[_Child], deadline: float) -> bool:
    """Read reports until all are in or the time is up; return True if a rank failed, died or hung."""
    failed = False
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.fd, selectors.EVENT_READ, child)
        while selector.get_map():
            wait = deadline - time.monotonic()
            if wait <= -0.5:  # half a second for the stacks to be written
                return True
            for key, _ in selector.select(min(max(wait + 0.5, 0), 1.0)):
                child = key.data
                data = os.read(child.fd, 1 << 20)
                child.received += data
                if data:
                    continue
                selector.unregister(child.fd)
                child.done = True
                with contextlib.suppress(EOFError, pickle.UnpicklingError):
                    child.outcome = pickle.loads(child.received)
                if child.outcome is None or child.outcome[0] == "error":
                    if not failed:
                        deadline = min(deadline, time.monotonic() + GRACE)
                    failed = True
    return failed


def _reap(children: list[_Child]) -> None:
    """Kill the children that have not reported, and wait for all."""
    for child in children:
        os.close(child.fd)
        if not child.done:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
    limit = time.monotonic() + 5
    for child in children:
        pid = 0
        while pid == 0:
            pid, child.status = os.waitpid(child.pid, os.WNOHANG)
            if pid == 0 and time.monotonic() > limit:
                os.kill(child.pid, signal.SIGKILL)
            if pid == 0:
                time.sleep(0.001)


def _raise(children: list[_Child], stacks: dict[int, str], timeout: float) -> None:
    """Raise `RankError` for a silently lost rank, else for the first exception, else for the hung ranks."""
    dead = [c for c in children if c.done and c.outcome is None]
    wrong = sorted(
        (c for c in children if c.outcome is not None and c.outcome[0] == "error"), key=lambda c: c.outcome[1]
    )
    hung = [c for c in children if not c.done]
    n = len(children)
    if dead:
        first = dead[0]
        code = os.waitstatus_to_exitcode(first.status)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        text = f"rank {first.rank} of {n} died without a report ({how})\n{stacks.get(first.rank, '')}"
    elif wrong:
        first = wrong[0]
        text = f"rank {first.rank} of {n} raised\n{first.outcome[2]}"
        if _AUTOGRAD_FORK in text:
            text += (
                "The parent has used autograd on a machine with GPUs: hide them by CUDA_VISIBLE_DEVICES=''\n"
            )
    else:
        first = hung[0]
        text = f"hung for {timeout:g} s: ranks {[c.rank for c in hung]} of {n}" + "".join(
            f"\n--- rank {c.rank}\n{stacks.get(c.rank) or '(no stack: the process could not run)'}"
            for c in hung
        )
    others = [f"rank {c.rank}: {c.outcome[2].strip().splitlines()[-1]}" for c in wrong if c is not first]
    others += [f"rank {c.rank}: died too" for c in dead if c is not first]
    others += [f"rank {c.rank}: still running, ended" for c in hung if first not in hung]
    raise RankError(first.rank, "\n".join([text, *others]))
