"""Cost of checkpoints: saving against raw writes, loading against raw reads, time of a saving step, memory.

`python -m benchmarks.bench_checkpoint` saves and loads a state of `--gib` GiB in turn with a plain file of as
many bytes, and with what else there is: torch's own distributed checkpoint, safetensors and torch.save. Every
writer ends with its bytes on disk. Files are dropped from the page cache before each of them is read; fastmp
reads all of them twice, as it checks every byte before it loads one. Then it measures steps of a training run
that saves, with nothing to wait for but copies, and the memory that loading at another layout takes.

Ratios are medians over rounds in which all come in turn. A disk's speed varies from one second to the next.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.bench_train import OneBatch
from benchmarks.measure import environment, in_turn, speedup
from fastmp.config import CheckpointConfig, GPTConfig, OptimizerConfig, TrainConfig
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import GPT
from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint.checkpointer import Checkpointer
from fastmp.training.checkpoint.storage import ShardedTensorRef
from fastmp.training.checkpoint.tensor_files import tensor_bytes
from fastmp.training.language import token_loss
from fastmp.training.trainer import Trainer

WORKLOADS = ()
TENSORS = 32
SAVING, LOADING, STEP = 0.7, 0.7, 1.1  # goals: of raw writing, of raw reading, of a step


def make_state(size: int) -> dict[str, Tensor]:
    """`size` bytes of numbers in `TENSORS` tensors."""
    each = size // (4 * TENSORS * 1024)
    return {f"model/layers.{i}.weight": torch.randn(each, 1024) for i in range(TENSORS)}


def _on_disk(path: Path) -> None:
    """Sync all files below a path."""
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())


def _forget(path: Path) -> None:
    """Drop all files below a path from the page cache."""
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Storages:
    """The ways to save and load one state below a directory."""

    def __init__(self, directory: Path, state: Mapping[str, Tensor]) -> None:
        self.directory, self.state = directory, state
        self.into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        self.fastmp = Checkpointer(directory / "fastmp", keep=1)

    def savers(self) -> dict[str, Callable[[], float]]:
        """Every one writes beside what it wrote before, and deletes that when the new one is on disk."""

        def write(path: Path) -> None:
            with open(path, "wb", buffering=0) as file:
                for tensor in self.state.values():
                    content = tensor_bytes(tensor)
                    while content:
                        content = content[file.write(content) :]

        def kept(name: str, save: Callable[[Path], Any]) -> Callable[[], float]:
            def run() -> None:
                path = self.directory / name
                new = path.with_name(f"{name}.new")
                save(new)
                _on_disk(new)
                if path.is_dir():
                    shutil.rmtree(path)
                new.replace(path)

            return _timed(run)

        shards = {name: ShardedTensorRef.whole(tensor) for name, tensor in self.state.items()}
        return {
            "raw": kept("raw", write),
            "fastmp": _timed(lambda: self.fastmp.save(1, shards, {})),
            "safetensors": kept("safetensors", lambda path: save_file(self.state, path)),
            "torch dcp": kept("dcp", lambda path: dcp.save(dict(self.state), checkpoint_id=path)),
            "torch.save": kept("torch", lambda path: torch.save(self.state, path)),
        }

    def loaders(self) -> dict[str, Callable[[], float]]:
        """Every one leaves the numbers in memory of its own; what `savers` wrote must be there."""

        def load_raw() -> None:
            with open(self.directory / "raw", "rb", buffering=0) as file:
                for tensor in self.into.values():
                    content = tensor_bytes(tensor)
                    while content:
                        content = content[file.readinto(content) :]

        def load_safetensors() -> None:
            for name, tensor in load_file(self.directory / "safetensors").items():
                self.into[name].copy_(tensor)

        def load_dcp() -> None:
            dcp.load(dict(self.into), checkpoint_id=self.directory / "dcp")

        def load_torch() -> None:
            torch.load(self.directory / "torch", weights_only=True)

        shards = {name: ShardedTensorRef.whole(tensor) for name, tensor in self.into.items()}
        rivals = {
            "raw": ("raw", load_raw),
            "fastmp": ("fastmp", lambda: self.fastmp.load(shards)),
            "safetensors": ("safetensors", load_safetensors),
            "torch dcp": ("dcp", load_dcp),
            "torch.load": ("torch", load_torch),
        }
        return {
            name: _timed(load, before=lambda file=file: _forget(self.directory / file))
            for name, (file, load) in rivals.items()
        }


def _timed(call: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> Callable[[], float]:
    def run() -> float:
        before()
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    return run


def transfers(directory: Path, size: int, rounds: int) -> list[dict[str, Any]]:
    """Saving and loading: GB/s of each, and its share of the raw speed."""
    storages, rows = Storages(directory, make_state(size)), []
    for what, rivals in (("save", storages.savers()), ("load", storages.loaders())):
        for call in rivals.values():
            call()  # the first one makes files and buffers
        times = in_turn(rivals, rounds)
        for name, found in times.items():
            speed = size / statistics.median(found) / 1e6
            rows.append({"what": what, "by": name, "GB/s": speed, "of raw": speedup(found, times["raw"])})
    for name, tensor in storages.state.items():
        assert torch.equal(storages.into[name], tensor), name
    return rows


def steps(directory: Path, *, interval: int, count: int, asleep: bool) -> dict[str, Any]:
    """Time of GPT steps with a save before every `interval`th, relative to steps without saves.

    asleep: steps leave the cores alone for a second, as those of a GPU do; else they take all cores.
    """
    config = GPTConfig(num_layers=4, hidden_size=512, num_heads=8, vocab_size=8192, max_seq_len=256)
    trainers = {
        name: _trainer(config, directory, name, asleep) for name in ("alone", "asynchronous", "synchronous")
    }
    saved = trainers["alone"].saving.state.to_save().values()
    size = sum(shard.nbytes for tensor in saved for _, shard in tensor.shards)
    for trainer in trainers.values():
        trainer.train_step()
        trainer.save()  # its buffer is there from now on
    times: dict[str, list[list[float]]] = {name: [] for name in trainers}
    for _ in range(count):
        for name, trainer in trainers.items():
            own = []
            for step in range(interval):
                start = time.perf_counter()
                if step == 0 and name != "alone":
                    trainer.saving.after_step(0, None)
                trainer.train_step()
                own.append(time.perf_counter() - start)
            trainer.saving.checkpointer.wait()
            times[name].append(own)
    alone = times["alone"]
    found = {"state MiB": size / 2**20, "step ms": statistics.median(own[0] for own in alone) * 1e3}
    for name in ("asynchronous", "synchronous"):
        found[name] = speedup([own[0] for own in alone], [own[0] for own in times[name]])
    found["until it is written"] = speedup(list(map(sum, alone)), list(map(sum, times["asynchronous"])))
    return found


def memory(directory: Path, size: int) -> dict[str, float]:
    """Peak memory of a rank while two ranks load a one-rank checkpoint, in units of all its tensors."""
    shape = (2048, size // (4 * 2048 * 8))
    names = [f"model/layers.{i}.weight" for i in range(8)]
    Checkpointer(directory).save(1, {name: ShardedTensorRef.whole(torch.randn(shape)) for name in names}, {})

    def rank_main(rank: int, world_size: int, dim: int) -> int:
        own = [n // world_size if i == dim else n for i, n in enumerate(shape)]
        at = tuple(rank * n if i == dim else 0 for i, n in enumerate(own))
        state = {name: ShardedTensorRef(shape, torch.float32, [(at, torch.zeros(own))]) for name in names}
        checkpointer = Checkpointer(directory, groups=ParallelGroups.create(RankGrid(world_size=world_size)))
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        checkpointer.load(state)
        return _resident("VmHWM") - before

    tensor = shape[0] * shape[1] * 4
    return {
        cut: max(run_ranks(rank_main, 2, dim)) / tensor for dim, cut in enumerate(("by rows", "by columns"))
    }


def _resident(kind: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{kind}:")[2].split()[0]) * 1024


def test_save(benchmark, tmp_path):
    """Saving 64 MiB."""
    savers = Storages(tmp_path, make_state(1 << 26)).savers()
    times = in_turn({name: savers[name] for name in ("raw", "fastmp")}, 1 if benchmark.disabled else 5)
    benchmark.extra_info["of raw"] = speedup(times["fastmp"], times["raw"])
    benchmark.pedantic(savers["fastmp"], rounds=5)


def _asleep(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    time.sleep(1.0)
    return torch.stack([param.flatten()[0] for param in model.parameters()]).sum(), torch.tensor(1)


def _trainer(config: GPTConfig, directory: Path, name: str, asleep: bool) -> Trainer:
    batch = 8
    return Trainer(
        GPT(config),
        OneBatch(batch, config.max_seq_len, config.vocab_size, seed=1),
        _asleep if asleep else token_loss,
        TrainConfig(global_batch_size=batch, run_dir=str(directory), name=name, eval_interval=0),
        optimizer=OptimizerConfig(lr=1e-4),
        checkpoint=CheckpointConfig(interval=1, keep=1, asynchronous=name == "asynchronous"),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_checkpoint", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument("--dir", type=Path, help="a directory on the file system to measure")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        rows = transfers(Path(folder), int(options.gib * 2**30), options.rounds)
        for row in rows:
            print(
                f"{row['what']:<6} {row['by']:<14} {row['GB/s']:6.2f} GB/s {row['of raw']:6.2f} of raw",
                flush=True,
            )
    found = {}
    for name in ("asleep", "on all cores"):
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            step = steps(Path(folder), interval=3, count=options.rounds, asleep=name == "asleep")
        found[name] = step
        print(
            f"a step ({name}) of {step['step ms']:.0f} ms, {step['state MiB']:.0f} MiB to save, takes",
            end=" ",
        )
        print(
            f"{step['asynchronous']:.2f} times as long when it saves, {step['synchronous']:.2f} if it waits;"
        )
        print(f"it and the next two together take {step['until it is written']:.2f} times as long")
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        taken = memory(Path(folder), 1 << 29)
        print("loading shards of a rank takes, beside its tensors,", end=" ")
        print(", ".join(f"{tensors:.2f} tensors of the whole model {cut}" for cut, tensors in taken.items()))
    if options.out:
        result = {**environment("cpu"), "gib": options.gib, "rows": rows, "steps": found, "tensors": taken}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
