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
NAMES = {  # what uses it, and whether it is still what that takes it for
    "_worker_info of torch.utils.data._utils.worker": (
        "loader/choice/measure.py",
        lambda: vars(worker)["_worker_info"] is None,
    ),
    "Module._forward_hooks": (
        "datasets/cut/program.py and datasets/transforms/pipelines.py",
        lambda: len(_hooks("register_forward_hook")._forward_hooks) == 1,
    ),
    "Module._forward_pre_hooks": (
        "datasets/cut/program.py and datasets/transforms/pipelines.py",
        lambda: len(_hooks("register_forward_pre_hook")._forward_pre_hooks) == 1,
    ),
    "the bit of type.__flags__ for a class made at run time": (
        "system/objects.py",
        lambda: (InPython.__flags__ & 1 << 9, int.__flags__ & 1 << 9) == (1 << 9, 0),
    ),
    "prctl of libc": (
        "system/loading/children.py",
        lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0) in (0, 1),
    ),  # PR_GET_DUMPABLE
    "sys._getframe": (
        "tools/run and cache/allocate.py",
        lambda: sys._getframe().f_globals["__name__"] == __name__ and isinstance(sys._getframe(), types.FrameType),
    ),
    "sys._is_gil_enabled": ("shm/segment.py", lambda: sys.version_info < (3, 13) or type(sys._is_gil_enabled()) is bool),
    "pin_memory of torch.utils.data._utils.pin_memory": (
        "loader/thread_maker.py and reading/graph/pipes.py",
        lambda: pin_memory.pin_memory("text", None) == "text" and pin_memory.pin_memory.__code__.co_varnames[1] == "device",
    ),
    "_pin_memory_device of torch's iterators": (
        "loader/thread_iterator.py",
        lambda: "_pin_memory_device" in vars(iter(torch.utils.data.DataLoader([1]))),
    ),
    "_task_info, _rcvd_idx, _data_queue, _send_idx and _worker_queue_idx_cycle of torch's iterators": (
        "loader/torch_iterators.py",
        lambda: _has_names(iter(torch.utils.data.DataLoader([1], num_workers=1)), *ITERATORS),
    ),
    "BaseProcess._target": ("shm/job.py", lambda: multiprocessing.Process(target=print)._target is print),
    "get_preparation_data of multiprocessing.spawn": (
        "tools/run/run.py",
        lambda: "init_main_from_path" in spawn.get_preparation_data.__code__.co_consts,
    ),
    "ForkServer._preload_modules": ("loader/worker_group.py", lambda: type(forkserver._forkserver._preload_modules) is list),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_what_it_was(name):
    user, is_as_known = NAMES[name]
    try:
        known = is_as_known()
    except (AttributeError, KeyError, TypeError):
        known = False
    assert known, f"{name}, which stocache/{user} uses, is gone or has changed"
