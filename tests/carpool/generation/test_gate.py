from math import inf

import pytest
from engines import LLAMA, SLO, gate
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from carpool.generation.gate import HEADROOM, TURNS, Gate
from carpool.generation.queues import MOST_SHARES
from carpool.generation.requests import Admit, Reason, Refuse, Request, Slo, State
from carpool.generation.step_model import StepModel
from carpool.policy.generation import Order


def request(key, prompt=500, arrival=0.0, **options):
    return Request(key, arrival, prompt, **options)


def admitted(actions):
    return [action.request.key for action in actions if isinstance(action, Admit)]


def refused(actions):
    return {action.request.key: action.reason for action in actions if isinstance(action, Refuse)}


def decode(machine: Gate, now: float, seconds: float) -> float:
    """Let the engine decode at its true pace; return the time after."""
    until = now + seconds
    while now < until:
        running = machine.meter.decoding
        now += 10 * LLAMA.seconds(running, machine.meter.kv, 0)
        machine.progress(now, 10 * running)
    return now


def filled(machine: Gate, prompt=200) -> tuple[list[Request], float]:
    """Send requests until one is held back; those before it decode, and their prompts are long past."""
    running, now = [], 0.0
    while True:
        each = request(1000 + len(running), prompt, now)
        if not admitted(machine.arrive(each, now)):
            machine.ended(each, now, 0, complete=False)
            return running, now
        machine.first_token(each, now)
        running.append(each)
        now = decode(machine, now, 5.0)


def test_an_idle_engine_gets_any_request_at_once():
    machine = gate(wrong=1000.0)
    assert admitted(machine.arrive(request(0, 100_000), 0.0)) == [0]


def test_it_closes_where_the_forecast_reaches_the_target():
    machine = gate()
    running, now = filled(machine)
    meter, margin = machine.meter, machine.calibration.tpot
    assert meter.forecast(1, 200) > SLO.tpot / margin
    # By the true constants: 11.5 ms + B x 39 us + KV x 77 ns.
    step = LLAMA.seconds(len(running), meter.kv, 0)
    assert step == pytest.approx(SLO.tpot / margin, rel=0.05)
    machine.ended(running[0], now, 10)
    assert meter.forecast(1, 200) <= SLO.tpot / margin


def full(machine: Gate, *, lengths: int) -> tuple[list[Request], float]:
    """Teach the gate answers of so many tokens; then let 32 requests decode that have just begun."""
    now = 0.0
    for key in range(100, 130):
        each = request(key, 10, now)
        machine.arrive(each, now)
        machine.first_token(each, now)
        now = decode(machine, now, 0.2)
        machine.ended(each, now, lengths)
    running = [request(key, 10, now) for key in range(32)]
    for each in running:
        machine.arrive(each, now)
        machine.first_token(each, now)
    return running, decode(machine, now, 0.2)


def test_a_request_with_more_choices_than_can_find_room_in_time_holds_up_no_others():
    machine = gate(max_running=32)
    running, now = full(machine, lengths=400)  # 5 s and more
    wide = request(200, 10, now, choices=32)
    assert refused(machine.arrive(wide, now)) == {200: Reason.TTFT}
    other = request(201, 10, now)
    assert not machine.arrive(other, now)
    assert admitted(machine.ended(running[0], now, 400)) == [201]


def test_a_prompt_that_never_fits_beside_others_holds_up_none():
    machine = gate(kv_tokens=16_384)  # 80 % of them may be used
    chat, now = request(0, 600), 0.0
    machine.arrive(chat, now)
    machine.first_token(chat, now)
    now = decode(machine, now, 1.0)
    assert refused(machine.arrive(request(1, 14_000, now), now)) == {1: Reason.TTFT}
    assert admitted(machine.arrive(request(2, 600, now), now)) == [2]
    # An empty engine takes it.
    machine.ended(chat, now, 100)
    machine.ended(machine.meter.streams[2], now, 100)
    assert admitted(machine.arrive(request(3, 14_000, now), now)) == [3]


