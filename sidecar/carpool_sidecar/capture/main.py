"""The command ``carpool-capture``: redirects some ports of this network namespace to others, and exits."""

from __future__ import annotations

import argparse
import socket
import sys

from carpool_sidecar.capture.nftables import Redirection, answers, batch, expected

OK, FAILED = 0, 1
PATIENCE = 5.0
"""Most seconds to wait for the kernel's answer."""

_NETFILTER = 12
"""Netlink protocol."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="carpool-capture",
        description="Redirects TCP connections that come from outside this network namespace, by port. Needs "
        "NET_ADMIN. Run again, it replaces what it did before.",
    )
    parser.add_argument("redirections", nargs="+", type=_redirection, metavar="PORT=TO", help="such as 8000=14080")
    parser.add_argument(
        "--optional", action="store_true", help="exit with 0 even if it fails: connections stay where they go now"
    )
    options = parser.parse_args(arguments)
    try:
        apply(options.redirections)
    except OSError as error:
        sys.stderr.write(f"carpool-capture: {error}\n")
        return OK if options.optional else FAILED
    shown = ", ".join(f"{each.port} to {each.to}" for each in options.redirections)
    sys.stdout.write(f"carpool-capture: redirected {shown}\n")
    return OK


def apply(redirections: list[Redirection]) -> None:
    """Put redirections in force, in place of the previous ones.

    Raises ``OSError``, with nothing changed, if this process is not allowed to, or the kernel can't.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER) as kernel:
        kernel.bind((0, 0))
        kernel.settimeout(PATIENCE)
        kernel.send(batch(redirections))
        left = expected(redirections)
        while left > 0:
            for answer in answers(kernel.recv(65536)):
                if answer is not None:
                    raise OSError(answer.code, _why(answer.code))
                left -= 1


def _why(code: int) -> str:
    if code in {1, 13}:
        return "the kernel refuses it: the container needs the capability NET_ADMIN, and user 0"
    return "the kernel can't redirect ports with nftables (it needs nft_redir, and Linux 5.2)"


def _redirection(text: str) -> Redirection:
    port, _, to = text.partition("=")
    for each in (port, to):
        if not (each.isascii() and each.isdigit() and len(each) <= 5 and 1 <= int(each) <= 65535):
            raise argparse.ArgumentTypeError(f"{text!r} is no redirection: write two ports, such as 8000=14080")
    return Redirection(int(port), int(to))


if __name__ == "__main__":
    sys.exit(main())
