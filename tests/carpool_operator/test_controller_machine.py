"""A policy, its rival and its pods come, go, fail and change at random; the invariants hold all the same."""

from __future__ import annotations

from math import nan

from fleets import EPOCH, RESNET, SimulatedPod, World, counted, policy_of, spec, workload_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from carpool.batching.counters import Stats
from carpool.policy.parameters import Parameters
from carpool.policy.spec import Fallback, FallbackBehavior, Tuning, TuningMode
from carpool_operator.controller import Controller
from carpool_operator.tuning.assignment import assign

RATES = [0, 3, 40, 300, 1500]


def cells(arrivals, batch):
    """Samples of a device with batch latency 5 + 0.5 b ms."""
    return [(batch, max(arrivals // batch, 1), 0.005 + 0.0005 * batch)] if arrivals else []


class Fleet(RuleBasedStateMachine):
    @initialize(behavior=st.sampled_from(FallbackBehavior))
    def begin(self, behavior):
        self.fallback = Fallback(behavior=behavior)
        self.world = World(spec(fallback=self.fallback), pods=2)
        self.totals = {each.pod.uid: counted() for each in self.world.pods}
        self.count = 2
        self.rate, self.late = 300, 0.0
        self.rival = Controller()
        self.touched = True
        """Whether the policy or whose the target is changed since the last step."""
        self.generation = 0
        self.applies = True
        """Whether the policy's mode allows changes."""

    def sees(self):
        """Whether any pod that is ready can be read."""
        return any(each.answers and not each.spoiled and each.pod.ready for each in self.world.pods)

    def one_step(self):
        world = self.world
        for each in world.pods:
            each.spoiled = getattr(each, "spoiled", False)
            each.spoil = spoil if each.spoiled else (lambda report: report)
        stats = []
        for each in world.pods:
            arrivals = self.rate * 2
            batch = min(each.parameters().max_batch, 8)
            self.totals[each.pod.uid] = counted(
                arrivals,
                misses=round(arrivals * self.late),
                cells=cells(arrivals, batch),
                total=self.totals[each.pod.uid],
            )
            stats.append(Stats(world.now + 2.0, models={"": self.totals[each.pod.uid]}))
        before, documents, seen = world.durable, len(world.log), self.sees()
        owned = assign([world.policy, *world.others]).get(RESNET) is world.policy
        world.step(world.now + 2.0, stats)
        new = [document for _, document in world.log[documents:]]
        # 1. Generations only grow; what is sent again is what is in force.
        for document in new:
            generation = document.change.generation
            if generation <= self.generation:
                assert document.pods is not None, "only repeats carry what was sent before"
            self.generation = max(self.generation, generation)
            assert document.change.expires > EPOCH + world.now
        # 2. A policy that does not own the target publishes nothing; of two policies, at most one publishes.
        if not owned:
            assert new == []
        if world.others:
            rival = self.rival.step(replace(world.view(world.now, {}), policy=world.others[0]))
            assert not (rival.documents and new)
            assert owned <= (rival.documents == [])
            for document in rival.documents:
                self.generation = max(self.generation, document.change.generation)
                for each in world.pods:
                    each.take(document.change)
        # 3. Without evidence nobody's parameters become others, but by the policy, or back to its baseline.
        for document in new:
            if document.pods is None and before is not None and not seen and not self.touched:
                after = document.change.parameters
                falls = self.fallback.behavior is FallbackBehavior.BASELINE and self.applies and not world.policy.paused
                assert after == before.parameters or (falls and set(after.values()) == {Parameters()})
        self.touched = False

    @rule(rate=st.sampled_from(RATES), late=st.sampled_from([0.0, 0.0, 0.2]), steps=st.integers(1, 12))
    def traffic(self, rate, late, steps):
        self.rate, self.late = rate, late
        for _ in range(steps):
            self.one_step()

    @precondition(lambda self: len(self.world.pods) < 4)
    @rule(template=st.sampled_from(["one", "two"]))
    def pod_comes(self, template):
        world = self.world
        pod = SimulatedPod(self.count, now=world.now, template_hash=template)
        pod.spoiled = False
        pod.change = world.durable
        self.count += 1
        self.totals[pod.pod.uid] = counted()
        world.pods.append(pod)
        world.stats.append(Stats(world.now, models={"": counted()}))

    @precondition(lambda self: self.world.pods)
    @rule(data=st.data())
    def pod_goes(self, data):
        index = data.draw(st.integers(0, len(self.world.pods) - 1))
        del self.world.pods[index], self.world.stats[index]

    @precondition(lambda self: self.world.pods)
    @rule(data=st.data(), what=st.sampled_from(["restart", "silent", "spoiled", "refuses", "unready"]))
    def pod_fails(self, data, what):
        world = self.world
        index = data.draw(st.integers(0, len(world.pods) - 1))
        each = world.pods[index]
        if what == "restart":
            self.totals[each.pod.uid] = counted()
            each.restart(world.now, Stats(at=0.0), world.durable)
        elif what == "silent":
            each.answers = not each.answers
        elif what == "spoiled":
            each.spoiled = not getattr(each, "spoiled", False)
        elif what == "refuses":
            each.takes = not each.takes
        else:
            each.pod = replace(each.pod, ready=not each.pod.ready)

    @rule(p99=st.sampled_from([0.02, 0.05, 0.5]), mode=st.sampled_from(TuningMode), paused=st.booleans())
    def policy_is_edited(self, p99, mode, paused):
        self.world.edit(spec(p99, tuning=Tuning(mode=mode), fallback=self.fallback))
        self.applies = mode is TuningMode.APPLY
        self.world.policy = replace(self.world.policy, paused=paused)
        self.touched = True

    @rule()
    def policy_breaks(self):
        self.world.policy = replace(self.world.policy, spec=None, error="spec: nonsense", generation=99)
        self.mend_soon = True

    @precondition(lambda self: self.world.policy.spec is None)
    @rule()
    def policy_is_mended(self):
        self.world.edit(spec(fallback=self.fallback))
        self.applies = True
        self.touched = True

    @rule(created=st.sampled_from([1.0, 2 * EPOCH]))
    def rival_comes_or_goes(self, created):
        self.world.others = [] if self.world.others else [policy_of(name="rival", created=created)]
        self.touched = True

    @rule(inject=st.sampled_from(["true", None]))
    def workload_changes(self, inject):
        self.world.workload = workload_of(inject=inject) if self.world.workload is None else None

    @rule()
    def operator_restarts(self):
        self.world.restart_operator()
        self.rival = Controller()

    @invariant()
    def pods_run_something_that_was_published(self):
        for each in self.world.pods:
            if each.change is not None:
                assert each.change.generation <= self.generation

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        world.others, world.workload = [], workload_of()
        world.edit(spec(fallback=self.fallback))
        world.policy = replace(world.policy, paused=False)
        world.pods = world.pods[:2] or [SimulatedPod(77, now=world.now)]
        for each in world.pods:
            each.answers, each.spoiled, each.takes = True, False, True
            each.pod = replace(each.pod, ready=True, template_hash="one")
            self.totals.setdefault(each.pod.uid, counted())
        self.rate, self.late, self.touched = 0, 0.0, True
        for _ in range(250):
            self.one_step()
        # All is well again, and at rest: nothing is written, nothing is said.
        before = len(world.log), len(world.writes), len(world.events)
        for _ in range(50):
            self.one_step()
        assert (len(world.log), len(world.writes), len(world.events)) == before
        # Nor by another operator that goes on from here.
        world.restart_operator()
        for _ in range(20):
            self.one_step()
        assert (len(world.log), len(world.writes), len(world.events)) == before
        assert world.condition("Ready")["status"] == "True"
        assert {each.change.generation for each in world.pods} == {world.durable.generation}


def spoil(report):
    return replace(report, stats=replace(report.stats, at=nan))


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
