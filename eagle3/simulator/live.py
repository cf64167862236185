"""Answers from the real model for prompts nobody recorded. Needs torch and transformers; batch size one.

One worker thread owns the model; the event loop never waits for it.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

from eagle3.errors import MissingExtraError, TargetError
from eagle3.simulator.answers import Answer


class TransformersModel:
    """A Hugging Face model directory behind `eagle3.simulator.chat.LiveModel`."""

    def __init__(self, model: Any, tokenizer: Any, end_ids: frozenset[int]) -> None:
        """Wrap a loaded model; generation stops at any of `end_ids`."""
        self._model = model
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="live-model")

    def submit(self, request: Mapping[str, Any], max_tokens: int, done: Callable[[Answer | str], None]) -> None:
        """Generate; then call `done` in the event loop's thread."""
        loop = asyncio.get_running_loop()

        def deliver(future: Future[Answer]) -> None:
            error = future.exception()
            answer = f"Simulator: the live model failed: {error}" if error is not None else future.result()
            if not loop.is_closed():
                loop.call_soon_threadsafe(done, answer)

        self._worker.submit(self.generate, request, max_tokens).add_done_callback(deliver)

    def generate(self, request: Mapping[str, Any], max_tokens: int) -> Answer:
        """One answer; blocks. Sampling follows the request's temperature, top_p, top_k and seed."""
        import torch

        rendered: str = self._tokenizer.apply_chat_template(
            request["messages"], tools=request.get("tools"), tokenize=False, add_generation_prompt=True
        )
        prompt_ids: list[int] = self._tokenizer(rendered, add_special_tokens=False)["input_ids"]
        temperature = float(request.get("temperature", 1.0))
        options: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_p": float(request.get("top_p", 1.0))}
            options["top_k"] = int(request.get("top_k", 0))
        torch.manual_seed(int(request.get("seed") or 0))
        with torch.inference_mode():
            # Shape [1, prompt + output tokens].
            generated = self._model.generate(
                torch.tensor([prompt_ids]),
                attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
                max_new_tokens=max_tokens,
                eos_token_id=sorted(self._end_ids),
                pad_token_id=min(self._end_ids),
                **options,
            )
        output_ids = tuple(int(i) for i in generated[0, len(prompt_ids) :])
        is_ended = bool(output_ids) and output_ids[-1] in self._end_ids
        text = cast("str", self._tokenizer.decode(output_ids, skip_special_tokens=True))
        return Answer(
            prompt_ids=tuple(prompt_ids),
            output_ids=output_ids,
            finish_reason="stop" if is_ended else "length",
            content=text,
            is_ended=is_ended,
        )


def load_live_model(directory: Path) -> TransformersModel:
    """Load a model directory (config, safetensors, tokenizer, chat template).

    Raises:
        MissingExtraError: torch or transformers is not installed.
        TargetError: The directory is not a model, or names no end token.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    except ImportError as exc:
        raise MissingExtraError("--live needs torch and transformers: pip install 'eagle3-pipeline[train]'.") from exc
    try:
        model: Any = cast("Any", AutoModelForCausalLM).from_pretrained(
            directory, dtype=torch.float32, local_files_only=True
        )
        tokenizer: Any = cast("Any", PreTrainedTokenizerFast).from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise TargetError(f"live model directory {str(directory)!r} cannot be loaded: {exc}") from exc
    stated: Any = model.generation_config.eos_token_id
    end_ids = frozenset(stated if isinstance(stated, list) else [stated]) - {None}
    if not end_ids:
        raise TargetError(f"live model directory {str(directory)!r} names no end token (eos_token_id).")
    return TransformersModel(model.eval(), tokenizer, cast("frozenset[int]", end_ids))
