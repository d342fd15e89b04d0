"""The training program with gradients that travel in bf16."""

from pathlib import Path

import pytest

from tests.support.training_run import Launch

pytestmark = pytest.mark.distributed

FLAGS = ("--bf16", "--grad-reduce-in-bf16")


def test_it_resumes_bit_by_bit_and_reports_fewer_bytes(launch: Launch, tmp_path: Path) -> None:
    save = ("--save", str(tmp_path), "--save-interval", "2")
    whole = launch("tp2", 2, *FLAGS, *save)
    resumed = launch("tp2", 2, *FLAGS, "--load", str(tmp_path), "--ckpt-step", "2")
    assert resumed.losses == whole.losses[2:]
    assert [r.grad_norm for r in resumed.records] == [r.grad_norm for r in whole.records[2:]]
    in_fp32 = launch("tp2", 2, "--bf16")
    assert in_fp32.losses == pytest.approx(whole.losses, rel=1e-2)
    assert in_fp32.losses != whole.losses
    # Parameters take a third of the bytes, gradients the rest, of which half is left.
    (fewer,), (more,) = ({r.regroup_bytes for r in run.records} for run in (whole, in_fp32))
    assert fewer is not None
    assert more is not None
    assert fewer / more == pytest.approx(2 / 3, rel=0.01)
