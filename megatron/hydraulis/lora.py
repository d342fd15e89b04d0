"""Low-rank adapters (LoRA): which linear layers have one, and of what sizes. No weights, no torch.

y = W·x + (alpha/rank)·B·(A·x), with W frozen: A is (rank, inputs), B (outputs, rank). Where
Megatron has one matrix for several of Hugging Face's, such as ``linear_qkv``, each of Hugging
Face's has its own adapter, as in peft; so adapters can be exchanged.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape

ALL_LINEAR = "all-linear"
"""peft's name for every linear layer but the output layer."""
ADAPTERS = ".adapters."
"""Part of the names of all parameters of adapters, as in
``self_attention.linear_qkv.adapters.q_proj.lora_A``."""
DEFAULT_ALPHA = 32.0
"""Default of Megatron Bridge."""
_OUTPUT_LAYER = "output_layer"
_SHARED_EXPERTS = "shared_experts"


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter of one of Hugging Face's linear layers."""

    module: str
    """Megatron's module, inside its layer: ``self_attention.linear_qkv``; or ``output_layer``."""
    target: str
    """Last part of Hugging Face's name: ``q_proj``."""
    num_inputs: int
    num_outputs: int

    @property
    def tp_cuts(self) -> Literal["inputs", "outputs"] | None:
        """Of what tp ranks have a part each; None if they have the layer whole."""
        if self.module.endswith("_down_proj"):
            return None
        return "inputs" if self.module.endswith(("linear_proj", "linear_fc2")) else "outputs"

    def num_parameters(self, rank: int) -> int:
        """Entries of A and B."""
        return rank * (self.num_inputs + self.num_outputs)


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapters that a model is trained with. Raises ConfigurationError for wrong numbers.

    ``targets`` are names as `resolve` takes them, and in its result Hugging Face's of each.
    """

    rank: int
    alpha: float = DEFAULT_ALPHA
    targets: tuple[str, ...] = (ALL_LINEAR,)

    def __post_init__(self) -> None:
        if isinstance(self.targets, str):
            raise ConfigurationError(
                f"targets of adapters are several names but are the text '{self.targets}'; give "
                f"('{self.targets}',)"
            )
        if self.rank < 1 or not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigurationError(
                "an adapter has a rank of at least 1 and a finite alpha above 0 but rank "
                f"(--lora-rank) is {self.rank} and alpha (--lora-alpha) {self.alpha:g}; correct "
                "them"
            )

    @classmethod
    def resolve(
        cls, rank: int, alpha: float, targets: Sequence[str] | str, shape: ModelShape
    ) -> "Lora":
        """The adapters that a user asks for.

        Args:
            rank: of A and B.
            alpha: the scale is alpha / rank.
            targets: names of linear layers, Megatron's (``linear_qkv``) or Hugging Face's
                (``q_proj``), or ``all-linear``. None of them: all of the layers.
            shape: the model.

        Raises:
            ConfigurationError: a name that the model has not, or that only its routed experts have.
        """
        names = [targets] if isinstance(targets, str) else list(targets)
        there = list(adapters(shape))
        chosen: set[str] = set()
        for name in names or [ALL_LINEAR]:
            found = [
                each.target
                for each in there
                if name in (each.target, each.module.rpartition(".")[2])
                or (name == ALL_LINEAR and each.module != _OUTPUT_LAYER)
            ]
            if not found:
                why = " (its routed experts cannot be adapted)" if shape.num_experts else ""
                known = dict.fromkeys(
                    each for one in there for each in (one.module.rpartition(".")[2], one.target)
                )
                raise ConfigurationError(
                    f"adapters go to linear layers of the model but targets (--lora-targets) have "
                    f"'{name}', which it lacks{why}; choose among {', '.join(known)} and "
                    f"{ALL_LINEAR}"
                )
            chosen.update(found)
        # In the order of the model, so that the same layers are the same adapters.
        resolved = dict.fromkeys(each.target for each in there if each.target in chosen)
        return cls(rank, float(alpha), tuple(resolved))

    def __str__(self) -> str:
        return f"rank {self.rank} of {' '.join(self.targets)}"

    @property
    def arguments(self) -> dict[str, Any]:
        """What Megatron's arguments, and so a checkpoint, have of it, as JSON returns them."""
        targets = list(self.targets)
        return {"lora_rank": self.rank, "lora_alpha": self.alpha, "lora_targets": targets}

    @property
    def scale(self) -> float:
        """What B·(A·x) is multiplied by."""
        return self.alpha / self.rank

    def of(self, there: Iterable[Adapter]) -> list[Adapter]:
        """Those adapters that this has."""
        return [each for each in there if each.target in self.targets]

    def of_layer(self, shape: ModelShape, *, has_experts: bool) -> list[Adapter]:
        """The adapters of a layer, which has an MLP or experts."""
        return self.of(layer_adapters(shape, has_experts=has_experts))

    def of_output(self, shape: ModelShape) -> list[Adapter]:
        """That of the output layer, if it has one."""
        return self.of(each for each in adapters(shape) if each.module == _OUTPUT_LAYER)

    def num_in(self, found: Iterable[Adapter]) -> int:
        """Entries of these adapters."""
        return sum(each.num_parameters(self.rank) for each in found)

    def num_parameters(self, shape: ModelShape) -> int:
        """Entries of all adapters of a model: what is trained."""
        num_dense = shape.num_layers - shape.num_expert_layers
        return (
            num_dense * self.num_in(self.of_layer(shape, has_experts=False))
            + shape.num_expert_layers * self.num_in(self.of_layer(shape, has_experts=True))
            + self.num_in(self.of_output(shape))
        )


