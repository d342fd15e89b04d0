"""One run: its parts and folders, and the order in which they start and end."""

from __future__ import annotations

import dataclasses
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
from megatron.training.global_vars import set_global_variables

from hydraulis_patches.training_loop import apply_training_loop
from megatron.hydraulis.checkpoint.folder import CheckpointFolder
from megatron.hydraulis.checkpoint.folder_lock import STALE_S, FolderLocks, Writer
from megatron.hydraulis.cost_model.device import described_device
from megatron.hydraulis.cost_model.model_arguments import training_precision
from megatron.hydraulis.data.corpus import Corpus, DatasetFingerprint
from megatron.hydraulis.data.dataset import weights_path
from megatron.hydraulis.data.sampler import BatchSizes, EvaluationSampler, LengthSampler
from megatron.hydraulis.data.sources import Corpora, load_corpora_from_arguments
from megatron.hydraulis.errors import (
    FULL_DISK,
    ConfigurationError,
    DataError,
    HydraulisError,
    listed,
    why_not_written,
)
from megatron.hydraulis.flags.arguments import Resolved
from megatron.hydraulis.flags.checks import check_data_files
from megatron.hydraulis.flags.defaults import has_fused_weight_gradients
from megatron.hydraulis.flags.describe import (
    format_description,
    length_text,
    num_parameters_of,
    option_lines,
)
from megatron.hydraulis.flags.samples import sample_tokens
from megatron.hydraulis.json_object import write_output
from megatron.hydraulis.library.building import (
    build_engine,
    choose_core_attention,
    frozen_by,
    model_config,
)
from megatron.hydraulis.library.devices import (
    common_constants,
    constants_of_this_rank,
    known_peak_flops_per_s,
)
from megatron.hydraulis.library.planning import (
    Planning,
    look_ahead_planner,
    profiled_model,
    read_cost_profile,
)
from megatron.hydraulis.loop.checkpoints import RunCheckpoints
from megatron.hydraulis.loop.drift import RunDrift
from megatron.hydraulis.loop.faults import HangGuard, heed_signals
from megatron.hydraulis.loop.memory_safety import MemorySafety
from megatron.hydraulis.loop.model_container import ContainerConfig
from megatron.hydraulis.loop.planned_data import (
    PlanExchange,
    PlanFeed,
    PlannedData,
    SampledBatches,
)
from megatron.hydraulis.loop.sft_data import convert_data
from megatron.hydraulis.loop.step import Iterators, RunParts, TrainingLoop
from megatron.hydraulis.loop.tracing import RunTrace
from megatron.hydraulis.observability.console import closing_table
from megatron.hydraulis.observability.records import (
    CONFIG_FILE_NAME,
    HAS_ENDED,
    METRICS_FILE_NAME,
    MetricsWriter,
    set_aside_earlier_run,
)
from megatron.hydraulis.observability.report_data import Run, read_run
from megatron.hydraulis.observability.trace import set_aside_earlier_trace
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.planner.planners import PLAN_FILES
from megatron.hydraulis.runtime.core_attention import CoreAttention
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import (
    ForwardStep,
    LossFunction,
    loss_func,
    make_forward_step,
)
from megatron.hydraulis.runtime.memory import is_out_of_memory, memory_meter
from megatron.hydraulis.runtime.model_building import ModelDefinition
from megatron.hydraulis.runtime.process_groups import (
    device_of_job,
    group_of_self,
    of_all_ranks,
    on_all_ranks,
    on_rank_0,
    training_loop_collection,
)
from megatron.hydraulis.runtime.spans import SpanRecorder, combine_recorders

_LOCKED = "hydraulis_locked"
"""Key in the store: rank 0 has the locks of the folders, or has failed."""
_STATE_BYTES = 16
"""A parameter in the canonical shards with its gradient and two moments, all in fp32."""


