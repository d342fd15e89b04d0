"""The lengths of a global batch, read from a file.

Three kinds of files, told apart by what they are: a Megatron index by the suffix ``.idx``, a JSON
list by its first character, and otherwise text with a number a line, blank lines left out.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from megatron.hydraulis.data.index import read_index
from megatron.hydraulis.errors import DataError
from megatron.hydraulis.json_object import parse_json, read_text

__all__ = ["read_lengths"]

_WHAT = "lengths file"
_IDX = ".idx"
# More digits are a typing error.
_NUMBER = re.compile(r"[0-9]{1,18}")


def read_lengths(path: str | Path) -> tuple[int, ...]:
    """The length of every sequence, in tokens: shape (num_sequences,), in the file's order.

    Of an ``.idx`` every document is a sequence. One of D tokens trains D-1, as its last token is
    predicted but predicts nothing; documents of fewer than 2 tokens train none and are left out.
    The ``.bin`` beside it is not needed.

    Raises DataError for a file that cannot be read, a length that is no whole number from 1 on,
    and a file without lengths.
    """
    if Path(path).suffix == _IDX:
        index = read_index(str(path).removesuffix(_IDX), checks_bin=False)
        trained = index.document_lengths - 1
        return _some(path, (int(length) for length in trained[trained > 0]))
    text = read_text(path, _WHAT, DataError)
    if text.lstrip()[:1] in ("[", "{"):
        return _some(path, _from_list(path, parse_json(text, f"{_WHAT} {path}", DataError)))
    return _some(path, _from_lines(path, text))


def _from_list(path: str | Path, content: object) -> Iterable[int]:
    if not isinstance(content, list):
        raise DataError(
            f"{_WHAT} {path}: must be a list of lengths but is an object; write it as [900, 20]"
        )
    for index, value in enumerate(content):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise DataError(
                f"{_WHAT} {path}: a length is a whole number from 1 on but number {index} of the "
                f"list is {value!r:.60}; correct it"
            )
        yield value


def _from_lines(path: str | Path, text: str) -> Iterable[int]:
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.strip()
        if not word:
            continue
        if not _NUMBER.fullmatch(word) or int(word) < 1:
            raise DataError(
                f"{_WHAT} {path}: every line is a whole number from 1 on but line {number} is "
                f"{word!r:.60}; correct it"
            )
        yield int(word)


def _some(path: str | Path, lengths: Iterable[int]) -> tuple[int, ...]:
    found = tuple(lengths)
    if not found:
        raise DataError(
            f"{_WHAT} {path}: a batch has at least 1 sequence of 1 token but the file has 0; "
            f"give another file"
        )
    return found
