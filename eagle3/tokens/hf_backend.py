"""Byte-level vocabularies in Hugging Face's `tokenizer.json`, through the `tokenizers` library.

The file's added tokens are taken out before the library sees it: added tokens that are not marked special would be read
out of ordinary text whatever options are set.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import tokenizers

from eagle3.errors import TokenizerError
from eagle3.records import canonical_json, sha256_text
from eagle3.tokens.grammar import ResponseGrammar
from eagle3.tokens.tokenizer import find_control_id, ordinary_decoder, read_vocabulary_file


class HfTokenizer:
    """A tokenizer from a byte-level `tokenizer.json`."""

    def __init__(self, directory: Path, grammar: ResponseGrammar) -> None:
        """Read the file.

        Raises:
            TokenizerError: The file is missing, damaged, not byte-level, or normalises text unlike the grammar says.
        """
        name = grammar.tokenizer.file
        data, digest = read_vocabulary_file(directory, grammar)
        try:
            document = cast("dict[str, Any]", json.loads(data))
            added = [(str(entry["content"]), int(entry["id"])) for entry in document["added_tokens"]]
            document["added_tokens"] = []
            _check_normalizer(document.get("normalizer"), grammar, name)
            if "ByteLevel" not in json.dumps(document.get("decoder")):
                raise TokenizerError(
                    f"vocabulary file {name!r} is not byte-level: its pieces cannot be told byte by byte. "
                    "Only byte-level vocabularies are supported."
                )
            library: Any = tokenizers.Tokenizer.from_str(json.dumps(document))
        except TokenizerError:
            raise
        except Exception as exc:  # the library raises bare Exception
            raise TokenizerError(f"vocabulary file {name!r} cannot be read: {exc}. Fetch it again.") from exc
        self._library = library
        self._literals = dict(added)
        self._names = {entry: token.id for entry, token in grammar.control.items()}
        pieces = cast("dict[str, int]", library.get_vocab(with_added_tokens=False))
        self._bytes: dict[int, bytes] = {}
        alphabet = byte_alphabet()
        for piece, piece_id in pieces.items():
            if all(character in alphabet for character in piece):
                self._bytes[piece_id] = bytes(alphabet[character] for character in piece)
            else:
                self._bytes[piece_id] = piece.encode()
        self._bytes |= {token_id: text.encode() for text, token_id in added}
        self._ids: dict[bytes, int] = {}
        self._vocab_size = max(self._bytes) + 1
        control = set(self._literals.values())
        ordinary = {token_id: piece for token_id, piece in self._bytes.items() if token_id not in control}
        self._decode_ordinary = ordinary_decoder([ordinary.get(token_id) for token_id in range(self._vocab_size)])
        self._digest = sha256_text(canonical_json(["hf", digest]))

    @property
    def vocab_size(self) -> int:
        """Number of ids, control tokens included."""
        return self._vocab_size

    @property
    def digest(self) -> str:
        """sha256 over the vocabulary file."""
        return self._digest

    @property
    def control_literals(self) -> frozenset[str]:
        """Texts of all added tokens, special or not."""
        return frozenset(self._literals)

    def encode_ordinary(self, text: str) -> list[int]:
        """Encode text without control tokens."""
        try:
            return list(cast("list[int]", self._library.encode(text, add_special_tokens=False).ids))
        except (UnicodeEncodeError, TypeError) as exc:
            raise TokenizerError(f"text of {len(text)} characters cannot be encoded: {exc}") from exc

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """Return the bytes that ids stand for."""
        try:
            return b"".join([self._bytes[token_id] for token_id in ids])
        except KeyError as exc:
            raise TokenizerError(f"id {exc} is not in the vocabulary of {self._vocab_size} ids.") from exc

    def decode_ordinary(self, ids: Sequence[int]) -> bytes:
        """Return the bytes that ordinary ids stand for; added tokens are refused."""
        return self._decode_ordinary(ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text that ids stand for; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode(errors="replace")

    def token_id(self, data: bytes) -> int | None:
        """Return the id of the one token with these bytes; None when there is none."""
        if not self._ids:
            self._ids = {piece: token_id for token_id, piece in reversed(self._bytes.items())}
        return self._ids.get(data)

    def control_id(self, name: str) -> int:
        """Return the id of a control token by name or text; unknown names raise."""
        return find_control_id(self._names, self._literals, name)


def byte_alphabet() -> Mapping[str, int]:
    """Return which character stands for which byte in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves, the other bytes for characters from U+0100 on, in order.
    Source: GPT-2's byte-level BPE, which all these vocabularies follow.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return alphabet


def _check_normalizer(normalizer: Any, grammar: ResponseGrammar, name: str) -> None:
    """Refuse vocabularies that change text before encoding in a way the grammar does not name."""
    is_empty = normalizer is None or cast("Mapping[str, Any]", normalizer).get("normalizers") == []
    found = "none" if is_empty else str(cast("Mapping[str, Any]", normalizer).get("type")).lower()
    if found != grammar.tokenizer.normalizer:
        raise TokenizerError(
            f"vocabulary file {name!r} normalises text by {found!r}, grammar {grammar.name!r} says "
            f"{grammar.tokenizer.normalizer!r}. Correct the grammar, or use the vocabulary it was written for."
        )
