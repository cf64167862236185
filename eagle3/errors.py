"""Every error this package raises on purpose.

    Eagle3Error
    ├── ConfigurationError          the set-up or the recipe is wrong; nothing was written         (exit 2)
    │   ├── RecipeError             a recipe field is missing, unknown or out of bounds
    │   ├── MissingExtraError       an optional dependency is not installed
    │   ├── PreflightError          a check before the run failed; nothing was spent
    │   ├── CredentialsError        no API key where the recipe says it is, or it was refused
    │   └── TargetError             target weights or tokenizer missing, damaged or unusable
    ├── InputError                  a prompt or answer file cannot be used as it is                (exit 2)
    ├── ArtifactError               something in the run directory disagrees with itself
    │   ├── RunLockedError          another process works in this run directory
    │   ├── StageDriftError         a sealed stage was made by another recipe
    │   ├── StageMissingError       a stage was asked for before the one it reads was sealed
    │   └── CorruptShardError       a file changed after it was sealed
    ├── ProviderError               an API call did not give an answer (see eagle3.providers)
    │   ├── RetryableProviderError      not billed; trying again may work                          (retryable)
    │   ├── AmbiguousProviderError      may have been billed; the reservation is kept              (retryable)
    │   └── RunRejectedError            no request will work until somebody changes something
    ├── PausedError                 stopped on purpose; a later run continues                      (exit 3)
    │   ├── CreditsExhaustedError   the account or key cannot pay; top it up and run again
    │   ├── BudgetReachedError      the recipe's budget cannot pay; raise it and run again
    │   └── StoppedError            a person asked to stop
    ├── TokenError
    │   ├── TokenizerError          tokenizer files are damaged, unknown or disagree with the grammar  (exit 2)
    │   ├── GrammarError            a response grammar is malformed or unknown                 (exit 2)
    │   ├── TemplateError           the chat template failed to render a prompt
    │   └── ReconstructionError     a completion cannot be turned into token ids
    ├── AuditFailedError            the audit's verdict forbids going on
    ├── GateError                   hidden states are not what their contract says
    ├── TrainingError               the trainer ended without its final checkpoint
    ├── EvaluationError             acceptance cannot be measured, or is that of an untrained draft
    └── ExportError                 a checkpoint cannot be served by the wanted engine

`retryable` says whether running the same call again can help; `exit_code` is what the command line returns.
Nobody parses messages. A message says what happened, what was expected and found, and what to do.
"""

from typing import ClassVar


class Eagle3Error(Exception):
    """Base of all errors raised on purpose."""

    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1


class ConfigurationError(Eagle3Error):
    """The set-up or the recipe is wrong; nothing was written."""

    exit_code = 2


class RecipeError(ConfigurationError):
    """A recipe field is missing, unknown or out of bounds."""


class MissingExtraError(ConfigurationError):
    """An optional dependency is not installed."""


class PreflightError(ConfigurationError):
    """A check before the run failed; nothing was spent."""


class CredentialsError(ConfigurationError):
    """No API key where the recipe says it is, or the key was refused."""


class TargetError(ConfigurationError):
    """Target weights or tokenizer are missing, damaged or unusable."""


class InputError(Eagle3Error):
    """A prompt or answer file cannot be used as it is."""

    exit_code = 2


class ArtifactError(Eagle3Error):
    """Something in the run directory disagrees with itself."""


class RunLockedError(ArtifactError):
    """Another process works in this run directory."""


class StageDriftError(ArtifactError):
    """A sealed stage was made by another recipe."""


class StageMissingError(ArtifactError):
    """A stage was asked for before the one it reads was sealed."""


class CorruptShardError(ArtifactError):
    """A file changed after it was sealed."""


class ProviderError(Eagle3Error):
    """An API call did not give an answer."""


class RetryableProviderError(ProviderError):
    """Not billed, and trying again may work."""

    retryable = True


class AmbiguousProviderError(ProviderError):
    """The request may have been billed although no complete answer came back."""

    retryable = True


class RunRejectedError(ProviderError):
    """No request will work until somebody changes the set-up."""


class PausedError(Eagle3Error):
    """Stopped on purpose with everything kept; a later run continues."""

    exit_code = 3


class CreditsExhaustedError(PausedError):
    """The account or the key cannot pay for the next request."""


class BudgetReachedError(PausedError):
    """The recipe's budget cannot pay for the next request."""


class StoppedError(PausedError):
    """A person or the operating system asked to stop."""


class TokenError(Eagle3Error):
    """Base of errors about text and token ids."""


class TokenizerError(TokenError):
    """Tokenizer files are damaged, unknown or disagree with the grammar."""

    exit_code = 2


class GrammarError(TokenError):
    """A response grammar is malformed or unknown."""

    exit_code = 2


class TemplateError(TokenError):
    """The chat template failed to render a prompt."""


class ReconstructionError(TokenError):
    """A completion cannot be turned into token ids."""


class AuditFailedError(Eagle3Error):
    """The audit's verdict forbids going on."""


class GateError(Eagle3Error):
    """Hidden states are not what their contract says."""


class TrainingError(Eagle3Error):
    """The trainer ended without its final checkpoint."""


class EvaluationError(Eagle3Error):
    """Acceptance cannot be measured, or it is that of an untrained draft."""


class ExportError(Eagle3Error):
    """A checkpoint cannot be served by the wanted engine."""
