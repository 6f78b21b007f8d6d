"""The training runs of soak scripts: recipes whose steps take milliseconds, and trainers of them."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import random
import signal
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from fastmp.apps import train_main as main
from fastmp.config import Recipe
from fastmp.config.recipe import parse_arguments
from fastmp.distributed.runtime import Runtime
from fastmp.training.data.corpus import build
from fastmp.training.trainer import Trainer

MODEL = {
    "model.num-layers": 4,
    "model.hidden-size": 16,
    "model.num-heads": 4,
    "model.max-seq-len": 16,
    "model.vocab-size": 257,
    "data.seq-len": 16,
    "data.micro-batch-size": 2,
    "train.global-batch-size": 8,
    "train.steps": 1000,
    "train.eval-interval": 0,
    "optimizer.warmup-steps": 2,
    "optimizer.bucket-size": 3000,
}
EXPERTS = {"model.moe.num-experts": 4, "model.moe.expert-ffn-hidden-size": 16, "model.moe.aux-loss": 0.01}
LAYOUTS = {  # ranks, and the options that divide the work between them
    "1 rank": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "ep2": (2, {"ep": 2, **EXPERTS}),
    "tp2 x dp2": (4, {"tp": 2}),
    "pp2 x ep2": (4, {"pp": 2, "ep": 2, **EXPERTS}),
}


def make_tokens(directory: Path) -> Path:
    """Token files of some thousand bytes, the same ones each time."""
    draw = random.Random(7)
    words = ["".join(draw.choices("aeioulnrst", k=draw.randint(2, 7))) for _ in range(60)]
    (directory / "text.txt").write_text("\n".join(" ".join(draw.choices(words, k=9)) for _ in range(400)))
    return build([str(directory / "text.txt")], directory / "tokens", validation_fraction=0.1)


@contextlib.contextmanager
def workshop() -> Iterator[Path]:
    """A directory with token files, from a process whose forked ranks begin at once."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        make_tokens(home)
        _warm(home)
        yield home


def arguments_of(options: Mapping[str, object]) -> list[str]:
    """The command line of `options` by name; None is a flag without a value."""
    pairs = ((f"--{name}", value) for name, value in options.items())
    return [part for name, value in pairs for part in ((name,) if value is None else (name, str(value)))]


def make_recipe(tokens: Path, run_dir: Path, **options: object) -> Recipe:
    return parse_arguments(arguments_of({**MODEL, "data.path": tokens, "train.run-dir": run_dir, **options}))


def make_runtime(rank: int, world_size: int) -> Runtime:
    return Runtime(rank=rank, world_size=world_size, local_rank=rank, device=torch.device("cpu"))


def make_trainer(recipe: Recipe, runtime: Runtime) -> Trainer:
    return main.make_trainer(recipe, runtime)[1]


def _warm(home: Path) -> None:
    """Import what a run imports."""
    for layout in ("1 rank", "ep2"):
        options = {key: value for key, value in LAYOUTS[layout][1].items() if "." in key}
        recipe = make_recipe(home / "tokens", home / "warm", **options)
        trainer = make_trainer(recipe, make_runtime(0, 1))
        trainer.train_step()
        trainer.save()
        trainer.resume()
        trainer.saving.checkpointer.close()


def state_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of this rank's parameters, buffers and optimizer state."""
    trainer.optimizer.gather.wait()
    found = {f"model/{name}": tensor for name, tensor in trainer.model.state_dict().items()}
    for name, entries in trainer.optimizer.state_dict()["state"].items():
        found |= {f"optimizer/{name}/{key}": tensor for key, tensor in entries.items()}
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def digest(trainer: Trainer) -> str:
    """A hash of all that `state_of` returns, of the optimizer's counts and of the random state."""
    counts = trainer.optimizer.state_dict()
    found = hashlib.sha256(f"{int(counts['step'])} {int(counts['skipped_steps'])}".encode())
    for name, tensor in sorted(state_of(trainer).items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    found.update(torch.get_rng_state().numpy().tobytes())
    for name, state in sorted(trainer.rng.states().items()):
        found.update(name.encode() + state.cpu().numpy().tobytes())
    return found.hexdigest()[:16]


def kill_after(seconds: float) -> None:
    """Send SIGKILL to this process after so many seconds, from a process that ends with it."""
    victim = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process that has threads
        pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() == victim:
            time.sleep(seconds)
            os.kill(victim, signal.SIGKILL)
        os._exit(0)
