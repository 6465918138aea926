"""ONNX files on the requested device, with sessions that keep changing batch sizes fast.

If a CUDA library is missing, onnxruntime falls back to the CPU without an error: answers are right, but tens of times
slower. And on CUDA a session plans its convolutions again whenever the batch size changes: 130 to 220 ms for ResNet-50
on an H100, for a batch of 2 ms (benchmarks/gpu; microsoft/onnxruntime issue 23006).
"""

from __future__ import annotations

import io
import logging
import mmap
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import onnxruntime

from carpool.policy.plain import PolicyError
from carpool_sidecar.backends.arrays import DATATYPES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Device = Literal["Auto", "CPU", "CUDA"]

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"

WARM_ROWS = 32
"""The largest batch that gets a session before traffic comes: the policy's default bound."""

MAX_SIZES = 16
"""Most sizes with their own session: each session holds another copy of the model's weights."""

_CUDA_OPTIONS = {"cudnn_conv_algo_search": "HEURISTIC"}
"""The default tries all algorithms for a new size: 0.2 to 1.2 s for ResNet-50 on an H100, and no faster batches."""

_CONVOLUTIONS = (b'"\x04Conv', b'"\x0dConvTranspose')
"""``op_type`` of a node as it stands in a file: the field's tag, its length and the name."""

_log = logging.getLogger("carpool.onnx")


class Model:
    """An ONNX file that is run from several threads.

    With convolutions on CUDA the batch sizes 1, 2, 3, 4, 6, 8, 12, 16, ... have a session each.
    """

    def __init__(self, path: str | Path, *, threads: int = 0, device: Device = "Auto") -> None:
        """Load the file at ``path``; ``threads`` compute one run on a CPU, 0 leaves the choice to the runtime.

        Auto takes CUDA if the runtime was built with it and it can be used; ``fallback`` says why not.

        Raises ``PolicyError`` for a file that is missing or broken, and for CUDA if it can't be used.
        """
        self._path, self._threads, self._device = path, threads, device
        check(path)
        self._version = _version(path)
        self._session = _open(path, threads, device)
        self.inputs: list[Any] = self._session.get_inputs()
        self.outputs: list[Any] = self._session.get_outputs()
        self.on_gpu = CUDA in self._session.get_providers()
        self.fallback = "" if self.on_gpu or device == "CPU" else _trouble()
        """Why the CPU is used although the runtime was built with CUDA; empty: it is not, or was requested."""
        batch = [value.shape[0] if value.shape else 0 for value in (*self.inputs, *self.outputs)]
        self._sized = self.on_gpu and not any(isinstance(size, int) for size in batch) and _convolves(path)
        self._sessions: dict[int, Any] = {}
        """By rows. If no more could be opened, all other sizes share one."""
        self._opening = Lock()

    def warm(self, rows: int = WARM_ROWS) -> None:
        """Make the sessions for batches of up to ``rows`` rows, if sizes have their own: takes seconds."""
        if not self._sized or any(not isinstance(size, int) for value in self.inputs for size in value.shape[1:]):
            return
        size = 1
        try:
            while size <= rows:
                kinds = {value.name: DTYPES[DATATYPES[value.type]] for value in self.inputs}
                self.run(None, {each.name: np.zeros((size, *each.shape[1:]), kinds[each.name]) for each in self.inputs})
                size = padded(size + 1)
        except Exception as error:  # noqa: BLE001 - the runtime raises what it likes; traffic will show whether it matters
            self._sessions[size] = self._session
            _log.warning("a batch could not be tried", extra={"rows": size, "error": str(error)})

    def run(self, names: Sequence[str] | None, arrays: Mapping[str, Any], *, pad: bool = False) -> list[Any]:
        """Compute the outputs called ``names`` (None: all) of one batch; raises what the runtime raises.

        ``pad``: rows are independent. If sizes have their own sessions, the batch is then filled up with copies of its
        last row to the next size that has one.
        """
        lengths = {len(array) if array.ndim else 0 for array in arrays.values()} if self._sized else set()
        rows = lengths.pop() if len(lengths) == 1 else 0
        if rows and (size := padded(rows)) > rows and pad:
            try:
                found = self._of_size(size).run(names, {name: _filled(array, size) for name, array in arrays.items()})
            except Exception:  # noqa: BLE001 - it may be too large; the batch is then computed unpadded
                found = []
            if found and all(getattr(array, "shape", ())[:1] == (size,) for array in found):
                return [array[:rows] for array in found]
        return list((self._of_size(rows) if rows else self._session).run(names, arrays))

    def _of_size(self, rows: int) -> Any:  # noqa: ANN401 - the runtime publishes no types
        session = self._sessions.get(rows)
        if session is not None or padded(rows) != rows or len(self._sessions) >= MAX_SIZES:
            return session or self._session
        with self._opening:
            if rows not in self._sessions:
                try:
                    self._sessions[rows] = self._another()
                except (PolicyError, OSError) as error:
                    _log.warning("no session for a size of its own", extra={"rows": rows, "error": str(error)})
                    self._sessions[rows] = self._session
            return self._sessions[rows]

    def _another(self) -> Any:  # noqa: ANN401 - the runtime publishes no types
        """Return one more session of the model that was loaded. Raises ``PolicyError`` or ``OSError``."""
        session = _open(self._path, self._threads, self._device)
        if _version(self._path) != self._version:  # afterwards, since it may be replaced while it is read
            raise PolicyError(
                "onnx.path", f"{self._path} has changed since it was loaded: restart to serve the new file"
            )
        return session


