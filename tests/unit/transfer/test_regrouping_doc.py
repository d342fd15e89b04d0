"""docs/regrouping.md: its code prints the documented output, its table is the benchmark's."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from benchmarks.regroup_bytes import (
    BYTES_PER_GB,
    PARAMETER_BYTES,
    PoolTraffic,
    StrategyTraffic,
)
from megatron.hydraulis.strategy import Pool
from megatron.hydraulis.transfer.canonical import model_parameters
from megatron.hydraulis.transfer.collective import Collective
from tests.support.planning import LLAMA_32B

_BLOCKS = re.compile(r"```python\n(?P<code>.*?)```\n\n```text\n(?P<output>.*?)```\n", re.DOTALL)


ROOT = Path(__file__).resolve().parents[3]
DOC = ROOT / "docs" / "regrouping.md"


def test_the_code_prints_the_documented_output() -> None:
    text = DOC.read_text(encoding="utf-8")
    blocks = list(_BLOCKS.finditer(text))
    assert len(blocks) == text.count("```python")
    namespace: dict[str, Any] = {}
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block["code"], str(DOC), "exec"), namespace)
        assert printed.getvalue() == block["output"], block["code"]


@pytest.fixture(scope="module")
def traffic() -> PoolTraffic:
    pool = Pool.read(ROOT / "examples" / "pool_64_ranks.json")
    return PoolTraffic(pool, LLAMA_32B, commonest="S0")


@pytest.mark.parametrize("name", ["S0", "S3", "S6"])
def test_the_table_is_the_benchmark_s(traffic: PoolTraffic, name: str) -> None:
    (row,) = re.findall(rf"^\| {name} \|.*$", DOC.read_text(encoding="utf-8"), re.MULTILINE)
    strategy = traffic.pool.strategy(name)
    by_number, chosen = traffic.by_number(strategy), traffic.chosen_for_itself(strategy)
    zero1 = by_number.zero1_bytes
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        name,
        f"`{strategy}`",
        _in_gb(by_number.held_bytes),
        _in_gb(by_number.gather_bytes),
        _in_gb(chosen.gather_bytes),
        "" if zero1 is None else _in_gb([zero1]),
        *(_across(by_number, kind) for kind in (Collective.ALL_TO_ALL, Collective.TWO_STEP)),
    ]


def test_the_benchmark_s_model_has_the_shape_s_parameters(traffic: PoolTraffic) -> None:
    with_experts = replace(
        LLAMA_32B,
        num_experts=8,
        num_expert_layers=LLAMA_32B.num_layers - 1,
        experts_per_token=2,
        expert_ffn_hidden_size=64,
        shared_expert_ffn_hidden_size=32,
    )
    latents: dict[str, Any] = {
        "kv_lora_rank": 48,
        "qk_head_dim": 64,
        "qk_pos_emb_head_dim": 40,
        "v_head_dim": 72,
    }
    with_latents = replace(LLAMA_32B, **latents)
    for shape in (LLAMA_32B, with_experts, with_latents, replace(with_latents, q_lora_rank=56)):
        assert sum(p.num_elements for p in model_parameters(shape)) == shape.num_parameters
    assert traffic.layout.num_elements == LLAMA_32B.num_parameters


def test_chosen_owners_bring_equal_replicas_closer_to_zero1(traffic: PoolTraffic) -> None:
    for name in ("S0", "S6"):
        strategy = traffic.pool.strategy(name)
        zero1 = traffic.by_number(strategy).zero1_bytes
        assert zero1 is not None
        by_number, chosen = (
            mean(each.gather_bytes) / zero1
            for each in (traffic.by_number(strategy), traffic.chosen_for_itself(strategy))
        )
        # No owner can hold more than all that it owns, as under ZeRO-1 with pp 1.
        assert 1.0 <= chosen < by_number <= 1.0 / (1.0 - 1.0 / 4)


def _across(traffic: StrategyTraffic, kind: Collective) -> str:
    return _in_gb([each.received_across * PARAMETER_BYTES for each in traffic.links(kind)])


def _in_gb(num_bytes: list[int] | list[float]) -> str:
    return f"{mean(num_bytes) / BYTES_PER_GB:.2f}"
