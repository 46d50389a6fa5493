"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(file: Path, content: bytes) -> None:
    """Writes the file in one go: other processes see the old one or the new one, and a full disk leaves the old one.

    What is no ordinary file, such as /dev/stdout, is written to as it is. Raises OSError."""
    file = Path(os.path.realpath(file))
    if file.exists() and not file.is_file():
        file.write_bytes(content)
        return
    fresh = file.with_name(f".new-{secrets.token_hex(8)}")
    try:
        with open(fresh, "xb") as opened:
            opened.write(content)
        os.replace(fresh, file)
    finally:
        fresh.unlink(missing_ok=True)
