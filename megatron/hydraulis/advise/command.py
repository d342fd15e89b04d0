"""``hydraulis advise``: a verdict on what a pool gains, and the commands to run next."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from rich.table import Table

from megatron.hydraulis.command_line import (
    PLACEHOLDER,
    add_flags,
    add_lengths_argument,
    add_profile_argument,
)
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.estimate_command import estimated_profile
from megatron.hydraulis.cost_model.job_costs import (
    JobCosts,
    add_job_arguments,
    add_regroup_arguments,
    job_options,
    job_ranks,
    print_bf16_advice,
    warn_of_assumed_rows,
)
from megatron.hydraulis.cost_model.model_arguments import job_precision, shape_of
from megatron.hydraulis.cost_model.profile import (
    AS_MEASURED,
    BY_RULE,
    NOTHING_HIDDEN,
    ProfileCostModel,
)
from megatron.hydraulis.cost_model.regrouping import wire_bytes
from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.frozen import NOTHING_FROZEN
from megatron.hydraulis.json_object import write_output
from megatron.hydraulis.lengths.batches import add_batch_arguments
from megatron.hydraulis.planner.solver import native_prints_to_stderr
from megatron.hydraulis.proposal.propose import Proposal, ProposalRequest, propose
from megatron.hydraulis.proposal.verdict import (
    HOW,
    OPEN_TEXT,
    PROFILE,
    PoolVerdict,
    Setting,
    best_baseline,
    pool_verdict,
    print_measurements,
)
from megatron.hydraulis.simulator.ways import BALANCED, CEILING, FIXED_ROWS, PACKING, Ways
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.terminal import (
    OnProgress,
    StrategyText,
    figures_table,
    launch_command,
    phase_progress,
    print_json,
    print_next,
    results_console,
)

_MS_PER_S = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to train, with mean times over the batches."""

    name: str
    strategies: tuple[Strategy, ...]
    """One, or those of a pool by their number of batches."""
    makespan_s: float
    regroup_s: dict[str, float]
    """Time that regrouping and optimizer add, by how regrouping counts."""
    setting: Setting
    memory_bytes: float
    """Estimate for the fullest rank with the largest micro-batch that its schemes hold, or that
    rows of fixed length fill."""

    @property
    def strategy(self) -> str:
        """The strategies in notation."""
        return " ".join(map(str, self.strategies))

    @property
    def text(self) -> str:
        """The strategies with what differs from the flags of the job."""
        return self.strategy + self.setting.text

    def time_s(self, kind: str) -> float:
        """Mean time of an iteration."""
        return self.makespan_s + self.regroup_s[kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """The predicted gain of a job; all times are for the same batches."""

    proposal: Proposal
    fixed_rows: Choice
    """The best homogeneous layout with rows of fixed length."""
    packing: Choice
    """The best one with the same rows without padding."""
    static: Choice
    """The best without a pool, see proposal/verdict.py."""
    pool: Choice
    verdict: PoolVerdict
    ceiling_s: float
    """Lower bound of the time of any plan, see simulator/ways.py."""
    bound_s: float
    """Lower bound of the time of any plan of these schemes, see `least_makespan_ms`."""
    num_tokens: float
    """Mean of a batch."""
    model_flops: float
    """Mean of a batch, see `Frozen.causal_flops`."""
    kinds: tuple[str, ...]
    """Ways in which regrouping can count, see `ProfileCostModel.readings`."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """All ways, from the least freedom to the most."""
        return self.fixed_rows, self.packing, self.static, self.pool

    @property
    def kind(self) -> str:
        """The way in which regrouping counts where one figure is given."""
        return self.kinds[-1]

    def gain(self, over: Choice, kind: str | None = None) -> float:
        """Time of another choice over that of the pool."""
        kind = kind or self.kind
        return over.time_s(kind) / self.pool.time_s(kind)


def advise(
    request: ProposalRequest,
    costs: JobCosts,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Advice:
    """Proposes a pool and compares it with the best without one.

    The pool also gets the setting of that best, and recomputation where fewer ranks hold the
    longest sequence with it, as far as a bound lets them gain.

    costs: with a model, and with rows for all cp that are offered.

    Raises PlanError and ConfigurationError as `propose`, ConfigurationError if no homogeneous
    strategy holds the longest sequence.
    """
    assert costs.model is not None
    shape = costs.model.shape
    batches, num_ranks, longest = request.batches, request.num_ranks, request.counts.longest
    settings = list(Setting.all_of(costs))
    proposal, setting = propose(request, costs.profile, on_progress), settings[0]
    baseline = best_baseline(request, settings, proposal.pool, proposal.best_static)
    if baseline is None:
        raise _no_static(longest, num_ranks)
    for other in settings[1:]:
        # The baseline's flags cost nothing more: with others it would gain what the flags gain.
        worth = 1.0 if other is baseline.setting else _WORTH_ANOTHER_SETTING
        is_better = other is baseline.setting or (
            _fewest_ranks(other, longest) < _fewest_ranks(settings[0], longest)
        )
        bound_ms = fmean(
            least_makespan_ms(other.costs.profile, each, num_ranks) for each in batches
        )
        if is_better and proposal.mean_s * _MS_PER_S > worth * bound_ms:
            found = propose(
                request,
                other.costs.profile,
                lambda what, done, total: on_progress(f"other flags: {what}", done, total),
            )
            if proposal.mean_s > worth * found.mean_s:
                proposal, setting = found, other
    on_progress("range", 0, 1)
    judgement = pool_verdict(request, settings, proposal, baseline, setting)
    on_progress("range", 1, 1)

    def choice(
        name: str,
        setting: Setting,
        shares: Sequence[tuple[Strategy, float]],
        makespan_s: float,
        rows: Iterable[tuple[Scheme, int]] = (),
    ) -> Choice:
        """shares: strategies with their shares of the batches; rows: that run on them, by default
        the largest."""
        profile, model = setting.costs.profile, setting.costs.model
        assert model is not None
        memory = model.memory
        return Choice(
            name=name,
            setting=setting,
            strategies=tuple(strategy for strategy, _ in shares),
            makespan_s=makespan_s,
            regroup_s={
                kind: math.fsum(share * model.overhead_ms(each) for each, share in shares)
                / _MS_PER_S
                for kind, model in profile.readings().items()
            },
            memory_bytes=memory.reserve_bytes
            + max(
                memory.peak_bytes(scheme, stage, num_tokens)
                for scheme, num_tokens in rows
                or [
                    (group, profile.max_tokens(group))
                    for strategy, _ in shares
                    for scheme in strategy.schemes
                    for group in scheme.group_schemes
                ]
                for stage in range(scheme.pp)
            ),
        )

    ways = Ways(
        batches=batches,
        pool=proposal.pool,
        costs=costs,
        seq_length=longest,
        shape=shape,
        on_progress=on_progress,
    )
    profile = setting.costs.profile
    fixed = {}
    for way in (FIXED_ROWS, PACKING):
        of_rows = ways.fastest(way)
        if of_rows is None:
            raise _no_static(longest, num_ranks)
        works, makespan_s = of_rows
        rows = frozenset().union(*(work.row_shapes for work in works))
        fixed[way] = choice(way, settings[0], [(works[0].strategy, 1.0)], makespan_s, rows)
    used = [proposal.pool.strategy(name) for name, _ in proposal.plans]
    overheads_s = [profile.overhead_ms(strategy) / _MS_PER_S for strategy in used]
    shares = [(strategy, used.count(strategy) / len(used)) for strategy in proposal.pool.strategies]
    (ceiling,) = replace(ways, costs=setting.costs).candidates(CEILING)
    frozen = NOTHING_FROZEN if costs.model is None else costs.model.frozen
    all_ranks = ceiling.cost_model.coefficients(baseline.strategy.schemes[0])
    return Advice(
        proposal=proposal,
        verdict=judgement,
        fixed_rows=fixed[FIXED_ROWS],
        packing=fixed[PACKING],
        static=choice(
            baseline.way,
            baseline.setting,
            [(baseline.strategy, 1.0)],
            baseline.time_s - baseline.overhead_s,
        ),
        pool=choice(
            "pool",
            setting,
            shares,
            fmean(
                time_s - overhead_s
                for (_, time_s), overhead_s in zip(proposal.plans, overheads_s, strict=True)
            ),
        ),
        ceiling_s=fmean(map(all_ranks.time_ms, batches)) / _MS_PER_S,
        bound_s=fmean(least_makespan_ms(profile, batch, num_ranks) for batch in batches)
        / _MS_PER_S,
        num_tokens=fmean(map(sum, batches)),
        model_flops=fmean(frozen.causal_flops(shape, batch) for batch in batches),
        kinds=tuple(profile.readings()),
    )


def _no_static(longest: int, num_ranks: int) -> ConfigurationError:
    return ConfigurationError(
        f"advice: a static strategy of one scheme must hold the longest sequence, {longest} "
        f"tokens, on all {num_ranks} ranks but none does; lower --seq-length"
    )


def _fewest_ranks(setting: Setting, longest: int) -> float:
    """The fewest ranks of a replica that holds the longest sequence."""
    rows = setting.costs.profile.schemes
    return min(
        (row.scheme.num_ranks for row in rows if row.max_tokens >= longest), default=math.inf
    )


def least_makespan_ms(profile: ProfileCostModel, batch: Sequence[int], num_ranks: int) -> float:
    """Limit below which no plan's makespan is.

    Each sequence runs on the scheme that holds it and needs the least rank time for it, with its
    part of the constant time of a full micro-batch. All ranks share that evenly: no pipeline is
    filled, and regrouping takes no time.
    """
    lengths = np.array(batch, np.float64)
    least_ms = np.full(len(batch), np.inf)
    for row in profile.schemes:
        if row.max_tokens and row.scheme.num_ranks <= num_ranks:
            times, limit = row.coefficients, row.max_tokens
            each_ms = times.sequence_time_ms(lengths) + times.c_ms / limit * lengths
            each_ms[lengths > limit] = np.inf
            least_ms = np.minimum(least_ms, row.scheme.num_ranks * each_ms)
    return float(least_ms.sum()) / num_ranks


_NUM_BATCHES, _FEWEST_BATCHES = 16, 4
_MOST_SEQUENCES = 1 << 16
"""Most sequences of all batches that are drawn, unless these are the fewest."""
_WORTH_A_POOL = 1.03
"""Gain over the best static strategy below which the verdict is to train with that one."""
_NEAR_CEILING = 0.9
POOL_FILE_NAME, PROFILE_FILE_NAME = "pool.json", "cost_profile.json"
_OF_PROPOSAL = (
    *("--seq-length", "--long-sequences", "--num-batches", "--seed", "--max-strategies"),
    *("--row-quantum-tokens", "--grad-reduce-in-bf16", "--no-regroup-overlap"),
    *("--device", "--intra-node-gb-per-s", "--inter-node-gb-per-s"),
)
"""Options that decide what `propose` finds, too."""
_WORTH_ANOTHER_SETTING = 1.03
"""Gain of a pool with other flags of the job from which these are advised."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the subcommand."""
    parser.description = (
        "Compare training with fixed-length rows, with balanced plans and with a pool of "
        "strategies for a corpus, without a GPU: a verdict, figures, and the commands to run next."
    )
    corpus = parser.add_argument_group("corpus and batches")
    add_lengths_argument(corpus)
    add_flags(corpus, ProposalRequest, "seq_length", "long_sequences")
    add_batch_arguments(corpus)
    corpus.add_argument(
        "--num-batches",
        type=int,
        metavar="N",
        help=f"number of batches to sample (default: {_NUM_BATCHES}, or fewer of many sequences, "
        "which differ less)",
    )
    add_flags(corpus, ProposalRequest, "seed", "max_strategies")
    job = parser.add_argument_group("job")
    add_job_arguments(job)
    add_profile_argument(job, " (default: estimated for all schemes that fit)", required=False)
    add_flags(job, ProposalRequest, "row_quantum_tokens")
    add_regroup_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        default=Path("advice"),
        help=f"write {POOL_FILE_NAME} and {PROFILE_FILE_NAME} here (default: %(default)s)",
    )
    output.add_argument("--json", action="store_true", help="print all figures as JSON")


