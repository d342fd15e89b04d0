"""Building one role's `GPTModel` on `meta`: the only place that constructs Megatron's model."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.core_attention import CoreAttentionName, builder_of
from megatron.hydraulis.runtime.packed_rope import follow_rows
from megatron.hydraulis.runtime.te_layers import (
    canonical_name,
    te_attention_wrapper,
    te_replacements,
)
from megatron.hydraulis.transfer.role import Role


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    """Everything about the model that no strategy changes."""

    transformer: TransformerConfig
    """Upstream's configuration of the whole model, with all parallel degrees 1."""
    layer_spec: ModuleSpec | TransformerBlockSubmodules
    """For every layer alike, or with one entry a layer of the whole model."""
    vocab_size: int
    """Tokens that exist."""
    padded_vocab_size: int
    """Rows of the embedding: a fixed property of the model, whatever the strategy."""
    max_sequence_length: int
    position_embedding_type: str = "rope"
    rotary_percent: float = 1.0
    rotary_base: int = 10000
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    seq_len_interpolation_factor: float | None = None
    fp16_lm_cross_entropy: bool = False
    tied_embeddings: bool = False
    sequence_parallel: bool = True
    """Sequence parallelism wherever tp > 1."""
    model_provider: Callable[..., torch.nn.Module] | None = None
    """A user's own ``model_provider(pre_process, post_process, config=, pg_collection=)``."""
    built_layer_spec: ModuleSpec | None = None
    """What roles are built of, where that is not ``layer_spec``: other modules with the same
    parameters, such as Transformer Engine's. Names, order and initial values are ``layer_spec``'s.
    """
    core_attention: CoreAttentionName = "sdpa"

    def __post_init__(self) -> None:
        if self.vocab_size > self.padded_vocab_size:
            raise ConfigurationError(
                f"the vocabulary has {self.vocab_size} tokens but the model's embedding only "
                f"{self.padded_vocab_size} rows; raise --padded-vocab-size or leave it away"
            )
        dropout = max(self.transformer.hidden_dropout, self.transformer.attention_dropout)
        if dropout:
            raise ConfigurationError(
                f"dropout is {dropout}, but masks depend on the layout of the replicas and the "
                "same batch would give another update under another plan; set --hidden-dropout 0 "
                "and --attention-dropout 0"
            )

    @property
    def as_built(self) -> ModelDefinition:
        """The same model by the layers that roles are built of."""
        if self.built_layer_spec is None:
            return self
        return dataclasses.replace(self, layer_spec=self.built_layer_spec, built_layer_spec=None)

    def role_config(self, role: Role) -> TransformerConfig:
        """Upstream's configuration as this role's stage sees it.

        A stage is told to be a model of its own with ``pp = 1``: its layers, however uneven the
        cut, are all that it builds, and no code of upstream looks for a neighbour's weights.
        A copy without `__post_init__`: initialisers were scaled for the whole model's depth.
        """
        config = copy.copy(self.transformer)
        config.num_layers = role.num_layers
        config.tensor_model_parallel_size = role.tp
        config.pipeline_model_parallel_size = 1
        config.context_parallel_size = 1
        config.sequence_parallel = self.sequence_parallel and role.tp > 1
        config.use_cpu_initialization = True  # allocates without naming a device, so on `meta`
        config.perform_initialization = False
        config.calculate_per_token_loss = True
        config.finalize_model_grads_func = None
        config.grad_scale_func = None
        config.timers = None
        config.no_sync_func = None
        config.batch_p2p_comm = True
        config.batch_p2p_sync = False
        config.variable_seq_lengths = False
        config.pipeline_dtype = config.params_dtype
        return config


