"""Notice values that are set while cached samples are served: attributes of a dataset and of what it holds, and variables."""

import contextlib
from typing import Any

from stocache.datasets.cut.tree import CONVENTIONAL
from stocache.system.loading.code import names_used, variables_of
from stocache.system.walking import is_small, small_values, values_in, walk


class HeldValues:
    """The values that samples of a dataset may be made with, as they were when they were held.

    Args:
        dataset: makes the samples.
        is_off: hold nothing but its transforms.

    Attributes:
        variables: the variables of modules that its code names; see `names_used`.
        held: where values are; the values, by their names; and what to put in front of the names.
        views: the items of ``held``, and of where they are now. The audit compares them for each batch.

    Slots hide its attributes, among them variables of modules, from whoever looks through the attributes of a dataset.
    """

    __slots__ = ("_dataset", "_is_off", "_names", "held", "variables", "views")
    _holds_dataset = True

    def __init__(self, dataset: object, is_off: bool) -> None:
        self._dataset, self._is_off = dataset, is_off
        self.variables, names = ([], set[str]()) if is_off else names_used(dataset)
        self._names = names.difference(CONVENTIONAL)
        self.hold()

    def __reduce__(self) -> Any:
        return HeldValues, (self._dataset, self._is_off)

    def hold(self) -> None:
        """Hold the values of now: the attributes of objects, and the variables of modules."""
        inner = ((each, type(each).__name__) for each in walk(self._dataset))
        roots = [*variables_of(self.variables), *inner, (self._dataset, "dataset")]
        found = {id(each[0]): each for root in roots for each in values_in(*root, self._names, CONVENTIONAL)}
        found |= {id(scope): (scope, small_values(scope, names), "") for scope, names in self.variables}
        self.held = [*found.values()]
        self.views = [held.items() for _, held, _ in self.held], [own.items() for own, _, _ in self.held]

    def new(self, transforms: bool = False) -> list[str]:
        """Return the names of the values that have been set; or of the ``transforms``."""
        found = []
        for own, held, prefix in self.held:
            for name, value in list(held.items()):
                with contextlib.suppress(Exception):  # it does not compare
                    if {name: value}.items() <= own.items():
                        continue
                if name not in CONVENTIONAL and not is_small(own.get(name)):  # a file that was opened
                    del held[name]
                elif transforms == (name in CONVENTIONAL):
                    found.append(prefix + name)
        return found

    def drop(self, names: list[str]) -> None:
        """Hold values no longer: samples are not made with them."""
        for _, held, prefix in self.held:
            for name in [name for name in held if prefix + name in names]:
                del held[name]
