"""The GPU's own metrics while load runs: busy share and energy, from NVML."""

from __future__ import annotations

import threading
from typing import Any, Self

try:
    import pynvml
except ImportError:
    pynvml = None


class Watch:
    """Between entering and leaving: mean utilization (samples of 0.1 s) and joules."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._done = threading.Event()
        self._busy: list[int] = []
        self.found: dict[str, float] = {}
        if pynvml is not None:
            try:
                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            except pynvml.NVMLError:
                self._handle = None

    @property
    def name(self) -> str:
        """What the GPU is called; empty without one."""
        return str(pynvml.nvmlDeviceGetName(self._handle)) if self._handle else ""

    def __enter__(self) -> Self:
        """Begin."""
        self._done.clear()
        self._busy, self.found = [], {}
        if self._handle:
            self._joules = self._energy()
            self._thread = threading.Thread(target=self._sample)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._done.set()
        if self._handle:
            self._thread.join()
            self.found = {
                "nvmlBusy": sum(self._busy) / max(1, len(self._busy)) / 100,
                "joules": self._energy() - self._joules,
            }

    def _energy(self) -> float:
        try:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3
        except pynvml.NVMLError:
            return 0.0

    def _sample(self) -> None:
        while not self._done.wait(0.1):
            self._busy.append(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
