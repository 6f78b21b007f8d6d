"""Resident memory over thousands of steps that also save; threads and files over many process groups.

Memory is the floor of each window of steps, because a save raises it for a moment; the slope is that of a
line through these floors, after a warm-up. It must stay below 1 KiB a step. Joining a job, training in it and
leaving it, again and again, must leave as many threads and open files as the first times did.
"""

from __future__ import annotations

import gc
import os
import resource
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tiny
import torch.distributed as dist
from soak import Outcome, main

from fastmp.distributed.runtime import init
from fastmp.testing.ranks import run_ranks
from fastmp.training.heap import map_large_blocks

SLOPE = 1024  # bytes a step
WINDOW = 50  # steps
LARGE = {  # activations of megabytes, as in configs/gpt-small.toml
    "model.num-layers": 2,
    "model.hidden-size": 192,
    "model.num-heads": 6,
    "model.max-seq-len": 256,
    "data.seq-len": 256,
    "data.micro-batch-size": 4,
    "train.global-batch-size": 4,
    "optimizer.bucket-size": 10**6,
}
CASES = {  # ranks, options
    "1 rank, activations of megabytes": (1, LARGE),
    "1 rank": (1, {}),
    "tp2": tiny.LAYOUTS["tp2"],
    "pp2 x ep2": tiny.LAYOUTS["pp2 x ep2"],
}


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def slope(memory: Sequence[int], warm_up: int) -> float:
    """Bytes a step of a line through the floors of windows after `warm_up` steps."""
    floors = [min(memory[i : i + WINDOW]) for i in range(warm_up, len(memory) - WINDOW + 1, WINDOW)]
    return float(np.polyfit(np.arange(len(floors)) * WINDOW, floors, 1)[0])


def train(
    rank: int, world_size: int, tokens: Path, home: Path, options: dict, steps: int, every: int
) -> list[int]:
    """Resident memory of this rank before each step of a run with checkpoints, evaluations and a log."""
    map_large_blocks()
    options = {
        **options,
        "train.steps": steps,
        "train.eval-interval": 5 * every,
        "checkpoint.interval": every,
    }
    recipe, memory = tiny.make_recipe(tokens, home, **options), []
    trainer = tiny.make_trainer(recipe, tiny.make_runtime(rank, world_size))
    trainer.train(before_step=lambda step: memory.append(resident()))
    return memory


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def join_and_leave(
    rank: int, world_size: int, tokens: Path, home: Path, ports: list[int]
) -> list[tuple[int, int]]:
    """(threads, open files) of this rank after each of several jobs of two steps and a checkpoint."""
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": str(world_size)}
    found = []
    for number, port in enumerate(ports):
        os.environ["MASTER_PORT"] = str(port)
        runtime = init()
        options = tiny.LAYOUTS[("ep2", "pp2")[number % 2]][1]
        trainer = tiny.make_trainer(tiny.make_recipe(tokens, home, **options), runtime)
        for _ in range(2):
            trainer.train_step()
        trainer.save()
        trainer.close()
        del trainer
        gc.collect()
        runtime.close()
        found.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return found


def run(quick: bool) -> Outcome:
    outcome, steps, jobs = Outcome(), 2 * WINDOW if quick else 2000, 3 if quick else 51
    with tiny.workshop() as home:
        tokens = home / "tokens"
        for name, (ranks, options) in CASES.items():
            if quick and name != "1 rank":
                continue
            memories = run_ranks(train, ranks, tokens, home / name, options, steps, 20, timeout=3000)
            slopes = [slope(memory, 0 if quick else steps // 3) for memory in memories]
            grown = max(max(memory) - memory[steps // 3] for memory in memories)
            row = {"run": name, "steps": steps, "saves": steps // 20, "bytes a step": round(max(slopes))}
            outcome.rows.append(row | {"peak over warm, MiB": round(grown / 2**20, 1)})
            if not quick and max(slopes) > SLOPE:  # too few windows else
                outcome.failures.append(f"{name}: resident memory grows by {max(slopes):.0f} bytes a step")
            print(outcome.rows[-1], flush=True)
        counts = run_ranks(join_and_leave, 2, tokens, home, free_ports(jobs), timeout=600)
        for rank, seen in enumerate(counts):
            first, last = seen[0], seen[-1]  # both of the layout with most groups
            row = {"run": f"{jobs} jobs, rank {rank}", "threads": f"{first[0]} -> {last[0]}"}
            outcome.rows.append(row | {"open files": f"{first[1]} -> {last[1]}"})
            if last[0] > first[0] or last[1] > first[1]:
                outcome.failures.append(f"rank {rank}: threads and files grow: {seen}")
    return outcome


if __name__ == "__main__":
    sys.exit(main("memory", run))
