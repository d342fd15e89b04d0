"""The parameters of the whole model and their initial values.

The whole model is built once on `meta`. A dispatch mode records the in-place operations that
upstream's initialisers run on each parameter; replayed later on rows, they give initial weights
that depend only on the seed and the parameter's name.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.hydraulis.errors import ConfigurationError, listed
from megatron.hydraulis.frozen import Frozen
from megatron.hydraulis.optimizer.shards import CanonicalShards
from megatron.hydraulis.runtime.adapters import check_all_found
from megatron.hydraulis.runtime.model_building import ModelDefinition, build_model
from megatron.hydraulis.runtime.process_groups import local_collection, of_all_ranks
from megatron.hydraulis.transfer.canonical import Contribution, ParameterSpec, Unit

ROWS_PER_BLOCK = 64
"""Rows that share one random stream. Changing it changes all initial weights."""

QK_NORMS = ("q_layernorm.", "k_layernorm.")
"""Norms over the heads of one TP rank: partial sums on every rank, sequence parallel or not. A norm
of latents has the same name; models with latents are refused unless sequence parallel."""

HEAD_NORMS = (*QK_NORMS, ".out_norm.")
"""Likewise, with that of a gated delta net's output."""

ROW_PARALLEL_BIASES = ("linear_proj.bias", "linear_fc2.bias")
"""Biases added to the sum over all TP ranks: equal on every rank, unless sequence parallel."""

TENSOR_PARALLEL_MODULES = ("self_attention", "cross_attention", "mlp")
"""Modules of a layer that work on one TP rank's part of the heads or of the FFN."""

_EXPERT = re.compile(r"\.experts\.local_experts\.([0-9]+)\.")
"""Matches the number of an expert in its layer, in the name of its parameter."""

MARK = "hydraulis_contribution"
"""Attribute of a parameter that says what each TP rank has of its gradient: a key of
``CONTRIBUTIONS``."""

CONTRIBUTIONS = {"partial": Contribution.PARTIAL, "replicated": Contribution.REPLICATED}


@dataclass(frozen=True)
class CataloguedParameter:
    """A parameter of the whole model and the recipe of its initial value."""

    spec: ParameterSpec
    recipe: tuple[InitialisationStep, ...]


@dataclass(frozen=True)
class InitialisationStep:
    """One in-place, element-wise operation of an initialiser."""

    operation: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...] = ()

    def replay(self, values: Tensor) -> None:
        """Run the operation on ``values``, in place."""
        self.operation(values, *self.arguments, **dict(self.keywords))


def catalogue(
    definition: ModelDefinition, *, tensor_parallel: bool = True, expert_parallel: bool = False
) -> list[CataloguedParameter]:
    """All parameters of the whole model, in the order of the modules.

    Args:
        tensor_parallel: whether some strategy has tp > 1; if so, it must be known of every
            parameter how TP ranks share its gradient.
        expert_parallel: whether some strategy has ep > 1; if so, gradients of experts are cut by
            tp or added up.

    Raises:
        ConfigurationError: a parameter that cannot be regrouped, or whose initial value cannot be
            made row by row.
    """
    role = definition.whole_role
    config = copy.copy(definition.role_config(role))
    config.use_cpu_initialization = False
    config.perform_initialization = True
    # With tp > 1 some stage will be sequence parallel: the modules mark their parameters.
    config.sequence_parallel = definition.sequence_parallel
    recorder = InitialiserRecorder()
    with warnings.catch_warnings(), EverythingOnMeta(recorder), recorder:
        warnings.filterwarnings("ignore", message=".*sequence.parallel.*")
        model = build_model(definition, config, role, local_collection())
    _check_no_hooks(dict(model.named_parameters()))
    if definition.lora is not None:
        check_all_found([name for name, _ in model.named_parameters()], definition.lora)
    return [
        CataloguedParameter(
            _spec(name, parameter, definition, tensor_parallel, expert_parallel),
            recorder.recipe(name, parameter),
        )
        for name, parameter in model.named_parameters()
    ]


