"""What an extraction engine must offer, and how sequences are grouped into batches. No torch here."""

from collections.abc import Sequence
from typing import Any, Protocol


class Backend(Protocol):
    """Computes hidden states of the target.

    Tensors are torch tensors on the CPU; T tokens, L captured layers, H hidden size, n decoder layers.
    """

    @property
    def num_layers(self) -> int:
        """Decoder layers of the target."""
        ...

    @property
    def hidden_size(self) -> int:
        """H."""
        ...

    @property
    def engine_version(self) -> str:
        """Version of the library that runs the forward pass."""
        ...

    @property
    def compute_dtype(self) -> str:
        """Dtype of the forward pass; that of the captured states may be narrower."""
        ...

    def capture(self, batch: Sequence[Sequence[int]]) -> list[Any]:
        """Return one tensor [T, L+1, H] per sequence of ids, slots as the capture contract says, in batch order."""
        ...

    def predict(self, hidden_TH: Any) -> Any:  # noqa: N803 - shape suffix
        """Return int64 [T]: the target's greedy next id after each state of a pre-norm residual stream."""
        ...

    def final_norm(self, hidden_TH: Any) -> Any:  # noqa: N803 - shape suffix
        """Return [T, H]: the states after the target's final norm."""
        ...

    def reference_states(self, input_ids: Sequence[int]) -> Any:
        """Return [n+1, T, H] by a road that shares nothing with `capture`.

        Entry j < n is the input of layer j; entry n is the output of the final norm.
        """
        ...


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group sequences of similar length, longest first, so that little is spent on padding.

    Args:
        lengths: Tokens per sequence.
        batch_tokens: Most tokens of one batch, padding included; a longer sequence is a batch of its own.

    Returns:
        Indices into `lengths`, each exactly once; longest first, so that a lack of memory shows at once.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if not batches or (len(batches[-1]) + 1) * width > batch_tokens:
            batches.append([])
            width = lengths[index]
        batches[-1].append(index)
    return batches
