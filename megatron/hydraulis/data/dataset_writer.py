"""Writes a Megatron dataset, and a file of weights next to it."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.data.index import bin_path, idx_path
from megatron.hydraulis.data.tokenizer import TokenizerFingerprint, tokenizer_path
from megatron.hydraulis.data.weights import WeightsWriter, checked_weights, weights_path
from megatron.hydraulis.errors import DataError
from megatron.hydraulis.json_object import write_json


class DatasetWriter:
    """Writes ``prefix.bin``, ``prefix.idx`` and, where documents have weights, ``prefix.weights``.

    The files get these names when all are complete; the weights of an earlier dataset are removed.

    A context manager: leaving it before ``commit`` removes what was written.

    Args:
        prefix: path of the dataset without suffix; folders are made.
        token_type: type the ids are stored in.
        tokenizer: what the ids mean, if known.
        has_weights: whether documents come with weights.

    Raises:
        DataError: the files cannot be written.
    """

    def __init__(
        self,
        prefix: str | Path,
        token_type: type[np.integer],
        tokenizer: TokenizerFingerprint | None = None,
        *,
        has_weights: bool = False,
    ) -> None:
        self._prefix = str(prefix)
        # In the target's folder, because a rename does not cross file systems.
        self._partial = f"{self._prefix}.{os.getpid()}.partial"
        self._paths = (bin_path, *((weights_path,) if has_weights else ()), idx_path)
        self._weights: WeightsWriter | None = None
        self._token_type = token_type
        self._tokenizer = tokenizer
        self._builder: Any = None

    def __enter__(self) -> Self:
        # Imported here: asking for help or naming a missing file takes no torch.
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        if os.path.basename(self._prefix) == "" or os.path.isdir(self._prefix):
            raise DataError(
                f"--output-prefix is the path of a dataset without .bin but '{self._prefix}' is a "
                f"folder; add a name, e.g. {os.path.join(self._prefix, 'corpus')}"
            )
        with self._reporting_failure():
            Path(self._prefix).parent.mkdir(parents=True, exist_ok=True)
            self._builder = IndexedDatasetBuilder(bin_path(self._partial), dtype=self._token_type)
            if weights_path in self._paths:
                self._weights = WeightsWriter(weights_path(self._partial))
        return self

    def add_documents(
        self,
        tokens: npt.NDArray[np.integer],
        lengths: Iterable[int],
        weights: npt.NDArray[np.floating] | None = None,
    ) -> None:
        """Append documents, which are concatenated in ``tokens``.

        Args:
            tokens: (sum of lengths,) token ids.
            lengths: tokens of each document.
            weights: (sum of lengths,) weight of predicting each token, if the dataset has weights.

        Raises:
            DataError: weights of another number than the tokens, negative or not finite.
            ValueError: weights for a dataset without.
        """
        if weights is not None and self._weights is None:
            raise ValueError(
                f"dataset '{self._prefix}' has no weights but documents come with {len(weights)}; "
                f"make the writer with has_weights=True"
            )
        if self._weights is not None:
            where = f"dataset '{self._prefix}'"
            checked = checked_weights([] if weights is None else weights, len(tokens), where)
            with self._reporting_failure():
                self._weights.add(checked)
        with self._reporting_failure():
            start = 0
            for length in lengths:
                self._builder.add_document(tokens[start : start + length], [length])
                start += length

    def commit(self) -> npt.NDArray[np.int64]:
        """Put the files in place.

        Returns:
            (num_documents,) tokens of each document.
        """
        lengths = np.array(self._builder.sequence_lengths, dtype=np.int64)
        with self._reporting_failure():
            self._builder.finalize(idx_path(self._partial))
            if self._weights is not None:
                self._weights.finish()
            for path in self._paths:
                _flush_to_disk(path(self._partial))
            # Without an index there is no dataset, so a crash in between cannot pair a new .bin
            # with an old .idx or old weights.
            for path in (idx_path, tokenizer_path, weights_path):
                Path(path(self._prefix)).unlink(missing_ok=True)
            if self._tokenizer is not None:
                write_json(tokenizer_path(self._prefix), asdict(self._tokenizer))
            for path in self._paths:
                os.replace(path(self._partial), path(self._prefix))
        return lengths

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Closing flushes, which fails again on a full disk; the first failure is the one to report.
        with contextlib.suppress(OSError):
            self._builder.data_file.close()
        with contextlib.suppress(OSError):
            if self._weights is not None:
                self._weights.close()
        for path in self._paths:
            Path(path(self._partial)).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"cannot write {bin_path(self._prefix)} and .idx: {error.strerror or error}; free "
                f"space, or choose an --output-prefix in a folder you can write to"
            ) from error


def _flush_to_disk(path: str) -> None:
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
