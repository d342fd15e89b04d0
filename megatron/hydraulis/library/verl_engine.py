"""An engine for verl, whose trainers and workers then train through `library.engine.Engine`.

verl imports this module if VERL_USE_EXTERNAL_MODULES names it; nothing else does. To verl every
rank is a data-parallel rank: it brings its share of a batch and gets the outputs of that share,
wherever the plan computes them.

verl's loss is any function of the log-probabilities and entropies of a rank's whole share, see
`Engine.batch_loss`. The SFT loss is linear.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from peft import LoraConfig, TaskType
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.distillation.fsdp.losses import kl_divergence
from verl.utils import tensordict_utils as tu
from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.utils.py_functional import append_to_dict
from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.spec import ShardSpec
from verl.workers.engine.utils import hf_delta_export
from verl.workers.utils.losses import sft_loss

from megatron.hydraulis.checkpoint.hugging_face.export_hf import Content, export_checkpoint
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.library.engine import Engine
from megatron.hydraulis.library.hugging_face import HfShard
from megatron.hydraulis.lora import Lora
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.runtime.process_groups import on_all_ranks, on_rank_0

BACKEND = "hydraulis"
"""The name of the strategy in verl's configuration."""
SCHEDULE_FILE = "lr_schedule.json"
MAX_FILE_BYTES = 5 * 10**9
"""Tensors in one file of an exported Hugging Face folder."""

_DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float32", "fp32"), torch.float32),
}
_ONLY_FSDP = {
    "full_determinism": False,
    "mixed_precision": None,
    "offload_policy": False,
    "pad_to_length": False,
    "ulysses_sequence_parallel_size": 1,
}
"""Fields of FSDP's configuration that would be ignored, with the values that ask for nothing."""
_BALANCES_EXPERTS = ("--moe-aux-loss-coeff", "--moe-z-loss-coeff")
"""Options whose losses are divided by the sum of weights, while verl's loss has its own divisor."""
_NOT_IN_BATCHES = (
    "calculate_sum_pi_squared",
    "enable_routing_replay",
    "multi_modal_inputs",
    "routed_experts",
)
"""Keys that ask for more than log-probabilities and entropies of text."""


class _Strategy:
    """The field that chooses the engine, which is always `BACKEND`.

    verl sets it twice: to "fsdp" of its file of defaults, which has no effect, and then to the
    strategy of the actor or critic. Raises ConfigurationError if that is another one: verl would
    train with its own engine, which ignores the pool.
    """

    def __get__(self, config: Any, owner: Any = None) -> str:
        return BACKEND

    def __set__(self, config: Any, strategy: str) -> None:
        if "strategy" in vars(config) and strategy != BACKEND:
            raise ConfigurationError(
                f"the configuration with a pool is that of verl's engine '{BACKEND}' but its actor "
                f"or critic has strategy={strategy}; set strategy={BACKEND} there"
            )
        vars(config)["strategy"] = BACKEND


@dataclass
class HydraulisEngineConfig(FSDPEngineConfig):
    """FSDP's configuration, of which dtype, offloading and ``forward_only`` apply, and the pool.

    Raises ConfigurationError for what the engine cannot do.
    """

    strategy: str = cast(str, _Strategy())
    pool: Any = None
    """Pool for `Engine.from_hf`: a strategy, several, or the path of a pool file."""
    cost_profile: str | None = None
    max_tokens_per_micro_batch: int | None = None
    options: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super(FSDPEngineConfig, self).__post_init__()
        if not self.pool:
            raise ConfigurationError(
                f"verl's engine '{BACKEND}' needs a pool but has {self.pool!r}; set pool in its "
                "configuration, such as 'tp2+2*tp1'"
            )
        if self.dtype not in _DTYPES:
            raise ConfigurationError(
                f"parameters are bf16 or fp32 but dtype is {self.dtype!r}; set dtype=bfloat16"
            )
        ignored = [
            f"{name}={self[name]}" for name, none in _ONLY_FSDP.items() if self[name] != none
        ]
        if self.router_replay.mode != "disabled":
            ignored.append(f"router_replay.mode={self.router_replay.mode}")
        if self.qat.enable:
            ignored.append("qat.enable=True")
        if ignored:
            raise ConfigurationError(
                f"verl's engine '{BACKEND}' cannot do all that FSDP's can, but has "
                f"{', '.join(ignored)}; leave that out"
            )
        given = {option.partition("=")[0] for option in self.options}
        balancing = [name for name in _BALANCES_EXPERTS if name in given]
        if balancing:
            raise ConfigurationError(
                "losses that balance experts are divided by the sum of the weights, but verl "
                f"divides its loss itself and options has {', '.join(balancing)}; leave that "
                "out, and balance by --moe-router-enable-expert-bias"
            )