def run(namespace: argparse.Namespace) -> int:
    """Prints verdict, tables and the next commands; returns the exit status.

    Raises ConfigurationError, StrategyError or DataError for invalid files and flags, PlanError if
    no scheme holds the longest sequence.
    """
    request = _request(namespace)
    with phase_progress() as on_progress, native_prints_to_stderr():
        on_progress("costs", 0, 1)
        costs = _costs(namespace, request)
        on_progress("costs", 1, 1)
        advice = advise(request, costs, on_progress)
    assert costs.model is not None
    advised = advice.pool if is_worth_a_pool(advice) else advice.static
    profile, device, pool = advised.setting.costs.profile, costs.model.device, advice.proposal.pool
    try:
        namespace.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"--out needs a writable folder: {namespace.out}: {error.strerror}; give another folder"
        ) from error
    write_output(namespace.out / POOL_FILE_NAME, {"version": 1, **pool.to_json()})
    used = (*advice.static.strategies, *pool.strategies)
    of_replicas = {strategy.replicas: strategy for strategy in used}
    kept = profile.only_for(Pool.of(*of_replicas.values()))
    write_output(namespace.out / PROFILE_FILE_NAME, kept.to_json())
    peak = request.num_ranks * costs.model.peak_flops_per_s
    if namespace.json:
        print_json(to_json(advice, profile, peak))
        return 0
    request.print_batch()
    console = results_console()
    console.print(verdict(advice), highlight=False)
    console.print()
    console.print(choice_table(advice, peak))
    console.print(gain_table(advice))
    print_bf16_advice(profile, advice.proposal.shares, advice.pool.time_s(advice.kind))
    if namespace.cost_profile is None:
        console.print(f"Times are estimates for {device.name}, not measured.", highlight=False)
    else:
        warn_of_assumed_rows(profile, pool)
    _print_commands(namespace, request, advice)
    return 0


