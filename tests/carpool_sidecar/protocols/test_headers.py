from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool_sidecar.protocols import headers
from carpool_sidecar.protocols.headers import WINDOW, Separation, advice, read

USUAL = [
    (b"Host", b"model.default"),
    (b"Content-Type", b"application/json"),
    (b"Authorization", b"Bearer t"),
    (b"traceparent", b"00-1-2-03"),
]


def test_headers_about_one_request_or_hop_are_not_in_the_key():
    varying = [(name, b"17") for name in sorted(headers.IGNORED - headers.DEADLINES)]
    varying += [(prefix + b"anything", b"17") for prefix in headers.IGNORED_PREFIXES]
    assert headers.read(USUAL + varying).key == headers.read(USUAL).key
    assert headers.read(varying).shared == []


@pytest.mark.parametrize(
    "name", [b"authorization", b"cookie", b"x-tenant", b"x-forwarded-user", b"content-type", b"accept"]
)
def test_every_other_header_is(name):
    one, two = headers.read([(name, b"a")]), headers.read([(name, b"b")])
    assert one.key != two.key
    assert headers.differing(one.key, two.key) == [name.decode()]


def test_names_have_no_case_and_lines_no_order():
    shouted = [(name.upper(), value) for name, value in reversed(USUAL)]
    assert headers.read(shouted).key == headers.read(USUAL).key


def test_lines_of_one_name_keep_their_order():
    assert headers.read([(b"x", b"1"), (b"X", b"2")]).key != headers.read([(b"x", b"2"), (b"x", b"1")]).key


def test_shared_headers_are_those_of_the_key():
    assert headers.read(USUAL).shared == [
        (b"authorization", b"Bearer t"),
        (b"content-type", b"application/json"),
        (b"host", b"model.default"),
    ]


NAMES = st.sampled_from([b"a", b"B", b"x-tenant", b"cookie", b"traceparent"])
LINES = st.lists(st.tuples(NAMES, st.binary(max_size=3).filter(lambda value: not set(value) & {30, 31})), max_size=6)


@given(LINES, LINES)
def test_differing_names_explain_different_keys(one, two):
    keys = headers.read(one).key, headers.read(two).key
    if keys[0] == keys[1]:
        assert headers.differing(*keys) == []
    elif len({name.lower() for name, _ in one}) == len(one) and len({name.lower() for name, _ in two}) == len(two):
        assert headers.differing(*keys)


def test_a_header_that_one_lacks_is_named():
    assert headers.differing(headers.read(USUAL).key, headers.read(USUAL[:1]).key) == ["authorization", "content-type"]
    assert headers.differing(headers.read([]).key, headers.read(USUAL[:1]).key) == ["host"]


@pytest.mark.parametrize(
    ("name", "value", "seconds"),
    [
        (b"grpc-timeout", b"100m", 0.1),
        (b"grpc-timeout", b"1S", 1.0),
        (b"grpc-timeout", b"20u", 20e-6),
        (b"grpc-timeout", b"7n", 7e-9),
        (b"grpc-timeout", b"2M", 120.0),
        (b"Grpc-Timeout", b"1H", 3600.0),
        (b"x-envoy-expected-rq-timeout-ms", b"250", 0.25),
        (b"X-Request-Timeout-Ms", b"12.5", 0.0125),
    ],
)
def test_deadlines_are_seconds(name, value, seconds):
    assert headers.read([(name, value)]).deadline_s == pytest.approx(seconds)


def test_the_least_deadline_wins():
    lines = [(b"grpc-timeout", b"1S"), (b"x-request-timeout-ms", b"30"), (b"x-envoy-expected-rq-timeout-ms", b"500")]
    assert headers.read(lines).deadline_s == pytest.approx(0.03)
    assert headers.read(USUAL).deadline_s is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"grpc-timeout", b"100"),
        (b"grpc-timeout", b"123456789S"),
        (b"grpc-timeout", b"-1S"),
        (b"grpc-timeout", b"1s"),
        (b"x-request-timeout-ms", b"soon"),
        (b"x-request-timeout-ms", b"-5"),
        (b"x-envoy-expected-rq-timeout-ms", b""),
        (b"x-envoy-expected-rq-timeout-ms", b"1e3"),
    ],
)
def test_a_malformed_deadline_says_nothing_as_to_any_server(name, value):
    assert headers.read([(name, value)]).deadline_s is None
    assert headers.read([(name, value), (b"x-request-timeout-ms", b"30")]).deadline_s == pytest.approx(0.03)


