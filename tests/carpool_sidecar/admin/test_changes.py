from __future__ import annotations

import logging
import time
from base64 import b64encode

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from carpool.exchange.change import Change, encode
from carpool.policy.parameters import Parameters
from carpool_sidecar.admin.changes import BODY, SIGNATURE, Changes
from carpool_sidecar.admin.signatures import Authority, Refused

KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
TARGET = "ns/Deployment/a"


def change(generation, batch=8, **fields):
    plain = {"target": TARGET, "expires": time.time() + 3600, "parameters": {"*": Parameters(max_batch=batch)}}
    return Change(generation=generation, **plain | fields)


def signed(document, key=KEY):
    body = encode(document)
    return body, b64encode(key.sign(body))


@pytest.fixture
def directory(tmp_path):
    directory = tmp_path / "change"
    directory.mkdir()
    return directory


@pytest.fixture
def seen():
    return []


@pytest.fixture
def changes(directory, seen):
    authority = Authority(KEY.public_key().public_bytes_raw().hex(), TARGET)
    return Changes(authority, seen.append, lambda: 3, logging.getLogger("test"), directory)


def mount(directory, name, files):
    """Put files there as kubelet does: a folder of their own, and a link that is swapped."""
    version = directory / name
    version.mkdir()
    for file, content in files.items():
        (version / file).write_bytes(content)
        link = directory / file
        if not link.is_symlink():
            link.symlink_to(f"..data/{file}")
    (directory / "..new").symlink_to(name)
    (directory / "..new").rename(directory / "..data")


def files(document, key=KEY):
    return dict(zip((BODY, SIGNATURE), signed(document, key), strict=True))


def test_generations_only_grow(changes, seen):
    changes.take(*signed(change(5)))
    changes.take(*signed(change(9)))
    for generation in (1, 3, 5, 8):
        with pytest.raises(Refused, match="not newer than 9"):
            changes.take(*signed(change(generation)))
    assert [each.generation for each in seen] == [5, 9]
    assert changes.rejected == {"older": 4}


def test_what_is_older_than_the_file_is_refused_too(changes, seen):
    with pytest.raises(Refused, match="not newer than 3"):
        changes.take(*signed(change(3)))
    assert seen == []


def test_the_one_in_force_may_come_again_signed_anew_or_not(changes, seen):
    changes.take(*signed(change(5)))
    changes.take(*signed(change(5)))
    changes.take(*signed(change(5, expires=time.time() + 7200)))
    assert len(seen) == 1
    with pytest.raises(Refused, match="not newer"):
        changes.take(*signed(change(5, batch=9)))  # another one under the same number


def test_what_was_replaced_by_a_file_does_not_come_again(changes):
    changes.take(*signed(change(5)))
    changes.superseded()
    with pytest.raises(Refused, match="not newer than 5"):
        changes.take(*signed(change(5)))
    changes.take(*signed(change(6)))


def test_a_directory_that_holds_nothing_or_is_not_there_is_no_fault(changes, directory, seen):
    changes.look()
    directory.rmdir()
    changes.look()
    assert (seen, changes.error, changes.rejected) == ([], None, {})


def test_the_directory_is_taken_from_once_and_again_when_it_changes(changes, directory, seen):
    mount(directory, "..1", files(change(5)))
    changes.look()
    changes.look()
    mount(directory, "..2", files(change(6)))
    changes.look()
    assert [each.generation for each in seen] == [5, 6]
    for name in (BODY, SIGNATURE, "..data"):
        (directory / name).unlink()
    changes.look()  # the ConfigMap was deleted
    assert (len(seen), changes.error) == (2, None)


def test_plain_files_do_too(changes, directory, seen):
    for name, content in files(change(5)).items():
        (directory / name).write_bytes(content)
    changes.look()
    assert [each.generation for each in seen] == [5]


def test_both_files_are_of_one_version(changes, directory, seen, monkeypatch):
    mount(directory, "..1", files(change(5)))
    reads = type(directory).read_bytes

    def swapping(path):
        content = reads(path)
        if path.name == BODY and "..1" in str(path):
            mount(directory, "..2", files(change(6)))  # between the two
            for file in (directory / "..1").iterdir():
                file.unlink()
        return content

    monkeypatch.setattr(type(directory), "read_bytes", swapping)
    changes.look()
    assert [each.generation for each in seen] == [6]
    assert changes.rejected == {}


@pytest.mark.parametrize(
    ("content", "reason", "says"),
    [
        (files(change(5, target="ns/Deployment/b")), "target", "ns/Deployment/b"),
        (files(change(5, expires=1.0)), "expired", "expired"),
        (files(change(5), Ed25519PrivateKey.from_private_bytes(bytes([1] * 32))), "signature", "change.sig"),
        (files(change(5)) | {BODY: b"{}"}, "signature", "change.sig"),
        ({BODY: b"{}"}, "content", "change.sig is not there"),
        ({SIGNATURE: b"AA=="}, "content", "change.json is not there"),
    ],
)
def test_an_invalid_change_is_ignored_and_reported_once(changes, directory, seen, content, reason, says, caplog):
    mount(directory, "..1", content)
    changes.look()
    changes.look()
    assert (seen, changes.rejected) == ([], {reason: 1})
    assert says in changes.error
    assert [(record.reason, record.error) for record in caplog.records] == [(reason, changes.error)]
    mount(directory, "..2", files(change(6)))
    changes.look()
    assert (len(seen), changes.error) == (1, None)


def test_a_change_that_can_not_be_read_is_reported(changes, directory):
    (directory / BODY).mkdir()
    changes.look()
    assert "change.json: Is a directory" in changes.error


def test_a_directory_behind_what_was_pushed_is_no_fault_to_be_shown(changes, directory, seen):
    changes.take(*signed(change(7)))
    mount(directory, "..1", files(change(5)))
    changes.look()
    assert (len(seen), changes.error, changes.rejected) == (1, None, {"older": 1})
    mount(directory, "..2", files(change(7)))
    changes.look()
    assert (len(seen), changes.rejected) == (1, {"older": 1})


def test_a_replay_from_the_directory_is_refused_by_what_was_pushed_and_the_other_way_round(changes, directory, seen):
    mount(directory, "..1", files(change(5)))
    changes.look()
    with pytest.raises(Refused, match="not newer than 5"):
        changes.take(*signed(change(4)))
    assert len(seen) == 1


def test_refusals_fill_no_log(changes, caplog):
    for _ in range(100):
        with pytest.raises(Refused):
            changes.take(b"{}", b"AAAA")
    assert changes.rejected == {"signature": 100}
    assert [record.count for record in caplog.records] == [1, 2, 4, 8, 16, 32, 64]
