"""Patches of upstream, each applied only to the upstream version it was written for."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

from megatron.hydraulis.errors import UpstreamVersionError

UPSTREAM_PACKAGE = "megatron-core"
HASH_DIGITS = 16
"""Hex digits kept of a source's SHA-256: enough to detect a change."""


@dataclass(frozen=True)
class Patch:
    """One replaced upstream name (or the same name wherever it was imported by value)."""

    name: str
    targets: Mapping[str, str]
    """'module:attribute' -> hash of the attribute's source, or of the module's source if the
    attribute has none."""
    reason: str
    """Reason why no public hook serves."""
    removable_when: str
    versions: tuple[str, ...] = ("0.19.2",)
    cpu_only: bool = False

    def check(self) -> None:
        """Check that the patch was written for the installed upstream.

        Raises:
            UpstreamVersionError: naming version, patch and what differs.
        """
        installed = installed_version()
        if installed not in self.versions:
            raise UpstreamVersionError(
                f"patch '{self.name}' is written for {UPSTREAM_PACKAGE} "
                f"{', '.join(self.versions)} but {installed} is installed; install "
                f"'{UPSTREAM_PACKAGE}=={self.versions[-1]}' or port the patch"
            )
        for target, expected in self.targets.items():
            found = source_hash(target)
            if found != expected:
                raise UpstreamVersionError(
                    f"patch '{self.name}': the source of {target} has hash {found}, expected "
                    f"{expected}; the installed {UPSTREAM_PACKAGE} {installed} was changed: "
                    "reinstall it or port the patch"
                )

    def apply(self, replacement: Callable[[Any], Any]) -> list[AppliedPatch]:
        """Check, then replace every target by ``replacement(original)``."""
        self.check()
        applied = []
        for target in self.targets:
            module, attribute = _resolve(target)
            original = getattr(module, attribute)
            setattr(module, attribute, replacement(original))
            applied.append(AppliedPatch(module, attribute, original))
        return applied


@dataclass(frozen=True)
class SetState:
    """State of an upstream module that upstream sets in code that does not run here. It is set by
    calling upstream's own function; nothing is replaced."""

    name: str
    """'module:function' that is called."""
    reason: str
    removable_when: str
    cpu_only: bool = False

    def check(self) -> None:
        """Check that the function exists.

        Raises:
            UpstreamVersionError: it does not.
        """
        module, attribute = _resolve(self.name)
        if not callable(getattr(module, attribute, None)):
            raise UpstreamVersionError(
                f"{self.name} does not exist in {UPSTREAM_PACKAGE} {installed_version()}; "
                "port what calls it"
            )


@dataclass(frozen=True)
class AppliedPatch:
    """A replaced name, which can be restored."""

    module: Any
    attribute: str
    original: Any

    def undo(self) -> None:
        """Restore upstream's value."""
        setattr(self.module, self.attribute, self.original)


@cache
def installed_version() -> str:
    """The version of upstream. Reading it takes a millisecond, and every patch asks for it."""
    return version(UPSTREAM_PACKAGE)


def check_signature(target: str, replacement: Callable[..., Any]) -> None:
    """Check that a replacement takes what upstream's callers pass.

    Raises:
        UpstreamVersionError: a parameter is missing or at another position.
    """
    module, attribute = _resolve(target)
    upstream = list(inspect.signature(getattr(module, attribute)).parameters.values())
    ours = list(inspect.signature(replacement).parameters.values())
    wanted = [(p.name, p.kind) for p in upstream]
    given = [(p.name, p.kind) for p in ours]
    if wanted != given:
        raise UpstreamVersionError(
            f"the replacement of {target} takes ({', '.join(name for name, _ in given)}) but "
            f"upstream's callers pass ({', '.join(name for name, _ in wanted)}); port it"
        )


def source_hash(target: str) -> str:
    """Hash of the installed source of a target."""
    module, attribute = _resolve(target)
    value = getattr(module, attribute)
    return _hash_of_source(value if inspect.isroutine(value) else module)


@cache
def _hash_of_source(value: Any) -> str:
    return hashlib.sha256(inspect.getsource(value).encode()).hexdigest()[:HASH_DIGITS]


def _resolve(target: str) -> tuple[Any, str]:
    module_name, attribute = target.split(":")
    return importlib.import_module(module_name), attribute
