"""Checkpoints: everything comes back, a kill at any point costs nothing, what does not fit is refused."""

from __future__ import annotations

import math
import os
import re
import resource
import signal
import sys
import threading
import time
import zlib
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_tools import refs, rewrite
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

from fastmp.config import GPTConfig, MoEConfig
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint import checkpointer as checkpointer_module
from fastmp.training.checkpoint import directory as directory_module
from fastmp.training.checkpoint import tensor_files
from fastmp.training.checkpoint.checkpointer import Checkpointer, Note, described
from fastmp.training.checkpoint.directory import CheckpointEntry, CheckpointName, to_delete
from fastmp.training.checkpoint.format import CheckpointError, read_manifest
from fastmp.training.checkpoint.storage import CheckpointReader, ShardedTensorRef
from fastmp.training.checkpoint.tensor_files import is_finite


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(checkpointer_module, "PAUSE", 0.01)


def tensors(seed, *, shape=(3, 4)):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/weight": torch.randn(shape, generator=generator),
        "model/half": torch.randn(5, generator=generator).bfloat16(),
        "optimizer/double": torch.randn(2, generator=generator, dtype=torch.float64),
        "optimizer/view": torch.randn(9, generator=generator)[3:7],
        "optimizer/empty": torch.zeros(0, 3),
        "optimizer/transposed": torch.randn(3, 2, generator=generator).t(),
        "counts/steps": torch.tensor(seed),
        "random/cpu": torch.randint(0, 256, (64,), generator=generator, dtype=torch.uint8),
    }


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


def load(checkpointer, scalars=None):
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
    return checkpointer.load(refs(found), scalars or {}), found


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_round_trip_is_bitwise_and_prunes(tmp_path):
    checkpointer = Checkpointer(tmp_path / "ck", description={"hidden": 8, "betas": (0.9, 0.95)}, keep=2)
    assert load(checkpointer)[0] is None
    for step in (1, 2, 3):
        path = checkpointer.save(step, refs(tensors(step)), {"tokens": 10 * step})
        assert path.name == f"step-{step:08d}"
    assert names(tmp_path / "ck") == ["latest", "step-00000002", "step-00000003"]
    loaded, found = load(checkpointer)
    assert (loaded.step, loaded.scalars, loaded.path) == (3, {"tokens": 30}, path)
    assert_equal(found, tensors(3))
    assert_equal(load_file(path / "rank-00000.safetensors"), tensors(3))  # any reader of the format can


def test_equal_states_are_equal_bytes(tmp_path):
    for name in ("a", "b"):
        Checkpointer(tmp_path / name, description={"x": 1}).save(1, refs(tensors(1)), {"tokens": 1})
    contents = [
        {path.name: path.read_bytes() for path in (tmp_path / name / "step-00000001").iterdir()}
        for name in "ab"
    ]
    assert contents[0] == contents[1] and len(contents[0]) == 2


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 4, 5])
def test_as_many_stay_as_asked_for(tmp_path, keep):
    checkpointer = Checkpointer(tmp_path, keep=keep)
    for step in range(1, 7):
        checkpointer.save(step, refs(tensors(step)), {})
        first = max(1, step - keep + 1) if keep else 1
        assert names(tmp_path) == ["latest", *(f"step-{s:08d}" for s in range(first, step + 1))]


def test_what_is_kept_by_steps_by_hours_and_for_being_finite():
    saved = [CheckpointEntry(step, step * 360_000_000_000, CheckpointName(step)) for step in range(1, 10)]
    asked = []

    def finite(name):
        asked.append(name.step)
        return name.step not in (8, 9)

    assert to_delete(saved, finite, keep=0) == [] and not asked

    def kept(**options):
        gone = to_delete(saved, finite, **options)
        return [each.name.step for each in saved if each.name not in gone]

    assert kept(keep=1) == [7, 9] and asked == [9, 8, 7]
    assert kept(keep=3) == [7, 8, 9]
    assert kept(keep=1, keep_every=4) == [4, 7, 8, 9]
    assert kept(keep=1, keep_hours=0.3) == [1, 3, 6, 7, 9]


