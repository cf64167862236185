"""The training process: `python -m eagle3.drafter.train_entry JOB.json`.

It runs the trainer of speculators unmodified apart from four things. Every metric record also goes out as one JSON
line, into `metrics.jsonl` and on the file descriptor the job names. The trainer does not look for a git repository
around it. On a machine without accelerator three places that assume one are pointed at the CPU. And on a CPU without
bfloat16 arithmetic the optimizer uses float32 where it insists on bfloat16. All reach into private names, so the
versions are pinned and contract tests cover them. The trainer installs signal handlers, which is why it has a process
of its own.
"""

import ctypes
import importlib
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eagle3.drafter.trainer_settings import SUPPORTED_SPECULATORS
from eagle3.precision import has_accelerator, has_fast_bfloat16

PR_SET_PDEATHSIG = 1
"""Linux `prctl` option. Source: linux/prctl.h."""


class MetricLines(logging.Filter):
    """A filter on the metrics logger that copies each record out as a JSON line and lets all pass.

    A filter of the logger sees the record before any handler rewrites its message into text.
    """

    def __init__(self, descriptor: int, kept: Path) -> None:
        """Write line by line.

        Args:
            descriptor: Open for writing; somebody reads along.
            kept: File to append to. The lines of an epoch are in it before its checkpoint is written, so that no kill
                leaves a complete epoch without its figures.
        """
        super().__init__()
        self._stream = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")
        self._kept = kept.open("a", buffering=1, encoding="utf-8")

    def filter(self, record: logging.LogRecord) -> bool:
        """Send the record when it carries metrics."""
        message: object = record.msg
        if isinstance(message, Mapping) and ("train" in message or "val" in message):
            line = json.dumps(_plain(message)) + "\n"
            self._kept.write(line)
            self._stream.write(line)
        return True

    def send(self, event: Mapping[str, Any]) -> None:
        """Write one line of another kind."""
        self._stream.write(json.dumps(event) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else float(value)


def adapt_to_machine() -> None:
    """Make the changes that this machine's processors need."""
    if not has_accelerator():
        patch_for_cpu()
    if not has_fast_bfloat16():
        orthogonalize_in_float32()


def patch_for_cpu() -> None:
    """Let the trainer run where torch has no accelerator."""
    import torch
    from speculators.train import checkpointer, cli, trainer

    device = torch.device("cpu")
    patched: Any = trainer
    patched.get_local_rank = lambda: device
    patched_checkpointer: Any = checkpointer
    patched_checkpointer.get_current_device = lambda: "cpu"
    torch.accelerator.synchronize = lambda *_args, **_kwargs: None

    base: Any = trainer.Trainer

    class CpuTrainer(base):
        """The trainer with autocast on the CPU instead of on an accelerator that is not there."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.device_type = "cpu"

    patched_cli: Any = cli
    patched_cli.Trainer = CpuTrainer


def orthogonalize_in_float32() -> None:
    """Let the Muon optimizer make its matrices orthogonal in float32; it converts them to bfloat16 by itself."""
    muon: Any = importlib.import_module("torch.optim._muon")
    muon._zeropower_via_newtonschulz = newton_schulz  # noqa: SLF001


def newton_schulz(grad_MN: Any, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Any:
    """Return the matrix [M, N] that Muon steps along: `grad_MN` with singular values brought near 1, in float32.

    The quintic iteration of torch's own Muon, step by step, in another dtype.
    """
    linear, cubic, quintic = coefficients
    is_tall = grad_MN.shape[0] > grad_MN.shape[1]
    wide = (grad_MN.T if is_tall else grad_MN).float()
    wide = wide / wide.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = wide @ wide.T
        wide = linear * wide + (cubic * gram + quintic * gram @ gram) @ wide
    return wide.T if is_tall else wide


def forget_surroundings() -> None:
    """Keep the trainer from writing `speculators.patch`.

    It takes the repository that its own file lies in for that of speculators. Inside a virtual environment that is the
    user's project, whose uncommitted changes, and perhaps secrets, would end up beside the checkpoints.
    """
    from speculators.train import utils

    patched: Any = utils
    patched.find_repo_root = lambda _start: None


def report_metrics(lines: MetricLines) -> None:
    """Make whichever trainer the command line uses announce itself and send its metrics."""
    from speculators.train import cli

    command_line: Any = cli
    base: Any = command_line.Trainer

    class ReportingTrainer(base):
        """The trainer, announcing how many steps it is about to run."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # Here, not earlier: the trainer's logging set-up replaces the filters of its loggers.
            metrics = logging.getLogger("speculators.metrics")
            metrics.addFilter(lines)
            # Every step would also be printed as a paragraph into the log.
            metrics.propagate = False
            lines.send(
                {
                    "start": {
                        "first_epoch": self.current_epoch,
                        "num_epochs": self.config.num_epochs,
                        "steps_per_epoch": len(self.train_loader),
                        "train_samples": len(self.train_loader.dataset),
                        "validation_samples": len(self.val_loader.dataset) if self.val_loader else 0,
                        "trainable_parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
                        "device": str(self.local_rank),
                    }
                }
            )

    command_line.Trainer = ReportingTrainer


def die_with_parent() -> None:
    """Have the kernel kill this process with its parent: no orphan writes checkpoints beside a new trainer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(job_path: Path) -> None:
    """Train as the job file says.

    The job holds `settings` (see `eagle3.drafter.trainer_settings`), `metrics` and `progress_fd`.

    Raises:
        RuntimeError: speculators has another version than the one this code was tested with.
    """
    die_with_parent()
    from speculators.train import cli
    from speculators.train.config import TrainConfig

    if (found := version("speculators")) != SUPPORTED_SPECULATORS:
        raise RuntimeError(f"speculators is {found}, expected {SUPPORTED_SPECULATORS}; install that one")
    job = json.loads(job_path.read_text("utf-8"))
    settings = dict(job["settings"])
    hidden_states_path = settings.pop("hidden_states_path")
    config: Any = TrainConfig.from_sources(
        cli=settings, argv=list(sys.argv), backend_cli={"hidden_states_path": hidden_states_path}
    )
    # The verifier's norm rebuilds the training targets; the trainer only warns when it does not find it.
    warnings.filterwarnings("error", message="Could not find final norm weights")
    adapt_to_machine()
    forget_surroundings()
    report_metrics(MetricLines(int(job["progress_fd"]), Path(job["metrics"])))
    cli.main(config)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
