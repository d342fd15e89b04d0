"""The share of one replica in an iteration: its micro-batches, in their order."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.errors import PlanError, StrategyError
from megatron.hydraulis.json_object import JsonObject
from megatron.hydraulis.planner.micro_batch import (
    ContextGroup,
    GroupShare,
    MicroBatch,
    check_fits_scheme,
)
from megatron.hydraulis.scheme import Replica, Scheme

__all__ = ["ContextGroup", "GroupShare", "MicroBatch", "ReplicaPlan", "check_time"]


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """The share of one replica, possibly none.

    Raises PlanError for a predicted time that is negative or not finite, for ranks that are not
    those of the scheme, and for context groups that do not fit it.
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
        for micro_batch in self.micro_batches:
            check_fits_scheme(micro_batch, self.scheme)

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

    def shares(self, micro_batch: MicroBatch) -> tuple[tuple[Scheme, GroupShare], ...]:
        """What each context group of a micro-batch runs, and the scheme that it costs like."""
        return tuple(
            (self.scheme.of_context_group(share.group.size), share)
            for share in micro_batch.shares(self.scheme.cp)
        )

    def times_ms(self, coefficients: Callable[[Scheme], Coefficients]) -> list[float]:
        """Time of each micro-batch on a stage: that of its slowest context group, empty ones too.

        coefficients: of a scheme, as a cost model gives them.
        """
        return [
            max(
                coefficients(scheme).time_ms(share.lengths)
                for scheme, share in self.shares(micro_batch)
            )
            for micro_batch in self.micro_batches
        ]

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
