from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from functools import partial
from random import Random

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from carpool_operator.cluster.election import DURATION, RENEW, Candidate, Election, Lease, LeaseMeta, Overlapping, Spec
from carpool_operator.cluster.kube import ApiError
from carpool_operator.cluster.sharding import Shard

WHOLE = Shard()
WALL = datetime(2026, 11, 21, 12, tzinfo=UTC)


class Server:
    """Keeps one lease, as the API server does: a write of an older version is refused."""

    def __init__(self):
        self.lease = None
        self.version = 0

    def write(self, lease):
        there = "" if self.lease is None else self.lease.metadata.resource_version
        if lease.metadata.resource_version != there:
            return None
        self.version += 1
        meta = msgspec.structs.replace(lease.metadata, resource_version=str(self.version))
        self.lease = msgspec.structs.replace(lease, metadata=meta)
        return self.lease


def take(server, candidate, now):
    """One round that nothing goes wrong in."""
    candidate.saw(server.lease, now)
    proposal = candidate.proposal(now, WALL)
    if proposal is not None and (written := server.write(proposal)) is not None:
        candidate.wrote(written, now)


def test_the_first_leads_and_the_second_waits():
    server, a, b = Server(), Candidate("a", "l", "ns"), Candidate("b", "l", "ns")

    take(server, a, 0.0)
    take(server, b, 1.0)

    assert a.leads(1.0)
    assert not b.leads(1.0)
    assert server.lease.spec == Spec("a", 15, "2026-11-21T12:00:00.000000Z", "2026-11-21T12:00:00.000000Z", 0)


def test_a_leader_that_falls_silent_has_stopped_before_another_begins():
    server, a, b = Server(), Candidate("a", "l", "ns"), Candidate("b", "l", "ns")
    take(server, a, 0.0)
    take(server, b, 0.5)  # sees it as it has been since 0.0

    assert a.leads(RENEW - 0.1)
    assert not a.leads(RENEW)
    take(server, b, 0.5 + DURATION - 0.1)
    assert not b.leads(0.5 + DURATION - 0.1)
    take(server, b, 0.5 + DURATION)
    assert b.leads(0.5 + DURATION)
    assert server.lease.spec.lease_transitions == 1
    take(server, a, 16.0)
    assert not a.leads(16.0)


def test_a_release_lets_the_next_in_at_once():
    server, a, b = Server(), Candidate("a", "l", "ns"), Candidate("b", "l", "ns")
    take(server, a, 0.0)
    take(server, b, 0.5)

    server.write(a.release(WALL))
    take(server, b, 1.0)

    assert not a.leads(0.6)
    assert b.leads(1.0)


def test_under_its_old_name_it_goes_on_at_once_after_a_restart():
    server = Server()
    take(server, Candidate("a", "l", "ns"), 0.0)
    again = Candidate("a", "l", "ns")

    take(server, again, 100.0)

    assert again.leads(100.0)


def test_a_longer_lease_of_another_s_is_respected():
    server, b = Server(), Candidate("b", "l", "ns")
    server.write(Lease(metadata=LeaseMeta("l", "ns"), spec=Spec("somebody", 60, None, None, None)))
    take(server, b, 0.0)

    take(server, b, 59.0)
    assert not b.leads(59.0)
    take(server, b, 60.0)
    assert b.leads(60.0)
    assert server.lease.spec.lease_transitions == 1


class OneWriter(RuleBasedStateMachine):
    """Three candidates whose clocks start anywhere, whose requests and answers are late, lost or both."""

    def __init__(self):
        super().__init__()
        self.server = Server()
        self.now = 0.0
        self.candidates = [Candidate(name, "l", "ns") for name in "abc"]
        self.offsets = [0.0, 1000.0, -50.0]
        self.flying = []
        """Writes under way: whose, what, when begun on its own clock; and answers."""
        self.answers = []

    def clock(self, number):
        return self.now + self.offsets[number]

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.0, 5.0, 9.0, 14.0, 16.0]))
    def pass_time(self, seconds):
        self.now += seconds

    @rule(number=st.integers(0, 2))
    def look(self, number):
        self.candidates[number].saw(self.server.lease, self.clock(number))

    @rule(number=st.integers(0, 2))
    def propose(self, number):
        now = self.clock(number)
        proposal = self.candidates[number].proposal(now, WALL)
        if proposal is not None:
            self.flying.append((number, proposal, now))

    @rule(data=st.data(), answered=st.booleans())
    def arrive(self, data, answered):
        if self.flying:
            number, proposal, begun = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
            written = self.server.write(proposal)
            if written is not None and answered:
                self.answers.append((number, written, begun))

    @rule()
    def answer(self):
        if self.answers:
            number, written, begun = self.answers.pop(0)
            self.candidates[number].wrote(written, begun)

    @rule(number=st.integers(0, 2))
    def release(self, number):
        candidate = self.candidates[number]
        # As the process does it: only once nothing of its own is under way.
        if not any(each[0] == number for each in (*self.flying, *self.answers)):
            proposal = candidate.release(WALL)
            if proposal is not None:
                self.server.write(proposal)

    @invariant()
    def one_leads(self):
        leading = [number for number, each in enumerate(self.candidates) if each.leads(self.clock(number))]
        assert len(leading) <= 1


