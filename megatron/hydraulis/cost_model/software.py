"""What the software of a training run adds to model and device: kernels, launches, messages.

`TRAINING` is this program; training, ``estimate``, ``simulate`` and ``recommend-layout`` use it.
The others ran 141 layouts of one 13B model on 64 A100-80GB for Efficient Parallelization Layouts
(arXiv 2311.05610). All were fitted together to the step times of these layouts and to the times of
a 32B model on 64 A800 (arXiv 2412.07894) by ``benchmarks/layout_calibration.py``;
docs/cost-model.md has the errors. Nothing belongs to a model, a layout or a sweep.
"""

import math
from dataclasses import dataclass, field, fields, replace

from megatron.hydraulis.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptMemory:
    """What other software keeps besides the terms of the memory model, which is of this program.

    Counts are those of its operations, not fitted. Gradients are bf16. Weights, gradients and a
    share of the optimizer's state (ZeRO-1 over the replicas) are all of its state.
    """

    hidden_states: float = 2.0
    """More hidden states of a layer: residuals and dropout's output."""
    attention_states: float = 2.0
    """More states as wide as the queries: those before the rotation."""
    mlp_tensors: float = 1.0
    """More tensors as wide as a gated MLP: the output of an activation without a fused kernel."""
    norm_states: float = 0.0
    """Hidden states of norms without a kernel: of both an fp32 copy and the normalised input."""
    score_bytes: float = 0.0
    """Of a score of attention that stores them: softmax's output and mask. As much is needed while
    one layer is at work."""
    logit_bytes: float = 16.0
    """Of an entry of the logits, which every tp rank gathers: logits and their gradient in bf16,
    and in fp32 their copy, its log-softmax and the gradient of it."""
    reserve_bytes: float = 2.5e9
    """Context, communicators and libraries."""
    visible_memory: float = 81252 * 2**20 / 80e9
    """Bytes that CUDA shows of a device over the nominal ones: 81,252 MiB of 80 GB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherTraining:
    """Where other training software differs in the course of an iteration.

    Replicas add up gradients by all-reduce and gather parameters (ZeRO-1) instead of regrouping.
    """

    network_share: float = 1.0
    """Of what the network's links reach in this program: messages between stages and replicas."""
    reduce_share: float = 1.0
    """Of that: messages between replicas."""
    wait_micro_batches: float
    """What a pipeline loses in a step besides filling and draining, as a number of micro-batches
    of sequences of at most `wait_tokens`. Measured times with two stages grow by it with the
    sequences of a micro-batch, but not without a pipeline. The cause is unknown."""
    wait_share: float = 1.0
    """Most that it loses, as a share of its micro-batches."""
    wait_tokens: float = 2048.0
    """Length up to which the wait grows with the sequences: that of the measured layouts."""
    kept: KeptMemory = field(default_factory=KeptMemory)


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Kernels and how they are called.

    Raises ConfigurationError for a constant that is negative or not finite, and unless exactly one
    of attention_share and score_passes is positive.
    """

    name: str
    hidden_passes: float = 6.58
    """Hidden states that a layer's forward moves through memory outside its matrix products:
    norms, residuals. Without sequence parallelism every tp rank moves all of them. Target of the
    fit: that saved 0.6 of 19.6 ms per layer (arXiv 2205.05198, table 4)."""
    query_passes: float = 5.79
    """Rows of queries, keys and values that it moves, divided by tp: rotation, layout."""
    ffn_passes: float = 4.93
    """Rows of the MLP's width that it moves, divided by tp, if the MLP is gated."""
    norm_passes: float = 0.0
    """Hidden states that norms move without a kernel, in bf16 rows."""
    logit_passes: float = 26.1
    """Rows of logits that loss and its gradient move, in bf16 rows."""
    logit_products: float = 4.0
    """Products with the output matrix: logits, once more for the backward of a row of several
    chunks (runtime/token_log_probs.py), and two gradients; not fitted."""
    weight_passes: float = 1.60
    """How often the backward of a micro-batch moves the weights to accumulate gradients."""
    half_rate_tokens: float = 512.0
    """Length at which attention without stored scores reaches half of its rate for long sequences;
    after the throughputs in FlashAttention-2 (arXiv 2307.08691, figure 4), not fitted."""
    collective_latencies: float = 2.16
    """Constant time of a collective of tensor parallelism, in latencies of its link."""
    launch_share: float = 1.0
    """Constant cost of a layer, over the device's."""
    expert_launch_share: float = 19 / 67
    """More of it for each expert of the rank, as experts run one after the other: operations of one
    in forward and backward, over the launches of a layer (tests/cuda_stand_in/README.md); counted,
    not fitted."""
    grouped_expert_launch_share: float = 6 / 67
    """Likewise in grouped products of Transformer Engine, which launches one for each expert: two
    in the forward and four in the backward. At 27 µs each; its own benchmark of 8 products has 33
    (TransformerEngine pull request 3134)."""
    tp_link_share: float = 0.849
    """Of what links in a node reach: collectives of tensor parallelism. Target of the fit: 41.5 %
    MFU for a 22B model on 8 A100 (arXiv 2205.05198, table 5)."""
    attention_share: float = 1.0
    """Rate of attention without stored scores for long sequences, over the device's."""
    score_passes: float = 0.0
    """How often the forward of attention that stores its scores moves one of them, as in bf16."""
    other: OtherTraining | None = None
    """None for this program."""

    def __post_init__(self) -> None:
        for part in (self, self.other, self.other and self.other.kept):
            for each in fields(part) if part else ():
                value = getattr(part, each.name)
                if isinstance(value, float) and not 0.0 <= value < math.inf:
                    raise ConfigurationError(
                        f"kernel {self.name!r}: constants are finite and not negative but "
                        f"{each.name} is {value}; correct it"
                    )
        if (self.score_passes > 0.0) == (self.attention_share > 0.0):
            raise ConfigurationError(
                f"kernel {self.name!r}: attention either stores scores or has a rate but "
                f"score_passes is {self.score_passes} and attention_share "
                f"{self.attention_share}; give one of them"
            )

    @property
    def stores_scores(self) -> bool:
        """Whether attention writes its scores to memory."""
        return self.score_passes > 0.0


