"""Which grammar a reply is read by: the caller's map, the patterns of the grammars, or the caller's default."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast

import yaml

from eagle3.errors import InputError, TemplateError, TokenError
from eagle3.tokens.grammar import ResponseGrammar, load_grammar, packaged_grammars
from eagle3.tokens.rendering import PromptRenderer
from eagle3.tokens.tokenizer import Tokenizer, load_tokenizer


@dataclass
class Family:
    """A grammar, its tokenizer and its prompt renderers."""

    directory: Path
    grammar: ResponseGrammar
    tokenizer: Tokenizer
    _renderers: dict[str, PromptRenderer | TemplateError] = field(
        default_factory=dict[str, PromptRenderer | TemplateError]
    )

    def renderer(self, mode: str) -> PromptRenderer:
        """Return the renderer of a mode.

        Raises:
            TemplateError: The directory has no template that ends prompts as this mode does.
        """
        found = self._renderers.get(mode)
        if found is None:
            try:
                found = PromptRenderer(self.directory, self.grammar, self.tokenizer, mode)
                found.render_ids([{"role": "user", "content": "Hi"}])
            except TemplateError as exc:
                found = exc
                if self.grammar.chat_template is not None:
                    template = self.grammar.chat_template
                    found = PromptRenderer(self.directory, self.grammar, self.tokenizer, mode, template=template)
            self._renderers[mode] = found
        if isinstance(found, TemplateError):
            raise found
        return found


@dataclass
class GrammarChoice:
    """Chooses and loads grammars by model."""

    tokenizer: Path
    """Directory of the tokenizer files, the same for all lines."""
    default: str
    """Grammar of models that no pattern names: a packaged name or a path to a YAML file."""
    patterns: Mapping[str, str] = field(default_factory=dict[str, str])
    """Pattern of model ids -> grammar, first match; before the grammars' own patterns."""
    _families: dict[str, Family | TokenError] = field(default_factory=dict[str, Family | TokenError])
    _known: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def default_family(self) -> Family:
        """Return the default family.

        Raises:
            TokenError: Its grammar and the tokenizer directory do not fit.
        """
        return self.family(self.default)

    def family(self, name: str) -> Family:
        """Return the family of a grammar, loaded once.

        Raises:
            TokenError: The grammar is unknown or malformed, or the tokenizer directory is of another family.
        """
        found = self._families.get(name)
        if found is None:
            try:
                grammar = load_grammar(name)
                found = Family(self.tokenizer, grammar, load_tokenizer(self.tokenizer, grammar))
            except TokenError as exc:
                found = exc
            self._families[name] = found
        if isinstance(found, TokenError):
            raise found
        return found

    def name_for(self, model: str, reply_model: str | None) -> str:
        """Return the grammar of a line: by the model that answered when it is known, else by the one asked for."""
        for candidate in (reply_model, model):
            known = self.known_name(candidate) if candidate is not None else None
            if known is not None:
                return known
        return self.default

    def known_name(self, model: str) -> str | None:
        """Return the grammar whose patterns name a model; None when none does."""
        wanted = model.lower()
        for pattern, name in self.patterns.items():
            if fnmatchcase(wanted, pattern.lower()):
                return name
        if not self._known:
            names = [self.default, *(name for name in packaged_grammars() if name != self.default)]
            self._known = {name: load_grammar(name).models for name in names}
        for name, patterns in self._known.items():
            if any(fnmatchcase(wanted, pattern.lower()) for pattern in patterns):
                return name
        return None


def read_grammar_map(path: Path) -> dict[str, str]:
    """Read a YAML or JSON object from model pattern to grammar.

    Grammar paths are relative to the map.

    Raises:
        InputError: The file cannot be read or is no such object.
    """
    try:
        document: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise InputError(f"grammar map {str(path)!r} cannot be read: {' '.join(str(exc).split())}") from exc
    entries = cast("Mapping[object, object]", document) if isinstance(document, dict) else {}
    if not entries or not all(isinstance(part, str) for entry in entries.items() for part in entry):
        raise InputError(
            f"grammar map {str(path)!r} must be an object from model pattern to grammar, such as "
            f"'*kimi-k2-instruct*: kimi-k2'; found {type(document).__name__}."
        )
    found = cast("Mapping[str, str]", entries)
    return {
        pattern: str(path.parent / name) if name.endswith((".yaml", ".yml")) else name
        for pattern, name in found.items()
    }
