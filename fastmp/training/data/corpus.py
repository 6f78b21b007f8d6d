"""Build token files from text: find documents, hold some out, tokenize, publish with one rename.

Documents are put in a fixed pseudo-random order; the last `validation_fraction` of the bytes of that order is
held out. The one document on the boundary is cut in two (at a line where possible), so the fraction is exact,
held-out text is never in training, and a single file works too. A BPE vocabulary is learnt from the training
text alone.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import stat
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fastmp.config.file_access import open_binary, read_file, read_json, write_synced
from fastmp.training.data.progress import ProgressLine, groups
from fastmp.training.data.sampling import epoch_key, permute
from fastmp.training.data.text_files import (
    HEAD_BYTES,
    JSON_LINES,
    check_is_text,
    json_lines,
    json_text,
    mark_bytes,
)
from fastmp.training.data.tokenfile import (
    FORMAT,
    Index,
    SplitInfo,
    dtype_for,
    open_split,
    open_tokenizer,
    read_index,
)
from fastmp.training.data.tokenize import Tokenizer, load_tokenizer, train_bpe
from fastmp.training.data.tokenwriter import STATE, SplitWriter, staged

RECIPES = ("pydoc", "stdlib")
SPLIT_KEY = epoch_key(0, 0)  # names the order of documents from which the tail is held out
SAVED_BYTES = 1 << 26  # text between two states that a killed build goes on from
GROUP_BYTES = 1 << 22  # text handed to the tokenizer at once: it works on several documents in parallel
CUT_SEARCH = 4096  # bytes before the boundary in which a line end is looked for
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


class DatasetExists(ValueError):
    """Raised if the directory to build holds a token dataset already."""


@dataclass(frozen=True)
class Document:
    """A text read on demand: `begin:end` of load() (None: to its end)."""

    name: str
    num_bytes: int
    load: Callable[[], bytes]
    begin: int = 0
    end: int | None = None
    changed: int = 0  # when, in nanoseconds, where it is a file

    def text(self) -> bytes:
        return self.load()[self.begin : self.end]


# Filters the documents of a build: those to keep, and what to note in the `source` of the index.
Select = Callable[[Sequence[Document], ProgressLine], tuple[list[Document], dict[str, Any]]]


def build(
    inputs: Sequence[str],
    out: str | Path,
    *,
    tokenizer: str = "byte",
    vocab_size: int | None = None,
    end_of_text: str | None = None,
    validation_fraction: float = 0.05,
    min_tokens: int = 0,
    select: Select | None = None,
    overwrite: bool = False,
    progress: ProgressLine | None = None,
) -> Path:
    """Tokenize `inputs` into the directory `out` and return it.

    Inputs are file patterns (`**` included) or the built-in "pydoc" and "stdlib". A file is a document; each
    line of a .jsonl file is one, the field "text" of its object. `tokenizer` is "byte",
    "bpe" (learns `vocab_size` tokens, 4096 by default, from the training text) or what `load_tokenizer`
    takes, with `end_of_text`. The directory appears whole or not at all; several processes may build the same
    one at once. `overwrite` replaces a token dataset that is there, once the new one is complete.

    Documents are left out that are empty, that `select` does not keep, and that have fewer than `min_tokens`
    tokens. Their numbers are in the `source` of the index. `progress` is told of each document.

    A build that was killed or interrupted while it tokenized goes on where it last saved, every SAVED_BYTES
    of text, if it is started again with the same files and options.

    Raises ValueError for a pattern without a match, a file that is binary or cannot be read or tokenized, too
    little text, or an `out` that holds something else; DatasetExists for a token dataset at `out`, without
    `overwrite`.
    """
    out = Path(out)
    progress = progress or ProgressLine(None)
    if not 0.0 <= validation_fraction <= 0.5:
        raise ValueError(f"validation_fraction must be in [0, 0.5], got {validation_fraction}")
    if vocab_size is not None and tokenizer != "bpe":
        raise ValueError(f"vocab_size {vocab_size} goes with tokenizer bpe, not {tokenizer!r}")
    if end_of_text is not None and tokenizer in ("byte", "bpe"):
        raise ValueError(f"end_of_text {end_of_text!r} goes with a tokenizer.json, not {tokenizer!r}")
    if min_tokens < 0:
        raise ValueError(f"min_tokens must not be negative, got {min_tokens}")
    _check_free(out, overwrite)
    found = _found(inputs)
    with_text = _with_text(found)
    documents, selection = select(with_text, progress) if select else (with_text, {})
    train, held_out = split_documents(documents, validation_fraction)
    if not train or (validation_fraction > 0 and not held_out):
        raise ValueError(
            f"{_bytes_of(documents)} bytes of text are too little to hold out {validation_fraction:g} of them"
        )
    source = {
        "inputs": list(inputs),
        "python": platform.python_version() if set(inputs) & set(RECIPES) else None,
        "tokenizer": tokenizer,
        "validation_fraction": validation_fraction,
        "min_tokens": min_tokens,
        "num_empty": len(found) - len(with_text),
        **selection,
        "num_short": 0,  # counted when they have tokens
    }
    made = _tokenizer(tokenizer, vocab_size, end_of_text, train)
    job = _job(train, held_out, made, source)
    try:
        with staged(out, replace=overwrite, job=job) as stage:
            index = _write(stage, train, held_out, made, source, progress)
    except FileExistsError:
        if read_index(out) != index:
            raise DatasetExists(
                f"{out} was built with other text or options meanwhile: choose another directory"
            ) from None
    except OSError as error:
        raise ValueError(f"{out}: cannot be written ({error.strerror or error})") from None
    _open_all(out)
    return out


def find_documents(inputs: Sequence[str]) -> list[Document]:
    """Return the documents of file patterns and built-in recipes, each file once, sorted in a pattern.

    Empty ones are left out; ValueError if all are.
    """
    return _with_text(_found(inputs))


def _with_text(documents: Sequence[Document]) -> list[Document]:
    found = [document for document in documents if document.num_bytes]
    if not found:
        others = f" and {len(documents) - 1} more" if len(documents) > 1 else ""
        raise ValueError(
            f"{documents[0].name}{others}: expected text, got only empty documents; give files that have text"
        )
    return found


def _found(inputs: Sequence[str]) -> list[Document]:
    """Return the documents of `find_documents`, empty ones too."""
    documents: dict[str, Document] = {}
    for pattern in inputs:
        if pattern == "pydoc":
            found = _pydoc()
        elif pattern == "stdlib":
            found = _stdlib()
        else:
            found = [document for path in _matches(pattern) for document in _file(Path(path))]
        if not found:
            raise ValueError(f"no file matches {pattern!r}")
        for document in found:
            documents.setdefault(document.name, document)
    if not documents:
        raise ValueError("no input text given")
    return list(documents.values())


def split_documents(documents: Sequence[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    """Return (training, held out): the tail of a shuffled order; the document at the boundary is split."""
    order = permute(np.arange(len(documents)), len(documents), SPLIT_KEY)
    train = [documents[i] for i in order]
    held_out: list[Document] = []
    wanted = round(fraction * _bytes_of(documents))
    while wanted > 0 and train:
        last = train.pop()
        if last.num_bytes > wanted and (cut := _cut(last.text(), last.num_bytes - wanted)) > 0:
            train.append(replace(last, num_bytes=cut, end=cut))
            last = replace(last, num_bytes=last.num_bytes - cut, begin=cut)
        held_out.append(last)
        wanted -= last.num_bytes
    return train, held_out


def _bytes_of(documents: Sequence[Document]) -> int:
    return sum(document.num_bytes for document in documents)


def _cut(text: bytes, near: int) -> int:
    """Return the last line start within CUT_SEARCH bytes before `near`, else that of the character."""
    line = text.rfind(b"\n", max(0, near - CUT_SEARCH), near) + 1
    if line > 0:
        return line
    while near > 0 and text[near] & 0xC0 == 0x80:
        near -= 1
    return near


def _tokenizer(
    name: str, vocab_size: int | None, end_of_text: str | None, train: Sequence[Document]
) -> Tokenizer:
    if name != "bpe":
        return load_tokenizer(name, end_of_text=end_of_text)
    for document in train:  # an error raised inside the library's iterator would lose its message
        with _named(document):
            document.text().decode()
    return train_bpe((document.text() for document in train), 4096 if vocab_size is None else vocab_size)


def _job(
    train: Sequence[Document], held_out: Sequence[Document], tokenizer: Tokenizer, source: dict[str, Any]
) -> str:
    """Return a hash of everything that token files depend on: documents, tokenizer, options."""
    digest = hashlib.sha256(json.dumps([FORMAT, source, tokenizer.to_json()]).encode())
    for documents in (train, held_out):
        for each in documents:
            digest.update(repr((each.name, each.num_bytes, each.begin, each.end, each.changed)).encode())
        digest.update(b"held out")
    return digest.hexdigest()


def _write(
    stage: Path,
    train: Sequence[Document],
    held_out: Sequence[Document],
    tokenizer: Tokenizer,
    source: dict[str, Any],
    progress: ProgressLine,
) -> Index:
    """Write all files, continuing from a saved state; `source` counts the short documents."""
    state = _read_state(stage) or {"splits": {}, "num_short": 0, "name": "", "done": 0, "writer": None}
    source["num_short"] = state["num_short"]
    splits = {name: SplitInfo(**info) for name, info in state["splits"].items()}
    todo = {"train": train, "validation": held_out}
    todo = {name: documents for name, documents in todo.items() if documents and name not in splits}
    begun = todo[state["name"]][: state["done"]] if state["name"] else ()
    progress.begin("tokenizing", sum(map(_bytes_of, todo.values())) - _bytes_of(begun))
    for name, documents in todo.items():
        done, saved = (state["done"], state["writer"]) if name == state["name"] else (0, None)
        writer = SplitWriter(stage, name, tokenizer, saved)
        unsaved = 0
        try:
            for group in groups(documents[done:], GROUP_BYTES, lambda document: document.num_bytes):
                source["num_short"] += _add(writer, group, tokenizer, source["min_tokens"])
                for document in group:
                    progress.add(document.num_bytes)
                done, unsaved = done + len(group), unsaved + _bytes_of(group)
                if unsaved >= SAVED_BYTES:
                    _save_state(stage, splits, source["num_short"], name, done, writer)
                    unsaved = 0
            if writer.num_documents == 0:
                raise ValueError(f"{name}: no document has {source['min_tokens']} tokens (--min-tokens)")
            splits[name] = writer.finish()
            if splits[name].num_tokens < 2:
                raise ValueError(f"{name}: the tokenizer makes no token of this text")
        finally:
            writer.close()
    (stage / STATE).unlink(missing_ok=True)
    description = tokenizer.to_json()
    if description is not None:
        write_synced(stage / "tokenizer.json", description.encode())
    index = Index(
        dtype=dtype_for(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        tokenizer=tokenizer.name,
        tokenizer_crc32=0 if description is None else zlib.crc32(description.encode()),
        end_of_text=tokenizer.end_of_text,
        source=source,
        splits=splits,
    )
    write_synced(stage / "index.json", index.to_json().encode())
    return index


def _save_state(
    stage: Path, splits: dict[str, SplitInfo], num_short: int, name: str, done: int, writer: SplitWriter
) -> None:
    """Save the progress of a build: the finished splits, and the documents of the next that are `done`."""
    state = {
        "splits": {split: asdict(info) for split, info in splits.items()},
        "num_short": num_short,
        "name": name,
        "done": done,
        "writer": writer.save(),
    }
    write_synced(stage / f"{STATE}.new", json.dumps(state).encode())
    os.replace(stage / f"{STATE}.new", stage / STATE)


def _read_state(stage: Path) -> dict[str, Any] | None:
    """Return the saved state of an interrupted build, or None; delete a partially written state."""
    (stage / f"{STATE}.new").unlink(missing_ok=True)
    path = stage / STATE
    return read_json(path, 1 << 30) if path.exists() else None


def _add(writer: SplitWriter, group: Sequence[Document], tokenizer: Tokenizer, min_tokens: int) -> int:
    """Write documents, except whole ones of fewer than `min_tokens` tokens; return their number."""
    texts = [document.text() for document in group]
    try:
        encoded = tokenizer.encode_batch(texts)
    except ValueError:  # one of them: find out which
        for document, text in zip(group, texts):
            with _named(document):
                tokenizer.encode(text)
        raise
    short = 0
    for document, text, ids in zip(group, texts, encoded):
        if len(ids) < min_tokens and document.begin == 0 and document.end is None:
            short += 1
            continue
        with _named(document):
            writer.add(text, ids)
    return short


@contextmanager
def _named(document: Document) -> Iterator[None]:
    """Add the name of the document to a ValueError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{document.name}: not UTF-8 at byte {document.begin + error.start}; "
            f"the byte tokenizer takes any bytes"
        ) from None
    except ValueError as error:
        raise ValueError(f"{document.name}: {error}") from None


