"""A provider that changes in mid-run, as the scenario says."""

from eagle3.simulator.scenario import Provider


def test_habits_change_after_so_many_answers_and_the_rest_stays():
    provider = Provider.model_validate(
        {
            "name": "Acme",
            "tag": "acme",
            "prompt_usd_per_mtok": 1,
            "completion_usd_per_mtok": 1,
            "tool_arguments": "compact",
            "change": {"after_answers": 3, "end_token_billed": False, "model_suffix": "new"},
        }
    )
    assert provider.after(2).end_token_billed
    assert provider.model_suffix(2) is None
    assert not provider.after(3).end_token_billed
    assert provider.after(3).tool_arguments == "compact"
    assert provider.model_suffix(3) == "new"
