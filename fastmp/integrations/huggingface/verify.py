"""Both models run on a few tokens: that a translation is right is measured rather than believed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from fastmp.config import GPTConfig
from fastmp.nn import GPT, Placement
from fastmp.parallel.groups import ParallelGroups
from fastmp.train.checkpoint.storage import CheckpointReader
from fastmp.train.checkpoint.weights import load_weights

__all__ = ["verify"]

BATCH, LENGTH = 2, 16
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-5}  # of the largest logit; float64 has float32 in it there


def verify(path: Path, reader: CheckpointReader, config: GPTConfig) -> str:
    """Compare the logits of transformers' model in the directory `path` with fastmp's, loaded by `reader`.

    Both compute in float32, of float64 weights in float64, on the CPU. Returns a line with the largest error.
    ValueError where it is too large, keys are missing or left over, or transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise ValueError(
            "verifying needs transformers, which is not installed (pip install transformers); "
            "--no-verify goes on without"
        )
    from transformers import AutoModelForCausalLM

    wide = reader.manifest.tensors["model/final_norm.weight"].dtype == "F64"
    dtype = torch.float64 if wide else torch.float32
    generator = torch.Generator().manual_seed(1)
    size = (BATCH, min(LENGTH, config.max_seq_len))
    tokens_BS = torch.randint(config.vocab_size, size, generator=generator)
    options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    try:
        theirs, report = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype, **options)
    except Exception as error:  # of any kind: it is theirs
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{path}: transformers cannot load it: {what}") from None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found := report.get(kind):
            raise ValueError(
                f"{path}: transformers says {kind.replace('_', ' ')}: {sorted(map(str, found))[:5]}"
            )
    with torch.no_grad():
        expected_BSV = theirs.eval()(tokens_BS).logits
        del theirs
        ours = GPT(config, Placement(dtype=dtype)).eval()
        load_weights(reader, config, [ours], ParallelGroups.alone())
        logits_BSV = ours(tokens_BS)[..., : config.vocab_size].transpose(0, 1)
    worst = (logits_BSV - expected_BSV).abs().max().item()
    largest = expected_BSV.abs().max().item()
    bound = BOUNDS[dtype] * max(1.0, largest)
    name = str(dtype).removeprefix("torch.")
    line = f"largest error of logits {worst:.3g}, of numbers up to {largest:.3g}, in {name}"
    if not worst <= bound:
        raise ValueError(f"{path}: {line}, more than {bound:.3g}: fastmp does not compute this model")
    return f"verified: {line}"