@EngineRegistry.register(model_type="language_model", backend=BACKEND, device=["cuda", "cpu"])
@EngineRegistry.register(model_type="value_model", backend=BACKEND, device=["cuda", "cpu"])
class HydraulisEngine(BaseEngine):
    """verl's interface of an `Engine`. All methods are collective.

    Raises ConfigurationError for a model, an optimizer or contents of checkpoints that `Engine`
    has not.
    """

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: HydraulisEngineConfig,
        optimizer_config: FSDPOptimizerConfig,
        checkpoint_config: Any,
    ) -> None:
        _check_model(model_config)
        if not engine_config.forward_only:
            _check_training(optimizer_config, checkpoint_config)
        self.mode: str | None = None
        self._model_config = model_config
        self._config = engine_config
        self._optimizer_config = optimizer_config
        self._checkpoints = BaseCheckpointManager(None, None, checkpoint_config=checkpoint_config)
        self._engine: Engine | None = None
        self._uses_adapters = True
        self._delta_shard_snap: dict[str, Tensor] = {}  # filled by BaseEngine

    @property
    def _is_critic(self) -> bool:
        return self._model_config.model_type == "value_model"

    @property
    def _lora(self) -> Lora | None:
        """The adapters of an actor."""
        config = self._model_config
        if config.lora_rank <= 0 or self._config.forward_only:
            return None
        targets = config.target_modules
        names = (targets,) if isinstance(targets, str) else tuple(targets)
        return Lora(config.lora_rank, float(config.lora_alpha), names)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Forward passes are those of the model without adapters: a reference policy."""
        self._uses_adapters = False
        try:
            yield
        finally:
            self._uses_adapters = True

    @property
    def is_param_offload_enabled(self) -> bool:
        return self._config.param_offload

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return self._config.optimizer_offload

    def initialize(self) -> None:
        """Build the engine from the model's folder; again if there is one."""
        if self._engine is not None:
            self._engine.close()
        if "RAY_LOCAL_WORLD_SIZE" in os.environ:  # verl gives Ray's workers a LOCAL_WORLD_SIZE of 1
            os.environ["LOCAL_WORLD_SIZE"] = os.environ["RAY_LOCAL_WORLD_SIZE"]
        self._engine = Engine.from_hf(
            self._model_config.local_path,
            pool=self._config.pool,
            optimizer=_settings(self._config, self._optimizer_config),
            cost_profile=self._config.cost_profile,
            dtype=_DTYPES[self._config.dtype],
            max_tokens_per_micro_batch=self._config.max_tokens_per_micro_batch,
            value_head=self._is_critic,
            lora=self._lora,
            options=self._config.options,
        )
        if not self._config.forward_only:
            self._schedule = _schedule(self._optimizer_config)
        self.engine.offload(
            parameters=self.is_param_offload_enabled, optimizer=self.is_optimizer_offload_enabled
        )

    @property
    def engine(self) -> Engine:
        """Built by `initialize`."""
        assert self._engine is not None, "verl calls initialize first"
        return self._engine

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return _Mode(self, "eval", **kwargs)

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size()

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def forward_backward_batch(
        self,
        data: TensorDict,
        loss_function: Callable[..., Any] | None,
        forward_only: bool = False,
    ) -> dict[str, Any]:
        """See `BaseEngine`. The loss is called once, with this rank's share as one micro-batch.

        Raises ConfigurationError for batches with more than text. An error in the loss is raised on
        every rank, but a loss with collectives must not fail on one rank alone.
        """
        temperature = on_all_ranks(lambda: _checked_temperature(data), "verl's batch cannot be run")
        tokens = [row.numpy() for row in data["input_ids"].cpu().unbind()]
        batch = self.engine.plan(tokens, scatter=True)
        if loss_function is not None:
            self._count_tokens(data)  # now, as a copy of what Ray brings is locked
        data = data.to(get_device_id())
        offsets = data["input_ids"].offsets()
        names = ["values" if self._is_critic else "log_probs"]
        if tu.get_non_tensor_data(data, "calculate_entropy", default=False):
            names.append("entropy")
        if tu.get_non_tensor_data(data, "distillation_use_topk", default=False):
            ids = on_all_ranks(lambda: data["teacher_ids"].cpu().unbind(), "there is no teacher")
            batch = batch.with_inputs(token_ids=[row.roll(1, dims=0) for row in ids])
            names.append("token_log_probs")
            if tu.get_non_tensor_data(data, "distillation_only", default=False):
                names.remove("log_probs")
        is_linear = not forward_only and _is_linear(loss_function)
        model_output: dict[str, Tensor] = {}
        metrics: dict[str, Any] = {}

        def loss_of(outputs: Mapping[str, list[Tensor]]) -> Tensor:
            for name, rows in outputs.items():
                # verl's entry t is about predicting token t + 1.
                values = torch.cat([row.roll(-1, dims=0) for row in rows])
                of_name = {name: values}
                if name == "token_log_probs":
                    of_name = _distillation(values, data, loss_function)
                for key, value in of_name.items():
                    model_output[key] = torch.nested.nested_tensor_from_jagged(value, offsets)
            if loss_function is None:
                return torch.ones(())
            value, found = loss_function(
                model_output=dict(model_output), data=data, dp_group=self.get_data_parallel_group()
            )
            metrics.update(found)
            return value

        if forward_only:
            outputs = self.engine.forward(
                batch, names, temperature=temperature, adapters=self._uses_adapters
            )
            loss = on_all_ranks(lambda: loss_of(outputs).item(), "verl's loss cannot be computed")
        else:
            loss = self.engine.batch_loss(
                batch,
                lambda outputs: loss_of(outputs) / self.get_data_parallel_size(),
                names,
                temperature=temperature,
                is_linear=is_linear,
            )
        if is_linear:  # zeros stood for outputs
            model_output.clear()
        lists: dict[str, Any] = {}  # verl aggregates lists of micro-batches' metrics
        append_to_dict(lists, metrics)
        model_output = {name: values.detach() for name, values in model_output.items()}
        return {"model_output": model_output, "loss": [loss], "metrics": lists}

    def _count_tokens(self, data: TensorDict) -> None:
        """Give the loss what it divides by."""
        num_tokens = data["loss_mask"].sum().to(get_device_id())
        dist.all_reduce(num_tokens)
        tu.assign_non_tensor(
            data, batch_num_tokens=num_tokens.item(), dp_size=self.get_data_parallel_size()
        )

    def optimizer_zero_grad(self) -> None:
        self.engine.discard_gradients()

    def optimizer_step(self) -> float:
        """Norm of the gradient before clipping; NaN where nothing could be updated."""
        norm = self.engine.optim_step(lr=self._schedule.get_last_lr()[0])
        self._schedule.optimizer.step()  # has no gradients; its schedule wants to be behind
        return math.nan if norm is None else norm

    def lr_scheduler_step(self) -> float:
        """The learning rate of the next update."""
        self._schedule.step()
        return self._schedule.get_last_lr()[0]

    def get_per_tensor_param(
        self, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """See `Engine.hf_tensors`. Unless ``model.lora.merge`` is set, adapters and their
        configuration are apart from the model, which a rollout engine needs once."""
        self.engine.onload(optimizer=False)
        lora = self.engine.runtime.definition.lora
        if lora is None or self._model_config.lora.get("merge", False):
            return self.engine.hf_tensors(), None
        config = LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=lora.rank,
            lora_alpha=self._model_config.lora_alpha,
            target_modules=list(lora.targets),
            bias="none",
        )
        if base_sync_done:
            return self.engine.hf_tensors("adapters"), config.to_dict()
        base = self.engine.hf_tensors("base")
        return ((replace_lora_wrapper(name, config), tensor) for name, tensor in base), (
            config.to_dict()
        )

    def get_per_tensor_param_shard(
        self, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, Tensor, ShardSpec]], None]:
        """See `Engine.hf_shards`; in bf16, as verl's other engines do."""
        self.engine.onload(optimizer=False)
        return (
            (
                shard.name,
                shard.values.bfloat16(),
                ShardSpec(shard.shape, place=shard, gather_group=dist.group.WORLD),
            )
            for shard in self.engine.hf_shards()
        ), None

    def get_per_tensor_param_delta_shard(
        self, **kwargs: Any
    ) -> tuple[Iterator[tuple[Any, ...]], None]:
        """What has changed since the last call, or since `BaseEngine.prime_delta_snapshots`, for
        verl's checkpoint engine ``delta_sharded``."""

        def changes(
            _: str, spec: ShardSpec, shard: HfShard, indices: Tensor, values: Tensor
        ) -> Any:
            slots, dtype = [(shard.name, shard.shape)], str(values.dtype).removeprefix("torch.")
            places = shard.places(indices).int()
            return slots, dtype, torch.tensor([len(places)]), places, values

        shards, _ = self.get_per_tensor_param_shard()
        return hf_delta_export(shards, self._delta_shard_snap, changes), None

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Load onto verl's device, or offload; memory for gradients comes and goes by itself."""
        super().to(device, model=model, optimizer=optimizer, grad=grad)
        move = self.engine.onload if device == get_device_name() else self.engine.offload
        move(parameters=model, optimizer=optimizer)

    @contextmanager
    def _onloaded(self) -> Iterator[None]:
        """Everything is on the device, and goes back unless there is an error."""
        offloaded = self.engine.runtime.offloaded
        self.engine.onload()
        yield
        self.engine.offload(
            parameters="parameters" in offloaded, optimizer="optimizer" in offloaded
        )

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Save with `Engine.save`, and the model for transformers if ``hf_model`` is asked for."""
        _check_local(hdfs_path)
        folder, manager = Path(local_path), self._checkpoints
        what = f"{folder} cannot be saved"
        on_rank_0(lambda: manager.ensure_checkpoint_capacity(max_ckpt_to_keep), what)

        def complete() -> None:
            state = {"num_steps": self._schedule.last_epoch}
            (folder / SCHEDULE_FILE).write_text(json.dumps(state))
            if manager.should_save_hf_model:
                export_checkpoint(
                    folder,
                    folder / "huggingface",
                    max_file_bytes=MAX_FILE_BYTES,
                    checks_content=False,
                    like=Path(self._model_config.local_path),
                    content=Content.MODEL if self._lora is None else Content.MERGED,
                )
            manager.register_checkpoint(local_path, max_ckpt_to_keep)

        with self._onloaded():
            self.engine.save(folder)
        on_rank_0(complete, what)

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **kwargs: Any,
    ) -> None:
        """Load what `save_checkpoint` has saved; the folder stays."""
        _check_local(hdfs_path)
        folder = Path(local_path)
        with self._onloaded():
            self.engine.load(folder)
        state = on_rank_0(
            lambda: json.loads((folder / SCHEDULE_FILE).read_text()), f"{folder} cannot be loaded"
        )
        self._schedule = _schedule(self._optimizer_config, num_steps=state["num_steps"])


class _Mode(BaseEngineCtx):
    """Loads and offloads the engine around its use, as verl's others do."""

    def __enter__(self) -> None:
        super().__enter__()
        self.engine.engine.runtime.set_training(self.mode == "train")

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:  # other ranks may be elsewhere
            self.engine.mode = None
            return
        if self.mode == "train" and self.zero_grad_on_exit:
            self.engine.optimizer_zero_grad()
        super().__exit__(kind, error, traceback)


