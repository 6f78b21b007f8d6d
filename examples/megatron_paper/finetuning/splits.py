"""The splits of a task, read and turned into samples, before a model is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.megatron_paper.finetuning.finetune_recipe import FinetuneConfig
from examples.megatron_paper.finetuning.finetune_tasks import TASKS
from examples.megatron_paper.finetuning.samples import ContextWindow, Sample, encode
from fastmp.config import GPTConfig
from fastmp.training.data.masked import SpecialTokens
from fastmp.training.data.tokenize import Tokenizer

__all__ = ["Prepared", "Split", "prepare", "vocab_size_of"]


@dataclass(frozen=True)
class Split:
    """The examples of a file and their samples; windows of questions."""

    name: str
    examples: list[Any]
    samples: Sequence[Sample]
    windows: Sequence[ContextWindow]


@dataclass(frozen=True)
class Prepared:
    """Data of a task; `notes` are lines to print about the files and left-out examples."""

    train: Sequence[Sample]
    dev: Split
    also: list[Split]
    special: SpecialTokens
    notes: list[str]

    @property
    def rows(self) -> int:
        """Return the rows of a sample."""
        return len(self.train[0].rows)


def prepare(task: str, config: FinetuneConfig, model: GPTConfig, tokenizer: Tokenizer) -> Prepared:
    """Read and encode all splits of `task` in the directory `config.path`.

    ValueError where a file of the task is missing or another one, where a split has no example, and where the
    tokenizer has more tokens than the model.
    """
    if vocab_size_of(tokenizer) > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size_of(tokenizer)} tokens, special ones included, the model a "
            f"vocabulary of {model.vocab_size}"
        )
    notes: list[str] = []

    def read(name: str, file: str) -> Split:
        path = Path(config.path) / file
        found = TASKS[task].read(path)
        encoded = encode(
            found.examples, tokenizer, seq_len=config.seq_len, stride=config.stride, training=name == "train"
        )
        left_out = [found.notes()] if found.left_out else []
        if encoded.left_out:
            left_out.append(f"{encoded.left_out} questions whose answer is not where it should be")
        if not encoded.samples:
            raise ValueError(f"{path}: has no question whose answer is where answer_start says")
        count = f"{len(found.examples)} examples"
        rows = f" in {len(encoded.samples)} windows" if encoded.windows else ""
        notes.append("; ".join([f"{path}: {count}{rows}", *left_out]))
        return Split(name, found.examples, encoded.samples, encoded.windows)

    train, dev = read("train", TASKS[task].train), read("dev", TASKS[task].dev)
    there = {name: file for name, file in TASKS[task].also.items() if (Path(config.path) / file).exists()}
    also = [read(name, file) for name, file in there.items()]
    return Prepared(train.samples, dev, also, SpecialTokens.of(tokenizer), notes)


def vocab_size_of(tokenizer: Tokenizer) -> int:
    """Return the number of ids of a tokenizer, including special tokens that it lacks."""
    ids: list[int] = [*vars(SpecialTokens.of(tokenizer)).values()]
    return max(tokenizer.vocab_size, 1 + max(ids))
