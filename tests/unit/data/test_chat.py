"""Conversations: tokens as ``transformers`` renders them, weights on the answers alone."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.data import preprocess
from megatron.hydraulis.data.chat import ChatCounts, ConversationEncoder
from megatron.hydraulis.data.dataset import read_index, read_weights
from megatron.hydraulis.data.documents import RawDocument
from megatron.hydraulis.data.tokenizer import (
    DocumentEncoder,
    TokenizerSettings,
    build_tokenizer,
)
from megatron.hydraulis.errors import ConfigurationError, DataError
from tests.support.chat_tokenizer import END, PROMPT, START, TEMPLATE, TURN, make_chat_tokenizer

MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    + START
    + "assistant\n{% generation %}{{ m.content }}"
    + END
    + "\n{% endgeneration %}{% else %}"
    + TURN
    + "{% endif %}{% endfor %}"
    + PROMPT
)
FORGETFUL = (
    "{% for m in messages %}" + START + "{{ m.role }}\n"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    + END
    + "\n{% endfor %}"
    + PROMPT
)
"""Drops the reasoning of earlier answers, as the templates of reasoning models do."""

HEADED = TEMPLATE.removesuffix(PROMPT)
"""Writes the role before an answer and ignores the prompt."""
BARE = "{% for m in messages %}{{ m.content }}" + END + "{% endfor %}"
"""Writes nothing before an answer, so that there is no prompt."""

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "Ask the tool."},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Grüße"},
    {"role": "assistant", "content": "Bye."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_tokenizer(tmp_path_factory.mktemp("chat_tokenizer"))


@pytest.fixture
def documents(folder: Path) -> DocumentEncoder:
    settings = TokenizerSettings(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    return DocumentEncoder(build_tokenizer(settings), append_eod=False)


def line(value: Any) -> RawDocument:
    content = json.dumps(value).encode()
    return RawDocument("chats.jsonl", 3, content, None, len(content))


def parts_of(
    documents: DocumentEncoder, turns: list[dict[str, str]], **options: Any
) -> list[tuple[str, bool]]:
    """Stretches of a conversation's text and whether they are trained."""
    encoder = ConversationEncoder(documents, **options)
    example, counts = encoder.encode(line({"messages": turns}))
    assert example is not None
    assert counts == ChatCounts(num_trained_tokens=int(example.weights.sum()))
    borders = np.flatnonzero(np.diff(example.weights)) + 1
    return [
        (documents.hugging_face.decode(ids), bool(weights[0]))
        for ids, weights in zip(
            np.split(example.tokens, borders), np.split(example.weights, borders), strict=True
        )
    ]


def rendered(turns: list[dict[str, str]]) -> str:
    return "".join(f"{START}{turn['role']}\n{turn['content']}{END}\n" for turn in turns)


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["prefixes", "marks"])
def test_the_text_of_answers_is_trained_and_nothing_else(
    documents: DocumentEncoder, template: str
) -> None:
    """The line break after an answer's end token is trained only if the template marks it."""
    answers = [TURNS[i]["content"] + END for i in (2, 4, 6)]
    trained, rest = answers, "\n"
    if template == MARKED:
        trained, rest = [f"{answer}\n" for answer in answers], ""
    prompt = f"{START}assistant\n"
    after = [(rest, False)] if rest else []
    assert parts_of(documents, TURNS, chat_template=template) == [
        (rendered(TURNS[:2]) + prompt, False),
        (trained[0], True),
        (rest + rendered(TURNS[3:4]) + prompt, False),
        (trained[1], True),
        (rest + rendered(TURNS[5:6]) + prompt, False),
        (trained[2], True),
        *after,
    ]
    assert parts_of(documents, TURNS, chat_template=template, train_on="last") == [
        (rendered(TURNS[:6]) + prompt, False),
        (trained[2], True),
        *after,
    ]
    first, whole = parts_of(documents, TURNS, chat_template=template, train_on="all")
    assert first == (START, False)  # nothing predicts it
    assert whole == (rendered(TURNS).removeprefix(START), True)


def weighted(*weights: object, key: str = "weight") -> list[dict[str, Any]]:
    """TURNS, whose answers have these weights."""
    left = iter(weights)
    return [{**turn, key: next(left)} if turn["role"] == "assistant" else turn for turn in TURNS]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED], ids=["prefixes", "marks"])
