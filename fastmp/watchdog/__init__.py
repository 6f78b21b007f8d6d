"""Hang watchdog: heartbeats between ranks, and the diagnosis of a job that hangs or has lost a rank."""

from __future__ import annotations

from fastmp._lazy import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    {
        "diagnosis": "RankRecord HangReport diagnose",
        "watchdog": "PeerLost Watchdog watch",
    },
)
