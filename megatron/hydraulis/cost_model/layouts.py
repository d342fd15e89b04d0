"""The layout model: step time, MFU and memory of fixed-length training under a layout.

**Time.** One layer's forward of a micro-batch of n tokens (sequences of s) on a tp rank:

    matrices     2·n·P/tp / matmul rate
    attention    2·n·s·q/tp / attention rate, causal; or, if scores are stored,
                 4·n·s·q/tp / matmul rate + passes·2 bytes·n·s·heads/tp / memory bandwidth
    elementwise  (passes·h/shares + passes·qkv/tp + passes·ffn/tp) · 2 bytes·n / memory bandwidth,
                 norms as hidden states
    messages     2·(latency + 2·(tp-1)/tp · n·h·2 bytes / bandwidth)     all-reduces; the
                 all-gathers and reduce-scatters of sequence parallelism move as much
    launches     a constant

where shares is tp with sequence parallelism and 1 without. The backward takes twice the forward
(attention without stored scores 2.5 times: it recomputes scores, arXiv 2307.08691), the same
messages, 1.5 times the launches, and moves the weights to accumulate their gradients. With
recomputation the forward runs once more.

The last stage also computes logits and loss. With t_i for forward and backward of a micro-batch on
stage i, messages to its neighbours included, and m micro-batches, 1F1B takes m·max t + Σ t - max t
(equal stages: (m+pp-1)·t), and the pipeline loses another `pipeline_wait` of max t, reduced in
proportion for sequences longer than `wait_tokens`, and never more than if its stages worked one at
a time. Then the ranks that hold the same parameters add up gradients (all-reduce) and gather
parameters (ZeRO-1): 6 bytes a parameter times (dp-1)/dp over the network of all of them on a node.

**Memory.** A rank of stage i holds

    bf16 weights and gradients        4 bytes a parameter of the stage / tp
    ZeRO-1: fp32 weights, moments     12 bytes a parameter / tp / dp
    activations for the backward      layers · min(m, pp-i) micro-batches in flight · n tokens ·
                                      what a layer keeps per token (only its input if it is
                                      recomputed)
    working memory                    the layer in its backward, or logits and loss (last stage)
    reserve                           context, communicators

The allocator takes `fragmentation` times the activations' tensors. A layer keeps per token, in
bytes (arXiv 2205.05198 §4 counts the same way):

    2·h·(hidden states + norm states)/shares + (2·states·(2q+2kv)/4 + 2·rows·ffn)/tp
    + score bytes·s·heads/tp
"""

from dataclasses import dataclass, fields

from megatron.hydraulis.cluster import Cluster
from megatron.hydraulis.cost_model.device import DeviceConstants
from megatron.hydraulis.cost_model.layout_constants import (
    LAYOUT_CONSTANTS,
    KernelConstants,
    LayoutConstants,
)
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme

