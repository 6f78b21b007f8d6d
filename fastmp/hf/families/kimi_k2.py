"""Kimi K2: DeepSeek-V3 by another name, of which transformers has no class. Exports are DeepSeek-V3."""

from __future__ import annotations

from fastmp.hf.families import deepseek_v3
from fastmp.hf.families.family import Family

FAMILY = Family("kimi_k2", deepseek_v3.CONVERSION)
