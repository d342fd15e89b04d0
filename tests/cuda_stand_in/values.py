"""Values on the stand-in: operations, whose kernels do nothing, are computed on the CPU in the same
memory.

An operation first runs as on a device: its memory is allocated, its kernels are launched, its
errors are raised. Then the CPU computes it from aliases of its arguments. An operation that the CPU
cannot compute is an error that names it, and so is a kernel launched outside of any operation, so
that no result is missing.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.cuda_stand_in.attention import ATTENTIONS
from tests.cuda_stand_in.device import PlainDispatchMode, driver

_WITHOUT_KERNELS = frozenset(
    [
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "set_",
        "resize_",
        "resize_as_",
        "record_stream",
        "is_pinned",
        "_pin_memory",
        "pin_memory",
        "_local_scalar_dense",
        "lift_fresh",
        "is_set_to",
        "_has_compatible_shallow_copy_type",
    ]
)
"""Operations on memory and its descriptions, and copies to the host, which move values."""

_INDEXED = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"])
"""Operations whose second argument is a list of indices or masks."""

_DEVICE = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


class NotComputed(RuntimeError):
    """An operation on the device that the CPU cannot compute."""


class Values(PlainDispatchMode):
    """Computes the operations of a thread, and of backward passes that it starts."""

    def __enter__(self) -> Values:
        driver().stand_in_require_values(1)
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = list(_leaves((args, kwargs)))
        if not any(_is_on_device(x) for x in inputs):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.namespace not in ("aten", "prims"):
            # An operation of torch or a library that calls others: each of those is computed.
            with self:
                return func.redispatch(_DEVICE, *args, **kwargs)
        if func.is_view or name in _WITHOUT_KERNELS:
            return func(*args, **kwargs)
        if name in _INDEXED:
            with self:  # as the kernels do, which then depend on a number that they count
                args = (args[0], _without_masks(args[1]), *args[2:])
        seed = _random_state(func, inputs)
        with _computing():
            out = func(*args, **kwargs)
        try:
            result = self._compute(func, name, args, kwargs, seed)
        except Exception as error:
            raise NotComputed(f"{func} is not computed: {error}") from error
        kept = {id(x) for x in inputs if isinstance(x, Tensor)}
        return _with_values(out, result, kept, may_lack=name in _WRITTEN)

    def _compute(self, func: Any, name: str, args: Any, kwargs: Any, seed: int | None) -> Any:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        cpu_args = _on_cpu(args, generator)
        cpu_kwargs = _on_cpu(kwargs, generator)
        cpu_kwargs.pop("pin_memory", None)
        written = _WRITTEN.get(name)
        if written is None and "dtype" in func._overloadname.split("_"):
            written = _product_of_wider_type(func)
        if written is not None:
            return written(*cpu_args, **cpu_kwargs)
        if seed is None:
            return func(*cpu_args, **cpu_kwargs)
        # An operation without a generator argument uses the CPU's default one.
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            return func(*cpu_args, **cpu_kwargs)


def compute_everywhere() -> None:
    """Compute values in this thread and in all threads that Python starts later, permanently."""
    Values().__enter__()
    start = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def with_values(thread: threading.Thread) -> None:
        with Values():
            start(thread)

    threading.Thread._bootstrap_inner = with_values  # type: ignore[attr-defined]


def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor in the same memory as a tensor of the device."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
        raise NotImplementedError(f"a tensor of layout {tensor.layout}, or one not yet resolved")
    storage = tensor.untyped_storage()
    num_elements = storage.nbytes() // tensor.element_size()
    if num_elements == 0 or tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_byte * (num_elements * tensor.element_size())).from_address(
        storage.data_ptr()
    )
    flat = torch.frombuffer(memory, dtype=tensor.dtype)
    return flat.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


@contextmanager
def _computing() -> Iterator[None]:
    before = driver().stand_in_computing(1)
    try:
        yield
    finally:
        driver().stand_in_computing(before)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def _is_on_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return isinstance(value, Tensor) and value.is_cuda


def _on_cpu(value: Any, generator: torch.Generator | None) -> Any:
    if isinstance(value, Tensor):
        return alias(value) if value.is_cuda else value
    if isinstance(value, (list, tuple)):
        return type(value)(_on_cpu(item, generator) for item in value)
    if isinstance(value, dict):
        return {key: _on_cpu(item, generator) for key, item in value.items()}
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return generator
    return value


def _random_state(func: Any, inputs: list[Any]) -> int | None:
    """A CPU generator in the state of the device's; None: nothing random.

    Read before the operation advances the generator: equal states give equal numbers.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    given = [x for x in inputs if isinstance(x, torch.Generator)]
    generator = given[0] if given else torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.get_state().numpy().tobytes()
    return int.from_bytes(hashlib.sha256(state).digest()[:7])