def adapters(shape: ModelShape) -> Iterator[Adapter]:
    """Every adapter that some layer of the model can have, and that of its output layer."""
    kinds = [False] * (shape.num_expert_layers < shape.num_layers) + [True] * bool(
        shape.num_experts
    )
    of_layers = (layer_adapters(shape, has_experts=has_experts) for has_experts in kinds)
    yield from dict.fromkeys(itertools.chain.from_iterable(of_layers))
    yield Adapter(_OUTPUT_LAYER, "lm_head", shape.hidden_size, shape.vocab_size)


def layer_adapters(shape: ModelShape, *, has_experts: bool) -> Iterator[Adapter]:
    """Those of a layer with an MLP, or with experts, of which only shared ones can have some."""
    yield from attention_adapters(shape)
    if not has_experts:
        yield from mlp_adapters(shape, "mlp", shape.ffn_hidden_size)
    elif shape.shared_expert_ffn_hidden_size:
        width = shape.shared_expert_ffn_hidden_size
        yield from mlp_adapters(shape, f"mlp.{_SHARED_EXPERTS}", width)


def attention_adapters(shape: ModelShape) -> Iterator[Adapter]:
    """Those of a layer's attention."""
    at, hidden = "self_attention", shape.hidden_size
    if not shape.kv_lora_rank:
        if shape.output_gate:
            return  # the rows of a gate lie between those of queries
        for target, size in (
            ("q_proj", shape.query_size),
            ("k_proj", shape.num_query_groups * shape.kv_channels),
            ("v_proj", shape.num_query_groups * shape.value_channels),
        ):
            yield Adapter(f"{at}.linear_qkv", target, hidden, size)
    else:
        if shape.q_lora_rank:
            yield Adapter(f"{at}.linear_q_down_proj", "q_a_proj", hidden, shape.q_lora_rank)
            yield Adapter(f"{at}.linear_q_up_proj", "q_b_proj", shape.q_lora_rank, shape.query_size)
        else:
            yield Adapter(f"{at}.linear_q_proj", "q_proj", hidden, shape.query_size)
        size = shape.kv_lora_rank + shape.qk_pos_emb_head_dim
        yield Adapter(f"{at}.linear_kv_down_proj", "kv_a_proj_with_mqa", hidden, size)
        size = shape.num_attention_heads * (shape.qk_head_dim + shape.v_head_dim)
        yield Adapter(f"{at}.linear_kv_up_proj", "kv_b_proj", shape.kv_lora_rank, size)
    yield Adapter(f"{at}.linear_proj", "o_proj", shape.output_size, hidden)


def mlp_adapters(shape: ModelShape, module: str, width: int) -> Iterator[Adapter]:
    """Those of an MLP of this width inside."""
    for target in ("gate_proj", "up_proj") if shape.gated_mlp else ("up_proj",):
        yield Adapter(f"{module}.linear_fc1", target, shape.hidden_size, width)
    yield Adapter(f"{module}.linear_fc2", "down_proj", width, shape.hidden_size)


def is_of_adapter(name: str) -> bool:
    """True for A or B of an adapter, by the name of the parameter or a checkpoint's key."""
    return ADAPTERS in name
