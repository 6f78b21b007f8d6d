"""N-grams: hashes as good as the words themselves, and the overlap of two texts as sets of tuples give it."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_tools import texts_of_bytes, write_megatron

from examples.megatron_paper.corpus.command import main
from examples.megatron_paper.corpus.ngrams import ngram_hashes, overlap
from fastmp.training.data.corpus import build


def tuples(text, n):
    words = re.findall(r"[^\W_]+", text.decode("utf-8", "replace").lower())
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


WORDS = st.sampled_from(
    ["a", "b", "ab", "ba", "aa", "A", "Straße", "ΣΑΣ", "\x00", "x_y", "10", "1", "0", "é"]
)
TEXTS = st.lists(st.tuples(WORDS, st.sampled_from([" ", "\n", ", ", "—", ""])), max_size=30).map(
    lambda parts: "".join(word + gap for word, gap in parts).encode()
)


@settings(max_examples=80, deadline=None)
@given(one=TEXTS | st.binary(max_size=40), other=TEXTS, n=st.integers(1, 4))
def test_hashes_are_equal_where_ngrams_are(one, other, n):
    grams = tuples(one, n) + tuples(other, n)
    hashes = [*ngram_hashes(one, n).tolist(), *ngram_hashes(other, n).tolist()]
    assert len(hashes) == len(grams)
    assert len(set(grams)) == len(set(hashes)) == len(set(zip(grams, hashes)))


def test_no_two_of_very_many_short_words_share_a_hash():
    words = [f"{i:x}" for i in range(100_000)]
    assert len(np.unique(ngram_hashes(" ".join(words).encode(), 1))) == len(words)


@settings(max_examples=30, deadline=None)
@given(
    a=st.lists(TEXTS, max_size=6),
    b=st.lists(TEXTS, max_size=6),
    n=st.integers(1, 3),
    at_once=st.sampled_from([1, 7, 1 << 20]),
)
def test_overlap_is_that_of_sets_of_tuples_in_any_number_of_passes(a, b, n, at_once):
    there = {gram for text in b for gram in tuples(text, n)}
    of_a = [tuples(text, n) for text in a]
    everything = [gram for grams in of_a for gram in grams]
    found = overlap(lambda: a, lambda: b, n, hashes_at_once=at_once)
    assert (found.ngrams, found.documents) == (len(everything), len(a))
    assert found.ngrams_found == sum(gram in there for gram in everything)
    assert (found.different, found.different_found) == (len(set(everything)), len(set(everything) & there))
    assert found.documents_found == sum(any(gram in there for gram in grams) for grams in of_a)


def test_the_command_takes_text_token_files_and_megatrons(tmp_path, capsys):
    texts = [f"one two three four five six seven eight nine {i} ten" for i in range(6)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    (tmp_path / "test.md").write_text(
        "One, two -- THREE four five six seven eight! nine and more, which is new"
    )
    directory = build([f"{tmp_path}/*.txt"], tmp_path / "d", validation_fraction=0.3)
    prefix = write_megatron(tmp_path / "m", texts_of_bytes(texts))
    for source in (f"{tmp_path}/*.txt", str(directory), str(prefix)):
        assert main(["overlap", "--json", str(tmp_path / "test.md"), source]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["ngrams"], found["ngrams_found"], found["documents_found"]) == (7, 2, 1)
    assert main(["overlap", "--ngram", "2", f"{tmp_path}/*.txt", str(tmp_path / "test.md")]) == 0
    out = capsys.readouterr().out
    assert "80.000% of all, each time it occurs: 48 of 60" in out and "100.000% of the documents" in out
    assert main(["overlap", str(tmp_path / "nothing"), source]) == 2
    assert "no file matches" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["overlap", "one"])
