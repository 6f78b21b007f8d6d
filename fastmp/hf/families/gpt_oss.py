"""GPT-OSS: experts with a clamped gate, attention sinks. Import and export are not supported."""

from __future__ import annotations

from fastmp.hf.families import llama_like
from fastmp.hf.families.base import Family
from fastmp.hf.patches import RMSNormInInputDtype

FAMILY = Family("gpt_oss", acceleration=llama_like.mixture("GptOss", norm=RMSNormInInputDtype))
