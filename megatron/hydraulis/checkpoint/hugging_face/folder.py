"""A Hugging Face folder: safetensors, their companions, and that it is complete or not there.

The safetensors library writes only what is in memory as a whole. The format is a length of 8 bytes,
a header in JSON and the tensors one after another, so they can be written as they are made:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron.hydraulis.checkpoint.hugging_face.config import CONFIG_NAME, TOKEN_IDS
from megatron.hydraulis.checkpoint.hugging_face.families import ExpertNames
from megatron.hydraulis.checkpoint.hugging_face.model import HuggingFaceModel
from megatron.hydraulis.errors import CheckpointError, ConfigurationError
from megatron.hydraulis.json_object import JsonObject, read_json
from megatron.hydraulis.terminal import size_text

MODEL_STEM = "model"
"""Beginning of the names of files with a model's tensors."""
_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.bin")
_ALIGNMENT_BYTES = 8
_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
_VOCABULARIES = ("tokenizer.json", "*vocab*", "tekken.json", "*.model", "*.tiktoken")
_COMPANIONS = (
    *(*_VOCABULARIES, "*token*", "merges.txt"),
    *("chat_template.*", "generation_config.json", "*processor_config.json"),
)
"""Patterns of the names that transformers and mistral-common give to what lies next to weights:
tokenizers, chat templates, settings of generation and of processors."""
_COMPANION_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")
_GENERATION_CONFIG = "generation_config.json"
_OF_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class _Source:
    """Place of a tensor."""

    file: str
    name: str
    """Its name in the file."""
    expert: int | None = None
    """Its number, if the tensor in the file has an axis for experts."""
    rows: slice = slice(None)
    """Rows of the expert that it has."""
    is_transposed: bool = False
    """Whether the rows are along the last axis in the file."""


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, read one by one.

    Args:
        folder: has ``model.safetensors``, or several files and their index.
        stem: of the file's name.

    Raises CheckpointError for a folder that lacks a file, or whose files lack a tensor.
    """

    def __init__(self, folder: Path, stem: str = MODEL_STEM) -> None:
        self._folder = folder
        self._single_file = f"{stem}{_SUFFIX}"
        self._files: dict[str, Any] = {}
        self._sources = {name: _Source(file, name) for name, file in self._find().items()}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._sources)

    def leave_out(self, names: Iterable[str]) -> None:
        """Go without these tensors."""
        for name in names:
            del self._sources[name]

    def split_experts(self, names: ExpertNames) -> None:
        """Name the experts' tensors as most published folders do, which have three for each expert;
        transformers (5.24) can write two for all experts of a layer."""
        if names.is_stacked:
            self._split_stacked(names)
            return
        gate, up, down = names.projections
        for fused in [name for name in self._sources if ".mlp." in name]:
            layer, _, kind = fused.rpartition(".mlp.")
            prefix = f"{layer}.{names.module}."
            if kind == "gate.weight":
                self._sources[prefix + kind] = self._sources.pop(fused)
            elif kind in ("experts.gate_up_proj", "experts.down_proj"):
                num_experts, num_rows, _ = self.shape(fused)
                parts = {down: slice(num_rows)}
                if kind == "experts.gate_up_proj":
                    parts = {gate: slice(num_rows // 2), up: slice(num_rows // 2, num_rows)}
                file = self._sources.pop(fused).file
                for expert in range(num_experts):
                    for part, rows in parts.items():
                        name = f"{prefix}experts.{expert}.{part}.weight"
                        self._sources[name] = _Source(file, fused, expert, rows)

    def _split_stacked(self, names: ExpertNames) -> None:
        gate, up, down = names.projections
        parts = {down: slice(None)}, {gate: slice(0, None, 2), up: slice(1, None, 2)}
        for stacked in list(self._sources):
            experts, found, kind = stacked.partition(f".{names.module}.experts.")
            projection, _, bias = kind.partition("_proj")
            if not found or projection not in ("gate_up", "down") or bias not in ("", "_bias"):
                continue
            num_experts = self.shape(stacked)[0]
            file = self._sources.pop(stacked).file
            for expert in range(num_experts):
                for part, rows in parts[projection == "gate_up"].items():
                    name = f"{experts}{found}{expert}.{part}.{bias[1:] or 'weight'}"
                    self._sources[name] = _Source(file, stacked, expert, rows, True)

    def shape(self, name: str) -> tuple[int, ...]:
        shape = tuple(self._slice(name).get_shape())
        source = self._sources[name]
        if source.expert is None:
            return shape
        own = shape[:0:-1] if source.is_transposed else shape[1:]
        return (len(range(*source.rows.indices(own[0]))), *own[1:])

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor. Raises CheckpointError for a quantized one."""
        dtype = str(self._slice(name).get_dtype())
        if dtype not in _DTYPES:
            raise CheckpointError(
                f"{self._folder}: tensor {name} must be of {', '.join(_DTYPES)} but is of {dtype}; "
                "save the model without quantization"
            )
        return _DTYPES[dtype]

    def read(self, name: str) -> torch.Tensor:
        """A copy of a tensor."""
        source = self._sources[name]
        try:
            stored = self._slice(name)
            tensor: torch.Tensor
            if source.expert is None:
                tensor = stored[:]
            elif source.is_transposed:
                tensor = stored[source.expert].movedim(0, -1)[source.rows]
            else:
                tensor = stored[source.expert, source.rows]
        except (SafetensorError, OSError) as error:
            raise self._damaged(source.file, error) from error
        return tensor

    def _find(self) -> dict[str, str]:
        single = self._single_file
        index = self._folder / f"{single}{_INDEX_SUFFIX}"
        if index.is_file():
            file_of = self._read_index(index)
        elif (self._folder / single).is_file():
            file_of = dict.fromkeys(self._open(single).keys(), single)
        else:
            found = [name for name in _PICKLES if (self._folder / name).exists()]
            raise CheckpointError(
                f"{self._folder}: there must be {single} or {index.name} but there is "
                f"{found[0] if found else 'neither'}; save the model as safetensors, since pickled "
                "files can run code and are not read"
            )
        for name in sorted(set(file_of.values())):
            there = set(self._open(name).keys())
            missing = sorted(t for t, file in file_of.items() if file == name and t not in there)
            if missing:
                raise CheckpointError(
                    f"{self._folder / name}: {len(missing)} tensors that the index places there "
                    f"are missing, {missing[0]} first; get the folder again"
                )
        return file_of

    def _read_index(self, path: Path) -> dict[str, str]:
        content = JsonObject(
            read_json(path, "index", CheckpointError), f"index {path}", CheckpointError
        )
        places = content.nested(content.value("weight_map"), f"index {path}, weight_map")
        file_of = {name: places.text(name) for name in places.keys}
        for file in set(file_of.values()):
            if Path(file).name != file:
                raise CheckpointError(
                    f"index {path}: files lie in the folder itself but {file!r} does not; get the "
                    "folder again"
                )
        return file_of

    def _open(self, name: str) -> Any:
        if name not in self._files:
            path = self._folder / name
            if not path.is_file():
                raise CheckpointError(
                    f"{self._folder}: the index names {name} but there is no such file; get the "
                    "folder again"
                )
            try:
                self._files[name] = safe_open(path, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise self._damaged(name, error) from error
        return self._files[name]

    def _slice(self, name: str) -> Any:
        source = self._sources[name]
        return self._files[source.file].get_slice(source.name)

    def _damaged(self, name: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self._folder / name}: must be a safetensors file but: "
            f"{' '.join(str(error).split())}; get the folder again"
        )


