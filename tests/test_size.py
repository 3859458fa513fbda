"""A budget of code lines for each room: the table on the page of the package."""

import pytest

from tests.support.house import PACKAGE, code_lines, rooms

STEP = 50  # budgets are multiples of it
LONG = 450  # lines of a module


@pytest.mark.parametrize("room", rooms(), ids=lambda room: room.names[0])
def test_a_room_keeps_to_its_budget_and_a_cut_lowers_it(room):
    lines = sum(map(code_lines, room.files))
    assert lines <= room.budget, f"{lines} lines: cut as much as you add"
    assert room.budget == -(-lines // STEP) * STEP, f"{lines} lines: write the lower budget into stocache/README.md"
    assert abs(room.lines - lines) < STEP, f"{lines} lines: write them into stocache/README.md"


def test_each_file_of_the_package_belongs_to_a_room():
    counted = {path for room in rooms() for path in room.files if path.is_relative_to(PACKAGE)}
    assert {*PACKAGE.rglob("*.py")} - counted == {PACKAGE / "__init__.py", PACKAGE / "__main__.py"}


def test_a_module_has_no_rulers_and_a_long_one_says_why_it_is_one():
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        assert not [line for line in text.splitlines() if line.lstrip().startswith("# ---")], f"{path}: two modules, or none"
        first = text.partition("\n\n")[0]  # of the docstring
        assert text.count("\n") <= LONG or "One module, because" in " ".join(first.split()), path
