"""The training program with every small variant of a layer that goes with the others."""

from pathlib import Path

import pytest

from megatron.hydraulis.checkpoint.torch_dist import StoredCheckpoint
from tests.support.training_run import ROUNDING, Launch

pytestmark = pytest.mark.distributed

FLAGS = (
    *("--window-size", "9,0", "--window-attn-skip-freq", "2", "--softmax-type", "learnable"),
    *("--quick-geglu", "--glu-linear-offset", "1", "--activation-func-clamp-value", "7"),
    *("--apply-layernorm-1p", "--qk-layernorm", "--apply-wd-to-qk-layernorm"),
    *("--attention-output-gate", "--no-rope-freq", "2"),
)

LATENTS = (
    *("--multi-latent-attention", "--q-lora-rank", "12", "--kv-lora-rank", "8", "--qk-layernorm"),
    *("--qk-head-dim", "4", "--qk-pos-emb-head-dim", "4", "--v-head-dim", "6"),
    *("--rotary-scaling-factor", "4", "--mscale-all-dim", "1"),
)
GROUPED = ("--group-query-attention", "--num-query-groups")
EXPERTS = (
    *("--num-experts", "4", "--moe-ffn-hidden-size", "16", "--moe-layer-freq", "([0]+[1])"),
    *(
        "--moe-aux-loss-coeff",
        "0.1",
        "--moe-z-loss-coeff",
        "0.01",
        "--moe-token-dispatcher-type",
        "alltoall",
    ),
    *("--moe-shared-expert-intermediate-size", "16", "--moe-grouped-gemm"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
)

HYBRID = (
    *("--hybrid-layer-pattern", "GE*-G-*-", "--linear-key-head-dim", "6"),
    *("--linear-num-key-heads", "4", "--linear-num-value-heads", "8"),
    *("--linear-value-head-dim", "4", "--num-experts", "4", "--moe-ffn-hidden-size", "16"),
)


def test_another_strategy_resumes_a_model_of_variants(launch: Launch, tmp_path: Path) -> None:
    save = ("--save", str(tmp_path), "--save-interval", "2")
    whole = launch("tp2+cp2", 4, *FLAGS, *save, without=["--swiglu"])
    load = ("--load", str(tmp_path), "--ckpt-step", "2")
    resumed = launch("pp2+tp2", 4, *FLAGS, *load, without=["--swiglu"])
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=ROUNDING)


def test_another_strategy_resumes_a_model_that_predicts_further_tokens(
    launch: Launch, tmp_path: Path
) -> None:
    flags = ("--mtp-num-layers", "2", "--mtp-loss-scaling-factor", "0.3")
    save = ("--save", str(tmp_path), "--save-interval", "2", "--eval-interval", "2")
    whole = launch("tp2+cp2", 4, *flags, *save, "--eval-iters", "1")
    of_predictions = [record.mtp_losses for record in whole.records]
    for number, loss in enumerate(of_predictions[0], 1):
        assert f" | mtp_{number} loss: {loss:.6E} | " in whole.outcome.stdout
    resumed = launch("pp2+tp2", 4, *flags, "--load", str(tmp_path), "--ckpt-step", "2")
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=ROUNDING)
    for record, expected in zip(resumed.records, of_predictions[2:], strict=True):
        assert record.mtp_losses == pytest.approx(expected, rel=ROUNDING)


def test_another_strategy_resumes_a_model_with_experts_and_latents(
    launch: Launch, tmp_path: Path
) -> None:
    save = ("--save", str(tmp_path), "--save-interval", "2")
    whole = launch("tp2ep2+cp2", 4, *EXPERTS, *LATENTS, *save, without=GROUPED)
    assert "--moe-grouped-gemm" in whole.outcome.stdout
    assert " | expert load: " in whole.outcome.stdout
    first = whole.records[0]
    for name, value in (
        ("load_balancing_loss", first.balancing_loss),
        ("z_loss", first.router_z_loss),
    ):
        assert f" | {name}: {value:.6E} | " in whole.outcome.stdout
    load = ("--load", str(tmp_path), "--ckpt-step", "2")
    resumed = launch("cp4~ep4", 4, *EXPERTS, *LATENTS, *load, without=GROUPED)
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=ROUNDING)
    last, expected = resumed.records[-1], whole.records[-1]
    assert last.router_bias_range == expected.router_bias_range != (0.0, 0.0)
    for name in ("expert_load", "balancing_loss", "router_z_loss"):
        assert getattr(last, name) == pytest.approx(getattr(expected, name), rel=ROUNDING), name


def test_another_strategy_resumes_a_hybrid_model(launch: Launch, tmp_path: Path) -> None:
    layers = {"without": ["--num-layers"]}
    save = ("--save", str(tmp_path), "--save-interval", "2")
    whole = launch("tp2ep2+2*tp1", 4, *HYBRID, *save, **layers)
    assert "count each of them as attention and an MLP or experts" in whole.outcome.stderr
    assert all(record.model_flops is None for record in whole.records)
    assert launch("pp2:5,3+tp2", 4, *HYBRID, **layers).losses == pytest.approx(
        whole.losses, rel=ROUNDING
    )
    load = ("--load", str(tmp_path), "--ckpt-step", "2")
    resumed = launch("cp4~ep4", 4, *HYBRID, *load, **layers)
    assert resumed.losses == pytest.approx(whole.losses[2:], rel=ROUNDING)
    keys = StoredCheckpoint(tmp_path / "iter_0000002").tensors.keys()
    net = "decoder.layers.0.self_attention."
    sections = {
        *(
            f"{net}in_proj.weight.{name}"
            for name in ["query", "key", "value", "z", "beta", "alpha"]
        ),
        *(f"{net}conv1d.weight.{name}" for name in ("query", "key", "value")),
    }
    norms = {
        f"{net}in_proj.layer_norm_weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.2.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.3.mlp.linear_fc1.layer_norm_weight",
        "decoder.final_norm.weight",
    }
    assert {*sections, *norms, f"{net}A_log"} <= keys
    assert f"{net}in_proj.weight" not in keys
