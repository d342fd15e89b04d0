import argparse
import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.__main__ import main, markdown
from benchmarks.gpu.packs import NUM_TOKENS, PACKS
from benchmarks.gpu.programs import profile_flags, training_flags, write_corpus
from megatron.hydraulis.flags.arguments import parse_arguments
from megatron.hydraulis.profiler.command import add_arguments, training_defaults


def test_packs_have_equal_tokens_and_different_squares() -> None:
    assert {sum(pack.lengths) for pack in PACKS} == {NUM_TOKENS}
    squares = [sum(n * n for n in pack.lengths) for pack in PACKS]
    assert squares == [pack.sum_of_squares for pack in PACKS]
    assert len(set(squares)) == len(PACKS)


def test_the_programs_take_their_flags(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    typed = profile_flags(tmp_path / "profile.json")
    place = typed.index("--")
    assert parser.parse_args(typed[:place]).max_tokens == NUM_TOKENS
    model = training_defaults(typed[place + 1 :])
    assert parse_arguments(model, num_ranks=1, rank=0, needs_data=False).args.bf16
    flags = training_flags(tmp_path, write_corpus(tmp_path, num_documents=3))
    resolved = parse_arguments(flags, num_ranks=1, rank=0)
    shape = resolved.shape
    assert 1.2e9 < shape.num_parameters < 1.4e9
    assert resolved.hydraulis.memory_trial == "on"


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure for minutes")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--results", str(tmp_path)]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_results_as_tables() -> None:
    found = {
        "setup": {
            "device": "GPU",
            "date": "2026-01-01",
            "torch": "2",
            "megatron-core": "0",
            "transformer-engine": "not installed",
        },
        "attention": {"rows": [{"pack": "4 x 8", "te_ms": 1.23456}], "left_out": {"te": "absent"}},
        "profile": {"rows": []},
        "training": {"mfu": 0.4, "memory": [{"tokens": 5, "foretold_gib": 2.0}]},
    }
    text = markdown(json.loads(json.dumps(found)))
    for line in ("# GPU, 2026-01-01", "| 4 x 8 | 1.235 |", "Left out: te: absent.", "- mfu: 0.4"):
        assert line in text.splitlines()
    assert "| 5 | 2 |" in text
