"""Costs of a job: a cost profile, completed from the model and the devices.

These give the overhead of strategies that were not measured (regrouping.py), memory, and the costs
of widths of context parallelism that were not measured. A profile has rows for some widths of a
scheme ⟨tp, pp, layers⟩. The costs of any other width cp follow from the nearest measured one, m,
with coefficients a_m, b_m, c_m and limit M_m. It is **assumed** that ranks share work and memory
evenly, as zigzag chunks allow (arXiv 2412.01523 assumes the same), and that they exchange as the
runtime would (context.py), before attention:

    a = a_m · m/cp
    b = (b_m - x(m)) · m/cp + x(cp)
    c = c_m                                     launches do not become fewer
    max_tokens = M_m · min(cp/m, P(cp)/P(m))    padding of the sequences included

Every measured form changes in this way. Where a ring overlaps with attention, or cp ranks share
weights, the forms are the analytic model's, a, b and c times what was measured over what it says of
the row. With shared weights or recomputation that no row has, the limit is P. x is the analytic
exchange per token in the longest stage, P the limit of the memory model: parameters are not split
by cp. Without model and device x is 0, and limits grow as cp.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.hydraulis.assumed import Corner
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import (
    DEVICE_NAMES,
    DeviceConstants,
    Precision,
    described_device,
    device_constants,
)
from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.cost_model.model_arguments import (
    add_model_arguments,
    given_settings,
    given_shape,
    job_precision,
)
from megatron.hydraulis.cost_model.pipeline import StageCosts
from megatron.hydraulis.cost_model.profile import (
    ProfileCostModel,
    ProfiledModel,
    ProfiledScheme,
    frozen_settings,
)
from megatron.hydraulis.cost_model.regrouping import Hiding, wire_bytes
from megatron.hydraulis.cost_model.trained_model import EXPERT_LOAD
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.frozen import NOTHING_FROZEN
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.strategy.strategy import RANKS_PER_NODE, ranks_of_node

_MS_PER_S = 1e3
_BYTES_PER_GB = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """What users say about a job besides its cost profile; model and device default to its."""

    shape: ModelShape | None = None
    device: DeviceConstants | None = None
    link_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Bandwidths instead of the device's, by field of `Cluster`."""
    grad_reduce_in_bf16: bool = False
    overlaps: bool = True
    """False for --no-regroup-overlap."""
    precision: Callable[[str | None], Precision] = lambda text: Precision.of(text or "bf16")
    """The precision of training, by that of the profile, None if it names none."""
    layers: Callable[[ModelShape], Mapping[str, Any]] = lambda _: {}
    """Fields of `AnalyticCostModel` about the layers of the model."""

    def costs(
        self,
        profile: ProfileCostModel,
        *,
        num_ranks: int,
        ranks_per_node: int,
        strategies: Iterable[Strategy] = (),
        tp_degrees: Iterable[int] | None = None,
        path: str | Path | None = None,
    ) -> JobCosts:
        """Costs of a job; `strategies` and `tp_degrees` as for `JobCosts.of`, path of the profile.

        Raises ConfigurationError for options that do not go together, and for another model, or
        fewer ranks, than the profile's.
        """
        shape, device = self.shape, self.device or described_device(profile.device)
        if shape is None and profile.model is not None:
            shape = profile.model.shape
        where = profile.source if path is None else path
        profile.check_num_ranks(num_ranks, ranks_per_node, where)
        precision, layers = Precision.BF16, dict[str, Any]()
        if shape is not None:
            precision = self.precision(None if profile.model is None else profile.model.dtype)
            layers = dict(self.layers(shape))
            used = ProfiledModel(
                shape=shape,
                dtype=precision,
                **frozen_settings(layers.get("frozen", NOTHING_FROZEN)),
            )
            profile.check_model(used, where, speaks=True)
        if device is None and self.link_bytes_per_s:
            raise ConfigurationError(
                "--intra-node-gb-per-s and --inter-node-gb-per-s change a device's links but "
                "--device is not given; give --device and the model"
            )
        if self.device is not None and shape is None:
            raise ConfigurationError(
                f"device {self.device.name} gives the speed of regrouping, but its bytes depend on "
                f"the model, which is not described; give the model"
            )
        if device is None or shape is None:
            return JobCosts(profile=profile)
        cluster = device.cluster(num_ranks, ranks_per_node)
        links = {
            name: replace(getattr(cluster, name), bytes_per_s=bytes_per_s, source="given")
            for name, bytes_per_s in self.link_bytes_per_s.items()
        }
        model = AnalyticCostModel(
            shape=shape,
            device=device,
            cluster=replace(cluster, **links),
            precision=precision,
            expert_load=profile.expert_load or EXPERT_LOAD,
            gradient_bytes=wire_bytes(precision, reduces_in_bf16=self.grad_reduce_in_bf16),
            **{"cp_comm_type": "auto"} | layers,
        )
        return JobCosts.of(
            profile, model, strategies, tp_degrees=tp_degrees, overlaps=self.overlaps
        )

    def costs_of_pool(
        self,
        profile: ProfileCostModel,
        pool: Pool,
        *,
        tp_degrees: Iterable[int] | None = None,
        path: str | Path | None = None,
    ) -> JobCosts:
        """`costs` of a pool's job, with rows for all its schemes, see `JobCosts.with_rows`.

        Raises StrategyError, too, if its strategies cannot cut the model, and for a scheme without
        a row from which another width of cp follows.
        """
        found = self.costs(
            profile,
            num_ranks=pool.num_ranks,
            ranks_per_node=pool.ranks_per_node,
            strategies=pool.strategies,
            tp_degrees=tp_degrees,
            path=path,
        )
        if found.model is not None:
            pool.check_model(found.model.shape)
        return found.with_rows(pool.groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobCosts:
    """CostModel of a job, for all widths of context parallelism.

    A splitting scheme, cp8~, counts at its full width.
    """

    profile: ProfileCostModel
    """The profile, with computed overheads if there is a model."""
    model: AnalyticCostModel | None = None
    """The model on the job's devices; None if one of them is unknown."""
    _rows: dict[Scheme, ProfiledScheme] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        profile: ProfileCostModel,
        model: AnalyticCostModel | None,
        strategies: Iterable[Strategy] = (),
        *,
        tp_degrees: Iterable[int] | None = None,
        overlaps: bool = True,
    ) -> JobCosts:
        """Costs from a profile to which computed overheads are added.

        Args:
            profile: measured or estimated.
            model: see the field.
            strategies: see `ProfileCostModel.with_regrouping`.
            tp_degrees: of all schemes in use; by default those of the profile with room in the job.
            overlaps: false for --no-regroup-overlap.
        """
        if model is None:
            return cls(profile=profile)
        if tp_degrees is None:
            num_ranks = model.cluster.num_ranks
            rows = (row.scheme for row in profile.schemes)
            tp_degrees = (scheme.tp for scheme in rows if scheme.num_ranks <= num_ranks)
        strategies = tuple(strategies)
        regroup = model.regroup_costs(tp_degrees, overlaps=overlaps).for_pool(strategies)
        return cls(profile=profile.with_regrouping(regroup, strategies), model=model)

    @property
    def knows_exchange(self) -> bool:
        """Whether the overhead of cp is known: measured, or from model and links."""
        return self.model is not None or any(row.scheme.cp > 1 for row in self.profile.schemes)

    def with_rows(self, schemes: Iterable[Scheme]) -> JobCosts:
        """These costs with assumed rows for schemes that the profile lacks.

        So all planning commands treat a width of cp that was not measured; training needs the row
        in its profile. Without a model it is unchanged: the exchange would be free.
        """
        if self.model is None:
            return self
        known = {row.scheme for row in self.profile.schemes}
        assumed = [self._row(scheme) for scheme in dict.fromkeys(schemes) if scheme not in known]
        profile = replace(self.profile, schemes=(*self.profile.schemes, *assumed))
        return replace(self, profile=profile)

    def with_widths(self) -> JobCosts:
        """These costs with rows for all cp that are powers of two and have room in the job.

        Narrower ones than a measured row only with ep: its groups of fewer ranks run in ``~`` alone
        and may not have been measured. Without a model it is unchanged: the exchange would be free.
        """
        if self.model is None:
            return self
        num_ranks = self.model.cluster.num_ranks
        widths = (
            row.scheme.of_context_group(1 << power)
            for row in self.profile.schemes
            if row.max_tokens and (row.scheme.cp == 1 or row.scheme.ep > 1)
            if not row.scheme.shares_weights
            for power in range((num_ranks // row.scheme.of_context_group(1).num_ranks).bit_length())
        )
        return self.with_rows(
            scheme
            for scheme in widths
            if scheme.as_replica.num_ranks <= num_ranks and self.max_tokens(scheme)
        )

    def by(self, model: AnalyticCostModel) -> JobCosts:
        """These costs for another model of the same job, such as one with other recomputation.

        Rows that were measured change by as much as the model's do; the others follow from them.
        """
        assert self.model is not None
        rows = []
        for row in self.profile.schemes:
            if not row.is_assumed:
                limit = model.max_tokens(row.scheme)
                if before := self.model.max_tokens(row.scheme):
                    limit = row.max_tokens * limit // before
                times = self._times_by(model, row)
                rows.append(replace(row, coefficients=times, max_tokens=limit))
        profile = replace(self.profile, schemes=tuple(rows))
        return replace(self, profile=profile, model=model).with_widths()

    def at_corner(self, corner: Corner) -> JobCosts:
        """These costs with assumed constants in a corner: rows that were measured remain."""
        if self.model is None:
            return self
        model = self.model.at_corner(corner)
        rows = [row for row in self.profile.schemes if not row.is_assumed]
        if self.profile.is_estimated:  # memory is not assumed
            rows = [replace(row, coefficients=self._times_by(model, row)) for row in rows]
        profile = replace(self.profile, schemes=tuple(rows))
        if (known := profile.regroup) is not None:
            overlaps = known.hiding is not Hiding.NOTHING
            regroup = model.regroup_costs((known.num_atoms,), overlaps=overlaps)
            is_one = corner is Corner.LOW or known.hiding is Hiding.ONE_QUEUE
            if is_one and regroup.hiding is Hiding.MANY_QUEUES:
                regroup = regroup.with_hiding(Hiding.ONE_QUEUE)  # streams share one
            profile = profile.with_regrouping(regroup)
        return replace(self, profile=profile, model=model).with_widths()

    def _times_by(self, model: AnalyticCostModel, row: ProfiledScheme) -> Coefficients:
        """The times of a row, which change by as much as those of the model do."""
        assert self.model is not None
        before, after = self.model.coefficients(row.scheme), model.coefficients(row.scheme)
        return _as_measured(after, before, row.coefficients)

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """Measured or assumed; StrategyError if the profile has no width of the scheme."""
        return self._row(scheme).coefficients

    def max_tokens(self, scheme: Scheme) -> int:
        """Measured or assumed; StrategyError if the profile has no width of the scheme."""
        return self._row(scheme).max_tokens

    def overhead_ms(self, strategy: Strategy) -> float:
        """The profile's, computed with the assumed times of widths that it lacks."""
        return self.profile.overhead_ms(strategy, self)

    def _row(self, scheme: Scheme) -> ProfiledScheme:
        """The row of the scheme's full width."""
        scheme = scheme.of_context_group(scheme.cp)
        if scheme not in self._rows:
            nearest = self._nearest(scheme)
            self._rows[scheme] = (
                nearest if nearest.scheme == scheme else self._assumed(scheme, nearest)
            )
        return self._rows[scheme]

    def _assumed(self, scheme: Scheme, row: ProfiledScheme) -> ProfiledScheme:
        """A row by the formulas of the module, from a measured one."""
        times, per_width = row.coefficients, row.scheme.cp / scheme.cp
        of_row_ms = self._exchange_ms_per_token(row.scheme)
        exchange_ms = self._exchange_ms_per_token(scheme)

        def of_width(form: Coefficients) -> Coefficients:
            shared_ms = max(0.0, form.b_ms_per_token - of_row_ms)
            return replace(
                form,
                a_ms_per_token2=form.a_ms_per_token2 * per_width,
                b_ms_per_token=shared_ms * per_width + exchange_ms,
                others=tuple(map(of_width, form.others)),
            )

        coefficients = of_width(times)
        has_others = row.scheme.apart_from_cp != scheme.apart_from_cp
        by_model = scheme.shares_weights or has_others
        if self.model is not None and (self.model.has_te_attention or by_model):
            wanted, model_row = self.model.coefficients(scheme), self.model.coefficients(row.scheme)
            if wanted.others or model_row.others or by_model:
                coefficients = _as_measured(wanted, model_row, times)
        limit = row.max_tokens * scheme.cp // row.scheme.cp
        # A limit of 0 of a measured row: the memory model is too strict here.
        if self.model is not None and has_others:
            limit = self.model.max_tokens(scheme)
        elif self.model is not None and (of_row := self.model.max_tokens(row.scheme)):
            limit = min(limit, row.max_tokens * self.model.max_tokens(scheme) // of_row)
        return ProfiledScheme(
            scheme=scheme,
            coefficients=coefficients,
            max_tokens=limit,
            is_assumed=True,
        )

    def _nearest(self, scheme: Scheme) -> ProfiledScheme:
        """The measured width fewest doublings away; the narrower of two equally near ones. Shared
        weights and recomputation also follow from rows without, but not the reverse."""
        known_from = [scheme]
        if self.model is not None:
            known_from.append(replace(scheme, fs=1, recomputes=False))
        of_columns = {each.apart_from_cp for each in known_from}
        rows = [
            row
            for row in self.profile.schemes
            if row.scheme.apart_from_cp in of_columns
            and (row.scheme.fs == scheme.fs or self.model is not None)
        ]
        if not rows:
            schemes = [row.scheme for row in self.profile.schemes]
            known = ", ".join(str(each) for each in schemes if each.as_replica == each)
            is_missing = " (an estimate has only those that fit)" * self.profile.is_estimated
            raise StrategyError(
                f"scheme {scheme}: a scheme without a row is estimated from one of the same tp, "
                f"ep, pp and layers, with the same fs and r or neither, but the cost profile of "
                f"{self.profile.device} has {known}{is_missing}; measure "
                f"{scheme.of_context_group(1).as_replica}, or take strategies of these schemes"
            )

        def order(row: ProfiledScheme) -> tuple[bool, bool, float, int]:
            of_row = row.scheme
            has_others = of_row.apart_from_cp != scheme.apart_from_cp
            doublings = abs(math.log2(of_row.cp / scheme.cp))
            return has_others, of_row.fs != scheme.fs, doublings, of_row.cp

        return min(rows, key=order)

    def _exchange_ms_per_token(self, scheme: Scheme) -> float:
        """Time of the exchange in the longest stage; widths that a2a refuses are estimated too."""
        if self.model is None:
            return 0.0
        way = self.model.cp_comm_type
        model = replace(self.model, cp_comm_type="auto" if way == "a2a" else way)
        stages = model.terms_by_stage(scheme)
        return _MS_PER_S * max(terms["context_parallel"].per_token_s for terms in stages)


def _as_measured(
    wanted: Coefficients, of_row: Coefficients, measured: Coefficients
) -> Coefficients:
    """Analytic coefficients as far off as those of a row are from measured ones.

    Where the model has one form only, the measured forms are kept and change by as much as it does.
    """

    def ratio(name: str, over: Coefficients, under: Coefficients) -> float:
        more, less = (max(getattr(form, name) for form in each.forms) for each in (over, under))
        return more / less if less else 1.0

    keeps_forms = bool(measured.others) and not (wanted.others or of_row.others)
    changed, over = (measured, wanted) if keeps_forms else (wanted, measured)
    a, b, c = (ratio(name, over, of_row) for name in ("a_ms_per_token2", "b_ms_per_token", "c_ms"))
    # A profile without the host's time has it in c, if at all.
    host_ms = measured.host_ms
    if of_row.host_ms:
        host_ms *= wanted.host_ms / of_row.host_ms
    return replace(changed.scaled(a=a, b=b, c=c), host_ms=host_ms)


def add_job_arguments(
    parser: argparse._ActionsContainer, note: str = "", *, required: bool = True
) -> None:
    """Declare the flags that job_ranks reads, with a note on when they are needed."""
    parser.add_argument(
        "--num-ranks", type=int, required=required, metavar="N", help=f"ranks of the job{note}"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help=f"ranks of a node{note} (default: {RANKS_PER_NODE}, or all of a smaller job)",
    )


def job_ranks(namespace: argparse.Namespace) -> tuple[int, int]:
    """Ranks of the job and of a node; StrategyError as `ranks_of_node`."""
    num_ranks, what = namespace.num_ranks, "--num-ranks, --ranks-per-node"
    return num_ranks, ranks_of_node(num_ranks, namespace.ranks_per_node, what)


def add_device_argument(
    parser: argparse._ActionsContainer, note: str = "", *, required: bool = True
) -> None:
    """Declare --device, with a note on what it is used for."""
    parser.add_argument(
        "--device", required=required, metavar="NAME", help=f"one of {DEVICE_NAMES}{note}"
    )


def add_regroup_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that job_options reads."""
    add_model_arguments(parser)
    links = parser.add_argument_group(
        "regrouping",
        "Regrouping and update of strategies that the profile did not measure are computed from "
        "bytes and links if device and model are known",
    )
    add_device_argument(
        links,
        "; gives links and memory bandwidth (default: the profile's, if it is one of these)",
        required=False,
    )
    for link, where in (("intra", "inside its node"), ("inter", "across nodes")):
        links.add_argument(
            f"--{link}-node-gb-per-s",
            type=float,
            metavar="X",
            help=f"bandwidth of a rank {where}, one direction, in GB/s (default: the device's)",
        )
    links.add_argument(
        "--no-regroup-overlap",
        action="store_true",
        help="regroup before and after compute instead of during it",
    )


def job_options(namespace: argparse.Namespace) -> JobOptions:
    """What the flags of `add_regroup_arguments` say; raises as `shape_of`, and for an unknown
    device."""
    return JobOptions(
        shape=given_shape(namespace),
        device=None if namespace.device is None else device_constants(namespace.device),
        link_bytes_per_s={
            name: gb_per_s * _BYTES_PER_GB
            for name in ("intra_node", "inter_node")
            if (gb_per_s := getattr(namespace, f"{name}_gb_per_s")) is not None
        },
        grad_reduce_in_bf16=namespace.grad_reduce_in_bf16,
        overlaps=not namespace.no_regroup_overlap,
        precision=partial(job_precision, namespace),
        layers=partial(given_settings, namespace),
    )


def print_bf16_advice(
    profile: ProfileCostModel, shares: Mapping[Strategy, float], iteration_s: float
) -> None:
    """Print what --grad-reduce-in-bf16 would save, if that is worth it; see `bf16_advice`."""
    if profile.regroup is not None:
        times = StageCosts(profile, profile.regroup.shape).usual_times_ms
        advice = profile.regroup.bf16_advice(shares, times, 1e3 * iteration_s)
        if advice is not None:
            print(advice)


def warn_of_assumed_rows(profile: ProfileCostModel, pool: Pool) -> None:
    """Say on stderr which schemes of a pool were not measured."""
    if assumed := profile.assumed_schemes(pool):
        print(
            f"warning: not measured: {', '.join(map(str, assumed))}; assumed from rows of other "
            "schemes, measure them with hydraulis profile",
            file=sys.stderr,
            flush=True,
        )


def warn_of_unknown_overheads(
    profile: ProfileCostModel, strategies: Iterable[Strategy] | None = None
) -> None:
    """Say on stderr that strategies have no overhead; without strategies if none is computed."""
    if profile.regroup is not None:
        return
    if strategies is not None and all(
        profile.measured_overhead_ms(strategy) is not None for strategy in strategies
    ):
        return
    print(
        "warning: regrouping and optimizer count 0 where the cost profile has no time of a "
        "strategy, because the model or its device is unknown; give --model and --device",
        file=sys.stderr,
        flush=True,
    )
