"""Files of text: byte order marks, documents in lines of JSON, and formats that are no text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from reprlib import repr as short
from typing import NamedTuple

from fastmp.config.file_access import open_binary

__all__ = ["HEAD_BYTES", "JSON_LINES", "JsonLine", "check_is_text", "json_lines", "json_text", "mark_bytes"]

JSON_LINES = (".jsonl", ".ndjson")  # endings of files with a document a line
HEAD_BYTES = 16  # of a file that show its format
_FIELD = "text"  # of a line, as Megatron-LM's preprocess_data.py reads by default
_TABLE = "with pandas: pandas.read_{}({!r}).to_json('out.jsonl', orient='records', lines=True)"
_EXPORT = f'export its text as .jsonl, a {{{{"{_FIELD}": ...}}}} a line'
_ICONV = "iconv -f UTF-{} -t UTF-8 {{path}} > OUT.txt"
_BINARY = (
    (b"\x1f\x8b", "gzip", "gunzip -k {path}"),
    (b"\x28\xb5\x2f\xfd", "zstd", "zstd -d {path}"),
    (b"BZh", "bzip2", "bunzip2 -k {path}"),
    (b"\xfd7zXZ\0", "xz", "unxz -k {path}"),
    (b"\x04\x22\x4d\x18", "lz4", "lz4 -d {path}"),
    (b"PK\x03\x04", "zip", "unzip {path}"),
    (b"PAR1", "Parquet", _TABLE.format("parquet", "{path}")),
    (b"ARROW1\0", "Arrow", _TABLE.format("feather", "{path}")),
    (b"\x93NUMPY", "NumPy", _EXPORT),
    (b"SQLite format 3\0", "SQLite", _EXPORT),
    (b"%PDF-", "PDF", "pdftotext {path}"),
    (codecs.BOM_UTF32_LE, "UTF-32", _ICONV.format(32)),
    (codecs.BOM_UTF32_BE, "UTF-32", _ICONV.format(32)),
    (codecs.BOM_UTF16_LE, "UTF-16", _ICONV.format(16)),
    (codecs.BOM_UTF16_BE, "UTF-16", _ICONV.format(16)),
)
_MORE = {"bzip2": b"1AY&SY", "Parquet": b"\x15"}  # after a beginning that a text may have: further bytes


def check_is_text(path: Path, head: bytes) -> None:
    """Raise ValueError if a file with the first bytes `head` is compressed, a table, or not in UTF-8."""
    for magic, name, advice in _BINARY:
        if head.startswith(magic) and _MORE.get(name, b"") in head[len(magic) :]:
            typed = advice.format(path=path)
            raise ValueError(f"{path}: expected text, got {name}; convert it first: {typed}")


def mark_bytes(head: bytes) -> int:
    """Return the length of the byte order mark with which UTF-8 text may begin."""
    return len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0


class JsonLine(NamedTuple):
    """A line of JSON in a file, from 1, its place in bytes, and the length of its text in UTF-8."""

    number: int
    begin: int
    length: int
    num_bytes: int


def json_lines(path: Path) -> Iterator[JsonLine]:
    """Yield the lines of a JSON Lines file that are not blank. Raises ValueError naming file and line."""
    with open_binary(path) as file:
        begin = 0
        for number, line in enumerate(file, 1):
            mark = mark_bytes(line) if number == 1 else 0
            content = line[mark:]
            if content.strip():
                num_bytes = len(_text_of(content, path, number))
                yield JsonLine(number, begin + mark, len(content), num_bytes)
            begin += len(line)


def json_text(path: Path, line: JsonLine) -> bytes:
    """Return the text of a line that `json_lines` has found."""
    try:
        with open_binary(path) as file:
            file.seek(line.begin)
            content = file.read(line.length)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    text = _text_of(content, path, line.number)
    if len(text) != line.num_bytes:
        raise ValueError(f"{path}:{line.number}: changed while it was read")
    return text


def _text_of(content: bytes, path: Path, number: int) -> bytes:
    wanted = f'{path}:{number}: expected a JSON object with a string "{_FIELD}"'
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{wanted}, got {short(content[:60])} (not JSON: {error})") from None
    if not isinstance(values, dict):
        raise ValueError(f"{wanted}, got {short(values)}")
    text = values.get(_FIELD)
    if not isinstance(text, str):
        found = f"one with the fields {', '.join(sorted(values))[:200]}" if text is None else short(text)
        raise ValueError(f"{wanted}, got {found}")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{wanted}, got half of a surrogate pair at character {error.start}") from None
