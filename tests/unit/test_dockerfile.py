"""Errors that would break a build of the image, found without building it.

hadolint checks its style (`make dockerfile-check`); a build needs a base image.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.test_packaging import declared

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
# Instructions with their continuation lines, comments left out.
INSTRUCTIONS = re.findall(
    r"^([A-Z]+) (.*)$", re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.M)), re.M
)


def arguments() -> dict[str, str]:
    return dict(text.split("=", 1) for name, text in INSTRUCTIONS if name == "ARG")


def test_versions_match_setup() -> None:
    own = arguments()
    assert own["MEGATRON_CORE_VERSION"] in declared()["megatron-core"].specifier
    assert own["TRANSFORMER_ENGINE_VERSION"] in declared("te")["transformer-engine"].specifier


def test_every_argument_is_documented_at_the_top_and_used() -> None:
    head = TEXT.partition("\nARG ")[0]
    for name in arguments():
        assert f"#   {name} " in head
        assert f"${{{name}}}" in TEXT


def test_copied_files_exist_and_are_not_ignored() -> None:
    let_through = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [name for kind, text in INSTRUCTIONS if kind == "COPY" for name in text.split()[:-1]]
    assert {"setup.py", "pyproject.toml", "megatron", "hydraulis_patches", "scripts"} <= set(copied)
    for name in copied:
        assert (ROOT / name).exists()
        assert f"!{name}" in let_through


def test_the_image_runs_as_a_user_without_rights_and_checks_its_health_by_import() -> None:
    kinds = [kind for kind, _ in INSTRUCTIONS]
    text_of = dict(INSTRUCTIONS)
    assert text_of["USER"] == "${USER_ID}"
    assert int(arguments()["USER_ID"]) > 0
    assert kinds.index("USER") > kinds.index("COPY")
    assert "import megatron.training, megatron.hydraulis.loop.entry" in text_of["HEALTHCHECK"]


def test_a_pre_release_of_an_image_is_older_than_its_release() -> None:
    torch = declared()["torch"].specifier
    for version in ("2.10.0a0+b4e4ee81d3", "2.11.0a0+eb65b36914.nv26.02"):
        assert not torch.contains(version, prereleases=True)
    for version in ("2.11.0", "2.12.0a0+0123abc.nv26.05", "2.15.0"):
        assert torch.contains(version, prereleases=True)
