"""What `docs/vllm.md` says: the launch line's JSON, and the tables of options and metrics."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_PAGE = (Path(__file__).parents[3] / "docs/vllm.md").read_text()


def transfer_config(**extra: Any) -> dict[str, Any]:
    """The value of `--kv-transfer-config` in the launch line, with `extra` in its `kv_connector_extra_config`."""
    (text,) = re.findall(r"--kv-transfer-config '(\{.*?\n  \})'", _PAGE, re.DOTALL)
    config: dict[str, Any] = json.loads(text)
    config["kv_connector_extra_config"] |= extra
    return config


def table(heading: str) -> dict[str, str]:
    """The second column of a section's table, by each name in the first."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", _PAGE, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", section, re.MULTILINE)
    return {name: second for first, second in rows for name in re.findall(r"`(.*?)`", first)}
