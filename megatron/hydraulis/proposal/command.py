"""``hydraulis propose``: which strategies a pool should hold."""

import argparse

from megatron.hydraulis.command_line import (
    add_flags,
    add_lengths_argument,
    add_profile_argument,
)
from megatron.hydraulis.cost_model.job_costs import (
    add_job_arguments,
    add_regroup_arguments,
    job_options,
    job_ranks,
    print_bf16_advice,
    warn_of_assumed_rows,
    warn_of_unknown_overheads,
)
from megatron.hydraulis.cost_model.profile import ProfileCostModel, proposed_profile_path
from megatron.hydraulis.json_object import write_output
from megatron.hydraulis.lengths.batches import add_batch_arguments
from megatron.hydraulis.planner.solver import native_prints_to_stderr
from megatron.hydraulis.proposal.propose import ProposalRequest, propose
from megatron.hydraulis.proposal.verdict import (
    PROFILE,
    judged,
    print_measurements,
)
from megatron.hydraulis.terminal import (
    launch_command,
    phase_progress,
    print_json,
    print_next,
    results_console,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the subcommand."""
    corpus = parser.add_argument_group("corpus and batches")
    add_lengths_argument(corpus)
    add_flags(corpus, ProposalRequest, "seq_length", "long_sequences")
    add_batch_arguments(corpus)
    add_flags(corpus, ProposalRequest, "num_batches", "seed", "max_strategies")
    job = parser.add_argument_group("job")
    add_profile_argument(job)
    add_job_arguments(job)
    add_flags(job, ProposalRequest, "schemes", "row_quantum_tokens")
    add_regroup_arguments(parser)
    output = parser.add_argument_group("pool")
    output.add_argument(
        "--out",
        metavar="FILE",
        help="write the pool file here, JSON; if it has schemes with a cp that was not measured, a "
        f"cost profile with assumed rows goes next to it, {proposed_profile_path('FILE')}",
    )
    output.add_argument("--json", action="store_true", help="print all results as JSON")


def run(namespace: argparse.Namespace) -> int:
    """Proposes a pool, prints and writes it; returns the exit status.

    Raises ConfigurationError, StrategyError or DataError for invalid files and flags, PlanError if
    no scheme holds the longest sequence.
    """
    num_ranks, ranks_per_node = job_ranks(namespace)
    request = ProposalRequest.of_command(
        namespace, num_ranks=num_ranks, ranks_per_node=ranks_per_node
    )
    profile_path = namespace.cost_profile
    profile = ProfileCostModel.read(profile_path)
    with phase_progress() as on_progress, native_prints_to_stderr():
        on_progress("costs", 0, 1)
        costs = job_options(namespace).costs(
            profile, num_ranks=num_ranks, ranks_per_node=ranks_per_node, path=profile_path
        )
        costs = costs.with_widths()
        on_progress("costs", 1, 1)
        proposal = propose(request, costs.profile, on_progress)
        on_progress("baseline and range", 0, 1)
        proposal = judged(request, costs, proposal)
        on_progress("baseline and range", 1, 1)
    cost_model = proposal.profile
    assumed = cost_model.assumed_schemes(proposal.pool)
    if namespace.out is not None:
        write_output(namespace.out, {"version": 1, **proposal.pool.to_json()})
        if assumed:
            profile_path = proposed_profile_path(namespace.out)
            write_output(profile_path, proposal.profile.to_json())
    if namespace.json:
        print_json(proposal.to_json() | {"assumed": list(map(str, assumed))})
        return 0
    warn_of_unknown_overheads(cost_model)
    warn_of_assumed_rows(cost_model, proposal.pool)
    request.print_batch()
    console = results_console()
    for table in proposal.tables():
        console.print(table)
        console.print()
    console.print(
        f"{proposal.num_mixes} strategies estimated, {proposal.num_bounds} bounds and "
        f"{proposal.num_plans} plans in {proposal.seconds:.1f} s"
    )
    if proposal.verdict is not None:
        console.print(str(proposal.verdict), highlight=False)
        if proposal.verdict.is_open:
            wanted = proposal.verdict.to_measure
            print_measurements(wanted, proposal.pool, namespace.training_words)
            console.print(f"Then propose again with --cost-profile {PROFILE}.", highlight=False)
    print_bf16_advice(cost_model, proposal.shares, proposal.mean_s)
    if namespace.out is not None:
        print(f"pool: {namespace.out}")
        if assumed:
            print(f"cost profile with the assumed rows: {profile_path}")
    if proposal.verdict is not None and proposal.verdict.is_open:
        return 0
    print_next(
        launch_command(proposal.pool.num_ranks, proposal.pool.ranks_per_node),
        *("--strategy-pool", namespace.out or "POOL", "--cost-profile", profile_path),
        *namespace.training_words,
    )
    return 0