OneWriter.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestOneWriter = OneWriter.TestCase


# ------------------------------------------------------------------------------------------- over the wire


@pytest.fixture
def stand(api, clock):
    """Make candidates."""
    kubes = []

    def make(identity, shard=WHOLE):
        kube, name = api.kube(), shard.lease("l")
        kubes.append(kube)
        return Election(
            kube, Candidate(identity, name, "ns"), name=name, namespace="ns", clock=clock,
            log=logging.getLogger("test"), random=Random(1), overlaps=partial(shard.overlaps, "l"),
        )  # fmt: skip

    yield make
    for kube in kubes:
        kube.close()


def lease(api):
    return api.get("coordination.k8s.io/v1", "leases", "l")["spec"]


async def test_of_two_that_begin_at_once_one_leads(api, stand):
    a, b = stand("a"), stand("b")

    results = await asyncio.gather(a.round(), b.round(), return_exceptions=True)

    assert [a.leads(), b.leads()].count(True) == 1
    assert all(each is None or each.status == 409 for each in results)
    assert lease(api)["holderIdentity"] == ("a" if a.leads() else "b")


async def test_it_renews_without_reading(api, stand, clock):
    a = stand("a")
    await a.round()
    api.log.clear()
    for _ in range(3):
        clock.now += 2.0
        await a.round()

    assert [line.split()[0] for line in api.log] == ["PUT"] * 3
    assert a.leads()


async def test_an_answer_that_was_lost_does_not_end_its_term(api, stand, clock):
    a = stand("a")
    await a.round()
    api.fail("PUT", status=500, after=True)
    clock.now += 2.0
    with pytest.raises(ApiError):
        await a.round()
    clock.now += 2.0
    with pytest.raises(ApiError) as conflict:  # the version is a newer one by now; it is read
        await a.round()
    await a.round()

    assert conflict.value.status == 409
    assert a.leads()
    clock.now += RENEW - 0.1
    assert a.leads()


async def test_when_the_server_is_gone_it_stops_in_time_and_takes_up_again_after(api, stand, clock):
    a, b = stand("a"), stand("b")
    await a.round()
    await b.round()
    api.fail("/leases", times=6)
    for _ in range(6):
        clock.now += 2.0
        with pytest.raises(ApiError):
            await a.round()
    assert not a.leads()
    clock.now += 5.0
    await b.round()
    await a.round()

    assert b.leads()
    assert not a.leads()
    assert lease(api)["leaseTransitions"] == 1


async def test_a_leader_that_is_cancelled_reports_the_loss_and_releases_the_lease(api, stand):
    a, b = stand("a"), stand("b")
    running = asyncio.create_task(a.run())
    await a.led.wait()
    assert not a.lost.is_set()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

    await a.release()
    await b.round()

    assert a.lost.is_set()
    assert not a.led.is_set()
    assert b.leads()


async def test_a_release_that_fails_is_no_reason_not_to_end(api, stand):
    a = stand("a")
    await a.round()
    api.fail("PUT", status=500)

    await a.release()

    assert not a.leads()


@pytest.mark.parametrize("turns", range(5))
async def test_a_task_that_is_cancelled_just_as_a_round_ends_still_ends(stand, monkeypatch, turns):
    one, answered = stand("a"), asyncio.Event()
    monkeypatch.setattr(one, "round", answered.wait)
    task = asyncio.create_task(one.run())
    for _ in range(5):
        await asyncio.sleep(0)
    answered.set()
    for _ in range(turns):
        await asyncio.sleep(0)

    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)

    ended = task.done()
    task.cancel()
    assert ended


# ------------------------------------------------------------------------------------------- several shards


