"""Runs one process on the stand-in as one rank of a larger job.

It has no peers: NCCL calls are logged and return immediately, so that `order` can report a job
whose calls have no common order, which would hang with peers. It has no values: kernels compute
nothing, and what the host reads from the device is zero. Values on which the engine depends are
given. So a rank of a job of any size runs in a second or two, with all its allocations and calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron.hydraulis.runtime import engine
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.outcome import LossTotal, StepVote
from tests.cuda_stand_in.device import PlainDispatchMode, mark
from tests.cuda_stand_in.order import COMMUNICATOR_MARK

NUM_DEVICES = 8
"""Devices of a node: rank r runs on device r modulo this."""
_ID_BYTES = 128
"""Length of NCCL's id of a communicator; the stand-in logs the bytes before the first zero."""

SEED = 1
GIVEN_LOSS = LossTotal(loss_sum=10.0, weight_sum=1000.0, trained_tokens=1000)
GIVEN_NORM = 1.0


class StoreOfAll(dist.Store):
    """A store that behaves as if all ranks had joined.

    NCCL gets the id of a communicator from it. A rank that leads one creates an id, so ids differ
    between ranks; a mark in the log names the key under which each is stored.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._num_ranks = num_ranks
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value."""
        self._values[key] = value.encode() if isinstance(value, str) else value
        if len(self._values[key]) == _ID_BYTES:
            _name_communicator(self._values[key], key)

    def get(self, key: str) -> bytes:
        """A stored value, or a generated one of the length of an NCCL id."""
        if key not in self._values:
            text = hashlib.sha256(key.encode()).hexdigest()[:16]
            self.set(key, text.encode().ljust(_ID_BYTES, b"\0"))
        return self._values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """`get` for several keys."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        """`set` for several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        """The count after all ranks have added."""
        return self._num_ranks

    def check(self, keys: list[str]) -> bool:
        """True if this rank has set them: torch looks for reports of failed ranks."""
        return all(key in self._values for key in keys)

    def wait(self, *args: Any) -> None:
        """Return immediately."""

    def append(self, key: str, value: bytes) -> None:
        """Append to a stored value."""
        self.set(key, self._values.get(key, b"") + value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value: no other rank does."""
        self.set(key, desired)
        return self._values[key]

    def deleteKey(self, key: str) -> bool:  # as torch calls it
        """Returns whether the key was there."""
        return self._values.pop(key, None) is not None

    def getNumKeys(self) -> int:
        """Number of stored values."""
        return len(self._values)

    def has_extended_api(self) -> bool:
        """`multi_get` and `multi_set` are there."""
        return True

    def clone(self) -> StoreOfAll:
        """Another connection to the same store."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignored: nothing takes time."""


def _name_communicator(identity: bytes, key: str) -> None:
    text = identity.split(b"\0")[0].decode()
    mark(COMMUNICATOR_MARK.format(id=text, name=key.replace(" ", "_")))


class ZerosFromDevice(PlainDispatchMode):
    """Makes everything that the host reads from the device zero."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation; zero its result if it comes to the host."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default:
            return type(result)(0) if args[0].is_cuda else result
        if func in _COPIES and result.device.type == "cpu" and any(_is_on_device(x) for x in args):
            result.zero_()
        return result


def _is_on_device(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.is_cuda


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


@contextmanager
def alone(rank: int, num_ranks: int) -> Iterator[None]:
    """Initialise `torch.distributed` with NCCL, with this process as one rank of a job.

    Weights are not initialised. Every iteration has a finite loss and norm, so that it updates, and
    the next strategy that it was given. The all-to-all dispatcher reads that tokens choose all
    experts equally often.
    """
    torch.cuda.set_device(rank % NUM_DEVICES)
    store = StoreOfAll(num_ranks)  # must stay referenced here
    dist.init_process_group("nccl", store=store, rank=rank, world_size=num_ranks)
    # Upstream uses its random-number tracker, which our engine does not need.
    model_parallel_cuda_manual_seed(SEED, tp_rank=0, ep_rank=0, etp_rank=0)
    with ExitStack() as stack:
        stack.enter_context(ZerosFromDevice())
        stack.enter_context(patch.object(engine, "initialise_shards", lambda *_, **__: None))
        stack.enter_context(patch.object(RuntimeEngine, "_vote", _given_vote(RuntimeEngine._vote)))
        stack.enter_context(patch.object(dist, "all_gather_object", _all_gather_object))
        stack.enter_context(
            patch.object(
                MoEAlltoAllTokenDispatcher,
                "_maybe_dtoh_and_synchronize",
                _given_routing(MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize),
            )
        )
        yield


def _all_gather_object(gathered: list[Any], own: Any, group: Any = None) -> None:
    """Acts as if every rank had sent the same. Not logged, as objects are read from a device."""
    gathered[:] = [own] * len(gathered)


def _given_vote(real: Callable[..., Any]) -> Callable[..., Any]:
    def vote(
        of_rank: RuntimeEngine,
        calls: Any,
        next_strategy: str | None = None,
        *,
        updates: bool = False,
    ) -> tuple[StepVote, tuple[int, ...]]:
        read, _ = real(of_rank, calls, next_strategy, updates=updates)
        names = [strategy.name for strategy in of_rank.pool.strategies]
        given = replace(
            read,
            loss=GIVEN_LOSS,
            next_strategy=None if next_strategy is None else names.index(next_strategy),
            squared_norm=(GIVEN_NORM * GIVEN_LOSS.weight_sum) ** 2,
        )
        return given, ()

    return vote


def _given_routing(real: Callable[..., Any]) -> Callable[..., Any]:
    def read_sizes(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
        tokens_per_expert = real(dispatcher, point, tokens_per_expert)
        if point == dispatcher.cuda_dtoh_point:
            num_chosen, num_experts = dispatcher.num_out_tokens, dispatcher.num_experts
            chosen = num_chosen // num_experts + (np.arange(num_experts) < num_chosen % num_experts)
            local = chosen[dispatcher.local_expert_indices]
            given = (
                (tokens_per_expert, dispatcher.tp_size * dispatcher.ep_size * local),
                (dispatcher.input_splits, chosen.reshape(dispatcher.ep_size, -1).sum(axis=1)),
                (dispatcher.output_splits, local.sum()),
                (dispatcher.output_splits_tp, dispatcher.ep_size * local.sum()),
                (getattr(dispatcher, "num_global_tokens_per_local_expert", None), local),
            )
            for read, values in given:
                if read is not None and not getattr(read, "is_cuda", False):
                    np.asarray(read)[...] = values
        return tokens_per_expert

    return read_sizes
