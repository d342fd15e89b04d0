"""Loading: find a checkpoint that is complete, check that it fits, fill the shards from it.

A damaged checkpoint is an error or, if asked for, a reason to take the one before. A checkpoint of
another model is always an error: the ones before it would not fit either.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.hydraulis.checkpoint.folder import LATEST_FILE_NAME, RELEASE, CheckpointFolder
from megatron.hydraulis.checkpoint.manifest import (
    FORMAT_NAME,
    MANIFEST_NAME,
    Manifest,
    is_checkpoint,
    known_settings,
    model_differences,
    model_of,
)
from megatron.hydraulis.checkpoint.names import (
    WRITTEN_HERE,
    ShardState,
    StoredModel,
    bias_pieces,
    model_states,
    shard_pieces,
    training_states,
)
from megatron.hydraulis.checkpoint.torch_dist import MASTER, MODEL, StoredCheckpoint
from megatron.hydraulis.errors import CheckpointError, ConfigurationError, Problems, listed
from megatron.hydraulis.lora import Lora, is_of_adapter
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.process_groups import (
    agreed_problems,
    on_all_ranks,
    on_rank_0,
)
from megatron.hydraulis.transfer.canonical import ParameterSpec

_MAX_ITERATIONS_NAMED = 8


@dataclass(frozen=True)
class UpstreamState:
    """Megatron's entries besides tensors, in its own checkpoints and in ours."""

    iteration: int
    num_steps: int
    """Number of updates by the optimizer."""
    num_consumed_sequences: int
    scheduler: Mapping[str, Any] | None
    num_floating_point_operations: float
    written_here: bool
    """Whether this program wrote it, so that there must be a manifest."""
    sharding_type: str | None
    """Sharding type of the optimizer state; None if the checkpoint does not say."""
    model: Mapping[str, Any]
    """Arguments of its model that are stored; see `model_of`."""
    settings: frozenset[str]
    """Names of all its arguments that are stored."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """State that was loaded besides parameters and moments."""

    path: Path
    manifest: Manifest | None
    """None for a checkpoint of plain Megatron."""
    upstream: UpstreamState
    with_optimizer: bool
    has_new_adapters: bool
    """Whether it has the model without adapters, which keep their values."""


Accept = Callable[[Path, Manifest | None, UpstreamState], None]
"""Raises ConfigurationError if a run may not continue from a checkpoint; called on every rank."""


def find_checkpoints(
    folder: CheckpointFolder, *, iteration: int | None = None, with_earlier: bool = False
) -> list[Path]:
    """Collective: the checkpoint to load, then the earlier ones if they may replace it.

    Args:
        iteration: this one, instead of the latest.
        with_earlier: ``--load-fallback``.

    Returns:
        Newest first; empty if there is nothing that looks like a checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing, or none is named the latest, and no other may
            replace it.
    """
    found = on_rank_0(
        lambda: _find(folder, iteration, with_earlier), f"{folder.root} cannot be read"
    )
    return found if with_earlier else found[:1]


def _find(folder: CheckpointFolder, wanted: int | str | None, with_earlier: bool) -> list[Path]:
    there = folder.iterations
    if wanted is None:
        try:
            wanted = folder.latest()
        except CheckpointError:
            if not (with_earlier and there):
                raise
    if isinstance(wanted, str):
        return [folder.path_of(RELEASE)]
    if wanted is None:
        if folder.paths and not (there and with_earlier):
            newest = folder.paths[-1].name
            fix = f"write {newest} into {LATEST_FILE_NAME}"
            if there:
                fix = f"give --ckpt-step {there[-1]}, or --load-fallback for the last good one"
            raise CheckpointError(
                f"{folder.root}: holds {len(folder.paths)} checkpoints, the newest {newest}, but "
                f"no file that names the latest; {fix}"
            )
        return [folder.path_of(i) for i in reversed(there)]
    usable = [folder.path_of(i) for i in reversed(there) if i <= wanted]
    # If one is named, starting from scratch because there is none would be wrong.
    if wanted not in there and not (with_earlier and usable):
        named = ", ".join(map(str, there[-_MAX_ITERATIONS_NAMED:])) or "none"
        fix = "copy it back, or start a new run in another folder"
        if there:
            fix = "give --ckpt-step for one of them"
            if there[0] < wanted:
                fix += ", or --load-fallback for the last good one"
        raise CheckpointError(
            f"{folder.root}: there is no checkpoint of iteration {wanted}; there are {named}: {fix}"
        )
    return usable


def load_first_whole(
    paths: list[Path],
    engine: RuntimeEngine,
    model: Mapping[str, Any],
    *,
    with_optimizer: bool = True,
    accept: Accept = lambda path, manifest, upstream: None,
    log: Callable[[str], None] = print,
) -> LoadedCheckpoint:
    """Collective: load the first that can be loaded, with a warning for every other.

    Arguments as for `load_checkpoint`.

    Raises:
        CheckpointError: none can be loaded.
        ConfigurationError: it is of another model.
    """
    errors = []
    for path in paths:
        try:
            return load_checkpoint(
                path, engine, model, with_optimizer=with_optimizer, accept=accept
            )
        except CheckpointError as error:
            if len(paths) == 1:
                raise
            errors.append(str(error))
            if dist.get_rank() == 0:
                log(f"warning: checkpoint {path} is skipped: {error}")
    raise CheckpointError(
        f"none of {len(paths)} checkpoints can be loaded; the newest: {errors[0]}"
    )


def load_checkpoint(
    path: Path,
    engine: RuntimeEngine,
    model: Mapping[str, Any],
    *,
    with_optimizer: bool = True,
    accept: Accept = lambda path, manifest, upstream: None,
) -> LoadedCheckpoint:
    """Collective: check a checkpoint, then fill the engine's parameters and moments from it.

    Args:
        engine: may have other strategies and ranks than the run that wrote the checkpoint.
        model: of this run, as in `Manifest.model`.
        with_optimizer: load moments and fp32 master; parameters alone otherwise.
        accept: called before anything is loaded.

    Raises:
        CheckpointError: it is damaged or incomplete; what the shards then hold is undefined.
        ConfigurationError: it is of another model, or has no optimizer state that can be used.
    """
    what = f"{path} cannot be read"
    manifest = on_all_ranks(lambda: _manifest(path), what)
    if manifest is not None:
        share = manifest.problems(path, share=dist.get_rank(), num_shares=dist.get_world_size())
        problems = agreed_problems(share)
        if problems:
            raise CheckpointError(f"{path}: {listed(problems)}; load another checkpoint")
    with_optimizer = with_optimizer and path.name != RELEASE

    def check() -> tuple[
        StoredCheckpoint, UpstreamState, tuple[ShardState, ...], StoredModel, bool
    ]:
        problems = Problems()
        if manifest is not None:
            with problems.collected():
                _check_same_model(path, model_differences(manifest.model, model))
        checkpoint = StoredCheckpoint(path)
        upstream = upstream_state(checkpoint)
        if manifest is None:
            if upstream.written_here:
                raise CheckpointError(
                    f"{path}: {MANIFEST_NAME} is missing, so its files cannot be checked; load "
                    "another checkpoint"
                )
            with problems.collected():
                known = upstream.settings
                _check_same_model(path, model_differences(upstream.model, model, of=known))
        definition, specs = engine.definition, list(engine.layout.parameters)
        has_new_adapters = False
        with problems.collected():
            has_new_adapters = _lacks_adapters(
                checkpoint, definition.lora, with_optimizer=with_optimizer
            )
        with problems.collected():
            accept(path, manifest, upstream)
        problems.raise_any()
        if has_new_adapters:
            specs = [spec for spec in specs if not is_of_adapter(spec.name)]
        stored = StoredModel.of(definition, separate_layers=checkpoint.has_separate_layers)
        states = model_states(engine)
        if with_optimizer:
            _check_optimizer(checkpoint, upstream)
            _check_frozen(checkpoint, stored, specs)
            states = training_states(engine)
        differences = _tensor_differences(checkpoint, stored, states, specs, definition.vocab_size)
        _check_same_model(path, differences)
        return checkpoint, upstream, states, stored, has_new_adapters

    checkpoint, upstream, states, stored, has_new_adapters = on_all_ranks(check, what)
    places = stored.parameters
    if has_new_adapters:
        places = {name: place for name, place in places.items() if not is_of_adapter(name)}
    engine.finish_regrouping()
    shapes = {key: tensor.shape for key, tensor in checkpoint.tensors.items()}
    pieces = [
        piece
        for state in states
        for piece in shard_pieces(engine.shards, state, places, saved_shapes=shapes)
    ]
    pieces += bias_pieces(engine, stored.biases)
    on_all_ranks(lambda: checkpoint.fill(pieces), what)
    if with_optimizer:
        engine.optimizer.num_steps.fill_(upstream.num_steps)
    engine.parameters_changed()
    return LoadedCheckpoint(path, manifest, upstream, with_optimizer, has_new_adapters)


def read_rng_state(path: Path) -> Any:
    """Megatron's entry for random-number generators; None if there is none.

    Raises CheckpointError.
    """
    return StoredCheckpoint(path).read_object("rng_state", num_axes=2)


def upstream_state(checkpoint: StoredCheckpoint) -> UpstreamState:
    """Read Megatron's entries, also as its earlier versions stored them. Raises CheckpointError."""
    path, common = checkpoint.folder, checkpoint.common_state()
    args = common.get("args")
    if args is not None and not isinstance(args, Namespace):
        raise CheckpointError(
            f"{path}: args must be Megatron's arguments but is {type(args).__name__}; load another "
            "checkpoint"
        )
    metadata = common.get("content_metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    iteration = _count(path, "iteration", common.get("iteration", 0))
    consumed = getattr(args, "consumed_train_samples", 0)
    return UpstreamState(
        iteration=iteration,
        num_steps=_num_steps(path, common.get("optimizer"), iteration),
        num_consumed_sequences=_count(path, "consumed_train_samples", consumed),
        scheduler=common.get("opt_param_scheduler"),
        num_floating_point_operations=common.get("num_floating_point_operations_so_far", 0),
        written_here=WRITTEN_HERE in metadata,
        sharding_type=metadata.get("distrib_optim_sharding_type"),
        model={} if args is None else model_of(args),
        settings=frozenset(() if args is None else known_settings(vars(args))),
    )


def _num_steps(path: Path, optimizer: Any, iteration: int) -> int:
    """Groups have it; in earlier versions with Transformer Engine or apex, the iteration alone.

    With experts on ranks, Megatron has two optimizers, by number.
    """
    try:
        parts = [optimizer] if "optimizer" in optimizer else list(optimizer.values())
        steps = {
            int(group["step"])
            for part in parts
            for group in part["optimizer"]["param_groups"]
            if group.get("step") is not None
        }
    except (AttributeError, TypeError, KeyError, ValueError):
        return iteration
    if len(steps) > 1:
        raise CheckpointError(
            f"{path}: parameter groups were updated {sorted(steps)} times, which must be one "
            "number; load another checkpoint"
        )
    return steps.pop() if steps else iteration


def _count(path: Path, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(
            f"{path}: {name} must be a whole number, at least 0, but is {value!r}; load another "
            "checkpoint"
        )
    return value


def _manifest(path: Path) -> Manifest | None:
    """None for a checkpoint of plain Megatron."""
    try:
        return Manifest.read(path)
    except FileNotFoundError:
        pass
    if is_checkpoint(path):
        return None
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such checkpoint; correct --load or --ckpt-step")
    raise CheckpointError(
        f"{path}: a checkpoint has {MANIFEST_NAME}, or of plain Megatron {FORMAT_NAME} in the "
        "format torch_dist, but this folder has neither; load another checkpoint"
    )


def _check_same_model(path: Path, differences: list[str]) -> None:
    if differences:
        raise ConfigurationError(
            f"{path} is of another model: {listed(differences)}; give the flags of the run that "
            "wrote it, or load another checkpoint"
        )


def _lacks_adapters(
    checkpoint: StoredCheckpoint, lora: Lora | None, *, with_optimizer: bool
) -> bool:
    """Whether a run with adapters begins with a checkpoint of the model alone.

    Raises ConfigurationError if it would go on without, and for adapters that the run has not.
    """
    has_adapters = any(map(is_of_adapter, checkpoint.tensors))
    if has_adapters and lora is None:
        raise ConfigurationError(
            f"{checkpoint.folder} has adapters but this run trains the model itself; give the "
            "rank, alpha and targets (--lora-rank, …) of the run that wrote it, or add them to the "
            "weights by export-hf --merge and begin with these"
        )
    if lora is None or has_adapters:
        return False
    if with_optimizer:
        raise ConfigurationError(
            f"{checkpoint.folder} has no adapters to go on with but rank (--lora-rank) is "
            f"{lora.rank}; train new ones of its model (--finetune, or Engine.from_hf with its "
            "folder)"
        )
    return True


def _check_optimizer(checkpoint: StoredCheckpoint, upstream: UpstreamState) -> None:
    if not checkpoint.has_optimizer:
        raise ConfigurationError(
            f"{checkpoint.folder} has no optimizer state; start a new optimizer with its weights "
            "by --finetune, or load another checkpoint"
        )
    if not checkpoint.has_resumable_optimizer:
        raise ConfigurationError(
            f"{checkpoint.folder} has optimizer state of the kind '{upstream.sharding_type}', "
            "which only the layout of ranks that wrote it can read; let Megatron save once with "
            "--dist-ckpt-optim-fully-reshardable, or take the weights alone by --finetune"
        )


def _check_frozen(
    checkpoint: StoredCheckpoint, stored: StoredModel, specs: Sequence[ParameterSpec]
) -> None:
    """Raise ConfigurationError unless the same parameters are frozen there, which shows in tensors
    of the optimizer that are missing: those that only one of both trains have no moments."""
    tensors = checkpoint.tensors
    changed: dict[bool, list[str]] = {False: [], True: []}  # by whether they are frozen here
    for spec in specs:
        key = stored.parameters[spec.name].tensors[0].key
        if key in tensors and (MASTER + key in tensors) == spec.is_frozen:
            changed[spec.is_frozen].append(spec.name)
    found = [
        f"{len(names)} are frozen {where}: {listed(names)}"
        for names, where in ((changed[True], "only here"), (changed[False], "only there"))
        if names
    ]
    if found:
        raise ConfigurationError(
            f"{checkpoint.folder} was trained with other frozen parameters, of {len(specs)} "
            f"{'; '.join(found)}; freeze those of the run that wrote it, or begin with a new "
            "optimizer by --no-load-optim"
        )


def _tensor_differences(
    checkpoint: StoredCheckpoint,
    stored: StoredModel,
    states: Sequence[ShardState],
    specs: Sequence[ParameterSpec],
    num_tokens: int,
) -> list[str]:
    """Tensors that are missing, have another shape, or are not in this model."""
    tensors = checkpoint.tensors
    differences = []
    parameters, biases = stored.parameters.values(), stored.biases.values()
    wanted = [
        (state.prefix + place.key, place)
        for state in states
        for spec in specs
        if spec.is_frozen == state.is_frozen
        for place in stored.parameters[spec.name].tensors
    ]
    for key, place in (*wanted, *((MODEL + place.key, place) for place in biases)):
        if key not in tensors:
            differences.append(f"there is no {key}")
        elif not place.fits(tensors[key].shape, num_tokens):
            differences.append(f"{key} is {tensors[key].shape} there and {place.shape} here")
    if any(state.prefix == MASTER for state in states):
        known = {each.key for place in (*parameters, *biases) for each in place.tensors}
        more = sorted(checkpoint.parameters.keys() - known)
        differences += [f"{key} is not in this model" for key in more]
    return differences
