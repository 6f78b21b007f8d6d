"""A GPT with experts in training: loads, evaluation, and steps that never wait for the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from feature_table import DROPOUT, FEATURES, one_rank
from marks import full
from torch._subclasses.fake_tensor import FakeTensorMode
from train_tools import NoDeviceCopies, Samples, check_on_a_gpu
from trainer_tools import (
    MICRO_BATCH,
    OPTIMIZER,
    OnDevice,
    make_groups,
    make_trainer,
)

from fastmp.apps.generation.batched import generate
from fastmp.apps.generation.trained_models import load_model, open_weights
from fastmp.config import ParallelConfig, TrainConfig
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import Placement
from fastmp.nn.gpt import GPT
from fastmp.testing.ranks import run_ranks
from fastmp.training.language import token_loss

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = FEATURES["shared expert"].options
CONFIG = SIZES["config"]
MOE = CONFIG.moe


def test_one_rank_balances_and_learns():
    curve, counts, grads, _, biases, _ = one_rank("shared expert")
    tokens = 2 * MICRO_BATCH * 16
    assert torch.tensor(counts).sum(-1).eq(MOE.top_k * tokens).all()
    assert curve[-1][0] < curve[0][0] and all(aux > 0 for _, _, aux, *_ in curve)
    assert len(biases) == 2 and all(
        0.05 <= bias.abs().max() <= 0.05 * len(curve) + 1e-6 for bias in biases.values()
    )
    experts = [name for name in grads if ".experts." in name]
    assert experts and all(grads[name].any() for name in experts)


def test_a_checkpoint_whose_router_had_no_gradient_opens_and_is_not_trained_on(tmp_path):
    """Runs of `top_k` 1 with normalised weights were trained before `Trainer` refused them."""
    balancing = {"aux_loss": 0.0, "sequence_aux_loss": 0.0}
    config = replace(CONFIG, moe=replace(MOE, top_k=1, **balancing))
    options = {"config": config, "run_dir": str(tmp_path), "name": "old"}
    with pytest.raises(
        ValueError, match="Router: top_k 1 with normalize_topk gives every expert the weight 1"
    ):
        make_trainer(**options)
    trainer = make_trainer(
        **options, frozen=lambda name: "router" in name
    )  # which writes the same description
    trainer.train_step()
    trainer.save()
    trainer.close()
    reader, described = open_weights(str(tmp_path / "old"), None, None)
    assert described == config
    model = load_model(reader, described, ParallelGroups.alone())
    (row,) = generate(model, [[1, 2, 3]], max_new_tokens=4).rows
    assert len(row.ids) == 4


@pytest.mark.parametrize(("world", "tp", "ep"), [(2, 1, 2), *full([(4, 2, 2), (4, 1, 2)])])
def test_moments_of_loads_are_those_of_microbatches(world, tp, ep):
    """Ranks agree on the loads of expert-parallel ranks, whose mean is that of all counts."""
    layout, size = ParallelConfig(tp=tp, ep=ep, etp=1), 3 * MICRO_BATCH * world // tp

    def rank_main(rank, world_size):
        groups = make_groups(world_size, layout)
        trainer = make_trainer(groups, layout, **{**SIZES, "global_batch_size": size})
        for _ in range(2):
            trainer.train_step()
        microbatches = trainer.num_microbatches * world_size // tp  # of all data-parallel ranks
        return trainer._window.moments, trainer._window.counts, 2 * microbatches

    results = run_ranks(rank_main, world)
    (moments, counts, added), *others = results
    numbers, sums, squares = moments[0]
    assert all(torch.equal(each, moments) for each, *_ in others)
    assert numbers.eq(added).all()
    tokens = counts.sum(0).view(ep, -1).sum(1).double()
    torch.testing.assert_close(sums / numbers, tokens / tokens.mean() - 1, rtol=0, atol=1e-12)
    variance = squares / numbers - (sums / numbers).square()
    assert (variance > 0).all() and (variance < 0.1).all()


def test_evaluation_counts_the_cross_entropy_alone_on_every_rank():
    def rank_main(rank, world_size):
        trainer = make_trainer(make_groups(world_size, tp=2, ep=2, etp=1), **SIZES)
        evaluation = trainer.evaluate(max_batches=1)
        biases = [b.clone() for n, b in trainer.model.named_buffers() if n.endswith("expert_bias")]
        return evaluation, any(bias.any() for bias in biases)

    (alone, moved), results = rank_main(0, 1), run_ranks(rank_main, 4)
    (batch,) = Samples(MICRO_BATCH, strides=3).validation_batches(0, 1, max_batches=1)
    model = make_trainer(**SIZES).model.eval()
    with torch.no_grad():
        losses = model.loss(batch["tokens"], batch["targets"])
    assert losses.aux == 0 and alone.loss == pytest.approx(losses.tokens.sum().item() / alone.num_tokens)
    for evaluation, bias_moved in results:
        assert evaluation == results[0][0] and not bias_moved and not moved
        assert abs(evaluation.loss - alone.loss) < 1e-10 and evaluation.num_tokens == alone.num_tokens


def test_a_step_with_all_experts_here_never_waits_for_the_device():
    """The whole step on tensors without values, on a device that is not the host's: counts and biases too."""

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(CONFIG, Placement(device="meta"))
        trainer = OnDevice(model, Samples(2), token_loss, TrainConfig(global_batch_size=4))
        with NoDeviceCopies():
            for _ in range(2):
                result = trainer.train_step()
            assert result.expert_counts.device.type == "meta" and result.expert_counts.shape == (2, 8)


@pytest.mark.gpu
def test_on_a_gpu_in_bfloat16(tmp_path):
    check_on_a_gpu(tmp_path, DROPOUT, Samples(4, strides=3), OPTIMIZER, bound=0.9)
