"""The journal: torn tails, damage, exact bytes, group commit, and replay."""

import asyncio
import gc
import io
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticSerializationError

import eagle3.generation.journal as journal_module
from eagle3.errors import ArtifactError
from eagle3.generation.journal import (
    AT_ONCE,
    BUFFER_BYTES,
    Journal,
    Place,
    decode_line,
    encode_line,
    journal_paths,
    raw_of,
    read_journal,
)

ENTRY = {"kind": "intent", "id": "a", "text": "U+2028 \u2028 and \u0085"}


def write(path: Path, *entries: dict[str, object], tail: bytes = b"") -> Path:
    path.write_bytes(b"".join(encode_line(entry) for entry in entries) + tail)
    return path


@given(st.binary(max_size=300))
def test_a_raw_body_survives_exactly(body: bytes):
    entry = decode_line(encode_line({"kind": "answer", "raw": body}))
    assert entry is not None
    assert raw_of(entry) == body


@given(st.text(max_size=50), st.data())
def test_every_torn_or_changed_line_is_noticed(text: str, data: st.DataObject):
    line = encode_line({"kind": "answer", "text": text})
    cut = data.draw(st.integers(0, len(line) - 1))
    assert decode_line(line[:cut]) is None
    changed = bytearray(line)
    changed[cut] ^= 1
    assert decode_line(bytes(changed)) is None


def test_a_torn_last_line_is_dropped_wherever_it_tears(tmp_path):
    line = encode_line(ENTRY)
    for cut in range(len(line)):
        path = write(tmp_path / "journal-0001.jsonl", ENTRY, tail=line[:cut])
        assert [entry for _, entry in read_journal(path)] == [ENTRY]


def test_damage_before_the_last_line_is_an_error(tmp_path):
    path = write(tmp_path / "journal-0001.jsonl", ENTRY, tail=b"garbage\n" + encode_line(ENTRY))
    with pytest.raises(ArtifactError, match="before its last line"):
        list(read_journal(path))


def test_places_lead_back_to_entries_and_notice_changes(tmp_path):
    path = write(tmp_path / "journal-0001.jsonl", ENTRY, {**ENTRY, "id": "b"})
    places = [place for place, _ in read_journal(path)]
    assert places[1].read()["id"] == "b"
    data = bytearray(path.read_bytes())
    data[places[1].offset + 30] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ArtifactError, match="changed at byte"):
        places[1].read()


def test_appended_lines_are_on_disk_when_append_returns(tmp_path):
    async def work() -> None:
        journal = Journal(tmp_path, window_s=0.0)
        places = await asyncio.gather(*(journal.append("d", {**ENTRY, "id": str(i)}) for i in range(50)))
        found = [entry["id"] for path in journal_paths(tmp_path / "d") for _, entry in read_journal(path)]
        assert sorted(found, key=int) == [str(i) for i in range(50)]
        assert places[7].read()["id"] == "7"
        await journal.aclose()

    asyncio.run(work())
    asyncio.run(work_again(tmp_path))
    assert len(journal_paths(tmp_path / "d")) == 2


async def work_again(root: Path) -> None:
    journal = Journal(root, window_s=0.0)
    await journal.append("d", ENTRY)
    await journal.aclose()


def test_a_file_that_is_full_stays_open_for_the_sync_under_way(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "ROTATE_BYTES", 1000)
    entered, may_go_on, sync = threading.Event(), threading.Event(), os.fdatasync

    def slow_sync(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread() and not entered.is_set():
            file = os.fstat(descriptor).st_ino
            entered.set()
            assert may_go_on.wait(10)
            assert os.fstat(descriptor).st_ino == file, "another file got the descriptor"
        sync(descriptor)

    monkeypatch.setattr(journal_module.os, "fdatasync", slow_sync)

    async def work() -> None:
        journal = Journal(tmp_path, window_s=0.0)
        first = asyncio.create_task(journal.append("d", ENTRY))
        await asyncio.to_thread(entered.wait, 10)
        others = [journal.append_later("d", {**ENTRY, "id": str(i)}) for i in range(100)]
        may_go_on.set()
        await first
        for number, durable in enumerate(others):
            assert (await durable).read()["id"] == str(number)
        await journal.aclose()

    asyncio.run(work())
    assert len(journal_paths(tmp_path / "d")) > 2
    found = [entry["id"] for path in journal_paths(tmp_path / "d") for _, entry in read_journal(path)]
    assert found == ["a", *map(str, range(100))]


def test_a_line_survives_the_process_long_before_its_sync(tmp_path):
    async def work() -> None:
        journal = Journal(tmp_path, window_s=600.0)
        durable = journal.append_later("d", ENTRY)
        for _ in range(1000):
            if any(path.stat().st_size for path in journal_paths(tmp_path / "d")):
                break
            await asyncio.sleep(0.01)
        (path,) = journal_paths(tmp_path / "d")
        assert [entry for _, entry in read_journal(path)] == [ENTRY]
        assert not durable.done()
        await journal.aclose()

    asyncio.run(work())


def test_many_lines_do_not_wait_for_their_time(tmp_path):
    async def work() -> None:
        journal = Journal(tmp_path, window_s=600.0)
        for number in range(AT_ONCE):
            journal.note("d", {**ENTRY, "id": str(number)})
        (path,) = journal_paths(tmp_path / "d")
        assert len(list(read_journal(path))) == AT_ONCE
        await journal.aclose()

    asyncio.run(work())


def test_an_entry_that_is_no_json_is_its_writers_trouble_alone(tmp_path):
    async def work() -> None:
        journal = Journal(tmp_path, window_s=0.0)
        written = [journal.append_later("d", {"id": value}) for value in ("a", object(), "b")]
        first, odd, last = await asyncio.gather(*written, return_exceptions=True)
        assert isinstance(odd, PydanticSerializationError)
        assert isinstance(first, Place)
        assert isinstance(last, Place)
        assert (first.read(), last.read()) == ({"id": "a"}, {"id": "b"})
        await journal.aclose()

    asyncio.run(work())


def test_what_is_appended_during_the_close_is_kept_and_after_it_refused(tmp_path, monkeypatch):
    entered, may_go_on, sync = threading.Event(), threading.Event(), os.fdatasync

    def slow_sync(descriptor: int) -> None:
        entered.set()
        assert may_go_on.wait(10)
        sync(descriptor)

    monkeypatch.setattr(journal_module.os, "fdatasync", slow_sync)

    async def work() -> None:
        journal = Journal(tmp_path, window_s=600.0)
        early = journal.append_later("d", ENTRY)
        closing = asyncio.create_task(journal.aclose())
        await asyncio.to_thread(entered.wait, 10)
        late = journal.append_later("d", {**ENTRY, "id": "late"})
        may_go_on.set()
        await asyncio.wait_for(closing, 10)
        assert (early.result().read()["id"], late.result().read()["id"]) == ("a", "late")
        with pytest.raises(ArtifactError, match="closed"):
            journal.append_later("d", ENTRY)

    asyncio.run(work())


def test_a_note_that_the_disk_refused_is_told_once(tmp_path):
    async def work() -> None:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context.get("exception")))
        journal = Journal(tmp_path, window_s=0.0)
        journal.note("d", {"id": object()})
        await journal.append("d", ENTRY)
        assert [type(error) for error in told] == [PydanticSerializationError]
        write_to(journal, io.FileIO("/dev/full", "wb"))
        journal.note("d", ENTRY)
        with pytest.raises(ArtifactError, match="No space left"):
            await journal.append("d", ENTRY)
        await journal.aclose()
        gc.collect()
        assert len(told) == 1

    asyncio.run(work())


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


