"""Fixtures that several folders of unit tests share."""

import pytest


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without CUDA on which no launcher has set a variable."""
    # It would set torch and the environment for the tests that follow.
    monkeypatch.setattr(
        "megatron.training.determinism.apply_determinism_to_args", lambda args: None
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for variable in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "RANK"):
        monkeypatch.delenv(variable, raising=False)
