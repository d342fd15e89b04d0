"""A store that counts the requests that it gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

OURS = "hydraulis"
"""What keys of this project contain; the others are torch's."""


class CountedStore(dist.Store):
    """Passes requests to a store and counts them. It must stay referenced: torch does not hold it.

    Args:
        store: gets the requests.
    """

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self._store: Any = store  # torch's stubs lack half of its methods
        self.num_requests: Counter[str] = Counter()
        """By whose key it is and kind, such as ``ours get``."""
        self.num_bytes: Counter[str] = Counter()
        """Of their keys and values."""
        self._clones: list[CountedStore] = []

    def _count(self, kind: str, keys: Sequence[str], values: Sequence[str | bytes] = ()) -> None:
        name = f"{'ours' if OURS in keys[0] else 'torch'} {kind}"
        self.num_requests[name] += 1
        self.num_bytes[name] += sum(map(len, keys)) + sum(map(len, values))

    def set(self, key: str, value: str | bytes) -> None:
        self._count("set", [key], [value])
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self._count("get", [key], [value])
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        self._count("get", keys, values)
        return values

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        self._count("set", keys, values)
        self._store.multi_set(keys, values)

    def add(self, key: str, value: int) -> int:
        self._count("add", [key])
        result: int = self._store.add(key, value)
        return result

    def check(self, keys: list[str]) -> bool:
        self._count("check", keys)
        result: bool = self._store.check(keys)
        return result

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._count("wait", keys)
        self._store.wait(keys, *timeout)

    def append(self, key: str, value: bytes) -> None:
        self._count("set", [key], [value])
        self._store.append(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._count("set", [key], [expected, desired])
        result: bytes = self._store.compare_set(key, expected, desired)
        return result

    def deleteKey(self, key: str) -> bool:  # as torch calls it
        self._count("delete", [key])
        result: bool = self._store.delete_key(key)
        return result

    def getNumKeys(self) -> int:
        result: int = self._store.num_keys()
        return result

    def has_extended_api(self) -> bool:
        result: bool = self._store.has_extended_api()
        return result

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def clone(self) -> CountedStore:
        clone = CountedStore(self._store.clone())
        clone.num_requests, clone.num_bytes = self.num_requests, self.num_bytes
        self._clones.append(clone)
        return clone
