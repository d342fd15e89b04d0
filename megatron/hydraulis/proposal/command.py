"""``hydraulis propose``: which strategies a pool should hold."""

import argparse

from megatron.hydraulis.command_line import add_profile_argument
from megatron.hydraulis.cost_model.limits import add_row_quantum
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.cost_model.shape_arguments import (
    add_job_arguments,
    add_regroup_arguments,
    job_options,
    job_ranks,
    print_bf16_advice,
    warn_of_unknown_overheads,
)
from megatron.hydraulis.json_object import write_output
from megatron.hydraulis.lengths.command import (
    add_batch_arguments,
    add_lengths_arguments,
    add_seed,
    batch_sizes,
    print_batch,
)
from megatron.hydraulis.lengths.counts import read_length_counts
from megatron.hydraulis.planner.solver import native_prints_to_stderr
from megatron.hydraulis.proposal.propose import (
    MAX_STRATEGIES,
    NUM_BATCHES,
    propose_for_corpus,
)
from megatron.hydraulis.strategy.notation import parse_terms
from megatron.hydraulis.terminal import (
    launch_command,
    phase_progress,
    print_json,
    print_next,
    results_console,
)

_PROFILE_SUFFIX = ".cost_profile.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the subcommand."""
    corpus = parser.add_argument_group("corpus and batches")
    add_lengths_arguments(corpus)
    add_batch_arguments(corpus)
    add_search_arguments(corpus, num_batches=NUM_BATCHES)
    job = parser.add_argument_group("job")
    add_profile_argument(job)
    add_job_arguments(job)
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
        "--out",
        metavar="FILE",
        help="write the pool file here, JSON; if it has schemes with a cp that was not measured, "
        f"a cost profile with assumed rows for them goes next to it, FILE{_PROFILE_SUFFIX}",
    )
    output.add_argument("--json", action="store_true", help="print all results as JSON")


def add_search_arguments(
    parser: argparse._ActionsContainer, *, num_batches: int | None, note: str = "%(default)s"
) -> None:
    """Declares the flags of a search for a pool; num_batches is the default, as note says."""
    parser.add_argument(
        "--num-batches",
        type=int,
        default=num_batches,
        metavar="N",
        help=f"number of batches to sample (default: {note})",
    )
    add_seed(parser)
    parser.add_argument(
        "--max-strategies",
        type=int,
        default=MAX_STRATEGIES,
        metavar="K",
        help="maximum number of strategies in the pool (default: %(default)s)",
    )


def run(namespace: argparse.Namespace) -> int:
    """Proposes a pool, prints and writes it; returns the exit status.

    Raises ConfigurationError, StrategyError or DataError for invalid files and flags, PlanError if
    no scheme holds the longest sequence.
    """
    num_ranks, ranks_per_node = job_ranks(namespace)
    allowed = None
    if namespace.schemes is not None:
        terms = parse_terms(namespace.schemes, label="--schemes")
        allowed = [term.scheme for term in terms if term.scheme is not None]
    counts = read_length_counts(namespace.lengths)
    counts = counts.cut(namespace.seq_length, namespace.long_sequences)
    sizes = batch_sizes(namespace)
    profile_path = namespace.cost_profile
    profile = ProfileCostModel.read(profile_path)
    with phase_progress() as on_progress, native_prints_to_stderr():
        on_progress("costs", 0, 1)
        costs = job_options(namespace).costs(
            profile, num_ranks=num_ranks, ranks_per_node=ranks_per_node, path=profile_path
        )
        costs = costs.with_widths()
        on_progress("costs", 1, 1)
        proposal = propose_for_corpus(
            counts,
            sizes,
            costs.profile,
            num_ranks=num_ranks,
            ranks_per_node=ranks_per_node,
            schemes=allowed,
            num_batches=namespace.num_batches,
            max_strategies=namespace.max_strategies,
            seed=namespace.seed,
            row_quantum=namespace.row_quantum_tokens,
            on_progress=on_progress,
        )
    cost_model = proposal.profile
    assumed = cost_model.assumed_schemes(proposal.pool)
    if namespace.out is not None:
        write_output(namespace.out, {"version": 1, **proposal.pool.to_json()})
        if assumed:
            profile_path = f"{namespace.out}{_PROFILE_SUFFIX}"
            write_output(profile_path, proposal.profile.to_json())
    if namespace.json:
        print_json(proposal.to_json() | {"assumed": list(map(str, assumed))})
        return 0
    warn_of_unknown_overheads(cost_model)
    print_batch(sizes, counts, namespace.seq_length)
    console = results_console()
    for table in proposal.tables():
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
        *("--strategy-pool", namespace.out or "POOL", "--cost-profile", profile_path),
        *namespace.training_words,
    )
    return 0
