"""Sustained rates and the state of a GPU in the rounds of a row, with a stand-in for NVML."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import conditions, gpu_rows, nvml
from benchmarks.compare import compare
from benchmarks.conditions import COPY, GEMM, Conditions, changes, modes
from benchmarks.measure import Ceilings, environment
from benchmarks.nvml import Nvml, State

COOL = State(1980, 3201, 400.0, 45, 60, ())
CAPPED = State(1410, 3201, 700.0, 61, 80, ("power cap",))


class Library:
    """NVML of one GPU at its power cap, which does not tell the temperature of its memory."""

    def __init__(self, **statuses):
        self.statuses, self.uuid = statuses, None

    def __getattr__(self, function):
        if function not in NUMBERS and not function.startswith("nvml"):
            raise AttributeError(function)

        def call(*arguments):
            if function == "nvmlDeviceGetHandleByUUID":
                self.uuid = arguments[0]
            elif function == "nvmlDeviceGetFieldValues":
                field = arguments[2]._obj
                field.status, field.value = (0, 650_500 | 7 << 32) if field.field == 186 else (3, 0)
            elif function != "nvmlInit_v2":
                number = NUMBERS[function]
                arguments[-1]._obj.value = number.get(arguments[1]) if isinstance(number, dict) else number
            return self.statuses.get(function, 0)

        return call


NUMBERS = {
    "nvmlDeviceGetClockInfo": {1: 1410, 2: 3201},
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1 | 0x4,
}


def test_a_reading_of_nvml():
    library = Library()
    nvml_of_one = Nvml(library, "1234")
    assert library.uuid == b"GPU-1234"
    assert nvml_of_one.read() == State(1410, 3201, 650.5, 61, None, ("power cap",))
    library.statuses = {"nvmlDeviceGetTemperature": 3}
    assert nvml_of_one.read().celsius is None
    with pytest.raises(OSError, match="status 6 of nvmlDeviceGetHandleByUUID"):
        Nvml(Library(nvmlDeviceGetHandleByUUID=6), "1234")


def test_a_machine_without_nvml_says_so(monkeypatch):
    assert nvml.sensors("cpu") == (None, "none on a CPU")
    monkeypatch.setattr(nvml, "LIBRARY", "libno-such-nvml.so")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"uuid": "1"}))
    read, reason = nvml.sensors("cuda")
    assert read is None and "libno-such-nvml.so" in reason
    assert "sensors" not in environment("cpu")
    assert nvml.summary([]) is None


def test_the_summary_keeps_extremes_and_counts_reasons():
    found = nvml.summary([COOL, CAPPED, replace(CAPPED, watts=None)])
    assert found["readings"] == 3 and found["sm_mhz"] == [1410, 1980] and found["watts"] == [400.0, 700.0]
    assert found["throttle"] == {"power cap": 2}
    assert nvml.summary([replace(COOL, watts=None)])["watts"] is None


@pytest.mark.parametrize(
    ("ms", "states", "expected"),
    [
        ([2.5, 2.51, 2.52], [CAPPED] * 3, []),  # the cap in all rounds is no change
        ([2.5, 2.9, 2.51, 2.91, 2.9], [], ["two modes: 2.505 and 2.9 ms"]),
        ([2.5, 2.9, 2.9, 2.91], [], ["times from 2.5 to 2.9 ms"]),  # one round is no mode
        ([1.0, 1.0], [COOL, CAPPED], ["SM clock from 1410 to 1980 MHz", "power cap in 1 of 2 rounds"]),
        ([1.0, 1.0], [COOL, replace(COOL, memory_mhz=2619)], ["memory clock from 2619 to 3201 MHz"]),
    ],
)
def test_what_changes_is_reported(ms, states, expected):
    assert changes(ms, states) == expected


def test_two_modes_are_not_averaged():
    assert modes([1.0, 1.1, 1.0, 1.1, 1.1]) == [1.0, 1.1]
    assert modes([1.0, 1.01, 1.02, 1.03]) == pytest.approx([1.015]) and modes([3.0]) == [3.0]


def test_shares_are_of_the_rates_of_the_same_rounds():
    """A GPU that slows down by a half slows the references, too: its sustained share does not change."""
    found = Conditions("cpu", tiny=True, read=lambda: COOL)
    found.bytes, found.size = 10**9, 1000
    times = {COPY: [1.0, 2.0, 2.0], GEMM: [1.0, 2.0, 2.0]}  # 2,000 GB/s and 2 TFLOP/s, then half
    row = [2.0, 4.0, 4.0]
    columns = found.columns(row, times, (2 * 10**9, 0), torch.bfloat16, [CAPPED, COOL, COOL, COOL])
    assert columns["of_sustained"] == pytest.approx(0.5)
    assert columns["sustained"] == pytest.approx({"copy_gbs": 1000.0, "gemm_tflops": 1.0})
    assert columns["state"]["readings"] == 3 and columns["state"]["throttle"] == {}  # no warm-up in it
    gemm = found.columns(row, times, (1, 4 * 10**9), torch.bfloat16, [])
    assert gemm["of_sustained"] == pytest.approx(1.0) and gemm["state"] is None


def test_every_row_has_its_conditions(tiny_case):
    """A kernel alone, and rivals of a function; none of the references is a peer."""
    states = iter([COOL, CAPPED] * 99)
    ceilings = Ceilings(1.0, {"float32": 1.0})
    found = Conditions("cpu", tiny=True, read=lambda: next(states))
    rows = compare(tiny_case, "both", ceilings, "cpu", rounds=2, conditions=found).rows
    assert set(rows) == {"fastmp", "torch eager"} and rows["fastmp"].best_peer == "torch eager"
    columns = rows["fastmp"].columns()
    assert columns["of_sustained"] > 0 and columns["sustained"]["gemm_tflops"] > 0
    assert columns["state"]["sm_mhz"] == [1410, 1980] and columns["changed"]
    item = gpu_rows.Item("kernels", "activation", "bias_gelu", (16, 256))
    (row,) = gpu_rows.rows(item, gpu_rows.Job("cpu", (item,), ceilings, tiny=True))
    assert row["of_sustained"] > 0 and row["state"] is None and conditions.COPY not in row


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_tells_its_state():
    read, source = nvml.sensors("cuda")
    if read is None:
        pytest.skip(source)
    found = Conditions("cuda", tiny=True)
    state = found.read()
    assert 100 < state.sm_mhz < 5000 and 0 < state.celsius < 120 and state.memory_mhz > 100
    run = found.references(torch.bfloat16)[GEMM]
    assert run() > 0
