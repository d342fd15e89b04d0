"""Loading: find a checkpoint that is whole, see that it fits, fill the shards from it.

A damaged checkpoint is an error, or, where that is wished, a reason to take the one before. One
that is whole but of another model never is: no checkpoint before it would fit either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME

from megatron.hydraulis.checkpoint.folder import LATEST_FILE_NAME, RELEASE, CheckpointFolder
from megatron.hydraulis.checkpoint.manifest import MANIFEST_NAME, Manifest
from megatron.hydraulis.checkpoint.model_arguments import model_differences
from megatron.hydraulis.checkpoint.names import StoredParameter, stored_parameters
from megatron.hydraulis.checkpoint.reader import (
    StoredTensor,
    load_into,
    read_object,
    stored_tensors,
)
from megatron.hydraulis.checkpoint.takeover import UpstreamState, master_prefix, upstream_state
from megatron.hydraulis.checkpoint.tensors import EXP_AVG, EXP_AVG_SQ, MODEL, sharded_tensors
from megatron.hydraulis.checkpoint.together import agreed_problems, on_all_ranks, on_rank_0
from megatron.hydraulis.errors import CheckpointError, ConfigurationError
from megatron.hydraulis.runtime.engine import Engine

__all__ = [
    "LoadedCheckpoint",
    "find_checkpoints",
    "load_checkpoint",
    "load_first_whole",
    "read_rng_state",
]

_MOST_NAMED = 4
"""Problems or differences that an error names before it only counts the rest."""
_MOST_ITERATIONS_NAMED = 8


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What was loaded beside parameters and moments."""

    path: Path
    manifest: Manifest | None
    """None for a checkpoint of plain Megatron."""
    upstream: UpstreamState
    with_optimizer: bool


def find_checkpoints(
    folder: CheckpointFolder, *, iteration: int | None = None, with_earlier: bool = False
) -> list[Path]:
    """Collective: the checkpoint to load, and after it the earlier ones if they may stand in.

    Args:
        folder: where to look.
        iteration: this one, instead of the latest.
        with_earlier: ``--load-fallback``.

    Returns:
        Newest first; empty where there is nothing that looks like a checkpoint.

    Raises:
        CheckpointError: the latest cannot be told, or is not there, nor any that may stand in.
    """

    def find() -> list[Path]:
        there = folder.iterations
        latest: int | str | None = iteration
        if latest is None:
            try:
                latest = folder.latest()
            except CheckpointError:
                if not (with_earlier and there):
                    raise
        if latest == RELEASE:
            return [folder.path_of(RELEASE)]
        if latest is None and folder.paths and not (there and with_earlier):
            newest = folder.paths[-1].name
            fix = (
                f"give --ckpt-step {there[-1]}, or --load-fallback for the last good one"
                if there
                else f"write {newest} into {LATEST_FILE_NAME}"
            )
            raise CheckpointError(
                f"{folder.root}: holds {len(folder.paths)} checkpoints, the newest {newest}, but "
                f"no file that names the latest; {fix}"
            )
        if latest is None:
            return [folder.path_of(i) for i in reversed(there)]
        assert isinstance(latest, int)
        usable = [folder.path_of(i) for i in reversed(there) if i <= latest]
        # Where one is named, having none is no reason to start from scratch.
        if latest not in there and not (with_earlier and usable):
            raise CheckpointError(_not_there(folder, latest, there))
        return usable

    found = on_rank_0(find, f"{folder.root} cannot be read")
    return found if with_earlier else found[:1]


def _not_there(folder: CheckpointFolder, latest: int, there: Sequence[int]) -> str:
    named = ", ".join(map(str, there[-_MOST_ITERATIONS_NAMED:])) or "none"
    fix = "copy it back, or start a new run in another folder"
    if there:
        fix = "give --ckpt-step for one of them"
        if there[0] < latest:
            fix += ", or --load-fallback for the last good one"
    return f"{folder.root}: there is no checkpoint of iteration {latest}; there are {named}: {fix}"


def load_first_whole(
    paths: list[Path],
    engine: Engine,
    model: Mapping[str, Any],
    *,
    with_optimizer: bool = True,
    log: Callable[[str], None] = print,
) -> LoadedCheckpoint:
    """Collective: the first that can be loaded; why others cannot is said loudly.

    Raises:
        CheckpointError: none is whole.
        ConfigurationError: it is of another model.
    """
    errors = []
    for path in paths:
        try:
            return load_checkpoint(path, engine, model, with_optimizer=with_optimizer)
        except CheckpointError as error:
            if len(paths) == 1:
                raise
            errors.append(str(error))
            if dist.get_rank() == 0:
                log(f"warning: checkpoint {path} is left out: {error}")
    raise CheckpointError(
        f"none of {len(paths)} checkpoints can be loaded; the newest: {errors[0]}"
    )