def write_safetensors(
    folder: Path,
    forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    tensors: Iterable[torch.Tensor],
    *,
    max_file_bytes: int,
    stem: str = MODEL_STEM,
) -> None:
    """Write tensors, one at a time, into as few files as the limit allows.

    Args:
        forms: shape and dtype of every tensor by name, in the order in which they are written.
        tensors: in the same order; may be made when they are asked for.
        max_file_bytes: limit for the tensors in a file; a larger tensor has its own file.
        stem: beginning of the names of files.

    Raises OSError.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in forms.items()}
    files: list[list[str]] = []
    num_bytes = 0
    for name, size in sizes.items():
        if not files or num_bytes + size > max_file_bytes:
            files.append([])
            num_bytes = 0
        files[-1].append(name)
        num_bytes += size
    file_names = [f"{stem}{_SUFFIX}"]
    if len(files) > 1:
        count = f"of-{len(files):05d}"
        file_names = [f"{stem}-{i:05d}-{count}{_SUFFIX}" for i in range(1, len(files) + 1)]
    stream = iter(tensors)
    for file_name, names in zip(file_names, files, strict=True):
        with (folder / file_name).open("wb") as file:
            file.write(_header({name: forms[name] for name in names}))
            for name in names:
                tensor = next(stream)
                assert (tuple(tensor.shape), tensor.dtype) == forms[name], name
                file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
                del tensor  # before the next one is made
            file.flush()
            os.fsync(file.fileno())
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {
                name: file_name
                for file_name, names in zip(file_names, files, strict=True)
                for name in names
            },
        }
        (folder / f"{stem}{_SUFFIX}{_INDEX_SUFFIX}").write_text(json.dumps(index, indent=2) + "\n")


def stack_experts(
    model: HuggingFaceModel, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors by the names of the family, which may have some of all experts of a layer.

    Those of a layer are filled side by side; see `ExpertNames.is_stacked`.
    """
    experts, names = model.experts, model.of_family.experts
    if experts is None or names is None or not names.is_stacked:
        yield from tensors
        return
    stacks: dict[str, torch.Tensor] = {}
    missing: dict[str, int] = {}
    for name, tensor in tensors:
        found = _OF_EXPERT.fullmatch(name)
        if found is None:
            yield name, tensor
            continue
        module, number, projection, kind = found.groups()
        parts = ("down_proj",) if projection == "down_proj" else ("gate_proj", "up_proj")
        joined = f"{module}.{'down' if len(parts) == 1 else 'gate_up'}_proj"
        joined += "_bias" if kind == "bias" else ""
        if joined not in stacks:
            size = (*tensor.shape[1:], len(parts) * len(tensor))
            stacks[joined] = tensor.new_empty(experts.num_experts, *size)
            missing[joined] = experts.num_experts * len(parts)
        own = stacks[joined][int(number)]
        own[..., parts.index(projection) :: len(parts)] = tensor.movedim(0, -1)
        missing[joined] -= 1
        if not missing[joined]:
            yield joined, stacks.pop(joined)


