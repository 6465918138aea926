"""Waiting for what can be seen but not watched."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import requests

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE = 60.0
PAUSE = 0.1


def eventually(test: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    """Return what ``test`` returns once that is true; until then its failures to connect and to assert are waited out.

    Raises:
        AssertionError: It was not within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        found: Any = None
        try:
            if found := test():
                return found
        except (requests.RequestException, AssertionError) as error:
            found = error
        assert time.monotonic() < deadline, f"not so within {timeout:g} s: {found!r}"
        time.sleep(PAUSE)
