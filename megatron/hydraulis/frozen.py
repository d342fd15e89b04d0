"""Which parts of a model are frozen, as planning needs to know it. No weights, no torch."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.lora import Lora
from megatron.hydraulis.model_shape import ModelShape

EMBEDDING, OUTPUT = "embedding", "output"
# Of a token and an entry of a matrix: a product has a multiplication and an addition.
_FORWARD, _BACKWARD, _WEIGHT = 2.0, 2.0, 2.0
_LAYERS = re.compile(r"(\d+)(?:-(\d+))?")


class StageLayers(NamedTuple):
    """Numbers of layers, of a stage or of a model, by what they do in the backward."""

    trained: int
    frozen: int = 0
    """They pass a gradient on, and their matrices have none."""
    idle: int = 0
    """They are frozen and in front of all that is trained, so they have no backward."""

    @property
    def number(self) -> int:
        """All of them."""
        return sum(self)

    @property
    def flops_per_entry(self) -> float:
        """Operations of a token for an entry of each of them, without adapters."""
        of_frozen = self.frozen * (_FORWARD + _BACKWARD) + self.idle * _FORWARD
        return self.trained * (_FORWARD + _BACKWARD + _WEIGHT) + of_frozen


@dataclass(frozen=True, slots=True)
class Frozen:
    """The parts of a model that are frozen as a whole; nothing by default.

    A part of which something is trained counts as trained.
    """

    layers: frozenset[int] = frozenset()
    embedding: bool = False
    output: bool = False
    """The final norm and, unless tied to the embedding, the output layer."""
    lora: Lora | None = None
    """Adapters that are trained instead, of a model that is frozen."""

    @classmethod
    def around(cls, lora: Lora | None, shape: ModelShape) -> Frozen:
        """All of a model but its adapters; nothing without adapters."""
        return cls() if lora is None else replace(cls._all_of(shape), lora=lora)

    @classmethod
    def _all_of(cls, shape: ModelShape) -> Frozen:
        return cls(frozenset(range(shape.num_layers)), True, True)

    @classmethod
    def parse(cls, words: Sequence[str], shape: ModelShape) -> Frozen:
        """The parts that --frozen names: ``embedding``, ``output``, and layers such as ``0-30``.

        Raises ConfigurationError for a part that the model lacks, and for all parts.
        """
        layers: set[int] = set()
        for word in words:
            if word in (EMBEDDING, OUTPUT):
                continue
            found = _LAYERS.fullmatch(word)
            first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
            if not first <= last < shape.num_layers:
                raise ConfigurationError(
                    f"--frozen takes {EMBEDDING}, {OUTPUT} and layers of 0 to "
                    f"{shape.num_layers - 1}, as in 0-{shape.num_layers - 1}, but has '{word}'; "
                    "correct it"
                )
            layers.update(range(first, last + 1))
        found_parts = cls(frozenset(layers), EMBEDDING in words, OUTPUT in words)
        if found_parts == cls._all_of(shape):
            raise ConfigurationError(
                f"some parts are trained but --frozen has all {shape.num_layers} layers, "
                f"{EMBEDDING} and {OUTPUT}; leave out those that training changes"
            )
        return found_parts

    def __str__(self) -> str:
        """The words that `parse` takes, empty if nothing is frozen."""
        words = [EMBEDDING] * self.embedding
        for _, group in itertools.groupby(enumerate(sorted(self.layers)), lambda p: p[1] - p[0]):
            run = [layer for _, layer in group]
            words.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
        return " ".join(words + [OUTPUT] * self.output)

    def has_output_matrix(self, shape: ModelShape) -> bool:
        """Whether the matrix that makes logits is frozen."""
        return self.embedding if shape.tied_embeddings else self.output

    def among(self, layers: range) -> StageLayers:
        """Numbers of these layers, which follow the embedding if they begin with 0."""
        num_frozen, idle = len(self.layers.intersection(layers)), 0
        if self.embedding and self.lora is None and layers.start == 0:
            idle = next((i for i in layers if i not in self.layers), len(layers))
        return StageLayers(len(layers) - num_frozen, num_frozen - idle, idle)

    def _all_layers(self, shape: ModelShape) -> StageLayers:
        """Those of the model, and the trained ones of multi-token prediction."""
        found = self.among(range(shape.num_layers))
        return found._replace(trained=found.trained + shape.num_predictions)

    def token_flops(self, shape: ModelShape, *, num_looked_up: int = 0) -> float:
        """Operations that a token needs in products with matrices, the output layer included.

        For each entry 6, 4 if it is frozen, as it has no gradient, and 2 in front of all that is
        trained.

        num_looked_up: embeddings that count as if they were matrices.
        """
        layers = self._all_layers(shape)
        output = StageLayers(0, 1) if self.has_output_matrix(shape) else StageLayers(1)
        looked_up = StageLayers(0, num_looked_up) if self.embedding else StageLayers(num_looked_up)
        ends = output.flops_per_entry + looked_up.flops_per_entry
        adapters = 0 if self.lora is None else self.lora.num_parameters(shape)
        return (
            layers.flops_per_entry * shape.num_matrix_parameters_per_layer
            + ends * shape.num_embedding_parameters
            + shape.num_predictions
            * StageLayers(1).flops_per_entry
            * (shape.num_projection_entries + shape.num_embedding_parameters)
            + StageLayers(1).flops_per_entry * adapters
        )

    def attention_layers(self, shape: ModelShape) -> float:
        """Layers that count for attention, whose backward has two products for one."""
        layers = self._all_layers(shape)
        return layers.trained + layers.frozen + layers.idle / 3

    def causal_flops(self, shape: ModelShape, lengths: Iterable[int]) -> float:
        """Floating-point operations that a batch needs, forward and backward.

        `token_flops`; for causal attention 6·layers·q·s² per sequence of s tokens, half of arXiv
        2204.02311's; less under a window, and in front of all that is trained.
        """
        of_token, window = self.token_flops(shape), shape.window
        attention = 6.0 * self.attention_layers(shape) * shape.score_size
        return math.fsum(
            of_token * s + attention * (s * s if window is None else window.squared(s))
            for s in lengths
        )


NOTHING_FROZEN = Frozen()
"""The whole model is trained."""
