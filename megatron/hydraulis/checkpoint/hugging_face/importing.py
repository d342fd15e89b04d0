"""From a Hugging Face folder to a checkpoint of parameters alone."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron.hydraulis.checkpoint.byte_progress import ByteProgress
from megatron.hydraulis.checkpoint.folder import (
    LATEST_FILE_NAME,
    RELEASE,
    CheckpointFolder,
)
from megatron.hydraulis.checkpoint.hugging_face.config_json import CONFIG_NAME, model_from_config
from megatron.hydraulis.checkpoint.hugging_face.model import HuggingFaceModel
from megatron.hydraulis.checkpoint.hugging_face.new_folder import new_folder
from megatron.hydraulis.checkpoint.hugging_face.safetensors_files import SafetensorsFolder
from megatron.hydraulis.checkpoint.hugging_face.stored import (
    LAYERS,
    PieceToWrite,
    write_parameters,
)
from megatron.hydraulis.checkpoint.hugging_face.tensors import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    TensorRows,
    layer_shapes,
    outer_shapes,
    tensor_rows,
)
from megatron.hydraulis.checkpoint.manifest import FileRecord, Manifest, files_of, sha256_of
from megatron.hydraulis.checkpoint.model_arguments import model_of
from megatron.hydraulis.checkpoint.names import sharding_metadata
from megatron.hydraulis.errors import CheckpointError, ConfigurationError
from megatron.hydraulis.json_object import read_json

__all__ = ["Imported", "import_folder"]

_CHECKPOINT_VERSION = 3.0
"""Of upstream's state dict."""
_ROPE_BUFFER = ".rotary_emb.inv_freq"
"""Ends the names of what old Llama folders have beside parameters: it follows from the base."""
_HEAD, _EMBEDDING_NAME = "lm_head.weight", "model.embed_tokens.weight"
_MOST_NAMED = 4


@dataclass(frozen=True)
class Imported:
    """What was written."""

    path: Path
    """Folder of the checkpoint."""
    model: HuggingFaceModel
    dtype: torch.dtype
    num_bytes: int
    """Of all tensors."""


