"""Random corruptions of what a run reads: bytes flipped, files cut, fields changed.

Each must end in an error of this package, or change nothing that the model learns: for example
another valid strategy in a pool. Anything else is a failure: another exception, other tensors than
were saved, other sequences than there are.

    python -m tests.fault.corruptions --num 1000 --seed 1

prints a table by kind of file and outcome, and ends with status 1 if there was a failure.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.hydraulis.checkpoint.folder import CheckpointFolder
from megatron.hydraulis.checkpoint.loading import find_checkpoints, load_first_whole
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.data.dataset import read_index
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.planner.planners import GreedyPlanner, RecordedPlans, plan_path, write_plan
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.checkpoints import fill_moments, make_engine, save_engine
from tests.support.gloo_pool import close_pools, pool_of
from tests.support.models import SmallModel
from tests.support.tiny_corpus import write_corpus

MODEL = SmallModel(num_layers=2, dtype=torch.float32)
ITERATIONS = (3, 5)
LENGTHS = (96, 80, 7, 12, 5, 33, 3, 64)
MOST_CHARACTERS = 2000
"""Length of an error message."""
REFUSED, UNCHANGED, HARMLESS = "refused", "unchanged", "another valid one"

Judge = Callable[[Path], str]
"""Reads what may be corrupted: `UNCHANGED`, `HARMLESS`, or what is wrong; raises HydraulisError."""


@dataclass(frozen=True)
class Kind:
    """One kind of input."""

    name: str
    sound: Path
    """Folder."""
    judge: Judge


@dataclass(frozen=True)
class Outcome:
    """The outcome of one corruption."""

    kind: str
    what: str
    verdict: str
    text: str

    @property
    def is_failure(self) -> bool:
        return self.verdict not in (REFUSED, UNCHANGED, HARMLESS)


# --- corruption -------------------------------------------------------------------------------


def corrupt(folder: Path, rng: random.Random) -> str:
    """Damage one file of the folder; returns what was done."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".bin")
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    ways = [_flip, _cut, _overwrite]
    if path.suffix == ".json":
        ways.append(_change_field)
    way = rng.choice(ways)
    what = way(content, rng)
    path.write_bytes(content)
    return f"{path.relative_to(folder)}: {what}"


def _flip(content: bytearray, rng: random.Random) -> str:
    places = [rng.randrange(len(content)) for _ in range(rng.choice((1, 1, 2, 8)))]
    for place in places:
        content[place] ^= 1 << rng.randrange(8)
    return f"bits flipped in bytes {places}"


def _cut(content: bytearray, rng: random.Random) -> str:
    size = rng.randrange(len(content))
    del content[size:]
    return f"cut to {size} bytes"


def _overwrite(content: bytearray, rng: random.Random) -> str:
    start = rng.randrange(len(content))
    new = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(8), rng.randbytes(64)))
    content[start : start + len(new)] = new
    return f"{len(new)} bytes overwritten at {start}"


def _change_field(content: bytearray, rng: random.Random) -> str:
    tree = json.loads(content)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(tree)
    node, key = rng.choice(places)
    old = node[key]
    if isinstance(node, dict) and rng.random() < 0.15:
        del node[key]
        what = f"{key!r} removed"
    elif isinstance(node, dict) and rng.random() < 0.1:
        node[f"{key}_"] = old
        what = f"{key!r} twice under another name"
    else:
        node[key] = rng.choice(_values(old, rng))
        what = f"{key!r} from {old!r:.40} to {node[key]!r:.40}"
    content[:] = json.dumps(tree).encode()
    return what


def _values(old: Any, rng: random.Random) -> list[Any]:
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    new: list[Any] = [
        None,
        "",
        "x" * 50,
        -1,
        0,
        1,
        7,
        10**9,
        10**30,
        1.5,
        float("nan"),
        float("inf"),
    ]
    new += [[], {}, [old], True, deep, "tp2", "999999999*tp1", "tp1"]
    if isinstance(old, int | float) and not isinstance(old, bool):
        new += [old + 1, old - 1, old * 2, -old]
    if isinstance(old, list):
        new += [old[:-1], old + old[:1], list(reversed(old)), rng.sample(old, len(old))]
    return new


# --- kinds of input ---------------------------------------------------------------------------


