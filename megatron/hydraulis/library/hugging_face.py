"""An engine for the model of a Hugging Face folder, and its tensors in Hugging Face's form."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hydraulis_patches.cpu_backend import apply_cpu_backend
from megatron.hydraulis.checkpoint.hugging_face.folder import stack_experts
from megatron.hydraulis.checkpoint.hugging_face.import_hf import assembled, open_folder
from megatron.hydraulis.checkpoint.hugging_face.model import HuggingFaceModel, model_flags
from megatron.hydraulis.checkpoint.hugging_face.tensors import (
    ROUTER_BIAS,
    TensorRows,
    adapter_rows,
    by_place,
)
from megatron.hydraulis.checkpoint.names import StoredModel, StoredParameter
from megatron.hydraulis.checkpoint.torch_dist import layer_key
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError, Problems
from megatron.hydraulis.flags.arguments import Resolved, parse_arguments
from megatron.hydraulis.flags.honoured import HONOURED_BY_TOPIC
from megatron.hydraulis.flags.parser import FlagParser
from megatron.hydraulis.library.batches import check_same
from megatron.hydraulis.library.building import build_engine, choose_core_attention, definition_of
from megatron.hydraulis.library.devices import common_constants, constants_of_this_rank
from megatron.hydraulis.library.planning import Planning, read_cost_profile
from megatron.hydraulis.library.plans import PoolLike, ProfileLike, as_pool
from megatron.hydraulis.lora import Lora, is_of_adapter
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.optimizer.shards import CanonicalShards, OwnedRectangle
from megatron.hydraulis.quiet_imports import silence_upstream
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import widened
from megatron.hydraulis.runtime.process_groups import of_all_ranks, on_all_ranks
from megatron.hydraulis.transfer.canonical import Bucket, ParameterSpec, Piece

HfContent = Literal["merged", "base", "adapters"]

_FLAG_OF_DTYPE = {torch.bfloat16: ("--bf16",), torch.float32: ()}
_OF_PYTHON = {
    *HONOURED_BY_TOPIC["Optimizer"],
    *HONOURED_BY_TOPIC["Checkpoints"],
    *HONOURED_BY_TOPIC["Data and tokenizer"],
    *("--loss-normalization", "--long-sequences"),
} - {
    *("--apply-wd-to-qk-layernorm", "--no-weight-decay-cond-type", "--grad-reduce-in-bf16"),
    *("--use-distributed-optimizer", "--accumulate-allreduce-grads-in-fp32"),
    *("--dist-ckpt-optim-fully-reshardable", "--vocab-size", "--padded-vocab-size"),
}
"""Options in whose place the engine has arguments and methods."""


@dataclass(frozen=True)
class BuiltEngine:
    """An engine and what it was built from."""

    engine: RuntimeEngine
    planning: Planning
    resolved: Resolved
    model: HuggingFaceModel
    places: Mapping[str, StoredParameter]
    """Parameters in a checkpoint with a tensor for every layer."""


@dataclass(frozen=True, eq=False)
class HfShard:
    """What one rank owns of a tensor in Hugging Face's form, possibly nothing."""

    name: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    values: Tensor
    """(n,), on the job's device."""
    blocks: Tensor
    """(blocks, 4): of each run of values, which is a rectangle of the tensor as a matrix, the first
    value, row and column, and the number of columns."""

    def places(self, indices: Tensor) -> Tensor:
        """Places in the flattened tensor of the values at (m,) indices."""
        blocks = self.blocks.to(indices.device)
        starts = blocks[:, 0].contiguous()
        numbers = torch.searchsorted(starts, indices, right=True) - 1
        start, row, column, num_columns = blocks[numbers].unbind(dim=1)
        rows = row + (indices - start) // num_columns
        columns = column + (indices - start) % num_columns
        return rows * math.prod(self.shape[1:]) + columns


