"""``import-hf``: a checkpoint of parameters alone from a Hugging Face folder.

What needs torch is imported late, so that help is quick.
"""

from __future__ import annotations

import argparse
import math
import shlex
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.hydraulis.checkpoint.folder import LATEST_FILE_NAME, RELEASE, CheckpointFolder
from megatron.hydraulis.checkpoint.hugging_face.config import (
    CONFIG_NAME,
    check_no_adapter,
    model_from_config,
    num_predicting_layers,
)
from megatron.hydraulis.checkpoint.hugging_face.model import HuggingFaceModel, model_flags
from megatron.hydraulis.checkpoint.hugging_face.tensors import (
    FINAL_NORM,
    PREDICTIONS,
    ROUTER,
    ROUTER_BIAS,
    ROWS_ARE_TOKENS,
    SCORE,
    Converted,
    Place,
    TensorRows,
    by_place,
    check_tensors,
    layers_differ,
    leading_axes,
    tensor_rows,
)
from megatron.hydraulis.checkpoint.manifest import Manifest, model_of, records_of
from megatron.hydraulis.errors import CheckpointError, ConfigurationError
from megatron.hydraulis.json_object import read_json
from megatron.hydraulis.lora import Lora, is_of_adapter
from megatron.hydraulis.terminal import ByteProgress

if TYPE_CHECKING:
    import torch

    from megatron.hydraulis.checkpoint.hugging_face.folder import SafetensorsFolder
    from megatron.hydraulis.checkpoint.torch_dist import FilePiece

_LINE_WIDTH = 96
EPSILON_OF_LATENTS = 1e-6
"""Epsilon of the norms of latents in transformers (5.23), whatever the configuration says."""
_CHECKPOINT_VERSION = 3.0
"""Version of Megatron's state dict."""
_ROPE_BUFFER = ".rotary_emb.inv_freq"
"""End of the names of buffers in old Llama folders, which follow from the rotary base."""
_HEAD, _EMBEDDING_NAME = "lm_head.weight", "model.embed_tokens.weight"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder with config.json and safetensors"
    )
    parser.add_argument(
        "output",
        type=Path,
        metavar="OUT",
        help="folder for --load, without checkpoints: gets one of parameters alone, 'release'",
    )
    parser.add_argument(
        "--adapter",
        type=Path,
        metavar="DIR",
        help="folder of peft with an adapter of the model, which is imported with it",
    )
    parser.add_argument(
        "--mtp",
        dest="predictions",
        action="store_true",
        help="import layers of multi-token prediction, too, for a run with --mtp-num-layers",
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        dest="vocab_divisor",
        type=int,
        default=128,
        metavar="N",
        help="pad the vocabulary to a multiple of N (default: %(default)s, as in training)",
    )


def run(namespace: argparse.Namespace) -> int:
    """Import as the flags say. Raises as `import_folder`."""
    done = import_folder(
        namespace.folder,
        namespace.output,
        vocab_divisor=namespace.vocab_divisor,
        adapter=namespace.adapter,
        predictions=namespace.predictions,
    )
    print(f"imported {namespace.folder} to {done.checkpoint}: {done}")
    print(
        "PARAMETERS ONLY: a run that loads it begins with iteration 1, a new optimizer and the "
        "first sequence"
    )
    epsilon = done.model.layernorm_epsilon
    if done.model.latents is not None and epsilon != EPSILON_OF_LATENTS:
        print(
            f"the norms of latents have the epsilon of all others, {epsilon:g}, which is "
            f"{EPSILON_OF_LATENTS:g} in transformers"
        )
    config = namespace.folder / CONFIG_NAME
    num_left_out = num_predicting_layers(read_json(config, "config", CheckpointError), str(config))
    if num_left_out and not done.model.mtp_num_layers:
        print(f"left out: layers of multi-token prediction ({num_left_out}), see --mtp")
    flags = model_flags(done.model)
    flags += {"bfloat16": ["--bf16"], "float16": ["--fp16"]}.get(done.dtype_name, [])
    if done.lora is not None:
        flags += lora_flags(done.lora)
    print("flags of such a run:")
    lines = [""]
    for flag in [shlex.join(("--load", str(namespace.output))), *flags]:
        if len(lines[-1]) + len(flag) > _LINE_WIDTH:
            lines.append("")
        lines[-1] += f" {flag}"
    print(" \\\n".join(f" {line}" for line in lines))
    return 0


def lora_flags(lora: Lora) -> list[str]:
    """Flags of the training program for these adapters, each with its value."""
    return [
        f"--lora-rank {lora.rank}",
        f"--lora-alpha {str(lora.alpha).removesuffix('.0')}",
        f"--lora-targets {' '.join(lora.targets)}",
    ]


