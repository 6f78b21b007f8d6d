"""Tokenizers: bytes, and byte-level BPE. Both are lossless: every token is a string of bytes.

Because a token knows its bytes, a loss per token becomes a loss per byte, which compares across tokenizers.
Documents are bytes, not str: the byte tokenizer takes any file, the BPE one any valid UTF-8. Files are plain
JSON as written by the `tokenizers` library, which only BPE needs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from fastmp.files import read_file

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
SMALLEST_BPE = 257  # 256 bytes and end-of-text
TOKENIZER_LIMIT = 1 << 28  # bytes of a file; those of 256,000 tokens have about 35 MB

TokenIds = npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """A tokenizer as training needs it. `end_of_text` separates documents and stands for no byte."""

    name: str
    vocab_size: int
    end_of_text: int
    token_lengths: npt.NDArray[np.int64]  # (vocab_size,) bytes of text that each token stands for

    def encode(self, text: bytes | str) -> TokenIds: ...
    def encode_batch(self, texts: list[bytes]) -> list[TokenIds]: ...
    def decode_bytes(self, ids: Iterable[int]) -> bytes: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def to_json(self) -> str | None: ...


class ByteTokenizer:
    """256 byte values and end-of-text (id 256). No training, no file, no dependency."""

    name = "byte"
    vocab_size = 257
    end_of_text = 256

    def __init__(self) -> None:
        self.token_lengths = np.append(np.ones(256, np.int64), 0)

    def encode(self, text: bytes | str) -> TokenIds:
        """Token ids (num_bytes,) int64 of `text`."""
        return np.frombuffer(_as_bytes(text), np.uint8).astype(np.int64)

    def encode_batch(self, texts: list[bytes]) -> list[TokenIds]:
        return [self.encode(text) for text in texts]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that `ids` stand for (end-of-text: none). ValueError on an id beyond the vocabulary."""
        return bytes(i for i in _checked(ids, self) if i != self.end_of_text)

    def decode(self, ids: Iterable[int]) -> str:
        """Text for people: bytes that are not UTF-8 (a character cut in two) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> None:
        return None


class BpeTokenizer:
    """Byte-level BPE (Radford et al. 2019) over a `tokenizers` JSON description."""

    name = "bpe"

    def __init__(self, description: str | bytes, *, source: str = "BpeTokenizer") -> None:
        """`description` is JSON; ValueError names `source` if it is not a lossless byte-level BPE."""
        try:
            self._description = description if isinstance(description, str) else description.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{source}: not UTF-8 at byte {error.start}") from None
        self._source = source
        self._tokenizer = _parse(self._description, source)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = len(ids)
        if set(ids.values()) != set(range(self.vocab_size)):
            raise ValueError(f"{source}: token ids are not 0 .. {self.vocab_size - 1}")
        if END_OF_TEXT not in ids:
            raise ValueError(f"{source}: the vocabulary has no {END_OF_TEXT} token")
        self.end_of_text = ids[END_OF_TEXT]
        characters = _byte_characters()
        if missing := [byte for byte, character in enumerate(characters) if character not in ids]:
            raise ValueError(
                f"{source}: {len(missing)} byte values have no token of their own (first: {missing[0]})"
            )
        byte_of = {character: byte for byte, character in enumerate(characters)}
        added = {
            token.content: token.special for token in self._tokenizer.get_added_tokens_decoder().values()
        }
        self._bytes: list[bytes] = [b""] * self.vocab_size
        for token, i in ids.items():
            if token in added:  # special tokens stand for no text, others for what they spell
                self._bytes[i] = b"" if added[token] else token.encode()
                continue
            try:
                self._bytes[i] = bytes(byte_of[character] for character in token)
            except KeyError:
                raise ValueError(
                    f"{source}: token {i} ({token!r}) is not written in byte-level characters"
                ) from None
        self.token_lengths = np.array([len(piece) for piece in self._bytes], np.int64)

    @classmethod
    def train(cls, documents: Iterable[bytes], vocab_size: int) -> BpeTokenizer:
        """Learn at most `vocab_size` tokens (fewer if the text runs out of pairs); deterministic.

        ValueError if vocab_size < 257 or a document is not UTF-8.
        """
        if vocab_size < SMALLEST_BPE:
            raise ValueError(
                f"bpe: vocab_size must be at least {SMALLEST_BPE} (256 bytes, end-of-text), got {vocab_size}"
            )
        library = _library()
        byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = byte_level
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(byte_level.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator((_as_str(document) for document in documents), trainer)
        return cls(tokenizer.to_str())

    def encode(self, text: bytes | str) -> TokenIds:
        """Token ids (num_tokens,) int64. An end-of-text marker spelt out is text. ValueError if not UTF-8."""
        return self.encode_batch([_as_bytes(text)])[0]

    def encode_batch(self, texts: list[bytes]) -> list[TokenIds]:
        strings = [_as_str(text) for text in texts]
        with _named(self._source):
            encoded = self._tokenizer.encode_batch(strings, add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in encoded]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes that `ids` stand for (end-of-text: none). ValueError on an id beyond the vocabulary."""
        return b"".join(self._bytes[i] for i in _checked(ids, self))

    def decode(self, ids: Iterable[int]) -> str:
        """Text for people: bytes that are not UTF-8 (a character cut in two) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        return self._description


def load_tokenizer(path_or_name: str | Path) -> Tokenizer:
    """ "byte", or the path of a `tokenizers` JSON file that holds a byte-level BPE.

    ValueError naming the file if it is missing, unreadable, damaged, or another kind of tokenizer.
    """
    if path_or_name == "byte":
        return ByteTokenizer()
    try:
        description = read_file(path_or_name, TOKENIZER_LIMIT)
    except OSError as error:
        raise ValueError(f"tokenizer {path_or_name}: cannot be read ({error.strerror})") from None
    return BpeTokenizer(description, source=f"tokenizer {path_or_name}")


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Entropy in nats of the distribution that `counts` are the counts of; 0 for no counts."""
    present = counts[counts > 0].astype(np.float64)
    if present.size == 0:
        return 0.0
    share = present / present.sum()
    return max(0.0, float(-(share * np.log(share)).sum()))