def _is_linear(loss_function: Any) -> bool:
    """Only verl's loss of SFT is linear; verl passes it with its configuration bound."""
    return getattr(loss_function, "func", loss_function) is sft_loss


def _distillation(student: Tensor, data: TensorDict, loss_function: Any) -> dict[str, Tensor]:
    """What verl's loss of distillation reads for each token, by log-probabilities of the teacher's
    top k tokens, (tokens, k). The overlap with the student's own top k would take all logits."""
    teacher = data["teacher_logprobs"].values().to(student.dtype)
    masses = {"student_mass": student.detach().exp().sum(-1), "teacher_mass": teacher.exp().sum(-1)}
    lowest = loss_function.keywords["distillation_config"].distillation_loss.log_prob_min_clamp
    if lowest is not None:
        student, teacher = student.clamp_min(lowest), teacher.clamp_min(lowest)
    return {"distillation_losses": kl_divergence(log_q=student, log_p=teacher), **masses}


def _settings(
    config: HydraulisEngineConfig, optimizer: FSDPOptimizerConfig
) -> AdamWSettings | None:
    if config.forward_only:
        return None
    return AdamWSettings(
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        beta1=optimizer.betas[0],
        beta2=optimizer.betas[1],
        clip_grad=optimizer.clip_grad,
    )


