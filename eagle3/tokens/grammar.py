"""Response grammars: how a model family writes an answer, as data.

One YAML file per family. Control tokens stand there as text *and* id; `eagle3.tokens.tokenizer` checks one against the
other and both against the model's own files. Everything about a family that code needs is here, so that adding one is
writing a file (docs/grammars.md).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, Self, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from eagle3.errors import GrammarError
from eagle3.recipe import Recipe
from eagle3.records import canonical_json, sha256_text

PLACEHOLDERS = ("{id}", "{name}", "{arguments}")
"""What the text of a tool call may refer to."""

SpaceAfter = Literal["keep", "strip"]
SpaceBefore = Literal["keep", "strip", "strip_all"]
ArgumentStyle = Literal["verbatim", "spaced", "compact"]
PaddingStyle = Literal["kept", "restored"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


class ControlToken(_Model):
    """One token that is an instruction and not text."""

    text: str = Field(min_length=1)
    """Its spelling in the tokenizer files."""
    id: int = Field(ge=0)
    """Its id; checked against the files when the tokenizer is loaded."""


class TokenizerFormat(_Model):
    """Which files hold the vocabulary and how they are read."""

    kind: Literal["tiktoken", "hf"]
    """`tiktoken`: a rank file plus `split_pattern`; `hf`: a byte-level `tokenizer.json`."""
    file: str
    """Name of the vocabulary file in the target directory."""
    sha256: tuple[str, ...] = ()
    """Accepted digests of the vocabulary file; empty accepts any."""
    vocab_size: int = Field(ge=1)
    """Number of ids, control tokens included."""
    split_pattern: str | None = None
    """Only tiktoken: the regular expression that cuts text before merging."""
    num_control: int | None = Field(default=None, ge=0)
    """Only tiktoken: ids after the ranks that are reserved for control tokens."""
    reserved_name: str | None = None
    """Only tiktoken: name of a control id without a name of its own; `{id}` stands for the id."""
    max_chunk_chars: int | None = Field(default=None, ge=1)
    """Longest stretch the model's own tokenizer encodes in one go."""
    max_run_chars: int | None = Field(default=None, ge=1)
    """Longest run of space or of non-space characters it does not cut."""
    normalizer: Literal["none", "nfc"] = "none"
    """What the tokenizer does to text before encoding; text that it changes cannot be rebuilt exactly."""

    @model_validator(mode="after")
    def _tiktoken_needs_pattern(self) -> Self:
        if self.kind == "tiktoken" and (self.split_pattern is None or self.num_control is None):
            raise ValueError("kind 'tiktoken' needs split_pattern and num_control")
        return self


class Part(_Model):
    """One piece of what surrounds a text: a control token, or text the model writes there itself."""

    token: str | None = None
    """Name of a control token."""
    text: str | None = None
    """Literal text; in a tool call it may hold `{id}`, `{name}` and `{arguments}`."""
    padding: bool = False
    """Text that many servers strip: the `padding` habit says whether it must be put back."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.token is None) == (self.text is None):
            raise ValueError("a part holds exactly one of 'token' and 'text'")
        if self.padding and self.text is None:
            raise ValueError("only text can be padding")
        return self


class Around(_Model):
    """What the model generates before and after a text."""

    before: tuple[Part, ...] = ()
    after: tuple[Part, ...] = ()


class ToolGrammar(_Model):
    """How tool calls are written."""

    after_content: tuple[Part, ...] = ()
    """Between an answer text and the calls, when there is such a text."""
    before: tuple[Part, ...] = ()
    """Before the first call."""
    call: tuple[Part, ...] = Field(min_length=1)
    """Each call."""
    between: tuple[Part, ...] = ()
    """Between two calls."""
    after: tuple[Part, ...] = ()
    """After the last call."""
    call_id: str | None = None
    """Regular expression of the ids the model writes, where `{id}` is part of a call. A server that puts ids of its own
    in their place leaves the model's unknown; such answers are dropped."""
    implicit_close: bool = False
    """Whether a call section may end the reasoning without the close token."""

    @field_validator("call_id")
    @classmethod
    def _is_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as exc:
            raise ValueError(f"not a regular expression: {exc}") from None
        return pattern


class Mode(_Model):
    """One way the model answers."""

    template_options: Mapping[str, bool | int | str] = Field(default_factory=dict)
    """Variables the chat template needs for this mode."""
    prompt_ends_with: str
    """Text that the rendered prompt must end with. It holds the opener of thinking when the prompt opens it."""
    reasoning: Around | None = None
    """Around the reasoning; None when this mode generates none."""
    close: str | None = None
    """Control token that ends the reasoning; needed when `reasoning` is given."""
    content: Around = Around()
    """Around the answer text."""


class Variants(_Model):
    """Habits a provider of this family may have. The first value of each axis is the default."""

    head_space: tuple[SpaceAfter, ...] = ("keep", "strip")
    """A space that detokenizers put after a control token: part of the text, or to be stripped."""
    tail_space: tuple[SpaceBefore, ...] = ("keep", "strip", "strip_all")
    """The same before a control token; `strip_all` also before the end token, which clients never see."""
    args_style: tuple[ArgumentStyle, ...] = ("verbatim", "spaced", "compact")
    """Spacing of tool arguments: as received, or re-serialised with or without spaces."""
    padding: tuple[PaddingStyle, ...] = ("kept",)
    """Whether padding text is still in the reply or must be put back."""
    end_billed: tuple[bool, ...] = (True, False)
    """Whether the end token counts as a completion token."""
    close_billed: tuple[bool, ...] = (True, False)
    """Whether the close of thinking does."""

    @model_validator(mode="after")
    def _no_empty_axis(self) -> Self:
        for name in type(self).model_fields:
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"axis {name!r} must name each of its values once, and at least one")
        return self


