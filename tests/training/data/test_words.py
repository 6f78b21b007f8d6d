"""Words and sentences of token ids: the same for every kind of tokenizer, as far as its tokens allow."""

from __future__ import annotations

import pytest
import tokenizer_tools
from hypothesis import given, settings
from hypothesis import strategies as st

from fastmp.training.data.tokenize import ByteTokenizer, TokenPiece, load_tokenizer, train_bpe
from fastmp.training.data.words import LOOKBACK, WordTable

TEXT = (
    'He\'d said (see "it."). Then: 3.14 e.g. half! Really?!\n\n'
    "Next  line_1\n\tindented; naïve 日本語。完 end.\nLast"
)
WORDS = (  # of TEXT, and where sentences begin: ||
    'He|\'|d| said| (|see| "|it|.|"|)|.|| Then|:| 3|.|14| e|.|g|.|| half|!|| Really|?|!||\n|\nNext|  line_1|'
    "\n\tindented|;| naïve| 日|本|語|。|完| end|.||\nLast"
)
PIECES = {  # where a token holds more than one word, or lacks the blanks
    "bpe": ['(|see| "|it|.").||', "|?!||\n|\nNext", "| 日本語|。|"],
    "wordpiece": ["| he| '| d|", '| it| .|| "| )| .|| then', "| 3| .|| 14|", "| 日| 本| 語| 。|| 完|"],
    "unigram": ['| said| (|see| "|it', "|.||\nLast", "| naïve|"],
}


def shown(tokenizer, text):
    """`text` as words, those with which sentences begin behind ||."""
    ids, pieces = tokenizer.encode(text), tokenizer.pieces()
    words, sentences = WordTable(pieces).starts(ids[None])
    marks = [b"||" if s else b"|" if w else b"" for w, s in zip(words[0], sentences[0])]
    return b"".join(mark + pieces[i].text for mark, i in zip(marks, ids)).decode()[1:]


def make(kind, folder):
    texts = [TEXT] * 3
    if kind == "bpe":
        return train_bpe([text.encode() for text in texts], 330)
    maker = tokenizer_tools.bert if kind == "wordpiece" else tokenizer_tools.albert
    return load_tokenizer(maker(folder / kind, texts))


def test_words_and_sentences_of_bytes():
    assert shown(ByteTokenizer(), TEXT) == WORDS


@pytest.mark.parametrize("kind", PIECES)
def test_words_and_sentences_of_other_tokens(kind, tmp_path):
    found = "|" + shown(make(kind, tmp_path), TEXT)
    assert [part for part in PIECES[kind] if part not in found] == []


@settings(max_examples=50)
@given(st.text(alphabet='ab Z.!)"\n\té日。_7', max_size=60), st.integers(0, 40))
def test_what_begins_a_sentence_is_told_by_the_tokens_just_before_it(text, skip):
    ids = ByteTokenizer().encode(text)
    table = WordTable(ByteTokenizer().pieces())
    words, sentences = table.starts(ids[None])
    rest = table.starts(ids[None, skip:])
    assert (words[:, skip + 1 :] == rest[0][:, 1:]).all()
    assert (sentences[:, skip + LOOKBACK :] == rest[1][:, LOOKBACK:]).all()
    assert (words | ~sentences).all() and words[:, :1].all()


def test_pieces_of_special_added_and_absent_tokens(tmp_path):
    tokenizer = load_tokenizer(tokenizer_tools.qwen_3(tmp_path / "qwen"))
    pieces = tokenizer.pieces()
    assert len(pieces) == tokenizer.vocab_size
    assert pieces[tokenizer.end_of_text] == TokenPiece(b"") == pieces[tokenizer.special_id("<|im_end|>")]
    assert TokenPiece(b"<tool_7>") in pieces and tokenizer.special_id("<tool_7>") is None
    assert tokenizer.special_id("[CLS]", "<|im_start|>") == tokenizer.encode_prompt("<|im_start|>")[0]
    assert ByteTokenizer().special_id("[CLS]") is None
    mixtral = load_tokenizer(tokenizer_tools.mixtral(tmp_path / "mixtral"))
    ids = mixtral.encode("the é")
    assert b"".join(mixtral.pieces()[i].text for i in ids) == b" the \xc3\xa9"
