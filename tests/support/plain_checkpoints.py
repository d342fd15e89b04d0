"""Plain Megatron on CPU ranks, its checkpoints written and read by upstream's own code alone."""

from __future__ import annotations

import importlib
import queue
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from benchmarks.inputs import llama_shape
from benchmarks.plain_megatron import PlainMegatronSide
from benchmarks.workload import Workload
from hydraulis_patches.cpu_backend import CpuTorch
from tests.support.gloo_pool import RankPool
from tests.support.reference import local_latent_attention

CUDA_MODULES = (
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
)
"""Modules of upstream's own writer that name CUDA; ours uses none of them."""

PLAIN_WORKLOAD = Workload(
    shape=llama_shape(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=64,
    ),
    lengths=(17, 9, 6),
    num_micro_batches=4,
)


_FUSED_WITH = {
    "pre_mlp_layernorm.": "mlp.linear_fc1.",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.",
}


@dataclass(frozen=True, kw_only=True)
class NamedAsTransformerEngine(Workload):
    """Norms of layers with experts or latents are called as in upstream's layers of Transformer
    Engine."""

    def layers(self, num_layers: int) -> TransformerBlockSubmodules:
        """The workload's layers with other names."""
        layers = super().layers(num_layers)
        for layer in layers.layer_specs:
            names = layer.submodules.sharded_state_dict_keys_map
            if self.has_latents:
                names |= {norm: f"{linear}layer_norm_" for norm, linear in _FUSED_WITH.items()}
            else:
                names.pop("pre_mlp_layernorm.", None)
        return layers


