"""Checkpoints that somebody else has made, and what lies beside a run's own."""

from __future__ import annotations

import itertools
import json
import os
import random
import time

import pytest
import torch
from checkpoint_tools import refs, rewrite

from fastmp.apps.cli import main
from fastmp.training.checkpoint import directory as directory_module
from fastmp.training.checkpoint import format as format_module
from fastmp.training.checkpoint.checkpointer import Checkpointer
from fastmp.training.checkpoint.chunks import TensorChunk
from fastmp.training.checkpoint.directory import CheckpointName, by_age, candidates, prune
from fastmp.training.checkpoint.format import CheckpointError, check_tiled, read_manifest
from fastmp.training.checkpoint.storage import ShardedTensorRef

NAME = "rank-00000.safetensors"


def state(**tensors):
    return refs({name.replace("__", "/"): tensor for name, tensor in tensors.items()})


def save(directory, step=1, **tensors):
    found = state(**(tensors or {"model__a": torch.ones(4)}))
    return Checkpointer(directory, keep=0).save(step, found, {})


@pytest.mark.parametrize("empty", [torch.empty(0, dtype=torch.int64), torch.empty(3, 0, 2)])
def test_empty_tensors_are_saved_read_compared_and_written_again(tmp_path, empty, capsys):
    tensors = {"counts__steps": torch.tensor(3), "model__a": torch.ones(3), "model__zz": empty}
    path = save(tmp_path, **tensors, model__b=empty)
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    assert Checkpointer(tmp_path).load(state(**found, model__b=empty)).step == 1
    assert torch.equal(found["model__a"], torch.ones(3)) and found["counts__steps"] == 3
    assert main(["checkpoint", "reshard", str(path), str(tmp_path / "again")]) == 0
    assert main(["checkpoint", "diff", str(path), str(tmp_path / "again")]) == 0


def test_an_empty_part_does_not_stand_for_another_one(tmp_path):
    path = save(tmp_path)
    rewrite(path, lambda manifest: manifest["tensors"]["model/a"][2].append([0, 88, 0, [0], [0]]))
    with pytest.raises(
        CheckpointError, match="model/a: shards overlap or are empty where another one begins"
    ):
        read_manifest(path)


@pytest.mark.parametrize("shape", [[2**61] * 300, [1] * 65, [0] * 65, [0, 2**61], [2**40, 0, 2**40, 2**40]])
def test_shapes_that_no_tensor_has_are_refused(tmp_path, shape):
    path = save(tmp_path)
    rewrite(path, lambda manifest: manifest["tensors"].update({"x": ["F32", shape, []]}))
    with pytest.raises(
        CheckpointError, match=r"manifest\.json: x: .*too many dimensions or elements"
    ) as error:
        read_manifest(path)
    assert len(str(error.value)) < 500


def test_a_shape_that_could_not_be_read_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match=r"model/a: .*too many dimensions"):
        save(tmp_path, model__a=torch.zeros([1] * 65))
    with pytest.raises(ValueError, match=r"cannot be the name of a tensor"):
        Checkpointer(tmp_path).save(1, {"model/\x1b[2J": ShardedTensorRef.whole(torch.ones(1))}, {})


def test_a_manifest_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(format_module, "LARGEST_MANIFEST", 300)
    with pytest.raises(ValueError, match=r"a manifest of .* bytes, at most 300 are read"):
        save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001"]


def test_another_model_is_named_in_a_line_that_can_be_printed(tmp_path):
    path = save(tmp_path)
    rewrite(path, lambda manifest: manifest.update(description={"\x1b[2J\ud800": "x" * 100_000}))
    with pytest.raises(CheckpointError, match="another model") as error:
        Checkpointer(tmp_path, description={"a": 1}).load({})
    assert str(error.value).isascii() and str(error.value).isprintable() and len(str(error.value)) < 5000


