"""Safetensors: reading a folder of them with the library, writing one tensor by tensor.

The library writes only what lies in memory as a whole. The format is a length of 8 bytes, a header
in JSON and the tensors one after another, so that it can be written as tensors come:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron.hydraulis.errors import CheckpointError
from megatron.hydraulis.json_object import JsonObject, read_json

__all__ = ["SafetensorsFolder", "TensorToWrite", "write_safetensors"]

_SINGLE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_ALIGNMENT_BYTES = 8
_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
_DTYPES_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """A tensor that will be asked for when its turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int


def write_safetensors(
    folder: Path,
    tensors: Sequence[TensorToWrite],
    produce: Callable[[int], torch.Tensor],
    *,
    max_file_bytes: int,
) -> None:
    """Write tensors into as few files as the limit allows, holding one at a time.

    Args:
        folder: that exists.
        tensors: all of them, in the order in which they are written.
        produce: the tensor of an index.
        max_file_bytes: of tensors in a file; a larger tensor has a file of its own.

    Raises OSError.
    """
    files = _files(tensors, max_file_bytes)
    names = [
        _SINGLE_FILE if len(files) == 1 else f"model-{i:05d}-of-{len(files):05d}.safetensors"
        for i in range(1, len(files) + 1)
    ]
    for name, indices in zip(names, files, strict=True):
        with (folder / name).open("wb") as file:
            file.write(_header([tensors[i] for i in indices]))
            for i in indices:
                file.write(_bytes_of(produce(i), tensors[i]))
            file.flush()
            os.fsync(file.fileno())
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
            "weight_map": {
                tensors[i].name: name
                for name, indices in zip(names, files, strict=True)
                for i in indices
            },
        }
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


class SafetensorsFolder:
    """The tensors of a Hugging Face folder, read one by one.

    Args:
        folder: with ``model.safetensors``, or several files and their index.

    Raises CheckpointError for a folder that lacks a file, or whose files lack a tensor.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._file_of = self._find()

    @property
    def names(self) -> frozenset[str]:
        """Of all tensors."""
        return frozenset(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Of a tensor. Raises CheckpointError for one that is no plain floating-point number."""
        dtype = str(self._slice(name).get_dtype())
        if dtype not in _DTYPES_BY_NAME:
            raise CheckpointError(
                f"{self._folder}: tensor {name} must be of {', '.join(_DTYPES_BY_NAME)} but is of "
                f"{dtype}; save the model without quantization"
            )
        return _DTYPES_BY_NAME[dtype]

    def read(self, name: str) -> torch.Tensor:
        """A tensor, in memory of its own."""
        file = self._files[self._file_of[name]]
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise self._damaged(self._file_of[name], error) from error
        return tensor

    def _find(self) -> dict[str, str]:
        index = self._folder / _INDEX
        if index.is_file():
            file_of = self._read_index(index)
        elif (self._folder / _SINGLE_FILE).is_file():
            file_of = dict.fromkeys(self._open(_SINGLE_FILE).keys(), _SINGLE_FILE)
        else:
            found = [name for name in _PICKLES if (self._folder / name).exists()]
            raise CheckpointError(
                f"{self._folder}: there must be {_SINGLE_FILE} or {_INDEX} but there is "
                f"{found[0] if found else 'neither'}; save the model as safetensors, since pickled "
                "files can run code and are not read"
            )
        for name in sorted(set(file_of.values())):
            there = set(self._open(name).keys())
            missing = sorted(t for t, file in file_of.items() if file == name and t not in there)
            if missing:
                raise CheckpointError(
                    f"{self._folder / name}: {len(missing)} tensors that the index places there "
                    f"are missing, {missing[0]} first; get the folder anew"
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
                    f"index {path}: files lie in the folder itself but {file!r} does not; "
                    "get the folder anew"
                )
        return file_of

    def _open(self, name: str) -> Any:
        if name not in self._files:
            path = self._folder / name
            if not path.is_file():
                raise CheckpointError(
                    f"{self._folder}: the index names {name} but there is no such file; get the "
                    "folder anew"
                )
            try:
                self._files[name] = safe_open(path, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise self._damaged(name, error) from error
        return self._files[name]

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)

    def _damaged(self, name: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self._folder / name}: must be a safetensors file but: "
            f"{' '.join(str(error).split())}; get the folder anew"
        )


def _files(tensors: Sequence[TensorToWrite], max_file_bytes: int) -> list[list[int]]:
    """Indices of each file's tensors."""
    files: list[list[int]] = []
    size = 0
    for i, tensor in enumerate(tensors):
        if not files or size + tensor.num_bytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(i)
        size += tensor.num_bytes
    return files


def _header(tensors: Sequence[TensorToWrite]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor, (start, end) in zip(tensors, _spans(tensors), strict=True):
        entries[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _spans(tensors: Sequence[TensorToWrite]) -> Iterator[tuple[int, int]]:
    at = 0
    for tensor in tensors:
        yield at, at + tensor.num_bytes
        at += tensor.num_bytes


def _bytes_of(tensor: torch.Tensor, expected: TensorToWrite) -> memoryview:
    assert tuple(tensor.shape) == expected.shape, expected.name
    assert tensor.dtype == expected.dtype, expected.name
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
