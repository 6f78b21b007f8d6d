"""Conditions of a row's rounds: the rates of a GEMM and a copy among them, and the state of the GPU.

Clocks follow power and temperature within milliseconds, so the best rates of a cool GPU say little about a
row that is timed under load. A cuBLAS GEMM and a copy therefore take turns with each row: their rates make
the roofline that the GPU sustains in these rounds ("of sustained"). Its sensors are read in each round, while
it works. What changes from round to round is reported in words.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from benchmarks.measure import Ceilings, Run, copy_run, gemm_run, name_of, summarize
from benchmarks.nvml import State, sensors, summary

COPY, GEMM = "a copy", "a GEMM"
_APART, _DRIFT, _CLOCKS = 1.04, 1.05, 1.02  # ratios above which modes, times and clocks are different


class Conditions:
    """The two references, made once for all rows of a process, and the sensors of a device.

    Args:
        tiny: small references, to try the program.
        read: reads the state in place of the device's sensors.
    """

    def __init__(self, device: str, *, tiny: bool = False, read: Callable[[], State] | None = None) -> None:
        self.read = sensors(device)[0] if read is None else read
        self.bytes, self.size = (1 << 20, 64) if tiny else (1 << 28, 8192)
        self._copy = lru_cache(lambda: copy_run(device, self.bytes))
        self._gemm = lru_cache(lambda dtype: gemm_run(device, self.size, dtype))

    def references(self, dtype: torch.dtype) -> dict[str, Run]:
        """Return the runs to be timed in turn with those of a row, whose GEMMs multiply in `dtype`."""
        return {COPY: self._copy(), GEMM: self._gemm(dtype)}

    def watch(self, states: list[State]) -> Callable[[], None]:
        """Return the function that a run calls while the GPU works: it appends the state."""
        return lambda: None if self.read is None else states.append(self.read())

    def columns(
        self,
        ms: Sequence[float],
        times: Mapping[str, Sequence[float]],
        costs: tuple[int, int],
        dtype: torch.dtype,
        states: Sequence[State],
    ) -> dict[str, Any]:
        """Return the columns of a row timed in `ms`, a number a round, next to `times` of the references.

        costs: the least (bytes, FLOPs) of the row.
        """
        rates = [
            Ceilings(2 * self.bytes / copy / 1e6, {name_of(dtype): 2 * self.size**3 / gemm / 1e9})
            for copy, gemm in zip(times[COPY], times[GEMM], strict=True)
        ]
        shares = [rate.floor(*costs, dtype)[0] / each for rate, each in zip(rates, ms, strict=True)]
        states = states[-len(ms) :]  # those before are of warm-ups
        return {
            "of_sustained": statistics.median(shares),
            "sustained": {
                "copy_gbs": statistics.median(rate.copy_gbs for rate in rates),
                "gemm_tflops": statistics.median(rate.gemm_tflops[name_of(dtype)] for rate in rates),
            },
            "modes": modes(ms),
            "state": summary(states),
            "changed": changes(ms, states),
        }


def modes(ms: Sequence[float]) -> list[float]:
    """Return the median of the times, or of each of two groups of at least two that are apart."""
    ordered = sorted(ms)
    gaps = [(ordered[i] / ordered[i - 1], i) for i in range(2, len(ordered) - 1)]
    ratio, at = max(gaps, default=(1.0, 0))
    groups = [ordered[:at], ordered[at:]] if ratio > _APART else [ordered]
    return [statistics.median(group) for group in groups]


def changes(ms: Sequence[float], states: Sequence[State]) -> list[str]:
    """Return what was not the same in all rounds, in words."""
    found, figures = [], summarize(ms)
    if len(both := modes(ms)) == 2:
        found.append(f"two modes: {both[0]:.4g} and {both[1]:.4g} ms")
    elif figures["p80"] > _DRIFT * figures["min"]:
        found.append(f"times from {figures['min']:.4g} to {figures['p80']:.4g} ms")
    for name, words in (("sm_mhz", "SM clock"), ("memory_mhz", "memory clock")):
        clocks = [clock for state in states if (clock := getattr(state, name)) is not None]
        if clocks and max(clocks) > _CLOCKS * min(clocks):
            found.append(f"{words} from {min(clocks)} to {max(clocks)} MHz")
    for reason, count in (summary(states) or {"throttle": {}})["throttle"].items():
        if count < len(states):
            found.append(f"{reason} in {count} of {len(states)} rounds")
    return found
