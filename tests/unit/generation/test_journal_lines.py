"""The journal's lines: exact bytes, torn tails, damage, and places."""

import json
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import ArtifactError
from eagle3.generation.journal_lines import (
    JournalReader,
    Place,
    decode_line,
    encode_line,
    journal_paths,
    raw_of,
    read_journal,
)

ENTRY = {"kind": "intent", "id": "a", "text": "U+2028 \u2028 and \u0085"}
ANSWER = {"kind": "answer", "id": "b", "reply": b'{"id":"x","choices":[]}'}

replies = st.binary(max_size=300) | st.binary(max_size=300).map(lambda inner: b"{" + inner + b"}")


def line_of(entry: dict[str, object]) -> bytes:
    return b"".join(encode_line(entry))


def line_with(rest: bytes) -> bytes:
    """Return a line whose members are written by hand."""
    return b'{"crc":"%08x",%b\n' % (zlib.crc32(rest), rest)


def write(path: Path, *entries: dict[str, object], tail: bytes = b"") -> Path:
    path.write_bytes(b"".join(line_of(entry) for entry in entries) + tail)
    return path


@given(replies, st.sampled_from(["raw", "reply"]), st.dictionaries(st.text(max_size=9), st.text(max_size=9)))
def test_bytes_and_members_survive_exactly(body: bytes, name: str, others: dict[str, str]):
    members = {"kind": "answer", "others": others}
    line = line_of({**members, name: body})
    assert line.index(b"\n") == len(line) - 1
    entry = decode_line(line)
    assert entry is not None
    assert raw_of(entry) == body
    assert {name: entry[name] for name in members} == members


json_values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=9,
)


@given(st.dictionaries(st.text(max_size=9) | st.sampled_from(["reply", "reply_size", "crc"]), json_values, max_size=4))
def test_a_reply_is_written_as_it_came_into_a_line_of_json(reply: dict[str, object]):
    body = json.dumps(reply, ensure_ascii=False).encode()
    line = line_of({"kind": "answer", "id": '},"reply":', "nested": {"reply": 1, "reply_size": 2}, "reply": body})
    assert line.endswith(b',"reply":' + body + b"}\n")
    assert json.loads(line)["reply"] == reply
    entry = decode_line(line)
    assert entry is not None
    nested = {"reply": 1, "reply_size": 2}
    assert entry == {"kind": "answer", "id": '},"reply":', "nested": nested, "reply": body}


@pytest.mark.parametrize(
    "body",
    [b'\n   \n{"a":1}', b'{"a":\n1}', b'data: {"a":1}\n\ndata: [DONE]\n\n', b' {"a":1}', b'{"a":1}\n', b"", b"\xff"],
    ids=["padded", "two lines", "stream", "space", "newline", "nothing", "no text"],
)
def test_a_reply_that_is_no_single_line_of_json_becomes_text(body: bytes):
    line = line_of({"kind": "answer", "reply": body})
    assert line.count(b"\n") == 1
    assert set(json.loads(line)) == {"crc", "kind", "raw64" if body == b"\xff" else "raw"}
    entry = decode_line(line)
    assert entry is not None
    assert raw_of(entry) == body


def test_answers_that_were_kept_as_text_are_read():
    entry = decode_line(line_with(b'"kind":"answer","raw":"{\\"a\\":1}"}'))
    assert entry is not None
    assert raw_of(entry) == b'{"a":1}'


@given(st.text(max_size=50), st.sampled_from([ENTRY, ANSWER]), st.data())
def test_every_torn_or_changed_line_is_noticed(text: str, entry: dict[str, object], data: st.DataObject):
    line = line_of({**entry, "more": text})
    cut = data.draw(st.integers(0, len(line) - 1))
    assert decode_line(line[:cut]) is None
    changed = bytearray(line)
    changed[cut] ^= 1
    assert decode_line(bytes(changed)) is None


@pytest.mark.parametrize("size", [b"", b"x", b"-3", b"999", b"0", b"8"])
def test_a_line_that_lies_about_its_reply_is_damaged(size: bytes):
    assert decode_line(line_with(b'"reply_size":7,"kind":"answer","reply":{"a":1}}')) is not None
    assert decode_line(line_with(b'"reply_size":%b,"kind":"answer","reply":{"a":1}}' % size)) is None


def test_a_torn_last_line_is_dropped_wherever_it_tears(tmp_path):
    for entry in (ENTRY, ANSWER):
        line = line_of(entry)
        for cut in range(len(line)):
            path = write(tmp_path / "journal-0001.jsonl", ENTRY, ANSWER, tail=line[:cut])
            first, second = (found for _, found in read_journal(path))
            assert (first["id"], second["id"]) == ("a", "b")


def test_damage_before_the_last_line_is_an_error(tmp_path):
    path = write(tmp_path / "journal-0001.jsonl", ENTRY, tail=b"garbage\n" + line_of(ENTRY))
    with pytest.raises(ArtifactError, match="before its last line"):
        list(read_journal(path))


def test_places_lead_back_to_entries_and_notice_changes(tmp_path):
    path = write(tmp_path / "journal-0001.jsonl", ENTRY, {**ENTRY, "id": "b"}, ANSWER)
    places = [place for place, _ in read_journal(path)]
    assert places[1].read()["id"] == "b"
    assert raw_of(places[2].read()) == ANSWER["reply"]
    data = bytearray(path.read_bytes())
    data[places[1].offset + 30] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match="changed at byte"):
        places[1].read()


def test_a_reader_opens_each_file_once_and_leaves_none_open(tmp_path, monkeypatch):
    opened: list[int] = []
    plain = os.open

    def remember(path: Path, flags: int) -> int:
        opened.append(plain(path, flags))
        return opened[-1]

    paths = [write(tmp_path / f"journal-000{number}.jsonl", ENTRY, ANSWER) for number in (1, 2)]
    found = [(place, entry) for path in paths for place, entry in read_journal(path)]
    monkeypatch.setattr(os, "open", remember)
    with JournalReader() as reader:
        assert [reader.read(place) for place, _ in reversed(found)] == [entry for _, entry in reversed(found)]
        assert len(opened) == len(paths)
        paths[1].write_bytes(paths[1].read_bytes().replace(b'"b"', b'"c"').replace(b'"a"', b'"d"'))
        with pytest.raises(ArtifactError, match=r"journal-0002\.jsonl' changed at byte"):
            reader.read(found[2][0])
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_files_are_read_in_the_order_of_their_numbers(tmp_path):
    names = ["journal-0002.jsonl", "journal-9999.jsonl", "journal-10000.jsonl"]
    for name in reversed(names):
        (tmp_path / name).touch()
    assert [path.name for path in journal_paths(tmp_path)] == names
    places = [Place(tmp_path / name, offset, 1) for name in names for offset in (0, 900, 1000)]
    by_text = sorted(places, key=lambda place: (str(place.path), str(place.offset)))
    assert by_text != places
    by_text.sort(key=lambda place: place.age)
    assert by_text == places