def _header(forms: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> bytes:
    names = {dtype: name for name, dtype in _DTYPES.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in forms.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": names[dtype],
            "shape": list(shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def companions_of(folder: Path, vocab_size: int) -> tuple[list[Path], dict[str, Any]]:
    """Files of a Hugging Face folder that go with any weights, and ids of special tokens for
    ``config.json``.

    Raises:
        CheckpointError: the folder has no configuration that can be read.
        ConfigurationError: a special token is beyond the vocabulary.
    """
    files = _companions(folder, _COMPANIONS)
    token_ids = _token_ids(folder / CONFIG_NAME, vocab_size)
    if (generation := folder / _GENERATION_CONFIG) in files:
        _token_ids(generation, vocab_size)
    return files, token_ids


def has_tokenizer(folder: Path) -> bool:
    """True if a folder has a file with the tokens of a tokenizer."""
    return bool(_companions(folder, _VOCABULARIES))


def _companions(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return [
        path
        for path in sorted(folder.iterdir() if folder.is_dir() else ())
        if path.is_file()
        and path.name.endswith(_COMPANION_SUFFIXES)
        and not path.name.endswith(_INDEX_SUFFIX)
        and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns)
    ]


def _token_ids(path: Path, vocab_size: int) -> dict[str, Any]:
    """The ids of special tokens that a configuration has, which must be below the vocabulary."""
    config = JsonObject(read_json(path, "config", CheckpointError), str(path), CheckpointError)
    token_ids = {key: config.value(key) for key in TOKEN_IDS if config.has(key)}
    for key, value in token_ids.items():
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not (type(token) is int and 0 <= token < vocab_size):
                raise ConfigurationError(
                    f"{path}: {key} must be a token below the vocabulary's {vocab_size} but is "
                    f"{token!r}; name the folder whose tokenizer the model was trained with"
                )
    return token_ids


@contextmanager
def new_folder(path: Path, while_writing: Path, num_bytes: int) -> Iterator[Path]:
    """An empty folder to write into, which gets its name when the block ends without an error.

    Args:
        path: does not exist yet, or is empty.
        while_writing: its name until then, on the same disk; replaces what an earlier attempt left.
        num_bytes: required disk space.

    Raises CheckpointError, also for an OSError inside the block.
    """
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(
                f"{path}: is written as a new folder but there is something; name another folder, "
                "or delete it first"
            )
        if while_writing.exists():
            shutil.rmtree(while_writing)
        while_writing.mkdir(parents=True)
        try:
            num_free = shutil.disk_usage(while_writing).free
            if num_free < num_bytes:
                raise CheckpointError(
                    f"{path.parent}: {size_text(num_bytes)} are to be written but "
                    f"{size_text(num_free)} are free; make room or name a folder on another disk"
                )
            yield while_writing
            if path.exists():
                path.rmdir()
            while_writing.rename(path)
        except BaseException:
            shutil.rmtree(while_writing, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror or error}; nothing was left there: make "
            f"room for {size_text(num_bytes)} or name a folder on another disk"
        ) from error
