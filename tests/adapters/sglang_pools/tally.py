"""What was compared, and how many values were equal: for the table at the end."""

from __future__ import annotations

import collections

COMPARED: collections.Counter[tuple[str, str]] = collections.Counter()
"""By `(case, kind of value)`."""
