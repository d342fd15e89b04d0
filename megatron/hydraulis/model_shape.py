"""The sizes of a model, as far as planning needs them: no weights, no torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.json_object import JsonObject, read_json
from megatron.hydraulis.ranges import RANGES, check_range

NO_DROPOUT = (
    "dropout masks depend on the layout of the replicas, so the same batch would not give the same "
    "update under another plan; use 0"
)
"""Reason why no model may have dropout."""


def require_no_dropout(*rates: float) -> None:
    """Raise ConfigurationError unless all dropout rates are 0."""
    if any(rates):
        raise ConfigurationError(f"dropout is {max(rates)}, but {NO_DROPOUT}")


_FORMAT_VERSION = 1
_HEAD_DIMS = ("qk_head_dim", "qk_pos_emb_head_dim")


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """Sliding window that some layers have, for the cost of core attention."""

    num_tokens: int
    """Keys of a token in these layers, its own included."""
    share: float
    """Share of the layers that have the window."""

    def squared(self, lengths: Any) -> Any:
        """``s² - share · max(0, s - w)²``, mean over the layers, in tokens².

        A causal sequence of s tokens has about s²/2 pairs of query and key; a window of w tokens
        leaves out (s - w)²/2 of them. Convex in s, and s² up to the window; so is every share.

        lengths: a number or an array, in tokens.
        """
        beyond = (lengths - self.num_tokens) * (lengths > self.num_tokens)
        return lengths * lengths - self.share * (beyond * beyond)


def layers_with_experts(num_layers: int, frequency: int | Sequence[int]) -> list[bool]:
    """Returns for each layer of a model with experts whether it has them.

    Args:
        num_layers: of the model.
        frequency: --moe-layer-freq: a period of at least 1 layer, the first of which has experts,
            or 1 or 0 for each layer.
    """
    if isinstance(frequency, int):
        return [layer % frequency == 0 for layer in range(num_layers)]
    return [bool(each) for each in frequency]


def windowed_layers(num_layers: int, skip_frequency: int | Sequence[int] | None) -> tuple[int, ...]:
    """1 for each layer with a window and 0 for the others, of a model that has one.

    Args:
        num_layers: of the model.
        skip_frequency: --window-attn-skip-freq: a period of at least 1 layer, the last of which has
            no window, or 1 or 0 for each layer; None if all have one.
    """
    if skip_frequency is None:
        return (1,) * num_layers
    if isinstance(skip_frequency, int):
        return tuple(int(layer % skip_frequency != 0) for layer in range(1, num_layers + 1))
    return tuple(skip_frequency)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The sizes of a decoder-only Transformer.

    Raises ConfigurationError for a size that is not positive, for attention heads that are not a
    multiple of the query groups, and for windowed layers that do not go with their window.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Width inside the MLP; of one half of fc1 when the MLP is gated."""
    num_attention_heads: int
    num_query_groups: int
    """Key and value heads; equal to num_attention_heads without grouped-query attention."""
    kv_channels: int
    """Size of one head; with latent attention, of one of queries or keys."""
    vocab_size: int
    """Entries of the embedding *with* padding."""
    gated_mlp: bool
    tied_embeddings: bool
    output_gate: bool = False
    """Whether attention's output is multiplied by a gate, which the queries' matrix makes too."""
    num_windowed_layers: int = 0
    """Layers whose tokens attend to a window."""
    window_tokens: int = 0
    """Tokens to which a token of these layers attends, itself included; 0 without such layers."""
    num_experts: int = 0
    """Experts of a layer that has them; 0 in a model whose layers all have an MLP."""
    num_expert_layers: int = 0
    """Layers with experts; the others have an MLP."""
    num_first_mlp_layers: int = 0
    """Layers with an MLP before the first layer with experts; 0 if that is unknown, too."""
    experts_per_token: int = 0
    """Experts that a token passes."""
    expert_ffn_hidden_size: int = 0
    """Width inside an expert, as ``ffn_hidden_size`` of an MLP."""
    shared_expert_ffn_hidden_size: int = 0
    """Width inside the experts that every token passes, together; 0 without any."""
    q_lora_rank: int = 0
    """Size of the latent of queries; 0 if one matrix projects them."""
    kv_lora_rank: int = 0
    """Size of the latent of keys and values; 0 without latent attention."""
    qk_head_dim: int = 0
    """Channels of a head that come from a latent; `kv_channels` also counts the rotated ones."""
    qk_pos_emb_head_dim: int = 0
    """Channels of a head that are rotated; keys of all heads share them."""
    v_head_dim: int = 0
    """Size of a head of values; 0 if it is `kv_channels`."""
    num_predictions: int = 0
    """Layers of multi-token prediction behind the others, each like the last of them."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and field.default is MISSING:
                self._check(value >= 1, "every size must be at least 1", field.name)
            option = f"--{field.name.replace('_', '-')}"
            if value and option in RANGES:
                check_range(option, value, f"model: {field.name}")
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigurationError(
                f"model: query groups must share the attention heads evenly but "
                f"{self.num_attention_heads} heads are not a multiple of "
                f"{self.num_query_groups} query groups; "
                f"use {math.gcd(self.num_attention_heads, self.num_query_groups)} query groups"
            )
        self._check(
            0 <= self.num_windowed_layers <= self.num_layers
            and (self.num_windowed_layers > 0) == (self.window_tokens > 0),
            f"some of {self.num_layers} layers have a window of at least 1 token, or none has",
            *("num_windowed_layers", "window_tokens"),
        )
        self._check(
            self.num_predictions >= 0, "there are 0 layers or more that predict", "num_predictions"
        )
        latents = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        sizes = [getattr(self, name) for name in latents]
        self._check(
            not any((*sizes, self.q_lora_rank))
            or (
                min(sizes) >= 1
                and self.q_lora_rank >= 0
                and self.kv_channels == self.qk_head_dim + self.qk_pos_emb_head_dim
                and self.num_query_groups == self.num_attention_heads
                and not self.output_gate
            ),
            "latent attention has sizes of at least 1, kv_channels = qk_head_dim + "
            "qk_pos_emb_head_dim, keys for every head and no output gate",
            *("q_lora_rank", *latents, "kv_channels"),
            *("num_query_groups", "num_attention_heads", "output_gate"),
        )
        needed = ("num_experts", "num_expert_layers", "experts_per_token", "expert_ffn_hidden_size")
        optional = ("num_first_mlp_layers", "shared_expert_ffn_hidden_size")
        self._check(
            not any(getattr(self, name) for name in (*needed, *optional))
            or (
                min(getattr(self, name) for name in needed) >= 1
                and min(getattr(self, name) for name in optional) >= 0
                and self.num_first_mlp_layers + self.num_expert_layers <= self.num_layers
                and self.experts_per_token <= self.num_experts
            ),
            f"a model with experts has at least 1 of them in 1 to {self.num_layers} layers, and a "
            f"token passes 1 to all of them",
            *(*needed, *optional),
        )

    def _check(self, is_right: bool, rule: str, *names: str) -> None:
        """Raise ConfigurationError with the rule and the fields that break it."""
        if not is_right:
            values = ", ".join(f"{name} {getattr(self, name)}" for name in names)
            raise ConfigurationError(
                f"model: {rule} but {values.replace(' ', ' is ', 1)}; correct "
                f"{'it' if len(names) == 1 else 'them'}"
            )

    @classmethod
    def read(cls, path: str | Path) -> "ModelShape":
        """Read ``{"num_layers": 60, "hidden_size": 6656, …}``, the fields by name.

        ``num_query_groups`` defaults to the number of heads, ``kv_channels`` to hidden size over
        heads, or to the sum of ``qk_head_dim`` and ``qk_pos_emb_head_dim``. Raises
        ConfigurationError for an unreadable file and for invalid sizes.
        """
        content = read_json(path, "model file", ConfigurationError)
        model = JsonObject(content, f"model file {path}", ConfigurationError)
        model.check_version(_FORMAT_VERSION)
        shape = cls.from_json(model)
        model.check_all_read()
        return shape

    @classmethod
    def from_json(cls, model: JsonObject) -> "ModelShape":
        """The fields by name, as `read` takes them; other keys are left to the caller."""
        num_heads, hidden_size = model.integer("num_attention_heads"), model.integer("hidden_size")
        channels = sum(model.integer(name, default=0) for name in _HEAD_DIMS)
        defaults: dict[str, int] = {
            "num_query_groups": num_heads,
            "kv_channels": channels or hidden_size // max(num_heads, 1),
        }
        sizes: dict[str, Any] = {}
        for field in fields(cls):
            default: Any = None if field.default is MISSING else field.default
            read: Callable[..., Any] = model.flag if field.type is bool else model.integer
            sizes[field.name] = read(field.name, default=defaults.get(field.name, default))
        return cls(**sizes)

    @property
    def window(self) -> AttentionWindow | None:
        """The window that changes the time of attention; None without one."""
        if not self.num_windowed_layers:
            return None
        return AttentionWindow(self.window_tokens, self.num_windowed_layers / self.num_layers)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.kv_channels

    @property
    def value_channels(self) -> int:
        """Size of a head of values."""
        return self.v_head_dim or self.kv_channels

    @property
    def padded_channels(self) -> int:
        """Size of a head where queries, keys and values need the same."""
        return max(self.kv_channels, self.value_channels)

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that have rotary positions."""
        return self.qk_pos_emb_head_dim or self.kv_channels

    @property
    def output_size(self) -> int:
        """Width of attention's output, of all heads together."""
        return self.num_attention_heads * self.value_channels

    @property
    def qkv_size(self) -> int:
        """Width of all queries, keys and values."""
        return self.query_size + self.num_query_groups * (self.kv_channels + self.value_channels)

    @property
    def score_size(self) -> float:
        """Channels of all heads that a pair of query and key takes, mean over the product of the
        two and that with the values."""
        return (self.query_size + self.output_size) / 2

    @property
    def num_matrix_parameters_per_layer(self) -> int:
        """Entries of the matrices that a token passes in a layer, mean over the layers."""
        return self.num_attention_entries + self.num_mlp_parameters_per_layer

    @property
    def num_mlp_parameters_per_layer(self) -> int:
        """Entries of fc1, with both halves if gated, and fc2, mean over the layers; of a layer with
        experts, of the router and of those that a token passes."""
        of_experts = self._num_entries_of_experts(self.experts_per_token)
        return round(self._mean(self.num_mlp_entries, of_experts))

    @property
    def mlp_width(self) -> float:
        """Width inside an MLP, or inside all experts that a token passes, mean over the layers."""
        of_experts = self.experts_per_token * self.expert_ffn_hidden_size
        return self._mean(self.ffn_hidden_size, of_experts + self.shared_expert_ffn_hidden_size)

    def _mean(self, of_mlp: int, of_experts: int) -> float:
        """Mean over the layers of what a layer with an MLP has, and one with experts."""
        num_dense = self.num_layers - self.num_expert_layers
        return (num_dense * of_mlp + self.num_expert_layers * of_experts) / self.num_layers

    @property
    def num_parameters_per_layer(self) -> int:
        """The matrices and the two norm weights of the largest layer, without biases."""
        return self.num_parameters_of_layers(1)

    def num_parameters_of_layers(self, num_layers: int, *, are_first: bool = False) -> int:
        """Matrices and norm weights of so many layers at most, see `num_with_experts`."""
        num_experts = self.num_with_experts(num_layers, are_first=are_first)
        num_entries = num_experts * self.num_expert_entries
        num_entries += (num_layers - num_experts) * self.num_mlp_entries
        return num_entries + num_layers * (self.num_attention_entries + 2 * self.hidden_size)

    def num_with_experts(
        self, num_layers: int, *, are_first: bool = False, most: bool | None = None
    ) -> int:
        """Returns how many of num_layers layers have experts, at most or at least.

        Args:
            are_first: whether they are the first of the model; otherwise any of them.
            most: by default whether layers with experts have more parameters.
        """
        if self.num_expert_entries > self.num_mlp_entries if most is None else most:
            num_mlps = min(num_layers, self.num_first_mlp_layers) if are_first else 0
            return min(num_layers - num_mlps, self.num_expert_layers)
        return max(0, num_layers - (self.num_layers - self.num_expert_layers))

    @property
    def whole_matrices(self) -> str:
        """Names of the matrices that every tp rank holds, which need sequence parallelism where tp
        is above 1; empty without any."""
        kinds = {"routers": self.num_experts, "projections to latents": self.kv_lora_rank}
        return " and ".join(what for what, is_there in kinds.items() if is_there)

    @property
    def num_router_entries(self) -> int:
        """Entries of the matrix of a layer's router."""
        return self.hidden_size * self.num_experts

    @property
    def num_routed_entries(self) -> int:
        """Entries of the matrices of a layer's experts that only some tokens pass."""
        return self._num_entries_of_mlp(self.num_experts * self.expert_ffn_hidden_size)

    @property
    def num_mlp_entries(self) -> int:
        """Entries of the matrices of a layer's MLP."""
        return self._num_entries_of_mlp(self.ffn_hidden_size)

    @property
    def num_expert_entries(self) -> int:
        """Entries of the matrices of a layer's experts, those of its router included."""
        return self._num_entries_of_experts(self.num_experts)

    @property
    def num_attention_entries(self) -> int:
        """Entries of the matrices of a layer's attention: query, gate, key, value, projection; of
        latent attention, to the latents and from them."""
        if self.kv_lora_rank:
            key_value_size = self.num_attention_heads * (self.qk_head_dim + self.v_head_dim)
            return (
                self.num_whole_attention_entries
                + (self.q_lora_rank or self.hidden_size) * self.query_size
                + self.kv_lora_rank * key_value_size
                + self.output_size * self.hidden_size
            )
        gate_size = self.query_size if self.output_gate else 0
        return self.hidden_size * (self.qkv_size + gate_size + self.output_size)

    @property
    def num_whole_attention_entries(self) -> int:
        """Entries of attention's matrices that every tp rank holds: projections to the latents."""
        if not self.kv_lora_rank:
            return 0
        latent_size = self.q_lora_rank + self.kv_lora_rank + self.qk_pos_emb_head_dim
        return self.hidden_size * latent_size

    def _num_entries_of_mlp(self, width: int) -> int:
        return (3 if self.gated_mlp else 2) * self.hidden_size * width

    def _num_entries_of_experts(self, number: int) -> int:
        """Entries of so many experts of a layer, those that all tokens pass, and the router."""
        width = number * self.expert_ffn_hidden_size + self.shared_expert_ffn_hidden_size
        return self.num_router_entries + self._num_entries_of_mlp(width)

    @property
    def num_projection_entries(self) -> int:
        """Entries of the matrix through which a layer of multi-token prediction gets a hidden state
        and an embedding."""
        return 2 * self.hidden_size**2

    @property
    def num_prediction_parameters(self) -> int:
        """Weights of a layer of multi-token prediction: of the layer, its projection and three
        norms more."""
        of_mlp = self.num_expert_entries if self.num_expert_layers else self.num_mlp_entries
        of_layer = self.num_attention_entries + of_mlp + 2 * self.hidden_size
        return of_layer + self.num_projection_entries + 3 * self.hidden_size

    @property
    def num_embedding_parameters(self) -> int:
        """Entries of the embedding; an untied output layer has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights: layers, final norm, embedding and, unless tied, the output layer."""
        num_ends = 1 if self.tied_embeddings else 2
        return (
            self.num_parameters_of_layers(self.num_layers)
            + self.hidden_size
            + num_ends * self.num_embedding_parameters
            + self.num_predictions * self.num_prediction_parameters
        )