def _request(namespace: argparse.Namespace) -> ProposalRequest:
    """Returns what the flags ask for, by default with fewer batches of many sequences."""
    num_ranks, ranks_per_node = job_ranks(namespace)
    request = ProposalRequest.of_command(
        namespace, num_ranks=num_ranks, ranks_per_node=ranks_per_node
    )
    if namespace.num_batches is not None:
        return request
    counts, sizes = request.counts, request.sizes
    mean_length = counts.num_tokens / counts.num_sequences if sizes.in_tokens else 1.0
    num_batches = int(_MOST_SEQUENCES * mean_length / sizes.largest)
    return replace(request, num_batches=max(_FEWEST_BATCHES, min(num_batches, _NUM_BATCHES)))


def _costs(namespace: argparse.Namespace, request: ProposalRequest) -> JobCosts:
    """The costs by the given profile or an estimate, with all widths of cp."""
    options = job_options(namespace)
    num_ranks, ranks_per_node = request.num_ranks, request.ranks_per_node
    if namespace.cost_profile is not None:
        profile = ProfileCostModel.read(namespace.cost_profile)
    elif options.device is None:
        raise ConfigurationError(
            "advice needs the times of a device but there is neither --device nor --cost-profile; "
            "give one of them"
        )
    else:
        shape, device = shape_of(namespace), options.device
        model = AnalyticCostModel(
            shape=shape,
            device=device,
            cluster=device.cluster(num_ranks, ranks_per_node),
            precision=(precision := job_precision(namespace)),
            gradient_bytes=wire_bytes(precision, reduces_in_bf16=options.grad_reduce_in_bf16),
            **options.layers(shape),
        )
        profile = estimated_profile(model)
    costs = options.costs(
        profile,
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        path=namespace.cost_profile,
    )
    if costs.model is None:
        raise ConfigurationError(
            f"advice needs the model and the device of cost profile {namespace.cost_profile} but "
            f"it does not name both; give --model and --device"
        )
    return costs.with_widths()