# A multiplication and an addition per entry of a matrix and token.
_FLOPS_PER_ENTRY = 2
_BF16_BYTES = 2
_BACKWARD_FORWARDS = 2.0
_BACKWARD_FORWARDS_OF_FLASH = 2.5
_BACKWARD_LAUNCHES = 1.5
# After attention and after the MLP; the backward has as many.
_NUM_ALL_REDUCES_FORWARD = 2
# The activation to the next stage and its gradient back.
_NUM_BOUNDARY_MESSAGES = 2
# Gradients in bf16 twice (reduce-scatter, all-gather), parameters once.
_DATA_PARALLEL_BYTES = 6
# Weights and gradients.
_ROLE_BYTES = 2 * _BF16_BYTES
# Master weights and two moments, fp32.
_OPTIMIZER_BYTES = 12
# Query, key, value and output: one hidden state each if heads are not grouped.
_ATTENTION_STATES = 4
# Gate, up and down: constants of the MLP are for three matrices.
_GATED_MATRICES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedLengthJob:
    """The same number of sequences of one length in every step.

    Raises ConfigurationError for a size that is not positive.
    """

    shape: ModelShape
    num_ranks: int
    sequence_tokens: int
    """Tokens of every sequence."""
    num_sequences: int
    """Sequences of a step: the global batch."""
    ranks_per_node: int = 8

    def __post_init__(self) -> None:
        sizes = {
            "ranks": self.num_ranks,
            "tokens a sequence": self.sequence_tokens,
            "sequences a step": self.num_sequences,
            "ranks a node": self.ranks_per_node,
        }
        for what, value in sizes.items():
            if value < 1:
                raise ConfigurationError(
                    f"job: needs at least 1 of {what} but has {value}; give a positive number"
                )

    @property
    def model_flops(self) -> float:
        """Floating-point operations of a step that MFU counts, forward and backward.

        6 per parameter and token, embedding included, and 12·layers·q·s per token for attention,
        not halved for being causal (arXiv 2204.02311, appendix B); recomputation does not count.
        """
        shape = self.shape
        num_ends = 1 if shape.tied_embeddings else 2
        num_entries = (
            shape.num_layers * shape.num_matrix_parameters_per_layer
            + num_ends * shape.num_embedding_parameters
        )
        attention = 12 * shape.num_layers * shape.query_size * self.sequence_tokens
        return self.num_sequences * self.sequence_tokens * (6.0 * num_entries + attention)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a step is spread over ranks and micro-batches.

    Raises ConfigurationError for sizes below 1.
    """

    micro_batch_size: int
    """Sequences of a micro-batch."""
    tp: int
    pp: int
    kernel: str
    """Name of the attention and norm kernels, see layout_constants."""
    sequence_parallel: bool = False
    recomputes_layers: bool = False
    """Whether every layer keeps only its input and runs its forward again in the backward."""

    def __post_init__(self) -> None:
        for name, value in (
            ("the micro-batch size", self.micro_batch_size),
            ("tp", self.tp),
            ("pp", self.pp),
        ):
            if value < 1:
                raise ConfigurationError(
                    f"layout: every size is at least 1 but {name} is {value}; give a positive one"
                )

    @property
    def scheme(self) -> Scheme:
        """The shape of one replica."""
        return Scheme(tp=self.tp, pp=self.pp)

    def dp(self, job: FixedLengthJob) -> int:
        """Replicas of the job; ConfigurationError unless they use all ranks."""
        dp, rest = divmod(job.num_ranks, self.tp * self.pp)
        if rest or dp == 0:
            raise ConfigurationError(
                f"layout tp {self.tp}, pp {self.pp}: replicas of {self.tp * self.pp} ranks must "
                f"use all ranks but the job has {job.num_ranks}; take degrees whose product "
                f"divides {job.num_ranks}"
            )
        return dp

    def num_micro_batches(self, job: FixedLengthJob) -> int:
        """Micro-batches of a replica in a step; the last one may be partial."""
        return -(-job.num_sequences // (self.micro_batch_size * self.dp(job)))

    @property
    def num_shares_of_hidden(self) -> int:
        """Over how many ranks a hidden state is spread between matrix products."""
        return self.tp if self.sequence_parallel else 1


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by cause; they add up to the step."""

    matmul_s: float
    """Matrix products of the layers, on the average stage."""
    attention_s: float
    elementwise_s: float
    """Norms, activations, residuals; accumulation of weight gradients."""
    launch_s: float
    tensor_parallel_s: float
    """Messages between tp ranks."""
    recompute_s: float
    """Forward passes of layers that run again."""
    logits_s: float
    """Output layer and loss, spread over the stages."""
    imbalance_s: float
    """Excess of the slowest stage over the average."""
    boundary_s: float
    """Messages between stages."""
    bubble_s: float
    """The pipeline fills and drains."""
    wait_s: float
    """Other losses of pipelines in a kernel's software; see KernelConstants."""
    data_parallel_s: float
    """Gradients and parameters between replicas."""

    @property
    def total_s(self) -> float:
        """Time of the step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of a rank by purpose."""

    stage: int
    weights_bytes: float
    """Weights and gradients in bf16."""
    optimizer_bytes: float
    """Its share of fp32 weights and moments."""
    activations_bytes: float
    """Kept for the backward."""
    working_bytes: float
    """The layer in its backward, or the logits."""
    reserve_bytes: float

    @property
    def total_bytes(self) -> float:
        """The sum."""
        return (
            self.weights_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.working_bytes
            + self.reserve_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPrediction:
    """What the layout model predicts for one layout."""

    layout: Layout
    time: StepTime
    mfu: float
    """Model FLOPs over those that all devices could have computed in the time."""
    memory: RankMemory
    """Of the fullest rank."""
    usable_bytes: float
    """Memory of a rank."""

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits in memory."""
        return self.memory.total_bytes <= self.usable_bytes


def predict_layout(
    job: FixedLengthJob,
    layout: Layout,
    device: DeviceConstants,
    constants: LayoutConstants = LAYOUT_CONSTANTS,
) -> LayoutPrediction:
    """Time, MFU and memory; the time of a layout that does not fit is what it would take.

    Raises ConfigurationError for an unknown kernel and replicas that do not use all ranks,
    StrategyError for more stages than layers.
    """
    time = step_time(job, layout, device, constants)
    peak = device.peak_flops_per_s * job.num_ranks
    return LayoutPrediction(
        layout=layout,
        time=time,
        mfu=job.model_flops / (time.total_s * peak),
        memory=rank_memory(job, layout, constants),
        usable_bytes=usable_bytes(device, constants),
    )


def step_time(
    job: FixedLengthJob, layout: Layout, device: DeviceConstants, constants: LayoutConstants
) -> StepTime:
    """Seconds of a step; formulas in the module's docstring, errors as of `predict_layout`."""
    return _StepModel(job, layout, device, constants, constants.kernel(layout.kernel)).step_time()


def usable_bytes(device: DeviceConstants, constants: LayoutConstants) -> float:
    """Bytes of a device that a process can use."""
    return device.memory_bytes * constants.visible_memory


def rank_memory(job: FixedLengthJob, layout: Layout, constants: LayoutConstants) -> RankMemory:
    """Memory of the fullest stage; formulas and errors as of `step_time`."""
    stages = (_stage_memory(job, layout, constants, stage) for stage in range(layout.pp))
    return max(stages, key=lambda memory: memory.total_bytes)


@dataclass(frozen=True, slots=True)
class _StepModel:
    """The times of one layout. Those of a micro-batch are of one tp rank."""

    job: FixedLengthJob
    layout: Layout
    device: DeviceConstants
    constants: LayoutConstants
    kernel: KernelConstants

    @property
    def cluster(self) -> Cluster:
        return self.device.cluster(self.job.num_ranks, self.job.ranks_per_node)

    @property
    def num_tokens(self) -> int:
        return self.layout.micro_batch_size * self.job.sequence_tokens

    @property
    def matmul_rate(self) -> float:
        device = self.device
        return device.peak_flops_per_s * device.matmul_fraction * self.constants.matmul_fraction

    def step_time(self) -> StepTime:
        job, layout = self.job, self.layout
        layer = self.layer_s()
        layer_s = 0.0
        for seconds in layer.values():
            layer_s += seconds
        logits_s, boundary_s = self.logits_s(), self.boundary_s()
        layers = layout.scheme.layers_per_stage(job.shape.num_layers)
        stages = [num * layer_s + boundary_s for num in layers]
        stages[-1] += logits_s
        slowest, together = max(stages), sum(stages)
        num_micro_batches = layout.num_micro_batches(job)
        layers_of_a_stage = num_micro_batches * job.shape.num_layers / layout.pp
        one_at_a_time = (layout.pp - 1) * (num_micro_batches - 1)
        of_short = min(1.0, self.constants.wait_tokens / job.sequence_tokens)
        wait = min(self.kernel.pipeline_wait_micro_batches * of_short, float(one_at_a_time))
        return StepTime(
            **{name: layers_of_a_stage * seconds for name, seconds in layer.items()},
            logits_s=num_micro_batches * logits_s / layout.pp,
            imbalance_s=num_micro_batches * (slowest - together / layout.pp),
            boundary_s=num_micro_batches * boundary_s,
            bubble_s=together - slowest,
            wait_s=wait * slowest,
            data_parallel_s=self.data_parallel_s(),
        )

    def layer_s(self) -> dict[str, float]:
        """Forward and backward of one layer for a micro-batch, by field of StepTime."""
        shape, tp, device, constants = self.job.shape, self.layout.tp, self.device, self.constants
        matmul_s = (
            _FLOPS_PER_ENTRY * self.num_tokens * shape.num_matrix_parameters_per_layer / tp
        ) / self.matmul_rate
        attention_s = self.attention_forward_s()
        norm_passes = 0.0 if self.kernel.has_norm_kernel else constants.norm_passes
        num_matrices = _GATED_MATRICES if shape.gated_mlp else _GATED_MATRICES - 1
        qkv_size = shape.query_size + 2 * shape.num_query_groups * shape.kv_channels
        hidden_passes = constants.hidden_passes + norm_passes
        rows = (
            hidden_passes * shape.hidden_size / self.layout.num_shares_of_hidden
            + constants.query_passes * qkv_size / tp
            + constants.ffn_passes * num_matrices / _GATED_MATRICES * shape.ffn_hidden_size / tp
        )
        elementwise_s = self.num_tokens * _BF16_BYTES * rows / device.memory_bytes_per_s
        messages_s = 0.0
        if tp > 1:
            num_bytes = 2 * (tp - 1) / tp * self.num_tokens * shape.hidden_size * _BF16_BYTES
            bandwidth = self.cluster.collective(tp).bytes_per_s * constants.tp_link_fraction
            messages_s = _NUM_ALL_REDUCES_FORWARD * (constants.tp_latency_s + num_bytes / bandwidth)
        weights_s = (
            constants.weight_passes * _BF16_BYTES * shape.num_matrix_parameters_per_layer / tp
        ) / device.memory_bytes_per_s
        forward_s = matmul_s + attention_s + elementwise_s + messages_s + constants.layer_launch_s
        attention_backward = (
            _BACKWARD_FORWARDS if self.kernel.stores_scores else _BACKWARD_FORWARDS_OF_FLASH
        )
        return {
            "matmul_s": (1 + _BACKWARD_FORWARDS) * matmul_s,
            "attention_s": (1 + attention_backward) * attention_s,
            "elementwise_s": (1 + _BACKWARD_FORWARDS) * elementwise_s + weights_s,
            "launch_s": (1 + _BACKWARD_LAUNCHES) * constants.layer_launch_s,
            "tensor_parallel_s": 2 * messages_s,
            "recompute_s": forward_s if self.layout.recomputes_layers else 0.0,
        }

    def attention_forward_s(self) -> float:
        shape, length, device, kernel = (
            self.job.shape,
            self.job.sequence_tokens,
            self.device,
            self.kernel,
        )
        num_pairs = self.layout.micro_batch_size * length * length / self.layout.tp
        causal_flops = _FLOPS_PER_ENTRY * num_pairs * shape.query_size
        if kernel.stores_scores:
            # All pairs are computed and half of them masked.
            moved = kernel.score_passes * _BF16_BYTES * num_pairs * shape.num_attention_heads
            return 2 * causal_flops / self.matmul_rate + moved / device.memory_bytes_per_s
        reached = length / (length + self.constants.half_rate_tokens)
        rate = device.peak_flops_per_s * device.attention_fraction * kernel.attention_fraction
        if shape.window is not None:
            causal_flops *= shape.window.squared(length) / (length * length)
        return causal_flops / (rate * reached)

    def logits_s(self) -> float:
        """Output layer and loss of a micro-batch, forward and backward."""
        shape, num_tokens, tp = self.job.shape, self.num_tokens, self.layout.tp
        flops = _FLOPS_PER_ENTRY * num_tokens * shape.num_embedding_parameters / tp
        moved = self.constants.logit_passes * _BF16_BYTES * num_tokens * shape.vocab_size / tp
        compute_s = (1 + _BACKWARD_FORWARDS) * flops / self.matmul_rate
        return compute_s + moved / self.device.memory_bytes_per_s

    def boundary_s(self) -> float:
        """Messages of a micro-batch between a stage and its neighbours."""
        if self.layout.pp == 1:
            return 0.0
        # Stages are as far apart as possible: replicas come before stages in the order of ranks.
        link = self.cluster.point_to_point(self.job.num_ranks)
        num_elements = self.num_tokens * self.job.shape.hidden_size
        num_bytes = num_elements * _BF16_BYTES / self.layout.num_shares_of_hidden
        return _NUM_BOUNDARY_MESSAGES * (
            link.latency_s + num_bytes / (link.bytes_per_s * self.device.link_fraction)
        )

    def data_parallel_s(self) -> float:
        """Of the fullest stage; ranks that add up the same gradients share their node's network."""
        shape, layout, dp = self.job.shape, self.layout, self.layout.dp(self.job)
        layers = layout.scheme.layers_per_stage(shape.num_layers)
        num_ends = 1 if layout.pp > 1 or shape.tied_embeddings else 2
        num_parameters = (
            layers[0] * shape.num_parameters_per_layer + num_ends * shape.num_embedding_parameters
        )
        num_bytes = _DATA_PARALLEL_BYTES * num_parameters / layout.tp * (dp - 1) / dp
        num_together = max(1, min(self.job.ranks_per_node // layout.tp, dp))
        bandwidth = num_together * self.device.inter_node.bytes_per_s
        return num_bytes / (bandwidth * self.kernel.data_parallel_fraction)


def _stage_memory(
    job: FixedLengthJob, layout: Layout, constants: LayoutConstants, stage: int
) -> RankMemory:
    shape = job.shape
    num_layers = layout.scheme.layers_per_stage(shape.num_layers)[stage]
    is_last = stage == layout.pp - 1
    num_ends = int(stage == 0) + int(is_last)
    if layout.pp == 1 and shape.tied_embeddings:
        num_ends = 1
    num_parameters = (
        num_layers * shape.num_parameters_per_layer + num_ends * shape.num_embedding_parameters
    ) / layout.tp
    num_tokens = layout.micro_batch_size * job.sequence_tokens
    whole = num_tokens * _layer_bytes_per_token(job, layout, constants)
    kept, working = whole, constants.working_layers * whole
    if layout.recomputes_layers:
        kept = num_tokens * shape.hidden_size * _BF16_BYTES / layout.num_shares_of_hidden
        working += whole
    if is_last:
        logit_bytes = constants.logit_bytes_split / layout.tp + constants.logit_bytes_whole
        working = max(working, num_tokens * shape.vocab_size * logit_bytes)
    num_in_flight = min(layout.num_micro_batches(job), layout.pp - stage)
    return RankMemory(
        stage=stage,
        weights_bytes=_ROLE_BYTES * num_parameters,
        optimizer_bytes=_OPTIMIZER_BYTES * num_parameters / layout.dp(job),
        activations_bytes=num_layers * num_in_flight * kept * constants.fragmentation,
        working_bytes=working * constants.fragmentation,
        reserve_bytes=constants.reserve_bytes,
    )


def _layer_bytes_per_token(
    job: FixedLengthJob, layout: Layout, constants: LayoutConstants
) -> float:
    shape, kernel = job.shape, constants.kernel(layout.kernel)
    norm_states = 0.0 if kernel.has_norm_kernel else constants.norm_states_kept
    hidden = (constants.hidden_states_kept + norm_states) * shape.hidden_size
    states = constants.attention_states_kept + kernel.copied_hidden_states
    key_value_size = shape.num_query_groups * shape.kv_channels
    attention = states * 2 * (shape.query_size + key_value_size) / _ATTENTION_STATES
    num_matrices = _GATED_MATRICES if shape.gated_mlp else _GATED_MATRICES - 1
    rows = constants.ffn_states_kept * num_matrices / _GATED_MATRICES * shape.ffn_hidden_size
    scores = kernel.score_bytes * job.sequence_tokens * shape.num_attention_heads
    split = _BF16_BYTES * (attention + rows) + scores
    return _BF16_BYTES * hidden / layout.num_shares_of_hidden + split / layout.tp
