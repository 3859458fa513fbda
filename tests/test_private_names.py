"""Private names of torch and Python whose loss no other test would notice; docs/design.md lists all."""

import ctypes
import multiprocessing
import sys
import types
from multiprocessing import forkserver, spawn

import pytest
import torch
from torch.utils.data._utils import pin_memory, worker


class InPython:
    """A class of the user."""


def _hooks(register):
    module = torch.nn.Linear(1, 1)
    getattr(module, register)(lambda *_: None)
    return module


def _has_names(iterator, *names):
    return {*names} <= {*vars(iterator)} and iterator._task_info[iterator._rcvd_idx] == (0,)


ITERATORS = "_task_info", "_rcvd_idx", "_data_queue", "_send_idx", "_worker_queue_idx_cycle"
NAMES = {  # whether it is still what the package takes it for
    "_worker_info of torch.utils.data._utils.worker": lambda: vars(worker)["_worker_info"] is None,
    "Module._forward_hooks": lambda: len(_hooks("register_forward_hook")._forward_hooks) == 1,
    "Module._forward_pre_hooks": lambda: len(_hooks("register_forward_pre_hook")._forward_pre_hooks) == 1,
    "the bit of type.__flags__ for a class made at run time": lambda: (
        (InPython.__flags__ & 1 << 9, int.__flags__ & 1 << 9) == (1 << 9, 0)
    ),
    "prctl of libc": lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) in (0, 1),  # PR_GET_DUMPABLE
    "sys._getframe": lambda: isinstance(sys._getframe(), types.FrameType) and sys._getframe().f_globals is globals(),
    "sys._is_gil_enabled": lambda: sys.version_info < (3, 13) or type(sys._is_gil_enabled()) is bool,
    "pin_memory of torch.utils.data._utils.pin_memory": lambda: (
        pin_memory.pin_memory("text", None) == "text" and pin_memory.pin_memory.__code__.co_varnames[1] == "device"
    ),
    "_pin_memory_device of torch's iterators": lambda: "_pin_memory_device" in vars(iter(torch.utils.data.DataLoader([1]))),
    "_task_info, _rcvd_idx, _data_queue, _send_idx and _worker_queue_idx_cycle of torch's iterators": lambda: _has_names(
        iter(torch.utils.data.DataLoader([1], num_workers=1)), *ITERATORS
    ),
    "BaseProcess._target": lambda: multiprocessing.Process(target=print)._target is print,
    "get_preparation_data of multiprocessing.spawn": lambda: (
        "init_main_from_path" in spawn.get_preparation_data.__code__.co_consts
    ),
    "ForkServer._preload_modules": lambda: type(forkserver._forkserver._preload_modules) is list,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_what_it_was(name):
    try:
        known = NAMES[name]()
    except (AttributeError, KeyError, TypeError):
        known = False
    assert known, f"{name} is gone or has changed. docs/design.md says what uses it."
