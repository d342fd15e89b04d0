"""Conversations as token ids with weights: answers are trained, the rest is their context.

The tokenizer's chat template renders a conversation. If it has ``{% generation %}`` marks, they
say which tokens the assistant writes. Without them, two prefixes are rendered for every answer: the
turns before it with the prompt for an answer, and the turns up to its end. The tokens of both must
begin those of the whole conversation; the answer is what lies between. A template that ignores the
prompt and writes the role before the answer is refused, as the role would be trained.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.data.dataset import Weights
from megatron.hydraulis.data.documents import RawDocument
from megatron.hydraulis.data.tokenizer import DocumentEncoder
from megatron.hydraulis.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from rich.text import Text

TrainOn = Literal["assistant", "last", "all"]
"""Which turns are trained: all of the assistant's, its last one, or every token."""

LongConversations = Literal["error", "truncate", "drop"]
"""Policies for a long conversation. Splitting would part an answer from its context."""

TRAIN_ON: tuple[TrainOn, ...] = get_args(TrainOn)
LONG_CONVERSATIONS: tuple[LongConversations, ...] = get_args(LongConversations)

_TURN_KEYS = ("messages", "conversations")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
"""ShareGPT's names of roles; it uses the usual ones, too."""

_PREDECESSORS: Mapping[str, tuple[str | None, ...]] = {
    "system": (None,),
    "developer": (None,),
    "user": (None, "system", "developer", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
"""Role -> roles that may come before it; None is the beginning."""

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Pattern by which ``transformers`` recognises the marks."""

_SHOWN_TOKENS = 8
"""Tokens in a message about two texts that differ."""

_SHOWN_CHARS = 100
"""Length of a turn in a message about it."""

Turn = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``preprocess`` about conversations."""
    group = parser.add_argument_group("conversations")
    group.add_argument(
        "--chat",
        action="store_true",
        help="the input holds conversations: messages, ShareGPT's conversations, or prompt and "
        "completion. The chat template of a HuggingFaceTokenizer renders them; P.weights says "
        "which tokens are trained",
    )
    group.add_argument(
        "--train-on",
        choices=TRAIN_ON,
        help="train the assistant's turns, its last one, or all tokens (default: assistant)",
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="use this template, not the tokenizer's own"
    )
    group.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help="longest conversation, as in training (default: no limit)",
    )
    group.add_argument(
        "--long-sequences",
        choices=LONG_CONVERSATIONS,
        help="what to do with a longer one (default: error)",
    )
    group.add_argument(
        "--show",
        action="store_true",
        help="print ten conversations with the trained spans in ⟦brackets⟧ first",
    )


def encoder_from_arguments(
    namespace: argparse.Namespace, documents: DocumentEncoder
) -> "ConversationEncoder":
    """The encoder that the flags describe.

    Raises:
        ConfigurationError: as the constructor, or a template that cannot be read.
    """
    template = None
    if namespace.chat_template is not None:
        try:
            template = Path(namespace.chat_template).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"--chat-template is a text file but {namespace.chat_template} cannot be read "
                f"({error}); give its path"
            ) from None
    return ConversationEncoder(
        documents,
        train_on=namespace.train_on or "assistant",
        chat_template=template,
        seq_length=namespace.seq_length,
        long_conversations=namespace.long_sequences or "error",
        json_key=namespace.json_key,
    )


def check_arguments(namespace: argparse.Namespace) -> None:
    """Raise ConfigurationError for flags that do not fit together."""
    if namespace.chat:
        if namespace.tokenizer_type != "HuggingFaceTokenizer":
            raise ConfigurationError(
                f"--chat uses the chat template of a HuggingFaceTokenizer but --tokenizer-type is "
                f"{namespace.tokenizer_type}; give the Hugging Face folder of the model"
            )
        if namespace.long_sequences is not None and namespace.seq_length is None:
            raise ConfigurationError(
                f"--long-sequences {namespace.long_sequences} needs the longest length but "
                f"--seq-length is not given; give it"
            )
        return
    options = ("train_on", "chat_template", "seq_length", "long_sequences", "show")
    given = [option for option in options if getattr(namespace, option)]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise ConfigurationError(f"{flag} is about conversations; add --chat or remove it")


