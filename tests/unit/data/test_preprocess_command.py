import io

import numpy as np
from rich.console import Console

from megatron.hydraulis.data.preprocess import LengthBin, length_bins, length_table


def test_bins_are_powers_of_two_without_gaps() -> None:
    assert length_bins(np.array([2, 3, 4, 16, 31, 17])) == (
        LengthBin(2, 3, 2, 5),
        LengthBin(4, 7, 1, 4),
        LengthBin(8, 15, 0, 0),
        LengthBin(16, 31, 3, 64),
    )


def test_every_border_falls_into_its_bin() -> None:
    for exponent in range(1, 48):
        for length in ((1 << exponent) - 1, 1 << exponent):
            (only,) = length_bins(np.array([length]))
            assert only.first <= length <= only.last


def test_a_rare_length_is_still_seen() -> None:
    output = io.StringIO()
    Console(width=100, file=output).print(length_table(np.array([1] * 10_000 + [5000])))
    lines = [line for line in output.getvalue().splitlines() if "4,096" in line]
    assert len(lines) == 1
    assert lines[0].count("█") == 1
    assert "33.3%" in lines[0]
