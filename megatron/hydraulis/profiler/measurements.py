"""What was measured so far, in a JSON lines file beside the profile: a rerun goes on from there.

The first line says what is measured (``setup``); a file of another setup is refused. A line
``attempt`` stands before every measurement: one that ends the process, by memory or otherwise, is
known by an attempt without a result. After `MAX_ATTEMPTS` of these a point counts as not fitting.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.profiler.grid import GridPoint

__all__ = [
    "MAX_ATTEMPTS",
    "MeasuredPoint",
    "MeasuredStrategy",
    "Measurements",
    "RegroupSpeed",
    "measurements_path",
]

MAX_ATTEMPTS = 2
"""An interrupted measurement is begun again once; a second end without a result says that the
point itself ends the process."""


def measurements_path(profile: Path) -> Path:
    """Where measurements of a profile lie: beside it."""
    return profile.with_name(profile.name + ".measurements.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPoint:
    """A micro-batch of a scheme: how long it took, or why it could not be run."""

    scheme: str
    point: GridPoint
    stage_ms: tuple[float, ...] = ()
    """Forward and backward on each stage, of the median replica; empty where it does not fit."""
    forward_ms: float = 0.0
    """Of that, the forward, on the slowest stage."""
    peak_bytes: int = 0
    """Most memory that a rank held meanwhile, see `runtime.memory.MemoryMeter`."""
    why_not: str = ""
    """Why it does not fit; empty where it does."""

    @property
    def fits(self) -> bool:
        """Whether it was run."""
        return not self.why_not

    @property
    def time_ms(self) -> float:
        """On the slowest stage."""
        return max(self.stage_ms)

    def to_json(self) -> dict[str, Any]:
        """One line of the file."""
        runs = [[length, len(list(same))] for length, same in itertools.groupby(self.point.lengths)]
        return {
            "kind": "point",
            "scheme": self.scheme,
            "packing": self.point.packing,
            "lengths": runs,
            "fits": self.fits,
            "why_not": self.why_not,
            "stage_ms": list(self.stage_ms),
            "forward_ms": self.forward_ms,
            "peak_bytes": self.peak_bytes,
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> MeasuredPoint:
        """What `to_json` gave."""
        lengths = tuple(n for n, times in line["lengths"] for _ in range(times))
        return cls(
            scheme=line["scheme"],
            point=GridPoint(line["packing"], lengths),
            stage_ms=tuple(line["stage_ms"]),
            forward_ms=line["forward_ms"],
            peak_bytes=line["peak_bytes"],
            why_not=line["why_not"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RegroupSpeed:
    """Regrouping of a strategy by itself, nothing beside it."""

    gather_bytes: int
    """That a rank receives, the most of all ranks."""
    gather_ms: float
    scatter_bytes: int
    """That a rank sends, the most of all ranks."""
    scatter_ms: float

    def to_json(self) -> dict[str, Any]:
        """With the bandwidths, None where nothing travels."""
        return {
            "gather_bytes": self.gather_bytes,
            "gather_ms": self.gather_ms,
            "gather_bytes_per_s": _per_s(self.gather_bytes, self.gather_ms),
            "scatter_bytes": self.scatter_bytes,
            "scatter_ms": self.scatter_ms,
            "scatter_bytes_per_s": _per_s(self.scatter_bytes, self.scatter_ms),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStrategy:
    """What an iteration of a strategy takes beside its micro-batches."""

    name: str
    iteration_ms: float
    """Of whole iterations of a few micro-batches."""
    makespan_ms: float
    """Of their micro-batches alone, by the measured time of each."""
    optimizer_ms: float
    regroup: RegroupSpeed

    @property
    def regroup_ms(self) -> float:
        """What is neither micro-batches nor optimizer: gather and scatter as far as they do not
        overlap, messages between stages, waits."""
        return max(0.0, self.iteration_ms - self.makespan_ms - self.optimizer_ms)

    def to_json(self) -> dict[str, Any]:
        """One line of the file."""
        return {
            "kind": "strategy",
            "name": self.name,
            "iteration_ms": self.iteration_ms,
            "makespan_ms": self.makespan_ms,
            "optimizer_ms": self.optimizer_ms,
            "regroup": self.regroup.to_json(),
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> MeasuredStrategy:
        """What `to_json` gave."""
        regroup = line["regroup"]
        return cls(
            name=line["name"],
            iteration_ms=line["iteration_ms"],
            makespan_ms=line["makespan_ms"],
            optimizer_ms=line["optimizer_ms"],
            regroup=RegroupSpeed(
                gather_bytes=regroup["gather_bytes"],
                gather_ms=regroup["gather_ms"],
                scatter_bytes=regroup["scatter_bytes"],
                scatter_ms=regroup["scatter_ms"],
            ),
        )


class Measurements:
    """The file, open for one profile.

    Args:
        path: of the file; made if there is none.
        setup: what is measured, as JSON values.
        restart: forget what the file holds.

    Raises ConfigurationError for a file of another setup or one that cannot be read or written.
    """

    def __init__(self, path: Path, setup: Mapping[str, Any], *, restart: bool = False) -> None:
        self._path = path
        self.points: dict[tuple[str, tuple[int, ...]], MeasuredPoint] = {}
        self.strategies: dict[str, MeasuredStrategy] = {}
        self._attempts: Counter[str] = Counter()
        try:
            if restart:
                path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = _whole_lines(path)
        except OSError as error:
            raise self._unusable(error) from error
        if not lines:
            self._append({"kind": "setup"} | dict(setup))
            return
        try:
            self._read(lines, setup)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"measurements {path}: a line is not what this version writes ({error!r}); measure "
                f"anew with --restart, or give another --out"
            ) from error

    @property
    def num_found(self) -> int:
        """Results that an earlier run left."""
        return len(self.points) + len(self.strategies)

    def has_point(self, scheme: str, point: GridPoint) -> bool:
        """Whether there is a result."""
        return (scheme, point.lengths) in self.points

    def begin(self, scheme: str, point: GridPoint) -> bool:
        """Note that a point is about to be measured; False where it was begun too often.

        Then it counts as not fitting.
        """
        key = _key(scheme, point.lengths)
        if self._attempts[key] >= MAX_ATTEMPTS:
            self.add_point(
                MeasuredPoint(
                    scheme=scheme,
                    point=point,
                    why_not=f"{MAX_ATTEMPTS} attempts ended the process",
                )
            )
            return False
        self._attempts[key] += 1
        self._append({"kind": "attempt", "key": key})
        return True

    def add_point(self, point: MeasuredPoint) -> None:
        """Keep the result of a point."""
        self.points[point.scheme, point.point.lengths] = point
        self._append(point.to_json())

    def add_strategy(self, strategy: MeasuredStrategy) -> None:
        """Keep the result of a strategy."""
        self.strategies[strategy.name] = strategy
        self._append(strategy.to_json())

    def _read(self, lines: Sequence[str], setup: Mapping[str, Any]) -> None:
        head, *rest = [json.loads(line) for line in lines]
        wanted = json.loads(json.dumps({"kind": "setup"} | dict(setup)))
        if head != wanted:
            differing = sorted(
                key for key in set(head) | set(wanted) if head.get(key) != wanted.get(key)
            )
            raise ConfigurationError(
                f"measurements {self._path}: a rerun goes on with the same setup but "
                f"{', '.join(differing)} differ{'s' if len(differing) == 1 else ''}; give "
                f"--restart to measure anew, or another --out"
            )
        for line in rest:
            if line["kind"] == "attempt":
                self._attempts[line["key"]] += 1
            elif line["kind"] == "point":
                point = MeasuredPoint.from_json(line)
                self.points[point.scheme, point.point.lengths] = point
            elif line["kind"] == "strategy":
                strategy = MeasuredStrategy.from_json(line)
                self.strategies[strategy.name] = strategy

    def _append(self, line: Mapping[str, Any]) -> None:
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                # The next measurement may take the machine down.
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"measurements {self._path}: must be a file that can be written but: "
            f"{error.strerror or error}; give another --out"
        )


def _key(scheme: str, lengths: tuple[int, ...]) -> str:
    runs = (f"{length}x{len(list(same))}" for length, same in itertools.groupby(lengths))
    return f"{scheme} {' '.join(runs)}"


def _whole_lines(path: Path) -> list[str]:
    """The complete lines; one that a killed run left unfinished is cut off the file."""
    if not path.exists():
        return []
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    return content[:end].decode().splitlines()


def _per_s(num_bytes: int, time_ms: float) -> float | None:
    return num_bytes / time_ms * 1e3 if num_bytes and time_ms > 0.0 else None
