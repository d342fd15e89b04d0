"""``hydraulis profile``: measures, fits and writes a cost profile."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from hydraulis_patches.cpu_backend import apply_cpu_backend
from megatron.hydraulis.command_line import add_pool_argument
from megatron.hydraulis.cost_model.model_arguments import gradient_bytes
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError, HydraulisError, StrategyError
from megatron.hydraulis.flags.arguments import Resolved, parse_arguments
from megatron.hydraulis.flags.checks import check_vocabulary_parts
from megatron.hydraulis.json_object import write_output
from megatron.hydraulis.lengths.counts import read_lengths
from megatron.hydraulis.library.building import (
    build_engine,
    choose_core_attention,
    definition_of,
)
from megatron.hydraulis.library.planning import profiled_model
from megatron.hydraulis.loop.entry import set_hardware_queues
from megatron.hydraulis.loop.faults import quieten_upstream, report_error
from megatron.hydraulis.loop.hugging_face import FolderOfRun
from megatron.hydraulis.loop.startup import (
    check_devices,
    check_launched,
    check_launcher_numbers,
    meet,
)
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.profiler.measurements import (
    MIXTURE,
    GridPoint,
    MeasuredPoint,
    MeasuredStrategy,
    Measurements,
    grid,
    measurements_path,
    profile_of,
    profile_tables,
    survey,
)
from megatron.hydraulis.profiler.rig import EngineRig
from megatron.hydraulis.runtime.core_attention import CoreAttentionName
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.memory import MemoryMeter, memory_meter
from megatron.hydraulis.runtime.process_groups import of_all_ranks, on_rank_0
from megatron.hydraulis.runtime.spans import SpanRecorder
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.strategy.notation import parse_scheme
from megatron.hydraulis.terminal import ProgressBars, print_next_proposal

_EXIT_STATUS_OF_ERROR = 2
_EPILOG = (
    "Run it as training is run, with as many ranks: torchrun --standalone --nproc-per-node 4 "
    "--no-python hydraulis profile --out profile.json -- MODEL FLAGS. MODEL FLAGS are those of "
    "hydraulis train, or --hf DIR; data, --lr and other flags of training may be among them and "
    "have no effect. To go on with a run that was interrupted, start it again."
)
_CPU_INFO = Path("/proc/cpuinfo")
_PACKAGES = ("torch", "megatron-core", "numpy", "scipy")
_TRAINING_DEFAULTS = (
    (("--train-iters",), "1"),
    (("--lr",), "1e-4"),
    (("--global-batch-size", "--global-batch-tokens"), "1"),
)
"""Flags that training needs and a profile does not, with a value for the first of each group."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.usage = "%(prog)s --out FILE [FLAGS] -- MODEL FLAGS"
    parser.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help="write the cost profile here, JSON; measurements go to the same folder",
    )
    schemes = parser.add_mutually_exclusive_group()
    schemes.add_argument(
        "--schemes", nargs="+", metavar="SCHEME", help="schemes to measure, for example tp1 tp2 pp2"
    )
    add_pool_argument(
        schemes,
        "; measure its schemes, also if it is for another number of ranks (default: those of "
        "--strategy or --strategy-pool among the model flags)",
        required=False,
    )
    sizes = parser.add_argument_group("grid of micro-batches")
    sizes.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="largest micro-batch in tokens (default: --max-tokens-per-micro-batch of the model "
        "flags, else --seq-length)",
    )
    sizes.add_argument(
        "--num-sizes",
        type=int,
        default=6,
        metavar="N",
        help="sizes to measure: the largest, its half, … (default: %(default)s)",
    )
    sizes.add_argument(
        "--short-tokens",
        type=int,
        default=64,
        metavar="N",
        help="length of short sequences in tokens (default: %(default)s)",
    )
    sizes.add_argument(
        "--lengths",
        metavar="FILE",
        help="lengths of a corpus in tokens, as for the command plan: also measure packings drawn "
        "from them",
    )
    sizes.add_argument(
        "--memory-limit-bytes",
        type=int,
        metavar="N",
        help="memory of a rank in bytes: micro-batches that are expected to take more are not "
        "tried (default: on a CPU what the rank holds and its share of nine tenths of what is "
        "free; on a GPU none)",
    )
    repeats = parser.add_argument_group("repeats")
    repeats.add_argument(
        "--num-warmup",
        type=int,
        default=2,
        metavar="N",
        help="runs that are not counted, before those that are (default: %(default)s)",
    )
    repeats.add_argument(
        "--num-repeats",
        type=int,
        default=5,
        metavar="N",
        help="runs whose median counts (default: %(default)s)",
    )
    parser.add_argument(
        "--restart", action="store_true", help="discard the measurements of an earlier run"
    )
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    parser.add_argument("model_flags", nargs="*", metavar="MODEL FLAGS", help=argparse.SUPPRESS)


