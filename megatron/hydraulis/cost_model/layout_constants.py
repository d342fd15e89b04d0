"""The fitted constants of the layout model.

All were fitted together to the step times and out-of-memory results of 141 layouts of one 13B model
on 64 A100-80GB, measured by the authors of Efficient Parallelization Layouts (arXiv 2311.05610),
with ``benchmarks/layout_calibration.py``; docs/cost-model.md has the errors, also of
cross-validation. A constant belongs to a kernel, to the software it ran in, or to all; none belongs
to a model, a layout or a sweep.
"""

import math
from dataclasses import dataclass, fields

from megatron.hydraulis.errors import ConfigurationError

DEFAULT_KERNEL = "flash_attention2 + RMS kernel"


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConstants:
    """A set of attention and norm kernels, with the software that ran them.

    Raises ConfigurationError for a negative or infinite constant, and unless exactly one of
    score_passes and attention_fraction is given.
    """

    name: str
    data_parallel_fraction: float
    """Share of the network that messages between data-parallel ranks reach."""
    pipeline_wait_micro_batches: float
    """What a pipeline of more than one stage loses in every step besides filling and draining, as
    a number of micro-batches of sequences of at most `wait_tokens`. Measured times grow by it as
    micro-batches get more sequences, but not without a pipeline. The cause is unknown."""
    score_passes: float = 0.0
    """How often the forward of attention that stores its scores moves one of them, as in bf16."""
    score_bytes: float = 0.0
    """Bytes that it keeps of a score for the backward."""
    attention_fraction: float = 0.0
    """Rate of attention without stored scores, for long sequences, relative to the device's
    attention_fraction."""
    copied_hidden_states: float = 0.0
    """Copies of query, key and value that attention keeps, in hidden states."""
    has_norm_kernel: bool = False
    """Whether RMSNorm is one kernel instead of elementwise operations on fp32 copies."""

    def __post_init__(self) -> None:
        _check_not_negative(self, f"kernel {self.name!r}")
        if (self.score_passes > 0.0) == (self.attention_fraction > 0.0):
            raise ConfigurationError(
                f"kernel {self.name!r}: attention either stores scores or has a rate but "
                f"score_passes is {self.score_passes} and attention_fraction "
                f"{self.attention_fraction}; give one of them"
            )

    @property
    def stores_scores(self) -> bool:
        """Whether attention writes its scores to memory."""
        return self.score_passes > 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutConstants:
    """Constants of all kernels.

    Raises ConfigurationError for a negative or infinite constant.
    """

    matmul_fraction: float
    """Rate of a layer's matrix products alone, relative to the device's matmul_fraction, which
    includes norms and activations."""
    hidden_passes: float
    """Hidden states that a layer's forward moves through memory outside its matrix products:
    norms, residuals. Without sequence parallelism every tp rank moves all of them."""
    query_passes: float
    """Rows of queries, keys and values that it moves, divided by tp: rotation, layout."""
    ffn_passes: float
    """Rows of the MLP's width that it moves, divided by tp."""
    norm_passes: float
    """Hidden states that the norms of a layer's forward move without a norm kernel, in bf16
    rows."""
    logit_passes: float
    """Rows of logits that loss and its gradient move, in bf16 rows."""
    weight_passes: float
    """How often the backward of a micro-batch moves the weights to accumulate gradients."""
    half_rate_tokens: float
    """Length at which attention without stored scores reaches half of its rate for long
    sequences; chosen after the throughputs in FlashAttention-2 (arXiv 2307.08691, figure 4), not
    fitted."""
    wait_tokens: float
    """Length up to which a pipeline's wait grows with the sequences: that of the calibration. That
    it stops growing is not measured but inferred: pipelines beat tensor parallelism of the same
    product in 52 of 54 measured pairs, which include long sequences."""
    layer_launch_s: float
    """Constant time of a layer's forward; the backward takes 1.5 times as much."""
    tp_link_fraction: float
    """Share of the link's bandwidth that the all-reduces of tensor parallelism reach."""
    tp_latency_s: float
    """Constant time of each of these all-reduces."""
    hidden_states_kept: float
    """Hidden states that a layer keeps for the backward: norms, residuals. Without sequence
    parallelism every tp rank keeps all of them."""
    norm_states_kept: float
    """Additional hidden states, in bf16, that norms without a kernel keep."""
    attention_states_kept: float
    """Hidden states of query, key, value and output that a layer keeps, rotated copies included."""
    ffn_states_kept: float
    """Rows of the MLP's width that a gated MLP keeps."""
    working_layers: float
    """Working memory of a layer's backward, as a multiple of a layer's activations."""
    logit_bytes_split: float
    """Bytes per entry of the logits that tp divides."""
    logit_bytes_whole: float
    """Bytes per entry of the logits that every tp rank holds."""
    fragmentation: float
    """Memory that the allocator takes, as a multiple of the activations' tensors."""
    reserve_bytes: float
    """Context, communicators and libraries."""
    visible_memory: float
    """Bytes that CUDA reports over the nominal ones: 81,252 MiB for 80 GB."""
    kernels: tuple[KernelConstants, ...]

    def __post_init__(self) -> None:
        _check_not_negative(self, "layout model")

    def kernel(self, name: str) -> KernelConstants:
        """The constants of a kernel, ignoring blanks and case; ConfigurationError if unknown."""
        for kernel in self.kernels:
            if _plain(kernel.name) == _plain(name):
                return kernel
        known = ", ".join(repr(kernel.name) for kernel in self.kernels)
        raise ConfigurationError(
            f"kernel {name!r}: constants are known for {len(self.kernels)} kernels but not for it; "
            f"use one of {known}"
        )


