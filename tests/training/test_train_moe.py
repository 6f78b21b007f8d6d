"""A GPT with experts in training: on every layout the losses, gradients, loads and biases of one rank."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
import torch
from marks import full
from torch._subclasses.fake_tensor import FakeTensorMode
from train_tools import EXPERTS, NoDeviceCopies, Samples, check_on_a_gpu, gather_main_grads, saved_tensors

from fastmp.config import OptimizerConfig, TrainConfig
from fastmp.distributed.collectives import group_rank, group_size
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.distributed.rng import RngTracker
from fastmp.nn import Placement
from fastmp.nn.gpt import GPT
from fastmp.tensor_parallel.attributes import parallel_attributes
from fastmp.testing.parallel import full_tensor
from fastmp.testing.ranks import run_ranks
from fastmp.training.language import token_loss
from fastmp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

MOE = replace(EXPERTS.moe, sequence_aux_loss=0.01, shared_expert_ffn_hidden_size=16)
CONFIG = replace(EXPERTS, num_layers=2, moe=MOE)
OPTIMIZER = OptimizerConfig(lr=3e-3, min_lr=1e-4, warmup_steps=2)
MICRO_BATCH, NUM_MICROBATCHES = 4, 2  # over all data-parallel ranks
STEPS = 4
# World size, tp, ep, etp, and what else
LAYOUTS = [
    (2, 2, 2, 1, {"sequence_parallel": True}),
    (2, 2, 1, 2, {"recompute": True}),
    (2, 1, 2, 1, {"dispatcher": "allgather"}),
    *full(
        [
            (2, 2, 2, 1, {}),
            (4, 2, 2, 1, {"sequence_parallel": True, "recompute": True}),
            (4, 2, 2, 2, {"dispatcher": "allgather"}),
            (4, 1, 2, 2, {}),
            (4, 4, 4, 1, {}),
            (8, 2, 2, 2, {"sequence_parallel": True}),
            (8, 2, 8, 1, {}),
        ]
    ),
]


def make_trainer(
    groups=ParallelGroups.alone(), *, seed=11, config=CONFIG, dtype=torch.float64, model=None, **train
):
    rng = RngTracker(seed, tp_rank=group_rank(groups.tp))
    model = {"sequence_parallel": False, "recompute": False, **(model or {})}
    on = Placement(groups, model["sequence_parallel"], rng=rng, dtype=dtype)
    gpt = GPT(config, on, recompute=model["recompute"])
    train = {"steps": 40, "global_batch_size": MICRO_BATCH * NUM_MICROBATCHES, "eval_interval": 0, **train}
    data = Samples(MICRO_BATCH // group_size(groups.dp), strides=3)
    return Trainer(gpt, data, token_loss, TrainConfig(**train), optimizer=OPTIMIZER, groups=groups, rng=rng)


def make_groups(world_size, tp, ep, etp):
    return ParallelGroups.create(RankGrid(world_size=world_size, tp=tp, ep=ep, etp=etp))


def whole(trainer, tensors):
    """{name: tensor of the undivided parameter}, padding of the vocabulary cut off."""
    groups, params = trainer.groups, dict(trainer.model.named_parameters())
    tp, etp, ep = groups.tp, groups.etp, groups.ep
    full = {
        name: full_tensor(tensor.detach().clone(), params[name], tp, etp_group=etp, ep_group=ep)
        for name, tensor in tensors.items()
    }
    full["word_embedding.weight"] = full["word_embedding.weight"][: CONFIG.vocab_size]
    return full


def run(trainer, steps=STEPS):
    """Numbers of each step, all gradients of the first, and parameters and biases at the end."""
    curve, counts = [], []
    for step in range(steps):
        result = trainer.train_step()
        curve.append([result.loss.item(), result.aux_loss.item(), result.grad_norm.item()])
        counts.append(result.expert_counts.tolist())
        if step == 0:
            gather_main_grads(trainer.grads)
            grads = whole(trainer, {name: p.main_grad for name, p in trainer.model.named_parameters()})
    biases = {n: b for n, b in trainer.model.named_buffers() if n.endswith("expert_bias")}
    return curve, counts, grads, whole(trainer, dict(trainer.model.named_parameters())), biases


@pytest.fixture(scope="module")
def one_rank():
    return run(make_trainer())


def test_one_rank_balances_and_learns(one_rank):
    curve, counts, grads, _, biases = one_rank
    tokens = MICRO_BATCH * NUM_MICROBATCHES * 16
    assert torch.tensor(counts).sum(-1).eq(MOE.top_k * tokens).all()
    assert curve[-1][0] < curve[0][0] and all(aux > 0 for _, aux, _ in curve)
    assert len(biases) == 2 and all(
        0.05 <= bias.abs().max() <= 0.05 * STEPS + 1e-6 for bias in biases.values()
    )
    experts = [name for name in grads if ".experts." in name]
    assert experts and all(grads[name].any() for name in experts)


@pytest.mark.parametrize(("world", "tp", "ep", "etp", "options"), LAYOUTS)
def test_every_layout_is_one_rank(one_rank, world, tp, ep, etp, options):
    """Losses, norm and every gradient to 1e-10, the same loads and biases, replicas bitwise equal."""
    options = dict(options)
    moe = replace(MOE, dispatcher=options.pop("dispatcher", "alltoall"))

    def rank_main(rank, world_size):
        groups = make_groups(world_size, tp, ep, etp)
        trainer = make_trainer(groups, config=replace(CONFIG, moe=moe), model=options)
        results = run(trainer)
        bits = {}
        for name, param in trainer.model.named_parameters():
            marks = parallel_attributes(param)
            place = [group_rank(groups.ep)] if marks.expert_parallel else []
            if marks.tensor_model_parallel:
                place.append(group_rank(groups.etp if marks.expert_parallel else groups.tp))
            bits[name, *place] = zlib.crc32(param.detach().numpy().tobytes())
        return *results, bits

    curve, counts, grads, params, biases = one_rank
    results = run_ranks(rank_main, world)
    replicas = {}
    for mine, my_counts, my_grads, my_params, my_biases, bits in results:
        assert mine == results[0][0], "bits differ between ranks"
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(curve), rtol=0, atol=1e-10)
        assert my_counts == counts
        assert all(torch.equal(my_biases[name], biases[name]) for name in biases)
        for name in grads:
            torch.testing.assert_close(my_grads[name], grads[name], rtol=0, atol=1e-10, msg=name)
            torch.testing.assert_close(my_params[name], params[name], rtol=0, atol=1e-9, msg=name)
        for place, checksum in bits.items():
            assert replicas.setdefault(place, checksum) == checksum, f"{place} differs between its replicas"


DROPOUT = replace(CONFIG, dropout=0.1, attention_dropout=0.1, moe=replace(MOE, jitter=0.1))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [((2, 2, 2, 1), torch.float32), *full([((1, 1, 1, 1), torch.bfloat16), ((4, 2, 2, 1), torch.bfloat16)])],
)
def test_resume_is_bitwise(tmp_path, layout, dtype):
    """Six steps, and three, a checkpoint, new objects from another seed, three more; dropout and jitter."""

    def rank_main(rank, world_size):
        groups = ParallelGroups.alone() if world_size == 1 else make_groups(*layout)
        options = {"config": DROPOUT, "dtype": dtype, "run_dir": str(tmp_path)}
        straight = make_trainer(groups, **options)
        expected = [straight.train_step().loss.item() for _ in range(6)]
        first = make_trainer(groups, **options)
        losses = [first.train_step().loss.item() for _ in range(3)]
        first.save()
        second = make_trainer(groups, seed=99, **options)
        assert second.resume() and second.step == 3
        losses += [second.train_step().loss.item() for _ in range(3)]
        assert losses == expected
        tensors = saved_tensors(second)
        assert sum(name.endswith("expert_bias") for name in tensors) == 2
        for name, tensor in saved_tensors(straight).items():
            assert torch.equal(tensor, tensors[name]), name

    if layout[0] == 1:
        rank_main(0, 1)
    else:
        run_ranks(rank_main, layout[0])


def test_evaluation_counts_the_cross_entropy_alone_on_every_rank():
    def rank_main(rank, world_size):
        trainer = make_trainer(make_groups(world_size, 2, 2, 1) if world_size > 1 else ParallelGroups.alone())
        evaluation = trainer.evaluate(max_batches=1)
        biases = [b.clone() for n, b in trainer.model.named_buffers() if n.endswith("expert_bias")]
        return evaluation, any(bias.any() for bias in biases)

    (alone, moved), results = rank_main(0, 1), run_ranks(rank_main, 4)
    (batch,) = Samples(MICRO_BATCH, strides=3).validation_batches(0, 1, max_batches=1)
    model = make_trainer().model.eval()
    with torch.no_grad():
        losses = model.loss(batch["tokens"], batch["targets"])
    assert losses.aux == 0 and alone.loss == pytest.approx(losses.tokens.sum().item() / alone.num_tokens)
    for evaluation, bias_moved in results:
        assert evaluation == results[0][0] and not bias_moved and not moved
        assert abs(evaluation.loss - alone.loss) < 1e-10 and evaluation.num_tokens == alone.num_tokens


def test_a_step_with_all_experts_here_never_waits_for_the_device():
    """The whole step on tensors without values, on a device that is not the host's: counts and biases too."""

    class OnDevice(Trainer):
        def _to_device(self, batch):
            return {name: torch.empty_like(tensor, device=self.device) for name, tensor in batch.items()}

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
