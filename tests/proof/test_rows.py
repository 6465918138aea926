from __future__ import annotations

from proof.rows import encode, read, write
from tiny import proof


def test_what_is_kept_is_read_again(tmp_path):
    path = tmp_path / "results" / "proof.json"
    write(path, proof())
    assert read(path) == proof()
    assert [each.name for each in path.parent.iterdir()] == ["proof.json"], "nothing half-written is left"


def test_each_row_has_a_line_of_its_own():
    lines = encode(proof()).decode().splitlines()
    assert sum('"contender":"carpool"' in line for line in lines) == 2
    assert max(map(len, lines)) < 1000


def test_an_empty_list_is_one():
    assert b'"hours": []' in encode(proof(hours=[]))
