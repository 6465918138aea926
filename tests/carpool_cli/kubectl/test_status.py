from __future__ import annotations

import pytest


def lines(result):
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.output.splitlines()]


def test_a_list_has_a_line_a_policy_and_what_is_wrong_below(kubectl):
    wrong = kubectl.condition("Programmed", "False", "NotInjected", "no pod has a sidecar: kubectl annotate …")
    not_ready = kubectl.condition("Ready", "False", "NotInjected", "see Programmed")
    kubectl.holds(
        kubectl.policy(),
        kubectl.policy("bert", [wrong, not_ready], annotations={"carpool.dev/paused": "true"}, applied=None),
    )
    shown = lines(kubectl.run("status"))
    assert shown[0].split("  ")[0] == "NAME"
    assert " ".join(shown[1].split()) == (
        "resnet p50 10ms, p99 50ms Apply batch 8, wait 2ms, 2 in flight 3/3/3 True True 5d"
    )
    assert " ".join(shown[2].split()) == "bert p50 10ms, p99 50ms Paused - 3/3/3 - False 5d"
    assert shown[3:] == ["", "bert: Programmed is not true: NotInjected: no pod has a sidecar: kubectl annotate …"]


def test_targets_of_token_streams_are_shown(kubectl):
    policy = kubectl.policy("llama")
    policy["spec"]["slo"] = {"ttft": {"p99": "2s"}, "tpot": {"p99": "50ms"}}
    kubectl.holds(policy)
    assert "llama ttft p99 2s, tpot p99 50ms Apply" in " ".join(lines(kubectl.run("status"))[1].split())


def test_token_streams_are_shown_in_full(kubectl):
    policy = kubectl.policy("llama")
    said = {
        "target": "Deployment/llama", "gated": 2, "requestsPerSecond": 14.0, "goodput": 12.0, "missFraction": 0.1,
        "tokensPerSecond": 2400.0, "ttftP99": "1s900ms", "tpotP99": "46ms", "running": 120, "queued": 3, "limit": 84,
    }  # fmt: skip
    limits = {
        "maxNumSeqs": 84, "maxNumBatchedTokens": 512, "maxNumQueuedTokens": 12000, "maxConcurrency": 84, "reason": "so",
    }  # fmt: skip
    policy["status"]["tokenStreams"] = [said, {**said, "target": "Deployment/bare", "gated": 0, "recommended": limits}]
    del policy["status"]["tokenStreams"][1]["goodput"]
    kubectl.holds(policy)
    shown = " ".join(kubectl.run("status", "llama").output.split())
    assert (
        "token streams of Deployment/llama: 14/s, 2400 tokens/s; 12/s met both targets; TTFT p99 1s900ms; "
        "TPOT p99 46ms; 120 running, 3 waiting, 84 fit into one engine" in shown
    )
    assert "Deployment/bare: 14/s, 2400 tokens/s; TTFT" in shown
    assert "--max-num-seqs 84 --max-num-batched-tokens 512 --max-num-queued-tokens 12000, or maxConcurrency 84" in shown


def test_all_namespaces_and_more_columns(kubectl):
    kubectl.holds(kubectl.policy(conditions=None))
    shown = lines(kubectl.run("status", "-A", "-o", "wide"))
    assert shown[0].split()[0] == "NAMESPACE"
    assert shown[0].endswith("RECOMMENDED")
    assert shown[1].split()[:2] == ["shop", "resnet"]
    assert "Deployment/resnet" in shown[1]
    assert shown[3].startswith("shop/resnet: the operator has not reported yet")
    assert kubectl.asked == [
        ["get", "batchingpolicies.carpool.dev", "--all-namespaces", "--output=json", "--request-timeout=20s"]
    ]


def test_where_there_are_none_the_next_command_is_named(kubectl):
    assert "kubectl annotate deployment/NAME carpool.dev/slo-p99=50ms" in kubectl.run("status").output
    assert "-A" in kubectl.run("status").output
    assert "-A" not in kubectl.run("status", "-A").output


def test_one_in_full(kubectl):
    kubectl.holds(kubectl.policy())
    shown = lines(kubectl.run("status", "resnet"))
    assert shown[0] == "resnet in shop: p50 10ms, p99 50ms, Apply"
    assert (
        shown[1].strip().startswith("applied: batch 8, wait 2ms, 2 in flight for Deployment/resnet, every model, since")
    )
    assert shown[2].strip() == "Deployment/resnet: 3 pods wanted, 3 with a sidecar, 3 run the newest"
    assert "on trial for" in shown[4]
    assert "batch 16" in shown[4]
    assert [line.split() for line in shown if line.strip().startswith("Accepted")] == [
        ["Accepted", "True", "12h", "Valid"]
    ]
    assert "nothing is wrong" in shown[-2]
    assert shown[-1].strip() == "why: kubectl carpool explain resnet -n shop"


