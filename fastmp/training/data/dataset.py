"""The dataset of a directory of token files, or of a corpus of Megatron-LM. What the training loop calls:

    data = TokenDataset.from_config(recipe.data, cache_dir="runs/data")   # several ranks may build at once
    data = TokenDataset(directory, seq_len=256, micro_batch_size=8, seed=1234)
    data.batch(step, microbatch, num_microbatches, dp_rank, dp_size)   # {"tokens", "targets"} (B, S) int64
    # ... with document_masking=True, "documents" as well: which token is in which document
    data.validation_batches(dp_rank, dp_size)   # the same; all held-out text once, padding's target is -100
    loss_per_byte = loss_per_token / data.validation.info.bytes_per_token    # data.train.info likewise
    data.validation.info.unigram_entropy   # nats per byte;  data.vocab_size, data.tokenizer
The state of a run is its step alone: a step's global batch is the same set of samples at every dp_size.
"""

from __future__ import annotations

import contextlib
import platform
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastmp.config import DataConfig
from fastmp.config.data_files import is_megatron
from fastmp.training.data.corpus import DatasetExists, build
from fastmp.training.data.megatron import MegatronSplit
from fastmp.training.data.megatron import open_splits as open_megatron
from fastmp.training.data.sampling import first_sample, sample_starts
from fastmp.training.data.tokenfile import FORMAT, TokenSplit, open_split, open_tokenizer, read_index
from fastmp.training.data.tokenize import Tokenizer, load_tokenizer

IGNORE_INDEX = -100  # target of padding, which the loss leaves out


