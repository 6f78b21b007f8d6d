"""`fastmp train` from end to end: alone, on forked ranks, under torchrun; and everything it must refuse."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time

import psutil
import pytest
import torch
from command_tools import Terminal, status_of
from train_tools import ROOT, arguments, command_line, losses

from fastmp.apps.train import main
from fastmp.apps.train_main import build_model, make_groups, train
from fastmp.config.recipe import parse_arguments
from fastmp.distributed.rng import RngTracker
from fastmp.distributed.runtime import Runtime
from fastmp.optim.named_params import named_parameters
from fastmp.testing.ranks import RankError, run_ranks
from fastmp.training.data.corpus import build
from fastmp.training.metrics import read_metrics

pytestmark = pytest.mark.usefixtures("one_thread")


def on_cpu(rank, world_size):
    return Runtime(rank=rank, world_size=world_size, local_rank=rank, device=torch.device("cpu"))


def test_a_whole_run_then_more_of_it_then_anew(tmp_path, tokens, capsys):
    run = tmp_path / "runs" / "tiny"
    assert main(arguments(tmp_path / "runs", tokens, checkpoint__interval=3)) == 0
    said = capsys.readouterr().out
    assert re.search(r"held-out loss \d\.\d+ nats per byte, .* unigram entropy of the same text, \d", said)
    assert "a sample:\nThe " in said
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in run.iterdir()} == {"checkpoints", "loss.png", "metrics.jsonl", "recipe.json"}
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5, 6]
    first = losses(run)

    # On from step 6, with no other change than the number of steps.
    assert main([*arguments(tmp_path / "runs", tokens, train__steps=8), "--resume", "auto"]) == 0
    assert "resumed after step 6" in capsys.readouterr().out
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert losses(run)[:6] == first

    # Without --resume the run starts anew, and the earlier one is kept under another name.
    assert main(arguments(tmp_path / "runs", tokens)) == 0
    assert f"the earlier run of this name is now {run}.1" in capsys.readouterr().out
    assert losses(run) == first and len(losses(tmp_path / "runs" / "tiny.1")) == 8


def test_resume_without_a_checkpoint_says_so(tmp_path, tokens, capsys):
    assert main([*arguments(tmp_path, tokens), "--resume", "auto"]) == 0
    none = f"no checkpoint in {tmp_path / 'tiny' / 'checkpoints'}: starting at step 0"
    assert none in capsys.readouterr().out


@pytest.mark.full
def test_a_run_goes_on_from_a_path_at_another_layout(tmp_path, tokens, capsys):
    """Another run starts, over two ranks, from the first one's checkpoint after three of its six steps."""
    assert main(arguments(tmp_path, tokens, checkpoint__interval=3)) == 0
    expected = losses(tmp_path / "tiny")
    path = tmp_path / "tiny" / "checkpoints" / "step-00000003"

    def rank_main(rank, world_size):
        options = ["--resume", str(path), "--tp", "2"]
        recipe = parse_arguments([*arguments(tmp_path, tokens, "second"), *options])
        train(recipe, on_cpu(rank, world_size))

    run_ranks(rank_main, 2)
    again = losses(tmp_path / "second")
    assert [step for step, _ in again] == [4, 5, 6]
    assert all(abs(ours - theirs) < 1e-4 for (_, ours), (_, theirs) in zip(again, expected[3:], strict=True))
    capsys.readouterr()
    assert main([*arguments(tmp_path, tokens, train__steps=4), "--resume", str(path)]) == 0
    assert f"resumed after step 3 from {path}\n" in capsys.readouterr().out
    assert losses(tmp_path / "tiny") == expected[:4], "the run itself goes on from there"
    assert main([*arguments(tmp_path, tokens), "--resume", str(tmp_path / "nothing")]) == 2
    assert "nothing: no checkpoint found; expected a checkpoint" in capsys.readouterr().err


def test_checkpoints_on_another_disk_stay_where_they_are(tmp_path, tokens, capsys):
    """A link takes the place of the directory; the run goes on in place."""
    assert main(arguments(tmp_path, tokens, checkpoint__interval=3)) == 0
    directory, other = tmp_path / "tiny" / "checkpoints", tmp_path / "disk"
    directory.rename(other)
    directory.symlink_to(other)
    more = arguments(tmp_path, tokens, train__steps=7, checkpoint__interval=3)
    assert main([*more, "--resume", "auto"]) == 0
    assert "resumed after step 6" in capsys.readouterr().out
    assert directory.is_symlink() and not (tmp_path / "tiny.1").exists()
    assert (other / "step-00000007").is_dir()


