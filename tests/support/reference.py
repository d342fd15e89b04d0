"""The one-process run whose results every strategy must have.

None of the project's runtime is used: upstream's GPTModel with its own attention, whole, sequence
after sequence, unpadded and unpacked, torch's plain AdamW and clipping.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed.finalize_model_grads import (
    _update_router_expert_bias,
    reset_model_temporary_tensors,
)
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs, gpt_model
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.gated_delta_net import common as gated_delta_net
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import dot_product_attention, multi_token_prediction
from megatron.core.transformer import utils as attention_masks
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor

from hydraulis_patches.cpu_backend import CpuTorch
from megatron.hydraulis.runtime.catalogue import catalogue, initial_rows
from megatron.hydraulis.runtime.process_groups import provide_memory_buffer, single_rank_collection
from tests.support.gloo_pool import worker_groups
from tests.support.models import Job, SmallModel, started_adapters, use_fp64_loss


@dataclass(frozen=True)
class ReferenceRun:
    """Whole tensors by name, per iteration."""

    gradients: tuple[dict[str, np.ndarray], ...]
    parameters: tuple[dict[str, np.ndarray], ...]
    losses: tuple[float, ...]
    biases: tuple[np.ndarray, ...]
    """Those of routers, (layers, experts); none in a model without them."""
    prediction_losses: tuple[tuple[float, ...], ...]
    """Those of each layer of multi-token prediction, per iteration."""


def initial_parameters(model: SmallModel, seed: int) -> dict[str, torch.Tensor]:
    """Whole initial weights, the padded vocabulary's rows cut off."""
    wide = torch.float64 if model.dtype == torch.float64 else torch.float32
    values = {}
    with started_adapters():
        entries = catalogue(model.definition())
    for entry in entries:
        spec = entry.spec
        value = initial_rows(entry, seed, 0, spec.shape[0], wide).reshape(spec.shape)
        values[spec.name] = value[: model.vocab_size] if is_vocabulary(spec.name) else value
    return values


def is_vocabulary(name: str) -> bool:
    """True if dim 0 is the vocabulary."""
    return name in ("embedding.word_embeddings.weight", "output_layer.weight")


def build_upstream_model(
    model: SmallModel, seed: int, dtype: torch.dtype | None = None
) -> GPTModel:
    """Upstream's whole model on one rank with the same initial weights, in ``dtype``."""
    dtype = dtype or model.dtype
    config = replace(model, dtype=dtype).transformer()
    config.use_cpu_initialization = True
    config.calculate_per_token_loss = True  # what routers add is a sum over tokens, too
    # Upstream's norms on a CPU have no such switch, so the reference has weights that are 1 more.
    config.layernorm_zero_centered_gamma = False
    collection = single_rank_collection(worker_groups().of_self)
    named: dict[str, Any] = {
        "config": config,
        "vocab_size": model.vocab_size,
        "max_sequence_length": 256,
        "position_embedding_type": model.position_embedding,
        "share_embeddings_and_output_weights": model.tied,
        "pg_collection": collection,
    }
    reference: Any
    with local_latent_attention(), _predictions_here():
        if model.layer_pattern:
            reference = build_hybrid_model(model, **named).to(dtype)
        else:
            reference = GPTModel(
                transformer_layer_spec=model.layer_spec(config),
                mtp_block_spec=_prediction_spec(model, config),
                **named,
            ).to(dtype)
    give_missing_groups(reference, collection.tp)
    for name, module in reference.named_modules():
        if model.bias and re.search(r"local_experts\.\d+\.linear_fc2$", name):
            # Upstream adds biases to it in place, which autograd refuses for a view.
            module.register_forward_hook(lambda _module, _inputs, out: (out[0].clone(), out[1]))
    values = initial_parameters(model, seed)
    if model.lora is not None:
        _add_adapters(reference, model, values)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(values[name] + _shift(model, name))
    if model.lora is None:
        model.freeze(reference)
    return reference


def build_hybrid_model(model: SmallModel, *, config: Any, **named: Any) -> HybridModel:
    """Upstream's model with its own gated delta nets, whose rule is `recurrent_delta_rule`."""
    config.deterministic_mode = True  # upstream's forward without fla
    named["pg_collection"].dp_cp = named["pg_collection"].cp
    spec = ModuleSpec(module=HybridStack, submodules=model.layer_spec(config))
    with patch.object(hybrid_block, "TENorm", WrappedTorchNorm):
        reference = HybridModel(
            hybrid_stack_spec=spec,
            hybrid_layer_pattern=model.layer_pattern,
            config=config,
            **named,
        )
    for module in reference.modules():
        if isinstance(module, GatedDeltaNet):
            module.gated_delta_rule = recurrent_delta_rule
            for name in ("_compute_g_and_beta", "_apply_gated_norm"):
                setattr(module, name, partial(_in_fp64, getattr(type(module), name), module))
    return reference


