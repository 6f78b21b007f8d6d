"""FP8 weights gathered as bytes: training is bitwise that of a run which gathers them in train.dtype."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
from feature_table import FP8, FP8_GATHERED, RAGGED, batches, check_each, groups_on, results_of
from graphed_trainers import CONFIG as GRAPHED
from marks import full
from train_tools import Samples
from trainer_tools import MICRO_BATCH, make_groups, make_trainer

from fastmp.config import CheckpointConfig, GraphConfig, ParallelConfig
from fastmp.cuda_graphs.function_graph import FunctionGraph
from fastmp.optim.flat_layout import Buffer
from fastmp.tensor_parallel import fp8_linear
from fastmp.testing.parallel import late_gathers
from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint.storage import CheckpointReader
from fastmp.training.replicas import ReplicaError

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"config": FP8_GATHERED, "global_batch_size": 2 * MICRO_BATCH, "fp8": FP8}
LATER = replace(RAGGED, overlap=False)
SMALL = replace(RAGGED, states="small", grad_dtype="bfloat16")
ONE = ParallelConfig()


def gathered_in_dtype():
    """Gather FP8 weights as all others."""
    return mock.patch.object(Buffer, "gathers_fp8", property(lambda self: False))


def numbers(trainer, steps):
    """All numbers of some steps and of an evaluation among them, and this rank's master weights."""
    seen = []
    for step in range(steps):
        result = trainer._train_step()  # parameters come while the next one runs
        seen += [result.loss, result.grad_norm]
        if step == 1:
            seen.append(torch.tensor(trainer.evaluate().loss))
    trainer.optimizer.gather.wait()
    names = trainer.optimizer.parameters
    return [*seen, *(trainer.optimizer.master(name).detach().clone() for name in names)]


def check_same(rank, world, options, text):
    """Train both ways; return the names of the weights that were gathered in FP8."""
    layout, groups = groups_on(text)
    found = []
    for gathers in (gathered_in_dtype(), nullcontext()):
        with gathers:
            trainer = make_trainer(groups, layout, **SIZES | {"optimizer": RAGGED} | options)
            found.append(numbers(trainer, steps=4 if trainer.graphs else 3))
    expected, mine = found
    assert len(expected) == len(mine)
    for each, other in zip(expected, mine, strict=True):
        assert torch.equal(each, other)
    trainer.check_replicas()
    if trainer.graphs is not None:
        assert trainer.graphs.failure is None and trainer.graphs.num_graphs > 0
    return sorted(trainer.grads.gathered_in_fp8)


BFLOAT16, FLOAT32 = {"dtype": torch.bfloat16}, {"dtype": torch.float32}
LAYERS = GraphConfig(enabled=True, warmup=1)
GRAPHS = {"layers": LAYERS, **{scope: replace(LAYERS, scope=(scope,)) for scope in ("full", "full_step")}}
MOE = replace(GRAPHED.moe, expert_ffn_hidden_size=32, dispatcher="symmetric", activation_stash=0.0)
IN_GRAPHS = replace(GRAPHED, hidden_size=32, num_heads=2, moe=MOE, num_layers=2)


def graphed(scope):
    options = {"config": IN_GRAPHS, "data": Samples(4), "optimizer": None, "graphs": GRAPHS[scope]}
    return options | FLOAT32 | {"global_batch_size": 32}


QUICK = [
    (BFLOAT16 | {"optimizer": LATER}, "2"),
    (BFLOAT16, "4 ep=2"),
    (FLOAT32 | {"optimizer": replace(RAGGED, name="muon")}, "2"),
    (graphed("layers"), "2 ep=2"),
]
FULL = [
    (BFLOAT16, "2"),
    (FLOAT32, "4"),
    (BFLOAT16 | {"optimizer": LATER}, "4"),
    (BFLOAT16 | {"optimizer": SMALL}, "2"),
    (BFLOAT16, "4 tp=2 sp recompute"),
    (FLOAT32, "4 pp=2 schedule=zero_bubble"),
    (BFLOAT16, "2 cp=2"),
    (BFLOAT16 | {"overlap_experts": True}, "4 ep=2"),
    *((graphed(scope), "2 ep=2") for scope in ("full_step", "full")),
]


def check_gathered(case, ranks):
    """Muon's matrices are gathered in their dtype."""
    optimizer = case[0].get("optimizer") or RAGGED
    assert all(bool(gathered) == (optimizer.name != "muon") for gathered in ranks)


