"""``plan`` end to end: output, files, the reasons for a choice, errors."""

import ctypes
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.planner.plan import IterationPlan, PlanExplanation, StrategyOutcome
from megatron.hydraulis.planner.planned import PlannedBatch, replica_table, summary
from megatron.hydraulis.planner.planners import CertifiedPlanner, GreedyPlanner
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.index_file import write_idx
from tests.support.plan_oracle import check_plan
from tests.support.planning import TableCostModel
from tests.support.planning_files import LENGTHS, POOL, PROFILE, write_files

EXAMPLES = Path(__file__).parents[3] / "examples"
EXAMPLE_FLAGS = [
    "--lengths",
    str(EXAMPLES / "lengths_instance_b.json"),
    "--cost-profile",
    str(EXAMPLES / "cost_profile_llama32b_a800.json"),
    "--pool",
    str(EXAMPLES / "pool_64_ranks.json"),
]


def check_example(path: Path) -> None:
    """Check a plan for the example's batch."""
    lengths, profile, pool = (json.loads(Path(file).read_text()) for file in EXAMPLE_FLAGS[1::2])
    check_plan(json.loads(path.read_text()), lengths, pool, profile)


def profile_with(**changes: Any) -> dict[str, Any]:
    """The profile with other figures of its first scheme."""
    first, *others = PROFILE["schemes"]
    return {**PROFILE, "schemes": [first | changes, *others]}


