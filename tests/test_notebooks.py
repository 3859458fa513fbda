"""The notebooks run unchanged, in an empty folder, and print what is kept in them."""

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.processes import run_python

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {path.stem: path for path in sorted(ROOT.glob("docs/notebooks/*.ipynb"))}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in NOTEBOOKS if name != "detector_with_mosaic"]
VARIES = re.compile(r"\b\d+(\.\d+)?( ?(s|ms|µs|MB/s|GB/s|samples/s)\b|x\b)|the trainer waited .*")  # times, and what follows
RUN = """
import sys, nbclient, nbformat, jupyter_client
client = nbclient.NotebookClient(nbformat.read(sys.argv[1], 4), timeout=100, coalesce_streams=True)
client.km = jupyter_client.AsyncKernelManager(kernel_name="python3", transport="ipc", ip=".kernel")  # sockets in this folder
client.km.kernel_spec.argv[0] = sys.executable
nbformat.write(client.execute(), "done.ipynb")
"""


def cells_of(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    shown = lambda each: (VARIES.sub("…", "".join(each.get("text") or each["data"]["text/plain"])), [*each.get("data", ())])
    outputs = lambda cell: [shown(each) for each in cell["outputs"] if "nvImageCodec" not in str(each)]  # MONAI beside pydicom
    return [("".join(cell["source"]), outputs(cell)) for cell in cells]


@pytest.mark.parametrize("name", ["detector_with_mosaic", *SLOW])
def test_a_notebook_runs_and_shows_what_is_kept_in_it(name, tmp_path):
    kept = cells_of(NOTEBOOKS[name])
    needs = re.findall(r"^(?:import|from) (\w+)", "\n".join(source for source, _ in kept), re.MULTILINE)
    for module in sorted({*needs, "nbclient", "ipykernel", "matplotlib"}):
        if find_spec(module) is None:
            pytest.skip(f"the notebook needs {module}")
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore:IProgress not found"}  # of tqdm, without ipywidgets
    assert "Warning" not in run_python("-c", RUN, NOTEBOOKS[name], cwd=tmp_path, env=env, timeout_s=150).stderr
    assert cells_of(tmp_path / "done.ipynb") == kept


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_small_and_keeps_what_it_shows_and_nothing_of_the_machine(name):
    assert NOTEBOOKS[name].stat().st_size < 250_000
    assert not re.search(r"/(home|root|tmp|work)/|Warning|stderr", NOTEBOOKS[name].read_text())
    shows = re.compile(r"^(?!def|class)(\S.*)?\b(print|plot|show)\(", re.MULTILINE)
    assert [source for source, shown in cells_of(NOTEBOOKS[name]) if shows.search(source) and not shown] == []