_EXPERTS: dict[str, Any] = {
    "shape": PLAIN_WORKLOAD.shape,
    "lengths": PLAIN_WORKLOAD.lengths,
    "num_micro_batches": PLAIN_WORKLOAD.num_micro_batches,
    "variant": {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 16,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "moe_shared_expert_intermediate_size": 12,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
}
EXPERTS_WORKLOAD = Workload(**_EXPERTS)
NAMED_WORKLOAD = NamedAsTransformerEngine(**_EXPERTS)
_LATENTS: dict[str, Any] = {
    "shape": replace(PLAIN_WORKLOAD.shape, num_query_groups=4),
    "lengths": PLAIN_WORKLOAD.lengths,
    "num_micro_batches": PLAIN_WORKLOAD.num_micro_batches,
    "variant": {
        "q_lora_rank": 12,
        "kv_lora_rank": 9,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 6,
        "v_head_dim": 8,
        "rope_type": "yarn",
        "qk_layernorm": True,
    },
}
LATENTS_WORKLOAD = Workload(**_LATENTS)
NAMED_LATENTS_WORKLOAD = NamedAsTransformerEngine(**_LATENTS)


def on_plain_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`RankPool.run` in new processes, because plain Megatron changes them permanently."""
    pool = RankPool(num_ranks)
    try:
        return pool.run(function, *args)
    finally:
        pool.close()


def put_writer_on_cpu() -> None:
    """Let upstream's own writer of checkpoints run on a CPU, in the whole process."""
    torch.Tensor.cuda = torch.Tensor.cpu  # type: ignore[method-assign,assignment]
    for name in CUDA_MODULES:
        module = importlib.import_module(name)
        module.torch = CpuTorch()  # type: ignore[attr-defined]
    # Upstream would start a process for it, which a daemon may not.
    filesystem_async._results_queue = queue.Queue()  # type: ignore[assignment]


class PlainMegatron:
    """One rank; see `PlainMegatronSide`. It needs a separate process."""

    def __init__(
        self, *, tp: int, pp: int, ep: int = 1, workload: Workload = PLAIN_WORKLOAD
    ) -> None:
        put_writer_on_cpu()
        with local_latent_attention():
            self.side = PlainMegatronSide(
                workload, tp=tp, pp=pp, ep=ep, overlaps_gradients=False, has_fused_adamw=True
            )
        for module in self.side._model.modules():
            if isinstance(module, MLASelfAttention):
                module.register_forward_pre_hook(_without_cp_size, with_kwargs=True)

    def train(self, iterations: range) -> list[float]:
        """Losses."""
        return [self.side(iteration).loss for iteration in iterations]  # type: ignore[union-attr]

    def save(self, folder: Path, iteration: int, sharding_type: str, **metadata: Any) -> None:
        """Saves as upstream's loop does."""
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        chosen = self._metadata(sharding_type) | metadata
        state = self._state(chosen, is_loading=False)
        state["model"] |= extra_states_of_norms(torch.empty(0, dtype=torch.uint8))
        state |= {
            "args": Namespace(num_layers=2, hidden_size=32, consumed_train_samples=4 * iteration),
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "opt_param_scheduler": {"num_steps": 4 * iteration},
        }
        content = {key: value for key, value in chosen.items() if key != "dp_cp_group"}
        dist_checkpointing.save(state, str(folder), content_metadata=content)

    def load(self, folder: Path) -> None:
        """Loads as upstream's loop does, optimizer state included."""
        metadata = dist_checkpointing.load_content_metadata(str(folder))
        assert metadata is not None
        metadata["dp_cp_group"] = self.side._groups.dp_cp
        asked = self._state(metadata, is_loading=True) | {"norms": extra_states_of_norms(None)}
        loaded = dist_checkpointing.load(asked, str(folder))
        assert len(loaded["norms"]) == 1  # otherwise the load would have failed
        self.side._model.module.load_state_dict(loaded["model"])
        with ExitStack() as corrections:
            for optimizer in self.side._optimizer.chained_optimizers:
                corrections.enter_context(_torch_adamw_can_load(optimizer))
            self.side._optimizer.load_state_dict(loaded["optimizer"])

    def forget(self) -> None:
        """Zero the parameters, so that later values must have been loaded."""
        with torch.no_grad():
            for parameter in self.side._model.parameters():
                parameter.zero_()

    def _metadata(self, sharding_type: str) -> dict[str, Any]:
        return {
            "distrib_optim_sharding_type": sharding_type,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": self.side._groups.dp_cp,
        }

    def _state(self, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
        state: dict[str, Any] = {
            "model": self.side._model.module.sharded_state_dict(metadata=metadata)
        }
        state["optimizer"] = self.side._optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=metadata
        )
        return state


def extra_states_of_norms(data: torch.Tensor | None) -> dict[str, ShardedObject]:
    """The extra state of Transformer Engine's norms, here only of the last one."""
    key = "decoder.final_layernorm._extra_state"
    return {key: ShardedObject(key, data, (1,), (0,), replica_id=dist.get_rank())}


def _without_cp_size(module: Any, inputs: Any, named: dict[str, Any]) -> Any:
    """Upstream's latent attention refuses rows that say how many cp ranks they have."""
    row = replace(named["packed_seq_params"], local_cp_size=None)
    return inputs, named | {"packed_seq_params": row}


@contextmanager
def _torch_adamw_can_load(optimizer: Any) -> Iterator[None]:
    """Correct what upstream does for Transformer Engine's and apex's AdamW only.

    Of torch's it looks for every parameter's number of steps in the wrong place, and gives all of
    them one tensor, to which each update would add.
    """
    set_states = optimizer._set_main_param_and_optimizer_states
    optimizer._set_main_param_and_optimizer_states = lambda parameter, tensors: set_states(
        parameter, tensors | {"step": None}
    )
    yield
    optimizer._set_main_param_and_optimizer_states = set_states
    for state in optimizer.optimizer.state.values():
        state["step"] = state["step"].clone()
    for group in optimizer.param_groups:
        group["fused"] = True


def train_and_save(
    tp: int,
    pp: int,
    folder: str,
    num_iterations: int,
    sharding_type: str,
    workload: Workload = PLAIN_WORKLOAD,
    ep: int = 1,
) -> list[float]:
    """Every rank of plain Megatron returns losses, with two iterations after the save."""
    plain = PlainMegatron(tp=tp, pp=pp, ep=ep, workload=workload)
    losses = plain.train(range(num_iterations))
    plain.save(Path(folder), num_iterations, sharding_type)
    return losses + plain.train(range(num_iterations, num_iterations + 2))


def load_and_train(
    tp: int,
    pp: int,
    folder: str,
    again: str,
    iterations: range,
    workload: Workload = PLAIN_WORKLOAD,
    ep: int = 1,
) -> list[float]:
    """Every rank of plain Megatron loads, saves at once, and trains on."""
    plain = PlainMegatron(tp=tp, pp=pp, ep=ep, workload=workload)
    plain.train(range(1))  # so that there is state to replace
    plain.forget()
    plain.load(Path(folder))
    plain.save(Path(again), iterations.start, "fully_reshardable")
    return plain.train(iterations)
