"""Free host memory."""

from __future__ import annotations

import os
from pathlib import Path

# Limit and usage files of a container's control group, for cgroup v2 and v1.
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def _of_machine() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        # Not Linux. The fallback below does not count memory that the page cache could give back.
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0


def host_free_bytes() -> int:
    """Host memory that this process can still take, in bytes; 0 if unknown."""
    free_bytes = _of_machine()
    for limit, used in _CGROUP_FILES:
        try:
            left_bytes = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # another version, or "max"
            continue
        free_bytes = min(free_bytes, max(0, left_bytes))
    return free_bytes