def is_worth_a_pool(advice: Advice) -> bool:
    """The pool is advised, and not the best static strategy."""
    return advice.gain(advice.static) >= _WORTH_A_POOL


def verdict(advice: Advice) -> str:
    """What to do, and what it gains: one sentence, and one more if that is open."""
    over_static, over_fixed = advice.verdict.text, advice.gain(advice.fixed_rows)
    reach = advice.bound_s / advice.pool.time_s(advice.kind)
    static, pool = advice.static, "the pool"
    of_static = HOW[static.name]
    if is_worth_a_pool(advice):
        what, strategies = pool, advice.proposal.pool.strategies
        if len(strategies) == 1:
            what, pool = f"--strategy '{strategies[0]}'", "this strategy"
        what = (
            f"Train with {what}{advice.pool.setting.text}: {over_static} as fast as the best "
            f"without a pool, {static.strategy} with {of_static}{static.setting.text}; "
            f"{over_fixed:.2f} × as fast as Megatron with rows of fixed length"
        )
    else:
        strategy = f"--strategy '{static.strategy}'" if static.name == BALANCED else static.strategy
        what = (
            f"Train with {strategy} and {of_static}{static.setting.text}: "
            f"{advice.fixed_rows.time_s(advice.kind) / static.time_s(advice.kind):.2f} × "
            f"as fast as Megatron with rows of fixed length; a pool does not pay, as it is only "
            f"{over_static} as fast as that"
        )
    near = " (little is left to gain)" if reach >= _NEAR_CEILING else ""
    open_text = f" {OPEN_TEXT}" if advice.verdict.is_open else ""
    return (
        f"{what}; no plan could be more than {1 / reach:.2f} × as fast as {pool}{near}.{open_text}"
    )


