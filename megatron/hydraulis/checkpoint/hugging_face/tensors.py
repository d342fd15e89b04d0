"""A model's tensors, in Megatron's and in Hugging Face's form.

All differences of layout between the two are about rows, so one table serves both directions:

- Megatron's ``linear_qkv`` stacks, for each query group, the rows of the group's query heads, of
  its key head and of its value head; Hugging Face has three matrices, heads in order.
- Megatron's ``linear_fc1`` stacks gate and up, and a tensor of experts has an axis for them.
- Megatron's vocabulary may be padded.
- Qwen3-Next puts the gate of each query head behind it, Megatron all gates of a group behind the
  group's queries.

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
from megatron.hydraulis.terminal import size_text

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm"
EXPERTS = "mlp.experts.experts."
"""Start of the keys of tensors that have one more axis, for the experts."""
ROUTER = "mlp.router"
ROUTER_BIAS = "mlp.router.expert_bias"
"""Key of a router's bias, which is no weight and in fp32."""
_BIAS_NAME = "e_score_correction_bias"
_ROUTER_BIAS_NAMES = (ROUTER_BIAS, _BIAS_NAME)
_SHARED = "mlp.shared_experts."

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of Megatron's, of one layer and one expert."""

    key: str
    """Without the layer's number: ``mlp.linear_fc2.weight``."""
    layer: int | None
    """None outside of layers."""
    expert: int | None
    """None outside of experts."""


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


def tensor_rows(model: HuggingFaceModel) -> Iterator[TensorRows]:
    """Every tensor of the model in Hugging Face's form, layer by layer.

    Those that make one of Megatron's tensors follow one another; see `by_place`.
    """
    outer = outer_shapes(model)

    def whole(name: str, key: str) -> TensorRows:
        return TensorRows(name, outer[key], Place(key, None, None), ((0, outer[key][0]),))

    yield whole("model.embed_tokens.weight", EMBEDDING)
    for layer in range(model.num_layers):
        yield from _layer_rows(model, layer)
    for kind in _norm_kinds(model):
        yield whole(f"model.norm.{kind}", f"{FINAL_NORM}.{kind}")
    if not model.tied_embeddings:
        yield whole("lm_head.weight", OUTPUT)


def by_place(model: HuggingFaceModel) -> Iterator[tuple[Place, Iterable[TensorRows]]]:
    """Every tensor of Megatron's, with what Hugging Face has of it, in the latter's order."""
    return groupby(tensor_rows(model), key=lambda row: row.place)


def outer_shapes(model: HuggingFaceModel, padded_size: int | None = None) -> dict[str, Any]:
    """Shapes of Megatron's tensors outside of layers, by key.

    Args:
        padded_size: rows of the vocabulary; without padding if None.
    """
    num_tokens = model.vocab_size if padded_size is None else padded_size
    shapes: dict[str, Any] = {
        EMBEDDING: (num_tokens, model.hidden_size),
        **{f"{FINAL_NORM}.{kind}": (model.hidden_size,) for kind in _norm_kinds(model)},
    }
    if not model.tied_embeddings:
        shapes[OUTPUT] = shapes[EMBEDDING]
    return shapes


def layer_shapes(model: HuggingFaceModel, layer: int) -> dict[str, tuple[int, ...]]:
    """Shapes of Megatron's tensors of a layer, by key without the layer's number; of experts,
    that of one."""
    hidden = model.hidden_size
    shapes = _attention_shapes(model) if model.latents is None else _latent_shapes(model)
    experts = model.experts
    if experts is None or not experts.layers[layer]:
        shapes |= _mlp_shapes(model, "mlp.", model.ffn_hidden_size)
        for kind in _norm_kinds(model):
            shapes[f"mlp.linear_fc1.layer_norm_{kind}"] = (hidden,)
        return shapes
    shapes["pre_mlp_layernorm.weight"] = (hidden,)
    shapes[f"{ROUTER}.weight"] = (experts.number, hidden)
    if experts.has_bias:
        shapes[ROUTER_BIAS] = (experts.number,)
    shapes |= _mlp_shapes(model, EXPERTS, experts.ffn_hidden_size)
    if experts.shared_ffn_hidden_size:
        shapes |= _mlp_shapes(model, _SHARED, experts.shared_ffn_hidden_size)
    if experts.has_shared_gate:
        shapes[f"{_SHARED}gate_weight"] = (1, hidden)
    return shapes


