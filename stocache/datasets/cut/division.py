"""Divide a function in two: what runs before the cache, and what runs each time after it.

NOTE [ Divided functions ]
    The first half ends before the first statement that draws. It returns the variables that the second half reads, its *state*,
    or the sample itself, if it returned before. If that statement is an ``if``, both branches are divided, and the test
    is kept. If it calls a function in Python, that function is divided as well; if it calls a known pipeline of
    transforms, the deterministic steps at its beginning run in the first half, the others in the second.

    Later statements that depend on nothing drawn are *hoisted* into the first half: they read no variable that a statement
    before them binds or may change, bind none that it reads, and nothing in between returns or raises.

    What a cache cannot hold is not in the state, but made again: imports, functions, and what the dataset holds
    (``reader = self.readers[name]``). So is what belongs to a worker (``generator = thread_safe_generator()``): one worker may
    cache a sample, and another read it. Arguments that only name something (``self.size``) are evaluated again, too.
"""

import ast
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from stocache.datasets.cut.source import (
    PREFIX,
    CannotCut,
    SourceCode,
    asks_worker,
    build,
    is_call,
    is_path,
    number_of,
    parts_of_call,
    position_of,
    root_of,
    statements,
)  # fmt: skip

STATE_ARGUMENT = f"{PREFIX}state"
RETURNED = "return"
"""The key of the sample, in a state of which nothing is left to do. No variable has this name."""

_ENDS = ast.Return, ast.Raise, ast.Break, ast.Continue


class Head(NamedTuple):
    """How many steps of a known pipeline run before the cache, as text."""

    steps: tuple[str, ...]


@dataclass(frozen=True)
class Division:
    """Where a function is divided; see NOTE [ Divided functions ].

    Attributes:
        function: the `SourceCode.identity` of the function.
        drew: the numbers of the statements that draw.
        inner: how what a statement calls is divided, by its number.
        at: the number of an earlier statement, before which the first half ends; None for the first that draws.
        again: variables that are made again.
        hoists: whether later statements are hoisted.
    """

    function: str
    drew: frozenset[int] = frozenset()
    inner: "Mapping[int, Division | Head]" = field(default_factory=dict)
    at: int | None = None
    again: frozenset[str] = frozenset()
    hoists: bool = True

    @property
    def places(self) -> set[int]:
        """The numbers of the statements that draw, or call what is divided."""
        return {*self.drew, *self.inner}

    def straight(self) -> "Division":
        """Return the division without hoisting."""
        inner = {number: its.straight() if isinstance(its, Division) else its for number, its in self.inner.items()}
        return replace(self, inner=inner, hoists=False)


class Given(NamedTuple):
    """Which arguments of a call are evaluated again after the cache.

    Attributes:
        arguments, keywords: for each position or name, whether it is.
        is_item: whether the call is an item that is taken of an object.
    """

    arguments: tuple[bool, ...]
    keywords: Mapping[str, bool]
    is_item: bool

    @property
    def all(self) -> bool:
        """Whether all are."""
        return all(self.arguments) and all(self.keywords.values())

    def parameters(self, source: SourceCode, owners: int) -> set[str]:
        """Return the parameters of the called function that it gets again.

        ``owners``: how many it gets besides the arguments: the object that a method belongs to.
        """
        if self.all:
            return source.parameters
        found = inspect.signature(source.function).bind(*[True] * owners, *self.arguments, **self.keywords).arguments
        more = {name: its.values() if isinstance(its, dict) else its for name, its in found.items() if type(its) is not bool}
        return source.parameters - {name for name, its in found.items() if not all(more.get(name, (its,)))}


class Halves(NamedTuple):
    """The two halves of a function.

    Attributes:
        first, second: the functions.
        before, after: the numbers of the lines of each.
        works: whether the first half calls something.
        text: the first half.
    """

    first: Any
    second: Any
    before: tuple[int, ...]
    after: tuple[int, ...]
    works: bool
    text: str