def test_append_returns_after_the_sync_of_its_bytes(tmp_path, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(journal_module.os, "fdatasync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))

    async def work() -> None:
        journal = Journal(tmp_path, window_s=0.0)
        for _ in range(3):
            place = await journal.append("d", ENTRY)
            assert synced
            assert synced[-1] >= place.offset + place.length
        await journal.aclose()

    asyncio.run(work())


def test_a_waiter_that_gave_up_holds_nobody_up(tmp_path):
    async def work() -> None:
        journal = Journal(tmp_path, window_s=0.05)
        given_up, kept = journal.append_later("d", ENTRY), journal.append_later("d", ENTRY)
        given_up.cancel()
        assert (await asyncio.wait_for(kept, 10)).read() == ENTRY
        write_to(journal, io.FileIO("/dev/full", "wb"))
        given_up, kept = journal.append_later("d", ENTRY), journal.append_later("d", ENTRY)
        given_up.cancel()
        with pytest.raises(ArtifactError, match="No space left"):
            await asyncio.wait_for(kept, 10)
        await journal.aclose()

    asyncio.run(work())


@pytest.mark.parametrize("trouble", ["folder", "sync"])
def test_everybody_is_told_why_nothing_can_be_written(tmp_path, monkeypatch, trouble):
    def refuse(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    if trouble == "folder":
        (tmp_path / "d").touch()
    else:
        monkeypatch.setattr(journal_module.os, "fdatasync", refuse)
    reason = "File exists" if trouble == "folder" else "Input/output error"

    async def work() -> None:
        journal = Journal(tmp_path, window_s=0.0)
        written = [journal.append_later("d", ENTRY) for _ in range(2)]
        for error in await asyncio.gather(*written, return_exceptions=True):
            assert isinstance(error, ArtifactError)
            assert reason in str(error)
        with pytest.raises(ArtifactError, match=reason):
            journal.note("d", ENTRY)
        await journal.aclose()

    asyncio.run(work())


def test_what_the_disk_refused_is_not_written_later(tmp_path):
    async def work() -> None:
        journal = Journal(tmp_path, window_s=0.05)
        await journal.append("d", ENTRY)
        (path,) = journal_paths(tmp_path / "d")
        write_to(journal, RefusingOnce(path, "ab"))
        written = [journal.append_later("d", {**ENTRY, "id": f"refused {number}"}) for number in range(3)]
        for error in await asyncio.gather(*written, return_exceptions=True):
            assert isinstance(error, ArtifactError)
            assert "cannot be written" in str(error)
        await asyncio.sleep(0.1)
        await journal.aclose()

    asyncio.run(work())
    (path,) = journal_paths(tmp_path / "d")
    assert [entry["id"] for _, entry in read_journal(path)] == ["a"]


def write_to(journal: Journal, raw: io.FileIO) -> None:
    """Let the rest of a journal go to another file."""
    file = journal._files["d"].file
    assert file is not None
    file.close()
    journal._files["d"].file = io.BufferedWriter(raw, buffer_size=BUFFER_BYTES)


class RefusingOnce(io.FileIO):
    """A file on a disk that is full for one write."""

    is_full = True

    def write(self, data, /):
        if self.is_full:
            self.is_full = False
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_a_disk_that_refuses_stops_everything(tmp_path):
    async def work() -> None:
        journal = Journal(tmp_path, window_s=0.0)
        await journal.append("d", ENTRY)
        write_to(journal, io.FileIO("/dev/full", "wb"))
        with pytest.raises(ArtifactError, match="cannot be written"):
            await journal.append("d", ENTRY)
        with pytest.raises(ArtifactError, match="cannot be written"):
            await journal.append("d", ENTRY)
        await journal.aclose()

    asyncio.run(work())
