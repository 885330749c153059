"""What time it is in a fake cluster."""

import asyncio
from datetime import UTC, datetime

EPOCH = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
"""When a loop's time 0 is, in seconds since 1970: virtual time has no date of its own."""


def loop_time() -> float:
    """Seconds since 1970 by the running loop's clock."""
    return EPOCH + asyncio.get_running_loop().time()
