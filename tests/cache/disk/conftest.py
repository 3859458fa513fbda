"""Fixtures for the folders of disk caches."""

import pytest

from tests.support.disks import loaded, open_disk


@pytest.fixture
def warnings(caplog):
    """Return a function that returns the warnings given since its last call."""

    def since():
        found = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        caplog.clear()
        return found

    return since


@pytest.fixture(params=["rows", "zstd"])
def kind(request):
    if request.param == "zstd":
        pytest.importorskip("zstandard", reason="zstandard is not installed")
    return request.param


@pytest.fixture
def filled(request, tmp_path):
    """A folder with all samples: rows, or of the kind that the test is for."""
    kind = request.getfixturevalue("kind") if "kind" in request.fixturenames else "rows"
    with open_disk(kind, tmp_path / "disk") as cache:
        loaded(cache, kind)
    return tmp_path / "disk"
