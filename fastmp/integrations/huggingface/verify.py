"""Both models run on a few tokens: that a translation is right is measured rather than believed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastmp.config import GPTConfig
from fastmp.nn import GPT, Bert, Placement
from fastmp.parallel.groups import ParallelGroups
from fastmp.train.checkpoint.storage import CheckpointReader
from fastmp.train.checkpoint.weights import load_weights

__all__ = ["verify"]

BATCH, LENGTH = 2, 16
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-5}  # of the largest logit; float64 has float32 in it there
BERT_BOUND = 1e-9  # of a BERT in float64, which has none in it


def verify(path: Path, reader: CheckpointReader, config: GPTConfig) -> str:
    """Compare the logits of transformers' model in the directory `path` with fastmp's, loaded by `reader`.

    Both compute in float32, of float64 weights in float64, on the CPU. Of a BERT, which sees two types of
    tokens and padding, the logits are those of tokens and of the order of sentences. Returns a line with the
    largest error.
    ValueError where it is too large, keys are missing or left over, or transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise ValueError(
            "verifying needs transformers, which is not installed (pip install transformers); "
            "--no-verify goes on without"
        )
    import transformers

    encoder = config.bert
    auto = "CausalLM" if encoder is None else "PreTraining" if encoder.sentence_order else "MaskedLM"
    wide = reader.manifest.tensors["model/word_embedding.weight"].dtype == "F64"
    dtype = torch.float64 if wide else torch.float32
    generator = torch.Generator().manual_seed(1)
    size = (BATCH, min(LENGTH, config.max_seq_len))
    tokens_BS = torch.randint(config.vocab_size, size, generator=generator)
    options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    try:
        make = getattr(transformers, f"AutoModelFor{auto}").from_pretrained
        theirs, report = make(str(path), dtype=dtype, **options)
    except Exception as error:  # of any kind: it is theirs
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{path}: transformers cannot load it: {what}") from None
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found := report.get(kind):
            raise ValueError(
                f"{path}: transformers says {kind.replace('_', ' ')}: {sorted(map(str, found))[:5]}"
            )
    ours = (GPT if encoder is None else Bert)(config, Placement(dtype=dtype)).eval()
    load_weights(reader, config, [ours], ParallelGroups.alone())
    with torch.no_grad():
        if isinstance(ours, Bert):
            expected, found = _of_bert(theirs.eval(), ours, tokens_BS)
        else:
            expected = theirs.eval()(tokens_BS).logits
            found = ours(tokens_BS)[..., : config.vocab_size].transpose(0, 1)
    worst = (found - expected).abs().max().item()
    largest = expected.abs().max().item()
    relative = BERT_BOUND if wide and encoder is not None else BOUNDS[dtype]
    bound = relative * max(1.0, largest)
    name = str(dtype).removeprefix("torch.")
    line = f"largest error of logits {worst:.3g}, of numbers up to {largest:.3g}, in {name}"
    if not worst <= bound:
        raise ValueError(f"{path}: {line}, more than {bound:.3g}: fastmp does not compute this model")
    return f"verified: {line}"


def _of_bert(theirs: Any, ours: Bert, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
    """All logits of transformers' BERT and of ours: of tokens that are no padding, and of the order."""
    B, S = tokens_BS.shape
    types_BS = torch.arange(S).expand(B, S) % ours.encoder.num_token_types
    padding_BS = torch.arange(S) >= S - S // 4 * torch.arange(B).view(B, 1)  # the last quarter of row 1
    made = theirs(tokens_BS, attention_mask=(~padding_BS).long(), token_type_ids=types_BS)
    hidden_SBH = ours.gathered(ours.hidden(tokens_BS, types_BS, padding_BS))
    logits_BSV = ours(tokens_BS, types_BS, padding_BS)[..., : ours.config.vocab_size].transpose(0, 1)
    expected = [getattr(made, "prediction_logits" if ours.encoder.sentence_order else "logits")[~padding_BS]]
    found = [logits_BSV[~padding_BS]]
    if ours.encoder.sentence_order:
        expected.append(made.seq_relationship_logits)
        found.append(ours.sentence_logits(hidden_SBH))
    return torch.cat([each.flatten() for each in expected]), torch.cat([each.flatten() for each in found])