@pytest.mark.parametrize("lengths", [60, 0], ids=["short answers", "unknown answers"])
def test_a_request_with_many_choices_holds_up_others_while_it_may_find_room_in_time(lengths):
    machine = gate(max_running=32)
    if lengths:
        running, now = full(machine, lengths=lengths)
    else:
        running, now = [request(key, 10) for key in range(32)], 0.0
        for each in running:
            machine.arrive(each, now)
            machine.first_token(each, now)
        now = decode(machine, now, 0.2)
    wide, other = request(200, 10, now, choices=16), request(201, 10, now)
    assert not machine.arrive(wide, now)
    assert not machine.arrive(other, now)
    ends = [machine.ended(each, now, 60) for each in running]
    assert [admitted(each) for each in ends] == [[]] * 15 + [[200], [201]] + [[]] * 15


def test_prompts_that_take_all_time_close_it_even_where_a_step_was_learned_to_take_none():
    # As in the first second of an overload: windows with prompts in every step leave nothing for the step itself.
    machine = Gate(SLO, StepModel(0.0, 0.0, 0.0, 25e-6))
    actions = [machine.arrive(request(key, 2400), 0.0) for key in range(40)]
    # 60 ms of prefill each: 16 of them take 0.96 s of the next second.
    assert sum(len(admitted(each)) for each in actions) == 16


def test_max_running_is_a_limit_of_its_own():
    machine = gate(max_running=3)
    actions = [machine.arrive(request(key, 10), 0.0) for key in range(5)]
    assert [admitted(each) for each in actions] == [[0], [1], [2], [], []]


def test_too_many_queued_tokens_are_refused_at_arrival():
    machine = gate(max_running=1, max_queued_tokens=1000)
    for key in range(3):
        machine.arrive(request(key, 500), 0.0)
    assert refused(machine.arrive(request(3, 500), 0.0)) == {3: Reason.QUEUE_FULL}
    machine.ended(request(3), 0.0, 0)


def test_a_batch_backlog_that_fills_the_queue_keeps_no_interactive_request_out():
    machine = gate(max_running=1, max_queued_tokens=1000)
    for key in range(4):
        actions = machine.arrive(request(key, 500, batch=True), 0.0)
    assert refused(actions) == {3: Reason.QUEUE_FULL}
    assert [refused(machine.arrive(request(key, 500), 0.0)) for key in (10, 11)] == [{}, {}]
    assert refused(machine.arrive(request(12, 500), 0.0)) == {12: Reason.QUEUE_FULL}


def test_a_tenant_that_fills_the_queue_keeps_no_other_out_of_its_share():
    machine = gate(max_running=1, max_queued_tokens=1000, weights={"flood": 1.0, "quiet": 3.0})
    for key in range(12):
        actions = machine.arrive(request(key, 100, tenant="flood"), 0.0)
    assert refused(actions) == {11: Reason.QUEUE_FULL}
    # Three quarters of 1,000 tokens are its own.
    quiet = [refused(machine.arrive(request(key, 100, tenant="quiet"), 0.0)) for key in range(100, 108)]
    assert quiet == [{}] * 7 + [{107: Reason.QUEUE_FULL}]


def test_tenants_that_come_one_after_the_other_fill_no_more_than_twice_the_limit():
    machine = gate(Slo(ttft=inf, tpot=0.05), max_running=1, max_queued_tokens=1000)
    machine.arrive(request(0, 500), 0.0)
    actions = [machine.arrive(request(key, 500, tenant=f"new-{key}"), 0.0) for key in range(1, 2001)]
    assert [refused(each) for each in actions[:4]] == [{}] * 4
    assert sum(len(refused(each)) for each in actions) == 1996
    assert machine.queued == 4


def test_a_prompt_larger_than_the_limit_waits_alone():
    machine = gate(Slo(ttft=inf, tpot=0.05), max_running=1, max_queued_tokens=1000)
    machine.arrive(request(0, 500), 0.0)
    assert refused(machine.arrive(request(1, 5000), 0.0)) == {}
    assert refused(machine.arrive(request(2, 10, tenant="other"), 0.0)) == {2: Reason.QUEUE_FULL}


def test_what_waits_too_long_is_refused_in_time_for_its_first_token_and_not_before():
    machine = gate(max_running=1)
    machine.arrive(request(0, 10), 0.0)
    machine.arrive(request(1, 1000), 0.0)
    wake = machine.wake_at(0.0)
    # Its prefill takes 55 ms and a step 11, with a margin; the target is 2 s.
    assert 1.8 < wake < SLO.ttft
    assert machine.poll(wake - 0.01) == []
    actions = machine.poll(wake)
    assert refused(actions) == {1: Reason.TTFT}
    assert actions[0].retry_after >= 1.0


