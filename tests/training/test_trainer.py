"""The training loop is one function of the data, whatever the layout, the microbatches and the restarts."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from marks import ON_GPUS, full
from torch._subclasses.fake_tensor import FakeTensorMode
from train_tools import NoDeviceCopies, Samples, check_on_a_gpu, gather_main_grads, saved_tensors
from trainer_tools import (
    SMALL,
    SMALL_OPTIMIZER,
    OnDevice,
    Regression,
    check_replicas,
    check_resume,
    checksums,
    make_groups,
    make_small,
    plain_model,
    regression_loss,
    whole,
)

import fastmp
from fastmp.config import CheckpointConfig, OptimizerConfig, ParallelConfig, TrainConfig
from fastmp.nn import Placement
from fastmp.nn.gpt import GPT
from fastmp.optim.optimizer import ParameterGroup
from fastmp.status import process_status
from fastmp.testing.parallel import count_collectives
from fastmp.testing.ranks import run_ranks
from fastmp.training.language import token_loss
from fastmp.training.metrics import RunInfo, TrainLog, read_metrics
from fastmp.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

# (tp, dp, sequence_parallel)
LAYOUTS = [
    (1, 2, False),
    (2, 1, True),
    *full([(2, 1, False), (1, 4, False), (2, 2, True)]),
    pytest.param(4, 1, True, marks=pytest.mark.exhaustive),
    pytest.param(4, 1, False, marks=pytest.mark.exhaustive),
    pytest.param(2, 2, False, marks=pytest.mark.exhaustive),
]


def gradients(trainer, num_tokens):
    """{name: gradient of the whole parameter}, padding rows of the vocabulary cut off.

    After a step the main gradients are those of the sum over all tokens; the optimizer scales as it reads.
    """
    gather_main_grads(trainer.grads)
    return {name: grad / num_tokens for name, grad in whole(trainer, lambda param: param.main_grad).items()}


def one_step(trainer):
    result = trainer.train_step()
    num_tokens = result.num_tokens.item()
    return result.loss.item(), result.grad_norm.item(), num_tokens, gradients(trainer, num_tokens)


UNCLIPPED = replace(SMALL_OPTIMIZER, clip_grad_norm=0.0)


@pytest.fixture(scope="module")
def one_rank():
    """What one rank computes: the first step in float64, and the losses of 40 steps in float32."""
    step = one_step(make_small(optimizer=UNCLIPPED))
    trainer = make_small(dtype=torch.float32)
    return step, [trainer.train_step().loss.item() for _ in range(40)]


@pytest.mark.parametrize(("tp", "dp", "sp"), LAYOUTS)
def test_every_layout_is_one_rank(one_rank, tp, dp, sp):
    """Loss, every full gradient and the norm to 1e-10 in float64, the same bits on all ranks.

    Then 40 steps in float32 to 1e-4, after which replicas are still bitwise equal.
    """

    def rank_main(rank, world_size):
        layout = ParallelConfig(tp=tp, sequence_parallel=sp)
        groups = make_groups(world_size, layout)
        step = one_step(make_small(groups, layout, optimizer=UNCLIPPED))
        trainer = make_small(groups, layout, dtype=torch.float32)
        results = [trainer.train_step() for _ in range(40)]
        curve = [(r.loss.item().hex(), r.grad_norm.item().hex()) for r in results]
        return step, curve, checksums(trainer)

    (loss, norm, num_tokens, grads), curve = one_rank
    results = run_ranks(rank_main, tp * dp)
    for step, _, _ in results:
        assert step[:3] == results[0][0][:3], "bits differ between ranks"
        assert abs(step[0] - loss) < 1e-10 and abs(step[1] - norm) < 1e-10 and step[2] == num_tokens
        for name, grad in grads.items():
            torch.testing.assert_close(step[3][name], grad, rtol=0, atol=1e-10, msg=name)
    assert all(result[1] == results[0][1] for result in results), "bits differ between ranks"
    for (mine, _), expected in zip(results[0][1], curve):
        assert abs(float.fromhex(mine) - expected) < 1e-4
    check_replicas(bits for _, _, bits in results)
    assert curve[-1] < 0.7 * curve[0], "the model must learn for this to mean anything"


def test_step_is_exact_for_uneven_microbatches():
    """The mean over all tokens of the global batch, as plain autograd finds it for all of it at once."""
    trainer = make_small(micro_batch=1, optimizer=UNCLIPPED)
    reference = make_small()
    reference.grads.remove_hooks()
    reference = reference.model
    batch = Samples(8).batch(0, 0, 1, 0, 1)
    losses = reference.loss(batch["tokens"], batch["targets"])
    counts = (batch["targets"] != -100).sum(1)
    assert counts.min() < counts.max() / 2
    expected = losses.sum() / counts.sum()
    expected_grads = torch.autograd.grad(expected, list(reference.parameters()))
    loss, norm, num_tokens, _ = one_step(trainer)
    assert num_tokens == counts.sum() and abs(loss - expected.item()) < 1e-12
    assert abs(norm - math.sqrt(sum(g.square().sum().item() for g in expected_grads))) < 1e-10
    for param, grad in zip(trainer.model.parameters(), expected_grads, strict=True):
        torch.testing.assert_close(param.main_grad / num_tokens, grad, rtol=0, atol=1e-12)


def test_accumulation_does_not_change_the_training():
    runs = []
    for num_microbatches in (1, 2, 4):
        trainer = make_small(micro_batch=8 // num_microbatches)
        assert trainer.num_microbatches == num_microbatches
        runs.append([trainer.train_step().loss.item() for _ in range(10)])
    for run in runs[1:]:
        assert max(abs(a - b) for a, b in zip(run, runs[0], strict=True)) < 1e-10


def test_a_step_sends_gradients_once_however_many_microbatches():
    def rank_main(rank, world_size):
        trainer = make_small(make_groups(world_size), micro_batch=1)
        with count_collectives() as seen:
            trainer.train_step()
        return trainer.num_microbatches, seen.calls, trainer.grads.flats[0].layout.size

    for num_microbatches, calls, size in run_ranks(rank_main, 2):
        assert num_microbatches == 4
        shard = size // 2
        gradients, parameters = ("reduce_scatter", [(shard,), (size,)]), ("all_gather", [(size,), (shard,)])
        assert calls == [gradients, ("all_reduce", [(8,)]), ("all_reduce", [(1,)]), parameters]


def test_replicas_start_equal_even_if_made_from_different_seeds():
    def rank_main(rank, world_size):
        trainer = make_small(make_groups(world_size), seed=rank)
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    left, right = run_ranks(rank_main, 2)
    assert torch.equal(left, right)


DROPOUT = replace(SMALL, dropout=0.1, attention_dropout=0.1)


def resume_case(rank, world_size, run_dir, tp, dtype):
    options = {"config": DROPOUT, "dtype": dtype, "run_dir": run_dir}
    options |= {"device": fastmp.init().device} if world_size > 1 else {}
    make = partial(make_small, make_groups(world_size, tp=tp), ParallelConfig(tp=tp), **options)
    assert not make(name="never-saved").resume()
    return {name: tensor.detach().cpu() for name, tensor in check_resume(make).items()}


@pytest.mark.parametrize(
    ("world_size", "tp", "dtype", "device"),
    [
        *((1, 1, torch.bfloat16, "cpu"), (1, 1, torch.float16, "cpu"), (2, 2, torch.float32, "cpu")),
        *full([(1, 1, torch.float32, "cpu"), (2, 1, torch.float32, "cpu")]),
        pytest.param(2, 2, torch.float64, "cuda", marks=ON_GPUS.marks),
        pytest.param(2, 1, torch.float64, "cuda", marks=ON_GPUS.marks),
    ],
)
def test_resume_is_bitwise(tmp_path, world_size, tp, dtype, device):
    """With dropout, so that random states matter."""
    case = str(tmp_path), tp, dtype
    if world_size == 1:
        resume_case(0, 1, *case)
        return
    # Each rank has states: of its own shards.
    for tensors in run_ranks(resume_case, world_size, *case, timeout=240, device=device):
        assert any(name.startswith("optimizer/") for name in tensors)


def test_a_step_with_a_nan_on_one_rank_is_skipped_everywhere_and_noted(tmp_path):
    def rank_main(rank, world_size):
        def poisoned(model, batch):
            losses = model.loss(batch["tokens"], batch["targets"])
            factor = math.nan if trainer.step == 2 and rank == 1 else 1.0
            return losses.sum() * factor, (batch["targets"] != -100).sum()

        trainer = make_small(make_groups(world_size), dtype=torch.float32)
        trainer.runner.loss = partial(poisoned, trainer.model)
        for _ in range(2):
            trainer.train_step()
        before = {name: tensor.detach().clone() for name, tensor in saved_tensors(trainer).items()}
        assert not math.isfinite(trainer.train_step().grad_norm)
        for name, tensor in saved_tensors(trainer).items():
            assert torch.equal(tensor, before[name]), name
        assert trainer.optimizer.skipped_steps == 1
        return trainer.train_step().loss.item()

    left, right = run_ranks(rank_main, 2)
    assert left == right and math.isfinite(left)


FLOAT16 = replace(SMALL_OPTIMIZER, lr=3e-3, loss_scale=2.0**10)


@pytest.mark.parametrize("world", [1, *full([2])])
def test_float16_follows_float32(world):
    """Losses of 12 steps; a float32 master takes what float16 could not, and the scale cancels."""

    def rank_main(rank, world_size):
        groups = make_groups(world_size)
        found = []
        for dtype in (torch.float32, torch.float16):
            trainer = make_small(groups, dtype=dtype, optimizer=FLOAT16)
            found.append([trainer.train_step().loss.item() for _ in range(12)])
            assert trainer.optimizer.skipped_steps == 0
        assert next(trainer.model.parameters()).dtype == torch.float16
        assert trainer.scaler.scale == 2.0**10
        return found

    for exact, rounded in [rank_main(0, 1)] if world == 1 else run_ranks(rank_main, world):
        assert exact[-1] < exact[0] - 0.3
        assert rounded == pytest.approx(exact, abs=0.02)


def test_a_scale_that_overflows_halves_and_its_steps_change_nothing(tmp_path):
    """From 2^40 every step overflows; with hysteresis 2 the second one halves, then each. It is saved."""
    optimizer = replace(FLOAT16, loss_scale=2.0**40, loss_scale_interval=5)
    options = {"dtype": torch.float16, "optimizer": optimizer, "run_dir": str(tmp_path)}
    trainer = make_small(**options)
    before = {name: tensor.clone() for name, tensor in saved_tensors(trainer).items()}
    scales = []
    while not trainer.train_step().grad_norm.isfinite():
        scales.append(trainer.scaler.scale.item())
        for name, tensor in saved_tensors(trainer).items():
            assert name.startswith("scaler/") or torch.equal(tensor, before[name]), name
    assert scales[:3] == [2.0**40, 2.0**39, 2.0**38] and 2.0**6 < scales[-1] < 2.0**20
    assert trainer.optimizer.skipped_steps == len(scales)
    for _ in range(4):
        trainer.train_step()
    assert trainer.scaler.scale == 2 * scales[-1], "doubled after five good steps"
    trainer.save()
    again = make_small(seed=99, **options)
    assert again.resume() and again.scaler.scale == trainer.scaler.scale
    assert again.train_step().loss == trainer.train_step().loss


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_whole_run_of_a_plain_model(tmp_path, dtype):
    """`train()` logs, evaluates and saves when it should, and a second trainer picks up where it stopped."""
    expected = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    data = Regression(expected)
    config = TrainConfig(
        steps=50,
        global_batch_size=8,
        dtype=dtype,
        eval_interval=20,
        name="plain",
        run_dir=str(tmp_path),
        log_interval=10,
    )
    optimizer = OptimizerConfig(lr=3e-2, min_lr=0.0, warmup_steps=5)
    trainer = Trainer(
        plain_model(),
        data,
        regression_loss,
        config,
        optimizer=optimizer,
        checkpoint=CheckpointConfig(interval=20),
    )
    with TrainLog(tmp_path / "plain", RunInfo(total_steps=50, tokens_per_step=24)) as log:
        final = trainer.train(log)
    records = read_metrics(tmp_path / "plain" / "metrics.jsonl")
    steps = {kind: [r["step"] for r in records if r["kind"] == kind] for kind in ("train", "eval")}
    assert steps == {"train": [1, 10, 20, 30, 40, 50], "eval": [20, 40, 50]}
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    assert final.loss < 0.3 * losses[0] and final.loss_per_byte is None
    assert trainer.model.training
    saved = sorted(path.name for path in (tmp_path / "plain" / "checkpoints").iterdir())
    assert saved == ["latest", "step-00000040", "step-00000050"]
    again = Trainer(plain_model(), data, regression_loss, config, optimizer=optimizer)
    assert again.resume() and again.step == 50
    assert again.evaluate().loss == final.loss  # the running statistics of the batch norm came back too
    assert {p.dtype for p in again.model.parameters()} == {expected}


def test_a_group_of_parameters_has_its_own_learning_rate_and_decay():
    def group(name, param):
        return ParameterGroup(lr=0.0) if name.startswith("0.") else ParameterGroup(weight_decay=0.5)

    config, model = TrainConfig(steps=5, global_batch_size=8, eval_interval=0), plain_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(model, Regression(), regression_loss, config, parameter_group=group)
    trainer.train()
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) == name.startswith("0."), name


def test_global_batch_must_divide():
    with pytest.raises(ValueError, match=r"global_batch_size 8 is not divisible by micro_batch_size 3 x 1"):
        make_small(micro_batch=3)


def test_a_step_never_waits_for_the_device():
    """The whole step on tensors without values, on a device that is not the host's.

    Whatever needs a value raises: .item(), branching on a tensor, a shape that depends on data.
    """

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(SMALL, Placement(device="meta"))
        trainer = OnDevice(model, Samples(2), token_loss, TrainConfig(global_batch_size=8))
        with NoDeviceCopies():
            result = trainer.train_step()
            assert result.loss.device.type == "meta"
            with pytest.raises(AssertionError, match="copy from meta to cpu"):
                result.loss.cpu()
            with pytest.raises(RuntimeError):
                result.loss.item()


def test_an_error_says_in_which_step():
    trainer = make_small()
    trainer.train_step()
    trainer.grads.reduce = lambda: {}["gone"]
    with pytest.raises(KeyError) as error:
        trainer.train_step()
    assert error.value.__notes__ == ["step 2"]


def test_a_loss_function_of_a_user_on_one_rank():
    """Batches are fetched one by one; what the function raises is raised, and phases are of the step."""
    trainer, events = make_small(global_batch_size=4), []

    def loss(batch):
        events.append(f"{process_status.phase} {sorted(batch)}")
        if broken:
            raise LookupError("nothing there")
        total, number = token_loss(trainer.model, batch)
        return (total.detach() if detached else total), number

    def fetch(microbatch):
        events.append(f"{process_status.phase} {microbatch}")
        return fetched(microbatch)

    fetched, trainer._fetch, trainer.runner.loss = trainer._fetch, fetch, loss
    broken = detached = False
    trainer.train_step()
    names = "['targets', 'tokens']"
    assert events == ["data 0", f"forward {names}", "data 1", f"forward {names}"]
    process_status.phase = "evaluate"  # a long phase for the watchdog
    trainer.runner.evaluate([fetched(0)])
    assert events[4:] == [f"evaluate {names}"]
    detached = True
    with pytest.raises(RuntimeError, match="does not require grad"):
        trainer.train_step()
    broken = True
    with pytest.raises(LookupError) as error:
        trainer.train_step()
    assert type(error.value) is LookupError and error.value.args == ("nothing there",)
    assert error.value.__notes__ == ["step 2"]


@pytest.mark.gpu
def test_on_a_gpu_in_bfloat16(tmp_path):
    check_on_a_gpu(tmp_path, DROPOUT, Samples(2), SMALL_OPTIMIZER, bound=0.7)
