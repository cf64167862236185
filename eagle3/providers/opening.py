"""From a recipe's provider section to a provider that can be used."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from eagle3.errors import ConfigurationError
from eagle3.providers.base import ChatProvider
from eagle3.providers.connection import ApiKey, key_from_environment
from eagle3.providers.openai_compatible import OpenAICompatibleProvider
from eagle3.providers.openrouter import OpenRouterProvider
from eagle3.providers.sglang import SGLangProvider
from eagle3.recipe import OpenAICompatible, OpenRouter, Recipe, SGLang


@asynccontextmanager
async def open_provider(
    recipe: Recipe, state: Path | None = None, target: Path | None = None
) -> AsyncGenerator[ChatProvider, None]:
    """Yield the recipe's provider; a look-alike is started for it and stopped with it.

    Args:
        recipe: Its `generation.provider` decides.
        state: Where a look-alike keeps account, cache and generations, so that a resumed run meets the same world.
        target: Prepared Hugging Face directory; a look-alike cuts answers with its tokenizer, and prompts that go out
            as ids are rendered with it.

    Raises:
        CredentialsError: The key's environment variable is empty.
        ConfigurationError: `sglang` without a target.
    """
    section = recipe.generation.provider
    if isinstance(section, OpenRouter):
        provider: ChatProvider = OpenRouterProvider(
            base_url=section.base_url,
            key=key_from_environment(section.api_key_env),
            model=section.model,
            routing=section.routing,
            response_cache=section.response_cache,
            stream=section.stream,
        )
        try:
            yield provider
        finally:
            await provider.aclose()
        return
    if isinstance(section, OpenAICompatible):
        key = key_from_environment(section.api_key_env) if section.api_key_env is not None else None
        provider = OpenAICompatibleProvider(
            base_url=section.base_url,
            key=key,
            model=section.model,
            return_token_ids=section.return_token_ids,
            prompt_price_usd_per_mtok=section.prompt_price_usd_per_mtok,
            completion_price_usd_per_mtok=section.completion_price_usd_per_mtok,
            stream=section.stream,
        )
        try:
            yield provider
        finally:
            await provider.aclose()
        return
    if isinstance(section, SGLang):
        provider = _sglang(section, recipe, target)
        try:
            yield provider
        finally:
            await provider.aclose()
        return

    from eagle3.simulator.process import SimulatorProcess  # noqa: PLC0415 - rehearsals only

    answers = [recipe.resolve(path) for path in section.answers]
    process = SimulatorProcess(
        recipe.resolve(section.scenario),
        answers,
        tokenizer=target,
        grammar=_grammar_name(recipe) if target is not None else None,
        mode=recipe.target.mode if target is not None else None,
        state=state,
    )
    with process:
        provider = OpenRouterProvider(
            base_url=process.base_url,
            key=ApiKey("simulator"),
            model=section.model,
            routing=section.routing,
            response_cache=section.response_cache,
            stream=section.stream,
            usage_lag_s=0.0,
            answers_outlive_us=False,
        )
        try:
            yield provider
        finally:
            await provider.aclose()


def _grammar_name(recipe: Recipe) -> str:
    name = recipe.target.grammar
    return str(recipe.resolve(Path(name))) if name.endswith((".yaml", ".yml")) else name


def _sglang(section: SGLang, recipe: Recipe, target: Path | None) -> SGLangProvider:
    if target is None:
        raise ConfigurationError("a provider of kind 'sglang' renders prompts itself: it needs the prepared target.")
    from eagle3.tokens.rendering import open_renderer  # noqa: PLC0415 - templates are rendered only for this one

    renderer = open_renderer(recipe, target)
    grammar = renderer.grammar
    stop_ids = sorted({grammar.control[name].id for names in grammar.end.values() for name in names})
    return SGLangProvider(
        base_url=section.base_url,
        key=key_from_environment(section.api_key_env) if section.api_key_env is not None else None,
        render_ids=renderer.render_ids,
        stop_ids=stop_ids,
        prompt_price_usd_per_mtok=section.prompt_price_usd_per_mtok,
        completion_price_usd_per_mtok=section.completion_price_usd_per_mtok,
    )
