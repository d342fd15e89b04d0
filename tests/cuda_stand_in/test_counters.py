"""Launches, NCCL calls and waits of the host, compared with plain megatron-core."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cuda_stand_in.counters import Case, Counts, Side, count, counts_of

MOST_LAUNCHES = 1.05
"""Share of plain megatron-core's launches."""
PACKED = (100, 17, 60)
"""Lengths of sequences in a row, each followed by padding under cp."""
NUM_LAYERS = 32


@pytest.mark.parametrize(
    ("tp", "cp"), [pytest.param(1, 1, marks=pytest.mark.nightly), (2, 1), (1, 2)]
)
def test_the_host_waits_for_no_layer_and_no_micro_batch(tp: int, cp: int, tmp_path: Path) -> None:
    """The host waits once an iteration, for loss and gradient norm together. Upstream's packed
    rotation waits four times a layer."""
    few = Case("ours", layers=2, tp=tp, cp=cp, lengths=PACKED)
    counted = count(few, tmp_path)
    assert counted.host_waits == 1
    more_layers = count(replace(few, layers=4), tmp_path)
    assert (more_layers.host_waits, more_layers.host_copies) == (1, counted.host_copies)
    assert count(replace(few, micro_batches=3), tmp_path).host_waits == 1


@pytest.mark.parametrize(
    ("tp", "fused"),
    [
        (1, False),
        (2, True),
        pytest.param(1, True, marks=pytest.mark.nightly),
        pytest.param(2, False, marks=pytest.mark.nightly),
    ],
)
def test_a_layer_launches_no_more_than_upstream(tp: int, fused: bool, tmp_path: Path) -> None:
    """Upstream uses our core attention here instead of its unfused one."""

    def of_a_layer(side: Side) -> int:
        case = Case(
            side, layers=2, tp=tp, micro_batches=8, fused_gradients=fused, same_attention=True
        )
        more = count(replace(case, layers=4), tmp_path).num_launches
        return (more - count(case, tmp_path).num_launches) // 2

    assert of_a_layer("ours") <= MOST_LAUNCHES * of_a_layer("plain")


@pytest.mark.parametrize(
    ("tp", "kind"),
    [
        (2, "biases"),
        pytest.param(1, "biases", marks=pytest.mark.nightly),
        pytest.param(2, "experts", marks=pytest.mark.nightly),
        pytest.param(1, "experts", marks=pytest.mark.nightly),
        (2, "latents"),
        pytest.param(1, "latents", marks=pytest.mark.nightly),
    ],
)
def test_experts_and_latents_wait_and_launch_no_more_than_upstream(
    tp: int, kind: str, tmp_path: Path
) -> None:
    """Upstream's dispatcher waits in every layer, ours too; loss, norm and figures of routing come
    in one copy."""
    ours, plain = (
        count(
            Case(
                side,
                layers=2,
                tp=tp,
                micro_batches=2,
                same_attention=True,
                has_experts=kind != "latents",
                has_biases=kind == "biases",
                has_latents=kind == "latents",
            ),
            tmp_path,
        )
        for side in ("ours", "plain")
    )
    assert ours.host_waits <= plain.host_waits
    assert ours.host_waits == 1 + (0 if kind == "latents" else 4)
    assert ours.num_launches <= MOST_LAUNCHES * plain.num_launches


def test_weight_gradients_are_added_by_the_layers_with_apex(tmp_path: Path) -> None:
    case = Case("ours", layers=2, micro_batches=2)
    plain = count(case, tmp_path)
    fused = count(replace(case, fused_gradients=True), tmp_path)
    # One addition for each of a layer's four matrices; the output layer needs none without apex.
    assert plain.launches["additions"] - fused.launches["additions"] == 8 * case.micro_batches
    assert plain.num_launches - fused.num_launches == 8 * case.micro_batches


def test_messages_go_only_between_ranks_that_exchange_data(tmp_path: Path) -> None:
    counts = count(Case("ours", layers=2, tp=2), tmp_path)
    assert counts.calls["Send of 8 ranks"] == counts.calls["Recv of 8 ranks"] > 0
    num_exchanges, num_peers = 2 * 4, 7
    assert counts.calls["Send of 8 ranks"] < num_exchanges * num_peers
    assert counts.sent_bytes["Send of 8 ranks"] > 0


def test_what_is_between_the_marks_is_counted() -> None:
    log = """0 COMM 1 id x size 8 rank 0
        1 KERNEL stream 1 cublasGemmEx
        2 MARK counted begin
        3 KERNEL stream 1 addcmul_cuda_kernel
        4 COPY D2D 8 stream 1 from 0x0 to 0x8
        5 HSYNC stream 1
        6 NCCL Send comm 1 count 4 dtype 9 peer 2 stream 2 read 0x0 8 write (nil) 0 redop 0
        7 MARK counted end
        8 HSYNC device"""
    assert counts_of(log.splitlines()) == Counts(
        launches=Counter({"multiplications": 1, "copies and casts": 1}),
        host_waits=1,
        calls=Counter({"Send of 8 ranks": 1}),
        sent_bytes=Counter({"Send of 8 ranks": 8}),
    )


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_iteration_launches_no_more_than_upstream(tp: int, fused: bool, tmp_path: Path) -> None:
    """The tables of README.md: run with ``-s``."""
    for micro_batches in (1, 8):
        case = Case("ours", NUM_LAYERS, tp=tp, micro_batches=micro_batches, fused_gradients=fused)
        ours = count(case, tmp_path)
        plain = count(replace(case, side="plain", same_attention=True), tmp_path)
        unfused = count(replace(case, side="plain"), tmp_path)
        print(f"\n{case}\nlaunches: {ours.num_launches} against {plain.num_launches}")
        print(f"against {unfused.num_launches} with upstream's core attention")
        print(f"host waits: {ours.host_waits} against {plain.host_waits}")
        for kind in sorted(ours.launches.keys() | plain.launches.keys()):
            print(f"| {kind} | {ours.launches[kind]} | {plain.launches[kind]} |")
        for kind in sorted(ours.calls.keys() | plain.calls.keys()):
            numbers = (ours.calls, plain.calls, ours.sent_bytes, plain.sent_bytes)
            print(f"| {kind} | {' | '.join(f'{each[kind]}' for each in numbers)} |")
        if micro_batches > 1:
            assert ours.num_launches <= MOST_LAUNCHES * plain.num_launches
