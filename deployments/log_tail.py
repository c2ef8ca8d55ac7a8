"""Shows on the terminal what this application's replicas write to Serve's log files."""

from __future__ import annotations

import re
from pathlib import Path

LINE = re.compile(r"(?P<level>[A-Z]+) \S+ (?P<time>\d\d:\d\d:\d\d)\S* .*? -- (?P<text>.*)")


class LogTail:
    """
    Args:
        folder: Serve's log files.
        app: the application; its replicas' files are followed from here on.
    """

    def __init__(self, folder: Path, app: str):
        self._folder, self._pattern = folder, f"replica_{app}_*.log"
        self._read: dict[Path, int] = {path: path.stat().st_size for path in folder.glob(self._pattern)}

    def lines(self) -> list[str]:
        """What was added since the last call: what engines say, and any warnings. Tracebacks stay in the files."""
        shown = []
        for path in sorted(self._folder.glob(self._pattern)):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]  # the rest of a line comes next time
            self._read[path] = self._read.get(path, 0) + len(whole)
            for line in whole.decode("utf-8", "replace").splitlines():
                match = LINE.fullmatch(line)
                if match is None:
                    continue
                level, text = match["level"], match["text"]
                if level in ("WARNING", "ERROR", "CRITICAL") or "engine_id=" in text:
                    shown.append(f"{match['time']} {text}" if level == "INFO" else f"{match['time']} {level} {text}")
        return shown
