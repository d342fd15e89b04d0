"""``hydraulis propose``: which strategies a pool should hold."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.progress import TextColumn, TimeElapsedColumn
from rich.table import Table

from megatron.hydraulis.cost_model.limits import add_row_quantum
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.cost_model.shape_arguments import (
    add_regroup_arguments,
    job_options,
    print_bf16_advice,
    warn_of_unknown_overheads,
)
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.json_object import write_output
from megatron.hydraulis.lengths.command import (
    add_batch_arguments,
    add_lengths_arguments,
    batch_sizes,
    check_seed,
    check_seq_length,
)
from megatron.hydraulis.lengths.counts import read_length_counts
from megatron.hydraulis.planner.solver import native_prints_to_stderr
from megatron.hydraulis.proposal.batches import draw_batches
from megatron.hydraulis.proposal.candidates import Candidates
from megatron.hydraulis.proposal.propose import OnProgress, Proposal, propose
from megatron.hydraulis.strategy.notation import parse_terms
from megatron.hydraulis.strategy.strategy import whole_nodes
from megatron.hydraulis.terminal import (
    figures_table,
    launch_command,
    print_json,
    print_next,
    progress_bars,
    results_console,
)

_NONE = "–"
_NUM_BATCHES = 32
_PROFILE_SUFFIX = ".cost_profile.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the subcommand."""
    corpus = parser.add_argument_group("corpus and batches")
    add_lengths_arguments(corpus)
    add_batch_arguments(corpus)
    corpus.add_argument(
        "--num-batches",
        type=int,
        default=_NUM_BATCHES,
        metavar="N",
        help="number of batches to sample for the search (default: %(default)s)",
    )
    job = parser.add_argument_group("job")
    job.add_argument(
        "--cost-profile",
        required=True,
        metavar="FILE",
        help="cost profile, JSON: times of the schemes in ms, their limits in tokens per "
        "micro-batch",
    )
    job.add_argument("--num-ranks", type=int, required=True, metavar="N", help="ranks of the job")
    job.add_argument(
        "--ranks-per-node", type=int, metavar="N", help="ranks of a node (default: all)"
    )
    job.add_argument(
        "--schemes",
        metavar="LIST",
        help="schemes to build strategies from, separated by '+', such as tp8+tp4pp2+tp4 "
        "(default: all of the profile)",
    )
    add_row_quantum(job)
    add_regroup_arguments(parser)
    output = parser.add_argument_group("pool")
    output.add_argument(
        "--max-strategies",
        type=int,
        default=7,
        metavar="K",
        help="maximum number of strategies in the pool (default: %(default)s)",
    )
    output.add_argument(
        "--out",
        metavar="FILE",
        help="write the pool file here, JSON; if it has schemes with a cp that was not measured, "
        f"a cost profile with assumed rows for them goes next to it, FILE{_PROFILE_SUFFIX}",
    )
    output.add_argument("--json", action="store_true", help="print all results as JSON")
    output.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the sampled batches; files, flags and seed determine the pool "
        "(default: %(default)s)",
    )


def run(namespace: argparse.Namespace) -> int:
    """Proposes a pool, prints and writes it; returns the exit status.

    Raises ConfigurationError, StrategyError or DataError for invalid files and flags, PlanError if
    no scheme holds the longest sequence.
    """
    check_seq_length(namespace.seq_length)
    check_seed(namespace.seed)
    counts = read_length_counts(namespace.lengths)
    if namespace.seq_length is not None:
        counts = counts.cut(namespace.seq_length, namespace.long_sequences)
    batches = draw_batches(counts, batch_sizes(namespace), namespace.num_batches, namespace.seed)
    cost_model, candidates = _candidates(namespace, batches)
    with proposal_progress(is_shown=not namespace.json) as on_progress, native_prints_to_stderr():
        proposal = propose(
            candidates,
            cost_model,
            batches,
            max_strategies=namespace.max_strategies,
            longest=counts.longest,
            seed=namespace.seed,
            row_quantum=namespace.row_quantum_tokens,
            on_progress=on_progress,
        )
    assumed, profile_path = cost_model.assumed_schemes(proposal.pool), namespace.cost_profile
    if namespace.out is not None:
        write_output(namespace.out, {"version": 1, **proposal.pool.to_json()})
        if assumed:
            profile_path = f"{namespace.out}{_PROFILE_SUFFIX}"
            write_output(profile_path, cost_model.only_for(proposal.pool).to_json())
    if namespace.json:
        print_json(proposal.to_json() | {"assumed": list(map(str, assumed))})
        return 0
    warn_of_unknown_overheads(cost_model)
    console = results_console()
    for table in proposal_tables(proposal):
        console.print(table)
        console.print()
    console.print(
        f"{proposal.num_mixes} strategies estimated, {proposal.num_bounds} bounds and "
        f"{proposal.num_plans} plans in {proposal.seconds:.1f} s"
    )
    if proposal.static_s is not None:
        console.print(
            f"{proposal.static_s / proposal.mean_s:.3f} × as fast as {proposal.static}, the best "
            f"static strategy of one scheme with balanced plans: {proposal.static_s:.4f} s",
            highlight=False,
        )
    if assumed:
        console.print(
            f"not measured: {', '.join(map(str, assumed))}; assumed from other widths of cp, with "
            "a ring of keys and values that nothing hides. Measure them with hydraulis profile."
        )
    print_bf16_advice(cost_model, proposal.shares, proposal.mean_s)
    if namespace.out is not None:
        print(f"pool: {namespace.out}")
        if assumed:
            print(f"cost profile with the assumed rows: {profile_path}")
    print_next(
        launch_command(proposal.pool.num_ranks, proposal.pool.ranks_per_node),
        *("--strategy-pool", namespace.out or "POOL", "--cost-profile", profile_path, "FLAGS"),
    )
    return 0


