"""``hydraulis simulate``: iteration times without a GPU."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import TextColumn, TimeRemainingColumn

from megatron.hydraulis.cost_model.limits import Limits, add_row_quantum
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.cost_model.shape_arguments import (
    add_regroup_arguments,
    given_shape,
    job_options,
    print_bf16_advice,
    warn_of_unknown_overheads,
)
from megatron.hydraulis.errors import ConfigurationError, PlanError
from megatron.hydraulis.json_object import write_json
from megatron.hydraulis.lengths.command import (
    add_batch_arguments,
    add_long_sequences,
    batch_sizes,
    check_seed,
    check_seq_length,
)
from megatron.hydraulis.lengths.counts import read_length_counts
from megatron.hydraulis.observability.trace import (
    MERGED_FILE_NAME,
    Span,
    TraceWindow,
    TraceWriter,
)
from megatron.hydraulis.observability.trace_analysis import Spans
from megatron.hydraulis.observability.trace_picture import draw_trace
from megatron.hydraulis.planner.solver import native_prints_to_stderr
from megatron.hydraulis.simulator.batches import (
    BatchPlanning,
    default_num_processes,
    sample_batches,
)
from megatron.hydraulis.simulator.output import (
    draw_results,
    iteration_spans,
    result_table,
    stage_names,
    strategy_use_table,
)
from megatron.hydraulis.simulator.results import SimulationSettings, WayResult, simulate_way
from megatron.hydraulis.simulator.simulation import IterationTasks
from megatron.hydraulis.simulator.ways import CONTEXT_WAYS, PACKING, POOL, WAYS, Ways
from megatron.hydraulis.strategy import Pool
from megatron.hydraulis.terminal import (
    launch_command,
    print_json,
    print_next,
    progress_bars,
    results_console,
)

RESULTS_FILE_NAME, PICTURE_FILE_NAME = "simulation.json", "simulation.png"
ITERATION_PICTURE_FILE_NAME = "iteration.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the subcommand."""
    parser.description = (
        "Estimate iteration times without a GPU, by simulating 1F1B of every replica, regrouping "
        "and planning, for the pool and for simpler ways to train, on the same batches. Files and "
        "flags determine the result (with --plan-time, or if planning is faster than training)."
    )
    files = parser.add_argument_group("input and output")
    files.add_argument(
        "--lengths",
        required=True,
        metavar="FILE",
        help="lengths of the corpus in tokens: an .idx, a JSON list, text with a number per line, "
        "or a .csv with the header length_tokens,count",
    )
    files.add_argument(
        "--cost-profile",
        required=True,
        metavar="FILE",
        help="cost profile, JSON: times of the schemes in ms, their limits in tokens per "
        "micro-batch; regroup_ms and optimizer_ms of a strategy are included if present",
    )
    files.add_argument("--pool", required=True, metavar="FILE", help="pool of strategies, JSON")
    files.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help=f"write {RESULTS_FILE_NAME}, {PICTURE_FILE_NAME}, {MERGED_FILE_NAME} (for "
        f"https://ui.perfetto.dev) and {ITERATION_PICTURE_FILE_NAME} here",
    )
    files.add_argument("--json", action="store_true", help="print the results as JSON, times in s")
    batches = parser.add_argument_group("iterations")
    batches.add_argument(
        "--iterations",
        type=int,
        default=100,
        metavar="N",
        help="iterations to simulate (default: %(default)s)",
    )
    add_batch_arguments(batches)
    batches.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help="most tokens of a sequence (default: the most tokens that a micro-batch of the pool "
        "may have)",
    )
    add_long_sequences(batches)
    batches.add_argument(
        "--long-sequence-window",
        type=int,
        default=0,
        metavar="K",
        help="let a long sequence wait for others, at most K iterations, and compare the pool with "
        "and without it (default: %(default)s)",
    )
    batches.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the batches (default: %(default)s)",
    )
    batches.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=WAYS,
        metavar="WAY",
        help=f"what to simulate, of {', '.join(map(repr, WAYS))} (default: all); explained in "
        "docs/metrics.md",
    )
    planning = parser.add_argument_group("planning")
    planning.add_argument(
        "--plan-ahead",
        type=int,
        default=2,
        metavar="K",
        help="iterations planned ahead; 0 plans between iterations (default: %(default)s)",
    )
    planning.add_argument(
        "--plan-time",
        type=float,
        metavar="S",
        help="time of a plan in s (default: the CPU time that it takes here)",
    )
    planning.add_argument(
        "--processes",
        type=int,
        default=default_num_processes(),
        metavar="N",
        help="number of planning processes if there are many iterations; it does not change the "
        "plans (default: the cores, here %(default)s)",
    )
    add_row_quantum(planning)
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
    if namespace.iterations < 1:
        raise ConfigurationError(
            f"--iterations is at least 1 but is {namespace.iterations}; raise it"
        )
    check_seq_length(namespace.seq_length)
    check_seed(namespace.seed)
    if namespace.long_sequence_window < 0:
        raise ConfigurationError(
            f"--long-sequence-window is at least 0 but is "
            f"{namespace.long_sequence_window}; raise it"
        )
    if namespace.plan_time is not None and not 0.0 <= namespace.plan_time < math.inf:
        raise ConfigurationError(
            f"--plan-time is finite and not negative but is {namespace.plan_time} s; give 0 for "
            f"none"
        )
    pool = Pool.read(namespace.pool)
    profile = ProfileCostModel.read(namespace.cost_profile)
    window = _window(namespace)
    costs = job_options(namespace).costs_of_pool(profile, pool, path=namespace.cost_profile)
    profile = costs.profile
    # With the iteration before the traced ones: they begin when it ends.
    kept = range(0) if namespace.out is None else range(window.first - 1, window.last + 1)
    settings = SimulationSettings(
        shape=given_shape(namespace) if costs.model is None else costs.model.shape,
        regroup=profile.regroup,
        plan_ahead=namespace.plan_ahead,
        kept=kept,
    )
    counts = read_length_counts(namespace.lengths).cut(
        namespace.seq_length or _longest_held(pool, profile), namespace.long_sequences
    )
    sampled = partial(
        sample_batches,
        counts.sequences,
        seed=namespace.seed,
        sizes=batch_sizes(namespace),
    )
    batches = sampled(
        num_batches=namespace.iterations, long_sequence_window=namespace.long_sequence_window
    )
    names = [way for way in WAYS if way in namespace.ways]
    with (
        progress_bars(TextColumn("{task.completed} batches"), TimeRemainingColumn()) as progress,
        native_prints_to_stderr(),
        BatchPlanning(namespace.processes) as planning,
    ):
        task = progress.add_task("planning", total=None)
        ways = Ways(
            batches=batches,
            pool=pool,
            costs=costs,
            seq_length=namespace.seq_length,
            shape=settings.shape,
            plan_time_s=namespace.plan_time,
            row_quantum=namespace.row_quantum_tokens,
            planning=planning,
            advance=lambda: progress.advance(task),
        )
        results: list[WayResult] = []
        skipped: dict[str, str] = {}
        for number, name in enumerate(names, start=1):
            progress.update(task, description=f"{number}/{len(names)} {name}")
            result = _simulated(name, ways, settings)
            if isinstance(result, WayResult):
                results.append(result)
            else:
                skipped[name] = result
        without_window = None
        if namespace.long_sequence_window and POOL in names:
            progress.update(task, description=f"{POOL} without the window")
            others = replace(ways, batches=sampled(num_batches=len(batches)))
            without_window = _simulated(POOL, others, settings)
    if not results:
        raise ConfigurationError(
            f"--ways: no strategy for {', '.join(skipped)} can be simulated with "
            f"sequences of {ways.limit} tokens; simulate {POOL!r} too"
        )
    reference = next((each for each in results if each.name == PACKING), results[0])
    content = _to_json(results, reference, skipped, ways)
    if isinstance(without_window, WayResult):
        with_window = next(each for each in results if each.name == POOL)
        gain = with_window.tokens_per_s / without_window.tokens_per_s
        content["long_sequence_window"] = {
            "iterations": namespace.long_sequence_window,
            "gain": gain,
            "without": without_window.to_json(reference),
        }
    if namespace.out is not None:
        _write(namespace.out, results, reference, content, window, _title(ways))
    if namespace.json:
        print_json(content)
        return 0
    warn_of_unknown_overheads(profile, pool.strategies)
    console = results_console()
    console.print(result_table(results, reference, _title(ways)))
    console.print(strategy_use_table(results))
    if "long_sequence_window" in content:
        console.print(
            f"Long sequences that wait up to {namespace.long_sequence_window} iterations: the pool "
            f"trains {gain:.3f} × the tokens/s that it trains without."
        )
    for name, why in skipped.items():
        console.print(f"{name!r} is skipped: {why}.", markup=False)
    for result in results:
        if result.name == POOL:
            num_iterations = len(result.accounts)
            shares = {
                pool.strategy(name): num / num_iterations for name, num in result.num_uses.items()
            }
            print_bf16_advice(profile, shares, result.time_s / num_iterations)
    if namespace.out is not None:
        console.print(f"written to {namespace.out}", markup=False)
    print_next(
        launch_command(pool.num_ranks, pool.ranks_per_node),
        *("--strategy-pool", namespace.pool, "--cost-profile", namespace.cost_profile, "FLAGS"),
    )
    return 0