def choice_table(advice: Advice, peak_flops_per_s: float) -> Table:
    """A row per way to train; times by `Advice.kind`."""
    strategies = [strategy for choice in advice.choices for strategy in choice.strategies]
    schemes = [scheme for strategy in strategies for scheme in strategy.schemes]
    marks = ""
    if any(scheme.shares_weights for scheme in schemes):
        marks += " fs: cp ranks share the weights."
    if any(scheme.recomputes for scheme in schemes):
        marks += " r: every layer is recomputed."
    table = figures_table(
        "the same batches, four ways to train",
        ("way", "strategy"),
        ("tokens/s", "MFU %", "gain ×", "memory GB", "regrouping s"),
        caption=f"MFU: of causal attention. Gain: over the first row. Memory: estimated, of the "
        f"fullest rank. Regrouping: with the optimizer, {advice.kind} ({NOTHING_HIDDEN}).{marks}",
    )
    for choice in advice.choices:
        time_s = choice.time_s(advice.kind)
        table.add_row(
            choice.name,
            StrategyText(choice.text),
            f"{advice.num_tokens / time_s:,.0f}",
            f"{100.0 * advice.model_flops / (time_s * peak_flops_per_s):.1f}",
            f"{advice.fixed_rows.time_s(advice.kind) / time_s:.2f}",
            f"{choice.memory_bytes / 1e9:.0f}",
            f"{choice.regroup_s[advice.kind]:.3f} ({choice.regroup_s[NOTHING_HIDDEN]:.3f})",
        )
    return table


