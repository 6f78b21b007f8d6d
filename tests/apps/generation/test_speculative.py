"""Speculative decoding with MTP modules: the ids of plain decoding, greedy and sampled, in fewer steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from marks import full
from trainer_tools import make_trainer

from fastmp.apps.cli import main
from fastmp.apps.generation.batched import generate
from fastmp.apps.generation.incremental import Decoder
from fastmp.apps.generation.trained_models import load_model, open_weights
from fastmp.config import CheckpointConfig, GPTConfig, LatentConfig, MoEConfig, RopeScaling
from fastmp.cuda_graphs.backends.recording import RecordingBackend
from fastmp.distributed.grid import RankGrid
from fastmp.distributed.groups import ParallelGroups
from fastmp.nn import GPT, Placement
from fastmp.nn.language_model import StageSpec
from fastmp.nn.stages import GPTStage
from fastmp.testing.ranks import run_ranks
from fastmp.training.checkpoint.format import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")

# of few tokens, some drafts are right by chance
CONFIG = GPTConfig(
    **{"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 5},
    **{"max_seq_len": 32, "init_std": 0.2, "norm": "rmsnorm", "activation": "swiglu", "ffn_hidden_size": 48},
    **{"linear_bias": False, "position": "rope", "tie_embeddings": False, "mtp_depth": 2},
)
LATENT = LatentConfig(kv_rank=16, q_rank=24, nope_size=8, rope_size=8, value_size=8)
CONFIGS = {
    "grouped": CONFIG,
    "latent": replace(CONFIG, num_kv_heads=None, latent=LATENT, rope_interleaved=True),
    "window, sinks": replace(
        CONFIG, sliding_window=4, attention_sinks=True, full_attention_layers=(0,), qk_norm=True
    ),
    "experts": replace(
        CONFIG, mtp_depth=1, moe=MoEConfig(num_experts=4, expert_ffn_hidden_size=16), dense_layers=(0,)
    ),
}
PROMPTS = [[1, 2, 3, 0, 4], [3], [2, 2, 4]]
CHOICES = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "top_p": 0.9, "seed": 5}}


def make(config, groups=ParallelGroups.alone()):
    torch.manual_seed(0)
    kind, spec = GPT, StageSpec(True, range(2), True)
    if groups.pp is not None:
        first = groups.pp.rank() == 0
        kind, spec = GPTStage, StageSpec(first, range(1) if first else range(1, 2), not first)
    model = kind(config, Placement(groups, dtype=torch.float64), stage_spec=spec).eval()
    with torch.no_grad():  # hand on the hidden states: what repeats itself is drafted right
        for module in model.mtp:
            module.proj.weight.copy_(torch.cat((torch.zeros(32, 32), torch.eye(32)), 1))
    return model


def continued(model, new=14, **options):
    found = generate(model, PROMPTS, max_new_tokens=new, **options)
    return [row.ids for row in found.rows], found


@pytest.mark.parametrize(
    ("name", "choice"),
    [*zip(CONFIGS, [*CHOICES] * 2), *full(zip(CONFIGS, [*reversed(CHOICES)] * 2))],
)
def test_ids_are_those_of_plain_decoding(name, choice):
    model = make(CONFIGS[name])
    want, plain = continued(model, **CHOICES[choice])
    ids, found = continued(model, speculative=True, **CHOICES[choice])
    assert ids == want and plain.decode_steps == 13
    assert found.decode_steps <= 13 and found.decoded_tokens == plain.decoded_tokens == 3 * 13
    options = {"max_new_tokens": 14, "speculative": True, **CHOICES[choice]}
    assert sum(generate(model, [prompt], **options).decode_steps for prompt in PROMPTS) < 3 * 13


@pytest.mark.parametrize("name", ["grouped", *full(["experts", "latent"])])
def test_graphs(name):
    model = make(CONFIGS[name])
    want, _ = continued(model, temperature=0.0)
    ids, _ = continued(model, temperature=0.0, speculative=True, backend=RecordingBackend())
    assert ids == want


def test_ends_of_text_and_lengths():
    """A row that ends early, or has its tokens, waits for the others."""
    model = make(CONFIG)
    for ends in range(5):
        want = continued(model, temperature=0.0, ends=[ends])[0]
        assert continued(model, temperature=0.0, ends=[ends], speculative=True)[0] == want
    for new in (1, 2, 3, 26):
        want = continued(model, new, temperature=0.0)[0]
        assert continued(model, new, temperature=0.0, speculative=True)[0] == want


def test_perfect_drafts_are_all_accepted():
    """Modules without a layer that hand on the tokens' embeddings: the model continues each by itself."""
    model = make(replace(CONFIG, tie_embeddings=True))
    with torch.no_grad():
        for layer in model.layers:  # the residual stream is the embedding
            layer.attention.proj.weight.zero_()
            layer.mlp.down.weight.zero_()
        for module in model.mtp:
            (layer,) = module.layers
            layer.attention.proj.weight.zero_()
            layer.mlp.down.weight.zero_()
            module.proj.weight.copy_(torch.cat((torch.eye(32), torch.zeros(32, 32)), 1))
    want, _ = continued(model, 13, temperature=0.0)
    ids, found = continued(model, 13, temperature=0.0, speculative=True)
    assert ids == want and found.decode_steps == 12 // 3


