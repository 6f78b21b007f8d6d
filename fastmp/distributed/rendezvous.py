"""Rendezvous: the ranks of a job find the store of rank 0, or of torchrun's agent, and agree on a name in it.

`join_store` waits for the ranks that are missing, says on stderr which these are, and ends when the time is
up.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fastmp.config import Environment
from fastmp.config.console import to_stderr

__all__ = ["LOOPBACK", "fresh_store", "join_store", "loopback_listener", "seconds_text"]

LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.02  # between two looks for other ranks at first; doubled from look to look
_QUIET_SECONDS = 5.0  # of waiting for ranks until a line says which are missing
_NAMING_RANKS = 64  # ranks of a job in which all of them look who is missing
_LISTED = 8  # ranks that a message names one by one; it counts the others


def loopback_listener(port: int = 0) -> socket.socket:
    """Listen at the loopback address alone, for the `master_listen_fd` of a TCPStore; port 0 is any free one.

    torch's own socket listens on every interface, whatever address it is given.
    """
    return socket.create_server((LOOPBACK, port))


def join_store(env: Environment, rank: int, timeout: timedelta) -> dist.Store:
    """Return the store that rank 0, or torchrun's agent, serves at the master address."""
    address, wait = f"{env.master_addr}:{env.master_port}", _StartWait(rank, env.world_size, timeout)
    host = LOOPBACK if env.master_addr == "localhost" else env.master_addr
    serves = rank == 0 and not env.agent_store
    options: dict[str, Any] = {"is_master": serves, "wait_for_workers": False, "multi_tenant": True}
    if not serves:
        _wait_for_listener(env, wait)
    elif host == LOOPBACK:
        with contextlib.suppress(OSError):  # the port is taken: by a store of this process, or torch says so
            options["master_listen_fd"] = loopback_listener(env.master_port).detach()
    left = max(wait.deadline - time.monotonic(), 1.0)
    try:
        store = _within(
            left + 1.0,
            lambda: dist.TCPStore(
                host, env.master_port, env.world_size, timeout=timedelta(seconds=left), **options
            ),
        )
    except RuntimeError as error:
        if serves and "EADDRINUSE" in str(error):
            raise RuntimeError(
                f"fastmp.init: rank 0 cannot listen on port {env.master_port}: another program has it; set "
                "another MASTER_PORT"
            ) from error
        raise RuntimeError(
            f"fastmp.init: rank {rank} cannot use the store of rank 0 at {address}: {error}; where another "
            "program has the port, set another MASTER_PORT"
        ) from error
    if store is None:
        raise RuntimeError(
            f"fastmp.init: rank {rank} reached {address}, but the store of rank 0 did not answer in "
            f"{seconds_text(timeout)}: another program may have the port; set another MASTER_PORT"
        )
    return fresh_store(store, rank, env.world_size, timeout)


class _StartWait:
    """Wait of a rank for others: pauses between looks, and one line on stderr if it takes seconds.

    Store keys are looked for, not waited for: torch prints two warnings for every wait that is over.
    """

    def __init__(self, rank: int, world_size: int, timeout: timedelta) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.begun, self.pause, self._told = time.monotonic(), _POLL_SECONDS, False
        self.deadline = self.begun + timeout.total_seconds()
        self.longest_pause = min(1.0, max(0.1, world_size / 8192))  # 8,192 looks a second for all ranks

    def goes_on(self, waiting: Callable[[], str]) -> bool:
        """Pause before the next look; return False if the time is up.

        waiting: returns what the line says, who is waited for; "" for no line yet.
        """
        now = time.monotonic()
        if now >= self.deadline:
            return False
        if not self._told and now - self.begun > _QUIET_SECONDS and (line := waiting()):
            self._told = True
            to_stderr(f"fastmp: rank {self.rank}: {line}, up to {self.deadline - now:.0f} s more")
        time.sleep(min(self.pause, self.deadline - now))
        self.pause = min(2 * self.pause, self.longest_pause)
        return True


def _wait_for_listener(env: Environment, wait: _StartWait) -> None:
    """Wait until something listens at the master address.

    torch's own wait takes twice as long as it is told, and prints a traceback for each attempt.
    """
    address = f"{env.master_addr}:{env.master_port}"
    while True:
        try:
            left = max(wait.deadline - time.monotonic(), 0.1)
            socket.create_connection((env.master_addr, env.master_port), timeout=left).close()
            return
        except OSError as error:
            if not wait.goes_on(lambda: f"waiting for the store of rank 0 at {address}"):
                raise RuntimeError(
                    f"fastmp.init: rank {wait.rank} cannot reach the store of rank 0 at {address} in "
                    f"{seconds_text(wait.timeout)} ({error.strerror or error}); start rank 0 there, or set "
                    "MASTER_ADDR and MASTER_PORT to where it runs"
                ) from error


def _within(seconds: float, make: Callable[[], dist.Store]) -> dist.Store | None:
    """Call `make` and return its result, or None if it takes longer than `seconds`.

    torch's client waits without end for the first answer of a store. It is left waiting in a daemon thread.
    """
    done: list[dist.Store | BaseException] = []

    def run() -> None:
        try:
            done.append(make())
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not done:
        return None
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]


