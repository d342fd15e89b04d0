"""The micro-batches that are measured, what was measured so far, and the cost profile of that.

Sizes go from small to large, each packed in several ways. Results are in a JSON lines file next to
the profile, from which a rerun goes on. Its first line is the setup of the measurements; a file of
another setup is refused. A line ``attempt`` is written before every measurement, so that one which
ends the process, for lack of memory or otherwise, shows as an attempt without a result. After
`MAX_ATTEMPTS` of these a point counts as not fitting.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron.hydraulis.cost_model.fit import Sample, fit_coefficients
from megatron.hydraulis.cost_model.profile import (
    ProfileCostModel,
    ProfiledModel,
    ProfiledScheme,
    ProfiledStrategy,
)
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.observability.records import complete_lines
from megatron.hydraulis.strategy import Scheme
from megatron.hydraulis.terminal import figures_table, table_text

SINGLE_LONG = "single long"
"""A micro-batch of as few sequences as the longest length allows."""
MANY_SHORT = "many short"
MIXTURE = "mixture"
"""Half of the tokens long, half short."""
MANY_MEDIUM = "many medium"
"""Equal sequences between long and short: what hides behind attention depends on their length."""
FEW_TOKENS = "few tokens"
"""One short sequence: on a GPU its time is the host's."""
SAMPLED = "sampled"
"""Kind of a micro-batch that is drawn from given lengths."""
MAX_ATTEMPTS = 2
"""An interrupted measurement is repeated once; a second end without a result means that the point
ends the process."""
_WIDTH = 100
_HELD_OUT = "held out: mean of |predicted/measured - 1|, each point predicted by a fit without it\n"


