"""What the target itself says and sees: its greedy continuations of prompts, and the captured layers along them.

B sequences, T tokens, K = captured layers side by side, ascending.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagle3.drafter.extra import import_torch, require_train_extra
from eagle3.errors import TargetError
from eagle3.precision import compute_dtype

BATCH_PROMPTS = 32


class TargetModel:
    """The target in memory."""

    def __init__(self, directory: Path, dtype: str, num_threads: int | None) -> None:
        """Load it for inference.

        Args:
            directory: Hugging Face directory.
            dtype: Of weights and forward pass, `bfloat16` or `float32`; see `eagle3.precision`.
            num_threads: CPU threads; None leaves torch's choice.

        Raises:
            TargetError: It cannot be loaded, or its layers are not where a decoder has them.
            MissingExtraError: torch or transformers is not installed.
        """
        require_train_extra("torch", "transformers")
        import transformers

        self._torch = import_torch()
        if num_threads is not None:
            self._torch.set_num_threads(num_threads)
        loader: Any = transformers.AutoModelForCausalLM
        loaded_as = getattr(self._torch, compute_dtype(dtype))
        shown_bars = transformers.utils.logging.is_progress_bar_enabled()
        transformers.utils.logging.disable_progress_bar()
        try:
            model = loader.from_pretrained(directory, dtype=loaded_as, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError) as exc:
            raise TargetError(
                f"target {directory.name!r} cannot be loaded: {type(exc).__name__}: {str(exc)[:300]}. Check its files."
            ) from exc
        finally:
            if shown_bars:
                transformers.utils.logging.enable_progress_bar()
        self._device = self._torch.accelerator.current_accelerator(check_available=True) or self._torch.device("cpu")
        self._model = model.eval().to(self._device)
        base: Any = getattr(model, "model", None)
        if base is None or not hasattr(base, "layers"):
            raise TargetError(
                f"target {directory.name!r} is a {type(model).__name__}, expected one with 'model.layers'"
            )
        self._base = base

    def continue_greedily(
        self,
        prompts: Sequence[Sequence[int]],
        end_ids: Sequence[int],
        max_new_tokens: int,
        on_done: Callable[[int], None],
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt, its end id included when it ended by itself.

        Prompts of similar length share a batch, padded on the left; the padding is masked out.
        """
        continuations: list[list[int]] = [[] for _ in prompts]
        by_length = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
        for start in range(0, len(by_length), BATCH_PROMPTS):
            batch = by_length[start : start + BATCH_PROMPTS]
            answers = self._continue_batch([prompts[index] for index in batch], frozenset(end_ids), max_new_tokens)
            for index, answer in zip(batch, answers, strict=True):
                continuations[index] = answer
            on_done(min(start + BATCH_PROMPTS, len(by_length)))
        return continuations

    def _continue_batch(
        self, prompts: Sequence[Sequence[int]], end_ids: frozenset[int], max_new_tokens: int
    ) -> list[list[int]]:
        torch = self._torch
        width = max(len(prompt) for prompt in prompts)
        padding_B = torch.tensor([width - len(prompt) for prompt in prompts], device=self._device)
        # The padding is masked, so any id does; the first of each prompt is certainly one of the vocabulary.
        padded = [[prompt[0]] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        ids_BT = torch.tensor(padded, device=self._device)
        columns_T = torch.arange(width, device=self._device)
        mask_BT = (columns_T[None, :] >= padding_B[:, None]).long()
        positions_BT = (columns_T[None, :] - padding_B[:, None]).clamp(min=0)
        answers: list[list[int]] = [[] for _ in prompts]
        open_rows = set(range(len(prompts)))
        cache: Any = None
        for _ in range(max_new_tokens):
            with torch.inference_mode():
                output = self._model(
                    input_ids=ids_BT,
                    attention_mask=mask_BT,
                    position_ids=positions_BT,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
            cache = output.past_key_values
            chosen_B = output.logits[:, -1].argmax(dim=-1)
            for row, token in enumerate(chosen_B.tolist()):
                if row in open_rows:
                    answers[row].append(token)
                    if token in end_ids:
                        open_rows.remove(row)
            if not open_rows:
                break
            ids_BT = chosen_B[:, None]
            mask_BT = torch.cat([mask_BT, torch.ones_like(ids_BT)], dim=1)
            positions_BT = positions_BT[:, -1:] + 1
        return answers

    def features(self, input_ids: Sequence[int], layer_ids: Sequence[int]) -> Any:
        """Return the inputs of the given layers along one sequence, side by side: float32 [T, K].

        Taken by hooks before the layers, which is what engines capture; see the conventions of stage 6.
        """
        captured: dict[int, Any] = {}

        def keep(layer: int) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
            def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                del module
                captured[layer] = args[0] if args else kwargs["hidden_states"]

            return hook

        hooks = [
            self._base.layers[layer].register_forward_pre_hook(keep(layer), with_kwargs=True) for layer in layer_ids
        ]
        try:
            with self._torch.inference_mode():
                self._base(input_ids=self._torch.tensor([list(input_ids)], device=self._device), use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return self._torch.cat([captured[layer][0] for layer in layer_ids], dim=-1).float().cpu()
