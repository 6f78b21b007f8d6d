"""Files of text that `fastmp data build` takes or refuses: JSON Lines, byte order marks, other formats."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zipfile

import numpy as np
import pytest

from fastmp.apps.data import main
from fastmp.training.data.corpus import build, find_documents
from fastmp.training.data.text_files import check_is_text

TEXTS = ["one line\nand another\n", "\u00e4 \u20ac \U0001f600", "", '"quoted"\tand tabbed', "x" * 5000]


def write_lines(path, texts, mark=b""):
    rows = [
        json.dumps({"text": text, "url": f"u{i}"}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)
    ]
    path.write_bytes(mark + "\n".join(rows).replace("\n", "\r\n", 1).encode() + b"\n\n  \n")
    return path


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("ending", ["jsonl", "ndjson"])
def test_each_line_of_json_is_a_document(tmp_path, mark, ending):
    path = write_lines(tmp_path / f"a.{ending}", TEXTS, mark)
    documents = find_documents([str(path)])
    assert [document.text().decode() for document in documents] == [text for text in TEXTS if text]
    assert [document.num_bytes for document in documents] == [len(t.encode()) for t in TEXTS if t]
    assert [document.name for document in documents] == [f"{path}:{line}" for line in (1, 2, 4, 5)]


def test_lines_of_json_give_the_tokens_of_files_with_their_texts(tmp_path, capsys):
    texts = [f"document {i}\n" * (i + 3) for i in range(9)]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    write_lines(tmp_path / "all.jsonl", [*texts[:4], "", *texts[4:]])
    made = [
        build([f"{tmp_path}/{pattern}"], tmp_path / name, validation_fraction=0.2)
        for pattern, name in (("*.txt", "files"), ("*.jsonl", "lines"))
    ]
    for name in ("train.bin", "train.documents", "validation.bin"):
        assert len({(directory / name).read_bytes() for directory in made}) == 1
    assert main(["stats", str(tmp_path / "lines")]) == 0
    assert "left out   1 are empty" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"content": "x", "id": 3}', "got one with the fields content, id"),
        (b'{"text": 3}', "got 3"),
        (b'{"text": null}', "got one with the fields text"),
        (b'["text"]', "got ['text']"),
        (b'{"text": "x"', "(not JSON: "),
        (b'{"text": "\xff"}', "(not JSON: "),
        (b"[" * 100_000, "(not JSON: "),
        (b'{"text": "a\\ud800"}', "half of a surrogate pair at character 1"),
    ],
)
def test_a_line_that_has_no_text_is_named(tmp_path, capsys, line, said):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "first"}\n\n' + line + b"\n")
    assert main(["build", "--input", str(path), "--out", str(tmp_path / "d")]) == 2
    error = capsys.readouterr().err.strip()
    assert f'{path}:3: expected a JSON object with a string "text", ' in error and said in error
    assert "\n" not in error and not (tmp_path / "d").exists()


def make_zip(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "text")


@pytest.mark.parametrize(
    ("name", "make", "said"),
    [
        (
            "a.txt.gz",
            lambda path: path.write_bytes(gzip.compress(b"text")),
            "got gzip; .*: gunzip -k .*gz",
        ),
        ("a.bz2", lambda path: path.write_bytes(bz2.compress(b"text")), "got bzip2; .*: bunzip2 -k"),
        ("a.xz", lambda path: path.write_bytes(lzma.compress(b"text")), "got xz; .*: unxz -k"),
        ("a.zip", make_zip, "got zip; .*: unzip"),
        ("a.zst", lambda path: path.write_bytes(b"\x28\xb5\x2f\xfd\x04\x00"), "got zstd; .*: zstd -d"),
        ("a.parquet", lambda path: path.write_bytes(b"PAR1\x15\x04\x15"), "got Parquet; .*read_parquet"),
        ("a.arrow", lambda path: path.write_bytes(b"ARROW1\0\0"), "got Arrow; .*read_feather"),
        (
            "a.npy",
            lambda path: np.save(path, np.arange(3)),
            "got NumPy; .*: export its text as .jsonl, a {.text.: ...} a line$",
        ),
        ("a.db", lambda path: path.write_bytes(b"SQLite format 3\0"), "got SQLite; .*: export its text as"),
        ("a.pdf", lambda path: path.write_bytes(b"%PDF-1.7"), "got PDF; .*pdftotext"),
        (
            "a.txt",
            lambda path: path.write_bytes("text".encode("utf-16")),
            "got UTF-16; .*iconv -f UTF-16 .*a.txt > OUT.txt",
        ),
        (
            "b.txt",
            lambda path: path.write_bytes("text".encode("utf-32")),
            "got UTF-32; .*iconv -f UTF-32 .*b.txt > OUT.txt",
        ),
        ("c.txt", lambda path: path.write_bytes(b"\0\0\xfe\xff\0\0\0t"), "got UTF-32; .*iconv -f UTF-32"),
        ("a.jsonl", lambda path: path.write_bytes(gzip.compress(b'{"text": "a"}')), "got gzip"),
    ],
)
def test_formats_that_are_no_text_are_refused_with_what_to_type(tmp_path, name, make, said):
    make(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name}: expected text, {said}"):
        build([str(tmp_path / name)], tmp_path / "d")


@pytest.mark.parametrize("text", ["BZh is a prefix", "PAR1, a format", "PK or not", "ARROW1", "\x1f", ""])
def test_texts_that_begin_like_a_format_are_texts(tmp_path, text):
    check_is_text(tmp_path / "a.txt", text.encode()[:16])


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"some text \xef\xbb\xbf\n" * 20)
    (document,) = find_documents([str(tmp_path / "a.txt")])
    assert document.text().startswith(b"some text \xef") and document.num_bytes == len(document.text())
    (tmp_path / "mark.txt").write_bytes(b"\xef\xbb\xbf")
    built = build([f"{tmp_path}/*.txt"], tmp_path / "d")
    assert json.loads((built / "index.json").read_text())["content"]["source"]["num_empty"] == 1


def test_empty_files_are_left_out_and_counted(tmp_path, capsys):
    for name, text in (("a.txt", "text\n" * 30), ("b.txt", ""), ("c.txt", ""), ("d.jsonl", "\n\n")):
        (tmp_path / name).write_text(text)
    patterns = [f"{tmp_path}/*.txt", f"{tmp_path}/*.jsonl"]
    assert main(["build", "--input", *patterns, "--out", str(tmp_path / "d")]) == 0
    assert "left out   3 are empty" in capsys.readouterr().out
    assert main(["build", "--input", f"{tmp_path}/[bc].txt", "--out", str(tmp_path / "e")]) == 2
    empty = "expected text, got only empty documents; give files that have text"
    assert f"b.txt and 1 more: {empty}" in capsys.readouterr().err
    (tmp_path / "e.jsonl").write_text('{"text": ""}\n')
    assert main(["build", "--input", f"{tmp_path}/e.jsonl", "--out", str(tmp_path / "e")]) == 2
    assert f"e.jsonl:1: {empty}" in capsys.readouterr().err