def _in_fp64(function: Any, *arguments: Any) -> Any:
    """A function of upstream that rounds to fp32 by ``float()``, without that for fp64."""
    with patch.object(
        Tensor, "float", lambda tensor: tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    ):
        return function(*arguments)


def unit_length(tensor: Tensor) -> Tensor:
    """What fla's ``l2norm`` gives."""
    return tensor / (tensor.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrent_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """The gated delta rule token by token: (batch, tokens, heads, sizes) of one sequence each."""
    state = query.new_zeros(*query.shape[:1], *query.shape[2:], value.size(-1))
    outputs = []
    for i in range(query.size(1)):
        q, k, v = query[:, i] * query.size(-1) ** -0.5, key[:, i], value[:, i]
        state = state * g[:, i, :, None, None].exp()
        error = v - torch.einsum("bhkv,bhk->bhv", state, k)
        state = state + torch.einsum("bhk,bhv->bhkv", k, beta[:, i, :, None] * error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q))
    return torch.stack(outputs, dim=1), None


def _predictions_here() -> Any:
    """Upstream asks the default groups whether this is the last stage."""
    here = ExitStack()
    name = "get_mtp_num_layers_to_build"
    here.enter_context(patch.object(gpt_layer_specs, name, _number_to_build))
    here.enter_context(patch.object(gpt_model, "mtp_on_this_rank", lambda **_: True))
    return here


def _number_to_build(config: Any, **_: Any) -> int:
    number: int = config.mtp_num_layers
    return number


def _prediction_spec(model: SmallModel, config: Any) -> Any:
    if not config.mtp_num_layers:
        return None
    return gpt_layer_specs.get_gpt_mtp_block_spec_for_backend(
        config, model.layer_spec(config), LocalSpecProvider()
    )


def _add_adapters(reference: GPTModel, model: SmallModel, values: Mapping[str, Tensor]) -> None:
    """Freeze upstream's model, and add the adapters to what its linear layers give."""
    assert model.lora is not None
    reference.requires_grad_(False)
    modules: dict[str, Any] = dict(reference.named_modules())
    for name in values:
        if not name.endswith(".lora_A"):
            continue
        of_linear, target = name.removesuffix(".lora_A").split(".adapters.")
        linear = modules[of_linear]
        if not hasattr(linear, "adapters"):
            linear.adapters = torch.nn.ModuleDict()
        low_rank = torch.nn.ParameterDict(
            {
                each: torch.empty_like(values[f"{of_linear}.adapters.{target}.{each}"])
                for each in ("lora_A", "lora_B")
            }
        )
        linear.adapters[target] = low_rank
        rows = _rows_of(model, of_linear, target)
        linear.register_forward_hook(partial(_with_adapter, low_rank, rows, model.lora.scale))


_SHARED_WIDTH = "moe_shared_expert_intermediate_size"


def _rows_of(model: SmallModel, linear: str, target: str) -> Tensor | slice:
    """The rows of a linear layer of Megatron's that are one of Hugging Face's, in its order."""
    if linear.endswith("linear_qkv"):
        size, heads = model.hidden_size // model.num_heads, model.num_heads // model.num_groups
        first, count = {"q": (0, heads), "k": (heads, 1), "v": (heads + 1, 1)}[target[0]]
        of_group = torch.arange((heads + 2) * size).view(-1, size)[first : first + count]
        starts = torch.arange(model.num_groups) * (heads + 2) * size
        return (starts[:, None] + of_group.flatten()).flatten()
    if linear.endswith("linear_fc1") and model.swiglu:
        is_shared = "shared_experts" in linear
        width = dict(model.variant)[_SHARED_WIDTH] if is_shared else model.ffn_hidden_size
        return slice(width) if target == "gate_proj" else slice(width, None)
    return slice(None)


def _with_adapter(
    low_rank: Any, rows: Any, scale: float, linear: Any, inputs: Any, outputs: Any
) -> Any:
    output, bias = outputs
    delta = scale * (inputs[0] @ low_rank["lora_A"].T) @ low_rank["lora_B"].T
    delta = delta[..., : output.shape[-1]]  # without the padding of the vocabulary
    added = torch.zeros_like(output)
    added[..., rows] = delta
    return output + added, bias


