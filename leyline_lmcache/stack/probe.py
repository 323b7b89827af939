"""One question over HTTP: does the server answer?"""

from __future__ import annotations

import urllib.error
import urllib.request

# Servers are on this machine: never through a proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """True if a GET of `url` is answered with status 200."""
    try:
        with _OPENER.open(url, timeout=timeout_s) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
