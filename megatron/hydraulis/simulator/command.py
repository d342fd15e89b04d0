"""``hydraulis simulate``: iteration times without a GPU."""

import argparse
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.hydraulis.command_line import (
    add_flags,
    add_lengths_argument,
    add_pool_argument,
    add_profile_argument,
)
from megatron.hydraulis.cost_model.job_costs import (
    add_regroup_arguments,
    job_options,
    print_bf16_advice,
    warn_of_assumed_rows,
    warn_of_unknown_overheads,
)
from megatron.hydraulis.cost_model.profile import ProfileCostModel, proposed_profile_path
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.json_object import write_json
from megatron.hydraulis.lengths.batches import add_batch_arguments
from megatron.hydraulis.observability.pictures import save_picture
from megatron.hydraulis.observability.trace import (
    MERGED_FILE_NAME,
    Span,
    Spans,
    TraceWindow,
    TraceWriter,
)
from megatron.hydraulis.observability.trace_picture import trace_figure
from megatron.hydraulis.planner.planned import stage_names
from megatron.hydraulis.planner.solver import native_prints_to_stderr
from megatron.hydraulis.simulator.comparison import Comparison, SimulationRequest, compare_ways
from megatron.hydraulis.simulator.results import WayResult
from megatron.hydraulis.simulator.simulation import IterationTasks, OperationTasks
from megatron.hydraulis.simulator.ways import BALANCED, POOL, default_num_processes
from megatron.hydraulis.strategy import Pool, Strategy
from megatron.hydraulis.terminal import (
    launch_command,
    phase_progress,
    print_json,
    print_next,
    results_console,
)

RESULTS_FILE_NAME, PICTURE_FILE_NAME = "simulation.json", "simulation.png"
ITERATION_PICTURE_FILE_NAME = "iteration.png"

