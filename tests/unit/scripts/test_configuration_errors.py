"""docs/configuration-errors.md holds every error of a configuration that the code raises."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.strategy import Pool, Strategy
from scripts import configuration_errors


@pytest.fixture(scope="module")
def messages() -> list[configuration_errors.Message]:
    return configuration_errors.all_messages()


def texts(source: str) -> list[str]:
    return [message.text for message in configuration_errors.messages_of(source, "config.py")]


def test_the_page_is_that_of_the_code(messages: list[configuration_errors.Message]) -> None:
    written = configuration_errors.PAGE.read_text(encoding="utf-8")
    wanted = configuration_errors.page(messages)
    missing = sorted(set(wanted.splitlines()) - set(written.splitlines()))
    assert written == wanted, f"run python scripts/configuration_errors.py; not there: {missing}"


def test_the_page_has_known_errors(messages: list[configuration_errors.Message]) -> None:
    written = " ".join(configuration_errors.PAGE.read_text(encoding="utf-8").split())
    assert len(messages) > 200
    for words in (
        "|every rank needs a GPU of its own|`loop/",
        "|strategy ⟨name⟩: a strategy needs at least 1 replica|`strategy/",
        "|--exit-signal ⟨name⟩ cannot be caught by a process|`flags/",
        "ranks meet at ⟨place⟩ within",
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
def test_messages_that_users_see_are_on_the_page(raising: Callable[[], object]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        raising()
    rows = re.findall(r"^\|([^|]+)\|`", configuration_errors.PAGE.read_text("utf-8"), re.MULTILINE)
    patterns = [re.sub(r"⟨[^⟩]*⟩|…", ".*", re.escape(row)) for row in rows if len(row.split()) > 3]
    assert any(re.search(pattern, str(caught.value)) for pattern in patterns)


def test_values_become_placeholders_and_choices_are_listed_together() -> None:
    source = """
def check(args):
    why = "too few" if args.few else "too many"
    raise ConfigurationError(
        f"{why}: {args.num_ranks} ranks of {len(args.nodes)} nodes "
        f"have {'a' if args.one else 'many'} GPUs, but need {args.needed}; start fewer"
    )
"""
    (found,) = configuration_errors.messages_of(source, "config.py")
    assert found.shown == "⟨too few / too many⟩: ⟨num_ranks⟩ ranks of … nodes have ⟨a / many⟩ GPUs"


def test_texts_that_are_chosen_before_the_error_are_separate_messages() -> None:
    source = """
def check(args):
    message = "there are no ranks" if args.few else "there are no nodes"
    raise ConfigurationError(message)
"""
    assert texts(source) == ["there are no ranks", "there are no nodes"]


def test_a_rule_without_text_is_shown_with_its_fix() -> None:
    short = configuration_errors.Message("config.py", 1, "⟨refusal⟩; use --cp-comm-type auto")
    assert short.shown == short.text
    assert not configuration_errors.Message("config.py", 1, "⟨where⟩: ⟨error⟩").shown


def test_a_long_rule_is_shown_by_its_first_words() -> None:
    rule = "⟨a b / c d⟩: one two three four five six seven eight nine"
    longer = f"{rule} ten"
    assert configuration_errors.Message("config.py", 1, f"{longer}; fix it").shown == longer
    assert configuration_errors.Message("config.py", 1, f"{longer} eleven").shown == f"{rule} …"


def test_options_that_are_made_from_names_are_marked() -> None:
    source = """
def check(args, dest, place):
    option = "--" + dest.replace("_", "-")
    where = f"at {place + 1}" + ending(place)
    raise ConfigurationError(f"{option_of(dest)} and {option} differ {where}; give {option}")
"""
    assert texts(source) == ["--⟨dest⟩ and --⟨dest⟩ differ at ……; give --⟨dest⟩"]


def test_messages_of_functions_that_make_errors_are_found() -> None:
    source = """
class Pool:
    def _error(self, message):
        return StrategyError(f"pool {self._name!r}: {message}")

    def check(self):
        raise self._error("a pool has one strategy or more but this has none; add one")
"""
    assert texts(source) == [
        "pool ⟨name⟩: a pool has one strategy or more but this has none; add one"
    ]


def test_an_error_whose_text_is_not_in_the_source_is_found() -> None:
    with pytest.raises(configuration_errors.UnreadableError, match="line 2"):
        texts("def check():\n    raise ConfigurationError(words[0])\n")
