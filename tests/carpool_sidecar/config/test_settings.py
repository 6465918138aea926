from __future__ import annotations

import json

import pytest

from carpool.policy.plain import PolicyError, to_plain
from carpool_sidecar.config.settings import EVERY_MODEL, address_of, check_change, parse

YAML = """
listen: 0.0.0.0:8080
upstream: {url: "http://127.0.0.1:9000", timeout: 3s, retry: true}
policy:
  slo: {latency: {p99: 50ms}}
  models: [{name: resnet, axis: First, maxBatch: 16}]
parameters:
  resnet: {maxBatch: 4, maxWait: 2ms}
bodies: {maxRequest: 1Mi, maxBuffered: 1Mi, maxAnswer: 1Mi}
"""


def plain(**fields):
    base = {"upstream": {"url": "http://h:1"}, "policy": {"slo": {"latency": {"p99": "50ms"}}}}
    return json.dumps({name: value for name, value in {**base, **fields}.items() if value is not None})


def test_yaml_and_json_say_the_same():
    config = parse(YAML)
    assert config.upstream.address == ("127.0.0.1", 9000, None)
    assert (config.upstream.timeout, config.bodies.max_request) == (3.0, 1 << 20)
    assert parse(json.dumps(to_plain(config))) == config


def test_fixed_parameters_go_before_the_baseline_within_its_limits():
    config = parse(YAML)
    assert config.parameters_of("resnet").max_batch == 4
    assert config.parameters_of("another") == config.policy.limits().clamp(config.policy.baseline)
    config = parse(plain(parameters={EVERY_MODEL: {"maxBatch": 3}}))
    assert config.parameters_of("any").max_batch == 3


def test_what_is_merged_into_a_mapping_may_be_given_anew():
    text = YAML.replace("  resnet: {", "  fast: &fast {maxBatch: 1, maxWait: 1ms}\n  resnet: {<<: *fast, ")
    assert parse(text).parameters["resnet"].max_wait == 0.002


NESTED = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 30)
)
MERGED = "a0: &a0 {x: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [{','.join([f'*a{level - 1}'] * 9)}]}}\n" for level in range(1, 30)
)
LONG = f"a: &a {'x' * 10_000}\nb: [{','.join(['*a'] * 50)}]\n"


@pytest.mark.parametrize("text", [NESTED, MERGED, LONG], ids=["lists", "merged mappings", "a long text"])
def test_aliases_that_stand_for_much_are_refused_before_they_are_copied(text):
    with pytest.raises(PolicyError, match=r"config: the aliases .* up to line \d+ stand for over 100000 characters"):
        parse(text)


def test_an_alias_that_contains_itself_is_refused():
    for text in ("a: &a [*a]", "a: &a {<<: *a}"):
        with pytest.raises(PolicyError, match="config"):
            parse(text)


def test_a_unix_socket_is_an_upstream():
    assert parse(plain(upstream={"url": "unix:/run/model.sock"})).upstream.address == ("", 0, "/run/model.sock")


def test_a_server_may_be_given_no_patience_and_an_address_of_ipv6():
    config = parse(plain(upstream={"url": "http://h:1", "patience": "0s"}, listen="[::1]:80", admin="::1:81"))
    assert (address_of(config.listen), address_of(config.admin)) == (("::1", 80), ("::1", 81))


