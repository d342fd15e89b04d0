"""In which order the sequences of a corpus are drawn: a function of the seed alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.data.blend import SequenceGroup, largest_deficit
from megatron.hydraulis.errors import ConfigurationError, DataError

__all__ = ["SequenceOrder", "epoch_permutation"]


def epoch_permutation(
    seed: int, group: int, epoch: int, num_sequences: int
) -> npt.NDArray[np.integer[Any]]:
    """(num_sequences,) the order of one group in one epoch; uint32 where that suffices.

    Sorts raw Philox output: NumPy keeps bit generators and ``SeedSequence`` stable over versions,
    but not ``Generator.permutation``, and a run must resume after an upgrade.
    """
    source = np.random.Philox(np.random.SeedSequence([seed, group, epoch]))
    order = np.argsort(source.random_raw(num_sequences), kind="stable")
    return order.astype(np.uint32) if num_sequences <= 1 << 32 else order


class SequenceOrder:
    """An endless stream of sequence ids, blended over groups, each group epoch after epoch.

    Args:
        groups: the datasets of the corpus with their weights.
        seed: seed of the shuffling, at least 0.

    Raises:
        ConfigurationError: a negative seed.
        DataError: no groups.
    """

    def __init__(self, groups: Sequence[SequenceGroup], *, seed: int) -> None:
        if not groups:
            raise DataError(
                "a sampler needs at least one sequence but the corpus holds 0; check the "
                "documents, --split and --long-sequences"
            )
        if seed < 0:
            raise ConfigurationError(f"a seed is at least 0 but is {seed}; set --seed")
        self._groups = tuple(groups)
        self._weights = tuple(group.weight for group in groups)
        self._seed = seed
        self._num_drawn = [0] * len(groups)
        self._permutations: dict[int, tuple[int, npt.NDArray[np.integer[Any]]]] = {}

    @property
    def num_drawn(self) -> int:
        """Sequences drawn so far, over all groups."""
        return sum(self._num_drawn)

    @property
    def epochs(self) -> tuple[int, ...]:
        """Epoch that each group's next sequence belongs to, from 0."""
        return tuple(
            drawn // group.num_sequences
            for drawn, group in zip(self._num_drawn, self._groups, strict=True)
        )

    def draw(self) -> int:
        """The id of the next sequence."""
        chosen = largest_deficit(self._weights, self._num_drawn) if len(self._groups) > 1 else 0
        group = self._groups[chosen]
        epoch, position = divmod(self._num_drawn[chosen], group.num_sequences)
        self._num_drawn[chosen] += 1
        return group.first_sequence + self._shuffled(chosen, epoch, position)

    def _shuffled(self, group: int, epoch: int, position: int) -> int:
        cached = self._permutations.get(group)
        if cached is None or cached[0] != epoch:
            size = self._groups[group].num_sequences
            cached = (epoch, epoch_permutation(self._seed, group, epoch, size))
            self._permutations[group] = cached
        return int(cached[1][position])

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; plain numbers, fit for JSON."""
        return {
            "seed": self._seed,
            "groups": [
                {
                    "num_sequences": group.num_sequences,
                    "epoch": drawn // group.num_sequences,
                    "position": drawn % group.num_sequences,
                }
                for group, drawn in zip(self._groups, self._num_drawn, strict=True)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken.

        Raises:
            ConfigurationError: the state was written under another seed.
            DataError: the state belongs to another corpus.
        """
        if state["seed"] != self._seed:
            raise ConfigurationError(
                f"the order of the data depends on the seed: the checkpoint was written with seed "
                f"{state['seed']} but this run has {self._seed}; resume with --seed {state['seed']}"
            )
        saved = [int(group["num_sequences"]) for group in state["groups"]]
        here = [group.num_sequences for group in self._groups]
        if saved != here:
            raise DataError(
                f"the checkpoint was written for datasets of {saved} sequences but this run has "
                f"{here}; resume with the same data, --seq-length, --split and --long-sequences"
            )
        self._num_drawn = [
            int(group["epoch"]) * size + int(group["position"])
            for group, size in zip(state["groups"], here, strict=True)
        ]