def test_weights_for_transformers_are_written_with_checkpoints(tmp_path, tokens, capsys):
    options = {"checkpoint__interval": 2, "checkpoint__weights_interval": 4, "checkpoint__keep": 1}
    assert main(arguments(tmp_path, tokens, **options)) == 0
    out = tmp_path / "tiny" / "weights" / "step-00000004"
    assert f"step 4: weights for transformers in {out}" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in out.parent.iterdir()] == ["step-00000004"]
    options["model__position"] = "rope"
    assert main(arguments(tmp_path, tokens, "other", **options)) == 2
    assert "no family of transformers computes this model" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


@pytest.mark.full
def test_the_vocabulary_is_that_of_the_data_unless_given(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(400)))
    bpe = build([str(text)], tmp_path / "bpe", tokenizer="bpe", vocab_size=300)
    for vocab_size, expected in ((None, 300), (320, 320)):
        given = {} if vocab_size is None else {"model__vocab_size": vocab_size}
        assert main(arguments(tmp_path, bpe, str(vocab_size), train__steps=1, **given)) == 0
        made = json.loads((tmp_path / str(vocab_size) / "recipe.json").read_text())
        assert made["model"]["vocab_size"] == expected
    options = ["--recipe", str(ROOT / "configs" / "gpt-small.toml"), "--data.path", str(bpe)]
    assert main([*options, "--train.run-dir", str(tmp_path), "--steps", "1"]) == 0


