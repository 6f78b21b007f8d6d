"""Reading of untrusted files: memory in proportion to the file, and files that are no files."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from fastmp.config import file_access
from fastmp.config.file_access import read_file


def peak_memory(work):
    """Return the result of `work` and the most bytes that it had allocated."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1000, 1_000_000])
def test_memory_is_that_of_the_file_and_not_of_its_limit(size, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    content, peak = peak_memory(lambda: read_file(path, 1 << 34))
    assert content == path.read_bytes()
    assert peak < 1.1 * size + 200_000


def test_a_file_at_its_limit_is_read_and_a_larger_one_is_not(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    assert read_file(path, 100_000) == path.read_bytes()
    with pytest.raises(OSError, match="larger than any file of its kind, 99999 bytes"):
        read_file(path, 99_999)


def test_a_file_without_a_size_is_read_whole_and_within_its_limit():
    path = Path("/proc/self/mountinfo")
    assert path.stat().st_size == 0
    assert read_file(path, 1 << 20) == path.read_bytes()
    with pytest.raises(OSError, match="larger"):
        read_file(path, 10)


def test_a_file_that_grows_while_it_is_read_does_not_pass_its_limit(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 300_000)
    fstat = os.fstat
    shrink = lambda d: os.stat_result([*fstat(d)[:6], 1000, *fstat(d)[7:]])  # noqa: E731
    monkeypatch.setattr(file_access.os, "fstat", shrink)
    content, peak = peak_memory(lambda: read_file(path, 1 << 34))
    assert content == path.read_bytes() and peak < 1_000_000
    with pytest.raises(OSError, match="larger"):
        read_file(path, 200_000)
