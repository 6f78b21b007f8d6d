"""Joining and leaving a job: `init()` for every rank, and a guard around a rank's main function.

Ranks come from torchrun, from any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT, from srun, mpirun and mpiexec, or from whoever has initialised torch.distributed. Without any of
these a process is a world of one. A rank that fails says so in one line and leaves at once: its peers see the
closed connection, or torchrun ends them, so that none waits for a collective's timeout.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fastmp.config import Environment, set_default_variables
from fastmp.config.console import flush_quietly, to_stderr
from fastmp.distributed.collectives import gather_objects
from fastmp.distributed.rendezvous import join_store, seconds_text

_MAX_CONNECTED = 64  # ranks of a job whose groups gloo connects when they are created
_LET_GO_SECONDS = 0.1  # 20 ms were too few for some threads on a machine with four programs a core
_JOIN_SECONDS = 5.0  # 16 ranks started at once on 2 cores came within 1 s of each other
# Ranks that have all been heard from connect within seconds: where one takes longer, it has died since.
CONNECTING = timedelta(minutes=1)
# Ranks that share a GPU have neither NVLink SHARP nor multicast, and torch asks before it maps their memory.
SHARED_GPU = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
SHARES_GPUS = (2, 30)  # the first NCCL that does
_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "timed out connecting",  # gloo's first message to a rank that has gone
    "wait timeout",  # for the address of one that has gone before it left it in the store
    "remote process exited",
    "lost the store",
)


@dataclass(frozen=True)
class Runtime:
    """This rank's place in the job and the device it computes on.

    Attributes:
        owns_group: `init` made the default process group, and `close` destroys it.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    owns_group: bool = False

    def close(self) -> None:
        """Leave the job and destroy all process groups, unless another library made the default group.

        A second call does nothing.
        """
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()
            _let_go()  # now, so that a job that joins again at the same port finds its peers gone too
            atexit.unregister(_let_go)


def init(
    *, backend: str | None = None, join_seconds: float | None = None, timeout_minutes: float = 10
) -> Runtime:
    """Join the job that the launcher describes and choose this rank's device.

    A launcher sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun does. If RANK is
    not set, the variables of srun, mpirun and mpiexec count: on one machine the ranks meet at localhost,
    under srun on several at the first machine of the step, at a port made from the job's id. Without any of
    these, this is a world of one, and no process group is made.

    If another library (Ray Train, Accelerate, Lightning, verl) has made a default process group, that group
    is adopted: all ranks call `init`, `join_seconds` and `timeout_minutes` have no effect, and
    `Runtime.close` leaves the group alone. The device is the current CUDA device if NCCL serves it, else the
    CPU. `local_rank` is LOCAL_RANK, or counts the ranks with the same host name.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or later) ranks may share GPUs, to test layouts: results are
    as with a GPU each, speed is not.

    A job restarted by `torchrun --max-restarts` never reads what dead workers left in the agent's store.

    Args:
        backend: "gloo" keeps everything on the CPU. None or "nccl": with a GPU the device is
            `cuda:LOCAL_RANK`, with NCCL for CUDA tensors and gloo for CPU tensors.
        join_seconds: how long to wait for ranks that are not there yet. None: `timeout_minutes` under a
            launcher that starts all ranks (torchrun, srun, mpirun, mpiexec), else 5 seconds.
        timeout_minutes: limit of every collective of the default group.

    Raises:
        ValueError: variables contradict each other or the machine, the launcher does not say where ranks
            meet, or an adopted group does not serve the device.
        RuntimeError: ranks are missing when the time is up (the message lists them; a line on stderr does
            after 5 seconds), or another program has the port.

    Example:
        >>> runtime = init(backend="gloo")
        >>> runtime.rank, runtime.world_size
        (0, 1)
        >>> runtime.close()
    """
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f"fastmp.init: backend must be None, 'gloo' or 'nccl', got {backend!r}")
    for name, value in (("timeout_minutes", timeout_minutes), ("join_seconds", join_seconds)):
        if value is not None and value <= 0:
            raise ValueError(f"fastmp.init: {name} must be positive, got {value}")
    env = Environment.read()
    if dist.is_available() and dist.is_initialized():
        _let_threads_end_first()
        _make_room_for_ranks(dist.get_world_size())
        return _adopt(env, backend)
    if env.missing:
        raise ValueError(f"fastmp.init: {env.missing}")
    device = _device(env, backend)
    if env.rank is None:
        if env.world_size > 1:
            raise ValueError(
                f"fastmp.init: WORLD_SIZE is {env.world_size} but RANK is not set; "
                f"start the ranks with fastmp launch --nproc-per-node {env.world_size}"
            )
        return Runtime(rank=0, world_size=1, local_rank=0, device=device)
    rank, world_size = env.rank, env.world_size
    if not 0 <= rank < world_size:
        raise ValueError(f"fastmp.init: RANK {rank} is outside 0 .. WORLD_SIZE - 1 = {world_size - 1}")
    timeout = timedelta(minutes=timeout_minutes)
    if join_seconds is None:
        join_seconds = timeout.total_seconds() if env.agent_store or env.launcher else _JOIN_SECONDS
    # 1. Settings that torch, gloo and NCCL read when the group is made.
    _let_threads_end_first()
    set_default_variables(TORCH_FR_BUFFER_SIZE="256")  # the default, 2000, takes 150 ms to read
    _make_room_for_ranks(world_size)
    if device.type == "cuda":
        set_default_variables(NCCL_GRAPH_REGISTER="0")  # see docs/cuda-graphs.md; NCCL reads it once
        if env.shares_gpus:
            set_default_variables(**SHARED_GPU)
    # 2. All ranks meet in the store of rank 0 or of torchrun's agent.
    store = join_store(env, rank, timedelta(seconds=join_seconds))
    # 3. Each rank connects to the others over gloo; NCCL connects at its first collective.
    connecting = min(timeout, CONNECTING)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=connecting,
        )
        if world_size > 1 and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
            # its gloo may go on without a peer, which no error says before a collective needs that
            dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        raise RuntimeError(
            f"fastmp.init: all {world_size} ranks had joined, but rank {rank} could not connect to each of "
            f"them in {seconds_text(connecting)}: one was lost, or its machine cannot be reached; look for "
            f"what it said, and start the job again ({error})"
        ) from error
    dist.distributed_c10d._set_pg_timeout(timeout)
    return Runtime(rank, world_size, env.local_rank or 0, device, owns_group=True)


