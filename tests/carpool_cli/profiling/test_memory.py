from __future__ import annotations

import ctypes

from carpool_cli.profiling import memory
from carpool_cli.profiling.memory import GpuMemory, HostMemory, fit, memory_cap

MIB = 2**20


def test_a_row_costs_the_growth_between_the_smallest_and_the_largest_batch():
    found = fit({1: 101 * MIB, 2: 102 * MIB, 64: 164 * MIB}, 1000 * MIB)
    assert (found.per_row, found.fixed) == (MIB, 100 * MIB)
    # 80 % of 1000 MiB less 100 MiB.
    assert found.rows == 700


def test_the_rows_that_fit_into_a_share_of_the_limit():
    assert memory_cap(1e6, 2e9, 4e9) == 1200
    assert memory_cap(1e6, 4e9, 4e9) == 0
    assert memory_cap(1e6, 0, 4e9, share=0.5) == 2000


def test_no_growth_is_no_limit():
    assert fit({1: 100 * MIB, 64: 100 * MIB + 1000}, 1000 * MIB) is None
    assert fit({1: 100 * MIB}, 1000 * MIB) is None


def test_the_cgroups_limit_counts_when_it_is_lower(tmp_path):
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text("MemFree: 1 kB\nMemTotal: 2048 kB\n")
    assert memory._host_limit(cgroup, meminfo) == 2048 * 1024
    cgroup.write_text("max\n")
    assert memory._host_limit(cgroup, meminfo) == 2048 * 1024
    cgroup.write_text("4096\n")
    assert memory._host_limit(cgroup, meminfo) == 4096


def test_this_process_uses_some_of_what_there_is():
    host = HostMemory()
    assert 0 < host.used() < host.limit


class FakeLibrary:
    """NVML with one device of 80 GiB."""

    used = 5 * MIB

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle):  # noqa: N802 - NVML's names
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle, found):  # noqa: N802 - NVML's names
        ctypes.cast(found, ctypes.POINTER(memory._NvmlMemory)).contents.total = 80 * 2**30
        ctypes.cast(found, ctypes.POINTER(memory._NvmlMemory)).contents.used = self.used
        return 0


def test_a_gpu_is_read_by_nvml():
    gpu = GpuMemory(FakeLibrary())
    assert (gpu.limit, gpu.used()) == (80 * 2**30, 5 * MIB)


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(memory.ctypes, "CDLL", missing)
    assert memory.gpu() is None
