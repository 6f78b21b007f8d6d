"""`fastmp checkpoint`: what it says of checkpoints, whole or damaged, and of two that differ."""

from __future__ import annotations

import pytest
import torch
from command_tools import check_mistake

from fastmp.apps.cli import main
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint.checkpointer import Checkpointer
from fastmp.training.checkpoint.format import read_manifest
from fastmp.training.checkpoint.storage import ShardedTensorRef

WEIGHT = torch.arange(24.0).view(4, 6)


def save(directory, step=1, **changes):
    """A checkpoint of one rank."""
    found = {
        "model/weight": WEIGHT,
        "optimizer/weight/exp_avg": WEIGHT / 7,
        "random/rank-0/cpu": torch.tensor(3),
    }
    state = {name: ShardedTensorRef.whole(tensor) for name, tensor in {**found, **changes}.items()}
    return Checkpointer(directory, keep=0).save(step, state, {"tokens": 5})


def save_in_shards(directory):
    """The same one of two ranks, in columns and with the optimizer's state in rows."""

    def rank_main(rank, world_size):
        state = {
            "model/weight": ShardedTensorRef(
                (4, 6), WEIGHT.dtype, [((0, 3 * rank), WEIGHT[:, 3 * rank : 3 * rank + 3])]
            ),
            "optimizer/weight/exp_avg": ShardedTensorRef(
                (4, 6), WEIGHT.dtype, [((2 * rank, 0), WEIGHT[2 * rank : 2 * rank + 2] / 7)]
            ),
            f"random/rank-{rank}/cpu": ShardedTensorRef.whole(torch.tensor(rank)),
        }
        groups = ParallelGroups.create(RankGrid(world_size=world_size, tp=2))
        Checkpointer(directory, groups=groups).save(1, state, {"tokens": 5})

    run_ranks(rank_main, 2)
    return directory / "step-00000001"


def test_verify_checks_every_byte_of_all_that_a_run_has(tmp_path, capsys):
    directory = tmp_path / "run" / "checkpoints"
    paths = [save(directory, step) for step in (1, 2)]
    assert main(["checkpoint", "verify", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"{path}: intact: step {step}, 3 tensors, 432 bytes" for step, path in enumerate(paths, 1)
    ]
    file = paths[0] / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    for place in range(0, len(content), 37):
        content[place] ^= 4
        file.write_bytes(content)
        assert main(["checkpoint", "verify", str(paths[0])]) == 1
        assert f"{file} is damaged" in capsys.readouterr().out
        content[place] ^= 4
    file.write_bytes(content)
    assert main(["checkpoint", "verify", str(paths[0])]) == 0


def test_inspect_says_what_there_is(tmp_path, capsys):
    save(tmp_path)
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f'{tmp_path}/step-00000001: step 1\nlayout {{"cp": 1, "dp": 1,' in said
    assert "optimizer/*/exp_avg             1 tensors             24 numbers   96 bytes" in said
    assert main(["checkpoint", "inspect", str(tmp_path), "--tensors", "model"]) == 0
    assert capsys.readouterr().out == "model/weight  F32 [4, 6]  1 shards\n"


@pytest.mark.parametrize("files", [1, 2])
def test_shards_written_again_as_whole_tensors_are_equal(tmp_path, files, capsys):
    source = save_in_shards(tmp_path / "shards")
    assert main(["checkpoint", "reshard", str(source), str(tmp_path / "again"), "--files", str(files)]) == 0
    path = tmp_path / "again" / "step-00000001"
    assert capsys.readouterr().out == f"{path}\n"
    manifest = read_manifest(path)
    assert len(manifest.files) == files and all(
        len(tensor.shards) == 1 for tensor in manifest.tensors.values()
    )
    assert main(["checkpoint", "diff", str(source), str(path), "--random"]) == 0
    assert capsys.readouterr().out == "bitwise equal\n"
    assert main(["checkpoint", "diff", str(source), str(save(tmp_path / "whole"))]) == 0, (
        "random states aside"
    )
    assert main(["checkpoint", "reshard", str(source), str(tmp_path / "weights"), "--weights"]) == 0
    assert list(read_manifest(tmp_path / "weights" / "step-00000001").tensors) == ["model/weight"]


def test_diff_names_what_differs(tmp_path, capsys):
    first = save(tmp_path / "first")
    other = WEIGHT.clone()
    other[1, 2] += 0.5
    second = save(tmp_path / "second", 2, **{"model/weight": other, "model/bias": torch.zeros(2)})
    assert main(["checkpoint", "diff", str(first), str(second)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "step: 1 and 2",
        "model/bias: nothing and F32 (2,)",
        "model/weight: 1 of 24 elements differ, by at most 0.5",
    ]


@pytest.mark.parametrize("command", ["checkpoint inspect", "data stats", "hf import"])
def test_a_reader_that_has_seen_enough_is_no_mistake(command, monkeypatch, capfd):
    """As `head` is; what is printed before may be more than a pipe holds."""

    def closed(*_, **__):
        raise BrokenPipeError

    for name in (
        *("apps.data_main._report", "hf.weight_io.TransformersReader"),
        "training.checkpoint.directory.checkpoint_at",
    ):
        monkeypatch.setattr(f"fastmp.{name}", closed)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    assert main([*command.split(), "somewhere"]) == 1
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "nowhere"], "nowhere: no checkpoint found; expected a checkpoint, or"),
        (["verify", "nowhere"], "nowhere: no checkpoint found"),
        (["diff", "nowhere", "."], "nowhere: no checkpoint found"),
        (["reshard", "nowhere", "out", "--files", "0"], "must be a whole number, 1 or more, got '0'"),
        (["examine"], "invalid choice: 'examine'"),
        ([], "required: COMMAND"),
    ],
)
def test_mistakes_are_one_line(arguments, said, capsys):
    check_mistake(["checkpoint", *arguments], said, capsys)
