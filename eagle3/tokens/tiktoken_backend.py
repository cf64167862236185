"""Vocabularies in tiktoken's format, read by our own strict loader.

tiktoken's own loader keeps copies in a folder shared by all users of the machine and serves them later without looking
at the file again; this one reads the file it is given, every time.
"""

import base64
import binascii
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tiktoken

from eagle3.errors import TokenizerError
from eagle3.records import canonical_json, sha256_text
from eagle3.tokens.grammar import ResponseGrammar
from eagle3.tokens.tokenizer import find_control_id, ordinary_decoder, read_json_file, read_vocabulary_file


class TiktokenTokenizer:
    """A tokenizer from a rank file, the grammar's split pattern and the control tokens of tokenizer_config.json."""

    def __init__(self, directory: Path, grammar: ResponseGrammar) -> None:
        """Read the files.

        Raises:
            TokenizerError: A file is missing, damaged or not what the grammar describes.
        """
        kind = grammar.tokenizer
        data, digest = read_vocabulary_file(directory, grammar)
        ranks = parse_ranks(data, kind.file)
        self._literals = _control_tokens(directory, grammar, len(ranks))
        pattern = kind.split_pattern or ""
        try:
            self._encoding = tiktoken.Encoding(
                grammar.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=dict(self._literals)
            )
        except ValueError as exc:
            raise TokenizerError(f"split_pattern of grammar {grammar.name!r} is not usable: {exc}") from exc
        self._names = {name: token.id for name, token in grammar.control.items()}
        self._max_chunk = kind.max_chunk_chars
        self._max_run = kind.max_run_chars
        limits = [limit for limit in (kind.max_chunk_chars, kind.max_run_chars) if limit is not None]
        self._max_uncut = min(limits, default=sys.maxsize)
        self._vocab_size = len(ranks) + len(self._literals)
        self._decode_ordinary = ordinary_decoder([*ranks, *[None] * len(self._literals)])
        cuts = [self._max_chunk, self._max_run]
        self._digest = sha256_text(canonical_json(["tiktoken", digest, pattern, cuts, self._literals]))

    @property
    def vocab_size(self) -> int:
        """Number of ids, control tokens included."""
        return self._vocab_size

    @property
    def digest(self) -> str:
        """sha256 over ranks, split pattern, cuts and control tokens."""
        return self._digest

    @property
    def control_literals(self) -> frozenset[str]:
        """Texts of all control tokens."""
        return frozenset(self._literals)

    def encode_ordinary(self, text: str) -> list[int]:
        """Encode text without control tokens, cut where the model's own tokenizer cuts."""
        try:
            text.encode()  # tiktoken itself would silently replace lone surrogates
            if len(text) <= self._max_uncut:
                return self._encoding.encode(text, disallowed_special=())
            ids: list[int] = []
            for piece in cut_text(text, self._max_chunk, self._max_run):
                ids.extend(self._encoding.encode(piece, disallowed_special=()))
        except (ValueError, UnicodeEncodeError) as exc:
            raise TokenizerError(f"text of {len(text)} characters cannot be encoded: {exc}") from exc
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes that ids stand for."""
        try:
            return self._encoding.decode_bytes(list(ids))
        except (KeyError, OverflowError) as exc:
            raise TokenizerError(f"id {exc} is not in the vocabulary of {self._vocab_size} ids.") from exc

    def decode_ordinary(self, ids: Sequence[int]) -> bytes:
        """Return the bytes that ordinary ids stand for; control ids are refused."""
        return self._decode_ordinary(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text that ids stand for; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def token_id(self, data: bytes) -> int | None:
        """Return the id of the one token with these bytes; None when there is none."""
        try:
            return self._encoding.encode_single_token(data)
        except KeyError:
            return None

    def control_id(self, name: str) -> int:
        """Return the id of a control token by name or text; unknown names raise."""
        return find_control_id(self._names, self._literals, name)


def parse_ranks(data: bytes, name: str) -> dict[bytes, int]:
    """Parse a rank file: lines of canonical base64, a space, the rank; ranks dense from 0; all 256 single bytes.

    Raises:
        TokenizerError: The data breaks one of these rules.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        encoded, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            token = b""
        if not token or base64.b64encode(token) != encoded or rank != str(number - 1).encode() or token in ranks:
            raise TokenizerError(
                f"vocabulary file {name!r}, line {number}: expected a new base64 token and rank {number - 1}, found "
                f"{line[:40]!r}. The file is damaged or only a pointer to the real one; fetch it again."
            )
        ranks[token] = number - 1
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenizerError(
            f"vocabulary file {name!r} lacks {len(missing)} of the 256 single bytes, first {missing[:5]}: it cannot "
            "encode every text. Fetch it again."
        )
    return ranks


def cut_text(text: str, max_chunk: int | None, max_run: int | None) -> Iterator[str]:
    """Cut text as the model's own tokenizer does before encoding: into chunks, and inside very long runs.

    Source: the vendor's tokenizer class; plain tiktoken gives other ids beyond these lengths.
    """
    size = max_chunk or len(text) or 1
    for start in range(0, len(text), size):
        chunk = text[start : start + size]
        if max_run is None or len(chunk) <= max_run:
            yield chunk
        else:
            yield from _cut_runs(chunk, max_run)


def _cut_runs(chunk: str, max_run: int) -> Iterator[str]:
    run, was_space, start = 0, chunk[0].isspace(), 0
    for index, character in enumerate(chunk):
        is_space = character.isspace()
        if is_space != was_space:
            run, was_space = 1, is_space
            continue
        run += 1
        if run > max_run:
            yield chunk[start:index]
            start, run = index, 1
    yield chunk[start:]


def _control_tokens(directory: Path, grammar: ResponseGrammar, num_ranks: int) -> dict[str, int]:
    """Return text -> id of all control tokens: the declared ones, and the reserved names of the rest."""
    declared: dict[int, str] = {}
    values = read_json_file(directory / "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(values, dict):
        for key, entry in cast("Mapping[str, Any]", values).items():
            declared[int(key)] = str(entry["content"])
    else:
        declared = {token.id: token.text for token in grammar.control.values()}
    pattern = grammar.tokenizer.reserved_name
    stop = num_ranks + (grammar.tokenizer.num_control or 0)
    literals: dict[str, int] = {}
    for token_id in range(num_ranks, stop):
        text = declared.get(token_id) or (pattern.replace("{id}", str(token_id)) if pattern else None)
        if text is None or text in literals:
            raise TokenizerError(
                f"control id {token_id} has no text of its own ({text!r}) in tokenizer_config.json, and grammar "
                f"{grammar.name!r} declares no reserved_name for it."
            )
        literals[text] = token_id
    stray = sorted(token_id for token_id in declared if not num_ranks <= token_id < stop)
    if stray:
        raise TokenizerError(
            f"control tokens {stray[:5]} lie outside [{num_ranks}, {stop}), where grammar {grammar.name!r} expects "
            "them: tokenizer_config.json and the vocabulary file do not belong together."
        )
    return literals
