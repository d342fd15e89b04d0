"""From a checkpoint to a Hugging Face folder."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME

from megatron.hydraulis.checkpoint.byte_progress import ByteProgress
from megatron.hydraulis.checkpoint.folder import CheckpointFolder, is_unfinished
from megatron.hydraulis.checkpoint.hugging_face.companions import Companions
from megatron.hydraulis.checkpoint.hugging_face.config_json import CONFIG_NAME, config_of
from megatron.hydraulis.checkpoint.hugging_face.model import (
    HuggingFaceModel,
    model_from_arguments,
)
from megatron.hydraulis.checkpoint.hugging_face.new_folder import new_folder
from megatron.hydraulis.checkpoint.hugging_face.safetensors_files import (
    TensorToWrite,
    write_safetensors,
)
from megatron.hydraulis.checkpoint.hugging_face.stored import StoredParameters
from megatron.hydraulis.checkpoint.hugging_face.tensors import (
    EMBEDDING,
    OUTPUT,
    TensorRows,
    layer_shapes,
    outer_shapes,
    tensor_rows,
)
from megatron.hydraulis.checkpoint.manifest import MANIFEST_NAME, Manifest
from megatron.hydraulis.checkpoint.reader import read_common_state
from megatron.hydraulis.errors import CheckpointError, ConfigurationError

__all__ = ["Exported", "export_checkpoint"]

_MOST_NAMED = 4


@dataclass(frozen=True)
class Exported:
    """What was written."""

    source: Path
    """Folder of the very checkpoint."""
    model: HuggingFaceModel
    dtype: torch.dtype
    num_bytes: int
    """Of all tensors."""


def export_checkpoint(
    source: Path,
    output: Path,
    *,
    vocab_size: int | None = None,
    max_file_bytes: int,
    checks_content: bool = True,
    like: Path | None = None,
) -> Exported:
    """Write a checkpoint's parameters as a Hugging Face folder.

    Args:
        source: folder of a checkpoint, or the folder whose latest is meant.
        output: a new folder.
        vocab_size: tokens without padding; as the checkpoint says where None.
        max_file_bytes: of the tensors in one file.
        checks_content: compare the checkpoint's files with their checksums first.
        like: Hugging Face folder whose tokenizer, files and ids of special tokens, is taken.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete, or the folder cannot be written.
        ConfigurationError: the model has no counterpart.
    """
    path = _checkpoint_path(source)
    manifest = _manifest(path)
    if manifest is not None:
        _check_files(path, manifest, checks_content=checks_content)
    parameters = StoredParameters(path)
    arguments = _arguments(path)
    model = model_from_arguments(
        arguments, str(path), vocab_size=_vocab_size(path, vocab_size, manifest, arguments)
    )
    dtype = _check_tensors(path, parameters, model)
    companions = None if like is None else Companions.of(like, model.vocab_size)
    rows = list(tensor_rows(model))
    tensors = [
        TensorToWrite(row.name, row.shape, dtype, row.num_elements * dtype.itemsize) for row in rows
    ]
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    while_writing = output.parent / f".{output.name}.exporting"
    with (
        ByteProgress("export-hf", num_bytes) as progress,
        new_folder(output, while_writing, num_bytes) as folder,
    ):
        pieces = _Pieces(parameters)

        def produce(i: int) -> torch.Tensor:
            progress.advance(tensors[i].num_bytes)
            return pieces.rows(rows[i])

        write_safetensors(folder, tensors, produce, max_file_bytes=max_file_bytes)
        config = config_of(model, str(dtype).removeprefix("torch."))
        if companions is not None:
            config |= companions.token_ids
            companions.copy_to(folder)
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    return Exported(path, model, dtype, num_bytes)


class _Pieces:
    """Megatron's tensors, the last one kept, since several of Hugging Face's are made of it."""

    def __init__(self, parameters: StoredParameters) -> None:
        self._parameters = parameters
        self._place: tuple[str, int | None] | None = None
        self._piece = torch.empty(0)

    def rows(self, wanted: TensorRows) -> torch.Tensor:
        """A tensor in Hugging Face's form."""
        place = (wanted.key, wanted.layer)
        if place != self._place:
            self._piece = self._parameters.read(*place)
            self._place = place
        if len(wanted.runs) == 1:
            first, end = wanted.runs[0]
            return self._piece[first:end]
        return torch.cat([self._piece[first:end] for first, end in wanted.runs])