class ResponseGrammar(_Model):
    """How one model family turns an answer into tokens."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    version: int = Field(ge=1)
    """Raised whenever a change of the file changes ids."""
    models: tuple[str, ...] = ()
    """Patterns of model ids that answer so, lower case with `*`: they choose a grammar for recorded replies."""
    tokenizer: TokenizerFormat
    control: Mapping[str, ControlToken] = Field(min_length=1)
    """Named control tokens; the names are this file's own."""
    modes: Mapping[str, Mode] = Field(min_length=1)
    end: Mapping[str, tuple[str, ...]]
    """Per finish reason the control tokens that end the answer; a reason that is not named has none."""
    tools: ToolGrammar | None = None
    tool_declarations: Literal["json", "typescript"] = "json"
    """`typescript`: the template also takes the tools as TypeScript, in the variable `tools_ts_str`."""
    variants: Variants = Variants()
    chat_template: str | None = None
    """For directories that have no template or a sibling family's; one in the directory that fits comes first."""

    @model_validator(mode="after")
    def _names_are_declared(self) -> Self:
        for place, name in self._token_names():
            if name not in self.control:
                known = sorted(self.control)
                raise ValueError(f"{place}: control token {name!r} is not declared; declared are {known}")
        for name, mode in self.modes.items():
            if (mode.reasoning is None) != (mode.close is None):
                raise ValueError(f"modes.{name}: 'reasoning' and 'close' go together")
        ids = [token.id for token in self.control.values()]
        texts = [token.text for token in self.control.values()]
        if len(set(ids)) != len(ids) or len(set(texts)) != len(texts):
            raise ValueError("control: two tokens share an id or a text")
        return self

    def _token_names(self) -> Iterator[tuple[str, str]]:
        for name, mode in self.modes.items():
            around = [mode.content, *([mode.reasoning] if mode.reasoning else [])]
            parts = [part for entry in around for part in (*entry.before, *entry.after)]
            yield from ((f"modes.{name}", part.token) for part in parts if part.token is not None)
            if mode.close is not None:
                yield f"modes.{name}.close", mode.close
        for reason, tokens in self.end.items():
            yield from ((f"end.{reason}", token) for token in tokens)
        if self.tools is not None:
            tools = self.tools
            parts = [*tools.after_content, *tools.before, *tools.call, *tools.between, *tools.after]
            yield from (("tools", part.token) for part in parts if part.token is not None)

    @property
    def digest(self) -> str:
        """sha256 over all that decides the ids of answers: equal digests give equal ids."""
        return sha256_text(canonical_json(self.model_dump(mode="json", exclude={"models", "chat_template"})))

    def mode(self, name: str) -> Mode:
        """Return a mode.

        Raises:
            GrammarError: The grammar has no such mode.
        """
        if name not in self.modes:
            raise GrammarError(f"grammar {self.name!r} has no mode {name!r}; its modes are {sorted(self.modes)}.")
        return self.modes[name]


def packaged_grammars() -> list[str]:
    """Return the names of the grammars that come with this package."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))


def load_grammar(name_or_path: str | Path) -> ResponseGrammar:
    """Read and check a grammar.

    Args:
        name_or_path: Name of a packaged grammar, or a path to a YAML file (recognised by its suffix).

    Raises:
        GrammarError: There is no such grammar, or the file breaks a rule; the message names each field.
    """
    source = str(name_or_path)
    try:
        if source.endswith((".yaml", ".yml")):
            text = Path(source).read_text(encoding="utf-8")
        else:
            text = (_folder() / f"{source}.yaml").read_text(encoding="utf-8")
    except OSError as exc:
        raise GrammarError(
            f"there is no response grammar {source!r}. Packaged are {packaged_grammars()}; a path must end in '.yaml'."
        ) from exc
    try:
        document: object = yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise GrammarError(f"grammar {source!r} is not valid YAML: {' '.join(str(exc).split())}") from exc
    try:
        return ResponseGrammar.model_validate(document)
    except ValidationError as exc:
        problems = [f"{_place(error['loc'])}: {error['msg']}" for error in exc.errors()]
        shown = "\n  ".join(problems[:5])
        more = f"\n  … and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise GrammarError(f"grammar {source!r} is malformed:\n  {shown}{more}") from None


def grammar_of(recipe: Recipe) -> ResponseGrammar:
    """Load the grammar that a recipe names; a path is relative to the recipe file.

    Raises:
        GrammarError: As for `load_grammar`, or the grammar lacks the recipe's mode.
    """
    name = recipe.target.grammar
    grammar = load_grammar(recipe.resolve(Path(name)) if name.endswith((".yaml", ".yml")) else name)
    grammar.mode(recipe.target.mode)
    return grammar


def _folder() -> Any:
    return files("eagle3.tokens") / "grammars"


def _place(location: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in cast("Sequence[object]", location)) or "grammar"