def _candidates(
    namespace: argparse.Namespace, batches: Sequence[Sequence[int]]
) -> tuple[ProfileCostModel, Candidates]:
    """The cost profile, with computed overheads, and the schemes of it that may be used."""
    num_ranks, ranks_per_node = namespace.num_ranks, namespace.ranks_per_node
    if num_ranks < 1 or (ranks_per_node is not None and ranks_per_node < 1):
        raise ConfigurationError(
            f"a job has at least 1 rank on nodes of at least 1 but --num-ranks is {num_ranks} and "
            f"--ranks-per-node {ranks_per_node}; give positive numbers"
        )
    allowed = None
    if namespace.schemes is not None:
        terms = parse_terms(namespace.schemes, label="--schemes")
        allowed = [term.scheme for term in terms if term.scheme is not None]
    ranks_per_node = whole_nodes(num_ranks, ranks_per_node or 0, "--ranks-per-node")
    profile = ProfileCostModel.read(namespace.cost_profile)
    costs = job_options(namespace).costs(
        profile,
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        path=namespace.cost_profile,
    )
    profile = costs.with_widths().profile
    return profile, Candidates.of(profile, num_ranks, ranks_per_node, allowed, batches)


@contextmanager
def proposal_progress(*, is_shown: bool) -> Iterator[OnProgress]:
    """A bar on stderr if that is a terminal."""
    columns = (TextColumn("{task.completed} of {task.total}"), TimeElapsedColumn())
    with progress_bars(*columns, is_shown=is_shown) as progress:
        tasks = {
            what: progress.add_task(what, total=None, visible=False)
            for what in ("search", "bounds", "plans", "baselines")
        }

        def on_progress(what: str, done: int, total: int) -> None:
            progress.update(tasks[what], completed=done, total=total, visible=True)

        yield on_progress


def proposal_tables(proposal: Proposal) -> Iterator[Table]:
    """The pool, smaller and larger pools, and the best strategy of each regime."""
    yield _pool(proposal)
    yield _sizes(proposal)
    yield _regimes(proposal)


def _pool(proposal: Proposal) -> Table:
    is_needed = any(member.gain_s is None for member in proposal.members)
    why = f" ({_NONE}: without it some sequences do not fit)" if is_needed else ""
    table = figures_table(
        "proposed pool",
        ("strategy", "replicas"),
        ("max tokens", "best for", "time, s", "overhead, s", "gain, %"),
        caption=f"Expected: {proposal.mean_s:.4f} s per iteration, the mean of "
        f"{proposal.num_batches} batches. Max tokens: the longest sequence that it holds. Best "
        f"for: share of the batches, and time: of these. Overhead: what regrouping and optimizer "
        f"add to its makespan. Gain: increase of the time without it"
        f"{why}.",
    )
    for member in proposal.members:
        gain = _NONE
        if member.gain_s is not None:
            gain = f"{100 * member.gain_s / (proposal.mean_s + member.gain_s):.2f}"
        table.add_row(
            member.name,
            member.replicas,
            f"{member.longest_tokens:,}",
            f"{100 * member.num_batches / proposal.num_batches:.0f} %",
            _NONE if member.mean_s is None else f"{member.mean_s:.4f}",
            f"{member.overhead_s:.4f}",
            gain,
        )
    return table


def _sizes(proposal: Proposal) -> Table:
    nothing = "No strategy was found that would make this pool faster."
    table = figures_table(
        "pools of other sizes",
        ("strategies",),
        ("time per iteration, s", "one more saves, ms"),
        caption=nothing if proposal.one_more_s is None else "",
    )
    rows = [(", ".join(size.names), size.mean_s) for size in proposal.sizes]
    if proposal.one_more_s is not None and proposal.one_more:
        rows.append((f"all, with {' and '.join(proposal.one_more)}", proposal.one_more_s))
    following = [mean_s for _, mean_s in rows[1:]]
    for place, (names, mean_s) in enumerate(rows):
        saved = f"{1e3 * (mean_s - following[place]):.1f}" if place < len(following) else _NONE
        is_pool = place + 1 == len(proposal.sizes)
        table.add_row(names, f"{mean_s:.4f}", saved, style="bold" if is_pool else None)
    return table


def _regimes(proposal: Proposal) -> Table:
    table = figures_table(
        "one strategy for each regime",
        ("longest sequence, tokens", "best strategy", "in pool"),
        ("batches", "with it alone, s", "with the pool, s"),
        caption="A regime: the same schemes hold the longest sequence of the batch.",
    )
    for regime in proposal.regimes:
        table.add_row(
            f"{regime.above_tokens + 1:,} – {regime.up_to_tokens:,}",
            regime.replicas,
            regime.name or _NONE,
            str(regime.num_batches),
            f"{regime.mean_s:.4f}",
            f"{regime.pool_mean_s:.4f}",
        )
    return table
