"""A tiny model of transformers with random weights and a tokenizer: `tiny_model.py FAMILY DIRECTORY`."""

from __future__ import annotations

import sys

import tokenizers
import transformers
from hf_models import CONFIGS
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
VOCAB = 320


def main(family: str, directory: str) -> None:
    """Save a model of a family of `hf_models.CONFIGS`, with a BPE of bytes learnt on this file."""
    name, options = CONFIGS[family]
    sizes = {"vocab_size": VOCAB, "eos_token_id": 0, "max_position_embeddings": 512}
    if "num_experts" in options:
        sizes["num_experts"] = 8
    config = getattr(transformers, name)(**{**options, **sizes})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)

    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet)
    bpe.train([__file__], learner)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main(*sys.argv[1:])