def test_conditions_that_follow_from_another_are_not_reported_beside_it(kubectl):
    said = [
        kubectl.condition("Accepted", "False", "Conflicted", "it belongs to another"),
        kubectl.condition("Programmed", "Unknown", "NoTargets", "none"),
        kubectl.condition("SLOMet", "Unknown", "TooFewRequests", "too few"),
        kubectl.condition("Ready", "False", "Conflicted", "it belongs to another"),
    ]
    kubectl.holds(kubectl.policy(conditions=said))
    told = [line for line in lines(kubectl.run("status", "resnet")) if "!" in line]
    assert told == ["  ! Accepted is not true: Conflicted: it belongs to another"]


def test_a_missed_slo_is_named_in_any_case_and_an_idle_model_is_nothing_wrong(kubectl):
    pending = kubectl.condition("Programmed", "Unknown", "Pending", "on its way")
    missed = kubectl.condition("SLOMet", "False", "Missed", "p99 within 50ms is missed")
    kubectl.holds(kubectl.policy(conditions=[pending, missed]))
    told = kubectl.run("status", "resnet").output
    assert "! Programmed is unknown: Pending: on its way" in told
    assert "! SLOMet is not true: Missed: p99 within 50ms is missed" in told
    kubectl.holds(kubectl.policy(conditions=[kubectl.condition("SLOMet", "Unknown", "TooFewRequests", "too few")]))
    assert "nothing is wrong" in kubectl.run("status", "resnet").output


def test_a_problem_named_by_conditions_that_are_true_is_reported_once(kubectl):
    past = ("ServiceBypassed", "Service web port 80 bypasses the sidecar. Correct it: kubectl patch …")
    said = [kubectl.condition("Programmed", "True", *past), kubectl.condition("Ready", "True", *past)]
    kubectl.holds(kubectl.policy(conditions=said))
    told = kubectl.run("status", "resnet").output
    assert [line.strip() for line in told.splitlines() if "bypasses" in line] == [f"! {past[0]}: {past[1]}"]
    assert "nothing is wrong" not in told
    assert kubectl.run("status", "--check").exit_code == 0


def test_a_spec_that_was_not_seen_yet_is_said(kubectl):
    held = kubectl.policy()
    held["metadata"]["generation"] = 4
    kubectl.holds(held)
    assert "the operator has not seen the last edit of the spec" in kubectl.run("status").output
    assert kubectl.run("status", "--check").exit_code == 3


def test_a_policy_that_is_paused_says_how_to_go_on(kubectl):
    kubectl.holds(kubectl.policy(annotations={"carpool.dev/paused": "true"}))
    assert "kubectl carpool resume resnet -n shop" in kubectl.run("status", "resnet").output


def test_check_is_for_scripts(kubectl):
    kubectl.holds(kubectl.policy())
    assert kubectl.run("status", "--check").exit_code == 0
    kubectl.holds(kubectl.policy(), kubectl.policy("b", [kubectl.condition("Ready", "Unknown", "Starting")]))
    assert kubectl.run("status", "--check").exit_code == 3
    assert kubectl.run("status", "resnet", "--check").exit_code == 0
    assert "Ready is unknown: Starting" in kubectl.run("status").output


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_objects_come_as_kubectl_prints_them(kubectl, form):
    kubectl.holds(kubectl.policy())
    kubectl.prints("as: it stands")
    assert kubectl.run("status", "-o", form).output == "as: it stands\n"
    assert f"--output={form}" in kubectl.asked[-1]


def test_what_a_terminal_would_obey_is_taken_out(kubectl):
    kubectl.holds(kubectl.policy("x", [kubectl.condition("Ready", "False", "R", "\x1b[2Jgone\x07[bold]")]))
    told = kubectl.run("status").output
    assert "\x1b" not in told
    assert "[2Jgone [bold]" in told


def test_a_name_and_all_namespaces_exclude_each_other(kubectl):
    result = kubectl.run("status", "resnet", "-A")
    assert result.exit_code == 2
    assert "leave out -A" in result.output


def test_the_status_of_another_version(kubectl):
    held = kubectl.policy()
    held["status"]["applied"] = "8"
    kubectl.holds(held)
    result = kubectl.run("status")
    assert result.exit_code == 1
    assert "applied" in result.output
    assert "version" in result.output