def main_guard(main: Callable[[], int | None]) -> int:
    """Run `main()` as this rank's whole program and return its exit status (None counts as 0).

    An exception becomes one line on stderr, `fastmp: rank R: Type: message`, without the rank in a world of
    one; FASTMP_DEBUG=1 adds the traceback. The status is 1, or 2 for a ValueError, a user's mistake, whose
    line has no type and keeps indented lines. In a job of several ranks the process then leaves at once,
    without the interpreter's clean-up, which could wait for peers; torchrun or the closed connections end the
    other ranks within seconds. A crash in native code and a collective that NCCL aborts at its timeout leave
    the Python stack on stderr.

    Example:
        >>> main_guard(lambda: 3)
        3
    """
    try:
        env = Environment.read()
    except ValueError as error:
        to_stderr(f"fastmp: {error}")
        return 2
    has_peers = env.world_size > 1
    if has_peers and sys.__stderr__ is not None:
        faulthandler.enable(file=sys.__stderr__)
    try:
        return main() or 0
    except SystemExit as leaving:
        if not has_peers or not isinstance(leaving.code, int):
            raise
        status = leaving.code
    except KeyboardInterrupt:
        _say(env, "interrupted")
        status = 130
    except BaseException as error:
        if env.debug:
            to_stderr(traceback.format_exc().rstrip())
        _say(env, _summary(error, env))
        status = 2 if isinstance(error, ValueError) else 1
        if has_peers and lost_peer(error):
            time.sleep(1)  # so that torchrun reports the rank that failed first, and not this one
    if has_peers:
        flush_quietly()
        os._exit(status)
    return status


def _make_room_for_ranks(world_size: int) -> None:
    """Prepare this process for a job of so many ranks, before it creates process groups.

    By default gloo connects all pairs of a group when the group is created: N descriptors a rank and N^2
    addresses through the store. Lazily, it connects the pairs that exchange messages. A small job stays with
    the default: where a rank ends in the middle of a lazy connection, gloo waits beyond any timeout. NCCL and
    CUDA open descriptors of their own, and many images have a soft limit of 1,024.
    """
    if world_size > _MAX_CONNECTED:
        set_default_variables(TORCH_GLOO_LAZY_INIT="1")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # macOS reports a hard limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _let_threads_end_first() -> None:
    """Register a short wait at exit, before Python's own clean-up, in which gloo's threads come to an end.

    A gloo thread frees a collective's tensors after the caller has gone on, and takes the GIL for it. A
    thread that asks for the GIL while the interpreter ends aborts the process (pytorch/pytorch#190489).
    Nothing joins these threads while a layer or another library still holds its group.
    """
    atexit.unregister(_let_go)  # one wait, however many calls of `init`
    atexit.register(_let_go)