def fresh_store(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return a namespace of `store` that only the ranks of this start of the job use.

    torchrun keeps one store over all restarts, with the addresses of dead workers in it, and its restart
    counts are per node and may differ. So the ranks agree among themselves:

    1. Rank 0 publishes a name never used before, and every other rank counts itself in under that name.
    2. When all are in, every rank confirms that it is still there: a rank may have died in the meantime. It
       joins again under the same name if it is started again.
    3. Rank 0 opens the name when all have confirmed, or gives it up when its time is over.

    A rank that finds a name open already has read that of an earlier start, and waits for the next name. A
    name that is not open when its rank 0 dies stays so. Every rank moves a few hundred bytes, however many
    ranks there are.

    Raises:
        RuntimeError: `timeout` is over; the message lists the missing ranks.
    """
    wait = _StartWait(rank, world_size, timeout)
    try:
        prefix = _lead(store, wait) if rank == 0 else _follow(store, wait)
    except dist.DistNetworkError as error:
        raise RuntimeError(
            f"fastmp.init: rank {rank} of {world_size} lost the store while ranks were joining: the process "
            f"that serves it has ended, look for what rank 0 or the launcher said ({error})"
        ) from error
    return dist.PrefixStore(prefix, store)


def _lead(store: dist.Store, wait: _StartWait) -> str:
    """Publish a new name as rank 0, and open it once every other rank has joined."""
    name = uuid.uuid4().hex
    prefix = f"fastmp/{name}"
    store.set("fastmp/leader", name)
    while wait.world_size > 1 and not _is_there(store, f"{prefix}/here/full"):
        if not wait.goes_on(functools.partial(_waiting, store, prefix, wait)):
            _, names = _missing(store, prefix, wait)
            if not names or _is_there(store, f"{prefix}/here/full"):  # the last one has come in the meantime
                break
            store.set(f"{prefix}/given_up", names)
            time.sleep(2 * wait.longest_pause)  # others read it: then this process may take the store with it
            raise RuntimeError(
                f"fastmp.init: {names} of {wait.world_size} did not join in {seconds_text(wait.timeout)}; "
                "start them, or give slow ones more join_seconds"
            )
    store.set(f"{prefix}/open", "")
    return prefix


def _follow(store: dist.Store, wait: _StartWait) -> str:
    """Join under the published name as any other rank, and return its prefix once rank 0 opens it."""
    prefix, awaited = "", ""
    while True:
        named = _is_there(store, "fastmp/leader")
        published = f"fastmp/{store.get('fastmp/leader').decode()}" if named else ""
        if published != prefix:
            prefix, wait.pause = published, _POLL_SECONDS
            # 1. A name that is open or given up already belongs to an earlier start of the job.
            ended = any(store.check([f"{prefix}/{end}"]) for end in ("open", "given_up"))
            awaited = "" if ended else "full"
            if awaited:
                _count(store, prefix, wait)
        if awaited and _is_there(store, f"{prefix}/{awaited}"):
            if awaited == "open":
                return prefix
            # 2. All ranks came: confirm that this one still waits.
            _count(store, f"{prefix}/here", wait)
            awaited, wait.pause = "open", _POLL_SECONDS
            continue
        current = prefix if awaited else ""
        if awaited and wait.pause == wait.longest_pause and _is_there(store, f"{prefix}/given_up"):
            waited = timedelta(seconds=round(time.monotonic() - wait.begun, 1))
            raise _not_joined(wait, waited, store.get(f"{prefix}/given_up").decode())
        if not wait.goes_on(functools.partial(_waiting, store, current, wait)):
            raise _not_joined(wait, wait.timeout, _missing(store, current, wait)[1])


def _not_joined(wait: _StartWait, waited: timedelta, names: str) -> RuntimeError:
    return RuntimeError(
        f"fastmp.init: rank {wait.rank} of {wait.world_size} waited {seconds_text(waited)}, but {names} "
        "did not join; start all ranks, or give slow ones more join_seconds"
    )


def _missing(store: dist.Store, prefix: str, wait: _StartWait) -> tuple[int, str]:
    """Return how many ranks have not joined under `prefix`, and which; rank 0 if it alone is left.

    On rank 0 itself, (0, "") if all have. In large jobs rank 0 alone reads a key of each rank, and the others
    read a count.
    """
    if not prefix:  # rank 0 has not published a name
        return 1, "rank 0"
    world_size = wait.world_size
    here = f"{prefix}/here"
    for counted in [here] if _is_there(store, f"{prefix}/full") else [prefix, here]:
        if wait.rank == 0 or world_size <= _NAMING_RANKS:
            ranks = [str(rank) for rank in range(1, world_size) if not _is_there(store, f"{counted}/{rank}")]
            number, more = len(ranks), len(ranks) - _LISTED
            names = f"ranks [{', '.join(ranks[:_LISTED])}{f' and {more} others' if more > 0 else ''}]"
        else:
            number = world_size - 1 - store.add(f"{counted}/joined", 0)
            names = f"{number} ranks"
        if number:
            return number, names
    return (1, "rank 0") if wait.rank else (0, "")


def _waiting(store: dist.Store, prefix: str, wait: _StartWait) -> str:
    """Return how many ranks have joined under `prefix` and which are waited for; "" for none."""
    number, names = _missing(store, prefix, wait)
    joined = f"{wait.world_size - number} of {wait.world_size} ranks are here, " if prefix else ""
    return f"{joined}waiting for {names}" if names else ""


def _count(store: dist.Store, prefix: str, wait: _StartWait) -> None:
    """Count this rank under `prefix`, once however often it is started; the last one to come sets "full"."""
    if store.add(f"{prefix}/{wait.rank}", 1) == 1 and store.add(f"{prefix}/joined", 1) == wait.world_size - 1:
        store.set(f"{prefix}/full", "")


def _is_there(store: dist.Store, key: str) -> bool:
    return bool(store.check([key]))


def seconds_text(duration: timedelta) -> str:
    """Return a duration in seconds, such as "0.5 s"."""
    return f"{duration.total_seconds():g} s"