def halves_of(
    source: SourceCode,
    division: Division,
    enter: Callable[[int, Given], tuple[Any, Any]] = lambda number, given: (None, None),
    given: set[str] | None = None,
) -> Halves:
    """Return the two halves of a function.

    Args:
        enter: called with the number of a statement whose call is divided, and what that call passes again; returns the two
            functions that take the place of the call.
        given: parameters that are passed to the second half again; None for all.

    Raises:
        CannotCut: a variable cannot be made again.
    """
    passed = source.parameters if given is None else given
    divider = _Divider(source, division, passed)
    first, second = divider.divide(copy.deepcopy(source.tree.body))
    remade = division.again | _of_worker(first, source.parameters - passed)
    again = _made_again(first, remade)
    variables = source.variables | divider.names  # others are global
    passed = passed - _names(first, ast.Store) | remade
    values: dict[str, object] = {f"{PREFIX}keep": _keep, f"{PREFIX}copy": copy.deepcopy}
    for number, its_given in divider.given.items():
        values[f"{PREFIX}enter{number}"], values[f"{PREFIX}leave{number}"] = enter(number, its_given)

    def keep(second: Sequence[ast.stmt], tests: frozenset[str] = frozenset()) -> Any:
        """Return the end of the first half: if it is divided in an ``if``, each branch keeps what is read after it."""
        if second and isinstance(second[0], ast.If) and number_of(second[0]) is None:
            choice, rest, tests = second[0], second[1:], tests | _names([second[0].test], ast.Load)
            kept = ast.If(choice.test, [keep([*choice.body, *rest], tests)], [keep([*choice.orelse, *rest], tests)])
            return ast.copy_location(kept, source.tree)
        names = tuple(sorted((live(second)[0] | live(again)[0] | tests) & variables - passed))
        return _at_line(f"return {PREFIX}keep(locals(), {names!r})", source.tree)

    ended = [*copy.deepcopy(first), keep(second)]
    for each in statements(ended[:-1]):
        if isinstance(each, ast.Return):  # before the function is divided
            each.value = ast.Dict([ast.Constant(RETURNED)], [each.value or ast.Constant(None)])
    kept, state = sorted((live(second)[0] | live(again)[0]) & variables - passed), STATE_ARGUMENT
    fill = [_at_line(f"if {name!r} in {state}: {name} = {state}[{name!r}]", source.tree) for name in kept]
    begin = build(source, ended, values)
    end = build(source, [*fill, *again, *(second or [ast.Pass()])], values, STATE_ARGUMENT)
    calls = (node for statement in first for node in ast.walk(statement) if is_call(node))
    works = any(not ast.unparse(call).startswith(PREFIX) for call in calls)
    return Halves(begin, end, _lines(first), _lines(second), works, f"{source.identity} {list(map(ast.dump, ended))}")


def _lines(body: Sequence[ast.stmt]) -> tuple[int, ...]:
    """Return the numbers of the lines of statements."""
    found = [each.test if isinstance(each, ast.If) else each for each in statements(body) if number_of(each) is not None]
    return tuple(sorted({line for each in found for line in range(each.lineno, (each.end_lineno or each.lineno) + 1)}))


def _keep(found: Mapping[str, object], names: Sequence[str]) -> dict[str, object]:
    return {name: found[name] for name in names if name in found}


def _at_line(text: str, place: ast.AST) -> Any:
    """Return a statement that is at the place of a node."""
    statement = ast.parse(text).body[0]
    for node in ast.walk(statement):
        ast.copy_location(node, place)
    return statement


def live(body: Sequence[ast.stmt]) -> tuple[set[str], set[str]]:
    """Return the names that statements read before they have bound them, and the variables that they have bound at the end."""
    wanted, bound = set[str](), set[str]()
    for statement in body:
        if isinstance(statement, ast.If):
            (reads, binds), (others, other_binds) = live(statement.body), live(statement.orelse)
            wanted |= (_names([statement.test], ast.Load) | reads | others) - bound
            bound |= binds & other_binds
            continue
        in_place = [each.target for each in statements([statement]) if isinstance(each, ast.AugAssign)]
        wanted |= (_names([statement], (ast.Load, ast.Del)) | _names(in_place, ast.Store)) - bound
        if isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name | ast.Tuple) for target in statement.targets):
            bound |= _names(statement.targets, ast.Store)
    return wanted, bound


def _names(nodes: Sequence[ast.AST], context: Any) -> set[str]:
    found = [node for each in nodes for node in ast.walk(each)]
    names = {node.id for node in found if isinstance(node, ast.Name) and isinstance(node.ctx, context)}
    if context is ast.Store:
        names |= {node.name for node in found if isinstance(node, ast.FunctionDef)}
        names |= {(node.asname or node.name).partition(".")[0] for node in found if isinstance(node, ast.alias)}
    return names


