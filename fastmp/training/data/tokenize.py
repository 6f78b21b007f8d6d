"""Tokenizers: bytes, or any file of the `tokenizers` library, as models on the Hugging Face Hub have them.

Documents are bytes, not str: the byte tokenizer takes any file, the others any valid UTF-8. Of bytes and of
byte-level BPE (GPT-2, Llama 3, Qwen3) the bytes of every token are known; what other tokens stand for, the
decoder in their file says. A tokenizer may lose something, by a normaliser or an alphabet with holes: whoever
writes token files counts the documents that are changed.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fastmp.config.data_files import TOKENIZER_LIMIT
from fastmp.config.file_access import FOREIGN_ERRORS, read_or_name

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
USUAL_ENDS = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[SEP]",
)  # where nothing says which token it is
SAID_BESIDE = (
    ("tokenizer_config.json", "eos_token"),
    ("special_tokens_map.json", "eos_token"),
    ("generation_config.json", "eos_token_id"),
    ("config.json", "eos_token_id"),
)
SMALLEST_BPE = 257  # 256 bytes and end-of-text

_BYTE = re.compile("<0x[0-9A-F]{2}>")  # one that stands for a byte, of characters that have no token

TokenIds = npt.NDArray[np.int64]


class TokenPiece(NamedTuple):
    """The text of a token.

    text: UTF-8, possibly part of a character, with a leading space if it begins a word; empty for a special
        token.
    goes_on: True if the token is marked as the continuation of a word, as ## in WordPiece.
    """

    text: bytes
    goes_on: bool = False


class Tokenizer(Protocol):
    """The interface of a tokenizer. `end_of_text` separates documents and has no text."""

    name: str
    vocab_size: int
    end_of_text: int

    def encode(self, text: bytes | str) -> TokenIds: ...
    def encode_batch(self, texts: list[bytes]) -> list[TokenIds]: ...
    def encode_prompt(self, text: str) -> list[int]: ...
    def encode_places(self, texts: list[str]) -> list[tuple[TokenIds, list[tuple[int, int]]]]: ...
    def decode_bytes(self, ids: Iterable[int]) -> bytes: ...
    def decode(self, ids: Iterable[int]) -> str: ...
    def to_json(self) -> str | None: ...
    def pieces(self) -> list[TokenPiece]: ...
    def special_id(self, *names: str) -> int | None: ...


class ByteTokenizer:
    """256 byte values and end-of-text (id 256). No training, no file, no dependency."""

    name = "byte"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: bytes | str) -> TokenIds:
        """Return the token ids (num_bytes,) int64 of `text`."""
        return np.frombuffer(_as_bytes(text), np.uint8).astype(np.int64)

    def encode_batch(self, texts: list[bytes]) -> list[TokenIds]:
        return [self.encode(text) for text in texts]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of `text` at the start of a document."""
        return [self.end_of_text, *self.encode(text).tolist()]

    def encode_places(self, texts: list[str]) -> list[tuple[TokenIds, list[tuple[int, int]]]]:
        """Return the ids of each text with the (first, end) characters of every token.

        Bytes of one character share its place.
        """
        encoded = []
        for text in texts:
            places = [(i, i + 1) for i, character in enumerate(text) for _ in _as_bytes(character)]
            encoded.append((self.encode(text), places))
        return encoded

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of `ids`; end-of-text has none. Raises ValueError beyond the vocabulary."""
        values = _checked(ids, self)
        return values[values != self.end_of_text].astype(np.uint8).tobytes()

    def decode(self, ids: Iterable[int]) -> str:
        """Return readable text: bytes outside UTF-8 (a character cut in two) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> None:
        return None

    def pieces(self) -> list[TokenPiece]:
        """Return the text of each id."""
        return [*(TokenPiece(bytes([value])) for value in range(256)), TokenPiece(b"")]

    def special_id(self, *names: str) -> None:
        """Return None: bytes have no special token besides end-of-text."""
        return None


