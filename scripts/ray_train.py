"""Train a recipe on the workers of a Ray cluster.

python scripts/ray_train.py WORKERS --recipe FILE ...     (options of fastmp train)
"""

import sys

import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def worker(config: dict[str, list[str]]) -> None:
    """Ray Train has made the process group, which init adopts."""
    import fastmp
    from fastmp.apps.train_main import train
    from fastmp.config.recipe import parse_arguments

    train(parse_arguments([*config["arguments"], "--resume", "auto"]), fastmp.init())


has_gpus = torch.cuda.is_available()
TorchTrainer(
    worker,
    train_loop_config={"arguments": sys.argv[2:]},
    torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if has_gpus else "gloo"),
    scaling_config=ScalingConfig(num_workers=int(sys.argv[1]), use_gpu=has_gpus),
    run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
).fit()
