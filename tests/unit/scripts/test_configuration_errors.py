"""docs/configuration-errors.md holds every error of a configuration that the code raises."""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.strategy import Pool, Strategy


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


def test_the_page_has_known_errors(script: ModuleType) -> None:
    written = " ".join(script.PAGE.read_text(encoding="utf-8").split())
    assert len(script.all_messages()) > 200
    for words in (
        "|every rank needs a GPU of its own but this node starts",
        "|strategy ⟨name⟩: a strategy needs at least 1 replica but has 0|`strategy/",
        "|--exit-signal ⟨name⟩ cannot be caught by a process|`flags/",
        "ranks meet within",
    ):
        assert words in written


@pytest.mark.parametrize(
    "raising",
    [
        lambda: Strategy.parse("tp4+", 4),
        lambda: Strategy.parse("2*tp2", 8),
        lambda: Strategy.parse("tp2pp2:5", 4),
        lambda: Pool(4, 4, ()),
        lambda: HydraulisConfig(strategy="tp2", strategy_pool=Path("pool.json")),
        lambda: HydraulisConfig(trace_iterations="2..1"),
    ],
)
def test_messages_that_users_see_are_on_the_page(
    script: ModuleType, raising: Callable[[], object]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        raising()
    rows = re.findall(r"^\|([^|]+)\|`", script.PAGE.read_text("utf-8"), re.MULTILINE)
    patterns = [re.sub(r"⟨[^⟩]*⟩|…", ".*", re.escape(row)) for row in rows if len(row.split()) > 3]
    assert any(re.search(pattern, str(caught.value)) for pattern in patterns)


def test_values_become_placeholders_and_choices_are_listed_together(script: ModuleType) -> None:
    source = """
def check(args):
    why = "too few" if args.few else "too many"
    raise ConfigurationError(
        f"{why}: {args.num_ranks} ranks of {len(args.nodes)} nodes "
        f"have {'a' if args.one else 'many'} GPUs; start fewer"
    )
"""
    (found,) = script.messages_of(source, "config.py")
    assert found.shown == "⟨too few / too many⟩: ⟨num_ranks⟩ ranks of … nodes have ⟨a / many⟩ GPUs"


def test_texts_that_are_chosen_before_the_error_are_separate_messages(
    script: ModuleType,
) -> None:
    source = """
def check(args):
    message = "there are no ranks" if args.few else "there are no nodes"
    raise ConfigurationError(message)
"""
    assert texts(script, source) == ["there are no ranks", "there are no nodes"]


def test_a_rule_without_text_is_shown_with_its_fix(script: ModuleType) -> None:
    short = script.Message("config.py", 1, "⟨refusal⟩; use --cp-comm-type auto")
    assert short.shown == short.text
    assert not script.Message("config.py", 1, "⟨where⟩: ⟨error⟩").shown


def test_options_that_are_made_from_names_are_marked(script: ModuleType) -> None:
    source = """
def check(args, dest, place):
    option = "--" + dest.replace("_", "-")
    where = f"at {place + 1}" + ending(place)
    raise ConfigurationError(f"{option_of(dest)} and {option} differ {where}; give {option}")
"""
    assert texts(script, source) == ["--⟨dest⟩ and --⟨dest⟩ differ at ……; give --⟨dest⟩"]


def test_messages_of_functions_that_make_errors_are_found(script: ModuleType) -> None:
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


def test_an_error_whose_text_is_not_in_the_source_is_found(script: ModuleType) -> None:
    with pytest.raises(script.UnreadableError, match="line 2"):
        texts(script, "def check():\n    raise ConfigurationError(words[0])\n")