class PackedNorm:
    """Torch's norm, with what sequence parallelism needs to know written on its parameters.

    Upstream's own wrapper refuses sequence parallelism.
    """

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> Any:
        """A `LayerNorm` or `RMSNorm` over the last dim, by ``config.normalization``."""
        norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in norms:
            raise ConfigurationError(
                f"normalization '{config.normalization}' has no local form; choose one of "
                f"{', '.join(norms)}"
            )
        if config.layernorm_zero_centered_gamma:
            raise ConfigurationError(
                "--apply-layernorm-1p needs Transformer Engine's norms; leave it away here"
            )
        norm = norms[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class PackedGPTModel(GPTModel):
    """`GPTModel` whose padded vocabulary takes no part in the softmax.

    Without the mask the loss, and so the update, would depend on how far the vocabulary is padded.
    """

    def __init__(self, *args: Any, num_tokens_in_vocabulary: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_tokens_in_vocabulary = num_tokens_in_vocabulary

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Loss per token, (1, tokens), of logits (tokens, 1, padded vocabulary / tp)."""
        width = logits.size(-1)
        first_token = self.pg_collection.tp.rank() * width
        num_real = min(max(self._num_tokens_in_vocabulary - first_token, 0), width)
        if num_real < width:
            # In place, without a copy of the logits, and unseen by autograd, which would copy their
            # gradient instead: what is masked has probability 0 and so gradient 0 in any case.
            with torch.no_grad():
                logits[..., num_real:] = torch.finfo(logits.dtype).min
        loss: Tensor = super().compute_language_model_loss(labels, logits)
        return loss


def build_model(
    definition: ModelDefinition,
    config: TransformerConfig,
    role: Role,
    pg_collection: ProcessGroupCollection,
) -> torch.nn.Module:
    """One stage of the model under the caller's device context (normally `meta`)."""
    if definition.model_provider is not None:
        return definition.model_provider(
            pre_process=role.has_embedding,
            post_process=role.has_output,
            config=config,
            pg_collection=pg_collection,
        )
    return PackedGPTModel(
        config=config,
        transformer_layer_spec=_stage_spec(definition, role),
        vocab_size=definition.padded_vocab_size,
        max_sequence_length=definition.max_sequence_length,
        pre_process=role.has_embedding,
        post_process=role.has_output,
        fp16_lm_cross_entropy=definition.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=definition.tied_embeddings,
        position_embedding_type=definition.position_embedding_type,
        rotary_percent=definition.rotary_percent,
        rotary_base=definition.rotary_base,
        rope_scaling=definition.rope_scaling,
        rope_scaling_factor=definition.rope_scaling_factor,
        seq_len_interpolation_factor=definition.seq_len_interpolation_factor,
        pg_collection=pg_collection,
        num_tokens_in_vocabulary=definition.vocab_size,
    )


def build_role_model(
    definition: ModelDefinition, role: Role, pg_collection: ProcessGroupCollection
) -> torch.nn.Module:
    """The stage's model on `meta`, its layers numbered as in the whole model.

    Returns:
        A module whose parameters hold no memory yet; `Arena.bind` gives them some.
    """
    config = definition.role_config(role)
    with torch.device("meta"):
        model = build_model(definition.as_built, config, role, pg_collection)
    numbered: Any  # Megatron's modules carry attributes that torch's type does not know
    for numbered in model.modules():
        if isinstance(getattr(numbered, "layer_number", None), int):
            numbered.layer_number += role.first_layer
    follow_rows(model)
    model.config = config
    return model


def global_name(local_name: str, role: Role) -> str:
    """The name in the whole model of a parameter of the stage, whichever layers it is built of."""
    if local_name == "output_layer.weight" and role.tied_embeddings:
        return "embedding.word_embeddings.weight"
    parts = local_name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + role.first_layer)
    return canonical_name(".".join(parts))


def packed_block_spec(
    layer_spec: ModuleSpec | TransformerBlockSubmodules,
    num_layers: int,
    *,
    core_attention: CoreAttentionName = "sdpa",
) -> TransformerBlockSubmodules:
    """Layers, and the final norm, that take packed input and know about sequence parallelism.

    For a model provider of one's own: upstream's local core attention refuses packed input, and
    its norms refuse sequence parallelism.

    Args:
        layer_spec: upstream's spec of one layer, or of all.
        num_layers: layers of the stage, where one spec stands for all.
        core_attention: takes the place of upstream's.

    Returns:
        What `GPTModel` takes as ``transformer_layer_spec``.
    """
    if not isinstance(layer_spec, TransformerBlockSubmodules):
        layer_spec = TransformerBlockSubmodules(
            layer_specs=[layer_spec] * num_layers, layer_norm=WrappedTorchNorm
        )
    attention = builder_of(core_attention)
    replaced = te_replacements() | {
        WrappedTorchNorm: PackedNorm,
        DotProductAttention: attention,
        te_attention_wrapper(): attention,
    }
    packed: TransformerBlockSubmodules = _for_packed_input(layer_spec, replaced)
    return packed


def _stage_spec(definition: ModelDefinition, role: Role) -> TransformerBlockSubmodules:
    """The layers of this stage, each able to take packed input."""
    spec = definition.layer_spec
    if isinstance(spec, TransformerBlockSubmodules):
        num_specs = len(spec.layer_specs or ())
        if num_specs != role.num_layers_of_model:
            raise ConfigurationError(
                f"--spec gives {num_specs} layers but the model has {role.num_layers_of_model}; "
                "give one spec a layer, or one for all"
            )
        stop = role.first_layer + role.num_layers
        spec = dataclasses.replace(spec, layer_specs=spec.layer_specs[role.first_layer : stop])
    return packed_block_spec(spec, role.num_layers, core_attention=definition.core_attention)


def _for_packed_input(spec: Any, replaced: Mapping[Any, Any]) -> Any:
    """The same spec with some of upstream's modules replaced, wherever they stand."""
    if isinstance(spec, type):
        return replaced.get(spec, spec)
    if isinstance(spec, list):
        return [_for_packed_input(entry, replaced) for entry in spec]
    if isinstance(spec, functools.partial):
        named = {key: _for_packed_input(value, replaced) for key, value in spec.keywords.items()}
        return functools.partial(spec.func, *spec.args, **named)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        changed = {
            field.name: _for_packed_input(getattr(spec, field.name), replaced)
            for field in dataclasses.fields(spec)
            if field.init
        }
        return dataclasses.replace(spec, **changed)
    return spec