@contextmanager
def local_latent_attention() -> Iterator[None]:
    """Within, upstream builds latent attention of its local layers, which it refuses or cannot."""
    with (
        patch.object(DotProductAttention, "__init__", _without_head_sizes),
        patch.object(QKNormConfigResolver, "resolve", _given_modules),
    ):
        yield


def give_missing_groups(model: torch.nn.Module, tp_group: dist.ProcessGroup | None) -> None:
    """Upstream hands no group to `linear_q_proj` of latent attention."""
    linear: Any
    for linear in model.modules():
        if isinstance(linear, ColumnParallelLinear) and linear.tp_group is None:
            linear.tp_group = tp_group


_INITIALISE = DotProductAttention.__init__


def _without_head_sizes(core: Any, *args: Any, **named: Any) -> None:
    """Latent attention gives sizes of heads, which upstream's local one does not take."""
    sizes = {"k_channels", "v_channels"}
    _INITIALISE(core, *args, **{name: named[name] for name in named.keys() - sizes})


def _given_modules(resolver: QKNormConfigResolver) -> dict[str, Any]:
    """The modules of the spec: upstream's local layers refuse norms without a latent of queries."""
    return vars(resolver.submodules)


def _shift(model: SmallModel, name: str) -> float:
    """The difference of the reference's value of a weight to the engine's."""
    is_centred = model.transformer().layernorm_zero_centered_gamma
    return 1.0 if is_centred and name.endswith("layernorm.weight") else 0.0


def _decays(model: SmallModel, name: str, parameter: torch.Tensor) -> bool:
    if model.decays_qk_norms and ("q_layernorm." in name or "k_layernorm." in name):
        return True
    return parameter.dim() > 1 and not name.endswith(".bias")


def _cuda_on_cpu() -> Any:
    """Upstream's attention with a window or an offset names CUDA."""
    on_cpu = ExitStack()
    on_cpu.enter_context(patch.object(gated_delta_net, "l2norm", unit_length))
    for module in (dot_product_attention, attention_masks):
        on_cpu.enter_context(patch.object(module, "torch", CpuTorch()))
    return on_cpu


def sequence_loss(
    model: torch.nn.Module, tokens: np.ndarray, weights: np.ndarray | None = None
) -> torch.Tensor:
    """Σ weight · loss of one sequence: (length + 1,) tokens and weights, 1 where None."""
    ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64))
    length = ids.numel() - 1
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    positions = torch.arange(length).unsqueeze(0)
    losses = model(ids[:-1].unsqueeze(0), positions, mask, labels=ids[1:].unsqueeze(0))
    if weights is None:
        return losses.sum()
    return (losses[0] * torch.from_numpy(weights[1:]).to(losses.dtype)).sum()


@contextmanager
def _recorded(losses: list[float]) -> Iterator[None]:
    """Append what upstream logs of its layers of multi-token prediction, without its default
    groups; their backward is divided by `_MASK_SCALE`."""
    module = multi_token_prediction
    groups = SimpleNamespace(get_data_parallel_group=lambda **_: None)

    def record(loss: Tensor, *_: Any, **__: Any) -> None:
        losses.append(loss.item())

    with (
        patch.object(module, "parallel_state", groups),
        patch.object(module, "_compute_mtp_acceptance_counts", lambda *_: (None, None)),
        patch.object(module.MTPLossLoggingHelper, "save_metrics_to_tracker", record),
        patch.object(module.MTPLossAutoScaler, "main_loss_backward_scale", 1 / _MASK_SCALE),
    ):
        yield


_MASK_SCALE = 1e3
"""Of weights: upstream counts at least 1 for what a layer predicts of a batch."""


def predicting_loss(
    model: Any, batch: Sequence[np.ndarray], weights: Sequence[np.ndarray]
) -> torch.Tensor:
    """Σ weight · loss of the main prediction of sequences, as one batch of upstream's, padded; its
    backward adds the gradients of the losses of multi-token prediction.

    These are means over the tokens that a layer predicts, of the batch.
    """
    longest = max(map(len, batch)) - 1
    padded, mask = np.zeros((len(batch), longest + 1), np.int64), np.zeros((len(batch), longest))
    for i, (tokens, each) in enumerate(zip(batch, weights, strict=True)):
        padded[i, : len(tokens)] = tokens
        mask[i, : len(tokens) - 1] = each[1:]
    ids, loss_mask = torch.from_numpy(padded), torch.from_numpy(mask) * _MASK_SCALE
    causal = torch.ones(1, 1, longest, longest).triu(1).bool()
    positions = torch.arange(longest).expand(len(batch), -1)
    losses = model(ids[:, :-1], positions, causal, labels=ids[:, 1:], loss_mask=loss_mask)
    return (losses * loss_mask).sum() / _MASK_SCALE