@pytest.mark.parametrize("tp", [2, 1])
def test_every_shard_of_every_rank_comes_back(tmp_path, tp):
    """World of 2 as TP=2 (two shards of a tensor) and as DP=2 (two replicas, of which one is written)."""

    def rank_main(rank, world_size):
        calls = []
        sys.addaudithook(lambda event, args: calls.append(args) if event == "pickle.find_class" else None)
        checkpointer = Checkpointer(
            tmp_path, groups=ParallelGroups.create(RankGrid(world_size=world_size, tp=tp))
        )
        whole = torch.arange(24.0).view(4, 6)
        at = (0, 3 * rank) if tp == 2 else (0, 0)
        own = whole[:, 3 * rank : 3 * rank + 3] if tp == 2 else whole
        saved = {"model/weight": ShardedTensorRef((4, 6), whole.dtype, [(at, own)])}
        saved |= {f"random/rank-{rank}": ShardedTensorRef.whole(torch.tensor([rank]))}
        checkpointer.save(7, saved, {"tokens": 70})
        calls.clear()
        new, random = torch.zeros_like(own), torch.tensor([9])
        wanted = {"model/weight": ShardedTensorRef((4, 6), whole.dtype, [(at, new)])}
        loaded = checkpointer.load(
            wanted | {f"random/rank-{rank}": ShardedTensorRef.whole(random)}, {"tokens": 0}
        )
        assert calls == [], "nothing is unpickled on the load path"
        assert (loaded.step, loaded.scalars, random.item()) == (7, {"tokens": 70}, rank)
        assert torch.equal(own, new)

    run_ranks(rank_main, 2)
    manifest = read_manifest(tmp_path / "step-00000007")
    assert sum(file.bytes - file.header_bytes for file in manifest.files.values()) == 24 * 4 + 2 * 8


def test_the_library_loads_it_into_dtensors(tmp_path):
    """Its own planner, with this storage: what FSDP2 has, from a checkpoint of one process."""
    Checkpointer(tmp_path).save(1, refs(tensors(1)), {})

    def rank_main(rank, world_size):
        mesh = DeviceMesh("cpu", list(range(world_size)))
        cut = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(1)], run_check=False)
        copied = DTensor.from_local(torch.zeros(3, 4), mesh, [Replicate()], run_check=False)
        for wanted in (cut, copied):
            dcp.load({"model/weight": wanted}, storage_reader=CheckpointReader(tmp_path / "step-00000001"))
            assert torch.equal(wanted.full_tensor(), tensors(1)["model/weight"])

    run_ranks(rank_main, 2)


def test_ranks_that_do_not_agree_and_holes_are_errors_that_name_the_tensor(tmp_path):
    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size, tp=2))
        checkpointer, said = Checkpointer(tmp_path, groups=groups), []
        for ref in (
            ShardedTensorRef((4,), torch.float32, [((rank,), torch.zeros(1))]),  # half of it
            ShardedTensorRef((4,), torch.float32, [((rank,), torch.zeros(3))]),  # they overlap
            ShardedTensorRef((4 + rank,), torch.float32, [((0,), torch.zeros(4 + rank))]),
        ):
            with pytest.raises(ValueError, match="model/weight") as error:
                checkpointer.save(1, {"model/weight": ref}, {})
            said.append(str(error.value))
        return said

    for holes, overlap, disagree in run_ranks(rank_main, 2):
        assert "its shards have 2 elements" in holes and "its shards have 6 elements" in overlap
        assert "ranks 0 and 1 do not agree on the shape of model/weight" in disagree
    assert not any(tmp_path.iterdir())


def test_another_model_is_refused_with_both_names(tmp_path):
    Checkpointer(tmp_path, description={"num_layers": 2}).save(1, refs(tensors(1)), {})
    with pytest.raises(CheckpointError, match=r"step-00000001.*num_layers=2; this run has num_layers=3"):
        load(Checkpointer(tmp_path, description={"num_layers": 3}))
    same = Checkpointer(tmp_path, description={"num_layers": 2})
    later = {"num_layers": 2, "norm": "layernorm"}  # a field that was not there when it was saved
    assert load(Checkpointer(tmp_path, description=later, defaults=later))[0].step == 1
    with pytest.raises(CheckpointError, match="saved with norm=layernorm; this run has norm=rmsnorm"):
        load(Checkpointer(tmp_path, description={**later, "norm": "rmsnorm"}, defaults=later))
    found = tensors(1, shape=(4, 4))
    with pytest.raises(CheckpointError, match=r"model/weight is .*\(3, 4\).*here .*\(4, 4\)"):
        same.load(refs(found))
    found["model/weight"] = torch.zeros(3, 4, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"float32.*here.*bfloat16"):
        same.load(refs(found))
    del found["model/weight"]
    with pytest.raises(CheckpointError, match=r"model/weight is .*, here nothing"):
        same.load(refs(found))
    found = tensors(1) | {"model/more": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"model/more is nothing, here"):
        same.load(refs(found))


