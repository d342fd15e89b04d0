"""``export-hf``: a checkpoint's parameters as a Hugging Face folder.

What needs torch is imported late, so that help is quick.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.hydraulis.checkpoint.folder import CheckpointFolder, is_unfinished
from megatron.hydraulis.checkpoint.hugging_face.config import CONFIG_NAME, config_of
from megatron.hydraulis.checkpoint.hugging_face.model import HuggingFaceModel, model_from_arguments
from megatron.hydraulis.checkpoint.hugging_face.tensors import (
    EMBEDDING,
    OUTPUT,
    ROUTER_BIAS,
    Converted,
    by_place,
    check_tensors,
    leading_axes,
    tensor_rows,
)
from megatron.hydraulis.checkpoint.manifest import FORMAT_NAME, Manifest, is_checkpoint
from megatron.hydraulis.errors import CheckpointError, ConfigurationError, listed
from megatron.hydraulis.terminal import ByteProgress

if TYPE_CHECKING:
    import torch

    from megatron.hydraulis.checkpoint.torch_dist import StoredCheckpoint

_BYTES_PER_GB = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="folder of a checkpoint (iter_…, torch_dist), of this program or of plain Megatron, "
        "or the folder given to --save, whose latest is taken",
    )
    parser.add_argument(
        "output", type=Path, metavar="DIR", help="new folder: config.json and safetensors"
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="number of tokens without padding (default: as the checkpoint says)",
    )
    parser.add_argument(
        "--like",
        type=Path,
        metavar="DIR",
        help="Hugging Face folder, such as the imported one, whose companions of weights are "
        "copied: tokenizer, chat template, settings of generation and processors, and the ids of "
        "special tokens (default: none)",
    )
    parser.add_argument(
        "--max-file-gb",
        type=float,
        default=5.0,
        metavar="GB",
        help="maximum size of the tensors in one file (default: %(default)g)",
    )
    parser.add_argument(
        "--no-checksums",
        dest="checks_content",
        action="store_false",
        help="check only the sizes of the checkpoint's files, not their content, which with the "
        "optimizer's state is much more than what is exported",
    )


def run(namespace: argparse.Namespace) -> int:
    """Export as the flags say. Raises as `export_checkpoint`."""
    limit_gb: float = namespace.max_file_gb
    done = export_checkpoint(
        namespace.checkpoint,
        namespace.output,
        vocab_size=namespace.vocab_size,
        max_file_bytes=int(min(limit_gb * _BYTES_PER_GB, 2**62)),
        checks_content=namespace.checks_content,
        like=namespace.like,
    )
    print(f"exported {done.checkpoint} to {namespace.output}: {done}")
    if namespace.like is None:
        print("copy the tokenizer's files into it: a checkpoint does not have them (--like)")
    return 0


def export_checkpoint(
    source: Path,
    output: Path,
    *,
    vocab_size: int | None = None,
    max_file_bytes: int,
    checks_content: bool = True,
    like: Path | None = None,
) -> Converted:
    """Write a checkpoint's parameters as a Hugging Face folder.

    Args:
        source: folder of a checkpoint, or folder of checkpoints whose latest is meant.
        output: a new folder.
        vocab_size: number of tokens without padding; as the checkpoint says if None.
        max_file_bytes: limit for the tensors in one file.
        checks_content: compare the checkpoint's files with their checksums first.
        like: Hugging Face folder whose companions of weights are copied, and the ids of special
            tokens.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete, or the folder cannot be written.
        ConfigurationError: the model has no counterpart.
    """
    import torch

    from megatron.hydraulis.checkpoint.hugging_face.folder import (
        companions_of,
        new_folder,
        write_safetensors,
    )
    from megatron.hydraulis.checkpoint.torch_dist import StoredCheckpoint

    path = _checkpoint_path(source)
    sizes = [vocab_size]
    try:
        manifest = Manifest.read(path)
    except FileNotFoundError:
        pass  # of plain Megatron
    else:
        with ByteProgress("checksums" if checks_content else "sizes", manifest.num_bytes) as bar:
            problems = manifest.problems(path, checks_content=checks_content, advance=bar.advance)
        if problems:
            raise CheckpointError(f"{path}: {listed(problems)}; export another checkpoint")
        sizes.append(manifest.model.get("vocab_size"))
    checkpoint = StoredCheckpoint(path)
    arguments = checkpoint.common_state().get("args")
    if not isinstance(arguments, Namespace):
        raise CheckpointError(
            f"{path}: the arguments of the run, which say what the model is, must be stored in the "
            "checkpoint but are not; export a checkpoint of a training program"
        )
    sizes.append(getattr(arguments, "vocab_size", None))
    size = next((each for each in sizes if each is not None), None)
    if size is None:
        raise ConfigurationError(
            f"{path}: does not say how many tokens the vocabulary has without padding; give "
            "--vocab-size"
        )
    model = model_from_arguments(vars(arguments), str(path), vocab_size=int(size))
    dtype = _check_tensors(checkpoint, model)
    dtype_name = str(dtype).removeprefix("torch.")
    files, token_ids = ([], {}) if like is None else companions_of(like, model.vocab_size)
    forms = {
        row.name: (row.shape, torch.float32 if row.place.key == ROUTER_BIAS else dtype)
        for row in tensor_rows(model)
    }
    num_bytes = sum(math.prod(shape) * each.itemsize for shape, each in forms.values())
    while_writing = output.parent / f".{output.name}.exporting"
    with (
        ByteProgress("export-hf", num_bytes) as progress,
        new_folder(output, while_writing, num_bytes) as folder,
    ):
        tensors = _tensors(checkpoint, model, progress)
        write_safetensors(folder, forms, tensors, max_file_bytes=max_file_bytes)
        config = config_of(model, dtype_name) | token_ids
        for file in files:
            shutil.copyfile(file, folder / file.name)
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    return Converted(path, model, dtype_name, num_bytes)


def _checkpoint_path(source: Path) -> Path:
    if not source.is_dir():
        raise CheckpointError(f"{source}: there is no such folder; correct the path")
    if is_unfinished(source):
        raise CheckpointError(
            f"{source}: is a checkpoint whose saving was interrupted; take a complete one, a "
            "folder called iter_…"
        )
    if is_checkpoint(source):
        return source
    folder = CheckpointFolder(source)
    latest = folder.latest()
    if latest is None:
        raise CheckpointError(
            f"{source}: must be a checkpoint of the format torch_dist, or a folder of checkpoints, "
            f"but has neither {FORMAT_NAME} nor a file that names the latest; correct the path"
        )
    path = folder.path_of(latest)
    if not is_checkpoint(path):
        raise CheckpointError(
            f"{source}: the latest checkpoint is {path.name} but that is not there, or not in the "
            "format torch_dist; name another one by its folder"
        )
    return path


def _check_tensors(checkpoint: StoredCheckpoint, model: HuggingFaceModel) -> torch.dtype:
    """The dtype of all tensors."""
    separate = checkpoint.has_separate_layers
    wanted: dict[str, tuple[int, ...]] = {}
    for place, _ in by_place(model):
        axes, _ = leading_axes(model, place, separate_layers=separate)
        wanted[checkpoint.layer_key(place.key, place.layer)] = (*axes, *place.shape)
    found = {}
    for key, tensor in checkpoint.parameters.items():
        shape = tensor.shape
        if key in (EMBEDDING, OUTPUT):  # without padding
            shape = (min(shape[0], model.vocab_size), *shape[1:])
        found[key] = shape, tensor.dtype
    fix = "export another checkpoint or correct --vocab-size"
    return check_tensors(model, checkpoint.folder, wanted, found, fix)


def _tensors(
    checkpoint: StoredCheckpoint, model: HuggingFaceModel, progress: ByteProgress
) -> Iterator[torch.Tensor]:
    """Hugging Face's tensors in the order of `tensor_rows`, each of Megatron's read once."""
    import torch

    for place, rows in by_place(model):
        piece = checkpoint.read(place.key, place.layer, place.expert)
        for row in rows:
            progress.advance(math.prod(row.shape) * piece.itemsize)
            if len(row.runs) == 1:
                first, end = row.runs[0]
                yield piece[first:end]
            else:
                yield torch.cat([piece[first:end] for first, end in row.runs])
        del piece  # before the next one is read
