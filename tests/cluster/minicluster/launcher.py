"""The first process of a container: makes its root, enters it and becomes the container's command.

Started as ``unshare --pid --mount --uts ... python -I -S launcher.py SPEC FD``. SPEC is a JSON file:

    {"argv", "environment", "directory", "hostname", "root", "scratch", "hidden", "read_only",
     "mounts": [{"source", "target", "read_only"}]}

The root is an overlay of the machine's own, or of an image's where ``root`` names its folder: everything is there, and
nothing that is written to it stays. One line goes to the descriptor FD: ``ok``, or why there is no container.
"""
# Importing pathlib costs more than all the rest, at each start of a container.
# ruff: noqa: PTH102, PTH103, PTH106, PTH112, PTH114, PTH115, PTH116, PTH120, PTH123, PTH208, PTH211

import ctypes
import json
import os
import sys

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384
MNT_DETACH = 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# Shared with the machine as they are: devices and the kernel's own trees.
SHARED = ("/dev", "/sys")
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = [text.encode() or None for text in (source, target, kind)]
    _check(_libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def _overlay(lower: str, scratch: str, target: str) -> None:
    """Show a folder at ``target`` such that writes go to ``scratch``."""
    for name in ("upper", "work"):
        os.makedirs(f"{scratch}/{name}")
    options = f"lowerdir={lower},upperdir={scratch}/upper,workdir={scratch}/work"
    try:
        _mount("overlay", target, "overlay", 0, options)
    except PermissionError:
        _mount("overlay", target, "overlay", 0, options + ",userxattr")  # in a user namespace


def _bind(source: str, target: str, *, read_only: bool) -> None:
    """Show a file or folder at a place that is made if need be."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    _mount(source, target, "", MS_BIND | MS_REC)
    if read_only:
        # The flags that it has may be locked: they are named again.
        flags = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
        _mount("", target, "", MS_BIND | MS_REMOUNT | MS_RDONLY | flags)


def _places() -> list[str]:
    """Return what a root is made of, in order: what lies in the machine's, and what is mounted deeper down."""
    with open("/proc/self/mountinfo") as lines:
        mounted = {line.split()[4].encode().decode("unicode_escape") for line in lines}
    deeper = {point for point in mounted if point.count("/") > 1 and not point.startswith((*SHARED, "/proc/"))}
    return sorted(filter(os.path.exists, {f"/{name}" for name in os.listdir("/")} | deeper))


def _make_root(scratch: str) -> tuple[str, list[str]]:
    """Make a folder that shows the machine's files, in this mount namespace alone.

    Returns:
        The folder, and the places in it that can be written.
    """
    places = _places()
    _mount("tmpfs", scratch, "tmpfs")
    root = f"{scratch}/root"
    os.mkdir(root)
    _mount("tmpfs", root, "tmpfs")
    open_places, closed = ["/"], ["/proc"]
    for number, place in enumerate(places):
        if place.startswith(tuple(f"{one}/" for one in closed)):
            continue
        if os.path.islink(place):
            os.symlink(os.readlink(place), root + place)
        elif place == "/proc":
            os.mkdir(root + place)
            _mount("proc", root + place, "proc")
        elif place in SHARED:
            os.mkdir(root + place)
            _mount(place, root + place, "", MS_BIND | MS_REC)
        elif not os.path.isdir(place):
            _bind(place, root + place, read_only=True)
        else:
            os.makedirs(root + place, exist_ok=True)
            try:
                # One for each folder: root in a user namespace may not mount an overlay of the whole root.
                _overlay(place, f"{scratch}/{number}", root + place)
                open_places.append(place)
            except OSError:  # what lies there cannot be below an overlay
                _bind(place, root + place, read_only=True)
                closed.append(place)
    if os.path.ismount(f"{root}/dev/shm"):  # noqa: S108 - the container's own
        _mount("tmpfs", f"{root}/dev/shm", "tmpfs")  # noqa: S108 - likewise
    return root, open_places


def _unpacked_root(image: str, scratch: str) -> tuple[str, list[str]]:
    """Make a folder that shows an image's files, as ``_make_root`` does."""
    _mount("tmpfs", scratch, "tmpfs")
    root = f"{scratch}/root"
    os.mkdir(root)
    _overlay(image, f"{scratch}/0", root)
    _mount("proc", f"{root}/proc", "proc")
    for place in SHARED:
        _mount(place, root + place, "", MS_BIND | MS_REC)
    return root, ["/"]


def _enter(root: str) -> None:
    os.mkdir(f"{root}/.machine")
    os.chdir(root)
    _check(_libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], b".", b".machine"), "pivot_root")
    os.chdir("/")


def _find(program: str, path: str) -> str:
    if "/" in program:
        return program
    for folder in path.split(os.pathsep):
        if os.access(f"{folder}/{program}", os.X_OK):
            return f"{folder}/{program}"
    raise FileNotFoundError(f'exec: "{program}": executable file not found in $PATH')


def main() -> None:
    """Become the container."""
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    report = int(sys.argv[2])
    os.set_inheritable(report, False)
    try:
        _check(_libc.sethostname(spec["hostname"].encode(), len(spec["hostname"])), "sethostname")
        image, scratch = spec["root"], spec["scratch"]
        root, writable = _unpacked_root(image, scratch) if image else _make_root(scratch)
        _enter(root)
        if os.path.isdir(spec["hidden"]):
            _mount("tmpfs", spec["hidden"], "tmpfs")  # the cluster's keys and tokens are not the container's
        for mount in spec["mounts"]:
            _bind("/.machine" + mount["source"], mount["target"], read_only=mount["read_only"])
        _check(_libc.umount2(b"/.machine", MNT_DETACH), "umount2")
        os.rmdir("/.machine")
        os.makedirs(spec["directory"], exist_ok=True)
        if spec["read_only"]:
            for place in writable:
                _mount("", place, "", MS_BIND | MS_REMOUNT | MS_RDONLY)
        os.chdir(spec["directory"])
        program = _find(spec["argv"][0], spec["environment"]["PATH"])
        os.stat(program)
    except OSError as error:
        os.write(report, f"{error.strerror or error}\n".replace("\n", " ").encode() + b"\n")
        os._exit(128)
    os.write(report, b"ok\n")
    os.execve(program, spec["argv"], spec["environment"])  # noqa: S606 - the container's command


if __name__ == "__main__":
    main()
