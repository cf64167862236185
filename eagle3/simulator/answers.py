"""What the models say: recorded answers looked up by their messages. Reads files once, at start.

A recorded answer holds the ids a real model produced, so token counts, bills and the truth given to tests are those of
a model and not of a guess. Scripted answers (text without ids) become ids in `eagle3.simulator.scripted`.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from eagle3.errors import ConfigurationError, InputError, MissingExtraError
from eagle3.simulator.scenario import draw

Decode = Callable[[Sequence[int]], str]
"""Ids to text, control tokens skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call in the model's own spelling."""

    id: str
    name: str
    arguments: str
    """JSON text exactly as generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the model produced for one prompt, before any provider touches the text."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    """All generated ids, the end token included when the model stopped."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    num_reasoning_tokens: int = 0
    """Leading output ids up to and including the token that closes the reasoning."""
    is_reasoning_opened: bool = False
    """A control token stands directly before the reasoning (in the prompt or generated)."""
    is_reasoning_closed: bool = False
    """A control token stands directly before the content."""
    is_ended: bool = False
    """The last output id is the end token, which no reply shows."""


Improvise = Callable[[Mapping[str, Any], int | None], Answer | None]
"""A request and its `max_tokens` to an answer, or to null when the question is none of those it knows."""


class AnswerTooLongError(InputError):
    """The recorded answer exceeds the request's `max_tokens` and cannot be cut without a tokenizer."""


