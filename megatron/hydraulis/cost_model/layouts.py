"""Step time, MFU and memory of fixed-length training under a layout.

A layout is a plan of equal micro-batches on replicas of one scheme. Its times are those of
`AnalyticCostModel`, its memory that of `MemoryModel`, with the software of the layout's kernel.
Replicas may share whole experts; each then counts as one column of a wider replica (``cp4~ep4``).

1F1B takes at most m·max t + Σ t - max t for m micro-batches and t_i for forward and backward of one
on stage i. Regrouping and optimizer follow (regrouping.py). In other software than this
program, replicas of the same parameters add up gradients (all-reduce) and gather parameters
(ZeRO-1) instead, 6 bytes a parameter times (dp-1)/dp over the network of all of them on a node, and
a pipeline waits (`OtherTraining`), never longer than if its stages worked one at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from megatron.hydraulis.cluster import Cluster
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import DeviceConstants
from megatron.hydraulis.cost_model.memory import MemoryModel
from megatron.hydraulis.cost_model.pipeline import StageCosts, equal_micro_batches_time_ms
from megatron.hydraulis.cost_model.recompute import NO_RECOMPUTE, Recompute
from megatron.hydraulis.cost_model.regrouping import RegroupCosts
from megatron.hydraulis.cost_model.software import TRAINING, OtherTraining, Software, software_of
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme, Strategy
from megatron.hydraulis.strategy.strategy import RANKS_PER_NODE, replica_scheme

_MS_PER_S = 1e3
# Gradients in bf16 twice (reduce-scatter, all-gather), parameters once.
_DATA_PARALLEL_BYTES = 6
EVERY_LAYER = Recompute(granularity="full", method="uniform", num_layers=1)


def _check_sizes(what: str, sizes: dict[str, int]) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ConfigurationError(
                f"{what}: every size is at least 1 but {name} is {value}; give a positive one"
            )


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
    ranks_per_node: int = RANKS_PER_NODE
    layers: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of `AnalyticCostModel` about layers and precision; not for other software, which was
    measured in bf16 with its own."""

    def __post_init__(self) -> None:
        _check_sizes(
            "job",
            {
                "the number of ranks": self.num_ranks,
                "the tokens of a sequence": self.sequence_tokens,
                "the number of sequences a step": self.num_sequences,
                "the ranks of a node": self.ranks_per_node,
            },
        )

    @property
    def model_flops(self) -> float:
        """Floating-point operations of a step that MFU counts, forward and backward.

        6 per token and parameter that it passes, embedding included, and 12·layers·q·s per token
        for attention, not halved for being causal (arXiv 2204.02311, appendix B); recomputation
        does not count.
        """
        shape = self.shape
        num_ends = 1 if shape.tied_embeddings else 2
        num_entries = (
            shape.num_layers * shape.num_matrix_parameters_per_layer
            + num_ends * shape.num_embedding_parameters
        )
        attention = 12 * shape.num_layers * shape.score_size * self.sequence_tokens
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
    """Name of a `Software`."""
    sequence_parallel: bool = False
    recomputes_layers: bool = False
    """Whether every layer keeps only its input and runs its forward again in the backward."""
    ep: int = 1
    """Ranks of a stage over which whole experts are distributed, of several replicas if it exceeds
    tp; 1: tp cuts every expert."""

    def __post_init__(self) -> None:
        sizes = {"the micro-batch size": self.micro_batch_size, "tp": self.tp, "pp": self.pp}
        _check_sizes("layout", sizes | {"ep": self.ep})

    @property
    def scheme(self) -> Scheme:
        """The shape of one replica, or of a column of replicas that share experts."""
        return Scheme(tp=self.tp, pp=self.pp, ep=self.ep)

    def strategy(self, job: FixedLengthJob) -> Strategy:
        """Of the job's replicas; StrategyError unless they fill it and divide the model."""
        return _strategy(job.shape, self.scheme, job.num_ranks, job.ranks_per_node)

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


