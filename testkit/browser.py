"""A headless Chromium for tests and for the pictures of the documentation."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any, Self

from penstock.report.charts import Page, page_html

DRIVER = "chromedriver"
PROGRAMS = ("chromium", DRIVER)
SWITCHES = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
_READY_S = 120


def why_no_browser() -> str:
    """What is missing for a browser; nothing if there is one."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {' and no '.join(missing)}: apt-get install chromium chromium-driver"
    return ""


class Browser:
    """One Chromium with a profile of its own, until the block ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.driver: Any = None

    def __enter__(self) -> Self:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which(PROGRAMS[0]))
        for switch in (*SWITCHES, f"--user-data-dir={self._folder / 'profile'}"):
            options.add_argument(switch)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(executable_path=shutil.which(DRIVER))
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.set_script_timeout(_READY_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.quit()

    def look(self, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Set the size of the window and the theme of the system."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._cdp("Emulation.setDeviceMetricsOverride", size)
        # Chromium believes in a finger from here on, and CSS with it.
        self._cdp("Emulation.setTouchEmulationEnabled", {"enabled": width < 600})
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._cdp("Emulation.setEmulatedMedia", {"features": [theme]})

    def show(self, page: Page | str, num_charts: int) -> None:
        """Open a page from disk and wait until all of its charts are drawn."""
        path = self._folder / "page.html"
        path.write_text(page if isinstance(page, str) else page_html(page), encoding="utf-8")
        self.logs()
        self.driver.get_log("performance")
        self.driver.get(path.as_uri())
        self.wait(f"window.penstockChartsReady >= {num_charts}")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true; the page checks it at each frame."""
        script = (
            "const done = arguments[arguments.length - 1];"
            f"(function look() {{ ({condition}) ? done(true) : requestAnimationFrame(look) }})()"
        )
        self.driver.execute_async_script(script)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        return self.driver.execute_script(f"return {expression}")

    def is_drawn(self, chart: int) -> bool:
        """Whether a chart's canvases have more than a few colours."""
        found: bool = self.driver.execute_script(
            """
            const seen = new Set();
            for (const canvas of document.querySelectorAll(`#chart${arguments[0]} canvas`)) {
                const { width, height } = canvas;
                const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
                for (const pixel of new Uint32Array(data.buffer)) {
                    seen.add(pixel);
                    if (seen.size > 5) return true;
                }
            }
            return false;
            """,
            chart,
        )
        return found

    def logs(self) -> list[str]:
        """What the console has said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """What the page has asked the network or the disk for since the last call."""
        events = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Save what is seen, or the whole page."""
        options: dict[str, Any] = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self._cdp("Page.getLayoutMetrics", {})["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            options["clip"] = clip
        data = self._cdp("Page.captureScreenshot", options)["data"]
        path.write_bytes(base64.b64decode(data))

    def keep(self, charts: list[int]) -> None:
        """Hide everything of the page but some charts, without their tables."""
        kept = ",".join(f"#chart{number}" for number in charts)
        self._style(
            f"figure:not(:has({kept})),header,nav,h2,.parts>:not(figure),section:not(:has({kept})),"
            "#theme,.numbers{display:none!important}body{padding:0 1rem .5rem!important}"
        )

    def keep_sections(self, titles: list[str]) -> None:
        """Hide everything of the page but some sections."""
        script = (
            "for (const section of document.querySelectorAll('section'))"
            "  section.hidden = !arguments[0].includes(section.querySelector('h2').textContent)"
        )
        self.driver.execute_script(script, titles)
        self._style(
            "header,nav,#theme,footer{display:none!important}body{padding:0 1rem .5rem!important}"
        )

    def _style(self, rules: str) -> None:
        self.driver.execute_script(
            "document.head.append(Object.assign(document.createElement('style'),"
            "{textContent: arguments[0]}))",
            rules,
        )

    def printed(self) -> bytes:
        """The page as a PDF file."""
        data = self._cdp("Page.printToPDF", {"printBackground": False, "paperWidth": 8.27})["data"]
        return base64.b64decode(data)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse at one place of the window, and let go at another."""
        for kind, (x, y) in (
            ("mousePressed", start),
            ("mouseMoved", ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)),
            ("mouseMoved", end),
            ("mouseReleased", end),
        ):
            event = {"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
            self._cdp("Input.dispatchMouseEvent", event)

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a place of the window."""
        self._cdp("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    def _cdp(self, command: str, options: dict[str, Any]) -> Any:
        return self.driver.execute_cdp_cmd(command, options)