@dataclass(frozen=True)
class Conversation:
    """Turns as chat templates take them, in a valid order.

    Raises:
        DataError: no turn, an unknown role, or roles out of order.
    """

    turns: tuple[Turn, ...]
    origin: str
    """File and line, for messages."""
    tools: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if not self.turns:
            raise DataError(
                f"{self.origin}: a conversation has at least 1 turn but this one has 0; remove it"
            )
        before: str | None = None
        for number, turn in enumerate(self.turns, start=1):
            role = turn["role"]
            if role not in _PREDECESSORS:
                raise DataError(
                    f"{self.origin}: roles are {', '.join(_PREDECESSORS)} but turn {number} of "
                    f"{len(self.turns)} has '{role}'; rename or remove it"
                )
            allowed = _PREDECESSORS[role]
            if before not in allowed:
                after = " or ".join(name or "the beginning" for name in allowed)
                raise DataError(
                    f"{self.origin}: {role} comes after {after} but turn {number} of "
                    f"{len(self.turns)} comes after {before or 'the beginning'}; merge or reorder "
                    f"the turns, or remove the conversation"
                )
            before = role

    @property
    def answers(self) -> list[int]:
        """Positions of the assistant's turns."""
        return [i for i, turn in enumerate(self.turns) if turn["role"] == "assistant"]

    @classmethod
    def of(cls, document: RawDocument, json_key: str | None = None) -> "Conversation":
        """Read a JSON object with the turns, as a list, or with a prompt and its completion.

        Args:
            document: one JSON object; its key ``tools`` may describe tools.
            json_key: key of the turns; by default ``messages`` or ``conversations``.

        Raises:
            DataError: none of these forms, or as the constructor.
        """
        value, origin = document.json(), document.origin
        keys = _TURN_KEYS if json_key is None else (json_key,)
        if not isinstance(value, dict):
            raise DataError(
                f"{origin}: a conversation is a JSON object but here is {type(value).__name__}; "
                f"write an object with the key '{keys[0]}'"
            )
        key = next((key for key in keys if value.get(key) is not None), None)
        if key is not None:
            turns = _turns(value[key], "user", origin, key)
            if isinstance(value.get("system"), str) and value["system"]:
                turns.insert(0, {"role": "system", "content": value["system"]})
        elif json_key is None and {"prompt", "completion"} <= value.keys():
            turns = _turns(value["prompt"], "user", origin, "prompt")
            turns += _turns(value["completion"], "assistant", origin, "completion")
        else:
            empty = [f"'{key}' is null" for key in keys if key in value]
            raise DataError(
                f"{origin}: turns are under {' or '.join(map(repr, keys))}"
                f"{', or in prompt and completion,' if json_key is None else ''} but "
                f"{''.join(empty[:1]) or f'the keys are {", ".join(value) or "none"}'}; convert "
                f"the data, or name the key of the turns by --json-key"
            )
        tools = value.get("tools")
        if isinstance(tools, str) and tools:
            try:
                tools = json.loads(tools)
            except ValueError as error:
                raise DataError(
                    f"{origin}: tools are a list, or one in JSON, but the text is not JSON "
                    f"({error}); correct the line"
                ) from None
        return cls(tuple(turns), origin, tools or None)


