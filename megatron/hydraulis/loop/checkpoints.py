"""Saving and loading of a run, which replaces two functions of upstream.

Upstream's functions write the same format. They are replaced because they start from scratch if
nothing can be loaded, load parts of what does not fit, mark the latest checkpoint by rewriting a
file in place, hold a copy of everything that is saved, and unpickle what they read.
"""

from __future__ import annotations

import random
import shlex
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.training.global_vars import get_args

from megatron.hydraulis.checkpoint.folder import RELEASE, CheckpointFolder
from megatron.hydraulis.checkpoint.loading import (
    Accept,
    LoadedCheckpoint,
    UpstreamState,
    find_checkpoints,
    load_first_whole,
    read_rng_state,
)
from megatron.hydraulis.checkpoint.manifest import MODEL_SETTINGS, Manifest, model_of
from megatron.hydraulis.checkpoint.saving import CheckpointSaver, SavedState, upstream_entries
from megatron.hydraulis.data.corpus import (
    DatasetFingerprint,
    data_differences,
    keeps_place,
)
from megatron.hydraulis.data.sampler import check_seed
from megatron.hydraulis.errors import CheckpointError, ConfigurationError, Problems, listed
from megatron.hydraulis.flags.arguments import Resolved
from megatron.hydraulis.flags.changes import changed_settings
from megatron.hydraulis.flags.defaults import UPSTREAMS_ROPE_FACTOR
from megatron.hydraulis.flags.describe import block_lines
from megatron.hydraulis.flags.samples import counts_iterations
from megatron.hydraulis.library.planning import Planning
from megatron.hydraulis.loop.model_container import ModelContainer
from megatron.hydraulis.loop.planned_data import PlannedData
from megatron.hydraulis.optimizer.sharded_adamw import ShardedAdamW
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.process_groups import on_rank_0


@dataclass
class LoopCounters:
    """Counters over all starts of a run, in addition to upstream's."""

    num_marked_plans: int = 0
    num_skipped: int = 0
    """Iterations without an update because their loss or gradient norm was not finite."""
    num_skipped_in_a_row: int = 0
    """Skipped iterations since the last update."""
    num_untrained_in_a_row: int = 0
    """Latest iterations of this start in which every token had the weight 0."""


