"""States as they come from a file, and states that were edited there."""

import copy
import json


def through_json(state):
    return json.loads(json.dumps(state))


def leaves(value, path=()):
    """Yield the path of keys to each value in a state that holds no others."""
    if isinstance(value, dict | list) and value:
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))
    else:
        yield path


def places(state):
    """Return the paths to all values in a state, also to values that hold others."""
    return list(dict.fromkeys(path[:depth] for path in leaves(state) for depth in range(1, len(path) + 1)))


def changed(state, path, value):
    """Return a copy of a state that has a different value at a place."""
    state = copy.deepcopy(state)
    within = state
    for key in path[:-1]:
        within = within[key]
    within[path[-1]] = value
    return state