def test_a_request_behind_a_long_prompt_waits_while_that_is_computed():
    machine = gate(max_running=1)
    long = request(0, 24_000)
    machine.arrive(long, 0.0)
    machine.arrive(request(1, 100, arrival=0.1), 0.1)
    # 24,000 tokens take 1.3 s, with a margin 1.7. After 1.2 s little of them is left, and the target is at 2.1 s.
    machine.progress(1.2, 0)
    assert machine.poll(1.2) == []
    assert machine.wake_at(1.2) > 1.7


def test_once_the_pace_is_known_a_request_that_would_wait_too_long_is_refused_at_arrival():
    machine = gate(max_running=1)
    now = 0.0
    current = request(0, 10)
    machine.arrive(current, now)
    # A stream takes a second; requests queue up behind it.
    for key in range(1, 40):
        machine.arrive(request(key, 10, now), now)
        machine.first_token(current, now)
        for _ in range(10):
            now += 0.1
            machine.progress(now, 10)
        following = admitted(machine.ended(current, now, 100))
        current = next(r for r in machine.meter.streams.values() if r.key in following)
    assert machine.queued == 0 or machine.queued <= 2
    for key in range(40, 45):
        actions = machine.arrive(request(key, 10, now), now)
    assert refused(actions) == {44: Reason.TTFT}


def test_a_deadline_ends_the_wait_wherever_in_the_queue():
    machine = gate(Slo(ttft=60.0, tpot=0.05), max_running=1)
    machine.arrive(request(0, 10), 0.0)
    machine.arrive(request(1, 10), 0.0)
    machine.arrive(request(2, 10, deadline=1.0), 0.0)
    assert machine.wake_at(0.0) <= 1.01
    assert refused(machine.poll(1.01)) == {2: Reason.DEADLINE}
    assert refused(machine.arrive(request(3, 10, deadline=0.5), 1.01)) == {3: Reason.DEADLINE}
    assert machine.queued == 1


def test_a_cancelled_request_leaves_from_anywhere_and_makes_room():
    machine = gate(max_running=1)
    requests = [request(key, 10) for key in range(4)]
    for each in requests:
        machine.arrive(each, 0.0)
    assert machine.ended(requests[1], 0.1, 0, complete=False) == []
    # 0 has no first token yet, 2 has one.
    assert admitted(machine.ended(requests[0], 0.2, 0, complete=False)) == [2]
    machine.first_token(requests[2], 0.3)
    assert admitted(machine.ended(requests[2], 0.4, 5, complete=False)) == [3]
    assert machine.meter.backlog == 10


def test_interactive_requests_go_first_and_batch_ones_fill_what_they_leave():
    machine = gate(max_running=1)
    machine.arrive(request(0, 10), 0.0)
    machine.arrive(request(1, 10, batch=True), 0.0)
    machine.arrive(request(2, 10), 0.0)
    first = next(iter(machine.meter.streams.values()))
    assert admitted(machine.ended(first, 0.1, 1)) == [2]
    assert admitted(machine.ended(machine.meter.streams[2], 0.2, 1)) == [1]


def test_batch_requests_leave_headroom():
    machine = gate()
    running, now = filled(machine)
    # Just enough room for an interactive request is too little for one of batch priority.
    machine.ended(running[0], now, 10)
    target = SLO.tpot / machine.calibration.tpot
    assert HEADROOM * target < machine.meter.forecast(1, 200) <= target
    assert admitted(machine.arrive(request(0, 200, now, batch=True), now)) == []
    assert admitted(machine.arrive(request(1, 200, now), now)) == [1]


def test_a_batch_request_that_waited_long_gets_a_turn_now_and_then():
    machine = gate(Slo(ttft=1e9, tpot=0.05), max_running=1, ageing=60.0)
    current = request(0, 10)
    machine.arrive(current, 0.0)
    for key in (1, 2):
        machine.arrive(request(key, 10, batch=True), 0.0)
    for key in range(100, 150):
        machine.arrive(request(key, 10), 0.0)
    order = []
    for turn in range(2 * TURNS + 2):
        (key,) = admitted(machine.ended(current, 61.0 + turn, 1))
        current = machine.meter.streams[key]
        order.append(key)
    # The one before the first turn counts too: it was admitted at once.
    assert [i for i, key in enumerate(order) if key < 100] == [TURNS - 1, 2 * TURNS]


