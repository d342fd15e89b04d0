"""Planning in Python: the documented examples, the public names, what is loaded, and errors."""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import pkgutil
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import numpy as np
import pytest

import megatron.hydraulis as hydraulis
from megatron.hydraulis.__main__ import main
from megatron.hydraulis.errors import ConfigurationError, DataError, PlanError, StrategyError
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.planning_files import LENGTHS, POOL, PROFILE, write_files

ROOT = Path(__file__).parents[3]
SHAPE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "kv_channels": 64,
    "vocab_size": 512,
    "gated_mlp": True,
    "tied_embeddings": False,
}


def profile() -> hydraulis.ProfileCostModel:
    return hydraulis.ProfileCostModel.from_json(PROFILE, what="test")


def small_estimate() -> hydraulis.ProfileCostModel:
    return hydraulis.estimate(hydraulis.ModelShape(**SHAPE), "cpu", ["tp1", "tp2"], num_ranks=4)


def test_planning_loads_neither_torch_nor_megatron_nor_matplotlib() -> None:
    code = f"""
import sys
import megatron.hydraulis as hydraulis
assert "numpy" not in sys.modules
shape = hydraulis.ModelShape(**{SHAPE!r})
profile = hydraulis.estimate(shape, "cpu", num_ranks=2)
lengths = [40, 30, 20, 10] * 4
print(hydraulis.plan(lengths, ["tp2", "2*tp1"], profile))
sizes = dict(global_batch_size=4)
pool = hydraulis.propose(lengths, profile, num_ranks=2, num_batches=2, max_strategies=1, **sizes)
print(pool)
print(hydraulis.simulate(lengths, pool, profile, iterations=2, ways=["pool"], **sizes))
loaded = {{"torch", "megatron.core", "megatron.training", "matplotlib"}} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_public_names_exist_are_typed_and_hide_no_submodule() -> None:
    source = ast.parse((ROOT / "megatron" / "hydraulis" / "__init__.py").read_text())
    typed = {
        str(alias.asname)
        for node in ast.walk(source)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.")
        for alias in node.names
        if alias.asname
    }
    submodules = {module.name for module in pkgutil.iter_modules(hydraulis.__path__)}
    assert not typed & submodules
    assert typed <= set(dir(hydraulis))
    for name in typed:
        assert getattr(hydraulis, name) is vars(hydraulis)[name]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hydraulis.nothing


def test_types_in_the_signatures_of_the_engine_are_public() -> None:
    known = {*dir(hydraulis), *dir(builtins), "Any", "Callable", "Iterator", "Path", "Sequence"}
    for owner in (hydraulis.Engine, hydraulis.Batch):
        for name, member in vars(owner).items():
            function = getattr(member, "__func__", member)  # of a class method
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            for annotation in function.__annotations__.values():
                nodes = ast.walk(ast.parse(annotation))
                names = {node.id for node in nodes if isinstance(node, ast.Name)}
                assert names - {"torch", "Tensor"} <= known, (owner, name)


def test_the_examples_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert (tmp_path / "plan.svg").read_text().count("<svg") == 1
    printed = capsys.readouterr().out
    assert "replicas of strategy" in printed
    assert "40000" in printed.splitlines()[-1]


def test_the_notebook_runs_and_draws() -> None:
    notebook = json.loads((ROOT / "examples" / "planning.ipynb").read_text())
    names: dict[str, Any] = {}
    shown = []
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == []
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), "cell", "eval"), names))
    kinds = [type(each).__name__ for each in shown]
    assert kinds == ["str", "PlannedBatch", "Proposal", "Comparison", "dict"]
    for each in shown[1:4]:
        html = each._repr_html_()
        assert html.count("<pre") == 1
        assert ("<svg" in html) == (type(each).__name__ != "Proposal")
    assert all(gain > 1.0 for gain in shown[-1].values())
    proposal, comparison = shown[2:4]
    times_s = [time_s for _, time_s in proposal.plans]
    assert proposal.error_s == pytest.approx(stdev(times_s) / len(times_s) ** 0.5)
    assert f"{proposal.mean_s:.4f} ± {proposal.error_s:.4f} s per iteration" in str(proposal)
    assert f" {comparison.result('pool').error_s:.3f} " in str(comparison)


def test_a_plan_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *write_files(tmp_path), "--json"]) == 0
    wanted = json.loads(capsys.readouterr().out)
    pool = hydraulis.Pool.from_json(POOL)
    planned = hydraulis.plan(np.array(LENGTHS), pool, profile())
    found = planned.to_json()
    assert found["digest"] == wanted["digest"]
    assert found["strategies"] == wanted["strategies"]
    assert str(planned).startswith(f"strategy {planned.plan.strategy}: ")


def test_every_stage_of_a_plan_is_drawn_once() -> None:
    shape = hydraulis.ModelShape(**SHAPE)
    estimate = hydraulis.estimate(shape, "cpu", ["tp2pp2", "tp2"], num_ranks=6)
    planned = hydraulis.plan([50, 40, 30, 20, 10], "tp2pp2+tp2", estimate, ranks_per_node=6)
    html = planned._repr_html_()
    for name in ("tp2pp2, stage 0, ranks ", "tp2pp2, stage 1, ranks ", "tp2, ranks "):
        assert html.count(name) == 1
    assert html == planned._repr_html_()
    for overhead, is_drawn in ((1e-4, False), (0.1, True)):
        time_s = max(each.predicted_time_s for each in planned.plan.replicas) * (1 + overhead)
        drawn = replace(planned, plan=replace(planned.plan, predicted_time_s=time_s))
        assert (">regroup</text>" in drawn._repr_html_()) == is_drawn


def test_a_hugging_face_folder_is_a_model(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 500,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = hydraulis.estimate(tmp_path, "cpu", ["tp1"], num_ranks=4).model
    assert found is not None
    assert found.shape == hydraulis.ModelShape(**{**SHAPE, "num_query_groups": 2})


def test_adapters_have_a_profile_and_plans() -> None:
    shape, lora = hydraulis.ModelShape(**SHAPE), hydraulis.Lora(rank=4)
    found, whole = (
        hydraulis.estimate(shape, "h100", ["tp1", "tp2"], num_ranks=4, lora=each)
        for each in (lora, None)
    )
    assert found.schemes[0] != whole.schemes[0]
    planned, without = (
        hydraulis.plan([50, 40], "2*tp2", profile, ranks_per_node=4, lora=each).plan
        for profile, each in ((found, lora), (whole, None))
    )
    assert planned.predicted_time_s != without.predicted_time_s
    for profile, given in ((found, None), (whole, lora)):
        with pytest.raises(ConfigurationError, match=r"rank 4 of q_proj k_proj"):
            hydraulis.plan([50, 40], "2*tp2", profile, ranks_per_node=4, lora=given)


def test_columns_that_share_experts_are_planned_and_simulated() -> None:
    """Groups of a wave narrower than ep are no replicas, neither in a pool nor in other ways."""
    experts = {
        "num_experts": 8,
        "num_expert_layers": SHAPE["num_layers"],
        "experts_per_token": 2,
        "expert_ffn_hidden_size": 64,
    }
    pool = Pool.of(*(Strategy.parse(text, 8) for text in ("tp2cp4~ep8", "cp4~ep4+2*tp2ep2")))
    found = hydraulis.estimate(hydraulis.ModelShape(**(SHAPE | experts)), "cpu", pool)
    assert {"ep4", "cp2ep4", "cp4ep4"} <= {str(row.scheme) for row in found.schemes}
    planned = hydraulis.plan([500, 40, 30, 20, 10, 10], pool, found)
    assert planned.plan.num_tokens == 610
    sizes: dict[str, Any] = {"global_batch_size": 6, "seq_length": 512}
    lengths = [500, 400, 30, 20, 10, 10, 60, 70]
    proposed = hydraulis.propose(lengths, found, num_ranks=8, num_batches=2, **sizes)
    hydraulis.simulate(lengths, proposed, found, iterations=2, **sizes)


def test_a_proposal_brings_the_rows_that_it_assumed() -> None:
    """Sequences that only a wider group than any measured one holds."""
    measured = small_estimate()
    lengths = [int(measured.max_tokens(measured.schemes[-1].scheme) * 1.5), *[1000] * 7]
    pool = hydraulis.propose(
        lengths, measured, num_ranks=4, global_batch_size=8, num_batches=2, max_strategies=1
    )
    assert any(row.is_assumed for row in pool.profile.schemes)
    planned = hydraulis.plan(lengths, pool, measured)
    assert planned.plan.num_tokens == sum(lengths)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], r"of at least 1 sequence, but .* shape \(0,\)"),
        ([3.5, 2.0], "of type float64"),
        ([[1, 2]], r"shape \(1, 2\)"),
        ([True], "of type bool"),
        ([5, 0, 3], "at least 1 token but number 1 has 0"),
    ],
)
def test_invalid_lengths_are_refused(lengths: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        hydraulis.plan(lengths, "2*tp1", profile())


UNTYPED: Any = hydraulis


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda costs: UNTYPED.plan(None, "4*tp1", costs), "lengths: whole numbers"),
        (lambda costs: UNTYPED.plan([[1], [2, 3]], "4*tp1", costs), "lengths: whole numbers"),
        (lambda costs: UNTYPED.plan([9], None, costs), "pool is a list .* this is None"),
        (lambda costs: UNTYPED.plan([9], [4], costs), r"pool is a list .* this is \[4\]"),
        (lambda costs: UNTYPED.plan([9], "4*tp1", None), "profile is .* this is None"),
        (lambda costs: UNTYPED.plan([9], "4*tp1", costs, model=3), "model is .* this is 3"),
        (lambda costs: UNTYPED.plan([9], "4*tp1", costs, ranks_per_node="8"), "is '8'"),
        (lambda costs: UNTYPED.propose([9], costs, num_ranks=None), "num_ranks is .* None"),
        (lambda costs: UNTYPED.estimate(costs.model.shape, "cpu", 4, num_ranks=4), "is a list"),
        (lambda costs: UNTYPED.estimate(costs.model.shape, None, num_ranks=4), "device None"),
        (lambda costs: UNTYPED.AdamWSettings(lr="1e-3"), "lr is a number"),
        (lambda costs: UNTYPED.AdamWSettings(lr=-1.0), "AdamWSettings: lr .* but is -1.0"),
        (lambda costs: UNTYPED.AdamWSettings(lr=1.0, beta1=1.0), "below 1, but is 1.0"),
    ],
)
def test_arguments_of_another_type_are_refused(call: Any, message: str) -> None:
    with pytest.raises(hydraulis.HydraulisError, match=message):
        call(small_estimate())


def test_other_invalid_arguments_are_refused(tmp_path: Path) -> None:
    costs = small_estimate()
    with pytest.raises(ConfigurationError, match="num_ranks is missing; give it"):
        hydraulis.estimate(hydraulis.ModelShape(**SHAPE), "cpu")
    with pytest.raises(ConfigurationError, match="device 'abacus'"):
        hydraulis.plan([9], "4*tp1", costs, device="abacus")
    with pytest.raises(StrategyError, match="at least 1 strategy but has 0"):
        hydraulis.plan([9], [], costs)
    with pytest.raises(StrategyError, match=r"pool\.json"):
        hydraulis.plan([9], tmp_path / "pool.json", costs)
    with pytest.raises(PlanError, match="10000000"):
        hydraulis.plan([10_000_000], "4*tp1", costs)
    with pytest.raises(ConfigurationError, match=r"global_batch_tokens .* None and None; give one"):
        hydraulis.propose([9], costs, num_ranks=4)
    with pytest.raises(ConfigurationError, match="'fast' is none of the 6 ways"):
        hydraulis.simulate([9], "4*tp1", costs, global_batch_size=1, ways=["fast"])
    result = hydraulis.simulate(
        [9, 8], "4*tp1", costs, global_batch_size=2, iterations=1, ways=["pool"]
    )
    with pytest.raises(ConfigurationError, match="'ceiling' has no result, but 'pool' have"):
        result.result("ceiling")