def on_ranks(rank, world, sizes, config):
    groups = ParallelGroups.create(RankGrid(world_size=world, **sizes))
    model = make(config, groups)
    return continued(model, temperature=0.0, speculative=True, groups=groups)[0]


@pytest.mark.parametrize(("name", "sizes"), [("grouped", {"pp": 2}), *full([("latent", {"tp": 2})])], ids=str)
def test_layouts(name, sizes):
    want, _ = continued(make(CONFIGS[name]), temperature=0.0)
    assert run_ranks(on_ranks, 2, sizes, CONFIGS[name]) == [want, want]


def test_a_checkpoint_with_modules_is_read_with_and_without(tmp_path):
    trainer = make_trainer(config=CONFIG, checkpoint=CheckpointConfig(), run_dir=str(tmp_path))
    reader, config = open_weights(str(trainer.save()), None, None)
    assert config.mtp_depth == 2
    found = []
    for depth in (0, 2):
        own = replace(config, mtp_depth=depth)
        model = load_model(reader, own, ParallelGroups.alone(), dtype=torch.float64)
        assert len(model.mtp) == depth
        found.append(continued(model, temperature=0.0, speculative=depth > 0)[0])
    assert found[0] == found[1]
    with pytest.raises(CheckpointError, match=r"it has 2 MTP modules, this run 3; set .*mtp_depth to 2"):
        load_model(reader, replace(config, mtp_depth=3), ParallelGroups.alone())


def test_the_command_leaves_positions_for_drafts(tmp_path, capsys):
    config = replace(CONFIG, vocab_size=257)
    path = make_trainer(config=config, checkpoint=CheckpointConfig(), run_dir=str(tmp_path)).save()
    options = ["--checkpoint", str(path), "--tokenizer", "byte", "--prompt", "a", "--temperature", "0"]
    assert main(["generate", *options, "--max-new-tokens", "29"]) == 0
    text = capsys.readouterr().out
    assert main(["generate", *options, "--speculative"]) == 0  # by default, as many as fit
    assert capsys.readouterr().out == text


def test_mistakes():
    with pytest.raises(
        ValueError, match="speculative decoding needs a model with MTP modules, got mtp_depth 0"
    ):
        continued(make(replace(CONFIG, mtp_depth=0)), speculative=True)
    scaling = RopeScaling("dynamic", factor=4.0, original_max_seq_len=8)  # a window's end turns its keys
    with pytest.raises(ValueError, match=r"positions that do not depend on the length, got .*'dynamic'"):
        continued(make(replace(CONFIG, rope_scaling=scaling)), speculative=True)
    with pytest.raises(ValueError, match="at most 26 new ones fit next to 2 drafts"):
        continued(make(CONFIG), 27, speculative=True)
    with pytest.raises(ValueError, match="generate: 32 tokens and 2 drafts are more than max_seq_len 32"):
        Decoder(make(CONFIG), ParallelGroups.alone(), places=32, choose=torch.argmax, speculative=True)
