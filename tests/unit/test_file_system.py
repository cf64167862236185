import fcntl
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eagle3.errors import ConfigurationError, RunLockedError
from eagle3.file_system import MAX_CLOCK_SKEW_S, check_clock, check_file_system, leading, require_leader
from eagle3.locks import held, is_held

CLAIM = {"plan": "abc", "transformers": "5"}


def test_a_good_folder_passes_and_nothing_is_left(tmp_path: Path) -> None:
    check_file_system(tmp_path / "runs")
    assert not list((tmp_path / "runs").iterdir())


def test_no_locks_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Any, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigurationError, match="offers no file locks"):
        check_file_system(tmp_path)


def test_locks_that_exclude_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda file, operation: None)
    with pytest.raises(ConfigurationError, match="grants the same lock twice"):
        check_file_system(tmp_path)


def test_a_rename_that_does_not_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda self, target: replace(self, target) if not Path(target).exists() else target
    )
    with pytest.raises(ConfigurationError, match="old file after a rename"):
        check_file_system(tmp_path)


def test_exclusive_creation_that_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch = Path.touch
    monkeypatch.setattr(Path, "touch", lambda self, mode=0o666, exist_ok=True: touch(self))
    with pytest.raises(ConfigurationError, match="O_EXCL"):
        check_file_system(tmp_path)


@pytest.mark.parametrize("sign", [-1, 1])
def test_a_clock_that_is_off(sign: int) -> None:
    check_clock(1000.0, 1000.0 + sign * MAX_CLOCK_SKEW_S, "runs")
    with pytest.raises(ConfigurationError, match="differs by 61 s"):
        check_clock(1000.0, 1000.0 + sign * (MAX_CLOCK_SKEW_S + 1), "runs")


def test_the_clock_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    with pytest.raises(ConfigurationError, match="by NTP"):
        check_file_system(tmp_path)


def test_a_lock_names_its_holder_and_ends_with_its_block(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    assert not is_held(lock)
    with held(lock, "this"):
        assert is_held(lock)
        with pytest.raises(RunLockedError, match=r"this is in use by process \d+ on "), held(lock, "this"):
            pass
    assert not is_held(lock)


def test_whoever_only_looks_turns_nobody_away(tmp_path: Path) -> None:
    """Somebody looks, all the time, whether the lock is held; taking it must succeed every time."""
    lock, stop = tmp_path / "lock", threading.Event()
    lock.touch()

    def look() -> None:
        while not stop.is_set():
            is_held(lock)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for _ in range(50):
            with held(lock, "this"):
                pass
    finally:
        stop.set()
        watcher.join()


def test_a_machine_that_shares_everything_joins(tmp_path: Path) -> None:
    with leading(tmp_path / "groups", CLAIM) as note:
        require_leader(tmp_path / "groups", note.id, CLAIM)
        require_leader(tmp_path / "groups", note.id)


def test_the_leaders_note_stays_for_the_same_claim_only(tmp_path: Path) -> None:
    with leading(tmp_path, CLAIM) as first:
        pass
    with leading(tmp_path, CLAIM) as again:
        assert again.id == first.id
    with leading(tmp_path, {**CLAIM, "plan": "other"}) as other:
        assert other.id != first.id


def test_one_leader_at_a_time(tmp_path: Path) -> None:
    with leading(tmp_path, CLAIM), pytest.raises(RunLockedError), leading(tmp_path, CLAIM):
        pass


def test_other_storage_is_noticed(tmp_path: Path) -> None:
    with leading(tmp_path / "here", CLAIM) as note, pytest.raises(ConfigurationError, match="finds nothing where"):
        require_leader(tmp_path / "elsewhere", note.id, patience_s=0)


def test_the_note_of_another_attempt_is_noticed(tmp_path: Path) -> None:
    with leading(tmp_path, CLAIM) as note, pytest.raises(ConfigurationError, match=f"finds note {note.id}"):
        require_leader(tmp_path, "0" * 12, patience_s=0)


def test_locks_that_do_not_reach_here_are_noticed(tmp_path: Path) -> None:
    with leading(tmp_path, CLAIM) as note:
        seen_elsewhere = tmp_path / "copy"
        seen_elsewhere.mkdir()
        (seen_elsewhere / "leader.json").write_bytes((tmp_path / "leader.json").read_bytes())
        (seen_elsewhere / "leader.lock").touch()
        with pytest.raises(ConfigurationError, match="do not reach from machine to machine"):
            require_leader(seen_elsewhere, note.id, patience_s=0)


def test_other_versions_are_noticed(tmp_path: Path) -> None:
    with leading(tmp_path, CLAIM) as note, pytest.raises(ConfigurationError, match="transformers differ"):
        require_leader(tmp_path, note.id, {**CLAIM, "transformers": "6"}, patience_s=0)
    assert json.loads((tmp_path / "leader.json").read_bytes())["claim"] == CLAIM
