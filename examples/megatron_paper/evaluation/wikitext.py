"""WikiText as published, and as its authors wrote it: a detokenizer that loses nothing.

WikiText is cut into words by spaces, also before punctuation, with " @-@ ", " @,@ " and " @.@ " where a mark
stands inside a word or a number. A model of subwords has never seen such text; it reads the text detokenized,
and the perplexity still counts the original words. That is a perplexity of the original text only if nothing
is lost on the way, so `tokenize` gives back every byte that `detokenize` was given.

A line " w w w " becomes chunks that single spaces separate. `_split` says which words a chunk stands for; it
looks at nothing but the chunk. A word joins the chunk before it only where `_split` gives both back, so

- a word that would be taken for another stays alone ("Malcolm X ."), and
- one that is read wrongly even when alone has two spaces before it, which say to take it as it is.

A line that this cannot write, as it has not the form of the published files, is kept as it is behind a space,
with which no other line begins. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

__all__ = ["count_words", "detokenize", "tokenize"]

_JOINTS = {"@-@": "-", "@,@": ",", "@.@": "."}
_LONGEST = 256  # characters of a chunk, or one of many marks would take time
_CLOSING, _OPENING = frozenset(",.;:!?)]}%°"), frozenset("([{$£€")
# what ends a word inside a chunk, and is one itself or joins two
_MARKS = re.compile(
    r"""(?P<joint> (?<=[0-9])[.,](?=[0-9]) | (?<=[\w>])-(?=[\w<]) )
      | <unk> | (?<=[\w>)"])'\w+ | ["'()\[\]{},;:!?%°$£€]""",
    re.VERBOSE,
)
_ABBREVIATIONS = frozenset(
    "Adm Apr Aug Ave Bros Brig Capt Cmdr Co Col Corp Cpl Dec Dept Dr Drs Esq Feb Fig Ft Gen Gov Hon Inc "
    "Jan Jr Jul Jun Lt Ltd Maj Mar Messrs Mr Mrs Ms Mt No Nos Nov Oct Op Ph Prof Pvt Rep Rev Sen Sep Sept "
    "Sgt Sr St Ste Supt Vol approx ca cf ed eds est etc pp vol vs".split()
)


def detokenize(text: str) -> str:
    """Return the text of WikiText's words in usual writing; `tokenize` is the inverse for any text."""
    *lines, rest = text.split("\n")
    # what follows the last line end: nothing, as a rule, which no line stands for
    return "\n".join([*map(_line, lines), rest and (_line(rest) or " " + rest)])


def tokenize(text: str) -> str:
    """Return the words of WikiText that `detokenize` turned into `text`."""
    *lines, rest = text.split("\n")
    return "\n".join([*map(_original, lines), rest and _original(rest)])


def count_words(text: str) -> int:
    """Return the number of words and line ends between the first and the last word of a WikiText file.

    This is the paper's T_o: 245,566 for the test set of WikiText-103.
    """
    return len(re.findall(r"[^ \n]+|\n", text.strip(" \n")))


def _line(line: str) -> str:
    """Return a detokenized line without its end; empty for " ", WikiText's empty line."""
    if line == " ":
        return ""
    words = line[1:-1].split(" ")
    if line[:1] != " " or line[-1:] != " " or not all(words) or list(_split(words[0])) != words[:1]:
        return " " + line
    return " ".join(_chunks(words))


def _original(line: str) -> str:
    if line.startswith(" "):
        return line[1:]
    words: list[str] = []
    literal = False
    for chunk in line.split(" ") if line else ():
        words.extend((chunk,) if literal else _split(chunk))
        literal = not chunk and not literal
    return " ".join(["", *words, ""]) if words else " "


def _chunks(words: list[str]) -> Iterator[str]:
    """Yield the chunks of a line; an empty one marks the next word as unchanged."""
    style, at = _Style(), 0
    chunk = ""
    held: tuple[str, ...] = ()  # the words of the chunk; none where no other may join it
    while at < len(words):
        joins, number, longer = style.joins(words[at]), 1, chunk + words[at]
        if words[at] in _JOINTS and at + 1 < len(words):
            joins, number, longer = True, 2, chunk + _JOINTS[words[at]] + words[at + 1]
        more = (*held, *words[at : at + number])
        if joins and held and len(longer) <= _LONGEST and _split(longer) == more:
            chunk, held = longer, more
            if number == 2:
                style.joins(words[at + 1])
            at += number
            continue
        if at:
            yield chunk
        chunk, held = words[at], (words[at],)
        if _split(chunk) != held:
            yield ""
            held = ()
        at += 1
    yield chunk


class _Style:
    """Says of the words of a line, one after the other, whether they stand close to the word before."""

    def __init__(self) -> None:
        self._open = {'"': False, "'": False}
        self._previous, self._opening = "", False

    def joins(self, word: str) -> bool:
        previous, self._previous = self._previous, word
        joins = self._opening or word in _CLOSING or word == previous == "="
        joins = joins or (word.startswith("'") and word != "'")
        self._opening = word in _OPENING
        if word in self._open:
            possessive = word == "'" and previous.endswith("s")
            if self._open[word] or possessive:
                joins, self._open[word] = True, False
            else:
                self._open[word] = self._opening = True
        return joins


@lru_cache(maxsize=1 << 16)
def _split(chunk: str) -> tuple[str, ...]:
    """Return the words of a chunk; none for an empty one."""
    if chunk.strip("=") == "":  # around a heading
        return tuple(chunk)
    words, begin = [], 0
    for mark in _MARKS.finditer(chunk):
        words += _without_stop(chunk[begin : mark.start()])
        words.append(f"@{mark[0]}@" if mark["joint"] else mark[0])
        begin = mark.end()
    return (*words, *_without_stop(chunk[begin:]))


def _without_stop(run: str) -> list[str]:
    """Return a run of non-punctuation characters, with a final full stop as a separate word.

    An abbreviation keeps its stop, as do initials and what has stops inside.
    """
    stem = run[:-1]
    if not run.endswith(".") or not stem or "." in stem or stem in _ABBREVIATIONS:
        return [run] if run else []
    return [run] if len(stem) == 1 and stem.isupper() else [stem, "."]
