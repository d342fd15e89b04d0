"""Silences known warnings of upstream and torch while they are imported."""

import logging
import warnings

__all__ = ["silence_warnings_of_imports"]


def silence_warnings_of_imports() -> None:
    """Call it before importing them.

    A dozen warnings per rank, that Apex, Transformer Engine or a CUDA runtime are absent, would
    hide an error, which is one line.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.(core|training)\b.*")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
