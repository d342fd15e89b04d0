"""Every test of this folder needs the stand-in."""

import pytest

from tests.cuda_stand_in.launch import why_not


@pytest.fixture(scope="session", autouse=True)
def _stand_in() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
