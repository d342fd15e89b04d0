"""A model's tensors, in Megatron's and in Hugging Face's form.

All differences of layout between the two are about rows, so one table serves both directions:

- Megatron's ``linear_qkv`` stacks, for each query group, the rows of the group's query heads, of
  its key head and of its value head; Hugging Face has three matrices, heads in order.
- Megatron's ``linear_fc1`` stacks gate and up, and a tensor of experts has an axis for them.
- Megatron's vocabulary may be padded.

GPT-OSS has tensors of all experts of a layer; here they are named by expert, as of other families,
and ``folder.stack_experts`` makes those of the family.

Adapters have no differences: each is of one of Hugging Face's linear layers, with its rows.

Rotary positions are the same: both rotate the first half of a head against the second half.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron.hydraulis.checkpoint.hugging_face.families import DENSE_PROJECTIONS
from megatron.hydraulis.checkpoint.hugging_face.model import FAMILY_NAMES, HuggingFaceModel
from megatron.hydraulis.errors import CheckpointError, ConfigurationError, listed
from megatron.hydraulis.lora import ADAPTERS, Lora, adapters
from megatron.hydraulis.terminal import size_text

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
OUTPUT_BIAS = "output_layer.bias"
"""Key that value heads alone have."""
SCORE = "score."
"""Start of the names of a value head's tensors."""
FINAL_NORM = "decoder.final_layernorm"
EXPERTS = "mlp.experts.experts."
"""Start of the keys of tensors that have one more axis, for the experts."""
ROUTER = "mlp.router"
SINKS = "self_attention.core_attention.softmax_offset"
"""Key of the offsets of the softmax, one for each head."""
ROUTER_BIAS = "mlp.router.expert_bias"
"""End of the key of a router's bias, which is no weight and in fp32."""
PREDICTIONS = "mtp.layers."
"""Start of the keys of layers of multi-token prediction, each of which has tensors of its own."""
_BIAS_NAME = "e_score_correction_bias"
_ROUTER_BIAS_NAMES = (ROUTER_BIAS, _BIAS_NAME)
_SHARED = "mlp.shared_experts."
_HEAD = "lm_head"
ROWS_ARE_TOKENS = (EMBEDDING, OUTPUT, f"output_layer{ADAPTERS}lm_head.lora_B")
"""Keys of tensors with a row for every token, which the vocabulary's padding lengthens."""
PEFT_PREFIX = "base_model.model."
"""What peft puts before the names of modules."""

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of Megatron's, of one layer and one expert."""

    key: str
    """The key without the layer's number: ``mlp.linear_fc2.weight``."""
    shape: tuple[int, ...]
    """The shape without padding of the vocabulary."""
    layer: int | None = None
    """None outside of layers."""
    expert: int | None = None
    """None outside of experts."""

    def padded_shape(self, num_tokens: int) -> tuple[int, ...]:
        """The shape with so many rows of the vocabulary, where the tensor has them."""
        return (num_tokens, *self.shape[1:]) if self.key in ROWS_ARE_TOKENS else self.shape


@dataclass(frozen=True, slots=True)
class TensorRows:
    """A tensor of Hugging Face's as rows of one of Megatron's."""

    name: str
    """Hugging Face's."""
    shape: tuple[int, ...]
    """Hugging Face's; the first dim counts the rows."""
    place: Place
    runs: Runs
    """(first row, end) of each run of rows in Megatron's tensor, in Hugging Face's order."""

    @classmethod
    def whole(cls, name: str, place: Place) -> TensorRows:
        """A tensor that both have in one piece."""
        return cls(name, place.shape, place, ((0, place.shape[0]),))


def tensor_rows(model: HuggingFaceModel, lora: Lora | None = None) -> Iterator[TensorRows]:
    """Every tensor of the model in Hugging Face's form, layer by layer, then those of adapters.

    Those that make one of Megatron's tensors follow one another; see `by_place`.
    """
    ends = (model.vocab_size, model.hidden_size)
    yield TensorRows.whole("model.embed_tokens.weight", Place(EMBEDDING, ends))
    yield from _copies(model, "embed_tokens", Place(EMBEDDING, ends))
    for layer in range(model.num_layers):
        yield from _layer_rows(model, layer)
    for index in range(model.mtp_num_layers):
        yield from _prediction_rows(model, index)
    for kind in ("weight", "bias") if model.squared_relu else ("weight",):
        place = Place(f"{FINAL_NORM}.{kind}", (model.hidden_size,))
        yield TensorRows.whole(f"model.norm.{kind}", place)
    if model.has_value_head:
        yield TensorRows.whole(f"{SCORE}weight", Place(OUTPUT, (1, model.hidden_size)))
        yield TensorRows.whole(f"{SCORE}bias", Place(OUTPUT_BIAS, (1,)))
    elif model.untie_embeddings_and_output_weights:
        yield TensorRows.whole("lm_head.weight", Place(OUTPUT, ends))
        yield from _copies(model, "shared_head.head", Place(OUTPUT, ends))
    if lora is not None:
        for pair in adapter_rows(model, lora).values():
            yield from pair


