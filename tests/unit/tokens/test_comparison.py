"""Providers of one model against each other: what bills alike is told apart by who sends spaces, and only then."""

from dataclasses import replace

import pytest

from eagle3.records import Exactness, loss_mask
from eagle3.tokens.comparison import EdgeSpaces, count_spaces, fit_providers, settled_axes
from eagle3.tokens.layout import Edge
from eagle3.tokens.reconstruct import reconstruct

WORDS = ["answer", "Hello", "list of words", "Rome", "The user", "again", "question"]


@pytest.fixture
def answers(completion, truth):
    """Stopped answers in plain mode; `artifact` puts a space before the end that the model did not write."""

    def make(provider, count, *, artifact=False, own_space=False, end_billed=True, model="acme/tiny"):
        made = []
        for number in range(count):
            text = f"{WORDS[number % len(WORDS)]}, {number}." + (" " if own_space else "")
            clean = completion(text, number=number)
            billed = len(truth(clean, "plain")) - (not end_billed)
            usage = clean.usage._replace(completion_tokens=billed)
            content = f"{text} " if artifact else text
            made.append(replace(clean, provider=provider, model=model, content=content, usage=usage))
        return made

    return make


@pytest.fixture
def fit(family):
    def run(*groups, min_samples=20):
        by_key = {(group[0].provider, group[0].model): group for group in groups}
        return fit_providers(by_key, family.grammar, family.tokenizer, "plain", min_samples=min_samples)

    return run


def test_space_that_others_never_send_is_the_providers(fit, answers, family, truth):
    plain, spaced = answers("Plain", 60), answers("Spaced", 60, artifact=True)
    profile = fit(plain, spaced)["Spaced", "acme/tiny"]
    assert (profile.habits.tail_space, profile.habits.end_billed) == ("strip_all", True)
    assert profile.axes["tail_space"].identified
    assert profile.billing_is_identified
    assert profile.compared == ("tail_space",)
    for seen, clean in zip(spaced, plain, strict=True):
        sample = reconstruct(seen, [1], family.grammar, family.tokenizer, profile, mode="plain").sample
        assert sample.exactness is Exactness.COUNT_VERIFIED
        assert list(sample.input_ids[1:]) == truth(clean, "plain")


def test_a_single_provider_stays_ambiguous(fit, answers, family):
    spaced = answers("Spaced", 60, artifact=True)
    profile = fit(spaced)["Spaced", "acme/tiny"]
    assert not profile.axes["tail_space"].identified
    assert not profile.axes["end_billed"].identified
    assert profile.compared == ()
    sample = reconstruct(spaced[0], [1], family.grammar, family.tokenizer, profile, mode="plain").sample
    assert sample.exactness is Exactness.COUNT_AMBIGUOUS
    # The end id follows an id that may not be there: it carries no loss either.
    assert not loss_mask(sample)[-1]


def test_a_model_that_ends_with_spaces_settles_nothing(fit, answers):
    """Both send the space, so it is the model's; that one of them does not bill the end stays possible."""
    profiles = fit(answers("Plain", 60, own_space=True), answers("Other", 60, own_space=True, end_billed=False))
    assert all(profile.compared == () for profile in profiles.values())
    assert profiles["Plain", "acme/tiny"].habits.tail_space == "keep"
    assert not profiles["Other", "acme/tiny"].axes["end_billed"].identified


@pytest.mark.parametrize("count", [5, 19])
def test_few_answers_of_others_settle_nothing(fit, answers, count):
    profiles = fit(answers("Plain", count), answers("Spaced", 60, artifact=True))
    assert profiles["Spaced", "acme/tiny"].compared == ()


def test_another_model_is_no_witness(fit, answers):
    profiles = fit(answers("Plain", 60, model="acme/other"), answers("Spaced", 60, artifact=True))
    assert profiles["Spaced", "acme/tiny"].compared == ()


def test_a_provider_whose_counts_do_not_fit_is_no_witness(fit, answers):
    """Texts that do not explain what was billed were changed on the way, so their edges prove nothing."""
    changed = [
        replace(answer, usage=answer.usage._replace(completion_tokens=answer.usage.completion_tokens + 5))
        for answer in answers("Plain", 60)
    ]
    assert fit(changed, answers("Spaced", 60, artifact=True))["Spaced", "acme/tiny"].compared == ()


def test_evidence_that_makes_the_counts_fit_worse_is_refused(fit, answers):
    """The space is billed: the model wrote it, although through the other provider it never does."""
    profile = fit(answers("Plain", 60), answers("Spaced", 60, own_space=True))["Spaced", "acme/tiny"]
    assert profile.compared == ()
    assert profile.habits.tail_space == "keep"


def spaces(edge, texts, spaced):
    return EdgeSpaces({edge: texts}, {edge: spaced})


@pytest.mark.parametrize(
    ("edge", "own", "others", "settled"),
    [
        (Edge.HEAD, (40, 40), (40, 0), {"head_space": {"strip"}}),
        (Edge.TAIL, (40, 39), (40, 1), {"tail_space": {"strip", "strip_all"}}),
        (Edge.END, (40, 40), (40, 2), {"tail_space": {"strip_all"}}),
        (Edge.END, (40, 40), (40, 3), {}),
        (Edge.END, (40, 37), (40, 0), {}),
        (Edge.END, (19, 19), (40, 0), {}),
        (Edge.END, (40, 40), (19, 0), {}),
        (Edge.HEAD, (40, 0), (40, 40), {}),
    ],
)
def test_settled_axes(edge, own, others, settled):
    assert settled_axes(spaces(edge, *own), [spaces(edge, *others)], min_samples=20) == settled


def test_edges_are_counted_where_texts_touch_control_tokens(family, completion):
    seen = completion(" Hi ", reasoning=" Hm", calls=(("look", "{}"),), finish="tool_calls")
    counted = count_spaces([seen, completion("Hi ", finish="length")], family.grammar, "thinking")
    assert counted.num_texts == {Edge.HEAD: 3, Edge.TAIL: 2}
    assert counted.num_spaced == {Edge.HEAD: 2, Edge.TAIL: 1}
    assert count_spaces([completion("Hi", reasoning="Hm")], family.grammar, "plain").num_texts == {}
