"""Planning for Python programs: the functions of the commands, with Python objects as input.

They load neither torch nor Megatron, and matplotlib only to draw.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.checkpoint.hugging_face.config import CONFIG_NAME, read_model
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import Precision, device_constants
from megatron.hydraulis.cost_model.estimate_command import (
    estimated_profile,
    schemes_of_job,
)
from megatron.hydraulis.cost_model.job_costs import (
    JobOptions,
    warn_of_assumed_rows,
    warn_of_unknown_overheads,
)
from megatron.hydraulis.cost_model.model_arguments import VOCABULARY_MULTIPLE
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.cost_model.staging import PoolFootprint
from megatron.hydraulis.cost_model.trained_model import NO_RECOMPUTE, Recompute
from megatron.hydraulis.data.dataset import LongSequences
from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.errors import ConfigurationError, DataError, StrategyError
from megatron.hydraulis.frozen import Frozen
from megatron.hydraulis.lengths.counts import LengthCounts, read_length_counts
from megatron.hydraulis.lora import Lora
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.planner.planned import PlannedBatch, plan_batch
from megatron.hydraulis.planner.solver import native_prints_to_stderr
from megatron.hydraulis.proposal.propose import Proposal, ProposalRequest
from megatron.hydraulis.proposal.propose import propose as _propose
from megatron.hydraulis.proposal.verdict import judged
from megatron.hydraulis.simulator.comparison import Comparison, SimulationRequest, compare_ways
from megatron.hydraulis.simulator.ways import WAYS
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.strategy.notation import parse_scheme
from megatron.hydraulis.strategy.pool import num_ranks_of
from megatron.hydraulis.strategy.strategy import ranks_of_node

Lengths = Sequence[int] | npt.NDArray[np.integer[Any]]
"""Tokens of each sequence."""
PoolLike = Pool | Proposal | str | os.PathLike[str] | Iterable[str]
"""A pool, what `propose` returned, a path of a pool file, or strategies in notation."""
ProfileLike = ProfileCostModel | str | os.PathLike[str]
"""A cost profile, or the path of one."""
ModelLike = ModelShape | str | os.PathLike[str]
"""A model's sizes, the path of a model file, or a Hugging Face folder with ``config.json``."""


def estimate(
    model: ModelLike,
    device: str,
    schemes: Pool | Iterable[str | Scheme] | None = None,
    *,
    num_ranks: int | None = None,
    ranks_per_node: int | None = None,
    fp32: bool = False,
    recompute: Recompute = NO_RECOMPUTE,
    lora: Lora | None = None,
) -> ProfileCostModel:
    """A cost profile without measurements, as ``hydraulis estimate``.

    Args:
        model: whose times are needed.
        device: name, such as ``h100`` or ``a800-80g``.
        schemes: such as ``["tp4pp2", "tp2"]``, or those of a pool; None for all of powers of two
            that fit.
        num_ranks: of the job, which share the optimizer's state; a pool knows it.
        ranks_per_node: None for the default of the commands; a pool knows it.
        fp32: train in fp32 instead of bf16.
        recompute: activations that the backward computes again; as in training, the MLPs of a
            model with experts keep theirs.
        lora: adapters that are trained instead of the model.

    Raises ConfigurationError for an unknown device, a job without ranks, and if nothing fits;
    StrategyError for a scheme that cannot divide the model.
    """
    shape, constants = as_shape(model), device_constants(device)
    frozen, footprint, wanted = _frozen(lora, shape), None, None
    if isinstance(schemes, Pool):
        num_ranks, ranks_per_node = schemes.num_ranks, schemes.ranks_per_node
        footprint = PoolFootprint.of(schemes, shape, frozen=frozen)
        wanted = [scheme for strategy in schemes.strategies for scheme in strategy.schemes]
    elif num_ranks is None:
        raise ConfigurationError(
            "an estimate needs the number of ranks, over which the optimizer's state is spread, "
            "but num_ranks is missing; give it, or a pool"
        )
    else:
        ranks_per_node = _ranks_per_node(num_ranks, ranks_per_node)
        wanted = None if schemes is None else _schemes(schemes)
    analytic = AnalyticCostModel(
        shape=shape,
        device=constants,
        cluster=constants.cluster(num_ranks, ranks_per_node),
        precision=Precision.FP32 if fp32 else Precision.BF16,
        recompute=recompute,
        cp_comm_type="auto",
        pool=footprint,
        frozen=frozen,
    )
    given = None if wanted is None else schemes_of_job(wanted, num_ranks)
    return estimated_profile(analytic, given, keeps_all=given is not None)


