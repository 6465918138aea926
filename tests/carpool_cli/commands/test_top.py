from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from carpool_cli.commands.top import watch
from carpool_cli.live.admin_client import AdminClient, AdminError
from carpool_cli.options import ADDRESS

if TYPE_CHECKING:
    from carpool.exchange.report import Report
    from carpool_cli.options import Address


def address(url: str) -> Address:
    return ADDRESS.convert(url, None, None)


class Leaving(AdminClient):
    """A sidecar that is gone at the third look."""

    looks = 0

    def report(self) -> Report:
        self.looks += 1
        if self.looks > 2:
            raise AdminError("gone")
        return super().report()


def test_it_looks_while_it_should_and_leaves_the_last_frame(up, capsys):
    pauses = []
    watch(AdminClient(address(up.admin)), "carpool here", goes_on=lambda: len(pauses) < 3, pause=pauses.append)
    assert len(pauses) == 3
    assert capsys.readouterr().out.rstrip().splitlines()[-1]


def test_without_a_terminal_it_looks_once(up, carpool):
    result = carpool("top", up.admin)
    assert result.exit_code == 0
    assert result.output.startswith("carpool  ready  up ")


def test_a_sidecar_that_goes_is_an_error_unless_it_was_to_go(up):
    client = Leaving(address(up.admin))
    with pytest.raises(AdminError, match="gone"):
        watch(client, "", pause=lambda _: None)
    client.looks = 0
    watch(client, "", goes_on=lambda: client.looks < 3, pause=lambda _: None)


def test_the_hint_is_asked_with_whether_the_model_is_ready(up):
    asked, pauses = [], []
    watch(
        AdminClient(address(up.admin)),
        "",
        hint=lambda ready: f"try {asked.append(ready)}",
        goes_on=lambda: not pauses,
        pause=pauses.append,
    )
    assert asked == [True]
