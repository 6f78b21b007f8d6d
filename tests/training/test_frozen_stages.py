"""Ranks without a parameter to train: a frozen pipeline stage trains, saves and resumes as one rank does."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from marks import full
from train_tools import DENSE, EXPERTS
from trainer_tools import BUCKETS, check_resume, make_groups, make_trainer, whole

from fastmp.config import CheckpointConfig, GraphConfig, ParallelConfig
from fastmp.config.precision import Fp8Recipe
from fastmp.optim.adamw import AdamW
from fastmp.optim.grad_buffers import GradBuffer
from fastmp.optim.muon import Muon
from fastmp.testing.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

UNTIED = replace(DENSE, tie_embeddings=False)
MIXED = replace(EXPERTS, tie_embeddings=False)
TABLE = "word_embedding.weight"


def of_first(name):
    """Return True for a parameter of the first of two stages of a model of four layers."""
    return bool(re.match(r"(word|position)_embedding|layers\.[01]\.", name))


def of_last(name):
    return not of_first(name)


def but_head(name):
    """Return True for all but the output layer, as in fine-tuning of a head."""
    return not name.startswith("output_layer")


def steps_of(trainer, steps=3):
    """Return the numbers of some steps, and this rank's parameters, whole."""
    curve = []
    for _ in range(steps):
        result = trainer._train_step()
        curve.append([result.loss.item(), result.grad_norm.item(), result.lr.item()])
    trainer.optimizer.gather.wait()
    trainer.check_replicas()
    assert trainer.optimizer.counts()["steps"] == steps
    return curve, whole(trainer, lambda param: param)


PP = {"pp": 2}
FP8 = {"config": replace(UNTIED, hidden_size=64, ffn_hidden_size=128), "fp8": Fp8Recipe(32)}
FLOAT16 = {"dtype": torch.float16, "optimizer": replace(BUCKETS, loss_scale=16.0)}
CASES = {  # world, layout, options of make_trainer, tolerance
    "first": (2, PP, {"frozen": of_first}, 1e-10),
    "last": (2, PP, {"frozen": of_last}, 1e-10),
    "all but the head": (2, PP, {"frozen": but_head}, 1e-10),
    "tied": (2, PP, {"config": DENSE, "frozen": lambda name: of_first(name) or name == TABLE}, 1e-10),
    "muon": (2, PP, {"frozen": of_first, "optimizer": replace(BUCKETS, name="muon")}, 1e-8),
    "sharded": (4, PP, {"frozen": of_first}, 1e-10),
    "sharded muon": (4, PP, {"frozen": of_last, "optimizer": replace(BUCKETS, name="muon")}, 1e-8),
    "replicated": (4, PP, {"frozen": of_first, "optimizer": replace(BUCKETS, shard=False)}, 1e-10),
    "experts": (4, {"pp": 2, "ep": 2}, {"frozen": of_first, "config": MIXED}, 1e-10),
    "tensor parallel": (4, {"pp": 2, "tp": 2, "sequence_parallel": True}, {"frozen": of_last}, 1e-10),
    "zero bubble": (2, PP | {"schedule": "zero_bubble"}, {"frozen": of_first}, 1e-10),
    "graphs": (2, PP, {"frozen": of_first, "graphs": GraphConfig(enabled=True)}, 1e-10),
    "small states": (
        4, PP,
        {"frozen": of_first, "optimizer": replace(BUCKETS, states="small"), "dtype": torch.bfloat16}, 0.02,
    ),
    "FP8 gather": (4, PP, {"frozen": of_first, "dtype": torch.bfloat16, **FP8}, 0.02),
    "float16, first": (2, PP, {"frozen": of_first, **FLOAT16}, 0.02),
    "float16, last": (2, PP, {"frozen": of_last, **FLOAT16}, 0.02),
}  # fmt: skip
QUICK = {
    2: ("tied", "float16, last"),
    4: ("sharded muon",),
}


def made(world, layout, options, **more):
    options = {"config": UNTIED, "optimizer": BUCKETS, **options, **more}
    layout = ParallelConfig(**layout)
    return make_trainer(make_groups(world, layout), layout, **options)


def check_frozen(world, names):
    """Train each case on all ranks and on one."""

    def rank_main(rank, world_size):
        found = []
        for name in names:
            _, layout, options, _ = CASES[name]
            trainer = made(world_size, layout, options)
            found.append((*steps_of(trainer), len(trainer.grads.parameters), trainer.scaler is not None))
            trainer.close()
        return found

    results = run_ranks(rank_main, world, timeout=180)
    for number, name in enumerate(names):
        _, _, options, tolerance = CASES[name]
        options = {key: value for key, value in options.items() if key != "graphs"}
        expected, params = steps_of(made(1, {}, options))
        mine = [result[number] for result in results]
        assert 0 in [num_trained for _, _, num_trained, _ in mine], name
        assert {scales for *_, scales in mine} == {options.get("dtype") == torch.float16}, name
        for curve, found, *_ in mine:
            close = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(torch.tensor(curve), torch.tensor(expected), **close, msg=name)
            for key, param in found.items():
                torch.testing.assert_close(param, params[key], **close, msg=f"{name}: {key}")


