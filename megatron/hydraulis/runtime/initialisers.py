"""Watching what initialisers do to parameters on `meta`, so that it can be done again on rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.hydraulis.errors import ConfigurationError

OVERWRITING = frozenset(
    {
        *("bernoulli_", "cauchy_", "exponential_", "fill_", "geometric_", "log_normal_"),
        *("normal_", "random_", "uniform_", "zero_"),
    }
)
"""In-place operations after which an element does not depend on what it was."""

ELEMENT_WISE = OVERWRITING | frozenset(
    {
        *("abs_", "add_", "clamp_", "clamp_max_", "clamp_min_", "div_", "erfinv_", "exp_"),
        *("log_", "mul_", "neg_", "pow_", "reciprocal_", "sqrt_", "sub_", "tanh_"),
    }
)
"""Operations that do the same to every element: done on rows, they do what they do on the whole."""


@dataclass(frozen=True)
class InitialisationStep:
    """One in-place, element-wise operation of an initialiser."""

    operation: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...] = ()

    def replay(self, values: Tensor) -> None:
        """Run the operation on ``values``, in place."""
        self.operation(values, *self.arguments, **dict(self.keywords))


@dataclass(frozen=True)
class _Extent:
    """The elements of a storage that a view reaches: [start, stop), some of them or all."""

    start: int
    stop: int
    is_dense: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Extent:
        start = int(tensor.storage_offset())
        if tensor.numel() == 0:
            return cls(start, start, True, tensor.dtype)
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        stop = start + 1 + sum((size - 1) * stride for size, stride in steps)
        return cls(start, stop, stop - start == tensor.numel(), tensor.dtype)

    def touches(self, other: _Extent) -> bool:
        """Whether both may share an element; offsets of unlike dtypes cannot be compared."""
        if self.dtype != other.dtype:
            return True
        return self.start < other.stop and other.start < self.stop

    def covers(self, other: _Extent) -> bool:
        """Whether it reaches every element of the other."""
        is_around = self.start <= other.start and other.stop <= self.stop
        return is_around and self.is_dense and self.dtype == other.dtype


@dataclass(frozen=True)
class _Write:
    """One operation that wrote to a storage, and why it cannot be repeated, if so."""

    name: str
    extent: _Extent
    step: InitialisationStep | None
    obstacle: str = ""


class InitialiserRecorder(TorchDispatchMode):
    """Notes every operation that writes to a tensor, by storage."""

    def __init__(self) -> None:
        super().__init__()
        self._writes: dict[int, list[_Write]] = {}
        self._kept: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Such as `t_`: another view of the same values.
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        written = list(_written(func, args, kwargs))
        if not written:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        is_plain = len(written) == 1 and bool(args) and written[0] is args[0]
        step, obstacle = None, "is not an element-wise operation on one tensor"
        if is_plain and name in ELEMENT_WISE:
            others = (*args[1:], *(v for k, v in kwargs.items() if k != "generator"))
            if any(isinstance(argument, Tensor) for argument in others):
                obstacle = "takes values from another tensor"
            else:
                keywords = tuple((k, v) for k, v in kwargs.items() if k != "generator")
                step = InitialisationStep(getattr(Tensor, name), tuple(args[1:]), keywords)
        elif is_plain and name == "copy_":
            obstacle = "takes values from another tensor"
        for target in written:
            self._note(target, _Write(name, _Extent.of(target), step, obstacle))
        if is_plain and written[0].is_meta:
            return written[0]  # there is no memory to write to
        return func(*args, **kwargs)

    def note_left_out(self, tensor: Tensor, name: str) -> None:
        """An initialiser looked at ``tensor``, saw `meta`, and did nothing."""
        obstacle = "does nothing on meta, where the model is looked at"
        self._note(tensor, _Write(name, _Extent.of(tensor), None, obstacle))

    def recipe(self, name: str, parameter: Tensor) -> tuple[InitialisationStep, ...]:
        """The operations from the last full overwrite on; what came before has no effect.

        Args:
            name: of the parameter, for the message.
            parameter: as it is in the finished model.

        Raises:
            ConfigurationError: it is never overwritten as a whole, or something is done to it
                after that which cannot be repeated on rows: to a part of it, with values of
                another tensor, or not element by element.
        """
        whole = _Extent.of(parameter)
        writes = [
            write
            for write in self._writes.get(_storage_of(parameter), [])
            if write.extent.touches(whole)
        ]
        overwrites = [
            i
            for i, write in enumerate(writes)
            if write.step is not None and write.name in OVERWRITING and write.extent.covers(whole)
        ]
        kept = writes[overwrites[-1] :] if overwrites else writes
        steps = []
        for write in kept:
            obstacle = write.obstacle if write.step is None else ""
            if not obstacle and not write.extent.covers(whole):
                num_elements = min(write.extent.stop, whole.stop) - max(
                    write.extent.start, whole.start
                )
                obstacle = f"writes to a part of it, within {num_elements} of"
                obstacle += f" {whole.stop - whole.start} elements"
            if obstacle:
                raise ConfigurationError(
                    f"parameter '{name}' is initialised by '{write.name}', which {obstacle}; "
                    "initial weights are made row by row on the ranks that own them: initialise "
                    "all of the parameter by operations such as normal_, uniform_, fill_, mul_ "
                    "with numbers (nn.Embedding: without padding_idx)"
                )
            assert write.step is not None
            steps.append(write.step)
        if not overwrites:
            raise ConfigurationError(
                f"parameter '{name}' is not initialised by its module when built on meta; "
                "initialise it in place in the module's constructor"
            )
        return tuple(steps)

    def _note(self, target: Tensor, write: _Write) -> None:
        self._writes.setdefault(_storage_of(target), []).append(write)
        self._kept.append(target)  # a freed storage's address could come back


class EverythingOnMeta(TorchFunctionMode):
    """Sends every new tensor to `meta`, also where a device is named.

    Args:
        recorder: told where one of torch's initialisers leaves a tensor on `meta` alone.
    """

    def __init__(self, recorder: InitialiserRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == _IS_META:
            # `trunc_normal_`, `orthogonal_`, `sparse_` and `dirac_` ask, and return at once.
            caller = sys._getframe(1)
            if caller.f_globals.get("__name__") == "torch.nn.init":
                name = caller.f_code.co_name.removeprefix("_no_grad_")
                self._recorder.note_left_out(args[0], name)
        if "device" in kwargs or func in _FACTORIES:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]

_FACTORIES = {
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.rand,
    torch.randn,
    torch.arange,
    torch.tensor,
}


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes to, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        values = value if isinstance(value, list | tuple) else [value]
        yield from (entry for entry in values if isinstance(entry, Tensor))


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
