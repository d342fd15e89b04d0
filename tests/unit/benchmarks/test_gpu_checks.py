"""The checks of a machine with GPUs: their runner, with steps that need none."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import machine, runner
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.checks import CHANGING, LAW_STRATEGIES, steps
from benchmarks.gpu.programs import profile_flags, training_flags
from benchmarks.gpu.runner import Figure, Results, Run, Step, run_steps
from benchmarks.gpu.sizes import (
    POOLS,
    REAL,
    SMALL,
    Sizes,
    add_size_options,
    chosen_sizes,
    pool_of_checks,
    sizes_of,
)
from benchmarks.gpu.training_inputs import write_corpus
from megatron.hydraulis.flags.arguments import parse_arguments
from megatron.hydraulis.profiler.command import add_arguments, training_defaults
from megatron.hydraulis.strategy import Pool, Strategy

ROOT = Path(__file__).resolve().parents[3]
WRITES = (
    "import json, os, pathlib; pathlib.Path({folder!r}, 'figures.jsonl').open('a').write("
    "json.dumps({{'key': 'ratio', 'value': 1.5, 'details': {{'rank': os.environ['RANK']}}}}) + "
    "'\\n'); {then}"
)
RATIO = Figure(key="ratio", what="a ratio", unit="x", at_most=2.0)
SPEED = Figure(key="speed", what="a speed", unit="tokens/s", at_least=10.0, is_of_device=True)


@pytest.fixture(autouse=True)
def _shorter_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LEAST_S", 0.1)
    monkeypatch.setattr(runner, "SECONDS_AFTER_FAILURE", 1.0)
    monkeypatch.setattr(runner, "POLL_S", 0.02)


def step(
    name: str,
    run: Callable[[Run], None],
    figures: tuple[Figure, ...] = (RATIO,),
    limit_s: float = 30.0,
    why_not: str = "",
) -> Step:
    return Step(name, "shows something", limit_s, figures, run, why_not)


def ranks(num: int, then: str) -> Callable[[Run], None]:
    """Rank 0 writes a figure; then all ranks do something."""

    def run(run: Run) -> None:
        writes = WRITES.format(folder=str(run.folder), then="pass")
        run.ranks(num, "-c", f"import os\nif os.environ['RANK'] == '0':\n    {writes}\n{then}")

    return run


def measure(**values: float) -> Callable[[Run], None]:
    def run(run: Run) -> None:
        for key, value in values.items():
            run.measured(key, value)

    return run


def run_all(tmp_path: Path, *all_steps: Step, **options: Any) -> dict[str, Any]:
    """Run them; what the file holds."""
    path = tmp_path / "results" / "all.json"
    given: dict[str, Any] = {"budget_s": 60.0, "on_stand_in": False, "say": lambda line: None}
    run_steps(
        all_steps, Results({"date": "today"}), path, keep=tmp_path / "kept", **(given | options)
    )
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_figures_are_judged_by_their_bounds(tmp_path: Path) -> None:
    found = run_all(
        tmp_path,
        step("good", measure(ratio=2.0, speed=11.0), (RATIO, SPEED)),
        step("bad", measure(ratio=2.1, speed=float("nan")), (RATIO, SPEED)),
        step("without bound", measure(size=3.0, more=1), (Figure(key="size", what="a size"),)),
    )
    rows = [row for each in found["steps"] for row in each["figures"]]
    assert [row["verdict"] for row in rows] == ["pass", "pass", "FAIL", "FAIL", "measured"]
    assert [row["expected"] for row in rows[:2]] == ["at most 2", "at least 10"]
    assert found["failed"]
    assert found["steps"][2]["other_figures"][0]["key"] == "more"
    text = "\n".join(found["table"])
    for part in ("a ratio", "at least 10", "11 tokens/s", "FAIL: it is nan"):
        assert part in text


def test_the_stand_in_shows_no_speed(tmp_path: Path) -> None:
    slow = step("slow", measure(ratio=1.0, speed=1.0), (RATIO, SPEED))
    found = run_all(tmp_path, slow, on_stand_in=True)
    ratio, speed = found["steps"][0]["figures"]
    assert (ratio["verdict"], speed["verdict"]) == ("pass", "on the stand-in: no meaning")
    assert speed["value"] == 1.0
    assert not found["failed"]


def test_a_failed_rank_leaves_its_figures_and_its_log_and_stops_nobody_else(
    tmp_path: Path,
) -> None:
    fails = (
        "import time\nif os.environ['RANK'] == '1':\n    raise OSError('bad card')\ntime.sleep(60)"
    )
    begun_s = time.monotonic()
    found = run_all(
        tmp_path,
        step("broken", ranks(2, fails), (RATIO, SPEED)),
        step("raises", lambda run: print(1 / 0)),
        step("sound", ranks(2, "pass")),
    )
    assert time.monotonic() - begun_s < 40, "the other rank was not waited for"
    broken, raises, sound = found["steps"]
    assert broken["status"] == "failed"
    assert "process 1 with status 1 of 2 ended" in broken["why"]
    assert "OSError: bad card" in broken["log_tails"]["log.rank1"]
    assert [row["verdict"] for row in broken["figures"]] == ["pass", "FAIL"]
    assert broken["figures"][1]["why"] == "the step failed"
    assert "ZeroDivisionError" in raises["log_tails"]["step"]
    assert sound["status"] == "done"
    assert sound["figures"][0]["details"] == {"rank": "0"}


def test_a_step_that_hangs_ends_at_its_limit_and_shows_where(tmp_path: Path) -> None:
    hangs = "import time\ndef wait_for_ever():\n    time.sleep(600)\nwait_for_ever()"
    found = run_all(tmp_path, step("hangs", ranks(2, hangs), limit_s=2.0))
    (hung,) = found["steps"]
    assert hung["status"] == "failed"
    assert "time is over and process 0, 1 of 2 has not ended" in hung["why"]
    assert "in wait_for_ever" in hung["log_tails"]["log.rank1"]


def test_what_cannot_run_and_what_comes_too_late_is_listed_with_the_reason(tmp_path: Path) -> None:
    found = run_all(
        tmp_path,
        step("large", measure(ratio=1.0), why_not="it needs 8 GPUs"),
        step("long", ranks(1, "import time; time.sleep(60)")),
        step("late", measure(ratio=1.0)),
        budget_s=0.6,
    )
    large, long, late = found["steps"]
    assert (large["status"], large["figures"][0]["why"]) == ("not run", "it needs 8 GPUs")
    assert long["status"] == "failed"
    assert (late["status"], late["why"]) == ("not run", "the 0.01 minutes are over")
    assert "not run: it needs 8 GPUs" in "\n".join(found["table"]).replace("\n", " ")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_writes_its_file_and_ends_its_ranks(
    number: signal.Signals, tmp_path: Path
) -> None:
    mark, path = tmp_path / "mark", tmp_path / "all.json"
    sleeps = f"import time\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)"
    all_steps = [step("sleeps", ranks(1, sleeps)), step("next", measure(ratio=1.0))]
    process = multiprocessing.get_context("fork").Process(
        target=run_steps,
        args=(all_steps, Results({}), path),
        kwargs={"budget_s": 60.0, "on_stand_in": False},
    )
    process.start()
    assert process.pid is not None
    end_s = time.monotonic() + 60
    while not (mark.exists() and mark.read_text()):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.join(30)
    assert process.exitcode == 0
    found = json.loads(path.read_text())
    assert [(each["status"], each["why"]) for each in found["steps"]] == [
        ("failed", "interrupted"),
        ("not run", "interrupted"),
    ]
    assert found["steps"][0]["figures"][0]["value"] == 1.5
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


@pytest.mark.parametrize("sizes", [REAL, SMALL])
@pytest.mark.parametrize("num_gpus", [1, 2, 3, 4, 7, 8, 16])
def test_the_number_of_gpus_decides_what_runs(sizes: Sizes, num_gpus: int, tmp_path: Path) -> None:
    found = steps(sizes, num_gpus, peak_flops_per_s=1e15, profile_path=tmp_path / "profile.json")
    cannot = {each.name for each in found if each.why_not}
    several = {"order-1", "order-32", "overlap-1", "overlap-8", "overlap-32"}
    assert cannot == {1: {*several, "pool"}, 2: {"pool"}, 3: {"pool"}}.get(num_gpus, set())
    for each in found:
        keys = [figure.key for figure in each.figures]
        assert len(keys) == len(set(keys)), each.name
    law = next(each for each in found if each.name == "law")
    assert len(law.figures) == 2 * {1: 1, 2: 4, 3: 4}.get(num_gpus, 6)


@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_strategies_are_of_as_many_gpus(num_gpus: int) -> None:
    texts = [*LAW_STRATEGIES[num_gpus], *CHANGING.get(num_gpus, "tp1").split("|")]
    for text in texts:
        Strategy.parse(text.strip(), num_gpus)


def test_the_pool_of_four_is_that_of_the_quickstart() -> None:
    given = Pool.read(ROOT / "examples" / "pool_4_ranks.json")
    assert set(POOLS[4]) == {str(strategy) for strategy in given.strategies}
    assert pool_of_checks(8).num_ranks == 8


def test_models_follow_the_memory_of_a_gpu() -> None:
    roomy, tight, least = (sizes_of(is_small=False, memory_bytes=x) for x in (80e9, 40e9, 24e9))
    assert 1.2e9 < roomy.model.shape.num_parameters < 1.4e9
    assert tight.model.shape.num_parameters == roomy.model.shape.num_parameters
    assert least.model.shape.num_parameters < 0.6e9
    assert "--recompute-granularity" not in roomy.model.flags
    parser = argparse.ArgumentParser()
    add_size_options(parser)
    for sizes in (roomy, tight, least, SMALL):
        assert chosen_sizes(parser.parse_args(sizes.options)) == sizes


@pytest.mark.parametrize("sizes", [REAL, SMALL])
def test_the_programs_take_their_flags(sizes: Sizes, tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    typed = profile_flags(sizes, tmp_path / "profile.json", ["tp1", "tp2"])
    place = typed.index("--")
    assert parser.parse_args(typed[:place]).schemes == ["tp1", "tp2"]
    model = training_defaults(typed[place + 1 :])
    assert parse_arguments(model, num_ranks=1, rank=0, needs_data=False).args.bf16
    write_corpus(replace(sizes, num_documents=3), tmp_path / "corpus")
    resolved = parse_arguments(training_flags(sizes, tmp_path), num_ranks=1, rank=0)
    assert resolved.hydraulis.memory_trial == "on"
    assert resolved.shape.num_parameters == sizes.model.shape.num_parameters


def test_packs_of_the_attention_benchmark_have_equal_tokens() -> None:
    for sizes in (REAL, SMALL):
        assert len({sum(lengths) for lengths in sizes.attention_packs.values()}) == 1


def test_an_unknown_machine_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # In this process, which has imported torch.
    monkeypatch.setattr(Run, "program", lambda *_: json.dumps(machine.describe()))
    assert main(["--results", str(tmp_path)]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
