"""Token ids of a dataset looked over quickly: long stretches of its ``.bin``, not sequences."""

from collections.abc import Iterator

import numpy as np

from megatron.hydraulis.data.index import DatasetIndex, bin_path
from megatron.hydraulis.errors import DataError

__all__ = ["extreme_tokens", "spread_stretches"]


def spread_stretches(
    first_token: int, end_token: int, *, stretch_tokens: int, budget_tokens: int
) -> tuple[range, ...]:
    """Stretches of the positions ``first_token`` up to, without, ``end_token``, in order.

    All of them when they fit in the budget, else as many as it pays for, at least one, spread
    evenly.
    """
    num_stretches = -(-(end_token - first_token) // stretch_tokens)
    num_read = min(num_stretches, max(1, budget_tokens // stretch_tokens))
    starts = [first_token + k * num_stretches // num_read * stretch_tokens for k in range(num_read)]
    return tuple(range(start, min(start + stretch_tokens, end_token)) for start in starts)


def extreme_tokens(
    index: DatasetIndex, stretches: tuple[range, ...]
) -> Iterator[tuple[range, int, int]]:
    """Each non-empty stretch with the lowest and the highest token id in it.

    Reads rather than maps the file: a page fault per 4 KiB is slow on a network file system.

    Raises:
        DataError: the ``.bin`` cannot be read, or no longer reaches to the end of a stretch.
    """
    path = bin_path(index.prefix)
    try:
        with open(path, "rb", buffering=0) as file:
            for stretch in stretches:
                file.seek(stretch.start * index.token_type.itemsize)
                tokens = np.fromfile(file, index.token_type, len(stretch))
                if len(tokens) < len(stretch):
                    raise DataError(
                        f"dataset '{index.prefix}': the .bin held {index.num_tokens} tokens when "
                        f"its size was checked but ends after {stretch.start + len(tokens)} now; "
                        f"leave the files of a running job alone"
                    )
                yield stretch, int(tokens.min()), int(tokens.max())
    except OSError as error:
        raise DataError(
            f"dataset '{index.prefix}': cannot read {path}: {error.strerror}"
        ) from error
