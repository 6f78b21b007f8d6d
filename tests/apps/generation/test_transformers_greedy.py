"""Models of transformers generate here, greedily, id for id what transformers' own `generate` does."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from hf_models import MODELS, save
from marks import full

from fastmp.apps.generation.batched import generate
from fastmp.apps.generation.trained_models import load_model, open_weights
from fastmp.distributed.groups import ParallelGroups

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

PROMPTS = [[5, 9, 2, 77, 30, 8, 8], [11], [64, 64, 3, 100]]
QUICK = ["gpt2", "mistral, window"]
NEW = 24


def saved(name, path):
    """The model `name`, in the directory `path`, whose norms add nothing that favours one token."""
    model = save(name, path)
    if name.startswith("gpt2"):
        for parameter_name, parameter in model.named_parameters():
            if ".ln_" in parameter_name and parameter_name.endswith("bias"):
                torch.nn.init.zeros_(parameter)
        model.save_pretrained(path)
    return model


def theirs_of(model, end=None):
    """What transformers generates of prompts that are padded on the left."""
    longest = max(map(len, PROMPTS))
    padding = [[0] * (longest - len(prompt)) for prompt in PROMPTS]
    ids = torch.tensor([zeros + prompt for zeros, prompt in zip(padding, PROMPTS)])
    mask = torch.tensor([zeros + [1] * len(prompt) for zeros, prompt in zip(padding, PROMPTS)])
    model.generation_config.eos_token_id = end
    generated = model.eval().generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    return generated[:, longest:].tolist()


def ours_of(path, **options):
    reader, config = open_weights(None, str(path), None)
    model = load_model(reader, config, ParallelGroups.alone())
    generated = generate(model, PROMPTS, max_new_tokens=NEW, temperature=0.0, **options)
    return [row.ids for row in generated.rows]


@pytest.mark.parametrize("name", [*QUICK, *full(name for name in MODELS if name not in QUICK)])
def test_greedy_is_theirs_id_for_id(name, tmp_path):
    expected = theirs_of(saved(name, tmp_path))
    assert ours_of(tmp_path) == expected
    assert len({tuple(row) for row in expected}) == 3


@pytest.mark.full
def test_the_end_of_a_text_is_theirs(tmp_path):
    model = saved("llama", tmp_path)
    end = theirs_of(model)[0][3]
    expected = [row[: row.index(end)] if end in row else row for row in theirs_of(model, end)]
    assert ours_of(tmp_path, ends=[end]) == expected
    assert len(expected[0]) <= 3 < NEW