def load_checkpoint(
    path: Path, engine: Engine, model: Mapping[str, Any], *, with_optimizer: bool = True
) -> LoadedCheckpoint:
    """Collective: check a checkpoint, then fill the engine's parameters and moments from it.

    Args:
        path: folder of the checkpoint.
        engine: whose canonical shards, whatever wrote the checkpoint.
        model: of this run, as in `Manifest.model`.
        with_optimizer: whether moments and fp32 master are wanted; parameters alone otherwise.

    Raises:
        CheckpointError: it is damaged or incomplete; what the shards then hold is undefined.
        ConfigurationError: it is of another model, or has no optimizer state that can be used.
    """
    manifest = on_all_ranks(lambda: _manifest(path), f"{path} cannot be read")
    if manifest is not None:
        _check_files(path, manifest)
        on_all_ranks(lambda: _check_model(path, manifest.model, model), f"{path} cannot be used")
    what = f"{path} cannot be read"
    upstream = on_all_ranks(lambda: upstream_state(path), what)
    if manifest is None:
        on_all_ranks(lambda: _check_written_by_megatron(path, upstream), what)
        on_all_ranks(lambda: _check_model(path, upstream.model, model), what)
    tensors = on_all_ranks(lambda: stored_tensors(path), what)
    with_optimizer = with_optimizer and path.name != RELEASE
    prefixes = on_all_ranks(lambda: _prefixes(path, tensors, upstream, with_optimizer), what)
    stored = _stored_parameters(engine, tensors)
    vocabulary = engine.definition.vocab_size
    on_all_ranks(lambda: _check_tensors(path, tensors, stored, prefixes, vocabulary), what)
    engine.finish_regrouping()
    flats = [engine.shards.parameters, engine.optimizer.exp_avg, engine.optimizer.exp_avg_sq]
    shapes = {key: tensor.shape for key, tensor in tensors.items()}
    state = {
        prefix: sharded_tensors(engine.shards, flat, stored, prefix, saved_shapes=shapes)
        for prefix, flat in zip(prefixes, flats, strict=False)
    }
    on_all_ranks(lambda: load_into(state, path), what)
    if with_optimizer:
        engine.optimizer.num_steps.fill_(upstream.num_steps)
    engine.parameters_changed()
    return LoadedCheckpoint(path, manifest, upstream, with_optimizer)


def read_rng_state(path: Path) -> Any:
    """Upstream's entry for random-number generators; None where there is none.

    Raises CheckpointError.
    """
    return read_object(path, "rng_state", num_axes=2)


def _manifest(path: Path) -> Manifest | None:
    """None for a checkpoint of plain Megatron; raises CheckpointError for what is none at all."""
    try:
        return Manifest.read(path)
    except FileNotFoundError:
        pass
    if (path / CONFIG_FNAME).is_file():
        return None
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such checkpoint; correct --load or --ckpt-step")
    raise CheckpointError(
        f"{path}: a checkpoint has {MANIFEST_NAME}, or of plain Megatron {CONFIG_FNAME} in the "
        "format torch_dist, but this folder has neither; load another checkpoint"
    )


def _check_files(path: Path, manifest: Manifest) -> None:
    """Collective: every rank reads its share of the files."""
    problems = agreed_problems(
        manifest.problems(path, share=dist.get_rank(), num_shares=dist.get_world_size())
    )
    if problems:
        raise CheckpointError(f"{path}: {_listed(problems)}; load another checkpoint")


def _check_model(path: Path, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    differences = model_differences(saved, here)
    if differences:
        raise ConfigurationError(
            f"{path} is of another model: {_listed(differences)}; give the flags of the run that "
            "wrote it, or load another checkpoint"
        )


def _check_written_by_megatron(path: Path, upstream: UpstreamState) -> None:
    if upstream.written_here:
        raise CheckpointError(
            f"{path}: {MANIFEST_NAME} is missing, by which its files could be checked; load "
            "another checkpoint"
        )


def _prefixes(
    path: Path, tensors: Mapping[str, StoredTensor], upstream: UpstreamState, with_optimizer: bool
) -> tuple[str, ...]:
    """Of the keys from which parameters and moments are loaded."""
    if not with_optimizer:
        return (MODEL,)
    return (master_prefix(path, tensors, upstream), EXP_AVG, EXP_AVG_SQ)


def _stored_parameters(
    engine: Engine, tensors: Mapping[str, StoredTensor]
) -> Mapping[str, StoredParameter]:
    layers_apart = any(key.startswith("decoder.layers.0.") for key in tensors)
    return stored_parameters(engine.definition, layers_apart=layers_apart)


def _check_tensors(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    stored: Mapping[str, StoredParameter],
    prefixes: tuple[str, ...],
    num_tokens: int,
) -> None:
    """Raise ConfigurationError unless every parameter is there in its shape."""
    differences = []
    wanted = {prefix + place.key: place for prefix in prefixes for place in stored.values()}
    for key, place in wanted.items():
        if key not in tensors:
            differences.append(f"there is no {key}")
            continue
        shape = tensors[key].shape
        axis = len(place.prefix)
        fits = shape == place.shape or (
            place.may_be_padded
            and len(shape) == len(place.shape)
            and shape[:axis] + shape[axis + 1 :] == place.shape[:axis] + place.shape[axis + 1 :]
            and shape[axis] >= num_tokens
        )
        if not fits:
            differences.append(f"{key} is {shape} there and {place.shape} here")
    if not any(prefix == MODEL for prefix in prefixes):
        known = {place.key for place in stored.values()}
        more = sorted(
            key for key in tensors if not key.startswith("optimizer") and key not in known
        )
        differences += [f"{key} is not in this model" for key in more]
    if differences:
        raise ConfigurationError(
            f"{path} is of another model: {_listed(differences)}; give the flags of the run that "
            "wrote it, or load another checkpoint"
        )


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else ""
    return ", ".join(items[:_MOST_NAMED]) + more
