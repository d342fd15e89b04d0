"""Everything that the documentation mentions exists: commands, options, files, sections."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from megatron.hydraulis.__main__ import COMMANDS, TRAIN
from megatron.hydraulis.flags.arguments import parse_arguments
from megatron.hydraulis.flags.config import HydraulisConfig, option_of
from megatron.hydraulis.flags.honoured import HONOURED
from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.strategy.pool import num_ranks_of
from tests.unit.flags.argument_command import flag_parser, write_corpus

_PROGRAMS = (
    r"(?:python|\.venv/bin/python|(?:\.venv/bin/)?hydraulis|bash|torchrun|sbatch|make|docker|pip)"
)
_COMMAND = re.compile(rf"(?:\w+=\S* +)*{_PROGRAMS} +\S")
_FENCE = re.compile(r"```(?P<language>\w*)")
_SPAN = re.compile(r"`([^`]+)`")
_OPTIONAL = re.compile(r"\[(--[^\]]*)\]")


@dataclass(frozen=True)
class DocumentedCommand:
    """One command, in a separate block or inside a sentence."""

    where: str
    """File and line."""
    text: str
    in_block: bool

    @cached_property
    def words(self) -> tuple[str, ...]:
        """The words as split by a shell, with optional parts."""
        return tuple(shlex.split(_OPTIONAL.sub(r"\1", self.text), comments=True))

    @property
    def program_arguments(self) -> tuple[str, ...] | None:
        """The words after ``hydraulis`` or ``-m megatron.hydraulis``; None for other commands."""
        for index, word in enumerate(self.words):
            is_program = "=" not in word and (index == 0 or self.words[index - 1] == "--no-python")
            if word == "megatron.hydraulis" or (is_program and word.endswith("hydraulis")):
                return self.words[index + 1 :]
        return None

    @property
    def is_whole(self) -> bool:
        """True if the command is complete, without placeholders."""
        return not any(
            word in ("…", "--help") or word.isupper() or word.startswith("$") for word in self.words
        ) and not _OPTIONAL.search(self.text)


def _paragraphs(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, kind, text): kind is the language of a fence, ``indented`` or ``prose``."""
    lines = path.read_text(encoding="utf-8").splitlines()
    kind, start, held = "prose", 1, list[str]()
    for number, line in enumerate([*lines, ""], start=1):
        fence = _FENCE.match(line)
        if fence:
            yield start, kind, "\n".join(held)
            is_end = kind not in ("prose", "indented")
            kind, start, held = ("prose" if is_end else fence["language"] or "text"), number + 1, []
            continue
        if kind in ("prose", "indented"):
            now = "indented" if line.startswith("    ") else "prose"
            if now != kind or not line.strip():
                yield start, kind, "\n".join(held)
                kind, start, held = now, number, []
        held.append(line)
    yield start, kind, "\n".join(held)


def documented_commands(path: Path, root: Path) -> list[DocumentedCommand]:
    """Every command that a file shows."""
    found = []
    for start, kind, text in _paragraphs(path):
        where = f"{path.relative_to(root)}:{start}"
        if kind == "prose":
            joined = " ".join(line.strip() for line in text.splitlines())
            found += [
                DocumentedCommand(where, span, in_block=False)
                for span in _SPAN.findall(joined)
                if _COMMAND.match(span)
            ]
        elif kind in ("bash", "console", "indented"):
            for line in re.sub(r"\\\n\s*", "", text).splitlines():
                found += [
                    DocumentedCommand(where, command.strip(), in_block=True)
                    for command in line.strip().removeprefix("$ ").split(" && ")
                    if _COMMAND.match(command.strip())
                ]
    return found


def documented_options(path: Path) -> set[str]:
    """Options inside sentences and tables, without their values."""
    return {
        option
        for _, kind, text in _paragraphs(path)
        if kind == "prose"
        for span in _SPAN.findall(" ".join(text.split()))
        for option in re.findall(r"(?:^| )(--[a-z][\w-]*)", span)
        if not _COMMAND.match(span) and "…" not in span
    }


ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / name / "README.md" for name in ("benchmarks", "examples", "hydraulis_patches")),
    ]
)
OF_OTHERS = {
    # Slurm
    *("--account", "--array", "--batch", "--container-image", "--container-mounts", "--exclude"),
    *("--gpus-per-node", "--mem", "--no-kill", "--nodes", "--partition", "--requeue", "--signal"),
    *("--start", "--time", "--exclusive"),
    # torchrun, pip
    *("--max-restarts", "--nnodes", "--nproc-per-node", "--no-build-isolation", "--build-arg"),
    *("--shutdown-timeout", "--numa-binding"),
    # docker, apt
    *("--gpus", "--no-install-recommends"),
}
"""Options of other programs that the pages name."""
SAID_BY_OTHERS = ("srun: ", "ReqNode", "Rendezvous", "address", "CUDA", "exitcode", "No space")
TRAINING_SCRIPTS = (
    *("quickstart.sh", "finetune.sh", "run_local.sh", "pretrain_gpt.sbatch", "sweep.sbatch"),
)
"""What follows them are flags of training."""


