"""structlog with other settings for some time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog


@contextmanager
def structlog_configured(**settings: Any) -> Iterator[None]:
    """Use these settings of `structlog.configure` in the context, and the earlier ones after it.

    A process that had not configured structlog has not configured it afterwards either: a site beside it
    may then choose where its own events go.
    """
    was_configured, before = structlog.is_configured(), structlog.get_config()
    structlog.configure(**settings)
    try:
        yield
    finally:
        if was_configured:
            structlog.configure(**before)
        else:
            structlog.reset_defaults()