def _plain(name: str) -> str:
    return "".join(name.split()).lower()


def _check_not_negative(constants: KernelConstants | LayoutConstants, what: str) -> None:
    for field in fields(constants):
        value = getattr(constants, field.name)
        if isinstance(value, float) and not 0.0 <= value < math.inf:
            raise ConfigurationError(
                f"{what}: constants are finite and not negative but {field.name} is {value}; "
                f"correct it"
            )


# The first three ran in one generation of their authors' software, the last two in a later one.
_FIRST_DATA_PARALLEL_FRACTION = 0.0687
_LATER_DATA_PARALLEL_FRACTION = 0.226
_FIRST_PIPELINE_WAIT = 0.185

LAYOUT_CONSTANTS = LayoutConstants(
    matmul_fraction=1.08,
    hidden_passes=6.67,
    query_passes=5.46,
    ffn_passes=4.81,
    norm_passes=55.3,
    logit_passes=25.6,
    weight_passes=1.52,
    half_rate_tokens=512.0,
    wait_tokens=2048.0,
    layer_launch_s=0.484e-3,
    tp_link_fraction=0.409,
    tp_latency_s=21.3e-6,
    hidden_states_kept=5.24,
    norm_states_kept=6.19,
    attention_states_kept=5.86,
    ffn_states_kept=3.83,
    working_layers=2.16,
    logit_bytes_split=8.82,
    logit_bytes_whole=2.63,
    fragmentation=1.04,
    reserve_bytes=2.75e9,
    visible_memory=81252 * 2**20 / 80e9,
    kernels=(
        KernelConstants(
            name="torch",
            score_passes=15.6,
            score_bytes=8.01,
            data_parallel_fraction=_FIRST_DATA_PARALLEL_FRACTION,
            pipeline_wait_micro_batches=_FIRST_PIPELINE_WAIT,
        ),
        KernelConstants(
            name="fused",
            score_passes=6.78,
            score_bytes=6.69,
            data_parallel_fraction=_FIRST_DATA_PARALLEL_FRACTION,
            pipeline_wait_micro_batches=_FIRST_PIPELINE_WAIT,
        ),
        KernelConstants(
            name="flash_attentionv1.0.8",
            attention_fraction=0.785,
            copied_hidden_states=3.31,
            data_parallel_fraction=_FIRST_DATA_PARALLEL_FRACTION,
            pipeline_wait_micro_batches=_FIRST_PIPELINE_WAIT,
        ),
        KernelConstants(
            name="flash_attention2",
            attention_fraction=1.24,
            data_parallel_fraction=_LATER_DATA_PARALLEL_FRACTION,
            pipeline_wait_micro_batches=7.40,
        ),
        KernelConstants(
            name="flash_attention2 + RMS kernel",
            attention_fraction=1.24,
            has_norm_kernel=True,
            data_parallel_fraction=_LATER_DATA_PARALLEL_FRACTION,
            pipeline_wait_micro_batches=4.46,
        ),
    ),
)
