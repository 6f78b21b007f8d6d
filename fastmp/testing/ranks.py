"""Ranks on one machine: gloo processes forked from the warm parent, or new ones on GPUs.

A forked child has torch and the test module already imported, so a case on four ranks costs a third of a
second, while spawning costs seconds. Rules that make it safe: the first act of a child is
`torch.set_num_threads(1)` (the parent's thread pool does not survive the fork), the parent never holds a
process group nor a CUDA context, and a child leaves through `os._exit`. CUDA does not survive a fork, so
ranks on GPUs are spawned. Children never outlive the call: hung ones dump their stacks and are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import selectors
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fastmp.config import with_variables
from fastmp.config.console import flush_quietly
from fastmp.config.file_access import open_writable, read_file
from fastmp.distributed.runtime import SHARED_GPU, SHARES_GPUS, nccl_version

__all__ = ["RankError", "gpu_variables", "lacks_gpus", "run_ranks"]

SEED = 1234  # every rank starts from this seed: a case that wants ranks to differ says so
GRACE = 3.0  # seconds the other ranks get to report after the first one failed
_PR_SET_PDEATHSIG = 1
_SPAWNED = "import sys; from fastmp.testing import ranks; ranks._spawned(sys.argv[1])"
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


@dataclass(frozen=True)
class _RankJob:
    """Facts of a call of `run_ranks`, passed to all of its ranks."""

    world_size: int
    device: str
    timeout: float
    deadline: float  # of time.monotonic, which all processes of a machine share
    folder: Path  # with the store and the stacks
    parent: int
    release_fd: int  # at its end when all ranks have reported

    def stack_path(self, rank: int) -> Path:
        return self.folder / f"stack-{rank}"


@dataclass
class _Child:
    rank: int
    pid: int
    fd: int  # read end of the pipe on which the child sends its outcome
    received: bytearray = field(default_factory=bytearray)
    outcome: Any = None  # ("ok" | "error", time, value | traceback text)
    done: bool = False  # the pipe is at its end: it has reported, or it is dead
    status: int = 0  # wait status, known once it has been reaped


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, device: str = "cpu"
) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on `world_size` ranks of this machine; results in rank order.

    Each rank computes on one thread, starts from the same seed, and finds `torch.distributed` initialised (no
    device-bound default group, loopback only). `fastmp.init().device` is its device.

    Args:
        fn: on "cpu", may be a closure. Its result must be picklable, without tensors on a GPU.
        timeout: seconds for the whole call.
        device: "cpu" forks ranks joined by gloo. "cuda" starts new processes joined by NCCL, of which rank r
            has GPU r modulo the number of GPUs; they import `fn` and unpickle `args`, so define `fn` at the
            top level of a module other than `__main__`.

    Raises:
        RankError: a rank raised (with its traceback), died (with its signal) or hung (with its stack).
        ValueError: `world_size` is below 1, `device` is another one, or `fn` cannot be imported.
        RuntimeError: the parent holds a process group or CUDA, and may not fork.
        unittest.SkipTest: there is no GPU, or NCCL is older than 2.30 and cannot share one. In pytest and
            unittest, the test is skipped with the reason.

    Example:
        >>> run_ranks(lambda rank, world_size: (rank, world_size), 2)
        [(0, 2), (1, 2)]
    """
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size must be at least 1, got {world_size}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"run_ranks: device must be 'cpu' or 'cuda', got {device!r}")
    if device == "cuda":
        call = _pickled(fn, args)
        if reason := lacks_gpus(world_size):
            raise unittest.SkipTest(reason)
        return _run(call, world_size, timeout, device)
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError("run_ranks: the parent holds a process group; ranks cannot be forked from it")
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "run_ranks: CUDA is initialised in this process and does not survive a fork; "
            "run the multi-rank tests in a process that does not touch the GPU"
        )
    return _run((fn, args), world_size, timeout, device)


def _run(call: tuple[Callable[..., Any], tuple] | bytes, world_size: int, timeout: float, device: str):
    """Run a call in forked ranks, or a pickled one in new processes."""
    release_read, release_write = os.pipe()  # closed by the parent: every rank has reported, leave
    folder = Path(tempfile.mkdtemp(prefix="fastmp-ranks-"))
    deadline = time.monotonic() + timeout
    job = _RankJob(world_size, device, timeout, deadline, folder, os.getpid(), release_read)
    children: list[_Child] = []
    try:
        for rank in range(world_size):
            children.append(_start(job, rank, call, release_write))
        failure = _collect(children, deadline)
    finally:
        os.close(release_write)
        os.close(release_read)
        _reap(children)
        stacks = {
            child.rank: read_file(path, 1 << 30).decode(errors="replace")
            for child in children
            if (path := job.stack_path(child.rank)).exists()
        }
        shutil.rmtree(folder, ignore_errors=True)
    if failure:
        _raise(children, stacks, timeout)
    return [child.outcome[2] for child in children if child.outcome is not None]