_US_PER_MS = 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the subcommand."""
    parser.description = (
        "Estimate iteration times without a GPU, by simulating 1F1B of every replica, regrouping "
        "and planning, for the pool and for simpler ways to train, on the same batches. Files and "
        "flags determine the result (with --plan-time, or if planning is faster than training)."
    )
    files = parser.add_argument_group("input and output")
    add_lengths_argument(files)
    add_profile_argument(files)
    add_pool_argument(files)
    files.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help=f"write {RESULTS_FILE_NAME}, {PICTURE_FILE_NAME}, {MERGED_FILE_NAME} (for "
        f"https://ui.perfetto.dev) and {ITERATION_PICTURE_FILE_NAME} here",
    )
    files.add_argument("--json", action="store_true", help="print the results as JSON, times in s")
    batches = parser.add_argument_group("iterations")
    add_flags(batches, SimulationRequest, "iterations")
    add_batch_arguments(batches)
    add_flags(batches, SimulationRequest, "seq_length", "long_sequences", "seed", "ways")
    planning = parser.add_argument_group("planning")
    add_flags(
        planning,
        SimulationRequest,
        *("plan_ahead", "plan_time_s", "num_processes", "row_quantum_tokens"),
        num_processes=default_num_processes(),
    )
    add_regroup_arguments(parser)
    parser.add_argument_group("trace").add_argument(
        "--trace-iterations",
        metavar="FIRST..LAST",
        help="iterations of the pool, or of the last way, in the trace (default: the last one)",
    )


def run(namespace: argparse.Namespace) -> int:
    """Simulates all ways and prints tables or JSON; returns the exit status.

    Raises ConfigurationError, StrategyError or DataError for invalid files and flags, PlanError if
    no strategy can hold a batch.
    """
    pool = Pool.read(namespace.pool)
    profile = ProfileCostModel.read(namespace.cost_profile)
    window = _window(namespace)
    options = job_options(namespace)
    costs = options.costs_of_pool(profile, pool, path=namespace.cost_profile)
    request = SimulationRequest.of_command(
        namespace,
        pool=pool,
        costs=costs,
        shape=options.shape,
        # With the iteration before the traced ones: they begin when it ends.
        kept=range(0) if namespace.out is None else range(window.first - 1, window.last + 1),
    )
    with phase_progress() as on_progress, native_prints_to_stderr():
        on_progress("batches", 0, 1)
        comparison = compare_ways(request, on_progress)
    assumed = list(map(str, costs.profile.assumed_schemes(pool)))
    results, content = comparison.results, comparison.to_json() | {"assumed": assumed}
    if namespace.out is not None:
        _write(namespace.out, comparison, content, window)
    if namespace.json:
        print_json(content)
        return 0
    warn_of_unknown_overheads(costs.profile, pool.strategies)
    warn_of_assumed_rows(costs.profile, pool)
    request.print_batch()
    console = results_console()
    for table in comparison.tables():
        console.print(table)
    for line in comparison.remarks():
        console.print(line, markup=False)
    for result in results:
        if result.name == POOL:
            num_iterations = len(result.accounts)
            shares = {
                pool.strategy(name): num / num_iterations for name, num in result.num_uses.items()
            }
            print_bf16_advice(costs.profile, shares, result.time_s / num_iterations)
    if namespace.out is not None:
        console.print(f"written to {namespace.out}", markup=False)
    profile_path = namespace.cost_profile
    flags = _faster_static(results, pool, profile)
    if flags is None:
        flags = ("--strategy-pool", namespace.pool)
        proposed = Path(proposed_profile_path(namespace.pool))
        if proposed.exists() and not all(map(profile.find, pool.groups)):
            profile_path = proposed
    print_next(
        launch_command(pool.num_ranks, pool.ranks_per_node),
        *(*flags, "--cost-profile", profile_path, *namespace.training_words),
    )
    return 0


def _faster_static(
    results: Iterable[WayResult], pool: Pool, profile: ProfileCostModel
) -> tuple[str, str] | None:
    """Flags of the best static strategy if it is faster than the pool and training can use it:
    training needs rows in its profile."""
    by_name = {each.name: each for each in results}
    static, with_pool = by_name.get(BALANCED), by_name.get(POOL)
    if static is None or with_pool is None or static.time_s >= with_pool.time_s:
        return None
    (notation,) = static.strategies.values()
    strategy = Strategy.parse(notation, pool.num_ranks, ranks_per_node=pool.ranks_per_node)
    if not all(map(profile.find, Pool.of(strategy).groups)):
        return None
    return "--strategy", notation


def _window(namespace: argparse.Namespace) -> TraceWindow:
    if namespace.trace_iterations is None:
        last = max(1, namespace.iterations)  # fewer are refused by the simulation
        return TraceWindow(last, last)
    window = TraceWindow.parse(namespace.trace_iterations)
    if window.first > namespace.iterations:
        raise ConfigurationError(
            f"--trace-iterations begin with {window.first} but --iterations is "
            f"{namespace.iterations}; trace earlier iterations or simulate more"
        )
    return window


def _write(
    folder: Path, comparison: Comparison, content: dict[str, Any], window: TraceWindow
) -> None:
    """Writes results, their picture, a trace and a picture of its last iteration."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RESULTS_FILE_NAME, content)
    except OSError as error:
        raise ConfigurationError(
            f"--out needs a writable folder: {folder}: {error.strerror}; give another folder"
        ) from error
    fix = "free space there or choose another --out"
    save_picture(comparison.figure(), folder / PICTURE_FILE_NAME, fix=fix)
    traced = comparison.results[-1]
    started_ms = 0.0
    with TraceWriter(folder / MERGED_FILE_NAME) as writer:
        for iteration in traced.iterations:
            if iteration.number in window:
                spans = iteration_spans(iteration, started_ms=started_ms)
                writer.write(spans)
                shown = _shown_spans(iteration, spans)
                last, rank_names = iteration.number, _names(iteration)
            started_ms = iteration.end_ms
    figure = trace_figure(Spans.of(shown), last, rank_names)
    save_picture(figure, folder / ITERATION_PICTURE_FILE_NAME, fix=fix)


