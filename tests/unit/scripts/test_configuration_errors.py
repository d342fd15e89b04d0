"""docs/configuration-errors.md holds every error of a configuration that the code raises."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron.hydraulis.flags.options import families


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    path = Path(__file__).parents[3] / "scripts" / "configuration_errors.py"
    spec = importlib.util.spec_from_file_location("configuration_errors", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def texts(script: ModuleType, source: str) -> list[str]:
    return [message.text for message in script.messages_of(source, "config.py")]


def test_the_page_is_that_of_the_code(script: ModuleType) -> None:
    written = script.PAGE.read_text(encoding="utf-8")
    wanted = script.page(script.all_messages())
    missing = sorted(set(wanted.splitlines()) - set(written.splitlines()))
    assert written == wanted, f"run python scripts/configuration_errors.py; not there: {missing}"


def test_the_page_has_known_errors_and_every_family_of_refused_options(script: ModuleType) -> None:
    written = script.PAGE.read_text(encoding="utf-8")
    assert len(script.all_messages()) > 200
    for words in (
        "every rank needs a GPU of its own but this node starts",
        "strategy ⟨name⟩: a strategy needs at least 1 replica but has 0 | add a scheme |",
        "--seed must be at most ⟨MAX SEED⟩ but is ⟨seed⟩ | give a smaller one |",
        "ranks meet within",
    ):
        assert words in written
    assert all(f"| {family.name} |" in written for family in families())


def test_values_become_marks_and_choices_become_rows(script: ModuleType) -> None:
    source = """
def check(args):
    why = "too few" if args.few else "too many"
    raise ConfigurationError(
        f"{why}: {args.num_ranks} ranks of {len(args.nodes)} nodes "
        f"have {'a' if args.one else 'many'} GPUs; start fewer"
    )
"""
    found = script.messages_of(source, "config.py")
    assert {message.halves for message in found} == {
        (f"{why}: ⟨num ranks⟩ ranks of … nodes have {count} GPUs", "start fewer")
        for why in ("too few", "too many")
        for count in ("a", "many")
    }


def test_options_that_are_made_from_names_are_marked(script: ModuleType) -> None:
    source = """
def check(args, dest, place):
    option = "--" + dest.replace("_", "-")
    where = f"at {place + 1}" + ending(place)
    raise ConfigurationError(f"{option_of(dest)} and {option} differ {where}; give {option}")
"""
    assert texts(script, source) == ["--⟨dest⟩ and --⟨dest⟩ differ at ⟨place⟩; give --⟨dest⟩"]


def test_functions_that_make_errors_are_followed_to_their_words(script: ModuleType) -> None:
    source = """
class Pool:
    def _error(self, message):
        return StrategyError(f"pool {self._name!r}: {message}")

    def check(self):
        raise self._error("a pool has one strategy or more but this has none; add one")
"""
    assert texts(script, source) == [
        "pool ⟨name⟩: a pool has one strategy or more but this has none; add one"
    ]


def test_an_error_whose_words_are_not_in_the_source_is_found(script: ModuleType) -> None:
    with pytest.raises(script.UnreadableError, match="line 2"):
        texts(script, "def check():\n    raise ConfigurationError(words[0])\n")


def test_an_error_of_a_module_that_no_topic_names_is_found(script: ModuleType) -> None:
    message = script.Message("new_part.py", 1, "a rule but numbers; a fix")
    with pytest.raises(script.UnreadableError, match=r"new_part.py raises errors but no topic"):
        script.page([message])
