"""Coefficients of the time model, fitted to measured times.

The time is the largest of a few forms ``a·Σs² + b·Σs + c`` with a, b, c ≥ 0, and of the host's time
if that was measured. One form is fitted by non-negative least squares (Lawson and Hanson, *Solving
Least Squares Problems*, ch. 23; ``scipy.optimize.nnls``) of relative errors: each point has the
weight 1/t², so that small micro-batches, of which an iteration has many, count as much as large
ones. Several forms are fitted in turn (Magnani and Boyd, *Convex piecewise-linear fitting*,
Optimization and Engineering 10, 2009): a point belongs to the form that is largest there, a form is
fitted to its points, and so on until nothing changes. One more form begins with some points of a
form that is there already: those in which a term has the largest share of the time.

More forms always come closer to the points that they are fitted to, noise included. So their number
is chosen by points that were held out: further forms must predict these clearly better.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from megatron.hydraulis.cost_model.interface import FORWARD_SHARE, Coefficients
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import AttentionWindow

_MOST_FORMS = 3
"""A ring has as many; see `Coefficients`."""
_FEWEST_POINTS = 3
"""Of each of several forms: as many as it has coefficients."""
_NEAR_HOST = 0.1
"""Samples that take so much longer than the host at most may be bound by it."""
_NUM_FOLDS = 6
_CLEARLY_BETTER = 0.7
"""Further forms must lower the mean held-out error to this share of it. Of 480 synthetic profiles
of one form with noise of 1, 3 and 10 %, none had a lower share than 0.74."""
_GOOD_ENOUGH = 0.005
"""Held-out error below which no further form is looked for."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured micro-batch. Raises ConfigurationError for numbers that are not positive."""

    sum_of_squares: float
    """Σ s_i², of which windows leave a part, in tokens²."""
    num_tokens: float
    """Σ s_i, or tokens of the row where padding counts."""
    time_ms: float
    """Forward and backward on the slowest stage."""

    def __post_init__(self) -> None:
        values = (self.sum_of_squares, self.num_tokens, self.time_ms)
        if not all(np.isfinite(values)) or min(values) <= 0.0:
            raise ConfigurationError(
                f"a measured micro-batch has positive and finite numbers but this one has "
                f"{self.num_tokens} tokens, Σs² = {self.sum_of_squares} and {self.time_ms} ms; "
                f"measure it again"
            )

    @classmethod
    def of(
        cls,
        lengths: Iterable[int],
        time_ms: float,
        row_tokens: int | None = None,
        window: AttentionWindow | None = None,
    ) -> Sample:
        """A micro-batch of sequences of these lengths, in tokens; row_tokens if its padding counts,
        the window of the model's layers."""
        lengths = tuple(lengths)
        num_tokens = sum(lengths) if row_tokens is None else row_tokens
        squares = sum(n * n if window is None else window.squared(n) for n in lengths)
        return cls(float(squares), float(num_tokens), time_ms)


@dataclass(frozen=True, slots=True)
class FormFit:
    """How well one form, or the host's time, describes the samples of which it is the largest."""

    num_points: int
    r_squared: float | None
    """Share of the variance of their times that is described; 1 is perfect. For times that are all
    equal, 1 if the fit meets them and 0 if not; None without samples."""
    held_out_error: float | None
    """Mean of |predicted/measured - 1| over these samples, each predicted by a fit without it; None
    without samples, or if there is only one."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients and how well they describe the samples."""

    coefficients: Coefficients
    residuals: tuple[float, ...]
    """predicted/measured - 1 of each sample, in their order."""
    total: FormFit
    """All samples."""
    forms: tuple[FormFit, ...]
    """The forms in the order of the coefficients', and the host's time if there is one."""

    @property
    def median_residual(self) -> float:
        """Median of the absolute relative residuals."""
        return statistics.median(map(abs, self.residuals))

    @property
    def worst_residual(self) -> float:
        """Largest of the absolute relative residuals."""
        return max(map(abs, self.residuals))

    def to_json(self) -> dict[str, Any]:
        """What a profile's ``measurement`` says of the fit."""
        return asdict(self.total) | {
            "median_residual": self.median_residual,
            "worst_residual": self.worst_residual,
            "forms": [asdict(form) for form in self.forms],
        }


def fit_coefficients(
    samples: Sequence[Sample],
    *,
    host_ms: float = 0.0,
    window: AttentionWindow | None = None,
    forward_share: float = FORWARD_SHARE,
) -> Fit:
    """The coefficients of least squared relative error, of as many forms as held-out samples show.

    Args:
        host_ms: time of the host in each sample; no form is fitted to samples that take no longer.
        window, forward_share: of the coefficients.

    Raises ConfigurationError without a sample.
    """
    if not samples:
        raise ConfigurationError(
            "coefficients are fitted to measured micro-batches but there is none; measure at "
            "least one that fits in memory"
        )
    features = np.array([(s.sum_of_squares, s.num_tokens, 1.0) for s in samples])
    times_ms = np.array([s.time_ms for s in samples])
    rows = features / times_ms[:, None]
    # Columns get a mean of 1, because the coefficients differ by ten orders of magnitude.
    scales = rows.mean(axis=0)
    points = _Points(rows / scales, host_ms / times_ms)
    held_out = _held_out_errors(points, np.lexsort((times_ms, *features.T)))
    num_forms = _chosen(held_out)
    forms = points.fits(num_forms)[-1]
    predicted_ms = points.predicted(forms) * times_ms
    largest = points.largest(forms)

    def described(chosen: Any) -> FormFit:
        if not chosen.any():
            return FormFit(0, None, None)
        error = float(held_out[num_forms - 1][chosen].mean())
        return FormFit(
            int(chosen.sum()),
            _r_squared(times_ms[chosen], predicted_ms[chosen]),
            error if np.isfinite(error) else None,
        )

    first, *others = (
        Coefficients(a, b, c, window=window, forward_share=forward_share)
        for a, b, c in (forms / scales).tolist()
    )
    return Fit(
        replace(first, others=tuple(others), host_ms=host_ms),
        tuple((predicted_ms / times_ms - 1.0).tolist()),
        described(np.full(len(samples), fill_value=True)),
        tuple(described(largest == form) for form in range(len(forms) + (host_ms > 0.0))),
    )