@dataclass(frozen=True, kw_only=True)
class UserHooks:
    """Functions that a user may replace, with upstream's signatures."""

    loss_func: LossFunction = loss_func
    """``loss_func(loss_mask, output_tensor) -> (weighted sum of losses, sum of weights, report)``;
    ``loss_mask`` holds the weights of the tokens."""
    model_provider: Callable[..., torch.nn.Module] | None = None
    """``model_provider(pre_process, post_process, config=, pg_collection=)``: one stage. It is also
    called for the whole model, first when the flags are read."""
    engine: Callable[..., RuntimeEngine] = RuntimeEngine
    """Class of the engine: a subclass can watch, or replace, what it is given to run."""
    notes: tuple[str, ...] = ()
    """Sentences that a reader of the run's report must know; kept in ``config.json``."""


class Job:
    """One run, as one rank sees it."""

    def __init__(self, resolved: Resolved, hooks: UserHooks, *, has_cuda: bool) -> None:
        if hooks.model_provider is not None and resolved.frozen.lora is None:
            frozen = frozen_by(hooks.model_provider, resolved)
            resolved = dataclasses.replace(resolved, frozen=frozen)
        self._resolved = resolved
        self._run_dir = Path(resolved.hydraulis.run_dir)
        self._hooks = hooks
        self._has_cuda = has_cuda
        self._engine: RuntimeEngine | None = None
        self._locks: FolderLocks | None = None
        """Rank 0 holds them, for the folders that the run writes to."""
        self._core_attention: CoreAttention | None = None
        self._description: dict[str, Any] | None = None
        """Content of ``config.json``, once rank 0 has written it."""
        self._profile = read_cost_profile(resolved)
        rank = int(os.environ.get("RANK", "0"))
        self._device = constants_of_this_rank(
            has_cuda=has_cuda,
            speaks=rank == 0 and self._profile is None,
            named=resolved.hydraulis.device,
        )
        is_known = has_cuda or resolved.hydraulis.device is not None
        if resolved.hydraulis.dry_run and self._profile is not None and not is_known:
            self._device = described_device(self._profile.device) or self._device
        self._planning = self._plan()

    def _plan(self) -> Planning:
        name = None if self._core_attention is None else self._core_attention.name
        return Planning.of(self._resolved, self._device, self._profile, name)

    def print_description(self) -> None:
        """Prints the output of --dry-run; at the end raises what is wrong with the data."""
        try:
            self._check_data()
        finally:
            print(format_description(self._planning.description_of(self._resolved)))

    def _check_data(self) -> None:
        """Print what the data are, and raise what is wrong with them."""
        args = self._resolved.args
        check_data_files(args)
        if args.sft:
            convert_data(args, self._run_dir, None)
        corpora = self.load_corpora()
        for corpus in corpora.parts:
            print(f"{corpus.name + ' data':<12} {corpus.report}")
            print(f"  longest sequence {int(corpus.lengths.max()):,} tokens")
        mean_length = corpora.train.mean_length
        print(f"global batch {self._batch_text(mean_length)}")
        sizes = self._resolved.sizes
        mean_tokens = 1.0 if sizes.in_tokens else mean_length
        advice = self._planning.bf16_advice(sizes.largest * mean_tokens)
        if advice is not None:
            print(f"regrouping   {advice}")
        length = length_text(self._resolved, mean_length)
        if length:
            print(f"training     {length}")
        # Otherwise limits need not be the job's.
        if self._profile is not None or self._device.name != "cpu":
            self.check_longest(corpora)

    def _batch_text(self, mean_length: float) -> str:
        return self._resolved.sizes.text(mean_length, self._resolved.args.seq_length)

    def choose_core_attention(self) -> None:
        """Choose it for this rank's device, which has to be the current one.

        Raises ConfigurationError if what the flags name cannot be used, and for a cost profile that
        was made with another one.
        """
        self._core_attention = choose_core_attention(self._resolved, self._resolved.pool)
        if self._profile is not None:
            path = str(self._resolved.hydraulis.cost_profile)
            model = profiled_model(self._resolved, self._core_attention.name)
            self._profile.check_model(model, path, speaks=False)
        elif self._has_cuda:  # limits depend on it
            self._planning = self._plan()

    def load_corpora(self) -> Corpora:
        """Training, validation and test data, of which only the index is read.

        Raises ConfigurationError, DataError.
        """
        corpora = load_corpora_from_arguments(
            self._resolved.args,
            long_sequences=self._resolved.hydraulis.long_sequences,
            loss_normalization=self._resolved.hydraulis.loss_normalization,
        )
        self._check_batches(corpora)
        return corpora

    def _check_batches(self, corpora: Corpora) -> None:
        """Raise ConfigurationError for a global batch that is larger than its data."""
        sizes = self._resolved.sizes
        option = "--global-batch-tokens" if sizes.in_tokens else "--global-batch-size"
        if not sizes.in_tokens and self._resolved.as_given["global_batch_size"] is None:
            option = "the last of --step-batch-size-schedule"
        _check_batch(option, sizes.largest, _size_of(corpora.train, sizes), "training", sizes.unit)
        option, unit = "--eval-global-batch-size", "samples" if sizes.in_tokens else "sequences"
        scale = sample_tokens(self._resolved.args, sizes)
        size = self._resolved.evaluation_sizes.largest // scale
        for corpus, data in ((corpora.valid, "validation"), (corpora.test, "test")):
            if corpus is not None:
                # Training's size, the default, may be several epochs of a small part.
                most = max(_size_of(corpus, sizes), sizes.largest) // scale
                _check_batch(option, size, most, data, unit)

    def _check_tokens(self, corpora: Corpora) -> list[bool]:
        """This rank's share of the check of tokens and weights. Raises DataError.

        Returns by corpus whether this rank has found a token that is trained.
        """
        return [
            corpus.check_vocabulary(
                self._resolved.vocabulary.size,
                share=dist.get_rank(),
                num_shares=dist.get_world_size(),
            )
            for corpus in corpora.parts
        ]

    @property
    def _folders(self) -> dict[str, str | Path | None]:
        """The folders that one job at a time writes to, by option."""
        hydraulis = self._resolved.hydraulis
        return {
            "--plan-dir": hydraulis.plan_dir,
            "--trace": hydraulis.trace,
            "--run-dir": hydraulis.run_dir,
            "--save": self._resolved.args.save,
        }

    def make_folders(self) -> None:
        """Make the folders of the run, on every rank, before ranks wait for each other.

        Raises ConfigurationError for one that cannot be written, and for a --plan-dir that already
        holds plans, unless the run continues from a checkpoint: plans of two runs could not be
        distinguished.
        """
        args, hydraulis = self._resolved.args, self._resolved.hydraulis
        if hydraulis.plan_dir is not None and args.load is None:
            num_plans = sum(1 for _ in Path(hydraulis.plan_dir).glob(PLAN_FILES))
            if num_plans:
                raise ConfigurationError(
                    f"--plan-dir {hydraulis.plan_dir} is for the plans of one run but holds "
                    f"{num_plans} of an earlier one; name another folder or empty it"
                )
        folders = {**self._folders, "--tensorboard-dir": args.tensorboard_dir}
        for option, folder in folders.items():
            if folder is None:
                continue
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _cannot_write(option, folder, error.strerror or str(error)) from error
            if not os.access(folder, os.W_OK | os.X_OK):
                raise _cannot_write(option, folder, "no permission")

    def check_longest(self, corpora: Corpora) -> None:
        """Raise ConfigurationError unless every sequence fits, before ranks wait for each other."""
        self._planning.check_longest(
            {corpus.name: int(corpus.lengths.max()) for corpus in corpora.parts}
        )

    def train(self, corpora: Corpora, store: dist.Store) -> None:
        """Train, with upstream's pretrain() around our step. Collective."""
        trains = on_all_ranks(lambda: self._check_tokens(corpora), "the data cannot be read")
        check_trained(corpora.parts, of_all_ranks(trains))
        if self._has_cuda:
            self._agree_on_device(corpora)
        checkpoints = self._make_checkpoints(corpora)
        checkpoints.check_save_folder()
        try:
            # Before anything of another job that writes to the same folders is moved.
            self._lock_folders(store)
            self._train(corpora, store, checkpoints)
        finally:
            if self._locks is not None:
                self._locks.release()

    def _train(self, corpora: Corpora, store: dist.Store, checkpoints: RunCheckpoints) -> None:
        try:
            if dist.get_rank() == 0:
                self._start_run_folder(corpora)
                self._print_notices(corpora)
            dist.barrier()
            parts = self._make_parts(store, checkpoints)
        except BaseException:
            checkpoints.abandon()
            raise
        try:
            self._pretrain(parts, corpora, store)
        except SystemExit:  # an exit condition of upstream
            self._finish(parts)
            raise
        except BaseException as error:
            self._abandon(parts)
            if isinstance(error, OSError) and error.errno in FULL_DISK:
                raise self._full_disk(error) from error
            raise
        self._finish(parts)

    def _full_disk(self, error: OSError) -> HydraulisError:
        """The error of a full disk; the file is TensorBoard's if the error names none."""
        path = error.filename or Path(self._resolved.args.tensorboard_dir) / "events.out.tfevents.*"
        return HydraulisError(
            f"cannot write {path}: {why_not_written(error, path)}; make room or name another "
            "--run-dir or --tensorboard-dir"
        )

    def _agree_on_device(self, corpora: Corpora) -> None:
        """Collective: all ranks plan with the same device."""
        self._device = common_constants(of_all_ranks(self._device))
        self._planning = self._plan()
        self.check_longest(corpora)

    def _start_run_folder(self, corpora: Corpora) -> None:
        """Move what an earlier run left out of the way and write ``config.json``."""
        hydraulis = self._resolved.hydraulis
        earlier = set_aside_earlier_run(self._run_dir)
        if earlier is not None:
            print(f"what an earlier run left in this folder is now in {earlier}", flush=True)
        if hydraulis.trace is not None:
            set_aside_earlier_trace(hydraulis.trace)
        corpus = {
            part.name: {"datasets": [str(prefix) for prefix in part.prefixes]}
            | dataclasses.asdict(part.report)
            for part in corpora.parts
        }
        content = self._planning.description_of(self._resolved)
        precision = training_precision(self._resolved.args)
        peak = known_peak_flops_per_s(has_cuda=self._has_cuda, precision=precision)
        self._description = content | {
            "corpus": corpus,
            "notes": list(self._hooks.notes),
            "peak_flops_per_s_of_rank": peak,
        }
        self._write_description(self._description | {HAS_ENDED: False})

    def _lock_folders(self, store: dist.Store) -> None:
        """Take the locks, and remove what an interrupted save left. Collective."""
        args, hydraulis = self._resolved.args, self._resolved.hydraulis
        folders = {name: Path(folder) for name, folder in self._folders.items() if folder}

        def lock() -> None:
            if dist.get_rank() > 0:
                # The lock of a job that was killed is watched for longer than a collective takes.
                timeout = timedelta(seconds=STALE_S, minutes=args.distributed_timeout_minutes)
                store.wait([_LOCKED], timeout)
                return
            writer = Writer.of_this_process()
            self._locks = FolderLocks(folders, writer, log=partial(print, flush=True))
            try:
                self._locks.acquire(take_over=hydraulis.take_over_save)
            finally:
                store.set(_LOCKED, "")
            if args.save is not None:
                CheckpointFolder(folders["--save"]).remove_leftovers()

        on_all_ranks(lock, "the folders of the run cannot be locked")

    def _check_locks(self) -> None:
        if self._locks is not None:
            self._locks.check()

    def _write_description(self, content: dict[str, Any]) -> None:
        write_output(self._run_dir / CONFIG_FILE_NAME, content, "--run-dir")

    def _print_notices(self, corpora: Corpora) -> None:
        assert self._core_attention is not None
        print(
            f"core attention: {self._core_attention.name} ({self._core_attention.why})", flush=True
        )
        if self._has_cuda and not has_fused_weight_gradients():
            has_te_layers = self._resolved.args.transformer_impl == "transformer_engine"
            which = "that of the output layer" if has_te_layers else "each"
            print(
                f"weight gradients: {which} is added by a separate kernel (apex's "
                "fused_weight_gradient_mlp_cuda is not installed)",
                flush=True,
            )
        poor_fits = None if self._profile is None else self._profile.poor_fits()
        warnings = (*self._resolved.pool_changes, *self._planning.left_out, poor_fits)
        for line in filter(None, warnings):
            print(f"warning: {line}", file=sys.stderr, flush=True)
        for line in option_lines(self._planning.description_of(self._resolved)):
            print(line, flush=True)
        mean_length = corpora.train.mean_length
        print(f"global batch: {self._batch_text(mean_length)}", flush=True)
        length = length_text(self._resolved, mean_length)
        if length:
            print(f"training: {length}", flush=True)
        for corpus in corpora.parts:
            print(f"{corpus.name} data: {corpus.report}", flush=True)

    def _make_checkpoints(self, corpora: Corpora) -> RunCheckpoints:
        """Collective."""
        args = self._resolved.args
        data: tuple[DatasetFingerprint, ...] = ()
        if args.save is not None or args.load is not None:
            data = on_rank_0(corpora.train.fingerprints, "the training data cannot be read")
        return RunCheckpoints(self._resolved, self._planning, data, self._check_locks)

    def _make_parts(self, store: dist.Store, checkpoints: RunCheckpoints) -> RunParts:
        """Collective."""
        args, hydraulis = self._resolved.args, self._resolved.hydraulis
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        metrics = MetricsWriter(self._run_dir) if rank == num_ranks - 1 else None
        trace = None
        if hydraulis.trace is not None:
            trace = RunTrace(
                Path(hydraulis.trace),
                hydraulis.trace_window,
                self._planning.cost_model,
                has_cuda=self._has_cuda,
            )
        memory = MemorySafety(self._planning, hydraulis, log=partial(print, flush=True))
        drift = None
        if hydraulis.report_drift is not None:
            drift = RunDrift(
                self._planning.cost_model, hydraulis.report_drift, store, has_cuda=self._has_cuda
            )
        guard = HangGuard(store, rank, num_ranks, 60.0 * args.distributed_timeout_minutes)
        return RunParts(metrics, trace, memory, drift, checkpoints, guard)

    def _pretrain(self, parts: RunParts, corpora: Corpora, store: dist.Store) -> None:
        """Hand our step, data and model to upstream's pretrain()."""
        from megatron.core.enums import ModelType
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.training import pretrain

        args = self._resolved.args
        forward_step = make_forward_step(self._hooks.loss_func)

        def make_iterators() -> Iterators:
            self._try_memory_out(parts.memory, forward_step, corpora)
            train, valid, test = (
                None
                if corpus is None
                else self._planned_data(corpus, store, parts, is_training=corpus is corpora.train)
                for corpus in (corpora.train, corpora.valid, corpora.test)
            )
            return train, valid, test

        loop = TrainingLoop(self._resolved, parts, make_iterators)
        apply_training_loop(loop, has_cuda=self._has_cuda)
        # Once per process: tokenizer, timers and, on the last rank, the writers.
        set_global_variables(self._resolved.args)
        if args.exit_signal_handler:
            heed_signals(args.exit_signal)
        timeout = timedelta(minutes=args.distributed_timeout_minutes)
        of_self = group_of_self(timeout, "hydraulis_loop")
        pretrain(
            pretrain_cfg_container_from_args(args, self._model_config(parts)),
            None,
            ModelType.encoder_or_decoder,
            forward_step,
            pg_collection=training_loop_collection(of_self),
            skip_model_parallel_init=True,
        )

    def _model_config(self, parts: RunParts) -> ContainerConfig:
        assert self._core_attention is not None
        recorders = (each.spans for each in (parts.trace, parts.drift) if each is not None)
        config = model_config(self._resolved, self._core_attention.name, ContainerConfig)
        config.engine_factory = partial(
            self._make_engine, parts.checkpoints, spans=combine_recorders(*recorders)
        )
        config.model_provider = self._hooks.model_provider
        return config

    def _make_engine(
        self, checkpoints: RunCheckpoints, definition: ModelDefinition, *, spans: SpanRecorder
    ) -> RuntimeEngine:
        args = self._resolved.args
        optimizer = AdamWSettings(
            lr=args.lr,
            min_lr=args.min_lr or 0.0,
            weight_decay=args.weight_decay,
            beta1=args.adam_beta1,
            beta2=args.adam_beta2,
            eps=args.adam_eps,
            clip_grad=args.clip_grad,
            decoupled_lr=args.decoupled_lr,
            decoupled_min_lr=args.decoupled_min_lr,
        )
        pool, make = self._planning.pool, self._hooks.engine
        try:
            self._engine = build_engine(
                self._resolved, pool, definition, optimizer, spans=spans, make=make
            )
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            num_ranks, num_parameters = dist.get_world_size(), num_parameters_of(self._resolved)
            state_gb = _STATE_BYTES * num_parameters / num_ranks / 1e9
            raise ConfigurationError(
                f"every rank owns 1/{num_ranks} of the parameters, gradients and optimizer state "
                f"but of {num_parameters:,} parameters that is {state_gb:,.3g} GB, for which "
                f"memory is too small; use more ranks or a smaller model (--vocab-size is "
                f"{self._resolved.vocabulary.size})"
            ) from error
        checkpoints.begin_from_folder(self._engine)
        if dist.get_rank() == 0:
            self._print_trained(self._engine)
        return self._engine

    def _print_trained(self, engine: RuntimeEngine) -> None:
        """Say what is trained if that is not the whole model."""
        specs, lora = engine.layout.parameters, engine.definition.lora
        frozen = [spec for spec in specs if spec.is_frozen]
        num_frozen = sum(spec.num_elements for spec in frozen)
        if lora is not None:
            num_trained = sum(spec.num_elements for spec in specs) - num_frozen
            print(
                f"adapters: rank {lora.rank}, alpha {lora.alpha:g}, of {', '.join(lora.targets)}: "
                f"{num_trained:,} elements are trained, {num_frozen:,} of the model are frozen",
                flush=True,
            )
        elif frozen:
            print(
                f"frozen: {len(frozen)} of {len(specs)} parameters, {num_frozen:,} elements: "
                f"{listed([spec.name for spec in frozen])}",
                flush=True,
            )

    def _try_memory_out(
        self, memory: MemorySafety, forward_step: ForwardStep, corpora: Corpora
    ) -> None:
        """Collective: what --memory-trial asks for; parameters and optimizer are in place."""
        wish = self._resolved.hydraulis.memory_trial
        if wish == "off" or (wish == "auto" and not self._has_cuda):
            return
        sizes = self._resolved.sizes
        longest = max(int(corpus.lengths.max()) for corpus in corpora.parts)
        assert self._engine is not None
        memory.try_out(
            self._engine,
            forward_step,
            memory_meter(int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))),
            longest_tokens=longest,
            most_tokens=sizes.largest * (1 if sizes.in_tokens else longest),
            vocab_size=self._resolved.vocabulary.size,
        )
        self._planning = memory.planning
        self.check_longest(corpora)

    def _planned_data(
        self, corpus: Corpus, store: dist.Store, parts: RunParts, *, is_training: bool
    ) -> PlannedData:
        args, hydraulis = self._resolved.args, self._resolved.hydraulis
        checkpoints, planning = parts.checkpoints, self._planning
        sampler = (
            LengthSampler(
                corpus.lengths,
                corpus.groups,
                seed=args.seed,
                sizes=self._resolved.sizes,
                num_consumed_sequences=checkpoints.num_consumed_elsewhere,
                num_consumed_tokens=checkpoints.num_consumed_elsewhere * args.seq_length,
            )
            if is_training
            else EvaluationSampler(
                corpus.lengths, corpus.groups, sizes=self._resolved.evaluation_sizes
            )
        )
        if is_training and checkpoints.sampler_state is not None:
            sampler.load_state_dict(
                checkpoints.sampler_state, counts_only=checkpoints.begins_other_data
            )
        batches = SampledBatches(
            sampler, first_iteration=checkpoints.first_iteration if is_training else 0
        )
        exchange = PlanExchange(store, corpus.name)
        feed, plan_dir = None, None
        if dist.get_rank() == 0:
            feed = PlanFeed(
                look_ahead_planner(
                    planning,
                    hydraulis,
                    timeout_s=60.0 * args.distributed_timeout_minutes,
                    is_training=is_training,
                ),
                exchange,
                batches,
                num_ahead=hydraulis.plan_ahead if is_training else 0,
            )
            plan_dir = hydraulis.plan_dir if is_training else None
        data = PlannedData(
            corpus=corpus,
            batches=batches,
            exchange=exchange,
            feed=feed,
            pool=planning.pool,
            limits=planning.limits,
            device=device_of_job(),
            plan_dir=plan_dir,
            num_predictions=is_training * (args.mtp_num_layers or 0),
        )
        parts.memory.watch(data, is_training=is_training)
        return data

    def _finish(self, parts: RunParts) -> None:
        """Complete what the run has begun and write its results. Collective."""
        parts.checkpoints.finish()
        if self._engine is not None:
            self._engine.close()
        run = None
        if parts.metrics is not None:
            parts.metrics.close()
            if (self._run_dir / METRICS_FILE_NAME).stat().st_size:
                run = read_run(self._run_dir, only_last_start=True)
                run = dataclasses.replace(run, config={**run.config, HAS_ENDED: True})
                # Before what a full disk could prevent.
                print(closing_table(run), flush=True)
        what = "the results of the run cannot be written"
        on_all_ranks(lambda: self._write_results(parts, run), what)
        if parts.trace is not None:
            on_rank_0(parts.trace.merge, what)
        if self._description is not None:
            self._write_description(self._description | {HAS_ENDED: True})
        parts.guard.close()

    def _write_results(self, parts: RunParts, run: Run | None) -> None:
        """The rank's trace, cost profile and, of ``run``, summary.png."""
        if parts.trace is not None:
            parts.trace.close()
        if run is not None:
            # Not above: matplotlib would take every start half a second.
            from megatron.hydraulis.observability.report_figures import write_summary

            write_summary(run)

    def _abandon(self, parts: RunParts) -> None:
        """End after an error, without waiting for other ranks."""
        parts.checkpoints.abandon()
        if parts.metrics is not None:
            parts.metrics.close()
        if parts.trace is not None:
            parts.trace.close()
        parts.guard.close()