def _schedule(config: FSDPOptimizerConfig, num_steps: int = 0) -> Any:
    """verl's schedule after some steps; its optimizer only holds the learning rate."""
    last_epoch = num_steps - 1  # torch makes a first step at once
    holder = torch.optim.SGD([{"params": [torch.zeros(1)], "initial_lr": config.lr}], lr=config.lr)
    num_warmup_steps = config.lr_warmup_steps
    if num_warmup_steps is None or num_warmup_steps <= 0:
        num_warmup_steps = int(config.lr_warmup_steps_ratio * config.total_training_steps)
    if config.lr_scheduler_type == "constant":
        return get_constant_schedule_with_warmup(holder, num_warmup_steps, last_epoch)
    return get_cosine_schedule_with_warmup(
        holder,
        num_warmup_steps,
        config.total_training_steps,
        min_lr_ratio=config.min_lr_ratio,
        num_cycles=config.num_cycles,
        last_epoch=last_epoch,
        zero_indexed_step=config.zero_indexed_step,
    )


def _check_model(config: HFModelConfig) -> None:
    if not config.use_remove_padding:
        raise ConfigurationError(
            f"verl's engine '{BACKEND}' packs sequences without padding but model."
            "use_remove_padding is False; set it to True"
        )
    found = [
        name
        for name, is_set in {
            "lora.rank": config.lora.get("rank", 0) > 0,  # Megatron's, as lora_rank is FSDP's
            "target_parameters": bool(config.target_parameters),
            "exclude_modules": bool(config.exclude_modules),
            "lora_adapter_path": config.lora_adapter_path is not None,
            "mtp.enable": config.mtp.enable,
            "override_config": bool({*config.override_config} - {"attn_implementation"}),
        }.items()
        if is_set
    ]
    if found:
        raise ConfigurationError(
            f"verl's engine '{BACKEND}' trains the model in its folder, or adapters by lora_rank, "
            f"lora_alpha and target_modules, but model sets {', '.join(found)}; leave that out"
        )


