"""Checkpoints: every shard comes back, a kill at any point costs nothing, what does not fit is refused."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import signal
import sys
import zlib

import pytest
import torch
from safetensors.torch import save_file

from fastmp.parallel.grid import RankGrid
from fastmp.parallel.groups import ParallelGroups
from fastmp.testing.ranks import run_ranks
from fastmp.train import checkpoint as checkpoint_module
from fastmp.train.checkpoint import Checkpointer, CheckpointError


def state(seed, *, shape=(3, 4)):
    generator = torch.Generator().manual_seed(seed)
    shard = {
        "model/weight": torch.randn(shape, generator=generator),
        "model/half": torch.randn(5, generator=generator).bfloat16(),
        "optimizer/double": torch.randn(2, generator=generator, dtype=torch.float64),
        "optimizer/view": torch.randn(9, generator=generator)[3:7],
        "optimizer/empty": torch.zeros(0, 3),
        "optimizer/transposed": torch.randn(3, 2, generator=generator).t(),
    }
    return shard, {"rng/cpu": torch.randint(0, 256, (64,), generator=generator, dtype=torch.uint8)}


def zeros_like(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


def load(checkpointer, example=0):
    shard, own = map(zeros_like, state(example))
    return checkpointer.load(shard, own), shard, own


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_round_trip_is_bitwise_and_prunes(tmp_path):
    checkpointer = Checkpointer(tmp_path / "ck", description={"hidden": 8, "betas": (0.9, 0.95)}, keep=2)
    assert load(checkpointer)[0] is None
    for step in (1, 2, 3):
        path = checkpointer.save(step, *state(step), {"tokens": 10 * step})
        assert path.name == f"step-{step:08d}"
    assert names(tmp_path / "ck") == ["latest", "step-00000002", "step-00000003"]
    loaded, shard, own = load(checkpointer)
    assert loaded == {"step": 3, "tokens": 30}
    assert_equal({**shard, **own}, {**state(3)[0], **state(3)[1]})


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 4, 5])
def test_as_many_stay_as_asked_for(tmp_path, keep):
    checkpointer = Checkpointer(tmp_path, keep=keep)
    for step in range(1, 7):
        checkpointer.save(step, *state(step), {})
        first = max(1, step - keep + 1) if keep else 1
        assert names(tmp_path) == ["latest", *(f"step-{s:08d}" for s in range(first, step + 1))]


@pytest.mark.parametrize("tp", [2, 1])
def test_every_shard_of_every_rank_comes_back(tmp_path, tp):
    """World of 2 as TP=2 (two different shards) and as DP=2 (one shard, two random states)."""

    def rank_main(rank, world_size):
        calls = []
        sys.addaudithook(lambda event, args: calls.append(args) if event == "pickle.find_class" else None)
        groups = ParallelGroups.create(RankGrid(world_size=world_size, tp=tp))
        checkpointer = Checkpointer(tmp_path, groups=groups, description={"layers": 2})
        shard_seed = rank if tp == 2 else 0
        shard, own = state(shard_seed)[0], state(100 + rank)[1]
        checkpointer.save(7, shard, own, {"tokens": 70})
        calls.clear()
        loaded, new_shard, new_own = load(checkpointer)
        assert calls == [], "nothing is unpickled on the load path"
        assert loaded == {"step": 7, "tokens": 70}
        assert_equal(shard, new_shard)
        assert_equal(own, new_own)
        return new_shard["model/weight"]

    left, right = run_ranks(rank_main, 2)
    assert torch.equal(left, right) == (tp == 1)


def test_other_layout_and_other_model_are_refused_with_both_names(tmp_path):
    Checkpointer(tmp_path, description={"num_layers": 2}).save(1, *state(1), {})
    with pytest.raises(CheckpointError, match=r"step-00000001.*num_layers=2; this run has num_layers=3"):
        load(Checkpointer(tmp_path, description={"num_layers": 3}))
    same = Checkpointer(tmp_path, description={"num_layers": 2})
    later = {"num_layers": 2, "norm": "layernorm"}  # a field that was not there when it was saved
    assert load(Checkpointer(tmp_path, description=later, defaults=later))[0] == {"step": 1}
    with pytest.raises(CheckpointError, match="saved with norm=layernorm; this run has norm=rmsnorm"):
        load(Checkpointer(tmp_path, description={**later, "norm": "rmsnorm"}, defaults=later))
    shard, own = state(1, shape=(4, 4))
    with pytest.raises(CheckpointError, match=r"tp0\.pp0/model/weight is .*\(3, 4\).*here .*\(4, 4\)"):
        same.load(shard, own)
    shard, own = state(1)
    shard["model/weight"] = shard["model/weight"].bfloat16()
    with pytest.raises(CheckpointError, match=r"float32.*here.*bfloat16"):
        same.load(shard, own)
    del shard["model/weight"]
    with pytest.raises(CheckpointError, match=r"model/weight is .*, here nothing"):
        same.load(shard, own)

    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size, tp=2))
        with pytest.raises(CheckpointError, match=r"another layout: .*tp=1.*; this run has .*tp=2"):
            load(Checkpointer(tmp_path, groups=groups, description={"num_layers": 2}))

    run_ranks(rank_main, 2)


def rewrite(path, change):
    """A state.json whose checksum is right, whatever it says."""
    state = json.loads((path / "state.json").read_text())["state"]
    state = change(state) or state
    crc = zlib.crc32(json.dumps(state).encode())
    (path / "state.json").write_text(json.dumps({"crc32": crc, "state": state}))


HOSTILE = {
    "not JSON": lambda path: (path / "state.json").write_text("{"),
    "not text": lambda path: (path / "state.json").write_bytes(b"\xff\xfe"),
    "nested deeply": lambda path: (path / "state.json").write_text("[" * 200_000),
    "a list": lambda path: (path / "state.json").write_text("[]"),
    "a list as state": lambda path: rewrite(path, lambda state: [1]),
    "no files": lambda path: rewrite(path, lambda state: state.pop("files") and None),
    "files a list": lambda path: rewrite(path, lambda state: {**state, "files": []}),
    "a file without a size": lambda path: rewrite(path, lambda state: {**state, "files": {"a": {}}}),
    "a file as a number": lambda path: rewrite(path, lambda state: {**state, "files": {"a": 1}}),
    "layout a number": lambda path: rewrite(path, lambda state: {**state, "layout": 1}),
    "scalars a list": lambda path: rewrite(path, lambda state: {**state, "scalars": []}),
    "step a string": lambda path: rewrite(path, lambda state: {**state, "step": "2"}),
    "another format": lambda path: rewrite(path, lambda state: {**state, "format": 2}),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_whatever_state_json_says_it_is_named_and_an_older_one_is_used(tmp_path, how, capfd):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, *state(1), {"tokens": 1})
    checkpointer.save(2, *state(2), {"tokens": 2})
    HOSTILE[how](tmp_path / "step-00000002")
    assert load(checkpointer)[0] == {"step": 1, "tokens": 1}
    said = capfd.readouterr().err
    assert len(said.splitlines()) == 1 and "step-00000002/state.json" in said, said
    HOSTILE[how](tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match=r"none in .* is whole; .*step-00000002/state\.json"):
        load(checkpointer)


@pytest.mark.parametrize("scalars", [{}, {"optimizer": {}}, {"optimizer": {"step": "1"}}, {"optimizer": [1]}])
def test_scalars_that_are_missing_or_of_another_type_are_named_and_nothing_is_read(tmp_path, scalars):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, *state(1), scalars)
    shard, own = (zeros_like(tensors) for tensors in state(0))
    with pytest.raises(
        CheckpointError, match=r"state\.json: scalars\.optimizer.* must be of type (dict|int), got"
    ):
        checkpointer.load(shard, own, {"optimizer": {"step": 0}})
    assert not any(tensor.any() for tensor in shard.values())


@pytest.mark.parametrize("name", ["aa.safetensors", "zz.safetensors"])
def test_a_file_that_is_not_listed_is_not_read(tmp_path, name):
    checkpointer = Checkpointer(tmp_path)
    path = checkpointer.save(1, *state(1), {})
    save_file({f"tp0.pp0/{key}": tensor.contiguous() for key, tensor in state(2)[0].items()}, path / name)
    _, shard, own = load(checkpointer)
    assert_equal({**shard, **own}, {**state(1)[0], **state(1)[1]})


def test_two_listed_files_with_one_tensor_are_refused(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    path = checkpointer.save(1, *state(1), {})
    first = next(path.glob("*.safetensors"))
    (path / "zz.safetensors").write_bytes(first.read_bytes())
    rewrite(path, lambda s: s["files"].update({"zz.safetensors": s["files"][first.name]}))
    with pytest.raises(CheckpointError, match=r"zz\.safetensors: another file .* has (tp0|rank0)"):
        load(checkpointer)


def not_finite(seed):
    shard, own = state(seed)
    shard["model/half"][3] = math.inf
    return shard, own


@pytest.mark.parametrize("keep", [1, 2])
def test_the_last_finite_checkpoint_is_never_deleted_and_is_what_is_loaded(tmp_path, keep, capfd):
    checkpointer = Checkpointer(tmp_path, keep=keep)
    checkpointer.save(1, *state(1), {})
    checkpointer.save(2, *state(2), {})
    for step in range(3, 7):
        checkpointer.save(step, *not_finite(step), {})
    newest = [f"step-{step:08d}" for step in range(7 - keep, 7)]
    assert names(tmp_path) == ["latest", "step-00000002", *newest]
    loaded, shard, _ = load(checkpointer)
    assert loaded == {"step": 2}
    assert_equal(shard, state(2)[0])
    said = capfd.readouterr().err.splitlines()
    assert len(said) == keep
    assert all(
        re.search(r"step-0000000. is passed over: .*not finite; using step-00000002$", s) for s in said
    )
    checkpointer.save(7, *state(7), {})
    assert names(tmp_path)[1:] == sorted([*newest, "step-00000007"][-keep:])


def test_without_any_finite_checkpoint_the_newest_is_loaded(tmp_path, capfd):
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        checkpointer.save(step, *not_finite(step), {})
    assert names(tmp_path) == ["latest", "step-00000002", "step-00000003"]
    assert load(checkpointer)[0] == {"step": 3}


def damage(path, how):
    target = next(path.glob("*.safetensors"))
    content = target.read_bytes()
    if how == "flipped bit":
        target.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "cut short":
        target.write_bytes(content[:-1])
    elif how == "file gone":
        target.unlink()
    elif how == "state gone":
        (path / "state.json").unlink()
    elif how == "state edited":
        text = (path / "state.json").read_text()
        (path / "state.json").write_text(text.replace('"tokens": 2', '"tokens": 3'))
    elif how == "state emptied":
        (path / "state.json").write_text("")
    elif how == "pointer gone":
        (path.parent / "latest").unlink()
    elif how == "pointer outside":
        (path.parent / "latest").write_text("../elsewhere\n")


DAMAGES = ["flipped bit", "cut short", "file gone", "state gone", "state edited", "state emptied"]


@pytest.mark.parametrize("how", [*DAMAGES, "pointer gone", "pointer outside"])
def test_damaged_checkpoint_is_passed_over(tmp_path, how, capfd):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, *state(1), {"tokens": 1})
    checkpointer.save(2, *state(2), {"tokens": 2})
    damage(tmp_path / "step-00000002", how)
    expected = 1 if how in DAMAGES else 2
    loaded, shard, own = load(checkpointer)
    assert loaded == {"step": expected, "tokens": expected}
    assert_equal({**shard, **own}, {**state(expected)[0], **state(expected)[1]})
    said = capfd.readouterr().err.splitlines()
    assert len(said) == (how in DAMAGES)
    for line in said:
        assert re.search(r"step-00000002 is passed over: .*/step-00000002/.*; using step-00000001$", line)


def test_no_whole_checkpoint_is_an_error_and_not_a_fresh_start(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, *state(1), {})
    damage(tmp_path / "step-00000001", "flipped bit")
    with pytest.raises(CheckpointError, match=r"none in .* is whole; .*checksum differs"):
        load(checkpointer)


def test_file_names_that_leave_the_directory_are_refused(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    path = checkpointer.save(1, *state(1), {})
    rewrite(path, lambda s: s["files"].update({"../../secret": {"bytes": 1, "crc32": 1}}))
    with pytest.raises(CheckpointError, match="outside its directory"):
        load(checkpointer)


class Killed(BaseException):
    pass


class KillSwitch:
    """Wraps functions; the call number `kill_at` of all of them together raises instead."""

    def __init__(self, kill_at):
        self.left = kill_at

    def around(self, function):
        def counted(*args, **kwargs):
            if self.left == 0:
                raise Killed
            self.left -= 1
            return function(*args, **kwargs)

        return counted


def test_kill_between_any_two_file_operations(tmp_path, monkeypatch):
    """Stop at the n-th operation that changes the directory, for every n: what is found is the old or the new
    checkpoint, whole, and the same step can be saved again."""
    operations = [(os, "replace"), (os, "fsync"), (type(tmp_path), "rename"), (type(tmp_path), "mkdir")]
    operations += [(checkpoint_module.shutil, "rmtree")]
    outcomes = []
    for kill_at in range(100):
        directory = tmp_path / str(kill_at)
        checkpointer = Checkpointer(directory, keep=1)
        checkpointer.save(1, *state(1), {"tokens": 1})
        switch = KillSwitch(kill_at)
        with monkeypatch.context() as patch:
            for owner, name in operations:
                patch.setattr(owner, name, switch.around(getattr(owner, name)))
            try:
                checkpointer.save(2, *state(2), {"tokens": 2})
                finished = True
            except Killed:
                finished = False
        loaded, shard, _ = load(Checkpointer(directory))
        assert_equal(shard, state(loaded["tokens"])[0])
        outcomes.append(loaded["step"])
        again = Checkpointer(directory, keep=1)
        again.save(2, *state(3), {"tokens": 3})  # the same step, after a restart that trained it anew
        loaded, shard, _ = load(again)
        assert loaded == {"step": 2, "tokens": 3}
        assert_equal(shard, state(3)[0])
        assert len(names(directory)) == 2, "the pointer and one checkpoint are left"
        if finished:
            break
    assert finished and kill_at > 6
    assert outcomes == sorted(outcomes) and outcomes[0] == 1 and outcomes[-1] == 2


def test_failed_write_leaves_the_last_checkpoint_and_no_litter(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, *state(1), {"tokens": 1})

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"cannot write in .*File too large"):
            checkpointer.save(2, *state(2), {"tokens": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert names(tmp_path) == ["latest", "step-00000001"]
    assert load(checkpointer)[0] == {"step": 1, "tokens": 1}


def test_failed_write_on_one_rank_is_an_error_on_all(tmp_path):
    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size, tp=2))
        checkpointer = Checkpointer(tmp_path, groups=groups)
        checkpointer.save(1, *state(rank), {"tokens": 1})
        if rank == 1:  # only there is the disk full
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit))
        with pytest.raises(OSError, match="File too large" if rank == 1 else "another rank failed"):
            checkpointer.save(2, *state(rank), {"tokens": 2})
        return load(checkpointer)[0]

    assert run_ranks(rank_main, 2) == [{"step": 1, "tokens": 1}] * 2
    assert names(tmp_path) == ["latest", "step-00000001"]
