from carpool.generation.profiles import EngineProfile, Linear
from carpool.generation.requests import Admit, Refuse, Request, Slo
from carpool_cli.streams.rules import Cap, Nothing, QueuedTokens

PROFILE = EngineProfile(
    name="test",
    source="rounded",
    kv_tokens=400_000,
    step=Linear(base=0.0115, sequence=39e-6, kv_token=77e-9, prompt_token=55e-6),
)
SLO = Slo(2.0, 0.05)


def arrive(rule, count, prompt=1000):
    kinds = []
    for key in range(count):
        kinds += [type(action) for action in rule.arrive(Request(key, 0.0, prompt), 0.0)]
    return kinds


def test_a_cap_admits_so_many_and_refuses_what_is_late():
    rule = Cap(3, SLO, PROFILE)
    assert arrive(rule, 5) == [Admit] * 3
    assert [type(action) for action in rule.poll(rule.wake_at(0.0))] == [Refuse] * 2


def test_no_gate_admits_all_and_a_limit_of_queued_tokens_does_not():
    assert arrive(Nothing(SLO, PROFILE), 100) == [Admit] * 100
    # 2 s at 55 us per token are 36 prompts of 1,000 tokens; the one that crosses it is still taken.
    assert arrive(QueuedTokens(SLO, PROFILE), 100).count(Admit) == 37
    assert arrive(QueuedTokens(SLO, PROFILE, 5_000), 100).count(Admit) == 6
