"""`fastmp generate`: from runs and from models of transformers, on layouts, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys

import pytest
import tokenizer_tools
from command_tools import Terminal, check_mistake
from marks import full
from train_tools import ROOT, arguments, run_fastmp

from fastmp.apps.cli import main
from fastmp.apps.generate import _print
from fastmp.apps.generation.batched import Completion, Continuation, Generated, generate
from fastmp.apps.generation.trained_models import eos_token_ids, load_model, open_weights, tokenizer_beside
from fastmp.distributed.groups import ParallelGroups
from fastmp.hf.weight_io import export_weights
from fastmp.training.checkpoint.directory import checkpoint_at
from fastmp.training.data.corpus import build
from fastmp.training.data.tokenize import load_tokenizer

PROMPTS = ("3 times 3 is ", "1")
ASKED = [*(part for text in PROMPTS for part in ("--prompt", text)), "--max-new-tokens", "9"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a few steps, whose token files have a tokenizer of their own."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(400)))
    tokens = build([str(folder / "text.txt")], folder / "tokens", tokenizer="bpe", vocab_size=300)
    options = {"checkpoint__interval": 6, "model__num_layers": 2, "model__init_std": 0.3}
    assert main(["train", *arguments(folder / "runs", tokens, **options)]) == 0
    return folder / "runs" / "tiny"


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """The same model as a directory of transformers, with no tokenizer."""
    checkpoint = checkpoint_at(trained)
    _, config = open_weights(str(checkpoint), None, None)
    return export_weights(checkpoint, config, tmp_path_factory.mktemp("exported") / "model")


def expected_of(run, **options):
    """What Python makes of `ASKED`, as the command prints it."""
    checkpoint = checkpoint_at(run)
    reader, config = open_weights(str(checkpoint), None, None)
    model, tokenizer = load_model(reader, config, ParallelGroups.alone()), tokenizer_beside(checkpoint)
    ids = [tokenizer.encode_prompt(text) for text in PROMPTS]
    rows = generate(model, ids, tokenizer=tokenizer, max_new_tokens=9, **options).rows
    return "".join(
        f"== prompt {i}: {row.reason}\n{prompt}{row.text}\n"
        for i, (prompt, row) in enumerate(zip(PROMPTS, rows, strict=True), 1)
    )


def of_command(capsys, *arguments):
    capsys.readouterr()
    assert main(["generate", *ASKED, *map(str, arguments)]) == 0
    return capsys.readouterr()


@pytest.mark.parametrize("stream", [Terminal, io.StringIO], ids=["terminal", "file"])
def test_the_text_of_a_model_cannot_steer_a_terminal(stream, monkeypatch):
    written = stream()
    monkeypatch.setattr(sys, "stdout", written)
    row = Continuation([1], "b\tc\n\x1b]0;title\x07", "length")
    _print(["a "], Generated([row], 1, 1, 1, 1.0, 1.0))
    text = "\\x1b]0;title\\x07" if stream is Terminal else "\x1b]0;title\x07"
    assert written.getvalue() == f"a b\tc\n{text}\n"


@pytest.mark.full
def test_a_run_and_what_transformers_has_of_it(trained, exported, capsys):
    drawn = ("--temperature", 1.2, "--top-k", 50, "--top-p", 0.9, "--seed", 4)
    expected = expected_of(trained, temperature=1.2, top_k=50, top_p=0.9, seed=4)
    said = of_command(capsys, "--checkpoint", trained, *drawn)
    assert said.out == expected
    assert re.search(r"prompts: \d+ tokens in .* tokens/s; .* new tokens: 16 in .* tokens/s", said.err)
    tokens = trained.parent.parent / "tokens"
    assert of_command(capsys, "--hf", exported, "--tokenizer", tokens, *drawn).out == expected
    greedily = of_command(capsys, "--checkpoint", checkpoint_at(trained), "--temperature", 0).out
    assert greedily == expected_of(trained, temperature=0.0) != expected


@pytest.mark.full
def test_a_model_of_few_positions_makes_as_many_tokens_as_fit_unless_asked_for_a_number(trained, capsys):
    reader, config = open_weights(str(checkpoint_at(trained)), None, None)
    model, tokenizer = (
        load_model(reader, config, ParallelGroups.alone()),
        tokenizer_beside(checkpoint_at(trained)),
    )
    ids = tokenizer.encode_prompt(PROMPTS[0])
    (row,) = generate(model, [ids], tokenizer=tokenizer, max_new_tokens=33 - len(ids), temperature=0.0).rows
    capsys.readouterr()
    assert config.max_seq_len == 32
    assert main(["generate", "--checkpoint", str(trained), "--prompt", PROMPTS[0], "--temperature", "0"]) == 0
    assert capsys.readouterr().out == PROMPTS[0] + row.text + "\n"


@pytest.mark.full
def test_one_prompt_is_the_text_alone_and_ends_before_a_stop_string(trained, capsys):
    whole = expected_of(trained, temperature=0.0).partition("== prompt 2")[0].partition("\n")[2][:-1]
    stop = whole[len(PROMPTS[0]) + 2 :][:2]
    options = ["--prompt", PROMPTS[0], "--max-new-tokens", "9", "--temperature", "0", "--stop", stop]
    capsys.readouterr()
    assert main(["generate", "--checkpoint", str(trained), *options]) == 0
    new = whole[len(PROMPTS[0]) :]
    assert capsys.readouterr().out == PROMPTS[0] + new[: new.index(stop)] + "\n"


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(("--tp", 2), id="tp", marks=pytest.mark.full),
        pytest.param(("--pp", 2), id="pp", marks=pytest.mark.exhaustive),
        pytest.param((), id="dp", marks=pytest.mark.exhaustive),
    ],
)
def test_ranks_print_what_one_does(trained, layout):
    printed = run_fastmp("launch", "-n", 2, "generate", "--checkpoint", trained, *ASKED, *layout)
    assert printed == expected_of(trained)


@pytest.mark.full
def test_a_reader_that_leaves_and_one_that_knows_no_unicode(trained):
    command = [sys.executable, "-m", "fastmp", "generate", "--checkpoint", str(trained)]
    command += ["--max-new-tokens", "9", "--prompt"]
    with subprocess.Popen([*command, "1"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as left:
        left.stdout.close()
        assert (left.stderr.read(), left.wait()) == (b"", 1)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "日"], cwd=ROOT, capture_output=True, env=environment)
    assert done.returncode == 0 and done.stdout.startswith(rb"\u65e5"), done.stderr


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["--checkpoint", "nowhere"], "nowhere: no checkpoint found; expected a checkpoint, or"),
        (["--hf", "nowhere"], "nowhere: not a local directory; fastmp downloads nothing"),
        (["--checkpoint", "a", "--hf", "b"], "not allowed with argument"),
        ([], "one of the arguments --checkpoint --hf is required"),
        (["--hf", "nowhere", "--top-p", "1.5"], "top_p must be above 0 and at most 1, got 1.5"),
        (["--hf", "nowhere", "--top-p", "0"], "top_p must be above 0 and at most 1, got 0.0"),
        (["--hf", "nowhere", "--top-k", "-1"], "--top-k: must be a whole number, 0 or more, got '-1'"),
        (["--hf", "nowhere", "--temperature", "nan"], "must be a number, 0 or more, got 'nan'"),
        (["--hf", "nowhere", "--tp", "2", "--pp", "2"], "fastmp launch -n 4 generate"),
        (["--hf", "nowhere", "--cp", "2"], "there is no option --cp"),
        (["--hf", "nowhere", "--stop", ""], "--stop: must not be empty"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(changes, named, capsys):
    check_mistake(["generate", "--prompt", "x", *changes], named, capsys)


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (["--max-new-tokens", "40"], "model of 32 positions; at most "),
        (["--tokenizer", "nowhere"], "tokenizer nowhere: cannot be read"),
        (["--hf"], "tokenizer.json: cannot be read (No such file or directory); name the model's tokenizer"),
    ],
)
def test_what_a_model_refuses_is_one_line(trained, exported, changes, named, capsys):
    where = ["--hf", str(exported)] if changes == ["--hf"] else ["--checkpoint", str(trained), *changes]
    test_a_mistake_is_one_line_and_status_2(where, named, capsys)


@pytest.mark.full
def test_a_checkpoint_without_its_run_or_with_damage(trained, tmp_path, capsys):
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in checkpoint_at(trained).iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    where = ["--checkpoint", str(moved)]
    test_a_mistake_is_one_line_and_status_2(where, "name the model's tokenizer by --tokenizer FILE", capsys)
    tensors = max(moved.iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    test_a_mistake_is_one_line_and_status_2(where, tensors.name, capsys)


@pytest.mark.parametrize("kind", [tokenizer_tools.mixtral, *full([tokenizer_tools.llama_3])])
def test_texts_go_on_where_prompts_end(kind, tmp_path):
    """A decoder that drops the space before a text drops none between a prompt and what is new."""
    tokenizer = load_tokenizer(kind(tmp_path / "model"))
    text = "the dog is on the mat, the end"
    ids = tokenizer.encode_prompt(text)
    for border in range(2, len(ids)):
        row = Completion(ids[:border], len(ids) - border, tokenizer, ("he e",))
        row.take(ids[border:])
        whole = tokenizer.decode(ids[:border]) + row.continuation().text
        assert whole == (text[:-6] if "he e" in text[len(tokenizer.decode(ids[:border])) :] else text)


def test_several_tokens_may_end_a_text(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert eos_token_ids(tmp_path) == {5}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert eos_token_ids(tmp_path) == {7, 8}