def test_a_young_batch_request_waits_for_all_interactive_ones():
    machine = gate(Slo(ttft=1e9, tpot=0.05), max_running=1, ageing=1e6)
    current = request(0, 10)
    machine.arrive(current, 0.0)
    machine.arrive(request(1, 10, batch=True), 0.0)
    for key in range(100, 150):
        machine.arrive(request(key, 10), 0.0)
    order = []
    for turn in range(51):
        (key,) = admitted(machine.ended(current, 61.0 + turn, 1))
        current = machine.meter.streams[key]
        order.append(key)
    assert order[-1] == 1


def test_a_report_of_the_cache_bounds_what_is_admitted():
    machine = gate(kv_budget_percent=100.0)
    now = 0.0
    for key in range(30):
        each = request(key, 100, now)
        machine.arrive(each, now)
        machine.first_token(each, now)
        machine.progress(now := now + 1.0, 100)
        machine.ended(each, now, 101)
    for key in range(100, 104):
        each = request(key, 1000, now)
        machine.arrive(each, now)
        machine.first_token(each, now)
    # 4,000 tokens are 80 %: the cache has 5,000, and five streams with 100 more each don't fit.
    machine.report(0.8)
    assert admitted(machine.arrive(request(200, 1000, now), now)) == []
    machine.report(0.2)
    assert machine.kv.tokens == pytest.approx(20_000)


