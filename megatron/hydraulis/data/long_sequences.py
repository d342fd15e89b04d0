"""What becomes of a document with more tokens than ``--seq-length`` can train."""

from typing import Literal, get_args

__all__ = ["LONG_SEQUENCES", "LongSequences"]

LongSequences = Literal["split", "truncate", "drop", "error"]
"""``split`` cuts into pieces of ``seq_length``, of which neighbours share a token, so that no
transition is lost; ``truncate`` keeps the first ``seq_length``; ``drop`` leaves the document out;
``error`` refuses it."""

LONG_SEQUENCES: tuple[LongSequences, ...] = get_args(LongSequences)
