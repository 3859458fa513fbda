"""What all tests of text need: pyarrow, and a file of numbered rows."""

import pytest

from tests.support.texts import rows


@pytest.fixture(autouse=True)
def pyarrow():
    return pytest.importorskip("pyarrow.csv", reason="comes with the extra text")


@pytest.fixture
def numbered(tmp_path):
    (path := tmp_path / "numbered.tsv").write_bytes(rows())
    return path