def _simulated(name: str, ways: Ways, settings: SimulationSettings) -> WayResult | str:
    """The result of a way, or why it is skipped."""
    try:
        result = simulate_way(name, ways.candidates(name), settings)
    except PlanError as error:
        # The widths of this way may not hold a batch; the other ways are still useful.
        if name not in CONTEXT_WAYS:
            raise
        return str(error)
    if result is not None:
        return result
    if name in CONTEXT_WAYS and not ways.costs.knows_exchange:
        return "the cost of cp is unknown; give --device and the model, or measure schemes with cp"
    return f"none of its strategies holds a sequence of {ways.limit} tokens"


def _longest_held(pool: Pool, profile: ProfileCostModel) -> int:
    """Most tokens of a sequence that a strategy of the pool can hold."""
    limits = Limits(profile)
    return max(
        limits.max_tokens(strategy, scheme)
        for strategy in pool.strategies
        for scheme in strategy.schemes
    )


def _window(namespace: argparse.Namespace) -> TraceWindow:
    if namespace.trace_iterations is None:
        return TraceWindow(namespace.iterations, namespace.iterations)
    window = TraceWindow.parse(namespace.trace_iterations)
    if window.first > namespace.iterations:
        raise ConfigurationError(
            f"--trace-iterations begin with {window.first} but --iterations is "
            f"{namespace.iterations}; trace earlier iterations or simulate more"
        )
    return window