def plan(
    lengths: Lengths,
    pool: PoolLike,
    profile: ProfileLike,
    *,
    model: ModelLike | None = None,
    device: str | None = None,
    ranks_per_node: int | None = None,
    grad_reduce_in_bf16: bool = False,
    lora: Lora | None = None,
    row_quantum: int = 1,
    seed: int = 0,
    time_limit_s: float | None = None,
) -> PlannedBatch:
    """The best plan for one batch, as ``hydraulis plan``.

    Args:
        lengths: shape (num_sequences,), in tokens.
        pool: strategies to choose from.
        profile: with every scheme of the pool.
        model: to compute regrouping of strategies that the profile did not measure; None for the
            profile's.
        device: likewise.
        ranks_per_node: of strategies in notation; None for the default of the commands.
        grad_reduce_in_bf16: gradients travel in bf16.
        lora: adapters that are trained instead of the model.
        row_quantum: to which rows are rounded up, in tokens.
        seed: for the solver's tie-breaking.
        time_limit_s: after which the best plan so far is used and marked.

    Raises DataError for invalid lengths, StrategyError and ConfigurationError for the other
    arguments, PlanError if no strategy holds the batch.
    """
    sizes = _lengths(lengths)
    found, known = _pool_and_profile(pool, profile, ranks_per_node)
    costs = _options(model, device, grad_reduce_in_bf16, lora).costs_of_pool(
        known, found, tp_degrees=(found.tp_lcm,)
    )
    warn_of_unknown_overheads(costs.profile, found.strategies)
    warn_of_assumed_rows(costs.profile, found)
    return plan_batch(
        sizes.tolist(),
        found,
        costs.profile,
        row_quantum=row_quantum,
        seed=seed,
        time_limit_s=time_limit_s,
    )


def propose(
    lengths: Lengths | LengthCounts | str | os.PathLike[str],
    profile: ProfileLike,
    *,
    num_ranks: int,
    ranks_per_node: int | None = None,
    global_batch_size: int | None = None,
    global_batch_tokens: int | None = None,
    seq_length: int | None = None,
    long_sequences: LongSequences = "split",
    schemes: Iterable[str | Scheme] | None = None,
    max_strategies: int = ProposalRequest.max_strategies,
    num_batches: int = ProposalRequest.num_batches,
    model: ModelLike | None = None,
    device: str | None = None,
    grad_reduce_in_bf16: bool = False,
    lora: Lora | None = None,
    row_quantum: int = 1,
    seed: int = 0,
) -> Proposal:
    """The pool with the least mean time over batches of a corpus, as ``hydraulis propose``.

    The result can be given to `plan` and `simulate` in place of a pool.

    Args, besides those of `plan`:
        lengths: of the corpus, in tokens, or the path of a file as ``--lengths`` takes it.
        profile: measured or estimated; with model and device, widths of cp are assumed.
        num_ranks: of the job.
        ranks_per_node: None for the default of the commands.
        global_batch_size: sequences of a batch.
        global_batch_tokens: or its most tokens instead.
        seq_length: most tokens of a sequence; None for no limit.
        long_sequences: what to do with longer ones: split, truncate, drop or error.
        schemes: to build strategies from; None for all of the profile.
        max_strategies: in the pool.
        num_batches: that are drawn.
        seed: of the batches.

    Raises the errors of `plan`.
    """
    ranks_per_node = _ranks_per_node(num_ranks, ranks_per_node)
    request = ProposalRequest(
        corpus=_counts(lengths),
        sizes=_sizes(global_batch_size, global_batch_tokens),
        seq_length=seq_length,
        long_sequences=long_sequences,
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        schemes=None if schemes is None else _schemes(schemes),
        num_batches=num_batches,
        max_strategies=max_strategies,
        seed=seed,
        row_quantum_tokens=row_quantum,
    )
    costs = _options(model, device, grad_reduce_in_bf16, lora).costs(
        as_profile(profile), num_ranks=num_ranks, ranks_per_node=ranks_per_node
    )
    warn_of_unknown_overheads(costs.profile)
    with native_prints_to_stderr():
        costs = costs.with_widths()
        return judged(request, costs, _propose(request, costs.profile))


