"""`make images` and `make test-images`: installs the Debian packages of programs that are missing.

Root gets them by apt; other users get the command to run. Each package has the name of its program.

Exit codes: 0, all are here; 1, not so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys


def missing(programs: list[str]) -> list[str]:
    """Return the programs that are not here."""
    return [program for program in programs if shutil.which(program) is None]


def main(programs: list[str]) -> int:
    """Install what is missing; returns the exit code."""
    wanted = missing(programs)
    if not wanted:
        return 0
    commands = [["apt-get", "update"], ["apt-get", "install", "--yes", "--no-install-recommends", *wanted]]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        said = " && ".join(f"sudo {' '.join(command)}" for command in commands)
        sys.stderr.write(f"{', '.join(wanted)}: not installed. On Debian and Ubuntu: {said}\n")
        return 1
    for command in commands:
        code = subprocess.run(command, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}, check=False).returncode
        if code:
            return 1
    return 1 if missing(wanted) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
