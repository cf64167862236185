"""Running the trainer: one subprocess, its progress lines, its checkpoints.

The trainer is believed by its files only. It returns normally after a stop, so a clean exit proves nothing; an epoch
counts when its folder holds `training_state.json`, which is written last, and that file says the epoch is complete.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import eagle3
from eagle3.artifacts import commit_json
from eagle3.drafter.trainer_settings import SettingValue
from eagle3.errors import StoppedError, TrainingError

STATE_FILE = "training_state.json"
INTERRUPTED_FOLDER = "interrupted"
STOP_GRACE_S = 60.0
"""After a stop the trainer writes a checkpoint of hundreds of megabytes; then it is killed."""
LOG_TAIL_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerJob:
    """One call of the trainer."""

    settings: Mapping[str, SettingValue]
    folder: Path
    """Holds `job.json`, `trainer.log`, `metrics.jsonl`; the checkpoints are below it."""
    num_threads: int | None
    """CPU threads; None leaves it to torch."""

    @property
    def checkpoints(self) -> Path:
        """One folder per epoch."""
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Every metric record of all attempts, one JSON line each."""
        return self.folder / "metrics.jsonl"


def complete_epochs(checkpoints: Path) -> int:
    """Return how many epochs are complete: one more than the highest whose state says so; 0 when none."""
    numbers = (
        [int(entry.name) for entry in checkpoints.iterdir() if entry.name.isdigit()] if checkpoints.is_dir() else []
    )
    return max((number + 1 for number in numbers if is_complete(checkpoints / str(number))), default=0)


def is_complete(epoch_folder: Path) -> bool:
    """Whether an epoch's checkpoint was written to its end."""
    try:
        state = json.loads((epoch_folder / STATE_FILE).read_text("utf-8"))
        at_end = state["epoch"] == int(epoch_folder.name) and state["local_step"] == 0
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return at_end and all((epoch_folder / name).is_file() for name in ("config.json", "model.safetensors"))


def sweep_checkpoints(checkpoints: Path) -> None:
    """Delete what a killed or stopped trainer left unfinished.

    The trainer resumes from the highest number it finds, finished or not, and never from `interrupted`.
    """
    if not checkpoints.is_dir():
        return
    for entry in checkpoints.iterdir():
        if entry.is_symlink() or not entry.is_dir():
            continue
        if entry.name == INTERRUPTED_FOLDER or (entry.name.isdigit() and not is_complete(entry)):
            shutil.rmtree(entry)


def trim_metrics(metrics: Path, num_complete_epochs: int) -> None:
    """Forget records of epochs that will be trained again."""
    if metrics.is_file():
        kept = [event for event in read_metrics(metrics) if int(event.get("epoch", -1)) < num_complete_epochs]
        metrics.write_text("".join(json.dumps(event) + "\n" for event in kept), encoding="utf-8")


def read_metrics(metrics: Path) -> list[dict[str, Any]]:
    """Read all metric records; a torn last line is dropped."""
    events: list[dict[str, Any]] = []
    for line in metrics.read_text("utf-8").splitlines() if metrics.is_file() else []:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events


def run_trainer(job: TrainerJob, on_event: Callable[[Mapping[str, Any]], None]) -> None:
    """Train until the last epoch is complete, going on after the last complete one.

    Args:
        job: What to run. Epochs complete already are not trained again.
        on_event: Called with each record: `start`, `train` or `val`.

    Raises:
        TrainingError: The trainer ended without its final checkpoint.
        StoppedError: The process was asked to stop; complete epochs are kept.
    """
    num_epochs = int(job.settings["epochs"])  # pyright: ignore[reportArgumentType] - a number by construction
    sweep_checkpoints(job.checkpoints)
    trim_metrics(job.metrics, complete_epochs(job.checkpoints))
    if complete_epochs(job.checkpoints) >= num_epochs:
        return
    read_end, write_end = os.pipe()
    commit_json(
        job.folder / "job.json",
        {"settings": dict(job.settings), "metrics": str(job.metrics.resolve()), "progress_fd": write_end},
    )
    with (job.folder / "trainer.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "eagle3.drafter.train_entry", str(job.folder / "job.json")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[write_end],
            env=_environment(job.num_threads),
            start_new_session=True,
        )
    os.close(write_end)
    try:
        with _forwarding_stop(process) as stopped:
            for event in _events(read_end):
                on_event(event)
            process.wait()
    finally:
        _end(process)
    _judge(job, num_epochs, process.returncode, was_stopped=stopped.is_set())


def _judge(job: TrainerJob, num_epochs: int, exit_code: int, *, was_stopped: bool) -> None:
    done = complete_epochs(job.checkpoints)
    if done >= num_epochs:
        return
    if was_stopped:
        raise StoppedError(f"training was stopped after {done} of {num_epochs} epochs. Run again to go on from there.")
    with (job.folder / "trainer.log").open(encoding="utf-8", errors="replace") as log:
        tail = "".join(deque(log, maxlen=LOG_TAIL_LINES)).strip()
    raise TrainingError(
        f"the trainer ended with exit code {exit_code} after {done} of {num_epochs} epochs, expected a complete "
        f"checkpoint {num_epochs - 1}. Mend the cause and run again; complete epochs are kept. End of "
        f"{job.folder.name}/trainer.log:\n{tail}"
    )


def _environment(num_threads: int | None) -> dict[str, str]:
    """The environment of the trainer: this library importable, no network, no progress bars in the log."""
    library = str(Path(eagle3.__file__).resolve().parent.parent)
    paths = [library, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "TQDM_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
    }
    if num_threads is not None:
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(num_threads))
    return environment


def _events(descriptor: int) -> Iterator[Mapping[str, Any]]:
    with os.fdopen(descriptor, encoding="utf-8") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # the last line of a killed trainer
            yield event


@contextmanager
def _forwarding_stop(process: "subprocess.Popen[bytes]") -> Generator[threading.Event]:
    """Pass SIGTERM on to the trainer while it runs, unless the surrounding program handles the signal itself."""
    stopped = threading.Event()
    is_ours = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )

    def forward(number: int, frame: FrameType | None) -> None:
        del number, frame
        stopped.set()
        _signal_group(process, signal.SIGTERM)

    if is_ours:
        signal.signal(signal.SIGTERM, forward)
    try:
        yield stopped
    finally:
        if is_ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Leave no trainer behind, whatever made us stop reading."""
    if process.poll() is not None:
        return
    _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + STOP_GRACE_S
    try:
        process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
