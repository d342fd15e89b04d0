"""Time of a step of fixed-length training under a layout, cause by cause.

One layer's forward of a micro-batch of n tokens (sequences of s) on a tp rank:

    matrices     2·n·P/tp / matmul rate
    attention    2·n·s·q/tp / attention rate, causal; or, where scores are stored,
                 4·n·s·q/tp / matmul rate + passes·2 bytes·n·s·heads/tp / memory bandwidth
    elementwise  (passes·h/shares + passes·qkv/tp + passes·ffn/tp) · 2 bytes·n / memory bandwidth,
                 norms as hidden states
    messages     2·(latency + 2·(tp-1)/tp · n·h·2 bytes / bandwidth)     all-reduces; the
                 all-gathers and reduce-scatters of sequence parallelism move as much
    launches     a constant

The backward takes twice the forward (attention without stored scores 2.5 times: it computes scores
again, arXiv 2307.08691), the same messages, 1.5 times the launches, and moves the weights to
accumulate their gradients. With recomputation the forward runs once more.

Stages differ: the last computes logits and loss too. With t_i for forward and backward of a
micro-batch on stage i, messages to its neighbours included, and m micro-batches, 1F1B takes
m·max t + Σ t - max t (equal stages: (m+pp-1)·t), and the pipeline loses `pipeline_wait` more of
max t, for sequences longer than `wait_tokens` so much less as they are longer, and at most so many
that its stages work one at a time.
Then the ranks that hold the same parameters add up gradients (all-reduce) and gather parameters
(ZeRO-1): 6 bytes a parameter times (dp-1)/dp over the network of all of them on a node.
"""

from dataclasses import dataclass, fields

from megatron.hydraulis.cluster import Cluster
from megatron.hydraulis.cost_model.device import DeviceConstants
from megatron.hydraulis.cost_model.layout import FixedLengthJob, Layout
from megatron.hydraulis.cost_model.layout_constants import KernelConstants, LayoutConstants

__all__ = ["StepTime", "step_time"]

