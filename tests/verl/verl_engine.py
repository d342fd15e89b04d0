"""verl's SFT trainer and actor worker train with our engine as one process of transformers does.

``make verl-test`` installs verl into an environment and runs this file; the suite does not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import peft
import pytest
import ray
import torch
import torch.distributed as dist
from hydra.errors import InstantiationException
from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer.config import CheckpointConfig
from verl.trainer.sft_trainer import SFTTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.config.engine import EngineRouterReplayConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from megatron.hydraulis.errors import CheckpointError, ConfigurationError
from megatron.hydraulis.library.verl_engine import HydraulisEngineConfig
from tests.support.gloo_pool import pool_of
from tests.verl.cpu_platform import average_with_gloo
from tests.verl.one_process import (
    LR,
    NUM_RANKS,
    TEMPERATURE,
    TIMEOUT_S,
    TOLERANCE,
    WEIGHT_DECAY,
    Reference,
    Tensors,
    actor_config,
    composed,
    engine_overrides,
    rollout,
    train_once,
    use_as_verl_rank,
)

CLIP_RANGE = 0.5
NUM_VALIDATION_BATCHES = 2
OUTPUTS = ("log_probs", "entropy")

pytestmark = pytest.mark.timeout(2 * TIMEOUT_S)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "chats.parquet"
    rows = [
        [
            {"role": "user", "content": f"What is {i} times {i}?"},
            {"role": "assistant", "content": "Count. " * i + f"It is {i * i}."},
        ]
        for i in range(16)
    ]
    pandas.DataFrame({"messages": rows}).to_parquet(file)
    return file


# --- on every rank ---


def run_sft(
    folder: Path, chats: Path, saved: Path, num_steps: int, lora_rank: int = 0
) -> tuple[list[Any], list[Any], Tensors, Tensors]:
    """Batches of this rank, metrics of each, of steps and then of the validation, the model at the
    end, merged with its adapters, and the adapters of the beginning."""
    use_as_verl_rank()
    config = composed(
        "sft_trainer_engine",
        [
            *engine_overrides("engine", "4*tp1,tp2+2*tp1"),
            *(f"model.path={folder}", f"model.lora_rank={lora_rank}", "model.lora_alpha=8"),
            *(f"data.train_files={chats}", f"data.val_files={chats}", "data.train_batch_size=8"),
            *("data.num_workers=0", "data.max_length=256"),
            *(f"optim.lr={LR}", f"optim.weight_decay={WEIGHT_DECAY}", "optim.lr_warmup_steps=2"),
            *("trainer.total_epochs=2", f"trainer.total_training_steps={num_steps}"),
            *("trainer.logger=[]", "trainer.save_freq=1", "trainer.device=cpu"),
            *("trainer.max_ckpt_to_keep=1", f"trainer.default_local_dir={saved}"),
            "checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        ],
    )
    trainer = SFTTrainer(config)
    batches, metrics = [], []
    client = trainer.training_client

    def recorded(call: Callable[[TensorDict], TensorDict], data: TensorDict) -> TensorDict:
        batches.append([(data["input_ids"][i], data["loss_mask"][i]) for i in range(len(data))])
        output = call(data)
        metrics.append(dict(tu.get(output, "metrics")))
        return output

    client.train_batch = partial(recorded, client.train_batch)
    client.infer_batch = partial(recorded, client.infer_batch)
    engine = trainer.engine.engine
    adapters = dict(engine.hf_tensors("adapters")) if lora_rank else {}
    trainer.fit()
    tensors = dict(engine.hf_tensors())
    engine.close()
    return batches, metrics, tensors, adapters


def run_actor(folder: Path, vocab_size: int) -> tuple[Any, ...]:
    """Outputs of this rank's responses by the actor and by the reference policy, metrics of each
    mini-batch, and the model after the update."""
    use_as_verl_rank()
    config = actor_config(folder)
    actor, policy = (ActorRolloutRefWorker(config, role=role) for role in ("actor", "ref"))
    own = rollout(vocab_size)[2 * dist.get_rank() :][:2]
    outputs = []
    for worker, compute in (
        (actor, actor.compute_log_prob),
        (policy, policy.compute_ref_log_prob),
    ):
        worker.init_model()
        data = left_right_2_no_padding(own.clone())
        tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
        found = compute(data)
        outputs.append({name: no_padding_2_padding(found[name], data) for name in OUTPUTS})
    policy.ref.engine.engine.close()
    engine = actor.actor.engine
    assert engine.engine.runtime.offloaded == {"moments"}
    data = left_right_2_no_padding(own.clone())
    train_once(data, 4, calculate_entropy=True, compute_loss=True)
    metrics = dict(tu.get(actor.update_actor(data), "metrics"))
    engine.to("another device")
    tensors = dict(engine.get_per_tensor_param()[0])
    assert engine.engine.runtime.offloaded == {"moments"}
    engine.engine.close()
    return outputs, metrics, tensors


def run_adapters(folder: Path, vocab_size: int) -> tuple[Any, ...]:
    """Log-probabilities with adapters and without, after an update, and what a rollout engine
    gets: adapters, the model below them, and both merged."""
    use_as_verl_rank()
    config = actor_config(folder)
    with open_dict(config):
        config.model.lora_rank, config.model.lora_alpha = 4, 8
    actor = ActorRolloutRefWorker(config, role="actor")
    actor.init_model()
    own = rollout(vocab_size)[2 * dist.get_rank() :][:2]
    data = left_right_2_no_padding(own.clone())
    train_once(data, 8, calculate_entropy=True, compute_loss=True)
    engine = actor.actor.engine
    first = dict(engine.get_per_tensor_param(base_sync_done=True)[0])
    metrics = dict(tu.get(actor.update_actor(data), "metrics"))
    outputs = []
    for no_adapter in (False, True):
        data = left_right_2_no_padding(own.clone())
        tu.assign_non_tensor(
            data, calculate_entropy=False, compute_loss=False, no_lora_adapter=no_adapter
        )
        found = actor.compute_log_prob(data)
        outputs.append(no_padding_2_padding(found["log_probs"], data))
    adapters, peft_config = engine.get_per_tensor_param(base_sync_done=True)
    exported = [first, dict(adapters), dict(engine.get_per_tensor_param()[0])]
    engine._model_config.lora["merge"] = True
    exported.append(dict(engine.get_per_tensor_param()[0]))
    engine.engine.close()
    return outputs, metrics, exported, peft_config


def critic_config(folder: Path) -> Any:
    return omega_conf_to_dataclass(
        composed(
            "ppo_trainer",
            [
                *engine_overrides("critic.fsdp", "cp2+pp2"),
                *("critic.strategy=hydraulis", f"critic.model.path={folder}"),
                *("critic.ppo_mini_batch_size=4", "critic.use_dynamic_bsz=True"),
                *(f"critic.optim.lr={LR}", f"critic.optim.weight_decay={WEIGHT_DECAY}"),
                *(f"critic.cliprange_value={CLIP_RANGE}", "critic.fsdp.param_offload=true"),
            ],
        ).critic
    )


def run_critic(folder: Path, vocab_size: int) -> tuple[Tensor, Any, Tensors]:
    """Values of this rank's responses, metrics of each mini-batch, and the model at the end."""
    use_as_verl_rank()
    config = critic_config(folder)
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model",
            model_config=config.model,
            engine_config=config.engine,
            optimizer_config=config.optim,
            checkpoint_config=config.checkpoint,
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(value_loss, config=config))
    data = left_right_2_no_padding(rollout(vocab_size)[2 * dist.get_rank() :][:2])
    tu.assign_non_tensor(data, compute_loss=False)
    values = no_padding_2_padding(worker.infer_batch(data)["values"], data)
    data = left_right_2_no_padding(rollout(vocab_size)[2 * dist.get_rank() :][:2])
    train_once(data, 4)
    metrics = dict(tu.get(worker.train_mini_batch(data), "metrics"))
    tensors = dict(worker.engine.get_per_tensor_param()[0])
    worker.engine.engine.close()
    return values, metrics, tensors


