"""The files of a run folder, and ``metrics.jsonl`` with one record per iteration."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

from megatron.hydraulis.errors import HydraulisError, why_not_written

METRICS_FILE_NAME = "metrics.jsonl"
CONFIG_FILE_NAME = "config.json"
SUMMARY_FILE_NAME = "summary.png"
REPORT_FILE_NAME = "report.html"
REPORT_PICTURES_FOLDER_NAME = "report"
HAS_ENDED = "has_ended"
"""Key of ``config.json``: whether the run ended without an error."""

_LEFT_BY_A_RUN = (
    METRICS_FILE_NAME,
    CONFIG_FILE_NAME,
    SUMMARY_FILE_NAME,
    "tensorboard",
    REPORT_FILE_NAME,
    REPORT_PICTURES_FOLDER_NAME,
)

_DAMAGES = (ValueError, TypeError, KeyError, AttributeError, RecursionError, HydraulisError)
"""Errors that reading a damaged record raises."""
_UNLIMITED = ("lm_loss", "grad_norm")
"""Numbers that may be anything, also not finite. All others are finite and at least 0."""
_LOWEST: dict[str, float] = {
    "iteration": 1,
    # Sums of replica times are rounded.
    "imbalance": 1 - 1e-6,
}
_HIGHEST: dict[str, float] = {"padding_fraction": 1, "plan_gap": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationRecord:
    """One iteration: what was measured and what the plan predicted.

    Raises `HydraulisError` if a value breaks its rule.
    """

    iteration: int
    """Number of the iteration; the first one is 1."""
    lm_loss: float | None
    """Mean loss of the global batch by the weights of its tokens; None if they have none.
    A non-finite loss is kept here and written as ``null``."""
    grad_norm: float | None
    """Global norm of the gradients before clipping; None if the update was skipped."""
    learning_rate: float
    num_sequences: int
    """Sequences of the global batch."""
    num_tokens: int
    """Tokens that the sequences of the global batch predict, without padding."""
    trained_tokens: int
    """Tokens of these with a weight above 0."""
    strategy: str
    """Name of the strategy in the pool, or its notation."""
    iteration_time_s: float
    """Measured wall time."""
    predicted_time_s: float
    """Time that the plan predicts: its makespan."""
    padding_fraction: float
    """Padding tokens / (padding tokens + ``num_tokens``) over all micro-batches, from 0 to 1."""
    imbalance: float
    """Makespan / rank-weighted mean of the replica times; 1 is perfect."""
    consumed_samples: int
    """Sequences consumed since training began, including this iteration."""
    plan_time_s: float
    """Time spent on planning this iteration."""
    plan_wait_s: float
    """Time that training waited for the plan; 0 if planning runs ahead of training."""
    plan_fetch_s: float
    """Time that the logging rank took to read the plan from the job's store."""
    replica_times_s: tuple[float, ...]
    """Predicted time of each replica, in the order of the strategy's replicas."""
    plan_status: str
    """The worse of the statuses with which dispatch and packing ended."""
    plan_gap: float | None
    """Largest share of the makespan that a better plan with the same strategy could save, from 0
    to 1; None for a plan without a bound."""
    num_marked_plans: int
    """Number of plans of this process so far, including this one, that a time limit or a failing
    solver or search cut short."""
    regroup_bytes: int | None = None
    """Bytes that the logging rank receives from and sends to others in gather and scatter; None in
    files of versions that did not count them."""
    skipped_bytes: int | None = None
    """Bytes that it did not exchange, as arenas still held frozen parameters; None as above."""
    gather_wait_s: float | None = None
    """Time that compute on the logging rank waited for parameters; None as above."""
    scatter_wait_s: float | None = None
    """Time that it waited for gradients; None as above."""
    column_bytes: int | None = None
    """Bytes that it receives and sends where cp ranks share weights; None as above."""
    column_wait_s: float | None = None
    """Time that its compute waited for them; None as above."""
    peak_allocated_bytes: int | None = None
    """Peak device memory of tensors on the logging rank; None without CUDA, and as above."""
    peak_reserved_bytes: int | None = None
    """Peak device memory held by its allocator; None as above."""
    expert_load: float | None = None
    """Tokens of the busiest expert of a layer over the mean of its experts, in the worst layer;
    None without experts, where the update was skipped, and as above."""
    balancing_loss: float | None = None
    """Mean loss of routers that balances experts, without its coefficient; None as above and
    without such a loss."""
    router_z_loss: float | None = None
    """Their mean z-loss; None likewise."""
    router_bias_range: tuple[float, float] | None = None
    """Smallest and largest bias of a router, after the update; None as above and without biases."""
    mtp_losses: tuple[float, ...] = ()
    """Mean loss of each layer of multi-token prediction; empty without any, and where nothing was
    updated."""
    model_flops: float | None = None
    """Operations that the sequences need, see `Frozen.causal_flops`; None as above."""
    strategy_times_s: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """The planner's ``bound_s`` and ``found_s`` of each strategy that holds the batch; empty where
    there was no choice, and as above."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if isinstance(value, int | float) and name not in _UNLIMITED:
                low, high = _LOWEST.get(name, 0), _HIGHEST.get(name, math.inf)
                holds = low <= value <= high and value < math.inf
                self._require(holds, name, f"is finite, at least {low} and at most {high}")
            elif isinstance(value, str):
                self._require(bool(value), name, "is not empty")
        self._require(
            all(0 <= time_s < math.inf for time_s in self.replica_times_s),
            "replica_times_s",
            "are finite and at least 0",
        )
        self._require(
            all(
                0 <= t["bound_s"] <= t["found_s"] < math.inf for t in self.strategy_times_s.values()
            ),
            "strategy_times_s",
            "are finite, at least 0 and not below their bounds",
        )

    def _require(self, holds: bool, name: str, rule: str) -> None:
        if not holds:
            raise HydraulisError(
                f"iteration record: {name} {rule}, but iteration {self.iteration} has "
                f"{name} = {getattr(self, name)!r}; correct the code that fills the record"
            )

    @property
    def idle_fraction(self) -> tuple[float, ...]:
        """Share of the predicted makespan after each replica's end: 1 - time / makespan."""
        makespan_s = max(self.replica_times_s, default=0.0)
        if makespan_s == 0.0:
            return (0.0,) * len(self.replica_times_s)
        return tuple(1.0 - time_s / makespan_s for time_s in self.replica_times_s)

    @property
    def tokens_per_s(self) -> float | None:
        """`num_tokens` over the measured time; None if no time has passed."""
        return self.num_tokens / self.iteration_time_s if self.iteration_time_s else None

    @property
    def idle_share(self) -> float:
        """Predicted share of the makespan that ranks of replicas wait for the slowest replica,
        from 0 to 1: 1 - 1 / imbalance."""
        return max(0.0, 1.0 - 1.0 / self.imbalance)

    @property
    def prediction_error(self) -> float | None:
        """|measured / predicted time of the iteration - 1|; None if the prediction is 0."""
        if self.predicted_time_s == 0.0:
            return None
        return abs(self.iteration_time_s / self.predicted_time_s - 1.0)

    @property
    def num_padding(self) -> float:
        """Padding tokens, derived from `padding_fraction`; 0 if nothing was trained."""
        if self.padding_fraction >= 1.0:
            return 0.0
        return self.num_tokens * self.padding_fraction / (1.0 - self.padding_fraction)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values, with `idle_fraction` and `prediction_error`.

        Non-finite values become None, because JSON has no NaN.
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
        """The record that `to_json` wrote; unknown keys are ignored.

        Earlier versions, which trained every token, did not write ``trained_tokens``.

        Raises `HydraulisError` if a key without a default is missing or a value breaks its rule.
        """
        values = {"trained_tokens": values.get("num_tokens"), **values}
        known: dict[str, Any] = {}
        missing = []
        for field in dataclasses.fields(cls):
            if field.name in values:
                value = values[field.name]
                _check_type(field.name, str(field.type), value)
                known[field.name] = tuple(value) if isinstance(value, list) else value
            elif field.default is field.default_factory is dataclasses.MISSING:
                missing.append(field.name)
        if missing:
            raise HydraulisError(
                f"iteration record: {len(missing)} keys are missing ({', '.join(missing)}); the "
                "file was written by another version or by hand"
            )
        return cls(**known)


_JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "str": str,
    "tuple[float, ...]": (list, tuple),
    "tuple[float, float]": (list, tuple),
    "Mapping[str, Mapping[str, float]]": dict,
}
"""Annotation of a field -> what it is in JSON."""
_LARGEST = 2**63


def _check_type(name: str, annotation: str, value: Any) -> None:
    """Raise `HydraulisError` for a JSON value that a field of a record cannot have."""
    kind = annotation.removesuffix(" | None")
    if value is None and kind != annotation:
        return
    is_right = isinstance(value, _JSON_TYPES[kind]) and not isinstance(value, bool)
    if isinstance(value, int):
        is_right &= abs(value) < _LARGEST
    if kind == "tuple[float, float]":
        is_right = is_right and len(value) == 2
    if not is_right:
        raise HydraulisError(
            f"iteration record: {name} must be of type {kind} but is {value!r:.60}; the file is "
            f"damaged or was written by another program"
        )
    if isinstance(value, list | tuple):
        for each in value:
            _check_type(name, "float", each)


class UnbufferedFile:
    """A file whose content is on the disk when `append` returns, or HydraulisError is raised.

    After a failed write nothing is left that could fail again at close.

    Args:
        path: of the file; its folder is created if needed.
        what: name of the content, for errors.
        fix: what a user can do if the file cannot be written.
        keeps_lines: whether to append to the complete lines of an existing file; otherwise its
            content is replaced.
    """

    def __init__(self, path: Path, *, what: str, fix: str, keeps_lines: bool) -> None:
        self.path = path
        self._what, self._fix = what, fix
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if keeps_lines:
                complete_lines(path)
            self._file: BinaryIO = open(path, "ab" if keeps_lines else "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._error(error) from error

    def append(self, content: bytes, remark: str = "") -> None:
        """Appends all of the content or nothing; errors name it with the remark."""
        num_written = 0
        try:
            while num_written < len(content):
                num_written += self._file.write(content[num_written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._file.seek(0, 2) - num_written)
            raise self._error(error, remark, f" ({len(content)} bytes)") from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _error(self, error: OSError, remark: str = "", size: str = "") -> HydraulisError:
        return HydraulisError(
            f"{self._what}{remark} must be written to {self.path}{size} but: "
            f"{why_not_written(error, self.path)}; {self._fix}"
        )


class MetricsWriter(UnbufferedFile):
    """Appends records to ``<run_dir>/metrics.jsonl``.

    An unfinished last line of a killed run is removed when the file is opened.
    """

    def __init__(self, run_dir: str | Path) -> None:
        super().__init__(
            Path(run_dir) / METRICS_FILE_NAME,
            what="metrics",
            fix="free space there or choose another --run-dir",
            keeps_lines=True,
        )

    def write(self, record: IterationRecord) -> None:
        line = json.dumps(record.to_json(), allow_nan=False).encode() + b"\n"
        self.append(line, f" of iteration {record.iteration}")


def read_metrics(run_dir: str | Path) -> list[IterationRecord]:
    """Records of ``<run_dir>/metrics.jsonl`` by iteration; the last record of an iteration counts.

    Raises as `read_lines`.
    """
    return by_iteration(read_lines(run_dir))


def by_iteration(records: Iterable[IterationRecord]) -> list[IterationRecord]:
    """The last record of every iteration, in ascending order."""
    last = {record.iteration: record for record in records}
    return [last[iteration] for iteration in sorted(last)]


def read_lines(run_dir: str | Path) -> list[IterationRecord]:
    """Records in the order of the file, in which iterations that ran twice have two.

    An unfinished last line, as a killed run leaves it, is ignored.
    Raises `HydraulisError` if there is no such file, or a complete line is not a record.
    """
    path = Path(run_dir) / METRICS_FILE_NAME
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HydraulisError(
            f"a run folder holds {METRICS_FILE_NAME}: {path}: {error.strerror}; "
            "give the folder of a run that finished an iteration"
        ) from error
    lines = content.split(b"\n")[:-1]
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(IterationRecord.from_json(json.loads(line)))
        except _DAMAGES as error:
            raise HydraulisError(
                f"every line of {path} is one iteration record, but line {number} of "
                f"{len(lines)} is not ({error}); remove that line"
            ) from error
    return records


def complete_lines(path: Path) -> list[bytes]:
    """The lines of a regular file, none if it is absent; a last one that a killed run left
    unfinished is cut off the file. Raises OSError."""
    if not path.is_file():
        return []
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    return content[:end].splitlines()


def set_aside_earlier_run(run_dir: str | Path) -> Path | None:
    """Moves metrics, pictures, configuration and TensorBoard events into a subfolder.

    Event files of two runs in one folder would be drawn as one curve. Events in another folder
    (``--tensorboard-dir``) are not moved.

    Returns:
        ``RUN_DIR/earlier.N`` with the first free N; None if there was nothing to move.

    Raises:
        HydraulisError: something cannot be moved.
    """
    run_dir = Path(run_dir)
    paths = [run_dir / name for name in _LEFT_BY_A_RUN]
    found = [path for path in paths if (any(path.iterdir()) if path.is_dir() else path.exists())]
    return set_aside(run_dir, found, "--run-dir")


def set_aside(folder: Path, found: Sequence[Path], option: str) -> Path | None:
    """Moves files of a folder, which an option names, into the first free ``earlier.N`` in it.

    Returns and raises as `set_aside_earlier_run`.
    """
    if not found:
        return None
    number = 1
    while (aside := folder / f"earlier.{number}").exists():
        number += 1
    try:
        aside.mkdir()
        for path in found:
            path.rename(aside / path.name)
    except OSError as error:
        raise HydraulisError(
            f"files of an earlier run in {folder} must be moved to {aside}: {error.strerror}; "
            f"choose another {option}"
        ) from error
    return aside
