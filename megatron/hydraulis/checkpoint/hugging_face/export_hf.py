"""``export-hf``: a checkpoint's parameters as a Hugging Face folder.

What needs torch is imported late, so that help is quick.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.hydraulis.checkpoint.folder import CheckpointFolder, is_unfinished
from megatron.hydraulis.checkpoint.hugging_face.config import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    config_of,
)
from megatron.hydraulis.checkpoint.hugging_face.families import DENSE_PROJECTIONS
from megatron.hydraulis.checkpoint.hugging_face.model import HuggingFaceModel, model_from_arguments
from megatron.hydraulis.checkpoint.hugging_face.tensors import (
    OUTPUT_BIAS,
    ROUTER_BIAS,
    ROWS_ARE_TOKENS,
    Converted,
    Place,
    TensorRows,
    adapter_rows,
    by_place,
    check_tensors,
    leading_axes,
    lora_from_arguments,
    tensor_rows,
)
from megatron.hydraulis.checkpoint.manifest import FORMAT_NAME, Manifest, is_checkpoint
from megatron.hydraulis.errors import CheckpointError, ConfigurationError, listed
from megatron.hydraulis.lora import Lora, is_of_adapter
from megatron.hydraulis.terminal import ByteProgress

if TYPE_CHECKING:
    import torch

    from megatron.hydraulis.checkpoint.torch_dist import StoredCheckpoint

_BYTES_PER_GB = 1e9


class Content(Enum):
    """What is written of a checkpoint."""

    MODEL = ""
    ADAPTER = "--adapter"
    MERGED = "--merge"


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
    of_adapters = parser.add_mutually_exclusive_group()
    of_adapters.add_argument(
        "--adapter",
        dest="content",
        action="store_const",
        const=Content.ADAPTER,
        default=Content.MODEL,
        help="write the adapters that were trained, for peft, without the model",
    )
    of_adapters.add_argument(
        "--merge",
        dest="content",
        action="store_const",
        const=Content.MERGED,
        help="write the model with its adapters added to its weights",
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
        "special tokens; with --adapter it is named as the base model (default: none, and as "
        "base model the folder that the run had as --hf)",
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
        content=namespace.content,
    )
    print(f"exported {done.checkpoint} to {namespace.output}: {done}")
    if namespace.like is None:
        print("copy the tokenizer's files into it: a checkpoint does not have them (--like)")
    of_mlp = set() if done.lora is None else set(done.lora.targets) & set(DENSE_PROJECTIONS)
    if done.model.experts is not None and of_mlp:
        print(
            f"warning: in models with experts peft (0.21) may ignore adapters of "
            f"{', '.join(sorted(of_mlp))}, which it takes for the experts'; --merge has them"
        )
    return 0


def export_checkpoint(
    source: Path,
    output: Path,
    *,
    vocab_size: int | None = None,
    max_file_bytes: int,
    checks_content: bool = True,
    like: Path | None = None,
    content: Content = Content.MODEL,
) -> Converted:
    """Write a checkpoint's parameters as a Hugging Face folder, or its adapters as one of peft.

    Args:
        source: folder of a checkpoint, or folder of checkpoints whose latest is meant.
        output: a new folder.
        vocab_size: number of tokens without padding; as the checkpoint says if None.
        max_file_bytes: limit for the tensors in one file.
        checks_content: compare the checkpoint's files with their checksums first.
        like: Hugging Face folder whose companions of weights are copied, and the ids of special
            tokens; an adapter names it as its base model.
        content: a model with adapters can only be written merged with them, or they alone.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete, or the folder cannot be written.
        ConfigurationError: the model has no counterpart, or its content is another.
    """
    from megatron.hydraulis.checkpoint.hugging_face.folder import (
        companions_of,
        new_folder,
        stack_experts,
        write_safetensors,
    )

    opened = _open(_checkpoint_path(source), vocab_size, checks_content=checks_content)
    model, lora = opened.model, opened.lora
    _check_content(opened, content)
    files, token_ids = ([], {}) if like is None else companions_of(like, model.vocab_size)
    made = _adapter(opened, like) if content is Content.ADAPTER else _model(opened, token_ids)
    forms = {
        name: (tuple(each.shape), each.dtype)
        for name, each in stack_experts(model, ((row.name, made.form(row)) for row in made.rows))
    }
    num_bytes = sum(math.prod(shape) * each.itemsize for shape, each in forms.values())
    while_writing = output.parent / f".{output.name}.exporting"
    with (
        ByteProgress("export-hf", num_bytes) as progress,
        new_folder(output, while_writing, num_bytes) as folder,
    ):
        merged = lora if content is Content.MERGED else None
        names = (row.name for row in made.rows)
        stored = zip(names, _tensors(opened, made.rows, merged, progress), strict=True)
        tensors = (tensor for _, tensor in stack_experts(model, stored))
        write_safetensors(folder, forms, tensors, max_file_bytes=max_file_bytes, stem=made.stem)
        for file in files:
            shutil.copyfile(file, folder / file.name)
        (folder / made.config_name).write_text(json.dumps(made.config, indent=2) + "\n")
    written = lora if content is Content.ADAPTER else None
    return Converted(opened.checkpoint.folder, model, _dtype_name(made.dtype), num_bytes, written)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint whose tensors are those of its model and its adapters."""

    checkpoint: StoredCheckpoint
    model: HuggingFaceModel
    dtype: torch.dtype
    base: str | None
    """Folder with whose weights the run began, if it says so."""
    lora: Lora | None
    dtype_of_adapters: torch.dtype | None


