"""Shared by the tests of checkpoints: the state of one rank, and manifests that say what a test wants."""

from __future__ import annotations

import json
import zlib

from fastmp.training.checkpoint.storage import ShardedTensorRef


def refs(tensors):
    return {name: ShardedTensorRef.whole(tensor) for name, tensor in tensors.items()}


def rewrite(path, change):
    """Apply `change` to the manifest, in place or by its result, and give it the right checksum."""
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    body = json.dumps(change(manifest) or manifest).encode()
    (path / "manifest.json").write_bytes(b'{"crc32": %d, "manifest": ' % zlib.crc32(body) + body + b"}\n")
