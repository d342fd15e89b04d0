"""``hydraulis recommend-layout``: all layouts of fixed-length training, ranked, and why.

A layout is a plan of equal micro-batches on replicas of one scheme. Its times are those of
`AnalyticCostModel`, its memory that of `MemoryModel`. Replicas may share whole experts; each then
counts as one column of a wider replica (``cp4~ep4``).

1F1B takes at most m·max t + Σ t - max t for m micro-batches and t_i for forward and backward of one
on stage i. Regrouping and optimizer follow (regrouping.py).
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from rich.table import Table

from megatron.hydraulis.cluster import Cluster
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import DeviceConstants, Precision, device_constants
from megatron.hydraulis.cost_model.estimate_command import powers_of_two
from megatron.hydraulis.cost_model.job_costs import (
    add_device_argument,
    add_job_arguments,
    job_ranks,
)
from megatron.hydraulis.cost_model.model_arguments import (
    add_model_arguments,
    given_layers,
    job_precision,
    model_words,
    shape_of,
)
from megatron.hydraulis.cost_model.pipeline import StageCosts, equal_micro_batches_time_ms
from megatron.hydraulis.cost_model.regrouping import RegroupCosts
from megatron.hydraulis.cost_model.trained_model import EVERY_LAYER, NO_RECOMPUTE
from megatron.hydraulis.errors import PlanError, StrategyError
from megatron.hydraulis.frozen import NOTHING_FROZEN, Frozen
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme, Strategy
from megatron.hydraulis.strategy.strategy import RANKS_PER_NODE, replica_scheme
from megatron.hydraulis.terminal import print_json, print_next, results_console, shown_while

_MS_PER_S = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedLengthJob:
    """The same number of sequences of one length in every step; all sizes are at least 1."""

    shape: ModelShape
    num_ranks: int
    sequence_tokens: int
    """Tokens of every sequence."""
    num_sequences: int
    """Sequences of a step: the global batch."""
    ranks_per_node: int = RANKS_PER_NODE
    layers: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Fields of `AnalyticCostModel` about layers and precision."""

    @property
    def model_flops(self) -> float:
        """Floating-point operations of a step that MFU counts, forward and backward.

        `Frozen.token_flops`, embedding included, and 12·layers·q·s per token for attention, not
        halved for being causal (arXiv 2204.02311, appendix B); recomputation does not count.
        """
        shape = self.shape
        frozen: Frozen = self.layers.get("frozen", NOTHING_FROZEN)
        num_looked_up = 0 if shape.tied_embeddings else 1
        attention = 12 * frozen.attention_layers(shape) * shape.score_size * self.sequence_tokens
        of_token = frozen.token_flops(shape, num_looked_up=num_looked_up) + attention
        return self.num_sequences * self.sequence_tokens * of_token


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How a step is spread over ranks and micro-batches; all sizes are at least 1."""

    micro_batch_size: int
    """Sequences of a micro-batch."""
    tp: int
    pp: int
    sequence_parallel: bool = False
    recomputes_layers: bool = False
    """Whether every layer keeps only its input and runs its forward again in the backward."""
    ep: int = 1
    """Ranks of a stage over which whole experts are distributed, of several replicas if it exceeds
    tp; 1: tp cuts every expert."""

    @property
    def scheme(self) -> Scheme:
        """The shape of one replica, or of a column of replicas that share experts."""
        return Scheme(tp=self.tp, pp=self.pp, ep=self.ep)

    def strategy(self, job: FixedLengthJob) -> Strategy:
        """The strategy of the job's replicas; StrategyError unless they fill it and divide the
        model."""
        return _strategy(job.shape, self.scheme, job.num_ranks, job.ranks_per_node)

    def dp(self, job: FixedLengthJob) -> int:
        """Replicas of the job."""
        return job.num_ranks // (self.tp * self.pp)

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
    "data_parallel_s": "gradients and parameters between replicas, and the optimizer",
}
"""Causes of a step's time."""
PURPOSES = {
    "weights_bytes": "weights and gradients",
    "optimizer_bytes": "optimizer state",
    "activations_bytes": "activations kept",
    "working_bytes": "logits or the layer at work",
    "reserve_bytes": "reserve",
}
"""Purposes of a rank's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutPrediction:
    """What is predicted for one layout."""

    layout: Layout
    time: Mapping[str, float]
    """Seconds of a step by cause (CAUSES); they add up to the step."""
    mfu: float
    """Model FLOPs over those that all devices could have computed in the time."""
    stage: int
    """The stage whose ranks are the fullest."""
    memory: Mapping[str, float]
    """Memory of a rank of this stage by purpose (PURPOSES)."""
    usable_bytes: float
    """Memory of a rank, reserve included."""

    @property
    def step_s(self) -> float:
        """Time of a step."""
        return sum(self.time.values())

    @property
    def memory_bytes(self) -> float:
        """Memory of the fullest rank."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the fullest rank fits in memory."""
        return self.memory_bytes <= self.usable_bytes


