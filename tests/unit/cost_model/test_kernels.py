"""Times of single kernels: limits, monotony and some measured ones."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from megatron.hydraulis.cost_model.device import Precision, device_constants
from megatron.hydraulis.cost_model.kernels import FittedKernels, Operation, Rates
from megatron.hydraulis.errors import ConfigurationError

DEVICES = ("a100-80g", "h100", "b200")
OPERATIONS: tuple[Operation, ...] = ("all_gather", "reduce_scatter", "all_reduce", "alltoall")


def of(name: str) -> tuple[FittedKernels, Rates]:
    device = device_constants(name)
    assert device.kernels is not None
    return device.kernels, device.rates(Precision.BF16)


# Rows of the tables that cost_model/kernels.py names.
@pytest.mark.parametrize(
    ("device", "m", "n", "k", "measured_ms"),
    [
        ("a100-80g", 8192, 12288, 2560, 1.88508),
        ("a100-80g", 4096, 5120, 8192, 1.2937),
        ("h100", 8192, 1536, 10240, 0.30801),
        ("h100", 4096, 7168, 7168, 0.4806),
        ("b200", 4352, 6144, 8192, 0.29459),
        ("b200", 1536, 10240, 51200, 0.97598),
    ],
)
def test_measured_products(device: str, m: int, n: int, k: int, measured_ms: float) -> None:
    kernels, rates = of(device)
    assert 1e3 * kernels.product_s(rates, m, n, k) == pytest.approx(measured_ms, rel=0.08)


@pytest.mark.parametrize(
    ("device", "sequences", "tokens", "heads", "groups", "measured_ms"),
    [
        ("a100-80g", 2, 16384, 24, 8, 18.90512),
        ("a100-80g", 16, 2048, 4, 4, 0.80875),
        ("h100", 8, 3072, 32, 2, 1.24147),
        ("h100", 64, 512, 8, 4, 0.38967),
        ("b200", 2, 16384, 12, 12, 1.45292),
        ("b200", 32, 4096, 12, 1, 1.54448),
    ],
)
def test_measured_calls_of_attention(
    device: str, sequences: int, tokens: int, heads: int, groups: int, measured_ms: float
) -> None:
    kernels, rates = of(device)
    found_s = kernels.attention_s(rates, sequences, tokens, heads, groups, 128)
    found_s += kernels.cache_write_s(sequences * tokens, groups, 128)
    assert 1e3 * found_s == pytest.approx(measured_ms, rel=0.08)


@pytest.mark.parametrize(
    ("device", "operation", "num_ranks", "num_bytes", "measured_ms"),
    [
        ("a100-80g", "reduce_scatter", 8, 134217728, 0.624),
        ("h100", "all_reduce", 8, 268435456, 1.0921),
        ("h100", "alltoall", 8, 134217728, 0.40242),
        ("b200", "all_gather", 8, 4194304, 0.02923),
    ],
)
def test_measured_collectives(
    device: str, operation: Operation, num_ranks: int, num_bytes: int, measured_ms: float
) -> None:
    kernels, rates = of(device)
    found_ms = 1e3 * kernels.collective_s(rates, operation, num_ranks, num_bytes)
    assert found_ms == pytest.approx(measured_ms, rel=0.08)


@pytest.mark.parametrize("name", DEVICES)
class TestLimits:
    def test_products_take_at_least_their_operations_and_their_bytes(self, name: str) -> None:
        kernels, rates = of(name)
        for m, n, k in itertools.product((1, 300, 4096), (64, 5120), (32, 8192)):
            time_s = kernels.product_s(rates, m, n, k)
            assert time_s > 2 * m * n * k / rates.flops_per_s
            assert time_s > 2 * (m * n + n * k + m * k) / rates.memory_bytes_per_s

    def test_a_product_takes_longer_with_more_rows_and_entries(self, name: str) -> None:
        kernels, rates = of(name)
        by_rows = [kernels.product_s(rates, m, 5120, 5120) for m in range(256, 16384, 256)]
        by_entries = [kernels.product_s(rates, 2048, 5120, k) for k in range(256, 16384, 256)]
        assert by_rows == sorted(by_rows)
        assert by_entries == sorted(by_entries)

    def test_a_row_more_than_a_wave_holds_begins_another(self, name: str) -> None:
        kernels, rates = of(name)
        full = [kernels.product_s(rates, m, 256, 8192) for m in (64, 128, 192, 256)]
        assert max(full) < 1.2 * min(full)

    def test_attention_takes_half_of_all_pairs_for_long_sequences(self, name: str) -> None:
        kernels, rates = of(name)
        time_s = kernels.attention_s(rates, 1, 2**17, 32, 8, 128)
        causal_s = 2 * 2**34 * 32 * 128 / (kernels.attention.peak_fraction * rates.flops_per_s)
        assert 1.0 < time_s / causal_s < 1.1

    def test_a_window_makes_attention_linear_in_tokens(self, name: str) -> None:
        kernels, rates = of(name)
        short, long, whole = (
            kernels.attention_s(rates, 1, tokens, 32, 8, 128, window)
            for tokens, window in ((2**15, 1024), (2**16, 1024), (2**16, 0))
        )
        assert 1.8 < long / short < 2.1
        assert whole > 10 * long
        assert kernels.attention_s(rates, 1, 2**16, 32, 8, 128, 2**20) == whole

    def test_two_sequences_take_less_than_one_of_twice_the_length(self, name: str) -> None:
        kernels, rates = of(name)
        for tokens in (128, 1024, 8192):
            two = kernels.attention_s(rates, 2, tokens, 32, 8, 128)
            assert two < kernels.attention_s(rates, 1, 2 * tokens, 32, 8, 128)

    def test_collectives_exceed_latency_and_wire(self, name: str) -> None:
        kernels, rates = of(name)
        for operation, ranks in itertools.product(OPERATIONS, (2, 4, 8)):
            times = [
                kernels.collective_s(rates, operation, ranks, 2.0**power) for power in range(34)
            ]
            assert times == sorted(times)
            assert times[0] > 2e-6
            wire_s = 2.0**33 * (ranks - 1) / ranks / rates.link_bytes_per_s
            assert times[-1] > wire_s * (1.5 if operation == "all_reduce" else 1.0)

    def test_a_rank_alone_needs_no_collective(self, name: str) -> None:
        kernels, rates = of(name)
        assert kernels.collective_s(rates, "all_gather", 1, 1e9) == 0.0


def test_fp32_has_its_own_peak_and_twice_the_bytes() -> None:
    kernels, bf16 = of("a100-80g")
    fp32 = device_constants("a100-80g").rates(Precision.FP32)
    assert fp32.entry_bytes == 2 * bf16.entry_bytes
    ratio = kernels.product_s(fp32, 8192, 8192, 8192) / kernels.product_s(bf16, 8192, 8192, 8192)
    assert ratio == pytest.approx(312 / 19.5, rel=0.01)


def test_h200_differs_from_h100_where_memory_decides() -> None:
    (kernels, slow), (same, fast) = of("h100"), of("h200")
    assert same == kernels
    narrow = [kernels.product_s(rates, 64, 65536, 8192) for rates in (slow, fast)]
    assert narrow[0] / narrow[1] == pytest.approx(4.8 / 3.35, rel=0.01)
    square = [kernels.product_s(rates, 8192, 8192, 8192) for rates in (slow, fast)]
    assert square[0] == square[1]


@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_sizes_that_are_not_positive(wrong: float, place: int) -> None:
    kernels, rates = of("h100")
    sizes: list[Any] = [64, 64, 64]
    sizes[place] = wrong
    with pytest.raises(ConfigurationError, match=f"product: .*{wrong}"):
        kernels.product_s(rates, *sizes)
    with pytest.raises(ConfigurationError, match=f"attention: .*{wrong}"):
        kernels.attention_s(rates, sizes[0], sizes[1], 8, 8, sizes[2])
    with pytest.raises(ConfigurationError, match=r"attention: .*-128"):
        kernels.attention_s(rates, 1, 64, 8, 8, 128, -128)
    with pytest.raises(ConfigurationError, match=f"collective: .*{wrong}"):
        kernels.collective_s(rates, "all_gather", 8, wrong)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_constants_that_are_negative(wrong: float) -> None:
    kernels, _ = of("h100")
    with pytest.raises(ConfigurationError, match=f"memory_fraction.*{wrong}"):
        replace(kernels, product=replace(kernels.product, memory_fraction=wrong))
    with pytest.raises(ConfigurationError, match="0 multiprocessors"):
        replace(kernels, num_multiprocessors=0)
