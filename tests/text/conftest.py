"""A file of numbered rows."""

import pytest

from tests.support.texts import rows


@pytest.fixture
def numbered(tmp_path):
    (path := tmp_path / "numbered.tsv").write_bytes(rows())
    return path
