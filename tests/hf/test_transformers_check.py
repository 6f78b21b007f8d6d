"""What import takes for granted of transformers."""

from __future__ import annotations

import importlib
import re

import pytest
import torch

from fastmp.hf import config_json
from fastmp.hf.families import CONVERSIONS

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new"])
def test_names_of_the_same_activation_are_all_that_transformers_has(name):
    from transformers.activations import ACT2CLS, ACT2FN

    x = torch.linspace(-20, 20, 1000, dtype=torch.float64)
    wanted = ACT2FN[name](x)
    same = set()
    for each in set(ACT2CLS) - {"xielu"}:  # which has parameters in BF16
        found = ACT2FN[each].double()(x) if isinstance(ACT2FN[each], torch.nn.PReLU) else ACT2FN[each](x)
        if (found - wanted).abs().max() < 1e-9:
            same.add(each)
    aliases = {alias for alias, of in config_json._ACTIVATIONS.items() if of == name}
    assert same == {name} | aliases | ({"gelu_pytorch_tanh"} if name == "gelu_new" else set())


# of padding in training, of losses, of the heads of other tasks, and of a split that changes nothing
READ = {"pad_token_id", "use_cache", "output_router_logits", "problem_type", "classifier_dropout"}
READ |= {"chunk_size_feed_forward", "is_encoder_decoder", "reorder_and_upcast_attn", "_attn_implementation"}


@pytest.mark.parametrize("family", sorted(CONVERSIONS.keys() - {"kimi_k2"}))
def test_no_model_reads_the_keys_that_import_leaves_out(family):
    source = importlib.import_module(f"transformers.models.{family}.modeling_{family}").__file__
    with open(source) as file:
        read = set(re.findall(r"config\.(\w+)", file.read()))
    assert len(read) > 10
    left_out = {key for key in read if key in config_json._UNUSED | config_json._GENERATION}
    assert {key for key in left_out if not key.startswith("summary_")} <= READ
