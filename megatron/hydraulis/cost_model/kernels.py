"""Times of single kernels: matrix products, causal attention and collectives inside a node.

The forms say what a kernel waits for: whole waves of tiles, memory, the longest block of attention,
the steps of a ring. Their constants are fitted for each device, by ``python -m benchmarks.kernels
--fit``, which also prints the errors, to the tables that NVIDIA publishes with aiconfigurator.

The planner needs times that are linear in Σ s², Σ s and 1. So each kernel's time is fitted, by
least squares of relative errors with coefficients that are not negative, to 1,024 to 16,384 tokens
of a cp rank: a chord would depend on where its two ends lie in their waves of tiles.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from megatron.hydraulis.errors import ConfigurationError

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "alltoall"]

_FLOPS_PER_ENTRY = 2
# Scores, and their product with the values.
_PRODUCTS_OF_ATTENTION = 2
# Rows and columns of the output that a multiprocessor computes at a time, by libraries' kernels.
_TILES = ((256, 256), (256, 128), (128, 256), (256, 64), (64, 256), (128, 128))
_USUAL_TILE = 256 * 128
# Parts into which k is cut when there are few tiles; each further one writes and reads fp32 sums.
_SPLITS = (1, 2, 4, 8)
_SPLIT_BYTES = 2 * 4
_QUERY_BLOCK = 128
_SHORT_QUERY_BLOCK = 64
_USUAL_HEAD_SIZE = 128
# Exponents p of (latency^p + wire^p)^(1/p): messages of some MB reach neither limit. They fit all
# three devices, so that they belong to the libraries' protocols and not to a device.
_RING_EXPONENT = 0.5
_ALL_TO_ALL_EXPONENT = 0.7


# To which linear times are fitted: not only powers of 2, which fill whole tiles. Sequences may be
# longer, as ranks share them.
_ROW_TOKENS = tuple(round(1024 * 2 ** (power / 4)) for power in range(17))
_SEQUENCE_TOKENS = tuple(round(256 * 2 ** (power / 2)) for power in range(17))
_MAX_CACHED = 4096


def _check_positive(kernel: str, sizes: Mapping[str, float]) -> None:
    if not all(0.0 < size < math.inf for size in sizes.values()):
        raise ConfigurationError(
            f"{kernel}: sizes must be positive and finite but are {dict(sizes)}; correct them"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """Figures of a device's data sheet by which its kernels run."""

    flops_per_s: float
    """Peak of dense matrix products in the training precision."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """One direction of a rank's link inside the node."""
    entry_bytes: int = 2
    """Of a number in the training precision."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductConstants:
    """Constants of products of dense matrices."""

    peak_fraction: float
    """Share of the peak that a multiprocessor reaches inside a tile of 256 × 128."""
    small_tile_exponent: float = 0.0
    """Exponent of the area of a smaller tile by which its rate falls."""
    fill_entries: float
    """What filling and draining a tile takes, in entries of k."""
    memory_fraction: float
    """Share of the memory's bandwidth."""
    start_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConstants:
    """Constants of the forward of fused causal attention."""

    peak_fraction: float
    """Share of the peak inside a block of 128 queries."""
    small_head_exponent: float = 0.0
    """Exponent of head sizes below 128 by which the rate falls."""
    backward_forwards: float
    """Time of the backward over that of the forward, which alone was measured."""
    fill_keys: float
    """What beginning and ending a block takes, in keys."""
    tail: float
    """Share of the longest block's time for which the device waits at the end."""
    has_short_blocks: bool
    """Whether sequences of at most 64 tokens are computed in blocks of 64 queries."""
    start_s: float
    cache_token_s: float
    cache_token_head_s: float
    cache_head_s: float
    """Writing keys and values of 128 channels to a cache, s: a token takes the less of the last
    times its heads, and the first plus the second times its heads. The measured calls do it,
    training does not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveConstants:
    """Constants of NCCL's collectives over ranks of one node."""

    start_s: float
    step_s: float
    """Latency of each step of a ring."""
    ring_fraction: float
    ring_loss: float
    """A ring over n ranks reaches ring_fraction / (1 + ring_loss / n) of a link."""
    all_reduce_gain: float
    """Rate of an all-reduce over that of the reduce-scatter and all-gather that it consists of."""
    all_to_all_start_s: float
    all_to_all_fraction: float
    all_to_all_loss: float
    """The same of an all-to-all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedKernels:
    """Times of a device's kernels by their sizes. Methods raise ConfigurationError for sizes that
    are not positive and finite."""

    num_multiprocessors: int
    product: ProductConstants
    attention: AttentionConstants
    collective: CollectiveConstants
    source: str
    """Where the measured times come from."""

    def __post_init__(self) -> None:
        for constants in (self.product, self.attention, self.collective):
            wrong = {
                name: value
                for name, value in asdict(constants).items()
                if not 0 <= value < math.inf
            }
            if wrong or self.num_multiprocessors < 1:
                raise ConfigurationError(
                    f"kernels of {self.num_multiprocessors} multiprocessors: {wrong} must not be "
                    f"negative, and there must be at least 1; correct them"
                )

    def product_s(self, rates: Rates, m: float, n: float, k: float) -> float:
        """Time of the product of an (m, k) and a (k, n) matrix.

        Tiles are computed in waves, one by each multiprocessor, for as long as a whole wave takes;
        or memory takes longer to read both matrices and write the third. A library is taken to
        choose the fastest tile and split of k.
        """
        _check_positive("product", {"m": m, "n": n, "k": k})
        own, best_s = self.product, math.inf
        tile_rate = own.peak_fraction * rates.flops_per_s / self.num_multiprocessors
        bandwidth = own.memory_fraction * rates.memory_bytes_per_s
        least_bytes = rates.entry_bytes * (m * k + k * n + m * n)
        for rows, columns in _TILES:
            share = math.pow(min(1.0, rows * columns / _USUAL_TILE), own.small_tile_exponent)
            entry_s = _FLOPS_PER_ENTRY * rows * columns / (tile_rate * share)
            num_tiles = math.ceil(m / rows) * math.ceil(n / columns)
            for num_parts in _SPLITS:
                num_waves = math.ceil(num_tiles * num_parts / self.num_multiprocessors)
                tiles_s = num_waves * entry_s * (k / num_parts + own.fill_entries)
                num_bytes = least_bytes + (num_parts - 1) * _SPLIT_BYTES * m * n
                best_s = min(best_s, max(tiles_s, num_bytes / bandwidth))
        return own.start_s + best_s

    def attention_s(
        self,
        rates: Rates,
        num_sequences: float,
        num_tokens: float,
        num_heads: float,
        num_key_value_heads: float,
        head_size: float,
        window_tokens: int = 0,
    ) -> float:
        """Time of causal attention of num_sequences sequences of num_tokens tokens, forward.

        Blocks of queries pass all keys that one of them sees, at most window_tokens before them
        (0: all). The device waits for a share of the longest block at the end, and for queries,
        keys, values and outputs in memory.
        """
        sizes = {
            "sequences": num_sequences,
            "tokens": num_tokens,
            "heads": num_heads,
            "key and value heads": num_key_value_heads,
            "head size": head_size,
            "window": window_tokens or num_tokens,
        }
        _check_positive("attention", sizes)
        own = self.attention
        is_short = own.has_short_blocks and num_tokens <= _SHORT_QUERY_BLOCK
        block = _SHORT_QUERY_BLOCK if is_short else _QUERY_BLOCK
        num_blocks = math.ceil(num_tokens / block)
        most_keys = block * num_blocks
        if window_tokens:
            most_keys = min(most_keys, window_tokens + block)
        num_growing = most_keys // block
        keys = block * num_growing * (num_growing + 1) / 2 + (num_blocks - num_growing) * most_keys
        share = math.pow(min(1.0, head_size / _USUAL_HEAD_SIZE), own.small_head_exponent)
        key_flops = _PRODUCTS_OF_ATTENTION * _FLOPS_PER_ENTRY * head_size * block
        key_s = key_flops / (own.peak_fraction * share * rates.flops_per_s)
        all_keys = num_sequences * num_heads * (keys + num_blocks * own.fill_keys)
        last_keys = own.tail * self.num_multiprocessors * (most_keys + own.fill_keys)
        num_moved = 2 * (num_heads + num_key_value_heads) * num_sequences * num_tokens * head_size
        memory_s = rates.entry_bytes * num_moved / rates.memory_bytes_per_s
        return own.start_s + key_s * (all_keys + last_keys) + memory_s

    def cache_write_s(
        self, num_tokens: float, num_key_value_heads: float, head_size: float
    ) -> float:
        """Time of writing the keys and values of num_tokens tokens to a cache."""
        own = self.attention
        token_s = min(
            own.cache_head_s * num_key_value_heads,
            own.cache_token_s + own.cache_token_head_s * num_key_value_heads,
        )
        return num_tokens * token_s * head_size / _USUAL_HEAD_SIZE

    def collective_s(
        self, rates: Rates, operation: Operation, num_ranks: int, num_bytes: float
    ) -> float:
        """Time of a collective over num_ranks ranks of a node; 0.0 for one rank.

        num_bytes is the whole message: what an all-gather leaves on each rank, what the others take
        from each.
        """
        _check_positive("collective", {"ranks": num_ranks, "bytes": num_bytes})
        if num_ranks == 1:
            return 0.0
        own = self.collective
        wire_s = num_bytes * (num_ranks - 1) / num_ranks / rates.link_bytes_per_s
        if operation == "alltoall":
            wire_s *= (1.0 + own.all_to_all_loss / num_ranks) / own.all_to_all_fraction
            return _joined(own.all_to_all_start_s, wire_s, _ALL_TO_ALL_EXPONENT)
        num_passes = 2 if operation == "all_reduce" else 1
        wire_s *= num_passes * (1.0 + own.ring_loss / num_ranks) / own.ring_fraction
        if operation == "all_reduce":
            wire_s /= own.all_reduce_gain
        latency_s = own.start_s + num_passes * (num_ranks - 1) * own.step_s
        return _joined(latency_s, wire_s, _RING_EXPONENT)


@lru_cache(maxsize=_MAX_CACHED)
def product_line(
    kernels: FittedKernels, rates: Rates, rows_per_token: float, n: float, k: float
) -> tuple[float, float]:
    """The time of products of rows_per_token rows a token, n columns and k entries.

    Returns seconds per token, and seconds.
    """
    return _line(lambda tokens: kernels.product_s(rates, rows_per_token * tokens, n, k))


@lru_cache(maxsize=_MAX_CACHED)
def collective_line(
    kernels: FittedKernels,
    rates: Rates,
    operation: Operation,
    num_ranks: int,
    bytes_per_token: float,
) -> tuple[float, float]:
    """The time of a collective. Returns seconds per token, and seconds."""
    return _line(
        lambda tokens: kernels.collective_s(rates, operation, num_ranks, bytes_per_token * tokens)
    )


@lru_cache(maxsize=_MAX_CACHED)
def attention_plane(
    kernels: FittedKernels,
    rates: Rates,
    num_heads: float,
    num_key_value_heads: float,
    head_size: float,
) -> tuple[float, float, float]:
    """The time of attention of the sequences of a micro-batch, forward.

    Returns seconds per token² of a sequence, seconds per token, and seconds.
    """
    rows = [
        (num_sequences, length)
        for length in _SEQUENCE_TOKENS
        for num_sequences in {1, max(1, _ROW_TOKENS[-1] // length)}
    ]
    per_token2_s, per_token_s, constant_s = _fitted(
        [(num * length**2, num * length, 1.0) for num, length in rows],
        [
            kernels.attention_s(rates, *row, num_heads, num_key_value_heads, head_size)
            for row in rows
        ],
    )
    return per_token2_s, per_token_s, constant_s


def _line(time_s: Callable[[int], float]) -> tuple[float, float]:
    per_token_s, constant_s = _fitted(
        [(tokens, 1.0) for tokens in _ROW_TOKENS], [time_s(tokens) for tokens in _ROW_TOKENS]
    )
    return per_token_s, constant_s


def _fitted(points: Sequence[tuple[float, ...]], times_s: Sequence[float]) -> list[float]:
    relative = np.array(points) / np.array(times_s)[:, None]
    scale = relative.max(axis=0)
    from scipy.optimize import nnls  # training plans without it

    found, _ = nnls(relative / scale, np.ones(len(times_s)))
    coefficients: list[float] = (found / scale).tolist()
    return coefficients


def _joined(latency_s: float, wire_s: float, exponent: float) -> float:
    total = math.pow(latency_s, exponent) + math.pow(wire_s, exponent)
    return math.pow(total, 1.0 / exponent)


_SOURCE = (
    "NVIDIA aiconfigurator, Apache-2.0, commit 095f58a (2026-08-21), systems/data/{}; fitted to "
    "products and attention above 0.1 ms and collectives of at least 1 MiB"
)
# Backward over forward of attention. A100: floating-point operations, as scores are computed again
# (arXiv 2307.08691). H100: forward and backward together reach 0.525 of the peak (arXiv 2407.08608,
# causal, head size 128), which leaves 3.5 / 0.525 - 1 / 0.66 for the backward. B200: as on the H100
# (assumption).
A100_KERNELS = FittedKernels(
    num_multiprocessors=108,
    product=ProductConstants(
        peak_fraction=0.955,
        small_tile_exponent=0.486,
        fill_entries=212.0,
        memory_fraction=0.744,
        start_s=11.4e-6,
    ),
    attention=AttentionConstants(
        peak_fraction=0.603,
        backward_forwards=2.5,
        fill_keys=0.0,
        tail=0.236,
        has_short_blocks=True,
        start_s=24.3e-6,
        cache_token_s=8.39e-9,
        cache_token_head_s=0.213e-9,
        cache_head_s=2.21e-9,
    ),
    collective=CollectiveConstants(
        start_s=9.4e-6,
        step_s=0.223e-6,
        ring_fraction=0.86,
        ring_loss=0.554,
        all_reduce_gain=1.087,
        all_to_all_start_s=16.3e-6,
        all_to_all_fraction=0.739,
        all_to_all_loss=0.547,
    ),
    source=_SOURCE.format("a100_sxm"),
)
H100_KERNELS = FittedKernels(
    num_multiprocessors=132,
    product=ProductConstants(
        peak_fraction=0.881,
        fill_entries=205.0,
        memory_fraction=0.849,
        start_s=0.0,
    ),
    attention=AttentionConstants(
        peak_fraction=0.66,
        backward_forwards=3.4,
        fill_keys=70.0,
        tail=0.3,
        has_short_blocks=True,
        start_s=18e-6,
        cache_token_s=6.5e-9,
        cache_token_head_s=0.16e-9,
        cache_head_s=1.7e-9,
    ),
    collective=CollectiveConstants(
        start_s=3.57e-6,
        step_s=0.443e-6,
        ring_fraction=1.078,
        ring_loss=1.379,
        all_reduce_gain=1.189,
        all_to_all_start_s=8.97e-6,
        all_to_all_fraction=0.718,
        all_to_all_loss=0.198,
    ),
    source=_SOURCE.format("h100_sxm"),
)
B200_KERNELS = FittedKernels(
    num_multiprocessors=148,
    product=ProductConstants(
        peak_fraction=0.74,
        fill_entries=111.0,
        memory_fraction=0.731,
        start_s=4.05e-6,
    ),
    attention=AttentionConstants(
        peak_fraction=0.686,
        backward_forwards=3.4,
        small_head_exponent=0.888,
        fill_keys=299.0,
        tail=0.847,
        has_short_blocks=False,
        start_s=17e-6,
        cache_token_s=1.38e-9,
        cache_token_head_s=0.254e-9,
        cache_head_s=0.568e-9,
    ),
    collective=CollectiveConstants(
        start_s=6.19e-6,
        step_s=0.747e-6,
        ring_fraction=0.989,
        ring_loss=0.979,
        all_reduce_gain=1.135,
        all_to_all_start_s=12.8e-6,
        all_to_all_fraction=0.842,
        all_to_all_loss=1.952,
    ),
    source=_SOURCE.format("b200_sxm"),
)
