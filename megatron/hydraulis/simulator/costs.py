"""Times that the simulator uses: of a micro-batch on each stage, and of regrouping each bucket."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron.hydraulis.cluster import Cluster, Link
from megatron.hydraulis.cost_model.interface import Coefficients, CostModel
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Replica, Scheme, Strategy
from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout, Unit, model_parameters
from megatron.hydraulis.transfer.collective import (
    Collective,
    bucket_gather,
    bucket_scatter,
    collective_of,
)
from megatron.hydraulis.transfer.ranges import buckets_with_equal_plans
from megatron.hydraulis.transfer.role import roles_of
from megatron.hydraulis.transfer.traffic import LinkElements, link_elements_by_rank

_MS_PER_S = 1e3
_FP32_BYTES = 4
# Gradient, master weight and two moments are read; master weight and moments are written.
_UPDATE_FP32_PASSES = 4 + 3


@dataclass(frozen=True)
class StageCosts:
    """Coefficients of every stage of a scheme.

    A cost model has the time of the slowest stage. If the shape of the model is known, the other
    stages take a share of it: of a and c by their layers, of b by the entries of their matrices,
    including the output layer. The embedding is a look-up and costs nothing. Without the shape all
    stages take the same time, which is what the planner assumes.
    """

    cost_model: CostModel
    shape: ModelShape | None = None
    """None if all stages are to take the same time."""
    _known: dict[Scheme, tuple[Coefficients, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def coefficients(self, scheme: Scheme) -> tuple[Coefficients, ...]:
        """Shape (pp,), by stage; raises StrategyError as cost model and scheme do."""
        if scheme not in self._known:
            self._known[scheme] = self._of(scheme)
        return self._known[scheme]

    def output_share(self, scheme: Scheme, stage: int) -> float:
        """Share of the output layer in a stage's matrix products, from 0 to 1."""
        if self.shape is None or stage < scheme.pp - 1:
            return 0.0
        return self.shape.num_embedding_parameters / _stage_entries(self.shape, scheme)[stage]

    def _of(self, scheme: Scheme) -> tuple[Coefficients, ...]:
        slowest = self.cost_model.coefficients(scheme)
        if self.shape is None:
            return (slowest,) * scheme.pp
        layers = scheme.layers_per_stage(self.shape.num_layers)
        entries = _stage_entries(self.shape, scheme)
        most_layers, most_entries = max(layers), max(entries)
        return tuple(
            replace(
                slowest,
                a_ms_per_token2=slowest.a_ms_per_token2 * num_layers / most_layers,
                b_ms_per_token=slowest.b_ms_per_token * num_entries / most_entries,
                c_ms=slowest.c_ms * num_layers / most_layers,
            )
            for num_layers, num_entries in zip(layers, entries, strict=True)
        )


def _stage_entries(shape: ModelShape, scheme: Scheme) -> list[int]:
    """Number of entries of each stage's matrices: shape (pp,)."""
    layers = scheme.layers_per_stage(shape.num_layers)
    entries = [num_layers * shape.num_matrix_parameters_per_layer for num_layers in layers]
    entries[-1] += shape.num_embedding_parameters
    return entries


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """Times of a bucket in one iteration of a strategy."""

    index: int
    unit: Unit
    gather_ms: float
    scatter_ms: float
    update_ms: float
    """On the slowest rank."""


@dataclass(frozen=True, slots=True)
class RegroupTimes:
    """Times of all buckets for one strategy."""

    buckets: tuple[BucketTimes, ...]
    """In the order of their gathers; scatters have the reverse order."""
    received_bytes: float
    """In gather and scatter together, mean over ranks."""