def test_what_the_codecs_ask_for():
    facts = headers.read(
        [(b"Content-Type", b"a/b"), (b"Content-Encoding", b"gzip"), (b"Inference-Header-Content-Length", b"12")]
    )
    assert (facts.content_type, facts.content_encoding, facts.header_length) == (b"a/b", b"gzip", b"12")


@pytest.mark.parametrize("name", [b"Inference-Header-Content-Length", b"Content-Type", b"Content-Encoding"])
def test_a_header_that_says_two_things_about_the_body_is_named(name):
    lines = [(name, b"12"), (name.lower(), b"13")]
    assert headers.read(lines).clash == f"header {name.lower().decode()} comes twice, with different values"
    assert headers.read([lines[0], lines[0]]).clash == ""


def test_made_up_names_do_not_grow_the_memory():
    reader = headers.Reader()
    for index in range(3 * headers._MAX_NAMES):
        reader.read([(b"x-made-up-%d" % index, b"")])
    assert len(reader._names) <= headers._MAX_NAMES
    assert reader.read([(b"X-New", b"1")]).shared == [(b"x-new", b"1")]


def test_callers_who_differ_in_a_header_across_which_is_batched_have_one_key():
    reader = headers.Reader(["authorization", "cookie"])
    one, two = (reader.read([(b"Authorization", value), *USUAL[:2]]) for value in (b"Bearer a", b"Bearer b"))
    assert one.key == two.key == headers.read(USUAL[:2]).key
    # Each keeps its own: a batch is sent with those of its first request.
    assert dict(one.shared)[b"authorization"] == b"Bearer a"
    assert dict(two.shared)[b"authorization"] == b"Bearer b"
    assert headers.read([(b"Authorization", b"a")]).key != headers.read([(b"Authorization", b"b")]).key
    assert reader.read([(b"x-tenant", b"a")]).key != reader.read([(b"x-tenant", b"b")]).key


def test_find_ignores_case():
    assert headers.find([(b"A", b"1"), (b"a", b"2")], b"a") == b"1"
    assert headers.find([], b"a") is None


def test_what_connection_names_is_of_one_hop():
    sent = [
        *USUAL,
        (b"Connection", b"X-Hop, keep-alive"),
        (b"x-hop", b"1"),
        (b"connection", b"x-other"),
        (b"X-Other", b"2"),
    ]
    assert headers.read(sent).shared == headers.read(USUAL).shared
    assert headers.read(sent).key == headers.read(USUAL).key
    assert headers.read([*USUAL, (b"Connection", b"host")]).shared == headers.read(USUAL).shared


def test_keys_under_former_rules_are_others():
    before = headers.Reader(["authorization"], 1).read(USUAL)
    bare = [field for field in USUAL if field[0] != b"Authorization"]
    after = headers.Reader([], 2).read(bare)
    assert before.key != after.key
    assert headers.differing(before.key, after.key) == []


def separated(keys):
    found = Separation()
    for key in keys:
        found.requests += 1
        if key != found.key:
            found.note(key)
    return found


def key_of(**headers):
    return read([(name.encode(), value) for name, value in headers.items()]).key


def test_a_header_with_its_own_value_in_every_request_is_named():
    users = [key_of(user=b"%d" % number, tenant=b"a") for number in range(2 * WINDOW)]
    assert separated(users[: WINDOW // 2]).own == [], "too few to say so"
    found = separated(users)
    assert found.own == ["user"]
    assert advice(found.own) == (
        "almost every request has its own `user`, so they share no batches; "
        "if the model ignores it: batchAcross: [user]"
    )
    for _ in range(2 * WINDOW):  # it is not sent any more
        found.requests += 1
        if (key := key_of(tenant=b"a")) != found.key:
            found.note(key)
    assert found.own == []
    assert advice([]) == ""
    assert "ignores them: batchAcross: [cookie, user]" in advice(["cookie", "user"])


def test_a_few_tenants_whose_requests_alternate_still_share_batches():
    assert separated([key_of(tenant=b"%d" % (number % 9)) for number in range(5 * WINDOW)]).own == []


def test_a_header_that_the_policy_cannot_ignore_is_not_named():
    names = [(b"content-type", b"a"), (b"user", b"b")]
    keys = [read([(name, b"%b%d" % (value, number)) for name, value in names]).key for number in range(3 * WINDOW)]
    assert separated(keys).own == ["user"]
