"""Builds this distribution: the pinned upstream wheel, plus the overlay, plus the patches.

Only the standard library is used, so a build needs nothing but Python. The check below comes
before every other import because `tomllib` does not exist in Python 3.10 and its ImportError
would hide the real reason.
"""

from __future__ import annotations

import sys


def require_supported_python(version: tuple[int, int] = sys.version_info[:2]) -> None:
    """Stop with one plain line on an interpreter that has no upstream wheel."""
    if not (3, 11) <= version <= (3, 13):
        raise SystemExit(
            f"sglang: Python {version[0]}.{version[1]} is not supported; use Python 3.11 to 3.13."
            "\n  Point your tool at one, for example: python3.12 -m pip install ."
        )


require_supported_python()
