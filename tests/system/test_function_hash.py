"""Texts that tell functions apart, and are the same in every process."""

import functools

from stocache.datasets.transforms.pipelines import step_text
from stocache.system.hashing import callable_text
from stocache.text.formats import CustomFormat


def made(scale, words=frozenset({"a", "b", "c"})):
    return lambda fields, limit=3: [scale * float(field) for field in fields if field not in {"x", "y"} and field in words]


def recursive():
    def inner(value):
        return inner(value[1:]) if value else value

    return inner


class Parse:
    def __call__(self, fields):
        return fields


def lambdas():
    return [lambda x: x[0], lambda x: x[1], lambda x: len(x), lambda x, n=1: x, made(1), made(2), made(2, ("a",))]


def test_lambdas_and_partials_have_texts_of_their_own():
    for text in (callable_text, step_text, lambda function: CustomFormat(function).identity):
        assert len(set(map(text, lambdas()))) == 7
    partials = [functools.partial(made, 1), functools.partial(made, 2), functools.partial(recursive)]
    assert len(set(map(callable_text, partials))) == 3
    assert list({0, 8}) != list({8, 0})  # as sets of texts differ from process to process
    for make in (*(lambda at=at: lambdas()[at] for at in range(7)), recursive, lambda: made(object())):  # at other addresses
        assert callable_text(make()) == callable_text(make())
    assert callable_text(made(1, {0, 8})) == callable_text(made(1, {8, 0}))


def test_a_function_of_a_module_is_its_name_and_an_object_its_class():
    for function, text in ((made, "made"), (Parse(), "Parse"), (Parse, "Parse"), (Parse().__call__, "__call__")):
        assert callable_text(function).startswith(f"{__name__}.")
        assert callable_text(function).endswith(text)