def _checkpoint_path(source: Path) -> Path:
    if not source.is_dir():
        raise CheckpointError(f"{source}: there is no such folder; correct the path")
    if is_unfinished(source):
        raise CheckpointError(
            f"{source}: is a checkpoint whose saving was interrupted; take a complete one, a "
            "folder called iter_…"
        )
    if _is_checkpoint(source):
        return source
    folder = CheckpointFolder(source)
    latest = folder.latest()
    if latest is None:
        raise CheckpointError(
            f"{source}: must be a checkpoint of the format torch_dist, or a folder of checkpoints, "
            f"but has neither {CONFIG_FNAME} nor a file that names the latest; correct the path"
        )
    path = folder.path_of(latest)
    if not path.is_dir() or not _is_checkpoint(path):
        raise CheckpointError(
            f"{source}: the latest checkpoint is {path.name} but that is not there, or not in the "
            "format torch_dist; name another one by its folder"
        )
    return path


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST_NAME).is_file() or (path / CONFIG_FNAME).is_file()


def _manifest(path: Path) -> Manifest | None:
    """None for a checkpoint of plain Megatron."""
    try:
        return Manifest.read(path)
    except FileNotFoundError:
        return None


def _check_files(path: Path, manifest: Manifest, *, checks_content: bool) -> None:
    what = "checksums" if checks_content else "sizes"
    with ByteProgress(what, manifest.num_bytes) as progress:
        problems = manifest.problems(path, checks_content=checks_content, advance=progress.advance)
    if problems:
        raise CheckpointError(f"{path}: {_listed(problems)}; export another checkpoint")


def _arguments(path: Path) -> Mapping[str, Any]:
    """Upstream's arguments as the checkpoint stores them."""
    arguments = read_common_state(path).get("args")
    if not isinstance(arguments, Namespace):
        raise CheckpointError(
            f"{path}: the arguments of the run, which say what the model is, must be stored in the "
            "checkpoint but are not; export a checkpoint of a training program"
        )
    return vars(arguments)


def _vocab_size(
    path: Path, given: int | None, manifest: Manifest | None, arguments: Mapping[str, Any]
) -> int:
    stored = None if manifest is None else manifest.model.get("vocab_size")
    for size in (given, stored, arguments.get("vocab_size")):
        if size is not None:
            return int(size)
    raise ConfigurationError(
        f"{path}: does not say how many tokens the vocabulary has without padding; give "
        "--vocab-size"
    )


def _check_tensors(
    path: Path, parameters: StoredParameters, model: HuggingFaceModel
) -> torch.dtype:
    """The dtype of all of them."""
    wanted = {
        key: (shape, key in (EMBEDDING, OUTPUT)) for key, shape in outer_shapes(model).items()
    }
    for key, shape in layer_shapes(model).items():
        if parameters.has_layers_apart:
            for layer in range(model.num_layers):
                wanted[parameters.key_of(key, layer)] = (shape, False)
        else:
            wanted[parameters.key_of(key, 0)] = ((model.num_layers, *shape), False)
    stored = parameters.tensors
    missing = sorted(wanted.keys() - stored.keys())
    if missing:
        raise CheckpointError(
            f"{path}: a {model.family} model of these arguments has {len(wanted)} tensors but "
            f"{_listed(missing)} of them are missing; export another checkpoint"
        )
    unknown = sorted(stored.keys() - wanted.keys())
    if unknown:
        raise ConfigurationError(
            f"{path}: {_listed(unknown)} have no counterpart in {model.family}, which has "
            f"{len(wanted)} tensors of Megatron's; only Llama, Qwen2 and Qwen3 models can be "
            "exported"
        )
    differences = [
        f"{key} is {stored[key].shape} instead of {shape}"
        for key, (shape, is_padded) in wanted.items()
        if not _fits(stored[key].shape, shape, is_padded=is_padded)
    ]
    if differences:
        raise CheckpointError(
            f"{path}: tensors must have the shapes that its arguments and a vocabulary of "
            f"{model.vocab_size} tokens give but {_listed(differences)}; export another checkpoint "
            "or correct --vocab-size"
        )
    dtypes = {tensor.dtype for tensor in stored.values()}
    if len(dtypes) > 1:
        raise ConfigurationError(
            f"{path}: all parameters are of one dtype in a Hugging Face folder but here of "
            f"{', '.join(sorted(map(str, dtypes)))}; export another checkpoint"
        )
    return dtypes.pop()


def _fits(stored: tuple[int, ...], wanted: tuple[int, ...], *, is_padded: bool) -> bool:
    if is_padded and len(stored) == len(wanted):
        return stored[0] >= wanted[0] and stored[1:] == wanted[1:]
    return stored == wanted


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else ""
    return ", ".join(items[:_MOST_NAMED]) + more
