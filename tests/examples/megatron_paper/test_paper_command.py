"""`python -m examples.megatron_paper`: its help, its answers to mistakes, and its ranks."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import finetune_files
import pytest
from command_tools import status_of
from finetune_tokenizer import tokenizer_json

from examples.megatron_paper.__main__ import COMMANDS, PROG, main

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("command", ["", *COMMANDS, "evaluate wikitext", "corpus build"])
def test_help_imports_neither_torch_nor_numpy(command):
    program = (
        "import sys\n"
        "from examples.megatron_paper.__main__ import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as leaving: assert not leaving.code\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    line = [sys.executable, "-c", program, *command.split(), "--help"]
    printed = subprocess.run(line, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert all(name in printed for name in ([command] if command else COMMANDS))


@pytest.mark.parametrize(
    ("command", "model"),
    [("finetune", "runs/bert"), ("evaluate wikitext", "Qwen3-0.6B"), ("evaluate lambada", "Qwen3-0.6B")],
)
def test_the_example_of_the_help_is_read_up_to_its_model(command, model, capsys, monkeypatch):
    """Where the checkpoint is missing, everything before it has been accepted."""
    monkeypatch.chdir(ROOT)
    assert status_of([*command.split(), "--help"], main) == 0
    (example,) = re.findall(r"^  python -m examples.megatron_paper (.*)", capsys.readouterr().out, re.M)
    assert status_of(shlex.split(example), main) == 2
    assert re.fullmatch(rf"(fastmp|{PROG} evaluate): {model}\b.*\n", capsys.readouterr().err)


def test_an_unknown_command_is_a_usage_error(capsys):
    assert main(["finetun", "qqp"]) == 2
    meant = "did you mean: python -m examples.megatron_paper finetune qqp"
    assert meant in capsys.readouterr().err
    assert main([]) == 2
    assert "usage: python -m examples.megatron_paper COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("finetune qqp", "fastmp launch -m examples.megatron_paper finetune qqp"),
        ("launch -n 2 finetune qqp", "fastmp launch -n 2 -m examples.megatron_paper finetune qqp"),
        ("eval wikitext f --hf m", "python -m examples.megatron_paper evaluate wikitext f --hf m"),
        ("eval lambada", "python -m examples.megatron_paper evaluate lambada"),
        ("data overlap a b", "python -m examples.megatron_paper corpus overlap a b"),
        (
            "data build --input f --out d --exclude t",
            "python -m examples.megatron_paper corpus build --input f --out d --exclude t",
        ),
        (
            "data build --input f --out d --dedup_jaccard=0.7",
            "python -m examples.megatron_paper corpus build --input f --out d --dedup_jaccard=0.7",
        ),
    ],
)
def test_the_command_that_fastmp_had_names_this_one(line, meant, capsys):
    assert status_of(line.split()) == 2
    assert capsys.readouterr().err.endswith(f"did you mean: {meant}\n")


def test_ranks_of_a_moved_task_are_launched_again(capsys, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert status_of(["eval", "lambada", "f"]) == 2
    assert "fastmp launch -n 2 -m examples.megatron_paper evaluate lambada f\n" in capsys.readouterr().err


@pytest.mark.full
def test_ranks_are_started_by_fastmp_launch(tmp_path):
    words = (*finetune_files.NOUNS, *finetune_files.VERBS, *"the yes maybe no why also ?".split())
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(words))
    finetune_files.qqp(tmp_path / "qqp", train=16, dev=8)
    shape = {"num-layers": 1, "hidden-size": 16, "num-heads": 2, "max-seq-len": 20, "bert.num-token-types": 2}
    given = {f"--model.{name}": value for name, value in shape.items()}
    given |= {"--data": tmp_path / "qqp", "--finetune.tokenizer": tmp_path / "tokenizer.json", "--seeds": 1}
    given |= {"--finetune.run-dir": tmp_path / "runs", "--finetune.seq-len": 20, "--finetune.epochs": 1}
    given |= {"--finetune.batch-size": 16, "--tp": 2}
    line = [sys.executable, "-m", "fastmp", "launch", "-n", "2", "-m", "examples.megatron_paper"]
    line += ["finetune", "qqp", *(str(part) for pair in given.items() for part in pair)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "qqp" / "results.json").is_file()
