"""Find the starts of words and sentences in token ids, from the text of each token, without decoding.

A token begins a word unless it goes on with the one before it: letters, digits and _ go on with such; blanks
belong to what follows them, as in byte-level BPE; a line break, a CJK character and every other character
begin a word; ## of WordPiece never does. So the words of bytes, BPE, WordPiece and unigram are what readers
take for words.

A sentence begins with the blank behind . ! ? (closing quotes and brackets may stand between), behind their
CJK forms, and with an empty line. WordPiece does not keep blanks: with it, every full stop ends a sentence.
Borders are where a text may be cut in two, and nothing else: one too many does no harm.

Properties of tokens are bits in a table, and the rest is numpy on whole batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fastmp.training.data.tokenize import TokenPiece

LOOKBACK = 3  # tokens before one that say whether a sentence begins with it: . ) ' and the blank

NOTHING, LETTER, BLANK, LINE, CJK, OTHER, INSIDE = range(7)  # kinds of characters; INSIDE goes on with any
_BLANKS = " \t\r\n\v\f"
_CLOSING = "\"')]}\u00bb\u201d\u2019"  # the last three are quotes
_ENDS, _CJK_ENDS = (".", "!", "?", "\u2026"), ("\u3002", "\uff01", "\uff1f")

# Bits of a token's properties; below them the kinds of its first and last character, 3 bits each.
_STOPS, _CLOSES, _ENDS_ALONE, _BEGINS = (np.uint16(1 << bit) for bit in range(6, 10))


def _goes_on() -> npt.NDArray[np.bool_]:
    """Return a table [last kind, first kind]: True if the second token continues the word of the first."""
    table = np.zeros((8, 8), np.bool_)
    table[:, INSIDE] = True
    table[LETTER, LETTER] = True
    for blank in (BLANK, LINE):
        table[blank, [BLANK, LETTER, OTHER, CJK]] = True
    return table


_GOES_ON = _goes_on()


class WordTable:
    """The properties of every token of a vocabulary, by its pieces."""

    def __init__(self, pieces: Sequence[TokenPiece]) -> None:
        self._properties = np.array([_properties(piece) for piece in pieces], np.uint16)

    def starts(self, ids: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return two masks (B, K) of the `ids`: beginnings of words, and beginnings of sentences.

        The first of a row begins a word. Whether others begin a sentence, the LOOKBACK before them say.
        """
        properties = self._properties[ids]
        first, last = properties & 7, properties >> 3 & 7
        words = np.ones(ids.shape, np.bool_)
        words[:, 1:] = ~_GOES_ON[last[:, :-1], first[:, 1:]]

        stops, closes = properties & _STOPS != 0, properties & _CLOSES != 0
        ended = stops.copy()
        for _ in range(LOOKBACK - 1):
            ended[:, 1:] = stops[:, 1:] | (closes[:, 1:] & ended[:, :-1])
        blank = (first == BLANK) | (first == LINE)
        sentences = np.zeros(ids.shape, np.bool_)
        sentences[:, 1:] = (ended[:, :-1] & blank[:, 1:]) | (properties[:, :-1] & _ENDS_ALONE != 0)
        empty_line = properties & _BEGINS != 0
        empty_line[:, 2:] |= (first[:, 2:] == LINE) & (last[:, 1:-1] == LINE) & (last[:, :-2] != LINE)
        empty_line[:, 1:] &= ~sentences[:, :-1]
        sentences |= empty_line
        return words, sentences & words


def _properties(piece: TokenPiece) -> int:
    if not piece.text:
        return NOTHING
    text = piece.text.decode(errors="replace")
    stripped = text.rstrip(_BLANKS)
    bare, behind = stripped.rstrip(_CLOSING), text[len(stripped) :]
    ahead = text[: len(text) - len(text.lstrip(_BLANKS))]
    first = INSIDE if piece.goes_on else _kind(piece.text[0])
    found = first | (NOTHING if stripped and behind else _last_kind(piece.text)) << 3
    if bare.endswith(_ENDS):
        found |= int(_ENDS_ALONE if behind else _STOPS)
    if bare.endswith(_CJK_ENDS) or (stripped and behind.count("\n") > 1):
        found |= int(_ENDS_ALONE)
    if stripped == text and not bare:
        found |= int(_CLOSES)
    if ahead.count("\n") > 1:
        found |= int(_BEGINS)
    return found


def _kind(byte: int) -> int:
    """Return the kind of the character that begins with this byte of UTF-8."""
    if byte == 0x0A:
        return LINE
    if byte in b" \t\r\v\f":
        return BLANK
    if byte < 0x80:
        return LETTER if chr(byte).isalnum() or byte == 0x5F else OTHER
    if byte < 0xC0:
        return INSIDE  # the character began with a token before
    if byte == 0xE2:
        return OTHER  # U+2000 to U+2FFF: punctuation, arrows, symbols
    return CJK if 0xE3 <= byte <= 0xE9 or byte == 0xEF else LETTER


def _last_kind(text: bytes) -> int:
    """Return the kind of the last character; LETTER if it began in an earlier token."""
    begin = len(text) - 1
    while begin > 0 and text[begin] & 0xC0 == 0x80:
        begin -= 1
    kind = _kind(text[begin])
    return LETTER if kind == INSIDE else kind
