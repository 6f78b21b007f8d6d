"""Biases of experts, as GPT-OSS has them: what takes none says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from feature_table import FP8, SINKS

from fastmp.config.recipe import load_recipe
from fastmp.nn.moe.experts import GroupedExperts
from fastmp.plan.layout import check_layout

CONFIGS = Path(__file__).parents[2] / "configs"


def test_what_takes_no_biases_of_experts_says_so():
    with pytest.raises(ValueError, match="set activation_stash 0 beside linear_bias"):
        replace(SINKS.moe, dispatcher="symmetric")
    with pytest.raises(ValueError, match=r"no FP8 GEMM of experts has a bias; set moe\.linear_bias"):
        GroupedExperts(SINKS).use_fp8(FP8)
    recipe = load_recipe(CONFIGS / "gpt-oss-20b.toml")
    recipe = replace(recipe, train=replace(recipe.train, precision="fp8", fp8_block=32))
    with pytest.raises(ValueError, match="experts in FP8 have no biases: expected linear_bias false"):
        check_layout(recipe, 32)