def test_random_states_may_be_missing_and_of_other_ranks(tmp_path):
    Checkpointer(tmp_path).save(1, refs(tensors(1)), {})
    found = tensors(2)
    found["random/other"] = found.pop("random/cpu")
    loaded = Checkpointer(tmp_path).load(refs(found), optional=frozenset({"random/other"}))
    assert loaded.missing == {"random/other"} and torch.equal(found["random/other"], tensors(2)["random/cpu"])


def test_a_checkpoint_is_loaded_from_a_path(tmp_path):
    checkpointer = Checkpointer(tmp_path, keep=0)
    paths = [checkpointer.save(step, refs(tensors(step)), {}) for step in (1, 2)]
    found = tensors(0)
    assert Checkpointer(tmp_path / "other").load(refs(found), path=paths[0]).step == 1
    assert_equal(found, tensors(1))
    with pytest.raises(CheckpointError, match="elsewhere: no checkpoint found"):
        checkpointer.load(refs(found), path=tmp_path / "elsewhere")


@pytest.mark.parametrize("scalars", [{}, {"optimizer": {}}, {"optimizer": {"step": "1"}}, {"optimizer": [1]}])
def test_scalars_that_are_missing_or_of_another_type_are_named_and_nothing_is_read(tmp_path, scalars):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, refs(tensors(1)), scalars)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
    with pytest.raises(
        CheckpointError, match=r"manifest\.json: scalars\.optimizer.* must be of type (dict|int), got"
    ):
        checkpointer.load(refs(found), {"optimizer": {"step": 0}})
    assert not any(tensor.any() for tensor in found.values())


def not_finite(seed):
    found = tensors(seed)
    found["model/half"][3] = math.inf
    return refs(found)


@pytest.mark.parametrize("keep", [1, 2])
def test_the_last_finite_checkpoint_is_never_deleted_and_is_what_is_loaded(tmp_path, keep, capfd):
    checkpointer = Checkpointer(tmp_path, keep=keep)
    checkpointer.save(1, refs(tensors(1)), {})
    checkpointer.save(2, refs(tensors(2)), {})
    for step in range(3, 7):
        checkpointer.save(step, not_finite(step), {})
    newest = [f"step-{step:08d}" for step in range(7 - keep, 7)]
    assert names(tmp_path) == ["latest", "step-00000002", *newest]
    loaded, found = load(checkpointer)
    assert loaded.step == 2
    assert_equal(found, tensors(2))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == keep
    assert all(
        re.search(r"step-0000000. is passed over: .*not finite; using step-00000002$", s) for s in said
    )
    checkpointer.save(7, refs(tensors(7)), {})
    assert names(tmp_path)[1:] == sorted([*newest, "step-00000007"][-keep:])


def test_without_any_finite_checkpoint_the_newest_is_loaded(tmp_path, capfd):
    checkpointer = Checkpointer(tmp_path)
    for step in (1, 2, 3):
        checkpointer.save(step, not_finite(step), {})
    assert names(tmp_path) == ["latest", "step-00000002", "step-00000003"]
    assert load(checkpointer)[0].step == 3


