"""Files of a transformers model: untrusted input, validated before use.

`stored_tensors` reads only the headers of safetensors files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastmp.config import GPTConfig
from fastmp.config.file_access import FOREIGN_ERRORS, open_regular, read_json
from fastmp.hf.config_json import ALIASES, from_transformers
from fastmp.hf.families import CONVERSIONS
from fastmp.training.checkpoint.chunks import TensorChunk
from fastmp.training.checkpoint.format import DTYPES
from fastmp.training.checkpoint.tensor_files import ChunkReader, OpenFile

CONFIG, INDEX, ALONE = "config.json", "model.safetensors.index.json", "model.safetensors"
_MAX_CONFIG, _MAX_INDEX, _MAX_HEADER = 1 << 20, 1 << 26, 1 << 27  # bytes
_SIZES = {  # values of config.json that are dimensions of tensors
    *("vocab_size", "hidden_size", "ffn_hidden_size", "num_layers", "num_heads", "num_kv_heads"),
    *("head_size", "max_seq_len", "moe.num_experts", "moe.top_k", "moe.expert_ffn_hidden_size"),
    *("bert.num_token_types", "n_shared_experts", "latent.kv_rank", "latent.q_rank"),
    *("latent.nope_size", "latent.rope_size", "latent.value_size"),
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # Qwen/Qwen3-0.6B
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
# buffers in files of old versions
NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|embeddings\.position_ids$")
# bytes beside scales, which fastmp.hf.quantized makes numbers of
LOW_PRECISION = {"F8_E4M3": torch.float8_e4m3fn}
_STORED_DTYPES = {**DTYPES, **LOW_PRECISION}
_PACKED = re.compile(r"_(blocks|scales)$")
Shape = tuple[int, ...]


class Stored(NamedTuple):
    """A tensor in a safetensors file, as its header has it; its bytes begin at `start`."""

    file: str
    dtype: str
    shape: Shape
    start: int

    def read(self, reader: ChunkReader, chunk: TensorChunk) -> Tensor:
        """Return a chunk in the stored dtype. `reader` is of the file; the chunk lies inside `shape`."""
        dtype = _STORED_DTYPES[self.dtype]
        out = torch.empty(chunk.sizes, dtype=dtype)
        reader.read(self.start, self.shape, dtype, chunk, out)
        return out


def check_shape(
    path: Path, name: str, stored: Stored, shape: Shape, wanted: str = f"{CONFIG} says", why: str = ""
) -> None:
    """Raise ValueError, naming the file and the tensor, unless a tensor is stored with shape `shape`."""
    if stored.shape != shape:
        raise ValueError(
            f"{path / stored.file}: {name} has shape {list(stored.shape)}, {wanted} {list(shape)}{why}"
        )


def is_transformers(path: Path) -> bool:
    """Return True if `path` is the directory of a transformers model."""
    return (path / CONFIG).is_file()


def read_config(path: Path) -> dict[str, Any]:
    """Return the config.json in the directory `path`. Raises ValueError naming the file."""
    check_local(path)
    return read_json(path / CONFIG, _MAX_CONFIG)


def model_of(path: Path, content: Mapping[str, Any], ignored: Sequence[str] = ()) -> tuple[str, GPTConfig]:
    """Return the model type and the model that a directory's config.json describes.

    Args:
        path: the directory. content: of its config.json.
        ignored: keys that are skipped.

    Raises:
        ValueError: as `from_transformers`, naming the file; one line.
    """
    try:
        return from_transformers(content, ignored)
    except ValueError as error:
        raise ValueError(f"{path / CONFIG}: " + "; ".join(str(error).splitlines())) from None
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"{path / CONFIG}: a value that makes no sense: {error}") from None


def check_local(path: Path) -> None:
    """Raise ValueError, with a download command, unless `path` is a directory."""
    if not path.is_dir():
        download = ""
        if _HUB_ID.fullmatch(str(path)) and not str(path).startswith("runs/"):
            download = f": hf download {path} --local-dir {path.name}, then pass {path.name}"
        raise ValueError(f"{path}: not a local directory; fastmp downloads nothing{download}")


def check_sizes(path: Path, content: Mapping[str, Any], stored: Mapping[str, Stored]) -> None:
    """Raise ValueError for a size in config.json beyond the stored tensors, before a model is allocated.

    Every size is a dimension of a tensor, or counts tensors (layers, separately stored experts).
    """
    family = CONVERSIONS.get(str(content.get("model_type")))
    if family is None:
        return
    longest = max((max(each.shape, default=0) for each in stored.values()), default=0)
    for key, value in content.items():
        ours = family.fields.get(ALIASES.get(key, key))
        name = key if ours is None else ours.ours
        if name == "max_seq_len" and "position_embedding.weight" not in family.model_weights:
            continue
        limit = len(stored) if name == "num_layers" else max(longest, len(stored))
        if name in _SIZES and type(value) is int and value > limit:
            what = f"{limit} tensors" if name == "num_layers" else f"dimensions of up to {longest}"
            raise ValueError(f"{path / CONFIG}: {key} is {short(value)}, but the files have {what}")


_WRAPPERS = {  # {prefix of a wrapper of models: how to save without it}
    "_orig_mod.": "call save_pretrained of the model that torch.compile was given",
    "module.": "call save_pretrained of model.module, which the wrapper holds",
    "base_model.model.": "call merge_and_unload() of the PEFT model, then save_pretrained of the result",
}


def missing(path: Path, name: str, stored: Mapping[str, Stored], whose: str) -> ValueError:
    """Return the error for a tensor that no file has; it names the prefix with which one has it.

    Args:
        path: the directory.
        name: of the tensor.
        stored: the tensors that are there.
        whose: the model type or class that has it.
    """
    for each in stored:
        prefix = each.removesuffix(name)
        if prefix != each and prefix.endswith("."):
            how = next((how for start, how in _WRAPPERS.items() if prefix.startswith(start)), "")
            return ValueError(
                f"{path / stored[each].file}: {name} is stored as {short(each)}, with the prefix {prefix!r}; "
                f"{how or 'remove it from all names'}"
            )
    first, _, rest = name.partition(".")
    if rest in stored:
        return ValueError(
            f"{path / stored[rest].file}: {name} is stored as {short(rest)}, without the prefix '{first}.'; "
            "load it in transformers as the class with a head, then save_pretrained"
        )
    return ValueError(f"{path}: {name} is missing, which {whose} has")


@contextmanager
def opened(path: Path) -> Iterator[OpenFile]:
    """Open a file for reading. Raises ValueError naming the file."""
    try:
        descriptor = open_regular(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    try:
        yield OpenFile(path, descriptor)
    finally:
        os.close(descriptor)


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Return the tensors of a directory by name. Raises ValueError for damaged or inconsistent files."""
    if not (path / INDEX).exists():
        if not (path / ALONE).exists():
            pickled = any(path.glob("*.bin")) or any(path.glob("*.pt*"))
            why = "; pickled weights are never read: save them as safetensors first" if pickled else ""
            raise ValueError(f"{path} has neither {ALONE} nor {INDEX}{why}")
        return _header(path, ALONE)
    index = read_json(path / INDEX, _MAX_INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise ValueError(f"{path / INDEX}: weight_map must map names of tensors to files")
    for file in set(index.values()):
        if not _FILE_NAME.fullmatch(file):
            raise ValueError(f"{path / INDEX}: {short(file)} is not the name of a safetensors file beside it")
    found: dict[str, Stored] = {}
    for file in sorted(set(index.values())):
        for name, stored in _header(path, file).items():
            if index.get(name) != file:
                raise ValueError(f"{path / INDEX}: {short(name)} is in {file}, but not so in the index")
            found[name] = stored
    for name, file in index.items():
        if name not in found:
            raise ValueError(f"{path / INDEX}: {short(name)} is not in {file}")
    return found


def _header(path: Path, name: str) -> dict[str, Stored]:
    """Return the tensors of a safetensors file, after checking that they cover its bytes exactly."""
    with opened(path / name) as file:
        size = os.fstat(file.descriptor).st_size
        length = int.from_bytes(os.pread(file.descriptor, 8, 0), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise ValueError(f"{path / name} is no safetensors file: a header of {length} bytes")
        text = os.pread(file.descriptor, length, 8)
    try:
        entries = _entries(text)
    except FOREIGN_ERRORS:
        raise ValueError(f"{path / name} is no safetensors file: its header cannot be read") from None
    found, at = {}, 0
    for each, dtype, shape, (start, end) in entries:
        kind = _STORED_DTYPES.get(dtype)
        packed = dtype == "U8" and _PACKED.search(each)
        if kind is None or not (kind.is_floating_point or packed or NOT_WEIGHTS.search(each)):
            raise ValueError(
                f"{path / name}: {short(each)} is {short(dtype)}, not numbers that can be trained"
            )
        if start != at or end - start != prod(shape) * kind.itemsize:
            raise ValueError(f"{path / name}: the bytes of {short(each)} do not fit its shape")
        found[each], at = Stored(name, dtype, shape, 8 + length + start), end
    if 8 + length + at != size:
        raise ValueError(f"{path / name} has {size} bytes, its tensors end at {8 + length + at}")
    return found


def _entries(text: bytes) -> list[tuple[str, str, Shape, tuple[int, int]]]:
    """Return (name, dtype, shape, (start, end)) of each tensor in a header, in file order.

    Invalid headers raise errors of various types.
    """
    if text[:1] != b"{" or text.rstrip(b" ")[-1:] != b"}":
        raise ValueError("other bytes than JSON and spaces")
    header = json.loads(text, object_pairs_hook=_each_once)
    metadata = header.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("metadata that is no text")
    found = []
    for each, entry in header.items():
        shape, (start, end) = entry["shape"], entry["data_offsets"]
        if len(entry) != 3 or type(entry["dtype"]) is not str or not isinstance(shape, list):
            raise ValueError("another description than that of a tensor")
        if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
            raise ValueError("a size that is no number")
        found.append((each, entry["dtype"], tuple(shape), (start, end)))
    return sorted(found, key=lambda entry: entry[3])


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name twice")
    return dict(pairs)