async def test_shards_of_one_division_lead_at_once(stand):
    a, b = stand("a", Shard(0, 2)), stand("b", Shard(1, 2))

    await asyncio.gather(a.round(), b.round())

    assert a.leads()
    assert b.leads()


@pytest.mark.parametrize(("before", "after"), [(WHOLE, Shard(0, 2)), (Shard(1, 2), WHOLE), (Shard(1, 2), Shard(0, 3))])
async def test_another_division_waits_until_the_leases_of_this_one_are_released(stand, before, after):
    a, b = stand("a", before), stand("b", after)
    await a.round()
    await b.round()
    assert not b.leads()

    await a.release()
    await b.round()

    assert b.leads()


async def test_another_division_waits_until_the_leases_of_this_one_have_run_out(stand, clock):
    a, b = stand("a", Shard(1, 2)), stand("b", WHOLE)
    await a.round()
    await b.round()
    clock.now += DURATION - 0.1
    await b.round()
    assert not b.leads()

    clock.now += 0.1
    await b.round()

    assert not a.leads()
    assert b.leads()


async def test_of_two_divisions_that_look_at_the_same_time_not_both_lead(api, stand, monkeypatch):
    a, b = stand("a", Shard(1, 2)), stand("b", WHOLE)
    looked = asyncio.Barrier(2)

    def slow(one):
        look, first = one._is_alone, True

        async def is_alone():
            nonlocal first
            alone = await look()
            if first:
                first = False
                await looked.wait()
            return alone

        monkeypatch.setattr(one, "_is_alone", is_alone)

    slow(a)
    slow(b)

    await asyncio.gather(a.round(), b.round())

    assert not (a.leads() and b.leads())
    held = [
        lease
        for lease in ("l", "l-1-of-2")
        if api.get("coordination.k8s.io/v1", "leases", lease)["spec"]["holderIdentity"]
    ]
    assert len(held) < 2


class OneDivision(RuleBasedStateMachine):
    """Shards of two divisions, whose requests are made in any order and whose clocks start anywhere."""

    def __init__(self):
        super().__init__()
        self.servers = {name: Server() for name in ("l", "l-0-of-2", "l-1-of-2")}
        self.now = 0.0
        self.shards = [WHOLE, Shard(0, 2), Shard(1, 2)]
        self.candidates = [Candidate(str(shard), shard.lease("l"), "ns") for shard in self.shards]
        self.others = [Overlapping() for _ in self.shards]
        self.at = [None] * 3
        """What each does next: a proposal to write, or ``"look"`` after it was written."""

    def clock(self, number):
        return self.now + 1000.0 * number

    def alone(self, number):
        there = [each.lease for each in self.servers.values() if each.lease is not None]
        overlapping = [each for each in there if self.shards[number].overlaps("l", each.metadata.name)]
        return not self.others[number].held(overlapping, self.clock(number))

    def server(self, number):
        return self.servers[self.shards[number].lease("l")]

    @rule(seconds=st.sampled_from([0.1, 2.0, 9.0, 14.0, 16.0]))
    def pass_time(self, seconds):
        self.now += seconds

    @rule(number=st.integers(0, 2))
    def go_on(self, number):
        """As ``Election.round``, one request at a time."""
        candidate, now = self.candidates[number], self.clock(number)
        match self.at[number]:
            case None:
                led = candidate.leads(now)
                if not led:
                    candidate.saw(self.server(number).lease, now)
                proposal = candidate.proposal(now, WALL)
                if proposal is not None and (led or self.alone(number)):
                    self.at[number] = (proposal, now, led)
            case (proposal, begun, led):
                written = self.server(number).write(proposal)
                if written is not None:
                    candidate.wrote(written, begun)
                self.at[number] = "look" if written is not None and not led else None
            case "look":
                self.at[number] = None
                if not self.alone(number):
                    self.server(number).write(candidate.release(WALL) or candidate.lease)

    @rule(number=st.integers(0, 2))
    def release(self, number):
        if self.at[number] is None and (proposal := self.candidates[number].release(WALL)) is not None:
            self.server(number).write(proposal)

    @invariant()
    def one_division_leads(self):
        # A candidate that still has to look does not report yet that it leads.
        leading = {
            shard.count
            for number, shard in enumerate(self.shards)
            if self.candidates[number].leads(self.clock(number)) and self.at[number] != "look"
        }
        assert len(leading) <= 1


OneDivision.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestOneDivision = OneDivision.TestCase
