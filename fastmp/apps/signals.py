"""Handling of signals before and after the training loop: one line, and the exit status.

Python runs a handler in the main thread, between two of its own instructions. While a program imports torch
or waits for other ranks in C++, that can take minutes. So a thread reads the number of the signal as the C
handler writes it (`signal.set_wakeup_fd`), and ends the process.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fastmp.config import Environment
from fastmp.config.console import write_from_handler

__all__ = ["ended_by_signals", "work_is_saved"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_saved = threading.Event()


def work_is_saved() -> None:
    """Let signals end the process with status 0 from now on: no batch system is to count it as failed."""
    _saved.set()


@contextmanager
def ended_by_signals(*, exits: bool = False) -> Iterator[None]:
    """End the process at Ctrl-C, SIGTERM or SIGUSR1, while nobody else handles them.

    The status is 128 + the number of the signal, as in shells; 0 after `work_is_saved`. exits: the process
    ends after the block; if its work is saved, it ignores signals then. Otherwise handlers are restored.

    Within the block a handler that is installed later, such as that of `StopRequests`, takes the place of
    this one until it is removed. Children that are forked within the block have the handlers from before it.
    In a thread that is not the main one nothing happens: only the main one may handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _saved.clear()
    ending, active = threading.Lock(), True

    def end(number: int, frame: FrameType | None = None) -> None:
        if ending.acquire(blocking=False):
            if _is_first():
                name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                where = "after the last save" if _saved.is_set() else "outside of the training loop"
                write_from_handler(f"\nfastmp: {name} {where}: nothing to save\n")
            os._exit(0 if _saved.is_set() else 128 + number)

    def watch() -> None:
        while numbers := reading.recv(64):
            for number in numbers:
                if number in _SIGNALS and signal.getsignal(number) is end:
                    end(number)  # type: ignore[call-arg]  # mypy narrows `end` to a handler of two arguments

    reading, writing = socket.socketpair()
    writing.setblocking(False)
    before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, end) for number in _SIGNALS}

    def give_back() -> None:
        nonlocal active
        if active:
            active = False
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                if signal.getsignal(number) is end:
                    signal.signal(number, handler)

    os.register_at_fork(after_in_child=give_back)  # or what ends a child would end this process
    thread = threading.Thread(target=watch, name="fastmp signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        if exits and _saved.is_set():  # Python restores all other handlers before it has ended
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        give_back()
        writing.close()
        thread.join()
        reading.close()


def _is_first() -> bool:
    """Return True on the first rank of a job, the only one that prints."""
    try:
        return not Environment.read().rank
    except ValueError:
        return True
