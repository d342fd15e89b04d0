"""The pages about flags list each of ours and every option of Megatron."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from megatron.hydraulis.flags.config import HydraulisConfig, option_of
from megatron.hydraulis.flags.honoured import HONOURED
from megatron.hydraulis.flags.parser import FlagParser
from scripts import flags_page

ROOT = Path(__file__).parents[3]
FIELDS = dataclasses.fields(HydraulisConfig)


def test_the_page_is_that_of_the_code() -> None:
    written = flags_page.PAGE.read_text(encoding="utf-8")
    assert written == flags_page.page(), "run python scripts/flags_page.py"


def test_every_flag_belongs_to_one_topic() -> None:
    listed = [name for fields in flags_page.FIELDS_BY_TOPIC.values() for name in fields]
    assert sorted(listed) == sorted(field.name for field in FIELDS)


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_the_page_has_every_flag_of_ours_with_its_default(field: dataclasses.Field[object]) -> None:
    rows = flags_page.PAGE.read_text(encoding="utf-8").splitlines()
    found = [row for row in rows if re.match(rf"\| `{option_of(field.name)}\b(?!-)", row)]
    assert len(found) == 1
    _, _, meaning, shown, _ = found[0].split(" | ".strip(), 4)
    assert meaning.strip()
    assert shown.strip()
    default = field.default
    if default is dataclasses.MISSING or default is None or default is False:
        return
    text = f"{default:g}" if isinstance(default, float) else str(default)
    assert re.match(rf" {re.escape(text)}(?!\w|\.\d)", shown), shown


def test_the_page_has_every_option_of_megatron_once() -> None:
    page = flags_page.PAGE.read_text(encoding="utf-8")
    upstream = page[page.index("## Options of Megatron") :]
    listed = re.findall(r"(?:^\| |, |\| |here: )`(--[\w-]+)`", upstream, re.MULTILINE)
    assert sorted(listed) == sorted(HONOURED)


def test_the_tables_of_other_options_are_those_of_the_code() -> None:
    written = flags_page.COMING_FROM.read_text(encoding="utf-8")
    tables = flags_page.MARK + written.partition(flags_page.MARK)[2]
    assert tables == flags_page.option_tables(), "run python scripts/flags_page.py"


def test_every_other_option_of_megatron_is_in_one_row() -> None:
    tables = flags_page.option_tables()
    alone = re.findall(r"(?:^\| |, )`(--[\w-]+)`", tables, re.MULTILINE)
    families = dict(re.findall(r"(?:^\| |, )`(--[\w-]+-)…` \((\d+)\)", tables, re.MULTILINE))
    others = [option for option in FlagParser().rows if option not in HONOURED]
    of_families = {
        family: [option for option in others if option.startswith(family)] for family in families
    }
    assert {family: str(len(options)) for family, options in of_families.items()} == families
    assert sorted([*alone, *itertools.chain(*of_families.values())]) == sorted(others)