def check_trained(corpora: Sequence[Corpus], trains: Sequence[Sequence[bool]]) -> None:
    """Refuse a corpus of which no token is trained: no iteration would update anything.

    Args:
        trains: by rank and corpus, whether its share of the weights has one above 0.

    Raises:
        DataError: names the corpus and its files.
    """
    for corpus, found in zip(corpora, zip(*trains, strict=True), strict=True):
        if not any(found):
            error = DataError(
                f"corpus '{corpus.name}': at least 1 token is trained but all weights of its "
                f"{corpus.report.num_tokens:,} tokens are 0; correct "
                f"{listed([weights_path(prefix) for prefix in corpus.prefixes])}, or remove it to "
                "train every token"
            )
            error.is_shared = True
            raise error


def _size_of(corpus: Corpus, sizes: BatchSizes) -> int:
    """An epoch in the unit of the sizes."""
    return corpus.report.num_tokens if sizes.in_tokens else corpus.num_sequences


def _check_batch(option: str, size: int, most: int, data: str, unit: str) -> None:
    if size > most:
        raise ConfigurationError(
            f"a global batch is at most one epoch of the {data} data but {option} is {size} and "
            f"the most is {most} {unit}; give more data or {option} {most} or less"
        )


def _cannot_write(option: str, folder: object, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot write to {option} {folder}: {reason}; make room or name another folder"
    )
