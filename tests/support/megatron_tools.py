"""A writer of Megatron-LM's indexed format, which knows nothing of the reader: fields one after another."""

from __future__ import annotations

import struct

CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "d": 6, "f": 7, "H": 8}


def write_megatron(prefix, documents, *, kind="H", modes=None):
    """Write PREFIX.bin and PREFIX.idx: a document is a list of sequences, each a list of token ids.

    kind: the letter of the ids' type in `struct`.
    """
    sequences = [sequence for document in documents for sequence in document]
    pointers, ends = [], [0]
    with open(f"{prefix}.bin", "wb") as file:
        for sequence in sequences:
            pointers.append(file.tell())
            file.write(struct.pack(f"<{len(sequence)}{kind}", *sequence))
    for document in documents:
        ends.append(ends[-1] + len(document))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, CODES[kind]))
        file.write(struct.pack("<QQ", len(sequences), len(ends)))
        file.write(struct.pack(f"<{len(sequences)}i", *map(len, sequences)))
        file.write(struct.pack(f"<{len(pointers)}q", *pointers))
        file.write(struct.pack(f"<{len(ends)}q", *ends))
        if modes is not None:
            file.write(struct.pack(f"<{len(modes)}b", *modes))
    return prefix


def texts_of_bytes(texts, *, end=256):
    """Documents of one sequence each, as the byte tokenizer has them, end-of-text behind."""
    return [[[*text.encode(), *([] if end is None else [end])]] for text in texts]
