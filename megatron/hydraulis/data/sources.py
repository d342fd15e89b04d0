"""The corpora of a run from ``--data-path``, ``--split`` and related flags."""

import argparse
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hydraulis.data.corpus import Corpus, DocumentRange
from megatron.hydraulis.data.dataset import (
    DatasetIndex,
    LongSequences,
    LossNormalization,
    read_index,
)
from megatron.hydraulis.errors import ConfigurationError, DataError

DEFAULT_SPLIT = "969,30,1"
"""Megatron's default of ``--split``: training, validation and test documents."""

_PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class Blend:
    """Datasets and how often each is drawn from.

    Raises:
        ConfigurationError: a weight that is not positive.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    """Share of the *sequences* that each dataset gives, in any unit; None: in proportion to the
    datasets' numbers of sequences, so that an epoch visits every sequence once."""

    def __post_init__(self) -> None:
        if self.weights is None:
            return
        for prefix, weight in zip(self.prefixes, self.weights, strict=True):
            if not (math.isfinite(weight) and weight > 0):
                raise ConfigurationError(
                    f"blend: weights are positive but that of '{prefix}' is {weight}; remove the "
                    f"dataset or give it a positive weight"
                )


@dataclass(frozen=True, eq=False)
class Corpora:
    """The parts of a run's data; None for validation or test data without sequences."""

    train: Corpus
    valid: Corpus | None
    test: Corpus | None

    @property
    def parts(self) -> list[Corpus]:
        """Parts that have sequences."""
        return [part for part in (self.train, self.valid, self.test) if part is not None]


def load_corpora(
    *,
    seq_length: int,
    long_sequences: LongSequences,
    loss_normalization: LossNormalization = "token",
    blend: Blend | None = None,
    split: str | None = None,
    blend_per_part: Sequence[Blend | None] | None = None,
) -> Corpora:
    """Read the indices of all datasets and divide their documents into parts.

    Args:
        seq_length: maximum number of tokens that a sequence trains.
        long_sequences: what to do with longer documents.
        loss_normalization: of the weights of tokens.
        blend: datasets whose documents ``split`` divides, in order, each dataset by itself.
        split: shares of training, validation and test; ``969,30,1`` if None.
        blend_per_part: instead of ``blend``, the datasets of training, validation and test.

    Raises:
        ConfigurationError: no training data, both kinds of data, or a split that is not numbers.
        DataError: a damaged or empty dataset, or a dataset of a blend without a training sequence.
    """
    if (blend is None) == (blend_per_part is None or not any(blend_per_part)):
        raise ConfigurationError(
            "data comes either from --data-path or from --train-data-path, --valid-data-path and "
            f"--test-data-path but {'neither is' if blend is None else 'both are'} given; give one"
        )
    if blend is not None:
        shares = _document_shares(DEFAULT_SPLIT if split is None else split)
        indices = [read_index(prefix) for prefix in blend.prefixes]
        blends: Sequence[Blend | None] = (blend, blend, blend)
        ranges = [[_part_of(index, share) for index in indices] for share in shares]
    else:
        assert blend_per_part is not None
        if split is not None:
            raise ConfigurationError(
                f"--split divides the datasets of --data-path but --train-data-path and the like "
                f"name each part's own and --split is '{split}'; remove --split"
            )
        blends = blend_per_part
        ranges = [
            [DocumentRange.whole(read_index(prefix)) for prefix in part.prefixes] if part else []
            for part in blends
        ]
    train, valid, test = (
        _corpus(name, part_blend, part_ranges, seq_length, long_sequences, loss_normalization)
        for name, part_blend, part_ranges in zip(_PARTS, blends, ranges, strict=True)
    )
    if train is None:
        raise ConfigurationError("there is no training corpus; give --train-data-path")
    return Corpora(train, valid, test)


def load_corpora_from_arguments(
    args: argparse.Namespace,
    *,
    long_sequences: LongSequences,
    loss_normalization: LossNormalization = "token",
) -> Corpora:
    """The corpora that Megatron's own flags name.

    Honours ``--data-path``, ``--data-args-path``, ``--train-data-path``, ``--valid-data-path``,
    ``--test-data-path``, ``--per-split-data-args-path``, ``--split`` and ``--seq-length``.

    Raises:
        ConfigurationError, DataError: as ``load_corpora``.
    """
    from megatron.training.utils import get_blend_and_blend_per_split

    try:
        blend, per_part = get_blend_and_blend_per_split(args)
    except AssertionError:
        raise ConfigurationError(
            "a blend has a weight for every dataset or for none; write W1 PREFIX1 W2 PREFIX2 or "
            "PREFIX1 PREFIX2, and give --data-path or --data-args-path, not both"
        ) from None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"cannot read the file that lists the datasets: {error}") from None
    return load_corpora(
        seq_length=args.seq_length,
        long_sequences=long_sequences,
        loss_normalization=loss_normalization,
        blend=_blend(blend),
        split=args.split,
        blend_per_part=None if per_part is None else [_blend(part) for part in per_part],
    )


def _blend(pair: tuple[Sequence[str], Sequence[float] | None] | None) -> Blend | None:
    if pair is None or not pair[0]:
        return None
    prefixes, weights = pair
    return Blend(tuple(prefixes), None if weights is None else tuple(weights))


def _document_shares(split: str) -> list[tuple[float, float] | None]:
    """The range, in [0, 1], of the documents of each part."""
    words = [word.strip() for word in split.split(",")]
    if not 1 <= len(words) <= len(_PARTS) or not all(
        re.fullmatch(r"[0-9]{1,18}(\.[0-9]*)?|\.[0-9]+", word) for word in words
    ):
        raise ConfigurationError(
            f"--split is up to three numbers, the shares of training, validation and test, each of "
            f"at most 18 digits before the point, but is '{split:.60}'; write it as {DEFAULT_SPLIT}"
        )
    if float(words[0]) == 0.0:
        raise ConfigurationError(
            f"--split gives training a share above 0 but is '{split}'; write it as {DEFAULT_SPLIT}"
        )
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    shares: list[tuple[float, float] | None] = convert_split_vector_to_split_matrix(
        parse_and_normalize_split(split)
    )
    return shares


def _part_of(index: DatasetIndex, share: tuple[float, float] | None) -> DocumentRange:
    if share is None:
        return DocumentRange(index, 0, 0)
    first, end = (round(border * float(index.num_documents)) for border in share)
    return DocumentRange(index, first, end)


def _corpus(
    name: str,
    blend: Blend | None,
    ranges: Sequence[DocumentRange],
    seq_length: int,
    long_sequences: LongSequences,
    loss_normalization: LossNormalization,
) -> Corpus | None:
    if blend is None:
        return None
    corpus = Corpus(
        ranges,
        seq_length=seq_length,
        long_sequences=long_sequences,
        weights=blend.weights,
        loss_normalization=loss_normalization,
        name=name,
    )
    if name == "train":
        for prefix, report in zip(corpus.prefixes, corpus.reports, strict=True):
            if report.num_sequences == 0:
                raise DataError(
                    f"dataset '{prefix}': a dataset of the training blend gives at least 1 "
                    f"sequence but none is left ({report}); check --split and --long-sequences or "
                    f"remove the dataset"
                )
    return corpus if corpus.num_sequences else None
