"""The 1F1B recurrence against the design's numbers and closed forms; see also tests/property."""

import math
from dataclasses import replace

import pytest

from megatron.hydraulis.cost_model import Coefficients, pipeline_time_ms
from megatron.hydraulis.cost_model.pipeline import last_backward_end_ms
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.planner.bounds import packing_bound_ms
from megatron.hydraulis.planner.costs import SchemeCost


@pytest.mark.parametrize("forward_share", [0.0, 1 / 3, 0.5, 1.0])
def test_arbitrary_order_exceeds_the_bound_of_sorted_order(forward_share: float) -> None:
    # The design's example, t = 4, 1, 4 on 2 stages: 16 instead of 4+1+4 + 1·4 = 13. It takes 16
    # however a micro-batch's time divides into forward and backward: the first long forward, its
    # backward, the second long forward and its backward wait for one another on both stages.
    def time_ms(times_ms: list[float]) -> float:
        return pipeline_time_ms(times_ms, 2, forward_share=forward_share)

    assert time_ms([4.0, 1.0, 4.0]) == pytest.approx(16.0)
    assert time_ms([4.0, 4.0, 1.0]) <= 13.0
    assert time_ms([1.0, 4.0, 4.0]) <= 13.0


def test_by_hand_with_a_forward_of_a_third() -> None:
    # Stage 0: F1 0-1, F2 1-3, B1 4-6, F3 6-7, B2 10-14, B3 14-16.
    # Stage 1: F1 1-2, B1 2-4, F2 4-6, B2 6-10, F3 10-11, B3 11-13.
    assert pipeline_time_ms([3.0, 6.0, 3.0], 2) == pytest.approx(16.0)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 7])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 12])
def test_equal_micro_batches(num_stages: int, num_micro_batches: int) -> None:
    time_ms = pipeline_time_ms([2.5] * num_micro_batches, num_stages)
    assert time_ms == pytest.approx((num_micro_batches + num_stages - 1) * 2.5)


def test_one_stage_only_adds_up() -> None:
    times_ms = [0.1] * 10
    assert pipeline_time_ms(times_ms, 1) == math.fsum(times_ms)


def test_no_micro_batches_take_no_time() -> None:
    assert pipeline_time_ms([], 4) == 0.0
    assert pipeline_time_ms([], 1) == 0.0


def test_the_forwards_share_matters_in_uneven_pipelines() -> None:
    times_ms = [1.0, 4.0, 1.0]
    assert pipeline_time_ms(times_ms, 2, forward_share=0.0) == pytest.approx(10.0)
    assert pipeline_time_ms(times_ms, 2) == pytest.approx(9.0)


@pytest.mark.parametrize(
    ("times_ms", "num_stages", "forward_share", "message"),
    [
        ([1.0], 0, 0.5, "at least 1 stage"),
        ([1.0, -1.0], 2, 0.5, "not -1.0 ms"),
        ([math.nan], 2, 0.5, "not nan ms"),
        ([math.inf], 1, 0.5, "not inf ms"),
        ([1.0], 2, 1.5, "between 0 and 1, not 1.5"),
    ],
)
def test_impossible_pipelines(
    times_ms: list[float], num_stages: int, forward_share: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pipeline_time_ms(times_ms, num_stages, forward_share=forward_share)


def test_forms_have_one_share_of_the_forward_as_bounds_need_it() -> None:
    # Two micro-batches of 4 ms on 2 stages, of which the first recomputes. Stage 0: F1 0-1,
    # F2 1-2.3, B1 5-8, B2 9-11.7. Stage 1: F1 1-2, B1 2-5, F2 5-6.3, B2 6.3-9. With either share
    # for both no order takes less than the bound of 4 + 4 + 1·4 = 12.
    halves_ms = ([1.0, 4 / 3], [3.0, 8 / 3])
    found_ms = last_backward_end_ms([halves_ms, halves_ms])
    plain = Coefficients(0.0, 0.0, 4.0)
    bound_ms = packing_bound_ms([1, 1], SchemeCost(plain, max_tokens=1, num_stages=2))
    assert (found_ms, bound_ms) == (pytest.approx(35 / 3), 12.0)
    with pytest.raises(ConfigurationError, match=r"forms .* share .* 0\.333.* correct"):
        replace(plain, others=(replace(plain, forward_share=0.25),))