@pytest.mark.parametrize("host", [tensor_files.HOST, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(monkeypatch, dtype, host):
    monkeypatch.setattr(tensor_files, "HOST", host)
    numbers = torch.full((5001,), torch.finfo(dtype).max, dtype=dtype)  # whose sum overflows
    numbers[::2] = torch.finfo(dtype).smallest_normal
    assert is_finite(numbers) and is_finite(-numbers) and is_finite(numbers[:0])
    for place in (0, 1, 4095, 4096, 5000):
        for bad in (math.inf, -math.inf, math.nan):
            worse = numbers.clone()
            worse[place] = bad
            assert not is_finite(worse)
            assert is_finite(worse[place + 1 :]) and is_finite(worse[:place])
    assert is_finite(torch.tensor([1 << 62]))


def damage(path, how):
    target = next(path.glob("*.safetensors"))
    content, manifest = target.read_bytes(), path / "manifest.json"
    if how == "flipped bit":
        target.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif how == "flipped bit of a header":
        target.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])
    elif how == "cut short":
        target.write_bytes(content[:-1])
    elif how == "file gone":
        target.unlink()
    elif how == "file a link":
        target.rename(path.parent / "moved")
        target.symlink_to(path.parent / "moved")
    elif how == "file a pipe":
        target.unlink()
        os.mkfifo(target)
    elif how == "one file more":
        save_file({"model/weight": torch.zeros(1)}, path / "zz.safetensors")
    elif how == "manifest gone":
        manifest.unlink()
    elif how == "manifest edited":
        manifest.write_text(manifest.read_text().replace('"tokens": 2', '"tokens": 3'))
    elif how == "manifest emptied":
        manifest.write_text("")
    elif how == "pointer gone":
        (path.parent / "latest").unlink()
    elif how == "pointer a pipe":
        (path.parent / "latest").unlink()
        os.mkfifo(path.parent / "latest")
    elif how == "pointer outside":
        (path.parent / "latest").write_text("../elsewhere\n")


DAMAGES = [
    *("flipped bit", "flipped bit of a header", "cut short", "file gone", "file a link", "file a pipe"),
    *("one file more", "manifest gone", "manifest edited", "manifest emptied"),
]


@pytest.mark.parametrize("how", [*DAMAGES, "pointer gone", "pointer a pipe", "pointer outside"])
def test_damaged_checkpoint_is_passed_over(tmp_path, how, capfd):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, refs(tensors(1)), {"tokens": 1})
    checkpointer.save(2, refs(tensors(2)), {"tokens": 2})
    damage(tmp_path / "step-00000002", how)
    expected = 1 if how in DAMAGES else 2
    loaded, found = load(checkpointer)
    assert (loaded.step, loaded.scalars) == (expected, {"tokens": expected})
    assert_equal(found, tensors(expected))
    said = capfd.readouterr().err.splitlines()
    assert len(said) == (how in DAMAGES)
    for line in said:
        assert re.search(r"step-00000002 is passed over: .*/step-00000002/.*; using step-00000001$", line)


def test_no_whole_checkpoint_is_an_error_and_nothing_is_read(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, refs(tensors(1)), {})
    damage(tmp_path / "step-00000001", "flipped bit")
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
    with pytest.raises(CheckpointError, match=r"none in .* is whole; .*checksum differs"):
        checkpointer.load(refs(found))
    assert not any(tensor.any() for tensor in found.values())


def test_damage_that_one_rank_finds_is_the_same_error_on_all(tmp_path):
    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size))
        checkpointer = Checkpointer(tmp_path, groups=groups)
        own = {f"model/{rank}": ShardedTensorRef.whole(torch.ones(1000))}
        checkpointer.save(1, own, {})
        if rank == 0:
            damaged = tmp_path / "step-00000001" / "rank-00001.safetensors"
            content = damaged.read_bytes()
            damaged.write_bytes(content[:-9] + b"x" + content[-8:])
        dist.barrier()
        with pytest.raises(CheckpointError) as error:
            checkpointer.load(own)
        return str(error.value)

    said = run_ranks(rank_main, 2)
    assert (
        said[0] == said[1] and "rank-00001.safetensors is damaged (model/1: its checksum differs)" in said[0]
    )


FILE_OPERATIONS = [(os, "replace"), (os, "fsync"), (os, "write"), (directory_module.shutil, "rmtree")]


