"""What the tests of the engine share."""

import pytest

from eagle3.generation import attempts as attempts_module
from eagle3.generation import engine as engine_module
from eagle3.generation import lost as lost_module
from eagle3.generation import retrying as retrying_module
from eagle3.generation import settlement as settlement_module


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr(lost_module, "LOOK_S", 0.001)
    monkeypatch.setattr(attempts_module, "NOTE_S", 0.001)
    monkeypatch.setattr(retrying_module, "FIRST_BACKOFF_S", 0.0)
    monkeypatch.setattr(engine_module, "PUMP_S", 0.001)
    monkeypatch.setattr(settlement_module, "LOOKUP_WAITS_S", (0.0,))
