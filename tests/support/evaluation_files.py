"""Small texts in the formats that evaluations read, a run trained on one of them, and results."""

from __future__ import annotations

import json

from train_tools import arguments

from fastmp.apps.cli import main
from fastmp.training.data.corpus import build

WORDS = "".join(f' {i} times {i} is {i * i} , the " dog " \'s 1 @,@ 000 . \n' for i in range(30))
WIKITEXT = f" \n = Dogs = \n \n{WORDS} \n"
PASSAGES = ["3 times 3 is 9.", "the dog  said", " and 7 times 7 is\n49"]


def write(folder):
    """Write a WikiText file, passages of LAMBADA and a plain text; return `folder`."""
    (folder / "wiki.test.tokens").write_text(WIKITEXT)
    lines = [json.dumps({"text": text, "more": 1}) for text in PASSAGES]
    (folder / "lambada.jsonl").write_text("\n".join([*lines, "", ""]))
    (folder / "text.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(400)))
    return folder


def train(files):
    """Return a run of a few steps, whose token files have a tokenizer of their own."""
    tokens = build([str(files / "text.txt")], files / "tokens", tokenizer="bpe", vocab_size=300)
    options = {"checkpoint__interval": 6, "model__num_layers": 2, "model__init_std": 0.3}
    assert main(["train", *arguments(files / "runs", tokens, **options)]) == 0
    return files / "runs" / "tiny"


def result_of(out, *arguments, command="eval", program=main):
    """Return the result that an evaluation has written to `out`."""
    assert program([command, *map(str, arguments), "--out", str(out)]) == 0
    assert not out.with_name(out.name + ".part").exists()
    return json.loads(out.read_text())