def _let_go() -> None:
    time.sleep(_LET_GO_SECONDS)


def _device(env: Environment, backend: str | None) -> torch.device:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and num_gpus == 0:
        raise ValueError("fastmp.init: backend 'nccl' needs a CUDA GPU, and torch sees none")
    if backend == "gloo" or num_gpus == 0:
        return torch.device("cpu")
    index = env.local_rank or 0
    if env.launcher and num_gpus == 1 and not env.shares_gpus:
        index = 0  # srun --gpus-per-task=1: each rank sees a GPU of its own
    if index >= num_gpus and not env.shares_gpus:
        raise ValueError(
            f"fastmp.init: LOCAL_RANK is {index}, but torch sees {num_gpus} GPU(s) on this machine; start "
            "one rank per GPU, use backend 'gloo', or, to test a layout, let ranks share GPUs by "
            "NCCL_MULTI_RANK_GPU_ENABLE=1"
        )
    if index >= num_gpus and (version := nccl_version()) < SHARES_GPUS:
        raise ValueError(
            "fastmp.init: NCCL_MULTI_RANK_GPU_ENABLE=1 needs NCCL 2.30 or later, got "
            f"{version[0]}.{version[1]}; start one rank per GPU, or use backend 'gloo'"
        )
    if index == num_gpus:  # one rank of each machine
        _say(env, f"ranks share {num_gpus} GPU(s): results are as with a GPU each, speed means nothing")
    index %= num_gpus
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def nccl_version() -> tuple[int, int]:
    """Return (major, minor) of the loaded NCCL, which LD_PRELOAD may have replaced.

    `torch.cuda.nccl.version()` is that of the headers torch was compiled with.
    """
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:  # a torch that NCCL is linked into
        return torch.cuda.nccl.version()[:2]
    return number.value // 10000, number.value // 100 % 100


def _adopt(env: Environment, backend: str | None) -> Runtime:
    """Return this rank's place in the default process group.

    Raises:
        ValueError: the group has no backend for the device's tensors.
    """
    rank, world_size, served = dist.get_rank(), dist.get_world_size(), dist.get_backend_config()
    has_nccl = "cuda:nccl" in served.split(",") and torch.cuda.is_available()
    device = torch.device("cpu")
    if has_nccl and backend != "gloo":
        device = torch.device("cuda", torch.cuda.current_device())
    lacks_nccl = backend == "nccl" and not has_nccl
    if lacks_nccl or (device.type == "cpu" and "cpu:" not in served):
        tensors, wanted = ("CUDA", "nccl") if lacks_nccl else ("CPU", "gloo")
        raise ValueError(
            f"fastmp.init: torch.distributed is already initialised with {served}, and {wanted} serves no "
            f"{tensors} tensors there; initialise it with 'cpu:gloo,cuda:nccl', or with 'gloo' where there "
            "is no GPU"
        )
    local_rank = env.local_rank
    if local_rank is None or (env.rank, env.world_size) != (rank, world_size):
        hosts = gather_objects(socket.gethostname(), dist.group.WORLD)
        local_rank = hosts[:rank].count(hosts[rank])
    return Runtime(rank, world_size, local_rank, device)


def _say(env: Environment, message: str) -> None:
    rank = f"rank {env.rank or 0}: " if env.world_size > 1 else ""
    to_stderr(f"fastmp: {rank}{message}")


def lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _LOST_PEER)


def _summary(error: BaseException, env: Environment) -> str:
    """Format an error as one line; for anything but a user's mistake, add how to see the traceback.

    Indented lines of a ValueError stay a list. Notes on the error, such as the training step, come first.
    """
    parts = str(error).split("\n  ") if isinstance(error, ValueError) else [str(error)]
    message = "\n  ".join(" ".join(part.split()) for part in parts)
    notes = [" ".join(note.split()) for note in getattr(error, "__notes__", ())]
    own = type(error) is ValueError or type(error).__module__.startswith("fastmp.")
    kind = [] if own and isinstance(error, ValueError) and message else [type(error).__name__]
    text = ": ".join([*notes, *kind, *([message] if message else [])])
    if env.world_size > 1 and lost_peer(error):
        return f"another rank is gone ({text.split('. ')[0]})"
    if isinstance(error, (ValueError, OSError)) or env.debug:
        return text
    return f"{text} (FASTMP_DEBUG=1 shows the traceback)"
