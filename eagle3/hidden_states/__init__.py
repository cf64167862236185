"""Stage 6: hidden states of the target on the corpus, in the layout that the `speculators` trainer reads.

`contract` says what is stored, `transformers_backend` computes it, `store` keeps it, `gates` prove it, `driver` makes
the stage. torch and transformers are imported when a backend is opened, never by importing this package.
"""

from eagle3.hidden_states.driver import claim_of_groups, extract_group, extract_hidden_states
from eagle3.hidden_states.groups import Division, GroupRecord

__all__ = ["Division", "GroupRecord", "claim_of_groups", "extract_group", "extract_hidden_states"]