class FileTokenizer:
    """A tokenizer as the `tokenizers` library describes it in JSON.

    `name` is the kind of its model: bpe, unigram, wordpiece or wordlevel. `vocab_size` is the highest id plus
    one, added tokens included.
    """

    def __init__(
        self, description: str | bytes, *, source: str = "FileTokenizer", end_of_text: str | int | None = None
    ) -> None:
        """`description` is JSON; `end_of_text` a token or an id, by default the first of USUAL_ENDS there.

        ValueError, which names `source`, where the library cannot read it or it has no such token.
        """
        try:
            self._description = description if isinstance(description, str) else description.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{source}: not UTF-8 at byte {error.start}") from None
        self._source = source
        self._tokenizer, byte_level = _parse(self._description, source)
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = type(self._tokenizer.model).__name__.lower()
        with _named(source):
            hidden = _without_markers(self._description, self.name)
        self._of_text = self._tokenizer if hidden is None else _parse(hidden, source)[0]
        self.vocab_size = max(ids.values(), default=-1) + 1
        if self.vocab_size > _max_ids(len(ids)):
            raise ValueError(f"{source}: {len(ids)} tokens have ids up to {self.vocab_size - 1}")
        outside = [i for i in self.encode_prompt("") if i >= self.vocab_size]
        if outside:
            raise ValueError(
                f"{source}: its post_processor gives id {outside[0]} for a vocabulary of {self.vocab_size}"
            )
        self.end_of_text = _find_end(ids, end_of_text, source)
        self._bytes = self._bytes_of(ids) if byte_level else None

    def encode(self, text: bytes | str) -> TokenIds:
        """Token ids (num_tokens,) int64. A marker spelt out is text. ValueError if not UTF-8."""
        return self.encode_batch([_as_bytes(text)])[0]

    def encode_batch(self, texts: list[bytes]) -> list[TokenIds]:
        strings = [_as_str(text) for text in texts]
        with _named(self._source):
            encoded = self._of_text.encode_batch(strings, add_special_tokens=False)
        return [np.array(one.ids, np.int64) for one in encoded]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the library's ids of `text`: markers are tokens, and its template is applied."""
        with _named(self._source):
            self._tokenizer.encode_special_tokens = False
            try:
                return self._tokenizer.encode(_as_str(_as_bytes(text))).ids
            finally:
                self._tokenizer.encode_special_tokens = True

    def encode_places(self, texts: list[str]) -> list[tuple[TokenIds, list[tuple[int, int]]]]:
        """Return ids and places as `ByteTokenizer`, in the text before normalisation."""
        with _named(self._source):
            encoded = self._of_text.encode_batch(texts, add_special_tokens=False)
        return [(np.array(one.ids, np.int64), one.offsets) for one in encoded]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of `ids`; special tokens have none. Raises ValueError beyond the vocabulary."""
        values = _checked(ids, self).tolist()
        if self._bytes is not None:
            return b"".join(self._bytes.get(i, b"") for i in values)
        with _named(self._source):
            return self._tokenizer.decode(values, skip_special_tokens=True).encode()

    def decode(self, ids: Iterable[int]) -> str:
        """Return readable text: bytes outside UTF-8 (a character cut in two) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        return self._description

    def pieces(self) -> list[TokenPiece]:
        """Return the text of each id; unused ids are empty."""
        made = [TokenPiece(b"")] * self.vocab_size
        if self._bytes is not None:
            for i, text in self._bytes.items():
                made[i] = TokenPiece(text)
            return made
        added = self._tokenizer.get_added_tokens_decoder()
        model = self._tokenizer.model
        for token, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if i in added:
                made[i] = TokenPiece(b"" if added[i].special else token.encode())
            else:
                made[i] = _piece(token, self.name, model)
        return made

    def special_id(self, *names: str) -> int | None:
        """Return the id of the first of `names` that is a special token; None if none is."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        ids = {token.content: i for i, token in added if token.special}
        return next((ids[name] for name in names if name in ids), None)

    def _bytes_of(self, ids: dict[str, int]) -> dict[int, bytes]:
        """Return the bytes of each token of a byte-level vocabulary; special tokens have none."""
        byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
        added = {token.content: token for token in self._tokenizer.get_added_tokens_decoder().values()}
        pieces = {}
        for token, i in ids.items():
            if token in added:
                pieces[i] = b"" if added[token].special else token.encode()
            elif all(character in byte_of for character in token):
                pieces[i] = bytes(byte_of[character] for character in token)
            else:
                pieces[i] = token.encode()
        return pieces


def train_bpe(documents: Iterable[bytes], vocab_size: int) -> FileTokenizer:
    """Learn a byte-level BPE (Radford et al. 2019) of at most `vocab_size` tokens, which loses nothing.

    There are fewer tokens if the text runs out of pairs. The same text gives the same tokens. A prompt begins
    with end-of-text, as documents in token files do.

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
    begin = END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = library.processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[begin]
    )
    return FileTokenizer(tokenizer.to_str())


