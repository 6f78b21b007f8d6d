"""A training step of a model of experts over ranks, each with its own tokens: ours, and transformers' own.

`fastmp launch -n 2 -m benchmarks.bench_transformers_ranks [--device cuda] [--ep 2] [--out FILE]` prints the
time of forward and backward of the slowest rank (CPU time without a GPU), made in turn in one job, its median
ratio to transformers within a round, and a rank's peak memory: weights, gradients, and the most that a step
holds beside them. transformers shards and dispatches by `DistributedConfig`, with its grouped GEMMs; FSDP2
alone is the same without expert parallelism.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fastmp
from benchmarks.against_transformers import write_rows
from benchmarks.bench_transformers import CASES, tokens_of
from benchmarks.measure import cpu_ms, event_ms, extra_bytes, in_turn, name_of
from fastmp.hf.mesh_loading import from_pretrained

WORKLOADS = ()  # it stands by itself
CASE = "Qwen3-MoE"
OURS, THEIRS, ALONE = "fastmp", "transformers", "transformers, FSDP2 alone"


def save_model(path: Path, device: str) -> None:
    """Write the model that all of them load."""
    import transformers

    name, on_cpu, on_gpu, *_ = CASES[CASE]
    config = getattr(transformers, name)(**(on_gpu if device == "cuda" else on_cpu), use_cache=False)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)


def models_of(path: Path, dtype: torch.dtype, device: str, ep: int) -> dict[str, Any]:
    """{name: its model}, with the same weights, each sharded over all ranks."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    ranks = dist.get_world_size()
    mesh = init_device_mesh(device, (ranks // ep, ep), mesh_dim_names=("dp_shard", "ep"))
    models = {OURS: from_pretrained(path, mesh=mesh, dtype=dtype)}
    for name, experts in ((THEIRS, ep), (ALONE, 1)):
        models[name] = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            experts_implementation="grouped_mm",
            distributed_config=DistributedConfig(fsdp_size=ranks, ep_size=experts),
        )
    return {name: model.train() for name, model in models.items()}


def step(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Forward and backward; returns the gradients, which replace those of the step before."""
    model.zero_grad(set_to_none=True)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def slowest(clock: Callable[..., float], call: Callable[[], Any], device: str) -> float:
    """Time of the slowest rank, all of which start together."""
    dist.barrier()
    time = torch.tensor([clock(call)], device=device)
    dist.all_reduce(time, dist.ReduceOp.MAX)
    return time.item()


def measure(path: Path, dtype: torch.dtype, options: argparse.Namespace) -> list[dict[str, Any]]:
    device = options.device
    models = models_of(path, dtype, device, options.ep)
    tokens = tokens_of(CASE, device).roll(dist.get_rank(), 1)  # other tokens on every rank
    calls = {name: partial(step, model, tokens) for name, model in models.items()}
    norms = {}
    for name, call in calls.items():
        grads = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in call()]
        norms[name] = torch.nn.utils.get_total_norm(grads).item()
    clock = event_ms if device == "cuda" else cpu_ms
    timed = {name: partial(slowest, clock, call, device) for name, call in calls.items()}
    times = in_turn(timed, options.rounds)
    rows = []
    for name, model in models.items():
        for each in models.values():
            each.zero_grad(set_to_none=True)
        gc.collect()
        weights = sum(p.to_local().nbytes if isinstance(p, DTensor) else p.nbytes for p in model.parameters())
        extra = statistics.median(extra_bytes(calls[name], device) for _ in range(3))  # FSDP2 frees at will
        peak = 2 * weights + extra  # gradients are as large as the weights
        ratio = statistics.median(a / b for a, b in zip(times[name], times[THEIRS], strict=True))
        of = {"case": CASE, "dtype": name_of(dtype), "ranks": dist.get_world_size(), "ep": options.ep}
        row = {"by": name, "ms": min(times[name]), "of transformers": ratio}
        rows.append({**of, **row, "peak MiB": peak / 2**20, "grad_norm": norms[name]})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ep", type=int, help="ranks that divide the experts; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="of all rivals in turn")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    options = parser.parse_args()
    runtime = fastmp.init()
    options.ep = options.ep or runtime.world_size
    rows = []
    shared: list[Any] = [tempfile.mkdtemp() if runtime.rank == 0 else None]
    dist.broadcast_object_list(shared)
    path = Path(shared[0])
    if runtime.rank == 0:
        save_model(path, options.device)
        print(f"{'dtype':10}{'':28}{'ms':>10}{'of transformers':>17}{'peak MiB':>10}{'grad norm':>11}")
    dist.barrier()
    for dtype in (torch.float32, torch.bfloat16):
        for row in measure(path, dtype, options):
            if runtime.rank == 0:
                print(
                    f"{row['dtype']:10}{row['by']:28}{row['ms']:10.1f}{row['of transformers']:17.2f}"
                    f"{row['peak MiB']:10.0f}{row['grad_norm']:11.5f}"
                )
            rows.append(row)
    if options.out and runtime.rank == 0:
        write_rows(options.out, options.device, rows)
    runtime.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
