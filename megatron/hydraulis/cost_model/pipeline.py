"""Exact time of a 1F1B pipeline over micro-batches of unequal work."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FORWARD_SHARE", "Operation", "pipeline_schedule", "pipeline_time_ms"]

FORWARD_SHARE = 1.0 / 3.0
"""Share of the forward in a micro-batch's time: the backward of a matrix product is two products
of its size, for the gradients of input and weight (arXiv 2104.04473, appendix)."""


def pipeline_time_ms(
    times_ms: Sequence[float], num_stages: int, *, forward_share: float = FORWARD_SHARE
) -> float:
    """Time from the first forward to the last backward of a replica.

    times_ms: shape (num_micro_batches,), forward + backward of each micro-batch on one stage, in
    the order in which they run; every stage takes the same. Messages cost nothing here: they
    belong to the times. 0.0 without micro-batches.

    Stage s of p runs ``w = p-1-s`` forwards ahead, then one forward and one backward in turn,
    then the remaining backwards (1F1B, arXiv 2006.09503 and 2104.04473). An operation starts when
    its stage is free and its input is there, so for micro-batch k on stage s::

        F(s, k) = max(F(s-1, k), end of the operation before on s) + f_k
        B(s, k) = max(B(s+1, k), end of the operation before on s) + b_k

    The operation before F(s, k) is B(s, k-w-1), or F(s, k-1) while stage s is still filling; that
    before B(s, k) is F(s, k+w), or B(s, k-1) once no forwards are left. Example: times 4, 1, 4 on
    2 stages with a forward of a third take 16, although Σt + (p-1)·max t = 13.

    Raises ValueError for a negative or non-finite time, fewer than one stage, or a forward share
    outside [0, 1].
    """
    _check(times_ms, num_stages, forward_share)
    if num_stages == 1:
        return math.fsum(times_ms)
    return _last_backward_end_ms(times_ms, num_stages, forward_share)


@dataclass(frozen=True, slots=True)
class Operation:
    """Forward or backward of one micro-batch on one stage."""

    is_forward: bool
    stage: int
    micro_batch: int
    start_ms: float
    """After the first forward of the replica has begun."""
    end_ms: float


def pipeline_schedule(
    times_ms: Sequence[float], num_stages: int, *, forward_share: float = FORWARD_SHARE
) -> list[Operation]:
    """When each forward and backward of a replica runs, by the recurrence of `pipeline_time_ms`.

    Operations of a stage come in the order in which it runs them. Arguments and errors are those
    of `pipeline_time_ms`.
    """
    _check(times_ms, num_stages, forward_share)
    operations: list[Operation] = []
    _last_backward_end_ms(times_ms, num_stages, forward_share, operations)
    return operations


def _check(times_ms: Sequence[float], num_stages: int, forward_share: float) -> None:
    if num_stages < 1:
        raise ValueError(f"a pipeline has at least 1 stage, not {num_stages}")
    if not 0.0 <= forward_share <= 1.0:
        raise ValueError(f"the forward's share is between 0 and 1, not {forward_share}")
    for time_ms in times_ms:
        if not 0.0 <= time_ms < math.inf:
            raise ValueError(f"a micro-batch takes a finite time from 0 on, not {time_ms} ms")


def _last_backward_end_ms(
    times_ms: Sequence[float],
    num_stages: int,
    forward_share: float,
    operations: list[Operation] | None = None,
) -> float:
    """The recurrence; ``operations``, if given, is appended to."""
    num_micro_batches = len(times_ms)
    forward_ms = [time_ms * forward_share for time_ms in times_ms]
    backward_ms = [time_ms - forward for time_ms, forward in zip(times_ms, forward_ms, strict=True)]
    free_ms = [0.0] * num_stages
    # End of the newest backward of each stage. One more entry: the loss follows the last stage's
    # own forward, which free_ms holds already.
    backward_end_ms = [0.0] * (num_stages + 1)
    # In round r stage s runs backward r-1-w_s and then forward r. Stage s+1 has run that backward
    # in round r-1, stage s-1 that forward in this round: every input is known when it is needed.
    for round_ in range(num_micro_batches + num_stages):
        forward_end_ms = 0.0
        for stage in range(num_stages):
            done_ms = free_ms[stage]
            finished = round_ - num_stages + stage
            if 0 <= finished < num_micro_batches:
                start_ms = max(done_ms, backward_end_ms[stage + 1])
                done_ms = start_ms + backward_ms[finished]
                backward_end_ms[stage] = done_ms
                if operations is not None:
                    operations.append(Operation(False, stage, finished, start_ms, done_ms))
            if round_ < num_micro_batches:
                start_ms = max(done_ms, forward_end_ms)
                done_ms = start_ms + forward_ms[round_]
                forward_end_ms = done_ms
                if operations is not None:
                    operations.append(Operation(True, stage, round_, start_ms, done_ms))
            free_ms[stage] = done_ms
    return backward_end_ms[0]
