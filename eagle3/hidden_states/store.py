"""Hidden states on disk: one safetensors file per corpus row, committed in groups, checked again on resume.

A file is either complete under its final name or not there. Each carries its capture contract and its token ids, so
that a file proves by itself which row it belongs to.
"""

import hashlib
import importlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3.artifacts import TEMPORARY_SUFFIX, ShardRef, sha256_file, sync_directory
from eagle3.errors import ConfigurationError, CorruptShardError, GateError
from eagle3.formats import CONTRACT_KEY, HIDDEN_STATES_KEY, TOKEN_IDS_KEY, hidden_states_name
from eagle3.hidden_states.contract import CaptureContract, contract_from_json
from eagle3.hidden_states.gates import check_values

HEADER_BYTES = 2048
"""Allowance for the safetensors header, padding and file-system rounding of one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredStates:
    """One file, read back."""

    contract: CaptureContract
    token_ids: list[int]
    hidden_TLH: Any  # noqa: N815 - shape suffix
    """torch tensor [T, L+1, H] of the contract's dtype."""


def read_states(path: Path) -> StoredStates:
    """Read one file.

    Raises:
        CorruptShardError: It cannot be opened, or lacks a tensor or the contract.
        GateError: Its contract is of another version.
    """
    safetensors: Any = importlib.import_module("safetensors")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            contract = contract_from_json(header[CONTRACT_KEY])
            hidden_TLH = file.get_tensor(HIDDEN_STATES_KEY)  # noqa: N806
            token_ids = file.get_tensor(TOKEN_IDS_KEY).tolist()
    except (OSError, KeyError, safetensors.SafetensorError) as exc:
        raise CorruptShardError(
            f"hidden states {path.name!r} cannot be read ({type(exc).__name__}: {exc}): the file is cut short or of "
            "another format. Delete it and run 'eagle3 extract' again."
        ) from exc
    return StoredStates(contract=contract, token_ids=token_ids, hidden_TLH=hidden_TLH)


class HiddenStateStore:
    """The files of one stage folder under one contract."""

    def __init__(self, directory: Path, contract: CaptureContract) -> None:
        """Name the folder; it is created by the first commit."""
        self.directory = directory
        self.contract = contract
        self._header = {CONTRACT_KEY: contract.to_json()}

    def path(self, row: int) -> Path:
        """Return where the states of a corpus row lie."""
        return self.directory / hidden_states_name(row)

    def existing(self, row: int, input_ids: Sequence[int]) -> ShardRef | None:
        """Return the file of a row when an earlier run left it whole, else None: it must be made.

        It counts only when it opens, its contract equals ours, its ids are those of the row, its tensor has the shape
        and dtype that follow, and its values pass the value gate.
        """
        path = self.path(row)
        if not path.is_file():
            return None
        try:
            stored = read_states(path)
            if stored.contract != self.contract or stored.token_ids != list(input_ids):
                return None
            self._check_tensor(row, input_ids, stored.hidden_TLH)
        except (CorruptShardError, GateError):
            return None
        return self._reference(row, len(input_ids), sha256_file(path), path.stat().st_size)

    def commit(self, rows: Sequence[int], sequences: Sequence[Sequence[int]], states: Sequence[Any]) -> list[ShardRef]:
        """Write the files of several rows: all are durable before the first gets its final name.

        Args:
            rows: Corpus rows.
            sequences: Ids of each row.
            states: torch tensor [T, L+1, H] of each row, in the contract's dtype.

        Raises:
            GateError: A tensor has another shape or dtype than the contract says, or values that no model makes.
        """
        torch: Any = importlib.import_module("torch")
        safetensors: Any = importlib.import_module("safetensors.torch")
        self.directory.mkdir(parents=True, exist_ok=True)
        written: list[tuple[Path, Path]] = []
        references: list[ShardRef] = []
        for row, input_ids, hidden_TLH in zip(rows, sequences, states, strict=True):  # noqa: N806
            self._check_tensor(row, input_ids, hidden_TLH)
            tensors = {
                HIDDEN_STATES_KEY: hidden_TLH.contiguous(),
                TOKEN_IDS_KEY: torch.tensor(list(input_ids), dtype=torch.int64),
            }
            data: bytes = safetensors.save(tensors, metadata=self._header)
            path = self.path(row)
            temporary = self.directory / f".{path.name}{TEMPORARY_SUFFIX}"
            with temporary.open("wb") as file:
                file.write(data)
            written.append((temporary, path))
            references.append(self._reference(row, len(input_ids), hashlib.sha256(data).hexdigest(), len(data)))
        for temporary, _ in written:
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
        for temporary, path in written:
            temporary.replace(path)
        sync_directory(self.directory)
        return references

    def read(self, row: int) -> StoredStates:
        """Read the states of a row; see `read_states`."""
        return read_states(self.path(row))

    def _check_tensor(self, row: int, input_ids: Sequence[int], hidden_TLH: Any) -> None:  # noqa: N803
        expected = (len(input_ids), self.contract.num_slots, self.contract.hidden_size)
        found, dtype = tuple(hidden_TLH.shape), str(hidden_TLH.dtype).removeprefix("torch.")
        if found != expected or dtype != self.contract.dtype:
            raise GateError(
                f"hidden states of row {row} have shape {list(found)} and dtype {dtype}, expected {list(expected)} and "
                f"{self.contract.dtype} [tokens, layers + 1, hidden]: the backend does not keep the capture contract."
            )
        check_values(row, hidden_TLH)

    @staticmethod
    def _reference(row: int, num_tokens: int, digest: str, size_bytes: int) -> ShardRef:
        return ShardRef(
            path=hidden_states_name(row), sha256=digest, size_bytes=size_bytes, num_samples=1, num_tokens=num_tokens
        )


def estimate_bytes(contract: CaptureContract, lengths: Sequence[int]) -> int:
    """Return the bytes that the files of sequences of these lengths take on disk."""
    return sum(lengths) * contract.token_bytes + len(lengths) * HEADER_BYTES


def describe_bytes(count: int) -> str:
    """Return a size in both units that people mean by "gigabyte"."""
    return f"{count / 1e9:.2f} GB ({count / 2**30:.2f} GiB)"


def require_disk_space(directory: Path, needed_bytes: int, reserve_bytes: int) -> None:
    """Refuse to start what would not fit.

    Args:
        directory: Where the files go; it need not exist yet.
        needed_bytes: What will be written.
        reserve_bytes: What must stay free afterwards.

    Raises:
        ConfigurationError: Less would be left free.
    """
    place = directory
    while not place.exists():
        place = place.parent
    free_bytes = shutil.disk_usage(place).free
    if free_bytes - needed_bytes < reserve_bytes:
        raise ConfigurationError(
            f"hidden states need {describe_bytes(needed_bytes)}; {describe_bytes(free_bytes)} are free and "
            f"hidden_states.disk_reserve_bytes keeps {describe_bytes(reserve_bytes)} of them. Free "
            f"{describe_bytes(needed_bytes + reserve_bytes - free_bytes)}, choose another run root, or lower "
            "corpus.max_dataset_completion_tokens."
        )