# A multiplication and an addition per entry of a matrix and token.
_FLOPS_PER_ENTRY = 2
_BF16_BYTES = 2
_BACKWARD_FORWARDS = 2.0
_BACKWARD_FORWARDS_OF_FLASH = 2.5
_BACKWARD_LAUNCHES = 1.5
# After attention and after the MLP; the backward has its mirror images.
_NUM_ALL_REDUCES_FORWARD = 2
# The activation to the next stage and its gradient back.
_NUM_BOUNDARY_MESSAGES = 2
# Gradients in bf16 twice (reduce-scatter, all-gather), parameters once.
_DATA_PARALLEL_BYTES = 6
# Gate, up and down: passes over the rows of the MLP are counted for three matrices.
_GATED_MATRICES = 3


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by cause; together they are the step."""

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
    """What the slowest stage takes more than the average."""
    boundary_s: float
    """Messages between stages."""
    bubble_s: float
    """The pipeline fills and drains."""
    wait_s: float
    """What pipelines of a kernel's software lose beside; see KernelConstants."""
    data_parallel_s: float
    """Gradients and parameters between replicas."""

    @property
    def total_s(self) -> float:
        """The step."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class _Layer:
    """Seconds of one layer for one micro-batch, forward and backward."""

    matmul_s: float
    attention_s: float
    elementwise_s: float
    launch_s: float
    tensor_parallel_s: float
    recompute_s: float

    @property
    def total_s(self) -> float:
        return (
            self.matmul_s
            + self.attention_s
            + self.elementwise_s
            + self.launch_s
            + self.tensor_parallel_s
            + self.recompute_s
        )


def step_time(
    job: FixedLengthJob, layout: Layout, device: DeviceConstants, constants: LayoutConstants
) -> StepTime:
    """Seconds of a step; the formulas are those of the module.

    Raises ConfigurationError for a kernel that is not known and replicas that do not use all ranks,
    StrategyError for more stages than layers.
    """
    kernel = constants.kernel(layout.kernel)
    cluster = device.cluster(job.num_ranks, job.ranks_per_node)
    layer = _layer(job, layout, device, constants, kernel, cluster)
    logits_s = _logits_s(job, layout, device, constants)
    boundary_s = _boundary_s(job, layout, device, cluster)
    layers = layout.scheme.layers_per_stage(job.shape.num_layers)
    stages = [num * layer.total_s + boundary_s for num in layers]
    stages[-1] += logits_s
    slowest, together = max(stages), sum(stages)
    num_micro_batches = layout.num_micro_batches(job)
    layers_of_a_stage = num_micro_batches * job.shape.num_layers / layout.pp
    one_at_a_time = (layout.pp - 1) * (num_micro_batches - 1)
    of_short = min(1.0, constants.wait_tokens / job.sequence_tokens)
    wait = min(kernel.pipeline_wait_micro_batches * of_short, float(one_at_a_time))
    return StepTime(
        matmul_s=layers_of_a_stage * layer.matmul_s,
        attention_s=layers_of_a_stage * layer.attention_s,
        elementwise_s=layers_of_a_stage * layer.elementwise_s,
        launch_s=layers_of_a_stage * layer.launch_s,
        tensor_parallel_s=layers_of_a_stage * layer.tensor_parallel_s,
        recompute_s=layers_of_a_stage * layer.recompute_s,
        logits_s=num_micro_batches * logits_s / layout.pp,
        imbalance_s=num_micro_batches * (slowest - together / layout.pp),
        boundary_s=num_micro_batches * boundary_s,
        bubble_s=together - slowest,
        wait_s=wait * slowest,
        data_parallel_s=_data_parallel_s(job, layout, device, kernel),
    )


def _layer(
    job: FixedLengthJob,
    layout: Layout,
    device: DeviceConstants,
    constants: LayoutConstants,
    kernel: KernelConstants,
    cluster: Cluster,
) -> _Layer:
    shape, tp = job.shape, layout.tp
    num_tokens = layout.micro_batch_size * job.sequence_tokens
    matmul_s = (
        _FLOPS_PER_ENTRY * num_tokens * shape.num_matrix_parameters_per_layer / tp
    ) / _matmul_rate(device, constants)
    attention_s = _attention_forward_s(job, layout, device, constants, kernel)
    norm_passes = 0.0 if kernel.has_norm_kernel else constants.norm_passes
    num_matrices = _GATED_MATRICES if shape.gated_mlp else _GATED_MATRICES - 1
    qkv_size = shape.query_size + 2 * shape.num_query_groups * shape.kv_channels
    rows = (
        (constants.hidden_passes + norm_passes) * shape.hidden_size / layout.num_shares_of_hidden()
        + constants.query_passes * qkv_size / tp
        + constants.ffn_passes * num_matrices / _GATED_MATRICES * shape.ffn_hidden_size / tp
    )
    elementwise_s = num_tokens * _BF16_BYTES * rows / device.memory_bytes_per_s
    messages_s = 0.0
    if tp > 1:
        num_bytes = 2 * (tp - 1) / tp * num_tokens * shape.hidden_size * _BF16_BYTES
        link = cluster.collective(tp)
        messages_s = _NUM_ALL_REDUCES_FORWARD * (
            constants.tp_latency_s + num_bytes / (link.bytes_per_s * constants.tp_link_fraction)
        )
    weights_s = (
        constants.weight_passes * _BF16_BYTES * shape.num_matrix_parameters_per_layer / tp
    ) / device.memory_bytes_per_s
    forward_s = matmul_s + attention_s + elementwise_s + messages_s + constants.layer_launch_s
    attention_backward = _BACKWARD_FORWARDS if kernel.stores_scores else _BACKWARD_FORWARDS_OF_FLASH
    return _Layer(
        matmul_s=(1 + _BACKWARD_FORWARDS) * matmul_s,
        attention_s=(1 + attention_backward) * attention_s,
        elementwise_s=(1 + _BACKWARD_FORWARDS) * elementwise_s + weights_s,
        launch_s=(1 + _BACKWARD_LAUNCHES) * constants.layer_launch_s,
        tensor_parallel_s=2 * messages_s,
        recompute_s=forward_s if layout.recomputes_layers else 0.0,
    )


def _matmul_rate(device: DeviceConstants, constants: LayoutConstants) -> float:
    return device.peak_flops_per_s * device.matmul_fraction * constants.matmul_fraction


def _attention_forward_s(
    job: FixedLengthJob,
    layout: Layout,
    device: DeviceConstants,
    constants: LayoutConstants,
    kernel: KernelConstants,
) -> float:
    shape, length = job.shape, job.sequence_tokens
    num_pairs = layout.micro_batch_size * length * length / layout.tp
    causal_flops = _FLOPS_PER_ENTRY * num_pairs * shape.query_size
    if kernel.stores_scores:
        # All pairs are computed and half of them masked.
        moved = kernel.score_passes * _BF16_BYTES * num_pairs * shape.num_attention_heads
        return (
            2 * causal_flops / _matmul_rate(device, constants) + moved / device.memory_bytes_per_s
        )
    reached = length / (length + constants.half_rate_tokens)
    rate = device.peak_flops_per_s * device.attention_fraction * kernel.attention_fraction
    return causal_flops / (rate * reached)


def _logits_s(
    job: FixedLengthJob, layout: Layout, device: DeviceConstants, constants: LayoutConstants
) -> float:
    """Output layer and loss of a micro-batch, forward and backward."""
    shape = job.shape
    num_tokens = layout.micro_batch_size * job.sequence_tokens
    flops = _FLOPS_PER_ENTRY * num_tokens * shape.num_embedding_parameters / layout.tp
    moved = constants.logit_passes * _BF16_BYTES * num_tokens * shape.vocab_size / layout.tp
    return (1 + _BACKWARD_FORWARDS) * flops / _matmul_rate(
        device, constants
    ) + moved / device.memory_bytes_per_s


def _boundary_s(
    job: FixedLengthJob, layout: Layout, device: DeviceConstants, cluster: Cluster
) -> float:
    """Messages of a micro-batch between a stage and its neighbours."""
    if layout.pp == 1:
        return 0.0
    # Stages are as far apart as can be: replicas come before stages in the order of ranks.
    link = cluster.point_to_point(job.num_ranks)
    num_tokens = layout.micro_batch_size * job.sequence_tokens
    num_bytes = num_tokens * job.shape.hidden_size * _BF16_BYTES / layout.num_shares_of_hidden()
    return _NUM_BOUNDARY_MESSAGES * (
        link.latency_s + num_bytes / (link.bytes_per_s * device.link_fraction)
    )


def _data_parallel_s(
    job: FixedLengthJob, layout: Layout, device: DeviceConstants, kernel: KernelConstants
) -> float:
    """Of the fullest stage; ranks of one node that add up the same gradients share its network."""
    shape, dp = job.shape, layout.dp(job)
    layers = layout.scheme.layers_per_stage(shape.num_layers)
    num_ends = 1 if layout.pp > 1 or shape.tied_embeddings else 2
    num_parameters = (
        layers[0] * shape.num_parameters_per_layer + num_ends * shape.num_embedding_parameters
    )
    num_bytes = _DATA_PARALLEL_BYTES * num_parameters / layout.tp * (dp - 1) / dp
    num_together = max(1, min(job.ranks_per_node // layout.tp, dp))
    bandwidth = num_together * device.inter_node.bytes_per_s * kernel.data_parallel_fraction
    return num_bytes / bandwidth