@pytest.mark.parametrize(
    ("turns", "train_on", "trained"),
    [
        (weighted(0, 1, 0), "assistant", ["It is 4."]),
        (weighted(0.0, None, 1), "assistant", ["It is 4.", "Bye."]),
        (weighted(True, False, True, key="train"), "assistant", ["Ask the tool.", "Bye."]),
        (weighted(0, 1, 1), "last", ["Bye."]),
        ([{**turn, "train": turn["role"] == "assistant"} for turn in TURNS], "last", ["Bye."]),
    ],
)
def test_a_weight_of_0_excludes_an_answer(
    documents: DocumentEncoder, template: str, turns: Any, train_on: Any, trained: list[str]
) -> None:
    encoder = ConversationEncoder(documents, chat_template=template, train_on=train_on)
    example, counts = encoder.encode(line({"messages": turns}))
    plain, _ = encoder.encode(line({"messages": TURNS}))
    assert example is not None
    assert plain is not None
    assert example.tokens.tolist() == plain.tokens.tolist()
    text = encoder.marked(example).plain
    assert [part.partition(END)[0] for part in text.split("⟦")[1:]] == trained
    assert not counts.ignored_keys
    nothing, counts = encoder.encode(line({"messages": weighted(0, 0, 0)}))
    assert nothing is None
    assert counts.num_untrained == 1


def test_what_follows_the_end_token_is_not_trained(documents: DocumentEncoder) -> None:
    """Several end tokens in a row are one end; a special token inside an answer is none."""
    end = "{{ m.content }}" + END
    cases = {
        "\n": (TEMPLATE, "a"),
        "": (TEMPLATE.replace(END + "\n", END), "a"),
        f"\n{START}\n": (TEMPLATE.replace(end, f"{end}\n{START}"), "a"),
        "\n\n": (TEMPLATE.replace(end, f"{end}{END}\n"), f"{START} a\n "),
    }
    for rest, (template, content) in cases.items():
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content}]
        _, trained, *after = parts_of(documents, turns, chat_template=template)
        assert trained[0].rstrip(END).rstrip() == content.rstrip(), template
        assert trained[0].endswith(END)
        assert after == ([(rest, False)] if rest else [])
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    bare += "{% if add_generation_prompt %}assistant: {% endif %}"
    parts = parts_of(documents, turns, chat_template=bare)
    assert parts[1] == (f"{START} a\n \n", True)  # without an end token


def test_keys_that_the_template_does_not_read_are_counted(documents: DocumentEncoder) -> None:
    template = TEMPLATE.replace("{{ m.content }}", "{{ m.name }}{{ m.content }}")
    assert template != TEMPLATE
    encoder = ConversationEncoder(documents, chat_template=template)
    turns: list[dict[str, Any]] = [
        {"from": "human", "value": "2 + 2?", "name": "Ada", "id": 1, "tool_calls": []},
        {"from": "gpt", "value": "4", "id": 2, "reasoning_content": "easy", "refusal": None},
    ]
    example, counts = encoder.encode(line({"conversations": turns}))
    assert example is not None
    assert "Ada2 + 2?" in documents.hugging_face.decode(example.tokens)
    assert counts.ignored_keys == {"id": 2, "reasoning_content": 1}
    assert str(counts + counts).endswith("not read: id (4 turns), reasoning_content (2 turns)")
    requiring = "{% for m in messages %}{% if not m.id %}{{ raise_exception('no id') }}{% endif %}"
    encoder = ConversationEncoder(documents, chat_template=requiring + template + "{% endfor %}")
    assert "id" not in encoder.encode(line({"conversations": turns}))[1].ignored_keys


def test_content_in_parts_is_text(documents: DocumentEncoder) -> None:
    part = {"type": "text", "text": "2 + 2?"}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": [part]},
        {"role": "assistant", "content": "4"},
    ]
    texts = [{"role": "user", "content": "2 + 2?"}, turns[1]]
    assert parts_of(documents, turns) == parts_of(documents, texts)
    turns[0]["content"] = [part, part]
    with pytest.raises(DataError, match=r"line 3: turn 1 of 2 .* 2 parts .*join"):
        ConversationEncoder(documents).encode(line({"messages": turns}))
    reading = TEMPLATE.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
    )
    example, _ = ConversationEncoder(documents, chat_template=reading).encode(
        line({"messages": turns})
    )
    assert example is not None
    assert "2 + 2?2 + 2?" in documents.hugging_face.decode(example.tokens)


