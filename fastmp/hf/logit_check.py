"""Comparison of a converted model's logits with transformers' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmp.config import BertConfig, GPTConfig
from fastmp.distributed.groups import ParallelGroups
from fastmp.hf.config_json import from_transformers, shortened
from fastmp.hf.stored import read_config
from fastmp.hf.weight_io import TransformersReader
from fastmp.nn import GPT, Bert, Placement
from fastmp.training.checkpoint.format import DTYPES
from fastmp.training.checkpoint.model_weights import load_weights
from fastmp.training.checkpoint.storage import CheckpointReader
from fastmp.training.checkpoint.tensor_files import is_finite

__all__ = ["verify"]

BATCH, LENGTH = 2, 32
# of the second comparison, so that windows and original lengths end within LENGTH tokens
WINDOW, ORIGINAL, POSITIONS = 5, 24, 64
# relative to the largest logit; transformers' float64 decoders use float32 in norms, its BERT does not
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-5}
BERT_BOUND = 1e-9  # in float64


def verify(path: Path, reader: CheckpointReader, config: GPTConfig, *, ignored: Sequence[str] = ()) -> str:
    """Compare the logits of transformers' model and of fastmp's on a few random tokens.

    Both compute on the CPU in float32, or in float64 for float64 weights. A model with sliding windows or
    scaled rotary positions is compared a second time, with windows and original lengths in config.json that
    end within these tokens. A BERT gets all token types and padding, and its logits include those of the
    order of sentences. One model is in memory at a time.

    Args:
        path: the directory of the transformers model.
        reader: of the same weights for fastmp's model.
        config: of fastmp's model.
        ignored: keys of config.json that `config` was made without.

    Returns:
        A line with the largest error.

    Raises:
        ValueError: the error is too large, weights are not finite, transformers reports missing or unexpected
            keys, or it is not installed.
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
    tokens_BS = torch.randint(config.vocab_size, (BATCH, LENGTH), generator=generator)
    # 1. The model as it is, and one whose windows and original lengths end within these tokens.
    content = read_config(path)
    cases = [_Case(tokens_BS[:, : config.max_seq_len], config)]
    changed = shortened(content, WINDOW, ORIGINAL, POSITIONS)
    if changed != content:
        read = from_transformers(changed, ignored)[1]
        names = ("sliding_window", "full_attention_layers", "rope_scaling", "max_seq_len")
        other = replace(config, **{name: getattr(read, name) for name in names})
        cases.append(_Case(tokens_BS[:, : read.max_seq_len], other, changed))
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
    # 2. transformers' logits.
    theirs, expected = theirs.to(dtype).eval(), list[Tensor]()
    with torch.no_grad():
        for case in cases:
            model = theirs if case.content is None else _again(theirs, case.content)
            expected.append(_theirs(model, encoder, case.tokens_BS))
        del theirs, model
    if not all(bool(logits.isfinite().all()) for logits in expected):
        raise ValueError(f"{_not_finite(reader)}, so there are no logits to compare; pass --no-verify")
    # 3. fastmp's, from the same weights.
    relative = BERT_BOUND if wide and encoder is not None else BOUNDS[dtype]
    name, lines = str(dtype).removeprefix("torch."), []
    for case, wanted in zip(cases, expected, strict=True):
        with torch.no_grad():
            ours = (GPT if encoder is None else Bert)(case.config, Placement(dtype=dtype)).eval()
            load_weights(reader, config, [ours], ParallelGroups.alone())
            found = _ours(ours, case.tokens_BS)
            del ours
        worst, largest = (found - wanted).abs().max().item(), wanted.abs().max().item()
        bound = relative * max(1.0, largest)
        line = f"largest error of logits {worst:.3g}, of numbers up to {largest:.3g}, in {name}"
        if not worst <= bound:
            how = "" if case.content is None else f", with {_changes(content, case.content)}"
            raise ValueError(
                f"{path}: {line}{how}, more than {bound:.3g}: fastmp does not compute this model"
            )
        lines.append((worst, line))
    return f"verified: {max(lines)[1]}"


class _Case(NamedTuple):
    """Tokens, the model that gets them, and its config.json if that is not the one in the directory."""

    tokens_BS: Tensor
    config: GPTConfig
    content: Mapping[str, Any] | None = None


def _again(theirs: Any, content: Mapping[str, Any]) -> Any:
    """Return transformers' model with another config.json and the same weights, which are not copied."""
    from fastmp.hf.mesh_loading import parameters_on_meta

    config = type(theirs.config).from_dict(
        {key: value for key, value in content.items() if key != "quantization_config"}
    )
    dtype = next(theirs.parameters()).dtype
    with parameters_on_meta():
        model = type(theirs)(config)
    model.load_state_dict(theirs.state_dict(), assign=True)
    return model.to(dtype).eval()


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {short(after[key])}" for key in after if before.get(key) != after[key])


def _not_finite(reader: CheckpointReader) -> str:
    """Return a sentence that names the tensors with NaN or infinite numbers."""
    first, others = "", list[str]()
    for name, tensor in reader.manifest.tensors.items():
        for shard in tensor.shards:
            numbers = reader.tensor(name, shard.chunk)
            if is_finite(numbers):
                continue
            theirs = reader.stored_name(name, shard) if isinstance(reader, TransformersReader) else name
            if first:
                others.append(theirs)
                continue
            wrong = int((~numbers.isfinite()).sum())
            first = f"{reader.directory / shard.file}: {theirs} has {wrong} numbers that are NaN or infinite"
    if not first:
        return f"{reader.directory}: weights are finite, but logits of transformers' model are not"
    return first + (f", and so have {', '.join(others[:5])}" if others else "")


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
