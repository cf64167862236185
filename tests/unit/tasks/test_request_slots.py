import pytest

from eagle3.errors import ConfigurationError
from tasks.request_slots import require_slots


def test_a_run_that_no_limit_can_hold_is_refused_instead_of_waiting_for_ever() -> None:
    require_slots(2000, 2000)
    with pytest.raises(ConfigurationError, match="has 2000 slots"):
        require_slots(2001, 2000)