def test_a_template_that_rewrites_earlier_turns_is_refused(documents: DocumentEncoder) -> None:
    turns = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "<think>easy</think>4"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "<think>yes</think>Yes"},
    ]
    says = r"line 3: .* 2 of 4 .* 25 of \d+ .*'<think>e'.*'4<\|im_end\|>.*--chat-template .*last$"
    with pytest.raises(DataError, match=says):
        parts_of(documents, turns, chat_template=FORGETFUL)
    parts = parts_of(documents, turns, chat_template=FORGETFUL, train_on="last")
    assert parts[1] == (f"<think>yes</think>Yes{END}", True)


def test_a_template_that_ignores_the_prompt_is_refused_if_roles_would_be_trained(
    documents: DocumentEncoder,
) -> None:
    says = r"line 3: .*_prompt .* turn 3 of 7 .*'<\|im_start\|>assistant\\n'.*--chat-template"
    with pytest.raises(DataError, match=says):
        parts_of(documents, TURNS, chat_template=HEADED)
    parts = parts_of(documents, TURNS, chat_template=BARE, train_on="last")
    assert parts[1] == (f"Bye.{END}", True)
    reasoned = TEMPLATE.replace("{{ m.content }}", "<think></think>{{ m.content }}")
    parts = parts_of(documents, TURNS, chat_template=reasoned, train_on="last")
    assert parts[1] == (f"<think></think>Bye.{END}", True)


@pytest.mark.parametrize(
    ("template", "train_on", "says"),
    [
        ("{# nothing #}", "assistant", r"line 3: .* 1 token .* gave 0;"),
        ("{# nothing #}", "all", r"line 3: .* 1 token .* gave 0;"),
        ("{{ raise_exception('no tools') }}", "assistant", r"line 3: .*\(no tools\)"),
        ("a\n{% for m in messages %}", "assistant", r"Jinja .* line 2 "),
    ],
)
def test_a_template_that_renders_no_conversation_is_refused(
    documents: DocumentEncoder, template: str, train_on: Any, says: str
) -> None:
    encoder = ConversationEncoder(documents, chat_template=template, train_on=train_on)
    with pytest.raises((DataError, ConfigurationError), match=says):
        encoder.encode(line({"messages": TURNS}))


@pytest.mark.parametrize(
    ("value", "num_turns"),
    [
        ({"messages": TURNS}, 7),
        (
            {
                "conversations": [
                    {"from": {"user": "human", "assistant": "gpt"}.get(role, role), "value": text}
                    for role, text in (turn.values() for turn in TURNS)
                ]
            },
            7,
        ),
        ({"prompt": TURNS[:4], "completion": TURNS[4:]}, 7),
        ({"prompt": "2 + 2?", "completion": "It is 4."}, 2),
    ],
    ids=["messages", "ShareGPT", "prompt and completion", "texts"],
)
def test_every_form_is_the_same_conversation(
    documents: DocumentEncoder, value: dict[str, Any], num_turns: int
) -> None:
    turns = TURNS if num_turns == 7 else [TURNS[1], TURNS[4]]
    encoder = ConversationEncoder(documents)
    found, _ = encoder.encode(line(value))
    expected, _ = encoder.encode(line({"messages": turns}))
    assert found is not None
    assert expected is not None
    assert documents.hugging_face.decode(found.tokens) == rendered(turns)
    assert found.weights.tolist() == expected.weights.tolist()