def _pickled(fn: Callable[..., Any], args: tuple) -> bytes:
    """Return a call as bytes for new processes, which can import `fn`."""
    try:
        call, why = pickle.dumps((fn, args)), "defined in __main__"
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        call, why = b"", str(error)
    if call and fn.__module__ != "__main__":
        return call
    raise ValueError(
        "run_ranks: ranks on GPUs are new processes: expected a function at the top level of a module other "
        f"than __main__, and arguments that can be pickled, got {fn!r} ({why}); define it with `def` in a "
        "module, and pass what it needs as arguments"
    )


def lacks_gpus(world_size: int) -> str:
    """Return the reason why this machine cannot run ranks on GPUs, or ""."""
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus == 0:
        return "no GPU: torch.cuda.is_available() is False"
    if num_gpus < world_size and (version := nccl_version()) < SHARES_GPUS:
        return (
            f"{world_size} ranks on {num_gpus} GPU(s) need NCCL 2.30 or later, got {version[0]}.{version[1]}"
        )
    return ""


def _start(
    job: _RankJob, rank: int, call: tuple[Callable[..., Any], tuple] | bytes, release_write: int
) -> _Child:
    read_fd, write_fd = os.pipe()
    flush_quietly()
    if isinstance(call, bytes):
        pid = _spawn(job, rank, call, write_fd)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process that has threads
            pid = os.fork()
        if pid == 0:
            try:
                gc.freeze()  # a finaliser of what the parent has left may wait for a thread of the parent
                torch.set_num_threads(1)
                os.close(read_fd)
                os.close(release_write)
                _child(job, rank, lambda: call, write_fd)
            finally:
                os._exit(1)
    os.close(write_fd)
    os.set_blocking(read_fd, False)
    return _Child(rank, pid, read_fd)


def _spawn(job: _RankJob, rank: int, call: bytes, write_fd: int) -> int:
    """Run a rank in a new process with the two pipes; return its process id."""
    path = job.folder / f"call-{rank}"
    with open_writable(path, "wb") as file:
        pickle.dump((job, rank, call, write_fd), file)
    variables = {} if job.device == "cpu" else gpu_variables(job.world_size)
    environment = with_variables(PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-c", _SPAWNED, str(path)],
        variables | environment,  # what is set already stays
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, fd) for fd in (job.release_fd, write_fd)],
    )


def gpu_variables(world_size: int) -> dict[str, str]:
    """Return the environment variables of ranks on GPUs, which share a GPU if there are too few."""
    sharing = -(-world_size // torch.cuda.device_count())
    variables = {"NCCL_GRAPH_REGISTER": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if sharing > 1:  # the kernels of all ranks must fit on a GPU together: a collective waits for its peers'
        ctas = str(max(1, 8 // sharing))
        variables |= {**SHARED_GPU, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": ctas}
    return variables


def _spawned(path: str) -> None:
    """Run the rank that `_spawn` described in a file."""
    torch.set_num_threads(1)
    try:
        job, rank, call, write_fd = pickle.loads(read_file(path, 1 << 30))
        _child(job, rank, lambda: pickle.loads(call), write_fd)
    finally:
        os._exit(1)


def _child(
    job: _RankJob, rank: int, call: Callable[[], tuple[Callable[..., Any], tuple]], write_fd: int
) -> None:
    """Run one rank: join, run, report, wait for the others (peers may still read its memory), leave."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed parent leaves no orphans
    if os.getppid() != job.parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    stack_file = open_writable(job.stack_path(rank), "wb")  # open until the process ends
    faulthandler.enable(file=stack_file)
    faulthandler.dump_traceback_later(max(job.deadline - time.monotonic(), 0.001), file=stack_file)
    code = 0
    try:
        fn, args = call()
        torch.manual_seed(SEED)
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if job.device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            "gloo" if job.device == "cpu" else "cpu:gloo,cuda:nccl",
            store=dist.FileStore(str(job.folder / "store"), job.world_size),
            rank=rank,
            world_size=job.world_size,
            # Longer than the harness's own limit: at a hang the stacks speak, not a collective's timeout.
            timeout=timedelta(seconds=2 * job.timeout + 10),
        )
        # A rank that fails at once would cut off peers that are still connecting. By gloo on a GPU too.
        dist.all_reduce(torch.zeros(1))
        result = fn(rank, job.world_size, *args)
        if job.device == "cuda":
            torch.cuda.synchronize()
        payload = pickle.dumps(("ok", time.monotonic(), result))
    except BaseException:
        payload = pickle.dumps(("error", time.monotonic(), traceback.format_exc()))
        code = 1
    with os.fdopen(write_fd, "wb") as pipe:
        pipe.write(payload)
    flush_quietly()
    if code == 0:
        os.read(job.release_fd, 1)  # returns at the end of file: all have reported
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
