"""LAMBADA (Paperno et al. 2016): predict the last word of a passage.

A file has one JSON object a line, {"text": "..."}, as published (Paperno et al. 2016, arXiv 1606.06031).
Standard library only.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from fastmp.config.file_access import FOREIGN_ERRORS

__all__ = ["Example", "read_examples"]


class Example(NamedTuple):
    """A passage without its last word and the space around it, and that word."""

    context: str
    word: str


def read_examples(content: bytes, name: str) -> list[Example]:
    """Return the examples of a file with this content; empty lines are skipped.

    ValueError, which begins with `name` and the line, for what is no such object, and for a text of less than
    two words.
    """
    examples = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            words = text.split()
        except FOREIGN_ERRORS:
            raise ValueError(f'{name}: line {number} is not a JSON object {{"text": "..."}}') from None
        if len(words) < 2:
            raise ValueError(f"{name}: line {number} has no last word behind others: {text[:60]!r}")
        examples.append(Example(text[: text.rfind(words[-1])].strip(), words[-1]))
    if not examples:
        raise ValueError(f"{name}: there are no examples in it")
    return examples