def test_an_onnx_file_names_its_model():
    config = parse(plain(upstream=None, onnx={"path": "/models/resnet50.onnx"}))
    assert config.onnx.model == "resnet50"
    assert parse(plain(upstream=None, onnx={"path": "/m.onnx", "name": "x"})).onnx.model == "x"


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        (plain(listen="8080"), "listen", "host:port"),
        (plain(admin="h:99999"), "admin", "host:port"),
        (plain(listen="127.0.0.1:80", admin="127.0.0.1:80"), "admin", "name another port"),
        (plain(upstream=None), "upstream", "exactly one"),
        (plain(onnx={"path": "x"}), "upstream", "exactly one"),
        (
            plain(upstream={"url": "https://h"}),
            "upstream.url",
            "TLS is not supported; write the server's plain port, http",
        ),
        (plain(upstream="https://h:1"), "upstream", "TLS is not supported"),
        (
            plain(policy={"slo": {"latency": {"p99": "50ms"}}, "batchAcross": ["a", "X-User"]}),
            "policy.batchAcross[",
            "write 'X-User' in lower case: x-user",
        ),
        (plain(policy={"slo": {"latency": {"p99": "50ms"}}, "batchAcross": ["a b"]}), "policy.batchAcross[", "regex"),
        (plain(upstream="http://h:1"), "upstream", 'write upstream: {url: "http://h:1"}'),
        (plain(upstream=None, onnx="m.onnx"), "onnx", "write onnx: {path: m.onnx}"),
        (plain(upstream={"url": "http://h:1/path"}), "upstream.url", "without a path"),
        (plain(upstream={"url": "http://h:x"}), "upstream.url", "http://host:port"),
        (plain(upstream={"url": "http://my host:1"}), "upstream.url", "http://host:port"),
        (plain(upstream={"url": "http://h", "timeout": "0s"}), "upstream.timeout", "must be longer than 0s; drop it"),
        (plain(upstream={"url": "http://h", "connectTimeout": 0}), "upstream.connectTimeout", "longer than 0s"),
        (plain(upstream=None, llm={"path": "m.gguf", "timeout": "0s"}), "llm.timeout", "longer than 0s"),
        (plain(jobs={"path": "/j", "finishWithin": "0s"}), "jobs.finishWithin", "longer than 0s"),
        (plain(listen="10.0.0.1:8080:9"), "listen", "host:port"),
        (plain(upstream={"url": "http://h", "ready": "x"}), "upstream.ready", "begin it with /"),
        (plain(policy={"slo": {"latency": {}}}), "policy.slo.latency", "at least one of p50"),
        (
            plain(policy={"slo": {"latency": {"p50": "80ms", "p99": "50ms"}}}),
            "policy.slo.latency",
            "p50 (80ms) is longer than p99 (50ms): lower it",
        ),
        (plain(policy={"slo": {"latency": {"p99": "50"}}}), "policy.slo.latency.p99", "not a duration"),
        (plain(listen=8080), "listen", "write host:port, e.g. 127.0.0.1:8080"),
        (plain(parameters={"m": {"maxBatch": 0}}), "parameters[m].maxBatch", ">= 1"),
        (plain(parameters={"m": {}, "*": {"size": 0}}), "parameters[*]", "there are maxBatch"),
        (
            plain(parameters={"m": 4}),
            "parameters[m]",
            "a whole number where a mapping is expected: its fields are maxBatch",
        ),
        (plain(parameters={"maxBatch": 8}), "parameters[maxBatch]", 'parameters: {"*": {maxBatch: 8}}'),
        (
            plain(shutdown={"lame": "30s"}),
            "shutdown.limit",
            "30s leaves no time after lame, 30s: raise it",
        ),
        (plain(publicKey="beef"), "publicKey", "write the 64 hex digits"),
        (plain(changes="/etc/carpool/change"), "changes", "name the publicKey"),
        (plain(drainKey="short"), "drainKey", ">= 16"),
        (plain(speed=11), "config", "unknown field `speed`; there are"),
        (plain(slo={}), "config", "unknown field `slo`: write it under policy"),
        (
            plain(policy={"slo": {"latency": {"p99": "50ms"}}, "parameters": {}}),
            "policy",
            "unknown field `parameters`: write it at the top level of the file, beside policy",
        ),
        (plain(policy={"speed": 11}), "policy", "unknown field `speed`; there are"),
        (plain(bodies={"maxRequest": "1 MB"}), "bodies.maxRequest", "not a size"),
        (plain(bodies={"maxRequest": "1Gi"}), "bodies.maxBuffered", "one body of bodies.maxRequest, 1Gi: raise"),
        (plain(bodies={"maxBuffered": "63Mi"}), "bodies.maxBuffered", "63Mi has no room"),
        (
            plain(bodies={"maxBuffered": "255Mi", "maxAnswer": "256Mi"}),
            "bodies.maxBuffered",
            "one body of bodies.maxAnswer, 256Mi: raise",
        ),
        (
            "a: [1",
            "config",
            "config: line 1, column 6: expected ',' or ']', but got '<stream end>', while ",
        ),
        ("a: [1,\nb: 2", "config", "line 2, column 5: expected ',' or ']', but got"),
        ("a: [1,\nb: 2", "config", "while parsing a flow sequence that begins in line 1"),
        ("policy: \0", "config", "config: character 9 is U+0000, which a YAML file can't have"),
        ("a: \tb: c", "config", "config: line 1, column 4: found character '\\t' that"),
        ("a:\n\tb: c", "config", "while scanning for the next token; use spaces, not tabs"),
        ("just words", "config", "mapping"),
        ("policy: .nan", "config", "write a finite number"),
        (f"{YAML}jobs: *", "config", 'write "*" in quotes'),
        ("2001-01-01: x", "config", "keys must be"),
        ("policy: 2001-99-99", "config", "month"),
        ("[" * 10_000, "config", "recursion"),
        ('{"a":' * 10_000, "config", "recursion"),
        (plain(upstream={"url": "http://[h"}), "upstream.url", "http://host:port"),
        ("{", "config", ""),
        (f"listen: h:1\n{YAML}", "config", "`listen` in line 3 is given in line 1 already"),
        (f"{YAML}limits: {{maxRows: 1, maxRows: 2}}", "config", "`maxRows` in line 10 is given in line 10 already"),
        (f"{YAML}1: a\n'1': b", "config", "`1` in line 11 is given in line 10 already"),
        ('{"policy": {},\n\t"policy": {}}', "config", "`policy` in line 2 is given in line 1 already"),
        (
            plain(generation=None, policy={"slo": {"latency": {"p99": "1s"}}, "generation": {"maxRunning": 4}}),
            "policy.slo.ttft",
            "generation needs it: without it there is no gate to bound, e.g. p99: 2s",
        ),
    ],
)
def test_what_is_wrong_is_named_with_the_fix(text, field, words):
    with pytest.raises(PolicyError) as caught:
        parse(text)
    assert caught.value.field.startswith(field)
    assert words in str(caught.value)
    assert "<unicode string>" not in str(caught.value)