class TokenDataset:
    """Fixed-length samples of a token directory or of a corpus of Megatron-LM; see the top of this module.

    source: the directory, or the prefix of Megatron's files. These have no tokenizer: `tokenizer` is what
        `load_tokenizer` takes. Their last documents, a share `validation_fraction` of their number, are
        held out.
    validation_source: what is held out instead: the held-out text of a directory, or its training text
        where it has no other; all documents of a corpus of Megatron-LM.
    document_masking: batches also have "documents", the `fastmp.nn.Documents` of their rows. A document
        begins with end-of-text, as token files have it, and with every row. End-of-text sees itself alone and
        predicts how a document begins; the last token of a document predicts end-of-text. So every target is
        one that its token can know of, and all of them count.
    static_shapes: in training these have room for as many documents as a batch may hold, for graphs.

    Opening checks sizes and the checksums of the small files: ValueError names the damaged file. `batch`
    checks each block of 64 KiB that it reads from for the first time, and every id.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        seq_len: int,
        micro_batch_size: int,
        seed: int,
        document_masking: bool = False,
        static_shapes: bool = False,
        tokenizer: str = "byte",
        validation_fraction: float = 0.05,
        validation_source: str | Path | None = None,
    ) -> None:
        if seq_len < 1 or micro_batch_size < 1:
            raise ValueError(
                f"TokenDataset: seq_len {seq_len} and micro_batch_size {micro_batch_size} must be positive"
            )
        self.seq_len, self.micro_batch_size, self.seed = seq_len, micro_batch_size, seed
        self.document_masking = document_masking
        corpus = open_corpora(source, tokenizer, validation_fraction, validation_source)
        self.tokenizer, self.train, self._validation = corpus
        self.vocab_size = self.tokenizer.vocab_size
        if self.train.info.num_tokens < seq_len + 1:
            raise ValueError(
                f"{self.train.path}: {self.train.info.num_tokens} tokens do not hold one sample of "
                f"seq_len + 1 = {seq_len + 1}; lower data.seq_len, or give more text"
            )
        self.max_documents: int | None = None
        if document_masking:
            for split in (self.train, self._validation):
                if isinstance(split, MegatronSplit):
                    split.check_ends()
            if static_shapes:
                self.max_documents = micro_batch_size * self.train.max_documents(seq_len)

    @classmethod
    def from_config(
        cls, config: DataConfig, *, cache_dir: str | Path, static_shapes: bool = False
    ) -> TokenDataset:
        """Open `config.path`, or the built-in `config.text`, built under `cache_dir` the first time."""
        return cls(
            cls.built(config, cache_dir),
            seq_len=config.seq_len,
            micro_batch_size=config.micro_batch_size,
            seed=config.seed,
            document_masking=config.document_masking,
            static_shapes=static_shapes,
            tokenizer=config.tokenizer,
            validation_fraction=config.validation_fraction,
            validation_source=config.validation_path,
        )

    @classmethod
    def built(cls, config: DataConfig, cache_dir: str | Path) -> Path:
        """Return the source that `from_config` opens, after building a built-in text if necessary."""
        source = cls.source(config, cache_dir)
        if config.path is None and not source.exists():
            with contextlib.suppress(DatasetExists):  # another process has just built it
                build(
                    [config.text],
                    source,
                    tokenizer=config.tokenizer,
                    validation_fraction=config.validation_fraction,
                )
        return source

    @staticmethod
    def source(config: DataConfig, cache_dir: str | Path) -> Path:
        """Return the source that `from_config` opens (of a blend, the first), built or not."""
        if config.first_path is not None:
            return Path(config.first_path)
        tokenizer = config.tokenizer
        if tokenizer not in ("byte", "bpe"):  # a file: others may have the same name
            loaded = load_tokenizer(tokenizer)
            description = f"{loaded.end_of_text} {loaded.to_json()}"
            tokenizer = f"{Path(tokenizer).stem}-{zlib.crc32(description.encode()):08x}"
        name = f"{config.text}-python{platform.python_version()}-{tokenizer}"
        return Path(cache_dir) / f"{name}-{config.validation_fraction:g}-{FORMAT.rpartition('-')[2]}"

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of training text per token; None if the text is not known."""
        return self.train.info.bytes_per_token

    @property
    def holds_out(self) -> bool:
        """True if there is held-out text."""
        return self._validation is not None

    def held_out(self) -> list[tuple[str, float, TokenDataset]]:
        """Return [(name, share, self)], as `BlendedDataset.held_out`. Raises ValueError without one."""
        return [(str(self.validation.path), 1.0, self)]

    @property
    def validation(self) -> TokenSplit | MegatronSplit:
        """The held-out split. Raises ValueError if there is none."""
        if self._validation is None:
            raise nothing_held_out(str(self.train.path.parent))
        return self._validation

    def batch(
        self, step: int, microbatch: int, num_microbatches: int, dp_rank: int, dp_size: int
    ) -> dict[str, Any]:
        """Return the microbatch of a data-parallel rank: "tokens" and "targets", (B, S) int64 on the CPU.

        targets[b, s] is the token after tokens[b, s]. `first_sample` selects the samples.
        """
        first = first_sample(step, microbatch, num_microbatches, dp_rank, dp_size, self.micro_batch_size)
        windows, begins = self.samples(first, self.micro_batch_size)
        return make_batch(windows[:, :-1].copy(), windows[:, 1:].copy(), begins, self.max_documents)

    def samples(self, first: int, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
        """Return samples `first` to `first` + `count` - 1 of the run.

        Returns:
            tokens (count, seq_len + 1), and a mask (count, seq_len) of those that begin documents; None
            without document_masking.
        """
        starts = sample_starts(self.seed, first, count, self.train.info.num_tokens, self.seq_len)
        windows = _windows(self.train, starts, self.seq_len)
        masked = self.document_masking
        return windows, self.train.document_begins(starts, windows[:, :-1]) if masked else None

    def num_validation_batches(self, dp_size: int = 1) -> int:
        """Return the number of batches that `validation_batches` yields on every rank."""
        windows = -(-(self.validation.info.num_tokens - 1) // self.seq_len)
        return -(-windows // (self.micro_batch_size * dp_size))

    def validation_batches(
        self, dp_rank: int = 0, dp_size: int = 1, *, max_batches: int | None = None
    ) -> Iterator[dict[str, Any]]:
        """Yield all held-out text, over the ranks together: each token but the first is a target once.

        As `batch`; the target is -100 where the last windows are padding. Every rank gets equally many
        batches, the same ones at every call; `max_batches` stops earlier, for a quick look.
        """
        count = self.num_validation_batches(dp_size)
        for number in range(count if max_batches is None else min(count, max_batches)):
            first = (number * dp_size + dp_rank) * self.micro_batch_size
            yield self._validation_batch(first)

    def _validation_batch(self, first: int) -> dict[str, Any]:
        split, seq_len = self.validation, self.seq_len
        shape = (self.micro_batch_size, seq_len)
        tokens = np.full(shape, self.tokenizer.end_of_text, np.int64)
        targets = np.full(shape, IGNORE_INDEX, np.int64)
        begins = np.zeros(shape, np.bool_) if self.document_masking else None  # padding: none of its own
        for row in range(self.micro_batch_size):
            begin = (first + row) * seq_len
            real = min(seq_len, split.info.num_tokens - 1 - begin)
            if real > 0:
                starts = np.array([begin])
                window = _windows(split, starts, real)
                tokens[row, :real], targets[row, :real] = window[0, :-1], window[0, 1:]
                if begins is not None:
                    begins[row, :real] = split.document_begins(starts, window[:, :-1])
        return make_batch(tokens, targets, begins)


class Corpus(NamedTuple):
    """A source of samples: its tokenizer, and its training and held-out splits."""

    tokenizer: Tokenizer
    train: TokenSplit | MegatronSplit
    validation: TokenSplit | MegatronSplit | None


def open_corpora(
    source: str | Path, tokenizer: str, held_out: float, validation_source: str | Path | None
) -> Corpus:
    """Open `source` as `open_corpus`; its held-out split is `validation_source`, if given."""
    corpus = open_corpus(source, tokenizer, 0.0 if validation_source else held_out)
    if validation_source is None:
        return corpus
    beside = open_corpus(validation_source, tokenizer, 0.0)
    check_same_tokenizer(source, corpus.tokenizer, validation_source, beside.tokenizer)
    return corpus._replace(validation=beside.validation or beside.train)


def open_corpus(source: str | Path, tokenizer: str, held_out: float) -> Corpus:
    """Open Megatron-LM's files, or a token directory with its own tokenizer and held-out text.

    Raises ValueError if a file is missing or damaged, or `source` is neither of the two.
    """
    if is_megatron(source):
        if tokenizer == "bpe":
            raise ValueError(
                f"{source}: a corpus of Megatron-LM needs the tokenizer it was made with: data.tokenizer is "
                "'bpe', which learns one; name a tokenizer.json"
            )
        made = load_tokenizer(tokenizer)
        return Corpus(made, *open_megatron(source, made, held_out))
    directory = Path(source)
    index = read_index(directory)
    validation = open_split(directory, index, "validation") if "validation" in index.splits else None
    return Corpus(open_tokenizer(directory, index), open_split(directory, index, "train"), validation)


def nothing_held_out(source: str) -> ValueError:
    """Return the error of a validation on `source`, which has no held-out text."""
    return ValueError(
        f"{source}: no text was held out (validation_fraction 0); "
        "set data.validation_path, or train.eval_interval 0"
    )


def check_same_tokenizer(one: str | Path, its: Tokenizer, other: str | Path, others: Tokenizer) -> None:
    """Raise ValueError if two sources have different tokenizers."""
    for what, first, second in (
        ("tokenizer", its.name, others.name),
        ("tokens in the vocabulary", its.vocab_size, others.vocab_size),
        ("end-of-text", its.end_of_text, others.end_of_text),
        ("file of the tokenizer", its.to_json(), others.to_json()),
    ):
        if first != second:
            values = "" if what.startswith("file") else f" ({first} and {second})"
            raise ValueError(
                f"{one} and {other} differ in {what}{values}: build them with the same tokenizer"
            )


def make_batch(
    tokens: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64],
    begins: npt.NDArray[np.bool_] | None = None,
    max_documents: int | None = None,
) -> dict[str, Any]:
    """Return a batch of `tokens` and `targets` (B, S), with "documents" if `begins` (B, S) is given."""
    import torch  # here, so that building token files does not wait for it

    batch: dict[str, Any] = {"tokens": torch.from_numpy(tokens), "targets": torch.from_numpy(targets)}
    if begins is not None:
        from fastmp.nn.documents import Documents

        position_ids = torch.from_numpy(_position_ids(begins))
        batch["documents"] = Documents.from_position_ids(position_ids, max_documents=max_documents)
    return batch


def _position_ids(begins: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return positions (B, S) in documents; one begins at each row and wherever `begins` (B, S) is True."""
    places = np.arange(begins.shape[1])
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


def _windows(
    split: TokenSplit | MegatronSplit, starts: npt.NDArray[np.int64], seq_len: int
) -> npt.NDArray[np.int64]:
    """Return the tokens (len(starts), seq_len + 1) of the ring from each start."""
    total = split.info.num_tokens
    result = np.empty((len(starts), seq_len + 1), np.int64)
    for row, start in enumerate(starts.tolist()):
        head = min(seq_len + 1, total - start)
        result[row, :head] = split.read(start, start + head)
        if head <= seq_len:
            result[row, head:] = split.read(0, seq_len + 1 - head)
    return result
