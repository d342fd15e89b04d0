"""Conversations out of the forms in which data sets hold them, and which turns may be trained."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.hydraulis.data.documents import RawDocument
from megatron.hydraulis.errors import DataError

_TURN_KEYS = ("messages", "conversations")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
"""ShareGPT's names of roles; it uses the usual ones, too."""

WEIGHT_KEYS = ("weight", "train")
"""Keys of a turn that say whether it is trained: OpenAI's and Axolotl's."""

CALL_KEYS = ("tool_calls", "function_call")
"""Keys of a turn with what the assistant writes besides content."""

_PREDECESSORS: Mapping[str, tuple[str | None, ...]] = {
    "system": (None,),
    "developer": (None,),
    "user": (None, "system", "developer", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
"""Role -> roles that may come before it; None is the beginning."""

_SHOWN_CHARS = 100
"""Length of a turn in a message about it."""

Turn = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Turns as chat templates take them, in a valid order.

    Raises:
        DataError: no turn, an unknown role, roles out of order, or weights that are wrong.
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
        for position, turn in enumerate(self.turns):
            weight_of(turn, self.place_of(position))

    @property
    def excluded(self) -> frozenset[int]:
        """Positions of turns that their weight excludes from training."""
        places = map(self.place_of, range(len(self.turns)))
        weights = map(weight_of, self.turns, places)
        return frozenset(i for i, weight in enumerate(weights) if weight == 0)

    def place_of(self, position: int) -> str:
        """File, line and turn, for messages."""
        return f"{self.origin}: turn {position + 1} of {len(self.turns)}"

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
            others = {k: v for k, v in turn.items() if k not in ("from", "value")}
            names = {"role": _SHAREGPT_ROLES.get(role, role), "content": turn.get("value")}
            turn = others | names
        content = turn.get("content")
        if isinstance(content, list) and len(content) == 1 and _is_text(content[0]):
            turn = {**turn, "content": (content := content[0]["text"])}
        has_content = isinstance(content, str | list) or (
            content is None and any(turn.get(key) for key in CALL_KEYS)
        )
        if not isinstance(turn.get("role"), str) or not has_content:
            raise DataError(
                f"{origin}: a turn has a role, or from, and content, or value, which is text or a "
                f"list of parts, but turn {number} of {len(value)} in '{key}' is "
                f"{json.dumps(turn)[:_SHOWN_CHARS]}; correct or remove the conversation"
            )
        turns.append(turn)
    return turns


def _is_text(part: Any) -> bool:
    """True for a part of content in OpenAI's form that is text and nothing else."""
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def weight_of(turn: Turn, place: str) -> int | None:
    """0 or 1 as a turn's ``weight`` or ``train`` says; None if it has neither.

    place: file, line and turn, for messages.

    Raises DataError for another value, keys that disagree, or 1 for a turn of another role than the
    assistant's.
    """
    given = {key: turn[key] for key in WEIGHT_KEYS if turn.get(key) is not None}
    for key, value in given.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise DataError(
                f"{place} has {key} {json.dumps(value)} but an answer is trained (1) or not (0); "
                f"write 0 or 1"
            )
        if value and turn["role"] != "assistant":
            raise DataError(
                f"{place} has {key} {json.dumps(value)} but its role is {turn['role']} and only "
                f"the assistant's turns are trained; remove the key, or write 0"
            )
    if len({int(value) for value in given.values()}) > 1:
        both = " and ".join(f"{key} {json.dumps(value)}" for key, value in given.items())
        raise DataError(f"{place} has {both}, which contradict each other; remove one")
    return int(next(iter(given.values()))) if given else None
