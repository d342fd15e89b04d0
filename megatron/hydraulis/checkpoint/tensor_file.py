"""A tensor at the end of a file, as torch.save writes it."""

from __future__ import annotations

from typing import IO, Any, cast

import torch

__all__ = ["save_tensor"]


def save_tensor(tensor: torch.Tensor, file: Any) -> None:
    """Write it. Raises OSError, also where torch makes something else of a full disk."""
    try:
        torch.save(tensor, cast(IO[bytes], file))
    except RuntimeError as error:
        # After a failed write torch ends its archive all the same, and complains of its length.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
