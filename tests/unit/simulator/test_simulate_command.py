"""``simulate``: tables, JSON, trace and pictures from files."""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.lengths.batches import add_batch_arguments, batch_sizes
from megatron.hydraulis.observability.trace import rank_shares, read_trace
from megatron.hydraulis.simulator.ways import WAYS

PNG_HEAD = b"\x89PNG"
SCHEMES = [
    {"tp": tp, "cp": 1, "pp": pp, "a_ms_per_token2": 1e-5 / tp, "b_ms_per_token": b, "c_ms": 2.0,
     "max_tokens": limit}
    for tp, pp, b, limit in ((1, 1, 1.0, 500), (2, 1, 0.8, 1200), (4, 1, 0.6, 3000))
]  # fmt: skip
MODEL = {
    "num_layers": 4,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "vocab_size": 512,
    "gated_mlp": True,
    "tied_embeddings": False,
}
POOL = {
    "num_ranks": 4,
    "ranks_per_node": 2,
    "strategies": [
        {"name": "mixed", "replicas": "tp2+2*tp1"},
        {"name": "long", "replicas": "tp4"},
    ],
}
LENGTHS = [400, 300, 1000, 120, 90, 60, 450, 30]
PROFILE = {"device": "d", "source": "s", "date": "t", "schemes": SCHEMES}
FILES = {"pool": POOL, "cost-profile": PROFILE, "lengths": LENGTHS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("simulate")
    for name, content in {**FILES, "model": MODEL}.items():
        (made / f"{name}.json").write_text(json.dumps(content))
    return made


@pytest.fixture
def simulate(folder: Path) -> Callable[..., int]:
    files = [text for name in FILES for text in (f"--{name}", str(folder / f"{name}.json"))]
    sizes = ["--global-batch-size", "8", "--iterations", "2", "--plan-time", "0.1"]
    return lambda *flags: main(["simulate", *files, *sizes, *flags])


@pytest.mark.parametrize(
    ("growth", "size"),
    [
        ("--rampup-batch-size 2 2 12", "--global-batch-size 8"),
        ("--step-batch-size-schedule 0:2,1.5K:4,3k:8", ""),
        ("--step-batch-size-schedule 0:8,1K:16", "--global-batch-tokens 2048"),
    ],
)
def test_of_batches_that_grow_the_last_count(growth: str, size: str) -> None:
    parser = argparse.ArgumentParser()
    add_batch_arguments(parser)
    namespace = parser.parse_args([*growth.split(), *size.split()])
    sizes = batch_sizes(namespace)
    wanted = (2048, "tokens") if "tokens" in size else (8, "sequences")
    assert (sizes.largest, sizes.unit) == wanted


def test_the_output_says_which_batches_of_growth_it_is_for(
    simulate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--ways", "pool", "--json")
    assert simulate(*flags) == 0
    plain = capsys.readouterr()
    assert simulate(*flags, "--rampup-batch-size", "2", "2", "12") == 0
    grown = capsys.readouterr()
    assert grown.out == plain.out
    assert plain.err.count("batches grow") == 0
    assert "batches grow in training; these are those of its end, 8 sequences" in grown.err
    assert simulate(*flags, "--global-batch-tokens", "99") == 2
    assert "give one" in capsys.readouterr().err


def test_the_printed_batch_is_of_the_sequences_that_are_simulated(
    simulate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.json"
    path.write_text("[29000, 1000]")  # the pool holds 3,000 tokens
    assert simulate("--lengths", str(path), "--ways", "pool") == 0
    assert "global batch: 8 sequences, about 21,818 tokens\n" in capsys.readouterr().out


@pytest.mark.parametrize("typed", ["x", "0:2,1K", "0:2 1K:x"])
def test_a_schedule_without_a_last_size_is_refused(typed: str) -> None:
    parser = argparse.ArgumentParser()
    add_batch_arguments(parser)
    with pytest.raises(ConfigurationError, match="write for example '0:256 1M:512'"):
        batch_sizes(parser.parse_args(["--step-batch-size-schedule", typed]))


@pytest.fixture
def regroup(folder: Path) -> list[str]:
    return ["--model", str(folder / "model.json"), "--device", "cpu"]


@pytest.fixture
def figures(
    simulate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    def found(*flags: str) -> dict[str, Any]:
        assert simulate("--ways", "pool", "--json", *flags) == 0
        content: dict[str, Any] = json.loads(capsys.readouterr().out)
        return content

    return found


def test_a_row_quantum_reduces_the_number_of_row_shapes(
    figures: Callable[..., dict[str, Any]],
) -> None:
    exact, rounded = (
        figures("--iterations", "6", "--row-quantum-tokens", quantum)["ways"][0]
        for quantum in ("1", "250")
    )
    assert rounded["num_row_shapes"] < exact["num_row_shapes"] / 2
    assert exact["padding_fraction"] == 0.0 < rounded["padding_fraction"] < 0.25
    assert exact["time_s"] < rounded["time_s"] < 1.25 * exact["time_s"]


def test_a_table_shows_all_ways_and_what_is_skipped(
    simulate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate() == 0
    text, mark, _ = capsys.readouterr().out.partition("next: ")
    assert mark
    for way in ("static, fixed rows", "static, packing", "static, balanced", "pool"):
        assert f"\n {way} " in text or f"\n{way} " in text
    assert "'megatron, cp' is skipped: the cost of cp is unknown" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_way_that_no_longer_exists_is_refused_with_those_that_do(
    simulate: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        simulate("--ways", "cp only")
    error = capsys.readouterr().err
    assert "cp only" in error
    assert all(way in error for way in WAYS)


@pytest.mark.parametrize(
    ("pool", "printed"),
    [({"pool": "tp4"}, "--strategy 4*tp1 "), ({"pool": "4*tp1"}, "--strategy-pool ")],
)
def test_the_next_command_trains_with_what_is_faster(
    pool: dict[str, str],
    printed: str,
    simulate: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, lengths = tmp_path / "pool.json", tmp_path / "lengths.json"
    lengths.write_text(json.dumps([400, 300, 120, 90]))
    rows = [{"name": name, "replicas": text} for name, text in pool.items()]
    path.write_text(json.dumps(POOL | {"strategies": rows}))
    flags = ("--pool", str(path), "--lengths", str(lengths), "--ways", "static, balanced", "pool")
    assert simulate(*flags) == 0
    text = capsys.readouterr().out
    assert printed in text.replace("'", "").partition("next: ")[2]


def test_rows_of_the_limit_have_room_for_padding(
    simulate: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With cp4 a sequence of 500 tokens takes 504."""
    path = tmp_path / "profile.json"
    cp4 = {**SCHEMES[-1], "tp": 1, "cp": 4}
    path.write_text(json.dumps(PROFILE | {"schemes": [*SCHEMES, cp4]}))
    flags = ("--cost-profile", str(path), "--ways", "static, packing", "static, fixed rows")
    assert simulate(*flags, "--seq-length", "500") == 0
    assert "skipped" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("how", "num_sequences", "num_tokens"),
    [("split", 11, 2450), ("truncate", 8, 1800), ("drop", 6, 1000), (None, 11, 2450)],
)
def test_long_sequences_are_cut_as_in_training(
    figures: Callable[..., dict[str, Any]], how: str | None, num_sequences: int, num_tokens: int
) -> None:
    flags = [] if how is None else ["--long-sequences", how]
    # An iteration is an epoch.
    size = ["--global-batch-size", str(num_sequences)]
    found = figures("--seq-length", "400", *size, *flags)
    assert (found["num_tokens"], found["longest_tokens"]) == (2 * num_tokens, 400)


def test_the_model_in_the_profile_and_its_device_are_the_defaults(
    figures: Callable[..., dict[str, Any]],
    regroup: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = figures(*regroup)
    capsys.readouterr()
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE | {"model": MODEL, "device": "CPU of a server, 4 ranks"}))
    assert figures("--cost-profile", str(path)) == given
    assert "regrouping and optimizer count 0" not in capsys.readouterr().err


def test_widths_of_cp_that_were_not_measured_have_an_overhead_too(
    figures: Callable[..., dict[str, Any]], regroup: list[str]
) -> None:
    (way,) = figures(*regroup, "--ways", "megatron, cp", "--seq-length", "900")["ways"]
    assert any("cp4~" in strategy["replicas"] for strategy in way["strategies"])
    assert way["received_bytes_per_iteration"] > 0


def test_the_same_files_and_flags_give_the_same_figures(
    figures: Callable[..., dict[str, Any]],
) -> None:
    assert figures() == figures()


def test_a_profile_of_another_model_is_refused(
    simulate: Callable[..., int],
    tmp_path: Path,
    regroup: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE | {"model": MODEL | {"num_layers": 8}}))
    assert simulate("--cost-profile", str(path), *regroup) == 2
    assert "num_layers 8 instead of 4;" in capsys.readouterr().err
    assert simulate("--cost-profile", str(path), "--ways", "pool") == 0, "no model to compare with"


def test_a_bandwidth_changes_the_result(
    figures: Callable[..., dict[str, Any]], regroup: list[str]
) -> None:
    def time_s(*flags: str) -> float:
        seconds: float = figures(*flags)["ways"][0]["time_s"]
        return seconds

    plain_s, regrouping_s = time_s(), time_s(*regroup)
    assert plain_s < regrouping_s < time_s(*regroup, "--inter-node-gb-per-s", "0.1")
    assert regrouping_s < time_s(*regroup, "--no-regroup-overlap")


def test_gradients_in_bf16_are_advised_where_links_are_slow(
    simulate: Callable[..., int], regroup: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    advice = "--grad-reduce-in-bf16 would save "
    ways = ("--ways", "pool", "--no-regroup-overlap", *regroup)
    for slow, advised in (("1000", False), ("0.01", True)):
        links = ("--intra-node-gb-per-s", slow, "--inter-node-gb-per-s", slow)
        assert simulate(*ways, *links) == 0
        assert (advice in capsys.readouterr().out) == advised
        assert simulate(*ways, *links, "--grad-reduce-in-bf16") == 0
        assert advice not in capsys.readouterr().out


def test_it_writes_results_pictures_and_a_trace_that_adds_up(
    tmp_path: Path, figures: Callable[..., dict[str, Any]], regroup: list[str]
) -> None:
    content = figures(*regroup, "--out", str(tmp_path), "--trace-iterations", "1..2")
    assert json.loads((tmp_path / "simulation.json").read_text()) == content
    for name in ("simulation.png", "iteration.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG_HEAD)
    spans = read_trace(tmp_path / "trace.json")
    (way,) = content["ways"]
    assert sorted(set(spans.values("iteration"))) == [1, 2]
    shares = rank_shares(spans)
    assert len(shares) == content["num_ranks"] == 4
    work_us = sum(share.forward_us + share.backward_us for share in shares)
    gather_waits_us = sum(
        spans.where(rank=share.rank, name="gather wait").total_us for share in shares
    )
    assert work_us - gather_waits_us == pytest.approx(
        way["shares"]["work"] * 4 * way["time_s"] * 1e6, rel=1e-6
    )
    for share in shares:
        assert share.window_us == pytest.approx(way["time_s"] * 1e6, rel=1e-3)


def test_the_picture_of_an_iteration_names_schemes_and_has_no_empty_rows(
    tmp_path: Path, simulate: Callable[..., int], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures: list[Figure] = []
    draw = Figure.savefig

    def keep(figure: Figure, *where: Any, **how: Any) -> None:
        figures.append(figure)
        draw(figure, *where, **how)

    monkeypatch.setattr(Figure, "savefig", keep)
    assert simulate("--ways", "pool", "--out", str(tmp_path)) == 0
    (axes,) = figures[-1].axes
    texts = [label.get_text() for label in axes.get_yticklabels()]
    assert not any("waits" in text for text in texts)
    assert {text.partition(",")[0] for text in texts} <= {"tp4", "tp2", "tp1"}
    assert texts[0] in ("tp4, ranks 0-3  compute", "tp2, ranks 0-1  compute")


def test_the_model_can_be_described_by_flags(
    simulate: Callable[..., int], regroup: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name: f"--{name.replace('_', '-')}" for name in MODEL} | {
        "vocab_size": "--padded-vocab-size"
    }
    sizes = [(names[name], str(size)) for name, size in MODEL.items() if size not in (True, False)]
    flags = [*itertools.chain(*sizes), "--swiglu", "--untie-embeddings-and-output-weights"]
    printed = []
    for model in (regroup[:2], flags):
        assert simulate(*model, *regroup[2:], "--ways", "pool", "--json") == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert json.loads(printed[0])["ways"][0]["received_bytes_per_iteration"] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--iterations", "0"], "--iterations must be at least 1 but is 0"),
        (["--iterations", "1" + "0" * 18], "--iterations must be at most 1,000,000 but is 1000"),
        (["--iterations", "999999", "--global-batch-size", "17"], "at most 16,777,216"),
        (["--plan-time", "-1"], "--plan-time must be at least 0 but is -1.0"),
        (["--plan-time", "inf"], "--plan-time must be at most 86400 but is inf"),
        (["--seq-length", "0"], "--seq-length must be at least 1 but is 0"),
        (["--long-sequence-window", "2"], "no sequence waits for another"),
        (["--seed", "-1"], "--seed must be at least 0 but is -1"),
        (["--plan-ahead", "-1"], "--plan-ahead must be at least 0 but is -1"),
        (["--device", "a800-80g"], "the model, which is not described"),
        (["--inter-node-gb-per-s", "3"], "--device is not given"),
        (["--trace-iterations", "7"], "begin with 7 but --iterations is 2"),
        (["--lengths", "nowhere.csv"], "nowhere.csv"),
        (["--ways", "megatron, cp"], "no strategy for megatron, cp"),
    ],
)
def test_bad_input_is_refused_in_a_line(
    flags: list[str],
    message: str,
    simulate: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert simulate(*flags) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
