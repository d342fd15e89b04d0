"""From a command line to a finished run."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hydraulis_patches.cpu_backend import apply_cpu_backend
from hydraulis_patches.training_loop import apply_training_loop
from megatron.hydraulis.cost_model.context import te_all_to_all_refusal
from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.data.sampler import EvaluationSampler, LengthSampler
from megatron.hydraulis.data.sources import load_corpora_from_arguments
from megatron.hydraulis.errors import ConfigurationError, HydraulisError
from megatron.hydraulis.flags.arguments import (
    Resolved,
    gpt_model_config,
    install_globals,
    parse_arguments,
)
from megatron.hydraulis.flags.checks import check_all_to_all
from megatron.hydraulis.flags.defaults import has_fused_weight_gradients
from megatron.hydraulis.flags.describe import describe, format_description
from megatron.hydraulis.loop import error_report, run_folder
from megatron.hydraulis.loop.batch_reader import BatchReader, PlannedData
from megatron.hydraulis.loop.checkpointing import RunCheckpoints
from megatron.hydraulis.loop.devices import (
    check_devices,
    common_constants,
    constants_of_this_rank,
)
from megatron.hydraulis.loop.hang_guard import HangGuard
from megatron.hydraulis.loop.job_store import meet
from megatron.hydraulis.loop.memory_safety import MemorySafety, use_expandable_segments
from megatron.hydraulis.loop.model_container import HydraulisModelConfig
from megatron.hydraulis.loop.plan_feed import PlanExchange, PlanFeed, SampledBatches
from megatron.hydraulis.loop.planning import Planning, look_ahead_planner, read_cost_profile
from megatron.hydraulis.loop.quiet import quieten_upstream
from megatron.hydraulis.loop.refitting import RunRefit
from megatron.hydraulis.loop.signals import heed_both
from megatron.hydraulis.loop.tracing import RunTrace
from megatron.hydraulis.loop.training_loop import Iterators, TrainingLoop
from megatron.hydraulis.observability.earlier_run import (
    set_aside_earlier_run,
    set_aside_earlier_trace,
)
from megatron.hydraulis.observability.records import MetricsWriter
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.runtime.core_attention import CoreAttention, choose, surroundings_here
from megatron.hydraulis.runtime.engine import Engine
from megatron.hydraulis.runtime.executor import (
    ForwardStep,
    LossFunction,
    loss_func,
    make_forward_step,
)
from megatron.hydraulis.runtime.memory import memory_meter
from megatron.hydraulis.runtime.model_building import ModelDefinition
from megatron.hydraulis.runtime.process_groups import (
    device_of_job,
    group_of_self,
    training_loop_collection,
)
from megatron.hydraulis.runtime.spans import SpanRecorder, combine_recorders

EXIT_STATUS_OF_ERROR = 2
EXIT_STATUS_OF_UNFORESEEN_ERROR = 1
"""That of an uncaught exception in Python."""
RESTART_COUNTS = {
    "Slurm has queued this job again": "SLURM_RESTART_COUNT",
    "torchrun has started the ranks again": "TORCHELASTIC_RESTART_COUNT",
}
"""Who starts a run again, and the variable that counts it."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

Corpora = tuple[Corpus | None, Corpus | None, Corpus | None]
"""Training, validation and test data."""


@dataclass(frozen=True, kw_only=True)
class UserHooks:
    """What a user may put in the place of ours, with upstream's signatures."""

    loss_func: LossFunction = loss_func
    """``loss_func(loss_mask, output_tensor) -> (sum of losses, tokens, report)``."""
    model_provider: Callable[..., torch.nn.Module] | None = None
    """``model_provider(pre_process, post_process, config=, pg_collection=)``: one stage."""
    engine: Callable[..., Engine] = Engine
    """What builds the engine: a subclass can watch, or replace, what it is given to run."""


def main(argv: Sequence[str] | None = None, hooks: UserHooks | None = None) -> None:
    """Train as the flags say; exits with status 2 and one line on what is wrong with them.

    Once ranks have met, the process of a rank that raises ends at once, with status 1 and a
    traceback if the error is not one of ours.
    """
    try:
        _run(argv, hooks or UserHooks())
    except HydraulisError as error:
        ranks_have_met = dist.is_initialized()
        error_report.report(error, ranks_have_met=ranks_have_met)
        if ranks_have_met:
            error_report.end_process(EXIT_STATUS_OF_ERROR)
        sys.exit(EXIT_STATUS_OF_ERROR)
    except Exception as error:
        if not dist.is_initialized():
            raise
        error_report.report_unforeseen(error)
        error_report.end_process(EXIT_STATUS_OF_UNFORESEEN_ERROR)


