"""Handling of signals before a program installs its own handlers: one line, and the shell's exit status.

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

__all__ = ["ended_by_signals"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """End the process at Ctrl-C, SIGTERM or SIGUSR1 with status 128 + number, while nobody else handles them.

    Within the block a handler that is installed later, such as that of `StopRequests`, takes the place of
    this one until it is removed. Children that are forked within the block have the handlers from before it.
    In a thread that is not the main one nothing happens: only the main one may handle signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending, active = threading.Lock(), True

    def end(number: int, frame: FrameType | None = None) -> None:
        if ending.acquire(blocking=False):
            if _is_first():
                name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
                os.write(2, f"\nfastmp: {name} outside of the training loop: nothing to save\n".encode())
            os._exit(128 + number)

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
