"""Leaves out what upstream says on the way to iteration 1 and a user of this program cannot use."""

from __future__ import annotations

import logging
import warnings

__all__ = ["quieten_upstream"]

_ONLY_ERRORS = (
    "megatron.core.models.gpt.gpt_model",  # announces another model at every one that is built
    "megatron.core.datasets.indexed_dataset",
    "megatron.core.rerun_state_machine",  # announces a mode that is always the same here
)
_ONLY_WARNINGS = (
    "matplotlib",
    "megatron.core.num_microbatches_calculator",  # counts micro-batches of one data-parallel group
    "megatron.core.tokenizers.utils.build_tokenizer",  # the padded vocabulary, also in a dry run
)


def quieten_upstream(rank: int) -> None:
    """Raise the levels of single loggers; log lines, validation and errors are not among them."""
    for name in _ONLY_ERRORS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in _ONLY_WARNINGS:
        logging.getLogger(name).setLevel(logging.WARNING)
    if rank != 0:
        # Every rank would report the same process groups.
        logging.getLogger("megatron.hydraulis").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|megatron)\b.*")
    # Upstream's barriers name no device. They take the current one, which is this rank's own.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under")
