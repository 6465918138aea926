"""The memory that a batch takes, and the available memory."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path
from typing import Any, NamedTuple, Protocol


def memory_cap(bytes_per_row: float, fixed_bytes: float, limit: float, share: float = 0.8) -> int:
    """Rows that fit into ``share`` of a memory limit in addition to the model; 0 if nothing fits."""
    return max(int((limit * share - fixed_bytes) // bytes_per_row), 0)


class Meter(Protocol):
    """Reads the memory that a model uses."""

    name: str
    limit: int
    """Available bytes."""

    def used(self) -> int:
        """Bytes in use, or their maximum so far."""


class HostMemory:
    """This process's largest resident size, relative to the cgroup's limit or all of the host's memory."""

    name = "host"

    def __init__(self) -> None:
        self.limit = _host_limit(Path("/sys/fs/cgroup/memory.max"), Path("/proc/meminfo"))

    def used(self) -> int:
        """Return the high-water mark: it only grows, so sizes must be tried in ascending order."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class GpuMemory:
    """The first GPU's memory, of all processes on it, by NVML."""

    name = "GPU"

    def __init__(self, library: Any) -> None:  # noqa: ANN401 - a ctypes library
        self._library = library
        self._handle = ctypes.c_void_p()
        library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._handle))
        self.limit = self._read().total

    def used(self) -> int:
        """Return the bytes in use now."""
        return int(self._read().used)

    def _read(self) -> _NvmlMemory:
        found = _NvmlMemory()
        self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(found))
        return found


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def gpu() -> GpuMemory | None:
    """Return the first GPU, ``None`` without a driver or a device."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    count = ctypes.c_uint()
    if library.nvmlInit_v2() or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) or not count.value:
        return None
    return GpuMemory(library)


class MemoryFit(NamedTuple):
    """Bytes per row, bytes without rows, and the rows that fit into 80 % of the limit."""

    per_row: float
    fixed: float
    limit: int
    rows: int


def fit(used: dict[int, int], limit: int) -> MemoryFit | None:
    """Fit a line to the bytes in use after batches by rows; ``None`` if they show no significant growth.

    The line goes through the smallest and largest size: allocators grow in steps, and a fit would follow the small
    ones.
    """
    least, most = min(used), max(used)
    growth = used[most] - used[least]
    # Below 1 MiB the growth is the interpreter's, not the model's.
    if most == least or growth < 2**20:
        return None
    per_row = growth / (most - least)
    fixed = used[least] - per_row * least
    return MemoryFit(per_row, fixed, limit, memory_cap(per_row, fixed, limit))


def _host_limit(cgroup: Path, meminfo: Path) -> int:
    total = next(
        int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if line.startswith("MemTotal:")
    )
    text = cgroup.read_text().strip() if cgroup.exists() else "max"
    return total if text == "max" else min(total, int(text))