def _names(iteration: IterationTasks) -> dict[int, str]:
    return stage_names(each.replica for each in iteration.replicas)


def _shown_spans(iteration: IterationTasks, spans: Sequence[Span]) -> list[Span]:
    """Spans of one rank of every stage, since all its ranks do the same; collectives, which are the
    same on all ranks, only of the first rank."""
    leaders = list(_names(iteration))
    first_only = leaders[:1]
    return [
        span for span in spans if span.rank in (first_only if span.track == "regroup" else leaders)
    ]


def iteration_spans(iteration: IterationTasks, *, started_ms: float) -> list[Span]:
    """Spans of every rank in an iteration, by start.

    The spans have the names of measured ones and are not planned ones: the simulation takes the
    place of a run, so that tables, pictures and viewers of traces show it in the same way.

    started_ms: end of the previous iteration.
    """
    common = list(_common_spans(iteration, started_ms))
    ranks = range(iteration.work.strategy.num_ranks)
    spans = [replace(span, rank=rank) for rank in ranks for span in common]
    for replica in iteration.replicas:
        scheme = replica.replica.scheme
        for stage, operations in enumerate(replica.by_stage):
            own = list(_stage_spans(iteration, operations))
            for cp, tp in itertools.product(range(scheme.cp), range(scheme.tp)):
                rank = replica.replica.rank_at(stage, cp, tp)
                spans += [replace(span, rank=rank) for span in own]
    return sorted(spans, key=lambda span: (span.start_us, -span.end_us))


def _span(track: str, name: str, start_ms: float, end_ms: float, **detail: int | str) -> Span:
    """A span of rank 0, to be copied to all ranks that have it."""
    return Span(
        rank=0,
        track=track,
        name=name,
        start_us=start_ms * _US_PER_MS,
        end_us=end_ms * _US_PER_MS,
        detail=detail,
    )


def _stage_spans(iteration: IterationTasks, operations: list[OperationTasks]) -> Iterator[Span]:
    number = iteration.number
    free_ms = iteration.begin_ms
    for operation in operations:
        stage = operation.stage
        if operation.start_ms > free_ms:
            detail = {"iteration": number, "stage": stage}
            yield _span("compute", "pipeline wait", free_ms, operation.start_ms, **detail)
        yield _span(
            "compute",
            "forward" if operation.is_forward else "backward",
            operation.start_ms,
            operation.end_ms,
            iteration=number,
            micro_batch=operation.micro_batch,
            stage=stage,
            num_tokens=operation.num_tokens,
        )
        for earlier, later in zip(operation.tasks, operation.tasks[1:], strict=False):
            if later.start_ms > earlier.end_ms:
                yield _span("host", "gather wait", earlier.end_ms, later.start_ms, iteration=number)
        free_ms = operation.end_ms


def _common_spans(iteration: IterationTasks, started_ms: float) -> Iterator[Span]:
    """Spans that all ranks have in common."""
    number, strategy = iteration.number, iteration.work.strategy.name
    begin_ms, end_ms = iteration.begin_ms, iteration.end_ms
    if begin_ms > started_ms:
        yield _span("host", "planning wait", started_ms, begin_ms, iteration=number)
    yield _span("iteration", "iteration", begin_ms, end_ms, iteration=number, strategy=strategy)
    collectives = [
        *(("gather", call.buckets[0], call.gather) for call in iteration.calls),
        *(("scatter", call.buckets[0], call.scatter) for call in iteration.calls),
    ]
    for name, index, task in collectives:
        yield _span("regroup", name, task.start_ms, task.end_ms, iteration=number, bucket=index)
    if iteration.updates:
        first_ms = min(task.start_ms for task in iteration.updates)
        last_ms = max(task.end_ms for task in iteration.updates)
        yield _span("compute", "optimizer", first_ms, last_ms, iteration=number)
    if iteration.overhead is not None:
        task = iteration.overhead
        yield _span("regroup", "overhead", task.start_ms, task.end_ms, iteration=number)
