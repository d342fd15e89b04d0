import numpy as np
import pytest
from megatron.core.datasets import helpers_cpp

from megatron.hydraulis.data.blend import Blend, SequenceGroup, largest_deficit
from megatron.hydraulis.errors import ConfigurationError


def draws(weights: tuple[float, ...], count: int) -> list[int]:
    num_drawn = [0] * len(weights)
    order = []
    for _ in range(count):
        order.append(largest_deficit(weights, num_drawn))
        num_drawn[order[-1]] += 1
    return order


@pytest.mark.parametrize("weights", [(0.5, 0.25, 0.25), (3.0, 1.0), (1.0, 7.0, 8.0), (1.0,)])
def test_same_order_as_megatrons_blended_dataset(weights: tuple[float, ...]) -> None:
    count = 200
    dataset_index = np.zeros(count, dtype=np.int16)
    sample_index = np.zeros(count, dtype=np.int64)
    shares = np.array(weights) / sum(weights)
    helpers_cpp.build_blending_indices(
        dataset_index, sample_index, shares, len(weights), count, False
    )
    assert draws(weights, count) == dataset_index.tolist()


def test_shares_hold_over_every_stretch() -> None:
    weights = (0.61, 0.3, 0.09)
    order = np.array(draws(weights, 1000))
    for end in (1, 10, 100, 333, 1000):
        for dataset, weight in enumerate(weights):
            assert abs((order[:end] == dataset).sum() - weight * end) < 2


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0,), "1 weights for 2 datasets"),
        ((1.0, 0.0), "that of 'b' is 0.0"),
        ((-1.0, 1.0), "that of 'a' is -1.0"),
        ((float("nan"), 1.0), "that of 'a' is nan"),
        ((float("inf"), 1.0), "that of 'a' is inf"),
    ],
)
def test_refused_weights(weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Blend(("a", "b"), weights)


def test_a_blend_has_datasets() -> None:
    with pytest.raises(ConfigurationError, match="at least one dataset"):
        Blend(())


@pytest.mark.parametrize(("size", "weight"), [(0, 1.0), (3, 0.0), (3, float("nan"))])
def test_a_group_has_sequences_and_weight(size: int, weight: float) -> None:
    with pytest.raises(ConfigurationError):
        SequenceGroup(0, size, weight)