def _check_training(optimizer: Any, checkpoint: Any) -> None:
    if not isinstance(optimizer, FSDPOptimizerConfig):
        raise ConfigurationError(
            "optim is verl's FSDPOptimizerConfig, whose learning-rate schedules apply, but is "
            f"{type(optimizer).__name__}; leave optim=fsdp"
        )
    if optimizer.optimizer != "AdamW" or optimizer.override_optimizer_config:
        raise ConfigurationError(
            f"the optimizer is AdamW but optim has optimizer={optimizer.optimizer} and "
            f"override_optimizer_config={optimizer.override_optimizer_config}; leave both out"
        )
    for name in ("save_contents", "load_contents"):
        contents = set(checkpoint[name])
        if not {"model", "optimizer", "extra"} <= contents:
            raise ConfigurationError(
                "a checkpoint has model, optimizer and extra but checkpoint."
                f"{name} is {sorted(contents)}; add what is missing"
            )


def _check_local(hdfs_path: str | None) -> None:
    if hdfs_path is not None:
        raise ConfigurationError(
            f"checkpoints are in a folder of a file system but hdfs_path is {hdfs_path}; leave it "
            "out"
        )


def _checked_temperature(data: TensorDict) -> float:
    """The temperature of a batch that can be run."""
    pad_mode = tu.get_non_tensor_data(data, "pad_mode", default=DatasetPadMode.NO_PADDING)
    if pad_mode != DatasetPadMode.NO_PADDING or not data["input_ids"].is_nested:
        raise ConfigurationError(
            f"a batch has nested input_ids without padding but its pad_mode is {pad_mode}; set "
            "data.pad_mode=no_padding"
        )
    wanted = [name for name in _NOT_IN_BATCHES if _is_given(tu.get(data, name))]
    if wanted:
        raise ConfigurationError(
            "a batch is text, of which log-probabilities and entropies are computed, but it has "
            f"{', '.join(wanted)}; use another engine for that"
        )
    temperatures = torch.as_tensor(tu.get(data, "temperature", default=1.0)).unique().tolist()
    if len(temperatures) != 1:
        raise ConfigurationError(
            f"all sequences of a batch have one temperature but there are {temperatures}; sample "
            "with one"
        )
    return float(temperatures[0])


def _is_given(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    return any(value) if isinstance(value, list) else bool(value)