@pytest.mark.parametrize("name", ["\x1b]0;owned\x07", "a\nb", "\ud800", "n" * 1001])
def test_names_that_cannot_be_printed_are_refused(tmp_path, name):
    path = save(tmp_path)
    rewrite(path, lambda manifest: manifest["tensors"].update({name: ["F99", [0], []]}))
    with pytest.raises(CheckpointError, match="cannot be the name of a tensor") as error:
        read_manifest(path)
    said = str(error.value)
    assert said.encode().isascii() and said.isprintable() and len(said) < 500


@pytest.mark.parametrize(
    "value", [[[]] * 100_000, "x" * 100_000, {"a": 1}, json.loads("[" * 900 + "]" * 900), 1 << 62, 1.5, True]
)
def test_whatever_stands_for_a_number_is_one_short_line(tmp_path, value):
    for place in (["step"], ["files", NAME], ["tensors", "model/a", 1], ["tensors", "model/a", 2, 0, 1]):
        path = save(tmp_path / str(place))

        def change(manifest, place=place):
            for key in place[:-1]:
                manifest = manifest[key]
            manifest[place[-1]] = value

        rewrite(path, change)
        with pytest.raises(CheckpointError) as error:
            read_manifest(path)
        assert len(str(error.value)) < 700 and "\n" not in str(error.value)


@pytest.mark.parametrize(("dims", "each"), [(12, 2), (2, 64), (1, 4096)])
def test_a_grid_of_many_boxes_is_checked_in_a_moment(dims, each):
    places = [tuple(2 * at for at in place) for place in itertools.product(range(each), repeat=dims)]
    chunks = [TensorChunk(at, (2,) * dims) for at in places]
    start = time.process_time()
    check_tiled("x", [2 * each] * dims, chunks, ValueError)
    first, *others = chunks[-1].offsets
    chunks[-1] = TensorChunk((first - 1, *others), chunks[-1].sizes)
    with pytest.raises(ValueError, match="x: shards overlap or leave a gap"):
        check_tiled("x", [2 * each] * dims, chunks, ValueError)
    assert time.process_time() - start < 5


def test_chunks_that_meet_nowhere_are_refused_before_memory_is_gone():
    """1024 chunks of 2^30 elements of 2^40 in all, each halved along ten of twenty dimensions."""
    chunks = []
    for number in range(1024):
        draw = random.Random(number)
        halved = draw.sample(range(20), 10)
        at = tuple(draw.randrange(3) if dim in halved else 0 for dim in range(20))
        chunks.append(TensorChunk(at, tuple(2 if dim in halved else 4 for dim in range(20))))
    with pytest.raises(ValueError, match="x: its 1024 shards are too irregular"):
        check_tiled("x", [4] * 20, chunks, ValueError)


def made_at(path, nanoseconds):
    os.utime(path / "manifest.json", ns=(nanoseconds, nanoseconds))


def test_a_save_is_on_disk_before_anything_names_it(tmp_path, monkeypatch):
    """What is named is synced first: files, directory, its new name in the parent, then `latest`."""
    done, sync, rename, replace = [], os.fsync, os.rename, os.replace

    def at(path):
        return os.path.relpath(path, tmp_path)

    def fsync(descriptor):
        done.append(("sync", at(os.readlink(f"/proc/self/fd/{descriptor}"))))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", lambda old, new: (done.append(("rename", at(new))), rename(old, new)))
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append(("rename", at(new))), replace(old, new)))
    save(tmp_path, 3)
    staging = "step-00000003.staging"
    assert done == [
        ("sync", f"{staging}/{NAME}"),
        ("sync", f"{staging}/manifest.json"),
        ("sync", staging),
        ("rename", "step-00000003"),
        ("sync", "."),
        ("sync", "latest.new"),
        ("rename", "latest"),
        ("sync", "."),
    ]


def without_number(path):
    """Make a checkpoint one of an older version, in whose manifest there was no sequence number."""
    made = (path / "manifest.json").stat().st_mtime_ns
    rewrite(path, lambda manifest: {key: each for key, each in manifest.items() if key != "sequence"})
    made_at(path, made)
    return path


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.name != "latest")


