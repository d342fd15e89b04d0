"""Megatron on a CPU: modules that name CUDA literally get a torch whose CUDA functions use the CPU.

Upstream calls `torch.cuda.current_device()` at some forty places and writes `device="cuda"` at
others. Each of the modules below gets, under its own name `torch`, an object that forwards
everything to torch but maps CUDA to the CPU. torch itself is not touched.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch

from hydraulis_patches.hashes import (
    CPU_BACKEND_HASHES,
    DISPATCHED_COUNTS_HASHES,
    GATED_DELTA_NET_HASHES,
    RNG_STATE_HASHES,
)
from hydraulis_patches.registry import AppliedPatch, Patch, SetState

CPU_BACKEND = Patch(
    name="cpu_backend",
    targets={f"{module}:torch": digest for module, digest in CPU_BACKEND_HASHES.items()},
    reason="upstream names CUDA devices literally and has no switch for another backend",
    removable_when="upstream takes the device from its configuration",
    cpu_only=True,
)

RNG_TRACKER = SetState(
    name="megatron.core.tensor_parallel.random:initialize_rng_tracker",
    reason="upstream's random-number tracker keeps CUDA generators; its tracker for inference, "
    "whose fork() does nothing, is set before upstream sets the other",
    removable_when="upstream has a tracker of CPU generators",
    cpu_only=True,
)

RNG_STATE = Patch(
    name="cuda_rng_state",
    targets=RNG_STATE_HASHES,
    reason="upstream's checkpoint() saves and restores a CUDA generator with every recomputation; "
    "without CUDA reading it raises, and setting it is deferred until CUDA is initialised, so "
    "that each state stays in memory",
    removable_when="upstream's checkpoint() skips CUDA generators where there is no CUDA",
    cpu_only=True,
)

DISPATCHED_COUNTS = Patch(
    name="dispatched_counts",
    targets=DISPATCHED_COUNTS_HASHES,
    reason="upstream's all-to-all dispatcher makes arrays of the numbers of tokens that experts' "
    "ranks exchange while it copies them to the host; without CUDA they stay tensors, which "
    "the collective does not take",
    removable_when="upstream converts them wherever they are",
    cpu_only=True,
)

GATED_DELTA_NET = Patch(
    name="gated_delta_net",
    targets=GATED_DELTA_NET_HASHES,
    reason="upstream's constructor refuses a machine without fla, whose kernels need CUDA; the "
    "rule in plain torch needs none of them",
    removable_when="upstream's constructor accepts its own rule in plain torch",
    cpu_only=True,
)

_FACTORIES = ("empty", "zeros", "ones", "full", "tensor", "rand", "randn", "arange", "as_tensor")


class CpuCuda:
    """Replaces `torch.cuda`: one device, the CPU, without asynchronous work."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        """The device of new tensors."""
        return torch.device("cpu")

    def is_available(self) -> bool:
        """Returns True: upstream refuses to start otherwise."""
        return True

    def device_count(self) -> int:
        """0, so that upstream sets neither devices nor CUDA seeds."""
        return 0

    def synchronize(self, device: Any = None) -> None:
        """Nothing to wait for: CPU operations are complete when they return."""

    def empty_cache(self) -> None:
        """Does nothing: there is no caching allocator."""

    def current_stream(self, device: Any = None) -> Any:
        """The only stream."""
        return _STREAM

    def Stream(self, device: Any = None) -> Any:
        """The only stream again: operations run in the order of the program."""
        return _STREAM

    def stream(self, stream: Any) -> Any:
        """A context in which nothing changes."""
        return contextlib.nullcontext()

    def memory_allocated(self, device: Any = None) -> int:
        """0: not measured on a CPU."""
        return 0

    max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The CPU generator's state."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Set the CPU generator's state."""
        torch.set_rng_state(state)

    def manual_seed(self, seed: int) -> None:
        """Seed the CPU generator."""
        torch.manual_seed(seed)


class _Stream:
    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for: CPU operations are complete when they return."""

    def record_event(self) -> Any:
        """Returns the stream itself: whatever waits for it need not wait either."""
        return self

    def synchronize(self) -> None:
        """Returns at once: there is nothing to wait for."""


_STREAM = _Stream()


class CpuTorch:
    """Replaces the module `torch`."""

    def __init__(self) -> None:
        self.cuda = CpuCuda()
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        self.__dict__[name] = value
        return value


def _on_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return make


def apply_cpu_backend() -> list[AppliedPatch]:
    """Apply the patches, and give upstream a random-number tracker that needs no CUDA.

    Raises:
        UpstreamVersionError: upstream is not the version that the patch was written for.
    """
    applied = CPU_BACKEND.apply(lambda original: CpuTorch())
    applied += RNG_STATE.apply(stand_in_for)
    applied += DISPATCHED_COUNTS.apply(stand_in_for)
    applied += GATED_DELTA_NET.apply(lambda original: True)
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    # Without dropout nothing random happens in a forward pass or its recomputation, so upstream's
    # tracker for inference, whose fork() does nothing, is enough.
    initialize_rng_tracker(inference_rng_tracker=True)
    return applied


def _counts_on_host(
    tensor: torch.Tensor, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    """A tensor that is on the host, as an array if asked; anything else as it is."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _get_no_rng_state(
    device: int | str | torch.device = "cuda", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    """Returns an empty state: the CPU's generator is saved anyway."""
    return torch.empty(0, dtype=torch.uint8)


def _set_no_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    """Does nothing, as nothing was saved."""


REPLACEMENTS: dict[str, Any] = {
    "maybe_move_tensor_to_cpu": _counts_on_host,
    "_get_cuda_rng_state": _get_no_rng_state,
    "_set_cuda_rng_state": _set_no_rng_state,
}


def stand_in_for(original: Any) -> Any:
    """The replacement of one of upstream's functions, wrapped as the original."""
    replacement = REPLACEMENTS[original.__name__]

    # A new function each time, wrapped around upstream's even if an earlier patch replaced that:
    # wrapped around itself it would have no signature and no source.
    @functools.wraps(inspect.unwrap(original))
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs)

    return stand_in
