"""The micro-batches that are measured: sizes from small to large, each packed in several ways."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.profiler.measurements import GridPoint, MeasuredPoint, Measurements

SINGLE_LONG = "single long"
"""As few sequences as the longest length allows."""
MANY_SHORT = "many short"
MIXTURE = "mixture"
"""Half of the tokens long, half short."""
SAMPLED = "sampled"
"""Drawn from given lengths."""


def survey(
    scheme: str,
    points: Iterable[GridPoint],
    measure: Callable[[str, GridPoint], MeasuredPoint],
    measurements: Measurements,
    *,
    limit_bytes: int | None = None,
    report: Callable[[MeasuredPoint], None] = lambda point: None,
) -> list[MeasuredPoint]:
    """Measure the points of a scheme by rising size, until one does not fit.

    Args:
        scheme: in its notation.
        points: by rising size.
        measure: runs a point of a scheme. Collective over the ranks of the job, as the survey is.
        measurements: of this run and of an earlier one, whose results are taken.
        limit_bytes: memory that a rank may take. A point that is expected to exceed it, judged by
            those before, is not tried: on a CPU that would end the process.
        report: called with each result.

    Returns:
        A result for every point. After one that does not fit, points of as many tokens or more are
        not tried.
    """
    results: list[MeasuredPoint] = []
    for point in points:
        result = measurements.find(scheme, point)
        if result is None:
            why_not = _why_not_tried(results, point.num_tokens, limit_bytes)
            why_not = why_not or measurements.begin(scheme, point)
            if why_not:
                result = MeasuredPoint(scheme=scheme, point=point, why_not=why_not)
            else:
                result = measure(scheme, point)
            measurements.add(result)
        results.append(result)
        report(result)
    return results


def _why_not_tried(
    before: Sequence[MeasuredPoint], num_tokens: int, limit_bytes: int | None
) -> str:
    """Why a point cannot fit, by the results of smaller ones; empty where it may."""
    too_many = next((each.point.num_tokens for each in before if not each.fits), None)
    if too_many is not None and num_tokens >= too_many:
        return f"{too_many} tokens do not fit"
    expected = expected_peak_bytes(before, num_tokens)
    if limit_bytes is not None and expected is not None and expected > limit_bytes:
        return (
            f"expected to take {expected / 1e9:.3g} GB of the {limit_bytes / 1e9:.3g} GB of a rank"
        )
    return ""


def expected_peak_bytes(before: Sequence[MeasuredPoint], num_tokens: int) -> float | None:
    """Peak memory of a micro-batch by the two largest sizes measured before it.

    Memory grows linearly with the tokens. None where fewer than two sizes are known.
    """
    peaks: dict[int, int] = {}
    for each in before:
        if each.fits:
            size = each.point.num_tokens
            peaks[size] = max(each.peak_bytes, peaks.get(size, 0))
    if len(peaks) < 2:
        return None
    smaller, larger = sorted(peaks)[-2:]
    slope = max(0.0, (peaks[larger] - peaks[smaller]) / (larger - smaller))
    return peaks[larger] + slope * (num_tokens - larger)


def grid(
    max_tokens: int,
    *,
    longest: int,
    short: int,
    num_sizes: int,
    sample_from: Sequence[int] = (),
    seed: int = 0,
) -> tuple[GridPoint, ...]:
    """The points of a scheme, by rising size, and within a size by rising Σs².

    Sizes are max_tokens and its halves, num_sizes of them or as many as hold a short sequence.
    Packings of one size separate the quadratic term of the time model, sizes the other two.

    Args:
        max_tokens: of the largest micro-batch.
        longest: tokens of the longest sequence, ``--seq-length``.
        short: tokens of a short sequence.
        num_sizes: how many sizes.
        sample_from: lengths of a corpus in tokens, from which each size is packed as well.
        seed: of that sample.

    Raises ConfigurationError for a number below 1 and a short sequence longer than max_tokens.
    """
    for what, value in (
        ("the most tokens", max_tokens),
        ("the longest sequence", longest),
        ("a short sequence", short),
        ("the number of sizes", num_sizes),
    ):
        if value < 1:
            raise ConfigurationError(
                f"grid of a profile: {what} must be at least 1 but is {value}; give more"
            )
    if short > min(max_tokens, longest):
        raise ConfigurationError(
            f"grid of a profile: a short sequence fits the smallest micro-batch but has {short} "
            f"tokens where a micro-batch has at most {max_tokens} and a sequence {longest}; lower "
            f"--short-tokens or raise --max-tokens"
        )
    sizes = [max_tokens >> halvings for halvings in range(num_sizes)]
    draw = random.Random(seed)
    points: dict[tuple[int, ...], GridPoint] = {}
    for size in sorted(size for size in sizes if size >= short):
        half = size // 2
        packings = [
            (MANY_SHORT, _pieces(size, short)),
            (MIXTURE, _pieces(half, longest) + _pieces(size - half, short)),
            (SINGLE_LONG, _pieces(size, longest)),
        ]
        if sample_from:
            packings.append((SAMPLED, _sampled(size, longest, sample_from, draw)))
        for packing, lengths in packings:
            ordered = tuple(sorted(lengths, reverse=True))
            points.setdefault(ordered, GridPoint(packing, ordered))
    return tuple(sorted(points.values(), key=lambda p: (p.num_tokens, p.sum_of_squares)))


def _pieces(num_tokens: int, length: int) -> list[int]:
    """Sequences of a length, and what is left as a last one."""
    num_whole, rest = divmod(num_tokens, length)
    return [length] * num_whole + ([rest] if rest else [])


def _sampled(
    num_tokens: int, longest: int, sample_from: Sequence[int], draw: random.Random
) -> list[int]:
    """Random lengths that fill a micro-batch; the last one is cut to fit."""
    lengths: list[int] = []
    left = num_tokens
    while left:
        lengths.append(min(draw.choice(sample_from), longest, left))
        left -= lengths[-1]
    return lengths
