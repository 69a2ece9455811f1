"""What the terminal shows: logging, and lines that come with time."""

from __future__ import annotations

import logging
import sys


def configure_logging(*, debug: bool) -> None:
    """What goes wrong is said by the commands themselves; `--debug` shows all that is logged."""
    level = logging.DEBUG if debug else logging.ERROR
    logging.basicConfig(level=level, format="%(levelname)s %(message)s", stream=sys.stderr)


def say(text: str = "") -> None:
    """One line, at once."""
    print(text, flush=True)


def format_seconds(seconds: float) -> str:
    """`75` as `1m15s`, `7322` as `2h02m`, `200000` as `2d07h`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_bytes(size: float) -> str:
    """`1536` as `1.5 KB`; powers of 1000, as disks are sold."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} PB"
