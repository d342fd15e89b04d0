"""A cost model from measured times: the cost profile.

A cost profile is a JSON file::

    {"version": 2, "device": "A800-80GB", "source": "who measured, and with what",
     "date": "2024-12-11",
     "model": {"num_layers": 60, "hidden_size": 6656, …, "dtype": "bf16"},
     "schemes": [{"tp": 4, "cp": 1, "pp": 2, "a_ms_per_token2": 2.0e-06, "b_ms_per_token": 0.12,
                  "c_ms": 65.4, "max_tokens": 12416}],
     "strategies": [{"name": "S6", "replicas": "16*tp4", "regroup_ms": 30.0,
                     "optimizer_ms": 12.0}]}

The time of a micro-batch on one stage, forward and backward, is ``a·Σs² + b·Σs + c``, less what
the sliding windows of ``model`` leave out of s²; max_tokens is the most tokens of a micro-batch.
``forward_share`` of a scheme is the forward's share in the time, a third where it is missing.
A scheme whose layers are not split evenly has its own row, with ``"layers": [14, 16]``; a row of
a cp that was not measured has ``"assumed": true``. Further forms of the time, of which the largest
counts, are ``"forms": [{"a_ms_per_token2": …, "b_ms_per_token": …, "c_ms": …}]``; ``host_ms`` is
the host's time of a micro-batch (`Coefficients`). Version 1 has neither. ``version``
and ``strategies`` are optional. A strategy is found by its replicas and where they are placed;
older profiles lack ``replicas``, and their names count. ``gradient_bytes``, 4 if absent, is the
size in which gradients travelled when strategies were measured. What is not listed is computed
(regrouping.py), or 0 where model and links are unknown.
``num_ranks``, optional, is the size of the job that limits are of: they hold on no fewer ranks.
``expert_load``, optional, is the load of the busiest expert, for widths that were not measured.
``model`` says what the times are of (`ProfiledModel`); older profiles lack it.
``measurement``, an optional object that no prediction uses, records how well the
coefficients fit, the versions of the software, and the speed of regrouping: see docs/profiling.md.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron.hydraulis.cost_model.device import described_device
from megatron.hydraulis.cost_model.interface import (
    FORWARD_SHARE,
    MOST_MS,
    Coefficients,
    CostModel,
)
from megatron.hydraulis.cost_model.pipeline import StageCosts
from megatron.hydraulis.cost_model.regrouping import BF16_BYTES, FP32_BYTES, Hiding, RegroupCosts
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.frozen import Frozen
from megatron.hydraulis.json_object import JsonObject, read_json
from megatron.hydraulis.model_shape import AttentionWindow, ModelShape
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

_FORMAT_VERSION = 2
_FORM_KEYS = ("a_ms_per_token2", "b_ms_per_token", "c_ms")
ESTIMATED = "estimated for "
"""The source of a profile that the analytic model made begins with this."""
_MIN_R_SQUARED = 0.9
_MAX_RESIDUAL = 0.2
"""Residual of a point up to which a fit is good whatever its R²: times that hardly differ have a
low R² although they are predicted well."""
_NO_ADAPTERS = "none"
_NOTHING = "nothing"
NOTHING_HIDDEN, BY_RULE, AS_MEASURED = "nothing hidden", "by the rule", "as measured"
"""How regrouping and optimizer count: all of their time; what the runtime does not hide by its own
rule; the times of the profile, and the rule scaled by them where it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledScheme:
    """Measurements of one scheme.

    Raises ConfigurationError for a negative limit and for a scheme with ``~``, whose row is that of
    the scheme without.
    """

    scheme: Scheme
    coefficients: Coefficients
    max_tokens: int
    """Most tokens of a micro-batch; 0 if not even the weights fit."""
    is_assumed: bool = False
    """Whether the row was not measured but follows from another width of cp, see job_costs.py."""

    def __post_init__(self) -> None:
        if self.max_tokens < 0:
            raise ConfigurationError(
                f"cost profile: max_tokens must not be negative but is {self.max_tokens} for "
                f"{self.scheme}; give 0 where the model does not fit"
            )
        if self.scheme.splits_cp:
            raise ConfigurationError(
                f"cost profile: a scheme is measured at its full width but a row is for "
                f"{self.scheme}; leave out the '~'"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledStrategy:
    """Overhead of a strategy in every iteration.

    Raises ConfigurationError for a negative or infinite time.
    """

    name: str
    replicas: str | None = None
    """The notation of the strategy; None in older profiles."""
    regroup_ms: float = 0.0
    """Time of gather and scatter that does not overlap with the replicas' work."""
    optimizer_ms: float = 0.0
    """Update of the canonical shards."""

    @property
    def overhead_ms(self) -> float:
        """What they add to the makespan."""
        return self.regroup_ms + self.optimizer_ms

    def is_of(self, strategy: Strategy) -> bool:
        """Whether the row is of these replicas on these ranks; without replicas, of this name."""
        placed = self.placed(strategy.num_ranks, strategy.ranks_per_node)
        if placed is None:
            return self.replicas is None and self.name == strategy.name
        return placed.replicas == strategy.replicas

    def placed(self, num_ranks: int, ranks_per_node: int) -> Strategy | None:
        """The strategy, whose default name is its notation; None if that is unknown or is not for
        this job."""
        text = self.name if self.replicas is None else self.replicas
        try:
            return Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node)
        except StrategyError:
            return None

    def __post_init__(self) -> None:
        for value in (self.regroup_ms, self.optimizer_ms):
            if not 0.0 <= value < MOST_MS:
                raise ConfigurationError(
                    f"cost profile: times of strategy {self.name!r} must be finite and not "
                    f"negative but are regroup_ms {self.regroup_ms} and optimizer_ms "
                    f"{self.optimizer_ms}; correct them"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledModel:
    """The model that a profile was made for, or is used for; an unknown setting is None."""

    shape: ModelShape
    dtype: str | None = None
    """``bf16`` or ``fp32``."""
    recompute: str | None = None
    """The text of a `Recompute`."""
    core_attention: str | None = None
    """``te``, ``torch`` or ``sdpa``."""
    experts: str | None = None
    """``grouped`` if a model's experts are one product, else ``single``."""
    lora: str = _NO_ADAPTERS
    """The text of a `Lora` if only adapters are trained. Without, a frozen matrix has two products
    more, so times of one are not those of the other."""
    frozen: str | None = None
    """The text of a `Frozen` if the rows depend on it; without, they hold whatever is frozen."""

    def to_json(self) -> dict[str, Any]:
        """The sizes and the known settings; from_json is its inverse."""
        return {
            name: value
            for name, value in self.values.items()
            if (value or name not in _LATER)
            and (name, value) not in (("lora", _NO_ADAPTERS), ("frozen", _NOTHING))
        }

    @property
    def values(self) -> dict[str, Any]:
        """Sizes and known settings by name."""
        settings = {name: getattr(self, name) for name in _SETTINGS}
        sizes = asdict(self.shape)
        if not self.shape.num_first_mlp_layers:
            del sizes["num_first_mlp_layers"]  # 0 in earlier files of models that have some
        return sizes | {name: text for name, text in settings.items() if text}

    @classmethod
    def from_json(cls, model: JsonObject) -> "ProfiledModel":
        """Raises the object's error for a missing or unknown key and for an invalid value."""
        settings = {name: model.text(name) for name in _SETTINGS if model.has(name)}
        profiled = cls(shape=ModelShape.from_json(model), **settings)
        model.check_all_read()
        return profiled


def proposed_profile_path(pool: str | Path) -> str:
    """The profile with assumed rows that ``hydraulis propose`` writes next to a pool file."""
    return f"{pool}.cost_profile.json"


def experts_setting(shape: ModelShape, *, groups_experts: bool) -> str | None:
    """The value of `ProfiledModel.experts`."""
    if not shape.num_experts:
        return None
    return "grouped" if groups_experts else "single"


def frozen_settings(frozen: Frozen, *, is_estimate: bool = False) -> dict[str, Any]:
    """`ProfiledModel.lora` and `ProfiledModel.frozen`, of an estimate or of a model that is to be
    trained."""
    if frozen.lora is not None:
        return {"lora": str(frozen.lora)}
    return {"frozen": str(frozen) or (None if is_estimate else _NOTHING)}


_LATER = tuple(each.name for each in fields(ModelShape) if each.default is not MISSING)
"""Sizes that earlier profiles do not have; they are written where they are not 0."""
_SETTINGS = tuple(each.name for each in fields(ProfiledModel) if each.name != "shape")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileCostModel:
    """CostModel from a cost profile.

    Raises ConfigurationError if there is no scheme, a scheme or strategy is listed twice, or
    gradients have a size that they never have.
    """

    device: str
    source: str
    """Who measured, and with what."""
    date: str
    schemes: tuple[ProfiledScheme, ...]
    strategies: tuple[ProfiledStrategy, ...] = ()
    gradient_bytes: int = FP32_BYTES
    """Size of a gradient on the wire when strategies were measured."""
    model: ProfiledModel | None = None
    """None in profiles that do not say."""
    num_ranks: int | None = None
    """Ranks of the job that the limits are of; None if unknown."""
    expert_load: float | None = None
    """Tokens of a layer's busiest expert over the mean of its experts when strategies were
    measured; None if unknown."""
    measurement: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """How it was measured, as JSON values; no prediction depends on it."""
    regroup: RegroupCosts | None = None
    """Costs of strategies that were not measured, see `with_regrouping`; not part of the file."""

    def __post_init__(self) -> None:
        if not self.schemes:
            raise ConfigurationError(
                "cost profile: needs at least 1 scheme but has 0; measure the schemes of the pool"
            )
        if self.gradient_bytes not in (BF16_BYTES, FP32_BYTES):
            raise ConfigurationError(
                f"cost profile: gradients travel in {BF16_BYTES} bytes each or in {FP32_BYTES} but "
                f"gradient_bytes is {self.gradient_bytes}; correct it"
            )
        if self.num_ranks is not None and self.num_ranks < 1:
            raise ConfigurationError(
                f"cost profile: it is for a job of at least 1 rank but num_ranks is "
                f"{self.num_ranks}; correct it"
            )
        _check_distinct("scheme", [str(row.scheme) for row in self.schemes])
        _check_distinct("strategy", [row.name for row in self.strategies])

    @property
    def is_estimated(self) -> bool:
        """Whether the analytic model made the rows."""
        return self.source.startswith(ESTIMATED)

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """The time of a micro-batch on the slowest stage; StrategyError for an unknown scheme."""
        return self._row(scheme).coefficients

    def max_tokens(self, scheme: Scheme) -> int:
        """Most tokens of a micro-batch; StrategyError for a scheme that was not measured."""
        return self._row(scheme).max_tokens

    def overhead_ms(self, strategy: Strategy, times: CostModel | None = None) -> float:
        """The measured time, else the computed one if `regroup` is known, else 0.0.

        times: of schemes that the profile lacks; by default its own.

        Raises ConfigurationError or StrategyError for a strategy of another job or model than that
        of `regroup`.
        """
        measured_ms = self.measured_overhead_ms(strategy)
        if measured_ms is not None:
            return measured_ms
        if self.regroup is None:
            return 0.0
        return self.regroup.exposed_ms(
            strategy, StageCosts(times or self, self.regroup.shape).usual_times_ms
        )

    def readings(self) -> "dict[str, ProfileCostModel]":
        """How regrouping and optimizer can count, the last one where one figure is given.

        `AS_MEASURED` is missing if nothing was measured; empty without `regroup`.
        """
        if self.regroup is None:
            return {}
        by_rule = self.regroup
        if by_rule.factor != 1.0:
            by_rule = replace(by_rule, factor=1.0)
        hidden = {NOTHING_HIDDEN: by_rule.with_hiding(Hiding.NOTHING), BY_RULE: by_rule}
        models = {
            name: replace(self, strategies=(), regroup=costs) for name, costs in hidden.items()
        }
        is_measured = self.strategies or self.regroup.factor != 1.0
        return models | ({AS_MEASURED: self} if is_measured else {})

    def measured_overhead_ms(self, strategy: Strategy) -> float | None:
        """Regrouping and optimizer of the same replicas on the same ranks; None if not measured."""
        for row in self.strategies:
            if row.is_of(strategy):
                return row.overhead_ms
        return None

    def with_regrouping(
        self, regroup: RegroupCosts, strategies: Iterable[Strategy] = ()
    ) -> "ProfileCostModel":
        """The profile with computed overheads of strategies that it lacks.

        They are scaled by measured over computed times of all rows of this job whose schemes were
        measured too. Rows without replicas are found by the names of the given strategies. If
        gradients had another size on the wire, rows count for nothing else.
        """
        measured = {
            placed.replicas: (placed, row.overhead_ms)
            for row in self.strategies
            if (placed := row.placed(regroup.cluster.num_ranks, regroup.cluster.ranks_per_node))
        }
        for strategy in strategies:
            measured_ms = self.measured_overhead_ms(strategy)
            if measured_ms is not None:
                measured[strategy.replicas] = (strategy, measured_ms)
        known = [
            (strategy, time_ms)
            for strategy, time_ms in measured.values()
            if all(map(self.find, strategy.schemes))
        ]
        as_measured = replace(regroup, gradient_bytes=self.gradient_bytes)
        calibrated = as_measured.calibrated(known, StageCosts(self, regroup.shape).usual_times_ms)
        if as_measured == regroup:
            return replace(self, regroup=calibrated)
        here = replace(calibrated, gradient_bytes=regroup.gradient_bytes)
        return replace(self, strategies=(), gradient_bytes=regroup.gradient_bytes, regroup=here)

    @property
    def splitting_schemes(self) -> tuple[Scheme, ...]:
        """Schemes with ``~`` of which every group has a row, by cp."""
        known = {row.scheme for row in self.schemes}
        split = (
            replace(scheme, splits_cp=True)
            for scheme in known
            if scheme.cp > 1 and scheme.cp & (scheme.cp - 1) == 0 and scheme == scheme.as_replica
        )
        found = (scheme for scheme in split if known.issuperset(scheme.group_schemes))
        return tuple(sorted(found, key=lambda scheme: (scheme.cp, str(scheme))))

    def assumed_schemes(self, pool: Pool) -> tuple[Scheme, ...]:
        """The schemes of a pool, and of its context groups, whose rows were not measured."""
        used = pool.groups
        return tuple(row.scheme for row in self.schemes if row.is_assumed and row.scheme in used)

    def only_for(self, pool: Pool) -> "ProfileCostModel":
        """The profile without assumed rows that a pool does not need."""
        needed = self.assumed_schemes(pool)
        rows = (row for row in self.schemes if not row.is_assumed or row.scheme in needed)
        return replace(self, schemes=tuple(rows))

    def poor_fits(self) -> str | None:
        """A line about schemes whose coefficients describe the measured times badly; None if all
        fit, or if the profile does not say."""
        poor = [
            f"{row.scheme} {fit['r_squared']:.2f}"
            for row in self.schemes
            if (fit := self.measurement.get("schemes", {}).get(str(row.scheme), {}))
            and fit.get("r_squared", 1.0) < _MIN_R_SQUARED
            and fit.get("worst_residual", 1.0) > _MAX_RESIDUAL
        ]
        if not poor:
            return None
        return (
            f"a good fit has an R² of at least {_MIN_R_SQUARED} but in the cost profile it is "
            f"{', '.join(poor)}: plans may be far from the best; profile again with --restart on a "
            f"machine without other work, with more --num-repeats"
        )

    def balanced_scheme(
        self, scheme: Scheme, *, num_layers: int, min_tokens: int, limit: int | None = None
    ) -> Scheme:
        """The scheme with the fastest layers of those measured for its degrees.

        Only rows for num_layers layers count, and of these the ones that hold min_tokens, or the
        most tokens if none does. The fastest has the least ``b·T + c``, T the tokens that all of
        them hold: a micro-batch of many short sequences. The scheme is unchanged if no row fits or
        the even split is as fast.

        limit: of every row, if a user set one that replaces those of the profile.
        """
        unsplit = replace(scheme.of_context_group(scheme.cp), layers=None)
        rows = [
            row
            for row in self.schemes
            if replace(row.scheme, layers=None) == unsplit
            and sum(row.scheme.layers or (num_layers,)) == num_layers
        ]
        if not rows:
            return scheme
        if limit is None:
            needed = min(min_tokens, max(row.max_tokens for row in rows))
            rows = [row for row in rows if row.max_tokens >= needed]
            limit = min(row.max_tokens for row in rows)
        num_tokens = limit

        def order(row: ProfiledScheme) -> tuple[float, bool]:
            times = row.coefficients
            return times.time_of_sums_ms(0.0, num_tokens), row.scheme.layers is not None

        return replace(scheme, layers=min(rows, key=order).scheme.layers)

    def check_model(self, used: ProfiledModel, path: str | Path, *, speaks: bool) -> None:
        """Raise ConfigurationError if the profile was made for another model.

        Settings that either side does not know are not compared.

        Args:
            path: of the profile, for the message.
            speaks: whether this rank warns of a profile that does not name its model.
        """
        if self.model is None:
            if speaks:
                print(
                    f"warning: cost profile {path} does not name the model that it was made for, "
                    "so that is not checked; measure or estimate it again to record the model",
                    file=sys.stderr,
                    flush=True,
                )
            return
        made_for, needed = self.model.values, used.values
        different = [
            f"{name} {made_for[name]} instead of {needed[name]}"
            for name in made_for
            if name in needed and made_for[name] != needed[name]
        ]
        if different:
            is_of_experts = any(each.startswith("experts ") for each in different)
            elsewhere = "; a dry run without its GPUs needs --device" if is_of_experts else ""
            raise ConfigurationError(
                f"cost profile {path}: its times and limits are for one model but it was made for "
                f"another one, with {', '.join(different)}; measure or estimate a profile of this "
                f"model (hydraulis profile, hydraulis estimate){elsewhere}"
            )

    def check_num_ranks(
        self, num_ranks: int, ranks_per_node: int, path: str | Path, *, only_warns: bool = False
    ) -> None:
        """Raise ConfigurationError if limits are of a job of more ranks than this one.

        Args:
            num_ranks: of this job.
            ranks_per_node: of this job.
            path: of the profile, for the message.
            only_warns: as an elastic job must start on the ranks that are left.
        """
        if self.num_ranks is None or self.num_ranks <= num_ranks:
            return
        device = described_device(self.device)
        text = (
            f"cost profile {path}: its limits hold on as many ranks or more, because fewer ranks "
            f"hold larger shards of the optimizer's state, but it was made for {self.num_ranks} "
            f"ranks and this job has {num_ranks}; make one for this job (hydraulis estimate "
            f"--model FILE --device {'NAME' if device is None else device.name} "
            f"--num-ranks {num_ranks} --ranks-per-node {ranks_per_node}, or hydraulis profile on "
            "its ranks)"
        )
        if not only_warns:
            raise ConfigurationError(text)
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def find(self, scheme: Scheme) -> ProfiledScheme | None:
        """The row of a scheme; ``cp8~`` has that of ``cp8``."""
        full_width = scheme.of_context_group(scheme.cp)
        return next((row for row in self.schemes if row.scheme == full_width), None)

    def _row(self, scheme: Scheme) -> ProfiledScheme:
        if (row := self.find(scheme)) is not None:
            return row
        known = ", ".join(str(row.scheme) for row in self.schemes)
        raise StrategyError(
            f"scheme {scheme}: not in the cost profile of {self.device}, which has {known}; "
            f"measure it, take strategies of these schemes, or give model and device, or "
            f"{proposed_profile_path('POOL')} of hydraulis propose, for other widths of cp"
        )

    @classmethod
    def read(cls, path: str | Path) -> "ProfileCostModel":
        """Read a cost profile; ConfigurationError names the file and what is wrong."""
        content = read_json(path, "cost profile", ConfigurationError)
        return cls.from_json(content, what=f"cost profile {path}")

    @classmethod
    def from_json(cls, content: Mapping[str, Any], *, what: str) -> "ProfileCostModel":
        """Read the content of a cost profile, called what in errors.

        Raises ConfigurationError for a missing or unknown key and for an invalid value.
        """
        profile = JsonObject(content, what, ConfigurationError)
        profile.check_version(1, _FORMAT_VERSION)
        strategies = profile.array("strategies") if profile.has("strategies") else []
        made_for = None
        if profile.has("model"):
            model = profile.nested(profile.value("model"), f"model of {profile.what}")
            made_for = ProfiledModel.from_json(model)
        window = None if made_for is None else made_for.shape.window
        measurement = profile.value("measurement") if profile.has("measurement") else {}
        profile.nested(measurement, f"measurement of {what}")  # it must be an object
        read = cls(
            device=profile.text("device"),
            source=profile.text("source"),
            date=profile.text("date"),
            schemes=tuple(
                _scheme_row(profile.nested(entry, f"scheme {index} of {what}"), window)
                for index, entry in enumerate(profile.array("schemes"))
            ),
            strategies=tuple(
                _strategy_row(profile.nested(entry, f"strategy {index} of {what}"))
                for index, entry in enumerate(strategies)
            ),
            gradient_bytes=profile.integer("gradient_bytes", default=FP32_BYTES),
            model=made_for,
            num_ranks=profile.integer("num_ranks") if profile.has("num_ranks") else None,
            expert_load=profile.number("expert_load") if profile.has("expert_load") else None,
            measurement=measurement,
        )
        profile.check_all_read()
        return read

    def to_json(self) -> dict[str, Any]:
        """The content of a cost profile; from_json is its inverse."""
        strategies = [
            _known(
                name=row.name,
                replicas=row.replicas,
                regroup_ms=row.regroup_ms,
                optimizer_ms=row.optimizer_ms,
            )
            for row in self.strategies
        ]
        return _known(
            version=_FORMAT_VERSION,
            device=self.device,
            source=self.source,
            date=self.date,
            num_ranks=self.num_ranks,
            model=None if self.model is None else self.model.to_json(),
            schemes=[_scheme_to_json(row) for row in self.schemes],
            strategies=strategies or None,
            gradient_bytes=None if self.gradient_bytes == FP32_BYTES else self.gradient_bytes,
            expert_load=self.expert_load,
            measurement=dict(self.measurement) or None,
        )


def _known(**values: Any) -> dict[str, Any]:
    """The values that are known, by key."""
    return {key: value for key, value in values.items() if value is not None}


def _check_distinct(noun: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigurationError(
                f"cost profile: every {noun} is listed once but {name} {names.count(name)} "
                f"times; keep one of them"
            )


def _scheme_row(entry: JsonObject, window: AttentionWindow | None) -> ProfiledScheme:
    share = entry.number("forward_share", default=FORWARD_SHARE)
    forms = entry.array("forms") if entry.has("forms") else []
    if entry.has("forms") and not forms:
        raise entry.error("forms lists at least 1 form but has none; remove it or list them")
    others = []
    for index, form in enumerate(forms):
        content = entry.nested(form, f"form {index} of {entry.what}")
        others.append(_form(content, window, share))
        content.check_all_read()
    host_ms = entry.number("host_ms", default=0.0)
    row = ProfiledScheme(
        scheme=Scheme.from_json(entry),
        coefficients=_form(entry, window, share, others=tuple(others), host_ms=host_ms),
        max_tokens=entry.integer("max_tokens"),
        is_assumed=entry.flag("assumed", default=False),
    )
    entry.check_all_read()
    return row


def _form(
    entry: JsonObject, window: AttentionWindow | None, forward_share: float, **others: Any
) -> Coefficients:
    numbers: dict[str, Any] = {key: entry.number(key) for key in _FORM_KEYS}
    try:
        return Coefficients(**numbers, window=window, forward_share=forward_share, **others)
    except ConfigurationError as error:
        raise entry.error(str(error)) from None


def _scheme_to_json(row: ProfiledScheme) -> dict[str, Any]:
    times, share = row.coefficients, row.coefficients.forward_share
    first, *forms = ({name: getattr(form, name) for name in _FORM_KEYS} for form in times.forms)
    return row.scheme.to_json() | _known(
        assumed=row.is_assumed or None,
        **first,
        forms=forms or None,
        host_ms=times.host_ms or None,
        forward_share=None if share == FORWARD_SHARE else share,
        max_tokens=row.max_tokens,
    )


def _strategy_row(entry: JsonObject) -> ProfiledStrategy:
    row = ProfiledStrategy(
        name=entry.text("name"),
        replicas=entry.text("replicas") if entry.has("replicas") else None,
        regroup_ms=entry.number("regroup_ms", default=0.0),
        optimizer_ms=entry.number("optimizer_ms", default=0.0),
    )
    entry.check_all_read()
    return row