def test_a_terminal_shows_the_step_that_is_done(tmp_path, tokens, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(arguments(tmp_path, tokens, train__log_interval=6, train__eval_interval=0)) == 0
    shown = re.split(r"\r\x1b\[K|\n", sys.stdout.getvalue())
    assert any(line.startswith("step 2/6  ETA") for line in shown)
    assert [line[:8] for line in shown if re.match("step .* loss ", line)] == ["step 1/6", "step 6/6"]


def test_a_run_that_another_process_is_at_is_left_alone(tmp_path, tokens, capsys):
    assert main(arguments(tmp_path, tokens)) == 0
    before = sorted(tmp_path.rglob("*"))
    descriptor = os.open(tmp_path / "tiny", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for more in ([], ["--resume", "auto"]):
            assert main([*arguments(tmp_path, tokens), *more]) == 2
            assert f"another process is training into {tmp_path / 'tiny'}" in capsys.readouterr().err
    finally:
        os.close(descriptor)
    assert sorted(tmp_path.rglob("*")) == before
    assert main(arguments(tmp_path, tokens)) == 0


EXPERTS = {
    "model.moe.num-experts": 4,
    "model.moe.expert-ffn-hidden-size": 16,
    "model.moe.score": "sigmoid",
    "model.moe.aux-loss": 0.01,
    "parallel.etp": 1,
}
TWO_LAYERS = {**EXPERTS, "model.num-layers": 2}
BALANCED = {**EXPERTS, "model.moe.sequence-aux-loss": 0.01}
BIAS = "--model.moe.expert-bias"


@pytest.mark.parametrize(
    ("layout", "model", "flags"),
    [
        pytest.param({"tp": 2}, {}, ["--parallel.sequence-parallel"], id="tp2", marks=pytest.mark.full),
        pytest.param({}, {}, [], id="dp2", marks=pytest.mark.exhaustive),
        pytest.param({"tp": 2, "ep": 2}, EXPERTS, [BIAS], id="tp2 ep2", marks=pytest.mark.exhaustive),
        pytest.param({"ep": 2}, EXPERTS, [BIAS], id="dp2 ep2", marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2}, TWO_LAYERS, [BIAS], id="pp2", marks=pytest.mark.exhaustive),
        pytest.param({"cp": 2}, BALANCED, [BIAS], id="cp2", marks=pytest.mark.exhaustive),
        pytest.param(
            {"pp": 2, "vpp": 2, "schedule": "zero_bubble"},
            {"model.num-layers": 4},
            [],
            id="pp2 vpp2",
            marks=pytest.mark.full,
        ),
    ],
)
def test_two_ranks_train_as_one(tmp_path, tokens, layout, model, flags):
    """Dense and with experts: the same losses to 1e-4, saved and resumed."""
    # One position more than the text uses: TP does not divide it, so generation must do without it too.
    changes = {"checkpoint__interval": 3, "model__max_seq_len": 33, **model}
    flags_of_model = [flag for flag in flags if flag.startswith("--model")]
    assert main([*arguments(tmp_path, tokens, "one", **changes), *flags_of_model]) == 0
    sizes = {f"parallel.{axis}": size for axis, size in layout.items()}
    options = [*arguments(tmp_path, tokens, "two", **changes, **sizes), *flags]

    def rank_main(rank, world_size, extra):
        return train(parse_arguments([*options, *extra]), on_cpu(rank, world_size))

    evaluations = run_ranks(rank_main, 2, [])
    assert evaluations[0] == evaluations[1]
    for (step, loss), (_, expected) in zip(losses(tmp_path / "two"), losses(tmp_path / "one"), strict=True):
        assert abs(loss - expected) < 1e-4, f"step {step}"
    run_ranks(rank_main, 2, ["--train.steps", "8", "--resume", "auto"])
    assert [step for step, _ in losses(tmp_path / "two")] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (tmp_path / "two" / "load.png").exists() == (EXPERTS.items() <= model.items())
    (tmp_path / "two" / "metrics.jsonl").unlink()  # nothing is left to train, and nothing of the loads known
    run_ranks(rank_main, 2, ["--train.steps", "8", "--resume", "auto"])


def test_ranks_go_on_together_though_one_alone_knows_of_the_restart(tmp_path, tokens):
    """Over several machines, only the torchrun whose rank died counts it."""

    def rank_main(rank, world_size, steps):
        recipe = parse_arguments(arguments(tmp_path, tokens, checkpoint__interval=2, train__steps=steps))
        train(recipe, on_cpu(rank, world_size), restarted=rank == 1 and steps == 3)

    run_ranks(rank_main, 2, 2)
    run_ranks(rank_main, 2, 3, timeout=30)
    assert [step for step, _ in losses(tmp_path / "tiny")] == [1, 2, 3]


def test_stages_have_the_weights_of_the_whole_and_random_numbers_of_their_own(tmp_path, tokens):
    def rank_main(rank, world_size, layout):
        recipe = parse_arguments(
            arguments(tmp_path, tokens, model__num_layers=2, model__vocab_size=257, **layout)
        )
        runtime = on_cpu(rank, world_size)
        groups = make_groups(recipe, runtime)
        rng = RngTracker(recipe.train.seed)
        model, _ = build_model(recipe, groups, rng, runtime.device)
        chunks = [model] if world_size == 1 else model
        with rng.fork("tensor-parallel"):
            sharded = torch.rand(3)
        return {n: p.detach() for n, p in named_parameters(chunks)}, torch.rand(3), sharded

    whole, *_ = rank_main(0, 1, {})
    (first, *left), (last, *right) = run_ranks(rank_main, 2, {"parallel__pp": 2})
    assert {*first, *last} == {*whole}
    for name, weight in [*first.items(), *last.items()]:
        assert torch.equal(weight, whole[name]), name
    assert not any(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["moe-small", "gpt-small"])
def test_the_recipes_of_make_train_train(tmp_path, tokens, recipe, capsys):
    options = {"data.path": tokens, "train.run-dir": tmp_path, "train.steps": 2, "train.eval-batches": 1}
    options |= {"data.micro-batch-size": 2, "train.global-batch-size": 2}
    assert main(["--recipe", str(ROOT / "configs" / f"{recipe}.toml"), *command_line(options)]) == 0
    said = capsys.readouterr().out
    parameters = {
        "gpt-small": r"1\.84 M parameters in float32",
        "moe-small": r"3\.81 M parameters \(1\.45 M for a token\)",
    }
    assert re.search(parameters[recipe], said)
    assert ("expert load by layer" in said) == (recipe == "moe-small")
    first, last = losses(tmp_path / recipe)
    assert abs(first[1] - 5.85) < 0.2 and last[1] < first[1]


@pytest.fixture
def cut_tokens(tmp_path, tokens):
    directory = tmp_path / "cut"
    directory.mkdir()
    for path in tokens.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    content = (directory / "train.bin").read_bytes()
    (directory / "train.bin").write_bytes(content[:-2])
    return directory


BAD = {
    "tp without ranks": (
        {"parallel__tp": 2},
        r"--tp 2 needs 2 processes, got 1; run: .* launch -n 2 train",
    ),
    "pp without ranks": (
        {"parallel__pp": 2},
        r"--pp 2 needs 2 processes, got 1; run: .* launch -n 2 train",
    ),
    "pp without ranks, and layers that it does not divide": (
        {"parallel__pp": 2, "model__num_layers": 3},
        r"fastmp launch -n 2 train .*num_layers 3 is not divisible by pp 2 .* change parallel",
    ),
    "ep without ranks": (
        {"parallel__ep": 4, "parallel__etp": 1, "model.moe.num-experts": 4},
        r"--ep 4 needs 4 processes, got 1; run: .* launch -n 4 train",
    ),
    "token ids beyond the vocabulary": ({"model__vocab_size": 200}, r"vocabulary of 257 .*vocab_size is 200"),
    "a run in the place of the data": ({"train__name": "data"}, r"/data is for token files"),
    "no such data": ({"data__path": "/nowhere"}, r"/nowhere"),
    "no such weights": ({"checkpoint__init_from": "/nowhere"}, r"/nowhere: not a local directory"),
    "no package of a sink": ({"train__sinks": "wandb"}, r"wandb is not installed: pip install"),
    "sequence longer than positions": ({"data__seq_len": 64}, r"seq_len 64 .*max_seq_len 32"),
    "batch that does not divide": (
        {"train__global_batch_size": 6},
        r"global_batch_size 6 .*micro_batch_size 4",
    ),
    "text too short for a sample": (
        {"data__seq_len": 32000, "model__max_seq_len": 32000},
        r"do not hold one sample",
    ),
    "nothing held out": ({"data__path": "all of it"}, r"no text was held out"),
    "no checkpoint that is whole": ({}, r"none in .* is whole"),
    "checkpoint of another model": (
        {"model__hidden_size": 32},
        r"another model.*hidden_size=16.*hidden_size=32",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_one_line_and_leaves_nothing(tmp_path, tokens, case, capsys, monkeypatch):
    changes, message = BAD[case]
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed
    resume = "checkpoint" in case
    if resume:
        assert main(arguments(tmp_path, tokens, checkpoint__interval=6)) == 0
        if "whole" in case:
            next((tmp_path / "tiny" / "checkpoints" / "step-00000006").glob("*.safetensors")).unlink()
    if case == "nothing held out":
        text = tmp_path / "text.txt"
        text.write_text("All of it is for training. " * 100)
        changes = {"data__path": build([str(text)], tmp_path / "tokens", validation_fraction=0.0)}
    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    more = ["--resume", "auto"] if resume else []
    status = status_of(["train", *arguments(tmp_path, tokens, **changes), *more])
    captured = capsys.readouterr()
    assert status == 2
    said = " ".join(captured.err.replace("│", " ").split())
    assert re.search(message, said) and "Traceback" not in said and captured.out == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_a_token_file_cut_short_ends_all_ranks(tmp_path, cut_tokens):
    options = arguments(tmp_path / "runs", cut_tokens)

    def rank_main(rank, world_size):
        train(parse_arguments(options), on_cpu(rank, world_size))

    begin = time.monotonic()
    with pytest.raises(RankError, match=r"train\.bin") as error:
        run_ranks(rank_main, 2)
    assert error.value.rank == 0 and time.monotonic() - begin < 10
    assert not (tmp_path / "runs").exists()


def torchrun(options, marker, ranks=2, program=("-m", "fastmp", "train")):
    """Run `fastmp train`, or another program, on `ranks` ranks under torchrun.

    Returns the exit status, the output, and how long the ranks stayed after fastmp's first message.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = subprocess.Popen(
        [*command, *program, *options],
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines, first = [], None
    for line in process.stdout:
        lines.append(line)
        if first is None and line.startswith("fastmp"):
            first = time.monotonic()
    status = process.wait(timeout=60)
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if marker in " ".join(p.info["cmdline"] or [])]
    assert left == [], "ranks are left"
    return status, "".join(lines), None if first is None else time.monotonic() - first


@pytest.mark.full
def test_torchrun_trains_over_two_ranks(tmp_path, tokens):
    options = arguments(tmp_path, tokens, "by-torchrun", parallel__tp=2, parallel__ep=2, **EXPERTS)
    status, output, _ = torchrun(options, str(tmp_path))
    assert status == 0, output
    assert "TP 2, DP 1; experts: EP 2, ETP 1, DP 1" in output and output.count("held-out loss") == 3
    assert output.count("  expert load ") == 6  # a field of each step's line
    assert len(losses(tmp_path / "by-torchrun")) == 6


@pytest.mark.exhaustive
def test_torchrun_trains_a_pipeline_of_experts_over_four_ranks(tmp_path, tokens):
    options = {"data.path": tokens, "train.run-dir": tmp_path, "data.micro-batch-size": 4}
    options |= {"train.eval-batches": 1, "train.log-interval": 1}
    arguments = [*command_line(options), "--recipe", str(ROOT / "configs" / "moe-small.toml"), "--steps", "2"]
    arguments += ["--tp", "1", "--pp", "2", "--vpp", "2", "--ep", "2"]
    status, output, _ = torchrun(arguments, str(tmp_path), ranks=4)
    assert status == 0, output
    assert "4 ranks: TP 1, PP 2 x VPP 2 (1f1b), DP 2; experts: EP 2, ETP 1, DP 1" in output
    assert output.count("expert load") == 2 and "a sample:\nThe " in output
    first, last = losses(tmp_path / "moe-small")
    assert abs(first[1] - 5.85) < 0.2 and last[1] < first[1]


FAULTY = """
import os, signal, sys
from fastmp.nn.stages import GPTStage
from fastmp.apps.train import main

kind, calls, forward = sys.argv.pop(1), 0, GPTStage.forward

def faulty(stage, x):
    global calls
    calls += 1
    output = forward(stage, x)
    if calls == 4 and os.environ["RANK"] == "1":  # the second step: two microbatches each
        if kind == "raises":
            raise RuntimeError("out of luck")
        os.kill(os.getpid(), signal.SIGKILL)
    return output[:-1] if kind == "shape" and calls == 4 and os.environ["RANK"] == "0" else output

GPTStage.forward = faulty
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        pytest.param(
            "raises",
            r"fastmp: rank 1: .*step 2, pipeline rank 1, instruction .*, forward m1 chunk 0: .*out of luck",
            id="raises",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "shape",
            r"fastmp: rank 0: .*step 2, pipeline rank 0, instr.*, forward m1 chunk 0: .*stage 0 outputs",
            id="sends a wrong shape",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("killed", r"rank +: 1 .*\n +exitcode +: -9 ", id="is killed", marks=pytest.mark.full),
    ],
)
def test_a_fault_in_a_stage_ends_the_job_in_seconds(tmp_path, tokens, kind, message):
    (tmp_path / "faulty.py").write_text(FAULTY)
    options = arguments(tmp_path / "runs", tokens, parallel__pp=2, model__num_layers=2)
    begin = time.monotonic()
    program = (str(tmp_path / "faulty.py"), kind)
    status, output, seconds = torchrun(options, str(tmp_path), program=program)
    assert status != 0 and re.search(message, output), output
    assert time.monotonic() - begin < 60 and (seconds is None or seconds < 10)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel__tp": 3}, "\n  world_size 2 is not a multiple of tp 3 x"),
        ({"parallel__ep": 2, **EXPERTS, "model.moe.num-experts": 3}, "num_experts 3"),
    ],
    ids=["world not divisible by tp", "experts not divisible by ep"],
)
def test_torchrun_with_a_bad_layout_says_it_once_and_leaves(tmp_path, tokens, changes, message):
    status, output, seconds = torchrun(arguments(tmp_path / "runs", tokens, **changes), str(tmp_path))
    said = [line for line in output.splitlines() if line.startswith(("fastmp:", "fastmp train:"))]
    assert status != 0 and seconds < 10  # torchrun's own
    assert len(said) == 1 and said[0].startswith("fastmp train: recipe"), output
    assert message in output.partition("fastmp train: recipe")[2], output
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
def test_experts_through_shared_memory_train_as_by_all_to_all(tmp_path, tokens):
    """By the command of `make train`: bit for bit, in graphs too; with little room pairs are dropped."""
    options = {"data.path": tokens, "train.run-dir": tmp_path, "train.steps": 3, "train.eval-batches": 1}
    options |= {"data.micro-batch-size": 2, "train.global-batch-size": 2, "train.log-interval": 1}
    recipe = ["--recipe", str(ROOT / "configs" / "moe-small.toml"), *command_line(options)]
    recipe += ["--tp", "2", "--ep", "2", "--model.num-layers", "2", "--model.hidden-size", "48"]
    shared = ["--dispatcher", "symmetric"]
    runs = {
        "ordinary": ["--dispatcher", "alltoall"],
        "shared": shared,
        "graphs": [*shared, "--graphs", "--scope", "moe", "--graphs.warmup", "1"],
        "little": [*shared, "--model.moe.symmetric-capacity", "0.5"],
    }

    def rank_main(rank, world_size, name):
        train(parse_arguments([*recipe, *runs[name], "--name", name]), on_cpu(rank, world_size))

    for name in runs:
        run_ranks(rank_main, 2, name)
    assert losses(tmp_path / "shared") == losses(tmp_path / "graphs") == losses(tmp_path / "ordinary")
    for name in runs:
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        dropped = [record["dropped_pairs"] for record in records if record["kind"] == "experts"]
        assert len(dropped) == 3 and all((number > 0) == (name == "little") for number in dropped), name