def _matches(pattern: str) -> list[str]:
    """Return the files that `pattern` matches.

    An existing file of that very name is taken literally ("notes[1].txt").
    """
    if os.path.lexists(pattern):
        return [pattern]
    paths = sorted(glob.glob(pattern, recursive=True))
    return [path for path in paths if not Path(path).is_dir()]


def _file(path: Path) -> list[Document]:
    """Return the documents of a file: itself, or each line of JSON."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ValueError(f"{path}: is a directory; write a pattern such as {path}/**/*.txt")
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path}: is not a regular file")
        with open_binary(path) as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    check_is_text(path, head)
    if path.suffix in JSON_LINES:
        changed = status.st_mtime_ns
        lines = [
            Document(f"{path}:{line.number}", line.num_bytes, partial(json_text, path, line), changed=changed)
            for line in json_lines(path)
        ]
        return lines or [Document(str(path), 0, bytes)]
    mark = mark_bytes(head)

    def load() -> bytes:
        try:
            text = read_file(path, 1 << 50)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
        if len(text) != status.st_size:
            raise ValueError(f"{path}: changed while it was read ({status.st_size} bytes, then {len(text)})")
        return text[mark:]

    return [Document(str(path), status.st_size - mark, load, changed=status.st_mtime_ns)]


def _pydoc() -> list[Document]:
    """Return Python's own documentation, one document a topic: about 0.4 MB in every CPython.

    Topics repeat sections of each other; only the first copy of a paragraph is kept, or a fifth of the
    held-out text would be a copy of training text.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("this Python comes without pydoc_data; use --input with files of your own") from None
    seen: set[str] = set()
    documents = []
    for name, topic in sorted(topics.items()):
        paragraphs = {" ".join(paragraph.split()): paragraph for paragraph in topic.split("\n\n")}
        text = "\n\n".join(p for key, p in paragraphs.items() if key not in seen).encode()
        seen.update(paragraphs)
        if text:
            documents.append(Document(f"pydoc:{name}", len(text), partial(bytes, text)))
    return documents


def _stdlib() -> list[Document]:
    """Return the sources of the standard library without its tests: about 12 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (
        path for path in sorted(root.rglob("*.py")) if not _NOT_LIBRARY & set(path.relative_to(root).parts)
    )
    return [document for path in paths if path.is_file() for document in _file(path) if document.num_bytes]


def _check_free(out: Path, overwrite: bool) -> None:
    """Raise ValueError unless `out` is absent, empty, or a dataset to overwrite."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / "index.json").exists():
        raise ValueError(f"{out} exists and is not a token dataset: choose another directory")
    if not overwrite:
        raise DatasetExists(
            f"{out} holds a token dataset already: choose another directory, or replace it (--overwrite)"
        )


def _open_all(out: Path) -> None:
    index = read_index(out)
    open_tokenizer(out, index)
    for name in index.splits:
        open_split(out, index, name)