def gain_table(advice: Advice) -> Table:
    """The pool's gain by how regrouping counts."""
    of_kinds = {
        NOTHING_HIDDEN: "all of regrouping and optimizer counts",
        BY_RULE: "what is not overlapped with compute, by the runtime's rule",
        AS_MEASURED: "the profile's times",
    }
    table = figures_table(
        "gain of the pool, ×",
        ("over",),
        advice.kinds,
        caption=". ".join(f"{kind.capitalize()}: {of_kinds[kind]}" for kind in advice.kinds)
        + ". Overlap shortens the other ways too, so it may lower a gain.",
    )
    for choice in (advice.static, advice.packing, advice.fixed_rows):
        table.add_row(choice.name, *(f"{advice.gain(choice, kind):.3f}" for kind in advice.kinds))
    return table


def to_json(advice: Advice, profile: ProfileCostModel, peak_flops_per_s: float) -> dict[str, Any]:
    """All figures, times in s by how regrouping counts; which of the pool's rows are assumed."""
    return {
        "verdict": verdict(advice),
        "gain": advice.verdict.to_json(),
        "num_tokens": advice.num_tokens,
        "ceiling_s": advice.ceiling_s,
        "bound_s": advice.bound_s,
        "ways": [
            {
                "way": choice.name,
                "strategy": choice.strategy,
                "setting": choice.setting.text.lstrip(", "),
                "time_s": {kind: choice.time_s(kind) for kind in advice.kinds},
                "regroup_s": choice.regroup_s,
                "mfu": advice.model_flops / (choice.time_s(advice.kind) * peak_flops_per_s),
                "memory_bytes": choice.memory_bytes,
                "gain_of_pool": {kind: advice.gain(choice, kind) for kind in advice.kinds},
            }
            for choice in advice.choices
        ],
        "pool": advice.proposal.pool.to_json(),
        "assumed": list(map(str, profile.assumed_schemes(advice.proposal.pool))),
        "proposal_seconds": advice.proposal.seconds,
    }


def _words_of_search(namespace: argparse.Namespace, sizes: BatchSizes) -> list[str]:
    """Returns flags for `propose` that repeat these, with those of training if all are known."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = namespace.training_words
    if words[-1] == PLACEHOLDER:
        flag = "--global-batch-tokens" if sizes.in_tokens else "--global-batch-size"
        words = [flag, str(sizes.largest)]
    for flag in _OF_PROPOSAL:
        name = flag.strip("-").replace("-", "_")
        value = vars(namespace)[name]
        if value != parser.get_default(name) and flag not in words:
            words = [*words, flag, *([] if value is True else [str(value)])]
    return list(words)


def _print_commands(
    namespace: argparse.Namespace, request: ProposalRequest, advice: Advice
) -> None:
    """Prints the way to a run: measure unless that was done, propose with that, train."""
    pool, is_worth_it = advice.proposal.pool, is_worth_a_pool(advice)
    setting = advice.pool.setting if is_worth_it else advice.static.setting
    words = setting.words(namespace.training_words)
    num_ranks, ranks_per_node = pool.num_ranks, pool.ranks_per_node
    pool_path, profile_path = namespace.out / POOL_FILE_NAME, namespace.out / PROFILE_FILE_NAME
    if namespace.cost_profile is None:
        pool_path, profile_path = Path(POOL_FILE_NAME), Path(PROFILE)
        strategies = (*advice.static.strategies, *pool.strategies)
        wanted = [(setting, strategies)]
        if advice.verdict.is_open:
            wanted += advice.verdict.to_measure
        schemes = print_measurements(wanted, pool, namespace.training_words)
        if is_worth_it:
            print_next(
                "hydraulis propose --lengths",
                *(namespace.lengths, "--num-ranks", num_ranks, "--ranks-per-node", ranks_per_node),
                *setting.words(_words_of_search(namespace, request.sizes)),
                *("--schemes", "+".join(schemes)),
                *("--cost-profile", profile_path, "--out", pool_path),
            )
    strategy: tuple[str, str | Path] = "--strategy", advice.static.strategy
    if is_worth_it:
        strategy = "--strategy-pool", pool_path
    print_next(
        launch_command(num_ranks, ranks_per_node),
        *strategy,
        *("--cost-profile", profile_path),
        *words,
    )