def load_tokenizer(path_or_name: str | Path, *, end_of_text: str | None = None) -> Tokenizer:
    """Load "byte", a tokenizer.json, or the tokenizer.json in the directory of a model.

    The token that ends a text is `end_of_text`, else that of transformers' files next to it (SAID_BESIDE),
    else one of USUAL_ENDS. Raises ValueError naming the file that is missing, unreadable or damaged.
    """
    if path_or_name == "byte":
        return ByteTokenizer()
    path = Path(path_or_name)
    if path.is_dir():
        path = path / "tokenizer.json"
        if not path.exists() and (path.parent / "tokenizer.model").exists():
            directory = str(path.parent)
            raise ValueError(
                f"tokenizer {directory}: has a tokenizer.model, but no tokenizer.json; transformers makes "
                f"one: AutoTokenizer.from_pretrained({directory!r}).save_pretrained({directory!r})"
            )
    description = read_or_name(path, TOKENIZER_LIMIT, "tokenizer ")
    end = _end_said_beside(path) if end_of_text is None else end_of_text
    return FileTokenizer(description, source=f"tokenizer {path}", end_of_text=end)


def _end_said_beside(path: Path) -> str | int | None:
    """Return the end-of-text token or id in the files next to a tokenizer.json, or None."""
    for name, key in SAID_BESIDE:
        beside = path.with_name(name)
        if not beside.exists():
            continue
        raw = read_or_name(beside, TOKENIZER_LIMIT)
        try:
            said = json.loads(raw)
        except (ValueError, RecursionError):
            raise ValueError(f"{beside}: not JSON, so it does not say which token ends a text") from None
        value = said.get(key) if isinstance(said, dict) else None
        if isinstance(value, dict):  # an added token with its properties
            value = value.get("content")
        if isinstance(value, list):  # several that end a reply: the first one ends a text
            value = value[0] if value else None
        if type(value) in (str, int):
            return value
    return None


def _find_end(ids: dict[str, int], end_of_text: str | int | None, source: str) -> int:
    if type(end_of_text) is int:
        if end_of_text in ids.values():
            return end_of_text
        raise ValueError(f"{source}: no token has the id {end_of_text}, which is to be end-of-text")
    for token in USUAL_ENDS if end_of_text is None else (str(end_of_text),):
        if token in ids:
            return ids[token]
    named = "is called " + ", ".join(USUAL_ENDS) if end_of_text is None else f"{end_of_text!r}"
    raise ValueError(f"{source}: no token {named}: name the one that ends a text (--end-of-text TOKEN)")


def unigram_entropy(counts: npt.NDArray[np.int64]) -> float:
    """Return the entropy, in nats, of the distribution with these counts; 0 without counts."""
    present = counts[counts > 0].astype(np.float64)
    if present.size == 0:
        return 0.0
    share = present / present.sum()
    return max(0.0, float(-(share * np.log(share)).sum()))


def _piece(token: str, kind: str, model: Any) -> TokenPiece:
    """Return the text of a token of a vocabulary that is not byte-level; `kind` selects its marks."""
    if kind == "wordlevel":
        return TokenPiece(b" " + token.encode())
    prefix = getattr(model, "continuing_subword_prefix", None)
    if prefix:
        inside = token.startswith(prefix)
        return TokenPiece(token[len(prefix) :].encode() if inside else b" " + token.encode(), inside)
    if _BYTE.fullmatch(token):
        return TokenPiece(bytes([int(token[3:5], 16)]))
    suffix = getattr(model, "end_of_word_suffix", None)
    if suffix and token.endswith(suffix):
        token = token.removesuffix(suffix) + " "
    return TokenPiece(token.replace("\u2581", " ").encode())


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.processors
        import tokenizers.trainers
    except ImportError:
        raise ValueError(
            "tokenizers other than byte need the tokenizers library: pip install tokenizers"
        ) from None
    return tokenizers