def build_from_folder(
    folder: str | Path,
    *,
    pool: PoolLike,
    cost_profile: ProfileLike | None,
    optimizer: AdamWSettings | None,
    dtype: torch.dtype | None,
    max_tokens_per_micro_batch: int | None,
    lora: Lora | None,
    value_head: bool,
    options: Sequence[str],
) -> BuiltEngine:
    """Builds an engine as the training program would; see `library.engine.Engine.from_hf`."""
    has_cuda = torch.cuda.is_available()
    if not has_cuda:
        apply_cpu_backend()
    if not dist.is_initialized():
        if has_cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if has_cuda else "gloo")

    silence_upstream(dist.get_rank())

    def resolve() -> tuple[Path, HuggingFaceModel, Resolved]:
        if not isinstance(optimizer, AdamWSettings | None):
            raise ConfigurationError(
                f"optimizer holds AdamWSettings, or None for an engine that does not train, but is "
                f"{optimizer!r}; give AdamWSettings(lr=…)"
            )
        if not isinstance(cost_profile, ProfileCostModel | str | os.PathLike | None):
            raise ConfigurationError(
                f"cost_profile is a ProfileCostModel or its path but this is {cost_profile!r:.60}; "
                "correct it, or leave it out"
            )
        if not isinstance(lora, Lora | None):
            raise ConfigurationError(
                f"lora is a Lora, or None to train the model, but is {lora!r:.60}; give "
                "Lora(rank=16)"
            )
        path = checked_path(folder)
        model, _, stored_dtype = open_folder(path, value_head=value_head)
        flag_parser = FlagParser()
        _check_options(flag_parser, options)
        parameter_dtype = dtype or stored_dtype
        if parameter_dtype not in _FLAG_OF_DTYPE:
            raise ConfigurationError(
                f"parameters are bf16 or fp32 but {'dtype' if dtype else 'that of the folder'} is "
                f"{parameter_dtype}; give dtype=torch.bfloat16 or dtype=torch.float32"
            )
        longest = min(model.max_position_embeddings, max_tokens_per_micro_batch or sys.maxsize)
        given, name, value = None, "--strategy", pool
        if not isinstance(pool, str | os.PathLike):
            ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None
            given, name, value = as_pool(pool, ranks_per_node), "--strategy-pool", "auto"
        elif Path(pool).is_file():
            name = "--strategy-pool"
        words = [
            *shlex.split(" ".join(model_flags(model))),
            *_FLAG_OF_DTYPE[parameter_dtype],
            *("--tokenizer-type", "NullTokenizer"),
            *("--lr", str(0.0 if optimizer is None else optimizer.lr)),
            *("--seq-length", str(longest)),
            *("--global-batch-size", "1", "--train-iters", "1", name, str(value)),
        ]
        if isinstance(cost_profile, str | os.PathLike):
            words += ["--cost-profile", str(cost_profile)]
        if max_tokens_per_micro_batch is not None:
            words += ["--max-tokens-per-micro-batch", str(max_tokens_per_micro_batch)]
        if lora is not None:
            words += ["--lora-rank", str(lora.rank), "--lora-alpha", repr(lora.alpha)]
            words += ["--lora-targets", *lora.targets]
        resolved = parse_arguments(
            [*words, *options],
            num_ranks=dist.get_world_size(),
            rank=dist.get_rank(),
            flag_parser=flag_parser,
            needs_data=False,
            proposed_pool=given,
        )
        return path, model, resolved

    what = f"{folder} cannot be read"
    path, model, resolved = on_all_ranks(resolve, what)
    check_same(
        of_all_ranks((resolved.given, resolved.pool, optimizer)), "arguments", "correct them"
    )
    device = constants_of_this_rank(has_cuda=has_cuda, speaks=False)
    device = common_constants(of_all_ranks(device))
    attention = choose_core_attention(resolved, resolved.pool).name
    profile = cost_profile if isinstance(cost_profile, ProfileCostModel) else None
    profile = read_cost_profile(resolved, profile, attention)
    planning = Planning.of(
        resolved,
        device,
        profile,
        attention,
        has_optimizer=optimizer is not None,
        accumulates=True,
    )
    definition = replace(definition_of(resolved, attention), has_value_head=value_head)
    engine = build_engine(resolved, planning.pool, definition, optimizer, accumulates=True)
    places = fill_from_folder(engine, path)
    return BuiltEngine(engine, planning, resolved, model, places)


def fill_from_folder(engine: RuntimeEngine, folder: Path) -> Mapping[str, StoredParameter]:
    """Sets the engine's parameters to those of the folder; returns `BuiltEngine.places`.

    Collective. Every rank reads the folder, one tensor at a time.

    Raises CheckpointError, ConfigurationError as `open_folder`.
    """
    places = StoredModel.of(engine.definition, separate_layers=True).parameters
    on_all_ranks(lambda: _fill(engine, folder, places), f"{folder} cannot be read")
    engine.parameters_changed()
    return places


