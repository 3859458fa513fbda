"""Texts that tell functions apart, and are the same in every process."""

import functools
import subprocess
import sys

import pytest

from stocache.system.function_hash import callable_text
from stocache.text.formats import CustomFormat
from stocache.transforms.pipelines import step_text

CODE = """
def made(scale, words=frozenset({"a", "b", "c"})):
    return lambda fields, limit=3: [scale * float(field) for field in fields if field not in {"x", "y", "z"} and field in words]
"""


def made(scale, words=("a",)):
    return lambda fields: [scale * float(field) for field in fields if field in words]


def recursive():
    def inner(value):
        return inner(value[1:]) if value else value

    return inner


class Parse:
    def __call__(self, fields):
        return fields


def lambdas():
    return [
        lambda fields: fields[0],
        lambda fields: fields[1],
        lambda fields: len(fields),
        lambda fields, n=1: fields,
        made(1),
        made(2),
    ]


def test_lambdas_are_told_apart():
    assert len({callable_text(function) for function in lambdas()}) == 6
    assert [callable_text(function) for function in lambdas()] == [callable_text(function) for function in lambdas()]
    assert len({step_text(function) for function in lambdas()}) == 6
    partials = [functools.partial(made, 1), functools.partial(made, 2), functools.partial(recursive)]
    assert len({callable_text(function) for function in partials}) == 3


@pytest.mark.parametrize(
    ("function", "text"), [(made, "made"), (Parse(), "Parse"), (Parse, "Parse"), (Parse().__call__, "__call__")]
)
def test_a_function_of_a_module_is_its_name(function, text):
    assert callable_text(function).startswith(f"{__name__}.")
    assert callable_text(function).endswith(text)
    assert callable_text(recursive()) == callable_text(recursive())


@pytest.mark.slow
def test_a_text_is_the_same_in_every_process():
    code = CODE + "from stocache.system.function_hash import callable_text\nprint(callable_text(made(2.5)))"
    options = {"capture_output": True, "text": True, "check": True}
    texts = {
        subprocess.run([sys.executable, "-c", code], **options, env={"PYTHONPATH": ":".join(sys.path)}).stdout for _ in range(3)
    }
    assert len(texts) == 1


def test_loaders_with_other_parse_functions_have_other_identities():
    assert len({CustomFormat(function).identity for function in lambdas()}) == 6