def measurements_path(profile: Path) -> Path:
    """The file of measurements of a profile, in the same folder."""
    return profile.with_name(profile.name + ".measurements.jsonl")


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One micro-batch to measure."""

    packing: str
    lengths: tuple[int, ...]
    """Tokens of each sequence."""

    @property
    def num_tokens(self) -> int:
        """Σ s_i."""
        return sum(self.lengths)

    @property
    def sum_of_squares(self) -> int:
        """Σ s_i²."""
        return sum(length * length for length in self.lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredPoint:
    """A micro-batch of a scheme: its time and memory, or why it could not be run."""

    scheme: str
    point: GridPoint
    stage_ms: tuple[float, ...] = ()
    """Forward and backward on each stage, of the median replica; empty where it was not run."""
    forward_ms: float = 0.0
    """Forward alone, on the slowest stage."""
    period_ms: float = 0.0
    """From the end of one micro-batch to that of the next one, on the slowest rank; 0 in older
    files."""
    peak_bytes: int = 0
    """Most memory that a rank held meanwhile, see `runtime.memory.MemoryMeter`."""
    why_not: str = ""
    """Reason why it was not run; empty where it was."""

    @property
    def fits(self) -> bool:
        """True if it was run."""
        return not self.why_not

    @property
    def time_ms(self) -> float:
        """Time of the slowest stage."""
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
            "period_ms": self.period_ms,
            "peak_bytes": self.peak_bytes,
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> MeasuredPoint:
        lengths = tuple(n for n, times in line["lengths"] for _ in range(times))
        return cls(
            scheme=line["scheme"],
            point=GridPoint(line["packing"], lengths),
            stage_ms=tuple(line["stage_ms"]),
            forward_ms=line["forward_ms"],
            period_ms=line.get("period_ms", 0.0),
            peak_bytes=line["peak_bytes"],
            why_not=line["why_not"],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RegroupSpeed:
    """Regrouping of a strategy without anything that overlaps with it."""

    gather_bytes: int
    """Received by a rank, the most of all ranks."""
    gather_ms: float
    scatter_bytes: int
    """Bytes that a rank sends, the most of all ranks."""
    scatter_ms: float

    def to_json(self) -> dict[str, Any]:
        """The fields and the bandwidths, which are None if no bytes travel."""
        return asdict(self) | {
            "gather_bytes_per_s": _per_s(self.gather_bytes, self.gather_ms),
            "scatter_bytes_per_s": _per_s(self.scatter_bytes, self.scatter_ms),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStrategy:
    """Time of an iteration of a strategy, and what of it is not micro-batches."""

    name: str
    iteration_ms: float
    """Time of an iteration with a few micro-batches."""
    makespan_ms: float
    """Makespan of its micro-batches, by the time that they took in this iteration."""
    optimizer_ms: float
    regroup: RegroupSpeed
    replicas: str | None = None
    """Replicas in strategy notation; None in older files."""
    expert_load: float | None = None
    """Load by random tokens, as in metrics.jsonl; None without experts, and in older files."""

    @property
    def regroup_ms(self) -> float:
        """The rest: gather and scatter as far as they do not overlap, messages between stages,
        waits."""
        return max(0.0, self.iteration_ms - self.makespan_ms - self.optimizer_ms)

    def to_json(self) -> dict[str, Any]:
        """One line of the file."""
        return {"kind": "strategy"} | asdict(self) | {"regroup": self.regroup.to_json()}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> MeasuredStrategy:
        regroup = RegroupSpeed(**_fields_of(RegroupSpeed, line["regroup"]))
        known = {"replicas": None, "expert_load": None, **line}
        return cls(**_fields_of(cls, known) | {"regroup": regroup})


class Measurements:
    """The measurements for one profile, and their file.

    Args:
        path: of the file, which is created if there is none.
        setup: of the measurements, as JSON values.
        restart: discard the content of the file.

    Raises ConfigurationError for a file of another setup or one that cannot be read or written.
    """

    def __init__(self, path: Path, setup: Mapping[str, Any], *, restart: bool = False) -> None:
        self._path: Path | None = path
        self._points: dict[str, MeasuredPoint] = {}
        self.strategies: dict[str, MeasuredStrategy] = {}
        self._attempts: Counter[str] = Counter()
        try:
            if restart:
                path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = complete_lines(path)
        except OSError as error:
            raise _unusable(path, error) from error
        if not lines:
            self._append({"kind": "setup"} | dict(setup))
            return
        try:
            self._read(lines, setup)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"measurements {path}: a line is not what this version writes ({error!r}); measure "
                f"again with --restart, or give another --out"
            ) from error

    @property
    def num_found(self) -> int:
        return len(self._points) + len(self.strategies)

    def without_file(self) -> Measurements:
        """The same content in memory alone, for ranks that do not write the file."""
        other = copy.copy(self)
        other._path = None
        return other

    def find(self, scheme: str, point: GridPoint) -> MeasuredPoint | None:
        """The result of a point, if there is one."""
        return self._points.get(_key(scheme, point.lengths))

    def begin(self, scheme: str, point: GridPoint) -> str:
        """Record that a point is about to be measured.

        Returns why it must not be, because it has ended the process too often; else nothing.
        """
        key = _key(scheme, point.lengths)
        if self._attempts[key] >= MAX_ATTEMPTS:
            return f"{MAX_ATTEMPTS} attempts ended the process"
        self._attempts[key] += 1
        self._append({"kind": "attempt", "key": key})
        return ""

    def add(self, point: MeasuredPoint) -> None:
        """Keep the result of a point."""
        self._points[_key(point.scheme, point.point.lengths)] = point
        self._append(point.to_json())

    def add_strategy(self, strategy: MeasuredStrategy) -> None:
        """Keep the result of a strategy."""
        self.strategies[strategy.name] = strategy
        self._append(strategy.to_json())

    def _read(self, lines: Sequence[bytes], setup: Mapping[str, Any]) -> None:
        head, *rest = [json.loads(line) for line in lines]
        wanted = json.loads(json.dumps({"kind": "setup"} | dict(setup)))
        if head != wanted:
            differing = sorted(
                key for key in set(head) | set(wanted) if head.get(key) != wanted.get(key)
            )
            raise ConfigurationError(
                f"measurements {self._path}: a rerun goes on with the same setup but "
                f"{', '.join(differing)} differ{'s' if len(differing) == 1 else ''}; give "
                f"--restart to measure again, or another --out"
            )
        for line in rest:
            if line["kind"] == "attempt":
                self._attempts[line["key"]] += 1
            elif line["kind"] == "point":
                point = MeasuredPoint.from_json(line)
                self._points[_key(point.scheme, point.point.lengths)] = point
            elif line["kind"] == "strategy":
                strategy = MeasuredStrategy.from_json(line)
                self.strategies[strategy.name] = strategy

    def _append(self, line: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                # The next measurement may take the machine down.
                os.fsync(file.fileno())
        except OSError as error:
            raise _unusable(self._path, error) from error


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
    """Reason why a point cannot fit, by the results of smaller ones; empty where it may."""
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
    One more point is a single short sequence. Packings of one size separate the quadratic term of
    the time model, sizes the other two; together they separate its forms.

    Args:
        max_tokens: of the largest micro-batch.
        longest: tokens of the longest sequence, ``--seq-length``.
        short: tokens of a short sequence.
        num_sizes: how many sizes.
        sample_from: lengths of a corpus in tokens, from which each size is packed as well.
        seed: of that sample.

    Raises ConfigurationError for a short sequence longer than max_tokens.
    """
    if short > min(max_tokens, longest):
        raise ConfigurationError(
            f"grid of a profile: a short sequence fits the smallest micro-batch but has {short} "
            f"tokens where a micro-batch has at most {max_tokens} and a sequence {longest}; lower "
            f"--short-tokens or raise --max-tokens"
        )
    sizes = [max_tokens >> halvings for halvings in range(num_sizes)]
    draw = random.Random(seed)
    medium = math.isqrt(short * min(max_tokens, longest))
    points: dict[tuple[int, ...], GridPoint] = {(short,): GridPoint(FEW_TOKENS, (short,))}
    for size in sorted(size for size in sizes if size >= short):
        half = size // 2
        packings = [
            (MANY_SHORT, _pieces(size, short)),
            (MANY_MEDIUM, _pieces(size, medium)),
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


def _unusable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"measurements {path}: must be a file that can be written but: "
        f"{error.strerror or error}; give another --out"
    )


