"""Makes the pictures of the documentation: screenshots of pages, with headless Chromium.

    python tools/screenshots.py PAGE.html docs/images/NAME.png [--width 900] [--charts 0,1]

A page is opened from disk; the picture is the whole page, or some of its charts with title and
legend. Pillow reduces it to 256 colours: charts have few, and the file is half as large.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from testkit.browser import Browser, why_no_browser

COLOURS = 256


def main() -> None:
    """Write one picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=900)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--charts", default="", help="numbers of charts, such as 0,1")
    args = parser.parse_args()
    if why_no_browser():
        sys.exit(why_no_browser())
    text = args.page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder)) as browser:
        browser.look(width=args.width, dark=args.dark)
        browser.show(text, text.count('class="chart"'))
        if args.charts:
            browser.keep([int(number) for number in args.charts.split(",")])
        browser.picture(args.picture)
    Image.open(args.picture).convert("RGB").quantize(COLOURS).save(args.picture, optimize=True)
    size = args.picture.stat().st_size
    sys.stdout.write(f"{args.picture}: {size / 1000:.0f} kB\n")


if __name__ == "__main__":
    main()
