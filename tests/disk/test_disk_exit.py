"""A program that ends without closing its disk cache has written what it has loaded."""

import subprocess
import sys

import numpy as np

PROGRAM = """
import sys, torch
from stocache.disk.cache import DiskCache
cache = DiskCache(sys.argv[1], "4MB", 40, fingerprint="1")
for idx in range(40):
    cache.serve(lambda indices: [torch.full((9,), idx)], lambda idx: False, [idx])
"""


def test_a_program_that_ends_has_written_what_it_has_loaded(tmp_path):
    command = [sys.executable, "-c", PROGRAM, tmp_path / "disk"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    entries = np.frombuffer((tmp_path / "disk" / "index").read_bytes(), "<u8").reshape(-1, 2)
    assert (entries[:, 0] > 0).sum() == 40
    assert done.stderr == ""