class RunCheckpoints:
    """``--save`` and ``--load`` of one run.

    Args:
        data: the training data, equal on all ranks.
        check_lock: raises CheckpointError if another job has taken the ``--save`` folder over.
    """

    def __init__(
        self,
        resolved: Resolved,
        planning: Planning,
        data: Sequence[DatasetFingerprint],
        check_lock: Callable[[], None],
    ) -> None:
        self._resolved = resolved
        self._planning = planning
        self._data = tuple(data)
        self._saver: CheckpointSaver | None = None
        self._check_lock = check_lock
        self.counters = LoopCounters()
        self.first_iteration = 0
        """Number of iterations that earlier starts have trained."""
        self.sampler_state: Mapping[str, Any] | None = None
        """State of the training data's sampler; None to begin with the first sequence."""
        self.begins_other_data = False
        """True if the state's place in the data is none in those of this run."""
        self.num_consumed_elsewhere = 0
        """Samples that plain Megatron has trained, rows of --seq-length tokens."""

    # --- replaced: save_checkpoint ----------------------------------------------------------

    def save_checkpoint(
        self,
        iteration: int,
        model: list[ModelContainer],
        optimizer: ShardedAdamW,
        opt_param_scheduler: Any,
        num_floating_point_operations_so_far: float,
        checkpointing_context: Any = None,
        pipeline_rank: Any = None,
        expert_rank: Any = None,
        tensor_rank: Any = None,
        pipeline_parallel: Any = None,
        expert_parallel: Any = None,
        non_persistent_ckpt: bool = False,
        train_data_iterator: PlannedData | None = None,
        preprocess_common_state_dict_fn: Any = None,
        release: bool = False,
        tp_group: Any = None,
        pp_group: Any = None,
        dp_cp_group: Any = None,
        dp_group: Any = None,
        expt_dp_group: Any = None,
        rng_state_key_prefix: str = "",
    ) -> None:
        """Save at the end of an iteration. Collective; raises CheckpointError."""
        assert train_data_iterator is not None
        args = get_args()
        self._saver_of(model[0]).save(
            SavedState(
                iteration=iteration,
                model=self._model(),
                state={
                    "consumed_train_samples": args.consumed_train_samples,
                    "consumed_valid_samples": args.consumed_valid_samples,
                    "num_skipped": self.counters.num_skipped,
                    "num_skipped_in_a_row": self.counters.num_skipped_in_a_row,
                    "sampler": train_data_iterator.batches.state,
                    "data": list(map(asdict, self._data)),
                    "planner": {
                        "pool": {s.name: str(s) for s in self._planning.pool.strategies},
                        "num_marked_plans": self.counters.num_marked_plans,
                    },
                },
                configuration=self._planning.description_of(self._resolved),
                upstream={
                    **upstream_entries(
                        args,
                        iteration,
                        optimizer,
                        self._planning.pool,
                        num_floating_point_operations=num_floating_point_operations_so_far,
                    ),
                    "opt_param_scheduler": opt_param_scheduler.state_dict(),
                    "rng_state": _rng_entry(),
                },
            )
        )

    # --- replaced: load_checkpoint ----------------------------------------------------------

    def load_checkpoint(
        self,
        ddp_model: list[ModelContainer],
        optimizer: ShardedAdamW,
        opt_param_scheduler: Any,
        load_arg: str = "load",
        strict: bool = True,
        checkpointing_context: Any = None,
        skip_load_to_model_and_opt: bool = False,
        tp_group: Any = None,
        pp_group: Any = None,
        dp_cp_group: Any = None,
        dp_group: Any = None,
        expt_dp_group: Any = None,
        rng_state_key_prefix: str = "",
    ) -> tuple[int, float]:
        """Load what ``--load`` names: (iterations trained, floating-point operations so far).

        Collective. Raises CheckpointError, ConfigurationError.
        """
        args, hydraulis = get_args(), self._resolved.hydraulis
        folder = CheckpointFolder(Path(args.load))
        paths = find_checkpoints(
            folder, iteration=args.ckpt_step, with_earlier=hydraulis.load_fallback
        )
        if not paths:
            self._begin_without(folder, args)
            return 0, 0.0
        loaded = load_first_whole(
            paths,
            ddp_model[0].engine,
            self._model(),
            with_optimizer=not (args.finetune or args.no_load_optim),
            accept=self._accept(opt_param_scheduler),
            log=partial(print, flush=True),
        )
        if args.finetune or loaded.path.name == RELEASE:
            self._say_begin("loaded", loaded.path, has_new_adapters=loaded.has_new_adapters)
            return 0, 0.0
        upstream = loaded.upstream
        if loaded.with_optimizer:
            opt_param_scheduler.load_state_dict(upstream.scheduler)
        args.consumed_train_samples = upstream.num_consumed_sequences
        args.skipped_train_samples = 0
        self.first_iteration = upstream.iteration
        self._take_state(loaded, args)
        self._report_loaded(loaded)
        return upstream.iteration, upstream.num_floating_point_operations

    # --- around the loop --------------------------------------------------------------------

    def begin_from_folder(self, engine: RuntimeEngine) -> None:
        """Take the weights of ``--hf``, unless there is a checkpoint to load. Collective.

        Raises CheckpointError, ConfigurationError.
        """
        hf, load = self._resolved.hydraulis.hf, self._resolved.args.load
        if hf is None:
            return
        if load is not None:
            folder = CheckpointFolder(Path(load))
            if on_rank_0(lambda: folder.paths, f"{load} cannot be read"):
                return
        # Only a run that begins with a folder needs its libraries.
        from megatron.hydraulis.library.hugging_face import fill_from_folder

        fill_from_folder(engine, Path(hf))
        has_new = engine.definition.lora is not None
        self._say_begin("took", hf, has_new_adapters=has_new)

    def check_save_folder(self) -> None:
        """Raise ConfigurationError if the ``--save`` folder has checkpoints from which the run
        would not continue."""
        save, load = self._resolved.args.save, self._resolved.args.load
        if save is None:
            return
        folder = CheckpointFolder(Path(save))
        existing = folder.paths
        starts_over = self._resolved.args.finetune
        continues = (
            load is not None and Path(load).resolve() == folder.root.resolve() and not starts_over
        )
        if existing and not continues:
            start = "without --load the run starts from iteration 1"
            fix = f"give --load {shlex.quote(str(save))} to go on"
            if load is not None:
                start = f"with --load {load} the run starts from what is there"
            if starts_over:
                start = "with --finetune the run starts from iteration 1"
                fix += " without --finetune"
            raise ConfigurationError(
                f"--save {save} holds checkpoints, the newest {existing[-1].name}, but "
                f"{start} and would replace them; {fix}, or another --save"
            )

    def poll(self) -> None:
        """Complete an asynchronous save that has ended. Collective; raises CheckpointError."""
        if self._saver is not None:
            self._saver.poll()

    def finish(self) -> None:
        """Complete all saves. Collective; raises CheckpointError."""
        if self._saver is not None:
            self._saver.finish()

    def abandon(self) -> None:
        """Give up saves that are not complete, because the run ends with an error."""
        if self._saver is not None:
            self._saver.abandon()

    def _saver_of(self, container: ModelContainer) -> CheckpointSaver:
        if self._saver is None:
            self._saver = CheckpointSaver(
                CheckpointFolder(Path(self._resolved.args.save)),
                container.engine,
                asynchronous=self._resolved.args.async_save,
                keep_last=self._resolved.hydraulis.keep_last,
                check_lock=self._check_lock,
                log=partial(print, flush=True),
            )
        return self._saver

    def _model(self) -> dict[str, Any]:
        return model_of(self._resolved.args, self._resolved.vocabulary.size)

    def _begin_without(self, folder: CheckpointFolder, args: Namespace) -> None:
        """Start without a checkpoint: an error unless it is the first start of a run."""
        is_own = args.save is not None and Path(args.save).resolve() == folder.root.resolve()
        if not is_own or args.exit_on_missing_checkpoint:
            raise CheckpointError(
                f"--load {folder.root}: there is no checkpoint; correct the folder, or remove "
                "--load to start from iteration 1 (a folder that is --save as well may be empty)"
            )
        if self._resolved.hydraulis.hf is None:
            self._say(
                f"warning: there is no checkpoint in {folder.root} yet: training starts from "
                "scratch, with iteration 1"
            )

    def _accept(self, scheduler: Any) -> Accept:
        """Raises one ConfigurationError unless the run may go on with these data, settings and
        learning-rate schedule."""
        args, hydraulis = self._resolved.args, self._resolved.hydraulis

        def accept(path: Path, manifest: Manifest | None, upstream: UpstreamState) -> None:
            if args.finetune or path.name == RELEASE:
                return
            problems = Problems()
            if manifest is not None:
                saved = _data_of(manifest)
                with problems.collected():
                    self._accept_data(path, saved, is_allowed=hydraulis.allow_other_data)
                order = manifest.state.get("sampler", {}).get("order", {})
                if "seed" in order and (saved is None or keeps_place(saved, self._data)):
                    with problems.collected():
                        check_seed(order["seed"], args.seed)
                with problems.collected():
                    self._accept_settings(path, manifest)
            if not args.no_load_optim:
                with problems.collected():
                    self._check_schedule(path, manifest, upstream, scheduler)
            problems.raise_any()

        return accept

    def _accept_settings(self, path: Path, manifest: Manifest) -> None:
        args, hydraulis = self._resolved.args, self._resolved.hydraulis
        here = self._planning.description_of(self._resolved)
        changes = changed_settings(
            manifest.configuration,
            here,
            upstream_defaults=self._resolved.settings,
            compared=MODEL_SETTINGS,
            keeps_schedule=args.use_checkpoint_opt_param_scheduler,
        )
        of_update = [str(change) for change in changes if change.changes_update]
        # A new optimizer and schedule go with new settings.
        is_allowed = hydraulis.allow_changed_settings or args.no_load_optim
        if of_update and not is_allowed:
            raise ConfigurationError(
                f"{path} was trained with other settings, on which the update depends: "
                f"{listed(of_update, most=len(of_update))}; give the former ones, or add "
                "--allow-changed-settings to go on with the new ones"
            )
        for line in block_lines("changed", f"settings since {path}", list(map(str, changes))):
            self._say(line)

    def _check_schedule(
        self, path: Path, manifest: Manifest | None, upstream: UpstreamState, scheduler: Any
    ) -> None:
        """Raise ConfigurationError unless the learning-rate schedule goes on, or is chosen."""
        if upstream.scheduler is None:
            raise CheckpointError(
                f"{path} has no state of the learning-rate schedule; take its weights alone by "
                "--finetune, or load another checkpoint"
            )
        theirs = "samples"
        if manifest is not None:
            theirs = _unit_of_schedule(manifest.configuration)
        ours = _unit_of_schedule(self._planning.description_of(self._resolved))
        if theirs != ours:
            fix = "--train-iters, and the former size or growth of the global batch"
            if theirs == "samples":
                fix = "--train-samples, and the schedule in samples of --seq-length tokens each"
            raise ConfigurationError(
                f"the learning-rate schedule of {path} counts {theirs} but that of this run "
                f"counts {ours}; give {fix}"
            )
        args = self._resolved.args
        if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler:
            return
        differences = _schedule_differences(scheduler, upstream.scheduler, ours)
        if differences:
            raise ConfigurationError(
                f"{path} was trained with another learning-rate schedule: "
                f"{listed(differences, most=len(differences))}; give the former values, or choose "
                "this run's by --override-opt_param-scheduler or the checkpoint's by "
                "--use-checkpoint-opt_param-scheduler"
            )

    def _accept_data(
        self, path: Path, saved: Sequence[DatasetFingerprint] | None, *, is_allowed: bool
    ) -> None:
        if saved is None:
            self._say(f"{path} does not record its data: these may be others")
            return
        differences = data_differences(saved, self._data)
        if not differences:
            return
        if not is_allowed:
            raise ConfigurationError(
                f"{path} was trained on other data: {listed(differences)}; give the same data, "
                "--split, --seq-length and --long-sequences, or add --allow-other-data"
            )
        goes_on = "training goes on at the same place in them"
        if not keeps_place(saved, self._data):
            goes_on = "training goes on with their first sequence"
        self._say(
            f"warning: {path} was trained on other data: {listed(differences)}; {goes_on} "
            "(--allow-other-data)"
        )

    def _take_state(self, loaded: LoadedCheckpoint, args: Namespace) -> None:
        manifest = loaded.manifest
        if manifest is None:
            self.num_consumed_elsewhere = loaded.upstream.num_consumed_sequences
            self._say(
                f"warning: {loaded.path} was written by plain Megatron: the order of the data is "
                "another here and starts with its first sequence"
            )
            if args.use_rope_scaling and args.rope_scaling_factor != UPSTREAMS_ROPE_FACTOR:
                self._say(
                    f"warning: Megatron scaled the positions of {loaded.path} by "
                    f"{UPSTREAMS_ROPE_FACTOR:g} whatever --rope-scaling-factor said, and this run "
                    f"scales them by {args.rope_scaling_factor:g}; give --rope-scaling-factor "
                    f"{UPSTREAMS_ROPE_FACTOR:g} to continue its training"
                )
            return
        state = manifest.state
        try:
            self.sampler_state = dict(state["sampler"])
            saved_data = _data_of(manifest)
            self.begins_other_data = saved_data is not None and not keeps_place(
                saved_data, self._data
            )
            args.consumed_valid_samples = int(state["consumed_valid_samples"])
            self.counters.num_marked_plans = int(state["planner"]["num_marked_plans"])
            self.counters.num_skipped = int(state["num_skipped"])
            self.counters.num_skipped_in_a_row = int(state["num_skipped_in_a_row"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{loaded.path}: the state of the run lacks {error}; load another checkpoint"
            ) from error
        if args.train_samples is not None and "num_tokens" not in self.sampler_state:
            raise CheckpointError(
                f"{loaded.path}: an earlier version wrote it, which did not count the tokens that "
                "were consumed, so that --train-samples cannot end the run; give --train-iters"
            )
        _set_rng_state(loaded.path)

    def _report_loaded(self, loaded: LoadedCheckpoint) -> None:
        self._say(
            f"loaded {loaded.path}: {loaded.upstream.iteration} iterations, "
            f"{loaded.upstream.num_consumed_sequences} sequences"
            + ("" if loaded.with_optimizer else "; optimizer and learning-rate schedule are new")
            + ("; adapters are new" if loaded.has_new_adapters else "")
        )
        if loaded.manifest is None:
            return
        num_ranks, pool = dist.get_world_size(), self._planning.pool
        if loaded.manifest.num_ranks != num_ranks:
            self._say(f"it was written by {loaded.manifest.num_ranks} ranks, now {num_ranks} go on")
        before = loaded.manifest.state["planner"].get("pool", {})
        now = {strategy.name: str(strategy) for strategy in pool.strategies}
        if before != now:
            self._say(f"its pool was {_pool_text(before)}; now it is {_pool_text(now)}")

    def _say_begin(self, verb: str, path: Path, *, has_new_adapters: bool) -> None:
        new = "; adapters are new" if has_new_adapters else ""
        self._say(f"{verb} the weights of {path}{new}; training begins with iteration 1")

    def _say(self, message: str) -> None:
        if dist.get_rank() == 0:
            print(message, flush=True)


def _data_of(manifest: Manifest) -> tuple[DatasetFingerprint, ...] | None:
    """The data that a run was trained on; None if an earlier version wrote the checkpoint."""
    entries = manifest.state.get("data")
    try:
        return None if entries is None else tuple(DatasetFingerprint(**each) for each in entries)
    except TypeError as error:
        raise CheckpointError(
            f"the state of the run lists its data in another form ({error}); load another "
            "checkpoint"
        ) from error


def _unit_of_schedule(configuration: Mapping[str, Any]) -> str:
    """Unit in which the learning-rate schedule of a run counts.

    configuration: as `flags.describe` returns it.
    """
    in_tokens = configuration.get("hydraulis", {}).get("global_batch_tokens") is not None
    grows = len(configuration.get("batch_sizes", {}).get("steps", ())) > 1
    by_samples = configuration.get("settings", {}).get("train_samples") is not None
    counts = counts_iterations(number_varies=in_tokens or grows, by_samples=by_samples)
    return "iterations" if counts else "samples"


def _pool_text(pool: Mapping[str, str]) -> str:
    return "; ".join(dict.fromkeys(pool.values()))


def _rng_entry() -> ShardedObject:
    """States of the random-number generators in upstream's form; training here draws none."""
    has_cuda = torch.cuda.is_available()
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if has_cuda else torch.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    return ShardedObject("rng_state", [state], (1, 1), (0, 0), replica_id=dist.get_rank())


def _set_rng_state(path: Path) -> None:
    entry = read_rng_state(path)
    try:
        state = entry[0]
        random.setstate(state["random_rng_state"])
        np.random.set_state(state["np_rng_state"])
        torch.set_rng_state(state["torch_rng_state"])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda_rng_state"])
        if state["rng_tracker_states"]:
            tensor_parallel.get_cuda_rng_tracker().set_states(state["rng_tracker_states"])
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: the states of the random-number generators cannot be set: "
            f"{type(error).__name__}: {error}; load another checkpoint"
        ) from error


_SCHEDULE = (
    ("--lr", "max_lr", ("start_lr",)),
    ("--min-lr", "min_lr", ()),
    ("the end of the warm-up", "lr_warmup_steps", ("warmup_iter", "warmup_steps")),
    ("the end of the decay", "lr_decay_steps", ("end_iter", "decay_steps")),
    ("--lr-decay-style", "lr_decay_style", ("decay_style",)),
    ("the weight decay at the start", "start_wd", ()),
    ("the weight decay at the end", "end_wd", ()),
    ("the end of training", "wd_incr_steps", ()),
    ("--weight-decay-incr-style", "wd_incr_style", ()),
)
"""Flag for an attribute of upstream's schedule, its name, and names in older checkpoints."""


def _schedule_differences(scheduler: Any, saved: Mapping[str, Any], unit: str) -> list[str]:
    """Lists how upstream's schedule differs from that of a checkpoint.

    unit: what both count.
    """
    found = []
    for what, name, earlier in _SCHEDULE:
        here = getattr(scheduler, name)
        there = next((saved[key] for key in (*earlier, name) if key in saved), here)
        if there != here:
            counted = f" {unit}" if name.endswith("_steps") else ""
            found.append(f"{what} is {there}{counted} there and {here}{counted} here")
    return found