CAUSES = {
    "matmul_s": "matrix products",
    "attention_s": "attention",
    "elementwise_s": "norms and activations, whole on every tp rank without sequence parallelism",
    "launch_s": "launches: smaller or more micro-batches on each rank",
    "tensor_parallel_s": "messages between tp ranks",
    "expert_copies_s": "copies of tokens for their experts",
    "expert_parallel_s": "messages between ep ranks",
    "recompute_s": "forward passes run again",
    "logits_s": "output layer and loss",
    "imbalance_s": "the last stage has the output layer too, the others wait",
    "boundary_s": "messages between stages",
    "bubble_s": "the pipeline fills and drains",
    "wait_s": "waits of the kernel's software in pipelines",
    "data_parallel_s": "gradients and parameters between replicas, and the optimizer",
}
"""Causes by field of StepTime."""
PURPOSES = {
    "weights_bytes": "weights and gradients",
    "optimizer_bytes": "optimizer state",
    "activations_bytes": "activations kept",
    "working_bytes": "logits or the layer at work",
    "reserve_bytes": "reserve",
}
"""Memory by field of RankMemory."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by cause (CAUSES); they add up to the step."""

    matmul_s: float
    attention_s: float
    elementwise_s: float
    launch_s: float
    tensor_parallel_s: float
    expert_copies_s: float
    expert_parallel_s: float
    recompute_s: float
    logits_s: float
    imbalance_s: float
    boundary_s: float
    bubble_s: float
    wait_s: float
    data_parallel_s: float

    @property
    def total_s(self) -> float:
        return float(sum(getattr(self, name) for name in CAUSES))


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of a rank by purpose (PURPOSES)."""

    stage: int
    weights_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    working_bytes: float
    reserve_bytes: float

    @property
    def total_bytes(self) -> float:
        return float(sum(getattr(self, name) for name in PURPOSES))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPrediction:
    """What is predicted for one layout."""

    layout: Layout
    time: StepTime
    mfu: float
    """Model FLOPs over those that all devices could have computed in the time."""
    memory: RankMemory
    """Of the fullest rank."""
    usable_bytes: float
    """Memory of a rank, reserve included."""

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits in memory."""
        return self.memory.total_bytes <= self.usable_bytes


def predict_layout(
    job: FixedLengthJob,
    layout: Layout,
    device: DeviceConstants,
    software: Software | None = None,
) -> LayoutPrediction:
    """Time, MFU and memory; the time of a layout that does not fit is what it would take.

    software: by default that of the layout's kernel.

    Raises ConfigurationError for an unknown kernel and replicas that do not use all ranks,
    StrategyError for more stages than layers, and for a layout that this program cannot run.
    """
    time = step_time(job, layout, device, software)
    memory, model = _rank_memory(job, layout, device, software)
    return LayoutPrediction(
        layout=layout,
        time=time,
        mfu=job.model_flops / (time.total_s * device.peak(model.parameter_bytes) * job.num_ranks),
        memory=memory,
        usable_bytes=model.usable_bytes + model.reserve_bytes,
    )


def step_time(
    job: FixedLengthJob,
    layout: Layout,
    device: DeviceConstants,
    software: Software | None = None,
) -> StepTime:
    """Seconds of a step; formulas in the module's docstring, errors as of `predict_layout`."""
    model, scheme = cost_model_of(job, layout, device, software), layout.scheme
    num_tokens = layout.micro_batch_size * job.sequence_tokens
    lengths = [job.sequence_tokens] * layout.micro_batch_size
    costs = StageCosts(model, job.shape)
    coefficients = costs.coefficients(scheme)
    squares = sum(map(coefficients[0].squared, lengths))
    causes = {"expert_copies": 0.0, "expert_parallel": 0.0}
    for terms in model.terms_by_stage(scheme):
        for cause, term in terms.items():
            causes[cause] = causes.get(cause, 0.0) + term.seconds(squares, num_tokens)
    stages_ms = [each.time_ms(lengths) for each in coefficients]
    num_micro_batches = layout.num_micro_batches(job)
    slowest_s = max(stages_ms) / _MS_PER_S
    # Replicas that share experts are one of waves: its scheme has the share that plans use.
    of_replica = layout.strategy(job).schemes[0] if layout.ep > 1 else scheme
    share = costs.coefficients(of_replica)[0].forward_share
    busy_s = equal_micro_batches_time_ms(stages_ms, num_micro_batches, share) / _MS_PER_S
    other, wait_s = model.software.other, 0.0
    if other is not None:
        wait_s = slowest_s * _wait_micro_batches(job, layout, other)
        data_parallel_s = _data_parallel_s(job, layout, device, other)
    else:
        data_parallel_s = _regrouping_s(
            job, layout, model, (share * stages_ms[0], (1.0 - share) * stages_ms[0])
        )
    per_cause = {
        f"{cause}_s": num_micro_batches * seconds / scheme.pp
        for cause, seconds in causes.items()
        if cause != "context_parallel"
    }
    average_s = sum(per_cause.values())
    return StepTime(
        **per_cause,
        imbalance_s=max(0.0, num_micro_batches * slowest_s - average_s),
        bubble_s=busy_s - max(average_s, num_micro_batches * slowest_s),
        wait_s=wait_s,
        data_parallel_s=data_parallel_s,
    )