def _parse(description: str, source: str) -> tuple[tokenizers.Tokenizer, bool]:
    """Return the library's tokenizer, and True if its decoder is byte-level."""
    library = _library()
    try:
        content: dict[str, Any] = json.loads(description)
        _, decoder = content["model"]["vocab"], content.get("decoder")
        refusal = _impossible(content)
    except FOREIGN_ERRORS:
        raise ValueError(f"{source}: not a tokenizer description in JSON") from None
    if refusal:
        raise ValueError(f"{source}: {refusal}")
    with _named(source):
        tokenizer = library.Tokenizer.from_str(description)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # text that spells a marker stays text
        if getattr(tokenizer.model, "dropout", None):
            tokenizer.model.dropout = None  # one text, one list of tokens
    return tokenizer, isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def _impossible(content: dict[str, Any]) -> str:
    """Return a fault that the library would overlook, or abort at; "" for a sound file.

    Faults are an id far beyond the number of tokens, and a merge without the prefix that the library cuts
    off: it aborts the process inside a character.
    """
    model, added = content["model"], content.get("added_tokens") or []
    vocab = model["vocab"]
    most = _max_ids(len(vocab) + len(added))
    ids = [*(vocab.items() if isinstance(vocab, dict) else ()), *((a["content"], a["id"]) for a in added)]
    for token, i in ids:
        if type(i) is not int or not 0 <= i < most:
            return f"{len(vocab)} tokens, but {short(token)} has the id {short(i)}"
    prefix = model.get("continuing_subword_prefix")
    for merge in (model.get("merges") or []) if prefix else []:
        second = (merge.split(" ") if isinstance(merge, str) else merge)[1]
        if not second.startswith(prefix):
            return f"the merge {short(merge)} lacks the continuing_subword_prefix {short(prefix)}"
    return ""


def _max_ids(tokens: int) -> int:
    """Return the largest number of ids accepted for this many tokens: vocabularies may have gaps."""
    return 2 * tokens + 1024


def _without_markers(description: str, kind: str) -> str | None:
    """Return the description with special tokens renamed so that no text spells one; None if none could.

    Models that look whole words or pieces up would find one that is in their vocabulary, as ALBERT's [MASK]
    is. There it gets a name that nobody can know; ids stay. The unknown token keeps its own.
    """
    content = json.loads(description)
    model = content["model"]
    added = content.get("added_tokens") or ()
    special = {each["content"] for each in added if each.get("special")} - {model.get("unk_token")}
    if kind == "unigram":
        names = [piece for piece, _ in model["vocab"]]
        special -= {names[model["unk_id"]]} if model.get("unk_id") is not None else set()
    else:
        names = list(model["vocab"])
    if kind not in ("unigram", "wordlevel", "wordpiece") or special.isdisjoint(names):
        return None
    secret = secrets.token_hex(16)
    new = {name: secret + name if name in special else name for name in names}
    if kind == "unigram":
        model["vocab"] = [[new[piece], score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {new[name]: i for name, i in model["vocab"].items()}
    for token in content["added_tokens"]:
        token["content"] = new.get(token["content"], token["content"])
    content["post_processor"] = None
    return json.dumps(content)


@contextlib.contextmanager
def _named(source: str) -> Iterator[None]:
    """Turn errors of the library, PanicException included, into a ValueError with `source`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())[:400]}") from None


def _byte_characters() -> list[str]:
    """Return the printable character of each byte value in byte-level BPE (GPT-2's table)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _checked(ids: Iterable[int], tokenizer: Tokenizer) -> TokenIds:
    values = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64)
    outside = (values < 0) | (values >= tokenizer.vocab_size)
    if outside.any():
        raise ValueError(
            f"{tokenizer.name} tokenizer: id {values[outside][0]} is outside the vocabulary of "
            f"{tokenizer.vocab_size}"
        )
    return values


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
        raise ValueError(f"not UTF-8 at byte {error.start}; the byte tokenizer takes any bytes") from None