@dataclass(frozen=True)
class RegroupCosts:
    """Times of regrouping for the strategies of one job.

    Bytes come from the transfer plans that the runtime executes. A collective takes as long as its
    slowest rank, which sends and receives at the same time. Links inside nodes and across nodes are
    used at the same time in one-step transfers, in sequence in two-step transfers. An update reads
    and writes its states at the bandwidth of the device's memory.

    Raises ConfigurationError for a bandwidth of memory or a share of a link that is not positive,
    and for a cluster of another size than the strategies'.
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
    """Bytes of a parameter on the wire."""
    gradient_bytes: int = 4
    """Bytes of a gradient on the wire."""
    _known: dict[tuple[Replica, ...], RegroupTimes] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not (self.memory_bytes_per_s > 0.0 and 0.0 < self.link_fraction <= 1.0):
            raise ConfigurationError(
                f"regrouping: the memory's bandwidth is positive and the share of a link in (0, 1] "
                f"but they are {self.memory_bytes_per_s} bytes/s and {self.link_fraction}; "
                f"correct them"
            )

    @cached_property
    def layout(self) -> CanonicalLayout:
        """The default order, in which rank r owns share r."""
        return CanonicalLayout.build(
            model_parameters(self.shape),
            num_atoms=self.num_atoms,
            num_ranks=self.cluster.num_ranks,
        )

    def times(self, strategy: Strategy) -> RegroupTimes:
        """Times of every bucket for a strategy of the job.

        Raises ConfigurationError for a strategy of another number of ranks, StrategyError for one
        that cannot cut the model.
        """
        if strategy.num_ranks != self.cluster.num_ranks:
            raise ConfigurationError(
                f"regrouping: strategy {strategy.name!r} is for {strategy.num_ranks} ranks but the "
                f"cluster has {self.cluster.num_ranks}; describe the cluster of the strategies"
            )
        if strategy.replicas not in self._known:
            self._known[strategy.replicas] = self._of(strategy)
        return self._known[strategy.replicas]

    def _of(self, strategy: Strategy) -> RegroupTimes:
        strategy.check_model(self.shape)
        roles = roles_of(strategy, self.shape.num_layers, self.shape.tied_embeddings)
        per_node = self.cluster.ranks_per_node
        kind = collective_of(self.layout, roles, ranks_per_node=per_node)
        times: list[BucketTimes] = []
        received_bytes = 0.0
        for buckets in buckets_with_equal_plans(self.layout, roles):
            gather, scatter = (
                link_elements_by_rank(
                    make(kind, self.layout, buckets[0], roles, ranks_per_node=per_node),
                    self.cluster.num_ranks,
                    ranks_per_node=per_node,
                )
                for make in (bucket_gather, bucket_scatter)
            )
            num_received = self.parameter_bytes * sum(each.received for each in gather)
            num_received += self.gradient_bytes * sum(each.received for each in scatter)
            received_bytes += len(buckets) * num_received / self.cluster.num_ranks
            times += [
                BucketTimes(
                    index=bucket.index,
                    unit=bucket.unit,
                    gather_ms=self._collective_ms(gather, self.parameter_bytes, kind),
                    scatter_ms=self._collective_ms(scatter, self.gradient_bytes, kind),
                    update_ms=self._update_ms(bucket),
                )
                for bucket in buckets
            ]
        times.sort(key=lambda bucket: bucket.index)
        return RegroupTimes(tuple(times), received_bytes)

    def _collective_ms(
        self, by_rank: Sequence[LinkElements], itemsize: int, kind: Collective
    ) -> float:
        inside = max(max(each.received_inside, each.sent_inside) for each in by_rank)
        across = max(max(each.received_across, each.sent_across) for each in by_rank)
        inside_s = self._time_s(itemsize * inside, self.cluster.intra_node)
        across_s = self._time_s(itemsize * across, self.cluster.inter_node)
        is_sequential = kind is Collective.TWO_STEP
        return _MS_PER_S * (inside_s + across_s if is_sequential else max(inside_s, across_s))

    def _time_s(self, num_bytes: int, link: Link) -> float:
        return link.time_s(num_bytes / self.link_fraction) if num_bytes else 0.0

    def _update_ms(self, bucket: Bucket) -> float:
        borders = bucket.shard_borders
        most = max(stop - start for start, stop in itertools.pairwise(borders))
        num_bytes = most * (_UPDATE_FP32_PASSES * _FP32_BYTES + self.parameter_bytes)
        return _MS_PER_S * num_bytes / self.memory_bytes_per_s