class GateMachine(RuleBasedStateMachine):
    """Plays client, driver and engine, and keeps its own account of every request."""

    @initialize(
        limits=st.fixed_dictionaries(
            {
                "order": st.sampled_from(list(Order)),
                "max_running": st.sampled_from([None, 1, 3]),
                "max_queued_tokens": st.sampled_from([None, 1000, 3000]),
                "kv_tokens": st.sampled_from([None, 8000]),
                "weights": st.sampled_from([None, {"a": 3.0}]),
                "ageing": st.sampled_from([5.0, 60.0]),
            }
        ),
        ttft=st.sampled_from([0.5, 5.0, inf]),
        tpot=st.sampled_from([0.02, 0.05, inf]),
        wrong=st.sampled_from([0.3, 1.0, 3.0]),
    )
    def start(self, limits, ttft, tpot, wrong):
        self.now = 0.0
        self.slo = Slo(ttft, tpot)
        self.gate = gate(self.slo, wrong=wrong, **limits)
        self.limits = self.gate.limits
        self.requests: dict[int, Request] = {}
        self.queued: set[int] = set()
        self.prefilling: set[int] = set()
        self.decoding: dict[int, int] = {}
        self.finished: set[int] = set()

    def carry_out(self, actions):
        for action in actions:
            key = action.request.key
            # Neither twice, nor anything that has ended, nor a refusal after the engine got it.
            assert key in self.queued
            self.queued.remove(key)
            if isinstance(action, Admit):
                assert self.now <= self.due(action.request)
                self.prefilling.add(key)
            else:
                assert action.retry_after >= 1.0
                assert action.request.state is State.ENDED
                self.finished.add(key)

    def due(self, each):
        return min(each.deadline, inf if each.batch else each.arrival + self.slo.ttft) + 1e-2

    @rule(
        prompt=st.integers(1, 3000),
        tenant=st.sampled_from("abcdef"),
        batch=st.booleans(),
        patience=st.sampled_from([0.0, 0.3, 3.0, inf]),
        most=st.sampled_from([None, 10, 500]),
        choices=st.sampled_from([1, 1, 3]),
    )
    def arrive(self, prompt, tenant, batch, patience, most, choices):
        key = len(self.requests)
        deadline = self.now + patience if patience < inf else inf
        each = Request(
            key, self.now, prompt, max_tokens=most, tenant=tenant, batch=batch, deadline=deadline, choices=choices
        )
        self.requests[key] = each
        self.queued.add(key)
        self.carry_out(self.gate.arrive(each, self.now))

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0, 10.0]), steps=st.integers(1, 50))
    def pass_time(self, seconds, steps):
        """Let time pass as the sidecar does: it wakes up when the gate wants to."""
        until = self.now + seconds
        while (wake := self.gate.wake_at(self.now)) < until:
            self.now = max(self.now, wake)
            before = len(self.queued)
            self.carry_out(self.gate.poll(self.now))
            assert len(self.queued) < before or self.gate.wake_at(self.now) > self.now
        self.now = until
        for key in self.decoding:
            self.decoding[key] += steps
        self.carry_out(self.gate.progress(self.now, steps * self.sequences(self.decoding)))

    def sequences(self, keys):
        return sum(self.requests[key].sequences for key in keys)

    @precondition(lambda self: self.prefilling)
    @rule(data=st.data())
    def first_token(self, data):
        key = data.draw(st.sampled_from(sorted(self.prefilling)))
        self.prefilling.remove(key)
        self.decoding[key] = 1
        self.carry_out(self.gate.first_token(self.requests[key], self.now))

    @precondition(lambda self: self.decoding or self.prefilling)
    @rule(data=st.data())
    def choice_ended(self, data):
        # One that ends before the first token of any has no text.
        each = self.requests[data.draw(st.sampled_from(sorted(self.prefilling | set(self.decoding))))]
        before = each.sequences
        self.carry_out(self.gate.choice_ended(each, self.now))
        assert each.sequences == max(1, before - 1)

    @precondition(lambda self: self.decoding)
    @rule(data=st.data(), complete=st.booleans())
    def end(self, data, complete):
        key = data.draw(st.sampled_from(sorted(self.decoding)))
        tokens = self.decoding.pop(key)
        self.finished.add(key)
        self.carry_out(self.gate.ended(self.requests[key], self.now, tokens, complete=complete))

    @precondition(lambda self: self.queued or self.prefilling)
    @rule(data=st.data())
    def cancel(self, data):
        key = data.draw(st.sampled_from(sorted(self.queued | self.prefilling)))
        self.queued.discard(key)
        self.prefilling.discard(key)
        self.finished.add(key)
        self.carry_out(self.gate.ended(self.requests[key], self.now, 0, complete=False))

    @rule(share=st.floats(0, 1))
    def report(self, share):
        self.gate.report(share)

    @invariant()
    def accounts_agree(self):
        if not self.requests:
            return
        running = self.prefilling | set(self.decoding)
        assert {len(s) for s in (self.queued & running, self.queued & self.finished, running & self.finished)} == {0}
        assert self.queued | running | self.finished == set(self.requests)
        meter = self.gate.meter
        assert set(meter.streams) == running
        assert self.gate.queued == len(self.queued)
        assert meter.sequences == self.sequences(running)
        assert meter.decoding == self.sequences(self.decoding)
        assert meter.backlog == sum(self.requests[key].prompt_tokens for key in self.prefilling)
        decoding = [(self.requests[key], tokens - 1) for key, tokens in self.decoding.items()]
        assert meter.kv == pytest.approx(sum(each.prompt_tokens + each.sequences * more for each, more in decoding))
        queues = (self.gate._interactive, self.gate._batch)
        assert sum(t.decoding for q in queues for t in q._tenants.values()) == self.sequences(self.decoding)
        assert set(self.gate.calibration._admitted) == self.prefilling
        assert set(self.gate.calibration._began) == set(self.decoding)

    @invariant()
    def limits_hold(self):
        if not self.requests:
            return
        if self.limits.max_running is not None:
            meter = self.gate.meter
            assert meter.sequences <= self.limits.max_running or len(meter.streams) == 1
        if self.limits.max_queued_tokens is not None:
            waiting = [self.requests[key] for key in self.queued]
            for batch in (False, True):
                queue = [each for each in waiting if each.batch is batch]
                self.waits_within(MOST_SHARES, queue)
                for tenant in {each.tenant for each in queue}:
                    self.waits_within(1.0, [each for each in queue if each.tenant == tenant])

    def waits_within(self, shares, requests):
        """Check the tokens that wait. One request may be larger than the limit."""
        tokens = sum(each.prompt_tokens for each in requests)
        assert len(requests) <= 1 or tokens <= shares * self.limits.max_queued_tokens

    @invariant()
    def nobody_waits_before_an_idle_engine_or_beyond_its_time(self):
        if not self.requests:
            return
        assert not self.queued or self.gate.meter.streams
        assert all(self.now <= self.due(self.requests[key]) for key in self.queued)


GateMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGateMachine = GateMachine.TestCase
