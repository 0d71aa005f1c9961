"""The picture of a plan's page that the README shows: the page of ``examples/train_all_methods.py`` in a browser.

    python -m scripts.picture_report --browser chromium
    python -m scripts.picture_report --page out/report.html    # a page that is there already

The browser (Chromium or Chrome, without a window) must load all of the page's pictures from the page itself, with no
network; the script counts them. The picture is cut below the last line and reduced to a palette, as it lies in the
repository.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image


#: Of the window, before the empty rest is cut off; pixels.
WIDTH, HEIGHT = 1240, 6000

#: Asks the browser to measure every picture; runs in a copy of the page, since the page itself may run nothing.
COUNT = """<script>addEventListener("load", () => {
  const shown = [...document.images].filter(one => one.complete && one.naturalWidth > 0);
  document.title = `shown ${shown.length} of ${document.images.length}`;
});</script>"""


def browse(browser: str, page: Path, *options: str) -> str:
    """Open a page without a window; returns what the browser writes."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}"]
        fixed += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={WIDTH},{HEIGHT}"]
        command = [browser, *fixed, *options, page.absolute().as_uri()]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def check_pictures(browser: str, page: Path) -> int:
    """Return the number of pictures that the browser shows; raise an error unless it is all of them."""
    text = page.read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', text)
    if policy is None:
        raise SystemExit(f"{page} has no content security policy; it is no page of jaxpipe's")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "page.html"
        copy.write_text(text.replace(policy[0], "").replace("</body>", f"{COUNT}</body>"))
        match = re.search(r"<title>shown (\d+) of (\d+)</title>", browse(browser, copy, "--dump-dom"))
    expected = len(re.findall("<img ", text))
    if match is None or [int(n) for n in match.groups()] != [expected, expected]:
        raise SystemExit(f"{expected} pictures in the page; the browser says {match and match[0]}")
    return expected


def cut(picture: Image.Image, edge: int = 24) -> Image.Image:
    """Without the empty rest below, in 128 colors."""
    filled = np.flatnonzero((np.asarray(picture.convert("L")) < 250).any(1))
    return picture.crop((0, 0, picture.width, min(picture.height, int(filled[-1]) + edge))).quantize(128)


def main() -> None:
    """Make the page, check it and take its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--page", type=Path, help="left out: made by the example")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/report.png"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = options.page
        if page is None:
            command = [sys.executable, "-m", "examples.train_all_methods", "--out", folder]
            subprocess.run(command, check=True)
            page = Path(folder) / "report.html"
        count = check_pictures(options.browser, page)
        shot = Path(folder) / "page.png"
        browse(options.browser, page, f"--screenshot={shot}")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        cut(Image.open(shot).convert("RGB")).save(options.out, optimize=True)
    print(f"{count} pictures shown; wrote {options.out}, {options.out.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
