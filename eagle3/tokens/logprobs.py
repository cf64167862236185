"""Ids out of logprobs: the bytes of every token, held against the texts of the same reply.

Bytes to id is a bijection, so true bytes give the ids. Servers differ in what they list: all tokens, all but the end,
or those of the content alone; some derive bytes from decoded text, and then tokens that are no UTF-8 by themselves are
lost. So the tokens count only when they spell the texts of the answer byte for byte.
"""

from collections.abc import Sequence
from dataclasses import replace

from eagle3.records import SegmentKind
from eagle3.tokens.layout import Piece
from eagle3.tokens.tokenizer import Tokenizer


def respelled(pieces: Sequence[Piece], token_bytes: Sequence[bytes], tokenizer: Tokenizer) -> tuple[Piece, ...] | None:
    """Return the pieces with the ids that the tokens name; None when they do not cover every text.

    Args:
        pieces: One layout of the answer; where its texts differ from the tokens' bytes the result is None.
        token_bytes: Bytes of each token, in order.
        tokenizer: Of the target.
    """
    found = [tokenizer.token_id(data) for data in token_bytes]
    ids = [token_id for token_id in found if token_id is not None]
    if len(ids) != len(found):
        return None
    if all(piece.token is not None or piece.kind is SegmentKind.CONTENT for piece in pieces):
        texts = [piece for piece in pieces if piece.token is None]
        covered = _cut(texts, ids, tokenizer)
        if covered is not None:
            made = iter(covered)
            return tuple(next(made) if piece.token is None else piece for piece in pieces)
    ended = list(pieces)
    while ended:
        covered = _cut(ended, ids, tokenizer)
        if covered is not None:
            return (*covered, *pieces[len(ended) :])
        if ended[-1].token is None:
            return None
        # Servers list the tokens that end an answer, or leave them out.
        ended.pop()
    return None


def _cut(pieces: Sequence[Piece], ids: Sequence[int], tokenizer: Tokenizer) -> list[Piece] | None:
    """Cut ids at the ends of the pieces; None unless each stretch spells its piece."""
    made: list[Piece] = []
    position = 0
    for piece in pieces:
        wanted = tokenizer.decode_bytes(piece.ids)
        stop, size = position, 0
        while stop < len(ids) and size < len(wanted):
            size += len(tokenizer.decode_bytes(ids[stop : stop + 1]))
            stop += 1
        stretch = tuple(ids[position:stop])
        is_same = stretch == piece.ids if piece.token is not None else tokenizer.decode_bytes(stretch) == wanted
        if not is_same:
            return None
        made.append(replace(piece, ids=stretch))
        position = stop
    return made if position == len(ids) else None
