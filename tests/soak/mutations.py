"""Random damage to bytes and JSON documents, for the soak run of damaged inputs."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

BYTES = rb"""
\ " { ] , - [2J NaN null Infinity true 0 -1 1e999 -1e999 9223372036854775807 18446744073709551616 "\ud800"
"../../../../etc/passwd" '/etc/passwd' !!python/object/apply:os.system c__builtin__.eval
""".split()
BYTES += [b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\n", b"\x1b[2J", b"cos\nsystem\n", b"9" * 5000]
BYTES += [b"[" * 4000, b'{"a":' * 4000, b"[" * 99_999, b"0x" + b"f" * 5000]
JSON = json.loads(
    """[null, true, false, 0, 1, -1, 2, 257, 2147483648, 4294967296, 9223372036854775808,
    -9223372036854775809, 0.5, 1e308, NaN, Infinity, -Infinity, "", "x", "byte", "bpe", "BPE",
    "../../etc/passwd", "/dev/zero", "\\u0000", "\\ud800", [], {}, [[]], [1, 2, 3],
    {"a": 1}, ["a", "b"], {"type": "BPE"}]"""
)
JSON += [10**400, "x" * 100_000]
TOML = """
0 1 -1 2 7 64 4096 1048576 2147483648 9223372036854775807 9223372036854775808 1e308 1e999 nan inf -inf 0.5 1.0
-0.0 1e-320 true false "" "x" "../x" "/etc/passwd" "/dev/zero" "a\\u0000b" "a\\nb" [] [1] [0.9,0.95] [1,'a']
[[1],[2]] {} {a=1} 1979-05-27 07:32:00 "softmax" "muon" "rope" "swiglu" "zero_bubble" "full" "float16" "wsd"
""".split()
TOML += ["9" * 400, "9" * 5000, "0x" + "f" * 5000, "[" * 5000, "[" * 300 + "]" * 300, "'\x1b[2J'"]
TOML += ["{a = " * 300 + "1" + "}" * 300, '"' + "x" * 30_000 + '"', "[" + "1," * 9_000 + "1]"]
PARTS = [  # what tokenizers do to text before it is cut and after, and other objects of their files
    {"type": "Lowercase"},
    {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "\x00"},
    {"type": "Replace", "pattern": {"Regex": "((("}, "content": ""},
    {"type": "Replace", "pattern": {"String": ""}, "content": "xx"},
    {"type": "Precompiled", "precompiled_charsmap": "AAAAAAAA/////w=="},
    {"type": "Split", "pattern": {"Regex": "(.+)+\\1"}, "behavior": "Isolated", "invert": True},
    {"type": "Sequence", "pretokenizers": []},
    {"type": "Metaspace", "replacement": "", "prepend_scheme": "always"},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 9}}], "pair": []},
    {"strategy": {"Fixed": 1 << 60}, "direction": "Left", "pad_id": 0, "pad_token": "x", "pad_type_id": 0},
    {"max_length": 1, "strategy": "LongestFirst", "stride": 1 << 40, "direction": "Right"},
    {"id": 1 << 31, "content": "x", "special": True, "lstrip": True, "normalized": True, "rstrip": False},
    {"type": "BPE", "dropout": 0.5, "vocab": {}, "merges": [], "ignore_merges": True},
]


def mutate_bytes(draw: random.Random, raw: bytes) -> bytes:
    """`raw` after one to four edits."""
    data = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice((0, 1, 2, 8, 200)))
        kind = draw.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[at:end]
        elif kind == 2:
            data[at:end] = draw.choice(BYTES)
        elif kind == 3:
            data[at:at] = data[draw.randrange(len(data) + 1) :][:200]
        elif kind == 4:
            data[at:end] = draw.randbytes(draw.randint(0, 8))
        elif kind == 5 and draw.random() < 0.3:
            del data[at:]
        else:
            numbers = [i for i in range(len(data)) if 48 <= data[i] < 58]
            if numbers:
                at = draw.choice(numbers)
                data[at : at + 1] = draw.choice(
                    (b"", b"0", b"9", b"99999999999", b"-", b".", b"e9", b"1e400")
                )
    return bytes(data)


def slots(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield (*path, key)
        yield from slots(node[key], (*path, key))


def mutate_json(draw: random.Random, text: str, *below: str) -> Any:
    """The document `text` with one to three values (below some key) replaced, renamed or left out."""
    document = json.loads(text)
    for _ in range(draw.randint(1, 3)):
        places = [path for path in slots(document) if path[: len(below)] == below and path != below]
        if not places:
            break
        groups: dict[Any, list[Any]] = {}
        for path in places:  # a vocabulary of thousands must not hide the rest
            groups.setdefault(path[:3], []).append(path)
        *parents, last = draw.choice(draw.choice(list(groups.values())))
        target = document
        for key in parents:
            target = target[key]
        kind = draw.randrange(4)
        if kind == 0:
            del target[last]
        elif kind == 1 and isinstance(target, dict):
            target[draw.choice(["", "x", "type", "id", "../x", "\0", str(last) + "s"])] = target.pop(last)
        else:
            target[last] = copy.deepcopy(draw.choice(JSON if draw.random() < 0.7 else PARTS))
    return document