def kinds(root: Path) -> list[Kind]:
    """Valid inputs of every kind, written to the folder."""
    return [_checkpoint(root), _index(root), _pool(root), _profile(root), _plan(root)]


def _checkpoint(root: Path) -> Kind:
    folder = root / "checkpoint"
    pool_of(2).run(_save, str(folder))
    sound = {f"iter_{i:07d}": pool_of(2).run(_load, str(folder), i) for i in ITERATIONS}

    def load(damaged: Path, iteration: int | None, with_earlier: bool = False) -> str:
        """Raises the error that all ranks report."""
        ranks = pool_of(2).run(_load, str(damaged), iteration, with_earlier)
        errors = [found for found in ranks if isinstance(found, str)]
        if len(errors) == len(ranks):
            raise HydraulisError(errors[0])
        if errors:
            return f"some ranks alone refuse: {errors[0]}"
        # Loading an earlier, complete checkpoint is no failure.
        name = ranks[0][0]
        return UNCHANGED if ranks == sound[name] else f"{name} was loaded otherwise"

    def judge(damaged: Path) -> str:
        try:
            # The latest and the previous checkpoint; the damage may be in either.
            verdicts = [load(damaged, iteration) for iteration in (None, ITERATIONS[0])]
        except HydraulisError:
            try:
                verdict = load(damaged, None, with_earlier=True)
            except HydraulisError as error:
                if "there is no checkpoint of iteration" in str(
                    error
                ):  # according to the damaged file
                    raise
                return f"no fallback: {error}"
            if verdict == UNCHANGED:
                raise
            return verdict
        return next((each for each in verdicts if each != UNCHANGED), UNCHANGED)

    return Kind("checkpoint", folder, judge)


def _save(root: str) -> None:
    engine = make_engine(MODEL.definition(), ("tp2",))
    fill_moments(engine)
    for iteration in ITERATIONS:
        engine.shards.parameters.mul_(1.5)
        save_engine(engine, Path(root), iteration)


def _load(root: str, iteration: int | None, with_earlier: bool = False) -> tuple[str, bytes] | str:
    """On every rank: name and content of what was loaded, or the error of this package."""
    engine = make_engine(MODEL.definition(), ("tp2",), seed=5)
    try:
        folder = CheckpointFolder(Path(root))
        paths = find_checkpoints(folder, iteration=iteration, with_earlier=with_earlier)
        if not paths:
            return "there is no checkpoint"
        loaded = load_first_whole(
            paths, engine, {"vocab_size": MODEL.vocab_size}, log=lambda line: None
        )
    except HydraulisError as error:
        return str(error)
    flats = (engine.shards.parameters, engine.optimizer.exp_avg, engine.optimizer.exp_avg_sq)
    content = b"".join(flat.numpy().tobytes() for flat in flats)
    return loaded.path.name, content + bytes([int(engine.optimizer.num_steps)])


def _index(root: Path) -> Kind:
    folder = root / "index"
    write_corpus(folder / "corpus")
    sound = read_index(str(folder / "corpus"))

    def judge(damaged: Path) -> str:
        found = read_index(str(damaged / "corpus"))
        is_same = (
            found.token_type == sound.token_type
            and np.array_equal(found.document_lengths, sound.document_lengths)
            and np.array_equal(found.first_sequences, sound.first_sequences)
        )
        return UNCHANGED if is_same else "other documents than there are"

    return Kind(".idx", folder, judge)


def _pool_of_strategies() -> Pool:
    texts = {"short": "4*tp1", "mixed": "tp2+2*tp1", "deep": "2*pp2:1,1"}
    return Pool.of(*(Strategy.parse(text, 4, name=name) for name, text in texts.items()))


def _pool(root: Path) -> Kind:
    folder = root / "pool"
    folder.mkdir()
    sound = _pool_of_strategies()
    (folder / "pool.json").write_text(json.dumps(sound.to_json()))

    def judge(damaged: Path) -> str:
        found = Pool.read(damaged / "pool.json")
        for strategy in found.strategies:
            used = sorted(rank for replica in strategy.replicas for rank in replica.ranks)
            if len(set(used)) != len(used) or not set(used) <= set(range(found.num_ranks)):
                return f"strategy {strategy} does not fit its ranks"
        return UNCHANGED if found == sound else HARMLESS

    return Kind("pool", folder, judge)