def _run(argv: Sequence[str] | None, hooks: UserHooks) -> None:
    has_cuda = torch.cuda.is_available()
    if has_cuda:
        use_expandable_segments()
    else:
        apply_cpu_backend()
    rank = int(os.environ.get("RANK", "0"))
    quieten_upstream(rank)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    resolved = parse_arguments(argv, num_ranks=num_ranks, rank=rank)
    args = resolved.args
    if resolved.hydraulis.dry_run:
        _Job(resolved, hooks, has_cuda=has_cuda).print_description()
        return
    _check_launcher(num_ranks)
    if has_cuda:
        check_devices(int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)), torch.cuda.device_count())
        torch.cuda.set_device(args.local_rank)
    if rank == 0:
        _warn_of_restart(save=args.save, loads=args.load is not None)
    job = _Job(resolved, hooks, has_cuda=has_cuda)
    job.choose_core_attention()
    corpora = job.load_corpora()
    job.check_limits(corpora)
    run_folder.make_folders(resolved)
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    store, rank, num_ranks = meet(timeout)
    dist.init_process_group(
        args.distributed_backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout
    )
    try:
        job.train(corpora, store)
    except SystemExit:  # how upstream's loop ends upon an exit condition
        dist.destroy_process_group()
        raise
    # After any other exception ranks may still be in a collective, so the groups stay: see `main`.
    dist.destroy_process_group()


def _check_launcher(num_ranks: int) -> None:
    """Raise ConfigurationError unless a launcher has told this process its place in the job."""
    missing = [variable for variable in LAUNCHER_VARIABLES if variable not in os.environ]
    if missing:
        raise ConfigurationError(
            f"ranks are started by torchrun, which sets {len(LAUNCHER_VARIABLES)} variables, but "
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; run torchrun "
            f"--nproc-per-node {num_ranks} -m megatron.hydraulis train FLAGS, or add --dry-run"
        )


def _warn_of_restart(*, save: str | None, loads: bool) -> None:
    """Say that a run which was started again, by Slurm or by torchrun, does not go on."""
    if loads:
        return
    flags = f"--load {save}" if save else "--save DIR --load DIR"
    for who, variable in RESTART_COUNTS.items():
        count = os.environ.get(variable, "")
        if count.isdigit() and int(count) > 0:
            print(
                f"warning: {who} (restart {count}) but there is no --load, so training starts "
                f"again from iteration 1; give {flags} to go on from the latest checkpoint",
                file=sys.stderr,
                flush=True,
            )