@dataclass(frozen=True, slots=True)
class _Points:
    """Samples in units of their times, so that a form should give 1."""

    rows: Any
    """Terms of the time, shape (num_samples, 3)."""
    host: Any
    """Time of the host, shape (num_samples,)."""

    def predicted(self, forms: Any) -> Any:
        """Shape (num_samples,), for forms of shape (num_forms, 3)."""
        return np.maximum((self.rows @ forms.T).max(axis=1), self.host)

    def largest(self, forms: Any) -> Any:
        """The number of the form that is largest in each sample, num_forms for the host."""
        return np.column_stack([self.rows @ forms.T, self.host]).argmax(axis=1)

    def fits(self, most: int) -> list[Any]:
        """Forms of the best fit with 1, 2, … forms, up to most or to what the samples suffice
        for."""
        owners = np.zeros(len(self.rows), dtype=int)
        # Also without samples that the host may bind, or it would never bind any.
        starts = [owners, np.where(self.host > 1.0 - _NEAR_HOST, 1, 0)]
        found = [self._best(starts, 1)]
        while len(found) < most:
            forms = self._best(self._splits(found[-1]), len(found) + 1)
            if forms is None:
                break
            found.append(forms)
        return found

    def _splits(self, forms: Any) -> Iterator[Any]:
        """Owners of the samples if one more form gets some of those of one form."""
        num_forms, owners = len(forms), self.largest(forms)
        for form in range(num_forms):
            mine = np.flatnonzero(owners == form)
            for term in self.rows[mine].T:
                order = mine[np.argsort(term, kind="stable")]
                for split in range(_FEWEST_POINTS, len(order) - _FEWEST_POINTS + 1):
                    start = np.where(owners == num_forms, num_forms + 1, owners)
                    start[order[split:]] = num_forms
                    yield start

    def _best(self, starts: Iterable[Any], num_forms: int) -> Any:
        """Forms of the least error that are reached from any start; None if there are none."""
        best, least = None, np.inf
        seen: set[bytes] = set()
        for owners in starts:
            while (key := owners.tobytes()) not in seen:
                seen.add(key)
                forms = self._fitted(owners, num_forms)
                if forms is None:
                    break
                error = float(((self.predicted(forms) - 1.0) ** 2).sum())
                if error < least:
                    best, least = forms, error
                owners = self.largest(forms)
        return best

    def _fitted(self, owners: Any, num_forms: int) -> Any:
        """Each form fitted to its samples; None if one of several has too few."""
        # Not above: it takes half a second of every start, and few commands fit anything.
        from scipy.optimize import nnls

        forms = []
        for form in range(num_forms):
            rows = self.rows[owners == form]
            if len(rows) < (_FEWEST_POINTS if num_forms > 1 else 1):
                return None
            forms.append(nnls(rows, np.ones(len(rows)))[0])
        return np.array(forms)


def _held_out_errors(points: _Points, order: Any) -> list[Any]:
    """|predicted/measured - 1| of each sample by fits without it, for 1, 2, … forms.

    Every _NUM_FOLDS-th sample in an order that does not depend on theirs is held out at a time.
    """
    errors = [np.full(len(order), np.inf) for _ in range(_MOST_FORMS)]
    for fold in range(_NUM_FOLDS):
        held_out = np.zeros(len(order), dtype=bool)
        held_out[order[fold::_NUM_FOLDS]] = True
        if held_out.all() or not held_out.any():
            continue
        rest = _Points(points.rows[~held_out], points.host[~held_out])
        left = _Points(points.rows[held_out], points.host[held_out])
        for number, forms in enumerate(rest.fits(_MOST_FORMS)):
            errors[number][held_out] = abs(left.predicted(forms) - 1.0)
    return errors


def _chosen(held_out: Sequence[Any]) -> int:
    """The number of forms."""
    means = [float(errors.mean()) for errors in held_out]
    chosen = 0
    for number in range(1, len(means)):
        if means[number] < _CLEARLY_BETTER * means[chosen] and means[chosen] > _GOOD_ENOUGH:
            chosen = number
    return chosen + 1


def _r_squared(times_ms: Any, predicted_ms: Any) -> float:
    spread = float(((times_ms - times_ms.mean()) ** 2).sum())
    missed = float(((times_ms - predicted_ms) ** 2).sum())
    if spread > 0.0:
        return 1.0 - missed / spread
    return float(np.allclose(predicted_ms, times_ms))
