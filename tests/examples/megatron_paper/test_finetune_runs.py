"""`finetune` from end to end: it learns, goes on where it was stopped, refuses what does not fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import finetune_files
import pytest
import torch
from command_tools import status_of
from finetune_models import PRE
from finetune_tokenizer import tokenizer_json
from marks import full
from safetensors.torch import save_file
from train_tools import command_line

from examples.megatron_paper.__main__ import main
from examples.megatron_paper.finetune import finetune
from examples.megatron_paper.finetuning import runs as runs_module
from examples.megatron_paper.finetuning.finetune_recipe import load_finetune
from examples.megatron_paper.finetuning.finetune_tasks import TASKS
from fastmp.apps import cli
from fastmp.config import BertConfig, OptimizerConfig, TrainConfig
from fastmp.distributed.runtime import Runtime
from fastmp.hf.config_json import to_transformers
from fastmp.hf.weight_io import name_mappings, own_tensors
from fastmp.nn import Bert
from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint.diff import differences
from fastmp.training.checkpoint.directory import checkpoint_at
from fastmp.training.metrics import read_metrics
from fastmp.training.stopping import StopRequests
from fastmp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[3]
WORDS = (
    *finetune_files.NOUNS,
    *finetune_files.VERBS,
    *"the yes maybe no why also rather here what is it true false . ?".split(),
)
WRITE = {
    "mnli": finetune_files.mnli,
    "qqp": finetune_files.qqp,
    "squad1": lambda folder, **sizes: finetune_files.squad(folder, "1.1", **sizes),
    "squad2": lambda folder, **sizes: finetune_files.squad(folder, "2.0", **sizes),
    "race": finetune_files.race,
}
CHANCE = {"mnli": 1 / 3, "qqp": 1 / 2, "squad1": 1 / 6, "squad2": 1 / 3, "race": 1 / 4}


def options(folder, task, **changes):
    """The options of a tiny run."""
    given = {
        "finetune": {
            "path": str(folder / task),
            "tokenizer": str(folder / "tokenizer.json"),
            "run_dir": str(folder / "runs"),
            "seq_len": 20,
            "batch_size": 16,
            "micro_batch_size": 8,
            "seeds": 1,
            "log_interval": 1,
            "save_interval": 0,
        },
        "model": {
            **{"num_layers": 2, "hidden_size": 32, "num_heads": 2, "max_seq_len": 20, "dropout": 0.1},
            **{"init_std": 0.1, "bert": {}},
        },
        "optimizer": {"lr": 3e-3},
        "parallel": {},
    }
    for key, value in changes.items():
        table, _, name = key.partition("__")
        given[table][name] = value
    return given


def arguments(given):
    """The same as a command line."""
    found = []
    for table, content in given.items():
        for key, value in content.items():
            if key == "bert":
                found += ["--model.bert.num-token-types", "2"]
            else:
                found += [f"--{table}.{key.replace('_', '-')}", str(value)]
    return found


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(WORDS))
    return tmp_path


def results_of(folder, task):
    return json.loads((folder / "runs" / task / "results.json").read_text())


def run(folder, task, *, grid=False, runtime=None, **changes):
    recipe = load_finetune(task, None, options(folder, task, **changes))
    runtime = runtime or Runtime(0, 1, 0, torch.device("cpu"))
    return finetune(task, recipe, runtime, grid=grid)


@pytest.mark.parametrize("task", full(TASKS))
def test_a_tiny_model_learns_every_task(folder, task):
    WRITE[task](folder / task, train=192, dev=60)
    (result,) = run(folder, task, finetune__epochs=12 if task.startswith("squad") else 6)
    metric = TASKS[task].metric
    assert result.metrics[metric] > CHANCE[task] + 0.4
    best = results_of(folder, task)["best"]
    assert best == {"batch_size": 16, "lr": 3e-3, "seed": 1234, "metric": result.metrics[metric]}
    extra = {"mnli": "mismatched_accuracy", "race": "test_high_accuracy", "qqp": "f1", "squad1": "exact"}
    assert extra.get(task, "best_exact") in result.metrics


def test_the_command_reports_the_median_and_keeps_what_is_done(folder, capsys):
    WRITE["qqp"](folder / "qqp", train=16, dev=8)
    line = ["finetune", "qqp", *arguments(options(folder, "qqp", finetune__epochs=2, finetune__seeds=2))]
    assert main(line) == 0
    said = capsys.readouterr().out
    assert re.search(r"epoch 1/2: accuracy \d\.\d+  f1 \d\.\d+\n", said)
    assert f"{folder / 'qqp' / 'dev.tsv'}: 8 examples\n" in said
    directory = folder / "runs" / "qqp"
    table = (directory / "results.md").read_text()
    assert table in said and table.startswith("| qqp | seeds | accuracy, median | of all |\n")
    first = directory / "batch16-lr0.003-seed1234"
    written = (first / "result.json").stat().st_mtime_ns
    kinds = [record["kind"] for record in read_metrics(first / "metrics.jsonl")]
    assert kinds == ["run", "train", "dev", "train"]
    assert len(json.loads((first / "predictions.json").read_text())) == 8

    line[line.index("--finetune.seeds") + 1] = "3"  # one more
    assert main(line) == 0
    assert capsys.readouterr().out.count("step 0") == 1
    assert (first / "result.json").stat().st_mtime_ns == written
    (point,) = results_of(folder, "qqp")["points"]
    metrics = [each["metrics"]["accuracy"] for each in point["runs"]]
    assert [each["seed"] for each in point["runs"]] == [1234, 1235, 1236]
    assert point["median"]["metric"] == sorted(metrics)[1]

    line[line.index("--finetune.epochs") + 1] = "3"
    assert main(line) == 2
    error = capsys.readouterr().err
    assert "an earlier start had another finetune.epochs; choose another finetune.name" in error
    assert error.count("\n") == 1


@pytest.mark.full
def test_the_grid_of_the_paper(folder):
    WRITE["qqp"](folder / "qqp", train=16, dev=8)
    results = run(folder, "qqp", grid=True, finetune__epochs=1)
    assert [result.point for result in results] == TASKS["qqp"].grid
    found = results_of(folder, "qqp")
    assert [(each["batch_size"], each["lr"]) for each in found["points"]] == [
        (128, 5e-5),
        (128, 3e-5),
        (256, 4e-5),
    ]
    assert found["best"]["metric"] == max(each["median"]["metric"] for each in found["points"])


class StopAfter(StopRequests):
    """Stops as a signal does, after some steps of the process."""

    left = 3

    def wanted(self):
        StopAfter.left -= 1
        return "" if StopAfter.left else "SIGTERM"


@pytest.mark.parametrize("task", full(["squad2", "race"]))
def test_a_run_that_was_stopped_goes_on_bitwise(folder, monkeypatch, task):
    WRITE[task](folder / task, train=16, dev=8)
    changes = {"finetune__epochs": 6, "finetune__save_interval": 2, "model__dropout": 0.2}
    (whole,) = run(folder, task, finetune__name="whole", **changes)
    monkeypatch.setattr(runs_module, "StopRequests", StopAfter)
    monkeypatch.setattr(StopAfter, "left", 3)
    assert run(folder, task, finetune__name="parts", **changes) == []
    assert not (folder / "runs" / "parts" / "results.json").exists()
    monkeypatch.undo()
    (parts,) = run(folder, task, finetune__name="parts", **changes)
    assert parts == whole
    one, other = (folder / "runs" / name / "batch16-lr0.003-seed1234" for name in ("whole", "parts"))
    assert (one / "predictions.json").read_text() == (other / "predictions.json").read_text()
    checkpoints = [checkpoint_at(path / "checkpoints") for path in (one, other)]
    assert list(differences(*checkpoints, random=True)) == []
    records = [read_metrics(path / "metrics.jsonl") for path in (one, other)]
    losses = [[(r["step"], r["loss"]) for r in some if r["kind"] == "train"] for some in records]
    assert losses[0] == losses[1] and len(losses[0]) == 6


@pytest.mark.full
@pytest.mark.parametrize(("world", "layout"), [(2, {"tp": 2}), (2, {}), (2, {"pp": 2})], ids=str)
def test_ranks_share_the_work_and_agree_on_the_result(folder, world, layout):
    WRITE["squad2"](folder / "squad2", train=24, dev=9)
    changes = {"finetune__epochs": 2, "finetune__seeds": 2, "model__dropout": 0.0}
    alone = run(folder, "squad2", finetune__name="alone", **changes)

    def case(rank, world):
        runtime = Runtime(rank, world, rank, torch.device("cpu"))
        given = {**changes, **{f"parallel__{axis}": size for axis, size in layout.items()}}
        found = run(folder, "squad2", runtime=runtime, finetune__name="ranks", **given)
        for ours, theirs in zip(found, alone, strict=True):
            assert ours.metrics.keys() == theirs.metrics.keys()
            for name in ("exact", "f1"):
                assert abs(ours.metrics[name] - theirs.metrics[name]) < 0.15  # float32

    run_ranks(case, world)
    assert len(results_of(folder, "ranks")["points"][0]["runs"]) == 2


def pretrained(folder, config):
    """A checkpoint of a Bert, as pretraining leaves it."""

    class Nothing:
        micro_batch_size = 8

    torch.manual_seed(9)
    model = Bert(config)
    train = TrainConfig(steps=1, run_dir=str(folder / "runs"), name="bert", eval_interval=0)
    trainer = Trainer(model, Nothing(), lambda model, batch: None, train, optimizer=OptimizerConfig())
    trainer.save()
    trainer.close()
    return model


@pytest.mark.parametrize("sentence_order", full([True, False]))
def test_runs_begin_with_the_weights_of_pretraining(folder, monkeypatch, sentence_order):
    WRITE["mnli"](folder / "mnli", train=16, dev=6)
    config = replace(
        PRE, vocab_size=40, max_seq_len=20, bert=replace(PRE.bert, sentence_order=sentence_order)
    )
    before = dict(pretrained(folder, config).named_parameters())
    began = {}

    class Watched(Trainer):
        def train(self, *args, **kwargs):
            began.update({name: param.clone() for name, param in self.model.named_parameters()})
            return super().train(*args, **kwargs)

    monkeypatch.setattr(runs_module, "Trainer", Watched)
    given = options(folder, "mnli", finetune__epochs=1)
    del given["model"]
    given["finetune"]["init_from"] = str(folder / "runs" / "bert")
    finetune("mnli", load_finetune("mnli", None, given), Runtime(0, 1, 0, torch.device("cpu")))
    own = {"task_head.output.weight", "task_head.output.bias"}
    own |= set() if sentence_order else {"task_head.pooler.weight", "task_head.pooler.bias"}
    for name, param in began.items():
        if name not in own:
            assert torch.equal(param, before[name.replace("task_head", "sentence_head")]), name


@pytest.mark.full
def test_a_run_of_fastmp_train_is_fine_tuned_with_its_own_tokenizer(tmp_path, capsys):
    WRITE["race"](tmp_path / "race", train=8, dev=4)
    shape = {"num-layers": 1, "hidden-size": 16, "num-heads": 2, "max-seq-len": 64, "bert.num-token-types": 2}
    train = {f"model.{key}": value for key, value in shape.items()}
    train |= {"data.masked-lm.max-ngram": 2, "data.seq-len": 64, "data.micro-batch-size": 2, "steps": 2}
    train |= {"train.global-batch-size": 2, "train.run-dir": tmp_path / "runs", "train.name": "bert"}
    train |= {"train.eval-interval": 0, "checkpoint.interval": 2}
    assert cli.main(["train", *command_line(train)]) == 0
    line = ["finetune", "race", "--recipe", str(ROOT / "configs" / "finetune" / "race.toml"), "--seeds", "1"]
    line += ["--data", str(tmp_path / "race"), "--init-from", str(tmp_path / "runs" / "bert")]
    line += ["--finetune.run-dir", str(tmp_path / "runs")]
    line += ["--finetune.seq-len", "64", "--finetune.epochs", "1"]
    assert main(line) == 0
    assert "| batch 32, lr 2e-05 | 1 |" in capsys.readouterr().out
    content = json.loads((tmp_path / "runs" / "race" / "finetune.json").read_text())
    assert content["model"]["vocab_size"] == 257 + 4  # bytes, end-of-text, and special tokens behind them


@pytest.mark.full
def test_a_model_of_transformers_is_fine_tuned_with_the_tokenizer_beside_it(folder, capsys):
    config, tensors = replace(PRE, vocab_size=40, max_seq_len=20, bert=BertConfig(post_norm=True)), {}
    for ours, shape in own_tensors(config).items():
        for link in name_mappings("bert", config, ours, shape):
            tensors.setdefault(link.name, torch.randn(link.shape) / 10)
    theirs = folder / "theirs"
    theirs.mkdir()
    save_file(tensors, theirs / "model.safetensors")
    (theirs / "config.json").write_text(json.dumps(to_transformers("bert", config, "float32")))
    (theirs / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    WRITE["mnli"](folder / "mnli", train=8, dev=4)
    line = ["finetune", "mnli", "--data", str(folder / "mnli"), "--init-from", str(theirs), "--seeds", "1"]
    line += ["--finetune.run-dir", str(folder), "--finetune.name", "of_theirs", "--finetune.seq-len", "20"]
    assert main([*line, "--finetune.batch-size", "8", "--finetune.epochs", "1"]) == 0
    assert "| batch 8, lr 1e-05 | 1 |" in capsys.readouterr().out
    assert json.loads((folder / "of_theirs" / "finetune.json").read_text())["model"]["bert"]["post_norm"]


DIVERGES = {"finetune__epochs": 60, "optimizer__lr": 1e30, "optimizer__clip_grad_norm": 0.0}


@pytest.mark.full
def test_runs_that_diverge_are_said_to(folder, capsys):
    WRITE["qqp"](folder / "qqp", train=16, dev=8)
    (result,) = run(folder, "qqp", **DIVERGES)
    assert result.metrics is None
    assert "diverged: Trainer: stopped after step" in capsys.readouterr().out
    assert "| batch 16, lr 1e+30 | 1 | diverged | diverged |" in (folder / "runs/qqp/results.md").read_text()
    assert results_of(folder, "qqp")["best"]["metric"] is None


@pytest.mark.full
def test_ranks_go_on_with_the_next_run_where_one_diverges(folder):
    WRITE["qqp"](folder / "qqp", train=16, dev=8)

    def case(rank, world):
        runtime = Runtime(rank, world, rank, torch.device("cpu"))
        found = run(folder, "qqp", runtime=runtime, finetune__seeds=2, parallel__tp=2, **DIVERGES)
        assert [each.metrics for each in found] == [None, None]

    run_ranks(case, 2)
    assert not list((folder / "runs").glob("*/*/hang/report*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"finetune__path": "nowhere"}, "nowhere/train.tsv: cannot be read (No such file or directory)"),
        ({"finetune__seq_len": 21}, "data.seq_len 21 is longer than model.max_seq_len 20"),
        ({"finetune__batch_size": 12}, "global_batch_size 12 is not divisible by micro_batch_size 8"),
        (
            {"model__vocab_size": 20},
            "the tokenizer has 30 tokens, special ones included, the model a vocabulary of 20",
        ),
        ({"parallel__cp": 2}, "parallel.cp is 2: the sequence of a BERT is not divided"),
        (
            {"parallel__tp": 2},
            "got 1; run: fastmp launch -n 2 -m examples.megatron_paper finetune qqp --finetune.path",
        ),
        (
            {"optimizer__warmup_steps": 3},
            "optimizer.warmup_steps 3: the number of steps follows from the data",
        ),
        ({"finetune__tokenizer": "gone.json"}, "tokenizer gone.json: cannot be read"),
        ({"finetune__warmup": 1.5}, "FinetuneConfig: warmup must be from 0 to 1, got 1.5"),
        ({"finetune__epochs": 0}, "FinetuneConfig: epochs must be positive, got 0"),
        ({"finetune__name": "a/b"}, "name must be the name of a directory, got 'a/b'"),
        ({"finetune__init_from": "gone"}, "gone"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_one_line_and_status_2(folder, capsys, changes, message):
    WRITE["qqp"](folder / "qqp", train=16, dev=8)
    assert status_of(["finetune", "qqp", *arguments(options(folder, "qqp", **changes))], main) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (folder / "runs").exists()


def test_other_mistakes_are_one_line_and_status_2(folder, capsys):
    WRITE["qqp"](folder / "qqp", train=16, dev=8)
    line = arguments(options(folder, "qqp"))
    model = [each for each in zip(line[::2], line[1::2], strict=True) if "bert" not in each[0]]
    for wrong, message in (
        (["finetune", "cola", *line], "argument TASK: invalid choice: 'cola'"),
        (["finetune", "qqp"], "there are no data: give finetune.path (--data DIR)"),
        (["finetune", "qqp", "--data", "x"], "there is no model: give finetune.init_from (--init-from PATH)"),
        (["finetune", "qqp", *(part for each in model for part in each)], "the model to fine-tune is a GPT"),
        (
            ["finetune", "qqp", *line, "--finetune.epoch", "3"],
            "there is no option --finetune.epoch; did you mean",
        ),
        (["finetune", "squad1", *line], "train-v1.1.json: cannot be read"),
    ):
        assert status_of(wrong, main) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_an_empty_development_set_is_refused(folder, capsys):
    path = WRITE["qqp"](folder / "qqp", train=16) / "dev.tsv"
    path.write_text(path.read_text().partition("\n")[0] + "\n")
    assert status_of(["finetune", "qqp", *arguments(options(folder, "qqp"))], main) == 2
    assert capsys.readouterr().err == f"fastmp: {path}: has no line that can be used\n"


@pytest.mark.full
def test_the_result_of_another_run_is_refused(folder, capsys):
    WRITE["qqp"](folder / "qqp", train=16, dev=8)
    line = ["finetune", "qqp", *arguments(options(folder, "qqp", finetune__epochs=1))]
    assert main(line) == 0
    path = folder / "runs" / "qqp" / "batch16-lr0.003-seed1234" / "result.json"
    for content, message in (
        ('{"seed": 5}', "is not the result of batch16-lr0.003 with seed 1234"),
        ("{", "not JSON"),
        ('{"point": {"batch_size": 16, "lr": 0.003}, "seed": 1234, "metrics": {}}', "has no metric accuracy"),
        (
            '{"point": {"batch_size": 16, "lr": 0.003}, "seed": 1234, "metrics": [1]}',
            "has no metric accuracy",
        ),
    ):
        path.write_text(content)
        assert main(line) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("task", TASKS)
def test_the_recipes_are_rows_of_table_6(task):
    path = ROOT / "configs" / "finetune" / f"{task}.toml"
    recipe = load_finetune(task, path, {"finetune": {"path": "x", "init_from": "y"}})
    assert recipe.point == TASKS[task].grid[0] and recipe.finetune.epochs == TASKS[task].epochs
    assert recipe.optimizer.schedule == "linear" and recipe.optimizer.min_lr == 0.0
    assert recipe.finetune.name == path.stem and recipe.finetune.seeds == 5
    assert recipe.model is None
