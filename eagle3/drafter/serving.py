"""The texts beside a bundle: how to serve it, and what it is."""

import json
from collections.abc import Mapping
from typing import Any

_SGLANG = """\
#!/usr/bin/env bash
# Serves the target with this draft. Usage: serve_sglang.sh TARGET [further arguments of the server]
# The target must have the weights and the quantization that the hidden states were taken from.
set -euo pipefail
target="${{1:?usage: serve_sglang.sh TARGET [server arguments]}}"
shift
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
exec python -m sglang.launch_server --model-path "$target" \\
  --speculative-algorithm EAGLE3 --speculative-draft-model-path "$here" \\
  --speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens} "$@"
"""

_VLLM = """\
#!/usr/bin/env bash
# Serves the target with this draft. Usage: serve_vllm.sh TARGET [further arguments of the server]
# The target must have the weights and the quantization that the hidden states were taken from.
set -euo pipefail
target="${{1:?usage: serve_vllm.sh TARGET [server arguments]}}"
shift
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
exec vllm serve "$target" \\
  --speculative-config \\
  "{{\\"model\\": \\"$here\\", \\"method\\": \\"eagle3\\", \\"num_speculative_tokens\\": {steps}}}" "$@"
"""


def serve_script(engine: str, num_draft_tokens: int) -> str:
    """Return the shell script that serves a target with a bundle of this engine.

    SGLang counts the target's own token among the draft tokens, hence one more.
    """
    template = _SGLANG if engine == "sglang" else _VLLM
    return template.format(steps=num_draft_tokens, tokens=num_draft_tokens + 1)


def bundle_readme(
    engine: str, target: str, config: Mapping[str, Any], evaluation: Mapping[str, Any], num_draft_tokens: int
) -> str:
    """Return the page that lies beside a bundle.

    Args:
        engine: `sglang` or `vllm`.
        target: Name of the target in the recipe.
        config: The bundle's config.json.
        evaluation: Stats of the evaluation; empty when the draft was not evaluated.
        num_draft_tokens: Tokens drafted per round in serving and evaluation.
    """
    ids = config.get("eagle_config", config)["eagle_aux_hidden_state_layer_ids"]
    convention = f"{'output' if engine == 'sglang' else 'input'} of these layers, counted from 0"
    lines = [
        f"# EAGLE-3 draft of {target} for {engine}",
        "",
        "| | |",
        "|---|---|",
        f"| target | {target} |",
        f"| captured layers | {json.dumps(ids)} ({convention}) |",
        f"| draft vocabulary | {config['draft_vocab_size']} ids |",
        f"| tokens drafted per round | {num_draft_tokens} |",
    ]
    if evaluation:
        lines += [
            f"| acceptance length | {evaluation['acceptance_length_trained']} ± {evaluation['standard_error']} |",
            f"| measured over | {evaluation['rounds']} rounds |",
            f"| the same, untrained draft | {evaluation['acceptance_length_untrained']} |",
        ]
    lines += [
        "",
        "Acceptance length is tokens per forward pass of the target, greedy, on held-out prompts.",
        "",
        f"Serve it: `bash serve_{engine}.sh PATH_OF_TARGET`.",
        "",
    ]
    return "\n".join(lines)
