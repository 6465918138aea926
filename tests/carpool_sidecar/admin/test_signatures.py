from __future__ import annotations

from base64 import b64encode, urlsafe_b64encode

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from carpool.exchange.change import Change, Ticket, encode
from carpool.policy.parameters import Parameters
from carpool_sidecar.admin.signatures import REMEMBERED, SKEW, Authority, Refused

NOW = 1.79e9
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes([1] * 32))
CHANGE = Change(target="ns/Deployment/a", generation=1, expires=NOW + 60, parameters={"*": Parameters()})
TICKET = Ticket(target="ns/Deployment/a", expires=NOW + 60)


@pytest.fixture
def authority():
    return Authority(KEY.public_key().public_bytes_raw().hex(), "ns/Deployment/a")


def header(document, key=KEY):
    body = encode(document)
    return b"Carpool " + b".".join(urlsafe_b64encode(part).rstrip(b"=") for part in (body, key.sign(body)))


def refused(act, *arguments):
    with pytest.raises(Refused) as told:
        act(*arguments)
    return told.value.reason


def replaced(document, **fields):
    return type(document)(**{name: getattr(document, name) for name in document.__struct_fields__} | fields)


def test_a_signed_change_is_read(authority):
    body = encode(CHANGE)
    assert authority.change(body, b64encode(KEY.sign(body)), NOW) == CHANGE
    assert authority.change(body, b64encode(KEY.sign(body)) + b"\n", NOW) == CHANGE  # as a file ends


@pytest.mark.parametrize("signature", [b"", b"!", b"AAAA", b64encode(bytes(64)), b"\xff", b"\xc3\xa4"])
def test_what_is_no_signature_is_refused(authority, signature):
    assert refused(authority.change, encode(CHANGE), signature, NOW) == "signature"


def test_a_signature_is_of_one_key_and_of_every_byte(authority):
    body = encode(CHANGE)
    assert refused(authority.change, body, b64encode(OTHER.sign(body)), NOW) == "signature"
    assert refused(authority.change, body + b" ", b64encode(KEY.sign(body)), NOW) == "signature"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"target": "ns/Deployment/b"}, "target"),
        ({"target": ""}, "target"),
        ({"expires": NOW - SKEW}, "expired"),
        ({"expires": float("-inf")}, "content"),
        ({"parameters": {}}, "content"),
    ],
)
def test_what_is_signed_for_others_or_another_time_or_is_wrong_is_refused(authority, fields, reason):
    body = encode(replaced(CHANGE, **fields))
    assert refused(authority.change, body, b64encode(KEY.sign(body)), NOW) == reason


def test_clocks_may_differ_by_a_minute(authority):
    body = encode(replaced(CHANGE, expires=NOW - SKEW + 1))
    assert authority.change(body, b64encode(KEY.sign(body)), NOW)
    authority.admit(header(replaced(TICKET, expires=NOW - SKEW + 1)), NOW)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b"{}", b"1"])
def test_what_was_signed_and_is_no_document_is_refused(authority, body):
    assert refused(authority.change, body, b64encode(KEY.sign(body)), NOW) == "content"


def test_a_ticket_lets_in_until_it_ends(authority):
    for now in (NOW, NOW + 60 + SKEW - 1):
        authority.admit(header(TICKET), now)
    assert refused(authority.admit, header(TICKET), NOW + 60 + SKEW) == "expired"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (header(TICKET, OTHER), "signature"),
        (header(replaced(TICKET, target="ns/Deployment/b")), "target"),
        (header(replaced(TICKET, expires=1.0)), "expired"),
        (header(CHANGE), "content"),
        (b"Carpool ", "signature"),
        (b"Carpool e30", "signature"),
        (b"Carpool e30.", "signature"),
        (b"Carpool \xff.\xff", "signature"),
        (b"Carpool a.a.a", "signature"),
        (header(TICKET)[:-4], "signature"),
    ],
)
def test_what_is_no_ticket_for_here_and_now_lets_nobody_in(authority, given, reason):
    assert refused(authority.admit, given, NOW) == reason


def test_a_ticket_is_no_change(authority):
    body = encode(TICKET)
    assert refused(authority.change, body, b64encode(KEY.sign(body)), NOW) == "content"


def test_the_same_ticket_is_verified_once_and_few_are_remembered(authority, monkeypatch):
    given = header(TICKET)
    authority.admit(given, NOW)
    with monkeypatch.context() as without:
        without.setattr(authority, "_keys", ())
        authority.admit(given, NOW)
    for number in range(3 * REMEMBERED):
        authority.admit(header(replaced(TICKET, expires=NOW + number)), NOW)
    assert len(authority._tickets) == REMEMBERED