def _title(ways: Ways) -> str:
    num_tokens = sum(map(sum, ways.batches))
    num = len(ways.batches)
    return (
        f"{num} iterations on {ways.pool.num_ranks} ranks: {num_tokens / num:,.0f} tokens each "
        f"(mean), longest sequence {ways.longest:,}"
    )


def _to_json(
    results: Sequence[WayResult], reference: WayResult, skipped: dict[str, str], ways: Ways
) -> dict[str, Any]:
    return {
        "num_ranks": ways.pool.num_ranks,
        "num_iterations": len(ways.batches),
        "num_tokens": sum(map(sum, ways.batches)),
        "longest_tokens": ways.longest,
        "reference": reference.name,
        "ways": [result.to_json(reference) for result in results],
        "left_out": skipped,
    }


def _write(
    folder: Path,
    results: Sequence[WayResult],
    reference: WayResult,
    content: dict[str, Any],
    window: TraceWindow,
    title: str,
) -> None:
    """Writes results, their picture, a trace and a picture of its last iteration."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RESULTS_FILE_NAME, content)
    except OSError as error:
        raise ConfigurationError(
            f"--out needs a writable folder: {folder}: {error.strerror}; give another folder"
        ) from error
    draw_results(results, reference, folder / PICTURE_FILE_NAME, title)
    traced = results[-1]
    started_ms = 0.0
    with TraceWriter(folder / MERGED_FILE_NAME) as writer:
        for iteration in traced.iterations:
            if iteration.number in window:
                spans = iteration_spans(iteration, started_ms=started_ms)
                writer.write(spans)
                shown = _shown_spans(iteration, spans)
                last, rank_names = iteration.number, stage_names(iteration)
            started_ms = iteration.end_ms
    draw_trace(
        Spans.of(shown),
        last,
        folder / ITERATION_PICTURE_FILE_NAME,
        rank_names,
        fix="free space there or choose another --out",
    )


def _shown_spans(iteration: IterationTasks, spans: Sequence[Span]) -> list[Span]:
    """Spans of one rank of every stage, since all its ranks do the same; collectives, which are the
    same on all ranks, only of the first rank."""
    leaders = list(stage_names(iteration))
    first_only = leaders[:1]
    return [
        span for span in spans if span.rank in (first_only if span.track == "regroup" else leaders)
    ]
