"""A small WordPiece tokenizer like BERT's, for texts of known words."""

from __future__ import annotations

import pytest

from fastmp.training.data.tokenize import FileTokenizer

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def word_tokenizer(words) -> FileTokenizer:
    """Ids 0 to 3 are the special tokens; then each of `words`, in lower case and without accents."""
    return FileTokenizer(tokenizer_json(words), end_of_text="[SEP]")


def tokenizer_json(words) -> str:
    library = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
    vocabulary = {word: i for i, word in enumerate((*SPECIALS, *words))}
    tokenizer = library.Tokenizer(library.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer.to_str()
