"""One key is replaced by another while sidecars run: none of them restarts, and none is without a valid document."""

from __future__ import annotations

import logging
from base64 import b64encode

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat
from fleets import spec

from carpool.policy.parameters import Parameters
from carpool_operator.api.model import Target
from carpool_operator.delivery.documents import Publisher, sidecar_policy
from carpool_operator.delivery.signing import (
    PRIVATE,
    PUBLIC,
    PUBLIC_MAP,
    SECRET,
    BadKey,
    Signer,
    new_key,
    obtain,
    refresh,
)
from carpool_sidecar.admin import changes as module
from carpool_sidecar.admin.changes import Changes
from carpool_sidecar.admin.signatures import Authority, Refused

TARGET = Target("shop", "Deployment", "resnet")
WALL = 1_800_000_000.0
OLD, NEW = new_key(), new_key()
ENCRYPTED = Ed25519PrivateKey.generate().private_bytes(
    Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
)
FIRST, BOTH, LAST = {PRIVATE: OLD}, {PRIVATE: OLD, "next.pem": NEW}, {"next.pem": NEW}


@pytest.fixture(autouse=True)
def now(monkeypatch):
    monkeypatch.setattr(module, "time", lambda: WALL)


class Sidecar:
    def __init__(self, public):
        self.taken = []
        self.authority = Authority(public, str(TARGET))
        self._changes = Changes(self.authority, self.taken.append, lambda: 0, logging.getLogger("test"))

    def take(self, signed):
        body, signature = signed
        self._changes.take(body, signature.encode())

    def refuses(self, signed):
        with pytest.raises(Refused) as refused:
            self.take(signed)
        return refused.value.reason


class Operator:
    def __init__(self, secret):
        self.signer = Signer(secret)
        self._publisher = Publisher(TARGET)

    def publish(self):
        self._publisher.keys = self.signer.announced
        document = self._publisher.publish(0.0, WALL, sidecar_policy(spec().policy()), {"*": Parameters()})
        return self.signer.sign(document.change)

    def is_due(self):
        self._publisher.keys = self.signer.announced
        return self._publisher.is_due(1.0, WALL + 1)


def test_sidecars_follow_from_one_key_to_the_next():
    operator = Operator(FIRST)
    sidecar = Sidecar(operator.signer.public)
    sidecar.take(operator.publish())
    assert not operator.is_due()

    operator.signer.adopt(BOTH)
    assert operator.is_due()  # for that alone
    both = operator.publish()
    sidecar.take(both)  # it knows the old key, by which it learns the new one
    started = Sidecar(operator.signer.public)
    started.take(both)  # one that is injected meanwhile has both

    operator.signer.adopt(LAST)
    assert operator.is_due()
    last = operator.publish()
    for each in (sidecar, started):
        each.take(last)
        each.authority.admit(operator.signer.ticket(TARGET, WALL).encode(), WALL)
        # The old key is worth nothing by now, and what brought it cannot come again.
        assert each.refuses(Operator(FIRST).publish()) == "signature"
        with pytest.raises(Refused, match="signature"):
            each.authority.admit(Signer(FIRST).ticket(TARGET, WALL).encode(), WALL)
        assert each.refuses(both) == "older"
    assert not operator.is_due()


def test_a_sidecar_that_missed_the_change_refuses_and_says_so():
    operator = Operator(FIRST)
    sidecar = Sidecar(operator.signer.public)
    operator.signer.adopt(LAST)
    assert sidecar.refuses(operator.publish()) == "signature"
    assert sidecar.taken == []


def test_with_one_key_documents_are_what_older_sidecars_read():
    body, signature = Operator(FIRST).publish()
    assert b"keys" not in body
    assert "," not in signature
    assert "," not in Signer(FIRST).ticket(TARGET, WALL)


def test_what_one_of_its_keys_signed_is_believed_again_after_a_restart():
    body, signature = Operator(BOTH).publish()
    for secret in (FIRST, BOTH, LAST):
        assert Signer(secret).read(body, signature) is not None
    assert Signer(new_key()).read(body, signature) is None


@pytest.mark.parametrize(
    ("secret", "said"),
    [
        ({}, "no entry that ends in .pem"),
        ({"note": b"text"}, "no entry that ends in .pem"),
        ({PRIVATE: OLD, "next.pem": b"text"}, "under next.pem"),
        ({PRIVATE: OLD, "next.pem": ENCRYPTED}, "without a passphrase under next.pem"),
        ({f"{number}.pem": OLD for number in range(9)}, "9 keys: sidecars take 8"),
    ],
)
def test_keys_that_can_not_sign_change_nothing(secret, said):
    signer = Signer(FIRST)
    with pytest.raises(BadKey, match=said):
        signer.adopt(secret)
    assert signer.public == Signer(OLD).public


def hold(api, secret):
    data = {name: b64encode(pem).decode() for name, pem in secret.items()}
    api.put("v1", "secrets", {"metadata": {"name": SECRET}, "data": data})


async def test_the_operator_takes_up_other_keys_while_it_runs(api, writer):
    hold(api, FIRST)
    signer = await obtain(writer, "ns")
    assert not await refresh(writer, "ns", signer)

    hold(api, BOTH)
    assert await refresh(writer, "ns", signer)

    both = Signer(BOTH).public
    assert signer.public == both
    assert both.count(",") == 1
    assert api.get("v1", "configmaps", PUBLIC_MAP)["data"] == {PUBLIC: both}


@pytest.mark.parametrize("altered", [None, {PUBLIC: "0" * 64}])
async def test_public_keys_that_somebody_deletes_or_alters_are_published_again(api, writer, altered):
    hold(api, FIRST)
    signer = await obtain(writer, "ns")
    if altered is None:
        api.remove("v1", "configmaps", PUBLIC_MAP)
    else:
        api.put("v1", "configmaps", {"metadata": {"name": PUBLIC_MAP}, "data": altered})

    assert not await refresh(writer, "ns", signer)

    assert api.get("v1", "configmaps", PUBLIC_MAP)["data"] == {PUBLIC: Signer(OLD).public}


async def test_keys_that_are_gone_stay_in_use(api, writer):
    hold(api, FIRST)
    signer = await obtain(writer, "ns")
    api.remove("v1", "secrets", SECRET)
    api.remove("v1", "configmaps", PUBLIC_MAP)

    assert not await refresh(writer, "ns", signer)

    assert api.get("v1", "configmaps", PUBLIC_MAP)["data"] == {PUBLIC: Signer(OLD).public}
    assert signer.public == Signer(OLD).public
    assert api.all("secrets") == []