def run(namespace: argparse.Namespace) -> int:
    """Measure, fit, write; returns the exit status. Called on every rank of the job."""
    try:
        _run(namespace)
    except HydraulisError as error:
        report_error(error, ranks_have_met=dist.is_initialized())
        return _EXIT_STATUS_OF_ERROR
    return 0


def _run(namespace: argparse.Namespace) -> None:
    measured = ["--strategy-pool", str(namespace.pool)] if namespace.pool else []
    if namespace.schemes:
        measured += ["--strategy", "+".join(namespace.schemes)]
    set_hardware_queues([*namespace.model_flags, *measured])  # as training does
    check_launcher_numbers()
    has_cuda = torch.cuda.is_available()
    if not has_cuda:
        apply_cpu_backend()
    rank = int(os.environ.get("RANK", "0"))
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    quieten_upstream(rank)
    logging.getLogger("megatron.hydraulis").setLevel(logging.WARNING)  # process groups, each time
    job = _Job.of(namespace, num_ranks=num_ranks, rank=rank)
    if has_cuda:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        check_devices(job.num_ranks_of_node, torch.cuda.device_count())
        torch.cuda.set_device(local_rank)
    with _process_group(job, num_ranks=num_ranks, rank=rank):
        if has_cuda:
            # Upstream keeps a state for random numbers that tp ranks do not share.
            model_parallel_cuda_manual_seed(
                job.resolved.args.seed, tp_rank=0, ep_rank=0, etp_rank=0
            )
        profile = job.measure()
        if rank == 0:
            write_output(namespace.out, profile.to_json())
            if namespace.json:
                print(json.dumps(profile.to_json()))
            else:
                print(profile_tables(profile), end="")
                print(f"cost profile: {namespace.out}")
                print_next_proposal(
                    num_ranks,
                    job.resolved.pool.ranks_per_node,
                    namespace.out,
                    job.resolved.args.seq_length,
                )
            warning = profile.poor_fits()
            if warning is not None:
                print(f"warning: {warning}", file=sys.stderr, flush=True)


