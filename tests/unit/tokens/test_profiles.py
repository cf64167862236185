"""Profiles: habits are learned from counts alone, and what the counts leave open is said."""

import json
from dataclasses import replace

import pytest

from eagle3.errors import CorruptShardError
from eagle3.tokens.profiles import fit_profile, habits_of, profile_from_json, read_profiles, write_profiles

WORDS = ["42", "answer", "Hello", "7", "list of words", "Rome", "The user", "again", "3", "question"]


@pytest.fixture
def answers(completion, truth):
    """Answers of a provider with given habits.

    Every third is cut and every fifth has no reasoning, so that billing and spaces can be told apart.
    """

    def make(count, *, spaced=False, compact=False, end_billed=True, mode="thinking", tools=False):
        made = []
        for number in range(count):
            word = WORDS[number % len(WORDS)]
            is_cut = number % 3 == 0 and not tools
            calls = (("look", '{"city": "Rome", "days": 3}'),) if tools else ()
            finish = "length" if is_cut else "tool_calls" if tools else "stop"
            reasoning = None if mode == "plain" or number % 5 == 0 else f"{word} number {number}"
            clean = completion(f"{word}, {number}.", reasoning=reasoning, calls=calls, finish=finish, number=number)
            billed = len(truth(clean, mode)) - (not end_billed and not is_cut)
            seen = replace(clean, usage=clean.usage._replace(completion_tokens=billed))
            if spaced:
                space = "" if mode == "plain" else " "
                seen = replace(seen, reasoning=reasoning and f" {reasoning} ", content=f"{space}{clean.content}")
            if compact:
                seen = replace(
                    seen,
                    tool_calls=tuple(
                        replace(call, arguments=call.arguments.replace(" ", "")) for call in seen.tool_calls
                    ),
                )
            made.append(seen)
        return made

    return make


@pytest.fixture
def fit(family):
    def run(completions, mode="thinking", min_samples=20):
        return fit_profile(completions, family.grammar, family.tokenizer, mode, min_samples=min_samples)

    return run


def test_faithful_provider(fit, answers):
    profile = fit(answers(60))
    assert profile.num_exact == profile.num_samples == 60
    assert profile.deltas == {0: 60}
    assert profile.habits == habits_of_default(profile)
    assert profile.billing_is_identified
    assert all(axis.identified for axis in profile.axes.values())


def habits_of_default(profile):
    return type(profile.habits)()


def test_spaces_are_found_and_told_from_billing(fit, answers):
    profile = fit(answers(120, spaced=True))
    assert (profile.habits.head_space, profile.habits.tail_space) == ("strip", "strip")
    assert profile.habits.end_billed
    assert profile.num_exact == 120
    assert profile.axes["head_space"].identified
    assert profile.billing_is_identified


def test_unbilled_end_is_found(fit, answers):
    profile = fit(answers(60, end_billed=False))
    assert not profile.habits.end_billed
    assert profile.num_exact == 60
    assert profile.axes["end_billed"].identified
    assert profile.axes["end_billed"].discriminating >= 20


def test_close_that_is_not_billed_hides_a_space_before_it(fit, answers):
    """When every answer has reasoning, the count cannot tell the two apart, and says so."""
    seen = [answer for answer in answers(60, spaced=True) if answer.reasoning]
    profile = fit(seen)
    assert profile.num_exact == len(seen)
    assert not profile.axes["close_billed"].identified
    assert not profile.axes["tail_space"].identified


def test_compact_arguments_are_found(fit, answers):
    profile = fit(answers(30, compact=True, tools=True))
    assert profile.habits.args_style == "spaced"
    assert profile.axes["args_style"].identified
    assert profile.num_exact == 30


def test_too_few_answers_identify_nothing(fit, answers):
    profile = fit(answers(9, end_billed=False))
    assert not profile.habits.end_billed
    assert not profile.axes["end_billed"].identified
    assert not profile.billing_is_identified
    assert fit(answers(18, end_billed=False), min_samples=5).axes["end_billed"].identified


def test_habits_that_hide_one_another_stay_open(fit, answers):
    """One artifact space before the end looks like an end that is not billed when no answer is cut."""
    seen = [
        replace(answer, content=f"{answer.content} ")
        for answer in answers(60, mode="plain")
        if answer.finish_reason == "stop"
    ]
    profile = fit(seen, mode="plain", min_samples=10)
    assert profile.num_exact == len(seen)
    assert not profile.axes["end_billed"].identified
    assert not profile.axes["tail_space"].identified


def test_change_of_habit_in_mid_run_shows_in_the_deltas(fit, answers):
    profile = fit([*answers(40), *answers(30, end_billed=False)])
    assert profile.habits.end_billed
    assert set(profile.deltas) == {0, 1}
    assert profile.deltas[1] == 20
    assert not profile.axes["end_billed"].identified


def test_answers_without_a_count_tell_nothing(fit, completion):
    profile = fit([completion("Hi", reasoning="Hm")])
    assert profile.num_samples == 0
    assert not profile.billing_is_identified


def test_default_habits_come_first(family):
    combinations = habits_of(family.grammar, "thinking")
    assert combinations[0] == type(combinations[0])()
    assert len(combinations) == len(set(combinations)) == 72
    assert len(habits_of(family.grammar, "plain")) == 36


def test_profiles_survive_json(fit, answers, tmp_path):
    profile = fit(answers(9, spaced=True))
    assert profile_from_json(json.loads(json.dumps(profile.to_json()))) == profile
    write_profiles(tmp_path / "profiles.json", [profile])
    assert read_profiles(tmp_path / "profiles.json") == [profile]


@pytest.mark.parametrize("text", ["{", "{}", '[{"provider": 1}]'])
def test_damaged_profiles(tmp_path, text):
    (tmp_path / "profiles.json").write_text(text)
    with pytest.raises(CorruptShardError, match=r"profiles\.json"):
        read_profiles(tmp_path / "profiles.json")
