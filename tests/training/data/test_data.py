"""Datasets: what a batch holds at every layout, that held-out text is held out, what `fastmp data` says."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import tokenizer_tools
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastmp.apps.data import main
from fastmp.config import DataConfig
from fastmp.training.data import dataset as data_module
from fastmp.training.data.corpus import build, find_documents, split_documents
from fastmp.training.data.dataset import IGNORE_INDEX, TokenDataset
from fastmp.training.data.sampling import sample_starts
from fastmp.training.data.tokenfile import open_split, read_index
from fastmp.training.data.tokenize import ByteTokenizer, train_bpe, unigram_entropy
from fastmp.training.data.tokenwriter import SplitWriter

DOCUMENTS = [f"document {i}: " + f"line {i} of many, number {i * i}\n" * (3 + i % 7) for i in range(40)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i, text in enumerate(DOCUMENTS):
        (folder / f"{i:02}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module", params=["byte", "bpe"])
def directory(request, texts, tmp_path_factory):
    out = tmp_path_factory.mktemp("data") / request.param
    vocab_size = 400 if request.param == "bpe" else None
    return build(
        [f"{texts}/*.txt"], out, tokenizer=request.param, vocab_size=vocab_size, validation_fraction=0.1
    )


def dataset(directory, *, seq_len=16, micro_batch_size=2, seed=5):
    return TokenDataset(directory, seq_len=seq_len, micro_batch_size=micro_batch_size, seed=seed)


def documents_of(split, tokenizer):
    bounds = itertools.pairwise(split.documents.tolist())
    return [tokenizer.decode(split.tokens[begin:end].tolist()) for begin, end in bounds]


def test_files_hold_every_document_once(directory):
    data = dataset(directory)
    train = documents_of(data.train, data.tokenizer)
    held_out = documents_of(data.validation, data.tokenizer)
    whole = [text for text in train + held_out if text in DOCUMENTS]
    pieces = [text for text in train + held_out if text not in DOCUMENTS]
    assert len(pieces) in (0, 2)  # the document on the boundary, cut in two at a line
    assert sorted(whole + ["".join(pieces)] * (pieces != [])) == sorted(DOCUMENTS)
    for split in (data.train, data.validation):
        assert (split.tokens[split.documents[:-1]] == data.tokenizer.end_of_text).all()
    total = sum(map(len, DOCUMENTS))
    assert data.validation.info.num_bytes == pytest.approx(0.1 * total, abs=60)  # to the nearest line


def test_bytes_and_entropy_are_those_of_the_text(directory):
    data = dataset(directory)
    for split in (data.train, data.validation):
        text = "".join(documents_of(split, data.tokenizer)).encode()
        assert split.info.num_bytes == len(text)
        assert split.info.bytes_per_token == pytest.approx(len(text) / (len(split.tokens) - 1))
        shares = np.bincount(np.frombuffer(text, np.uint8)) / len(text)
        entropy = -sum(p * np.log(p) for p in shares if p > 0)
        assert split.info.unigram_entropy == pytest.approx(entropy)
        assert entropy == pytest.approx(unigram_entropy(np.bincount(list(text))))
    assert data.vocab_size == data.tokenizer.vocab_size > data.train.info.max_token


def test_a_batch_is_the_stream_shifted_by_one(directory):
    data = dataset(directory)
    ring = np.concatenate([data.train.tokens, data.train.tokens]).tolist()
    for step in range(data.train.info.num_tokens // data.seq_len):
        batch = data.batch(step, 0, 1, 0, 1)
        assert set(batch) == {"tokens", "targets"}
        for tokens, targets in zip(batch["tokens"].tolist(), batch["targets"].tolist()):
            assert tokens[1:] == targets[:-1]
            window = [*tokens, targets[-1]]
            assert any(
                ring[i : i + 17] == window for i in range(len(data.train.tokens)) if ring[i] == window[0]
            )
    assert batch["tokens"].shape == batch["targets"].shape == (2, 16)
    assert batch["tokens"].dtype == batch["targets"].dtype == torch.int64


def samples_of_step(data, step, dp_size, num_microbatches):
    """{sample: times} of a step over all ranks and microbatches."""
    batches = [
        data.batch(step, microbatch, num_microbatches, rank, dp_size)
        for microbatch in range(num_microbatches)
        for rank in range(dp_size)
    ]
    return torch.cat([torch.cat([batch["tokens"], batch["targets"][:, -1:]], 1) for batch in batches])


def sorted_rows(rows):
    return sorted(rows.tolist())


@pytest.mark.parametrize(
    ("dp_size", "num_microbatches", "micro_batch_size"), [(2, 4, 1), (4, 1, 2), (1, 1, 8), (8, 1, 1)]
)
def test_the_global_batch_does_not_depend_on_the_layout(
    directory, dp_size, num_microbatches, micro_batch_size
):
    alone = dataset(directory, micro_batch_size=1)
    divided = dataset(directory, micro_batch_size=micro_batch_size)
    for step in (0, 1, 40):
        expected = samples_of_step(alone, step, 1, 8)
        assert sorted_rows(samples_of_step(divided, step, dp_size, num_microbatches)) == sorted_rows(expected)


def test_a_step_can_be_had_again_in_a_new_process(directory):
    first, second = dataset(directory), dataset(directory)
    for _ in range(7):
        first.batch(0, 0, 1, 0, 1)
    assert torch.equal(first.batch(31, 1, 2, 1, 3)["tokens"], second.batch(31, 1, 2, 1, 3)["tokens"])
    other_seed = dataset(directory, seed=6).batch(31, 1, 2, 1, 3)["tokens"]
    assert not torch.equal(second.batch(31, 1, 2, 1, 3)["tokens"], other_seed)


def test_batches_leave_every_generator_alone(directory):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    dataset(directory).batch(3, 0, 1, 0, 1)
    assert torch.equal(torch.get_rng_state(), before[0]) and (np.random.get_state()[1] == before[1]).all()


@given(seq_len=st.integers(1, 700), micro_batch_size=st.integers(1, 5), dp_size=st.integers(1, 4))
def test_validation_covers_the_held_out_text_once(directory, seq_len, micro_batch_size, dp_size):
    data = dataset(directory, seq_len=seq_len, micro_batch_size=micro_batch_size)
    ranks = [list(data.validation_batches(rank, dp_size)) for rank in range(dp_size)]
    assert {len(batches) for batches in ranks} == {data.num_validation_batches(dp_size)}
    targets = []
    for batches in zip(*ranks):
        for batch in batches:
            assert batch["tokens"].shape == batch["targets"].shape == (micro_batch_size, seq_len)
            assert 0 <= batch["tokens"].min() and batch["tokens"].max() < data.vocab_size
            targets += batch["targets"][batch["targets"] != IGNORE_INDEX].tolist()
    assert targets == data.validation.tokens[1:].tolist()


def test_a_quick_look_is_the_start_of_the_whole(directory):
    data = dataset(directory)
    whole = list(data.validation_batches())
    some = list(data.validation_batches(max_batches=2))
    assert len(some) == 2 < len(whole)
    assert all(torch.equal(a["targets"], b["targets"]) for a, b in zip(some, whole))


@pytest.mark.parametrize("text", ["a" * 1000, "é" * 500, "short line\n" * 90])
def test_one_document_is_cut_at_a_line_or_at_least_between_characters(tmp_path, text):
    (tmp_path / "one.txt").write_text(text)
    train, held_out = split_documents(find_documents([str(tmp_path / "one.txt")]), 0.25)
    pieces = [train[0].text().decode(), held_out[0].text().decode()]
    assert "".join(pieces) == text
    assert len(held_out[0].text()) / len(text.encode()) == pytest.approx(0.25, abs=0.02)
    assert "\n" not in text or pieces[0].endswith("\n")


def test_nothing_held_out_on_request(texts, tmp_path):
    data = dataset(build([f"{texts}/*.txt"], tmp_path / "d", validation_fraction=0.0))
    assert data.train.info.num_bytes == sum(map(len, DOCUMENTS))
    with pytest.raises(ValueError, match="no text was held out"):
        next(data.validation_batches())


def test_bpe_learns_from_training_text_alone(tmp_path):
    """A word that only the held-out half holds gets no token of its own."""
    (tmp_path / "one.txt").write_text("common words here\n" * 300 + "zyzzyva\n" * 250)
    out = build(
        [str(tmp_path / "one.txt")], tmp_path / "d", tokenizer="bpe", vocab_size=300, validation_fraction=0.3
    )
    tokenizer = dataset(out).tokenizer
    assert len(tokenizer.encode(" words")) == 1 and len(tokenizer.encode("zyzzyva")) == 7


def test_an_existing_tokenizer_file_can_be_used(directory, texts, tmp_path):
    if not (directory / "tokenizer.json").exists():
        with pytest.raises(ValueError, match=r"absent\.json"):
            build([f"{texts}/*.txt"], tmp_path / "d", tokenizer=str(tmp_path / "absent.json"))
        return
    again = build(
        [f"{texts}/*.txt"],
        tmp_path / "d",
        tokenizer=str(directory / "tokenizer.json"),
        validation_fraction=0.1,
    )
    assert np.array_equal(dataset(again).train.tokens, dataset(directory).train.tokens)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((-1, 0, 1, 0, 1), "step -1"), ((0, 1, 1, 0, 1), "microbatch 1 of 1"), ((0, 0, 1, 2, 2), "rank 2 of 2")],
)
def test_batch_out_of_range(directory, arguments, named):
    with pytest.raises(ValueError, match=named):
        dataset(directory).batch(*arguments)


def test_sizes_that_do_not_fit_are_named(directory):
    with pytest.raises(
        ValueError, match=r"train\.bin: \d+ tokens do not hold one sample of seq_len \+ 1 = 100001"
    ):
        dataset(directory, seq_len=100_000)
    with pytest.raises(ValueError, match="seq_len 0"):
        dataset(directory, seq_len=0)


def test_wide_vocabularies_are_stored_in_32_bits(tmp_path):
    class Wide(ByteTokenizer):
        vocab_size = 70_000

    writer = SplitWriter(tmp_path, "train", Wide())
    writer.add(b"abc", np.array([69_999, 0, 1]))
    with pytest.raises(ValueError, match="token id 70000 is beyond the vocabulary of 70000"):
        writer.add(b"a", np.array([70_000]))
    with pytest.raises(ValueError, match="token id -1 is beyond"):
        writer.add(b"a", np.array([-1]))
    info = writer.finish()
    assert info.max_token == 69_999
    assert np.fromfile(tmp_path / "train.bin", "<u4").tolist() == [256, 69_999, 0, 1]


@pytest.mark.parametrize("lost", ["train.bin", "train.documents"])
@pytest.mark.parametrize("kept", [None, 0, 5])
def test_a_writer_goes_on_only_behind_all_that_it_saved(tmp_path, lost, kept):
    writer = SplitWriter(tmp_path, "train", ByteTokenizer())
    writer.add(b"text", np.arange(4))
    saved = writer.save()
    SplitWriter(tmp_path, "train", ByteTokenizer(), saved)
    if kept is None:
        (tmp_path / lost).unlink()
    else:
        os.truncate(tmp_path / lost, kept)
    with pytest.raises(
        ValueError, match=f"{re.escape(str(tmp_path))}: expected .*unfinished build.*delete it"
    ):
        SplitWriter(tmp_path, "train", ByteTokenizer(), saved)


def test_documents_that_do_not_come_back_are_counted(tmp_path):
    writer = SplitWriter(tmp_path, "train", ByteTokenizer())
    for ids in ([97, 98, 99], [97, 98]):
        writer.add(b"abc", np.array(ids))
    assert writer.finish().num_changed == 1


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory):
    """Documents of 1 to 40 bytes."""
    folder = tmp_path_factory.mktemp("short")
    rng = np.random.default_rng(3)
    for i, length in enumerate([*rng.integers(1, 41, 30), 1, 1, 1]):
        (folder / f"{i:02}.txt").write_bytes(bytes(rng.integers(97, 122, length).astype(np.uint8)))
    return build([f"{folder}/*.txt"], folder / "tokens", validation_fraction=0.2)


@settings(max_examples=40)
@given(step=st.integers(0, 200), seq_len=st.integers(1, 70))
def test_documents_of_a_batch_are_those_of_the_file(short_documents, step, seq_len):
    """Which span two samples, begin one, are empty, or wrap around the end of the file."""
    options = {"seq_len": seq_len, "micro_batch_size": 3, "seed": 5}
    data = TokenDataset(short_documents, **options, document_masking=True)
    tokens = data.train.tokens.copy()
    tokens[[41, 42, 43, 99]] = data.tokenizer.end_of_text
    data.train = replace(data.train, tokens=tokens, checked=np.ones_like(data.train.checked))
    total, begins = data.train.info.num_tokens, np.flatnonzero(tokens == data.tokenizer.end_of_text)
    assert set(data.train.documents[:-1]) < set(begins) and (np.diff(begins) == 1).any()
    batch, starts = data.batch(step, 0, 1, 0, 1), sample_starts(5, 3 * step, 3, total, seq_len)
    places = starts[:, None] + np.arange(seq_len)
    of_documents = np.concatenate([begins, begins + total])
    began = of_documents[np.searchsorted(of_documents, places, side="right") - 1]
    positions = places - np.maximum(began, starts[:, None])
    assert batch["documents"].position_ids_BT.tolist() == positions.tolist()
    borders = batch["documents"].borders_n
    assert borders.tolist() == [*np.flatnonzero(positions == 0), 3 * seq_len]
    assert int(borders.diff().max()) == batch["documents"].longest


@pytest.mark.parametrize("seq_len", [1, 7, 40, 300])
def test_there_is_room_for_the_documents_of_any_batch(short_documents, seq_len):
    options = {"seq_len": seq_len, "micro_batch_size": 3, "seed": 5}
    data = TokenDataset(short_documents, **options, document_masking=True, static_shapes=True)
    ends = np.tile(data.train.tokens, 2)[1:] == data.tokenizer.end_of_text
    sums = np.concatenate([[0], np.cumsum(ends)])
    most = 1 + max(sums[s + seq_len - 1] - sums[s] for s in range(data.train.info.num_tokens))
    assert data.train.max_documents(seq_len) == most and data.max_documents == 3 * most
    for step in range(5):
        documents = data.batch(step, 0, 1, 0, 1)["documents"]
        assert documents.borders_n.shape == (3 * most + 1,)
        assert (documents.longest, documents.static) == (seq_len, True)


def test_padding_of_held_out_text_is_no_document_of_each_token(short_documents):
    data = TokenDataset(short_documents, seq_len=16, micro_batch_size=3, seed=5, document_masking=True)
    seen = []
    for batch in data.validation_batches():
        positions, padding = batch["documents"].position_ids_BT, batch["targets"] == IGNORE_INDEX
        assert not (padding & (positions == 0))[:, 1:].any()
        begins = (batch["tokens"] == data.tokenizer.end_of_text) | (torch.arange(16) == 0)
        assert torch.equal(positions[~padding] == 0, begins[~padding])
        seen.append(padding.any())
    assert any(seen) and "documents" not in dataset(short_documents).batch(0, 0, 1, 0, 1)


def test_a_models_tokenizer_builds_token_files_and_its_losses_are_told(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("\n".join(tokenizer_tools.TEXTS) * 20 + "e\u0301")
    model = tokenizer_tools.qwen_3(tmp_path / "model")
    common = ["build", "--input", str(tmp_path / "text.txt"), "--tokenizer", str(model)]
    assert main([*common, "--out", str(tmp_path / "d"), "--validation-fraction", "0"]) == 0
    assert "not lossless: 1 of these documents do not come back" in capsys.readouterr().out
    assert main([*common, "--out", str(tmp_path / "e"), "--end-of-text", "<|im_end|>"]) == 0
    data = dataset(tmp_path / "e")
    library = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    assert data.tokenizer.end_of_text == library.token_to_id("<|im_end|>") == data.train.tokens[0]
    assert main([*common[:-1], "byte", "--out", str(tmp_path / "f"), "--end-of-text", "a"]) == 2
    assert "end_of_text 'a' goes with a tokenizer.json, not 'byte'" in capsys.readouterr().err


def test_built_in_texts():
    assert len(find_documents(["pydoc"])) > 50
    assert sum(document.num_bytes for document in find_documents(["stdlib"])) > 5e6


def test_held_out_documentation_is_not_in_the_training_text():
    train, held_out = (
        b"\n".join(document.text() for document in part)
        for part in split_documents(find_documents(["pydoc"]), 0.05)
    )
    width = 48
    seen = {train[i : i + width] for i in range(len(train) - width)}
    copied = sum(held_out[i : i + width] in seen for i in range(len(held_out) - width))
    assert copied < 0.06 * len(held_out)


def test_from_config_builds_once(tmp_path, monkeypatch):
    config = DataConfig(text="pydoc", seq_len=32, micro_batch_size=3)
    first = TokenDataset.from_config(config, cache_dir=tmp_path)
    monkeypatch.setattr(data_module, "build", None)  # a second build would fail
    second = TokenDataset.from_config(config, cache_dir=tmp_path)
    assert torch.equal(first.batch(0, 0, 1, 0, 1)["tokens"], second.batch(0, 0, 1, 0, 1)["tokens"])
    assert first.batch(0, 0, 1, 0, 1)["tokens"].shape == (3, 32)
    by_path = DataConfig(path=str(first.train.path.parent), seq_len=32, micro_batch_size=3)
    assert len(TokenDataset.from_config(by_path, cache_dir=tmp_path / "unused").train.tokens)
    with pytest.raises(ValueError, match="pydoc, stdlib, got 'wikipedia'"):
        TokenDataset.from_config(DataConfig(text="wikipedia"), cache_dir=tmp_path)


def test_tokenizer_files_of_one_name_are_not_mixed_up(tmp_path):
    """The text built with one is not served to a recipe that names another."""
    sizes = []
    for size in (300, 310):
        path = tmp_path / str(size) / "tokenizer.json"
        path.parent.mkdir()
        path.write_text(train_bpe([text.encode() for text in DOCUMENTS], size).to_json())
        config = DataConfig(text="pydoc", tokenizer=str(path), seq_len=32, micro_batch_size=1)
        sizes.append(TokenDataset.from_config(config, cache_dir=tmp_path / "cache").vocab_size)
    assert sizes == [300, 310]


def test_standard_library_with_a_dangling_link(tmp_path, monkeypatch):
    (tmp_path / "one.py").write_text("1\n")
    (tmp_path / "link.py").symlink_to("absent")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert [document.name for document in find_documents(["stdlib"])] == [str(tmp_path / "one.py")]


def test_text_of_which_the_tokenizer_makes_nothing_is_refused(tmp_path):
    (tmp_path / "blank.txt").write_text(" \n ")
    model = tokenizer_tools.bert(tmp_path / "model")
    with pytest.raises(ValueError, match="train: the tokenizer makes no token of this text"):
        build([str(tmp_path / "blank.txt")], tmp_path / "d", tokenizer=str(model), validation_fraction=0)
    assert not (tmp_path / "d").exists()


def test_a_file_whose_name_has_wildcards(tmp_path):
    (tmp_path / "notes[1].txt").write_text("text")
    assert [document.name for document in find_documents([f"{tmp_path}/notes[1].txt"])] == [
        f"{tmp_path}/notes[1].txt"
    ]


def test_an_impossible_directory_is_one_line(texts, tmp_path, capsys):
    out = str(tmp_path / ("d" * 300))
    assert main(["build", "--input", f"{texts}/*.txt", "--out", out]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fastmp data: ") and said.count("\n") == 1 and out in said


def test_command_line(texts, tmp_path, capsys):
    out = str(tmp_path / "d")
    more = ["--tokenizer", "bpe", "--vocab-size", "300"]
    assert main(["build", "--input", f"{texts}/*.txt", "--out", out, *more]) == 0
    assert "bpe tokenizer, 300 tokens, uint16" in capsys.readouterr().out
    assert main(["check", out]) == 0
    assert "all checksums match" in capsys.readouterr().out
    assert main(["stats", out]) == 0
    assert "nats/byte" in capsys.readouterr().out
    assert main(["build", "--input", f"{texts}/*.pdf", "--out", str(tmp_path / "e")]) == 2
    printed = capsys.readouterr()
    assert printed.err == f"fastmp data: no file matches '{texts}/*.pdf'\n" and not printed.out
    index = read_index(tmp_path / "d")
    assert open_split(tmp_path / "d", index, "train").info.num_documents >= 30
    with pytest.raises(SystemExit, match="2"):
        main(["build", "--out", out])
