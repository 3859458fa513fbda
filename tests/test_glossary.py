"""The words of the project: one meaning each, in the glossary and in the names of the package."""

import ast
import re
from collections import defaultdict

import stocache
from tests.support.house import PACKAGE
from tests.support.sources import statements, tree_of

KNOWN = {  # names that two things still have: only shrink this
    "InOrder",  # both are written to files and states
    "LOAD_NS",
}  # fmt: skip


COMMANDS = ("tools/cli/app.py", "tools/cli/folders.py", "tools/cli/caches.py")  # a command has the name of what it runs
TWIN = "system/platform/portable.py"  # has the names of the other one


def once():
    """Yield the path and the tree of each module but the twin of one."""
    for path in PACKAGE.rglob("*.py"):
        if (name := path.relative_to(PACKAGE).as_posix()) != TWIN:
            yield name, tree_of(path)


def test_classes_and_exported_functions_have_names_of_their_own():
    places = defaultdict(list)
    for path, tree in once():
        for node in statements(tree):
            exported = isinstance(node, ast.FunctionDef) and node in tree.body and node.name in stocache.__all__
            if isinstance(node, ast.ClassDef) or (exported and path not in COMMANDS):
                places[node.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1 and name not in KNOWN} == {}


def test_a_constant_has_one_value_wherever_it_is_defined():
    values = defaultdict(set)
    for node in (node for _, tree in once() for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            several = isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(names)
            for number, name in enumerate(names):
                if isinstance(name, ast.Name) and re.fullmatch("[A-Z][A-Z0-9_]*", name.id):  # names with _ are of one module
                    values[name.id].add(ast.unparse(node.value.elts[number] if several else node.value))
    assert {name: found for name, found in values.items() if len(found) > 1 and name not in KNOWN} == {}


def test_each_term_is_in_the_glossary_once_in_order_and_with_a_meaning():
    groups = (PACKAGE / "GLOSSARY.md").read_text().split("\n## ")[1:]
    entries = [re.findall(r"^- (.*)", group, re.MULTILINE) for group in groups]
    assert all(re.fullmatch(r"\*\*[^*]+\*\*: \S.{10,}\.", entry) for group in entries for entry in group)
    terms = [[entry[2:].partition("**")[0].casefold() for entry in group] for group in entries]
    assert [sorted(group) for group in terms] == terms
    every = [term for group in terms for term in group]
    assert 50 < len(every) == len(set(every)) <= 60
    assert {"row", "record", "stream", "order", "claim", "block", "unit", "generation", "epoch"} <= set(every)