def test_what_a_run_gave_up_is_older_than_what_it_did_then(tmp_path, capfd):
    """It went back from step 12 to 4 and on to 8: of these the newest two stay, and 6 comes after 8."""
    for step in (4, 12):
        save(tmp_path, step)
    checkpointer = Checkpointer(tmp_path, keep=2)
    checkpointer.save(6, state(model__a=torch.ones(4)), {})
    assert names(tmp_path) == ["step-00000006", "step-00000012"]
    last = checkpointer.save(8, state(model__a=torch.ones(4)), {})
    assert names(tmp_path) == ["step-00000006", "step-00000008"]
    made_at(without_number(save(tmp_path, 12)), 12)
    (tmp_path / "latest").write_text("step-00000008\n")
    (last / NAME).write_bytes(b"")
    assert checkpointer.load(state(model__a=torch.zeros(4))).step == 6
    assert "using step-00000006" in capfd.readouterr().err


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_newer_is_what_was_saved_later_whatever_its_time(tmp_path, hours):
    """The clock went by an hour after step 6, or a copy has other times; the run goes on in its directory."""
    checkpointer = Checkpointer(tmp_path, keep=3)
    for step in (2, 4, 6):
        path = checkpointer.save(step, state(model__a=torch.ones(4)), {})
        made_at(path, path.stat().st_mtime_ns - hours * 3_600 * 10**9)
    for step in (8, 10, 12):
        checkpointer.save(step, state(model__a=torch.ones(4)), {})
    assert names(tmp_path) == ["step-00000008", "step-00000010", "step-00000012"]
    assert [read_manifest(tmp_path / name).sequence for name in names(tmp_path)] == [4, 5, 6]
    (tmp_path / "latest").unlink()
    assert checkpointer.load(state(model__a=torch.zeros(4))).step == 12
    # Back to step 8, and on from there: 9 and 10 are newer than 12.
    for step in (9, 10):
        checkpointer.save(step, state(model__a=torch.ones(4)), {})
    assert names(tmp_path) == ["step-00000009", "step-00000010.1", "step-00000012"]
    (tmp_path / "latest").unlink()
    assert str(candidates(tmp_path)[0]) == "step-00000010.1"


def test_checkpoints_without_a_number_come_first(tmp_path):
    """Their order is that of time, also behind one whose clock was ahead."""
    for step, made in ((6, 10**18), (2, 2 * 10**18), (4, 3 * 10**18)):
        made_at(without_number(save(tmp_path, step)), made)
    made_at(save(tmp_path, 1), 10**9)
    made_at(save(tmp_path, 3), 10**8)
    assert [saved.name.step for saved in by_age(tmp_path)] == [6, 2, 4, 1, 3]
    assert [saved.sequence for saved in by_age(tmp_path)] == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("number", [-1, 1.5, "1", None, 2**62, [1]])
def test_a_sequence_number_that_is_none_is_refused(tmp_path, number):
    path = save(tmp_path)
    rewrite(path, lambda manifest: manifest.update(sequence=number))
    with pytest.raises(CheckpointError, match="sequence must be a number from 0"):
        read_manifest(path)
    assert len(by_age(tmp_path)) == 1 and save(tmp_path, 2).is_dir()


@pytest.mark.parametrize("number", [10**18 - 1, 10**18, 2**62 - 3])
def test_large_sequence_numbers_are_in_order_up_to_the_largest(tmp_path, number):
    rewrite(save(tmp_path, 6), lambda manifest: manifest.update(sequence=number))
    save(tmp_path, 2)
    assert [saved.name.step for saved in by_age(tmp_path)] == [6, 2]
    assert [saved.sequence for saved in by_age(tmp_path)] == [number, number + 1]
    rewrite(save(tmp_path, 4), lambda manifest: manifest.update(sequence=2**62 - 1))
    with pytest.raises(CheckpointError, match=f"sequence numbers below {2**62 - 1}, got {2**62 - 1}; move"):
        save(tmp_path, 8)


