"""State of a GPU by NVML: clocks, power, temperatures and throttle reasons."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"
# Reasons why clocks are below the wanted ones; idle and clocks set by hand are not among them.
_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_SM, _MEMORY, _GPU_SENSOR = 1, 2, 0
_MEMORY_TEMPERATURE, _INSTANT_POWER = 82, 186  # nvmlDeviceGetPowerUsage is a mean over a second


@dataclass(frozen=True)
class State:
    """One reading; None for what this GPU does not tell."""

    sm_mhz: int | None
    memory_mhz: int | None
    watts: float | None
    celsius: int | None
    memory_celsius: int | None
    throttle: tuple[str, ...]


class _Field(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_uint),
        ("status", ctypes.c_uint),
        ("value", ctypes.c_ulonglong),
    )


class Nvml:
    """One GPU, found by its UUID: CUDA_VISIBLE_DEVICES renumbers devices for torch only."""

    def __init__(self, library: Any, uuid: str) -> None:
        self.library, self.handle = library, ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        self._ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(self.handle))

    def _ask(self, function: str, *arguments: Any) -> None:
        if status := getattr(self.library, function)(*arguments):
            raise OSError(f"status {status} of {function}")

    def _number(self, function: str, *which: int, kind: Any = ctypes.c_uint) -> int | None:
        value = kind()
        status = getattr(self.library, function)(self.handle, *which, ctypes.byref(value))
        return None if status else value.value

    def _field(self, number: int) -> int | None:
        field = _Field(field=number)
        status = self.library.nvmlDeviceGetFieldValues(self.handle, 1, ctypes.byref(field))
        return None if status or field.status else field.value & 0xFFFFFFFF  # both are unsigned int

    def read(self) -> State:
        """Return the state now; takes microseconds."""
        milliwatts = self._field(_INSTANT_POWER)
        bits = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong) or 0
        return State(
            self._number("nvmlDeviceGetClockInfo", _SM),
            self._number("nvmlDeviceGetClockInfo", _MEMORY),
            None if milliwatts is None else milliwatts / 1e3,
            self._number("nvmlDeviceGetTemperature", _GPU_SENSOR),
            self._field(_MEMORY_TEMPERATURE),
            tuple(reason for bit, reason in _REASONS.items() if bits & bit),
        )


def sensors(device: str) -> tuple[Callable[[], State] | None, str]:
    """Return what reads a GPU's state, and its source; where nothing can, None and the reason."""
    if torch.device(device).type != "cuda":
        return None, "none on a CPU"
    try:
        nvml = Nvml(ctypes.CDLL(LIBRARY), str(torch.cuda.get_device_properties(device).uuid))
        nvml.read()
    except (OSError, AttributeError) as error:  # no library, no such GPU in it, or a function is missing
        return None, f"none: {error}"
    return nvml.read, "NVML"


def summary(states: Sequence[State]) -> dict[str, Any] | None:
    """Return [least, most] of each number, and in how many readings each throttle reason stood."""
    if not states:
        return None
    found: dict[str, Any] = {"readings": len(states)}
    for name in (field.name for field in fields(State) if field.name != "throttle"):
        values = [value for state in states if (value := getattr(state, name)) is not None]
        found[name] = [min(values), max(values)] if values else None
    reasons = [reason for state in states for reason in state.throttle]
    return found | {"throttle": {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)}}
