"""Iterations whose loss or gradient norm is not finite: left out and counted, or the end of a run.

The engine has updated nothing then, on no rank: parameters, moments and learning rate are those of
the iteration before.
"""

from __future__ import annotations

import torch.distributed as dist

from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.errors import NonFiniteLossError
from megatron.hydraulis.loop.batch_reader import PlannedBatch
from megatron.hydraulis.loop.checkpointing import LoopCounters
from megatron.hydraulis.runtime.outcome import StepOutcome

__all__ = ["NonFiniteIterations"]

MAX_SEQUENCES_NAMED = 16
"""Sequences that an error names before it only counts the rest."""


class NonFiniteIterations:
    """Says of every iteration whether the run goes on after it.

    Args:
        num_allowed: iterations in a row that may be left out; 0 stops at the first.
        counters: of the run, where they are counted.
    """

    def __init__(self, num_allowed: int, counters: LoopCounters) -> None:
        self._num_allowed = num_allowed
        self._counters = counters

    def note(
        self, iteration: int, planned: PlannedBatch, outcome: StepOutcome, corpus: Corpus
    ) -> None:
        """Collective where the iteration trained tokens and updated nothing.

        Raises:
            NonFiniteLossError: it is one more in a row than allowed; names the sequences.
        """
        counters = self._counters
        if outcome.updated:
            counters.num_skipped_in_a_row = 0
        if outcome.updated or not outcome.loss.num_tokens:
            return
        counters.num_skipped += 1
        counters.num_skipped_in_a_row += 1
        in_a_row = counters.num_skipped_in_a_row
        what, sequences = _cause(planned, outcome, corpus)
        if in_a_row > self._num_allowed:
            before = (
                f"; it is iteration {in_a_row} in a row and --max-skipped-in-a-row is "
                f"{self._num_allowed}"
                if self._num_allowed
                else ""
            )
            fix = "" if self._num_allowed else "; --skip-nan-iterations leaves such updates out and"
            fix += " goes on" if fix else ""
            raise NonFiniteLossError(
                f"iteration {iteration}: {what}, {sequences}{before}; lower --lr or look at these "
                f"sequences{fix}"
            )
        if dist.get_rank() == 0:
            print(
                f"warning: iteration {iteration} is left out: {what}, {sequences} "
                f"({in_a_row} in a row, of at most {self._num_allowed}; {counters.num_skipped} in "
                "all)",
                flush=True,
            )


def _cause(planned: PlannedBatch, outcome: StepOutcome, corpus: Corpus) -> tuple[str, str]:
    """Collective: the ranks that saw a bad micro-batch tell the others its sequences."""
    own = [
        sequence_id
        for index in outcome.bad_micro_batches
        for sequence_id in planned.micro_batch_sequences[index]
    ]
    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    bad = sorted({sequence_id for ids in everyone for sequence_id in ids})
    if outcome.loss.is_finite:
        what = f"the gradient norm is {outcome.gradient_norm}"
        bad = sorted(planned.batch.sequence_ids)
        where = "the loss is finite, so any sequence of the batch may be the cause: "
    else:
        what = f"the loss is {outcome.loss.loss_sum}"
        where = "in micro-batches with sequences "
    named = ", ".join(
        f"{sequence_id} ({corpus.describe(sequence_id)})"
        for sequence_id in bad[:MAX_SEQUENCES_NAMED]
    )
    more = f" and {len(bad) - MAX_SEQUENCES_NAMED} more" if len(bad) > MAX_SEQUENCES_NAMED else ""
    return what, f"{where}{named}{more}"
