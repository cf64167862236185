"""How much money may lie in answers nobody looked at: the bound holds, and a bound below one request does not stop."""

import asyncio
from decimal import Decimal
from pathlib import Path

import pytest

from eagle3.errors import AuditFailedError
from eagle3.generation.journal_lines import Place
from eagle3.generation.watching import AnswerWatch
from eagle3.records import PromptRecord

PROMPT = PromptRecord(sample_id="s", dataset="d", prompt_id="p", messages=())
PLACE = Place(Path("journal"), 0, 0)
CENT = Decimal("0.01")


def watch_of(check=lambda answers: None, bound: Decimal = 10 * CENT) -> AnswerWatch:
    return AnswerWatch(check, bound, lambda prompt, place: None)


def test_requests_under_way_and_unseen_answers_share_the_bound():
    watch = watch_of()
    assert watch.admits(9 * CENT, CENT)
    assert not watch.admits(10 * CENT, CENT)
    watch.arrived(PROMPT, PLACE, 5 * CENT)
    assert watch.admits(4 * CENT, CENT)
    assert not watch.admits(5 * CENT, CENT)
    assert watch.peak_usd == 10 * CENT
    assert "0.05 USD in answers that were not cleared and at most 0.04 USD" in watch.risk(4 * CENT)


def test_one_request_alone_always_goes():
    watch = watch_of(bound=CENT)
    assert watch.admits(Decimal(0), 5 * CENT)
    assert not watch.admits(5 * CENT, 5 * CENT)


def test_nothing_is_bought_before_earlier_answers_were_looked_at():
    watch = watch_of()
    watch.known(PROMPT, PLACE)
    assert not watch.admits(Decimal(0), CENT)


def test_a_look_clears_what_it_saw():
    async def scene():
        seen, cleared = [], asyncio.Event()
        watch = watch_of(seen.append)
        watch.known(PROMPT, PLACE)
        watch.arrived(PROMPT, PLACE, 10 * CENT)
        assert not watch.admits(Decimal(0), CENT)  # held back, so the look does not wait for more answers
        task = asyncio.create_task(watch.look_forever(cleared.set, lambda error: None))
        await cleared.wait()
        task.cancel()
        assert [len(batch) for batch in seen] == [2]
        assert watch.unseen_usd == 0
        assert watch.admits(Decimal(0), CENT)
        assert (watch.num_seen, watch.num_looks) == (2, 1)

    asyncio.run(scene())


def test_an_objection_stops_and_clears_nothing():
    def object_to(answers):
        raise AuditFailedError("no")

    async def scene():
        errors = []
        watch = watch_of(object_to)
        watch.arrived(PROMPT, PLACE, 10 * CENT)
        watch.admits(Decimal(0), CENT)
        await watch.look_forever(lambda: pytest.fail("cleared"), errors.append)
        assert [str(error) for error in errors] == ["no"]
        assert watch.unseen_usd == 10 * CENT

    asyncio.run(scene())