def _library() -> tokenizers:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise ValueError(
            'the bpe tokenizer needs the tokenizers library: pip install "fastmp[train]"'
        ) from None
    return tokenizers


def _parse(description: str, source: str) -> tokenizers.Tokenizer:
    library = _library()
    try:
        kind = json.loads(description)["model"]["type"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{source}: not a tokenizer description in JSON") from None
    if kind != "BPE":
        raise ValueError(f"{source}: model type {kind!r} is not the byte-level BPE that fastmp reads")
    with _named(source):
        tokenizer = library.Tokenizer.from_str(description)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # text that spells a marker stays text
    return tokenizer


@contextlib.contextmanager
def _named(source: str) -> Iterator[None]:
    """Turn what the library raises, Exception itself or a PanicException, into a ValueError with `source`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(f"{source}: {error}") from None


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte value (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _checked(ids: Iterable[int], tokenizer: Tokenizer) -> list[int]:
    ids = [int(i) for i in ids]
    for i in ids:
        if not 0 <= i < tokenizer.vocab_size:
            raise ValueError(
                f"{tokenizer.name} tokenizer: id {i} is outside the vocabulary of {tokenizer.vocab_size}"
            )
    return ids


def _as_bytes(text: bytes | str) -> bytes:
    try:
        return text.encode() if isinstance(text, str) else bytes(text)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"tokenizer: the text holds half a surrogate pair at character {error.start}"
        ) from None


def _as_str(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"bpe: not UTF-8 at byte {error.start}; the byte tokenizer takes any bytes"
        ) from None
