"""``check-plan``: valid plans pass, every kind of damage is named."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.plan_check import files
from megatron.hydraulis.plan_check.files import Rule
from tests.support.index_file import write_idx
from tests.support.planning_files import LENGTHS, POOL, PROFILE, make_plan, write_files

Content = dict[str, Any]


def batches(plan: Content, replica: int) -> list[Content]:
    """The micro-batches of a replica."""
    found: list[Content] = plan["replicas"][replica]["micro_batches"]
    return found


def missing_key(plan: Content) -> None:
    del plan["replicas"][0]["ranks"]


def text_for_a_number(plan: Content) -> None:
    plan["replicas"][1]["predicted_time_s"] = "fast"


def time_that_is_no_number(plan: Content) -> None:
    plan["predicted_time_s"] = float("nan")


def time_beyond_floats(plan: Content) -> None:
    plan["replicas"][0]["predicted_time_s"] = 10**400


def list_for_a_name(plan: Content) -> None:
    plan["strategy"] = []


def other_strategy(plan: Content) -> None:
    plan["strategy"] = "short"


def replica_left_out(plan: Content) -> None:
    del plan["replicas"][-1]


def other_scheme(plan: Content) -> None:
    plan["replicas"][1]["scheme"] = {"tp": 2, "cp": 1, "pp": 1}


def ranks_swapped(plan: Content) -> None:
    plan["replicas"][0]["ranks"].reverse()


def empty_micro_batch(plan: Content) -> None:
    batches(plan, 0).append({"sequences": [], "lengths": []})


def lost_length(plan: Content) -> None:
    del batches(plan, 0)[0]["lengths"][-1]


def unknown_sequence(plan: Content) -> None:
    batches(plan, 0)[0]["sequences"][0] = len(LENGTHS)


def repeated_sequence(plan: Content) -> None:
    batches(plan, 0).append(copy.deepcopy(batches(plan, 1)[0]))


def missing_sequence(plan: Content) -> None:
    del batches(plan, 1)[0]


def other_length(plan: Content) -> None:
    batches(plan, 0)[-1]["lengths"][0] -= 1


def other_length_of_a_sequence_with_an_id(plan: Content) -> None:
    other_length(plan)
    plan["sequence_ids"] = [500 + place for place in range(len(LENGTHS))]


def an_id_too_few(plan: Content) -> None:
    plan["sequence_ids"] = list(range(len(LENGTHS) - 1))


def too_many_tokens(plan: Content) -> None:
    first, second = batches(plan, 1)[:2]
    first["sequences"] += second["sequences"]
    first["lengths"] += second["lengths"]
    del batches(plan, 1)[1]


def row_too_short(plan: Content) -> None:
    batch = batches(plan, 0)[-1]
    batch["rows"] = [sum(batch["lengths"]) - 4]


def row_that_tp_does_not_divide(plan: Content) -> None:
    batches(plan, 0)[0]["rows"] = [3999]


def row_beyond_the_limit(plan: Content) -> None:
    batches(plan, 0)[0]["rows"] = [4004]


def rows_of_groups_that_are_not_there(plan: Content) -> None:
    batches(plan, 0)[0]["rows"] = [4000, 4000]


def padding_that_takes_no_time(plan: Content) -> None:
    batches(plan, 0)[0]["rows"] = [4000]


def groups_without_splitting(plan: Content) -> None:
    first = batches(plan, 1)[0]
    first["groups"] = [[0, 1, len(first["sequences"])]]


def optimistic_replica(plan: Content) -> None:
    plan["replicas"][2]["predicted_time_s"] *= 0.999


def other_order(plan: Content) -> None:
    # Work was in falling order; with the largest in the middle it takes longer.
    order = sorted(batches(plan, 1), key=lambda batch: sum(batch["lengths"]))
    plan["replicas"][1]["micro_batches"] = [order[0], *order[2:], order[1]]


def overhead_forgotten(plan: Content) -> None:
    plan["predicted_time_s"] = max(r["predicted_time_s"] for r in plan["replicas"])


def other_objective(plan: Content) -> None:
    plan["dispatch"]["objective_s"] *= 1.01


def bound_above_the_plan(plan: Content) -> None:
    plan["packing"] |= {"bound_s": plan["packing"]["objective_s"] * 1.01, "gap": 0.0}


def flattering_gap(plan: Content) -> None:
    plan["dispatch"]["gap"] /= 2


DAMAGES: list[tuple[Callable[[Content], None], Rule, str]] = [
    (missing_key, Rule.PLAN_FORMAT, "needs 'ranks'"),
    (text_for_a_number, Rule.PLAN_FORMAT, "there is 'fast'"),
    (time_that_is_no_number, Rule.PLAN_FORMAT, "there is nan"),
    (time_beyond_floats, Rule.PLAN_FORMAT, "int too large to convert to float"),
    (list_for_a_name, Rule.PLAN_FORMAT, "a name is expected but there is []"),
    (other_strategy, Rule.UNKNOWN_STRATEGY, "for 'short' but the pool has mixed, long"),
    (replica_left_out, Rule.REPLICA_COUNT, "2 replicas but strategy 'mixed' has 3"),
    (
        other_scheme,
        Rule.REPLICA_SCHEME,
        "replica 1 is tp2cp1pp1 but strategy 'mixed' has tp1cp1pp2",
    ),
    (ranks_swapped, Rule.REPLICA_RANKS, "on ranks [3, 2, 1, 0]"),
    (empty_micro_batch, Rule.EMPTY_MICRO_BATCH, "0 sequences and 0 lengths"),
    (lost_length, Rule.EMPTY_MICRO_BATCH, "of replica 0 has"),
    (unknown_sequence, Rule.UNKNOWN_SEQUENCE, "sequence 12 but the batch ends at 11"),
    (repeated_sequence, Rule.REPEATED_SEQUENCE, "once more"),
    (missing_sequence, Rule.MISSING_SEQUENCE, "of 12 sequences are in no micro-batch"),
    (other_length, Rule.SEQUENCE_LENGTH, "sequence 0 with 2999 tokens but it has 3000"),
    (
        other_length_of_a_sequence_with_an_id,
        Rule.SEQUENCE_LENGTH,
        "0 (500 of the corpus) with 2999",
    ),
    (an_id_too_few, Rule.SEQUENCE_IDS, "lists 11 ids but the batch has 12 sequences"),
    (groups_without_splitting, Rule.CONTEXT_GROUPS, "of which the profile knows groups of none"),
    (too_many_tokens, Rule.TOKEN_LIMIT, "but the limit is 900"),
    (row_too_short, Rule.ROWS, "must be a multiple of 4 from 3"),
    (row_that_tp_does_not_divide, Rule.ROWS, "a row of 3999 tokens"),
    (rows_of_groups_that_are_not_there, Rule.ROWS, "lists rows [4000, 4000] but has no groups"),
    (row_beyond_the_limit, Rule.TOKEN_LIMIT, "4004 tokens with padding but the limit is 4000"),
    (padding_that_takes_no_time, Rule.REPLICA_TIME, "the predicted time of replica 0"),
    (optimistic_replica, Rule.REPLICA_TIME, "the predicted time of replica 2"),
    (other_order, Rule.REPLICA_TIME, "the predicted time of replica 1"),
    (overhead_forgotten, Rule.ITERATION_TIME, "regrouping and optimizer 0.015000 s"),
    (other_objective, Rule.STAGE_OBJECTIVE, "the objective of dispatch"),
    (bound_above_the_plan, Rule.STAGE_BOUND, "the bound of packing"),
    (flattering_gap, Rule.STAGE_GAP, "the gap of dispatch"),
]


def one_strategy(replicas: str, *, name: Any = "only") -> Content:
    """The pool with this strategy alone."""
    return {**POOL, "strategies": [{"name": name, "replicas": replicas}]}


def test_every_rule_is_tested_by_a_damage() -> None:
    assert {rule for _, rule, _ in DAMAGES} == set(Rule)


@pytest.mark.parametrize(
    ("damage", "rule", "message"), [pytest.param(*d, id=d[0].__name__) for d in DAMAGES]
)
def test_damaged_plans_are_rejected_by_name(
    damage: Callable[[Content], None],
    rule: Rule,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = make_plan()
    assert (
        min(len(batches(plan, replica)) for replica in (1, 2)) >= 3
    )  # so that the damages have an effect
    damage(plan)
    flags = write_files(tmp_path, plan=plan)
    assert main(["check-plan", *flags]) == 1
    line = capsys.readouterr().out
    assert line.startswith(f"invalid: {rule.value}: ")
    assert line.count("\n") == 1
    assert message in line
    assert main(["check-plan", *flags, "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["valid"], printed["rule"]) == (False, rule.value)


def test_a_valid_plan_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan()
    assert main(["check-plan", *write_files(tmp_path, plan=plan)]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"valid: strategy mixed, {plan['predicted_time_s']:.6f} s; regroup")
    assert "optimizer 0.015000 s by the profile; dispatch" in line
    assert line.count("\n") == 1


def test_a_measured_overhead_is_found_by_replicas_whatever_the_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replicas = POOL["strategies"][0]["replicas"]
    for row, status in (
        ({"name": "other", "replicas": replicas, "regroup_ms": 15.0}, 0),
        ({"name": "other", "replicas": replicas, "regroup_ms": 14.0}, 1),
        ({"name": "mixed", "replicas": "2*tp4", "regroup_ms": 14.0}, 0),
    ):
        profile = PROFILE | {"strategies": [row]}
        flags = write_files(tmp_path, plan=make_plan(), cost_profile=profile)
        assert main(["check-plan", *flags]) == status
    assert "optimizer 0.015000 s by the plan, not checked" in capsys.readouterr().out


def test_overheads_with_gradients_of_another_size_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"name": "other", "replicas": POOL["strategies"][0]["replicas"], "regroup_ms": 14.0}
    for size, option, status in (
        ({}, [], 1),
        ({}, ["--grad-reduce-in-bf16"], 0),
        ({"gradient_bytes": 2}, [], 0),
        ({"gradient_bytes": 2}, ["--grad-reduce-in-bf16"], 1),
    ):
        profile = PROFILE | {"strategies": [row]} | size
        flags = write_files(tmp_path, plan=make_plan(), cost_profile=profile)
        assert main(["check-plan", *flags, *option]) == status


def test_findings_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan() | {"packing": None, "version": 1}
    assert main(["check-plan", *write_files(tmp_path, plan=plan), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert findings["valid"] is True
    assert findings["predicted_time_s"] == pytest.approx(findings["makespan_s"] + 0.015)
    assert set(findings["claimed_bound_s"]) == {"dispatch"}
    assert 0 < findings["proved_bound_s"]["dispatch"] <= findings["makespan_s"]
    # The plan's bound cannot be above the plan's time.
    assert 0 < findings["proved_bound_s"]["packing"] <= findings["makespan_s"]
    # 500 ms of regrouping are part of what the strategy takes.
    assert findings["strategy_bounds_s"]["long"] > 0.5


def test_a_strategy_that_cannot_hold_the_batch_has_no_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {"name": "short", "replicas": "4*tp1pp2"}
    pool = POOL | {"strategies": [*POOL["strategies"], short]}
    assert main(["check-plan", *write_files(tmp_path, plan=make_plan(), pool=pool), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["strategy_bounds_s"]["short"] is None


def test_lengths_from_lines_and_from_an_index(tmp_path: Path) -> None:
    flags = write_files(tmp_path, plan=make_plan())
    place = flags.index("--lengths") + 1
    lines = tmp_path / "lengths.txt"
    lines.write_text("\n".join(map(str, LENGTHS)) + "\n")
    index = write_idx(tmp_path / "corpus.idx", [[1], *([n - 10, 11] for n in LENGTHS)])
    for path in (lines, index):
        flags[place] = str(path)
        assert main(["check-plan", *flags]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": "no plan"}, None),
        ({"lengths": []}, "a batch has at least 1 sequence but this has 0"),
        ({"lengths": [3, 0]}, "a length is from 1 to 1000000000000000000 but one is 0"),
        ({"lengths": ["3", "x"]}, "but one is '3'"),
        ({"pool": POOL | {"num_ranks": 9}}, "is for 8 ranks but the job has 9"),
        ({"pool": {"num_ranks": 8}}, "needs 'strategies' but lacks it"),
        ({"cost_profile": PROFILE | {"schemes": []}}, "uses tp4cp1pp1, which has no row"),
        ({"cost_profile": PROFILE | {"version": 9}}, "version 1 can be read but this is 9"),
        (
            {"cost_profile": PROFILE | {"schemes": PROFILE["schemes"] * 2}},
            "a scheme is listed once but tp4cp1pp1 twice",
        ),
        (
            {"cost_profile": PROFILE | {"strategies": [{"name": "long", "regroup_ms": -1.0}]}},
            "a finite number from 0 on is expected but there is -1.0",
        ),
        (
            {"cost_profile": PROFILE | {"strategies": [{"name": "long", "regroup_ms": 10**400}]}},
            "int too large to convert to float",
        ),
        (
            {"pool": POOL | {"strategies": POOL["strategies"] * 2}},
            "a strategy of the pool is listed once but mixed twice",
        ),
        ({"pool": one_strategy("2*tp4", name=["x"])}, "a name is expected but there is ['x']"),
        ({"pool": one_strategy("999999999*tp4")}, "needs more ranks than the 8 of the job"),
        ({"pool": one_strategy("tp0+2*tp4")}, "'tp0' has a degree of 0"),
        (
            {"pool": one_strategy(f"{10**17}*idle") | {"num_ranks": 10**17}},
            "a job has at most 10000000 ranks",
        ),
        ({"lengths": [10**30]}, "a length is from 1 to 1000000000000000000 but one is 1000"),
    ],
)
def test_files_that_cannot_be_used_are_status_2(
    changes: Content,
    message: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = write_files(tmp_path, **({"plan": make_plan()} | changes))
    if "plan" in changes:
        (tmp_path / "plan.json").write_text("{")
        message = "JSON is expected but"
    assert main(["check-plan", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message is not None
    assert message in error


@pytest.mark.parametrize("name", ["plan", "cost_profile", "pool"])
def test_files_beyond_the_limits_are_status_2(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most_bytes = 5_000_000
    monkeypatch.setattr(files, "_MOST_BYTES", most_bytes)
    flags = write_files(tmp_path, plan=make_plan())
    path = tmp_path / f"{name}.json"
    for text, message in (
        ("[" * 33 + "]" * 33, "at most 32 deep"),
        ("[" * 99_999 + "]" * 99_999, "JSON is expected but"),
        (path.read_text() + " " * most_bytes, f"has more than {most_bytes} bytes"),
    ):
        path.write_text(text)
        assert main(["check-plan", *flags]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plan", "lengths", "cost_profile", "pool"])
def test_missing_files_are_status_2(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = write_files(tmp_path, plan=make_plan())
    (tmp_path / f"{name}.json").unlink()
    assert main(["check-plan", *flags]) == 2
    assert f"{name}.json: cannot be read" in capsys.readouterr().err


def test_the_checker_loads_nothing_of_the_planner(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from megatron.hydraulis.__main__ import main\n"
        f"status = main({['check-plan', *write_files(tmp_path, plan=make_plan())]!r})\n"
        "ours = [name for name in sys.modules if name.startswith('megatron.hydraulis.')]\n"
        "allowed = ('__main__', 'command_line', 'errors', 'plan_check', 'quiet_imports')\n"
        "alien = [name for name in ours if name.split('.')[2] not in allowed]\n"
        "assert not alien, alien\n"
        "assert not {'torch', 'highspy'} & set(sys.modules)\n"
        "sys.exit(status)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
