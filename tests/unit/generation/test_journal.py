"""The journal's writer: group commit, exact places, a disk that refuses, and the close."""

import asyncio
import gc
import io
import os
import threading
from pathlib import Path

import pytest
from pydantic_core import PydanticSerializationError

import eagle3.generation.journal as journal_module
from eagle3.errors import ArtifactError
from eagle3.generation.journal import AT_ONCE, Journal
from eagle3.generation.journal_lines import Place, journal_paths, read_journal

ENTRY = {"kind": "intent", "id": "a", "text": "U+2028 \u2028 and \u0085"}


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


def test_what_the_disk_refused_is_not_written_later(tmp_path, monkeypatch):
    async def work() -> None:
        journal = Journal(tmp_path, window_s=0.05)
        await journal.append("d", ENTRY)
        refuse_once(monkeypatch)
        written = [journal.append_later("d", {**ENTRY, "id": f"refused {number}"}) for number in range(3)]
        for error in await asyncio.gather(*written, return_exceptions=True):
            assert isinstance(error, ArtifactError)
            assert "cannot be written" in str(error)
        await asyncio.sleep(0.1)
        await journal.aclose()

    asyncio.run(work())
    (path,) = journal_paths(tmp_path / "d")
    assert [entry["id"] for _, entry in read_journal(path)] == ["a"]


def test_nothing_of_a_batch_is_written_after_a_part_was_refused(tmp_path):
    (tmp_path / "taken").touch()

    async def work() -> None:
        journal = Journal(tmp_path, window_s=0.0)
        written = [journal.append_later(folder, ENTRY) for folder in ("d", "taken")]
        for error in await asyncio.gather(*written, return_exceptions=True):
            assert isinstance(error, ArtifactError)
        await journal.aclose()

    asyncio.run(work())
    assert [entry for path in journal_paths(tmp_path / "d") for _, entry in read_journal(path)] == []


def test_a_refusal_during_rotation_ends_all_writing(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "ROTATE_BYTES", 1)
    refuse_once(monkeypatch)

    async def work() -> None:
        journal = Journal(tmp_path, window_s=0.0)
        written = [journal.append_later("d", {**ENTRY, "id": str(number)}) for number in range(5)]
        for error in await asyncio.gather(*written, return_exceptions=True):
            assert isinstance(error, ArtifactError)
        await journal.aclose()

    asyncio.run(work())
    assert [entry for path in journal_paths(tmp_path / "d") for _, entry in read_journal(path)] == []


def write_to(journal: Journal, file: io.FileIO) -> None:
    """Let the rest of a journal go to another file."""
    earlier = journal._files["d"].file
    assert earlier is not None
    earlier.close()
    journal._files["d"].file = file


def refuse_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full for one write."""
    write = os.writev

    def refuse(descriptor: int, pieces: list[bytes]) -> int:
        monkeypatch.setattr(journal_module.os, "writev", write)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal_module.os, "writev", refuse)


@pytest.mark.parametrize("taken", [0, 1, 40, 90])
def test_a_write_that_took_a_part_is_completed(tmp_path, monkeypatch, taken):
    write = os.write

    def take_a_part(descriptor: int, pieces: list[bytes]) -> int:
        return write(descriptor, b"".join(pieces)[:taken]) if taken else 0

    monkeypatch.setattr(journal_module.os, "writev", take_a_part)
    monkeypatch.setattr(journal_module.os, "write", lambda descriptor, data: write(descriptor, data[:7]))

    async def work() -> None:
        journal = Journal(tmp_path, window_s=0.0)
        entries = [{"kind": "answer", "id": str(number), "reply": b'{"a":1}'} for number in range(3)]
        written = [journal.append_later("d", entry) for entry in entries]
        assert [place.read() for place in await asyncio.gather(*written)] == entries
        await journal.aclose()

    asyncio.run(work())


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