class _Job:
    """The parts of one run and how they come together."""

    def __init__(self, resolved: Resolved, hooks: UserHooks, *, has_cuda: bool) -> None:
        self._resolved = resolved
        self._hooks = hooks
        self._has_cuda = has_cuda
        self._engine: Engine | None = None
        self._core_attention = CoreAttention("sdpa", "not chosen")
        self._profile = read_cost_profile(resolved)
        rank = int(os.environ.get("RANK", "0"))
        self._device = constants_of_this_rank(
            has_cuda=has_cuda, speaks=rank == 0 and self._profile is None
        )
        self._planning = Planning.of(resolved, self._device, self._profile)

    def print_description(self) -> None:
        """What --dry-run tells; raises what is wrong with the data as well."""
        corpora = self.load_corpora()
        planning = self._planning
        description = describe(
            self._resolved,
            planning.pool.strategies,
            planning.limits,
            cost_model=planning.source,
            left_out=planning.left_out,
        )
        print(format_description(description))
        for corpus in corpora:
            if corpus is not None:
                print(f"{corpus.name + ' data':<12} {corpus.report}")
                print(f"  longest sequence {int(corpus.lengths.max()):,} tokens")

    def choose_core_attention(self) -> None:
        """Find out which core attention there is; needs this rank's device to be the current one.

        Raises ConfigurationError for one that was asked for and is not there, and for an exchange
        among cp ranks that it does not have.
        """
        args, resolved = self._resolved.args, self._resolved
        here = surroundings_here(dtype=args.params_dtype, head_size=args.kv_channels)
        self._core_attention = choose(resolved.hydraulis.core_attention, here)
        if self._core_attention.name == "te":
            check_all_to_all(args, resolved.pool, resolved.shape, te_all_to_all_refusal)

    def load_corpora(self) -> Corpora:
        """Training, validation and test data, of which only the index is read.

        Raises ConfigurationError, DataError.
        """
        corpora = load_corpora_from_arguments(
            self._resolved.args, long_sequences=self._resolved.hydraulis.long_sequences
        )
        if corpora.train is None:
            raise ConfigurationError(
                "no training data: --split leaves the training part no document of 2 tokens or "
                "more; give more data or another --split"
            )
        return corpora.train, corpora.valid, corpora.test

    def check_limits(self, corpora: Corpora) -> None:
        """Raise an error unless every sequence fits, before any rank waits for another.

        The ranks share the check of the vocabulary. Raises ConfigurationError, DataError.
        """
        self._check_longest(corpora)
        share, num_shares = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        for corpus in corpora:
            if corpus is not None:
                corpus.check_vocabulary(
                    self._resolved.vocabulary.size, share=share, num_shares=num_shares
                )

    def _check_longest(self, corpora: Corpora) -> None:
        self._planning.check_longest(
            {corpus.name: int(corpus.lengths.max()) for corpus in corpora if corpus is not None}
        )

    def _agree_on_device(self, corpora: Corpora) -> None:
        """Collective: all ranks plan with the same device."""
        devices: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(devices, self._device)
        self._device = common_constants(devices)
        self._planning = Planning.of(self._resolved, self._device, self._profile)
        self._check_longest(corpora)

    def train(self, corpora: Corpora, store: dist.Store) -> None:
        """Everything from the process groups on: upstream's pretrain() around our step."""
        from megatron.core.enums import ModelType
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.training import pretrain

        resolved = self._resolved
        args, hydraulis = resolved.args, resolved.hydraulis
        rank = dist.get_rank()
        run_dir = Path(hydraulis.run_dir)
        if self._has_cuda:
            self._agree_on_device(corpora)
        if rank == 0:
            earlier = set_aside_earlier_run(run_dir)
            if earlier is not None:
                print(f"what an earlier run left in this folder is now in {earlier}", flush=True)
            if hydraulis.trace is not None:
                set_aside_earlier_trace(hydraulis.trace)
            run_folder.write_configuration(resolved, self._planning, corpora)
            print(
                f"core attention: {self._core_attention.name} ({self._core_attention.why})",
                flush=True,
            )
            if self._has_cuda and not has_fused_weight_gradients():
                print(
                    "weight gradients: each is added by a separate kernel (apex's "
                    "fused_weight_gradient_mlp_cuda is not installed)",
                    flush=True,
                )
            for line in (*resolved.pool_changes, *self._planning.left_out):
                print(f"warning: {line}", file=sys.stderr, flush=True)
            for corpus in corpora:
                if corpus is not None:
                    print(f"{corpus.name} data: {corpus.report}", flush=True)
        dist.barrier()
        is_last_rank = rank == dist.get_world_size() - 1
        metrics = MetricsWriter(run_dir) if is_last_rank else None
        trace = self._run_trace(store)
        memory = MemorySafety(self._planning, hydraulis, log=partial(print, flush=True))
        refit = RunRefit.of(hydraulis, lambda: memory.planning, store, has_cuda=self._has_cuda)
        guard = HangGuard(
            store, rank, dist.get_world_size(), 60.0 * args.distributed_timeout_minutes
        )
        checkpoints = RunCheckpoints(resolved, self._planning)
        checkpoints.check_save_folder()
        forward_step = make_forward_step(self._hooks.loss_func)

        def make_iterators() -> Iterators:
            self._try_memory_out(memory, forward_step, corpora)
            return self._iterators(corpora, store, checkpoints, memory)

        loop = TrainingLoop(
            hydraulis,
            make_iterators,
            metrics,
            trace,
            refit,
            checkpoints=checkpoints,
            memory=memory,
            guard=guard,
        )
        install_globals(resolved)
        if args.exit_signal_handler:
            heed_both(args.exit_signal)
        model_config = gpt_model_config(args, HydraulisModelConfig)
        model_config.engine_factory = partial(
            self._make_engine,
            spans=combine_recorders(*(each.spans for each in (trace, refit) if each is not None)),
        )
        model_config.num_tokens_in_vocabulary = resolved.vocabulary.size
        model_config.uses_sequence_parallel = hydraulis.sequence_parallel
        model_config.model_provider = self._hooks.model_provider
        model_config.core_attention = self._core_attention.name
        of_self = group_of_self(
            timedelta(minutes=args.distributed_timeout_minutes), "hydraulis_loop"
        )
        apply_training_loop(loop, has_cuda=self._has_cuda)
        ends_properly = False
        try:
            pretrain(
                pretrain_cfg_container_from_args(args, model_config),
                None,
                ModelType.encoder_or_decoder,
                forward_step,
                pg_collection=training_loop_collection(of_self),
                skip_model_parallel_init=True,
            )
            ends_properly = True
        except SystemExit:
            ends_properly = True  # an exit condition of upstream
            raise
        finally:
            if ends_properly:
                checkpoints.finish()
            else:
                checkpoints.abandon()
            if self._engine is not None and ends_properly:
                self._engine.close()
            if metrics is not None:
                metrics.close()
                if ends_properly:
                    run_folder.close_run(run_dir)
            if trace is not None:
                trace.close(merges=ends_properly)
            if refit is not None and ends_properly:
                refit.write(run_dir, self._planning)
            guard.close()

    def _run_trace(self, store: dist.Store) -> RunTrace | None:
        """Collective where a trace is asked for."""
        hydraulis = self._resolved.hydraulis
        if hydraulis.trace is None:
            return None
        return RunTrace(
            Path(hydraulis.trace),
            hydraulis.trace_window,
            self._planning.cost_model,
            store,
            has_cuda=self._has_cuda,
        )

    def _make_engine(self, definition: ModelDefinition, *, spans: SpanRecorder) -> Engine:
        args = self._resolved.args
        self._engine = self._hooks.engine(
            definition,
            self._planning.pool,
            AdamWSettings(
                lr=args.lr,
                min_lr=args.min_lr or 0.0,
                weight_decay=args.weight_decay,
                beta1=args.adam_beta1,
                beta2=args.adam_beta2,
                eps=args.adam_eps,
                clip_grad=args.clip_grad,
            ),
            seed=args.seed,
            timeout=timedelta(minutes=args.distributed_timeout_minutes),
            owners_for=self._resolved.hydraulis.regroup_owners_for,
            overlap=not self._resolved.hydraulis.no_regroup_overlap,
            spans=spans,
        )
        return self._engine

    def _try_memory_out(
        self, memory: MemorySafety, forward_step: ForwardStep, corpora: Corpora
    ) -> None:
        """Collective: what --memory-trial asks for; parameters and optimizer are in place."""
        wish = self._resolved.hydraulis.memory_trial
        if wish == "off" or (wish == "auto" and not self._has_cuda):
            return
        args, hydraulis = self._resolved.args, self._resolved.hydraulis
        longest = max(int(corpus.lengths.max()) for corpus in corpora if corpus is not None)
        assert self._engine is not None
        memory.try_out(
            self._engine,
            forward_step,
            memory_meter(int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))),
            longest_tokens=longest,
            most_tokens=hydraulis.global_batch_tokens or args.global_batch_size * longest,
            vocab_size=self._resolved.vocabulary.size,
        )
        self._planning = memory.planning
        self._check_longest(corpora)

    def _iterators(
        self,
        corpora: Corpora,
        store: dist.Store,
        checkpoints: RunCheckpoints,
        memory: MemorySafety,
    ) -> Iterators:
        args, hydraulis = self._resolved.args, self._resolved.hydraulis
        batch_tokens = hydraulis.global_batch_tokens
        size = {
            "global_batch_size": None if batch_tokens else args.global_batch_size,
            "global_batch_tokens": batch_tokens,
        }
        iterators: list[PlannedData | None] = []
        for corpus in corpora:
            if corpus is None:
                iterators.append(None)
                continue
            is_training = corpus is corpora[0]
            sampler = (
                LengthSampler(corpus.lengths, corpus.groups, seed=args.seed, **size)
                if is_training
                else EvaluationSampler(corpus.lengths, corpus.groups, **size)
            )
            if is_training and checkpoints.sampler_state is not None:
                sampler.load_state_dict(checkpoints.sampler_state)
            batches = SampledBatches(
                sampler, first_iteration=checkpoints.first_iteration if is_training else 0
            )
            exchange = PlanExchange(store, corpus.name)
            feed, plan_dir = None, None
            if dist.get_rank() == 0:
                feed = PlanFeed(
                    look_ahead_planner(self._planning, hydraulis, is_training=is_training),
                    exchange,
                    batches,
                    num_ahead=hydraulis.plan_ahead if is_training else 0,
                )
                plan_dir = hydraulis.plan_dir if is_training else None
            reader = BatchReader(
                corpus,
                batches,
                exchange,
                self._planning.pool,
                limits=self._planning.limits,
                device=device_of_job(),
                plan_dir=plan_dir,
            )
            iterators.append(data := PlannedData(reader, feed))
            memory.watch(data, is_training=is_training)
        train, valid, test = iterators
        return train, valid, test