def test_checkpoints_made_at_one_time_are_in_the_order_of_steps_and_numbers(tmp_path):
    paths = [without_number(save(tmp_path, step)) for step in (3, 1, 3, 2)]
    for path in paths:
        made_at(path, 1_000_000_001)
    made_at(tmp_path / "step-00000002", 1_000_000_002)
    order = [CheckpointName(1), CheckpointName(3), CheckpointName(3, 1), CheckpointName(2)]
    assert [saved.name for saved in by_age(tmp_path)] == order
    (tmp_path / "latest").write_text("step-00000003\n")
    assert candidates(tmp_path) == [
        CheckpointName(3),
        CheckpointName(2),
        CheckpointName(3, 1),
        CheckpointName(1),
    ]


@pytest.mark.parametrize(
    "name", ["step-0000000001", "step-00000001.0", "step-00000001.01", "step-\u0660\u0660000001", "step-1"]
)
def test_names_in_another_form_are_no_checkpoints(tmp_path, name):
    save(tmp_path).rename(tmp_path / name)
    assert by_age(tmp_path) == []
    assert Checkpointer(tmp_path).load(state(model__a=torch.zeros(4))) is None


@pytest.mark.parametrize(("keep", "asked"), [(0, []), (1, ["step-00000003"]), (2, ["step-00000003"])])
def test_of_the_other_checkpoints_no_manifest_is_read(tmp_path, monkeypatch, keep, asked):
    paths, seen = [save(tmp_path, step) for step in (1, 2, 3)], []
    monkeypatch.setattr(directory_module, "is_finite", lambda path: not seen.append(path.name))
    prune(tmp_path, paths[-1], keep=keep)
    assert seen == asked and len(names(tmp_path)) == (keep or 3)


def test_the_checkpoint_just_made_stays_whatever_the_clock_says(tmp_path):
    paths = [save(tmp_path, step) for step in (1, 2)]
    made_at(paths[0], time.time_ns() + 10**12)
    prune(tmp_path, paths[1], keep=1)
    assert names(tmp_path) == ["step-00000002"]


@pytest.mark.parametrize("keep", [0, 1])
def test_nothing_beside_it_ends_a_save(tmp_path, keep):
    elsewhere = save(tmp_path / "elsewhere", 2)
    run = tmp_path / "run"
    strange = save(run, 1)
    rewrite(
        strange,
        lambda manifest: manifest.update(step=[], finite=0, tensors={"x": ["F32", [2**61] * 250, []]}),
    )
    (run / "step-00000002").symlink_to(elsewhere)
    (run / "step-00000003").symlink_to("nowhere")
    (run / "step-00000004").write_text("a file")
    (run / "step-00000003.staging").symlink_to(elsewhere)
    (run / "step-00000004.staging").write_text("a file")
    made = Checkpointer(run, keep=keep).save(3, state(model__a=torch.full((4,), torch.inf)), {})
    left = ["step-00000002", "step-00000003", "step-00000003.1", "step-00000004"]
    assert made.name == "step-00000003.1" and elsewhere.is_dir()
    assert names(run) == ([] if keep else ["step-00000001"]) + left


def test_a_checkpoint_may_be_a_link_to_a_directory_elsewhere(tmp_path):
    elsewhere, run = save(tmp_path / "elsewhere", 7), tmp_path / "run"
    run.mkdir()
    (run / "step-00000007").symlink_to(elsewhere)
    found = torch.zeros(4)
    assert Checkpointer(run).load(state(model__a=found)).step == 7 and found.all()


def test_what_a_checkpoint_says_is_printed_as_ascii(tmp_path, capsys):
    path = save(tmp_path)
    strange = {"\x1b[31m": ["\ud800", "\x1b[2J"]}
    rewrite(path, lambda manifest: manifest.update(layout=strange, description=strange))
    assert main(["checkpoint", "inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert said.isascii() and said.replace("\n", "").isprintable() and "ud800" in said
