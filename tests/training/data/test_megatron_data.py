"""Corpora of Megatron-LM: every document once, the samples of token files, documents, and damaged files."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_tools import texts_of_bytes, write_megatron
from train_tools import arguments, losses

from fastmp.apps.data import main
from fastmp.apps.train import main as train
from fastmp.config import DataConfig
from fastmp.config.data_files import expected_vocab_size, is_megatron
from fastmp.plan.resources import main as plan
from fastmp.training.data.corpus import build
from fastmp.training.data.dataset import IGNORE_INDEX, TokenDataset
from fastmp.training.data.megatron import open_files, open_splits
from fastmp.training.data.sampling import sample_starts
from fastmp.training.data.tokenize import ByteTokenizer, train_bpe

TEXTS = [f"document {i}: " + f"line {i} of many, number {i * i}\n" * (1 + i % 5) for i in range(40)]
END = 256


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_megatron(
        tmp_path_factory.mktemp("megatron") / "my-gpt.v2_text_document", texts_of_bytes(TEXTS)
    )


def dataset(source, *, seq_len=16, micro_batch_size=2, **options):
    return TokenDataset(source, seq_len=seq_len, micro_batch_size=micro_batch_size, seed=5, **options)


def test_all_documents_are_there_and_the_last_ones_are_held_out(prefix):
    data = dataset(prefix, validation_fraction=0.1)
    text = data.tokenizer.decode(np.concatenate([data.train.tokens, data.validation.tokens]))
    assert text == "".join(TEXTS) and data.vocab_size == 257
    assert data.tokenizer.decode(data.validation.tokens) == "".join(TEXTS[36:])
    assert (data.train.info.num_documents, data.validation.info.num_documents) == (36, 4)
    assert data.train.info.bytes_per_token is None
    whole = dataset(prefix, validation_fraction=0.0)
    assert whole.train.info.num_tokens == sum(map(len, TEXTS)) + 40
    with pytest.raises(ValueError, match="no text was held out"):
        _ = whole.validation


def test_any_spelling_of_the_prefix_and_nothing_is_copied(prefix):
    for spelling in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        assert is_megatron(spelling) and dataset(spelling).train.path == prefix.with_name(
            f"{prefix.name}.bin"
        )
    files = open_files(prefix)
    assert isinstance(files.tokens.base, np.memmap) and files.tokens.dtype == np.uint16
    train, _ = open_splits(prefix, ByteTokenizer(), 0.1)
    assert np.shares_memory(train.tokens, train.files.tokens)


@pytest.mark.parametrize("kind", "BbhiqH")
def test_all_types_of_ids_and_documents_of_several_sequences(tmp_path, kind):
    documents = [[[1, 2, 3], [4]], [[5, 6]], [[], [7, 8], [9]], [[10, 11, 12]]]
    prefix = write_megatron(tmp_path / "c", documents, kind=kind, modes=[0] * 7)
    files = open_files(prefix)
    assert files.tokens.tolist() == [*range(1, 13)] and files.largest_id() == 12
    assert files.starts(0, 5).tolist() == [0, 4, 6, 9, 12]
    assert files.begins_between(1, 9).tolist() == [4, 6] and files.begins_between(4, 5).tolist() == [4]


def test_documents_of_an_empty_text_have_no_token_and_no_end(tmp_path):
    """As `preprocess_data.py --append-eod` writes them: they change nothing, wherever they stand."""
    full, nothing = texts_of_bytes(["some text", "and more of it", "and an end"]), []
    plain = write_megatron(tmp_path / "plain", full)
    sparse = write_megatron(tmp_path / "sparse", [nothing, [[]], full[0], nothing, *full[1:], nothing])
    one, other = (dataset(p, validation_fraction=0, document_masking=True) for p in (plain, sparse))
    assert other.train.with_end and one.train.with_end
    for step in range(6):
        a, b = one.batch(step, 0, 1, 0, 1), other.batch(step, 0, 1, 0, 1)
        assert torch.equal(a["tokens"], b["tokens"])
        assert torch.equal(a["documents"].position_ids_BT, b["documents"].position_ids_BT)
    with pytest.raises(ValueError, match=r"the last 1 of 7 documents, which would be held out, have 0 token"):
        dataset(sparse)


def test_samples_are_those_of_token_files_with_the_same_stream(tmp_path):
    """A document ends with end-of-text in the one and begins with it in the other: the ring is the same."""
    (tmp_path / "all.txt").write_text("x" * 500)
    directory = build([str(tmp_path / "all.txt")], tmp_path / "tokens", validation_fraction=0.0)
    prefix = write_megatron(tmp_path / "m", texts_of_bytes(["x" * 500]))
    options = {"document_masking": True, "seq_len": 20}
    ours, theirs = dataset(directory, **options), dataset(prefix, **options, validation_fraction=0.0)
    assert np.roll(theirs.train.tokens, 1).tolist() == ours.train.tokens.tolist()
    at = {}
    for data, shift in ((ours, 0), (theirs, 1)):
        for step in range(40):
            batch, starts = data.batch(step, 0, 1, 0, 1), sample_starts(5, 2 * step, 2, 501, 20)
            for row, start in enumerate(starts.tolist()):
                sample = tuple(batch[name][row].tolist() for name in ("tokens", "targets"))
                positions = batch["documents"].position_ids_BT[row].tolist()
                assert at.setdefault((start + shift) % 501, (sample, positions)) == (sample, positions)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=12), seq_len=st.integers(1, 12), data=st.data()
)
def test_documents_of_a_batch_are_those_of_the_index(tmp_path_factory, lengths, seq_len, data):
    seq_len = min(seq_len, sum(lengths) - 1)
    ids = iter(range(1 << 30))
    documents = [[[next(ids) % 250 for _ in range(n - 1)] + [END]] for n in lengths]
    if lengths[0] > 2:
        documents[0][0][0] = END  # spelt out in the text: not the end of a document
    prefix = write_megatron(tmp_path_factory.mktemp("m") / "p", documents)
    made = dataset(prefix, seq_len=seq_len, validation_fraction=0, document_masking=True, static_shapes=True)
    stream, total = [i for d in documents for i in d[0]], sum(lengths)
    assert made.train.tokens.tolist() == stream
    ends = set((np.cumsum(lengths) - 1).tolist())
    step = data.draw(st.integers(0, 50))
    starts = sample_starts(5, 2 * step, 2, total, seq_len).tolist()
    batch = made.batch(step, 0, 1, 0, 1)
    for row, start in enumerate(starts):
        positions, at = [], -1
        for place in range(start, start + seq_len):
            at = 0 if place == start or place % total in ends else at + 1
            positions.append(at)
        assert batch["documents"].position_ids_BT[row].tolist() == positions
        assert batch["tokens"][row].tolist() == [stream[(start + i) % total] for i in range(seq_len)]
    most = max(1 + sum((s + i) % total in ends for i in range(1, seq_len)) for s in range(total))
    assert made.max_documents == 2 * most


def test_held_out_documents_are_evaluated_once_and_padding_is_no_document(prefix):
    data = dataset(prefix, seq_len=16, micro_batch_size=3, document_masking=True, validation_fraction=0.2)
    held_out, seen = data.validation.tokens, []
    for batch in data.validation_batches():
        padding = batch["targets"] == IGNORE_INDEX
        positions = batch["documents"].position_ids_BT
        begins = ((batch["tokens"] == END) & ~padding) | (torch.arange(16) == 0)
        assert torch.equal(positions == 0, begins)
        seen += batch["targets"][~padding].tolist()
    assert seen == held_out[1:].tolist()


def test_a_second_corpus_is_held_out_whole(prefix, tmp_path):
    other = write_megatron(tmp_path / "valid", texts_of_bytes(["held out text"] * 3))
    data = dataset(prefix, validation_source=other)
    assert data.tokenizer.decode(data.validation.tokens) == "held out text" * 3
    assert data.train.info.num_documents == 40
    (tmp_path / "t.txt").write_text("text of a directory\n" * 30)
    directory = build([str(tmp_path / "t.txt")], tmp_path / "d", validation_fraction=0.5)
    assert dataset(prefix, validation_source=directory).validation.path.name == "validation.bin"
    learnt = build([str(tmp_path / "t.txt")], tmp_path / "e", tokenizer="bpe", vocab_size=260)
    with pytest.raises(ValueError, match=r"differ in tokenizer \(byte and bpe\): build them with the same"):
        dataset(prefix, validation_source=learnt)


def test_a_tokenizer_of_a_file(tmp_path):
    tokenizer = train_bpe([text.encode() for text in TEXTS], 300)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    documents = [[[*tokenizer.encode(text).tolist(), tokenizer.end_of_text]] for text in TEXTS]
    prefix = write_megatron(tmp_path / "p", documents, kind="i")
    data = dataset(prefix, tokenizer=str(tmp_path), document_masking=True)
    assert data.tokenizer.decode(data.train.tokens) == "".join(TEXTS[:38])
    config = DataConfig(path=str(prefix), tokenizer=str(tmp_path))
    assert expected_vocab_size(config) == data.vocab_size
    assert expected_vocab_size(replace(config, tokenizer=str(tmp_path / "none"))) == 0
    assert expected_vocab_size(DataConfig(path=str(prefix))) == 257
    assert expected_vocab_size(DataConfig(path=str(tmp_path / "nothing"))) == 0


def test_the_wrong_tokenizer_is_told_when_the_corpus_is_opened(prefix, tmp_path):
    big = write_megatron(tmp_path / "big", [[[5, 50256]], [[5, 50256]]])
    with pytest.raises(
        ValueError, match=r"big.bin: token id 50256 at token 1 is beyond the 257 tokens of the byte"
    ):
        dataset(big, seq_len=2)
    with pytest.raises(ValueError, match=r"needs the tokenizer it was made with: data.tokenizer is 'bpe'"):
        dataset(prefix, tokenizer="bpe")
    bare = write_megatron(tmp_path / "bare", texts_of_bytes(TEXTS, end=None))
    assert dataset(bare).batch(0, 0, 1, 0, 1)["tokens"].shape == (2, 16)
    with pytest.raises(
        ValueError, match=r"bare.bin: document 0 ends with token 10, not with end-of-text, token 256"
    ):
        dataset(bare, document_masking=True)
    one = write_megatron(tmp_path / "one", texts_of_bytes(["only one"]))
    with pytest.raises(ValueError, match=r"1 document\(s\) are too few to hold out a share of 0.05"):
        dataset(one)


def test_an_id_beyond_the_vocabulary_behind_those_looked_at(tmp_path):
    ids = [7] * 70_000
    ids[69_990] = 300
    prefix = write_megatron(tmp_path / "p", [[ids]])
    data = dataset(prefix, seq_len=1000, validation_fraction=0.0)
    with pytest.raises(ValueError, match=r"p.bin: token id 300 at token 69990 is beyond"):
        for step in range(40):
            data.batch(step, 0, 1, 0, 1)
    negative = write_megatron(tmp_path / "n", [[[1, -1, 3]]], kind="i")
    with pytest.raises(ValueError, match="token id -1 at token 1 is negative"):
        open_files(negative).largest_id()
    with pytest.raises(ValueError, match="token id -1 at token 1"):
        open_splits(negative, ByteTokenizer(), 0)


HEADER = 34  # bytes: then 40 lengths, 40 offsets, 41 documents


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, b"X", "is not an index of Megatron-LM's memory-mapped format"),
        (9, struct.pack("<Q", 2), "has version 2, and 1 is known"),
        (17, b"\x06", "dtype code 6 is not one of integers"),
        (17, b"\xff", "dtype code 255 is not one of integers"),
        (18, struct.pack("<Q", 41), "41 sequences and 41 entries of documents take"),
        (18, struct.pack("<Q", (1 << 64) - 1), "sequences and 41 entries of documents take"),
        (26, struct.pack("<Q", 1 << 60), "entries of documents take"),
        (HEADER, struct.pack("<i", -5), "sequence 0 has a length of -5 tokens"),
        (HEADER, struct.pack("<i", 1 << 30), "sequence 1 is said to lie at byte"),
        (HEADER + 160 + 8, struct.pack("<q", 1 << 50), "sequence 1 is said to lie at byte 1125899906842624"),
        (HEADER + 160, struct.pack("<q", -8), "sequence 0 is said to lie at byte -8"),
        (HEADER + 480, struct.pack("<q", 3), "documents do not run from 0 to its 40 sequences"),
        (HEADER + 480 + 16, struct.pack("<q", 1 << 40), "document 2 ends before it begins"),
        (HEADER + 480 + 16, struct.pack("<q", -1), "document 1 ends before it begins"),
    ],
)
def test_a_damaged_index_is_named(prefix, tmp_path, place, value, message):
    raw = bytearray(prefix.with_name(f"{prefix.name}.idx").read_bytes())
    raw[place : place + len(value)] = value
    (tmp_path / "p.idx").write_bytes(raw)
    (tmp_path / "p.bin").write_bytes(prefix.with_name(f"{prefix.name}.bin").read_bytes())
    with pytest.raises(ValueError, match=message) as error:
        open_files(tmp_path / "p")
    assert str(tmp_path / "p.idx") in str(error.value)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_damage_is_worse_than_a_value_error(prefix, tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    for suffix in (".idx", ".bin"):
        raw = bytearray(prefix.with_name(prefix.name + suffix).read_bytes())
        for _ in range(data.draw(st.integers(0, 2))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):
            raw = raw[: data.draw(st.integers(0, len(raw)))]
        (folder / f"p{suffix}").write_bytes(raw)
    try:
        opened = dataset(folder / "p", document_masking=True, validation_fraction=0.1)
        for step in range(20):
            opened.batch(step, 0, 1, 0, 1)
        list(opened.validation_batches())
    except ValueError as error:
        assert str(folder) in str(error)


def test_other_kinds_of_data_missing_and_cut_files(tmp_path, prefix, capsys):
    picture = write_megatron(tmp_path / "picture", [[[1, 2], [3]]], modes=[0, 1])
    with pytest.raises(ValueError, match="sequence 1 has mode 1: only text is read"):
        open_files(picture)
    name = f"{prefix.name}.bin"
    (tmp_path / "a.idx").write_bytes(prefix.with_name(f"{prefix.name}.idx").read_bytes())
    with pytest.raises(ValueError, match=r"a.bin: cannot be read \(No such file"):
        open_files(tmp_path / "a")
    (tmp_path / "a.bin").write_bytes(prefix.with_name(name).read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"a.bin: cut short: \d+ bytes, and a.idx names"):
        open_files(tmp_path / "a")
    assert main(["check", str(tmp_path / "a")]) == 2 and "cut short" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"none.bin: is empty \(0 bytes\)"):
        open_files(write_megatron(tmp_path / "none", []))
    assert main(["check", str(prefix)]) == 0
    out = capsys.readouterr().out
    assert "40 documents, 40 sequences" in out and "ids up to 256" in out


@pytest.mark.full
def test_a_run_on_megatrons_files_and_its_plan(prefix, tmp_path, capsys):
    options = arguments(tmp_path, prefix, data__document_masking="")
    options = [part for part in options if part]
    assert train(options) == 0
    assert "held-out loss" in (out := capsys.readouterr().out) and "nats per token" in out
    assert [step for step, _ in losses(tmp_path / "tiny")] == [1, 2, 3, 4, 5, 6]
    (tmp_path / "r.toml").write_text(f'[data]\npath = "{prefix}"\nseq_len = 32\n[model]\nmax_seq_len = 32\n')
    assert plan([str(tmp_path / "r.toml"), "--world-size", "1"]) == 0


@pytest.mark.parametrize("number", ["1e999", '"a"', "null", "[]"])
def test_a_tokenizer_whose_ids_are_no_numbers_has_no_size_that_is_expected(tmp_path, number):
    (tmp_path / "books.idx").touch()
    path = tmp_path / "tokenizer.json"
    path.write_text(f'{{"model": {{"vocab": {{"a": {number}}}}}, "added_tokens": []}}')
    assert expected_vocab_size(DataConfig(path=str(tmp_path / "books"), tokenizer=str(path))) == 0