def import_folder(source: Path, output: Path, *, vocab_divisor: int = 128) -> Imported:
    """Write a Hugging Face folder's model as a checkpoint that ``--load`` starts from.

    Args:
        source: with config.json and safetensors.
        output: folder for checkpoints that has none yet; gets ``release`` and the file that names
            it the latest.
        vocab_divisor: the vocabulary is padded, by rows of zeros, to a multiple of it.

    Raises:
        CheckpointError: the folder is damaged or incomplete, or the checkpoint cannot be written.
        ConfigurationError: the model has no counterpart in Megatron.
    """
    if not source.is_dir():
        raise CheckpointError(f"{source}: there is no such folder; correct the path")
    what = f"{source / CONFIG_NAME}"
    model = model_from_config(read_json(source / CONFIG_NAME, "config", CheckpointError), what)
    files = SafetensorsFolder(source)
    rows = list(tensor_rows(model))
    dtype = _check_tensors(source, files, model, rows)
    folder = CheckpointFolder(output)
    if folder.latest() is not None or folder.paths:
        raise CheckpointError(
            f"{output}: a model is imported into a folder without checkpoints but there are "
            "some; name another folder"
        )
    padded_size = -(-model.vocab_size // vocab_divisor) * vocab_divisor
    pieces, parts = _pieces(model, padded_size, rows)
    num_bytes = sum(torch.Size(piece.sizes).numel() * dtype.itemsize for piece in pieces)
    path, while_writing = folder.path_of(RELEASE), folder.path_while_saving(RELEASE)
    with (
        ByteProgress("import-hf", num_bytes) as progress,
        new_folder(path, while_writing, num_bytes) as new,
    ):

        def produce(i: int) -> torch.Tensor:
            piece = pieces[i]
            progress.advance(torch.Size(piece.sizes).numel() * dtype.itemsize)
            shape = piece.shape if piece.layer is None else piece.shape[1:]
            return _assembled(shape, dtype, parts[i], files)

        arguments = _arguments(model, padded_size, dtype)
        write_parameters(
            new, pieces, dtype, produce, _common(arguments), empty_objects=_extra_states(model)
        )
        _write_manifest(new, arguments, model, source)
    _name_latest(folder)
    return Imported(path, model, dtype, num_bytes)


def _check_tensors(
    source: Path, files: SafetensorsFolder, model: HuggingFaceModel, rows: list[TensorRows]
) -> torch.dtype:
    """The dtype of all of them."""
    wanted = {row.name: row.shape for row in rows}
    missing = sorted(wanted.keys() - files.names)
    if missing:
        raise CheckpointError(
            f"{source}: a {model.family} model of {CONFIG_NAME} has {len(wanted)} tensors but "
            f"{_listed(missing)} are missing; get the folder anew"
        )
    extra = {name for name in files.names - wanted.keys() if not name.endswith(_ROPE_BUFFER)}
    if model.tied_embeddings and _HEAD in extra:
        if not torch.equal(files.read(_HEAD), files.read(_EMBEDDING_NAME)):
            raise ConfigurationError(
                f"{source}: with tie_word_embeddings {_HEAD} must be {_EMBEDDING_NAME} but "
                f"differs; set tie_word_embeddings to false in {CONFIG_NAME}, or leave {_HEAD} out"
            )
        extra.remove(_HEAD)
    if extra:
        raise ConfigurationError(
            f"{source}: {_listed(sorted(extra))} have no counterpart in Megatron's model, to which "
            f"{len(wanted)} tensors of a {model.family} model belong; import another model"
        )
    for name, shape in wanted.items():
        if files.shape(name) != shape:
            raise CheckpointError(
                f"{source}: {name} must be {shape} by {CONFIG_NAME} but is {files.shape(name)}; "
                "get the folder anew"
            )
    dtypes = {files.dtype(name): name for name in wanted}
    if len(dtypes) > 1:
        named = ", ".join(f"{name} {dtype}" for dtype, name in dtypes.items())
        raise ConfigurationError(
            f"{source}: all tensors must be of one dtype but {named}; save the model in one dtype"
        )
    return next(iter(dtypes))


def _pieces(
    model: HuggingFaceModel, padded_size: int, rows: list[TensorRows]
) -> tuple[list[PieceToWrite], list[list[TensorRows]]]:
    """What is written, in the order of Hugging Face's tensors, and what each is made of."""
    layers = layer_shapes(model)
    outer = outer_shapes(model)
    pieces: list[PieceToWrite] = []
    parts: list[list[TensorRows]] = []
    place = None
    for row in rows:
        if (row.key, row.layer) == place:
            parts[-1].append(row)
            continue
        place = (row.key, row.layer)
        parts.append([row])
        if row.layer is not None:
            shape = (model.num_layers, *layers[row.key])
            pieces.append(PieceToWrite(f"{LAYERS}{row.key}", shape, row.layer))
        elif row.key in (EMBEDDING, OUTPUT):
            pieces.append(PieceToWrite(row.key, (padded_size, *outer[row.key][1:]), None))
        else:
            pieces.append(PieceToWrite(row.key, outer[row.key], None))
    return pieces, parts


def _assembled(
    shape: tuple[int, ...], dtype: torch.dtype, parts: list[TensorRows], files: SafetensorsFolder
) -> torch.Tensor:
    """A tensor of Megatron's, rows that no part fills at 0."""
    whole = torch.zeros(shape, dtype=dtype)
    for part in parts:
        rows = files.read(part.name)
        at = 0
        for first, end in part.runs:
            whole[first:end] = rows[at : at + end - first]
            at += end - first
    return whole


def _arguments(model: HuggingFaceModel, padded_size: int, dtype: torch.dtype) -> Namespace:
    return Namespace(
        **model.to_arguments(),
        padded_vocab_size=padded_size,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )


def _common(arguments: Namespace) -> dict[str, object]:
    return {
        "args": arguments,
        "checkpoint_version": _CHECKPOINT_VERSION,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": sharding_metadata(),
    }


def _extra_states(model: HuggingFaceModel) -> list[str]:
    """Keys of what upstream's modules store besides, and ask for, local or Transformer Engine's."""
    states = [ShardedObject(f"{FINAL_NORM}._extra_state", None, (1,), (0,))]
    for key in layer_shapes(model):
        module, found, _ = key.partition(".weight")
        if found:
            for layer in range(model.num_layers):
                shape, offset = (model.num_layers,), (layer,)
                states.append(ShardedObject(f"{LAYERS}{module}._extra_state", None, shape, offset))
    return [each.unique_key for each in states]


def _write_manifest(
    folder: Path, arguments: Namespace, model: HuggingFaceModel, source: Path
) -> None:
    Manifest(
        iteration=0,
        num_ranks=1,
        model=model_of(arguments) | {"vocab_size": model.vocab_size},
        state={},
        configuration={"imported_from": source.resolve().name, "family": model.family},
        files={
            name: FileRecord((folder / name).stat().st_size, sha256_of(folder / name))
            for name in files_of(folder)
        },
    ).write(folder)


def _name_latest(folder: CheckpointFolder) -> None:
    try:
        folder.write_latest(RELEASE)
    except OSError as error:
        raise CheckpointError(
            f"{folder.root}: {LATEST_FILE_NAME} cannot be written: {error.strerror}; write "
            f"'{RELEASE}' into it"
        ) from error


def _listed(items: list[str]) -> str:
    more = f" and {len(items) - _MOST_NAMED} more" if len(items) > _MOST_NAMED else ""
    return ", ".join(items[:_MOST_NAMED]) + more
