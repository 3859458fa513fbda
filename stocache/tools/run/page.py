"""Write the report of ``stocache run`` as one HTML file, which needs no other: what a person can pass on."""

import base64
import io
import platform
import sys
import time
from collections.abc import Sequence
from html import escape
from importlib.metadata import version

from rich.console import Console

from stocache.system.figures import plural
from stocache.system.platform import here
from stocache.tools.plot import WAITS, draw, tabulate
from stocache.tools.run.report import LoaderLines, report_of

_WIDTH = 180  # characters of a line
_PAGE = """<!doctype html><meta charset="utf-8"><title>stocache run</title><style>{stylesheet} img {{ max-width: 100% }}</style>
<body><h1>stocache run</h1><pre>{code}</pre>"""


def page_of(loaders: Sequence[LoaderLines], command: str, tried: Sequence[str], ended: bool) -> str:
    """Return the page.

    Args:
        loaders: what the report says of each.
        command: the program and its arguments.
        tried: settings that were tried, with what was measured, and warnings.
        ended: whether the program has ended. Before that there are no pictures: to draw one takes up to a second.
    """
    console = Console(record=True, file=io.StringIO(), width=_WIDTH, highlight=False)
    state = f"{'ended' if ended else 'was running'} at {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
    versions = ", ".join(f"{package} {version(package)}" for package in ("stocache", "torch"))
    machine = f"Python {sys.version.split()[0]}, {platform.platform()}, {plural(here.usable_cpus(), 'CPU')}"
    texts = [f"{command}\n{state}; {versions}, {machine}", report_of(loaders), "Settings that were tried, and warnings:"]
    for text in [*texts, *(f"- {each}" for each in tried or ["none"])]:
        console.print(text, markup=False, end="\n\n")
    pictures = []
    for each in loaders:
        console.print(each.heading, tabulate(tuple(each.epochs), WAITS), sep="\n")
        if ended and each.epochs:
            draw(tuple(each.epochs)).savefig(picture := io.BytesIO(), format="png", dpi=100)
            data = base64.b64encode(picture.getvalue()).decode()
            pictures.append(f'<h2>{escape(each.heading)}</h2><img alt="epochs" src="data:image/png;base64,{data}">')
    return "\n".join([console.export_html(code_format=_PAGE), *pictures])