def _profile_content() -> dict[str, Any]:
    rows = [("tp1", 1, 1), ("tp2", 2, 1), ("pp2", 1, 2)]
    return {
        "device": "test",
        "source": "made up",
        "date": "2026-01-01",
        "schemes": [
            {
                "tp": tp,
                "cp": 1,
                "pp": pp,
                "a_ms_per_token2": 1e-4,
                "b_ms_per_token": 0.1 / (tp * pp),
                "c_ms": 2.0,
                "max_tokens": 128 * tp * pp,
            }
            for _, tp, pp in rows
        ],
    }


def _profile(root: Path) -> Kind:
    folder = root / "profile"
    folder.mkdir()
    (folder / "profile.json").write_text(json.dumps(_profile_content()))
    sound = ProfileCostModel.read(folder / "profile.json")

    def judge(damaged: Path) -> str:
        found = ProfileCostModel.read(damaged / "profile.json")
        for row in found.schemes:
            time_ms = row.coefficients.time_ms(LENGTHS)
            if not 0.0 <= time_ms < float("inf") or row.max_tokens < 1:
                return f"{row.scheme} takes {time_ms} ms and holds {row.max_tokens} tokens"
        return UNCHANGED if found == sound else HARMLESS

    return Kind("profile", folder, judge)


def _plan(root: Path) -> Kind:
    folder = root / "plan"
    pool, model = _pool_of_strategies(), ProfileCostModel.from_json(_profile_content(), what="")
    sound = GreedyPlanner(Pool.of(pool.strategy("mixed")), model).plan(LENGTHS)
    for place in (folder, folder.with_name("other")):
        write_plan(place, 0, sound, range(len(LENGTHS)))

    def judge(damaged: Path) -> str:
        found = RecordedPlans(damaged).plan(LENGTHS)
        found.validate(LENGTHS, pool.strategy(found.strategy), model.max_tokens)
        held = sorted(
            pair
            for replica in found.replicas
            for micro_batch in replica.micro_batches
            for pair in zip(micro_batch.sequences, micro_batch.lengths, strict=True)
        )
        if held != list(enumerate(LENGTHS)):
            return f"the plan trains {held}"
        return UNCHANGED if found.digest == sound.digest else HARMLESS

    assert plan_path(folder, 0).exists()
    return Kind("plan", folder, judge)


# --- many of them -----------------------------------------------------------------------------


def run(num: int, seed: int, root: Path) -> list[Outcome]:
    """Run this many corruptions, the kinds in turn."""
    outcomes = []
    known = kinds(root)
    for kind in known:
        assert kind.judge(kind.sound) == UNCHANGED, f"{kind.name} is refused without any damage"
    for number in range(num):
        kind = known[number % len(known)]
        rng = random.Random(f"{seed}/{number}")
        damaged = root / "damaged"
        shutil.copytree(kind.sound, damaged)
        what = corrupt(damaged, rng)
        outcomes.append(_judged(kind, damaged, what))
        shutil.rmtree(damaged)
    return outcomes


def _judged(kind: Kind, damaged: Path, what: str) -> Outcome:
    try:
        verdict = kind.judge(damaged)
    except HydraulisError as error:
        text = str(error)
        fine = 0 < len(text) <= MOST_CHARACTERS and "\n" not in text
        return Outcome(kind.name, what, REFUSED if fine else "no clear error", text)
    except Exception as error:
        return Outcome(kind.name, what, type(error).__name__, str(error))
    return Outcome(kind.name, what, verdict, "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--num", type=int, default=1000, help="corruptions (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, help="of all of them (default: 1)")
    options = parser.parse_args(argv)
    # Upstream logs every model that is built, on every rank.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run(options.num, options.seed, Path(folder))
    counts = Counter((outcome.kind, outcome.verdict) for outcome in outcomes)
    for (kind, verdict), count in sorted(counts.items()):
        print(f"{kind:12} {verdict:30.30} {count:6}")
    failures = [outcome for outcome in outcomes if outcome.is_failure]
    for outcome in failures[:20]:
        print(f"FAILURE {outcome.kind}, {outcome.what}: {outcome.verdict}: {outcome.text[:500]}")
    print(f"{len(outcomes)} corruptions, {len(failures)} failures")
    close_pools()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
