"""Builds that were killed go on where they had saved and end with the same bytes, in bounded memory."""

from __future__ import annotations

import os
import signal
import tracemalloc

import numpy as np
import pytest
from command_tools import fork
from marks import full

from fastmp.apps.cli import main
from fastmp.training.data import corpus
from fastmp.training.data.corpus import build
from fastmp.training.data.tokenfile import open_split, read_index, verify


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "texts").mkdir()
    for i in range(60):
        text = " ".join(f"w{n}" for n in rng.integers(0, 500, int(rng.integers(1, 900))))
        (tmp_path / "texts" / f"{i:02}.txt").write_text(text)
    return tmp_path / "texts"


def files_of(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def killed(action):
    """Run `action` in a child; return True if it was killed, and check that it ended well otherwise."""
    status = os.waitpid(fork(action), 0)[1]
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("tokenizer", ["byte", *full(["bpe"])])
def test_a_killed_build_goes_on_and_ends_with_the_same_bytes(folder, tmp_path, monkeypatch, tokenizer):
    """Killed at its 9th fsync again and again, which is after it has saved twice."""
    options = {"tokenizer": tokenizer, "validation_fraction": 0.2, "min_tokens": 40}
    options |= {"vocab_size": 300} if tokenizer == "bpe" else {}
    expected = files_of(build([f"{folder}/*.txt"], tmp_path / "whole", **options))
    monkeypatch.setattr(corpus, "GROUP_BYTES", 6000)
    monkeypatch.setattr(corpus, "SAVED_BYTES", 12000)
    real, added, counted = os.fsync, corpus._add, tmp_path / "added"

    def dying_build():
        calls = []

        def fsync(descriptor):
            calls.append(descriptor)
            if len(calls) > 8:
                os.kill(os.getpid(), signal.SIGKILL)
            real(descriptor)

        def add(writer, group, *arguments):
            with counted.open("a") as file:
                file.write("".join(f"{document.name} {document.begin}\n" for document in group))
            return added(writer, group, *arguments)

        os.fsync, corpus._add = fsync, add
        build([f"{folder}/*.txt"], tmp_path / "d", **options)

    times = 0
    while killed(dying_build):
        times += 1
        assert times < 40 and not (tmp_path / "d").exists()
        assert len(list(tmp_path.glob(".d.building-*"))) == 1
    assert times >= 3 and files_of(tmp_path / "d") == expected
    assert not list(tmp_path.glob(".d.*"))
    # What was done since the last save alone is done again: at most SAVED_BYTES and a group each time.
    assert len(counted.read_text().splitlines()) < 61 + times * 12


def test_a_killed_build_of_other_files_or_options_is_not_gone_on_with(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "GROUP_BYTES", 6000)
    monkeypatch.setattr(corpus, "SAVED_BYTES", 12000)
    real = corpus._save_state

    def dying_build():
        def save_and_die(*arguments):
            real(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        corpus._save_state = save_and_die
        build([f"{folder}/*.txt"], tmp_path / "d", overwrite=True)

    for change in ("text", "option"):
        assert killed(dying_build) and list(tmp_path.glob(".d.building-*"))
        if change == "text":  # of the same size
            path = folder / "00.txt"
            text = path.read_text()
            path.write_text(text[::-1])
            os.utime(path, ns=(1, 1))
        options = {"min_tokens": 300} if change == "option" else {}
        build([f"{folder}/*.txt"], tmp_path / "d", overwrite=True, **options)
        build([f"{folder}/*.txt"], tmp_path / f"fresh-{change}", **options)
        assert files_of(tmp_path / "d") == files_of(tmp_path / f"fresh-{change}")
        assert not list(tmp_path.glob(".d.*"))
    for name in (index := read_index(tmp_path / "d")).splits:
        verify(open_split(tmp_path / "d", index, name))


def test_an_interrupted_build_goes_on_as_well(folder, tmp_path, monkeypatch, capsys):
    """Ctrl-C is one line and status 130; what was saved by then stays, and nothing where nothing was."""
    monkeypatch.setattr(corpus, "GROUP_BYTES", 6000)
    command = ["data", "build", "--input", f"{folder}/*.txt", "--out", str(tmp_path / "d")]
    real, groups = corpus._add, []

    def interrupted(*arguments):
        groups.append(arguments)
        if len(groups) > 4:
            raise KeyboardInterrupt
        return real(*arguments)

    for saved_bytes, left in ((1 << 30, 0), (12000, 1)):
        monkeypatch.setattr(corpus, "SAVED_BYTES", saved_bytes)
        monkeypatch.setattr(corpus, "_add", interrupted)
        assert main(command) == 130 and capsys.readouterr().err == "fastmp: interrupted\n"
        assert len(list(tmp_path.glob(".d.building-*"))) == left
        groups.clear()
    monkeypatch.setattr(corpus, "_add", lambda *arguments: groups.append(arguments) or real(*arguments))
    assert main(command) == 0 and not list(tmp_path.glob(".d.*"))
    whole = sum(len(path.read_bytes()) for path in folder.iterdir())
    assert 0 < sum(document.num_bytes for _, group, *_ in groups for document in group) < whole - 12000
    assert files_of(tmp_path / "d") == files_of(
        build([f"{folder}/*.txt"], tmp_path / "whole", tokenizer="byte")
    )


@pytest.mark.full
def test_memory_does_not_follow_the_text(tmp_path, monkeypatch):
    """Of 2 and of 8 MB in documents of 20 kB: what differs is less than 2 kB a document."""
    monkeypatch.setattr(corpus, "GROUP_BYTES", 1 << 16)
    rng, peaks = np.random.default_rng(0), {}
    for number in (100, 400):
        folder = tmp_path / str(number)
        folder.mkdir()
        for i in range(number):
            (folder / f"{i}.txt").write_bytes(rng.integers(97, 123, 20_000).astype(np.uint8).tobytes())
        build([f"{folder}/0.txt"], tmp_path / f"warm{number}")
        tracemalloc.start()
        build([f"{folder}/*.txt"], tmp_path / f"d{number}")
        peaks[number] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[400] - peaks[100] < 300 * 2000, peaks
    assert peaks[400] < 4_000_000, peaks