def test_kill_between_any_two_file_operations(tmp_path):
    """Die at the n-th operation that changes the directory, for every n: what is found is the old or the new
    checkpoint, whole, and the same step can be saved again."""
    operations = [*FILE_OPERATIONS, (type(tmp_path), "rename"), (type(tmp_path), "mkdir")]
    outcomes, status = [], 9
    for kill_at in range(100):
        directory = tmp_path / str(kill_at)
        checkpointer = Checkpointer(directory, keep=1)
        checkpointer.save(1, refs(tensors(1)), {"tokens": 1})
        checkpointer.close()
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            left = [kill_at]

            def counted(function, left=left):
                def call(*args, **kwargs):
                    if left[0] == 0:
                        os._exit(9)
                    left[0] -= 1
                    return function(*args, **kwargs)

                return call

            for owner, name in operations:
                setattr(owner, name, counted(getattr(owner, name)))
            Checkpointer(directory, keep=1).save(2, refs(tensors(2)), {"tokens": 2})
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        loaded, found = load(Checkpointer(directory))
        assert_equal(found, tensors(loaded.scalars["tokens"]))
        outcomes.append(loaded.step)
        again = Checkpointer(directory, keep=1)
        again.save(2, refs(tensors(3)), {"tokens": 3})  # the same step, after a restart that trained it anew
        loaded, found = load(again)
        assert (loaded.step, loaded.scalars) == (2, {"tokens": 3})
        assert_equal(found, tensors(3))
        assert len(names(directory)) == 2, "the pointer and one checkpoint are left"
        if status == 0:
            break
        assert status == 9
    assert status == 0 and kill_at > 10
    assert outcomes == sorted(outcomes) and outcomes[0] == 1 and outcomes[-1] == 2