def _fields_of(kind: type[Any], line: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: line[field.name] for field in fields(kind)}


def _key(scheme: str, lengths: tuple[int, ...]) -> str:
    runs = (f"{length}x{len(list(same))}" for length, same in itertools.groupby(lengths))
    return f"{scheme} {' '.join(runs)}"


def _per_s(num_bytes: int, time_ms: float) -> float | None:
    return num_bytes / time_ms * 1e3 if num_bytes and time_ms > 0.0 else None


def profile_of(
    schemes: Mapping[Scheme, Sequence[MeasuredPoint]],
    strategies: Sequence[MeasuredStrategy],
    *,
    model: ProfiledModel,
    device: str,
    source: str,
    date: str,
    num_ranks: int,
    has_host: bool,
    setup: Mapping[str, Any],
) -> ProfileCostModel:
    """The cost profile of measured points.

    ``max_tokens`` of a scheme is the largest size that ran in every packing, and 0 where there is
    none. A scheme is skipped if no point of it fits, since there is nothing to fit to.

    Args:
        has_host: whether the host issues work to a device, so that few tokens take the host's time.
        setup: versions and settings, recorded in the profile.

    Raises ConfigurationError when no scheme is left.
    """
    window = model.shape.window
    rows: list[ProfiledScheme] = []
    notes: dict[str, Any] = {}
    for scheme, points in schemes.items():
        fitting = [point for point in points if point.fits]
        if not fitting:
            notes[str(scheme)] = {"fits": False, "why_not": points[0].why_not if points else ""}
            continue
        forward_share = statistics.median(p.forward_ms / p.time_ms for p in fitting)
        few = [p for p in fitting if has_host and p.point.packing == FEW_TOKENS and p.period_ms]
        fit = fit_coefficients(
            [Sample.of(p.point.lengths, p.time_ms, window=window) for p in fitting],
            host_ms=max((point.time_ms for point in few), default=0.0),
            window=window,
            forward_share=forward_share,
        )
        # The host also works between two micro-batches.
        host_ms = max((point.period_ms for point in few), default=0.0)
        sizes = {point.point.num_tokens for point in fitting}
        refused = {point.point.num_tokens for point in points if not point.fits}
        rows.append(
            ProfiledScheme(
                scheme=scheme,
                coefficients=replace(fit.coefficients, host_ms=host_ms),
                max_tokens=scheme.rounded_down(max(sizes - refused, default=0)),
            )
        )
        slowest = [point for point in fitting if point.point.num_tokens == max(sizes)]
        notes[str(scheme)] = fit.to_json() | {
            "num_points_that_do_not_fit": len(points) - len(fitting),
            "peak_bytes": max(point.peak_bytes for point in slowest),
            "stage_ms": list(slowest[-1].stage_ms),
            "forward_share": forward_share,
        }
    return ProfileCostModel(
        device=device,
        source=source,
        date=date,
        num_ranks=num_ranks,
        model=model,
        schemes=tuple(rows),
        strategies=tuple(
            ProfiledStrategy(
                name=s.name,
                replicas=s.replicas,
                regroup_ms=s.regroup_ms,
                optimizer_ms=s.optimizer_ms,
            )
            for s in strategies
        ),
        expert_load=max(
            (s.expert_load for s in strategies if s.expert_load is not None), default=None
        ),
        measurement={
            "setup": dict(setup),
            "schemes": notes,
            "regroup": {s.name: s.regroup.to_json() for s in strategies},
        },
    )