def import_folder(
    source: Path,
    output: Path,
    *,
    vocab_divisor: int = 128,
    adapter: Path | None = None,
    predictions: bool = False,
) -> Converted:
    """Write a Hugging Face folder's model as a checkpoint that ``--load`` starts from.

    Args:
        source: has config.json and safetensors.
        output: folder for checkpoints that has none yet; gets ``release`` and the file that names
            it the latest.
        vocab_divisor: the vocabulary is padded, with rows of zeros, to a multiple of it.
        adapter: folder of peft with an adapter of the model.
        predictions: whether layers of multi-token prediction are imported, too.

    Raises:
        CheckpointError: a folder is damaged or incomplete, or the checkpoint cannot be written.
        ConfigurationError: the model has no counterpart in Megatron, or the adapter none here.
    """
    from megatron.hydraulis.checkpoint.hugging_face.adapter_folder import open_adapter
    from megatron.hydraulis.checkpoint.hugging_face.folder import new_folder
    from megatron.hydraulis.checkpoint.names import sharding_metadata
    from megatron.hydraulis.checkpoint.torch_dist import COMMON_STATE, write_file, write_metadata

    model, files, dtype = open_folder(source, predictions=predictions)
    sources = [_Origin(files, dtype)]
    lora = None
    if adapter is not None:
        lora, files, dtype_of_adapter = open_adapter(adapter, model, files)
        sources.append(_Origin(files, dtype_of_adapter))
    folder = CheckpointFolder(output)
    if folder.latest() is not None or folder.paths:
        raise CheckpointError(
            f"{output}: a model is imported into a folder without checkpoints but there are "
            "some; name another folder"
        )
    padded_size = -(-model.vocab_size // vocab_divisor) * vocab_divisor
    arguments = Namespace(
        **model.to_arguments(),
        **({} if lora is None else lora.arguments),
        padded_vocab_size=padded_size,
        bf16=str(dtype) == "torch.bfloat16",
        fp16=str(dtype) == "torch.float16",
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )
    common = {
        "args": arguments,
        "checkpoint_version": _CHECKPOINT_VERSION,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": sharding_metadata(),
    }
    objects = dict.fromkeys(_extra_states(model)) | {COMMON_STATE: common}
    num_bytes = sum(
        math.prod(place.padded_shape(padded_size)) * _origin_of(place, sources).dtype.itemsize
        for place, _ in by_place(model, lora)
    )
    path = folder.path_of(RELEASE)
    with (
        ByteProgress("import-hf", num_bytes) as progress,
        new_folder(path, folder.path_while_saving(RELEASE), num_bytes) as new,
    ):
        pieces = _pieces(model, lora, padded_size, sources, progress)
        written = write_file(new, 0, pieces, objects)
        write_metadata(new, [written])
        Manifest(
            iteration=0,
            num_ranks=1,
            model=model_of(arguments, model.vocab_size),
            state={},
            configuration={"imported_from": source.resolve().name, "family": model.family},
            files=records_of(new, {written.name: written.record}),
        ).write(new)
    try:
        folder.write_latest(RELEASE)
    except OSError as error:
        raise CheckpointError(
            f"{output}: {LATEST_FILE_NAME} cannot be written: {error.strerror}; write "
            f"'{RELEASE}' into it"
        ) from error
    return Converted(path, model, str(dtype).removeprefix("torch."), num_bytes, lora)


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where tensors come from."""

    files: SafetensorsFolder
    dtype: torch.dtype


def _origin_of(place: Place, sources: Sequence[_Origin]) -> _Origin:
    """The one of the model, or the one of its adapter."""
    return sources[is_of_adapter(place.key)]


def open_folder(
    source: Path, *, value_head: bool = False, predictions: bool = False
) -> tuple[HuggingFaceModel, SafetensorsFolder, torch.dtype]:
    """The model of a Hugging Face folder, its tensors, which are those of the model, and their
    dtype.

    Args:
        value_head: the model has one, which the folder may lack, in place of an output layer.
        predictions: whether it has its layers of multi-token prediction.

    Raises as `import_folder`.
    """
    from megatron.hydraulis.checkpoint.hugging_face.folder import SafetensorsFolder

    if not source.is_dir():
        raise CheckpointError(
            f"{source}: there is no such folder; correct the path, or, for a model on "
            f"the Hub, download it first"
        )
    check_no_adapter(source)
    config = source / CONFIG_NAME
    content = read_json(config, "config", CheckpointError)
    if value_head and isinstance(content, dict):
        content |= {"architectures": None}  # tensors tell what is on top of the layers
    model = model_from_config(content, str(config))
    if value_head:
        model = replace(model, has_value_head=True, untie_embeddings_and_output_weights=True)
    files = SafetensorsFolder(source)
    num_predictions = num_predicting_layers(content, str(config))
    if predictions:
        model = replace(model, mtp_num_layers=num_predictions)
    else:
        numbers = range(model.num_layers, model.num_layers + num_predictions)
        layers = tuple(f"model.layers.{number}." for number in numbers)
        files.leave_out([name for name in files.names if name.startswith(layers)])
    if (names := model.of_family.experts) is not None:
        files.split_experts(names)
    return model, files, _check_tensors(source, files, model)


def _check_tensors(source: Path, files: SafetensorsFolder, model: HuggingFaceModel) -> torch.dtype:
    """The dtype of all tensors."""
    wanted = {
        row.name: row.shape
        for row in tensor_rows(model)
        if row.name in files.names or not row.name.startswith(SCORE)
    }
    names = {name for name in files.names if name in wanted or not name.endswith(_ROPE_BUFFER)}
    is_tied = not model.untie_embeddings_and_output_weights
    if is_tied and _HEAD in names and _EMBEDDING_NAME in names:
        if not files.read(_HEAD).equal(files.read(_EMBEDDING_NAME)):
            raise ConfigurationError(
                f"{source}: with tie_word_embeddings {_HEAD} must be {_EMBEDDING_NAME} but "
                f"differs; set tie_word_embeddings to false in {CONFIG_NAME}, or leave {_HEAD} out"
            )
        names.remove(_HEAD)
    if model.has_value_head:
        names.discard(_HEAD)
    for place, same in by_place(model) if model.mtp_num_layers else ():
        first, *copies = (row.name for row in same)
        for name in copies if place.key in ROWS_ARE_TOKENS else ():
            if {first, name} <= names and not files.read(name).equal(files.read(first)):
                raise ConfigurationError(
                    f"{source}: layers of multi-token prediction share embedding and output layer "
                    f"with the model but {name} differs from {first}; import without --mtp"
                )
    found = {name: (files.shape(name), files.dtype(name)) for name in names}
    return check_tensors(str(model), source, wanted, found, "get the folder again")


def _pieces(
    model: HuggingFaceModel,
    lora: Lora | None,
    padded_size: int,
    sources: Sequence[_Origin],
    progress: ByteProgress,
) -> Iterator[FilePiece]:
    """Megatron's tensors, one at a time, in the order of Hugging Face's."""
    import torch

    from megatron.hydraulis.checkpoint.torch_dist import FilePiece, layer_key

    separate = layers_differ(model)
    for place, rows in by_place(model, lora):
        source = _origin_of(place, sources)
        size = place.padded_shape(padded_size)
        axes, index = leading_axes(model, place, separate_layers=separate)
        stored = torch.float32 if place.key.endswith(ROUTER_BIAS) else source.dtype
        data = assembled(size, stored, rows, source.files).view(*(1 for _ in axes), *size)
        key = layer_key(place.key, place.layer, separate_layers=separate)
        yield FilePiece(key, (*axes, *size), (*index, *(0 for _ in size)), data, stored)
        progress.advance(math.prod(size) * source.dtype.itemsize)
        del data  # before the next one is made


def assembled(
    size: tuple[int, ...], dtype: torch.dtype, parts: Iterable[TensorRows], files: SafetensorsFolder
) -> torch.Tensor:
    """One of Megatron's tensors, of its size; rows that no part fills are 0."""
    import torch

    whole = torch.zeros(size, dtype=dtype)
    for part in parts:
        rows = files.read(part.name)
        at = 0
        for first, end in part.runs:
            whole[first:end] = rows[at : at + end - first]
            at += end - first
    return whole


def _extra_states(model: HuggingFaceModel) -> Iterator[str]:
    """Keys of the objects that Megatron's modules, local or Transformer Engine's, ask for."""
    from megatron.hydraulis.checkpoint.torch_dist import layer_key, object_key

    yield object_key(f"{FINAL_NORM}._extra_state")
    separate = layers_differ(model)
    for place, _ in by_place(model):
        module, found, _ = place.key.partition(".weight")
        is_in_layer = place.layer is not None or module.startswith(PREDICTIONS)
        if found and is_in_layer and not module.endswith(ROUTER):
            axes, index = leading_axes(model, place, separate_layers=separate)
            key = layer_key(f"{module}._extra_state", place.layer, separate_layers=separate)
            yield object_key(key, axes or (1,), index or (0,))
