"""The sizes of a model, as far as planning needs them: no weights, no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.hydraulis.errors import ConfigurationError

__all__ = ["ModelShape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A decoder-only Transformer by its sizes.

    Raises ConfigurationError when a size is not positive or the attention heads cannot be
    shared out over the query groups.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Width inside the MLP; of one half of fc1 when the MLP is gated."""
    num_attention_heads: int
    num_query_groups: int
    """Key and value heads; equal to num_attention_heads without grouped-query attention."""
    kv_channels: int
    """Size of one head."""
    vocab_size: int
    """Entries of the embedding *with* padding."""
    gated_mlp: bool
    tied_embeddings: bool

    def __post_init__(self) -> None:
        for name, value in self._sizes():
            if value < 1:
                raise ConfigurationError(
                    f"model: every size must be at least 1 but {name} is {value}; "
                    f"give a positive {name}"
                )
        if self.num_attention_heads % self.num_query_groups:
            raise ConfigurationError(
                f"model: query groups must share the attention heads evenly but "
                f"{self.num_attention_heads} heads are not a multiple of "
                f"{self.num_query_groups} query groups; "
                f"use {math.gcd(self.num_attention_heads, self.num_query_groups)} query groups"
            )

    def _sizes(self) -> Iterator[tuple[str, int]]:
        yield "num_layers", self.num_layers
        yield "hidden_size", self.hidden_size
        yield "ffn_hidden_size", self.ffn_hidden_size
        yield "num_attention_heads", self.num_attention_heads
        yield "num_query_groups", self.num_query_groups
        yield "kv_channels", self.kv_channels
        yield "vocab_size", self.vocab_size

    @property
    def query_size(self) -> int:
        """Width of all query heads side by side."""
        return self.num_attention_heads * self.kv_channels

    @property
    def num_matrix_parameters_per_layer(self) -> int:
        """Entries of one layer's matrices: query, key, value, projection, fc1, fc2."""
        key_value_size = 2 * self.num_query_groups * self.kv_channels
        attention = self.hidden_size * (self.query_size + key_value_size + self.query_size)
        return attention + self.num_mlp_parameters_per_layer

    @property
    def num_mlp_parameters_per_layer(self) -> int:
        """Entries of fc1, of both its halves when the MLP is gated, and fc2."""
        num_mlp_matrices = 3 if self.gated_mlp else 2
        return num_mlp_matrices * self.hidden_size * self.ffn_hidden_size

    @property
    def num_parameters_per_layer(self) -> int:
        """The matrices and the two norm weights of a layer, without biases."""
        return self.num_matrix_parameters_per_layer + 2 * self.hidden_size

    @property
    def num_embedding_parameters(self) -> int:
        """Entries of the embedding, which are also those of an output layer of its own."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights: layers, final norm, embedding and, unless tied, the output layer."""
        num_ends = 1 if self.tied_embeddings else 2
        return (
            self.num_layers * self.num_parameters_per_layer
            + self.hidden_size
            + num_ends * self.num_embedding_parameters
        )