def _touched(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the variables that statements bind, or whose objects they may change: arguments, and owners of what is called."""
    found = _names(nodes, ast.Store) | _names(nodes, ast.Del)
    for node in (node for each in nodes for node in ast.walk(each)):
        roots: list[Any] = []
        if isinstance(node, ast.Call):
            roots = [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
            roots = [node.value]
        found |= {root.id for root in map(root_of, roots) if isinstance(root, ast.Name)}
    return found - {"self"}


def _of_worker(body: Sequence[ast.stmt], left_out: Set[str]) -> Set[str]:
    """Return the variables that only name what belongs to the worker: its `WorkerInfo`, or its generators."""
    found, others = set[str](), set(left_out)
    for at, statement in enumerate(body):
        reads, binds = _names([statement], ast.Load), _names([statement], ast.Store)
        asks = any(map(asks_worker, ast.walk(statement))) or not reads.isdisjoint(found)
        is_same = reads.isdisjoint(_names(body[at + 1 :], ast.Store))  # when it runs again
        (found if asks and is_same and _only_names(statement) else others).update(binds)
    return found - others


def _only_names(statement: ast.stmt) -> bool:
    """Whether a statement calls nothing and can run again: it names something, defines, or chooses between such statements."""
    if isinstance(statement, ast.If):
        return _is_simple(statement.test) and all(map(_only_names, [*statement.body, *statement.orelse]))
    if isinstance(statement, ast.Assign):
        return is_path(statement.value, items=True) or _is_simple(statement.value)
    return isinstance(statement, _DEFINITIONS)


def _is_simple(value: ast.expr) -> bool:
    """Whether an expression only compares, computes with, or chooses among what it names."""
    return all(isinstance(node, _SIMPLE) or asks_worker(node) for node in ast.walk(value))


def _made_again(first: Sequence[ast.stmt], names: Set[str]) -> list[ast.stmt]:
    """Return the statements of the first half that make these variables.

    Raises:
        CannotCut: they call something.
    """
    making = (statement for statement in first if _names([statement], ast.Store) & names)
    again = [copy.deepcopy(statement) for statement in making if _only_names(statement)]
    if missing := names - _names(again, ast.Store):
        raise CannotCut(f"a cache cannot hold {', '.join(sorted(missing))}")
    return again


_DEFINITIONS = ast.FunctionDef | ast.Import | ast.ImportFrom
_SIMPLE = (
    ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BinOp, ast.UnaryOp, ast.BoolOp,
    ast.expr_context, ast.cmpop, ast.operator, ast.unaryop, ast.boolop,
)  # fmt: skip


class _Divider:
    """Divides the statements of a function.

    Attributes:
        names: variables that it adds.
        given: what calls that are divided pass again, by the numbers of their statements.
    """

    def __init__(self, source: SourceCode, division: Division, given: set[str]) -> None:
        self._division = division
        body, self._variables = source.tree.body, source.variables
        self._given_again = given - _names(body, ast.Store) | _of_worker(body, source.parameters - given)
        self._cut = division.places if division.at is None else {*division.places, division.at}
        self.names: frozenset[str] = frozenset()
        self.given: dict[int, Given] = {}

    def divide(self, body: Any) -> tuple[list[Any], list[Any]]:
        """Return the statements before the cut, and those after it."""
        at = position_of(body, self._cut)
        first, second = body[:at], body[at:]
        if second and isinstance(second[0], ast.If) and number_of(second[0]) not in self._cut:
            test = ast.Name(self._name("test", second[0]), ast.Load())
            kept = ast.Assign([ast.Name(test.id, ast.Store())], ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), second[0].test)))
            (begin, end), (other_begin, other_end) = self.divide(second[0].body), self.divide(second[0].orelse)
            first.append(_placed(kept, second[0]))
            first += [_placed(ast.If(test, begin or [ast.Pass()], other_begin), second[0])] * bool(begin or other_begin)
            rest = [_placed(ast.If(test, end or [ast.Pass()], other_end), second[0])] * bool(end or other_end)
            second = [*rest, *second[1:]]
        if not second:
            return first, second
        expanded = self._with_inner(second)
        if expanded[0] is not second[0] and number_of(second[0]) != self._division.at:
            first.append(expanded.pop(0))
        elif self._division.at is not None:
            return first, second
        return (first, expanded) if not self._division.hoists else self._hoisted(first, expanded)

    def _name(self, kind: str, statement: Any) -> str:
        name = _ours(kind, statement).id
        self.names |= {name}
        return name

    def _with_inner(self, body: Sequence[Any]) -> list[Any]:
        """Return statements, the statements that call what is divided as two: the first half of the call, and the rest."""
        found: list[Any] = []
        equal: dict[str, tuple[set[str], ast.Call]] = {}  # the variables of a call, and its second half, for equal calls
        for statement in body:
            changed = _names([statement], ast.Store)
            if (given := self._given(statement)) is None:
                changed |= _touched([statement])
                found.append(statement)
            else:
                text = ast.dump(statement.value)
                call = self._second_half(statement, given)
                if text in equal:  # they share the first half, of which the second one may change its own
                    shared = equal[text][1].args
                    call.args[1], shared[1] = shared[1], _placed(ast.Call(_ours("copy"), [shared[1]], []), statement)
                else:
                    function, arguments, keywords = parts_of_call(statement.value)
                    enter = ast.Call(_ours("enter", statement), [function, *arguments], keywords)
                    found.append(_placed(ast.Assign([ast.Name(call.args[1].id, ast.Store())], enter), statement))
                equal[text] = _names([statement.value], ast.Load), call
                rest = copy.copy(statement)
                rest.value = call
                found.append(_placed(rest, statement))
            equal = {text: its for text, its in equal.items() if not changed & its[0]}
        return found

    def _given(self, statement: Any) -> Given | None:
        """Return what a call that is divided gets again. None for others, and if what cannot be evaluated again is unpacked."""
        if number_of(statement) not in self._division.inner or number_of(statement) == self._division.at:
            return None
        _, arguments, keywords = parts_of_call(statement.value)
        names = {key.arg: self._is_given(key.value) for key in keywords}
        given = Given(tuple(map(self._is_given, arguments)), names, isinstance(statement.value, ast.Subscript))
        unpacks = None in names or any(isinstance(each, ast.Starred) for each in arguments)
        return given if given.all or not unpacks else None

    def _second_half(self, statement: Any, given: Given) -> Any:
        """Return the call of the second half of what a statement calls, with the arguments that are evaluated again."""
        function, arguments, keywords = parts_of_call(statement.value)
        self.given[number_of(statement)] = given
        passed = [each if its else ast.Constant(None) for each, its in zip(arguments, given.arguments, strict=True)]
        named = [key if given.keywords[key.arg] else ast.keyword(key.arg, ast.Constant(None)) for key in keywords]
        state = ast.Name(self._name("inner", statement), ast.Load())
        return ast.Call(_ours("leave", statement), [function, state, *passed], named)

    def _is_given(self, node: Any) -> bool:
        """Whether an argument only names something that is no variable, or is given again: it is evaluated again."""
        root = root_of(node)
        variable = isinstance(root, ast.Name) and root.id in self._variables - self._given_again
        return is_path(node) and not isinstance(node, ast.Lambda) and not variable

    def _hoisted(self, first: list[Any], body: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return both halves, after statements that depend on nothing drawn were moved into the first."""
        skipped: list[Any] = []
        variables = self._variables | self.names
        for statement in body:
            reads, writes = _names([statement], (ast.Load, ast.Del)) & variables, _touched([statement]) & variables
            free = not reads & _touched(skipped) and not writes & (_touched(skipped) | _names(skipped, ast.Load))
            ends = any(isinstance(node, _ENDS) for each in (*skipped, statement) for node in ast.walk(each))
            fixed = isinstance(statement, ast.Expr) or not position_of([statement], self._cut) or _sets_attributes([statement])
            attributes = {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
            changed = attributes & _sets_attributes(skipped)
            move = skipped and free and not ends and not fixed and not changed
            (first if move else skipped).append(statement)
        return first, skipped


def _placed(node: Any, place: ast.AST) -> Any:
    return ast.fix_missing_locations(ast.copy_location(node, place))


def _ours(kind: str, statement: Any = None) -> ast.Name:
    return ast.Name(f"{PREFIX}{kind}{'' if statement is None else number_of(statement)}", ast.Load())


def _sets_attributes(nodes: Sequence[ast.AST]) -> set[str]:
    found = (node for each in nodes for node in ast.walk(each))
    return {node.attr for node in found if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)}


def earlier(source_by_name: Mapping[str, SourceCode], division: Division) -> Iterator[Division]:
    """Yield divisions that end the first half earlier, the latest first."""
    source = source_by_name[division.function]
    for number, its in [*division.inner.items()][:1] if division.at is None else ():
        if isinstance(its, Division):
            choices: Iterator[Any] = earlier(source_by_name, its)
        else:
            choices = (Head(its.steps[:count]) for count in range(len(its.steps) - 1, -1, -1))
        yield from (replace(division, inner={**division.inner, number: choice}) for choice in choices)
    body: list[Any] = source.tree.body
    for at in range(position_of(body, division.places), 0, -1):
        before = body[:at]
        if at < len(body) and any(is_call(node) for each in before for node in ast.walk(each)):
            yield replace(division, at=number_of(body[at]))
