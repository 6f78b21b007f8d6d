"""Damaged, hostile, half-written token files: one ValueError that names the file, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from command_tools import fork
from hypothesis import given
from hypothesis import strategies as st

from fastmp.apps.data import main
from fastmp.training.data import corpus, tokenfile
from fastmp.training.data.corpus import DatasetExists, build
from fastmp.training.data.dataset import TokenDataset
from fastmp.training.data.tokenfile import open_split, open_tokenizer, read_index, verify
from fastmp.training.data.tokenwriter import staged


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02}.txt").write_text(f"text number {i}\n" * (5 + i))
    return folder


@pytest.fixture
def out(texts, tmp_path):
    return build([f"{texts}/*.txt"], tmp_path / "d", tokenizer="bpe", vocab_size=270, validation_fraction=0.2)


def open_all(directory):
    return TokenDataset(directory, seq_len=8, micro_batch_size=2, seed=0)


SPLIT_FILES = [f"{a}.{b}" for a in ("train", "validation") for b in ("bin", "documents", "checksums")]


def make_fifo(path):
    os.mkfifo(path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def extend(path):
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.mark.parametrize("change", [cut, extend, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("name", [*SPLIT_FILES, "tokenizer.json", "index.json"])
def test_a_damaged_file_is_named_when_opened(out, name, change, capsys):
    change(out / name)
    with pytest.raises(ValueError, match=name.replace(".", r"\.")) as caught:
        open_all(out)
    assert "\n" not in str(caught.value)
    assert main(["stats", str(out)]) == 2
    assert name in capsys.readouterr().err


def test_what_is_wrong_is_said(out):
    size = (out / "train.bin").stat().st_size
    cut(out / "train.bin")
    with pytest.raises(ValueError, match=rf"cut short: {size - 1} bytes, the index says {size}"):
        open_all(out)
    with pytest.raises(ValueError, match="no token files found"):
        open_all(out.parent / "absent")


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "train.documents", "train.checksums"])
def test_check_finds_one_flipped_bit_anywhere(out, name, capsys):
    raw = bytearray((out / name).read_bytes())
    for bit in (0, len(raw) * 4 + 3, len(raw) * 8 - 1):
        raw[bit // 8] ^= 1 << bit % 8
        (out / name).write_bytes(raw)
        assert main(["check", str(out)]) == 2
        assert name in capsys.readouterr().err
        raw[bit // 8] ^= 1 << bit % 8
    (out / name).write_bytes(raw)
    assert main(["check", str(out)]) == 0


@pytest.fixture(scope="module")
def several_blocks(tmp_path_factory):
    """Tokens of three blocks and a part of a fourth."""
    folder = tmp_path_factory.mktemp("blocks")
    for i in range(9):
        (folder / f"{i}.txt").write_bytes(bytes(range(32, 127)) * (120 + i))
    return build([f"{folder}/*.txt"], folder / "d", validation_fraction=0.0)


def flip(path, byte):
    raw = bytearray(path.read_bytes())
    raw[byte] ^= 1
    path.write_bytes(raw)


def test_a_damaged_block_is_one_error_and_only_when_it_is_read(several_blocks):
    size = tokenfile.BLOCK_BYTES
    path, total = several_blocks / "train.bin", (several_blocks / "train.bin").stat().st_size
    assert 3 * size < total < 4 * size
    for byte, block, last in ((0, 0, size - 1), (2 * size, 2, 3 * size - 1), (total - 1, 3, total - 1)):
        flip(path, byte)
        try:
            train = open_all(several_blocks).train
            named = rf"train\.bin: damaged: block {block} \(bytes {block * size} to {last}\) has checksum"
            for begin in (0, size, 2 * size, 3 * size):  # the last of a block, and the first of the next
                before, behind = begin // 2 - 3, min(begin // 2 + 3, train.info.num_tokens)
                if begin // size == block or (begin // size - 1 == block and before > 0):
                    with pytest.raises(ValueError, match=named):
                        train.read(max(before, 0), behind)
                else:
                    train.read(max(before, 0), behind)
            with pytest.raises(ValueError, match=named):
                verify(train)
        finally:
            flip(path, byte)
    verify(open_all(several_blocks).train)


@pytest.mark.parametrize("seed", range(4))
def test_no_flipped_bit_is_trained_on(several_blocks, seed):
    """Wherever the bit is: the batches that hold its block raise, all others are those of the whole file."""
    path = several_blocks / "train.bin"
    byte = np.random.default_rng(seed).integers(path.stat().st_size)
    expected = TokenDataset(several_blocks, seq_len=2000, micro_batch_size=1, seed=0)
    expected = [expected.batch(step, 0, 1, 0, 1) for step in range(80)]
    flip(path, byte)
    raised = 0
    try:
        data = TokenDataset(several_blocks, seq_len=2000, micro_batch_size=1, seed=0)
        for step, batch in enumerate(expected):
            try:
                assert torch.equal(data.batch(step, 0, 1, 0, 1)["tokens"], batch["tokens"])
            except ValueError as error:
                assert f"block {byte // tokenfile.BLOCK_BYTES} " in str(error)
                raised += 1
    finally:
        flip(path, byte)
    assert raised


def test_a_block_is_checked_once(several_blocks, monkeypatch):
    data = open_all(several_blocks)
    data.batch(0, 0, 1, 0, 1)
    monkeypatch.setattr(tokenfile.zlib, "crc32", None)
    data.batch(0, 0, 1, 0, 1)


def test_held_out_text_is_checked_too(out):
    flip(out / "validation.bin", 5)
    data = open_all(out)
    with pytest.raises(ValueError, match=r"validation\.bin: damaged: block 0 "):
        list(data.validation_batches())


def test_an_impossible_token_is_noticed_when_it_is_read(out):
    (out / "train.bin").write_bytes(np.full(read_index(out).splits["train"].num_tokens, 60_000, "<u2"))
    data = open_all(out)
    data.train.checked[:] = True  # as if the checksums were those of such tokens
    with pytest.raises(ValueError, match=r"train\.bin: damaged: token id 60000, the index says \d+ at most"):
        data.batch(0, 0, 1, 0, 1)


def test_another_tokenizer_is_noticed(out, tmp_path):
    other = build([str(tmp_path / "texts/0*.txt")], tmp_path / "e", tokenizer="bpe", vocab_size=262)
    (out / "tokenizer.json").write_bytes((other / "tokenizer.json").read_bytes())
    with pytest.raises(
        ValueError, match=r"tokenizer\.json: damaged: its checksum is not that of the tokenizer"
    ):
        open_all(out)


def rewrite(directory, content):
    """An index whose checksum is right, whatever it says."""
    crc = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    (directory / "index.json").write_text(json.dumps({"crc32": crc, "content": content}))


def content_of(directory):
    return json.loads((directory / "index.json").read_text())["content"]


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (["splits", "train", "max_token"], 270, "token id 270 is beyond the vocabulary of 270"),
        (["splits", "train", "num_tokens"], 1 << 62, "num_tokens"),
        (["splits", "train", "num_tokens"], True, "num_tokens True"),
        (["splits", "train", "num_documents"], 0, "num_documents 0"),
        (["splits", "train", "unigram_entropy"], float("nan"), "unigram_entropy nan"),
        (["splits", "train", "unigram_entropy"], "3", "unigram_entropy '3'"),
        (["splits", "../train"], {}, r"\.\./train"),
        (["dtype"], "O", "dtype 'O'"),
        (["dtype"], "uint32", "dtype 'uint32'"),
        (["vocab_size"], 0, "vocab_size 0"),
        (["tokenizer"], "../../etc", "unknown tokenizer"),
        (["tokenizer"], "byte", "vocab_size 270"),
        (["end_of_text"], 270, "end_of_text 270"),
        (["splits", "train", "num_changed"], -1, "num_changed -1"),
        (["splits"], [], "objects"),
        (["source", "inputs"], [["deep"]], "source must hold numbers and texts, and lists of these"),
        ([], [], "damaged"),
    ],
)
def test_an_index_that_lies_is_refused(out, path, value, named):
    content = content_of(out)
    if path:
        *parents, last = path
        target = content
        for key in parents:
            target = target[key]
        target[last] = value
    else:
        content = value
    rewrite(out, content)
    with pytest.raises(
        ValueError, match=rf"index\.json: damaged: .*{named}" if path else r"index\.json: damaged"
    ):
        read_index(out)


@pytest.mark.parametrize("name", ["index.json", "tokenizer.json"])
@pytest.mark.parametrize("make", [make_fifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_refused_at_once(out, name, make):
    (out / name).unlink()
    make(out / name)
    with pytest.raises(ValueError, match=rf"{name}: cannot be read \((not a regular file|Is a directory)\)"):
        open_all(out)


def test_a_tokenizer_that_is_not_utf8_is_named_though_its_checksum_is_right(out):
    (out / "tokenizer.json").write_bytes(b'{"model": "\xff"}')
    rewrite(out, {**content_of(out), "tokenizer_crc32": zlib.crc32(b'{"model": "\xff"}')})
    with pytest.raises(ValueError, match=r"/tokenizer\.json: not UTF-8 at byte 11"):
        open_all(out)


def test_an_older_format_says_what_to_do(out):
    content = content_of(out)
    content["format"] = "fastmp-tokens-1"
    rewrite(out, content)
    with pytest.raises(ValueError, match=r"index\.json: format 'fastmp-tokens-1'.*build it again"):
        read_index(out)


def test_an_index_edited_by_hand_is_refused(out):
    path = out / "index.json"
    raw = path.read_text()
    num_bytes = f'"num_bytes": {read_index(out).splits["train"].num_bytes}'
    path.write_text(raw.replace(num_bytes, num_bytes + "0"))
    with pytest.raises(ValueError, match=r"index\.json: damaged: its checksum does not match"):
        read_index(out)


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "one.txt").write_text("some text to fuzz\n" * 40)
    return build([str(folder / "one.txt")], folder / "d", validation_fraction=0.2)


def accept_or_value_error(directory):
    """Opening gives a working dataset or a ValueError in one line; nothing else, and no pickle on the way."""
    try:
        index = read_index(directory)
        open_tokenizer(directory, index)
        for name in index.splits:
            open_split(directory, index, name).tokens.max()
    except ValueError as error:
        assert str(directory) in str(error)
        return None
    return index


@given(raw=st.binary(max_size=200) | st.text(max_size=50).map(str.encode))
def test_index_of_arbitrary_bytes(sample, raw):
    original = (sample / "index.json").read_bytes()
    try:
        (sample / "index.json").write_bytes(raw)
        assert accept_or_value_error(sample) is None
    finally:
        (sample / "index.json").write_bytes(original)


@given(data=st.data())
def test_index_with_some_bytes_changed(sample, data):
    original = (sample / "index.json").read_bytes()
    expected = read_index(sample)
    raw = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=6))
    try:
        (sample / "index.json").write_bytes(raw)
        assert accept_or_value_error(sample) in (None, expected)
    finally:
        (sample / "index.json").write_bytes(original)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def slots(node, path=()):
    for key in node if isinstance(node, dict) else ():
        yield (*path, key)
        yield from slots(node[key], (*path, key))


@given(data=st.data())
def test_index_with_any_value_replaced_and_its_checksum_made_right(sample, data):
    original = (sample / "index.json").read_bytes()
    content = content_of(sample)
    *parents, last = data.draw(st.sampled_from(list(slots(content))))
    target = content
    for key in parents:
        target = target[key]
    if data.draw(st.booleans()):
        target[last] = data.draw(json_values)
    else:
        del target[last]
    try:
        rewrite(sample, content)
        accept_or_value_error(sample)
    finally:
        (sample / "index.json").write_bytes(original)


@pytest.mark.parametrize(
    "raw", [b"[" * 100_000, b'{"crc32": 1e999, "content": ' + b"9" * 10_000 + b"}", b"\xff" * 99]
)
def test_index_that_hurts_parsers(sample, raw):
    original = (sample / "index.json").read_bytes()
    try:
        (sample / "index.json").write_bytes(raw)
        assert accept_or_value_error(sample) is None
        (sample / "index.json").write_bytes(b" " * (tokenfile.INDEX_LIMIT + 1))
        with pytest.raises(ValueError, match="larger than any file of its kind"):
            read_index(sample)
    finally:
        (sample / "index.json").write_bytes(original)


def test_nothing_is_unpickled(out):
    seen = []
    armed = [True]
    sys.addaudithook(lambda event, _: seen.append(event) if armed[0] and event.startswith("pickle") else None)
    data = open_all(out)
    data.batch(0, 0, 1, 0, 1)
    list(data.validation_batches())
    verify(data.train)
    armed[0] = False
    assert seen == []


def assert_nothing_built(tmp_path):
    assert sorted(path.name for path in tmp_path.iterdir()) in (["texts"], ["d", "texts"]), list(
        tmp_path.iterdir()
    )


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda path: path.write_bytes(b"\x1f\x8b\x08\0"), "expected text, got gzip"),
        (lambda path: path.symlink_to("absent"), "cannot be read"),
        (make_fifo, "not a regular file"),
    ],
)
def test_a_bad_text_file_is_named(texts, tmp_path, make, named):
    make(texts / "99.txt")
    with pytest.raises(ValueError, match=rf"99\.txt.*{named}"):
        build([f"{texts}/*.txt"], tmp_path / "d")
    assert_nothing_built(tmp_path)


def test_a_file_that_is_not_utf8_is_named_by_bpe_and_taken_by_bytes(texts, tmp_path):
    (texts / "99.txt").write_bytes(b"fine\nuntil \xff here\n" * 10)
    for fraction in (0.0, 0.5):  # in training, and (file order is fixed) possibly held out
        with pytest.raises(ValueError, match=r"99\.txt: .*not UTF-8"):
            options = {"vocab_size": 270, "validation_fraction": fraction}
            build([f"{texts}/*.txt"], tmp_path / "d", tokenizer="bpe", **options)
    assert_nothing_built(tmp_path)
    assert open_all(build([f"{texts}/*.txt"], tmp_path / "d")).train.info.max_token == 256


def test_a_file_without_permission_is_named(texts, tmp_path, monkeypatch):
    real = os.open

    def refuse(path, *arguments, **options):
        if str(path).endswith("05.txt"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ValueError, match=r"05\.txt: cannot be read \(Permission denied\)"):
        build([f"{texts}/*.txt"], tmp_path / "d")
    assert_nothing_built(tmp_path)


def test_a_file_that_changes_meanwhile_is_named(texts, tmp_path, monkeypatch):
    real = corpus.split_documents

    def change_after_listing(documents, fraction):
        result = real(documents, fraction)
        (texts / "03.txt").write_text("other")
        return result

    monkeypatch.setattr(corpus, "split_documents", change_after_listing)
    with pytest.raises(ValueError, match=r"03\.txt: changed while it was read"):
        build([f"{texts}/*.txt"], tmp_path / "d")
    assert_nothing_built(tmp_path)


@pytest.mark.parametrize(
    ("inputs", "options", "named"),
    [
        (["absent/**/*.md"], {}, r"no file matches 'absent/\*\*/\*\.md'"),
        ([], {}, "no input"),
        (["{texts}"], {}, r"is a directory; write a pattern such as .*/texts/\*\*/\*\.txt"),
        (["{texts}/00.txt"], {"validation_fraction": 0.9}, r"\[0, 0\.5\], got 0\.9"),
        (["{texts}/00.txt"], {"validation_fraction": 1e-6}, "too little to hold out"),
        (["{texts}/00.txt"], {"vocab_size": 300}, "vocab_size 300 goes with tokenizer bpe, not 'byte'"),
        (["{texts}/00.txt"], {"tokenizer": "bpe", "vocab_size": 10}, "at least 257.*got 10"),
        (["{texts}/00.txt"], {"tokenizer": "bytes"}, "tokenizer bytes: cannot be read"),
    ],
)
def test_bad_arguments_are_named(texts, tmp_path, inputs, options, named):
    with pytest.raises(ValueError, match=named):
        build([pattern.format(texts=texts) for pattern in inputs], tmp_path / "d", **options)
    assert_nothing_built(tmp_path)


def snapshot(directory):
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in directory.iterdir()}


def test_a_dataset_that_is_there_is_kept_unless_it_is_to_be_overwritten(texts, out, capsys):
    before = snapshot(out)
    with pytest.raises(DatasetExists, match=r"/d holds a token dataset already: .*--overwrite"):
        build([f"{texts}/*.txt"], out)
    command = ["build", "--input", f"{texts}/*.txt", "--out", str(out)]
    assert main(command) == 2
    assert "holds a token dataset already" in capsys.readouterr().err
    assert snapshot(out) == before
    assert main([*command, "--overwrite"]) == 0
    assert open_all(out).vocab_size == 257
    (out / "index.json").write_text("damaged")
    assert main([*command, "--overwrite"]) == 0
    assert main(["check", str(out)]) == 0
    assert_nothing_built(out.parent)


def test_a_failure_while_overwriting_leaves_the_old_or_the_new(texts, out, monkeypatch):
    before = snapshot(out)
    with pytest.raises(ValueError, match="no file matches"):
        build(["absent/*"], out, overwrite=True)
    (texts / "99.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        build([f"{texts}/*.txt"], out, tokenizer="bpe", vocab_size=270, overwrite=True)
    assert snapshot(out) == before
    assert_nothing_built(out.parent)


def test_a_directory_of_something_else_is_not_touched(texts, tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match="exists and is not a token dataset"):
            build([f"{texts}/*.txt"], tmp_path / "d", overwrite=overwrite)
    (tmp_path / "f").write_text("a file")
    with pytest.raises(ValueError, match="not a token dataset"):
        build([f"{texts}/*.txt"], tmp_path / "f")
    assert (tmp_path / "d" / "thesis.tex").read_text() == "years of work"
    assert (tmp_path / "f").read_text() == "a file"


def test_an_empty_directory_is_filled(texts, tmp_path):
    (tmp_path / "d").mkdir()
    open_all(build([f"{texts}/*.txt"], tmp_path / "d"))


@pytest.mark.parametrize("call", ["fsync", "rename"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_at_any_point_leaves_nothing(texts, tmp_path, monkeypatch, call, error):
    real = getattr(os, call)
    for failing in range(20):
        calls = []

        def fail(*arguments, calls=calls, failing=failing):
            calls.append(arguments)
            if len(calls) > failing:
                raise error
            return real(*arguments)

        monkeypatch.setattr(os, call, fail)
        try:
            build([f"{texts}/*.txt"], tmp_path / "d")
        except (ValueError, KeyboardInterrupt) as raised:
            assert isinstance(raised, KeyboardInterrupt) or "No space left" in str(raised)
        else:
            break
        finally:
            monkeypatch.setattr(os, call, real)
        if (tmp_path / "d").exists():  # only the last fsync, of the parent, comes after the rename
            assert call == "fsync" and failing == 8
            open_all(tmp_path / "d")
            shutil.rmtree(tmp_path / "d")
        assert_nothing_built(tmp_path)
    assert failing == {"fsync": 9, "rename": 1}[call]


def test_what_a_killed_builder_left_is_removed_by_the_next(texts, tmp_path):
    for kill_at in range(8):

        def dying_build(kill_at=kill_at):
            calls = []
            real = os.fsync

            def fsync(descriptor):
                calls.append(descriptor)
                if len(calls) > kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                real(descriptor)

            os.fsync = fsync
            build([f"{texts}/*.txt"], tmp_path / "d")

        _, status = os.waitpid(fork(dying_build), 0)
        assert os.WIFSIGNALED(status) and not (tmp_path / "d").exists()
    open_all(build([f"{texts}/*.txt"], tmp_path / "d"))
    assert_nothing_built(tmp_path)


def test_a_living_builder_is_left_alone(tmp_path):
    with staged(tmp_path / "d") as first:
        (first / "work").write_text("half done")
        with pytest.raises(FileExistsError):  # d is there by the time the outer one is done
            with staged(tmp_path / "d") as second:
                assert first.exists() and second != first
                (second / "work").write_text("done")
                (tmp_path / "d").mkdir()
                (tmp_path / "d" / "work").write_text("someone else's")
        assert (first / "work").read_text() == "half done"
        (tmp_path / "d" / "work").unlink()
    assert (tmp_path / "d" / "work").read_text() == "half done"


def test_builders_at_the_same_time_are_harmless(texts, tmp_path):
    def same():
        with contextlib.suppress(DatasetExists):  # if another was there before this one had begun
            build([f"{texts}/*.txt"], tmp_path / "d")
        open_all(tmp_path / "d")

    children = [fork(same) for _ in range(4)]
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0, 0]
    open_all(tmp_path / "d")
    assert_nothing_built(tmp_path)


def test_a_builder_whose_directory_was_taken_for_a_leftover_makes_another(texts, tmp_path, monkeypatch):
    """Another builder may sweep between the making of a directory and the taking of its lock."""
    real, swept = os.open, []

    def sweep_first(path, *arguments):
        if "building-" in str(path) and not swept:
            swept.append(path)
            Path(path).rmdir()
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", sweep_first)
    open_all(build([f"{texts}/*.txt"], tmp_path / "d"))
    assert swept
    assert_nothing_built(tmp_path)
