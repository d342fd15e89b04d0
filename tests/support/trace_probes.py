"""Operations of a pipeline in a trace."""

from __future__ import annotations

from itertools import pairwise

from megatron.hydraulis.observability.trace import Span, Spans


def one_f_one_b(num_micro_batches: int, num_stages: int, stage: int) -> list[tuple[str, int]]:
    """The operations of a stage, in order."""
    num_ahead = min(num_stages - 1 - stage, num_micro_batches)
    order = [("forward", k) for k in range(num_ahead)]
    for k in range(num_micro_batches - num_ahead):
        order += [("forward", num_ahead + k), ("backward", k)]
    return order + [
        ("backward", k) for k in range(num_micro_batches - num_ahead, num_micro_batches)
    ]


def operations(spans: Spans) -> list[tuple[str, int]]:
    """The recorded operations, in order."""
    return [
        (span.name, int(span.detail["micro_batch"])) for span in spans.named("forward", "backward")
    ]


def overlaps(spans: Spans) -> list[tuple[Span, Span]]:
    """Adjacent pairs of which the second starts before the first has ended."""
    return [
        (earlier, later) for earlier, later in pairwise(spans) if later.start_us < earlier.end_us
    ]
