"""The detokenizer of WikiText: what it writes, and that nothing is lost in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.megatron_paper.evaluation.wikitext import count_words, detokenize, tokenize

PUBLISHED = (
    ' \n = A <unk> = \n \n The well @-@ known player \'s " first " goal ( 1 @,@ 500 of 2 @.@ 5 million ) : '
    "they don 't know . \n \n = = Later = = \n \n \n = = = 1990 \u2013 92 = = = \n \n"
)
NATURAL = (
    "\n= A <unk> =\n\nThe well-known player's \"first\" goal (1,500 of 2.5 million): they don't know.\n\n"
    "== Later ==\n\n\n=== 1990 \u2013 92 ===\n\n"
)
# what words, marks and spaces can be mistaken for each other
SPACES = [" ", "  ", "\n", " \n", "\n ", " @-@ ", " @.@ ", " ' ", ' " ']
WORDS = [
    *("a B 5 06 <unk> é U.S. Mr. X. word. 5.8".split()),
    *("\t", "\r", "\u2028", "\xa0", "\0"),
    *("@-@ @,@ @.@ @ - -- . ... , ; : ! ? % $ ' 's \" = ( ) [".split()),
]


def test_it_reads_as_people_write():
    assert detokenize(PUBLISHED) == NATURAL
    assert tokenize(NATURAL) == PUBLISHED


@pytest.mark.parametrize(
    ("words", "natural"),
    [
        ("Mr. A. B. Smith left the U.S. again .", "Mr. A. B. Smith left the U.S. again."),
        ("named Malcolm X . He", "named Malcolm X . He"),  # or the stop would be that of an initial
        ("the U.S . again", "the U.S . again"),
        ("the 90s ' \" best of ' all ' \" , he said", "the 90s' \"best of 'all'\", he said"),
        ("state @-@ of @-@ the @-@ art", "state-of-the-art"),
        ("1 @,@ 234 @,@ 567 @.@ 8 %", "1,234,567.8%"),
        ("a 5.8 b", "a  5.8 b"),  # two spaces: a word as it is
        ("a word. B", "a  word. B"),
        ("a @-@", "a @-@"),
        ("<unk> 's <unk> @-@ based", "<unk>'s <unk>-based"),
        ("( [ x ] )", "([x])"),
        ("$ 5 and £ 6", "$5 and £6"),
        ("what ? ! ...", "what?! ..."),
    ],
)
def test_rules_and_where_they_would_lose_something(words, natural):
    assert detokenize(f" {words} \n") == natural + "\n"
    assert tokenize(natural + "\n") == f" {words} \n"


@given(st.lists(st.sampled_from(SPACES + WORDS), max_size=16).map("".join))
def test_nothing_is_lost_of_nasty_text(text):
    assert tokenize(detokenize(text)) == text


@pytest.mark.full
@given(st.text(max_size=30))
def test_nothing_is_lost_of_any_text(text):
    assert tokenize(detokenize(text)) == text


@pytest.mark.full
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=20))
def test_lines_of_the_published_form_are_detokenized(words):
    line = " ".join(["", *words, ""])
    natural = detokenize(line + "\n")
    assert tokenize(natural) == line + "\n" and len(natural) <= len(line) + 2 * len(words)


def test_what_is_not_in_the_published_form_stays_as_it_is():
    assert detokenize("no space , before\n") == " no space , before\n"
    assert detokenize(" two  spaces , inside \n") == "  two  spaces , inside \n"


def test_words_and_line_ends_between_the_first_and_the_last_word_count():
    assert count_words(" \n = A = \n \n b c . \n \n") == 3 + 2 + 3
    assert count_words(PUBLISHED) == len(PUBLISHED.strip().split(" "))
    assert count_words(" \n \n") == 0


@pytest.mark.full
def test_a_long_run_of_marks_takes_no_time():
    text = " " + " , " * 50_000 + "\n"
    assert tokenize(detokenize(text)) == text
    text = " x" + " ," * 50_000 + " \n"
    assert tokenize(detokenize(text)) == text