def _copies(model: HuggingFaceModel, module: str, place: Place) -> Iterator[TensorRows]:
    """The tensor that every layer of multi-token prediction has again."""
    for layer in range(model.num_layers, model.num_layers + model.mtp_num_layers):
        yield TensorRows.whole(f"model.layers.{layer}.{module}.weight", place)


def _prediction_rows(model: HuggingFaceModel, index: int) -> Iterator[TensorRows]:
    """A layer of multi-token prediction, which Hugging Face numbers after the others."""
    of_layer, key = f"model.layers.{model.num_layers + index}.", f"{PREDICTIONS}{index}."
    hidden = model.hidden_size
    sizes: dict[str, tuple[int, ...]] = {
        "enorm": (hidden,),
        "hnorm": (hidden,),
        "eh_proj": (hidden, 2 * hidden),
    }
    for name, size in sizes.items():
        yield TensorRows.whole(f"{of_layer}{name}.weight", Place(f"{key}{name}.weight", size))
    yield from _layer_rows(model, model.num_layers + index)
    norm = Place(f"{key}final_layernorm.weight", (hidden,))
    yield TensorRows.whole(f"{of_layer}shared_head.norm.weight", norm)


def adapter_rows(model: HuggingFaceModel, lora: Lora) -> dict[str, tuple[TensorRows, TensorRows]]:
    """A and B of every adapter, with peft's names, by the name of the adapted weight.

    Raises ConfigurationError for an adapter of a tied output layer.
    """
    if _HEAD in lora.targets and not model.untie_embeddings_and_output_weights:
        raise ConfigurationError(
            f"an adapter of {_HEAD} belongs to its weight but {model} has none, as its embeddings "
            f"are tied: merged, it would change the embedding, too; leave {_HEAD} out of "
            "the targets (--lora-targets)"
        )
    there = {(each.module, each.target) for each in lora.of(adapters(model.shape()))}
    found = {}
    for row in tensor_rows(model):
        linear = row.name.removesuffix(".weight")
        module, target = row.place.key.removesuffix(".weight"), linear.rpartition(".")[2]
        if (module, target) in there:
            num_outputs, num_inputs = row.shape
            sizes = {"lora_A": (lora.rank, num_inputs), "lora_B": (num_outputs, lora.rank)}
            a, b = (
                TensorRows.whole(
                    f"{PEFT_PREFIX}{linear}.{name}.weight",
                    Place(f"{module}{ADAPTERS}{target}.{name}", size, row.place.layer),
                )
                for name, size in sizes.items()
            )
            found[row.name] = a, b
    return found


def lora_from_arguments(arguments: Mapping[str, Any], model: HuggingFaceModel) -> Lora | None:
    """The adapters of a run; None without them."""
    if not arguments.get("lora_rank"):
        return None
    rank, alpha = arguments["lora_rank"], arguments["lora_alpha"]
    return Lora.resolve(rank, alpha, arguments.get("lora_targets") or (), model.shape())


def by_place(
    model: HuggingFaceModel, lora: Lora | None = None
) -> Iterator[tuple[Place, Iterable[TensorRows]]]:
    """Every tensor of Megatron's, with what Hugging Face has of it, in the order of
    `tensor_rows`."""
    return groupby(tensor_rows(model, lora), key=lambda row: row.place)


