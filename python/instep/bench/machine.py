"""Describes the machine, because figures depend on it: the processor, its caches and the versions of packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path
from typing import Optional


def processor() -> str:
    """The processor's name. Many virtual machines shorten the name, so family and model are added if they are known."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    lines = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    fields = {key.strip(): value.strip() for key, _, value in lines}
    name = fields.get("model name") or platform.processor() or platform.machine()
    family, model = fields.get("cpu family"), fields.get("model")
    return f"{name} (family {family}, model {model})" if family and model else name


def last_level_cache() -> int:
    """The size in bytes of the first core's largest cache, or 32 MiB if the system does not report a size."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((_bytes(path.read_text().strip()) for path in sizes), default=32 << 20)


def _bytes(text: str) -> int:
    shift = {"K": 10, "M": 20, "G": 30}.get(text[-1:], 0)
    return int(text.rstrip("KMG")) << shift


def version(package: str) -> Optional[str]:
    """The version of an installed package, or None."""
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


class Others:
    """Measures, from now on, the share of all cores' time that other processes and other virtual machines use. Only
    Linux reports these times.
    """

    def __init__(self) -> None:
        self.start = _seconds_of_cores()

    def share(self) -> Optional[float]:
        """Returns the share of all cores' time that others used, from 0 to 1, or None if the system does not report it."""
        end = _seconds_of_cores()
        if self.start is None or end is None:
            return None
        everything, busy, own = (after - before for before, after in zip(self.start, end))
        return max(0.0, (busy - own) / everything) if everything else None


def _seconds_of_cores() -> Optional[tuple[float, float, float]]:
    """The total time of all cores, their busy time, and the processor time of this process with its children, in
    seconds.
    """
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    time, second = os.times(), os.sysconf("SC_CLK_TCK")
    own = time.user + time.system + time.children_user + time.children_system
    idle = ticks[3] + ticks[4]
    return sum(ticks) / second, (sum(ticks) - idle) / second, own


def load() -> str:
    """The mean number of running tasks in the last minute."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