def loss_of_step(reference: Reference, ranks: list[Any], step: int) -> Tensor:
    """The reference's, for what all ranks had in a step."""
    rows = [row for batches, *_ in ranks for row in batches[step]]
    tokens, masks = zip(*rows, strict=True)
    mask = torch.nested.as_nested_tensor(list(masks), layout=torch.jagged)
    data = tu.get_tensordict(
        {"loss_mask": mask}, {"dp_size": 1, "batch_num_tokens": int(mask.values().sum())}
    )
    loss, _ = sft_loss(None, reference.outputs(list(tokens)), data)
    return loss


def test_the_sft_trainer_trains_adapters_as_peft(folder: Path, chats: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    ranks = pool_of(NUM_RANKS).run(run_sft, folder, chats, saved, 3, 4, timeout_s=TIMEOUT_S)
    reference = Reference(folder)
    reference.adapt(ranks[0][3], peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    lr = 0.0
    for step, metrics in enumerate(ranks[0][1][:3]):
        loss = loss_of_step(reference, ranks, step)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
        assert metrics["grad_norm"] == pytest.approx(reference.update(loss, lr), rel=TOLERANCE)
        lr = metrics["lr"]
    reference.model = reference.model.merge_and_unload()
    for _, _, tensors, _ in ranks:
        reference.assert_is(tensors)
    exported = saved / "global_step_3" / "huggingface"
    model: Any = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    reference.assert_is(model.state_dict())


def test_the_sft_trainer_trains_as_one_process(folder: Path, chats: Path, tmp_path: Path) -> None:
    """Also after it has resumed from its checkpoint."""
    pool, saved = pool_of(NUM_RANKS), tmp_path / "saved"
    reference = Reference(folder)
    lr = 0.0  # the warm-up's first
    for last_step, num_steps in ((3, 3), (4, 1)):
        ranks = pool.run(run_sft, folder, chats, saved, last_step, timeout_s=TIMEOUT_S)
        for step, metrics in enumerate(ranks[0][1]):
            loss = loss_of_step(reference, ranks, step)
            assert metrics["loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
            if step < num_steps:
                norm = reference.update(loss, lr)
                assert metrics["grad_norm"] == pytest.approx(norm, rel=TOLERANCE)
                lr = metrics["lr"]
        for _, metrics, tensors, _ in ranks:
            assert len(metrics) == num_steps + NUM_VALIDATION_BATCHES
            assert metrics[-1]["loss"] == ranks[0][1][-1]["loss"]
            reference.assert_is(tensors)
    kept = sorted(saved.glob("global_step_*"))
    assert [each.name for each in kept] == ["global_step_3", "global_step_4"]  # one of each run
    exported = AutoModelForCausalLM.from_pretrained(kept[-1] / "huggingface", dtype=torch.float32)
    reference.assert_is(exported.state_dict())


def test_an_actor_updates_as_one_process(folder: Path) -> None:
    vocab_size = AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    ranks = pool_of(NUM_RANKS).run(run_actor, folder, vocab_size, timeout_s=TIMEOUT_S)
    reference = Reference(folder)
    whole = rollout(vocab_size)
    data = left_right_2_no_padding(whole.clone())
    outputs = reference.outputs(list(data["input_ids"].unbind()), TEMPERATURE)
    for policy in range(2):
        for name in OUTPUTS:
            wanted = no_padding_2_padding(outputs[name], data).detach()
            found = torch.cat([rank[0][policy][name] for rank in ranks])
            torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)

    loss_of = partial(ppo_loss, config=omega_conf_to_dataclass(actor_config(folder).actor))
    for step in range(2):
        data = left_right_2_no_padding(whole[step::2].clone())
        tu.assign_non_tensor(
            data,
            dp_size=1,
            batch_num_tokens=int(data["loss_mask"].sum()),
            global_batch_size=4,
        )
        outputs = reference.outputs(list(data["input_ids"].unbind()), TEMPERATURE)
        loss, metrics = loss_of(model_output=outputs, data=data)
        norm = reference.update(loss)
        wanted = {
            "loss": loss.item(),
            "grad_norm": norm,
            **{name: metrics[name].aggregate() for name in ("kl_loss", "actor/entropy_loss")},
        }
        for _, found, _ in ranks:
            assert {name: found[name][step] for name in wanted} == pytest.approx(
                wanted, rel=TOLERANCE
            )
    for _, _, tensors in ranks:
        reference.assert_is(tensors)


def test_an_actor_with_adapters_updates_as_one_process_of_peft(folder: Path) -> None:
    reference = Reference(folder)
    vocab_size = reference.model.config.vocab_size
    ranks = pool_of(NUM_RANKS).run(run_adapters, folder, vocab_size, timeout_s=TIMEOUT_S)
    _, _, (first, *_), peft_config = ranks[0]
    base = {name: value.clone() for name, value in reference.model.state_dict().items()}
    whole = rollout(vocab_size)
    data = left_right_2_no_padding(whole.clone())
    tokens = list(data["input_ids"].unbind())

    def log_probs() -> Tensor:
        return no_padding_2_padding(reference.outputs(tokens, TEMPERATURE)["log_probs"], data)

    without = log_probs().detach()
    given = {key: peft_config[key] for key in ("r", "lora_alpha", "target_modules", "task_type")}
    reference.adapt(first, peft.LoraConfig(**given))
    num_tokens = int(data["loss_mask"].sum())
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=num_tokens, global_batch_size=8)
    loss, _ = ppo_loss(
        omega_conf_to_dataclass(actor_config(folder).actor),
        reference.outputs(tokens, TEMPERATURE),
        data,
    )
    norm = reference.update(loss)
    wanted = log_probs().detach()
    assert (wanted - without).abs().max() > 10 * TOLERANCE
    for i, expected in enumerate((wanted, without)):
        found = torch.cat([outputs[i] for outputs, *_ in ranks])
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    of_peft = peft.get_peft_model_state_dict(reference.model)
    merged = reference.model.merge_and_unload().state_dict()
    for _, metrics, (_, adapters, below, all_in_one), _ in ranks:
        assert metrics["loss"][0] == pytest.approx(loss.item(), rel=TOLERANCE)
        assert metrics["grad_norm"][0] == pytest.approx(norm, rel=TOLERANCE)
        assert adapters.keys() == of_peft.keys()
        for name, tensor in adapters.items():
            torch.testing.assert_close(tensor, of_peft[name], rtol=TOLERANCE, atol=TOLERANCE)
        for name, tensor in below.items():
            assert torch.equal(tensor, base[name.replace(".base_layer", "")])
        assert any(".base_layer." in name for name in below)
        for name, tensor in all_in_one.items():
            torch.testing.assert_close(tensor, merged[name], rtol=TOLERANCE, atol=TOLERANCE)


def test_a_critic_updates_as_one_process(folder: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    vocab_size = model.config.vocab_size
    ranks = pool_of(NUM_RANKS).run(run_critic, tmp_path, vocab_size, timeout_s=TIMEOUT_S)
    reference = Reference(tmp_path, AutoModelForTokenClassification)
    whole = rollout(vocab_size)
    data = left_right_2_no_padding(whole.clone())
    wanted = no_padding_2_padding(reference.values(list(data["input_ids"].unbind())), data)
    found = torch.cat([values for values, _, _ in ranks])
    torch.testing.assert_close(found, wanted.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    for step in range(2):
        data = left_right_2_no_padding(whole[step::2].clone())
        num_tokens = int(data["loss_mask"].sum())
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=num_tokens, global_batch_size=4)
        outputs = {"values": reference.values(list(data["input_ids"].unbind()))}
        loss, metrics = value_loss(critic_config(tmp_path), outputs, data)
        expected = {
            "loss": loss.item(),
            "grad_norm": reference.update(loss),
            "critic/vf_loss": metrics["critic/vf_loss"].aggregate(),
        }
        for _, seen, _ in ranks:
            assert {name: seen[name][step] for name in expected} == pytest.approx(
                expected, rel=TOLERANCE
            )
    for _, _, tensors in ranks:
        reference.assert_is(tensors)


def test_all_model_types_of_verl_have_an_engine() -> None:
    for engines in EngineRegistry._engines.values():
        assert engines["hydraulis"]["cuda"] is engines["hydraulis"]["cpu"]


# --- with Ray ---


class CpuWorker(TrainingWorker):
    """Joins before verl does, which would ask for gloo on the CPU twice."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        average_with_gloo()
        rank, num_ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
        super().__init__(config)


@pytest.fixture
def workers(folder: Path) -> Iterator[RayWorkerGroup]:
    """Two of them, initialised."""
    config = TrainingWorkerConfig(
        model_type="language_model",
        model_config=HFModelConfig(path=str(folder)),
        engine_config=HydraulisEngineConfig(
            pool="tp2", dtype="fp32", max_tokens_per_micro_batch=256
        ),
        optimizer_config=FSDPOptimizerConfig(lr=LR, weight_decay=WEIGHT_DECAY),
        checkpoint_config=CheckpointConfig(),
    )
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}},
    )
    try:
        group = RayWorkerGroup(
            RayResourcePool([2], use_gpu=False, max_colocate_count=1),
            RayClassWithInitArgs(ray.remote(CpuWorker), config=config),
            device_name="cpu",
        )
        group.set_loss_fn(partial(sft_loss, config=None))
        group.reset()
        yield group
    finally:
        ray.shutdown()


def test_workers_of_ray_train_as_one_process(folder: Path, workers: RayWorkerGroup) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(3, 200, (n,), generator=generator) for n in (9, 30, 5, 17)]
    rows = {
        "input_ids": tokens,
        "loss_mask": [(torch.arange(len(row)) > 2).long() for row in tokens],
        "position_ids": [torch.arange(len(row)) for row in tokens],
    }
    nested = {
        name: torch.nested.as_nested_tensor(values, layout=torch.jagged)
        for name, values in rows.items()
    }
    given = {"temperature": 1.0, "global_token_num": [len(row) for row in tokens]}
    reference = Reference(folder)
    wanted = reference.outputs(tokens)
    data = tu.get_tensordict(nested, {**given, "compute_loss": False})
    found = workers.infer_batch(data).get()["log_probs"]
    for one, other in zip(found.unbind(), wanted["log_probs"].unbind(), strict=True):
        torch.testing.assert_close(one[:-1], other[:-1], rtol=TOLERANCE, atol=TOLERANCE)

    num_tokens = int(nested["loss_mask"].values().sum())
    counts = tu.get_tensordict(nested, {"dp_size": 1, "batch_num_tokens": num_tokens})
    loss, _ = sft_loss(None, wanted, counts)
    metrics = tu.get(workers.train_batch(tu.get_tensordict(nested, given)).get(), "metrics")
    assert metrics["loss"] == pytest.approx(loss.item(), rel=TOLERANCE)
    assert metrics["grad_norm"] == pytest.approx(reference.update(loss), rel=TOLERANCE)


# --- errors ---


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pool": None}, "needs a pool but has None"),
        ({"dtype": "float16"}, "dtype is 'float16'"),
        ({"offload_policy": True}, "has offload_policy=True"),
        (
            {"router_replay": EngineRouterReplayConfig(mode="R2")},
            "router_replay.mode=R2",
        ),
        ({"options": ["--moe-aux-loss-coeff", "0.1"]}, "options has --moe-aux-loss-coeff;"),
        ({"options": ["--moe-z-loss-coeff=0.1"]}, "options has --moe-z-loss-coeff;"),
    ],
)
def test_an_engine_refuses_what_it_cannot_do(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        HydraulisEngineConfig(**{"pool": "4*tp1", **changes})


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", "critic"])
@pytest.mark.parametrize("strategy", ["fsdp", "hydralis"])
def test_no_other_engine_gets_our_configuration(role: str, strategy: str, folder: Path) -> None:
    config = composed(
        "ppo_trainer",
        [
            *engine_overrides("actor_rollout_ref.actor.fsdp_config", "4*tp1"),
            *engine_overrides("critic.fsdp", "4*tp1"),
            *(f"{role}.strategy={strategy}", f"{role}.use_dynamic_bsz=True"),
            *(f"critic.model.path={folder}", "actor_rollout_ref.rollout.n=1"),
        ],
    )
    text = f"has strategy={strategy}; set strategy=hydraulis"
    with pytest.raises(InstantiationException, match=text):
        omega_conf_to_dataclass(OmegaConf.select(config, role))


@pytest.mark.parametrize(
    ("model", "optimizer", "checkpoint", "text"),
    [
        ({"use_remove_padding": False}, {}, {}, "use_remove_padding is False"),
        ({"lora": {"rank": 8}}, {}, {}, "sets lora.rank;"),
        ({"lora_rank": 8, "exclude_modules": "q_proj"}, {}, {}, "sets exclude_modules;"),
        ({}, {"optimizer": "AdamW8bit"}, {}, "optimizer=AdamW8bit"),
        ({}, {}, {"save_contents": ["model", "extra"]}, "save_contents is ['extra', 'model']"),
    ],
)
def test_wrong_models_optimizers_and_checkpoints(
    folder: Path,
    model: dict[str, Any],
    optimizer: dict[str, Any],
    checkpoint: dict[str, Any],
    text: str,
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        EngineRegistry.new(
            "language_model",
            "hydraulis",
            model_config=HFModelConfig(path=str(folder), **model),
            engine_config=HydraulisEngineConfig(pool="tp1"),
            optimizer_config=FSDPOptimizerConfig(**optimizer),
            checkpoint_config=CheckpointConfig(**checkpoint),
        )


def failing_loss(place: str) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """A loss that raises on rank 1 alone, when it is called or in its backward."""

    def fail(*_: Any) -> Any:
        raise RuntimeError(f"a bug in the {place}")

    def loss(model_output: Any, **_: Any) -> tuple[Tensor, dict[str, Any]]:
        total = model_output["log_probs"].values().sum()
        if dist.get_rank() == 1:
            if place == "call":
                fail()
            total.register_hook(fail)
        return total, {}

    return loss


def wrong_batches(folder: Path) -> list[str]:
    """On every rank: the messages of batches and losses that rank 1 alone has wrong."""
    use_as_verl_rank()
    engine = EngineRegistry.new(
        "language_model",
        "hydraulis",
        model_config=HFModelConfig(path=str(folder)),
        engine_config=HydraulisEngineConfig(pool="2*tp1", dtype="fp32"),
        optimizer_config=FSDPOptimizerConfig(lr=LR),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    found = []
    spoils: list[Callable[[TensorDict], Any]] = [
        lambda data: tu.assign_non_tensor_stack(data, "multi_modal_inputs", [{}, {"images": 1}]),
        lambda data: data.update({"temperature": torch.tensor([1.0, 0.5])}),
        lambda data: tu.assign_non_tensor(data, calculate_sum_pi_squared=True),
    ]
    for spoil in spoils:
        data = left_right_2_no_padding(rollout(20)[:2])
        if dist.get_rank() == 1:
            spoil(data)
        with pytest.raises(ConfigurationError) as error:
            engine.infer_batch(data)
        found.append(str(error.value))
    for place in ("call", "backward"):
        data = left_right_2_no_padding(rollout(20)[:2])
        with pytest.raises(CheckpointError) as failure:
            engine.forward_backward_batch(data, failing_loss(place))
        assert (failure.value.__cause__ is not None) == (dist.get_rank() == 1)
        found.append(str(failure.value))
    engine.engine.close()
    return found


def test_wrong_batches_and_losses_raise_one_error_on_every_rank(folder: Path) -> None:
    texts = (
        *("multi_modal_inputs", "[0.5, 1.0]", "calculate_sum_pi_squared"),
        *("a bug in the call (rank 1)", "a bug in the backward (rank 1)"),
    )
    for found in pool_of(2).run(wrong_batches, folder, timeout_s=TIMEOUT_S):
        for message, text in zip(found, texts, strict=True):
            assert text in message
