"""Look at the site in Chromium, as on a phone and a desktop: no page is wider than the window, no code on the first is cut.

python docs/look.py SITE    # a folder that `mkdocs build` has written; says so if Chromium is not installed
"""

import functools
import http.server
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from html import unescape
from pathlib import Path

WIDTHS = 390, 1280  # pixels
LOOK = """
<pre id="found"></pre><script>
const pages = PAGES, found = [];
function look(frame, page, width) {
  const page_of = frame.contentDocument, first = frame.contentWindow.innerHeight;
  if (page_of.documentElement.scrollWidth > width)
    found.push(`${page} is ${page_of.documentElement.scrollWidth} pixels wide in a window of ${width}`);
  if (page == "index.html") for (const code of page_of.querySelectorAll("pre code"))
    if (width > 1000 && code.getBoundingClientRect().top < first && code.scrollWidth > code.clientWidth)
      found.push(`${page}: code is cut at ${width} pixels: ${code.innerText.slice(0, 60)}`);
}
async function all() {
  for (const width of WIDTHS) for (const page of pages) await new Promise(next => {
    const frame = document.createElement("iframe");
    frame.sandbox = "allow-same-origin";  // without its scripts: the layout is that of the styles
    frame.style.cssText = `width: ${width}px; height: 800px; border: 0`;
    frame.onload = () => { look(frame, page, width); frame.remove(); next() };
    frame.src = page;
    document.body.append(frame);
  });
  document.getElementById("found").textContent = JSON.stringify(found);
}
all();
</script>"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a word."""

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def problems(chromium: str, site: Path) -> list[str]:
    """Return what is too wide in the pages of the site."""
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    with tempfile.TemporaryDirectory() as folder:
        served = Path(shutil.copytree(site, Path(folder, "site")))
        (served / "look.html").write_text(LOOK.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS)))
        handler = functools.partial(Quiet, directory=str(served))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/user"]
            command += ["--virtual-time-budget=600000", "--dump-dom", f"http://127.0.0.1:{server.server_port}/look.html"]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            server.shutdown()
    found = re.search(r'<pre id="found">(\[.*?\])</pre>', done.stdout, re.DOTALL)
    return json.loads(unescape(found[1])) if found else ["Chromium did not look at all pages"]


if __name__ == "__main__":
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.stderr.write("Chromium is not installed: nobody looked at the site.\n")
    else:
        sys.exit("\n".join(problems(browser, Path(sys.argv[1]))) or 0)
