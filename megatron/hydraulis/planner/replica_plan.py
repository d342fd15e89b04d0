"""The share of one replica in an iteration: its micro-batches, in their order."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.errors import PlanError, StrategyError
from megatron.hydraulis.json_object import JsonObject
from megatron.hydraulis.strategy import Replica, Scheme


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """Consecutive cp ranks of a replica that share one packed row.

    Raises PlanError unless there is at least 1 rank, from rank 0 on, and 0 or more sequences.
    """

    offset: int
    """Its first cp coordinate, from 0."""
    size: int
    """Cp ranks in it."""
    num_sequences: int
    """Number of its sequences in the micro-batch, after those of the group before it. A group
    without sequences runs a row of padding: see docs/architecture.md."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.offset < 0 or self.num_sequences < 0:
            raise PlanError(
                f"a context group has at least 1 rank, from rank 0 on, and 0 or more sequences but "
                f"there is {self.to_json()} as [offset, size, sequences]; correct it"
            )

    @property
    def columns(self) -> range:
        """Its cp coordinates."""
        return range(self.offset, self.offset + self.size)

    def to_json(self) -> list[int]:
        """``[offset, size, num_sequences]``."""
        return [self.offset, self.size, self.num_sequences]


@dataclass(frozen=True, slots=True)
class GroupShare:
    """One context group's share of a micro-batch."""

    group: ContextGroup
    sequences: tuple[int, ...]
    """Indices into the lengths of the global batch; possibly none."""
    lengths: tuple[int, ...]
    """Tokens of each of them."""
    row_tokens: int | None = None
    """Tokens of its row, padding included; None for what the scheme needs, `Scheme.row_tokens`."""

    @property
    def num_tokens(self) -> int:
        """Σ s."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences packed and run as one unit of a replica's schedule: one row, or one per group.

    Raises PlanError when it is empty, when a sequence is listed twice, when a length is below 1,
    unless groups are consecutive from cp rank 0 on, have powers of two as sizes, begin at multiples
    of their size and have all sequences, and unless rows are one for each group and have room.
    """

    sequences: tuple[int, ...]
    """Indices into the lengths of the global batch, in the order of packing."""
    lengths: tuple[int, ...]
    """Tokens of each of these sequences."""
    groups: tuple[ContextGroup, ...] = ()
    """A wave: how the cp ranks of a scheme like ``cp8~`` are grouped for this micro-batch. Empty
    for one group of all cp ranks."""
    rows: tuple[int, ...] = ()
    """Tokens of each group's row, padding included, where rows are rounded up: see
    `Limits.row_tokens`. Empty where every row is as short as its scheme allows."""

    def __post_init__(self) -> None:
        if not self.sequences:
            raise PlanError(
                "a micro-batch holds at least 1 sequence but has 0; leave empty micro-batches out"
            )
        if len(self.sequences) != len(self.lengths):
            raise PlanError(
                f"a micro-batch has one length a sequence but {len(self.sequences)} sequences "
                f"and {len(self.lengths)} lengths; list as many of both"
            )
        if len(set(self.sequences)) != len(self.sequences) or min(self.sequences) < 0:
            raise PlanError(
                f"a micro-batch lists distinct sequences counted from 0 but has "
                f"{list(self.sequences)}; name each sequence once"
            )
        if min(self.lengths) < 1:
            raise PlanError(
                f"a sequence has at least 1 token but a length is {min(self.lengths)}; "
                f"drop empty sequences from the batch"
            )
        if self.groups:
            self._check_groups()
        if self.rows:
            self._check_rows()

    def _check_groups(self) -> None:
        for group in self.groups:
            if group.size & (group.size - 1) or group.offset % group.size:
                raise self._groups_error(
                    "the size of a context group is a power of two and its offset a multiple of it"
                )
        if self.groups[0].offset or any(
            before.offset + before.size != after.offset for before, after in pairwise(self.groups)
        ):
            raise self._groups_error("context groups follow on one another from offset 0")
        if sum(group.num_sequences for group in self.groups) != len(self.sequences):
            raise self._groups_error(
                f"context groups share all {len(self.sequences)} sequences of their micro-batch"
            )

    def _check_rows(self) -> None:
        num_groups = max(1, len(self.groups))
        if len(self.rows) != num_groups or min(self.rows) < 1 or sum(self.rows) < self.num_tokens:
            raise PlanError(
                f"each of {num_groups} rows has room for its sequences, together "
                f"{self.num_tokens} tokens, but there are rows of {list(self.rows)} tokens; "
                f"correct the rows"
            )

    def _groups_error(self, rule: str) -> PlanError:
        return PlanError(
            f"{rule} but there are {[group.to_json() for group in self.groups]} as "
            f"[offset, size, sequences]; correct the groups"
        )

    @property
    def num_tokens(self) -> int:
        """Σ s: what fills memory."""
        return sum(self.lengths)

    def shares(self, width: int) -> tuple[GroupShare, ...]:
        """Shares of the context groups, by offset; ``width`` is the replica's cp."""
        if not self.groups:
            whole = ContextGroup(0, width, len(self.sequences))
            row_tokens = self.rows[0] if self.rows else None
            return (GroupShare(whole, self.sequences, self.lengths, row_tokens),)
        self.check_width(width)
        found = []
        first = 0
        for group, row_tokens in zip_longest(self.groups, self.rows):
            part = slice(first, first + group.num_sequences)
            found.append(GroupShare(group, self.sequences[part], self.lengths[part], row_tokens))
            first = part.stop
        return tuple(found)

    def shares_of(self, scheme: Scheme) -> tuple[tuple[Scheme, GroupShare], ...]:
        """Share of each context group on a replica's scheme, with the scheme it costs like."""
        return tuple(
            (scheme.of_context_group(share.group.size), share) for share in self.shares(scheme.cp)
        )

    def time_ms(self, scheme: Scheme, coefficients: Callable[[Scheme], Coefficients]) -> float:
        """Time on a stage of a replica's scheme: that of the slowest context group, empty or not.

        coefficients: those of a scheme, by a cost model.
        """
        return max(
            coefficients(of_group).time_ms(share.lengths, share.row_tokens)
            for of_group, share in self.shares_of(scheme)
        )

    def share_of(self, column: int, width: int) -> GroupShare:
        """Share of the group of a cp coordinate; raises IndexError outside the width."""
        for share in self.shares(width):
            if column in share.group.columns:
                return share
        raise IndexError(f"no cp coordinate {column} in a replica of cp {width}")

    def check_width(self, width: int) -> None:
        """Raise PlanError when there are groups that do not cover this many cp ranks."""
        if self.groups and sum(group.size for group in self.groups) != width:
            raise self._groups_error(f"context groups cover all {width} cp ranks of their replica")

    def to_json(self) -> dict[str, Any]:
        """``{"sequences": [...], "lengths": [...]}``; ``"groups"`` and ``"rows"`` if there are."""
        content: dict[str, Any] = {
            "sequences": list(self.sequences),
            "lengths": list(self.lengths),
        }
        if self.groups:
            content["groups"] = [group.to_json() for group in self.groups]
        if self.rows:
            content["rows"] = list(self.rows)
        return content

    @classmethod
    def from_json(cls, content: JsonObject) -> "MicroBatch":
        """Read what to_json wrote; PlanError for anything else."""
        sequences, lengths = content.integers("sequences"), content.integers("lengths")
        groups = _groups_from_json(content) if content.has("groups") else ()
        rows = content.integers("rows") if content.has("rows") else ()
        content.check_all_read()
        return cls(sequences, lengths, groups, rows)