USER, ANSWER = TURNS[1], TURNS[2]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"messages": [ANSWER]}, "assistant .* user or tool .* turn 1 of 1"),
        ({"messages": [USER, USER]}, "user .* turn 2 of 2 .* user"),
        ({"messages": [USER, TURNS[0]]}, "system .* turn 2"),
        ({"messages": [USER, TURNS[3]]}, "tool .* assistant or tool .* turn 2"),
        ({"messages": [{"role": "bot", "content": ""}]}, "turn 1 of 1 .*'bot'"),
        ({"messages": [{"role": "user"}]}, "turn 1 of 1 in 'messages' is .*user"),
        ({"messages": [{"role": "user", "content": None}]}, "turn 1 of 1 in 'messages' is .*null"),
        ({"messages": None}, "'messages' is null"),
        ({"messages": []}, "1 turn .* 0"),
        ({"messages": 5}, "'messages' .* list .* int"),
        ({"text": "a"}, "'messages' or 'conversations', .*prompt .* text;"),
        ([1], "JSON object .* list"),
        ({"messages": [USER], "tools": "{"}, "tools .* JSON"),
        ({"messages": [USER, ANSWER | {"weight": 0.5}]}, r"turn 2 of 2 .*weight 0\.5 .*0 or 1"),
        ({"messages": [USER, ANSWER | {"train": "no"}]}, r'turn 2 of 2 .*train "no" .*0 or 1'),
        ({"messages": [USER | {"weight": 1}, ANSWER]}, "turn 1 of 2 .*weight 1 .*user .*remove"),
        (
            {"messages": [USER, ANSWER | {"weight": 0, "train": True}]},
            "turn 2 of 2 .*weight 0 and train true.*remove one",
        ),
        (
            {"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}]},
            "turn 2 of 2 .*function_call.*--chat-template",
        ),
        (
            {"messages": [USER, ANSWER | {"tool_calls": [{"id": "x"}]}]},
            "turn 2 of 2 .*tool_calls.*--chat-template",
        ),
    ],
)
def test_what_is_no_conversation_is_refused(
    documents: DocumentEncoder, value: Any, says: str
) -> None:
    with pytest.raises(DataError, match=f"chats.jsonl, line 3: .*{says}"):
        ConversationEncoder(documents).encode(line(value))


def test_a_tokenizer_without_template_needs_one(documents: DocumentEncoder) -> None:
    documents.hugging_face.chat_template = None
    with pytest.raises(ConfigurationError, match="--chat-template"):
        ConversationEncoder(documents)


def test_the_last_answer_needs_one_mark_an_answer(documents: DocumentEncoder) -> None:
    template = MARKED.replace("{{ m.content }}<", "{{ m.content }}{% endgeneration %}<", 1).replace(
        "\n{% endgeneration %}", "\n"
    )
    twice = template.replace(
        "{% generation %}{{ m.content }}",
        "{% generation %}{{ m.content[0] }}{% endgeneration %}-{% generation %}{{ m.content }}",
    )
    with pytest.raises(DataError, match="6 spans in 3 answers"):
        parts_of(documents, TURNS, chat_template=twice, train_on="last")


def test_weights_need_answers_that_can_be_told_apart(documents: DocumentEncoder) -> None:
    nowhere = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    marked_once = "{% generation %}x{% endgeneration %}" + nowhere
    with pytest.raises(DataError, match="1 spans in 3 answers"):
        parts_of(documents, weighted(0, 1, 1), chat_template=marked_once)
    with pytest.raises(DataError, match=r"turn 3 of 7 .*weight 0 or train false .*--train-on all"):
        parts_of(documents, weighted(0, 1, 1), train_on="all")


def test_conversations_that_are_too_long(documents: DocumentEncoder) -> None:
    """The last answer of TURNS has 5 trained tokens, its 4 letters and the end; then a line break
    follows."""
    length = len(ConversationEncoder(documents).encode(line({"messages": TURNS}))[0].tokens) - 1  # type: ignore[union-attr]

    def encode(seq_length: int, policy: Any) -> Any:
        return ConversationEncoder(
            documents, seq_length=seq_length, long_conversations=policy, train_on="last"
        ).encode(line({"messages": TURNS}))

    assert encode(length, "error")[1] == ChatCounts(num_trained_tokens=5)
    with pytest.raises(DataError, match=rf"-length {length - 2} .* {length}, .* 1 of the 5 "):
        encode(length - 2, "error")
    example, counts = encode(length - 2, "truncate")
    assert len(example.tokens) == len(example.weights) == length - 1
    assert counts == ChatCounts(
        num_trained_tokens=4, num_truncated=1, num_truncated_tokens=2, num_cut_answers=1
    )
    assert encode(length - 2, "drop") == (None, ChatCounts(num_dropped_long=1))
    nothing, counts = encode(length - 20, "truncate")
    assert nothing is None
    assert counts.num_untrained == 1


