"""`fastmp eval`: its figures on small files, on layouts, and what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace

import evaluation_files
import pytest
import tokenizer_tools
from command_tools import check_mistake
from evaluation_files import result_of
from train_tools import ROOT, run_fastmp

from fastmp.apps.cli import main
from fastmp.apps.evaluation.result_tables import read_result
from fastmp.apps.evaluation.tasks import heldout_task
from fastmp.apps.generation.trained_models import open_weights
from fastmp.config import BertConfig
from fastmp.training.data.tokenize import ByteTokenizer, load_tokenizer
from fastmp.training.metrics import read_metrics


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return evaluation_files.write(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def trained(files):
    return evaluation_files.train(files)


def test_the_same_text_in_other_tokens_is_another_evaluation(files, tmp_path):
    """What was begun with one tokenizer does not go on with another."""
    tokenizers = [ByteTokenizer(), load_tokenizer(tokenizer_tools.gpt2(tmp_path / "model"))]
    one, again, other = (heldout_task(files / "text.txt", t).settings for t in (tokenizers[0], *tokenizers))
    assert one == again != other


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


@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in [("--pp", 2), ("--cp", 2), ()]),
        pytest.param(("--tp", 2, "--sequence-parallel"), marks=pytest.mark.full),
    ],
)
def test_ranks_print_what_one_does(trained, files, tmp_path, layout):
    where = ("heldout", files / "text.txt", "--stride", 8, "--checkpoint", trained)
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
    where = ("heldout", files / "text.txt", "--stride", 8, "--checkpoint", str(trained))
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
        (["held"], "invalid choice: 'held'"),
        (["heldout", "f"], "one of the arguments --checkpoint --hf is required"),
        (["heldout", "f", "--checkpoint", "nowhere"], "nowhere: no checkpoint found; expected a checkpoint"),
        (["heldout", "f", "--hf", "nowhere"], "nowhere: not a local directory; fastmp downloads nothing"),
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
        (["heldout", "nowhere"], "nowhere: cannot be read (No such file or directory)"),
        (["heldout", "EMPTY"], "there is no text in it"),
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
    places = {name: tmp_path / name for name in ("EMPTY", "BYTES")}
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


@pytest.mark.parametrize("content", ["", "[]", '{"task": "heldout"}', '{"task": "lambada", "accuracy": 0.5}'])
def test_other_files_are_no_results(tmp_path, content, capsys):
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(ValueError, match=r"r\.json: is no result of heldout"):
        read_result(tmp_path / "r.json", {"heldout": ["nats_per_byte"]})
    assert main(["eval", "table", str(tmp_path / "none.json")]) == 2
    assert "none.json: cannot be read (No such file or directory)" in capsys.readouterr().err
