"""Plain megatron-core: its DDP, distributed optimizer (ZeRO-1), schedules and global groups."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module

from benchmarks.step_report import StepClock, StepReport, Traffic, finish_device
from benchmarks.workload import WEIGHT_SEED, Workload
from hydraulis_patches.cpu_backend import CpuTorch
from megatron.hydraulis.runtime.catalogue import CataloguedParameter, catalogue, initial_rows
from megatron.hydraulis.runtime.executor import make_forward_step

CUDA_MODULES = (
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.distributed.param_and_grad_buffer",
    "megatron.core.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.optimizer",
    "megatron.core.parallel_state",
)
"""Modules of upstream's DDP and optimizer that name CUDA; our engine uses none of them."""


class PlainMegatronSide:
    """One rank of plain megatron-core; callable with the number of an iteration.

    Called with None it returns its `Traffic` instead. Changes upstream's modules and
    `torch.Tensor.type` in the whole process, so it needs a separate one.

    Args:
        workload: model, optimizer and batches.
        tp: tensor-parallel degree.
        pp: pipeline-parallel degree.
        ep: expert-parallel degree, of a model with experts.
        overlaps_gradients: upstream's ``--overlap-grad-reduce``; on CUDA also
            ``--overlap-param-gather``.
        has_fused_adamw: torch's fused kernel, as our side has it; otherwise torch's default loop,
            which upstream uses without Transformer Engine and apex.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        tp: int,
        pp: int,
        ep: int = 1,
        overlaps_gradients: bool,
        has_fused_adamw: bool,
    ) -> None:
        has_cuda = torch.cuda.is_available()
        if not has_cuda:
            _put_upstream_on_cpu()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            create_gloo_process_groups=not has_cuda,
        )
        self._workload = workload
        self._clock = StepClock()
        self._groups = ProcessGroupCollection.use_mpu_process_groups()
        self._forward_step = make_forward_step()
        self._schedule = get_forward_backward_func()
        model = self._build_model(tp, pp, ep)
        _set_initial_weights(model, workload)
        if has_cuda:
            model = Float16Module(model.config, model.cuda())
        self._model = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                overlap_grad_reduce=overlaps_gradients,
                overlap_param_gather=overlaps_gradients and has_cuda,
            ),
            model,
        )
        self._optimizer = self._build_optimizer(has_fused_adamw)
        config: Any = model.config
        config.finalize_model_grads_func = self._clock.timed("scatter", finalize_model_grads)
        config.grad_scale_func = self._optimizer.scale_loss
        if overlaps_gradients:
            config.no_sync_func = self._model.no_sync
            if has_cuda:
                config.grad_sync_func = self._model.start_grad_sync
                config.param_sync_func = self._model.start_param_sync
        for group in [*self._model.bucket_groups, *self._model.expert_parallel_bucket_groups]:
            self._clock.time_method(group, "start_param_sync", "gather")

    def __call__(self, iteration: int | None) -> StepReport | Traffic:
        if iteration is None:
            return self._traffic()
        workload, clock = self._workload, self._clock
        data_parallel = self._groups.dp_cp
        batches = workload.micro_batches(iteration, data_parallel.rank(), data_parallel.size())
        dist.barrier()
        clock.start_step()
        # The order of megatron.training's train_step.
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        with clock.measure("compute"):
            reports = self._schedule(
                forward_step_func=self._forward_step,
                data_iterator=iter(batches),
                model=[self._model],
                num_microbatches=len(batches),
                seq_length=workload.num_tokens_per_micro_batch,
                micro_batch_size=1,
                forward_only=False,
            )
        with clock.measure("optimizer"):
            _, norm, _ = self._optimizer.step()
        loss = math.nan
        if reports:
            total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
            dist.all_reduce(total, group=data_parallel)
            loss = (total[0] / total[1]).item()
        finish_device()
        return clock.report(loss=loss, gradient_norm=float(norm))

    def _build_model(self, tp: int, pp: int, ep: int) -> torch.nn.Module:
        workload = self._workload
        stage = self._groups.pp.rank()
        return GPTModel(
            config=workload.transformer(tp=tp, pp=pp, ep=ep),
            transformer_layer_spec=workload.layers(workload.shape.num_layers // pp),
            vocab_size=workload.shape.vocab_size,
            max_sequence_length=max(workload.lengths),
            pre_process=stage == 0,
            post_process=stage == pp - 1,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            pg_collection=self._groups,
        )

    def _build_optimizer(self, has_fused_adamw: bool) -> Any:
        settings = self._workload.optimizer
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.min_lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.eps,
                clip_grad=settings.clip_grad,
                use_distributed_optimizer=True,
                params_dtype=self._workload.dtype,
                bf16=self._workload.dtype == torch.bfloat16,
            ),
            [self._model],
            use_gloo_process_groups=not torch.cuda.is_available(),
        )
        for group in optimizer.param_groups:
            group["fused"] = has_fused_adamw
            # As upstream's scheduler does before the first step; the optimizer would decay norms
            # too.
            group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        return optimizer

    def _traffic(self) -> Traffic:
        """ZeRO-1's by its definition, with the padding of the buffers."""
        size = self._groups.dp_cp.size()
        buffers = self._model.buffers
        received = sum(buffer.numel for buffer in buffers) * (size - 1) // size
        return Traffic(
            parameters_bytes=sum(p.numel() * p.element_size() for p in self._model.parameters()),
            gather_bytes=received * torch.float32.itemsize,
            scatter_bytes=received * torch.float32.itemsize,
        )


def _put_upstream_on_cpu() -> None:
    """The project's CPU backend for the modules that only upstream's optimizer needs."""
    for name in CUDA_MODULES:
        module = importlib.import_module(name)
        module.torch = CpuTorch()  # type: ignore[attr-defined]
    original = torch.Tensor.type

    def cuda_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Upstream's optimizer compares with "torch.cuda.FloatTensor", literally.
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    torch.Tensor.type = cuda_name  # type: ignore[method-assign,assignment]


def _set_initial_weights(model: torch.nn.Module, workload: Workload) -> None:
    """The initial weights of our engine, cut for this rank."""
    entries = {entry.spec.name: entry for entry in catalogue(workload.definition())}
    first_layer = 0
    num_layers = len(model.decoder.layers)  # type: ignore[union-attr,arg-type]
    if num_layers:
        first_layer = model.decoder.layers[0].layer_number - 1  # type: ignore[union-attr,index]
    tp_group = parallel_state.get_tensor_model_parallel_group()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            if parts[:2] == ["decoder", "layers"]:
                parts[2] = str(int(parts[2]) + first_layer)
            if "local_experts" in parts:
                experts = model.decoder.layers[0].mlp.experts  # type: ignore[union-attr,index]
                at = parts.index("local_experts") + 1
                parts[at] = str(
                    int(parts[at]) + experts.ep_group.rank() * len(experts.local_experts)
                )
            entry = entries[".".join(parts)]
            parameter.copy_(_local_value(entry, tp_group.rank(), tp_group.size()))


def _local_value(entry: CataloguedParameter, tp_rank: int, tp: int) -> torch.Tensor:
    spec = entry.spec
    whole = initial_rows(entry, WEIGHT_SEED, 0, spec.shape[0], torch.float32).reshape(spec.shape)
    if spec.tp_dim is None:
        return whole
    parts = whole.split(spec.parts or spec.shape[spec.tp_dim], dim=spec.tp_dim)
    return torch.cat([part.chunk(tp, dim=spec.tp_dim)[tp_rank] for part in parts], spec.tp_dim)
