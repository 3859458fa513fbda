"""Every warning has a section that explains it, and says so; the command prints it."""

import ast
import logging
import re
from pathlib import Path

import pytest

import stocache
from stocache.cli.symptoms import symptom_of, symptoms

PACKAGE = Path(stocache.__file__).parent
PARTS = "Seen", "Cause", "Remedy", "Check"


def warnings():
    """The format strings of all warnings on the logger, with the place of each."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "logger.warning"
                and isinstance(node.args[0], ast.Constant)
            ):
                yield pytest.param(node.args[0].value, id=f"{path.relative_to(PACKAGE)}:{node.lineno}")


@pytest.mark.parametrize("text", [*warnings()])
def test_each_warning_has_one_section(text):
    if text == "the disk cache %s %s":  # of two texts
        text %= "", "takes no more samples: "
    message = re.sub(r"%[-.\d]*[a-z]", "x", text.replace("%%", "%"))
    assert len([each for each in symptoms() if each.pattern is not None and each.pattern.search(message)]) == 1


def test_sections_are_numbered_and_whole():
    codes = [each.code for each in symptoms()]
    assert codes == [f"S{number:02}" for number in range(1, 9)] + [f"W{number:02}" for number in range(1, len(codes) - 7)]
    for each in symptoms():
        assert re.findall(r"^- \*\*(\w+)\*\*: ", each.text, re.MULTILINE) == [*PARTS]
        assert (each.pattern is not None) == each.code.startswith("W")


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


def test_a_page_that_was_not_installed_explains_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("stocache.cli.symptoms._PAGE", tmp_path / "none")
    symptoms.cache_clear()
    try:
        assert symptoms() == ()
        assert symptom_of("cache stops growing at 1") is None
    finally:
        symptoms.cache_clear()


def test_the_command_prints_a_section_a_class_or_the_list(run):
    assert run("explain", "w08").stdout.startswith("W08: the cache stops growing\n\n- **Seen**: ")
    assert run("explain", "LimitError").stdout == f"{stocache.LimitError.__doc__}\n"
    listed = run("explain").stdout.splitlines()
    assert listed[:2] == ["S01  the second epoch is not faster", "S02  the GPU is at 30 %"]
    assert len(listed) == len(symptoms())


@pytest.mark.parametrize(("code", "near"), [
    ("W88", "W08: the cache stops growing"), ("bus error", "S06: "), ("StocacheMistake", "S01: "), ("", "S01: "),
])  # fmt: skip
def test_an_unknown_code_is_answered_with_those_near_it(code, near, run):
    result = run("explain", code)
    assert (result.exit_code, f"{code!r} is unknown. Near it:" in result.stderr, near in result.stderr) == (2, True, True)
