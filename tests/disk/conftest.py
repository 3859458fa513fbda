"""Fixtures for the folders of disk caches."""

import pytest


@pytest.fixture
def warnings(caplog):
    """Return the warnings given since the last call."""

    def since():
        found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        caplog.clear()
        return found

    return since