def test_what_a_running_process_cannot_change_is_named():
    check_change(parse(plain()), parse(plain(policy={"slo": {"latency": {"p99": "70ms"}}})))
    for fields, name in (
        ({"listen": "127.0.0.1:1"}, "listen"),
        ({"publicKey": "0" * 64}, "publicKey"),
        ({"drainKey": "0" * 16}, "drainKey"),
        ({"upstream": {"url": "http://other:1"}}, "upstream"),
    ):
        with pytest.raises(PolicyError, match="restart") as caught:
            check_change(parse(plain()), parse(plain(**fields)))
        assert caught.value.field == name


def test_an_address_may_be_ipv6():
    assert address_of("[::1]:80") == ("::1", 80)
    assert address_of("localhost:0") == ("localhost", 0)


def test_less_room_than_the_largest_answer_by_default_is_no_contradiction():
    bodies = parse(plain(bodies={"maxBuffered": "100Mi"})).bodies
    assert bodies.largest_answer == 100 * 2**20
    assert parse(plain()).bodies.largest_answer == 256 * 2**20


@pytest.mark.parametrize(
    ("more", "at_once"),
    [
        ({}, 32),
        ({"bounds": {"maxInFlight": {"max": 8}}}, 8),
        ({"tuning": {"mode": "Recommend"}}, 32),
        ({"baseline": {"maxBatch": 16}}, 0),
        ({"tuning": {"mode": "Hold"}}, 0),
        ({"passThrough": {"mode": "Never"}}, 0),
        ({"bounds": {"maxInFlight": {"min": 2}}}, 0),
    ],
)
def test_calls_at_once_are_found_out_where_nobody_says_what_to_begin_with(more, at_once):
    policy = {"slo": {"latency": {"p99": "50ms"}}, **more}
    config = {"policy": policy, "upstream": {"url": "http://127.0.0.1:9000"}}
    assert parse(json.dumps(config)).undecided == at_once
    # Fixed parameters are somebody's; an operator writes the baseline before it knows anything.
    fixed = {"maxBatch": 32, "maxWait": "0s", "maxInFlight": 1}
    if not at_once:
        return
    assert parse(json.dumps({**config, "parameters": {"*": fixed}})).undecided == 0
    steered = {**config, "target": "ns/Deployment/m", "parameters": {"*": fixed}}
    assert parse(json.dumps(steered)).undecided == at_once
    steered["parameters"] = {"*": {**fixed, "maxInFlight": 4}}
    assert parse(json.dumps(steered)).undecided == 0


def test_a_fixed_wait_has_to_be_below_the_slo():
    parse(plain(parameters={"m": {"maxBatch": 2, "maxWait": "49ms"}})).validate_waits()
    config = parse(plain(parameters={"m": {"maxBatch": 2}, "*": {"maxBatch": 2, "maxWait": "50ms"}}))
    with pytest.raises(PolicyError, match=r"^parameters\[\*\]\.maxWait: 50ms is not below the SLO of 50ms: lower it$"):
        config.validate_waits()
    # These hold no request.
    parse(plain(parameters={"*": {"maxBatch": 1, "maxWait": "2s"}})).validate_waits()
    parse(plain(parameters={"*": {"maxBatch": 2, "maxWait": "2s", "passThrough": True}})).validate_waits()
