"""Conversations to prompt ids, with the model's own chat template in a sandbox.

The template's text is cut at the control tokens it emits, and each stretch between them is encoded as ordinary text.
User text cannot reach a control token: before rendering, each control literal in the conversation is broken by a
private character that occurs nowhere else, and that character is taken out again after the cut. A string whose end
could complete a literal with what follows is broken there too. For conversations without such literals the template
sees exactly what a server's would.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eagle3.errors import TemplateError
from eagle3.recipe import Recipe
from eagle3.records import JsonObject, canonical_json, sha256_text
from eagle3.tokens.grammar import ResponseGrammar, grammar_of
from eagle3.tokens.tokenizer import Tokenizer, load_tokenizer, read_json_file
from eagle3.tokens.tool_declarations import typescript_declarations

PRIVATE_USE = range(0xE000, 0xF8FF)
"""Characters without a meaning of their own; one that the conversation does not use breaks its literals."""


class PromptRenderer:
    """Renders prompts of one target in one mode."""

    def __init__(
        self,
        directory: Path,
        grammar: ResponseGrammar,
        tokenizer: Tokenizer,
        mode: str,
        template_options: Mapping[str, bool | int | str] | None = None,
        *,
        template: str | None = None,
    ) -> None:
        """Compile the template of a target directory.

        Args:
            directory: Holds `chat_template.jinja`, or a `tokenizer_config.json` with `chat_template`.
            grammar: Of the target's family.
            tokenizer: Of the target.
            mode: Mode of the grammar; its template options apply first.
            template_options: Further template variables; they override the mode's.
            template: Template to use instead of the directory's.

        Raises:
            TemplateError: There is no template, or it does not compile.
        """
        self.grammar = grammar
        self.tokenizer = tokenizer
        self.mode = mode
        self._prompt_ending = grammar.mode(mode).prompt_ends_with
        self._options = {**grammar.mode(mode).template_options, **(template_options or {})}
        config = read_json_file(directory / "tokenizer_config.json")
        self._specials = _special_texts(config)
        source = template or _template_source(directory, config, grammar)
        self._template = _compile(source)
        literals = sorted(tokenizer.control_literals, key=lambda literal: (-len(literal), literal))
        self._literals = re.compile("|".join(re.escape(literal) for literal in literals) or r"(?!)")
        self._ends = {literal[:size] for literal in literals for size in range(1, len(literal))}
        self._longest = max((len(literal) for literal in literals), default=0)
        self.digest = sha256_text(canonical_json([source, self._options, grammar.digest, tokenizer.digest]))
        """sha256 over all that decides prompt ids."""

    def control_literals_in(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> list[str]:
        """Return which control literals occur in the text of a conversation, each once."""
        found = {literal for text in _strings([messages, tools]) for literal in self._literals.findall(text)}
        return sorted(found)

    def render_text(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> str:
        """Return the prompt as text, for people; ids come from `render_ids`.

        Raises:
            TemplateError: The template refuses the conversation, or the prompt does not end as the mode demands.
        """
        text, breaker = self._render(messages, tools)
        return text.replace(breaker, "")

    def render_ids(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> list[int]:
        """Return the prompt ids, generation prompt included.

        Raises:
            TemplateError: As for `render_text`.
            TokenizerError: A text cannot be encoded.
        """
        return self._encode(*self._render(messages, tools))

    def render_history_ids(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> list[int]:
        """Return the ids of a conversation as the template writes it into a later prompt: no generation prompt.

        Raises:
            TemplateError: The template refuses the conversation.
            TokenizerError: A text cannot be encoded.
        """
        return self._encode(*self._render(messages, tools, is_open=False))

    def _encode(self, text: str, breaker: str) -> list[int]:
        ids: list[int] = []
        position = 0
        for match in self._literals.finditer(text):
            ids += self.tokenizer.encode_ordinary(text[position : match.start()].replace(breaker, ""))
            ids.append(self.tokenizer.control_id(match.group()))
            position = match.end()
        return ids + self.tokenizer.encode_ordinary(text[position:].replace(breaker, ""))

    def _render(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject], *, is_open: bool = True
    ) -> tuple[str, str]:
        breaker = _unused_character([messages, tools])

        def broken(text: str) -> str:
            return self._broken(text, breaker)

        variables: dict[str, Any] = {
            **self._specials,
            **self._options,
            "messages": _mapped(list(messages), broken),
            "tools": _mapped(list(tools), broken) if tools else None,
            "add_generation_prompt": is_open,
        }
        if tools and self.grammar.tool_declarations == "typescript":
            declared = typescript_declarations(tools)
            if declared is not None:
                variables["tools_ts_str"] = broken(declared)
        try:
            text = self._template.render(**variables)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as exc:
            roles = [str(message.get("role")) for message in messages]
            raise TemplateError(
                f"the chat template cannot render a conversation with roles {roles[:5]}: {type(exc).__name__}: {exc}"
            ) from exc
        if is_open and not text.endswith(self._prompt_ending):
            raise TemplateError(
                f"the chat template ends prompts with {text[-60:]!r}, but mode {self.mode!r} of grammar "
                f"{self.grammar.name!r} expects {self._prompt_ending!r}. Check target.mode, target.template_options "
                "and the template."
            )
        return text, breaker

    def _broken(self, text: str, breaker: str) -> str:
        text = self._literals.sub(lambda match: match.group()[0] + breaker + match.group()[1:], text)
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            if text[-size:] in self._ends:
                return text[: len(text) - size + 1] + breaker + text[len(text) - size + 1 :]
        return text


def open_renderer(recipe: Recipe, target: Path) -> PromptRenderer:
    """Return the renderer of a recipe's target, with its grammar and checked tokenizer in it.

    Raises:
        TokenError: Grammar, tokenizer or template is missing or they disagree.
    """
    grammar = grammar_of(recipe)
    tokenizer = load_tokenizer(target, grammar)
    return PromptRenderer(target, grammar, tokenizer, recipe.target.mode, recipe.target.template_options)


def _template_source(directory: Path, config: Mapping[str, Any], grammar: ResponseGrammar) -> str:
    try:
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        source = config.get("chat_template")
    if isinstance(source, list):
        named = {str(entry["name"]): str(entry["template"]) for entry in cast("list[dict[str, Any]]", source)}
        source = named.get("default")
    if not isinstance(source, str) or not source:
        source = grammar.chat_template
    if not source:
        raise TemplateError(
            f"target directory {directory.name!r} has no chat template: neither 'chat_template.jinja' nor "
            "'chat_template' in 'tokenizer_config.json'. Put the model's own template there."
        )
    return source


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Return `bos_token` and its like, which templates refer to by name."""
    texts: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        if isinstance(value, dict):
            value = cast("dict[str, Any]", value).get("content")
        if isinstance(value, str):
            texts[name] = value
    return texts


def _compile(source: str) -> jinja2.Template:
    """Compile a template in the environment that transformers gives templates."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates call it this way
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,  # noqa: FBT001, FBT002 - same reason
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(pattern: str) -> str:
        return datetime.now(UTC).strftime(pattern)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception  # pyright: ignore[reportArgumentType] - jinja2 types globals narrowly
    environment.globals["strftime_now"] = strftime_now  # pyright: ignore[reportArgumentType] - same reason
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as exc:
        raise TemplateError(f"the chat template does not compile, line {exc.lineno}: {exc.message}") from exc


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in cast("Sequence[Any]", value):
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of JSON with every string value changed; keys and roles steer the template and stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: item if key in ("role", "type") else _mapped(item, change) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in cast("Sequence[Any]", value)]
    return value


def _unused_character(value: Any) -> str:
    used = {character for text in _strings(value) for character in text if not character.isascii()}
    for code in PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise TemplateError("the conversation uses every private-use character, so control literals cannot be kept apart")
