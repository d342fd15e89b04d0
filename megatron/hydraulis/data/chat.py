"""Conversations as token ids with weights: answers are trained, the rest is their context.

The tokenizer's chat template renders a conversation. If it has ``{% generation %}`` marks, they
say which tokens the assistant writes. Without them, two prefixes are rendered for every answer: the
turns before it with the prompt for an answer, and the turns up to its end. The tokens of both must
begin those of the whole conversation; the answer is what lies between, up to its end token. A
template that ignores the prompt and writes the role before the answer is refused, as the role would
be trained. A turn's ``weight`` or ``train`` of 0 excludes an answer.
"""

import argparse
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.data.conversations import CALL_KEYS, WEIGHT_KEYS, Conversation
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

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Pattern by which ``transformers`` recognises the marks."""

_SHOWN_CONVERSATIONS = 10
DEFAULT_SEED = 1234
"""The seed of --show, as Megatron's."""

_SHOWN_TOKENS = 8
"""Tokens in a message about two texts that differ."""


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
        type=int,
        nargs="?",
        const=_SHOWN_CONVERSATIONS,
        metavar="N",
        help="print N conversations, chosen at random, with the trained spans in ⟦brackets⟧ first "
        "(default: %(const)s if N is left out)",
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help=f"chooses the conversations of --show (default: {DEFAULT_SEED})",
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
        if namespace.seed is not None and namespace.show is None:
            raise ConfigurationError(
                f"--seed {namespace.seed} chooses the conversations of --show, which is not given; "
                f"add --show or remove it"
            )
        return
    options = ("train_on", "chat_template", "seq_length", "long_sequences", "show", "seed")
    given = [option for option in options if getattr(namespace, option) is not None]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise ConfigurationError(f"{flag} is about conversations; add --chat or remove it")


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
    ignored_keys: Counter[str] = field(default_factory=Counter)
    """Key of turns on which the rendered text does not depend -> number of turns that have it."""

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
        text = f"{self.num_trained_tokens:,} trained tokens" + "".join(
            f", {number:,} {what}" for number, what in parts if number
        )
        if not self.ignored_keys:
            return text
        keys = (f"{key} ({number:,} turns)" for key, number in sorted(self.ignored_keys.items()))
        return f"{text}\nkeys of turns that the chat template does not read: {', '.join(keys)}"


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
        added = self._tokenizer.added_tokens_decoder.items()
        self._special_ids = frozenset(i for i, token in added if token.special).union(
            self._tokenizer.all_special_ids
        )
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
                cannot be found or would lack a part, or one that is too long and the policy is
                ``error``.
        """
        conversation = Conversation.of(document, self.json_key)
        counts = ChatCounts(ignored_keys=self._ignored_keys(conversation))
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
            return None, counts + ChatCounts(num_dropped_long=1)
        if num_excess:
            counts += ChatCounts(
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
            if conversation.excluded:
                raise DataError(
                    f"{conversation.place_of(min(conversation.excluded))} has weight 0 or "
                    f"train false but --train-on all trains every token; use --train-on "
                    f"assistant, or remove the key"
                )
            ids = self._render(conversation)["input_ids"]
            return ids, np.ones(len(ids), dtype=np.bool_)
        answers = conversation.answers
        candidates = answers[-1:] if self.train_on == "last" else answers
        chosen = [answer for answer in candidates if answer not in conversation.excluded]
        if self._has_marks(conversation):
            rendered = self._render(conversation, return_assistant_tokens_mask=True)
            is_answer = np.array(rendered["assistant_masks"], dtype=np.bool_)
            if chosen != answers:
                is_kept = [answer in chosen for answer in answers]
                _keep_runs(is_answer, is_kept, conversation.origin)
            return rendered["input_ids"], is_answer
        ids = self._render(conversation)["input_ids"]
        is_answer = np.zeros(len(ids), dtype=np.bool_)
        for answer in chosen:
            begin = self._num_tokens_before(ids, conversation, answer, add_generation_prompt=True)
            end = self._num_tokens_before(ids, conversation, answer + 1)
            self._check_header(ids[begin:end], begin, conversation, answer)
            is_answer[begin : self._end_of_turn(ids, begin, end)] = True
        return ids, is_answer

    def _end_of_turn(self, ids: list[int], begin: int, end: int) -> int:
        """Where the end token of an answer ends, which a model writes last.

        Templates write more behind it, such as a line break. The end token is the first special
        token, or several without anything between them, after which only special tokens and white
        space follow; without one the answer ends where the turn does.
        """
        place = end
        while place > begin and (
            ids[place - 1] in self._special_ids
            or self._tokenizer.decode([ids[place - 1]]).isspace()
        ):
            place -= 1
        while place < end and ids[place] not in self._special_ids:
            place += 1
        if place == end:
            return end
        while place < end and ids[place] in self._special_ids:
            place += 1
        return place

    def _ignored_keys(self, conversation: Conversation) -> Counter[str]:
        """Keys without which the conversation is rendered to the same text, with their turns.

        Raises DataError for a call of a tool among them, or parts of content written as a list.
        """
        present = Counter(
            key
            for turn in conversation.turns
            for key, value in turn.items()
            if key not in ("role", "content", *WEIGHT_KEYS) and value not in (None, "", [], {})
        )
        lists = [i for i, t in enumerate(conversation.turns) if isinstance(t.get("content"), list)]
        if not present and not lists:
            return present
        whole = self._render(conversation, tokenize=False)
        for position in lists:
            content = conversation.turns[position]["content"]
            if str(content) in whole:
                raise DataError(
                    f"{conversation.place_of(position)} has content of {len(content)} parts but "
                    f"the chat template takes it as text; join the parts into one text, or give a "
                    f"template that reads them by --chat-template FILE"
                )
        ignored = Counter(
            {k: n for k, n in present.items() if not self._reads(k, conversation, whole)}
        )
        for key in CALL_KEYS:
            if key in ignored:
                position = next(i for i, t in enumerate(conversation.turns) if t.get(key))
                raise DataError(
                    f"{conversation.place_of(position)} has {key}, which the chat template does "
                    f"not read, so the call would be missing from the answer; give a template that "
                    f"reads it by --chat-template FILE, or write the call into content"
                )
        return ignored

    def _reads(self, key: str, conversation: Conversation, whole: str) -> bool:
        """True if the text of a conversation depends on a key of its turns."""
        try:
            return bool(self._render(conversation, left_out=(key,), tokenize=False) != whole)
        except DataError:  # of a template that requires it
            return True

    def _has_marks(self, conversation: Conversation) -> bool:
        template = self._tokenizer.get_chat_template(tools=conversation.tools)
        return _GENERATION_MARK.search(template) is not None

    def _num_tokens_before(
        self,
        ids: list[int],
        conversation: Conversation,
        num_turns: int,
        *,
        add_generation_prompt: bool = False,
    ) -> int:
        """Number of tokens of the first turns, which must begin ``ids``."""
        if num_turns == len(conversation.turns):
            return len(ids)
        prefix = self._render(conversation, num_turns, add_generation_prompt=add_generation_prompt)[
            "input_ids"
        ]
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
        self,
        conversation: Conversation,
        num_turns: int | None = None,
        *,
        left_out: Collection[str] = (),
        tokenize: bool = True,
        **options: bool,
    ) -> Any:
        """The first turns as ``transformers`` renders them, and tokenizes them unless it is not to.

        left_out: keys that the template does not get.
        """
        hidden = {*WEIGHT_KEYS, *left_out}
        try:
            rendered = self._tokenizer.apply_chat_template(
                [
                    {key: value for key, value in turn.items() if key not in hidden}
                    for turn in conversation.turns[:num_turns]
                ],
                tools=conversation.tools,
                tokenize=tokenize,
                return_dict=tokenize,
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


def _keep_runs(is_answer: npt.NDArray[np.bool_], is_kept: Sequence[bool], origin: str) -> None:
    """Clear the runs of True that are not kept, in place; the template marks one an answer."""
    begins = np.flatnonzero(np.diff(is_answer, prepend=False) & is_answer)
    if len(begins) != len(is_kept):
        raise DataError(
            f"{origin}: --train-on last, or the weight of a turn, needs one marked span an answer "
            f"but the chat template marks {len(begins)} spans in {len(is_kept)} answers; train all "
            f"of them, or use another --chat-template"
        )
    for begin, end, keeps in zip(begins, [*begins[1:], len(is_answer)], is_kept, strict=True):
        is_answer[begin:end] &= keeps
