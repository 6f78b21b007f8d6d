"""Tokenizers lose no byte, count bytes right, and refuse anything else by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastmp.train.tokenize import END_OF_TEXT, BpeTokenizer, ByteTokenizer, load_tokenizer, unigram_entropy

CORPUS = [b"the cat sat on the mat, the end.\n" * 20, "naïve café — 日本語 😀\n".encode() * 20]


@pytest.fixture(scope="module")
def bpe():
    return BpeTokenizer.train(CORPUS, 290)


@given(st.binary(max_size=300))
def test_byte_round_trip(data):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(data)
    assert ids.dtype == np.int64 and tokenizer.decode_bytes(ids) == data
    assert tokenizer.token_lengths[ids].sum() == len(data)


@settings(max_examples=200)
@given(
    text=st.text(max_size=200) | st.sampled_from([END_OF_TEXT, f"a{END_OF_TEXT}b", "the the the", "\r\n\t\0"])
)
def test_bpe_round_trip(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text and bpe.decode_bytes(ids) == text.encode()
    assert bpe.token_lengths[ids].sum() == len(text.encode())
    assert bpe.end_of_text not in ids  # text that spells the marker is text


def test_bpe_is_deterministic_and_learns(bpe):
    again = BpeTokenizer.train(iter(CORPUS), 290)
    assert again.to_json() == bpe.to_json()
    assert bpe.vocab_size == 290
    assert len(bpe.encode(CORPUS[0])) < len(CORPUS[0]) / 2


def test_bpe_batch_is_one_by_one(bpe):
    for one, batched in zip(CORPUS, bpe.encode_batch(CORPUS)):
        assert np.array_equal(bpe.encode(one), batched)


def test_bpe_stops_where_the_text_has_no_more_pairs():
    assert 257 <= BpeTokenizer.train([b"ab"], 5000).vocab_size < 300


def test_saved_tokenizer_loads_equal(bpe, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe.to_json())
    loaded = load_tokenizer(path)
    text = "the naïve 日 cat"
    assert np.array_equal(loaded.encode(text), bpe.encode(text))
    assert (loaded.vocab_size, loaded.end_of_text) == (bpe.vocab_size, bpe.end_of_text)
    assert isinstance(load_tokenizer("byte"), ByteTokenizer)


def test_end_of_text_stands_for_nothing(bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        assert tokenizer.token_lengths[tokenizer.end_of_text] == 0
        assert (
            tokenizer.decode([*tokenizer.encode("a"), tokenizer.end_of_text, *tokenizer.encode("b")]) == "ab"
        )
        assert len(tokenizer.token_lengths) == tokenizer.vocab_size


def test_a_character_cut_in_two_is_shown_not_raised(bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        half = [tokenizer.encode("é")[0]] if tokenizer.name == "byte" else [bpe.encode("\u07ff")[0]]
        assert tokenizer.decode(half) == "\ufffd"


@pytest.mark.parametrize("bad", (-1, 300, 10**12))
def test_an_id_beyond_the_vocabulary_is_named(bpe, bad):
    for tokenizer in (ByteTokenizer(), bpe):
        with pytest.raises(ValueError, match=f"id {bad} is outside the vocabulary of {tokenizer.vocab_size}"):
            tokenizer.decode([bad])


def test_text_that_is_not_text_is_named(bpe):
    with pytest.raises(ValueError, match="not UTF-8 at byte 2"):
        bpe.encode(b"ab\xff")
    with pytest.raises(ValueError, match="half a surrogate pair at character 1"):
        ByteTokenizer().encode("a\ud800")


def test_vocabulary_too_small_for_bytes():
    with pytest.raises(ValueError, match=r"at least 257.*got 256"):
        BpeTokenizer.train(CORPUS, 256)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.json"):
        load_tokenizer(tmp_path / "absent.json")


def drop_byte(description):
    del description["model"]["vocab"]["Ā"]


def drop_marker(description):
    description["added_tokens"].clear()
    description["model"]["vocab"].pop(END_OF_TEXT)


def strange_token(description):
    description["model"]["vocab"]["日"] = len(description["model"]["vocab"])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d["model"].update(type="WordPiece"), "WordPiece"),
        (lambda d: d.pop("model"), "not a tokenizer"),
        (drop_marker, "token"),
        (drop_byte, "token"),
        (strange_token, "byte-level characters"),
    ],
)
def test_other_tokenizers_are_refused_by_file_name(bpe, tmp_path, change, named):
    description = json.loads(bpe.to_json())
    change(description)
    path = tmp_path / "strange.json"
    path.write_text(json.dumps(description))
    with pytest.raises(ValueError, match=rf"strange\.json.*{named}"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA/////w=="}),  # panics
        (
            "pre_tokenizer",
            {"type": "Split", "pattern": {"Regex": "(.+)+\\1x"}, "behavior": "Isolated", "invert": False},
        ),
    ],
)
def test_a_tokenizer_whose_parts_fail_on_text_is_named(bpe, tmp_path, part, value):
    path = tmp_path / "strange.json"
    path.write_text(json.dumps({**json.loads(bpe.to_json()), part: value}))
    with pytest.raises(ValueError, match=r"strange\.json: "):
        load_tokenizer(path).encode("A line of text, and numbers, " * 9)


@settings(max_examples=150)
@given(data=st.data())
def test_a_damaged_tokenizer_file_loads_right_or_raises_value_error(bpe, tmp_path_factory, data):
    raw = bytearray(bpe.to_json().encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=8))
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    path.write_bytes(raw)
    try:
        loaded = load_tokenizer(path)
    except ValueError as error:
        assert "damaged.json" in str(error)
    else:  # still a byte-level BPE: then it must still count bytes right, or notice that it does not
        assert len(loaded.token_lengths) == loaded.vocab_size


def test_entropy_against_known_distributions():
    assert unigram_entropy(np.bincount([0, 1, 2, 3])) == pytest.approx(np.log(4))
    assert unigram_entropy(np.array([7])) == 0.0 and unigram_entropy(np.array([], np.int64)) == 0.0
    assert unigram_entropy(np.array([1, 3])) == pytest.approx(0.25 * np.log(4) + 0.75 * np.log(4 / 3))