@pytest.mark.parametrize("world", [2, 4])
def test_a_frozen_stage_trains_as_one_rank_with_these_parameters_frozen(world):
    check_frozen(world, QUICK[world])


@pytest.mark.full
@pytest.mark.parametrize("world", [2, 4])
def test_frozen_stages_on_further_layouts(world):
    check_frozen(world, [name for name in CASES if CASES[name][0] == world and name not in QUICK[world]])


@pytest.mark.parametrize(
    ("frozen", "kind"),
    [
        (of_first, "adamw"),
        *full([(of_last, "adamw"), (of_first, "muon"), (of_first, "small"), (of_last, "fp8")]),
    ],
)
def test_saving_resuming_and_resharding(tmp_path, frozen, kind):
    """Bitwise on the same layout; the checkpoint also continues on one rank, and there and back again."""
    optimizer = replace(BUCKETS, name="muon") if kind == "muon" else BUCKETS
    options = {"frozen": frozen, "dtype": torch.float64 if kind in ("adamw", "muon") else torch.bfloat16}
    options |= FP8 if kind == "fp8" else {}
    if kind == "small":
        optimizer = replace(BUCKETS, states="small")
    options |= {"optimizer": optimizer, "checkpoint": CheckpointConfig(keep=0)}
    run_dir = {"run_dir": str(tmp_path)}

    def rank_main(rank, world_size):
        tensors = check_resume(lambda **more: made(world_size, PP, options | run_dir, **more), steps=2)
        trainer = made(world_size, PP, options | run_dir)
        assert trainer.resume() and trainer.step == 1
        return set(tensors), trainer.train_step().loss.item()

    results = run_ranks(rank_main, 4, timeout=180)
    assert not any(frozen(name.split("/")[1]) for names, _ in results for name in names if "exp_avg" in name)
    alone = made(1, {}, options | run_dir)
    assert alone.resume() and alone.step == 1 and alone.optimizer.counts()["steps"] == 1
    close = 1e-8 if options["dtype"] == torch.float64 else 0.02
    assert alone.train_step().loss.item() == pytest.approx(results[0][1], rel=close)
    alone.save()
    expected = alone.train_step().loss.item()

    def again(rank, world_size):
        trainer = made(world_size, PP, options | run_dir)
        assert trainer.resume() and trainer.step == 2 and trainer.optimizer.counts()["steps"] == 2
        return trainer.train_step().loss.item()

    assert run_ranks(again, 2) == pytest.approx([expected] * 2, rel=close)


def test_nothing_to_train_on_any_rank_is_one_error_on_all():
    def rank_main(rank, world_size):
        said = []
        for layout, frozen in (
            (PP, lambda name: True),
            ({"tp": 2}, lambda name: True),
            (PP, lambda name: rank == 0),  # whose table is tied to that of the other one
        ):
            with pytest.raises(ValueError) as error:
                made(world_size, layout, {"config": DENSE, "frozen": frozen})
            said.append(str(error.value))
        return said

    left, right = run_ranks(rank_main, 2)
    assert left == right
    for message in left[:2]:
        assert "all are frozen on every rank" in message
    assert "frozen on one of them only" in left[2]
    with pytest.raises(ValueError, match="all are frozen on every rank"):
        make_trainer(config=DENSE, frozen=lambda name: True)


def test_an_optimizer_without_parameters_counts_steps():
    def rank_main(rank, world_size):
        for kind in (AdamW, Muon):
            frozen = torch.nn.Linear(3, 3).requires_grad_(False)
            grads = GradBuffer(frozen.named_parameters())
            optimizer = kind(grads)
            grads.zero()
            grads.reduce()
            optimizer.step(grad_norm=torch.tensor(1.0))
            optimizer.step(grad_norm=torch.tensor(torch.nan))
            optimizer.step()
            assert grads.first_not_finite(torch.tensor(True)).shape == (0,)
            saved = {name: value.item() for name, value in optimizer.counts().items()}
            assert saved == {"steps": 2, "skipped_steps": 1}
            again = kind(GradBuffer(frozen.named_parameters()))
            again.load_state_dict(optimizer.state_dict())
            assert {name: value.item() for name, value in again.counts().items()} == saved

    run_ranks(rank_main, 2)
