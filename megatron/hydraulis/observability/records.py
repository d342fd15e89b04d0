"""The record of one training iteration: what was measured and what the plan predicted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.hydraulis.errors import HydraulisError

# How far below 1 an imbalance may lie by the rounding of sums of replica times.
IMBALANCE_ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationRecord:
    """One iteration, as it is logged, written to ``metrics.jsonl`` and summed up at the end.

    Raises `HydraulisError` when a field contradicts its rule.
    """

    iteration: int
    """Number of the iteration; the first one is 1."""
    lm_loss: float | None
    """Mean loss per trained token of the global batch; None if no token was trained.
    A non-finite loss is held as it is and written as ``null``."""
    grad_norm: float | None
    """Global norm of the gradients before clipping; None if the update was skipped."""
    learning_rate: float
    num_sequences: int
    """Sequences of the global batch."""
    num_tokens: int
    """Trained tokens of the global batch, without padding."""
    strategy: str
    """The strategy in the design's notation, or its name in the pool."""
    iteration_time_s: float
    """Measured wall time of the iteration."""
    predicted_time_s: float
    """Time that the plan expects: its makespan."""
    padding_fraction: float
    """Padding tokens / (trained + padding tokens) over all micro-batches, from 0 to 1."""
    imbalance: float
    """Makespan / rank-weighted mean of the replica times; 1 is perfect."""
    consumed_samples: int
    """Sequences consumed since training began, this iteration included."""
    plan_time_s: float
    """Time spent on planning this iteration."""
    plan_wait_s: float
    """Time that training stood still because the planner had no plan yet; 0 where planning runs
    ahead of training."""
    plan_fetch_s: float
    """Time that the rank which logs took to read the plan in the job's store."""
    replica_times_s: tuple[float, ...]
    """Predicted time of each replica, in the order of the strategy's replicas."""
    plan_status: str
    """How planning ended: the worse of the statuses of dispatch and packing."""
    plan_gap: float | None
    """What of the makespan a better plan with the same strategy could save at most, from 0 to 1;
    None for a plan without a bound."""
    num_marked_plans: int
    """Plans of this process so far, this one included, that a time limit, a failing solver or a
    failing search cut short."""
    regroup_bytes: int | None = None
    """What the rank that logs receives from others and sends to them in the iteration's gather and
    scatter; None in files of a version that did not count them."""
    gather_wait_s: float | None = None
    """Time that the compute of the rank that logs stood still for parameters; None as above."""
    scatter_wait_s: float | None = None
    """Time that it stood still for gradients; None as above."""
    peak_allocated_bytes: int | None = None
    """Most device memory that tensors of the rank which logs took in the iteration; None without
    CUDA, and as above."""
    peak_reserved_bytes: int | None = None
    """Most that its allocator held; None as above."""

    def __post_init__(self) -> None:
        self._require(self.iteration >= 1, "iterations count from 1", iteration=self.iteration)
        for name in ("num_sequences", "num_tokens", "consumed_samples", "num_marked_plans"):
            self._require(getattr(self, name) >= 0, f"{name} is a count", **{name: self._get(name)})
        for name in (
            "iteration_time_s",
            "predicted_time_s",
            "plan_time_s",
            "plan_wait_s",
            "plan_fetch_s",
            "learning_rate",
        ):
            value = getattr(self, name)
            self._require(
                math.isfinite(value) and value >= 0.0,
                f"{name} is finite and not negative",
                **{name: value},
            )
        for name in (
            "regroup_bytes",
            "gather_wait_s",
            "scatter_wait_s",
            "peak_allocated_bytes",
            "peak_reserved_bytes",
        ):
            value = getattr(self, name)
            self._require(
                value is None or (math.isfinite(value) and value >= 0),
                f"{name} is finite and not negative",
                **{name: value},
            )
        self._require(
            0.0 <= self.padding_fraction <= 1.0,
            "padding_fraction lies between 0 and 1",
            padding_fraction=self.padding_fraction,
        )
        self._require(
            math.isfinite(self.imbalance) and self.imbalance >= 1.0 - IMBALANCE_ROUNDING,
            "imbalance is makespan over mean and at least 1",
            imbalance=self.imbalance,
        )
        self._require(bool(self.strategy), "strategy is not empty", strategy=self.strategy)
        self._require(
            all(math.isfinite(time_s) and time_s >= 0.0 for time_s in self.replica_times_s),
            "replica_times_s are finite and not negative",
            replica_times_s=self.replica_times_s,
        )

        self._require(
            self.plan_gap is None or 0.0 <= self.plan_gap <= 1.0,
            "plan_gap lies between 0 and 1",
            plan_gap=self.plan_gap,
        )
        self._require(
            bool(self.plan_status), "plan_status is not empty", plan_status=self.plan_status
        )

    def _get(self, name: str) -> Any:
        return getattr(self, name)

    def _require(self, holds: bool, rule: str, **numbers: Any) -> None:
        if not holds:
            found = ", ".join(f"{name} = {value!r}" for name, value in numbers.items())
            raise HydraulisError(
                f"iteration record: {rule}, but iteration {self.iteration} has {found}; "
                "correct what fills the record"
            )

    @property
    def idle_fraction(self) -> tuple[float, ...]:
        """Share of the predicted makespan that each replica is done before: 1 - time / makespan."""
        makespan_s = max(self.replica_times_s, default=0.0)
        if makespan_s == 0.0:
            return (0.0,) * len(self.replica_times_s)
        return tuple(1.0 - time_s / makespan_s for time_s in self.replica_times_s)

    @property
    def prediction_error(self) -> float | None:
        """|measured / predicted time of the iteration - 1|; None where nothing was predicted."""
        if self.predicted_time_s == 0.0:
            return None
        return abs(self.iteration_time_s / self.predicted_time_s - 1.0)

    @property
    def num_padding(self) -> float:
        """Padding tokens, worked out from `padding_fraction`; 0 where nothing was trained."""
        if self.padding_fraction >= 1.0:
            return 0.0
        return self.num_tokens * self.padding_fraction / (1.0 - self.padding_fraction)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values, `idle_fraction` and `prediction_error` among them.

        What is not finite becomes None, for JSON has no NaN.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("lm_loss", "grad_norm"):
            value = values[name]
            values[name] = value if value is not None and math.isfinite(value) else None
        values["replica_times_s"] = list(self.replica_times_s)
        values["idle_fraction"] = list(self.idle_fraction)
        values["prediction_error"] = self.prediction_error
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> IterationRecord:
        """The record that `to_json` wrote; keys that this version does not know are passed over.

        Raises `HydraulisError` if a key that has no default is missing or a value breaks its rule.
        """
        fields = dataclasses.fields(cls)
        required = [field.name for field in fields if field.default is dataclasses.MISSING]
        missing = [name for name in required if name not in values]
        if missing:
            raise HydraulisError(
                f"iteration record: {len(missing)} of {len(required)} keys are missing "
                f"({', '.join(missing)}); the file was written by another version or by hand"
            )
        known = {field.name: values[field.name] for field in fields if field.name in values}
        known["replica_times_s"] = tuple(known["replica_times_s"])
        return cls(**known)
