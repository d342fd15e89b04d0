"""Time of regrouping and of the shards' update: by call, and as far as compute does not hide it.

A bucket is gathered, scattered and updated once an iteration, alone or in a call with others
(`transfer.calls`). A collective takes as long as its
slowest rank, which sends and receives at the same time; links inside nodes and across nodes are
used at the same time in one-step transfers, in sequence in two-step transfers. An update reads and
writes its states at the bandwidth of the device's memory.

What of it adds to the makespan, is **exposed**, is given by the order in which the runtime issues
it (docs/regrouping.md, section Overlap) and by what overlaps, see `Hiding`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum, auto

from megatron.hydraulis.cluster import Cluster, Link
from megatron.hydraulis.cost_model.device import DeviceConstants, Precision
from megatron.hydraulis.cost_model.pipeline import stage_parts
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.frozen import NOTHING_FROZEN, Frozen
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Replica, Scheme, Strategy
from megatron.hydraulis.transfer.amounts import (
    LayoutAmounts,
    RankAmounts,
    StrategyAmounts,
    amounts_of_model,
)
from megatron.hydraulis.transfer.calls import call_amounts, calls_of
from megatron.hydraulis.transfer.canonical import Bucket, Unit
from megatron.hydraulis.transfer.collective import Collective, collective_of
from megatron.hydraulis.transfer.role import Role, held_buckets, roles_of

_MS_PER_S = 1e3
FP32_BYTES = Precision.FP32.num_bytes
BF16_BYTES = Precision.BF16.num_bytes
_LEAST_SAVING = 0.01
"""Share of an iteration that is worth a line about an option."""
# Gradient, master weight and two moments are read; master weight and moments are written.
_UPDATE_FP32_PASSES = 4 + 3

MicroBatchTimes = Callable[[Scheme], Sequence[tuple[float, float]]]
"""Forward and backward of a scheme's micro-batch in ms, shape (pp, 2)."""


def wire_bytes(precision: Precision, *, reduces_in_bf16: bool) -> int:
    """Size of a gradient on the wire: that of bf16 only if parameters are bf16, too."""
    return precision.num_bytes if reduces_in_bf16 else FP32_BYTES


class Hiding(Enum):
    """What hides regrouping."""

    NOTHING = auto()
    """--no-regroup-overlap."""
    ONE_QUEUE = auto()
    """A CUDA device: work of one hardware queue starts in the order in which it was issued. Gathers
    are issued before the first forward, so only the update hides them; scatters after the last
    message between stages, so only a first stage's last backward hides them."""
    MANY_QUEUES = auto()
    """A CUDA device with a hardware queue for each stream, as is assumed of 32: the first forward
    also hides gathers."""
    THREADS = auto()
    """A thread for collectives (gloo): the first forward also hides gathers, and the last backward
    of every stage hides scatters."""

    @property
    def hides_gathers(self) -> bool:
        """Whether the first forward hides gathers."""
        return self in (Hiding.MANY_QUEUES, Hiding.THREADS)


@dataclass(frozen=True, slots=True)
class CallTimes:
    """Times of a call's buckets in one iteration of a strategy."""

    buckets: tuple[int, ...]
    """Their indices."""
    units: tuple[Unit, ...]
    """The part of the model of each, by the name of its trained parameters."""
    gather_ms: float
    scatter_ms: float
    update_ms: float
    """Time of the update on the slowest rank."""


@dataclass(frozen=True, slots=True)
class RegroupTimes:
    """Times of all calls for one strategy."""

    calls: tuple[CallTimes, ...]
    """Calls in the order of gathers; scatters have the reverse order."""
    received_bytes: float
    """What a rank receives in gather and scatter together, mean over ranks."""
    skipped_bytes: float = 0.0
    """What it does not receive, as it holds these frozen parameters already."""

    @property
    def total_ms(self) -> float:
        """Regrouping and update if nothing hides them."""
        return math.fsum(c.gather_ms + c.scatter_ms + c.update_ms for c in self.calls)

    @property
    def units(self) -> tuple[Unit, ...]:
        """The unit of every bucket, by index."""
        found = {b: u for call in self.calls for b, u in zip(call.buckets, call.units, strict=True)}
        return tuple(found[bucket] for bucket in sorted(found))

    def exposed_ms(self, forward_ms: Sequence[float], backward_ms: Sequence[float]) -> float:
        """Regrouping and update as far as compute does not hide them.

        forward_ms: shape (num_buckets,), by index: compute of the next forward that begins when the
            bucket has arrived and may overlap later gathers.
        backward_ms: compute of the last backward that completes a bucket's gradients and may
            overlap the scatters before it.
        """
        updated_ms = gathered_ms = 0.0
        arrivals_ms: dict[int, float] = {}
        for call in self.calls:
            updated_ms += call.update_ms
            gathered_ms = max(gathered_ms, updated_ms) + call.gather_ms
            arrivals_ms.update(dict.fromkeys(call.buckets, gathered_ms))
        forward_end_ms = updated_ms
        for bucket, compute_ms in enumerate(forward_ms):
            forward_end_ms = max(forward_end_ms, arrivals_ms[bucket]) + compute_ms
        completed_ms = list(itertools.accumulate(reversed(backward_ms)))[::-1]
        backward_end_ms, scattered_ms = completed_ms[0], 0.0
        for call in reversed(self.calls):
            complete_ms = max(completed_ms[bucket] for bucket in call.buckets)
            scattered_ms = max(scattered_ms, complete_ms) + call.scatter_ms
        return forward_end_ms - math.fsum(forward_ms) + scattered_ms - backward_end_ms