@contextmanager
def _process_group(job: _Job, *, num_ranks: int, rank: int) -> Iterator[None]:
    """The job of the launcher; without a launcher a job of this process alone."""
    timeout = timedelta(minutes=job.resolved.args.distributed_timeout_minutes)
    store: dist.Store = dist.HashStore()
    if num_ranks > 1 or "RANK" in os.environ:
        check_launched("profile")
        store, rank, num_ranks = meet(timeout)
    dist.init_process_group(
        job.resolved.args.distributed_backend,
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
    )
    yield
    # After an exception ranks may still be in a collective: the process just ends.
    dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The strategies and grid points to measure, and the job to measure them for."""

    namespace: argparse.Namespace
    resolved: Resolved
    filling: dict[Scheme, Strategy]
    """The strategy by which each scheme is measured."""
    pool: Pool
    """These strategies and those of the given pool that this job can run."""
    skipped: tuple[str, ...]
    points: tuple[GridPoint, ...]
    num_ranks_of_node: int

    @classmethod
    def of(cls, namespace: argparse.Namespace, *, num_ranks: int, rank: int) -> _Job:
        """Raises ConfigurationError, DataError."""
        folder = FolderOfRun.named_in(training_defaults(namespace.model_flags))
        of_folder = () if folder is None else folder.flags
        resolved = parse_arguments(
            training_defaults([*of_folder, *namespace.model_flags]),
            num_ranks=num_ranks,
            rank=rank,
            needs_data=False,
        )
        if folder is not None:
            folder.check(resolved)
        pool = resolved.pool if namespace.pool is None else Pool.read(namespace.pool)
        strategies = pool.strategies
        schemes = [scheme for strategy in strategies for scheme in strategy.schemes]
        if namespace.schemes is not None:
            strategies = ()
            schemes = [parse_scheme(text, label="--schemes") for text in namespace.schemes]
        ranks_per_node = resolved.pool.ranks_per_node
        filling, all_strategies, skipped = _profiled_pool(
            schemes, strategies, num_ranks, ranks_per_node
        )
        all_strategies.check_model(resolved.shape)
        check_vocabulary_parts(all_strategies, resolved.vocabulary.padded_size)
        limit = resolved.hydraulis.max_tokens_per_micro_batch
        points = grid(
            namespace.max_tokens or limit or resolved.args.seq_length,
            longest=resolved.args.seq_length,
            short=namespace.short_tokens,
            num_sizes=namespace.num_sizes,
            sample_from=() if namespace.lengths is None else read_lengths(namespace.lengths),
            seed=resolved.args.seed,
        )
        return cls(
            namespace=namespace,
            resolved=resolved,
            filling=filling,
            pool=all_strategies,
            skipped=skipped,
            points=points,
            num_ranks_of_node=min(ranks_per_node, num_ranks),
        )

    def measure(self) -> ProfileCostModel:
        """Collective: everything that has not been measured yet."""
        rank, args = dist.get_rank(), self.resolved.args
        device = _device_name(self.num_ranks_of_node)
        versions = {"python": platform.python_version()} | {
            name: importlib.metadata.version(name) for name in _PACKAGES
        }
        setup = {
            "model_flags": list(self.namespace.model_flags),
            "versions": versions,
            "device": device,
            "num_ranks": dist.get_world_size(),
            "num_warmup": self.namespace.num_warmup,
            "num_repeats": self.namespace.num_repeats,
        }
        if rank == 0:
            for line in self.skipped:
                print(f"warning: {line}", file=sys.stderr, flush=True)
        measurements = self._measurements(setup)
        core_attention = choose_core_attention(self.resolved, self.pool)
        meter = memory_meter(self.num_ranks_of_node)
        limit_bytes = self._limit_bytes(meter)
        rig = EngineRig(
            partial(self._engine, core_attention.name),
            {str(scheme): strategy for scheme, strategy in self.filling.items()},
            meter,
            num_warmup=self.namespace.num_warmup,
            num_measured=self.namespace.num_repeats,
            vocab_size=self.resolved.vocabulary.size,
            seed=args.seed,
        )
        num_steps = len(self.filling) * len(self.points) + len(self.pool.strategies)
        with _shown_steps(num_steps, is_shown=rank == 0) as report:
            points = {
                scheme: survey(
                    str(scheme),
                    self.points,
                    rig.run_point,
                    measurements,
                    limit_bytes=limit_bytes,
                    report=lambda point: report(_point_text(point)),
                )
                for scheme in self.filling
            }
            strategies = self._strategies(rig, measurements, points, report)
        rig.close()
        profile = profile_of(
            points,
            strategies,
            model=profiled_model(self.resolved, core_attention.name),
            device=device,
            source=f"measured by hydraulis profile on {dist.get_world_size()} ranks, "
            f"torch {versions['torch']}, megatron-core {versions['megatron-core']}",
            date=date.today().isoformat(),
            num_ranks=dist.get_world_size(),
            has_host=torch.cuda.is_available(),
            setup=setup,
        )
        return replace(profile, gradient_bytes=gradient_bytes(args))

    def _strategies(
        self,
        rig: EngineRig,
        measurements: Measurements,
        points: dict[Scheme, list[MeasuredPoint]],
        report: Callable[[str], None],
    ) -> list[MeasuredStrategy]:
        """Measure the strategies whose schemes all fit in memory."""
        typical = {
            scheme: point
            for scheme, measured in points.items()
            if (point := _typical_point(measured)) is not None
        }
        found: list[MeasuredStrategy] = []
        for strategy in self.pool.strategies:
            if {scheme.group_schemes[0] for scheme in strategy.schemes} <= set(typical):
                if strategy.name not in measurements.strategies:
                    measurements.add_strategy(rig.run_strategy(strategy, typical))
                found.append(measurements.strategies[strategy.name])
            report(f"strategy {strategy.name}")
        return found

    def _measurements(self, setup: dict[str, Any]) -> Measurements:
        """Collective: those of rank 0's file, to which rank 0 appends."""

        def opened() -> Measurements:
            path = measurements_path(Path(self.namespace.out))
            found = Measurements(path, setup, restart=self.namespace.restart)
            if found.num_found:
                print(
                    f"resuming: {found.num_found} results of an earlier run are in {path}",
                    file=sys.stderr,
                    flush=True,
                )
            return found

        measurements = on_rank_0(opened, "the measurements cannot be used")
        return measurements if dist.get_rank() == 0 else measurements.without_file()

    def _limit_bytes(self, meter: MemoryMeter) -> int | None:
        """The limit of rank 0, on every rank; None if points of any size are tried."""
        limit: int | None = self.namespace.memory_limit_bytes
        if limit is None and not torch.cuda.is_available():
            limit = meter.capacity_bytes()
        return of_all_ranks(limit)[0]

    def _engine(self, core_attention: CoreAttentionName, spans: SpanRecorder) -> RuntimeEngine:
        args = self.resolved.args
        # The measured pool may lack the strategy of --regroup-owners-for.
        hydraulis = replace(self.resolved.hydraulis, regroup_owners_for=None)
        return build_engine(
            replace(self.resolved, hydraulis=hydraulis),
            self.pool,
            definition_of(self.resolved, core_attention),
            AdamWSettings(lr=args.lr, clip_grad=args.clip_grad, eps=args.adam_eps),
            spans=spans,
        )


