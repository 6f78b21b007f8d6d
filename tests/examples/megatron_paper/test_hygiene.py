"""What is left out of a corpus: pages of a test set and near-duplicates; and how many."""

from __future__ import annotations

import importlib.util
import itertools
import sys

import numpy as np
import pytest

from examples.megatron_paper.corpus import hygiene
from examples.megatron_paper.corpus.command import main
from examples.megatron_paper.corpus.ngrams import ngram_hashes
from fastmp.apps import cli
from fastmp.training.data.corpus import build
from fastmp.training.data.tokenfile import open_split, open_tokenizer, read_index

RNG = np.random.default_rng(3)
needs_rensa = pytest.mark.skipif(importlib.util.find_spec("rensa") is None, reason="rensa is not installed")


def words(count):
    return [f"w{i}" for i in RNG.integers(0, 10**6, count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """20 documents of 300 words; 3 near copies, a distant relative, 2 pages of a test set, 2 short ones."""
    folder = tmp_path_factory.mktemp("corpus")
    documents = [words(300) for _ in range(20)]
    for i, document in enumerate(documents):
        (folder / f"a{i:02}.txt").write_text(" ".join(document))
    for i in range(3):
        copy = [*documents[i]]
        copy[150] = "changed"
        (folder / f"b{i}.txt").write_text(" ".join(copy).upper())
    (folder / "c.txt").write_text(" ".join(documents[5][:150] + words(150)))
    test = words(400)
    (folder / "test.md").write_text(" ".join(test))
    (folder / "d0.txt").write_text(" ".join(words(200) + test[100:180] + words(200)))
    (folder / "d1.txt").write_text(" ".join(test))
    (folder / "d2.txt").write_text(" ".join(words(400) + test[100:120]))  # a quotation, 13 of 413 n-grams
    (folder / "e0.txt").write_text("short")
    (folder / "e1.txt").write_text("one word more")
    return folder


def texts_of(directory):
    index = read_index(directory)
    tokenizer = open_tokenizer(directory, index)
    found = []
    for name in index.splits:
        split = open_split(directory, index, name)
        bounds = split.documents.tolist()
        found += [tokenizer.decode(split.tokens[a:b].tolist()) for a, b in itertools.pairwise(bounds)]
    return found


def counts(directory):
    source = read_index(directory).source
    return tuple(source[f"num_{why}"] for why in ("excluded", "near_duplicates", "short"))


def test_excluded_and_short_documents_are_left_out_and_counted(folder, tmp_path, capsys):
    options = ["build", "--input", f"{folder}/*.txt", "--out", str(tmp_path / "d")]
    options += ["--validation-fraction", "0"]
    assert main([*options, "--exclude", f"{folder}/*.md", "--min-tokens", "14"]) == 0
    assert "left out   2 overlap excluded files, 2 have too few tokens" in capsys.readouterr().out
    left_out = {"d0.txt", "d1.txt", "e0.txt", "e1.txt"}
    expected = sorted(path.read_text() for path in folder.glob("*.txt") if path.name not in left_out)
    assert sorted(texts_of(tmp_path / "d")) == expected and counts(tmp_path / "d") == (2, 0, 2)
    source = read_index(tmp_path / "d").source
    assert (source["min_tokens"], source["exclude"]) == (14, [f"{folder}/*.md"])
    assert cli.main(["data", "stats", str(tmp_path / "d")]) == 0
    assert "left out   2 overlap excluded files, 2 have" in capsys.readouterr().out


@needs_rensa
def test_of_near_duplicates_the_first_stays(folder, tmp_path):
    built = [
        build(
            [f"{folder}/*.txt"],
            tmp_path / name,
            select=hygiene.hygiene(dedup_jaccard=0.7),
            validation_fraction=0.1,
        )
        for name in ("one", "two")
    ]
    assert counts(built[0]) == (0, 3, 0)
    text = " ".join(texts_of(built[0]))
    assert "CHANGED" not in text and (folder / "c.txt").read_text()[-300:] in text
    for file in built[0].iterdir():
        assert file.read_bytes() == (built[1] / file.name).read_bytes()


@needs_rensa
def test_duplicates_are_those_of_the_exact_similarity():
    """Of pairs from 0 to 1, those off the threshold by four standard deviations of the estimate."""
    pairs = []
    for share in np.linspace(0, 1, 101):
        document = RNG.integers(0, 1 << 63, 400, dtype=np.uint64)
        changed = document.copy()
        changed[int(share * 400) :] = RNG.integers(0, 1 << 63, 400 - int(share * 400), dtype=np.uint64)
        jaccard = len(np.intersect1d(document, changed)) / len(np.union1d(document, changed))
        pairs.append((document, changed, jaccard))
    made = hygiene.signatures([one for one, _, _ in pairs] + [other for _, other, _ in pairs])
    dropped = hygiene.near_duplicates(made, 0.7)
    assert not dropped[:101].any()
    for (_, _, jaccard), drop in zip(pairs, dropped[101:]):
        estimate_spread = 4 * (jaccard * (1 - jaccard) / hygiene.SLOTS) ** 0.5
        if abs(jaccard - 0.7) > estimate_spread:
            assert drop == (jaccard > 0.7), jaccard
    again = hygiene.signatures(one for one, _, _ in pairs)
    assert (again == made[:101]).all()


def test_what_resembles_only_a_dropped_document_stays():
    """Chains of four, each like the one before it alone: two stay, whichever band meets first."""
    for _ in range(50):
        chain = [RNG.integers(0, 1 << 32, hygiene.SLOTS, dtype=np.uint32)]
        for part in np.split(RNG.permutation(hygiene.SLOTS)[:90], 3):
            chain.append(chain[-1].copy())
            chain[-1][part] = RNG.integers(0, 1 << 32, len(part), dtype=np.uint32)
        assert hygiene.near_duplicates(np.stack(chain), 0.7).tolist() == [False, True, False, True]


def test_texts_without_words_are_alike_only_where_they_are_equal():
    assert hygiene.shingles(b"...").tolist() != hygiene.shingles(b"!!!").tolist()
    assert hygiene.shingles(b"two words").tolist() == ngram_hashes(b"Two, words!", 2).tolist()


def test_mistakes(folder, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"dedup_jaccard must be between 0 and 1, got 1.5"):
        hygiene.hygiene(dedup_jaccard=1.5)
    with pytest.raises(ValueError, match="all 2 documents overlap the excluded files"):
        everything = hygiene.hygiene([f"{folder}/*.txt"])
        build([f"{folder}/d[01].txt"], tmp_path / "d", select=everything)
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(ValueError, match=r"needs the rensa library: pip install rensa"):
        hygiene.hygiene(dedup_jaccard=0.7)
    assert not (tmp_path / "d").exists() and not list(tmp_path.glob(".d.*"))
