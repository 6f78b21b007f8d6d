"""Directories with tokenizers built like those of well-known models, from a few words of text.

What makes each of them special is there: the alphabet, normaliser, template, decoder, added tokens and the
files beside it. With `full_size`, tokens that no text reaches fill the vocabularies up to the sizes of the
originals.
"""

from __future__ import annotations

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

TEXTS = [
    "the cat sat on the mat, the end.",
    "  def f(x):\n\treturn x ** 2  # 12345\n\n",
    "naïve café — 日本語 😀\r\n",
    " leading and  double spaces ",
]


def _save(tokenizer, directory, **beside):
    """`beside`: the contents of other files, by their names without .json."""
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in beside.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def _filled(tokenizer, size):
    """`tokenizer` with a vocabulary of at least `size` tokens before its added ones."""
    description = json.loads(tokenizer.to_str())
    vocab = description["model"]["vocab"]
    vocab.update({f"unreached{i}": i for i in range(len(vocab), size)})
    return Tokenizer.from_str(json.dumps(description))


def _byte_level(pattern, size):
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    tokenizer.pre_tokenizer = byte_level
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=sorted(byte_level.alphabet()), show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return _filled(tokenizer, size)


WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gpt2(directory, full_size=False):
    """Byte-level BPE; only the generation configuration says what ends a text."""
    tokenizer = _byte_level(None, 50_256 if full_size else 0)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    end = tokenizer.token_to_id("<|endoftext|>")
    return _save(tokenizer, directory, tokenizer_config={}, generation_config={"eos_token_id": end})


def llama_3(directory, full_size=False):
    """Byte-level BPE with 256 added tokens and a template that begins a text with one of them."""
    tokenizer = _byte_level(WORDS, 128_000 if full_size else 0)
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    names += [f"<|reserved_special_token_{i}|>" for i in range(253)]
    tokenizer.add_special_tokens(names)
    begin = (names[0], tokenizer.token_to_id(names[0]))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    return _save(tokenizer, directory, tokenizer_config={"eos_token": "<|end_of_text|>"})


def qwen_3(directory, full_size=False):
    """Byte-level BPE behind a normaliser (NFC), with special tokens and tokens that are text."""
    tokenizer = _byte_level(WORDS, 151_643 if full_size else 0)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(f"<tool_{i}>", special=False, normalized=False) for i in range(23)])
    return _save(tokenizer, directory, tokenizer_config={"eos_token": {"content": "<|endoftext|>"}})


def mixtral(directory, full_size=False):
    """BPE of characters, with bytes for those that it does not know, and ▁ for spaces."""
    tokenizer = Tokenizer(models.BPE())
    trainer = BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.train_from_iterator(TEXTS[:2] * 3, trainer)
    description = json.loads(tokenizer.to_str())
    vocab, model = description["model"]["vocab"], description["model"]
    vocab.update({f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)})
    model.update(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = _filled(Tokenizer.from_str(json.dumps(description)), 32_000 if full_size else 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _save(tokenizer, directory, special_tokens_map={"eos_token": "</s>"})


def bert(directory, texts=TEXTS, vocab_size=200):
    """WordPiece without case and accents, with BERT's special tokens; nothing says what ends a text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
    return _save(tokenizer, directory, tokenizer_config={"sep_token": "[SEP]"})


def albert(directory, texts=TEXTS, vocab_size=200):
    """Unigram with ▁ for spaces, and special tokens some of which have other names."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "</s>"]
    trainer = UnigramTrainer(
        vocab_size=vocab_size, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _save(tokenizer, directory)
