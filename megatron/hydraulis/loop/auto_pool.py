"""``--strategy-pool auto``: a pool, proposed at the first start and kept in the run folder."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from megatron.hydraulis.cost_model.device import DeviceConstants
from megatron.hydraulis.cost_model.estimate_command import estimated_profile, possible_schemes
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.model_arguments import gradient_bytes
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.data.sources import load_corpora_from_arguments
from megatron.hydraulis.errors import ConfigurationError, HydraulisError
from megatron.hydraulis.flags.arguments import Resolved
from megatron.hydraulis.flags.checks import check_context
from megatron.hydraulis.json_object import write_json
from megatron.hydraulis.lengths.counts import LengthCounts
from megatron.hydraulis.library.devices import constants_of_this_rank
from megatron.hydraulis.library.planning import (
    analytic_cost_model,
    profiled_model,
    row_quantum_tokens,
)
from megatron.hydraulis.loop.startup import made_by_rank_0
from megatron.hydraulis.planner.solver import native_prints_to_stderr
from megatron.hydraulis.proposal.propose import ProposalRequest, propose
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.strategy.pool import MADE_FOR
from megatron.hydraulis.terminal import phase_progress

FILE_NAME = "auto_pool.json"
_NUM_BATCHES = 8
"""Number of batches: few, as all ranks wait."""


def pool_of_job(resolved: Resolved, *, has_cuda: bool, store: dist.Store | None) -> Pool:
    """The pool of the run folder if it was made for this job, else a proposal.

    Only rank 0 reads, proposes, and writes unless the run is dry; the others get the pool by the
    store.

    Args:
        resolved: of `parse_without_pool`.
        store: None if there are no other ranks.

    Raises ConfigurationError and PlanError as proposing does on rank 0, HydraulisError on ranks
    that get no pool.
    """
    text = made_by_rank_0(
        lambda: json.dumps(_kept_or_proposed(resolved, has_cuda=has_cuda).to_json()),
        "--strategy-pool auto",
        "the pool",
        rank=resolved.args.rank,
        store=store,
    )
    return Pool.from_json(json.loads(text))


def _kept_or_proposed(resolved: Resolved, *, has_cuda: bool) -> Pool:
    if resolved.args.hybrid_layer_pattern is not None:
        raise ConfigurationError(
            "--strategy-pool auto proposes by the costs of layers but those by "
            "--hybrid-layer-pattern are not estimated yet; name strategies"
        )
    path = Path(resolved.hydraulis.run_dir) / FILE_NAME
    named = resolved.hydraulis.device
    device = constants_of_this_rank(has_cuda=has_cuda, speaks=False, named=named)
    lengths = _training_lengths(resolved)
    made_for = _made_for(resolved, device, lengths)
    if path.exists():
        pool = Pool.read(path)
        why = _why_not_kept(resolved, pool, made_for, json.loads(path.read_text(encoding="utf-8")))
        if why is None:
            print(f"strategy pool: {path}, proposed at an earlier start", flush=True)
            return pool
        print(f"warning: {path} {why}: a pool is proposed again", file=sys.stderr, flush=True)
    pool = _proposed(resolved, device, LengthCounts.of(lengths))
    where = "not kept by a dry run" if resolved.hydraulis.dry_run else f"kept in {path}"
    names = ", ".join(str(strategy) for strategy in pool.strategies)
    print(f"strategy pool: {names}; {where}", flush=True)
    if not resolved.hydraulis.dry_run:
        _write(path, {"version": 1, **pool.to_json(), MADE_FOR: made_for})
    return pool


def _made_for(
    resolved: Resolved, device: DeviceConstants, lengths: npt.NDArray[np.integer[Any]]
) -> dict[str, Any]:
    """Inputs of a proposal besides ranks, as JSON values."""
    args, hydraulis = resolved.args, resolved.hydraulis
    profile = hydraulis.cost_profile
    model = profiled_model(resolved, hydraulis.core_attention)
    settings = (
        *("transformer_impl", "softmax_type", "qk_layernorm", "layernorm_zero_centered_gamma"),
        *("cp_comm_type", "glu_linear_offset", "activation_func_clamp_value"),
    )
    return {
        # How experts are computed is among the settings.
        "model": replace(
            model, experts=None, shape=replace(model.shape, num_first_mlp_layers=0)
        ).to_json(),
        "first layers without experts": model.shape.num_first_mlp_layers,
        "device": {"name": device.name, "memory_bytes": device.memory_bytes},
        "settings": {name: getattr(args, name, None) for name in settings}
        | ({"moe_grouped_gemm": True} if args.moe_grouped_gemm else {})
        | {
            "gradient_bytes": gradient_bytes(args),
            "row_quantum_tokens": row_quantum_tokens(resolved, device),
            "sequence_parallel": hydraulis.sequence_parallel,
        },
        "layers gathered ahead": hydraulis.fs_prefetch,
        "cost profile": profile and hashlib.sha256(Path(profile).read_bytes()).hexdigest(),
        "batch size": [resolved.sizes.largest, resolved.sizes.unit],
        "lengths": hashlib.sha256(np.sort(lengths).astype(np.int64).tobytes()).hexdigest(),
    }


def _why_not_kept(
    resolved: Resolved, kept: Pool, made_for: dict[str, Any], content: dict[str, Any]
) -> str | None:
    """Says how the job that a pool was made for differs from this one; None if it does not."""
    num_ranks, ranks_per_node = resolved.pool.num_ranks, resolved.pool.ranks_per_node
    if (kept.num_ranks, kept.ranks_per_node) != (num_ranks, ranks_per_node):
        return (
            f"is for {kept.num_ranks} ranks, {kept.ranks_per_node} a node, and the job has "
            f"{num_ranks}, {ranks_per_node} a node"
        )
    before = content.get(MADE_FOR)
    if not isinstance(before, dict):
        return "does not say what it was proposed for"
    # Files of earlier versions do not name everything, such as the batch size.
    differing = [name for name, value in made_for.items() if before.get(name, value) != value]
    return f"was proposed for other values of {', '.join(differing)}" if differing else None


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
    except OSError as error:
        raise ConfigurationError(
            f"--strategy-pool auto keeps its pool in the run folder but {path} cannot be written: "
            f"{error.strerror}; give another --run-dir"
        ) from error


def _training_lengths(resolved: Resolved) -> npt.NDArray[np.integer[Any]]:
    """Lengths of all sequences, in tokens."""
    how = resolved.hydraulis.long_sequences
    corpora = load_corpora_from_arguments(resolved.args, long_sequences=how)
    return np.asarray(corpora.train.lengths)


def _proposed(resolved: Resolved, device: DeviceConstants, counts: LengthCounts) -> Pool:
    """A pool for the training data's lengths and this device, or the cost profile's schemes."""
    hydraulis = resolved.hydraulis
    num_ranks, ranks_per_node = resolved.pool.num_ranks, resolved.pool.ranks_per_node
    # The pool is unknown: each scheme as if it filled the job.
    model = replace(analytic_cost_model(resolved, device), pool=None)
    if hydraulis.cost_profile is None:
        allowed = [each for each in possible_schemes(model) if _is_allowed(resolved, each)]
        profile = estimated_profile(model, allowed)
    else:
        profile = ProfileCostModel.read(hydraulis.cost_profile)
        profile.check_model(profiled_model(resolved), hydraulis.cost_profile, speaks=False)
        if hydraulis.max_tokens_per_micro_batch is None and not hydraulis.elastic:
            profile.check_num_ranks(num_ranks, ranks_per_node, hydraulis.cost_profile)
        profile = _allowed(resolved, profile)
    costs = JobCosts.of(profile, model, overlaps=not resolved.hydraulis.no_regroup_overlap)
    request = ProposalRequest(
        corpus=counts,
        sizes=resolved.sizes,
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        num_batches=_NUM_BATCHES,
        seed=resolved.args.seed,
        row_quantum_tokens=row_quantum_tokens(resolved, device),
    )
    if hydraulis.cost_profile is not None and (left_out := _not_measured(resolved, costs, request)):
        print(
            f"strategy pool: without {', '.join(left_out)}, which {hydraulis.cost_profile} lacks; "
            f"to offer them, measure them as well (hydraulis profile --schemes)",
            flush=True,
        )
    with phase_progress(prefix="strategy pool, ") as on_progress, native_prints_to_stderr():
        return propose(request, costs.profile, on_progress).pool


def _not_measured(resolved: Resolved, costs: JobCosts, request: ProposalRequest) -> list[str]:
    """Schemes without a row for some width of cp, which training refuses, as far as a pool might
    use them; with ``~`` only those with ep, as the widths of others are schemes too."""
    useful = request.candidates(_allowed(resolved, costs.with_widths().profile))
    known = {row.scheme for row in costs.profile.schemes}
    return [
        str(scheme)
        for scheme in useful.schemes
        if not known.issuperset(scheme.group_schemes) and (scheme.ep > 1 or not scheme.splits_cp)
    ]


def _allowed(resolved: Resolved, profile: ProfileCostModel) -> ProfileCostModel:
    rows = tuple(row for row in profile.schemes if _is_allowed(resolved, row.scheme))
    return replace(profile, schemes=rows)


def _is_allowed(resolved: Resolved, scheme: Scheme) -> bool:
    """The vocabulary and --cp-comm-type allow a scheme, or the smallest replica with it as a group,
    of at most the job's ranks."""
    scheme = scheme.as_replica
    if scheme.num_ranks > resolved.pool.num_ranks or resolved.vocabulary.padded_size % scheme.tp:
        return False
    try:
        pool = Pool.of(Strategy.parse(str(scheme), scheme.num_ranks))
        pool.check_model(resolved.shape)
        check_context(resolved.args, pool, resolved.shape)
    except HydraulisError:
        return False
    return True
