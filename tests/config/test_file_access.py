"""Reading of untrusted files: memory in proportion to the file, and files that are no files."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from fastmp.config import file_access
from fastmp.config.file_access import open_writable, read_file, read_json_value


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
    with pytest.raises(OSError, match="larger than any file of its kind: 100000 bytes, at most 99999"):
        read_file(path, 99_999)


def test_a_file_without_a_size_is_read_whole_and_within_its_limit():
    path = Path("/proc/self/mountinfo")
    assert path.stat().st_size == 0
    assert read_file(path, 1 << 20) == path.read_bytes()
    with pytest.raises(OSError, match="larger than any file of its kind: more bytes, at most 10"):
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


def test_json_errors_name_their_line(tmp_path):
    path = tmp_path / "file.json"
    for content, said in (
        (b'{"a": 1,\n "b": 2,\n c}', "line 3: Expecting property name"),
        (b"", "line 1: "),
        (b'{}\n{"a": 1}', "line 2: Extra data"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"file\.json: not JSON \({said}"):
            read_json_value(path, 1000)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"file\.json: not JSON$"):
        read_json_value(path, 1000)


@pytest.mark.parametrize(("mode", "left"), [("wb", b"xy"), ("r+b", b"xyc"), ("ab", b"abcxy")])
def test_modes_of_writing_are_those_of_open(mode, left, tmp_path):
    path = tmp_path / "file"
    if mode == "r+b":
        with pytest.raises(FileNotFoundError):
            open_writable(path, mode)
        assert not path.exists()
    path.write_bytes(b"abc")
    with open_writable(path, mode) as file:
        file.write(b"xy")
    assert path.read_bytes() == left
    path.unlink()
    if mode != "r+b":
        open_writable(path, mode).close()
        assert path.exists()
