"""Hidden states by a plain forward pass of the Hugging Face model.

Suffixes: B sequences of a batch, T tokens, L captured layers, H hidden, V target vocabulary.
"""

import importlib
import importlib.util
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3.errors import MissingExtraError, TargetError
from eagle3.precision import compute_dtype

PREDICT_ROWS = 1024
"""Rows of logits computed at a time; bounds memory at 1024 x V values."""


def import_torch() -> Any:
    """Import torch.

    Raises:
        MissingExtraError: torch or transformers is not installed.
    """
    missing = [name for name in ("torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"extracting hidden states needs {missing}, which are not installed. "
            "Install the train extra: pip install 'eagle3-pipeline[train]'."
        )
    return importlib.import_module("torch")


class TransformersBackend:
    """The target as a Hugging Face causal language model; see `eagle3.hidden_states.backend.Backend`.

    States are taken by pre-hooks on the decoder layers and on the final norm: `output_hidden_states` would keep all
    layers in memory and has its last entry after the final norm. Batches are padded on the right and need no attention
    mask, because a causal model never lets a token see what comes after it.
    """

    def __init__(self, directory: Path, layer_ids: Sequence[int], dtype: str, num_threads: int | None = None) -> None:
        """Load the model.

        Args:
            directory: Hugging Face directory with configuration and weights.
            layer_ids: Input-of-layer ids, ascending.
            dtype: `bfloat16` or `float32`, of the captured states. The forward pass has it too, unless this processor
                cannot do it at full speed: see `eagle3.precision`.
            num_threads: CPU threads; None leaves torch's choice. It holds for the whole process.

        Raises:
            MissingExtraError: torch or transformers is not installed.
            TargetError: The directory holds no model that can be loaded, or one whose parts have other names.
        """
        self._torch = import_torch()
        self._transformers: Any = importlib.import_module("transformers")
        if num_threads is not None:
            self._torch.set_num_threads(num_threads)
        self._layer_ids = tuple(layer_ids)
        self._device = self._torch.device("cuda" if self._torch.cuda.is_available() else "cpu")
        self._dtype = getattr(self._torch, dtype)
        self._model = self._load(directory, compute_dtype(dtype))
        self._base: Any = getattr(self._model, "model", None)
        if not all(hasattr(self._base, part) for part in ("layers", "norm")):
            raise TargetError(
                f"target {directory.name!r} is a {type(self._model).__name__}, expected a decoder with 'model.layers' "
                "and 'model.norm': its layers cannot be found. Use a backend that knows this architecture."
            )

    def _load(self, directory: Path, dtype: str) -> Any:
        bars_shown = bool(self._transformers.utils.logging.is_progress_bar_enabled())
        self._transformers.utils.logging.disable_progress_bar()
        try:
            model = self._transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=getattr(self._torch, dtype), local_files_only=True, attn_implementation="sdpa"
            )
        except (OSError, ValueError, KeyError, RuntimeError) as exc:
            raise TargetError(
                f"target {directory.name!r} cannot be loaded by transformers {self.engine_version}: "
                f"{type(exc).__name__}: {str(exc)[:300]}. Check config.json and the weight files."
            ) from exc
        finally:
            if bars_shown:
                self._transformers.utils.logging.enable_progress_bar()
        model.eval()
        model.requires_grad_(False)  # noqa: FBT003 - torch's own signature
        return model.to(self._device)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the target."""
        return len(self._base.layers)

    @property
    def hidden_size(self) -> int:
        """H."""
        return int(self._base.config.hidden_size)

    @property
    def engine_version(self) -> str:
        """Version of transformers."""
        return str(self._transformers.__version__)

    @property
    def compute_dtype(self) -> str:
        """Dtype of weights and forward pass."""
        return str(self._model.dtype).removeprefix("torch.")

    @contextmanager
    def _captured(self, slots: list[Any]) -> Generator[None]:
        """Fill `slots`, one per captured layer and one for the final norm, with the input each of them gets."""

        def keep_input(slot: int) -> Any:
            def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                del module
                slots[slot] = args[0] if args else kwargs["hidden_states"]

            return hook

        modules = [*(self._base.layers[layer] for layer in self._layer_ids), self._base.norm]
        handles = [
            module.register_forward_pre_hook(keep_input(slot), with_kwargs=True) for slot, module in enumerate(modules)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def capture(self, batch: Sequence[Sequence[int]]) -> list[Any]:
        """Return one tensor [T, L+1, H] per sequence of ids, in batch order; one forward pass without the lm_head."""
        torch = self._torch
        width = max(len(ids) for ids in batch)
        # Any valid id pads: no real token sees it. The first id of the row is certainly valid.
        padded = [[*ids, *[ids[0]] * (width - len(ids))] for ids in batch]
        input_ids_BT = torch.tensor(padded, dtype=torch.int64, device=self._device)  # noqa: N806
        slots: list[Any] = [None] * (len(self._layer_ids) + 1)
        with torch.inference_mode(), self._captured(slots):
            self._base(input_ids=input_ids_BT, use_cache=False)
        stacked_BTLH = torch.stack(slots, dim=2).to(self._dtype).cpu()  # noqa: N806
        return [stacked_BTLH[row, : len(ids)] for row, ids in enumerate(batch)]

    def predict(self, hidden_TH: Any) -> Any:  # noqa: N803
        """Return int64 [T]: argmax of lm_head(norm(state))."""
        torch = self._torch
        with torch.inference_mode():
            parts = [
                self._model.lm_head(self._base.norm(self._as_computed(part))).argmax(dim=-1).cpu()
                for part in hidden_TH.split(PREDICT_ROWS)
            ]
        return torch.cat(parts)

    def final_norm(self, hidden_TH: Any) -> Any:  # noqa: N803
        """Return [T, H]: the states after the final norm."""
        with self._torch.inference_mode():
            return self._base.norm(self._as_computed(hidden_TH)).cpu()

    def _as_computed(self, hidden_TH: Any) -> Any:  # noqa: N803
        return hidden_TH.to(self._device, self._model.dtype)

    def reference_states(self, input_ids: Sequence[int]) -> Any:
        """Return [n+1, T, H] as the model's own `output_hidden_states`, one sequence, no hooks, no padding."""
        torch = self._torch
        with torch.inference_mode():
            ids_BT = torch.tensor([list(input_ids)], dtype=torch.int64, device=self._device)  # noqa: N806
            output = self._base(input_ids=ids_BT, use_cache=False, output_hidden_states=True)
        return torch.stack([state[0].cpu() for state in output.hidden_states])