def simulate(
    lengths: Lengths | LengthCounts | str | os.PathLike[str],
    pool: PoolLike,
    profile: ProfileLike,
    *,
    global_batch_size: int | None = None,
    global_batch_tokens: int | None = None,
    iterations: int = SimulationRequest.iterations,
    ways: Collection[str] = WAYS,
    seq_length: int | None = None,
    long_sequences: LongSequences = "split",
    model: ModelLike | None = None,
    device: str | None = None,
    ranks_per_node: int | None = None,
    grad_reduce_in_bf16: bool = False,
    lora: Lora | None = None,
    plan_ahead: int = SimulationRequest.plan_ahead,
    plan_time_s: float | None = None,
    num_processes: int = 1,
    row_quantum: int = 1,
    seed: int = 0,
) -> Comparison:
    """Times of the pool and of simpler ways to train the same batches, as ``hydraulis simulate``.

    Args, besides those of `plan` and `propose`:
        iterations: to simulate.
        ways: what to simulate; docs/metrics.md explains them.
        seq_length: most tokens of a sequence; None for the most that the pool holds.
        plan_ahead: iterations planned ahead.
        plan_time_s: time of a plan; None for the CPU time that it takes here.
        num_processes: that plan; more than one need a main module that can be imported.

    Raises the errors of `plan`.
    """
    found, known = _pool_and_profile(pool, profile, ranks_per_node)
    options = _options(model, device, grad_reduce_in_bf16, lora)
    request = SimulationRequest(
        corpus=_counts(lengths),
        sizes=_sizes(global_batch_size, global_batch_tokens),
        seq_length=seq_length,
        long_sequences=long_sequences,
        pool=found,
        costs=options.costs_of_pool(known, found),
        shape=options.shape,
        ways=ways,
        iterations=iterations,
        plan_ahead=plan_ahead,
        plan_time_s=plan_time_s,
        num_processes=num_processes,
        seed=seed,
        row_quantum_tokens=row_quantum,
    )
    warn_of_unknown_overheads(request.costs.profile, found.strategies)
    warn_of_assumed_rows(request.costs.profile, found)
    with native_prints_to_stderr():
        return compare_ways(request)


def as_pool(pool: PoolLike, ranks_per_node: int | None = None) -> Pool:
    """Reads a path or strategies in notation, of which the largest gives the ranks of the job.

    ranks_per_node: of strategies in notation; None for the default of the commands.

    Raises StrategyError for a file that cannot be read and for invalid strategies.
    """
    if isinstance(pool, Pool):
        return pool
    if isinstance(pool, Proposal):
        return pool.pool
    if isinstance(pool, os.PathLike) or (isinstance(pool, str) and Path(pool).suffix == ".json"):
        return Pool.read(Path(pool))
    texts = _listed(pool, "pool", "a list of strategies, a Pool or the path of a pool file")
    if not texts:
        raise StrategyError("pool: a pool needs at least 1 strategy but has 0; add one")
    num_ranks = max(map(num_ranks_of, texts))
    ranks_per_node = _ranks_per_node(num_ranks, ranks_per_node)
    return Pool.of(
        *(Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node) for text in texts)
    )


def as_profile(profile: ProfileLike) -> ProfileCostModel:
    """Reads a path. Raises ConfigurationError for a file that cannot be read."""
    if isinstance(profile, ProfileCostModel):
        return profile
    return ProfileCostModel.read(_path(profile, "profile", "a ProfileCostModel"))


def as_shape(model: ModelLike) -> ModelShape:
    """Reads a path; the vocabulary of a Hugging Face model is padded as by default in training.

    Raises ConfigurationError for a file that cannot be read and for a model that Megatron does not
    have.
    """
    if isinstance(model, ModelShape):
        return model
    path = _path(model, "model", "a ModelShape")
    if path.is_dir() or path.name == CONFIG_NAME:
        return read_model(path)[0].shape(VOCABULARY_MULTIPLE)
    return ModelShape.read(path)