def full_disk():
    """From now on, this process cannot write files of more than 100 bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_save_that_fails_is_tried_again_and_leaves_the_last_checkpoint(tmp_path):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, refs(tensors(1)), {"tokens": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.getsignal(signal.SIGXFSZ)
    full_disk()
    try:
        for failures in (1, 2):
            checkpointer.notes()
            with pytest.raises(OSError, match=r"cannot write in .*File too large"):
                checkpointer.save(2, refs(tensors(2)), {"tokens": 2})
            assert checkpointer.failed
            notes = [note.text for note in checkpointer.notes()]
            assert len(notes) == 3 and all("File too large; trying again" in note for note in notes[:2])
            assert notes[2].endswith(f"given up ({failures} in a row)")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert names(tmp_path) == ["latest", "step-00000001"]
    loaded, _ = load(checkpointer)
    assert loaded.step == 1
    path = checkpointer.save(3, refs(tensors(3)), {})
    assert checkpointer.notes() == [Note(f"step 3: saved {path}")] and not checkpointer.failed


def test_a_save_succeeds_at_its_second_attempt(tmp_path, monkeypatch):
    checkpointer, calls, write = Checkpointer(tmp_path), [], os.write

    def once(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        return write(*arguments)

    monkeypatch.setattr(os, "write", once)
    path = checkpointer.save(1, refs(tensors(1)), {})
    first, second = checkpointer.notes()
    assert "Input/output error; trying again" in first.text and first.failed
    assert second == Note(f"step 1: saved {path}")
    assert_equal(load(checkpointer)[1], tensors(1))


def test_failed_write_on_one_rank_is_an_error_on_all(tmp_path):
    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size, tp=2))
        checkpointer = Checkpointer(tmp_path, groups=groups)
        own = {f"model/{rank}": ShardedTensorRef.whole(torch.ones(1000))}
        checkpointer.save(1, own, {"tokens": 1})
        if rank == 1:  # only there is the disk full
            full_disk()
        with pytest.raises(OSError, match=r"File too large \(rank 1\)"):
            checkpointer.save(2, own, {"tokens": 2})
        return checkpointer.load(own).step

    assert run_ranks(rank_main, 2) == [1, 1]
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_what_is_saved_is_what_was_there_when_the_save_began(tmp_path, monkeypatch):
    """The numbers change as soon as that is allowed, while writing has not begun."""
    checkpointer, found, write = Checkpointer(tmp_path), tensors(1), os.write

    def slow(*arguments):
        time.sleep(0.02)
        return write(*arguments)

    monkeypatch.setattr(os, "write", slow)
    checkpointer.start_save(1, refs(found), {})
    checkpointer.wait_staged()
    for tensor in found.values():
        tensor.zero_()
    assert not (tmp_path / "latest").exists(), "still on its way"
    checkpointer.wait()
    assert_equal(load(checkpointer)[1], tensors(1))


def test_a_rank_that_does_not_come_to_load_is_named(tmp_path):
    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size))
        checkpointer = Checkpointer(tmp_path, groups=groups, timeout=timedelta(seconds=0.5))
        if rank == 1:
            time.sleep(1.5)
            return ""
        with pytest.raises(RuntimeError) as error:
            checkpointer.load({})
        return str(error.value)

    assert "Rank 1 failed to pass monitoredBarrier" in run_ranks(rank_main, 2)[0]


def with_tensor(name, change):
    def changed(manifest):
        manifest["tensors"][name] = change(*manifest["tensors"][name])

    return changed


def with_shard(number, value):
    """The first shard of model/weight: [file, start, checksum, offsets, sizes]."""

    def change(dtype, shape, shards):
        shards[0][number] = value
        return [dtype, shape, shards]

    return with_tensor("model/weight", change)


NAME = "rank-00000.safetensors"
HOSTILE = {
    "not JSON": lambda path: (path / "manifest.json").write_text("{"),
    "not text": lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe"),
    "nested deeply": lambda path: (path / "manifest.json").write_bytes(
        b'{"crc32": %d, "manifest": ' % zlib.crc32(b"[" * 200_000) + b"[" * 200_000 + b"}\n"
    ),
    "a link": lambda path: damage_manifest(path, lambda manifest, kept: manifest.symlink_to(kept)),
    "a list": lambda path: rewrite(path, lambda manifest: [1]),
    "no files": lambda path: rewrite(path, lambda manifest: manifest.pop("files") and None),
    "files a list": lambda path: rewrite(path, lambda manifest: {**manifest, "files": []}),
    "a file without a size": lambda path: rewrite(path, lambda m: {**m, "files": {NAME: []}}),
    "a file outside": lambda path: rewrite(path, lambda m: {**m, "files": {"../" + NAME: m["files"][NAME]}}),
    "a hidden file": lambda path: rewrite(path, lambda m: {**m, "files": {"." + NAME: m["files"][NAME]}}),
    "layout a number": lambda path: rewrite(path, lambda manifest: {**manifest, "layout": 1}),
    "scalars a list": lambda path: rewrite(path, lambda manifest: {**manifest, "scalars": []}),
    "step negative": lambda path: rewrite(path, lambda manifest: {**manifest, "step": -2}),
    "another format": lambda path: rewrite(path, lambda manifest: {**manifest, "format": 3}),
    "unknown dtype": lambda path: rewrite(path, with_tensor("model/weight", lambda d, s, p: ["F31", s, p])),
    "wider dtype": lambda path: rewrite(path, with_tensor("model/weight", lambda d, s, p: ["F64", s, p])),
    "no shards": lambda path: rewrite(path, with_tensor("model/weight", lambda d, s, p: [d, s, []])),
    "the same shard twice": lambda path: rewrite(
        path, with_tensor("model/weight", lambda d, s, p: [d, [6, 4], [p[0], p[0]]])
    ),
    "a shard of another file": lambda path: rewrite(path, with_shard(0, 1)),
    "a shard before its place": lambda path: rewrite(path, with_shard(1, 0)),
    "a shard behind the end": lambda path: rewrite(path, with_shard(1, 1 << 40)),
    "a shard outside of its tensor": lambda path: rewrite(path, with_shard(3, [1, 0])),
    "a shard too small": lambda path: rewrite(path, with_shard(4, [2, 4])),
    "a shard of more dimensions": lambda path: rewrite(path, with_shard(4, [3, 4, 1])),
}


def damage_manifest(path, how):
    kept = path.parent / "kept"
    (path / "manifest.json").rename(kept)
    how(path / "manifest.json", kept)


@pytest.mark.parametrize("how", HOSTILE)
def test_whatever_the_manifest_says_it_is_named_and_an_older_one_is_used(tmp_path, how, capfd):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, refs(tensors(1)), {"tokens": 1})
    checkpointer.save(2, refs(tensors(2)), {"tokens": 2})
    HOSTILE[how](tmp_path / "step-00000002")
    loaded, found = load(checkpointer)
    assert (loaded.step, loaded.scalars) == (1, {"tokens": 1})
    assert_equal(found, tensors(1))
    said = capfd.readouterr().err
    assert len(said.splitlines()) == 1 and "step-00000002/manifest.json" in said, said
    HOSTILE[how](tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match=r"none in .* is whole; .*step-00000002/manifest\.json"):
        load(checkpointer)


def test_leftovers_that_cannot_be_removed_fail_on_all_ranks(tmp_path):
    """A file in the place of a directory is removed; what the first rank may not touch is an error on all."""

    def rank_main(rank, world_size):
        checkpointer = Checkpointer(
            tmp_path / "ck", groups=ParallelGroups.create(RankGrid(world_size=world_size))
        )
        own = {f"model/{rank}": ShardedTensorRef.whole(torch.ones(3))}
        if rank == 0:
            (tmp_path / "ck").mkdir()
            (tmp_path / "ck" / "step-00000007.staging").write_text("left over")
        dist.barrier()
        checkpointer.save(1, own, {})
        if rank == 0:

            def refuse(directory):
                raise OSError(39, "Directory not empty")

            directory_module.remove_staging = refuse
        with pytest.raises(OSError, match="Directory not empty"):
            checkpointer.save(2, own, {})
        checkpointer.close()
        return names(tmp_path / "ck")

    assert run_ranks(rank_main, 2)[0] == ["latest", "step-00000001"]


def test_all_ranks_load_what_the_first_one_finds(tmp_path):
    """A run that goes on saves another checkpoint while ranks look for the latest one."""
    checkpointer = Checkpointer(tmp_path, keep=0)
    for step in (1, 2):
        checkpointer.save(step, refs(tensors(step)), {})

    def rank_main(rank, world_size):
        if rank == 1:
            directory_module.checkpoints_at = lambda path: [tmp_path / "step-00000001"]
        groups = ParallelGroups.create(RankGrid(world_size=world_size))
        found = {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}
        loaded = Checkpointer(tmp_path / "own", groups=groups).load(refs(found), path=tmp_path)
        assert_equal(found, tensors(2))
        return loaded.path.name

    assert run_ranks(rank_main, 2) == ["step-00000002"] * 2


def test_of_a_run_that_is_named_an_older_checkpoint_is_taken_for_a_damaged_one(tmp_path, capfd):
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", keep=0)
    for step in (1, 2):
        checkpointer.save(step, refs(tensors(step)), {})
    damage(tmp_path / "run" / "checkpoints" / "step-00000002", "flipped bit")
    found = tensors(0)
    loaded = Checkpointer(tmp_path / "own").load(refs(found), path=tmp_path / "run")
    assert loaded.step == 1 and "step-00000002 is passed over" in capfd.readouterr().err


def test_an_error_of_any_kind_on_one_rank_is_one_on_all(tmp_path):
    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size))
        checkpointer = Checkpointer(tmp_path, groups=groups, description={"rank": rank})
        own = {f"model/{rank}": ShardedTensorRef.whole(torch.ones(3))}
        said = []
        checkpointer.save(1, own, {})
        with pytest.raises(CheckpointError, match="another model: saved with rank=0; this run has rank=1"):
            checkpointer.load(own)  # the first rank has no fault to find
        checkpointer.description = {"rank": 0}
        if rank == 1:

            def out_of_memory(*arguments):
                raise MemoryError("no room for a buffer")

            CheckpointReader.read = out_of_memory
        with pytest.raises(CheckpointError, match="MemoryError: no room for a buffer"):
            checkpointer.load(own)
        return said

    run_ranks(rank_main, 2)


def test_no_memory_for_a_copy_is_a_save_that_fails(tmp_path, monkeypatch):
    checkpointer = Checkpointer(tmp_path)

    def out_of_memory(size):
        raise MemoryError

    monkeypatch.setattr(checkpointer._staging, "_allocate", out_of_memory)
    checkpointer.start_save(1, refs(tensors(1)), {})
    checkpointer.wait_staged()
    with pytest.raises(OSError, match="there is no memory for a copy"):
        checkpointer.wait()


def test_a_tensor_is_converted_for_the_library_and_an_empty_one_comes_back(tmp_path):
    path = Checkpointer(tmp_path).save(1, refs(tensors(1)), {})
    wanted = {"model/weight": torch.zeros(3, 4, dtype=torch.bfloat16)}
    dcp.load(wanted, storage_reader=CheckpointReader(path), no_dist=True)
    assert torch.equal(wanted["model/weight"], tensors(1)["model/weight"].bfloat16())


def test_an_optional_tensor_of_another_form_counts_as_missing(tmp_path):
    Checkpointer(tmp_path).save(1, refs(tensors(1)), {})
    found = tensors(0) | {"random/cpu": torch.zeros(16, dtype=torch.uint8)}
    loaded = Checkpointer(tmp_path).load(refs(found), optional=frozenset({"random/cpu"}))
    assert loaded.missing == {"random/cpu"} and torch.equal(found["model/weight"], tensors(1)["model/weight"])


def test_nothing_is_deleted_while_something_follows_a_checkpoint(tmp_path):
    at_work, go_on = threading.Event(), threading.Event()

    def after(path, step):
        at_work.set()
        assert go_on.wait(10)
        return f"read {(path / 'manifest.json').stat().st_size > 0}"

    checkpointer = Checkpointer(tmp_path, keep=1, after=after)
    checkpointer.save(1, refs(tensors(1)), {})
    assert at_work.wait(10)
    checkpointer.save(2, refs(tensors(2)), {})  # does not wait for it
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002"]
    go_on.set()
    checkpointer.wait_following()
    assert [note.text for note in checkpointer.notes() if "read" in note.text] == [
        "step 1: read True",
        "step 2: read True",
    ]
    checkpointer.save(3, refs(tensors(3)), {})
    assert names(tmp_path)[1] == "step-00000003"


def test_threads_and_groups_go_with_close_and_come_back(tmp_path):
    def rank_main(rank, world_size):
        groups = ParallelGroups.create(RankGrid(world_size=world_size))
        own, counts = {f"model/{rank}": ShardedTensorRef.whole(torch.ones(3))}, []
        for _ in range(4):
            checkpointer = Checkpointer(tmp_path, groups=groups)
            for step in (1, 2):
                checkpointer.save(step, own, {})
                checkpointer.close()
            counts.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
        return counts

    for counts in run_ranks(rank_main, 2):
        assert counts[1:] == counts[:1] * 3


def test_configurations_of_others_are_not_compared():
    @dataclass
    class Config:
        dtype: torch.dtype = torch.float32

    assert described(Config()) == {}
    assert described(GPTConfig())["description"]["num_layers"] == 4


MOE = GPTConfig(moe=MoEConfig(num_experts=4, dispatcher="symmetric", symmetric_capacity=2.0))


@pytest.mark.parametrize(
    ("changes", "differ"),
    [
        ({"dispatcher": "alltoall", "symmetric_capacity": None}, ""),
        ({"symmetric_overflow": "rerun"}, ""),
        ({"top_k": 1}, r"saved with moe\.top_k=2; this run has moe\.top_k=1$"),
    ],
)
def test_a_layout_may_need_another_dispatcher(tmp_path, changes, differ):
    """Symmetric memory is for one machine: the same run goes on over several by all-to-all."""
    Checkpointer(tmp_path, **described(MOE)).save(1, refs(tensors(1)), {})
    now = replace(MOE, moe=replace(MOE.moe, **changes))
    again = Checkpointer(tmp_path, **described(now))
    if not differ:
        assert again.load(refs(tensors(0))).step == 1
        return
    with pytest.raises(CheckpointError, match=differ):
        again.load(refs(tensors(0)))


def test_a_table_that_has_grown_takes_its_defaults(tmp_path):
    """A checkpoint of before an option of experts was there is one with its default."""
    older = described(MOE)
    del older["description"]["moe"]["drop_policy"]
    Checkpointer(tmp_path, **older).save(1, refs(tensors(1)), {})
    assert Checkpointer(tmp_path, **described(MOE)).load(refs(tensors(0))).step == 1
    other = replace(MOE, moe=replace(MOE.moe, capacity_factor=1.0, drop_policy="position"))
    with pytest.raises(
        CheckpointError, match=r"moe\.drop_policy=probs; this run has .*moe\.drop_policy=position"
    ):
        Checkpointer(tmp_path, **described(other)).load(refs(tensors(0)))
