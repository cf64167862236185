"""Ids out of logprobs: the bytes of every token, held against the texts of the same reply.

Bytes to id is a bijection, so true bytes give the ids. Servers differ in what they list: all tokens, all but the end,
or those of the content alone. Some derive bytes from decoded text: tokens that are no UTF-8 by themselves then come as
U+FFFD, as nothing, or as the whole character in the last of them. Such a run is encoded anew from the characters it
stands for, when those give as many ids. All in all the tokens count only when they spell the answer byte for byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eagle3.records import SegmentKind
from eagle3.tokens.layout import Piece
from eagle3.tokens.tokenizer import Tokenizer

REPLACEMENT = "\ufffd".encode()


@dataclass(frozen=True, slots=True)
class Respelled:
    """An answer in the ids that its logprobs name."""

    pieces: tuple[Piece, ...]
    num_encoded: int
    """Ids that were lost in the listing and encoded anew."""


def respelled(pieces: Sequence[Piece], token_bytes: Sequence[bytes], tokenizer: Tokenizer) -> Respelled | None:
    """Return the pieces with the ids that the tokens name; None when they do not cover every text.

    Args:
        pieces: One layout of the answer; where its texts differ from the tokens' bytes the result is None.
        token_bytes: Bytes of each token, in order.
        tokenizer: Of the target.
    """
    if all(piece.token is not None or piece.kind is SegmentKind.CONTENT for piece in pieces):
        covered = _cut([piece for piece in pieces if piece.token is None], token_bytes, tokenizer)
        if covered is not None:
            made = iter(covered.pieces)
            spelled = tuple(next(made) if piece.token is None else piece for piece in pieces)
            return replace(covered, pieces=spelled)
    ended = list(pieces)
    while ended:
        covered = _cut(ended, token_bytes, tokenizer)
        if covered is not None:
            return replace(covered, pieces=(*covered.pieces, *pieces[len(ended) :]))
        if ended[-1].token is None:
            return None
        # Servers list the tokens that end an answer, or leave them out.
        ended.pop()
    return None


def _cut(pieces: Sequence[Piece], tokens: Sequence[bytes], tokenizer: Tokenizer) -> Respelled | None:
    """Cut tokens at the ends of the pieces; None unless each stretch spells its piece and none is left."""
    made: list[Piece] = []
    position = num_encoded = 0
    for piece in pieces:
        if piece.token is not None:
            if position == len(tokens) or (tokenizer.token_id(tokens[position]),) != piece.ids:
                return None
            made.append(piece)
            position += 1
            continue
        spelled = _spell(tokenizer.decode_bytes(piece.ids), tokens[position:], tokenizer)
        if spelled is None:
            return None
        ids, encoded = spelled
        made.append(replace(piece, ids=tuple(ids)))
        position += len(ids)
        num_encoded += encoded
    return Respelled(tuple(made), num_encoded) if position == len(tokens) else None


def _spell(wanted: bytes, tokens: Sequence[bytes], tokenizer: Tokenizer) -> tuple[list[int], int] | None:
    """Return the ids of the first tokens, which spell a text, and how many of them had to be encoded anew."""
    ids: list[int] = []
    done = num_encoded = 0
    while done < len(wanted):
        data = tokens[len(ids)] if len(ids) < len(tokens) else b""
        known = tokenizer.token_id(data) if data and wanted.startswith(data, done) else None
        if known is not None:
            ids.append(known)
            done += len(data)
            continue
        stop = len(ids)
        while stop < len(tokens) and _is_lost(tokens[stop], tokenizer):
            stop += 1
        following = tokens[stop] if stop < len(tokens) else b""
        run = _encoded(wanted, done, stop - len(ids), following, tokenizer)
        if run is None:
            return None
        ids += run
        done += len(tokenizer.decode_bytes(run))
        num_encoded += len(run)
    return ids, num_encoded


def _is_lost(data: bytes, tokenizer: Tokenizer) -> bool:
    return not data or REPLACEMENT in data or tokenizer.token_id(data) is None


def _encoded(text: bytes, start: int, count: int, following: bytes, tokenizer: Tokenizer) -> list[int] | None:
    """Return so many ids for the shortest run of whole characters that the listing goes on after."""
    for stop in range(start + 1, len(text) + 1) if count else ():
        is_whole = stop == len(text) or text[stop] & 0xC0 != 0x80
        if not is_whole or not (text.startswith(following, stop) or stop == len(text)):
            continue
        ids = tokenizer.encode_ordinary(text[start:stop].decode())
        if len(ids) == count and tokenizer.decode_bytes(ids) == text[start:stop]:
            return ids
        if len(ids) > count:
            return None
    return None
