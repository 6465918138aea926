from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool_sidecar.config.descriptors import ADMIN_CONNECTIONS, BACKLOG, MOST_CLIENTS, OTHERS, open_files, share


def test_where_there_is_room_everybody_gets_what_is_wanted():
    assert share(1_048_576, 256, 1024) == (MOST_CLIENTS, 1024, BACKLOG)


@given(files=st.integers(1024, 100_000), inference=st.integers(0, 256), forwarded=st.integers(1, 65_536))
def test_never_more_than_there_is(files, inference, forwarded):
    shares = share(files, inference, forwarded)
    assert sum(shares) + inference + ADMIN_CONNECTIONS + OTHERS <= files
    assert min(16, forwarded) <= shares.forwarded <= forwarded
    assert shares.clients >= 16
    assert shares.clients >= min(shares.forwarded, MOST_CLIENTS), "no connection is kept for what no client can ask"


def test_the_usual_soft_limit_is_enough_to_serve():
    clients, forwarded, backlog = share(1024, 256, 1024)
    assert clients >= 150
    assert forwarded >= 150
    assert backlog >= 16


@pytest.mark.parametrize("files", [0, 100])
def test_with_too_few_files_a_few_connections_are_tried_all_the_same(files):
    assert share(files, 256, 1024) == (16, 16, 16)


def test_a_process_opens_as_many_files_as_it_may():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = (
        "import resource; from carpool_sidecar.config.descriptors import *; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (200, {most})); "
        "before = open_files(); raise_limit(); print(before, open_files())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603 - ours
    assert done.stdout.split() == ["200", str(most)]


def test_the_limit_of_this_process_is_read():
    assert open_files() == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