def profile_tables(profile: ProfileCostModel) -> str:
    """A row for each form of each scheme with its fit, and one for each strategy with its overhead,
    as text."""
    schemes = figures_table(
        "Time of a micro-batch, the largest a·Σs² + b·Σs + c",
        ("scheme",),
        ("a, ns/token²", "b, µs/token", "c, ms", "points", "R²", "held out", "max tokens", "GB"),
    )
    notes = profile.measurement.get("schemes", {})
    for row in profile.schemes:
        note, times, name = notes[str(row.scheme)], row.coefficients, str(row.scheme)
        limits = (f"{row.max_tokens:,}", f"{note['peak_bytes'] / 1e9:.2f}")
        forms = [
            (f"{f.a_ms_per_token2 * 1e6:.4g}", f"{f.b_ms_per_token * 1e3:.4g}", f"{f.c_ms:.4g}")
            for f in times.forms
        ]
        host = [("–", "–", f"host {times.host_ms:.4g}")] if times.host_ms else []
        for form, fit in zip([*forms, *host], note["forms"], strict=True):
            quality = (_shown(fit["r_squared"], ".4f"), _shown(fit["held_out_error"], ".1%"))
            schemes.add_row(name, *form, str(fit["num_points"]), *quality, *limits)
            name, limits = "", ("", "")
    for scheme, note in notes.items():
        if not note.get("fits", True):
            schemes.add_row(scheme, *"––––––", "0", note["why_not"])
    strategies = figures_table(
        "Overhead of an iteration",
        ("strategy",),
        ("regroup, ms", "optimizer, ms", "gather, GB/s", "scatter, GB/s"),
    )
    speeds = profile.measurement.get("regroup", {})
    for strategy in profile.strategies:
        speed = speeds[strategy.name]
        strategies.add_row(
            strategy.name,
            f"{strategy.regroup_ms:.2f}",
            f"{strategy.optimizer_ms:.2f}",
            _gb_per_s(speed["gather_bytes_per_s"]),
            _gb_per_s(speed["scatter_bytes_per_s"]),
        )
    text = table_text(schemes, _WIDTH) + _HELD_OUT
    return text + table_text(strategies, _WIDTH) if profile.strategies else text


def _shown(value: float | None, style: str) -> str:
    return "–" if value is None else format(value, style)


def _gb_per_s(bytes_per_s: float | None) -> str:
    return "–" if bytes_per_s is None else f"{bytes_per_s / 1e9:.3f}"