def _refusal(given: Any, name: str, kinds: str) -> ConfigurationError:
    return ConfigurationError(f"{name} is {kinds} but this is {given!r:.60}; correct it")


def _path(given: Any, name: str, kind: str) -> Path:
    if isinstance(given, str | os.PathLike):
        return Path(given)
    raise _refusal(given, name, f"{kind} or its path")


def _listed(given: Any, name: str, kinds: str, kind: type = str) -> list[Any]:
    """One text, or several texts and objects of a kind."""
    found = [given] if isinstance(given, str) else given
    if isinstance(found, Iterable):
        found = list(found)
        if all(isinstance(each, str | kind) for each in found):
            return found
    raise _refusal(given, name, kinds)


def _sizes(num_sequences: int | None, num_tokens: int | None) -> BatchSizes:
    if (num_sequences is None) == (num_tokens is None):
        raise ConfigurationError(
            f"a batch has global_batch_size sequences or global_batch_tokens tokens but these are "
            f"{num_sequences} and {num_tokens}; give one of them"
        )
    return BatchSizes.constant(num_sequences=num_sequences, num_tokens=num_tokens)


def _frozen(lora: Lora | None, shape: ModelShape) -> Frozen:
    """All but adapters with any of their names."""
    if lora is not None:
        lora = Lora.resolve(lora.rank, lora.alpha, lora.targets, shape)
    return Frozen.around(lora, shape)


def _options(
    model: ModelLike | None, device: str | None, grad_reduce_in_bf16: bool, lora: Lora | None
) -> JobOptions:
    return JobOptions(
        layers=lambda shape: {"frozen": _frozen(lora, shape)},
        shape=None if model is None else as_shape(model),
        device=None if device is None else device_constants(device),
        grad_reduce_in_bf16=grad_reduce_in_bf16,
    )


def _pool_and_profile(
    pool: PoolLike, profile: ProfileLike, ranks_per_node: int | None
) -> tuple[Pool, ProfileCostModel]:
    """A proposal brings the rows that were assumed for its pool."""
    known = as_profile(profile)
    if isinstance(pool, Proposal):
        schemes = {row.scheme for row in known.schemes}
        rows = (row for row in pool.profile.schemes if row.scheme not in schemes and row.is_assumed)
        known = replace(known, schemes=(*known.schemes, *rows))
    return as_pool(pool, ranks_per_node), known


def _ranks_per_node(num_ranks: int, given: int | None) -> int:
    for name, value in (("num_ranks", num_ranks), ("ranks_per_node", given or 0)):
        if not isinstance(value, Integral):
            raise _refusal(value, name, "a whole number")
    return ranks_of_node(num_ranks, given, "num_ranks, ranks_per_node")


def _schemes(schemes: Iterable[str | Scheme]) -> list[Scheme]:
    return [
        each if isinstance(each, Scheme) else parse_scheme(each, label="schemes")
        for each in _listed(schemes, "schemes", "a list such as ['tp4pp2', 'tp2']", Scheme)
    ]


def _counts(lengths: Lengths | LengthCounts | str | os.PathLike[str]) -> LengthCounts:
    if isinstance(lengths, LengthCounts):
        return lengths
    if isinstance(lengths, str | os.PathLike):
        return read_length_counts(Path(lengths))
    return LengthCounts.of(_lengths(lengths))


def _lengths(lengths: Lengths) -> npt.NDArray[np.integer[Any]]:
    """Checks lengths; DataError unless they are whole numbers from 1 on, at least one."""
    try:
        values = np.asarray(lengths)
    except ValueError:  # rows of different lengths
        values = np.asarray(lengths, dtype=object)
    if values.ndim != 1 or not len(values) or values.dtype.kind not in "iu":
        raise DataError(
            f"lengths: whole numbers of tokens, one for each of at least 1 sequence, but these are "
            f"of type {values.dtype} and shape {values.shape}; give a list such as [900, 20]"
        )
    if values.min() < 1:
        raise DataError(
            f"lengths: a sequence has at least 1 token but number {int(values.argmin())} has "
            f"{int(values.min())}; leave it out"
        )
    return values
