"""The tokenizer protocol, loading by grammar, and the checks that tie grammar and files together.

A tokenizer here never reads a control token out of text: ordinary text gives ordinary ids, control ids come by name.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, cast

from eagle3.errors import TokenizerError
from eagle3.tokens.grammar import ControlToken, ResponseGrammar


class Tokenizer(Protocol):
    """Text to ids and back, for one model."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, control tokens included."""
        ...

    @property
    def digest(self) -> str:
        """sha256 over all that decides ids: vocabulary, split rule, control tokens."""
        ...

    @property
    def control_literals(self) -> frozenset[str]:
        """Texts of all control tokens the files declare, also of those the grammar does not name."""
        ...

    def encode_ordinary(self, text: str) -> list[int]:
        """Encode text without ever producing a control id.

        Raises:
            TokenizerError: The text cannot be encoded (a lone surrogate).
        """
        ...

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes that ids stand for, control tokens as their text.

        Raises:
            TokenizerError: An id is not in the vocabulary.
        """
        ...

    def decode_ordinary(self, ids: Sequence[int]) -> bytes:
        """Return the bytes that ordinary ids stand for; several times as fast as `decode_bytes`.

        Raises:
            TokenizerError: One is a control id or not in the vocabulary.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text that ids stand for; bytes that are no UTF-8 become U+FFFD."""
        ...

    def token_id(self, data: bytes) -> int | None:
        """Return the id of the one token with these bytes, a control token by its text; None when there is none."""
        ...

    def control_id(self, name: str) -> int:
        """Return the id of a control token, by its name in the grammar or by its text.

        Raises:
            TokenizerError: There is no such token. There is no fallback to an unknown id.
        """
        ...


def load_tokenizer(directory: Path, grammar: ResponseGrammar) -> Tokenizer:
    """Load the tokenizer of a target directory and check it against the grammar.

    No code from the directory is executed.

    Args:
        directory: Holds the vocabulary file the grammar names, and usually `config.json`.
        grammar: Of the same family.

    Raises:
        TokenizerError: A file is missing or damaged, its digest is not one the grammar accepts, or grammar and files
            disagree about a control token, the end of an answer or the vocabulary size.
    """
    tokenizer = load_unchecked_tokenizer(directory, grammar)
    check_tokenizer(tokenizer, grammar, directory)
    return tokenizer


def load_unchecked_tokenizer(directory: Path, grammar: ResponseGrammar) -> Tokenizer:
    """Load the tokenizer of a target directory; only for code that makes the checks one by one.

    Raises:
        TokenizerError: A file is missing or damaged, or its digest is not one the grammar accepts.
    """
    # Imported here so that reading a grammar costs neither library.
    if grammar.tokenizer.kind == "tiktoken":
        from eagle3.tokens.tiktoken_backend import TiktokenTokenizer  # noqa: PLC0415

        return TiktokenTokenizer(directory, grammar)
    from eagle3.tokens.hf_backend import HfTokenizer  # noqa: PLC0415

    return HfTokenizer(directory, grammar)


def check_tokenizer(tokenizer: Tokenizer, grammar: ResponseGrammar, directory: Path) -> None:
    """Check that grammar, tokenizer and model configuration name the same tokens.

    Per control token: its id decodes to its text, no ordinary text gives it, and its literal in ordinary text stays
    ordinary. The end of an answer is one of the model configuration's end ids. `eos_token` of the tokenizer files is
    not consulted: several families name another token there.

    Raises:
        TokenizerError: One of these does not hold.
    """
    if tokenizer.vocab_size != grammar.tokenizer.vocab_size:
        raise TokenizerError(
            f"tokenizer has {tokenizer.vocab_size} ids, grammar {grammar.name!r} expects "
            f"{grammar.tokenizer.vocab_size}: this is not the vocabulary the grammar describes. "
            "Check target.grammar and the target directory."
        )
    control_ids = {token.id for token in grammar.control.values()}
    for name, token in grammar.control.items():
        mistake = control_mistakes(tokenizer, name, token)
        if mistake is not None:
            raise TokenizerError(f"{mistake} Correct grammar {grammar.name!r}.")
    for token in grammar.control.values():
        ordinary = tokenizer.encode_ordinary(token.text)
        if control_ids.intersection(ordinary):
            raise TokenizerError(
                f"the text {token.text!r} encodes to the control id {token.id} as ordinary text: prompts could smuggle "
                "control tokens in. The vocabulary file is not one this project can use."
            )
    check_size(grammar, directory)
    check_end(grammar, directory)


def control_mistakes(tokenizer: Tokenizer, name: str, token: ControlToken) -> str | None:
    """Return what is wrong with the id or the text of a control token; None when they agree with the files."""
    found = tokenizer.decode_bytes([token.id]) if token.id < tokenizer.vocab_size else b""
    if found == token.text.encode() and token.text in tokenizer.control_literals:
        return None
    known = "a control token" if token.text in tokenizer.control_literals else "no control token"
    return (
        f"control token {name!r} is {token.text!r} with id {token.id} in the grammar, but in the tokenizer id "
        f"{token.id} is {found!r}, and {token.text!r} is {known}."
    )


def check_size(grammar: ResponseGrammar, directory: Path) -> str:
    """Check that the model has an id for every id of the tokenizer; returns what its configuration says.

    Raises:
        TokenizerError: It has fewer.
    """
    stated: list[str] = []
    for name in ("generation_config.json", "config.json"):
        values = read_json_file(directory / name)
        size = values.get("vocab_size") or cast("dict[str, Any]", values.get("text_config") or {}).get("vocab_size")
        if isinstance(size, int) and size < grammar.tokenizer.vocab_size:
            raise TokenizerError(
                f"{name!r} gives the model {size} ids, the tokenizer has {grammar.tokenizer.vocab_size}: "
                "tokenizer and weights do not belong together."
            )
        if isinstance(size, int):
            stated.append(f"{size} in {name}")
    return ", ".join(stated)


def check_end(grammar: ResponseGrammar, directory: Path) -> str:
    """Check that the tokens that end an answer are among the end ids of the model configuration; returns those.

    Raises:
        TokenizerError: One is not.
    """
    configured: set[int] = set()
    named: list[str] = []
    for name in ("generation_config.json", "config.json"):
        values = read_json_file(directory / name)
        found = values.get("eos_token_id")
        if found is None and isinstance(values.get("text_config"), dict):
            found = values["text_config"].get("eos_token_id")
        ids = {found} if isinstance(found, int) else set(cast("list[int]", found or []))
        if ids:
            configured |= ids
            named.append(name)
    if not named:
        return "no model configuration"
    for token in grammar.end.get("stop", ()):
        if grammar.control[token].id not in configured:
            raise TokenizerError(
                f"grammar {grammar.name!r} ends answers with {token!r} = {grammar.control[token].id}, but "
                f"{' and '.join(named)} name {sorted(configured)} as end ids. Correct the grammar; the eos_token of "
                "the tokenizer files is no guide."
            )
    return f"{sorted(configured)} in {' and '.join(named)}"


def read_json_file(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file, empty when there is no file.

    Raises:
        TokenizerError: The file is not a JSON object.
    """
    try:
        values: object = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise TokenizerError(f"{path.name!r} cannot be read as JSON: {exc}. Restore the file.") from exc
    if not isinstance(values, dict):
        raise TokenizerError(f"{path.name!r} must hold a JSON object, found {type(values).__name__}. Restore the file.")
    return cast("dict[str, Any]", values)