@dataclass(frozen=True, slots=True)
class _Folder:
    """What a folder gets."""

    config_name: str
    config: dict[str, Any]
    stem: str
    """Beginning of the names of files with tensors."""
    rows: list[TensorRows]
    dtype: torch.dtype

    def form(self, row: TensorRows) -> torch.Tensor:
        """A tensor without values."""
        import torch

        dtype = torch.float32 if row.place.key.endswith(ROUTER_BIAS) else self.dtype
        return torch.empty(row.shape, dtype=dtype, device="meta")


def _model(opened: _Opened, token_ids: dict[str, Any]) -> _Folder:
    from megatron.hydraulis.checkpoint.hugging_face.folder import MODEL_STEM

    config = config_of(opened.model, _dtype_name(opened.dtype)) | token_ids
    rows = list(tensor_rows(opened.model))
    return _Folder(CONFIG_NAME, config, MODEL_STEM, rows, opened.dtype)


def _adapter(opened: _Opened, like: Path | None) -> _Folder:
    from megatron.hydraulis.checkpoint.hugging_face.adapter_folder import (
        ADAPTER_STEM,
        adapter_config,
    )

    assert opened.lora is not None
    assert opened.dtype_of_adapters is not None
    config = adapter_config(opened.lora, opened.base if like is None else str(like.resolve()))
    rows = [row for pair in adapter_rows(opened.model, opened.lora).values() for row in pair]
    return _Folder(ADAPTER_CONFIG_NAME, config, ADAPTER_STEM, rows, opened.dtype_of_adapters)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _open(path: Path, vocab_size: int | None, *, checks_content: bool) -> _Opened:
    """Raises as `export_checkpoint`."""
    from megatron.hydraulis.checkpoint.torch_dist import StoredCheckpoint

    sizes, base = [vocab_size], None
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
        base = manifest.configuration.get("hydraulis", {}).get("hf")
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
    if OUTPUT_BIAS in checkpoint.parameters:
        model = replace(model, has_value_head=True)
    lora = lora_from_arguments(vars(arguments), model)
    dtype_of_adapters = None
    dtype = _dtype(checkpoint, model, lora)
    if lora is not None:
        dtype_of_adapters = _dtype(checkpoint, model, lora, of_adapters=True)
    return _Opened(checkpoint, model, dtype, base, lora, dtype_of_adapters)


def _check_content(opened: _Opened, content: Content) -> None:
    """Raise ConfigurationError if the checkpoint cannot be written that way."""
    path = opened.checkpoint.folder
    if content is Content.ADAPTER and opened.model.has_value_head:
        raise ConfigurationError(
            f"{path}: {content.value} writes adapters alone but a value head was trained with "
            f"them; give {Content.MERGED.value}"
        )
    if (opened.lora is None) == (content is Content.MODEL):
        return
    if opened.lora is None:
        raise ConfigurationError(
            f"{path}: {content.value} is for adapters but the run trained none; leave it out"
        )
    raise ConfigurationError(
        f"{path}: has adapters of {', '.join(opened.lora.targets)}, which a folder of "
        f"{opened.model.family} cannot hold; give --adapter for a folder of peft, or --merge to "
        "add them to the weights"
    )


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


def _dtype(
    checkpoint: StoredCheckpoint,
    model: HuggingFaceModel,
    lora: Lora | None,
    *,
    of_adapters: bool = False,
) -> torch.dtype:
    """The dtype of all tensors of the model, or of all that its adapters have.

    Raises as `check_tensors`.
    """
    separate = checkpoint.has_separate_layers
    wanted: dict[str, tuple[int, ...]] = {}
    for place, _ in by_place(model, lora):
        if is_of_adapter(place.key) == of_adapters:
            axes, _ = leading_axes(model, place, separate_layers=separate)
            wanted[checkpoint.layer_key(place.key, place.layer)] = (*axes, *place.shape)
    found = {}
    for key, tensor in checkpoint.parameters.items():
        shape = tensor.shape
        if key in ROWS_ARE_TOKENS:  # without padding
            shape = (min(shape[0], model.vocab_size), *shape[1:])
        if lora is None or is_of_adapter(key) == of_adapters:
            found[key] = shape, tensor.dtype
    what = str(model)
    if lora is not None and of_adapters:
        what = f"the adapters of {', '.join(lora.targets)} of {what}"
    fix = "export another checkpoint or correct --vocab-size"
    return check_tensors(what, checkpoint.folder, wanted, found, fix)


def _tensors(
    opened: _Opened, rows: Sequence[TensorRows], merged: Lora | None, progress: ByteProgress
) -> Iterator[torch.Tensor]:
    """Tensors in the order of the rows, each of Megatron's read once.

    merged: adapters that are added to weights, in fp32.
    """
    import torch

    def read(place: Place) -> torch.Tensor:
        return opened.checkpoint.read(place.key, place.layer, place.expert)

    added = {} if merged is None else adapter_rows(opened.model, merged)
    for place, parts in groupby(rows, key=lambda row: row.place):
        piece = read(place)
        for row in parts:
            progress.advance(math.prod(row.shape) * piece.itemsize)
            tensor = _taken(piece, row)
            if merged is not None and row.name in added:
                a, b = (_taken(read(each.place), each).float() for each in added[row.name])
                wide = torch.promote_types(tensor.dtype, torch.float32)
                tensor = (tensor.to(wide) + merged.scale * (b @ a)).to(tensor.dtype)
            yield tensor
        del piece  # before the next one is read


def _taken(piece: torch.Tensor, row: TensorRows) -> torch.Tensor:
    """The rows of one of Megatron's tensors."""
    import torch

    if len(row.runs) == 1:
        first, end = row.runs[0]
        return piece[first:end]
    return torch.cat([piece[first:end] for first, end in row.runs])
