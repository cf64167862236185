"""Fixtures for every test: real data when it is at hand, and a loud skip when it is not."""

import os
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def project() -> Path:
    return PROJECT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real tokenizers and recorded replies that are not part of the project: EAGLE3_SHARED_DATA, or ../shared/data."""
    place = Path(os.environ.get("EAGLE3_SHARED_DATA", PROJECT.parent / "shared" / "data"))
    if not place.is_dir():
        pytest.skip("real tokenizers and recordings are not at hand: set EAGLE3_SHARED_DATA to their folder")
    return place
