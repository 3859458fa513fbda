"""Read a function as statements that make one call each, and compile functions from these statements.

NOTE [ Statements with one call ]
    ``return self.transform(read(path)), label`` becomes three statements: the result of ``read`` is assigned to a name of ours,
    then the result of ``self.transform``, and the pair is returned. So a cut may lie between any two calls. Operands are
    evaluated in the same order; what is evaluated only under a condition, or several times (``and``, a lambda, a
    comprehension), is left unchanged. A conditional expression that is assigned or returned becomes an ``if``.

    Files and lines are kept, for tracebacks and breakpoints. The code is compiled with the variables, defaults and cells of the
    function, ``__class__`` among them. If the source does not compile to the code of the function, it was edited since.
"""

import __future__

import ast
import copy
import functools
import inspect
import linecache
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

from stocache.system.hashing import code_text, digest

PREFIX = "stocache_"
"""What names of ours in a program begin with. Two underscores would be changed in a class."""

_REFUSED = (ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)
_FRAMES = {"locals", "vars", "eval", "exec", "dir"}  # see the variables of their caller
_FUTURE = functools.reduce(int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names))


class CannotCut(Exception):
    """The reason why a program cannot be cut. Never raised to users."""


@dataclass(frozen=True)
class SourceCode:
    """A function as statements.

    Attributes:
        function: the function.
        tree: its definition; see NOTE [ Statements with one call ]. Each statement has a ``number``.
        variables: names of its local variables.
        identity: a text by which the function is known again in other processes.
    """

    function: FunctionType
    tree: ast.FunctionDef
    variables: frozenset[str]
    identity: str

    @property
    def parameters(self) -> set[str]:
        """The names of its arguments."""
        return {*inspect.signature(self.function).parameters}

    @property
    def name(self) -> str:
        """Its name, with the name of its class."""
        return self.function.__qualname__.rpartition("<locals>.")[2]


@functools.lru_cache(256)
def source_of(function: FunctionType) -> SourceCode:
    """Return a function as statements.

    Raises:
        CannotCut: there is no such source.
    """
    code, name = function.__code__, function.__qualname__
    tree = _definition_of(function)
    if hasattr(function, "__wrapped__") or {*map(ast.unparse, tree.decorator_list)} - {"staticmethod", "classmethod"}:
        raise CannotCut(f"{name} is decorated")
    for node in ast.walk(tree):
        if isinstance(node, _REFUSED) or (isinstance(node, ast.Name) and node.id in _FRAMES):
            raise CannotCut(f"line {getattr(node, 'lineno', tree.lineno)} of {name} is not followed: {ast.unparse(node):.40}")
    tree.decorator_list = []
    steps = _Steps()
    tree.body = steps.block(tree.body)
    for number, statement in enumerate(statements(tree.body)):
        statement.number = number
    variables = frozenset({*code.co_varnames, *code.co_cellvars, *steps.names})
    module = function.__module__.replace("__mp_main__", "__main__")  # as a spawned process calls the program
    return SourceCode(function, tree, variables, f"{module}.{name} {digest((code.co_code, code.co_names))}")


def _definition_of(function: FunctionType) -> ast.FunctionDef:
    """Return the definition of a function, or of a lambda as a function.

    Raises:
        CannotCut: there is no source, it is not what was compiled, or a line has several lambdas.
    """
    code, name = function.__code__, function.__qualname__
    linecache.checkcache(code.co_filename)
    try:
        text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    except KeyError:  # another thread has read the file meanwhile
        text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    file, codes = _file_of(text, code.co_filename, code.co_flags & _FUTURE)
    place = code.co_firstlineno, code.co_name
    found = [node for node in ast.walk(file) if isinstance(node, ast.FunctionDef | ast.Lambda) and _place_of(node) == place]
    texts = {code_text(each) for each in codes if (each.co_firstlineno, each.co_name) == place}
    if len(found) != 1 or code_text(code) not in texts:
        raise CannotCut(f"the source of {name} is {'not what was imported' if found else 'not there'}")
    tree: Any = copy.deepcopy(found[0])
    if isinstance(tree, ast.Lambda):
        arguments, tree = tree.args, _block("def function()", [ast.copy_location(ast.Return(tree.body), tree.body)], tree)
        tree.args = arguments
    _mangle(tree, _class_of(function))
    return tree  # type: ignore[no-any-return]


@functools.lru_cache(8)
def _file_of(text: str, path: str, flags: int) -> tuple[ast.AST, list[CodeType]]:
    """Return the tree of a file, and the codes in it, compiled as a whole, and by statement, as IPython does."""
    try:
        tree = ast.parse(text)
        bodies = [tree, *(ast.Module([statement], []) for statement in tree.body)]
        flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT  # as there
        codes = [compile(each, path, "exec", flags, dont_inherit=True) for each in bodies]
        return tree, [found for code in codes for found in _codes_in(code)]
    except (SyntaxError, ValueError):
        return ast.Module([], []), []