@contextmanager
def _shown_steps(num_steps: int, *, is_shown: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error, lines if that is no terminal; to be called after a step."""
    columns = (MofNCompleteColumn(), TimeElapsedColumn())
    with ProgressBars(*columns, is_shown=is_shown, line_interval_s=0.0) as bars:
        task = bars.add_task("profile", total=num_steps)
        yield lambda text: bars.update(task, advance=1, description=text)


def _point_text(point: MeasuredPoint) -> str:
    took = f"{point.time_ms:.2f} ms" if point.fits else f"does not fit: {point.why_not}"
    return f"{point.scheme}, {point.point.num_tokens} tokens, {point.point.packing}: {took}"


def training_defaults(model_flags: Sequence[str]) -> list[str]:
    """The flags of a model, with defaults for those that only training needs."""
    added: list[str] = []
    for options, value in _TRAINING_DEFAULTS:
        if not any(word.split("=")[0] in options for word in model_flags):
            added += [options[0], value]
    return [*added, *model_flags]


def _profiled_pool(
    schemes: Iterable[Scheme],
    strategies: Iterable[Strategy],
    num_ranks: int,
    ranks_per_node: int,
) -> tuple[dict[Scheme, Strategy], Pool, tuple[str, ...]]:
    """A strategy to measure each scheme with, all strategies, and a line for each skipped scheme.

    Of a scheme that splits its cp ranks, every size of group is measured as a separate scheme. The
    given strategies that are for the ranks of this job are among all, so that their overheads are
    measured as well.

    Raises ConfigurationError where no scheme can be measured.
    """
    filling: dict[Scheme, Strategy] = {}
    skipped: list[str] = []
    for scheme in dict.fromkeys(group for whole in schemes for group in whole.group_schemes):
        try:
            filling[scheme] = _filling_strategy(scheme, num_ranks, ranks_per_node)
        except StrategyError as error:
            skipped.append(f"skipped: {error}")
    if not filling:
        raise ConfigurationError(
            f"a profile needs at least 1 scheme that can be run but has 0: {'; '.join(skipped)}; "
            f"start more ranks or name other schemes with --schemes"
        )
    named = {strategy.name: strategy for strategy in filling.values()}
    for strategy in strategies:
        is_of_job = (strategy.num_ranks, strategy.ranks_per_node) == (num_ranks, ranks_per_node)
        if is_of_job and {scheme.group_schemes[0] for scheme in strategy.schemes} <= set(filling):
            named.setdefault(strategy.name, strategy)
    return filling, Pool.of(*named.values()), tuple(skipped)


def _filling_strategy(scheme: Scheme, num_ranks: int, ranks_per_node: int) -> Strategy:
    """Fill the ranks with replicas of a scheme, so that the machine is busy as in training.

    A group of fewer than ep ranks runs next to others like it. Raises StrategyError where the ranks
    hold none.
    """
    replica = scheme.as_replica
    if replica != scheme:
        replica = replace(replica, splits_cp=True)
    num_replicas, num_idle = divmod(num_ranks, replica.num_ranks)
    if not num_replicas:
        raise StrategyError(
            f"scheme {scheme} needs {replica.num_ranks} ranks but {num_ranks} were started"
        )
    text = f"{num_replicas}*{replica}" + (f"+{num_idle}*idle" if num_idle else "")
    return Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node)


def _device_name(num_ranks_of_node: int) -> str:
    """The GPU, or the CPU with the number of ranks that share it."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    model = platform.processor() or platform.machine()
    if _CPU_INFO.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", _CPU_INFO.read_text(), re.MULTILINE)
        model = model if found is None else found.group(1)
    num_cores = len(os.sched_getaffinity(0))
    return (
        f"CPU {model}: {num_ranks_of_node} ranks on {num_cores} cores, "
        f"{torch.get_num_threads()} threads a rank"
    )


def _typical_point(points: Sequence[MeasuredPoint]) -> MeasuredPoint | None:
    """The mixture nearest to half of the largest size; None where nothing fits."""
    fitting = [point for point in points if point.fits]
    if not fitting:
        return None
    half = max(point.point.num_tokens for point in fitting) / 2
    mixtures = [point for point in fitting if point.point.packing == MIXTURE] or fitting
    return min(mixtures, key=lambda point: abs(point.point.num_tokens - half))
