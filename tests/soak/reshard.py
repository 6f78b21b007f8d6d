"""Checkpoints of every layout, loaded into every other one.

A run of two steps saves at its layout; a run at another layout, made from another seed, loads that and saves
it again at once. Both checkpoints must be the same tensors, bit for bit. The next five steps of both runs
must have the same losses, but for the order of sums in float32. With small states, steps also round at
random, by where in its buffer an element lies.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import tiny
import torch.distributed.checkpoint  # here, so that no forked rank has to import it
from soak import Outcome, Progress, main

from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint.diff import differences

STEPS = 5
BOUND = 1e-4  # of the losses of these steps, in nats
SHARED = {
    "1 rank": (1, {}),
    "dp2": (2, {}),
    "dp2, replicated state": (2, {"optimizer.no-shard": None}),
    "pp2 x vpp2": (2, {"pp": 2, "vpp": 2}),
    "cp2": (2, {"cp": 2}),
}
DENSE = SHARED | {
    "tp2": (2, {"tp": 2, "parallel.sequence-parallel": None}),
    "tp2 x pp2": (4, {"tp": 2, "pp": 2}),
    "dp4": (4, {"optimizer.bucket-size": 500}),
}
EXPERTS = SHARED | {
    "tp2 x ep2, symmetric": (
        2,
        {
            **{"tp": 2, "ep": 2, "etp": 1, "parallel.sequence-parallel": None},
            "model.moe.dispatcher": "symmetric",
        },
    ),
    "tp2 x pp2 x ep2": (4, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
    "etp2 x ep2": (4, {"tp": 2, "ep": 2, "etp": 2, "optimizer.bucket-size": 500}),
}
ROTARY = {
    "model.norm": "rmsnorm",
    "model.position": "rope",
    "model.num-kv-heads": 2,
    "model.no-linear-bias": None,
    "model.no-tie-embeddings": None,
}
MODELS = {  # options, layouts, whether the next steps are compared
    "gpt-2": ({}, DENSE, True),
    "llama, muon": ({**ROTARY, "model.activation": "swiglu", "optimizer.name": "muon"}, DENSE, True),
    "mixtral": ({**ROTARY, "model.activation": "swiglu", **tiny.EXPERTS}, EXPERTS, True),
    "qwen3-moe, small states": (
        {
            **ROTARY,
            **tiny.EXPERTS,
            "model.activation": "swiglu",
            "model.qk-norm": None,
            "model.moe.score": "sigmoid",
            "model.moe.expert-bias": None,
            "model.moe.shared-expert-ffn-hidden-size": 16,
            "optimizer.states": "small",
            "train.dtype": "bfloat16",
        },
        EXPERTS,
        False,
    ),
}


def run(quick: bool) -> Outcome:
    """Every model at its layouts; quick: one model, at two of them."""
    outcome = Outcome()
    for name in ["mixtral"] if quick else MODELS:
        options, layouts, follows = MODELS[name]
        if quick:
            layouts = {each: layouts[each] for each in ("tp2 x ep2, symmetric", "pp2 x vpp2")}
        with tempfile.TemporaryDirectory() as folder:
            _run_model(name, options, layouts, follows, Path(folder), outcome)
    return outcome


def _run_model(name, options, layouts, follows, folder, outcome):
    tokens = tiny.make_tokens(folder)

    def trainer_of(rank, world_size, layout, run, seed):
        named = {**options, **layout, "train.name": run, "train.seed": seed}
        recipe = tiny.make_recipe(tokens, folder / "runs", **named)
        return tiny.make_trainer(recipe, tiny.make_runtime(rank, world_size))

    def losses(trainer):
        return [trainer.train_step().loss.item() for _ in range(STEPS if follows else 0)]

    def save(rank, world_size, layout, run):
        trainer = trainer_of(rank, world_size, layout, run, 1)
        for _ in range(2):
            trainer.train_step()
        return trainer.save(), losses(trainer)

    def load(rank, world_size, layout, sources, target):
        found = []
        for number, path in enumerate(sources):
            trainer = trainer_of(rank, world_size, layout, f"to-{target}-{number}", 2)
            trainer.resume(path)
            found.append((trainer.save(), losses(trainer)))
        return found

    progress = Progress(name, len(layouts) ** 2)
    saved = [_ranks(save, world, layout, f"from-{i}") for i, (world, layout) in enumerate(layouts.values())]
    sources, equal, worst = [path for path, _ in saved], 0, 0.0
    for number, (target, (world, layout)) in enumerate(layouts.items()):
        for source, (path, expected), (again, followed) in zip(
            layouts, saved, _ranks(load, world, layout, sources, number), strict=True
        ):
            apart = max((abs(a - b) for a, b in zip(expected, followed, strict=True)), default=0.0)
            worst = max(worst, apart)
            differing = list(differences(path, again))
            equal += not differing
            if differing or apart > BOUND:
                what = differing[0] if differing else f"losses apart by {apart:.2g}"
                outcome.failures.append(f"{name}, {source} to {target}: {what}")
        progress.at((number + 1) * len(layouts))
    others = len(layouts) * (len(layouts) - 1)
    outcome.rows.append(
        {
            "model": name,
            "layouts": len(layouts),
            "ordered pairs": others,
            "with itself": len(layouts),
            "equal bit for bit": equal,
            "losses apart by": f"{worst:.1e}" if follows else "",
        }
    )


def _ranks(function, world_size, *arguments):
    """Return the result of the first rank."""
    return run_ranks(function, world_size, *arguments, timeout=300)[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main("reshard", run))