def _codes_in(code: CodeType) -> list[CodeType]:
    """Return the codes of the functions and classes within a code."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return [found for each in inner for found in (each, *_codes_in(each))]


def _place_of(node: Any) -> tuple[int, str]:
    """Return the line on which a definition begins, and its name."""
    if isinstance(node, ast.Lambda):
        return node.lineno, "<lambda>"
    return min(each.lineno for each in (node, *node.decorator_list)), node.name


def _class_of(function: FunctionType) -> str:
    """Return the name of the class in which a function is defined; empty if there is none."""
    scopes = function.__qualname__.split(".")
    return scopes[-2] if len(scopes) > 1 and scopes[-2] != "<locals>" else ""


def _mangle(node: ast.AST, owner: str) -> None:
    """Spell private names (``self.__load``) as the compiler does in a class."""
    for key in ("id", "attr", "arg", "name", "asname", "rest"):
        name = getattr(node, key, None)
        if isinstance(name, str) and name.startswith("__") and not name.endswith("__") and owner.strip("_"):
            setattr(node, key, f"_{owner.lstrip('_')}{name}")
    for child in ast.iter_child_nodes(node) if not isinstance(node, ast.ClassDef) else ():
        _mangle(child, owner)


def statements(body: Iterable[ast.AST]) -> Iterator[Any]:
    """Yield the statements of a body and the statements within them, except inside functions and classes."""
    for node in body:
        if isinstance(node, ast.stmt):
            yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.expr):
            yield from statements(ast.iter_child_nodes(node))


def position_of(body: Sequence[ast.stmt], numbers: Collection[int]) -> int:
    """Return the position of the first statement that has one of these numbers, or has one in it; the end if there is none."""
    found = (at for at, each in enumerate(body) if any(number_of(inner) in numbers for inner in statements([each])))
    return next(found, len(body))


def number_of(statement: Any) -> Any:
    """Return the number of a statement; None if it was added to the program."""
    return getattr(statement, "number", None)


def _compile(tree: ast.FunctionDef, function: FunctionType, names: Sequence[str]) -> CodeType:
    """Return the code of a definition in the class and the scope of ``function``, with further names in that scope."""
    inner: Any = copy.copy(tree)
    inner.name = f"{PREFIX}function"  # a global function may have its own name
    if _class_of(function):  # whose name stays a global variable; private names are spelled out already
        inner = _block(f"class {PREFIX}class", [inner], tree)
    enclosing = [name for name in (*function.__code__.co_freevars, *names) if name != "__class__"]
    module = ast.Module([_block(f"def {PREFIX}scope({', '.join(enclosing)})", [inner], tree)], [])
    flags = function.__code__.co_flags & _FUTURE
    code = compile(ast.fix_missing_locations(module), function.__code__.co_filename, "exec", flags, dont_inherit=True)
    return next(each for each in _codes_in(code) if each.co_name == f"{PREFIX}function")


def _block(head: str, body: list[Any], place: ast.AST) -> Any:
    """Return a class or function, as this version of Python parses it, with a body."""
    made: Any = ast.parse(f"{head}: pass").body[0]
    made.body = body
    return ast.copy_location(made, place)


def build(source: SourceCode, body: Sequence[ast.stmt], values: Mapping[str, object], argument: str | None = None) -> Any:
    """Return a function like the function of a source, with a different body.

    Args:
        values: the values of further names in it.
        argument: a further argument, given by its name.
    """
    function, tree = source.function, copy.copy(source.tree)
    tree.body = list(body)
    if argument is not None:
        tree.args = copy.deepcopy(tree.args)
        tree.args.kwonlyargs.append(ast.arg(argument))
        tree.args.kw_defaults.append(None)
    code, its = _compile(tree, function, tuple(values)), function.__code__
    names = {"co_name": its.co_name} | ({"co_qualname": its.co_qualname} if hasattr(its, "co_qualname") else {})
    cells = dict(zip(its.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: CellType(value) for name, value in values.items()}
    made = FunctionType(
        code.replace(**names), function.__globals__, its.co_name, function.__defaults__,
        tuple(cells[name] for name in code.co_freevars),
    )  # fmt: skip
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def is_path(node: ast.AST | None, items: bool = False) -> bool:
    """Whether an expression only names something: ``self.reader.open``, ``super().read``, ``get_worker_info()``, a constant.

    ``items``: also ``self.readers[name]`` and ``getattr(self, name)``.
    """
    while isinstance(node, ast.Attribute | ast.Starred | ast.Subscript):
        if isinstance(node, ast.Subscript) and not (items and is_path(node.slice)):
            return False
        node = node.value
    if asks_worker(node):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        is_getattr = items and node.func.id == "getattr" and all(map(is_path, node.args))
        return is_getattr or (node.func.id == "super" and not node.args)
    return isinstance(node, ast.Name | ast.Constant | ast.Lambda | None)


def asks_worker(node: ast.AST | None) -> bool:
    """Whether an expression returns what belongs to the worker: its `WorkerInfo`, or its generator."""
    if not isinstance(node, ast.Call) or node.args or node.keywords or not is_path(node.func):
        return False
    return ast.unparse(node.func).rpartition(".")[2] in {"get_worker_info", "thread_safe_generator"}


def root_of(node: Any) -> Any:
    """Return what a path begins with: ``self`` of ``self.readers[name].open``."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return node