def cost_model_of(
    job: FixedLengthJob,
    layout: Layout,
    device: DeviceConstants,
    software: Software | None = None,
) -> AnalyticCostModel:
    """The cost model of a layout; raises as `predict_layout`."""
    layout.dp(job)
    software, shape = software or software_of(layout.kernel), job.shape
    if layout.tp > 1 and not layout.sequence_parallel and shape.whole_matrices:
        raise ConfigurationError(
            f"layout tp {layout.tp}: {shape.whole_matrices} need sequence parallelism where tp is "
            f"above 1 but it is off; turn it on"
        )
    if shape.num_experts and software.other is not None:
        raise ConfigurationError(
            f"kernel {software.name!r}: its constants were measured without experts but the model "
            f"has {shape.num_experts} a layer; use {TRAINING.name!r}"
        )
    if shape.num_experts or layout.ep > 1:
        layout.strategy(job)
    return AnalyticCostModel(
        shape=job.shape,
        device=device,
        cluster=device.cluster(job.num_ranks, min(job.num_ranks, job.ranks_per_node)),
        sequence_parallel=layout.sequence_parallel,
        recompute=EVERY_LAYER if layout.recomputes_layers else NO_RECOMPUTE,
        software=software,
        **(job.layers if software.other is None else {}),
    )


def _rank_memory(
    job: FixedLengthJob, layout: Layout, device: DeviceConstants, software: Software | None
) -> tuple[RankMemory, MemoryModel]:
    scheme = layout.scheme
    model = cost_model_of(job, layout, device, software).memory
    if model.kept is not None:
        model = replace(
            model,
            sequence_tokens=job.sequence_tokens,
            num_micro_batches=layout.num_micro_batches(job),
        )
    num_tokens = layout.micro_batch_size * job.sequence_tokens
    num_tokens += -num_tokens % scheme.token_quantum
    stages = []
    for stage in range(scheme.pp):
        role, state = model.role_bytes(scheme, stage), model.state_bytes(scheme, stage)
        activations = model.activation_bytes(scheme, stage, num_tokens)
        peak = model.peak_bytes(scheme, stage, num_tokens)
        stages.append(
            RankMemory(
                stage=stage,
                weights_bytes=role,
                optimizer_bytes=state - role,
                activations_bytes=activations,
                working_bytes=peak - state - activations,
                reserve_bytes=model.reserve_bytes,
            )
        )
    return max(stages, key=lambda memory: memory.total_bytes), model


def _wait_micro_batches(job: FixedLengthJob, layout: Layout, other: OtherTraining) -> float:
    """How many micro-batches longer a pipeline takes than fill and drain explain."""
    num_micro_batches = layout.num_micro_batches(job)
    of_short = min(1.0, other.wait_tokens / job.sequence_tokens)
    return min(
        other.wait_micro_batches * of_short,
        other.wait_share * num_micro_batches,
        (layout.pp - 1.0) * (num_micro_batches - 1),
    )


def _data_parallel_s(
    job: FixedLengthJob, layout: Layout, device: DeviceConstants, other: OtherTraining
) -> float:
    """Of the fullest stage; ranks that add up the same gradients share their node's network."""
    shape, dp = job.shape, layout.dp(job)
    layers = layout.scheme.layers_per_stage(shape.num_layers)
    num_ends = 1 if layout.pp > 1 or shape.tied_embeddings else 2
    num_parameters = (
        layers[0] * shape.num_parameters_per_layer + num_ends * shape.num_embedding_parameters
    )
    num_bytes = _DATA_PARALLEL_BYTES * num_parameters / layout.tp * (dp - 1) / dp
    num_together = max(1, min(job.ranks_per_node // layout.tp, dp))
    share = device.link_fraction * other.network_share * other.reduce_share
    return num_bytes / (num_together * device.inter_node.bytes_per_s * share)


@lru_cache
def _strategy(shape: ModelShape, scheme: Scheme, num_ranks: int, ranks_per_node: int) -> Strategy:
    replica = replica_scheme(tp=scheme.tp, pp=scheme.pp, ep=scheme.ep)
    num_replicas, rest = divmod(num_ranks, replica.num_ranks)
    if rest or not num_replicas:
        raise StrategyError(
            f"layout tp {scheme.tp}, pp {scheme.pp}, ep {scheme.ep}: ep ranks are in replicas of "
            f"{replica.num_ranks} ranks together, which must use all ranks, but the job has "
            f"{num_ranks}; take an ep that divides {num_ranks // scheme.pp}"
        )
    text = f"{num_replicas}*{replica}"
    strategy = Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node)
    strategy.check_model(shape)
    return strategy


@lru_cache
def _regroup_costs(
    shape: ModelShape, device: DeviceConstants, cluster: Cluster, tp: int
) -> RegroupCosts:
    """Costs that remember the strategies they were asked for: layouts differ by micro-batch too."""
    return RegroupCosts.of(shape, device, cluster, num_atoms=tp)


def _regrouping_s(
    job: FixedLengthJob,
    layout: Layout,
    model: AnalyticCostModel,
    first_stage_ms: tuple[float, float],
) -> float:
    costs = _regroup_costs(job.shape, model.device, model.cluster, layout.tp)
    return costs.exposed_ms(layout.strategy(job), lambda _: first_stage_ms) / _MS_PER_S
