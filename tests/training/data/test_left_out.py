"""Documents that a build leaves out and counts, and the progress that it shows."""

from __future__ import annotations

import io

import pytest
from command_tools import Terminal

from fastmp.apps.data import main
from fastmp.training.data.corpus import build
from fastmp.training.data.progress import ProgressLine
from fastmp.training.data.tokenfile import read_index


@pytest.fixture
def folder(tmp_path):
    """Documents of 0, 9, 10 and 11 bytes."""
    for length in (0, 9, 10, 11):
        (tmp_path / f"{length}.txt").write_text("x" * length)
    return tmp_path


def lengths(directory, split="train"):
    index = read_index(directory)
    return index.splits[split].num_bytes, index.source["num_empty"], index.source["num_short"]


def test_a_document_of_exactly_the_fewest_tokens_stays(folder, capsys):
    options = ["--out", str(folder / "d"), "--min-tokens", "10", "--validation-fraction", "0"]
    assert main(["build", "--input", f"{folder}/*.txt", *options]) == 0
    assert "left out   1 are empty, 1 have too few tokens" in capsys.readouterr().out
    assert lengths(folder / "d") == (10 + 11, 1, 1)


def test_a_directory_may_have_the_name_of_a_command_that_moved(folder, capsys, monkeypatch):
    build([f"{folder}/*.txt"], folder / "overlap", validation_fraction=0)
    monkeypatch.chdir(folder)
    assert main(["stats", "overlap"]) == 0 and capsys.readouterr().out.startswith("overlap: byte")


def test_a_filter_sees_documents_with_text_and_adds_to_the_notes(folder):
    def select(documents, progress):
        assert sorted(each.num_bytes for each in documents) == [9, 10, 11]
        return [each for each in documents if each.num_bytes != 10], {"why": "not ten"}

    built = build([f"{folder}/*.txt"], folder / "d", select=select, validation_fraction=0)
    assert lengths(built) == (9 + 11, 1, 0) and read_index(built).source["why"] == "not ten"


def test_mistakes(folder):
    given = {"inputs": [f"{folder}/*.txt"], "out": folder / "d"}
    with pytest.raises(ValueError, match="min_tokens must not be negative, got -1"):
        build(**given, min_tokens=-1)
    with pytest.raises(ValueError, match=r"train: no document has 1000000 tokens \(--min-tokens\)"):
        build(**given, min_tokens=10**6, validation_fraction=0)
    assert not (folder / "d").exists() and not list(folder.glob(".d.*"))


def test_progress_is_one_line_with_a_rate_and_the_time_left(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for stream, lines in ((Terminal(), 1), (io.StringIO(), 4)):
        progress = ProgressLine(stream)
        progress.begin("tokenizing", 1_000_000_000)
        for _ in range(120):
            now[0] += 1.0
            progress.add(1_000_000)
        progress.end()
        assert stream.getvalue().count("\n") == lines
        last = stream.getvalue().replace("\r", "\n").rstrip("\n").rsplit("\n", 1)[-1].rstrip()
        assert last == ("tokenizing: 120 documents, 120 of 1,000 MB, 1 documents/s, 1.0 MB/s, 15 min left")
