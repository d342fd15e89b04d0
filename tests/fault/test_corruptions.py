"""Fifty of the random corruptions of `tests.fault.corruptions`."""

from pathlib import Path

import pytest

from tests.fault.corruptions import run

pytestmark = [pytest.mark.fault, pytest.mark.distributed]

NUM = 50


def test_a_corrupted_file_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    outcomes = run(NUM, 7, tmp_path)
    assert [outcome for outcome in outcomes if outcome.is_failure] == []
    refused = [outcome for outcome in outcomes if outcome.verdict == "refused"]
    assert len(refused) > NUM // 2
    assert {outcome.kind for outcome in refused} == {o.kind for o in outcomes}
