"""The share of one replica in an iteration: its micro-batches, in their order."""

import math
from dataclasses import dataclass
from typing import Any

from megatron.hydraulis.errors import PlanError, StrategyError
from megatron.hydraulis.json_object import JsonObject
from megatron.hydraulis.scheme import Replica, Scheme

__all__ = ["MicroBatch", "ReplicaPlan", "check_time"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences packed into one row and run as one unit of a replica's schedule.

    Raises PlanError when it is empty, when a sequence comes twice, or when a length is below 1.
    """

    sequences: tuple[int, ...]
    """Indices into the lengths of the global batch, in the order of packing."""
    lengths: tuple[int, ...]
    """Tokens of each of these sequences."""

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

    @property
    def num_tokens(self) -> int:
        """Σ s: what fills memory."""
        return sum(self.lengths)

    @property
    def sum_of_squares(self) -> int:
        """Σ s²: what attention computes."""
        return sum(length * length for length in self.lengths)

    def to_json(self) -> dict[str, Any]:
        """``{"sequences": [...], "lengths": [...]}``."""
        return {"sequences": list(self.sequences), "lengths": list(self.lengths)}

    @classmethod
    def from_json(cls, content: JsonObject) -> "MicroBatch":
        """Read what to_json wrote; PlanError for anything else."""
        micro_batch = cls(content.integers("sequences"), content.integers("lengths"))
        content.check_all_read()
        return micro_batch


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The share of one replica, possibly none.

    Raises PlanError for a predicted time that is negative or not finite and for ranks that are
    not those of the scheme.
    """

    scheme: Scheme
    ranks: tuple[int, ...]
    """As in strategy.Replica: stage by stage, in a stage cp by cp, in that tp by tp."""
    micro_batches: tuple[MicroBatch, ...]
    """In the order in which they run; the order is part of the predicted time."""
    predicted_time_s: float

    def __post_init__(self) -> None:
        try:
            Replica(self.scheme, self.ranks)
        except StrategyError as error:
            raise PlanError(f"replica of a plan: {error}") from None
        check_time("predicted_time_s of a replica", self.predicted_time_s)

    @property
    def replica(self) -> Replica:
        """The replica, for the positions of its ranks."""
        return Replica(self.scheme, self.ranks)

    @property
    def num_sequences(self) -> int:
        """Sequences of all micro-batches."""
        return sum(len(micro_batch.sequences) for micro_batch in self.micro_batches)

    @property
    def num_tokens(self) -> int:
        """Tokens of all micro-batches."""
        return sum(micro_batch.num_tokens for micro_batch in self.micro_batches)

    def to_json(self) -> dict[str, Any]:
        """``{"scheme": ..., "ranks": ..., "predicted_time_s": ..., "micro_batches": [...]}``."""
        return {
            "scheme": _scheme_to_json(self.scheme),
            "ranks": list(self.ranks),
            "predicted_time_s": float(self.predicted_time_s),
            "micro_batches": [micro_batch.to_json() for micro_batch in self.micro_batches],
        }

    @classmethod
    def from_json(cls, content: JsonObject) -> "ReplicaPlan":
        """Read what to_json wrote; PlanError for anything else."""
        replica = cls(
            scheme=_scheme_from_json(
                content.nested(content.value("scheme"), f"scheme of {content.what}")
            ),
            ranks=content.integers("ranks"),
            micro_batches=tuple(
                MicroBatch.from_json(
                    content.nested(entry, f"micro-batch {index} of {content.what}")
                )
                for index, entry in enumerate(content.array("micro_batches"))
            ),
            predicted_time_s=content.number("predicted_time_s"),
        )
        content.check_all_read()
        return replica


def _scheme_to_json(scheme: Scheme) -> dict[str, Any]:
    """``{"tp", "cp", "pp"}``, and ``layers`` and ``splits_cp`` where the scheme has them."""
    content: dict[str, Any] = {"tp": scheme.tp, "cp": scheme.cp, "pp": scheme.pp}
    if scheme.layers is not None:
        content["layers"] = list(scheme.layers)
    if scheme.splits_cp:
        content["splits_cp"] = True
    return content


def _scheme_from_json(content: JsonObject) -> Scheme:
    try:
        scheme = Scheme(
            tp=content.integer("tp"),
            cp=content.integer("cp"),
            pp=content.integer("pp"),
            layers=content.integers("layers") if content.has("layers") else None,
            splits_cp=content.flag("splits_cp") if content.has("splits_cp") else False,
        )
    except StrategyError as error:
        raise PlanError(f"{content.what}: {error}") from None
    content.check_all_read()
    return scheme


def check_time(what: str, value: float) -> None:
    """Raise PlanError unless a time is finite and not negative."""
    if not 0.0 <= value < math.inf:
        raise PlanError(f"{what} must be finite and not negative but is {value}; correct it")