def leading_axes(
    model: HuggingFaceModel, place: Place, *, separate_layers: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the axes that a checkpoint has before a tensor's own, and its index along them.

    separate_layers: whether the checkpoint has a tensor for every layer.
    """
    axes = []
    if place.layer is not None and not separate_layers:
        axes.append((model.num_layers, place.layer))
    if place.expert is not None and model.experts is not None:
        axes.append((model.experts.num_experts, place.expert))
    return tuple(size for size, _ in axes), tuple(index for _, index in axes)


def layers_differ(model: HuggingFaceModel) -> bool:
    """True if Megatron stores a tensor for every layer, instead of one with an axis for them."""
    return model.experts is not None and not all(model.experts.moe_layer_freq)


@dataclass(frozen=True, slots=True)
class _Module:
    """A module of a layer, in Megatron's form and in Hugging Face's."""

    prefix: str
    """Megatron's key without ``weight`` or ``bias`` at its end."""
    shape: tuple[int, ...]
    """Shape of Megatron's weight."""
    parts: str | Mapping[str, Runs]
    """Hugging Face's module, or those of which it has several, each with its rows."""
    has_bias: bool = False
    expert: int | None = None


def _layer_rows(model: HuggingFaceModel, number: int) -> Iterator[TensorRows]:
    """A layer by Hugging Face's number; one of multi-token prediction is like the last one."""
    of_layer, layer, start = f"model.layers.{number}", min(number, model.num_layers - 1), ""
    own: int | None = number
    if number >= model.num_layers:
        own, start = None, f"{PREDICTIONS}{number - model.num_layers}.transformer_layer."
    for module in _modules(model, layer):
        for kind in ("weight", "bias") if module.has_bias else ("weight",):
            shape = module.shape if kind == "weight" else module.shape[:1]
            place = Place(start + module.prefix + kind, shape, own, module.expert)
            if isinstance(module.parts, str):
                yield TensorRows.whole(f"{of_layer}.{module.parts}.{kind}", place)
                continue
            for part, runs in module.parts.items():
                size = (_num_rows(runs), *shape[1:])
                yield TensorRows(f"{of_layer}.{part}.{kind}", size, place, runs)
    if model.softmax_type == "learnable":
        place = Place(start + SINKS, (model.num_attention_heads,), own)
        yield TensorRows.whole(f"{of_layer}.self_attn.sinks", place)
    experts = model.experts
    if experts is None or not experts.moe_layer_freq[layer]:
        return
    if experts.moe_router_enable_expert_bias:
        place = Place(start + ROUTER_BIAS, (experts.num_experts,), own)
        yield TensorRows.whole(f"{of_layer}.mlp.gate.{_BIAS_NAME}", place)


def _num_rows(runs: Runs) -> int:
    return sum(end - first for first, end in runs)


def _modules(model: HuggingFaceModel, layer: int) -> Iterator[_Module]:
    """All that a layer has but the biases of routers."""
    yield from _attention(model) if model.latents is None else _latent_attention(model)
    hidden, norm = (model.hidden_size,), "post_attention_layernorm"
    experts, names = model.experts, model.of_family.experts
    if experts is None or names is None or not experts.moe_layer_freq[layer]:
        yield _Module("mlp.linear_fc1.layer_norm_", hidden, norm, model.squared_relu)
        yield from _mlp(model, "mlp.", model.ffn_hidden_size, "mlp")
        return
    yield _Module("pre_mlp_layernorm.", hidden, norm)
    router = f"{names.module}.{names.router}"
    yield _Module(f"{ROUTER}.", (experts.num_experts, *hidden), router, model.add_bias_linear)
    for expert in range(experts.num_experts):
        module = f"{names.module}.experts.{expert}"
        width = experts.moe_ffn_hidden_size
        yield from _mlp(model, EXPERTS, width, module, names.projections, expert)
    shared = f"mlp.{names.shared_module}"
    if shared_width := experts.moe_shared_expert_intermediate_size:
        yield from _mlp(model, _SHARED, shared_width, shared)
    if experts.moe_shared_expert_gate:
        yield _Module(f"{_SHARED}gate_", (1, *hidden), f"{shared}_gate")


def _attention(model: HuggingFaceModel) -> Iterator[_Module]:
    """Modules of attention, with the norm before it."""
    hidden, at = model.hidden_size, "self_attention."
    qkv = _qkv_runs(model)
    shape = sum(map(_num_rows, qkv.values())), hidden
    yield _Module(f"{at}linear_qkv.layer_norm_", (hidden,), "input_layernorm", model.squared_relu)
    yield _Module(f"{at}linear_qkv.", shape, qkv, model.add_qkv_bias)
    shape = hidden, model.num_attention_heads * model.kv_channels
    yield _Module(f"{at}linear_proj.", shape, "self_attn.o_proj", model.add_bias_linear)
    if model.qk_layernorm:
        yield _Module(f"{at}q_layernorm.", (model.kv_channels,), "self_attn.q_norm")
        yield _Module(f"{at}k_layernorm.", (model.kv_channels,), "self_attn.k_norm")


def _latent_attention(model: HuggingFaceModel) -> Iterator[_Module]:
    """`_attention` with latents. Both rotate pairs of adjacent channels, in the same order."""
    latents, hidden, heads = model.latents, model.hidden_size, model.num_attention_heads
    assert latents is not None
    queries, q_rank, kv_rank = heads * model.kv_channels, latents.q_lora_rank, latents.kv_lora_rank
    at, to = "self_attention.", "self_attn."
    yield _Module("input_layernorm.", (hidden,), "input_layernorm")
    if q_rank:
        yield _Module(f"{at}linear_q_down_proj.", (q_rank, hidden), f"{to}q_a_proj")
        yield _Module(f"{at}linear_q_up_proj.layer_norm_", (q_rank,), f"{to}q_a_layernorm")
        yield _Module(f"{at}linear_q_up_proj.", (queries, q_rank), f"{to}q_b_proj")
    else:
        yield _Module(f"{at}linear_q_proj.", (queries, hidden), f"{to}q_proj")
    down = kv_rank + latents.qk_pos_emb_head_dim, hidden
    up = heads * (latents.qk_head_dim + latents.v_head_dim), kv_rank
    yield _Module(f"{at}linear_kv_down_proj.", down, f"{to}kv_a_proj_with_mqa")
    yield _Module(f"{at}linear_kv_up_proj.layer_norm_", (kv_rank,), f"{to}kv_a_layernorm")
    yield _Module(f"{at}linear_kv_up_proj.", up, f"{to}kv_b_proj")
    yield _Module(f"{at}linear_proj.", (hidden, heads * latents.v_head_dim), f"{to}o_proj")


def _mlp(
    model: HuggingFaceModel,
    prefix: str,
    width: int,
    parent: str,
    projections: tuple[str, str, str] = DENSE_PROJECTIONS,
    expert: int | None = None,
) -> Iterator[_Module]:
    """Modules of an MLP or an expert; ``parent``: Hugging Face's module."""
    hidden, has_biases = model.hidden_size, model.add_bias_linear
    gate, up, down = (f"{parent}.{each}" for each in projections)
    num_rows, parts = 2 * width, {gate: ((0, width),), up: ((width, 2 * width),)}
    if model.squared_relu:
        num_rows, parts = width, {up: ((0, width),)}
    yield _Module(f"{prefix}linear_fc1.", (num_rows, hidden), parts, has_biases, expert)
    yield _Module(f"{prefix}linear_fc2.", (hidden, width), down, has_biases, expert)


def _qkv_runs(model: HuggingFaceModel) -> dict[str, Runs]:
    size = model.kv_channels
    num_heads = model.num_attention_heads // model.num_query_groups
    num_query_rows = num_heads * size
    starts = [group * (num_query_rows + 2 * size) for group in range(model.num_query_groups)]
    ends = [start + num_query_rows for start in starts]
    return {
        "self_attn.q_proj": tuple(zip(starts, ends, strict=True)),
        "self_attn.k_proj": tuple((end, end + size) for end in ends),
        "self_attn.v_proj": tuple((end + size, end + 2 * size) for end in ends),
    }


@dataclass(frozen=True)
class Converted:
    """Result of ``import-hf`` or ``export-hf``."""

    checkpoint: Path
    """Folder of the checkpoint itself."""
    model: HuggingFaceModel
    dtype_name: str
    """Torch's name of the dtype, such as ``bfloat16``."""
    num_bytes: int
    """Size of all tensors."""
    lora: Lora | None = None
    """The adapters that the result has."""

    def __str__(self) -> str:
        model, lora = self.model, self.lora
        has = "" if lora is None else f"adapters of {len(lora.targets)} layers, rank {lora.rank}, "
        return (
            f"{model.family}, {model.num_layers} layers, {model.vocab_size} tokens, {has}"
            f"{size_text(self.num_bytes)} of {self.dtype_name}"
        )


def check_tensors[Dtype](
    what: str,
    source: Path,
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[tuple[int, ...], Dtype]],
    fix: str,
    only: str = f"only models of {FAMILY_NAMES} can be converted",
) -> Dtype:
    """Check that a source of tensors has exactly those of a model; returns their common dtype.

    Args:
        what: the model, for messages.
        source: for messages.
        wanted: shapes by name.
        found: shapes and dtypes by name.
        fix: end of the message about damage.
        only: end of the message about further tensors.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        ConfigurationError: there are tensors of another model, or of several dtypes.
    """
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise CheckpointError(
            f"{source}: {what} has {len(wanted)} tensors, of which these are missing: "
            f"{listed(missing)}; {fix}"
        )
    unknown = sorted(found.keys() - wanted.keys())
    if unknown:
        raise ConfigurationError(
            f"{source}: {listed(unknown)} have no counterpart, since {what} has {len(wanted)} "
            f"tensors; {only}"
        )
    differences = [
        f"{name} is {found[name][0]} instead of {shape}"
        for name, shape in wanted.items()
        if found[name][0] != shape
    ]
    if differences:
        raise CheckpointError(
            f"{source}: tensors must have the shapes of {what} but {listed(differences)}; {fix}"
        )
    dtypes = {
        dtype: name for name, (_, dtype) in found.items() if not name.endswith(_ROUTER_BIAS_NAMES)
    }
    if len(dtypes) > 1:
        raise ConfigurationError(
            f"{source}: all tensors must be of one dtype but "
            f"{', '.join(f'{name} is of {dtype}' for dtype, name in dtypes.items())}; save the "
            "model in one dtype"
        )
    return next(iter(dtypes))