def _turns(value: Any, role_of_text: str, origin: str, key: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": role_of_text, "content": value}]
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise DataError(
            f"{origin}: '{key}' holds a list of turns but is {type(value).__name__}; correct the "
            f"line or set --json-key"
        )
    turns = []
    for number, turn in enumerate(value, start=1):
        if "from" in turn and "role" not in turn:
            role = str(turn["from"])
            turn = {"role": _SHAREGPT_ROLES.get(role, role), "content": turn.get("value")}
        content = turn.get("content")
        has_content = isinstance(content, str | list) or (
            content is None and bool(turn.get("tool_calls"))
        )
        if not isinstance(turn.get("role"), str) or not has_content:
            raise DataError(
                f"{origin}: a turn has a role, or from, and content, or value, which is text or a "
                f"list of parts, but turn {number} of {len(value)} in '{key}' is "
                f"{json.dumps(turn)[:_SHOWN_CHARS]}; correct or remove the conversation"
            )
        turns.append(turn)
    return turns


@dataclass(frozen=True, kw_only=True)
class ChatCounts:
    """Counts of what became of conversations."""

    num_trained_tokens: int = 0
    num_untrained: int = 0
    """Conversations without a trained token, which are skipped."""
    num_dropped_long: int = 0
    num_truncated: int = 0
    num_truncated_tokens: int = 0
    num_cut_answers: int = 0
    """Truncated conversations that lost trained tokens."""

    def __add__(self, other: "ChatCounts") -> "ChatCounts":
        return ChatCounts(
            **{
                name: getattr(self, name) + getattr(other, name)
                for name in self.__dataclass_fields__
            }
        )

    def __str__(self) -> str:
        parts = (
            (self.num_untrained, "conversations without a trained token skipped"),
            (self.num_dropped_long, "longer than --seq-length dropped"),
            (
                self.num_truncated,
                f"truncated by {self.num_truncated_tokens:,} tokens, which cuts trained tokens of "
                f"{self.num_cut_answers:,}",
            ),
        )
        return f"{self.num_trained_tokens:,} trained tokens" + "".join(
            f", {number:,} {what}" for number, what in parts if number
        )


@dataclass(frozen=True, eq=False)
class WeightedTokens:
    """A conversation as it is stored."""

    tokens: npt.NDArray[np.integer]
    weights: Weights
    """(num_tokens,) 1 on trained tokens, else 0."""


class ConversationEncoder:
    """Turns conversations into token ids and weights.

    Args:
        documents: holds the Hugging Face tokenizer.
        train_on: which turns are trained.
        chat_template: instead of the tokenizer's own.
        seq_length: the longest conversation, in tokens to predict, one less than it has; None: no
            limit.
        long_conversations: what to do with longer ones.
        json_key: key of the turns; by default ``messages`` or ``conversations``.

    Raises:
        ConfigurationError: no chat template, or a ``seq_length`` below 1.
    """

    def __init__(
        self,
        documents: DocumentEncoder,
        *,
        train_on: TrainOn = "assistant",
        chat_template: str | None = None,
        seq_length: int | None = None,
        long_conversations: LongConversations = "error",
        json_key: str | None = None,
    ) -> None:
        if seq_length is not None and seq_length < 1:
            raise ConfigurationError(
                f"a sequence trains at least 1 token but --seq-length is {seq_length}; raise it"
            )
        self.documents = documents
        self.train_on = train_on
        self.seq_length = seq_length
        self.long_conversations = long_conversations
        self.json_key = json_key
        self._tokenizer = documents.hugging_face
        if chat_template is not None:
            self._tokenizer.chat_template = chat_template
        if self._tokenizer.chat_template is None:
            raise ConfigurationError(
                "conversations are rendered by the tokenizer's chat template but "
                f"{self._tokenizer.name_or_path} has none; give one by --chat-template FILE"
            )

    def encode(self, document: RawDocument) -> tuple[WeightedTokens | None, ChatCounts]:
        """Returns what is stored of a conversation, None for nothing, and what became of it.

        Raises:
            DataError: not a conversation, one that the template cannot render or whose answers
                cannot be found, or one that is too long and the policy is ``error``.
        """
        conversation = Conversation.of(document, self.json_key)
        ids, is_trained = self._trained(conversation)
        tokens = self.documents.stored(ids, conversation.origin)
        is_trained[:1] = False  # nothing predicts the first token
        num_excess = 0 if self.seq_length is None else max(0, len(tokens) - 1 - self.seq_length)
        num_cut = int(is_trained[len(tokens) - num_excess :].sum())
        if num_excess and self.long_conversations == "error":
            raise DataError(
                f"{conversation.origin}: sequences train at most --seq-length {self.seq_length} "
                f"tokens but this conversation has {len(tokens) - 1}, so {num_cut} of the "
                f"{int(is_trained.sum())} trained tokens of its answers would be cut off; raise "
                f"--seq-length, or set --long-sequences to truncate or drop"
            )
        if num_excess and self.long_conversations == "drop":
            return None, ChatCounts(num_dropped_long=1)
        counts = ChatCounts()
        if num_excess:
            counts = ChatCounts(
                num_truncated=1, num_truncated_tokens=num_excess, num_cut_answers=int(num_cut > 0)
            )
            tokens, is_trained = tokens[:-num_excess], is_trained[:-num_excess]
        if not is_trained.any():
            return None, counts + ChatCounts(num_untrained=1)
        counts += ChatCounts(num_trained_tokens=int(is_trained.sum()))
        return WeightedTokens(tokens, is_trained.astype(np.float32)), counts

    def marked(self, example: WeightedTokens) -> "Text":
        """The text of a conversation, its trained spans in bold ⟦brackets⟧."""
        from rich.text import Text  # slow to import

        text = Text()
        borders = np.flatnonzero(np.diff(example.weights)) + 1
        for part in np.split(np.arange(len(example.tokens)), borders):
            words = self._tokenizer.decode(example.tokens[part].tolist())
            trained = bool(example.weights[part[0]])
            text.append(f"⟦{words}⟧" if trained else words, "bold green" if trained else "")
        return text

    def _trained(self, conversation: Conversation) -> tuple[list[int], npt.NDArray[np.bool_]]:
        """Ids of the whole conversation and which of them are trained."""
        if self.train_on == "all":
            ids = self._render(conversation)["input_ids"]
            return ids, np.ones(len(ids), dtype=np.bool_)
        answers = conversation.answers
        if self._has_marks(conversation):
            rendered = self._render(conversation, return_assistant_tokens_mask=True)
            is_answer = np.array(rendered["assistant_masks"], dtype=np.bool_)
            if self.train_on == "last" and answers:
                _keep_last_run(is_answer, len(answers), conversation.origin)
            return rendered["input_ids"], is_answer
        ids = self._render(conversation)["input_ids"]
        is_answer = np.zeros(len(ids), dtype=np.bool_)
        for answer in answers[-1:] if self.train_on == "last" else answers:
            begin = self._num_tokens_before(ids, conversation, answer, add_generation_prompt=True)
            end = self._num_tokens_before(ids, conversation, answer + 1)
            self._check_header(ids[begin:end], begin, conversation, answer)
            is_answer[begin:end] = True
        return ids, is_answer

    def _has_marks(self, conversation: Conversation) -> bool:
        template = self._tokenizer.get_chat_template(tools=conversation.tools)
        return _GENERATION_MARK.search(template) is not None

    def _num_tokens_before(
        self, ids: list[int], conversation: Conversation, num_turns: int, **options: bool
    ) -> int:
        """Number of tokens of the first turns, which must begin ``ids``."""
        if num_turns == len(conversation.turns):
            return len(ids)
        prefix = self._render(conversation, num_turns, **options)["input_ids"]
        if ids[: len(prefix)] != prefix:
            self._refuse_prefix(ids, prefix, conversation, num_turns)
        return len(prefix)

    def _check_header(
        self, answer_ids: list[int], begin: int, conversation: Conversation, answer: int
    ) -> None:
        """Raise DataError for a header in an answer because the template ignores the prompt.

        Text before the content may also be part of the answer, such as an empty reasoning, if the
        prompt is what comes before it.

        Args:
            answer_ids: tokens that would be trained.
            begin: number of tokens before them.
            answer: position of the answer's turn.
        """
        content = conversation.turns[answer].get("content")
        if not isinstance(content, str):
            return
        text = self._tokenizer.decode(answer_ids).lstrip()
        place = text.find(content.strip())
        if place > 0 and len(self._render(conversation, answer)["input_ids"]) == begin:
            raise DataError(
                f"{conversation.origin}: the chat template has no {{% generation %}} marks, so "
                f"add_generation_prompt must render what comes before an answer, but it renders "
                f"nothing and turn {answer + 1} of {len(conversation.turns)} begins with "
                f"{text[:place]!r}, which would be trained; give a template with marks, or one "
                f"that renders the prompt, by --chat-template FILE"
            )

    def _refuse_prefix(
        self, ids: list[int], prefix: list[int], conversation: Conversation, num_turns: int
    ) -> NoReturn:
        place = next(
            (i for i, pair in enumerate(zip(ids, prefix, strict=False)) if pair[0] != pair[1]),
            min(len(ids), len(prefix)),
        )
        whole, part = (
            self._tokenizer.decode(sequence[place : place + _SHOWN_TOKENS])
            for sequence in (ids, prefix)
        )
        fix = "give a template with marks by --chat-template FILE"
        if self.train_on != "last":
            fix += ", or train on the last answer alone by --train-on last"
        raise DataError(
            f"{conversation.origin}: the chat template has no {{% generation %}} marks, so the "
            f"tokens of the first {num_turns} of {len(conversation.turns)} turns must begin those "
            f"of the conversation, but from token {place} of {len(prefix)} on they are {part!r} "
            f"there and {whole!r} in the conversation; {fix}"
        )

    def _render(
        self, conversation: Conversation, num_turns: int | None = None, **options: bool
    ) -> Mapping[str, Any]:
        """The first turns as ``transformers`` renders and tokenizes them."""
        try:
            rendered: Mapping[str, Any] = self._tokenizer.apply_chat_template(
                list(conversation.turns[:num_turns]),
                tools=conversation.tools,
                tokenize=True,
                return_dict=True,
                **options,
            )
        except Exception as error:  # templates raise whatever their authors chose
            from jinja2 import TemplateSyntaxError  # slow to import

            if isinstance(error, TemplateSyntaxError):
                raise ConfigurationError(
                    f"a chat template is Jinja but line {error.lineno} of this one is not "
                    f"({error.message}); correct it, or give another by --chat-template FILE"
                ) from error
            raise DataError(
                f"{conversation.origin}: the chat template cannot render the conversation "
                f"({error}); correct or remove it, or give another --chat-template"
            ) from error
        return rendered


def _keep_last_run(is_answer: npt.NDArray[np.bool_], num_answers: int, origin: str) -> None:
    """Clear all but the last run of True, in place; the template marks one run an answer."""
    begins = np.flatnonzero(np.diff(is_answer, prepend=False) & is_answer)
    if len(begins) != num_answers:
        raise DataError(
            f"{origin}: --train-on last needs one marked span an answer but the chat template "
            f"marks {len(begins)} spans in {num_answers} answers; use --train-on assistant or "
            f"another --chat-template"
        )
    is_answer[: begins[-1]] = False
