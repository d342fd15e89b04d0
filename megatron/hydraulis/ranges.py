"""The numbers that options, sizes of models and drawn batches may have: every limit is here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron.hydraulis.errors import Problems

_LARGEST_INTEGER = 2**31 - 1
"""The limit of libraries that count in 32 bits, far above any real size or number of
iterations."""
_LARGEST_REAL = 1e19
"""The square of a larger number overflows fp32."""
_LARGEST_SEED = 2**32 - 1
"""The limit of NumPy's generator, which upstream seeds too."""
MAX_RANKS = 1 << 17
"""The largest job: each rank takes memory and time of planning, and no cluster has more devices
today."""
MAX_LAYERS = 10_000
"""The deepest model: commands list the parameters of every layer."""
MAX_DRAWN_SEQUENCES = 1 << 24
"""The most sequences that a command draws: as Python numbers they take about 0.6 GB."""
MAX_SHUFFLED_SEQUENCES = 1 << 28
"""The largest corpus that a command shuffles: it takes 2 GiB of lengths, and as much of order."""


@dataclass(frozen=True, slots=True)
class OptionRange:
    """An interval of numbers; a value that is not finite is outside of any."""

    low: float
    high: float
    above_low: bool = False
    """Whether low itself is outside."""
    below_high: bool = False
    """Whether high itself is outside."""

    def problem(self, option: str, value: object) -> str | None:
        """The rule, the number and the fix if a value of the option is outside; else None."""
        if not isinstance(value, int | float):
            return None
        if value < self.low or (self.above_low and value == self.low):
            rule = f"{'above' if self.above_low else 'at least'} {self.low:g}"
            what = "a positive number" if self.low in (0, 1) else "a larger number"
            if self.low == 0 and not self.above_low:
                what = "0 or a positive number"
        elif value > self.high or (self.below_high and value == self.high):
            high = f"{self.high:,}" if isinstance(self.high, int) else f"{self.high:g}"
            rule = f"{'below' if self.below_high else 'at most'} {high}"
            what = "a smaller number"
        elif math.isfinite(value):
            return None
        else:
            rule, what = "a number", "a number"
        return f"{option} must be {rule} but is {value}; give {what}"


_FROM_1 = OptionRange(1, _LARGEST_INTEGER)
_FROM_0 = OptionRange(0, _LARGEST_INTEGER)
_POSITIVE = OptionRange(0.0, _LARGEST_REAL, above_low=True)
_NOT_NEGATIVE = OptionRange(0.0, _LARGEST_REAL)
_LARGEST_NUM_SAMPLES = 2**53
"""Upstream's schedule counts them in float64."""

