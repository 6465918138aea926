from __future__ import annotations

from base64 import b64decode, b64encode
from itertools import count

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from carpool.exchange.change import Change
from carpool.policy.parameters import Parameters
from carpool_operator.api.model import Target
from carpool_operator.cluster.kube import ApiError
from carpool_operator.cluster.writing import NotLeading, Writer
from carpool_operator.delivery.signing import (
    PRIVATE,
    PUBLIC,
    PUBLIC_MAP,
    SECRET,
    TICKET_LIFE,
    BadKey,
    Signer,
    new_key,
    obtain,
)
from carpool_sidecar.admin.signatures import Authority, Refused

TARGET = Target("ns", "Deployment", "web")
WALL = 1_800_000_000.0


def change(**fields):
    given = {"target": str(TARGET), "generation": 7, "expires": WALL + 100, "parameters": {"*": Parameters()}}
    return Change(**{**given, **fields})


def test_a_sidecar_takes_what_the_operator_signs():
    signer = Signer(new_key())

    body, signature = signer.sign(change())

    assert Authority(signer.public, str(TARGET)).change(body, signature.encode(), WALL) == change()
    assert signer.sign(change()) == (body, signature)  # the same bytes again: nothing is written for it


def test_a_sidecar_lets_its_tickets_in():
    signer = Signer(new_key())
    authority = Authority(signer.public, str(TARGET))

    authority.admit(signer.ticket(TARGET, WALL).encode(), WALL + TICKET_LIFE / 2)

    with pytest.raises(Refused):
        authority.admit(signer.ticket(Target("ns", "Deployment", "other"), WALL).encode(), WALL)
    with pytest.raises(Refused):
        authority.admit(signer.ticket(TARGET, WALL).encode(), WALL + TICKET_LIFE + 61)


def test_a_ticket_serves_for_half_its_life():
    signer = Signer(new_key())
    first = signer.ticket(TARGET, WALL)

    assert signer.ticket(TARGET, WALL + TICKET_LIFE / 2 - 1) == first
    assert signer.ticket(TARGET, WALL + TICKET_LIFE / 2 + 1) != first


def test_it_believes_only_what_it_signed():
    signer, other = Signer(new_key()), Signer(new_key())
    body, signature = signer.sign(change())

    assert signer.read(body, signature) == change()
    assert other.read(body, signature) is None
    assert signer.read(body.replace(b"7", b"8"), signature) is None
    assert signer.read(body, "no base64!") is None
    assert signer.read(b"", "") is None
    ticket = signer.ticket(TARGET, WALL).removeprefix("Carpool ")
    payload, _, signed = ticket.partition(".")
    altchars = b"-_"
    assert signer.read(b64decode(payload, altchars), b64encode(b64decode(signed, altchars)).decode()) is None


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"no key",
        generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    ],
)
def test_a_key_that_can_not_sign_is_named(pem):
    with pytest.raises(BadKey, match=SECRET):
        Signer(pem)


async def test_it_makes_the_key_once_and_publishes_its_other_half(api, writer):
    first = await obtain(writer, "ns")
    again = await obtain(writer, "ns")

    assert again.public == first.public
    assert api.get("v1", "configmaps", PUBLIC_MAP)["data"] == {PUBLIC: first.public}
    assert api.writes == {("secrets", SECRET): 1, ("configmaps", PUBLIC_MAP): 1}
    stored = b64decode(api.get("v1", "secrets", SECRET)["data"][PRIVATE])
    assert Signer(stored).public == first.public


async def test_of_two_that_make_one_at_once_both_end_with_the_first(api, writer):
    theirs = new_key()
    secret = {"metadata": {"name": SECRET}, "data": {PRIVATE: b64encode(theirs).decode()}}
    reads = count()
    answered = writer.read

    async def read(path, query=None):
        try:
            return await answered(path, query)
        finally:
            if next(reads) == 0:
                api.put("v1", "secrets", secret)  # just after it saw that there was none

    writer.read = read

    assert (await obtain(writer, "ns")).public == Signer(theirs).public


async def test_it_makes_none_where_it_may_not_read_or_does_not_lead(api, writer):
    api.fail("GET", 403)
    with pytest.raises(ApiError):
        await obtain(writer, "ns")
    kube = api.kube()
    with pytest.raises(NotLeading):
        await obtain(Writer(kube, lambda: False), "ns")

    assert api.all("secrets") == []
    kube.close()