def is_call(node: ast.AST) -> bool:
    """Whether an expression calls something: a function, or the ``__getitem__`` of what `self` holds."""
    if isinstance(node, ast.Subscript):
        root = root_of(node)
        return isinstance(node.ctx, ast.Load) and isinstance(root, ast.Name) and root.id == "self" and node.value is not root
    return isinstance(node, ast.Call) and not is_path(node)


def parts_of_call(call: Any) -> tuple[Any, list[Any], list[Any]]:
    """Return what is called, its arguments, and its named arguments; of an item, the index is the argument."""
    return (call.func, call.args, call.keywords) if isinstance(call, ast.Call) else (call.value, [call.slice], [])


def _calls(node: ast.AST) -> bool:
    """Whether a call is made to evaluate an expression."""
    return is_call(node) or any(_calls(child) for child in ast.iter_child_nodes(node) if not isinstance(node, ast.Lambda))


_EVALUATED = (
    ast.Call | ast.Tuple | ast.List | ast.Set | ast.Dict | ast.BinOp | ast.UnaryOp | ast.Attribute | ast.Starred | ast.Subscript
    | ast.Slice | ast.Compare
)  # fmt: skip


def _operands(node: Any) -> list[tuple[Any, Any]]:
    """Return what an expression evaluates, in this order: as lists or fields of a node, and positions or names in these."""
    if not isinstance(node, _EVALUATED) or (isinstance(node, ast.Compare) and len(node.ops) > 1):
        return []
    if isinstance(node, ast.Dict):
        pairs = [place for at in range(len(node.keys)) for place in ((node.keys, at), (node.values, at))]
        return [(items, at) for items, at in pairs if items[at] is not None]
    found: list[tuple[Any, Any]] = []
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.expr):
            found.append((vars(node), name))
        for at, item in enumerate(value if isinstance(value, list) else ()):
            found += [(value, at)] if isinstance(item, ast.expr) else [(vars(item), "value")] * isinstance(item, ast.keyword)
    return found


class _Steps:
    """Divides statements into ones that make one call each.

    Attributes:
        names: the names of the results.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def block(self, body: Sequence[ast.stmt]) -> list[ast.stmt]:
        return [step for statement in body for step in self._statement(statement)]

    def _statement(self, statement: Any) -> list[ast.stmt]:
        if isinstance(statement, ast.If):
            statement.body, statement.orelse = self.block(statement.body), self.block(statement.orelse)
        is_simple = isinstance(statement, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr)
        is_simple = is_simple or (isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name))
        if not is_simple or statement.value is None:
            return [statement]
        if isinstance(statement.value, ast.IfExp) and not isinstance(statement, ast.AugAssign):
            choice, other = statement.value, copy.deepcopy(statement)
            statement.value, other.value = choice.body, choice.orelse
            chosen = ast.If(choice.test, self._statement(statement), self._statement(other))
            return [ast.copy_location(chosen, choice)]
        steps: list[ast.stmt] = []
        statement.value = self._flat(statement.value, steps)
        return [*steps, statement]

    def _flat(self, node: Any, steps: list[ast.stmt]) -> Any:
        """Return an expression whose calls, but for itself, were appended to ``steps``."""
        operands = _operands(node)
        calling = [at for at, (holder, key) in enumerate(operands) if _calls(holder[key])]
        for at, (holder, key) in enumerate(operands[: calling[-1] + 1 if calling else 0]):
            part = holder[key] = self._flat(holder[key], steps)
            if isinstance(part, ast.Starred):
                holder, key, part = vars(part), "value", part.value
            is_step = is_call(part) or (_calls(part) and not _operands(part))
            if isinstance(part, ast.Call) and ast.unparse(part.func).endswith(("empty", "empty_like")):
                continue  # what it returns is not initialised: no value to cache
            if not is_path(part) and not isinstance(part, ast.Slice) and (at < calling[-1] or is_step):
                self.names.append(f"{PREFIX}{len(self.names)}")
                name = self.names[-1]
                step = ast.Assign([ast.Name(name, ast.Store())], part)
                steps += self._statement(ast.fix_missing_locations(ast.copy_location(step, part)))
                holder[key] = ast.copy_location(ast.Name(name, ast.Load()), part)
        return node
