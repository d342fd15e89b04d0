"""Baselines: batches for one static strategy with the same number of rows on every replica.

Users of Megatron pack sequences into rows of the context window and give every data-parallel rank
the same number of rows. `fixed_length_shares` does this as well as possible:

- The number of rows is what first-fit decreasing needs for the batch at the context window, rounded
  up to a multiple of the number of replicas.
- The rows are then balanced by tokens: sequences, longest first, go to the row with the fewest
  tokens if it has room; otherwise the rows of first-fit decreasing are used.
- Rows are distributed so that replicas, too, get about the same number of tokens.
- Padding costs nothing; `padded_time_s` is the time with rows padded to the context window, which
  is the actual cost of fixed shapes.

Attention is not balanced: rows with the same number of tokens differ in Σ s².

Two simpler baselines distribute micro-batches to equal replicas round-robin, as plain data
parallelism does: `deal_padded` gives each sequence a row, `deal_fixed_rows` packs rows by best fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.planner.greedy import best_fit
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.replica_plan import MicroBatch, ReplicaPlan
from megatron.hydraulis.strategy import Strategy

__all__ = [
    "deal_fixed_rows",
    "deal_padded",
    "equal_rows",
    "first_fit_decreasing",
    "fixed_length_plan",
    "fixed_length_shares",
    "padded_time_s",
]

MS_PER_S = 1000.0


def first_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Indices of the sequences of each row; longest sequences first, each in the first row with
    room.

    Raises ValueError if a sequence is longer than a row.
    """
    if max(lengths, default=0) > row_tokens:
        raise ValueError(f"a row of {row_tokens} tokens cannot hold one of {max(lengths)}")
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((i for i, free in enumerate(room) if free >= lengths[index]), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[place].append(index)
        room[place] -= lengths[index]
    return rows


def equal_rows(lengths: Sequence[int], window_tokens: int, num_replicas: int) -> list[list[int]]:
    """Indices of the sequences of each row: a multiple of num_replicas rows of about equal tokens.

    A row is empty if there are fewer sequences than rows. The fullest rows come first. Raises
    ValueError if a sequence is longer than the window.
    """
    rows = first_fit_decreasing(lengths, window_tokens)
    num_rows = num_replicas * math.ceil(len(rows) / num_replicas)
    rows += [[] for _ in range(num_rows - len(rows))]
    rows = _dealt(lengths, window_tokens, num_rows) or rows
    return sorted(rows, key=lambda row: -sum(lengths[i] for i in row))


def _dealt(lengths: Sequence[int], window_tokens: int, num_rows: int) -> list[list[int]] | None:
    """Longest sequence first to the row with the fewest tokens; None if one has no room."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    tokens = [0] * num_rows
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = tokens.index(min(tokens))
        rows[place].append(index)
        tokens[place] += lengths[index]
    return rows if max(tokens) <= window_tokens else None


def fixed_length_shares(
    lengths: Sequence[int], window_tokens: int, num_replicas: int
) -> list[list[list[int]]]:
    """Indices of the sequences of each row of each replica; a row may be empty.

    Raises ValueError if a sequence is longer than the window.
    """
    return _shares(equal_rows(lengths, window_tokens, num_replicas), num_replicas)


def _shares(rows: list[list[int]], num_replicas: int) -> list[list[list[int]]]:
    """Rows of each replica, in alternating order, so that all get full and less full ones."""
    shares: list[list[list[int]]] = [[] for _ in range(num_replicas)]
    for turn, start in enumerate(range(0, len(rows), num_replicas)):
        order = range(num_replicas) if turn % 2 == 0 else reversed(range(num_replicas))
        for replica, row in zip(order, rows[start : start + num_replicas], strict=True):
            shares[replica].append(row)
    return shares


def fixed_length_plan(
    lengths: Sequence[int],
    strategy: Strategy,
    cost_model: CostModel,
    *,
    window_tokens: int,
    iteration: int = 0,
) -> IterationPlan:
    """The plan for a strategy of equal replicas, each with the same number of rows.

    Raises ValueError if replicas differ or cannot hold a row.
    """
    schemes = {replica.scheme for replica in strategy.replicas}
    if len(schemes) != 1 or strategy.idle_ranks:
        raise ValueError(
            f"rows are distributed evenly over equal replicas but these are {strategy}"
        )
    scheme = schemes.pop()
    if cost_model.max_tokens(scheme) < window_tokens:
        raise ValueError(
            f"{scheme} holds {cost_model.max_tokens(scheme)} tokens but a row has {window_tokens}"
        )
    coefficients = cost_model.coefficients(scheme)
    shares = fixed_length_shares(lengths, window_tokens, len(strategy.replicas))
    replicas = []
    for replica, rows in zip(strategy.replicas, shares, strict=True):
        micro_batches = tuple(
            MicroBatch(tuple(row), tuple(lengths[i] for i in row)) for row in rows if row
        )
        times_ms = [coefficients.time_ms(m.lengths) for m in micro_batches]
        time_s = pipeline_time_ms(times_ms, scheme.pp) / MS_PER_S
        replicas.append(ReplicaPlan(scheme, replica.ranks, micro_batches, time_s))
    makespan_s = max(replica.predicted_time_s for replica in replicas)
    return IterationPlan(
        iteration=iteration,
        strategy=strategy.name,
        replicas=tuple(replicas),
        predicted_time_s=makespan_s + cost_model.overhead_ms(strategy) / MS_PER_S,
    )


def padded_time_s(plan: IterationPlan, cost_model: CostModel, *, window_tokens: int) -> float:
    """Predicted makespan of such a plan if every row is padded to the context window.

    Padding costs what tokens cost outside attention.
    """
    slowest_ms = 0.0
    for replica in plan.replicas:
        coefficients = cost_model.coefficients(replica.scheme)
        times_ms = [
            coefficients.time_ms(m.lengths)
            + coefficients.b_ms_per_token * (window_tokens - m.num_tokens)
            for m in replica.micro_batches
        ]
        slowest_ms = max(slowest_ms, pipeline_time_ms(times_ms, replica.scheme.pp))
    return slowest_ms / MS_PER_S


def deal_padded(
    lengths: Sequence[int], num_replicas: int, max_tokens: int
) -> list[list[list[int]]]:
    """A row as long as the batch's longest sequence for each sequence.

    Returns the indices of the sequences by replica and micro-batch: micro-batches are filled in the
    batch's order and distributed round-robin. Raises ValueError if a row does not fit.
    """
    per_micro_batch = _rows_per_micro_batch(max(lengths), max_tokens)
    return _round_robin(_chunks(list(range(len(lengths))), per_micro_batch), num_replicas)


def deal_fixed_rows(
    lengths: Sequence[int], num_replicas: int, max_tokens: int, row_tokens: int
) -> list[list[list[list[int]]]]:
    """Rows of row_tokens, packed by best fit.

    Returns the indices of the sequences by replica, micro-batch and row; micro-batches are
    distributed round-robin. Raises ValueError if a row does not fit.
    """
    falling = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows = best_fit(falling, lengths, row_tokens)
    return _round_robin(_chunks(rows, _rows_per_micro_batch(row_tokens, max_tokens)), num_replicas)


def _rows_per_micro_batch(row_tokens: int, max_tokens: int) -> int:
    if row_tokens > max_tokens:
        raise ValueError(f"a micro-batch of {max_tokens} tokens cannot hold a row of {row_tokens}")
    return max_tokens // row_tokens


def _chunks[T](items: Sequence[T], size: int) -> list[list[T]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def _round_robin[T](items: Sequence[T], num_replicas: int) -> list[list[T]]:
    return [list(items[replica::num_replicas]) for replica in range(num_replicas)]
