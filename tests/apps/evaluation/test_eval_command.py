"""`fastmp eval`: its tasks on small files in the public formats, on layouts, and what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
import tokenizer_tools
from command_tools import check_mistake
from marks import full
from train_tools import ROOT, arguments, run_fastmp

from fastmp.apps.cli import main
from fastmp.apps.evaluation.lambada import read_examples
from fastmp.apps.evaluation.result_tables import read_result
from fastmp.apps.evaluation.scoring import Score
from fastmp.apps.evaluation.tasks import heldout_task, lambada_task, wikitext_task
from fastmp.apps.evaluation.wikitext import detokenize
from fastmp.apps.generation.trained_models import open_weights
from fastmp.config import BertConfig
from fastmp.hf.weight_io import export_weights
from fastmp.training.checkpoint.directory import checkpoint_at
from fastmp.training.data.corpus import build
from fastmp.training.data.tokenize import ByteTokenizer, load_tokenizer
from fastmp.training.metrics import read_metrics

WORDS = "".join(f' {i} times {i} is {i * i} , the " dog " \'s 1 @,@ 000 . \n' for i in range(30))
WIKITEXT = f" \n = Dogs = \n \n{WORDS} \n"
PASSAGES = ["3 times 3 is 9.", "the dog  said", " and 7 times 7 is\n49"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "wiki.test.tokens").write_text(WIKITEXT)
    lines = [json.dumps({"text": text, "more": 1}) for text in PASSAGES]
    (folder / "lambada.jsonl").write_text("\n".join([*lines, "", ""]))
    (folder / "text.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(400)))
    return folder


@pytest.fixture(scope="module")
def trained(files):
    """A run of a few steps, whose token files have a tokenizer of their own."""
    tokens = build([str(files / "text.txt")], files / "tokens", tokenizer="bpe", vocab_size=300)
    options = {"checkpoint__interval": 6, "model__num_layers": 2, "model__init_std": 0.3}
    assert main(["train", *arguments(files / "runs", tokens, **options)]) == 0
    return files / "runs" / "tiny"


def result_of(out, *arguments):
    assert main(["eval", *map(str, arguments), "--out", str(out)]) == 0
    assert not out.with_name(out.name + ".part").exists()
    return json.loads(out.read_text())


def test_what_wikitext_scores_and_counts(files):
    tokenizer = ByteTokenizer()
    task = wikitext_task(files / "wiki.test.tokens", tokenizer, window=64, stride=8)
    natural = detokenize(WIKITEXT).encode()
    first, second, *_ = task.rows
    assert tokenizer.decode_bytes(first.ids) == natural[:64] and first.ids[0] == tokenizer.end_of_text
    assert tokenizer.decode_bytes(second.ids[-9:]) == natural[63:72] and second.scored == 8
    found = task.summarize([Score(-float(row.scored), False) for row in task.rows])
    num_words = len(WIKITEXT.strip().split(" "))
    assert (
        (found["num_words"], found["num_tokens"])
        == (num_words, len(natural))
        == (5 + 30 * 16 - 1, found["nats"])
    )
    assert found["perplexity"] == math.exp(len(natural) / num_words)
    assert found["perplexity_per_token"] == math.e and found["lossless"] is True


def test_the_same_file_in_other_tokens_is_another_evaluation(files, tmp_path):
    """What was begun with one tokenizer does not go on with another."""
    tokenizers = [ByteTokenizer(), load_tokenizer(tokenizer_tools.gpt2(tmp_path / "model"))]
    for make, name in ((wikitext_task, "wiki.test.tokens"), (heldout_task, "text.txt")):
        one, again, other = (make(files / name, t).settings for t in (tokenizers[0], *tokenizers))
        assert one == again != other
    passages = [lambada_task(files / "lambada.jsonl", t, max_seq_len=64).settings for t in tokenizers]
    assert passages[0] != passages[1]


def test_a_perplexity_beyond_all_numbers_is_infinite(files):
    task = wikitext_task(files / "wiki.test.tokens", ByteTokenizer())
    assert task.summarize([Score(-1e6, False)])["perplexity"] == math.inf


@pytest.mark.parametrize(
    "kind", [tokenizer_tools.mixtral, *full([tokenizer_tools.gpt2, tokenizer_tools.llama_3])]
)
def test_last_words_have_one_space_before_them(kind, files, tmp_path):
    tokenizer = load_tokenizer(kind(tmp_path / "model"))
    task = lambada_task(files / "lambada.jsonl", tokenizer, max_seq_len=64)
    for row, text in zip(task.rows, ("3 times 3 is 9.", "the dog said", "and 7 times 7 is 49"), strict=True):
        assert tokenizer.decode(row.ids).strip() == text
        word = tokenizer.decode(row.ids)[len(tokenizer.decode(row.ids[: -row.scored])) :]
        assert word == " " + text.split()[-1]
    begins = row.ids[0] != tokenizer.encode("and")[0]
    assert begins == (kind is not tokenizer_tools.gpt2)
    lengths = [len(task.rows[number].ids) for number in task.order]
    assert lengths == sorted(lengths, reverse=True) and sorted(task.order) == [0, 1, 2]


class Ended(ByteTokenizer):
    """Bytes, and a token behind every text: what is encoded never begins a longer text."""

    def encode(self, text):
        return np.append(super().encode(text), self.end_of_text)


@pytest.mark.parametrize("kind", [ByteTokenizer, Ended])
def test_the_last_word_begins_with_its_space(kind, files):
    """Also where its tokens are not what it adds to those of the passage."""
    tokenizer = kind()
    task = lambada_task(files / "lambada.jsonl", tokenizer, max_seq_len=64)
    words = [tokenizer.decode(row.ids[-row.scored :]) for row in task.rows]
    assert words == [" 9.", " said", " 49"]


def test_what_lambada_makes_of_scores(files):
    task = lambada_task(files / "lambada.jsonl", ByteTokenizer(), max_seq_len=12)
    assert [len(row.ids) for row in task.rows] == [13, 13, 13]  # the end of what is longer
    found = task.summarize([Score(-1.0, True), Score(-2.0, False), Score(-6.0, True)])
    assert found["accuracy"] == 2 / 3 and found["perplexity"] == math.exp(3.0)
    assert (found["num_tokens"], found["num_truncated"]) == (len(" 9." + " said" + " 49"), 2)
    with pytest.raises(ValueError, match="the 5 tokens of 'said' are too many for the model"):
        lambada_task(files / "lambada.jsonl", ByteTokenizer(), max_seq_len=4)


def test_words_and_passages_without_a_token_are_refused(tmp_path):
    """A word of no tokens would count as right, and one with nothing before it has no first prediction."""
    description = tokenizer_tools.bert(tmp_path / "model") / "tokenizer.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"post_processor": None}))
    tokenizer = load_tokenizer(description)
    passages = tmp_path / "passages.jsonl"
    for text in ("the \u200b", "\u200b the"):
        passages.write_text(json.dumps({"text": text}))
        with pytest.raises(ValueError, match=f"{passages}: the tokenizer has no token for"):
            lambada_task(passages, tokenizer, max_seq_len=64)
    passages.write_text('{"text": "\\ud800 the"}')
    with pytest.raises(ValueError, match=f"{passages}: tokenizer: the text holds half a surrogate pair"):
        lambada_task(passages, tokenizer, max_seq_len=64)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "there are no examples in it"),
        (b'{"text": "a b"}\n{"text": "', 'line 2 is not a JSON object {"text": "..."}'),
        (b'{"txt": "a b"}', "line 1 is not a JSON"),
        (b'["a b"]', "line 1 is not a JSON"),
        (b'{"text": 3}', "line 1 is not a JSON"),
        (b'{"text": "\xff b"}', "line 1 is not a JSON"),
        (b"[" * 100_000, "line 1 is not a JSON"),
        (b'\n{"text": " one "}', "line 2 has no last word behind others: ' one '"),
    ],
)
def test_damaged_passages(content, named):
    with pytest.raises(ValueError) as raised:
        read_examples(content, "f")
    assert str(raised.value).startswith("f: ") and named in str(raised.value)


@pytest.mark.full
def test_held_out_loss_is_the_trainers(trained, files, tmp_path, capsys):
    made = result_of(tmp_path / "h.json", "heldout", files / "tokens", "--checkpoint", trained)
    (*_, trainers) = [each for each in read_metrics(trained / "metrics.jsonl") if each["kind"] == "eval"]
    assert made["nats_per_token"] == pytest.approx(trainers["loss"], rel=1e-6)
    assert made["nats_per_byte"] == pytest.approx(trainers["loss_per_byte"], rel=1e-6)
    said = capsys.readouterr()
    assert "heldout" in said.out and "windows" in said.err and "tokens/s scored" in said.err
    sliding = result_of(
        tmp_path / "s.json", "heldout", files / "text.txt", "--checkpoint", trained, "--stride", 8
    )
    assert sliding["num_bytes"] == len((files / "text.txt").read_bytes())
    graphed = tmp_path / "g.json"
    assert result_of(graphed, "heldout", files / "tokens", "--checkpoint", trained, "--graphs") == made
    assert sliding["perplexity_per_token"] == math.exp(sliding["nats"] / sliding["num_tokens"])


@pytest.mark.full
def test_transformers_directories_and_tables(trained, files, tmp_path, capsys):
    checkpoint = checkpoint_at(trained)
    _, config = open_weights(str(checkpoint), None, None)
    exported = export_weights(checkpoint, config, tmp_path / "model")
    where = ("wikitext", files / "wiki.test.tokens", "--stride", 8)
    one = result_of(tmp_path / "1.json", *where, "--checkpoint", checkpoint)
    two = result_of(tmp_path / "2.json", *where, "--hf", exported, "--tokenizer", files / "tokens")
    assert two["nats"] == one["nats"] and two["model"] == str(exported)
    passages = ("lambada", files / "lambada.jsonl", "--checkpoint", trained)
    three = result_of(tmp_path / "3.json", *passages)
    alone = result_of(tmp_path / "4.json", *passages, "--batch-size", 1)
    assert alone["nats"] == pytest.approx(three["nats"], rel=1e-6) and alone["accuracy"] == three["accuracy"]
    capsys.readouterr()
    assert main(["eval", "table", *(str(tmp_path / f"{i}.json") for i in (1, 3, 2))]) == 0
    wikitext, lambada = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in wikitext.splitlines()] == ["wikitext", one["model"], two["model"]]
    assert len({len(line) for line in wikitext.splitlines()}) == 1 and f"{one['nats']:,.4f}" in wikitext
    assert "accuracy" in lambada and f"{three['accuracy']:.2%}" in lambada


@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in [("--pp", 2), ("--cp", 2), ()]),
        pytest.param(("--tp", 2, "--sequence-parallel"), marks=pytest.mark.full),
    ],
)
def test_ranks_print_what_one_does(trained, files, tmp_path, layout):
    where = ("wikitext", files / "wiki.test.tokens", "--stride", 8, "--checkpoint", trained)
    expected = result_of(tmp_path / "1.json", *where)
    printed = run_fastmp("launch", "-n", 2, "eval", *where, *layout, "--out", tmp_path / "2.json")
    made = json.loads((tmp_path / "2.json").read_text())
    assert made["nats"] == pytest.approx(expected["nats"], rel=1e-6)
    assert len(printed.splitlines()) == 2
    if not layout:
        assert made == expected


@pytest.mark.full
def test_a_killed_command_goes_on(trained, files, tmp_path, capsys):
    """All but two finished batches are taken from what the other one has left."""
    where = ("wikitext", files / "wiki.test.tokens", "--stride", 8, "--checkpoint", str(trained))
    out, part = tmp_path / "1.json", tmp_path / "1.json.part"
    command = [sys.executable, "-m", "fastmp", "eval", *map(str, where)]
    command += ["--out", str(out), "--batch-size", "1"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and (not part.exists() or part.read_bytes().count(b"\n") < 4):
            time.sleep(0.01)
        process.kill()
    assert part.exists() and not out.exists()
    capsys.readouterr()
    other = ["eval", *map(str, where), "--out", str(out), "--batch-size", "2"]
    with pytest.raises(SystemExit):
        main(other)
    assert "1.json.part: is part of another evaluation, with batch_size 1, not 2" in capsys.readouterr().err
    again = result_of(out, *where, "--batch-size", "1")
    assert again == result_of(tmp_path / "2.json", *where, "--batch-size", "1")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ([], "the following arguments are required: TASK"),
        (["wiki"], "invalid choice: 'wiki'"),
        (["wikitext", "f"], "one of the arguments --checkpoint --hf is required"),
        (["wikitext", "f", "--checkpoint", "nowhere"], "nowhere: no checkpoint found; expected a checkpoint"),
        (["lambada", "f", "--hf", "nowhere"], "nowhere: not a local directory; fastmp downloads nothing"),
        (["lambada", "f", "--hf", "nowhere", "--stride", "8"], "there is no option --stride"),
        (["heldout", "f", "--hf", "nowhere", "--window", "0"], "--window: must be a whole number, 1 or more"),
        (["heldout", "f", "--hf", "n", "--tp", "2", "--cp", "2"], "fastmp launch -n 4 eval"),
        (["table", "nowhere"], "nowhere: cannot be read (No such file or directory)"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(changes, named, capsys):
    check_mistake(["eval", *changes], named, capsys)


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["wikitext", "nowhere"], "nowhere: cannot be read (No such file or directory)"),
        (["lambada", "nowhere"], "nowhere: cannot be read"),
        (["heldout", "nowhere"], "nowhere: cannot be read"),
        (["wikitext", "EMPTY"], "there is no word in it"),
        (["heldout", "EMPTY"], "there is no text in it"),
        (["wikitext", "BYTES"], "not UTF-8 at byte 1"),
        (["wikitext", "WINDOWS"], "WINDOWS: its lines end with a carriage return"),
        (["heldout", "BYTES"], "not UTF-8 at byte 1"),
        (["heldout", "SPLIT"], "validation.bin: holds tokens, not text: give a directory of token files"),
        (["heldout", "."], ".: no token files found (there is no index.json); make them"),
        (
            ["heldout", "TEXT", "--window", "33"],
            "a window of 33 tokens is longer than the model's 32 positions",
        ),
        (["heldout", "TEXT", "--stride", "33"], "stride must be from 1 to the window, 32, got 33"),
        (
            ["heldout", "TOKENS", "--tokenizer", "byte"],
            "tokens of another tokenizer (bpe, 300 tokens) than the mo",
        ),
        (["heldout", "TEXT", "--tokenizer", "LARGE"], "is outside the model's vocabulary of 300"),
        (["heldout", "TEXT", "--out", "/nowhere/f"], "/nowhere/f.part: cannot be written"),
        (["heldout", "TEXT", "--out", "."], "--out .: is a directory; name a file"),
    ],
)
def test_what_a_file_or_model_refuses_is_one_line(trained, files, tmp_path, changes, named, capsys):
    (tmp_path / "EMPTY").write_bytes(b"")
    (tmp_path / "BYTES").write_bytes(b"a\xff")
    (tmp_path / "WINDOWS").write_bytes(WIKITEXT.replace("\n", "\r\n").encode())
    places = {name: tmp_path / name for name in ("EMPTY", "BYTES", "WINDOWS")}
    places |= {"TEXT": files / "text.txt", "TOKENS": files / "tokens"}
    places["SPLIT"] = files / "tokens" / "validation.bin"
    if "LARGE" in changes:
        places["LARGE"] = tokenizer_tools.llama_3(tmp_path / "LARGE")
    capsys.readouterr()
    asked = [*(str(places.get(each, each)) for each in changes), "--checkpoint", str(trained)]
    check_mistake(["eval", *asked], named, capsys)


@pytest.mark.full
def test_encoders_are_refused(trained, files, monkeypatch, capsys):
    _, config = open_weights(str(trained), None, None)
    encoder = replace(config, bert=BertConfig())
    monkeypatch.setattr("fastmp.apps.generation.trained_models.model_from", lambda description: encoder)
    asked = ["eval", "heldout", str(files / "text.txt"), "--checkpoint", str(trained)]
    check_mistake(asked, "got a BERT, which predicts masked tokens", capsys)


@pytest.mark.parametrize(
    "content", ["", "[]", '{"task": "lambada"}', '{"task": "wikitext", "perplexity": 3}']
)
def test_other_files_are_no_results(tmp_path, content, capsys):
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(ValueError, match=r"r\.json: is no result of fastmp eval"):
        read_result(tmp_path / "r.json")
    assert main(["eval", "table", str(tmp_path / "none.json")]) == 2
    assert "none.json: cannot be read (No such file or directory)" in capsys.readouterr().err
