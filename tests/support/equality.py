"""Equality of samples, more exact than `==`."""

import dataclasses

import numpy as np
import torch

from stocache.samples.leaves.arrays import array_dim_order_of, dim_order_of


def everywhere(check, a, b):
    """Whether two samples are the same containers, with the same keys, around leaves that pass a check."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        same_keys = list(a) == list(b) and list(map(type, a)) == list(map(type, b))
        return same_keys and all(everywhere(check, a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(everywhere(check, *pair) for pair in zip(a, b, strict=True))
    if dataclasses.is_dataclass(a):
        return everywhere(check, vars(a), vars(b))
    return check(a, b)


def same(a, b):
    """Equality in type, structure, dtype, shape and value."""
    return everywhere(_same_leaves, a, b)


def _same_leaves(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        values = (lambda array: array.tolist()) if a.dtype.hasobject else np.ndarray.tobytes
        return a.dtype == b.dtype and a.shape == b.shape and values(a) == values(b)
    return a == b or (a != a and b != b)


def identical(a, b):
    """`same`, and NaNs and dict order bit for bit, folds, zones and strides."""
    if isinstance(a, torch.Tensor) and type(a) is type(b):
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b) and strides(a) == strides(b)
    if isinstance(a, np.ndarray) and strides(a) != strides(b):
        return False
    return same(a, b) and (isinstance(a, set | frozenset) or repr(a) == repr(b))


def strides(value):
    """The strides that count, of what is dense; None if they do not count, or are the strides of C."""
    order = array_dim_order_of(value) if isinstance(value, np.ndarray) else dim_order_of(value)
    return order and [dim for dim in order if value.shape[dim] > 1]


def raw(tensor):
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