def test_one_line_and_a_valid_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    flags = write_files(tmp_path)
    assert main(["plan", *flags, "--out", str(out)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"strategy mixed: \d\.\d{4} s predicted, of which 0\.0150 s regrouping and optimizer, "
        r"dispatch bound \d\.\d{4} s, gap \d+\.\d\d % "
        r"\(.+\); 12 sequences, 9600 tokens; planned in \d+\.\d{3} s",
        line,
    )
    plan = json.loads(out.read_text())
    assert IterationPlan.from_json(plan).num_tokens == sum(LENGTHS)
    check_plan(plan, LENGTHS, POOL, PROFILE)


def test_the_examples_of_the_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", *EXAMPLE_FLAGS, "--out", str(out), "--explain"]) == 0
    text = capsys.readouterr().out
    # The published planner takes S2, at 2.56 s without regrouping (PKU-DAIR/Hetu).
    predicted = re.match(r"strategy (C\d): (\d\.\d{4}) s predicted, of which (\d\.\d{4}) s", text)
    assert predicted is not None
    assert predicted[1] == "C5"
    # S5, the best without cp, takes 2.131 s.
    assert float(predicted[2]) - float(predicted[3]) < 2.05
    for name in ("S0", "S1", "S2", "S3", "S4", "S5", "S6", "C1", "W1"):
        assert re.search(rf"│ {name} +│ [0-9a-z*+~]+ +│ +\d\.\d{{4}} │", text)
    assert len(re.findall("│ chosen +│", text)) == 1
    check_example(out)


def test_gradients_in_bf16_are_advised_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    option = "--grad-reduce-in-bf16"
    # With overlap compute hides most of the scatter of strategies without pipelines.
    links = ["--device", "a800-80g", "--no-regroup-overlap"]
    plan_s = []
    for flags in ([], [option]):
        assert main(["plan", *EXAMPLE_FLAGS, *links, *flags, "--out", str(out)]) == 0
        printed = capsys.readouterr().out
        advice = re.search(
            rf"^{option} would save ([\d.]+) ms of an iteration's [\d,.]+ ms$",
            printed,
            re.MULTILINE,
        )
        assert (advice is None) == bool(flags)
        plan_s.append(json.loads(out.read_text())["predicted_time_s"])
        if advice is not None:
            saved_s = float(advice[1]) / 1e3
        check_example(out)
    # Another strategy may now be better still.
    assert plan_s[0] - plan_s[1] >= saved_s - 5e-5 > 0.01 * plan_s[0]


def test_the_plan_of_the_example_is_the_best_of_its_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, pool = tmp_path / "plan.json", tmp_path / "pool.json"
    without_cp = Pool.of(*(s for s in Pool.read(EXAMPLE_FLAGS[-1]).strategies if s.name[0] == "S"))
    pool.write_text(json.dumps({"version": 1, **without_cp.to_json()}))
    flags = [*EXAMPLE_FLAGS[:-1], str(pool)]
    assert main(["plan", *flags, "--out", str(out)]) == 0
    assert "strategy S5: 2.6057 s" in capsys.readouterr().out
    plan = json.loads(out.read_text())
    # Weights on the replicas, found without a solver, prove that no plan with S5 takes less.
    assert plan["dispatch"]["objective_s"] == pytest.approx(2.1308304)
    assert plan["dispatch"]["bound_s"] <= 2.1308305
    check_example(out)


def test_seed_and_time_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    digests = set()
    for _ in range(2):
        assert main(["plan", *EXAMPLE_FLAGS, "--seed", "7", "--json", "--out", str(out)]) == 0
        digests.add(json.loads(capsys.readouterr().out)["digest"])
    assert len(digests) == 1
    limit = ["--plan-time-limit", "1e-9"]
    assert main(["plan", *EXAMPLE_FLAGS, *limit, "--out", str(out)]) == 0
    assert "(time limit)" in capsys.readouterr().out
    check_example(out)
    assert main(["plan", *EXAMPLE_FLAGS, "--plan-time-limit", "0"]) == 2
    assert "--plan-time-limit must be above 0 but is 0.0" in capsys.readouterr().err
    for seed in ("-1", str(2**31)):
        assert main(["plan", *EXAMPLE_FLAGS, "--seed", seed]) == 2
        assert re.search(f"--seed must be .* but is {seed};", capsys.readouterr().err)


def test_replicas_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = {"name": "short", "replicas": "4*tp1pp2"}
    pool = POOL | {"strategies": [*POOL["strategies"], short]}
    assert main(["plan", *write_files(tmp_path, pool=pool), "--explain"]) == 0
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    rows = [row for row in rows if len(row) == 7]
    strategies = {row[0]: row for row in rows if row[0] in ("mixed", "long", "short")}
    replicas = [row for row in rows if row[0] in ("tp4", "pp2")]
    assert [row[:2] for row in replicas] == [["tp4", "0-3"], ["pp2", "4-5"], ["pp2", "6-7"]]
    assert sum(int(row[2]) for row in replicas) == len(LENGTHS)
    assert sum(int(row[3]) for row in replicas) == sum(LENGTHS)
    idle = [float(row[6]) for row in replicas]
    # One stage never waits for itself; two fill and drain.
    slowest = max(replicas, key=lambda row: float(row[5]))
    assert all(0.0 <= share < 100.0 for share in idle)
    assert min(idle) == 0.0 if slowest[0] == "tp4" else min(idle) > 0.0
    assert strategies["short"][2:6] == ["–", "–", "–", "0.0000"]
    assert strategies["mixed"][5:] == ["0.0150", "chosen"]
    assert strategies["long"][5] == "0.5000"
    assert strategies["long"][6] != "chosen"


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = write_files(tmp_path)
    printed = []
    for _ in range(2):
        assert main(["plan", *flags, "--json"]) == 0
        printed.append(json.loads(capsys.readouterr().out))
    assert printed[0]["digest"] == printed[1]["digest"]
    assert IterationPlan.from_json(printed[0]["plan"]).digest == printed[0]["digest"]
    outcomes = {outcome["name"]: outcome for outcome in printed[0]["strategies"]}
    assert outcomes["mixed"]["why_not_chosen"] is None
    assert outcomes["mixed"]["found_s"] == printed[0]["plan"]["predicted_time_s"]
    assert outcomes["long"]["bound_s"] > 0.5


def test_documents_of_an_index(tmp_path: Path) -> None:
    flags = write_files(tmp_path)
    out = tmp_path / "plan.json"
    flags[flags.index("--lengths") + 1] = str(write_idx(tmp_path / "c.idx", [[301], [1], [51, 50]]))
    assert main(["plan", *flags, "--out", str(out)]) == 0
    assert IterationPlan.from_json(json.loads(out.read_text())).num_tokens == 300 + 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [4001]}, "a sequence must fit one micro-batch but sequence 0 has 4001"),
        ({"lengths": []}, "at least 1 sequence of 1 token but the file has 0"),
        ({"pool": POOL | {"num_ranks": 4}}, "3 replicas use 8 ranks but the job has 4"),
        ({"cost_profile": PROFILE | {"schemes": PROFILE["schemes"][:1]}}, "which has tp4; measure"),
        ({"cost_profile": []}, "must be an object but is []"),
        ({"cost_profile": profile_with(c_ms=10**400)}, "c_ms must be a number of usual size"),
        ({"cost_profile": profile_with(a_ms_per_token2=1e308)}, "but are a = 1e+308 ms/token²"),
        ({"cost_profile": profile_with(max_tokens=10**400)}, "a whole number of usual size"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *write_files(tmp_path, **changes)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_a_plan_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *write_files(tmp_path), "--out", str(tmp_path)]) == 2
    assert f"writing {tmp_path} fails: Is a directory" in capsys.readouterr().err