_OPTIONS: dict[OptionRange, str] = {
    _FROM_1: """
        --hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups
        --moe-ffn-hidden-size --moe-router-topk --moe-router-num-groups --moe-router-group-topk
        --moe-shared-expert-intermediate-size
        --q-lora-rank --kv-lora-rank --qk-head-dim --v-head-dim
        --linear-conv-kernel-dim --linear-key-head-dim --linear-value-head-dim
        --linear-num-key-heads --linear-num-value-heads
        --kv-channels --max-position-embeddings --rotary-base --rotary-seq-len-interpolation-factor
        --yarn-original-max-position-embeddings
        --recompute-num-layers --make-vocab-size-divisible-by --vocab-size --padded-vocab-size
        --seq-length --train-iters --global-batch-size --eval-global-batch-size --exit-interval
        --exit-duration-in-mins --lr-decay-iters --lr-wsd-decay-iters --save-interval --ckpt-step
        --eval-interval
        --log-interval --tensorboard-log-interval --tensorboard-queue-size
        --distributed-timeout-minutes --tensor-model-parallel-size --pipeline-model-parallel-size
        --context-parallel-size --expert-model-parallel-size --expert-tensor-parallel-size
        --global-batch-tokens --max-tokens-per-micro-batch --row-quantum-tokens --loss-chunk-tokens
        --ranks-per-node --keep-last --max-skipped-in-a-row --lora-rank""",
    OptionRange(1, MAX_LAYERS): "--num-layers",
    OptionRange(1, MAX_RANKS): "--num-ranks",
    _FROM_0: """
        --mtp-num-layers --lr-warmup-iters --eval-iters --start-eval-at-iter --manual-gc-interval
        --tiktoken-num-special-tokens --null-tokenizer-eod-id --logging-level --plan-ahead
        --fs-prefetch
        --window-attn-skip-freq --no-rope-freq
        --moe-layer-freq --num-experts""",
    OptionRange(
        1, _LARGEST_NUM_SAMPLES
    ): "--train-samples --lr-decay-samples --lr-wsd-decay-samples",
    OptionRange(0, _LARGEST_NUM_SAMPLES): "--lr-warmup-samples --rampup-batch-size",
    OptionRange(-_LARGEST_REAL, _LARGEST_REAL): "--glu-linear-offset",
    OptionRange(-1, _LARGEST_INTEGER): "--null-tokenizer-pad-id --window-size",
    OptionRange(1, _LARGEST_SEED): "--seed",
    OptionRange(0, 2): "--timing-log-level",
    _POSITIVE: """
        --norm-epsilon --activation-func-clamp-value --init-method-std --rope-scaling-factor
        --moe-router-topk-scaling-factor --adam-eps --plan-time-limit --report-drift
        --lora-alpha --yarn-beta-fast --yarn-beta-slow""",
    _NOT_NEGATIVE: """
        --mscale --mscale-all-dim --mtp-loss-scaling-factor
        --lr --min-lr --decoupled-lr --decoupled-min-lr --lr-warmup-init --weight-decay
        --start-weight-decay --end-weight-decay --clip-grad
        --moe-aux-loss-coeff --moe-z-loss-coeff --moe-router-bias-update-rate""",
    OptionRange(2, _LARGEST_INTEGER): "--qk-pos-emb-head-dim",
    OptionRange(1.0, _LARGEST_REAL): "--rotary-scaling-factor",
    OptionRange(0.0, 1.0, below_high=True): "--adam-beta1 --adam-beta2",
    OptionRange(0.0, 1.0): "--lr-warmup-fraction --hidden-dropout --attention-dropout",
    OptionRange(0.0, 1.0, above_low=True): "--rotary-percent",
}

_OPTIONS_OF_COMMANDS: dict[OptionRange, str] = {
    _FROM_1: """
        --max-tokens --num-sizes --short-tokens --num-repeats --top --iteration --call --show""",
    _FROM_0: "--seed --num-warmup --matrix-size",
    _POSITIVE: "--max-file-gb --intra-node-gb-per-s --inter-node-gb-per-s",
    OptionRange(1, 2**53): "--memory-limit-bytes",
    OptionRange(1, 1_000_000): "--iterations",
    OptionRange(1, 100_000): "--num-batches",
    OptionRange(1, 1_000): "--max-strategies",
    OptionRange(1, 256): "--processes --workers",
    OptionRange(0.0, 86_400.0): "--plan-time",
    OptionRange(0.0, 86_400.0, above_low=True): "--time-limit --timeout",
}
"""Options of other commands than training, where they mean something else or do not exist."""


def _by_option(table: Mapping[OptionRange, str]) -> dict[str, OptionRange]:
    return {option: bounds for bounds, options in table.items() for option in options.split()}


RANGES: Mapping[str, OptionRange] = MappingProxyType(_by_option(_OPTIONS))
"""Option of training -> the numbers that it accepts."""
RANGES_OF_COMMANDS: Mapping[str, OptionRange] = MappingProxyType(
    {**RANGES, **_by_option(_OPTIONS_OF_COMMANDS)}
)
"""Option of the other commands -> the numbers that it accepts."""


def check_range(option: str, value: float, name: str = "") -> None:
    """Raise ConfigurationError for a number outside the range of an option of a command.

    name: what the error calls it, if not by the option.
    """
    problems = Problems()
    if (line := RANGES_OF_COMMANDS[option].problem(name or option, value)) is not None:
        problems.add(line)
    problems.raise_any()
