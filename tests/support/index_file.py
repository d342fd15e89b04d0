"""An ``.idx`` written by the layout of its documentation, without torch and Megatron."""

import struct
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

_INT32 = 4


def write_idx(path: Path, documents: Sequence[Sequence[int]]) -> Path:
    """Write the index of int32 documents, each given by the lengths of its stored sequences."""
    lengths = [length for document in documents for length in document]
    ends = list(accumulate(lengths, initial=0))
    boundaries = list(accumulate(map(len, documents), initial=0))
    path.write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, _INT32, len(lengths), len(boundaries))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(lengths)}q", *(end * _INT32 for end in ends[:-1]))
        + struct.pack(f"<{len(boundaries)}q", *boundaries)
    )
    return path
