"""A process group that somebody else made, and the device of a rank."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import run_launcher

import fastmp
from fastmp.config import Environment
from fastmp.distributed.runtime import Runtime, _device
from fastmp.testing.ranks import run_ranks


def adopt(rank: int, world_size: int, variables: dict[str, int]) -> tuple[Runtime, list[int]]:
    """What `init` makes of the harness's process group, which is there after `close`, too."""
    os.environ.update({name: str(value + rank) for name, value in variables.items()})
    runtime = fastmp.init()
    runtime.close()
    ranks = [None] * world_size
    dist.all_gather_object(ranks, runtime.rank)
    return runtime, ranks


@pytest.mark.parametrize(
    ("variables", "first"),
    [({}, 0), ({"RANK": 0, "LOCAL_RANK": 4}, 4), ({"RANK": 7, "LOCAL_RANK": 7}, 0), ({"RANK": 0}, 0)],
    ids=["no variables", "variables of this group", "variables of another job", "no LOCAL_RANK"],
)
def test_a_process_group_of_others_is_adopted_and_left_alone(monkeypatch, variables, first):
    """Local ranks are LOCAL_RANK where that is about these ranks; else ranks of one host are counted."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert run_ranks(adopt, 3, variables) == [
        (Runtime(rank, 3, first + rank, torch.device("cpu")), [0, 1, 2]) for rank in range(3)
    ]


def adopted_gpu(rank: int, world_size: int, backends: str, backend: str | None) -> str:
    """The device of an adopted group with these `backends` on a machine with GPUs, as far as torch says."""
    torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 5
    dist.get_backend_config = lambda: backends
    try:
        return str(fastmp.init(backend=backend).device)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("backends", "backend", "result"),
    [
        ("cpu:gloo,cuda:nccl", None, "cuda:5"),
        ("cuda:nccl", None, "cuda:5"),
        ("cpu:gloo,cuda:nccl", "gloo", "cpu"),
        ("cpu:gloo,cuda:gloo", None, "cpu"),
        (
            *("cuda:nccl", "gloo"),
            "fastmp.init: torch.distributed is already initialised with cuda:nccl, and gloo serves no CPU "
            "tensors there; initialise it with 'cpu:gloo,cuda:nccl', or with 'gloo' where there is no GPU",
        ),
        (
            *("cpu:gloo,cuda:gloo", "nccl"),
            "fastmp.init: torch.distributed is already initialised with cpu:gloo,cuda:gloo, and nccl serves "
            "no CUDA tensors there; initialise it with 'cpu:gloo,cuda:nccl', or with 'gloo' where there is "
            "no GPU",
        ),
    ],
)
def test_the_device_of_an_adopted_group_is_one_that_its_backends_serve(backends, backend, result):
    assert run_ranks(adopted_gpu, 1, backends, backend) == [result]


@pytest.mark.parametrize(("name", "index"), [("srun", 0), ("", None)])
def test_a_rank_of_srun_that_sees_one_gpu_takes_it(monkeypatch, name, index):
    """srun --gpus-per-task=1 shows every rank a GPU of its own, as number 0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    env = Environment(rank=3, world_size=4, local_rank=3, launcher=name)
    if index is None:
        with pytest.raises(ValueError, match="LOCAL_RANK is 3, but torch sees 1 GPU"):
            _device(env, None)
        return
    assert _device(env, None) == torch.device("cuda", index) and chosen == [torch.device("cuda", index)]


INITIALISE = {
    "accelerate": "from accelerate import Accelerator; Accelerator(cpu=True)",
    "lightning": "from lightning.fabric import Fabric; "
    "Fabric(accelerator='cpu', devices=2, strategy='ddp').launch()",
}
ADOPT = """
import torch, torch.distributed as dist
import fastmp
from fastmp.distributed import ParallelGroups, RankGrid
runtime = fastmp.init()
group = ParallelGroups.create(RankGrid(world_size=runtime.world_size, tp=2)).tp
dist.all_reduce(total := torch.tensor(runtime.rank + 1), group=group)
runtime.close()
assert (runtime.world_size, total.item(), dist.is_initialized()) == (2, 3, True)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("library", INITIALISE)
def test_the_group_that_a_library_has_made_is_adopted(tmp_path, library):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library}")
    program = tmp_path / "program.py"
    program.write_text(f"{INITIALISE[library]}\n{ADOPT}")
    command = [sys.executable, "-m", "fastmp", "launch", "-n", "2", str(program)]
    environment = {**os.environ, "PYTHONPATH": str(Path(fastmp.__file__).parents[1])}
    run_launcher(command, environment, 120)
