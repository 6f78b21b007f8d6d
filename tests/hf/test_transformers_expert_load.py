"""The expert load of transformers models: counted on the device, summed over ranks, logged by the Trainer."""

from __future__ import annotations

import pytest
import torch
from hf_models import VOCAB, batch_of, model_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fastmp
from fastmp.hf.expert_load import ExpertLoad
from fastmp.testing.ranks import run_ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


class Experts(nn.Module):
    def __init__(self, device):
        super().__init__()
        self.num_experts = 4
        self.down_proj = nn.Parameter(torch.zeros(4, 2, 2, device=device))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return hidden_states


def test_ratios_of_steps():
    experts = Experts("cpu").train()
    load = ExpertLoad(nn.Sequential(experts))
    for step in ([[0, 1], [0, 2]], [[3, 1], [0, 2]]):
        for index in torch.tensor(step):  # microbatches
            experts(torch.zeros(1, 2), index[None], torch.ones(1, 2))
        experts.eval()(torch.zeros(1, 2), top_k_index=torch.tensor([[3, 3]]), top_k_weights=None)
        experts.train()
        load.step()
    assert load.read() == {"0": (1.5, 2.0)}  # 2 of 4 assignments over 4 experts, then 1 of 4
    assert load.read() == {}
    load.remove()
    experts(torch.zeros(1, 2), torch.tensor([[0, 1]]), None)
    load.step()
    assert load.read() == {"0": (0.0, 0.0)}
    with pytest.raises(ValueError, match="ExpertLoad: expected a model with experts, got Linear"):
        ExpertLoad(nn.Linear(2, 2))


def test_the_host_reads_nothing_before_it_is_asked():
    """Tensors on the meta device have no values to read."""
    experts = Experts("meta").train()
    load = ExpertLoad(nn.Sequential(experts))
    for _ in range(2):
        experts(torch.zeros(3, 2, device="meta"), torch.zeros(3, 2, device="meta", dtype=torch.int64), None)
        load.step()
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        load.read()


def wanted_load(model, batches):
    """max/mean of each layer, from the experts' own arguments in an untouched model."""
    counts = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):

            def hook(module, args, name=name):
                found = torch.bincount(args[1].flatten(), minlength=module.num_experts)
                counts[name] = counts.get(name, 0) + found

            module.register_forward_pre_hook(hook)
    for batch in batches:
        model(**batch)
    return {name: (c.max() / c.double().mean()).item() for name, c in counts.items()}


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_is_the_routing_of_transformers(family):
    """With gradient checkpointing, whose recomputations are not counted; one of them compiled too."""
    batch = batch_of(family)
    wanted = wanted_load(model_of(family), [batch])
    for prepare in ("checkpointing", "compile") if family == "mixtral" else ("checkpointing",):
        model = model_of(family, use_cache=False)
        fastmp.accelerate(model)
        if prepare == "compile":
            model(**batch)  # transformers installs its own hooks
        load = ExpertLoad(model)
        if prepare == "compile":
            model.compile(backend="aot_eager", fullgraph=True)
        else:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**batch).loss.backward()
        load.step()
        found = load.read()
        assert {name: each.mean for name, each in found.items()} == pytest.approx(wanted, rel=1e-12)
        assert all(each.mean == each.highest > 1 for each in found.values())


@pytest.mark.full
@pytest.mark.parametrize("how", ["mesh", "group"])
def test_is_that_of_all_ranks(how):
    """Of the tokens of both ranks over a mesh; over a group ranks have the same tokens."""
    batch = batch_of("mixtral")
    rows = [{name: tensor[rank : rank + 1] for name, tensor in batch.items()} for rank in range(2)]
    wanted = wanted_load(model_of("mixtral"), rows if how == "mesh" else [batch])

    def run(rank, world_size):
        model = model_of("mixtral")
        if how == "mesh":
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "ep"))
            fastmp.accelerate(model, mesh=mesh)
        else:
            fastmp.accelerate(model, group=torch.distributed.group.WORLD)
        load = ExpertLoad(model)
        model(**(rows[rank] if how == "mesh" else batch)).loss.backward()
        load.step()
        assert [each.mean for each in load.read().values()] == pytest.approx([*wanted.values()], rel=1e-12)

    run_ranks(run, 2, timeout=200)


class Documents(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        ids = torch.randint(3, VOCAB, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


@pytest.mark.full
def test_the_trainer_logs_it(tmp_path):
    """Of steps of two microbatches, while evaluation and gradient checkpointing go on; reporters see it."""
    pytest.importorskip("accelerate", reason="transformers' Trainer needs Accelerate, which is not installed")
    from fastmp.hf.trainer_callback import ExpertLoadCallback

    model = model_of("mixtral")
    fastmp.accelerate(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=0.0,
        report_to=[],
        save_strategy="no",
        eval_strategy="steps",
        eval_steps=1,
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
    )
    seen = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    trainer = transformers.Trainer(
        model, arguments, train_dataset=Documents(), eval_dataset=Documents(), callbacks=[Reporter()]
    )
    trainer.callback_handler.callbacks.insert(0, ExpertLoadCallback())
    trainer.train()
    names = {"expert_load", "expert_load/layers.0", "expert_load/layers.1"}
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(history) == 2 and all(names <= entry.keys() for entry in history)
    assert [{n: e[n] for n in names} for e in seen if "loss" in e] == [
        {n: e[n] for n in names} for e in history
    ]
    assert not any(names & entry.keys() for entry in trainer.state.log_history if "loss" not in entry)
    data = [Documents()[index] for index in range(8)]  # the two steps have all samples between them
    batch = {name: torch.stack([each[name] for each in data]) for name in data[0]}
    wanted = wanted_load(model_of("mixtral"), [batch])
    both = [sum(entry[f"expert_load/layers.{layer}"] for entry in history) / 2 for layer in range(2)]
    for found, want in zip(both, wanted.values(), strict=True):
        assert want - 1e-9 <= found <= 2 * want  # of halves
    assert all(entry["expert_load"] == max(entry[name] for name in names) for entry in history)