def predict_layout(
    job: FixedLengthJob, layout: Layout, device: DeviceConstants
) -> LayoutPrediction:
    """Time, MFU and memory; the time of a layout that does not fit is what it would take.

    Raises StrategyError for replicas that do not fill the job or do not divide the model.
    """
    layout.strategy(job)
    model = cost_model_of(job, layout, device)
    time = _step_time(job, layout, model)
    stage, memory = _memory(job, layout, model)
    return LayoutPrediction(
        layout=layout,
        time=time,
        mfu=job.model_flops / (sum(time.values()) * model.peak_flops_per_s * job.num_ranks),
        stage=stage,
        memory=memory,
        usable_bytes=model.memory.usable_bytes + memory["reserve_bytes"],
    )


def cost_model_of(
    job: FixedLengthJob, layout: Layout, device: DeviceConstants
) -> AnalyticCostModel:
    """The cost model of a layout."""
    return AnalyticCostModel(
        shape=job.shape,
        device=device,
        cluster=device.cluster(job.num_ranks, min(job.num_ranks, job.ranks_per_node)),
        sequence_parallel=layout.sequence_parallel,
        recompute=EVERY_LAYER if layout.recomputes_layers else NO_RECOMPUTE,
        **job.layers,
    )


def _step_time(
    job: FixedLengthJob, layout: Layout, model: AnalyticCostModel
) -> Mapping[str, float]:
    scheme = layout.scheme
    num_tokens = layout.micro_batch_size * job.sequence_tokens
    lengths = [job.sequence_tokens] * layout.micro_batch_size
    costs = StageCosts(model, job.shape)
    coefficients = costs.coefficients(scheme)
    squares = sum(map(coefficients[0].squared, lengths))
    causes = {"expert_copies_s": 0.0, "expert_parallel_s": 0.0}
    num_micro_batches = layout.num_micro_batches(job)
    for terms in model.terms_by_stage(scheme):
        for cause, term in terms.items():
            seconds = term.seconds(squares, num_tokens)
            causes[f"{cause}_s"] = causes.get(f"{cause}_s", 0.0) + seconds
    del causes["context_parallel_s"]
    causes = {name: num_micro_batches * each / scheme.pp for name, each in causes.items()}
    average_s = sum(causes.values())
    stages_ms = [each.time_ms(lengths) for each in coefficients]
    slowest_s = num_micro_batches * (max(stages_ms) / _MS_PER_S)
    # Replicas that share experts are one of waves: its scheme has the share that plans use.
    (of_replica,) = layout.strategy(job).schemes
    share = costs.coefficients(of_replica)[0].forward_share
    busy_s = equal_micro_batches_time_ms(stages_ms, num_micro_batches, share) / _MS_PER_S
    halves_ms = [(share * stage_ms, (1.0 - share) * stage_ms) for stage_ms in stages_ms]
    regroup = _regroup_costs(
        job.shape, model.device, model.cluster, layout.tp, model.parameter_bytes, model.frozen
    )
    exposed_ms = regroup.exposed_ms(layout.strategy(job), lambda _: halves_ms)
    host_s = num_micro_batches * max(each.host_ms for each in coefficients) / _MS_PER_S
    causes["launch_s"] += max(0.0, host_s - busy_s)
    causes["imbalance_s"] = max(0.0, slowest_s - average_s)
    causes["bubble_s"] = busy_s - max(average_s, slowest_s)
    causes["data_parallel_s"] = exposed_ms / _MS_PER_S
    return {name: causes[name] for name in CAUSES}


