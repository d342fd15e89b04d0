"""Megatron's scheduler of dynamic context parallelism: what upstream's own code gives."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

from megatron.hydraulis.simulator.work import Wave, context_waves

SEEDS = range(40)


def batch(seed: int) -> list[int]:
    """Up to 120 sequences of at most 6,400 tokens, most of them short."""
    generator = np.random.default_rng(seed)
    drawn = generator.lognormal(5.0, 1.5, size=generator.integers(1, 120))
    return [int(length) for length in np.clip(drawn, 1, 6400)]


def upstream_waves(lengths: Sequence[int], rank_tokens: int, num_ranks: int) -> list[Wave]:
    class Ranks:
        """All that upstream asks of a process group."""

        def size(self) -> int:
            return num_ranks

    scheduler = BalancedCPScheduler(rank_tokens, Ranks())
    _, by_wave = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    waves = []
    for by_rank in by_wave:
        size_of = Counter(tuple(indices) for indices in by_rank)
        waves.append([(size, list(indices)) for indices, size in size_of.items()])
    return waves


@pytest.mark.parametrize("seed", SEEDS)
def test_waves_are_those_of_megatron_s_scheduler(seed: int) -> None:
    lengths = batch(seed)
    found = context_waves(lengths, 400, 16)
    assert found == upstream_waves(lengths, 400, 16)
    indices = [index for wave in found for _, group in wave for index in group]
    assert sorted(indices) == list(range(len(lengths)))
    for wave in found:
        assert sum(size for size, _ in wave) == 16
        assert all(lengths[i] <= 400 * size for size, group in wave for i in group)


def test_a_sequence_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(ValueError, match="4 ranks of 8 tokens cannot hold one of 33"):
        context_waves([33], 8, 4)
