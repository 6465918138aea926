"""A real model on real files: `magika` classifies each file of a folder from its first and last bytes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import magika
import numpy as np

from carpool_cli.demo.processes import DemoError
from carpool_cli.demo.real_models import RealModel, direct
from carpool_cli.load.servers import request_of
from carpool_cli.profiling.arrays import to_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_FILES = 160
"""Different files; each is sent many times."""


def model(folder: Path, rate: float) -> RealModel:
    """Return magika's model with a request for each file below a folder that needs the model.

    Raises ``DemoError`` if there is none, or if the model's outputs differ from magika's own result.
    """
    path = next(Path(magika.__file__).parent.glob("models/*/model.onnx"))
    own = magika.Magika()
    files, rows = [], []
    for file in _files(folder):
        # The features come from magika's own code, in a function without a public name. None: no model is needed.
        _, features = own._get_result_or_features_from_path(file)  # noqa: SLF001 - see above
        if features is not None:
            files.append(file)
            rows.append(np.array([[*features.beg, *features.mid, *features.end]], np.int32))
    if not files:
        raise DemoError(f"no file below {folder} is long enough for the model")
    inputs = [{"bytes": row} for row in rows]
    expected = direct(path, inputs, "target_label")
    labels = own._target_labels_space  # noqa: SLF001 - likewise
    said = [str(labels[int(scores.argmax())]) for scores in expected]
    for file, label in zip(files, said, strict=True):
        if label != str(own.identify_path(file).dl.label):
            raise DemoError(f"{file}: the model says {label}, magika's own API {own.identify_path(file).dl.label}")
    return RealModel(
        name="magika",
        title=f"magika {magika.__version__}: classifies files by their bytes ({path.stat().st_size / 1e6:.1f} MB)",
        path=path,
        output="target_label",
        inputs=inputs,
        requests=[request_of("v2-binary", to_tensors(row)) for row in inputs],
        expected=expected,
        in_batch=direct(path, inputs, "target_label", copies=2),
        words=[(str(file.relative_to(folder)), label) for file, label in zip(files, said, strict=True)],
        rate=rate,
    )


def _files(folder: Path) -> Iterator[Path]:
    """Walk a folder's own files, with all suffixes early: the n-th file of each suffix before any (n+1)-th."""
    by_suffix: dict[str, list[Path]] = {}
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(names):
            file = Path(place) / name
            if not file.is_symlink():
                by_suffix.setdefault(file.suffix or name, []).append(file)
    ranked = sorted((rank, file) for files in by_suffix.values() for rank, file in enumerate(files))
    yield from (file for _, file in ranked[:MOST_FILES])