def canonical_json(value: object) -> str:
    """JSON text that is equal for equal values: sorted keys, no blanks, non-ASCII characters as they are."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def key_of(value: object) -> str:
    """sha256 (hex) of the canonical JSON, the identity of messages and of samples."""
    return hashlib.sha256(canonical_json(value).encode("utf-8", "surrogatepass")).hexdigest()


def recorded_answer(record: Mapping[str, Any]) -> Answer:
    """Read one line of a recorded-answers file: `prompt_ids`, `output_ids`, `text`, `finish_reason`.

    Raises:
        KeyError, TypeError, ValueError: A field is missing or of the wrong type.
    """
    finish: Any = record["finish_reason"]
    if finish not in ("stop", "length"):
        raise ValueError(f"finish_reason is {finish!r}, expected 'stop' or 'length'")
    output_ids = tuple(int(i) for i in record["output_ids"])
    if not output_ids:
        raise ValueError("output_ids is empty")
    return Answer(
        prompt_ids=tuple(int(i) for i in record["prompt_ids"]),
        output_ids=output_ids,
        finish_reason=finish,
        content=str(record["text"]),
        is_ended=finish == "stop",
    )


def cut_answer(answer: Answer, max_tokens: int, decode: Decode | None) -> Answer:
    """The answer as it would be with the request's `max_tokens`.

    Args:
        answer: A recorded answer, without reasoning or tool calls if it has to be cut here.
        max_tokens: Of the request.
        decode: Ids to text; null when the simulator has no tokenizer.

    Raises:
        AnswerTooLongError: It has to be cut and there is no tokenizer, or its parts cannot be told apart by ids.
    """
    if len(answer.output_ids) <= max_tokens:
        return answer
    if answer.reasoning is not None or answer.tool_calls or decode is None:
        raise AnswerTooLongError(
            f"the recorded answer has {len(answer.output_ids)} tokens, the request allows {max_tokens}: raise "
            "max_tokens, or start the simulator with --tokenizer so that it can cut plain answers."
        )
    kept = answer.output_ids[:max_tokens]
    return replace(answer, output_ids=kept, content=decode(kept), finish_reason="length", is_ended=False)


class Answers:
    """All recorded answers of a simulator, by messages."""

    def __init__(self, *, decode: Decode | None = None, improvise: Improvise | None = None) -> None:
        """Start empty; `decode` makes text of cut answers, `improvise` answers what nobody recorded."""
        self._by_messages: dict[str, list[Answer]] = {}
        self._decode = decode
        self._improvise = improvise

    def __len__(self) -> int:
        return sum(map(len, self._by_messages.values()))

    def add(self, messages: object, answer: Answer) -> None:
        """Record one more answer to `messages`."""
        self._by_messages.setdefault(key_of(messages), []).append(answer)

    def improvised(self, request: Mapping[str, Any], max_tokens: int | None) -> Answer | None:
        """The answer to a question that nobody recorded, cut to `max_tokens`; null when it is not an easy one."""
        return None if self._improvise is None else self._improvise(request, max_tokens)

    def find(self, messages_key: str, *, max_tokens: int | None, replica: str) -> Answer | None:
        """The answer to a prompt, cut to `max_tokens`; null when none is recorded.

        Args:
            messages_key: `key_of(messages)`.
            max_tokens: Of the request; null for no limit.
            replica: Tells requests for the same messages apart (their seed); it picks one of several recordings.

        Raises:
            AnswerTooLongError: See `cut_answer`.
        """
        recorded = self._by_messages.get(messages_key)
        if recorded is None:
            return None
        chosen = recorded[int(draw(0, "answer", messages_key, replica) * len(recorded))]
        return chosen if max_tokens is None else cut_answer(chosen, max_tokens, self._decode)


def load_answers(
    paths: Iterable[Path],
    *,
    decode: Decode | None = None,
    improvise: Improvise | None = None,
    script: Callable[[Mapping[str, Any]], Answer] | None = None,
) -> Answers:
    """Read answer files: JSON lines with `messages` and either `output_ids` (recorded) or `content` (scripted).

    Args:
        paths: Files to read.
        decode: Ids to text, for requests with a smaller `max_tokens` than the recording.
        improvise: Answers some questions that nobody recorded.
        script: Turns a scripted line into an answer; null when no tokenizer and grammar are given.

    Raises:
        ConfigurationError: A file cannot be read, or holds scripted lines and `script` is null.
        InputError: A line is malformed.
    """
    answers = Answers(decode=decode, improvise=improvise)
    for path in paths:
        try:
            # Not splitlines: answers may contain U+2028 and its like unescaped.
            lines = path.read_text(encoding="utf-8").split("\n")
        except OSError as exc:
            raise ConfigurationError(f"answers file {str(path)!r} cannot be read: {exc.strerror}.") from exc
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"answers file {path.name!r}, line {number}"
            try:
                document: Any = json.loads(line)
                if not isinstance(document, dict):
                    raise TypeError("expected a JSON object")
                record = cast("dict[str, Any]", document)
                is_recorded = "output_ids" in record
                if not is_recorded and script is None:
                    raise ConfigurationError(
                        f"{where} is scripted text without token ids: give --tokenizer and --grammar, or leave it out."
                    )
                answer = recorded_answer(record) if is_recorded or script is None else script(record)
                answers.add(record["messages"], answer)
            except (KeyError, TypeError, ValueError) as exc:
                raise InputError(f"{where} is malformed ({type(exc).__name__}: {exc}). Record it again.") from exc
    return answers


def load_decode(directory: Path) -> Decode:
    """The decode function of `tokenizer.json` in a model directory.

    Raises:
        ConfigurationError: The file is missing or damaged.
        MissingExtraError: The `tokenizers` package is not installed.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as exc:
        raise MissingExtraError("cutting recorded answers needs the 'tokenizers' package: pip install it.") from exc
    path = directory / "tokenizer.json"
    try:
        # The package raises bare Exception for every fault of the file.
        tokenizer: Any = cast("Any", Tokenizer).from_file(str(path))
    except Exception as exc:
        raise ConfigurationError(f"tokenizer {str(path)!r} cannot be loaded: {exc}. Check --tokenizer.") from exc

    def decode(ids: Sequence[int]) -> str:
        return cast("str", tokenizer.decode(list(ids), skip_special_tokens=True))

    return decode