def checked_path(path: str | Path) -> Path:
    """Raises ConfigurationError for what is no path."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigurationError(f"a folder is named by its path but this is {path!r:.60}; name it")
    return Path(path)


def _check_options(flag_parser: FlagParser, options: Sequence[str]) -> None:
    """Refuse options that would have no effect; `parse_arguments` refuses those that are wrong."""
    is_list = isinstance(options, Sequence) and not isinstance(options, str)
    if not is_list or not all(isinstance(each, str) for each in options):
        raise ConfigurationError(
            f"options is a list of words but this is {options!r:.60}; write it as "
            '["--name", "value"]'
        )
    without_effect = sorted(flag_parser.parse(options, Problems()).explicit & _OF_PYTHON)
    if without_effect:
        raise ConfigurationError(
            "from_hf has its optimizer, dtype and sequences from Python but options has "
            f"{', '.join(without_effect)}; leave them out: AdamWSettings and optim_step(lr=…) set "
            "the optimizer, dtype= the dtype, TokenSequence(tokens, weights) the data, load and "
            "save the checkpoint"
        )


def hf_tensors(
    engine: RuntimeEngine,
    model: HuggingFaceModel,
    stored: Mapping[str, StoredParameter],
    content: HfContent = "merged",
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by Hugging Face's name, or adapters' by peft's, on every rank, on the job's
    device.

    Args:
        stored: see `BuiltEngine.places`.
        content: see `Engine.hf_tensors`.

    Collective: every rank exhausts the iterator. A rank never holds the model: besides the shards
    there are one bucket of parameters (while it is gathered, this rank's share of it, too), one of
    Megatron's tensors and one of Hugging Face's at a time, or those of a layer's experts; and all
    adapters where they are merged.
    """
    engine.require_onloaded()
    engine.finish_regrouping()
    layout = engine.layout
    places: list[list[tuple[Bucket, Piece, int]]] = [[] for _ in layout.parameters]
    for bucket in layout.buckets:
        for piece, offset in zip(bucket.pieces, bucket.piece_offsets, strict=False):
            places[piece.parameter].append((bucket, piece, offset))

    def of(spec: ParameterSpec) -> list[tuple[Bucket, Piece, int]]:
        return places[layout.index_of[spec.name]]

    def tensors(*, of_adapters: bool) -> Iterator[tuple[str, Tensor]]:
        gathered: int | None = None
        shares: list[tuple[int, Tensor]] = []
        found = [
            (spec, parts)
            for spec, parts in _parameters(engine, model, stored)
            if is_of_adapter(spec.name) == of_adapters
        ]
        # By buckets, so that each is gathered once.
        for spec, parts in sorted(found, key=lambda each: of(each[0])[0][0].index):
            whole = torch.empty(spec.shape, dtype=engine.dtype, device=engine.device)
            matrix = whole.view(spec.shape[0], -1)
            for bucket, piece, offset in of(spec):
                if bucket.index != gathered:
                    shares.clear()  # or there would be two buckets while the next is gathered
                    shares += _gathered(engine, bucket)
                    gathered = bucket.index
                row, column = layout.global_rectangle(piece)
                rows = slice(row, row + piece.num_elements // piece.row_length)
                _copy(shares, offset, matrix[rows, column : column + piece.row_length])
            for part in parts:
                yield part.name, torch.cat([whole[first:end] for first, end in part.runs])
            del whole, matrix  # or there would be two of them

    if content == "adapters":
        yield from tensors(of_adapters=True)
        return
    lora = engine.definition.lora if content == "merged" else None
    added = {} if lora is None else dict(tensors(of_adapters=True))
    pairs = {} if lora is None else adapter_rows(model, lora)
    for name, tensor in stack_experts(model, tensors(of_adapters=False)):
        if lora is not None and name in pairs:
            a, b = (widened(added.pop(each.name)) for each in pairs[name])
            tensor = (widened(tensor) + lora.scale * (b @ a)).to(tensor.dtype)
        yield name, tensor
    for bias, (part,) in _router_biases(engine, model):
        yield part.name, bias.clone()


def hf_shards(
    engine: RuntimeEngine, model: HuggingFaceModel, stored: Mapping[str, StoredParameter]
) -> Iterator[HfShard]:
    """This rank's part of every tensor of a model without adapters, without communication; see
    `hf_tensors`.

    Raises ConfigurationError for a family that has tensors of all experts of a layer.
    """
    names = model.of_family.experts
    if names is not None and names.is_stacked:
        raise ConfigurationError(
            f"a shard is a part of one parameter but {model.of_family.name} has tensors of all "
            "experts of a layer; use hf_tensors"
        )
    engine.require_onloaded()
    owned = _owned(engine.shards)
    for spec, parts in _parameters(engine, model, stored):
        flat = engine.shards.frozen if spec.is_frozen else engine.shards.parameters
        for part in parts:
            yield _shard_of(part, owned.get(spec.name, []), flat, engine.dtype)
    for bias, (part,) in _router_biases(engine, model):
        own = bias.clone() if engine.rank == 0 else bias[:0]  # every rank has all of them
        yield HfShard(part.name, part.shape, own, torch.tensor([[0, 0, 0, 1]]))


def _shard_of(
    part: TensorRows, owned: Sequence[OwnedRectangle], flat: Tensor, dtype: torch.dtype
) -> HfShard:
    """What is owned of a tensor, by the rows of a parameter that it is.

    flat: the shards that have the parameter.
    """
    values, blocks = [flat[:0]], []
    num_values = num_rows = 0
    for first, end in part.runs:
        for each in owned:
            start, stop = max(first, each.first_row), min(end, each.first_row + each.num_rows)
            if start >= stop:
                continue
            blocks.append(
                (num_values, num_rows + start - first, each.first_column, each.num_columns)
            )
            num_owned = (stop - start) * each.num_columns
            at = each.shard_offset + (start - each.first_row) * each.num_columns
            values.append(flat[at : at + num_owned])
            num_values += num_owned
        num_rows += end - first
    found = torch.tensor(blocks, dtype=torch.int64).view(-1, 4)
    return HfShard(part.name, part.shape, torch.cat(values).to(dtype), found)


def _owned(shards: CanonicalShards) -> dict[str, list[OwnedRectangle]]:
    """By parameter what this rank owns of it."""
    owned: dict[str, list[OwnedRectangle]] = {}
    for is_frozen in (False, True):
        for part in shards.rectangles(frozen=is_frozen):
            owned.setdefault(shards.layout.parameters[part.parameter].name, []).append(part)
    return owned


def _gathered(engine: RuntimeEngine, bucket: Bucket) -> list[tuple[int, Tensor]]:
    """Collective: all shares of a bucket's parameters in order, with the first element of each."""
    ranges = [bucket.shard_range(rank) for rank in range(engine.layout.num_ranks)]
    most = max(stop - start for start, stop in ranges)  # a collective takes equal shares
    own = engine.shards.bucket_parameters(bucket)
    share = own.new_zeros(most, dtype=engine.dtype)
    share[: len(own)] = own
    shares = share.new_empty(len(ranges) * most)
    dist.all_gather_into_tensor(shares, share)
    parts = zip(ranges, shares.split(most), strict=True)
    found = [(start, part[: stop - start]) for (start, stop), part in parts if start < stop]
    return sorted(found, key=lambda each: each[0])


def _copy(shares: Sequence[tuple[int, Tensor]], first: int, out: Tensor) -> None:
    """Set ``out`` to the elements of a bucket from ``first`` on."""
    end = first + out.numel()
    found = [
        share[max(0, first - start) : end - start]
        for start, share in shares
        if start < end and first < start + len(share)
    ]
    out.copy_(torch.cat(found).view(out.shape))


def _fill(engine: RuntimeEngine, folder: Path, stored: Mapping[str, StoredParameter]) -> None:
    """Set this rank's shards from the folder."""
    model, files, dtype = open_folder(folder, value_head=engine.definition.has_value_head)
    shards = engine.shards
    there = files.names
    owned = _owned(shards)
    for spec, parts in _parameters(engine, model, stored):
        if spec.name not in owned or not {part.name for part in parts} <= there:
            continue  # adapters, and a head that the folder lacks, stay as they were initialised
        matrix = assembled(spec.shape, dtype, parts, files).view(spec.shape[0], -1)
        flat = shards.frozen if spec.is_frozen else shards.parameters
        for part in owned[spec.name]:
            rows = slice(part.first_row, part.first_row + part.num_rows)
            columns = slice(part.first_column, part.first_column + part.num_columns)
            own = flat[part.shard_offset : part.shard_offset + part.num_elements]
            own.view(part.num_rows, part.num_columns).copy_(matrix[rows, columns])
    for bias, tensors in _router_biases(engine, model):
        bias.copy_(assembled(tuple(bias.shape), bias.dtype, tensors, files))


def _parameters(
    engine: RuntimeEngine, model: HuggingFaceModel, stored: Mapping[str, StoredParameter]
) -> Iterator[tuple[ParameterSpec, list[TensorRows]]]:
    """Every parameter, with what Hugging Face has of it."""
    name_of = {(at.key, at.prefix): name for name, at in stored.items()}
    layout = engine.layout
    for place, parts in by_place(model, engine.definition.lora):
        if place.key == ROUTER_BIAS:
            continue  # no parameter
        key = layer_key(place.key, place.layer, separate_layers=True)
        name = name_of[key, () if place.expert is None else (place.expert,)]
        yield layout.parameters[layout.index_of[name]], list(parts)


def _router_biases(
    engine: RuntimeEngine, model: HuggingFaceModel
) -> Iterator[tuple[Tensor, list[TensorRows]]]:
    """Every router's bias, which each rank has, with what Hugging Face has of it."""
    for place, parts in by_place(model):
        if place.key == ROUTER_BIAS:
            assert engine.routers is not None
            assert engine.routers.biases is not None
            assert place.layer is not None
            yield engine.routers.biases[place.layer], list(parts)