def _attention_shapes(model: HuggingFaceModel) -> dict[str, tuple[int, ...]]:
    """With the norm before it."""
    hidden = model.hidden_size
    query = model.num_attention_heads * model.kv_channels
    num_query_matrices = 2 if model.has_output_gate else 1
    qkv = num_query_matrices * query + 2 * model.num_query_groups * model.kv_channels
    shapes: dict[str, tuple[int, ...]] = {
        "self_attention.linear_qkv.weight": (qkv, hidden),
        "self_attention.linear_proj.weight": (hidden, query),
    }
    for kind in _norm_kinds(model):
        shapes[f"self_attention.linear_qkv.layer_norm_{kind}"] = (hidden,)
    if model.has_qkv_biases:
        shapes["self_attention.linear_qkv.bias"] = (qkv,)
    if model.has_linear_biases:
        shapes["self_attention.linear_proj.bias"] = (hidden,)
    if model.has_qk_norms:
        shapes["self_attention.q_layernorm.weight"] = (model.kv_channels,)
        shapes["self_attention.k_layernorm.weight"] = (model.kv_channels,)
    return shapes


def _latent_shapes(model: HuggingFaceModel) -> dict[str, tuple[int, ...]]:
    """Likewise of latent attention. Both rotate pairs of adjacent channels, in the same order."""
    latents, hidden, heads = model.latents, model.hidden_size, model.num_attention_heads
    assert latents is not None
    queries, q_rank, kv_rank = heads * model.kv_channels, latents.q_lora_rank, latents.kv_lora_rank
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    if q_rank:
        shapes |= {
            "self_attention.linear_q_down_proj.weight": (q_rank, hidden),
            "self_attention.linear_q_up_proj.layer_norm_weight": (q_rank,),
            "self_attention.linear_q_up_proj.weight": (queries, q_rank),
        }
    else:
        shapes["self_attention.linear_q_proj.weight"] = (queries, hidden)
    num_rows = heads * (latents.qk_head_dim + latents.v_head_dim)
    return shapes | {
        "self_attention.linear_kv_down_proj.weight": (
            kv_rank + latents.qk_pos_emb_head_dim,
            hidden,
        ),
        "self_attention.linear_kv_up_proj.layer_norm_weight": (kv_rank,),
        "self_attention.linear_kv_up_proj.weight": (num_rows, kv_rank),
        "self_attention.linear_proj.weight": (hidden, heads * latents.v_head_dim),
    }


def _mlp_shapes(model: HuggingFaceModel, prefix: str, ffn: int) -> dict[str, tuple[int, ...]]:
    num_rows = (1 if model.has_squared_relu else 2) * ffn
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}linear_fc1.weight": (num_rows, model.hidden_size),
        f"{prefix}linear_fc2.weight": (model.hidden_size, ffn),
    }
    if model.has_linear_biases:
        shapes[f"{prefix}linear_fc1.bias"] = (num_rows,)
        shapes[f"{prefix}linear_fc2.bias"] = (model.hidden_size,)
    return shapes


def _norm_kinds(model: HuggingFaceModel) -> tuple[str, ...]:
    """Parameters of a norm outside of attention."""
    return ("weight", "bias") if model.has_squared_relu else ("weight",)


def shape_of(
    model: HuggingFaceModel, place: Place, padded_size: int | None = None
) -> tuple[int, ...]:
    """Shape of one of Megatron's tensors; ``padded_size`` as for `outer_shapes`."""
    if place.layer is None:
        shape: tuple[int, ...] = outer_shapes(model, padded_size)[place.key]
        return shape
    return layer_shapes(model, place.layer)[place.key]


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
        axes.append((model.experts.number, place.expert))
    return tuple(size for size, _ in axes), tuple(index for _, index in axes)


def layers_differ(model: HuggingFaceModel) -> bool:
    """Whether Megatron stores a tensor for every layer, instead of one with an axis for them."""
    return model.experts is not None and not all(model.experts.layers)


def _layer_rows(model: HuggingFaceModel, layer: int) -> Iterator[TensorRows]:
    num_experts = 0 if model.experts is None else model.experts.number
    for key, shape in layer_shapes(model, layer).items():
        if key == ROUTER_BIAS:
            name = f"model.layers.{layer}.mlp.gate.{_BIAS_NAME}"
            yield TensorRows(name, shape, Place(key, layer, None), ((0, num_experts),))
            continue
        # "….linear_qkv.weight" as well as "….linear_qkv.layer_norm_weight"
        kind = "bias" if key.endswith("bias") else "weight"
        module = key.removesuffix(kind).rstrip("._")
        for expert in range(num_experts) if key.startswith(EXPERTS) else (None,):
            place = Place(key, layer, expert)
            for name, given in _parts(model, module, expert).items():
                runs = given or ((0, shape[0]),)
                num_rows = sum(end - first for first, end in runs)
                full_name = f"model.layers.{layer}.{name}.{kind}"
                yield TensorRows(full_name, (num_rows, *shape[1:]), place, runs)