@functools.cache
def commands_of(path: Path) -> list[DocumentedCommand]:
    return documented_commands(path, ROOT)


@functools.cache
def training_options() -> frozenset[str]:
    ours = {option_of(field.name) for field in dataclasses.fields(HydraulisConfig)}
    return frozenset({*HONOURED, *ours, "--help"})


@functools.cache
def parser_of(command: str) -> argparse.ArgumentParser:
    module = {each.name: each.module for each in COMMANDS}[command]
    parser = argparse.ArgumentParser(prog=command, exit_on_error=False)
    if command != TRAIN.name:
        importlib.import_module(module).add_arguments(parser)
    return parser


@functools.cache
def benchmark_options(name: str) -> frozenset[str]:
    """The options in the source: the parsers are created inside functions."""
    path = ROOT / "benchmarks" / name.replace(".", "/")
    sources = [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else path.glob("*.py")
    texts = [source.read_text() for source in (*sources, ROOT / "benchmarks" / "command.py")]
    return frozenset({"--help", *re.findall(r'"(--[\w-]+)"', "".join(texts))})


def after(words: tuple[str, ...], word: str) -> tuple[str, ...]:
    return words[words.index(word) + 1 :]


def options_in(words: tuple[str, ...]) -> set[str]:
    return {word.split("=")[0] for word in words if re.match(r"--\w", word)}


def wrong_in(command: DocumentedCommand) -> set[str]:
    """Options, modules, scripts and targets of a command that do not exist."""
    words = command.words
    missing = {
        word
        for word in words
        if re.fullmatch(r"(scripts|examples|tests|benchmarks)/[\w./-]+", word)
        and not (ROOT / word).exists()
    }
    if command.program_arguments:
        name, *rest = command.program_arguments
        if name == TRAIN.name:
            return missing | (options_in(tuple(rest)) - training_options())
        if name not in {"COMMAND", "--help", "--version", *(each.name for each in COMMANDS)}:
            return {name}
        if name.startswith("-") or name == "COMMAND":
            return missing
        own, _, of_training = " ".join(rest).partition(" -- ")
        known = set(parser_of(name)._option_string_actions)
        missing |= options_in(tuple(own.split())) - known
        missing |= options_in(tuple(of_training.split())) - training_options()
    elif any(word.startswith("benchmarks.") for word in words):
        name = next(word for word in words if word.startswith("benchmarks."))
        missing |= options_in(after(words, name)) - benchmark_options(name.split(".")[1])
    elif "pretrain_gpt.py" in words:
        missing |= options_in(after(words, "pretrain_gpt.py")) - training_options()
    elif words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        missing |= {words[1]} - set(targets)
    for script in words:
        if Path(script).name in TRAINING_SCRIPTS:
            missing |= options_in(after(words, script)) - training_options()
    return missing


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_page_can_be_typed(path: Path) -> None:
    wrong = {
        f"{command.where}: {command.text}": missing
        for command in commands_of(path)
        if (missing := wrong_in(command))
    }
    assert not wrong


RUNS_A_COMMAND = {command.name for command in COMMANDS if command.takes_command}


def test_complete_commands_parse() -> None:
    """No required argument is missing, and every value is accepted."""
    num_seen = 0
    for path in PAGES:
        for command in commands_of(path):
            if not command.program_arguments or not command.is_whole:
                continue
            name, *rest = command.program_arguments
            if name == TRAIN.name or name.startswith("-"):
                continue
            if not command.in_block and not rest:
                continue  # the name of the command
            if name in RUNS_A_COMMAND and "--" in rest:
                rest = rest[: rest.index("--")]
            try:
                parser_of(name).parse_args(rest)
            except (argparse.ArgumentError, SystemExit) as error:
                pytest.fail(f"{command.where}: {command.text}: {error}")
            num_seen += 1
    assert num_seen >= 6


def test_variables_before_a_command_are_read_by_something() -> None:
    scripts = "".join(
        path.read_text()
        for path in (ROOT / "scripts").rglob("*")
        if path.suffix in (".sh", ".sbatch", ".py")
    )
    for path in PAGES:
        for command in commands_of(path):
            for word in command.words:
                name, equals, _ = word.partition("=")
                if not equals or not name.isidentifier():
                    break
                assert re.search(rf"\b{name}\b", scripts), f"{command.where}: {name}"


def test_every_option_that_a_page_names_is_one_of_some_program() -> None:
    known = {*training_options(), *flag_parser().upstream_options, *OF_OTHERS}
    known |= {option for each in COMMANDS for option in parser_of(each.name)._option_string_actions}
    known |= {"--version"}
    known |= {
        option
        for path in (ROOT / "benchmarks").glob("*.py")
        for option in benchmark_options(path.stem)
    }
    scripts = [*(ROOT / "scripts").glob("*.sh"), *(ROOT / "scripts").glob("*.py")]
    known |= set(re.findall(r"--[a-z][\w-]+", "".join(path.read_text() for path in scripts)))
    unknown = {
        str(path.relative_to(ROOT)): missing
        for path in PAGES
        if (missing := documented_options(path) - known)
    }
    assert not unknown, "there is no such option, or OF_OTHERS lacks another program's"


def as_text(default: object) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_defaults_in_the_help_are_correct() -> None:
    source = (ROOT / "megatron" / "hydraulis" / "flags" / "config.py").read_text()
    for field in dataclasses.fields(HydraulisConfig):
        if isinstance(field.default, bool) or not isinstance(field.default, int | float | str):
            continue
        _, _, behind = source.partition(f"\n    {field.name}: ")
        described = " ".join(behind.split('"""')[1].split())
        stated = re.search(r"Default: (\w+(\.\w+)?)", described)
        assert stated is not None, field.name
        assert stated[1] == as_text(field.default), field.name


def anchors(path: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.add(slug if slug not in found else f"{slug}-1")
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_link_targets_exist(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for link in links:
        if link.startswith(("http", "mailto:")):
            continue
        file, _, section = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        if section:
            assert section in anchors(target), link


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        links = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
        waiting += [
            target
            for link in links
            if not link.startswith("http") and (target := (page.parent / link).resolve()).is_file()
        ]
    assert not set(PAGES) - reached


def test_the_architecture_names_every_part_of_the_package() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    packages = text[text.index("## Packages") :].partition("\n## ")[0]
    parts = [path.parent.name for path in (ROOT / "megatron" / "hydraulis").glob("*/__init__.py")]
    assert not [part for part in parts if f"{part}/`" not in packages]


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = (path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md"))
    assert not [page for page in pages if f"]({page})" not in index and str(page) != "README.md"]


MAX_WORDS_OF_DOCS = 24_000


def test_the_docs_have_at_most_as_many_words_as_contributing_says() -> None:
    num_words = sum(len(path.read_text().split()) for path in (ROOT / "docs").rglob("*.md"))
    assert num_words <= MAX_WORDS_OF_DOCS
    assert f"{MAX_WORDS_OF_DOCS:,} words" in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize(
    ("head", "least"),
    [("| question | module | name |", 20), ("| to add | begin in | name | then |", 8)],
    ids=["decided", "added"],
)
def test_the_tables_of_contributing_name_existing_code(head: str, least: int) -> None:
    """Each name is defined in a module of its row; what the last column mentions exists."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = text[text.index(head) :].partition("\n\n")[0].splitlines()[2:]
    folders = (ROOT / "megatron", ROOT / "tests", ROOT / "scripts")
    code = {path: path.read_text() for folder in folders for path in folder.rglob("*.py")}
    for row in rows:
        sources = [(ROOT / path).read_text() for path in re.findall(r"\]\(([^)]+)\)", row)]
        assert sources, row
        _, _, names, *mentions = row.removeprefix("| ").removesuffix(" |").split(" | ")
        for name in re.findall(r"`([^`]+)`", names):
            defines = rf"^ *((class|def) {name}\b|{name}\b.* = )"
            assert any(re.search(defines, each, re.MULTILINE) for each in sources), (row, name)
        for name in re.findall(r"`(\w[\w/.]*)`", "".join(mentions)):
            is_found = (
                any(str(path).endswith(f"/{name}") for path in code)
                if name.endswith(".py")
                else (ROOT / name).is_file()
                or any(re.search(rf"\b{name}\b", each) for each in code.values())
            )
            assert is_found, (row, name)
    assert len(rows) >= least


def test_the_flags_that_operations_give_as_an_example_train_on_eight_nodes(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    block = re.search(r"^FLAGS=\(\n(.*?)^\)$", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    flags = block[1].split()
    # Their corpus and tokenizer do not exist here.
    for option in ("--data-path", "--tokenizer-type", "--tokenizer-model"):
        del flags[(at := flags.index(option)) : at + 2]
    flags += ["--data-path", write_corpus(tmp_path), "--tokenizer-type", "NullTokenizer"]
    flags += ["--vocab-size", "32000", "--ranks-per-node", "8"]
    parser = flag_parser()
    for strategy in re.findall(r"--strategy '([^']*)'", text):
        num_ranks = Strategy.parse(strategy, num_ranks_of(strategy)).num_ranks
        argv = [*flags, "--strategy", strategy]
        resolved = parse_arguments(argv, num_ranks=num_ranks, rank=0, flag_parser=parser)
        assert resolved.pool.num_ranks == num_ranks


def test_messages_quoted_in_operations_exist() -> None:
    """Each constant part of a quotation is in a script or in the package."""
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text[text.index("| what you see |") :].partition("\n\n")[0]
    sources = "".join(
        re.sub(r'"(\s*\\)?\n\s*[fr]*"', " " if path.suffix == ".sh" else "", path.read_text())
        for folder in ("scripts", "megatron/hydraulis")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".sh", ".py")
    )
    num_seen = 0
    for row in table.splitlines()[2:]:
        for quotation in re.findall(r"`([^`]+)`", row.split(" | ")[0]):
            for part in re.split(r"…|\b\d+|\bN\b|error: ", quotation):
                if len(words := part.strip(" :,")) > 15 and not quotation.startswith(
                    SAID_BY_OTHERS
                ):
                    assert words in sources, quotation
                    num_seen += 1
    assert num_seen >= 10
