"""A small BERT, and rows of masked tokens for it."""

from __future__ import annotations

import torch
from train_tools import Samples

from fastmp.config import BertConfig, GPTConfig

PRE = GPTConfig(
    **{"num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 131, "max_seq_len": 16},
    init_std=0.1,
    activation="gelu",
    bert=BertConfig(),
)
MAX_MASKED = 5  # of a sample


class BertSamples(Samples):
    """Rows of 16 tokens, of several lengths, each a function of its number; up to MAX_MASKED are masked."""

    def sample(self, number):
        generator = torch.Generator().manual_seed(number)
        length, places = 16 - number % 3 * 4, torch.arange(16)
        tokens = torch.randint(3, 131, (16,), generator=generator)
        masked = torch.zeros(16, dtype=torch.bool)
        masked[torch.randperm(length, generator=generator)[: 2 + number % 4]] = True
        return {
            "tokens": tokens.masked_fill(masked, 1).masked_fill(places >= length, 0),
            "targets": tokens.masked_fill(~masked, -100),
            "token_types": (places >= length // 2).long(),
            "padding_mask": places >= length,
            "sentence_order": torch.tensor(number % 2),
        }

    def samples(self, first):
        rows = [self.sample(first + i) for i in range(self.micro_batch_size)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