@pytest.mark.parametrize(("world", "cases"), [*batches("quick", QUICK), *batches("full", FULL)])
def test_training_is_bitwise_that_of_weights_in_their_dtype(world, cases):
    check_each(cases, results_of(check_same, world, cases), check_gathered)


@pytest.mark.parametrize("overlap", [True, False])
def test_no_copy_is_used_before_it_is_there(overlap):
    @late_gathers()
    def late(rank, world):
        return check_same(rank, world, BFLOAT16 | {"optimizer": replace(RAGGED, overlap=overlap)}, "2")

    assert all(run_ranks(late, 2))


def test_weights_changed_between_graphed_steps_are_quantised():
    """A replay does not begin with quantising; who changes weights meanwhile is seen by their versions."""

    @mock.patch.object(fp8_linear, "quantize_weight", wraps=fp8_linear.quantize_weight)
    def rank_main(rank, world, quantised):
        options = {"config": replace(IN_GRAPHS, moe=None), "data": Samples(4), "global_batch_size": 32}
        options |= FLOAT32 | {"fp8": FP8}
        made = []
        for graphs in (None, GRAPHS["full_step"]):
            quantised.reset_mock()
            trainer = make_trainer(make_groups(world, ONE), ONE, graphs=graphs, **options)
            losses = []
            for step in range(5):
                if step == 3:
                    state = trainer.model.state_dict()
                    generator = torch.Generator().manual_seed(1)
                    noise = {n: 0.1 * torch.randn(w.shape, generator=generator) for n, w in state.items()}
                    trainer.model.load_state_dict(noise)
                losses.append(trainer.train_step().loss.item())
            made.append(losses)
            assert quantised.call_count == 2 * len(trainer.grads.gathered_in_fp8), "at first, and then"
        assert isinstance(trainer.graphs, FunctionGraph) and trainer.graphs.num_graphs == 1
        return made

    for eager, graphed in run_ranks(rank_main, 2):
        assert eager == graphed and eager[3] > eager[2] + 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, *full([torch.float32])])
def test_checkpoints_hold_the_numbers_of_owners(dtype, tmp_path):
    """Saved in FP8: what a run saves that gathers in its dtype. It resumes on any ranks, in any precision."""
    options = SIZES | {"dtype": dtype, "checkpoint": CheckpointConfig(), "optimizer": RAGGED}

    def save(rank, world):
        groups, saved = make_groups(world, ONE), []
        for name, gathers in (("dtype", gathered_in_dtype()), ("fp8", nullcontext())):
            with gathers:
                trainer = make_trainer(groups, run_dir=str(tmp_path / name), **options)
                for _ in range(2):
                    trainer.train_step()
                saved.append(trainer.save())
        assert trainer.grads.gathered_in_fp8
        return saved

    files = [CheckpointReader(path) for path in run_ranks(save, 2, timeout=120)[0]]
    names = [sorted(name for name in each.manifest.tensors if "random/" not in name) for each in files]
    assert names[0] == names[1] and any(name.startswith("model/") for name in names[0])
    for name in names[0]:
        assert torch.equal(*(each.tensor(name) for each in files)), name

    def resume(rank, world):
        losses = []
        for name in ("dtype", "fp8"):
            for fp8 in (FP8, None):
                run_dir = str(tmp_path / name)
                trainer = make_trainer(
                    make_groups(world, ONE), seed=99, run_dir=run_dir, **options | {"fp8": fp8}
                )
                assert trainer.resume()
                losses.append([trainer.train_step().loss.item() for _ in range(2)])
        return losses

    for world in (1, 2):
        for of_dtype, exact, of_fp8, also_exact in run_ranks(resume, world, timeout=120):
            assert of_dtype == of_fp8 != exact == also_exact


def test_a_replica_with_another_copy_is_found():
    def rank_main(rank, world):
        trainer = make_trainer(make_groups(world, ONE), **SIZES | BFLOAT16)
        trainer.check_replicas()  # before any step
        trainer.train_step()
        trainer.check_replicas()
        name, copies = next(iter(trainer.grads.gathered_in_fp8.items()))
        if rank == 1:
            copies.tensors[0].view(torch.uint8).view(-1)[3] ^= 1
        with pytest.raises(ReplicaError, match=f"the same FP8 weight {name}"):
            trainer.check_replicas()
        return True

    assert all(run_ranks(rank_main, 2))
