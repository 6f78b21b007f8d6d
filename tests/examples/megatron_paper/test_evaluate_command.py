"""`python -m examples.megatron_paper evaluate`: its tasks on small files in the public formats."""

from __future__ import annotations

import json
import math
from functools import partial

import evaluation_files
import numpy as np
import pytest
import tokenizer_tools
from command_tools import check_mistake
from evaluation_files import WIKITEXT
from marks import full
from train_tools import run_fastmp

from examples.megatron_paper.__main__ import PROG, main
from examples.megatron_paper.evaluation.lambada import read_examples
from examples.megatron_paper.evaluation.wikitext import detokenize
from examples.megatron_paper.evaluation.zero_shot_tasks import lambada_task, wikitext_task
from fastmp.apps.evaluation.scoring import Score
from fastmp.apps.generation.trained_models import open_weights
from fastmp.hf.weight_io import export_weights
from fastmp.training.checkpoint.directory import checkpoint_at
from fastmp.training.data.tokenize import ByteTokenizer, load_tokenizer

made_by = partial(evaluation_files.result_of, command="evaluate", program=main)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return evaluation_files.write(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def trained(files):
    return evaluation_files.train(files)


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
    wiki = files / "wiki.test.tokens"
    one, again, other = (wikitext_task(wiki, t).settings for t in (tokenizers[0], *tokenizers))
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
def test_transformers_directories_and_tables(trained, files, tmp_path, capsys):
    checkpoint = checkpoint_at(trained)
    _, config = open_weights(str(checkpoint), None, None)
    exported = export_weights(checkpoint, config, tmp_path / "model")
    where = ("wikitext", files / "wiki.test.tokens", "--stride", 8)
    one = made_by(tmp_path / "1.json", *where, "--checkpoint", checkpoint)
    two = made_by(tmp_path / "2.json", *where, "--hf", exported, "--tokenizer", files / "tokens")
    assert two["nats"] == one["nats"] and two["model"] == str(exported)
    passages = ("lambada", files / "lambada.jsonl", "--checkpoint", trained)
    three = made_by(tmp_path / "3.json", *passages)
    alone = made_by(tmp_path / "4.json", *passages, "--batch-size", 1)
    assert alone["nats"] == pytest.approx(three["nats"], rel=1e-6) and alone["accuracy"] == three["accuracy"]
    capsys.readouterr()
    assert main(["evaluate", "table", *(str(tmp_path / f"{i}.json") for i in (1, 3, 2))]) == 0
    wikitext, lambada = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in wikitext.splitlines()] == ["wikitext", one["model"], two["model"]]
    assert len({len(line) for line in wikitext.splitlines()}) == 1 and f"{one['nats']:,.4f}" in wikitext
    assert "accuracy" in lambada and f"{three['accuracy']:.2%}" in lambada


@pytest.mark.full
def test_ranks_print_what_one_does(trained, files, tmp_path):
    asked = ("wikitext", files / "wiki.test.tokens", "--stride", 8, "--checkpoint", trained)
    expected, out = made_by(tmp_path / "1.json", *asked), tmp_path / "2.json"
    launched = ("launch", "-n", 2, "-m", "examples.megatron_paper", "evaluate", *asked)
    printed = run_fastmp(*launched, "--tp", 2, "--out", out)
    assert json.loads(out.read_text())["nats"] == pytest.approx(expected["nats"], rel=1e-6)
    assert len(printed.splitlines()) == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["wiki"], "invalid choice: 'wiki'"),
        (["wikitext", "f"], "one of the arguments --checkpoint --hf is required"),
        (["wikitext", "f", "--checkpoint", "nowhere"], "nowhere: no checkpoint found; expected a checkpoint"),
        (["lambada", "f", "--hf", "nowhere"], "nowhere: not a local directory; fastmp downloads nothing"),
        (["lambada", "f", "--hf", "nowhere", "--stride", "8"], "there is no option --stride"),
        (
            ["wikitext", "f", "--hf", "n", "--tp", "2"],
            "fastmp launch -n 2 -m examples.megatron_paper evaluate wikitext f",
        ),
        (["table", "nowhere"], "nowhere: cannot be read (No such file or directory)"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(changes, named, capsys):
    check_mistake(["evaluate", *changes], named, capsys, main, PROG)


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "content", "named"),
    [
        ("wikitext", None, "FILE: cannot be read (No such file or directory)"),
        ("lambada", None, "FILE: cannot be read"),
        ("wikitext", b"", "there is no word in it"),
        ("wikitext", b"a\xff", "not UTF-8 at byte 1"),
        ("wikitext", WIKITEXT.replace("\n", "\r\n").encode(), "FILE: its lines end with a carriage return"),
    ],
)
def test_what_a_file_refuses_is_one_line(trained, tmp_path, task, content, named, capsys):
    if content is not None:
        (tmp_path / "FILE").write_bytes(content)
    capsys.readouterr()
    asked = ["evaluate", task, str(tmp_path / "FILE"), "--checkpoint", str(trained)]
    check_mistake(asked, named, capsys, main, PROG)
