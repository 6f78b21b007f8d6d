"""Damaged and hostile checkpoints: manifests, headers of files and whole directories, changed at random.

A checkpoint loads with the bits that were saved, or it is refused with one CheckpointError that names the
file, and nothing is loaded. Where checksums are made right again (signed), a manifest may describe another
legal checkpoint; nobody can know that it was forged. See inputs.py for what is watched while a case is read.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint  # here, so that no case imports it
from inputs import Family, run_families
from mutations import mutate_bytes, mutate_json
from soak import Outcome, main

from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint.checkpointer import Checkpointer
from fastmp.training.checkpoint.storage import ShardedTensorRef

OPENING = b'{"crc32": %d, "manifest": '


def make_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model/weight": torch.randn(6, 4, generator=generator),
        "model/bias": torch.randn(5, generator=generator).bfloat16(),
        "optimizer/weight/exp_avg": torch.randn(6, 4, generator=generator, dtype=torch.float64),
        "counts/steps": torch.tensor(seed),
        "random/rank-0/cpu": torch.randint(0, 256, (40,), generator=generator, dtype=torch.uint8),
    }


def save(directory: Path, seed: int) -> Path:
    """Two ranks that share the tensors of two dimensions by rows."""

    def rank_main(rank: int, world_size: int) -> None:
        state = {
            name: ShardedTensorRef.whole(tensor)
            if tensor.ndim < 2
            else ShardedTensorRef((6, 4), tensor.dtype, [((3 * rank, 0), tensor[3 * rank : 3 * rank + 3])])
            for name, tensor in make_tensors(seed).items()
        }
        groups = ParallelGroups.create(RankGrid(world_size=world_size))
        Checkpointer(directory, groups=groups).save(seed, state, {"tokens": 7})

    run_ranks(rank_main, 2)
    return directory / f"step-{seed:08d}"


class Checkpoints:
    """Two intact checkpoints of other numbers below `home`, from which cases are made."""

    def __init__(self, home: Path) -> None:
        self.paths = [save(home / "checkpoints", seed) for seed in (1, 2)]
        self.raw = [{path.name: path.read_bytes() for path in each.iterdir()} for each in self.paths]
        self.files = sorted(name for name in self.raw[0] if name != "manifest.json")

    def families(self) -> list[Family]:
        return [
            Family("manifest", 7000, self._make_manifest, self._read_same),
            Family("manifest, signed", 7000, self._make_signed_manifest, self._read_legal),
            Family("header", 4000, self._make_header, self._read_same),
            Family("header, signed", 2000, self._make_signed_header, self._read_legal),
            Family("one bit", 3000, self._make_flipped, self._read_refused),
            Family("directory", 500, self._make_directory, self._read_same),
        ]

    def _fresh(self, folder: Path) -> Path:
        path = folder / "step-00000001"
        path.mkdir()
        for name, raw in self.raw[0].items():
            (path / name).write_bytes(raw)
        return path

    def _make_manifest(self, draw: random.Random, folder: Path) -> Path:
        path = self._fresh(folder)
        (path / "manifest.json").write_bytes(mutate_bytes(draw, self.raw[0]["manifest.json"]))
        return path

    def _make_signed_manifest(self, draw: random.Random, folder: Path) -> Path:
        path = self._fresh(folder)
        document = mutate_json(draw, self.raw[0]["manifest.json"].decode(), "manifest")
        sign(path, document["manifest"])
        return path

    def _make_header(self, draw: random.Random, folder: Path) -> Path:
        path = self._fresh(folder)
        self._change_header(draw, path)
        return path

    def _make_signed_header(self, draw: random.Random, folder: Path) -> Path:
        path = self._fresh(folder)
        name, header, size = self._change_header(draw, path)
        manifest = json.loads(self.raw[0]["manifest.json"])["manifest"]
        number = sorted(manifest["files"]).index(name)
        moved = len(header) - manifest["files"][name][1]
        manifest["files"][name] = [size, len(header), zlib.crc32(header)]
        for _, _, parts in manifest["tensors"].values():
            for part in parts:
                part[1] += moved if part[0] == number else 0
        sign(path, manifest)
        return path

    def _change_header(self, draw: random.Random, path: Path) -> tuple[str, bytes, int]:
        name = draw.choice(self.files)
        raw = self.raw[0][name]
        end = 8 + int.from_bytes(raw[:8], "little")
        header = mutate_bytes(draw, raw[:end])
        (path / name).write_bytes(header + raw[end:])
        return name, header, len(header) + len(raw) - end

    def _make_flipped(self, draw: random.Random, folder: Path) -> Path:
        path = self._fresh(folder)
        name = draw.choice([*self.files, "manifest.json"])
        raw = bytearray(self.raw[0][name])
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        (path / name).write_bytes(raw)
        return path

    def _make_directory(self, draw: random.Random, folder: Path) -> Path:
        path = self._fresh(folder)
        for _ in range(draw.randint(1, 2)):
            names = sorted(os.listdir(path))
            victim = path / draw.choice(names or ["manifest.json"])
            _CHANGES[draw.randrange(len(_CHANGES))](draw, self, path, victim)
        return path

    def _load(self, path: Path) -> dict[str, torch.Tensor]:
        """Load it; where it is refused, nothing has been loaded."""
        found = {name: torch.zeros_like(tensor) for name, tensor in make_tensors(1).items()}
        state = {name: ShardedTensorRef.whole(tensor) for name, tensor in found.items()}
        try:
            Checkpointer(path.parent).load(state, {"tokens": 0}, path=path)
        except ValueError:
            if any(tensor.any() for tensor in found.values()):
                raise AssertionError("it was refused when something of it had been loaded") from None
            raise
        return found

    def _read_same(self, path: Path) -> str:
        """Whatever is accepted is what was saved: this checkpoint, or all of the other one."""
        found = self._load(path)
        for seed in (1, 2):
            if all(torch.equal(tensor, found[name]) for name, tensor in make_tensors(seed).items()):
                return ""
        return "other numbers were accepted"

    def _read_refused(self, path: Path) -> str:
        self._load(path)
        return "a bit that was flipped was not found"

    def _read_legal(self, path: Path) -> str:
        """A forged manifest may say which bytes are whose, and no more than that."""
        found = self._load(path)
        intact = make_tensors(1)
        strange = [name for name, tensor in found.items() if tensor.shape != intact[name].shape]
        return f"{strange} have another shape" if strange else ""


def sign(path: Path, manifest: Any) -> None:
    """Write a manifest whose checksum is right, whatever it says."""
    body = json.dumps(manifest).encode()
    (path / "manifest.json").write_bytes(OPENING % zlib.crc32(body) + body + b"}\n")


def _swap(draw: random.Random, made: Checkpoints, path: Path, victim: Path) -> None:
    names = sorted(os.listdir(path))
    if len(names) > 1:
        first, second = draw.sample(names, 2)
        (path / first).rename(path / "kept")
        (path / second).rename(path / first)
        (path / "kept").rename(path / second)


def _from_other(draw: random.Random, made: Checkpoints, path: Path, victim: Path) -> None:
    _remove(draw, made, path, victim)
    victim.write_bytes(made.raw[1].get(victim.name, b""))


def _all_from_other(draw: random.Random, made: Checkpoints, path: Path, victim: Path) -> None:
    for name, raw in made.raw[1].items():
        _remove(draw, made, path, path / name)
        (path / name).write_bytes(raw)


def _linked(draw: random.Random, made: Checkpoints, path: Path, victim: Path) -> None:
    kept = path.parent / f"kept-{draw.random()}"
    if not victim.is_dir():
        victim.rename(kept)
        victim.symlink_to(draw.choice([kept, "/etc/passwd", "/dev/zero", "../x", victim.name]))


def _as_pipe(draw: random.Random, made: Checkpoints, path: Path, victim: Path) -> None:
    _remove(draw, made, path, victim)
    os.mkfifo(victim)


def _as_directory(draw: random.Random, made: Checkpoints, path: Path, victim: Path) -> None:
    _remove(draw, made, path, victim)
    victim.mkdir()


def _remove(draw: random.Random, made: Checkpoints, path: Path, victim: Path) -> None:
    if victim.is_dir() and not victim.is_symlink():
        shutil.rmtree(victim)
    else:
        victim.unlink(missing_ok=True)


def _cut(draw: random.Random, made: Checkpoints, path: Path, victim: Path) -> None:
    if victim.is_file() and not victim.is_symlink():
        raw = victim.read_bytes()
        victim.write_bytes(raw[: draw.randrange(len(raw) + 1)])


def _mutate(draw: random.Random, made: Checkpoints, path: Path, victim: Path) -> None:
    if victim.is_file() and not victim.is_symlink():
        victim.write_bytes(mutate_bytes(draw, victim.read_bytes()))


def _extra(draw: random.Random, made: Checkpoints, path: Path, victim: Path) -> None:
    name = draw.choice(["rank-00007.safetensors", "state.pkl", "pytorch_model.bin", ".nfs0001", "sub"])
    _remove(draw, made, path, path / name)
    if name == "sub":
        (path / name).mkdir()
    else:
        (path / name).write_bytes(draw.choice([b"", made.raw[1][made.files[0]], b"cos\nsystem\n"]))


_CHANGES: list[Callable[[random.Random, Checkpoints, Path, Path], None]] = [
    _swap, _from_other, _all_from_other, _linked, _as_pipe, _as_directory, _remove, _cut, _mutate, _extra,
]  # fmt: skip


def run(quick: bool) -> Outcome:
    return run_families(Checkpoints, quick)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main("damaged", run))