@dataclass(frozen=True)
class RegroupCosts:
    """Times of regrouping for the strategies of one job.

    Elements by link are those of the transfer plans that the runtime executes.

    Raises ConfigurationError for a bandwidth of memory, a share of a link or a factor that is not
    positive, and for a cluster of another size than the strategies'.
    """

    shape: ModelShape
    cluster: Cluster
    num_atoms: int
    """Least common multiple of all tp degrees."""
    memory_bytes_per_s: float
    """Bandwidth of a device's memory."""
    link_fraction: float = 1.0
    """Share of a link's bandwidth that collectives reach."""
    parameter_bytes: int = 2
    """Size of a parameter on the wire."""
    gradient_bytes: int = FP32_BYTES
    """Size of a gradient on the wire."""
    hiding: Hiding = Hiding.ONE_QUEUE
    factor: float = 1.0
    """Measured over computed times, see `calibrated`; all times are multiplied by it."""
    frozen: Frozen = NOTHING_FROZEN
    _known: dict[tuple[tuple[Replica, ...], ...], RegroupTimes] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        device: DeviceConstants,
        cluster: Cluster,
        *,
        num_atoms: int,
        parameter_bytes: int,
        gradient_bytes: int = FP32_BYTES,
        overlaps: bool = True,
        frozen: Frozen = NOTHING_FROZEN,
    ) -> RegroupCosts:
        """Costs on devices of one kind; overlaps is false for --no-regroup-overlap."""
        hiding = Hiding.THREADS if device.name == "cpu" else Hiding.MANY_QUEUES
        return cls(
            shape,
            cluster,
            num_atoms,
            memory_bytes_per_s=device.memory_bytes_per_s,
            link_fraction=device.link_fraction,
            parameter_bytes=parameter_bytes,
            gradient_bytes=gradient_bytes,
            hiding=hiding if overlaps else Hiding.NOTHING,
            frozen=frozen,
        )

    def __post_init__(self) -> None:
        if not (self.memory_bytes_per_s > 0.0 and 0.0 < self.link_fraction <= 1.0):
            raise ConfigurationError(
                f"regrouping: the memory's bandwidth is positive and the share of a link in (0, 1] "
                f"but they are {self.memory_bytes_per_s} bytes/s and {self.link_fraction}; "
                f"correct them"
            )
        if not 0.0 < self.factor < math.inf:
            raise ConfigurationError(
                f"regrouping: the factor of measured over computed times is positive but is "
                f"{self.factor}; correct the times of strategies in the cost profile"
            )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickled without what it has computed."""
        return RegroupCosts, tuple(getattr(self, each.name) for each in fields(self) if each.init)

    def with_hiding(self, hiding: Hiding) -> RegroupCosts:
        """The costs with other hiding; they share what is computed for strategies, as no time of a
        bucket depends on it."""
        costs = replace(self, hiding=hiding)
        object.__setattr__(costs, "_known", self._known)
        return costs

    def _amounts(self, num_expert_groups: int) -> LayoutAmounts:
        """Elements of a layout whose experts are grouped as ranks hold them."""
        cluster = self.cluster
        return amounts_of_model(
            self.shape,
            num_expert_groups,
            self.num_atoms,
            cluster.num_ranks,
            cluster.ranks_per_node,
            self.frozen,
        )

    def times(self, strategy: Strategy, after: Strategy | None = None) -> RegroupTimes:
        """Times of every call for a strategy of the job.

        after: the strategy of the iteration before, by default the same. What it had of frozen
        parameters is not gathered again by ranks whose role did not change (`held_buckets`).

        Raises ConfigurationError for a strategy of another number of ranks, StrategyError for one
        that cannot cut the model.
        """
        if strategy.num_ranks != self.cluster.num_ranks:
            raise ConfigurationError(
                f"regrouping: strategy {strategy.name!r} is for {strategy.num_ranks} ranks but the "
                f"cluster has {self.cluster.num_ranks}; describe the cluster of the strategies"
            )
        if after is None or self.frozen == NOTHING_FROZEN:
            after = strategy
        key = strategy.replicas, after.replicas
        if key not in self._known:
            self._known[key] = self._of(strategy, after)
        return self._known[key]

    def exposed_ms(
        self, strategy: Strategy, times_ms: MicroBatchTimes, after: Strategy | None = None
    ) -> float:
        """Regrouping and update that add to the makespan, by `hiding`; arguments as of `times`.

        times_ms: of a scheme's usual micro-batch. The first and the last one hide regrouping; of
        several schemes the one counts that hides the least.
        """
        times = self.times(strategy, after)
        if self.hiding is Hiding.NOTHING:
            return times.total_ms
        costs = self.for_pool([strategy])
        return max(
            costs._exposed_by_ms(times, scheme, times_ms(scheme)) for scheme in strategy.schemes
        )

    def for_pool(self, strategies: Iterable[Strategy]) -> RegroupCosts:
        """These costs with the hardware queues that training sets for a pool (loop/entry.py): one
        if some strategy has tp."""
        has_tp = any(scheme.tp > 1 for strategy in strategies for scheme in strategy.schemes)
        if has_tp and self.hiding is Hiding.MANY_QUEUES:
            return self.with_hiding(Hiding.ONE_QUEUE)
        return self

    def _exposed_by_ms(
        self, times: RegroupTimes, scheme: Scheme, times_ms: Sequence[tuple[float, float]]
    ) -> float:
        forward_ms: dict[Unit, float] = {}
        backward_ms: dict[Unit, float] = {}
        hidden = 0.0
        if scheme.pp > 1 and self.hiding is Hiding.THREADS:
            # All ranks issue scatters: a first stage from its last backward but one on, while it
            # awaits the last stage, which runs a forward in between.
            later_ms = math.fsum(of_backward for _, of_backward in times_ms[1:])
            hidden = min(1.0, times_ms[-1][0] / later_ms) if later_ms else 0.0
        for stage, parts in enumerate(stage_parts(self.shape, scheme)):
            of_forward, of_backward = times_ms[stage]
            for unit, share in parts:
                forward_ms[unit] = share * of_forward * self.hiding.hides_gathers
                backward_ms[unit] = share * of_backward * (hidden if stage else 1.0)
        # Of several buckets of a unit, the last one counts.
        shares_ms = [
            (forward_ms.pop(unit, 0.0), backward_ms.pop(unit, 0.0))
            for unit in reversed(times.units)
        ]
        return times.exposed_ms(*map(list, zip(*reversed(shares_ms), strict=True)))

    def calibrated(
        self,
        measured: Iterable[tuple[Strategy, float]],
        times_ms: MicroBatchTimes,
    ) -> RegroupCosts:
        """These costs with the factor of measured (strategy, ms) over computed exposed times;
        unchanged if nothing was measured."""
        measured_ms = computed_ms = 0.0
        for strategy, time_ms in measured:
            measured_ms += time_ms
            computed_ms += self.exposed_ms(strategy, times_ms)
        if not measured_ms or not computed_ms:
            return self
        return replace(self, factor=self.factor * measured_ms / computed_ms)

    def bf16_advice(
        self,
        shares: Mapping[Strategy, float],
        times_ms: MicroBatchTimes,
        iteration_ms: float,
    ) -> str | None:
        """A line about what --grad-reduce-in-bf16 would save, if that is worth it; else None.

        shares: of the iterations, by strategy; times_ms: as in `exposed_ms`; iteration_ms:
        mean time of an iteration, predicted.
        """
        if self.parameter_bytes != BF16_BYTES or self.gradient_bytes == BF16_BYTES:
            return None
        in_fp32_ms, in_bf16_ms = (
            math.fsum(share * costs.exposed_ms(s, times_ms) for s, share in shares.items())
            for costs in (self, replace(self, gradient_bytes=BF16_BYTES))
        )
        saved_ms = in_fp32_ms - in_bf16_ms
        if saved_ms <= _LEAST_SAVING * iteration_ms:
            return None
        return (
            f"--grad-reduce-in-bf16 would save {saved_ms:,.1f} ms of an iteration's "
            f"{iteration_ms:,.1f} ms"
        )

    def _roles(self, strategy: Strategy) -> list[Role | None]:
        strategy.check_model(self.shape)
        shape = self.shape
        return roles_of(
            *(strategy, shape.num_layers, shape.tied_embeddings),
            *(shape.num_experts, shape.num_predictions),
        )

    def _of(self, strategy: Strategy, after: Strategy) -> RegroupTimes:
        roles = self._roles(strategy)
        counted = self._amounts(math.lcm(*(scheme.ep for scheme in strategy.schemes)))
        amounts = StrategyAmounts(counted, roles)
        kind = collective_of(amounts)
        scatter_kind = collective_of(amounts, may_reduce=self.gradient_bytes == FP32_BYTES)
        same = {b.index: buckets[0].index for buckets in amounts.equal_buckets for b in buckets}
        held = held_buckets(counted.layout, self._roles(after), roles)
        known: dict[tuple[int, ...], tuple[float, float, float, float]] = {(): (0.0,) * 4}

        def exchange(buckets: Iterable[int]) -> tuple[float, float, float, float]:
            """Gather and scatter in ms, and what all ranks receive in each, in bytes."""
            call = tuple(same[bucket] for bucket in buckets)
            if call not in known:
                gather, scatter = call_amounts(kind, amounts, call)
                if scatter_kind is not kind:
                    _, scatter = call_amounts(scatter_kind, amounts, call)
                known[call] = (
                    self._collective_ms(gather, self.parameter_bytes, kind),
                    self._collective_ms(scatter, self.gradient_bytes, scatter_kind),
                    self.parameter_bytes * float(gather.received.sum()),
                    self.gradient_bytes * float(scatter.received.sum()),
                )
            return known[call]

        times: list[CallTimes] = []
        received_bytes = skipped_bytes = 0.0
        for call in calls_of(kind, amounts, strategy):
            _, scatter_ms, of_all, scattered = exchange(call)
            gather_ms, _, gathered, _ = exchange(each for each in call if each not in held)
            received_bytes += (gathered + scattered) / self.cluster.num_ranks
            skipped_bytes += (of_all - gathered) / self.cluster.num_ranks
            buckets = [counted.layout.buckets[bucket] for bucket in call]
            times.append(
                CallTimes(
                    buckets=call,
                    units=tuple(bucket.unit.trained for bucket in buckets),
                    gather_ms=gather_ms,
                    scatter_ms=scatter_ms,
                    update_ms=math.fsum(map(self._update_ms, buckets)),
                )
            )
        # Nothing hides what columns exchange before the first micro-batch and after the last one,
        # as nothing hides the last scatter.
        of_columns_ms = max(map(self._of_columns_ms, strategy.schemes))
        times[0] = replace(times[0], scatter_ms=times[0].scatter_ms + of_columns_ms)
        return RegroupTimes(tuple(times), received_bytes, skipped_bytes)

    def _of_columns_ms(self, scheme: Scheme) -> float:
        """The gather and scatter of an embedding and a layer, the mean of all, among ranks that
        share their weights."""
        if not scheme.shares_weights:
            return 0.0
        shape, link = self.shape, self.cluster.collective(scheme.tp * scheme.fs, scheme.tp)
        layer = shape.num_parameters_of_layers(shape.num_layers) / shape.num_layers
        routed = shape.num_expert_layers * shape.num_routed_entries / shape.num_layers
        others = (layer - routed + shape.num_embedding_parameters) / scheme.tp
        routed /= scheme.tp if scheme.ep == 1 else scheme.ep
        num_received = int((1 - 1 / scheme.fs) * others + (1 - 1 / scheme.num_holders) * routed)
        seconds = self._time_s(self.parameter_bytes * num_received, link)
        if self.frozen.lora is None:  # gradients of adapters are small
            seconds += self._time_s(self.gradient_bytes * num_received, link)
        return self.factor * _MS_PER_S * seconds

    def _collective_ms(self, by_rank: RankAmounts, itemsize: int, kind: Collective) -> float:
        inside, across = (
            int(max(received.max(), sent.max()))
            for received, sent in (
                (by_rank.received_inside, by_rank.sent_inside),
                (by_rank.received_across, by_rank.sent_across),
            )
        )
        inside_s = self._time_s(itemsize * inside, self.cluster.intra_node)
        between_nodes = self.cluster.point_to_point(self.cluster.num_ranks)
        across_s = self._time_s(itemsize * across, between_nodes)
        is_sequential = kind is Collective.TWO_STEP
        seconds = inside_s + across_s if is_sequential else max(inside_s, across_s)
        return self.factor * _MS_PER_S * seconds

    def _time_s(self, num_bytes: int, link: Link) -> float:
        return link.time_s(num_bytes / self.link_fraction) if num_bytes else 0.0

    def _update_ms(self, bucket: Bucket) -> float:
        if bucket.unit.is_frozen:
            return 0.0
        borders = bucket.shard_borders
        most = max(stop - start for start, stop in itertools.pairwise(borders))
        num_bytes = most * (_UPDATE_FP32_PASSES * FP32_BYTES + self.parameter_bytes)
        return self.factor * _MS_PER_S * num_bytes / self.memory_bytes_per_s