def _memory(
    job: FixedLengthJob, layout: Layout, of_job: AnalyticCostModel
) -> tuple[int, Mapping[str, float]]:
    """The stage whose ranks are the fullest, and the memory of one of them."""
    scheme, model = layout.scheme, of_job.memory
    num_tokens = layout.micro_batch_size * job.sequence_tokens
    num_tokens += -num_tokens % scheme.token_quantum

    def of_stage(stage: int) -> dict[str, float]:
        role, state = model.role_bytes(scheme, stage), model.state_bytes(scheme, stage)
        activations = model.activation_bytes(scheme, stage, num_tokens)
        peak = model.peak_bytes(scheme, stage, num_tokens)
        return {
            "weights_bytes": role,
            "optimizer_bytes": state - role,
            "activations_bytes": activations,
            "working_bytes": peak - state - activations,
            "reserve_bytes": model.reserve_bytes,
        }

    stages = map(of_stage, range(scheme.pp))
    return max(enumerate(stages), key=lambda numbered: sum(numbered[1].values()))


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
    shape: ModelShape,
    device: DeviceConstants,
    cluster: Cluster,
    tp: int,
    parameter_bytes: int,
    frozen: Frozen,
) -> RegroupCosts:
    """Costs that remember the strategies they were asked for: layouts differ by micro-batch too."""
    return RegroupCosts.of(
        shape, device, cluster, num_atoms=tp, parameter_bytes=parameter_bytes, frozen=frozen
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """A layout with the cause of its rank or rejection."""

    prediction: LayoutPrediction
    rule: str
    """The cause by which the layout loses most against the first, or ``memory``; of the first one
    the largest besides matrix products and attention."""
    why: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Degrees, or degrees and a micro-batch size, that cannot run."""

    tp: int
    pp: int
    ep: int
    micro_batch_size: int | None
    rule: str
    why: str


@dataclass(frozen=True, slots=True)
class LayoutSearch:
    """All layouts of a job."""

    ranked: tuple[Verdict, ...]
    """Layouts that fit, the fastest first."""
    rejected: tuple[Verdict, ...]
    """Layouts that do not fit, by the time that they would take."""
    refused: tuple[Refusal, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, has_activations=False)
    job = parser.add_argument_group("job")
    add_device_argument(job)
    add_job_arguments(job)
    job.add_argument(
        "--seq-length", type=int, required=True, metavar="N", help="tokens of every sequence"
    )
    job.add_argument(
        "--global-batch-size",
        type=int,
        required=True,
        metavar="N",
        help="rows of --seq-length tokens of a global batch, as in Megatron",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--top", type=int, default=10, metavar="N", help="layouts to print (default: %(default)s)"
    )
    output.add_argument(
        "--json",
        action="store_true",
        help="print all layouts as JSON: times in s, memory in bytes of the fullest rank",
    )


def run(namespace: argparse.Namespace) -> int:
    """Rank the layouts and print them; returns the exit status.

    Raises ConfigurationError for flags that make no sense, PlanError when no layout fits.
    """
    num_ranks, ranks_per_node = job_ranks(namespace)
    shape, precision = shape_of(namespace), job_precision(namespace)
    job = FixedLengthJob(
        shape=shape,
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        sequence_tokens=namespace.seq_length,
        num_sequences=namespace.global_batch_size,
        layers=given_layers(namespace, shape) | {"precision": precision},
    )
    device = device_constants(namespace.device)
    with shown_while("layouts"):
        search = search_layouts(job, device)
    if namespace.json:
        print_json(
            {
                "ranked": [_verdict_to_json(verdict) for verdict in search.ranked],
                "rejected": [_verdict_to_json(verdict) for verdict in search.rejected],
                "refused": [dataclasses.asdict(refusal) for refusal in search.refused],
            }
        )
        return 0
    console = results_console()
    num_tokens = job.num_sequences * job.sequence_tokens
    print(
        f"global batch: {job.num_sequences:,} rows of {job.sequence_tokens:,} tokens, as in "
        f"Megatron; here --global-batch-tokens {num_tokens}"
    )
    best = search.ranked[0].prediction
    has_ep = job.shape.num_experts > 0
    title = f"fastest of {len(search.ranked)} that fit"
    console.print(_table(title, search.ranked[: namespace.top], has_ep=has_ep))
    faster = sorted(
        (v for v in search.rejected if v.prediction.step_s < best.step_s),
        key=lambda verdict: verdict.prediction.memory_bytes,
    )
    if faster:
        title = f"would be faster than the first, but out of memory ({len(faster)}), least first"
        console.print(_table(title, faster[: namespace.top], has_ep=has_ep))
    if has_ep:
        console.print(
            "ep: ranks that hold a layer's experts together, each expert whole: Megatron's "
            "--expert-model-parallel-size with --expert-tensor-parallel-size 1; at 1 tp cuts them"
        )
    console.print(
        f"{len(search.rejected)} layouts are out of memory, {len(search.refused)} cannot be run: "
        f"--json lists them. Layouts have no cp; advise compares strategies that have."
    )
    is_assumed_fp32 = precision is Precision.FP32 and not namespace.fp32
    print_next(
        "hydraulis advise --lengths CORPUS.idx --seq-length",
        *(str(job.sequence_tokens), "--global-batch-tokens", str(num_tokens)),
        *("--num-ranks", str(num_ranks), "--ranks-per-node", str(ranks_per_node)),
        *(*model_words(namespace), *(["--fp32"] if is_assumed_fp32 else [])),
        *("--device", namespace.device),
    )
    return 0


def _table(title: str, verdicts: Sequence[Verdict], *, has_ep: bool) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("size", "tp", "pp", *["ep"] * has_ep):
        table.add_column(column, justify="right")
    table.add_column("SP")
    table.add_column("again")
    for column in ("step s", "MFU %", "GB"):
        table.add_column(column, justify="right")
    table.add_column("why", overflow="fold")
    for verdict in verdicts:
        prediction, layout = verdict.prediction, verdict.prediction.layout
        table.add_row(
            str(layout.micro_batch_size),
            str(layout.tp),
            str(layout.pp),
            *[str(layout.ep)] * has_ep,
            "yes" if layout.sequence_parallel else "no",
            "layers" if layout.recomputes_layers else "none",
            f"{prediction.step_s:.2f}",
            f"{100.0 * prediction.mfu:.1f}",
            f"{prediction.memory_bytes / 1e9:.1f}",
            verdict.why,
        )
    return table


def _verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    prediction, layout = verdict.prediction, verdict.prediction.layout
    return {
        "micro_batch_size": layout.micro_batch_size,
        "tp": layout.tp,
        "pp": layout.pp,
        "ep": layout.ep,
        "sequence_parallel": layout.sequence_parallel,
        "recompute": "full" if layout.recomputes_layers else None,
        "predicted_step_time_s": prediction.step_s,
        "predicted_mfu": prediction.mfu,
        "predicted_memory_bytes": prediction.memory_bytes,
        "usable_memory_bytes": prediction.usable_bytes,
        "predicted_fits": prediction.fits,
        "rule": verdict.rule,
        "why": verdict.why,
        "time_s": prediction.time,
        "memory": {"stage": prediction.stage, **prediction.memory},
    }


def search_layouts(job: FixedLengthJob, device: DeviceConstants) -> LayoutSearch:
    """Predict and rank all layouts.

    tp are powers of two inside a node, pp all degrees whose product with tp divides the ranks, ep
    powers of two up to the ranks of a stage, micro-batch sizes powers of two; sequence parallelism
    (with tp) and recomputation on and off.

    Raises PlanError when no layout fits.
    """
    refused: list[Refusal] = []
    predictions = [predict_layout(job, layout, device) for layout in _layouts(job, refused)]
    # Equal times, where sequence parallelism has no effect, go by memory.
    predictions.sort(key=lambda each: (each.step_s, each.memory_bytes, each.layout.tp))
    fitting = [prediction for prediction in predictions if prediction.fits]
    rejected = [prediction for prediction in predictions if not prediction.fits]
    if not fitting:
        raise PlanError(_none_fits(job, device, rejected, refused))
    first = fitting[0]
    ranked = [_first_verdict(first)]
    ranked += [_verdict(prediction, first) for prediction in fitting[1:]]
    return LayoutSearch(
        tuple(ranked),
        tuple(Verdict(prediction, "memory", _memory_why(prediction)) for prediction in rejected),
        tuple(refused),
    )


def _none_fits(
    job: FixedLengthJob,
    device: DeviceConstants,
    rejected: Sequence[LayoutPrediction],
    refused: Sequence[Refusal],
) -> str:
    if not rejected:
        return (
            f"no layout can be run on {job.num_ranks} ranks: {refused[0].why}"
            if refused
            else f"no layout can be run on {job.num_ranks} ranks; change their number"
        )
    least = min(rejected, key=lambda prediction: prediction.memory_bytes)
    return (
        f"a layout must fit in {least.usable_bytes / 1e9:.1f} GB of {device.name} but the smallest "
        f"of {len(rejected)} needs {least.memory_bytes / 1e9:.1f} GB; use more ranks or "
        f"shorter sequences, or advise: its strategies have cp, layouts have none"
    )


def _layouts(job: FixedLengthJob, refused: list[Refusal]) -> Iterator[Layout]:
    for tp, pp, ep in _degrees(job, refused):
        dp = job.num_ranks // (tp * pp)
        if job.num_sequences % dp:
            why = (
                f"replicas share the batch evenly but {job.num_sequences} sequences are not a "
                f"multiple of {dp} replicas"
            )
            refused.append(Refusal(tp, pp, ep, None, "batch", why))
            continue
        sequences_per_replica = job.num_sequences // dp
        spreads = (False,) if tp == 1 else (True,) if job.shape.whole_matrices else (False, True)
        for size in powers_of_two(sequences_per_replica):
            if sequences_per_replica % size:
                why = (
                    f"micro-batches share a replica's {sequences_per_replica} sequences evenly "
                    f"but their size is {size}"
                )
                refused.append(Refusal(tp, pp, ep, size, "batch", why))
                break
            for sequence_parallel, recomputes in itertools.product(spreads, (False, True)):
                yield Layout(
                    micro_batch_size=size,
                    tp=tp,
                    pp=pp,
                    ep=ep,
                    sequence_parallel=sequence_parallel,
                    recomputes_layers=recomputes,
                )


def _degrees(job: FixedLengthJob, refused: list[Refusal]) -> Iterator[tuple[int, int, int]]:
    """tp, pp and ep of layouts that divide model and job; each degree is refused once."""

    def divides(tp: int, pp: int, ep: int) -> bool:
        replica = Layout(micro_batch_size=1, tp=tp, pp=pp, ep=ep)
        try:
            replica.strategy(job)
        except StrategyError as error:
            refused.append(Refusal(tp, pp, ep, None, "division", str(error)))
            return False
        return True

    for tp in powers_of_two(min(job.ranks_per_node, job.num_ranks)):
        if job.num_ranks % tp or not divides(tp, 1, 1):
            continue
        for pp in range(1, job.num_ranks // tp + 1):
            if (job.num_ranks // tp) % pp or not divides(tp, pp, 1):
                continue
            num_together = math.gcd(job.num_ranks // pp, job.shape.num_experts or 1)
            for ep in range(1, num_together + 1):
                if num_together % ep == 0 and divides(tp, pp, ep):
                    yield tp, pp, ep


def _first_verdict(first: LayoutPrediction) -> Verdict:
    costs = [name for name in CAUSES if name not in ("matmul_s", "attention_s")]
    rule = max(costs, key=first.time.__getitem__)
    share = 100.0 * first.time[rule] / first.step_s
    return Verdict(first, rule, f"fastest; most goes to {CAUSES[rule]}: {share:.0f} %")


def _verdict(prediction: LayoutPrediction, first: LayoutPrediction) -> Verdict:
    more = {name: prediction.time[name] - first.time[name] for name in CAUSES}
    rule = max(more, key=more.__getitem__)
    slower = 100.0 * (prediction.step_s / first.step_s - 1.0)
    if more[rule] <= 0.0:
        return Verdict(prediction, "equal", "as fast as the first, with more memory")
    return Verdict(prediction, rule, f"+{slower:.1f} %; {CAUSES[rule]}: +{more[rule]:.2f} s")


def _memory_why(prediction: LayoutPrediction) -> str:
    parts = prediction.memory
    most = max(parts, key=parts.__getitem__)
    return (
        f"stage {prediction.stage} needs {prediction.memory_bytes / 1e9:.1f} of "
        f"{prediction.usable_bytes / 1e9:.1f} GB; {PURPOSES[most]}: {parts[most] / 1e9:.1f} GB"
    )