_WHOLE_NAMES = {
    "self_attention.linear_qkv.layer_norm": "input_layernorm",
    "input_layernorm": "input_layernorm",
    "self_attention.linear_q_proj": "self_attn.q_proj",
    "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
    "self_attention.linear_q_up_proj.layer_norm": "self_attn.q_a_layernorm",
    "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
    "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
    "self_attention.linear_kv_up_proj.layer_norm": "self_attn.kv_a_layernorm",
    "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.linear_fc1.layer_norm": "post_attention_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
"""Modules whose tensors Hugging Face has in one piece, in all families."""


def _parts(model: HuggingFaceModel, module: str, expert: int | None) -> Mapping[str, Runs | None]:
    """Hugging Face's modules that make one of Megatron's, with their rows; None for all rows."""
    if module in _WHOLE_NAMES:
        return {_WHOLE_NAMES[module]: None}
    if module == "self_attention.linear_qkv":
        return _qkv_runs(model)
    parent, _, linear = module.rpartition(".")
    projections, ffn = DENSE_PROJECTIONS, model.ffn_hidden_size
    experts, names = model.experts, model.of_family.experts
    if parent != "mlp" or not linear.startswith("linear_fc"):
        assert experts is not None
        assert names is not None
        if module == ROUTER:
            return {f"{names.module}.gate": None}
        shared = f"mlp.{names.shared_module}"
        if linear == "gate":
            return {f"{shared}_gate": None}
        if expert is None:
            parent, ffn = shared, experts.shared_ffn_hidden_size
        else:
            parent, ffn = f"{names.module}.experts.{expert}", experts.ffn_hidden_size
            projections = names.projections
    gate, up, down = (f"{parent}.{each}" for each in projections)
    if linear == "linear_fc2":
        return {down: None}
    if model.has_squared_relu:
        return {up: None}
    return {gate: ((0, ffn),), up: ((ffn, 2 * ffn),)}


def _qkv_runs(model: HuggingFaceModel) -> dict[str, Runs]:
    size = model.kv_channels
    num_heads = model.num_attention_heads // model.num_query_groups
    num_query_rows = num_heads * size * (2 if model.has_output_gate else 1)
    starts = [group * (num_query_rows + 2 * size) for group in range(model.num_query_groups)]
    ends = [start + num_query_rows for start in starts]
    queries = list(zip(starts, ends, strict=True))
    if model.has_output_gate:
        queries = [
            (start + row, start + row + size)
            for start in starts
            for head in range(num_heads)
            for row in (head * size, (num_heads + head) * size)
        ]
    return {
        "self_attn.q_proj": tuple(queries),
        "self_attn.k_proj": tuple((end, end + size) for end in ends),
        "self_attn.v_proj": tuple((end + size, end + 2 * size) for end in ends),
    }


@dataclass(frozen=True)
class Converted:
    """What ``import-hf`` or ``export-hf`` has converted."""

    checkpoint: Path
    """Folder of the checkpoint itself."""
    model: HuggingFaceModel
    dtype_name: str
    """Torch's name of the dtype, such as ``bfloat16``."""
    num_bytes: int
    """Size of all tensors."""

    def __str__(self) -> str:
        model = self.model
        return (
            f"{model.family}, {model.num_layers} layers, {model.vocab_size} tokens, "
            f"{size_text(self.num_bytes)} of {self.dtype_name}"
        )


def check_tensors[Dtype](
    model: HuggingFaceModel,
    source: Path,
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[tuple[int, ...], Dtype]],
    fix: str,
) -> Dtype:
    """Check that a source of tensors has exactly those of a model; returns their common dtype.

    Args:
        source: for messages.
        wanted: shapes by name.
        found: shapes and dtypes by name.
        fix: end of the message about damage.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        ConfigurationError: there are tensors of another model, or of several dtypes.
    """
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise CheckpointError(
            f"{source}: a {model.family} model of this configuration has {len(wanted)} tensors, "
            f"of which these are missing: {listed(missing)}; {fix}"
        )
    unknown = sorted(found.keys() - wanted.keys())
    if unknown:
        raise ConfigurationError(
            f"{source}: {listed(unknown)} have no counterpart, since a {model.family} model has "
            f"{len(wanted)} tensors; only models of {FAMILY_NAMES} can be converted"
        )
    differences = [
        f"{name} is {found[name][0]} instead of {shape}"
        for name, shape in wanted.items()
        if found[name][0] != shape
    ]
    if differences:
        raise CheckpointError(
            f"{source}: tensors must have the shapes that the configuration and a vocabulary of "
            f"{model.vocab_size} tokens give but {listed(differences)}; {fix}"
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
