"""What results of benches say of where they were measured, and how a soak ends."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def finished(results: dict[str, Any], out: Path | None) -> int:
    """Print what a soak found, write it as JSON if asked to, and give the exit code: 1 if anything is `wrong`."""
    results["machine"] = machine()
    text = json.dumps(results, indent=2)
    print(text)
    if out is not None:
        out.write_text(text + "\n")
    return 1 if results["wrong"] else 0
