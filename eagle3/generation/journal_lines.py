"""The lines of the completions journal: how an entry is written, where it lies, and how it is read back.

A line is one JSON object and one newline. Its first member is the crc32 of everything between that member and the
newline, so that a torn or damaged line is noticed. Each process starts a new file, so a line torn by a crash is always
the last of its file and is dropped.
"""

import base64
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self, cast

from pydantic_core import PydanticSerializationError, from_json, to_json

from eagle3.errors import ArtifactError
from eagle3.records import JsonObject

_PREFIX = b'{"crc":"'
_PREFIX_LENGTH = len(_PREFIX) + 8 + len(b'",')
_REPLY_SIZE = "reply_size"
_BEFORE_REPLY = b',"reply":'
_WITH_REPLY = b'"reply_size":'
"""How what follows the crc begins in a line that ends with a reply."""


class Place(NamedTuple):
    """Where one line lies."""

    path: Path
    offset: int
    length: int

    @property
    def age(self) -> tuple[Path, int, str, int]:
        """Sorts the places of one folder as they were written."""
        return self.path.parent, *_number_order(self.path), self.offset

    def read(self) -> JsonObject:
        """Return the line's entry.

        Raises:
            ArtifactError: The bytes are not what was written.
        """
        with JournalReader() as reader:
            return reader.read(self)


class JournalReader:
    """Reads single lines back; of many, it opens each file once. Use it as a context manager."""

    def __init__(self) -> None:
        """Start with no file open."""
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> Self:
        """Do nothing yet."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read(self, place: Place) -> JsonObject:
        """Return the entry of the line at `place`.

        Raises:
            ArtifactError: The bytes are not what was written.
        """
        descriptor = self._descriptors.get(place.path)
        if descriptor is None:
            descriptor = self._descriptors[place.path] = os.open(place.path, os.O_RDONLY)
        entry = decode_line(os.pread(descriptor, place.length, place.offset))
        if entry is None:
            message = (
                f"journal {place.path.name!r} changed at byte {place.offset} after it was written: restore the file."
            )
            raise ArtifactError(message)
        return entry


def encode_line(entry: JsonObject) -> tuple[bytes, ...]:
    """Return the line of an entry, in pieces that belong together.

    A member `reply` holds the bytes of an answer, which were read before, a member `raw` any bytes; both are kept
    exactly. A reply that is JSON on one line ends the line just as it came, with its length in `reply_size`: escaping
    it would cost more than all the rest, and so would a copy. Other bytes become text named `raw` when they are UTF-8,
    else base64 named `raw64`.
    """
    reply: bytes | None = entry.get("reply")
    if reply is None:
        return _whole(entry)
    members = {_REPLY_SIZE: len(reply), **entry}
    del members["reply"]
    if not reply.startswith(b"{") or b"\n" in reply:  # padded, or a stream
        del members[_REPLY_SIZE]
        return _whole({**members, "raw": reply})
    head = to_json(members)[1:-1] + _BEFORE_REPLY
    checksum = zlib.crc32(b"}", zlib.crc32(reply, zlib.crc32(head)))
    return b'%b%08x",%b' % (_PREFIX, checksum, head), reply, b"}\n"


def _whole(entry: JsonObject) -> tuple[bytes]:
    """Return the line of an entry whose bytes, if it has any, become text."""
    try:
        document = to_json(entry)
    except PydanticSerializationError:
        raw = entry.get("raw")
        if not isinstance(raw, bytes):
            raise
        members = {name: value for name, value in entry.items() if name != "raw"}
        document = to_json({**members, "raw64": base64.b64encode(raw).decode("ascii")})
    rest = document[1:]
    return (b'%b%08x",%b\n' % (_PREFIX, zlib.crc32(rest), rest),)


def decode_line(line: bytes) -> JsonObject | None:
    """Return the entry of a line, or None when it is torn or damaged."""
    if not line.startswith(_PREFIX) or not line.endswith(b"}\n"):
        return None
    rest = line[_PREFIX_LENGTH:-1]
    if line[:_PREFIX_LENGTH] != b'%b%08x",' % (_PREFIX, zlib.crc32(rest)):
        return None
    try:
        return _with_reply(rest) if rest.startswith(_WITH_REPLY) else cast("JsonObject", from_json(b"{" + rest))
    except ValueError:
        return None


def _with_reply(rest: bytes) -> JsonObject:
    """Return the entry of a line that ends with a reply; raise `ValueError` when it does not."""
    start = len(rest) - len(b"}") - int(rest[len(_WITH_REPLY) : rest.index(b",")])
    if not rest.endswith(_BEFORE_REPLY, 0, start):
        raise ValueError("no reply of that size")
    entry = cast("JsonObject", from_json(b"{%b}" % rest[: start - len(_BEFORE_REPLY)]))
    del entry[_REPLY_SIZE]
    entry["reply"] = rest[start:-1]
    return entry


def raw_of(entry: JsonObject) -> bytes:
    """Return the body of an entry that was read back, exactly as it came."""
    if "reply" in entry:
        return cast("bytes", entry["reply"])
    if "raw64" in entry:
        return base64.b64decode(cast("str", entry["raw64"]))
    return cast("str", entry.get("raw", "")).encode("utf-8")


def journal_paths(folder: Path) -> list[Path]:
    """Return the journal files of a folder, oldest first."""
    return sorted(folder.glob("journal-*.jsonl"), key=_number_order)


def _number_order(path: Path) -> tuple[int, str]:
    """Sort file names by their number, which outgrows its four digits in the end."""
    return len(path.name), path.name


def read_journal(path: Path) -> Iterator[tuple[Place, JsonObject]]:
    """Yield the entries of one file with their places; a torn last line is dropped.

    Raises:
        ArtifactError: A line before the last is damaged.
    """
    offset = 0
    torn_at: int | None = None
    with path.open("rb") as file:
        for line in file:
            if torn_at is not None:
                message = (
                    f"journal {path.parent.name}/{path.name} is damaged at byte {torn_at}, before its last line: a "
                    "crash cannot do that. Restore the file, or remove the line if you accept to pay for its answer "
                    "again."
                )
                raise ArtifactError(message)
            entry = decode_line(line)
            if entry is None:
                torn_at = offset
            else:
                yield Place(path, offset, len(line)), entry
            offset += len(line)