def run_reference(job: Job, dtype: torch.dtype | None = None) -> ReferenceRun:
    """One rank runs all iterations of the job, with any strategies.

    Args:
        job: what to run.
        dtype: to compute in; the model's own by default. The initial weights are those of the
            model's dtype in any case: in fp64 this is the exact answer to an fp32 or bf16 job.
    """
    use_fp64_loss()
    provide_memory_buffer()
    destroy_moe_metrics_tracker()  # sized for the layers of this worker's last model
    with _cuda_on_cpu():
        return _run(job, build_upstream_model(job.model, job.seed, dtype))


def _run(job: Job, model: torch.nn.Module) -> ReferenceRun:
    named: dict[str, Any] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    settings = job.settings
    decayed = [p for name, p in named.items() if _decays(job.model, name, p)]
    others = [p for name, p in named.items() if not _decays(job.model, name, p)]
    adamw = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    gradients, parameters, losses, biases, predicted = [], [], [], [], []
    num_predictions = job.model.transformer().mtp_num_layers or 0
    for i, batch in enumerate(job.batches):
        adamw.zero_grad()
        weights = job.weights_of(i) or [None] * len(batch)
        divisor = job.weight_sum(i)
        # What routers add to the sum is a mean over tokens after the division.
        scale = divisor / sum(len(tokens) - 1 for tokens in batch)
        MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(scale, dtype=torch.float64))
        total = 0.0
        of_predictions: tuple[float, ...] = ()
        if num_predictions:
            total, of_predictions = _predicting(model, batch, job.weights[i])
        for tokens, each in () if num_predictions else zip(batch, weights, strict=True):
            loss = sequence_loss(model, tokens, each)
            loss.backward()
            total += loss.item()
        for parameter in named.values():
            parameter.grad.div_(divisor)
        gradients.append(_copies({name: p.grad for name, p in named.items()}))
        torch.nn.utils.clip_grad_norm_(named.values(), settings.clip_grad)
        adamw.step()
        parameters.append(
            _copies({name: p.detach() - _shift(job.model, name) for name, p in named.items()})
        )
        losses.append(total / divisor)
        predicted.append(of_predictions)
        config: Any = model.config
        if config.moe_router_enable_expert_bias:
            _update_router_expert_bias([model], config, worker_groups().of_self)
            reset_model_temporary_tensors(config, [model])
            of_layers = np.zeros((job.model.num_layers + num_predictions, config.num_moe_experts))
            for name, bias in model.named_buffers():
                if name.endswith("expert_bias"):
                    first = job.model.num_layers if name.startswith("mtp.") else 0
                    of_layers[first + int(name.split(".")[2])] = bias.numpy()
            biases.append(of_layers)
    return ReferenceRun(
        *map(tuple, (gradients, parameters, losses, biases, predicted)),  # type: ignore[arg-type]
    )


def _predicting(
    model: Any, batch: Sequence[np.ndarray], weights: Sequence[np.ndarray]
) -> tuple[float, tuple[float, ...]]:
    """Backward of a batch with multi-token prediction; returns the main loss's sum and the mean
    loss of each layer.

    Routers would see padding, and upstream's local latent attention takes no batch, so that then
    sequences run one after another: what upstream normalises by a sequence's weights is scaled to
    those of the batch, for one layer.
    """
    config = model.config
    found: list[float] = []
    if config.num_moe_experts is None and not config.multi_latent_attention:
        with _recorded(found):
            loss = predicting_loss(model, batch, weights)
            loss.backward()
        return float(loss), tuple(found)
    assert config.mtp_num_layers == 1
    factor, total = config.mtp_loss_scaling_factor, 0.0
    sums = [(each[1:].sum(dtype=np.float64), each[2:].sum(dtype=np.float64)) for each in weights]
    all_main, all_ahead = np.sum(sums, axis=0)
    for tokens, each, (main, ahead) in zip(batch, weights, sums, strict=True):
        # Upstream's factor is main / ahead.
        own = main / max(ahead, 1 / _MASK_SCALE)
        config.mtp_loss_scaling_factor = factor * all_main / all_ahead / own if own else 0.0
        with _recorded(found):
            loss = predicting_loss(model, [tokens], [each])
            loss.backward()
        total += float(loss)
    config.mtp_loss_scaling_factor = factor
    mean = sum(loss * ahead for loss, (_, ahead) in zip(found, sums, strict=True)) / all_ahead
    return total, (mean,)


def _copies(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.double().numpy().copy() for name, tensor in tensors.items()}
