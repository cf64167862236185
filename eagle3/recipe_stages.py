"""The sections of a recipe about what becomes of the answers: one per stage after generation."""

from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field

from eagle3.recipe_base import OPERATIONAL, Section


class Reconstruction(Section):
    """How ids are rebuilt from text."""

    use_server_ids: bool = True
    """Take native ids when the server gave them."""
    min_profile_samples: int = Field(default=20, ge=1)
    """Discriminating samples needed before a provider's habit counts as known."""


class Audit(Section):
    """What ends a run instead of training on it."""

    max_mismatch_share: float = Field(default=0.005, ge=0, le=1)
    """Of one provider's samples; above it, and above two samples, count mismatches are judged: one constant offset in
    most samples of a kind is a habit nobody knew of and critical, scattered ones are a warning. Mismatched samples are
    dropped in any case."""
    max_drift_share: float = Field(default=0.1, ge=0, le=1)
    """Of one provider's samples; a share of count mismatches that is surely above it is critical even when they are
    scattered. Small models at high temperature need more: they often spell words in unusual tokens."""
    stop_on_critical: bool = True
    while_generating: Annotated[bool, OPERATIONAL] = True
    """Look at answers while others are still bought, and stop buying when a provider changes its habits, the model id
    changes, or the counts of a provider disagree as a rule. Needs `stop_on_critical`."""
    max_at_risk_usd: Annotated[Decimal, OPERATIONAL] = Field(default=Decimal(25), gt=0)
    """Most dollars in answers that were not looked at yet and in requests under way, those at their dearest. It bounds
    what a provider that goes wrong can cost; a small value also holds requests back."""


class Corpus(Section):
    """What is trained on."""

    max_sample_tokens: int = Field(default=4096, ge=8)
    """Longer samples are left out and counted."""
    max_dataset_completion_tokens: int | None = Field(default=None, ge=1)
    """Cap of completion tokens per dataset."""
    min_exactness: Literal[
        "exact_ids", "exact_logprobs", "count_verified", "count_repaired", "count_ambiguous", "unverified"
    ] = "count_ambiguous"
    """Weakest grade that is kept."""
    validation_samples: int = Field(default=64, ge=1)
    """Samples held out from training, for validation and acceptance; drawn per dataset in proportion. Never more than
    half of the corpus."""
    shard_samples: int = Field(default=1024, ge=1)


class HiddenStates(Section):
    """What is extracted from the target."""

    backend: Literal["transformers"] = "transformers"
    layer_ids: tuple[int, ...] | None = None
    """Input-of-layer ids, ascending; unset means [2, n // 2, n - 3] for n layers."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the forward pass and of the stored states. A CPU without bfloat16 arithmetic computes in float32, in twice the
    memory, and stores what is asked for here; the figures of the gates say so (`computed_in`)."""
    batch_tokens: Annotated[int, OPERATIONAL] = Field(default=2048, ge=1)
    """Most tokens per forward pass, padding included."""
    num_threads: Annotated[int | None, OPERATIONAL] = Field(default=None, ge=1)
    num_groups: Annotated[int, OPERATIONAL] = Field(default=1, ge=1, le=4096)
    """Parts for several machines: above 1, a deployment's run hands out one flow run each. The states stay the same."""
    group_pool: Annotated[str, OPERATIONAL] = "eagle3-gpu"
    """Work pool with a deployment of the flow `extract-group`, whose workers extract the groups."""
    gate_samples: int = Field(default=32, ge=1)
    """Samples on which the gates check the store."""
    min_target_agreement: float = Field(default=0.6, ge=0, le=1)
    """Share of response positions whose last state must predict the next token. Greedy answers reach 0.9 and more;
    answers sampled at temperature 1 less."""
    disk_reserve_bytes: Annotated[int, OPERATIONAL] = Field(default=2_000_000_000, ge=0)
    """Refuse to start when less would be left free."""


class Training(Section):
    """How the draft is trained."""

    epochs: int = Field(default=3, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    total_seq_len: int = Field(default=8192, ge=8)
    """Tokens per packed row; samples must fit."""
    draft_vocab_size: int = Field(default=32000, ge=16)
    """Most frequent target ids that the draft can propose."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the forward pass; weights are updated in float32 either way. A CPU without bfloat16 arithmetic computes in
    float32 instead, and the figures of the training say so (`computed_in`)."""
    ttt_steps: int = Field(default=3, ge=1, le=16)
    """Chained steps the draft is trained for."""
    num_layers: Literal[1] = 1
    norm_before_fc: bool = False
    norm_output: bool = False
    """Both need an engine of 2026 or later; off loads everywhere."""
    seed: int = 0
    num_threads: Annotated[int | None, OPERATIONAL] = Field(default=None, ge=1)
    """CPU threads; unset means all cores."""


class Evaluation(Section):
    """How acceptance is measured."""

    num_draft_tokens: int = Field(default=3, ge=1, le=16)
    """Tokens drafted per round (k)."""
    max_prompts: int = Field(default=64, ge=1)
    max_new_tokens: int = Field(default=96, ge=4)
    """Greedy continuation of the target per prompt."""
    min_acceptance_length: float = Field(default=1.02, ge=1)
    """A trained draft at or below this accepts nothing: something is joined wrongly, and the run fails."""


class Export(Section):
    """For whom the draft is written."""

    engines: tuple[Literal["sglang", "vllm"], ...] = ("sglang", "vllm")
