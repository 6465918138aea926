from __future__ import annotations

import ssl
from datetime import UTC, datetime

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

from carpool_operator.webhook.certificates import LIFE, SETTLE, issue, read, renewed

NAMES = ("carpool-injector.carpool-system.svc",)
DAY = 86400.0
NOW = 1_800_000_000.0


def trusts(material, pair, now):
    """Whether an API server with this bundle takes this certificate then."""
    verifier = (
        PolicyBuilder()
        .store(Store(x509.load_pem_x509_certificates(material.bundle)))
        .time(datetime.fromtimestamp(now, UTC))
        .build_server_verifier(x509.DNSName(NAMES[0]))
    )
    try:
        verifier.verify(x509.load_pem_x509_certificate(pair.certificate), [])
    except VerificationError:
        return False
    return True


def test_the_first_is_served_at_once_and_trusted():
    first = renewed(None, NAMES, NOW)
    assert first.following is None
    assert trusts(first, first.current, NOW)
    assert trusts(first, first.current, NOW - 200), "clocks of API servers may be late"
    assert renewed(first, NAMES, NOW + LIFE / 2) is first


def test_years_go_by_and_no_call_fails():
    material = renewed(None, NAMES, NOW)
    served = {material.current.certificate}
    before = material
    for hour in range(0, 24 * 365 * 2, 5):
        now = NOW + hour * 3600.0
        material = renewed(material, NAMES, now)
        # API servers may still trust the previous bundle, and replicas may still serve the previous certificate.
        for bundle in (before, material):
            for pair in (before.current, material.current):
                assert trusts(bundle, pair, now)
        assert len(x509.load_pem_x509_certificates(material.bundle)) <= 3
        served.add(material.current.certificate)
        before = material
    assert len(served) == 1 + 365 * 2 // 60, "each for two thirds of 90 days"


def test_it_is_announced_before_it_is_served():
    first = renewed(None, NAMES, NOW)
    due = NOW + LIFE * 2 / 3 + 1
    announced = renewed(first, NAMES, due)
    assert announced.current == first.current
    assert trusts(announced, announced.following, due)
    assert renewed(announced, NAMES, due + SETTLE - 1) is announced
    then = renewed(announced, NAMES, due + SETTLE)
    assert then.current == announced.following
    assert then.following is None
    assert trusts(then, first.current, due + SETTLE)
    # The old authority goes with its end.
    later = renewed(then, NAMES, NOW + LIFE + DAY)
    assert later.bundle.count(b"BEGIN") == then.bundle.count(b"BEGIN") - 1


def test_an_expired_one_is_replaced_at_once():
    first = renewed(None, NAMES, NOW)
    late = NOW + LIFE + DAY
    healed = renewed(first, NAMES, late)
    assert trusts(healed, healed.current, late)
    # One that was announced takes its place.
    announced = renewed(first, NAMES, NOW + LIFE - 1)
    assert renewed(announced, NAMES, NOW + LIFE + 1).current == announced.following


def test_other_names_need_another():
    first = renewed(None, ("elsewhere.svc",), NOW)
    healed = renewed(first, NAMES, NOW)
    assert trusts(healed, healed.current, NOW)


def test_a_clock_that_went_back_does_not_matter_much():
    first = renewed(None, NAMES, NOW)
    assert renewed(first, NAMES, NOW - 200) is first
    assert renewed(first, NAMES, NOW - DAY) is not first


def test_a_secret_is_read_as_it_was_written():
    first = renewed(None, NAMES, NOW)
    announced = renewed(first, NAMES, NOW + LIFE * 0.9)
    for material in (first, announced):
        assert read(material.secret()) == material


def swapped(data):
    return {**data, "tls.key": issue(NAMES, NOW)[0].key}


def untrusted(data):
    return {**data, "ca.crt": issue(NAMES, NOW)[1]}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda _: {},
        lambda data: {**data, "tls.crt": b""},
        lambda data: {**data, "tls.crt": b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"},
        lambda data: {**data, "tls.key": b"no key"},
        lambda data: {**data, "next.crt": data["tls.crt"]},
        lambda data: {**data, "next.crt": b"x", "next.key": b"y"},
        swapped,
        untrusted,
    ],
)
def test_a_spoiled_secret_is_made_anew(spoil):
    held = read(spoil(renewed(None, NAMES, NOW).secret()))
    assert held is None
    made = renewed(held, NAMES, NOW)
    assert trusts(made, made.current, NOW)


def test_no_key_that_signs_is_kept():
    secret = renewed(None, NAMES, NOW).secret()
    assert sum(value.count(b"PRIVATE KEY-----") for value in secret.values()) == 2, "begin and end of one"
    assert ssl.create_default_context(cadata=secret["ca.crt"].decode()).cert_store_stats()["x509_ca"] == 1