def test_of_a_long_conversation_the_ends_are_shown(
    tmp_path: Path,
    documents: DocumentEncoder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TURNS}) + "\n")
    encoder = ConversationEncoder(documents)
    shown = []
    for num_shown in (1000, 6):
        monkeypatch.setattr(preprocess, "_SHOWN_TOKENS", num_shown)
        preprocess.show_conversations([tmp_path / "a.jsonl"], encoder, num_shown=1, seed=1)
        shown.append(capsys.readouterr().out)
    num_tokens = len(encoder.encode(line({"messages": TURNS}))[0].tokens)  # type: ignore[union-attr]
    assert "left out" not in shown[0]
    assert f"[… {num_tokens - 6} tokens are left out …]" in shown[1]
    assert TURNS[0]["content"] in shown[0]
    assert TURNS[1]["content"] not in shown[1]


def test_shown_conversations_are_drawn_by_the_seed(
    tmp_path: Path, documents: DocumentEncoder, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every one of 20 is shown about equally often, in the order of the file."""
    answers = [{"messages": [USER, {"role": "assistant", "content": f"<{i}>"}]} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, answers)) + "\n")
    encoder = ConversationEncoder(documents)

    def shown(seed: int) -> list[int]:
        preprocess.show_conversations([tmp_path / "a.jsonl"], encoder, num_shown=5, seed=seed)
        output = capsys.readouterr().out
        assert f"5 of 20 conversations, chosen at random (--seed {seed})" in output
        return [int(number) for number in re.findall(r"⟦<(\d+)>", output)]

    draws = [shown(seed) for seed in range(60)]
    assert draws[3] == shown(3)
    assert all(draw == sorted(draw) and len(set(draw)) == 5 for draw in draws)
    counts = np.bincount(np.concatenate(draws), minlength=20)
    assert counts.min() >= 5  # 15 expected
    assert counts.max() <= 28


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_command_writes_weights_and_shows_spans(
    tmp_path: Path, folder: Path, num_workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    messages = json.dumps({"messages": TURNS})
    unanswered = json.dumps({"messages": [USER]})
    (source / "a.jsonl").write_text(f"{messages}\n{unanswered}\n")
    (source / "b.jsonl.gz").write_bytes(gzip.compress(messages.encode()))
    rows = [{"messages": TURNS, "source": "x"}, {"messages": [USER, ANSWER], "source": "y"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source / "c.parquet")
    words = ["preprocess", "--input", str(source), "--output-prefix", str(tmp_path / "out")]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    words += ["--workers", str(num_workers)]
    assert main([*words, "--chat", "--show", "--train-on", "last"]) == 0
    output = capsys.readouterr().out
    assert "5 of 5 conversations, chosen at random (--seed 1234)" in output
    assert output.count("⟦Bye.<|im_end|>⟧") == 3
    assert output.count("⟦Ask the tool.<|im_end|>⟧") == 1
    assert "1 conversations without a trained token skipped" in output
    assert "out.bin, .weights and .idx" in output
    index = read_index(str(tmp_path / "out"))
    weights = read_weights(index)
    assert weights is not None
    lengths = index.document_lengths.tolist()
    trained = [part.sum() for part in np.split(weights, np.cumsum(lengths)[:-1])]
    assert trained == [5, 5, 5, 14]
    assert f"{sum(trained):.0f} trained tokens" in output
    # Plain documents under the same name have no weights.
    assert main([*words, "--pattern", "*.jsonl", "--json-key", "none"]) == 2
    assert read_weights(read_index(str(tmp_path / "out"))) is not None
    (source / "a.jsonl").write_text('{"text": "plain"}\n')
    assert main([*words, "--pattern", "*.jsonl"]) == 0
    assert read_weights(read_index(str(tmp_path / "out"))) is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--train-on all", "--train-on is about conversations; add --chat"),
        ("--show", "--show is about conversations; add --chat"),
        ("--seed 0", "--seed is about conversations; add --chat"),
        ("--chat --seed 0", "--seed 0 chooses the conversations of --show"),
        ("--chat --show 0", "--show must be at least 1 but is 0"),
        ("--chat --tokenizer-type NullTokenizer", "--tokenizer-type is NullTokenizer; give"),
        ("--chat --long-sequences drop", "--seq-length is not given"),
        ("--chat --seq-length 0", "--seq-length must be at least 1 but is 0"),
        ("--chat --chat-template none.jinja", "none.jinja cannot be read"),
    ],
)
def test_flags_that_do_not_fit(
    tmp_path: Path, folder: Path, words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": TURNS}))
    flags = ["--input", str(tmp_path), "--output-prefix", str(tmp_path / "out")]
    flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    assert main(["preprocess", *flags, *words.split()]) == 2
    assert says in capsys.readouterr().err
