"""Every warning has a section that explains it, and says so; the command prints it."""

import ast
import logging
import pickle
import re
import sys
import traceback
from pathlib import Path

import pytest

import stocache
from stocache.tools.cli.symptoms import symptoms

PACKAGE = Path(stocache.__file__).parent
PARTS = "Seen", "Cause", "Remedy", "Check"


def text_of(node):
    """The text that an expression writes, with x for what is not constant."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text_of, node.values))
    return str(node.value) if isinstance(node, ast.Constant) else "x"


def calls():
    """The functions that are called with a text, the texts, and the places."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                yield ast.unparse(node.func), text_of(node.args[0]), f"{path.relative_to(PACKAGE)}:{node.lineno}"


CALLS = [*calls()]
WARNINGS = [pytest.param(text, id=place) for name, text, place in CALLS if name == "logger.warning" and text != "x"]
ERRORS = [cls.__name__ for cls in vars(stocache.errors).values() if isinstance(cls, type) and cls is not stocache.StocacheError]


@pytest.mark.parametrize("text", WARNINGS)
def test_each_warning_has_one_section(text):
    if text == "the disk cache %s %s":  # of two texts
        text %= "", "takes no more samples: "
    message = re.sub(r"%[-.\d]*[a-z]", "x", text.replace("%%", "%"))
    assert len([each for each in symptoms() if each.code[0] == "W" and each.pattern and each.pattern.search(message)]) == 1


@pytest.mark.parametrize("error", ERRORS)
def test_each_class_of_errors_has_a_section_with_messages_that_it_has(error):
    (section,) = [each for each in symptoms() if each.code == error]
    said = "\n".join(text for _, text, _ in CALLS)
    for pattern in section.pattern.pattern.split("|"):
        assert re.search(pattern.replace(".*", ".{,99}"), said), pattern


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have notes from Python 3.11 on")
@pytest.mark.parametrize("error", ERRORS)
def test_a_traceback_ends_with_the_address_of_the_error(error):
    raised = getattr(stocache.errors, error)("it cannot be")
    for each in (raised, pickle.loads(pickle.dumps(raised))):
        assert traceback.format_exception_only(each)[-1] == f"(stocache explain {error})\n"
        assert str(each) == "it cannot be"


def test_sections_are_numbered_and_whole():
    codes = [each.code for each in symptoms()]
    assert codes == [f"S{number:02}" for number in range(1, 10)] + [f"W{number:02}" for number in range(1, 25)] + ERRORS
    for each in symptoms():
        assert re.findall(r"^- \*\*(\w+)\*\*: ", each.text, re.MULTILINE) == [*PARTS]
        assert (each.pattern is None) == each.code.startswith("S0")


def test_a_warning_ends_with_its_address_and_other_records_do_not(caplog):
    caplog.set_level("INFO", "stocache")
    logger = logging.getLogger("stocache")
    for level in (logging.WARNING, logging.INFO):
        logger.log(level, "cache stops growing at %s of %s: %d %%.", 1, 2, 3)
    logger.warning("of another %s", "library")
    assert caplog.messages == [
        "cache stops growing at 1 of 2: 3 %. (stocache explain W08)",
        "cache stops growing at 1 of 2: 3 %.",
        "of another library",
    ]


def test_the_command_prints_a_section_a_class_or_the_list(run):
    assert run("explain", "w08").stdout.startswith("W08: the cache stops growing\n\n- **Seen**: ")
    assert run("explain", "limiterror").stdout.startswith("LimitError: a limit or an option")
    assert run("explain", "the cache is closed. Make a new one, or close it later.").stdout.startswith("ClosedError: ")
    listed = run("explain").stdout.splitlines()
    assert [line.split(None, 1) for line in listed] == [[each.code, each.title] for each in symptoms()]