TRAINING = Software(name="hydraulis")

# Three ran in one generation of their authors' software, two in a later one.
_FIRST = OtherTraining(reduce_share=0.0823, wait_micro_batches=0.22)
# Target of the fit: data parallelism costs a 30B model 9 to 29 % on 256 GPUs.
_LATER = OtherTraining(network_share=0.243, wait_micro_batches=7.19)
_SEPARATE_NORMS = KeptMemory(norm_states=6.0)
_STORED_SCORES = replace(_SEPARATE_NORMS, score_bytes=8.0)
_NORM_KERNEL = replace(
    TRAINING,
    name="flash_attention2 + RMS kernel",
    logit_products=3.0,
    launch_share=0.662,
    tp_link_share=0.519,
    # With few micro-batches, published sweeps show next to no wait with this kernel.
    other=replace(_LATER, wait_micro_batches=4.09, wait_share=0.125),
)
_NO_NORM_KERNEL = replace(_NORM_KERNEL, norm_passes=57.7)

SOFTWARE = (
    TRAINING,
    replace(
        _NO_NORM_KERNEL,
        name="torch",
        attention_share=0.0,
        score_passes=16.0,
        other=replace(_FIRST, kept=_STORED_SCORES),
    ),
    replace(
        _NO_NORM_KERNEL,
        name="fused",
        attention_share=0.0,
        score_passes=7.16,
        other=replace(_FIRST, kept=_STORED_SCORES),
    ),
    replace(
        _NO_NORM_KERNEL,
        name="flash_attentionv1.0.8",
        attention_share=0.577,
        # Copies of query, key and value too.
        other=replace(_FIRST, kept=replace(_SEPARATE_NORMS, attention_states=5.0)),
    ),
    replace(_NO_NORM_KERNEL, name="flash_attention2", other=replace(_LATER, kept=_SEPARATE_NORMS)),
    _NORM_KERNEL,
)
SOFTWARE_NAMES = ", ".join(repr(software.name) for software in SOFTWARE)
"""As help texts and errors list them."""


def software_of(kernel: str) -> Software:
    """By a kernel's name, ignoring blanks and case; ConfigurationError if unknown."""
    for software in SOFTWARE:
        if _plain(software.name) == _plain(kernel):
            return software
    raise ConfigurationError(
        f"kernel {kernel!r}: constants are known for {len(SOFTWARE)} kernels but not for it; "
        f"use one of {SOFTWARE_NAMES}"
    )


def _plain(name: str) -> str:
    return "".join(name.split()).lower()
