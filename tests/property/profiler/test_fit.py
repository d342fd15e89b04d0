"""The fit recovers the true coefficients, with and without noise, and none is negative."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.cost_model.fit import Sample, fit_coefficients
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import AttentionWindow
from megatron.hydraulis.profiler.measurements import grid

POINTS = grid(8192, longest=8192, short=64, num_sizes=6)

coefficients = st.builds(
    Coefficients,
    a_ms_per_token2=st.floats(1e-8, 1e-4),
    b_ms_per_token=st.floats(1e-4, 1.0),
    c_ms=st.floats(0.0, 100.0),
)


def measured(truth: Coefficients, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    draw = random.Random(seed)
    return [
        Sample.of(p.lengths, truth.time_ms(p.lengths) * draw.uniform(1 - noise, 1 + noise))
        for p in POINTS
    ]


@given(truth=coefficients)
def test_exact_times_give_the_coefficients_back(truth: Coefficients) -> None:
    fit = fit_coefficients(measured(truth))
    for point in POINTS:
        wanted = truth.time_ms(point.lengths)
        assert fit.coefficients.time_ms(point.lengths) == pytest.approx(wanted, rel=1e-6)
    assert fit.total.r_squared == pytest.approx(1.0, abs=1e-6)
    assert fit.worst_residual < 1e-6
    found = fit.coefficients
    # A term that is a billionth of every time cannot be found.
    share = truth.a_ms_per_token2 * 8192**2 / truth.time_ms([8192])
    if share > 1e-3:
        assert found.a_ms_per_token2 == pytest.approx(truth.a_ms_per_token2, rel=1e-3)


@given(truth=coefficients)
def test_times_of_a_model_with_windows_give_the_coefficients_back(truth: Coefficients) -> None:
    window = AttentionWindow(512, 0.75)
    windowed = replace(truth, window=window)
    fit = fit_coefficients(
        [Sample.of(p.lengths, windowed.time_ms(p.lengths), window=window) for p in POINTS],
        window=window,
    )
    assert fit.worst_residual < 1e-6
    found = fit.coefficients
    for point in POINTS:
        wanted = windowed.time_ms(point.lengths)
        assert found.time_ms(point.lengths) == pytest.approx(wanted, rel=1e-6)


@settings(max_examples=40)
@given(truth=coefficients, seed=st.integers(0, 1000))
def test_ten_percent_noise_changes_predictions_by_at_most_ten_percent(
    truth: Coefficients, seed: int
) -> None:
    noise = 0.1
    fit = fit_coefficients(measured(truth, noise, seed))
    assert fit.median_residual <= noise
    for point in POINTS:
        wanted = truth.time_ms(point.lengths)
        assert fit.coefficients.time_ms(point.lengths) == pytest.approx(wanted, rel=1.5 * noise)


@settings(max_examples=40)
@given(truth=coefficients, seed=st.integers(0, 1000), factor=st.sampled_from([1e-3, 0.5, 1e3]))
def test_neither_the_order_of_samples_nor_the_unit_of_time_matters(
    truth: Coefficients, seed: int, factor: float
) -> None:
    samples = measured(truth, 0.1, seed)
    fit = fit_coefficients(samples)
    shuffled = random.Random(seed).sample(samples, len(samples))
    scaled = [replace(sample, time_ms=sample.time_ms * factor) for sample in samples]
    for other, unit in ((fit_coefficients(shuffled), 1.0), (fit_coefficients(scaled), factor)):
        for point in POINTS:
            wanted = unit * fit.coefficients.time_ms(point.lengths)
            assert other.coefficients.time_ms(point.lengths) == pytest.approx(wanted, rel=1e-6)


DEVICE = Coefficients(a_ms_per_token2=4.4e-7, b_ms_per_token=0.0167, c_ms=5.0)
LINK = Coefficients(a_ms_per_token2=1.1e-7, b_ms_per_token=0.0198, c_ms=6.4)
FLAT = Coefficients(a_ms_per_token2=0.0, b_ms_per_token=0.0, c_ms=60.0)
LONG_POINTS = grid(131_072, longest=131_072, short=64, num_sizes=8)


@pytest.mark.parametrize(
    ("forms", "host_ms"),
    [
        ((DEVICE,), 0.0),
        ((LINK,), 0.0),
        ((FLAT, DEVICE), 0.0),
        ((LINK, DEVICE), 0.0),
        ((DEVICE,), 60.0),
        ((LINK, DEVICE), 60.0),
        ((FLAT, replace(LINK, b_ms_per_token=0.03), replace(DEVICE, a_ms_per_token2=1e-6)), 0.0),
    ],
)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_as_many_forms_are_found_as_there_are(
    forms: tuple[Coefficients, ...], host_ms: float, noise: float, seed: int
) -> None:
    draw = random.Random(seed)
    truth = replace(forms[0], others=forms[1:])
    times_ms = [max(host_ms, truth.time_ms(point.lengths)) for point in LONG_POINTS]
    fit = fit_coefficients(
        [
            Sample.of(point.lengths, time_ms * draw.uniform(1 - noise, 1 + noise))
            for point, time_ms in zip(LONG_POINTS, times_ms, strict=True)
        ],
        host_ms=host_ms,
    )
    found = fit.coefficients
    assert len(found.forms) == len(forms)
    assert len(fit.forms) == len(forms) + (host_ms > 0.0)
    assert sum(form.num_points for form in fit.forms) == len(LONG_POINTS)
    assert fit.total.held_out_error is not None
    assert fit.total.held_out_error < 0.02
    for point, wanted in zip(LONG_POINTS, times_ms, strict=True):
        predicted = max(host_ms, found.time_ms(point.lengths))
        assert predicted == pytest.approx(wanted, rel=1e-3 + 3 * noise)


@settings(max_examples=40)
@given(truth=coefficients, seed=st.integers(0, 1000), noise=st.sampled_from([0.01, 0.03, 0.1]))
def test_noise_does_not_split_a_form(truth: Coefficients, seed: int, noise: float) -> None:
    fit = fit_coefficients(measured(truth, noise, seed))
    assert fit.coefficients.others == ()


@given(
    st.lists(
        st.builds(
            Sample,
            sum_of_squares=st.floats(1.0, 1e9),
            num_tokens=st.floats(1.0, 1e5),
            time_ms=st.floats(1e-3, 1e5),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_coefficients_are_never_negative(samples: list[Sample]) -> None:
    fit = fit_coefficients(samples)  # Coefficients refuse negative and infinite ones
    assert len(fit.residuals) == len(samples)


def test_no_measurements_and_impossible_times_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="measure at least one"):
        fit_coefficients([])
    for time_ms in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="measure it again"):
            Sample.of([4], time_ms)