def _groups_from_json(content: JsonObject) -> tuple[ContextGroup, ...]:
    groups = []
    for entry in content.array("groups"):
        match entry:
            case [int(offset), int(size), int(num_sequences)] if bool not in map(type, entry):
                groups.append(ContextGroup(offset, size, num_sequences))
            case _:
                raise PlanError(
                    f"{content.what}: a context group is [offset, size, sequences] but there is "
                    f"{entry!r:.60}; list three whole numbers"
                )
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The share of one replica, possibly empty.

    Raises PlanError for a predicted time that is negative or not finite, and for ranks or context
    groups that do not fit the scheme.
    """

    scheme: Scheme
    ranks: tuple[int, ...]
    """Ranks as in strategy.Replica: stage by stage, in a stage cp by cp, in that tp by tp."""
    micro_batches: tuple[MicroBatch, ...]
    """Micro-batches in the order in which they run, which is part of the predicted time."""
    predicted_time_s: float

    def __post_init__(self) -> None:
        try:
            Replica(self.scheme, self.ranks)
        except StrategyError as error:
            raise PlanError(f"replica of a plan: {error}") from None
        check_time("predicted_time_s of a replica", self.predicted_time_s)
        for micro_batch in self.micro_batches:
            if micro_batch.groups and not self.scheme.splits_cp:
                raise PlanError(
                    f"only a scheme like cp8~ splits its cp ranks but {self.scheme} has a "
                    f"micro-batch with context groups; leave them out or plan for a scheme with '~'"
                )
            micro_batch.check_width(self.scheme.cp)

    @property
    def replica(self) -> Replica:
        """The replica, for the positions of its ranks."""
        return Replica(self.scheme, self.ranks)

    @property
    def num_sequences(self) -> int:
        """Number of sequences of all micro-batches."""
        return sum(len(micro_batch.sequences) for micro_batch in self.micro_batches)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all micro-batches."""
        return sum(micro_batch.num_tokens for micro_batch in self.micro_batches)

    def shares(self, micro_batch: MicroBatch) -> tuple[tuple[Scheme, GroupShare], ...]:
        """`MicroBatch.shares_of` this replica's scheme."""
        return micro_batch.shares_of(self.scheme)

    def times_ms(self, coefficients: Callable[[Scheme], Coefficients]) -> list[float]:
        """`MicroBatch.time_ms` of each micro-batch."""
        return [each.time_ms(self.scheme, coefficients) for each in self.micro_batches]

    def to_json(self) -> dict[str, Any]:
        """``{"scheme": ..., "ranks": ..., "predicted_time_s": ..., "micro_batches": [...]}``."""
        return {
            "scheme": self.scheme.to_json(),
            "ranks": list(self.ranks),
            "predicted_time_s": float(self.predicted_time_s),
            "micro_batches": [micro_batch.to_json() for micro_batch in self.micro_batches],
        }

    @classmethod
    def from_json(cls, content: JsonObject) -> "ReplicaPlan":
        """Read what to_json wrote; PlanError for anything else."""
        scheme = content.nested(content.value("scheme"), f"scheme of {content.what}")
        replica = cls(
            scheme=Scheme.from_json(scheme),
            ranks=content.integers("ranks"),
            micro_batches=tuple(
                MicroBatch.from_json(
                    content.nested(entry, f"micro-batch {index} of {content.what}")
                )
                for index, entry in enumerate(content.array("micro_batches"))
            ),
            predicted_time_s=content.number("predicted_time_s"),
        )
        scheme.check_all_read()
        content.check_all_read()
        return replica


def check_time(what: str, value: float) -> None:
    """Raise PlanError unless a time is finite and not negative."""
    if not 0.0 <= value < math.inf:
        raise PlanError(f"{what} must be finite and not negative but is {value}; correct it")
