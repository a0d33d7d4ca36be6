"""The ranks of a run, from the metrics endpoints of its loaders."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from penstock.engine.metrics import snapshots_of
from penstock.engine.snapshot import LiveCounts, LiveRank, LiveSnapshot
from penstock.errors import OptionError
from penstock.report.live.following import RECENT_S

_ANSWER_S_MAX = 2.0
_AT_ONCE_MAX = 32


class ScrapedRun:
    """Asks endpoints again and again; recent figures are differences of two answers."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [
            url if url.endswith("/metrics") else url.rstrip("/") + "/metrics" for url in urls
        ]
        self._seen: dict[tuple[str, int], deque[LiveSnapshot]] = {}
        """Of each endpoint and rank, what it said in the last seconds."""

    def look(self) -> list[LiveRank]:
        """Return the ranks as they are now; those whose endpoint does not answer are silent."""
        with ThreadPoolExecutor(min(_AT_ONCE_MAX, len(self._urls))) as pool:
            pages = list(pool.map(_page_or_error, self._urls))
        at_s = time.time()
        silent: set[str] = set()
        for url, page in zip(self._urls, pages, strict=True):
            if isinstance(page, OSError):
                silent.add(url)
                continue
            for snapshot in snapshots_of(page, at_s):
                self._remember(url, snapshot)
        if not self._seen:
            raise OptionError(self._nobody(pages))
        return [
            _rank(seen).in_state("silent" if url in silent else "running")
            for (url, _), seen in sorted(self._seen.items(), key=lambda item: item[0][1])
        ]

    def _remember(self, url: str, snapshot: LiveSnapshot) -> None:
        seen = self._seen.setdefault((url, snapshot.rank), deque())
        if seen and snapshot.counts.elapsed_s < seen[-1].counts.elapsed_s:
            seen.clear()  # Another process answers there: the job was started again.
        seen.append(snapshot)
        while len(seen) > 2 and seen[1].at_s <= snapshot.at_s - RECENT_S:
            seen.popleft()

    def _nobody(self, pages: Sequence[str | OSError]) -> str:
        said = "; ".join(
            f"{url}: {page if isinstance(page, OSError) else 'no metrics of a loader'}"
            for url, page in zip(self._urls, pages, strict=True)
        )
        return (
            f"no rank answers ({said}); start the job with PENSTOCK_METRICS_PORT=9400 and name "
            "http://HOST:9400, and one port more for each further rank of the host"
        )


def _page_or_error(url: str) -> str | OSError:
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S_MAX) as answer:
            page: bytes = answer.read()
    except urllib.error.URLError as error:
        return error.reason if isinstance(error.reason, OSError) else error
    except OSError as error:
        return error
    return page.decode(errors="replace")


def _rank(seen: deque[LiveSnapshot]) -> LiveRank:
    first, last = seen[0], seen[-1]
    # The first answer has nothing to be compared with: then the whole run is what is recent.
    before = first.counts if len(seen) > 1 else LiveCounts()
    return LiveRank(now=last, recent=last.counts - before)