def test_help_names_units(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", "--help"])
    assert exit_.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "lengths of the batch in tokens" in text
    assert "in ms" in text
    assert "in s" in text
    assert "wall-clock limit in s" in text


def test_planning_imports_neither_torch_nor_megatron_core() -> None:
    script = (
        "import sys\n"
        "from megatron.hydraulis.__main__ import main\n"
        f"assert main({['plan', *EXAMPLE_FLAGS]!r}) == 0\n"
        "assert not {'torch', 'megatron.core', 'megatron.training'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


EXPLAINED_POOL = Pool.of(Strategy.parse("tp2@1,0+2*tp1", 4), Strategy.parse("pp2+2*idle", 4))


def outcome(
    bound_s: float | None, found_s: float | None, *, name: str = "a", why: str = ""
) -> StrategyOutcome:
    return StrategyOutcome(name=name, bound_s=bound_s, found_s=found_s, why_not_chosen=why)


def rendered(*tables: object) -> list[list[str]]:
    """The cells of all rows of the tables."""
    console = Console(width=200)
    with console.capture() as captured:
        for table in tables:
            console.print(table)
    lines = captured.get().splitlines()
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_gap_of_an_outcome() -> None:
    assert outcome(0.9, 1.0).gap == pytest.approx(0.1)
    assert outcome(0.0, 0.0).gap == 0.0
    assert outcome(1.0, 1.0 - 1e-12).gap == 0.0
    assert outcome(None, None).gap is None
    assert outcome(0.5, None).gap is None


def test_nothing_is_better_than_a_bound() -> None:
    with pytest.raises(PlanError, match=r"'a': .* a plan takes 0.9 s and the bound is 1.0 s"):
        outcome(1.0, 0.9)


@pytest.mark.parametrize("marked", [[], ["tp2@1,0+2*tp1", "pp2+2*idle"], ["pp2+2*idle"]])
def test_exactly_the_plans_strategy_is_chosen(marked: list[str]) -> None:
    plan = GreedyPlanner(EXPLAINED_POOL, TableCostModel()).plan([100, 200, 300])
    assert plan.strategy == EXPLAINED_POOL.strategies[0].name
    names = [strategy.name for strategy in EXPLAINED_POOL.strategies]
    outcomes = tuple(
        outcome(0.0, 1.0, name=name, why="" if place in marked else "slow")
        for name, place in zip(names, ("tp2@1,0+2*tp1", "pp2+2*idle"), strict=True)
    )
    with pytest.raises(PlanError, match="one strategy is chosen, the plan's"):
        PlanExplanation(plan=plan, strategies=outcomes)


@pytest.mark.parametrize("planner", [GreedyPlanner, CertifiedPlanner])
def test_every_strategy_has_a_row_and_every_replica(
    planner: type[GreedyPlanner] | type[CertifiedPlanner],
) -> None:
    model = TableCostModel(limits={(1, 1, 2): 250})
    explanation = planner(EXPLAINED_POOL, model).explain([100, 200, 300, 50])
    plan = explanation.plan
    planned = PlannedBatch(plan, explanation.strategies, EXPLAINED_POOL, model)
    rows = rendered(planned.strategy_table())
    assert [row[0] for row in rows] == [strategy.name for strategy in EXPLAINED_POOL.strategies]
    assert [row[1] for row in rows] == [str(strategy) for strategy in EXPLAINED_POOL.strategies]
    assert rows[0][6] == "chosen"
    assert float(rows[0][3]) == pytest.approx(plan.predicted_time_s, abs=1e-4)
    assert rows[1][2:5] == ["–", "–", "–"]
    replicas = rendered(replica_table(plan, model))
    assert [row[:2] for row in replicas] == [["tp2", "1, 0"], ["tp1", "2"], ["tp1", "3"]]
    assert sum(int(row[3]) for row in replicas) == 650
    assert min(float(row[6]) for row in replicas) == 0.0
    text = summary(plan)
    assert text.startswith(f"strategy {plan.strategy}: {plan.predicted_time_s:.4f} s predicted")
    assert "4 sequences, 650 tokens" in text


def test_if_nothing_takes_time_nothing_is_idle() -> None:
    model = TableCostModel(times=lambda scheme: Coefficients(0.0, 0.0, 0.0))
    for planner in (GreedyPlanner(EXPLAINED_POOL, model), CertifiedPlanner(EXPLAINED_POOL, model)):
        plan = planner.plan([100, 200, 300])
        assert plan.predicted_time_s == 0.0
        assert {row[6] for row in rendered(replica_table(plan, model))} == {"0.0"}
        assert plan.dispatch is not None
        assert "Error" not in plan.dispatch.status


def test_the_solvers_output_is_not_in_the_json(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiGHS prints by C's own output, which is written when its buffer is full or flushed."""
    honest = CertifiedPlanner.explain
    native = ctypes.CDLL(None)

    def noisy(
        planner: CertifiedPlanner, lengths: Sequence[int], *, iteration: int = 0
    ) -> PlanExplanation:
        native.printf(b"a word of the solver\n")
        return honest(planner, lengths, iteration=iteration)

    monkeypatch.setattr(CertifiedPlanner, "explain", noisy)
    assert main(["plan", *write_files(tmp_path), "--json"]) == 0
    native.fflush(None)
    printed = capfd.readouterr()
    assert math.isfinite(json.loads(printed.out)["plan"]["predicted_time_s"])
    assert printed.err == "a word of the solver\n"