def _check_no_hooks(parameters: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for hooks of a model provider that would see gradients, which the
    arena's parameters do not have."""
    hooked = [
        name
        for name, each in parameters.items()
        if each._backward_hooks or each._post_accumulate_grad_hooks
    ]
    if hooked:
        raise ConfigurationError(
            f"gradients are added up on the shards, where hooks of parameters do not run, but the "
            f"model provider registers hooks on {len(hooked)} of {len(parameters)}: "
            f"{listed(hooked)}; put what they do into the loss or a module's forward"
        )


def frozen_parts(specs: Iterable[ParameterSpec]) -> Frozen:
    """The parts of a model that are frozen as a whole."""
    units = {spec.unit for spec in specs}
    frozen = {each.trained for each in units if each.is_frozen} - units
    embeddings = {each.trained for each in units} & {Unit.embedding(), Unit.first_stage()}
    return Frozen(
        frozenset(each.order for each in frozen if each.is_layer),
        embedding=embeddings <= frozen,
        output=Unit.output() in frozen,
    )


def check_frozen(specs: Sequence[ParameterSpec], *, trains: bool) -> None:
    """Collective: check that all ranks freeze the same parameters, and such as can be.

    Args:
        trains: whether there is an optimizer.

    Raises:
        ConfigurationError: they do not, nothing is left to train, or only some experts of a layer
            are frozen.
    """
    frozen = [spec.name for spec in specs if spec.is_frozen]
    digest = hashlib.sha256("\n".join(frozen).encode()).hexdigest()
    if len(set(of_all_ranks(digest))) > 1:
        of_first, *of_others = of_all_ranks(frozen)
        rank, others = next((r, o) for r, o in enumerate(of_others, 1) if o != of_first)
        different = sorted(set(of_first) ^ set(others))
        raise ConfigurationError(
            f"all ranks freeze the same parameters but rank {rank} differs from rank 0 in "
            f"{len(different)} of {len(specs)}: {listed(different)}; let the model provider freeze "
            "them on every rank or on none"
        )
    if not frozen:
        return
    if trains and len(frozen) == len(specs):
        raise ConfigurationError(
            f"some parameters are trained but all {len(specs)} are frozen by requires_grad=False; "
            "leave those that training changes as they are"
        )
    of_experts = {(_EXPERT.sub(".experts.", spec.name), spec.is_frozen) for spec in specs}
    partly = sorted(name for name, is_frozen in of_experts if (name, not is_frozen) in of_experts)
    if partly:
        raise ConfigurationError(
            f"all experts of a layer are one tensor in checkpoints but some are frozen of "
            f"{listed(list(dict.fromkeys(partly)))}; freeze those of all experts or of none"
        )


def initialise_shards(
    shards: CanonicalShards,
    entries: Sequence[CataloguedParameter],
    seed: int,
    *,
    dtype: torch.dtype,
) -> None:
    """Set the initial weights of a rank's shards, which depend only on the seed and the names.

    dtype: in which random numbers are drawn, whatever that of the shards.
    """
    by_name = {entry.spec.name: entry for entry in entries}
    for is_frozen, flat in ((False, shards.parameters), (True, shards.frozen)):
        for part in shards.rectangles(frozen=is_frozen):
            entry = by_name[shards.layout.parameters[part.parameter].name]
            rows = initial_rows(entry, seed, part.first_row, part.num_rows, dtype)
            columns = rows[:, part.first_column : part.first_column + part.num_columns]
            target = flat[part.shard_offset : part.shard_offset + part.num_elements]
            target.copy_(columns.reshape(-1))


def initial_rows(
    entry: CataloguedParameter, seed: int, first_row: int, num_rows: int, dtype: torch.dtype
) -> Tensor:
    """Rows [first_row, first_row + num_rows) of a parameter's initial value.

    Args:
        first_row: along dim 0 of the whole parameter.
        dtype: of the result; random numbers are drawn in it.

    Returns:
        (num_rows, elements of a row), on the CPU.
    """
    rows, row_length = entry.spec.shape[0], math.prod(entry.spec.shape[1:])
    first_block = first_row // ROWS_PER_BLOCK
    last_block = (first_row + num_rows - 1) // ROWS_PER_BLOCK
    blocks = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for block in range(first_block, last_block + 1):
            text = f"{seed}/{entry.spec.name}/{block}"
            # `torch.manual_seed` would also reseed every device, which `fork_rng` does not undo.
            block_seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
            torch.default_generator.manual_seed(block_seed)
            height = min(ROWS_PER_BLOCK, rows - block * ROWS_PER_BLOCK)
            values = torch.empty(height, row_length, dtype=dtype, device="cpu")
            for step in entry.recipe:
                step.replay(values)
            blocks.append(values)
    start = first_row - first_block * ROWS_PER_BLOCK
    return torch.cat(blocks)[start : start + num_rows]


def _spec(
    name: str,
    parameter: Any,
    definition: ModelDefinition,
    tensor_parallel: bool,
    expert_parallel: bool,
) -> ParameterSpec:
    if getattr(parameter, "average_gradients_across_tp_domain", False):
        raise ConfigurationError(
            f"parameter '{name}' asks to average its gradients over the TP ranks; averages cannot "
            "be added up on the shards: mark it sequence_parallel or remove the mark"
        )
    is_cut = bool(getattr(parameter, "tensor_model_parallel", False))
    contribution = (
        Contribution.SHARDED
        if is_cut
        else _contribution(name, parameter, tensor_parallel, definition.sequence_parallel)
    )
    found = _EXPERT.search(name) if is_cut or expert_parallel else None
    expert = None if found is None else int(found[1])
    if expert is not None and not is_cut and not tensor_parallel:
        contribution = Contribution.PARTIAL  # the same without tp, and allowed for experts
    is_matrix = parameter.dim() > 1 and not name.endswith(".bias")
    is_decayed_norm = definition.decays_qk_norms and any(norm in name for norm in QK_NORMS)
    unit = _unit(name)
    return ParameterSpec(
        name=name,
        shape=tuple(parameter.shape),
        unit=unit if parameter.requires_grad else unit.frozen,
        contribution=contribution,
        tp_dim=parameter.partition_dim if is_cut else None,
        parts=_parts(parameter) if is_cut else (),
        decays=is_matrix or is_decayed_norm,
        is_embedding_or_output=getattr(parameter, "is_embedding_or_output_parameter", False),
        experts=None if expert is None else (expert, expert + 1),
    )


def _parts(parameter: Any) -> tuple[int, ...]:
    """Rows of the stacked parts of a whole parameter that tp cuts, if there are several."""
    stride: int = getattr(parameter, "partition_stride", 1)
    equal = (len(parameter) // stride,) * stride if stride > 1 else ()
    return tuple(getattr(parameter, "partition_sizes", equal))


def _contribution(
    name: str, parameter: Any, tensor_parallel: bool, sequence_parallel: bool
) -> Contribution:
    """Returns what each TP rank has of the gradient of a parameter that all hold completely.

    A wrong answer would leave the first loss intact and spoil the update, so with tensor
    parallelism nothing is guessed: a parameter is marked or known.
    """
    mark = getattr(parameter, MARK, None)
    if mark is not None:
        if mark not in CONTRIBUTIONS:
            raise ConfigurationError(
                f"parameter '{name}' has {MARK} = {mark!r}; it can be {_CHOICES}"
            )
        return CONTRIBUTIONS[mark]
    is_marked_sequence_parallel = bool(getattr(parameter, "sequence_parallel", False))
    if is_marked_sequence_parallel or any(norm in name for norm in HEAD_NORMS):
        return Contribution.PARTIAL
    if not tensor_parallel or not name.startswith(("decoder.", "mtp.")):
        return Contribution.REPLICATED
    if any(module in name.split(".") for module in TENSOR_PARALLEL_MODULES):
        is_known = name.endswith(ROW_PARALLEL_BIASES) and not sequence_parallel
        why = "is in a module that tensor parallelism cuts"
    else:
        is_known = not sequence_parallel
        why = (
            "is not marked sequence_parallel, although its layer's input is cut along the sequence"
        )
    if not is_known:
        raise ConfigurationError(
            f"parameter '{name}' is not cut over TP ranks and {why}: set parameter.{MARK} to "
            f"{_CHOICES}, if a TP rank's gradient is a part of the sum or all of it, respectively"
        )
    return Contribution.REPLICATED


_CHOICES = " or ".join(f"'{choice}'" for choice in CONTRIBUTIONS)


def _unit(name: str) -> Unit:
    parts = name.split(".")
    if parts[:2] == ["embedding", "word_embeddings"]:
        return Unit.embedding()
    if parts[0] == "embedding":
        return Unit.first_stage()
    if parts[:2] == ["decoder", "layers"]:
        return Unit.layer(int(parts[2]))
    if parts[:2] == ["mtp", "layers"]:
        return Unit.prediction(int(parts[2]))
    if parts[0] in ("decoder", "output_layer"):
        return Unit.output()
    raise ConfigurationError(
        f"parameter '{name}' belongs to no stage: names begin with 'embedding.', "
        "'decoder.layers.N.', 'decoder.', 'mtp.layers.N.' (last stage) or 'output_layer.'"
    )


OVERWRITING = frozenset(
    {
        *("bernoulli_", "cauchy_", "exponential_", "fill_", "geometric_", "log_normal_"),
        *("normal_", "random_", "uniform_", "zero_"),
    }
)
"""In-place operations after which an element does not depend on its old value."""

ELEMENT_WISE = OVERWRITING | frozenset(
    {
        *("abs_", "add_", "clamp_", "clamp_max_", "clamp_min_", "div_", "erfinv_", "exp_"),
        *("log_", "mul_", "neg_", "pow_", "reciprocal_", "sqrt_", "sub_", "tanh_"),
    }
)
"""Operations on each element separately, with the same result on rows as on the whole."""


@dataclass(frozen=True)
class _Extent:
    """The elements [start, stop) of a storage that a view spans, with gaps unless it is dense."""

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
        """True if both may share an element; offsets of different dtypes cannot be compared."""
        if self.dtype != other.dtype:
            return True
        return self.start < other.stop and other.start < self.stop

    def covers(self, other: _Extent) -> bool:
        """True if it reaches every element of the other."""
        is_around = self.start <= other.start and other.stop <= self.stop
        return is_around and self.is_dense and self.dtype == other.dtype


@dataclass(frozen=True)
class _Write:
    """One operation that wrote to a storage: a step, or why it cannot be one."""

    name: str
    extent: _Extent
    step: InitialisationStep | str


class InitialiserRecorder(TorchDispatchMode):
    """Records every operation that writes to a tensor, by storage."""

    def __init__(self) -> None:
        super().__init__()
        self._writes: dict[int, list[_Write]] = {}
        self._kept: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, for torch (2.15): skipping its compiler would import it, and none is running."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # An in-place view such as `t_` changes no values.
        is_view = torch.Tag.inplace_view in func.tags
        written = [] if is_view else list(_written(func, args, kwargs))
        if not written:
            result = func(*args, **kwargs)
            if func is torch.ops.aten._to_copy.default:
                self._follow_conversion(args[0], result)
            return result
        name = func.overloadpacket.__name__
        is_plain = len(written) == 1 and bool(args) and written[0] is args[0]
        step: InitialisationStep | str = "is not an element-wise operation on one tensor"
        if is_plain and (name in ELEMENT_WISE or name == "copy_"):
            named = {key: value for key, value in kwargs.items() if key != "generator"}
            if any(isinstance(argument, Tensor) for argument in (*args[1:], *named.values())):
                step = "takes values from another tensor"
            else:
                operation = getattr(Tensor, name)
                step = InitialisationStep(operation, tuple(args[1:]), tuple(named.items()))
        for target in written:
            self._note(target, _Write(name, _Extent.of(target), step))
        if is_plain and written[0].is_meta:
            return written[0]  # there is no memory to write to
        return func(*args, **kwargs)

    def _follow_conversion(self, source: Tensor, result: Tensor) -> None:
        """Upstream's routers are initialised in fp32 and then converted to the model's dtype: what
        wrote to all of the source is repeated in the dtype of the shards."""
        whole, converted = _Extent.of(source), _Extent.of(result)
        for write in self._writes.get(_storage_of(source), []):
            if write.extent == whole:
                self._note(result, dataclasses.replace(write, extent=converted))

    def note_left_out(self, tensor: Tensor, name: str) -> None:
        """Record an initialiser that did nothing because ``tensor`` is on `meta`."""
        obstacle = "does nothing on meta, where the model is built first"
        self._note(tensor, _Write(name, _Extent.of(tensor), obstacle))

    def recipe(self, name: str, parameter: Tensor) -> tuple[InitialisationStep, ...]:
        """The operations from the last complete overwrite on; earlier ones have no effect.

        Args:
            name: of the parameter, for the message.
            parameter: as it is in the finished model.

        Raises:
            ConfigurationError: it is never overwritten completely, or a later operation cannot be
                repeated on rows: it writes to a part, takes values of another tensor, or does not
                work element by element.
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
            if not isinstance(write.step, str)
            and write.name in OVERWRITING
            and write.extent.covers(whole)
        ]
        kept = writes[overwrites[-1] :] if overwrites else writes
        steps = []
        for write in kept:
            step = write.step
            if not isinstance(step, str) and not write.extent.covers(whole):
                extent = write.extent
                num_elements = min(extent.stop, whole.stop) - max(extent.start, whole.start)
                step = (
                    f"writes to a part of it, within {num_elements} of {whole.stop - whole.start} "
                    "elements"
                )
            if isinstance(step, str):
                raise ConfigurationError(
                    f"parameter '{name}' is initialised by '{write.name}', which {step}; "
                    "initial weights are made row by row on the ranks that own them: initialise "
                    "all of the parameter by operations such as normal_, uniform_, fill_, mul_ "
                    "with numbers (nn.Embedding: without padding_idx)"
                )
            steps.append(step)
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
    """Creates every new tensor on `meta`, even if another device is given.

    Args:
        recorder: records initialisers of torch that skip tensors on `meta`.
    """

    def __init__(self, recorder: InitialiserRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func == _IS_META:
            # `trunc_normal_`, `orthogonal_`, `sparse_` and `dirac_` test this and return at once.
            caller = sys._getframe(1)
            if caller.f_globals.get("__name__") == "torch.nn.init":
                name = caller.f_code.co_name.removeprefix("_no_grad_")
                self._recorder.note_left_out(args[0], name)
        if func is torch.arange and "device" in kwargs:
            # Upstream's rotary frequencies. On meta, torch would compute what follows from them in
            # Python, in a module that imports its compiler: 2 s.
            return func(*args, **kwargs | {"device": "cpu"})
        if "device" in kwargs or func in _FACTORIES:
            kwargs["device"] = "meta"
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if {each.is_meta for each in tensors} == {True, False}:
            args, kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
        return func(*args, **kwargs)


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")


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