def _without_masks(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Boolean masks as indices."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += index.nonzero().unbind(1)
        else:
            found.append(index)
    return found


def _with_values(out: Any, result: Any, kept: set[int], *, may_lack: bool) -> Any:
    """The device's outputs with what the CPU computed.

    Args:
        out: what the operation gave on the device.
        result: what it gave on the CPU, in the same structure.
        kept: ids of tensors that were computed in place.
        may_lack: whether the CPU may leave out what only a kernel can read.
    """
    if isinstance(out, (list, tuple)):
        return type(out)(
            _with_values(o, r, kept, may_lack=may_lack) for o, r in zip(out, result, strict=True)
        )
    if not isinstance(out, Tensor):
        return out if result is None else result
    if id(out) in kept:
        return out
    if result is None:
        if not may_lack:
            raise NotComputed("the CPU gives fewer outputs than the device")
        return out
    if out.shape != result.shape:  # as many as a kernel counts
        out = torch.empty(result.shape, dtype=out.dtype, device=out.device)
    (alias(out) if out.is_cuda else out).copy_(result)
    return out


def _product_of_wider_type(func: Any) -> Callable[..., Tensor]:
    """A product of narrow matrices in fp32: ``mm``, ``bmm``, ``addmm``, ``baddbmm``."""
    plain = getattr(torch, func.overloadpacket.__name__)

    def product(*args: Any, **kwargs: Any) -> Tensor:
        dtype = args[-1]
        out = kwargs.pop("out", None)
        found: Tensor = plain(*(x.to(dtype) for x in args[:-1]), **kwargs)
        return found if out is None else out.copy_(found)

    return product


def _rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    normalized_shape: list[int],
    rstd: Tensor,
    weight: Tensor | None,
    mask: list[bool],
) -> tuple[Tensor, Tensor | None]:
    wide = torch.promote_types(x.dtype, torch.float32)
    dims = tuple(range(-len(normalized_shape), 0))
    g, normed = grad.to(wide), x.to(wide) * rstd.to(wide)
    scaled = g if weight is None else g * weight.to(wide)
    mean = (scaled * normed).mean(dims, keepdim=True)
    d_x = (rstd.to(wide) * (scaled - normed * mean)).to(x.dtype)
    if weight is None:
        return d_x, None
    outer = tuple(range(x.dim() - len(normalized_shape)))
    return d_x, (g * normed).sum(outer).to(weight.dtype)


def _in_wide_types(operation: Any) -> Callable[..., tuple[Tensor | None, ...]]:
    """An operation on bf16 with statistics in fp32, as in kernels; the CPU requires one type."""

    def computed(*args: Any) -> tuple[Tensor | None, ...]:
        def widened(x: Any) -> Any:
            is_tensor = isinstance(x, Tensor)
            return x.to(torch.promote_types(x.dtype, torch.float32)) if is_tensor else x

        return tuple(operation(*map(widened, args)))

    return computed


_WRITTEN: dict[str, Callable[..., Any]] = {
    **ATTENTIONS,
    "_fused_rms_norm": _in_wide_types(torch.ops.aten._fused_rms_norm.default),
    "_fused_rms_norm_backward": _rms_norm_backward,
    "native_layer_norm": _in_wide_types(torch.ops.aten.native_layer_norm.default),
    "native_layer_norm_backward": _in_wide_types(torch.ops.aten.native_layer_norm_backward.default),
}
"""Operations for which the CPU has no kernel, or none for the device's types."""