def read_vocabulary_file(directory: Path, grammar: ResponseGrammar) -> tuple[bytes, str]:
    """Return the bytes of the vocabulary file and their sha256, after checking the grammar's pins.

    Raises:
        TokenizerError: The file is missing, or its digest is not accepted.
    """
    name = grammar.tokenizer.file
    try:
        data = (directory / name).read_bytes()
    except OSError as exc:
        raise TokenizerError(
            f"vocabulary file {name!r} of grammar {grammar.name!r} cannot be read in {directory.name!r}: "
            f"{exc.strerror}. Check target.weights and target.grammar."
        ) from exc
    digest = hashlib.sha256(data).hexdigest()
    accepted = grammar.tokenizer.sha256
    if accepted and digest not in accepted:
        raise TokenizerError(
            f"vocabulary file {name!r} has sha256 {digest[:12]}…, grammar {grammar.name!r} accepts "
            f"{[pin[:12] + '…' for pin in accepted][:5]}: it is another vocabulary or it is damaged."
        )
    return data, digest


def ordinary_decoder(pieces: Sequence[bytes | None]) -> Callable[[Sequence[int]], bytes]:
    """Return `Tokenizer.decode_ordinary` for a table of bytes by id; shared by the backends.

    Args:
        pieces: Bytes of each id in order; None for control ids and unused ones.
    """

    def decode(ids: Sequence[int]) -> bytes:
        if not ids:
            return b""
        try:
            found = itemgetter(*ids)(pieces) if len(ids) > 1 else (pieces[ids[0]],)
            if min(ids) >= 0:  # a negative one would count from the end of the table
                return b"".join(cast("Sequence[bytes]", found))
        except (IndexError, TypeError):
            pass
        wrong = next(each for each in ids if not 0 <= each < len(pieces) or pieces[each] is None)
        raise TokenizerError(f"id {wrong} is no ordinary token of the vocabulary of {len(pieces)} ids.")

    return decode


def find_control_id(names: Mapping[str, int], literals: Mapping[str, int], name: str) -> int:
    """Return the id of a control token by grammar name or text; shared by the backends.

    Raises:
        TokenizerError: Neither knows it.
    """
    found = names.get(name, literals.get(name))
    if found is None:
        raise TokenizerError(f"there is no control token {name!r}; the grammar names {sorted(names)}.")
    return found