def padded(rows: int) -> int:
    """Return the least of 1, 2, 3, 4, 6, 8, 12, 16, ... that is at least ``rows``."""
    octave = 1 << (rows - 1).bit_length()
    return 3 * octave // 4 if octave >= 4 and rows <= 3 * octave // 4 else octave


def _filled(array: Any, size: int) -> Any:  # noqa: ANN401 - numpy's types say little here
    missing = size - len(array)
    return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)]) if missing else array


def _convolves(path: str | Path) -> bool:
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return any(data.find(each) >= 0 for each in _CONVOLUTIONS)


def _version(path: str | Path) -> tuple[int, int, int]:
    facts = Path(path).stat()
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def check(path: str | Path) -> None:
    """Raise ``PolicyError`` if there is no file."""
    if not Path(path).is_file():
        raise PolicyError("onnx.path", f"there is no file {path}: name the model's .onnx file")


def _open(path: str | Path, threads: int, device: Device) -> Any:  # noqa: ANN401 - the runtime publishes no types
    check(path)
    built = CUDA in onnxruntime.get_available_providers()
    if device == "CUDA" and not built:
        raise PolicyError(
            "onnx.device", "this onnxruntime has no CUDA: install onnxruntime-gpu (extra `gpu`), or use CPU"
        )
    wanted = built and device != "CPU"
    if wanted:
        _load_libraries()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors come as exceptions; warnings about a model's graph help nobody here
    providers = [(CUDA, _CUDA_OPTIONS), CPU] if wanted else [CPU]
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:
        raise PolicyError("onnx.path", f"{path} can't be loaded: {error}") from error
    if device == "CUDA" and CUDA not in session.get_providers():
        raise PolicyError("onnx.device", f"{_trouble()} Or use CPU")
    return session


def _trouble() -> str:
    """Return why CUDA can't be used; empty if the runtime was built without it."""
    if CUDA not in onnxruntime.get_available_providers():
        return ""
    said = _load_libraries() or "the runtime printed why"
    return f"CUDA can't be used ({said}): is there a GPU, and are its libraries and cuDNN installed (extra `gpu`)?"


@cache
def _load_libraries() -> str:
    """Load the libraries of NVIDIA's packages, which are on no search path; return the first failure, in one line.

    Runs once, with the first file: its output is captured for the whole process.
    """
    load = getattr(onnxruntime, "preload_dlls", None)
    if load is None:
        return ""
    printed = io.StringIO()
    with redirect_stdout(printed):
        load()
    return next((line.strip() for line in printed.getvalue().splitlines() if line.strip()), "")
