"""Comparison of a converted model's logits with transformers' own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastmp.config import BertConfig, GPTConfig
from fastmp.distributed.groups import ParallelGroups
from fastmp.hf.weight_io import TransformersReader
from fastmp.nn import GPT, Bert, Placement
from fastmp.training.checkpoint.format import DTYPES
from fastmp.training.checkpoint.model_weights import load_weights
from fastmp.training.checkpoint.storage import CheckpointReader

__all__ = ["verify"]

BATCH, LENGTH = 2, 16
# relative to the largest logit; transformers' float64 decoders use float32 in norms, its BERT does not
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-5}
BERT_BOUND = 1e-9  # in float64


def verify(path: Path, reader: CheckpointReader, config: GPTConfig) -> str:
    """Compare the logits of transformers' model and of fastmp's on a few random tokens.

    Both compute on the CPU in float32, or in float64 for float64 weights. A BERT gets all token types and
    padding, and its logits include those of the order of sentences. One model is in memory at a time.

    Args:
        path: the directory of the transformers model.
        reader: of the same weights for fastmp's model.
        config: of fastmp's model.

    Returns:
        A line with the largest error.

    Raises:
        ValueError: the error is too large, transformers reports missing or unexpected keys, or it is not
            installed.
    """
    if find_spec("transformers") is None:
        raise ValueError(
            "verifying needs transformers, which is not installed; pip install transformers, or pass "
            "--no-verify"
        )
    import transformers

    encoder = config.bert
    auto = "CausalLM" if encoder is None else "PreTraining" if encoder.sentence_order else "MaskedLM"
    wide = reader.manifest.tensors["model/word_embedding.weight"].dtype == "F64"
    dtype = torch.float64 if wide else torch.float32
    quantization = reader.quantization if isinstance(reader, TransformersReader) else None
    rounded = None if quantization is None else DTYPES[quantization.dtype]  # of dequantised weights
    generator = torch.Generator().manual_seed(1)
    size = (BATCH, min(LENGTH, config.max_seq_len))
    tokens_BS = torch.randint(config.vocab_size, size, generator=generator)
    options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    try:
        make = getattr(transformers, f"AutoModelFor{auto}").from_pretrained
        theirs, report = make(str(path), dtype=rounded or dtype, **options)
    except Exception as error:  # transformers raises errors of any type
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{path}: transformers cannot load it: {what}") from None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found := report.get(kind):
            raise ValueError(
                f"{path}: transformers says {kind.replace('_', ' ')}: {sorted(map(str, found))[:5]}"
            )
    with torch.no_grad():
        expected = _theirs(theirs.to(dtype).eval(), encoder, tokens_BS)
        del theirs
        ours = (GPT if encoder is None else Bert)(config, Placement(dtype=dtype)).eval()
        load_weights(reader, config, [ours], ParallelGroups.alone())
        found = _ours(ours, tokens_BS)
    worst = (found - expected).abs().max().item()
    largest = expected.abs().max().item()
    relative = BERT_BOUND if wide and encoder is not None else BOUNDS[dtype]
    bound = relative * max(1.0, largest)
    name = str(dtype).removeprefix("torch.")
    line = f"largest error of logits {worst:.3g}, of numbers up to {largest:.3g}, in {name}"
    if not worst <= bound:
        raise ValueError(f"{path}: {line}, more than {bound:.3g}: fastmp does not compute this model")
    return f"verified: {line}"


def _theirs(model: Any, encoder: BertConfig | None, tokens_BS: Tensor) -> Tensor:
    """Return the flattened logits of transformers' model; a BERT's without padding, then its order logits."""
    if encoder is None:
        return model(tokens_BS).logits.flatten()
    types_BS, padding_BS = _types_and_padding(encoder, tokens_BS)
    made = model(tokens_BS, attention_mask=(~padding_BS).long(), token_type_ids=types_BS)
    if not encoder.sentence_order:
        return made.logits[~padding_BS].flatten()
    return torch.cat([made.prediction_logits[~padding_BS].flatten(), made.seq_relationship_logits.flatten()])


def _ours(model: GPT | Bert, tokens_BS: Tensor) -> Tensor:
    """Return the logits of fastmp's model in the order of `_theirs`."""
    if isinstance(model, GPT):
        return model(tokens_BS)[..., : model.config.vocab_size].transpose(0, 1).flatten()
    types_BS, padding_BS = _types_and_padding(model.encoder, tokens_BS)
    logits_SBV = model(tokens_BS, types_BS, padding_BS)[..., : model.config.vocab_size]
    logits = logits_SBV.transpose(0, 1)[~padding_BS].flatten()
    if not model.encoder.sentence_order:
        return logits
    gathered_SBH = model.gathered(model.hidden(tokens_BS, types_BS, padding_BS))
    return torch.cat([logits, model.sentence_logits(gathered_SBH).flatten()])


def _types_and_padding(encoder: BertConfig, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Return token types (B, S), all that the model has, and padding (B, S): the last quarter of row 1."""
    B, S = tokens_BS.shape
    types_BS = torch.arange(S).expand(B, S) % encoder.num_token_types
    return types_BS, torch.arange(S) >= S - S // 4 * torch.arange(B).view(B, 1)
