"""Every fuzzer in turn: ``python tests/fuzz.py [--iterations N] [--seed S]``; exits 1 at the first finding."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
import traceback
from pathlib import Path

FUZZERS = sorted(Path(__file__).parent.glob("**/fuzz.py"))


def main() -> int:
    """Run them; returns the exit code."""
    parser = argparse.ArgumentParser(description="Throw damaged bytes at every parser.")
    parser.add_argument("--iterations", type=int, default=100_000, help="rounds of each fuzzer (100000)")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="replays a run (default: the time)")
    options = parser.parse_args()
    for path in FUZZERS:
        if path == Path(__file__):
            continue
        name = path.relative_to(Path(__file__).parent)
        print(f"{name}: {options.iterations} rounds, seed {options.seed}", flush=True)  # noqa: T201 - a script prints
        spec = importlib.util.spec_from_file_location(f"{path.parent.name}_fuzz", path)
        assert spec is not None
        assert spec.loader is not None
        fuzzer = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fuzzer)
        try:
            outcomes = fuzzer.main(options.iterations, options.seed)
        except Exception:  # noqa: BLE001 - whatever it is, it is a finding
            traceback.print_exc()
            return 1
        print("  " + ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items())))  # noqa: T201 - likewise
    return 0


if __name__ == "__main__":
    sys.exit(main())
