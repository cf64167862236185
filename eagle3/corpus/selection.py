"""Which samples the corpus holds, in which split and in which order: pure functions over sample ids and lengths.

Every choice is made by a hash of the seed and the sample id, never by a random stream or by the order in which samples
arrive. So the corpus does not depend on how its input was cut into shards, and one more sample changes little.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from eagle3.recipe import Corpus
from eagle3.records import Exactness

_RANK = {grade: rank for rank, grade in enumerate(Exactness)}
"""`Exactness` lists its grades best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What the choice depends on, for one sample."""

    sample_id: str
    dataset: str
    prompt_key: str
    """Equal for answers to the same messages, across replicas and datasets."""
    num_tokens: int
    num_completion_tokens: int
    exactness: Exactness


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Who is in the corpus."""

    train: Sequence[str]
    """Sample ids in corpus order."""
    validation: Sequence[str]
    left_out: Mapping[str, str]
    """sample_id -> reason."""


def select(candidates: Sequence[Candidate], settings: Corpus, dropped: Mapping[str, str], seed: int) -> Selection:
    """Choose, split and order the samples of a corpus.

    Args:
        candidates: All samples, in any order.
        settings: Limits of the recipe.
        dropped: sample_id -> audit rule that dropped it.
        seed: Of the cap, the split and the shuffle.

    Returns:
        Disjoint train and validation ids in shuffled order; both empty when nothing is left or nothing can be held out
        is decided by the caller.
    """
    left_out: dict[str, str] = {}
    kept: list[Candidate] = []
    for candidate in candidates:
        reason = _unfit(candidate, settings, dropped)
        if reason is None:
            kept.append(candidate)
        else:
            left_out[candidate.sample_id] = reason
    if settings.max_dataset_completion_tokens is not None:
        within = capped(kept, settings.max_dataset_completion_tokens, seed)
        left_out.update({each.sample_id: "dataset_cap" for each in kept if each.sample_id not in within})
        kept = [each for each in kept if each.sample_id in within]
    held_out = hold_out(kept, settings.validation_samples, seed)
    train = [each.sample_id for each in kept if each.sample_id not in held_out]
    validation = [each.sample_id for each in kept if each.sample_id in held_out]
    return Selection(
        train=[train[index] for index in row_order(train, seed)],
        validation=[validation[index] for index in row_order(validation, seed)],
        left_out=left_out,
    )


def _unfit(candidate: Candidate, settings: Corpus, dropped: Mapping[str, str]) -> str | None:
    rule = dropped.get(candidate.sample_id)
    if rule is not None:
        return f"audit:{rule}"
    if _RANK[candidate.exactness] > _RANK[Exactness(settings.min_exactness)]:
        return f"exactness:{candidate.exactness.value}"
    if candidate.num_tokens > settings.max_sample_tokens:
        return "too_long"
    return None


def capped(candidates: Iterable[Candidate], max_completion_tokens: int, seed: int) -> frozenset[str]:
    """Return the ids of a random part of each dataset whose completion tokens stay within the cap.

    Samples are taken in hash order and a dataset ends at the first that does not fit: going on with shorter ones
    would favour short answers.
    """
    taken: set[str] = set()
    spent: Counter[str] = Counter()
    full: set[str] = set()
    for candidate in sorted(candidates, key=_by_hash(seed, "cap")):
        dataset = candidate.dataset
        if dataset in full:
            continue
        if spent[dataset] + candidate.num_completion_tokens > max_completion_tokens:
            full.add(dataset)
            continue
        spent[dataset] += candidate.num_completion_tokens
        taken.add(candidate.sample_id)
    return frozenset(taken)


def hold_out(candidates: Sequence[Candidate], num_samples: int, seed: int) -> frozenset[str]:
    """Return the ids of the validation split.

    All answers to one prompt go to the same side, whatever dataset they came from. Datasets give in proportion to their
    size. The number is exact when answers come one per prompt; with replicas it may fall short by less than the
    answers of one prompt. At most half of the samples are held out, so that a small corpus still trains.
    """
    num_samples = min(num_samples, len(candidates) // 2)
    groups: defaultdict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        groups[candidate.prompt_key].append(candidate)
    quota = proportional_quota(Counter(each.dataset for each in candidates), num_samples)
    held_out: list[Candidate] = []
    waiting: list[list[Candidate]] = []
    for key in sorted(groups, key=lambda key: sample_hash(seed, "split", key)):
        group = groups[key]
        wanted = Counter(each.dataset for each in group)
        if all(quota[dataset] >= count for dataset, count in wanted.items()):
            quota = {dataset: share - wanted[dataset] for dataset, share in quota.items()}
            held_out += group
        else:
            waiting.append(group)
    for group in waiting:
        if len(held_out) + len(group) <= num_samples:
            held_out += group
    return frozenset(each.sample_id for each in held_out)


def proportional_quota(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Share `total` among datasets in proportion to their sizes, by largest remainder; ties go by name."""
    if total <= 0:
        return dict.fromkeys(sizes, 0)
    everything = sum(sizes.values())
    quota = {name: total * size // everything for name, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda name: (-(total * sizes[name] % everything), name))
    for name in by_remainder[: total - sum(quota.values())]:
        quota[name] += 1
    return quota


def row_order(sample_ids: Sequence[str], seed: int) -> list[int]:
    """Return the shuffled order of rows: a permutation of indices that depends on seed and ids, not on their order.

    Sorting by a hash is a shuffle that can be done in two passes over files of any size: first into buckets by the
    hash's leading digits, then inside each bucket.
    """
    return sorted(range(len(sample_ids)), key=lambda index: (sample_hash(seed, "row", sample_ids[index]), index))


def sample_hash(seed: int, purpose: str, name: str) -> bytes:
    """Return 16 pseudo-random bytes for a name; independent between purposes."""
    return hashlib.sha256(f"{seed}\0{purpose}\0{name}".encode()).digest()[:16]


def _by_hash(seed: int, purpose: str) -> Callable[[Candidate], bytes]:
    return lambda candidate: sample_hash(seed, purpose, candidate.sample_id)
