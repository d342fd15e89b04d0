"""``--strategy-pool auto``: a pool, proposed at the first start and kept in the run folder."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megatron.hydraulis.cost_model.estimate_command import estimated_profile, possible_schemes
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.cost_model.regrouping import RegroupCosts
from megatron.hydraulis.data.sources import load_corpora_from_arguments
from megatron.hydraulis.errors import ConfigurationError, HydraulisError
from megatron.hydraulis.flags.arguments import Resolved, parse_arguments
from megatron.hydraulis.flags.checks import check_context
from megatron.hydraulis.json_object import replace_text
from megatron.hydraulis.lengths.counts import LengthCounts
from megatron.hydraulis.loop.planning import analytic_cost_model, profiled_model
from megatron.hydraulis.loop.startup import constants_of_this_rank
from megatron.hydraulis.planner.solver import native_prints_to_stderr
from megatron.hydraulis.proposal.batches import draw_batches
from megatron.hydraulis.proposal.candidates import Candidates
from megatron.hydraulis.proposal.propose import propose
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

FILE_NAME = "auto_pool.json"
_OPTION, _AUTO = "--strategy-pool", "auto"
_KEY = "hydraulis_auto_pool"
_NUM_BATCHES = 8
"""Few, as all ranks wait."""
_LOG_INTERVAL_S = 5.0


def wants_proposal(argv: Sequence[str]) -> bool:
    """Whether the last --strategy-pool of a command line is ``auto``."""
    values = [
        word.partition("=")[2] if "=" in word else (*argv[place + 1 :], "")[0]
        for place, word in enumerate(argv)
        if word.split("=")[0] == _OPTION
    ]
    return bool(values) and values[-1] == _AUTO


def with_pool(
    argv: Sequence[str], *, num_ranks: int, rank: int, has_cuda: bool, store: dist.Store | None
) -> list[str]:
    """The command line with a pool file of the run folder in place of ``auto``.

    Rank 0 reads the file if it is for as many ranks and nodes, and else proposes a pool and writes
    it; the other ranks get it by the store, and write it where they do not see rank 0's file.

    Raises ConfigurationError and PlanError as parsing and proposing do, on every rank.
    """
    rest = _without_pool(argv)
    resolved = parse_arguments(rest, num_ranks=num_ranks, rank=rank)
    path = Path(resolved.hydraulis.run_dir) / FILE_NAME
    if rank == 0:
        try:
            text = _pool_text(resolved, path, has_cuda=has_cuda)
        except HydraulisError:
            if store is not None:
                store.set(_KEY, "")
            raise
        if store is not None:
            store.set(_KEY, text)
    else:
        assert store is not None  # only rank 0 runs alone
        text = store.get(_KEY).decode()
        if not text:
            raise ConfigurationError(
                f"--strategy-pool auto: rank 0 proposes the pool but rank {rank} got none; see the "
                f"error of rank 0"
            )
    _write(path, text)
    return [*rest, _OPTION, str(path)]


def _without_pool(argv: Sequence[str]) -> list[str]:
    rest, is_value = [], False
    for word in argv:
        if not is_value and word.split("=")[0] != _OPTION:
            rest.append(word)
        is_value = not is_value and word == _OPTION
    return rest


def _write(path: Path, text: str) -> None:
    try:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(path, text)
    except OSError as error:
        raise ConfigurationError(
            f"--strategy-pool auto keeps its pool in the run folder but {path} cannot be written: "
            f"{error.strerror}; give another --run-dir"
        ) from error


def _pool_text(resolved: Resolved, path: Path, *, has_cuda: bool) -> str:
    num_ranks, ranks_per_node = resolved.pool.num_ranks, resolved.pool.ranks_per_node
    if path.exists():
        kept = Pool.read(path)
        if (kept.num_ranks, kept.ranks_per_node) == (num_ranks, ranks_per_node):
            print(f"strategy pool: {path}, proposed at an earlier start", flush=True)
            return path.read_text(encoding="utf-8")
        print(
            f"warning: {path} is for {kept.num_ranks} ranks, {kept.ranks_per_node} a node, and the "
            f"job has {num_ranks}, {ranks_per_node} a node: a pool is proposed again",
            file=sys.stderr,
            flush=True,
        )
    pool = _proposed(resolved, has_cuda=has_cuda)
    names = ", ".join(str(strategy) for strategy in pool.strategies)
    print(f"strategy pool: {names}; kept in {path}", flush=True)
    return json.dumps({"version": 1, **pool.to_json()}, indent=1) + "\n"


def _proposed(resolved: Resolved, *, has_cuda: bool) -> Pool:
    """Of the training data's lengths and this device, or the cost profile's schemes."""
    args, hydraulis = resolved.args, resolved.hydraulis
    num_ranks, ranks_per_node = resolved.pool.num_ranks, resolved.pool.ranks_per_node
    device = constants_of_this_rank(has_cuda=has_cuda, speaks=False)
    if hydraulis.cost_profile is None:
        possible = possible_schemes(resolved.shape, num_ranks, ranks_per_node)
        schemes = [scheme for scheme in possible if _is_allowed(resolved, scheme)]
        profile = estimated_profile(analytic_cost_model(resolved, device), schemes)
    else:
        profile = ProfileCostModel.read(hydraulis.cost_profile)
        profile.check_model(profiled_model(resolved), hydraulis.cost_profile, speaks=False)
        schemes = [row.scheme for row in profile.schemes if _is_allowed(resolved, row.scheme)]
    regroup = RegroupCosts.of(
        resolved.shape,
        device,
        device.cluster(num_ranks, ranks_per_node),
        num_atoms=math.lcm(*(scheme.tp for scheme in schemes)),
        parameter_bytes=2 if args.bf16 else 4,
        overlaps=not hydraulis.no_regroup_overlap,
    )
    corpus = load_corpora_from_arguments(args, long_sequences=hydraulis.long_sequences).train
    if corpus is None:
        raise ConfigurationError(
            "--strategy-pool auto needs the lengths of training data but --split leaves the "
            "training part none; give more data or another --split"
        )
    counts = LengthCounts.of(corpus.lengths)
    batches = draw_batches(counts, resolved.sizes, _NUM_BATCHES, args.seed)
    profile = profile.with_regrouping(regroup)
    logged_s = -math.inf

    def log(what: str, done: int, total: int) -> None:
        nonlocal logged_s
        if time.monotonic() - logged_s >= _LOG_INTERVAL_S:
            logged_s = time.monotonic()
            print(f"proposing a strategy pool: {what} {done} of {total}", flush=True)

    with native_prints_to_stderr():
        return propose(
            Candidates.of(profile, num_ranks, ranks_per_node, schemes, batches),
            profile,
            batches,
            max_strategies=_NUM_BATCHES,
            longest=counts.longest,
            seed=args.seed,
            on_progress=log,
        ).pool


def _is_allowed(resolved: Resolved, scheme: Scheme) -> bool:
    """Whether the vocabulary and --cp-comm-type allow a scheme of at most the job's ranks."""
    if scheme.num_ranks > resolved.pool.num_ranks or resolved.vocabulary.padded_size % scheme.tp:
        return False
    try:
        pool = Pool.of(Strategy.parse(str(scheme), scheme.num_ranks))
        pool.check_model(resolved.shape)
        check_context(resolved.args, pool, resolved.shape)
    except HydraulisError:
        return False
    return True
