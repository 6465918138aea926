"""Fleets that exist only as numbers: simulated pods, the reports they would give, the documents they would take."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from carpool.batching.counters import DURATION_BOUNDS, ROW_BOUNDS, ModelStats, Stats, combine
from carpool.exchange.report import Lane, Queue, Report, RolledBack, Stalls
from carpool.learning.arrivals import Poisson, until
from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.spec import SLO, Latency, Objective
from carpool.simulation.outcome import Setting
from carpool.simulation.simulator import Device, Simulation, linear
from carpool_operator.api.annotations import INJECT
from carpool_operator.api.model import Pod, Policy, Reading, Target, View, Workload
from carpool_operator.api.spec import PolicySpec, TargetRef
from carpool_operator.controller import Controller
from carpool_operator.delivery.documents import EVERY
from carpool_operator.tuning.assignment import assign

RESNET = Target("vision", "Deployment", "resnet")
GPU = Device(times=linear(0.005, 0.0005))
EPOCH = 1_790_000_000.0
"""Seconds since the epoch when virtual time begins."""
INTERVAL = 2.0


def spec(p99=0.05, names=("resnet",), objective=Objective.EFFICIENCY, **changes):
    """Of a policy that saves device time at any load: what its tuner wants depends on nothing but the load."""
    return PolicySpec(
        objective=objective,
        slo=SLO(latency=Latency(p99=Duration(p99))),
        target_refs=tuple(TargetRef(name=name) for name in names),
        **changes,
    ).validate()


def policy_of(wanted=None, *, name="resnet", annotated=False, **changes):
    fields = {
        "namespace": "vision",
        "name": name,
        "uid": f"uid-{name}",
        "generation": 1,
        "created": EPOCH,
        "spec": wanted or spec(),
        "error": "",
        "status": {},
        "made_for": RESNET if annotated else None,
    }
    return Policy(**{**fields, **changes})


def workload_of(target=RESNET, *, replicas=3, inject="true", **changes):
    fields = {
        "target": target,
        "uid": f"uid-{target.name}",
        "generation": 1,
        "annotations": {},
        "template_annotations": {} if inject is None else {INJECT: inject},
        "selector": f"app={target.name}",
        "replicas": replicas,
        "created": EPOCH,
        "rolling": False,
    }
    return Workload(**{**fields, **changes})


def pod_of(index, target=RESNET, **changes):
    fields = {
        "namespace": target.namespace,
        "name": f"{target.name}-{index}",
        "uid": f"{target.name}-uid-{index}",
        "target": target,
        "ip": "10.244.0.9",
        "admin_port": 14090,
        "ready": True,
        "deleting": False,
        "template_hash": "one",
    }
    return Pod(**{**fields, **changes})


def counted(arrivals=0, *, misses=0, seconds=2.0, cells=(), total=None):
    """Counters of an interval, on top of ``total``."""
    before = total or ModelStats(durations=[0] * (len(DURATION_BOUNDS) + 1), request_rows=[0] * (len(ROW_BOUNDS) + 1))
    windows = round(seconds / 0.1)
    each = arrivals / windows
    known = {tuple(cell[:4]): cell[4:] for cell in before.cells}
    for rows, batches, time in cells:
        n, busy, squared = known.get((0, rows, 1, 0), (0, 0.0, 0.0))
        known[0, rows, 1, 0] = (n + batches, busy + batches * time, squared + batches * time * time)
    durations = list(before.durations)
    durations[16] += arrivals
    return ModelStats(
        arrivals=before.arrivals + arrivals,
        arrivals_squared=before.arrivals_squared + round(windows * (each * each + each)),
        windows=before.windows + windows,
        rows=before.rows + arrivals,
        dispatched=before.dispatched + arrivals,
        served=before.served + arrivals,
        hits=before.hits + arrivals - misses,
        misses={"late": before.misses.get("late", 0) + misses},
        cells=[(*key, *value) for key, value in known.items()],
        durations=durations,
        request_rows=[before.request_rows[0] + arrivals, *before.request_rows[1:]],
    )


def report_of(stats, *, uptime, generation=0, running=None, parameters=None, **changes):
    """What a sidecar would say."""
    lanes = {
        name: Lane(
            parameters=parameters or Parameters(),
            pass_through=(parameters or Parameters()).pass_through,
            queued_requests=0,
            cap=32,
            quarantined=False,
        )
        for name in stats.models
    }
    fields = {
        "stats": stats,
        "uptime_seconds": uptime,
        "ready": True,
        "readiness": "ready",
        "target": str(RESNET),
        "generation": generation,
        "running": generation if running is None else running,
        "slo_seconds": 0.05,
        "queue": Queue(rows=stats.queued_rows, in_flight=0, slots=1),
        "lanes": lanes,
        "stalls": Stalls(0, 0.0),
    }
    return Report(**{**fields, **changes})


class SimulatedPod:
    """A replica's sidecar without its batching: what it received, and when it began."""

    def __init__(self, index, now=0.0, **changes):
        self.pod = pod_of(index, **changes)
        self.began = now
        self.change = None
        self.before = None
        """The change that was in force before a roll-back, and why there was one."""
        self.rolled_back = []
        self.stalled = 0.0
        self.answers = True
        self.takes = True
        self.spoil = lambda report: report
        self.note = ""
        self._origin = Stats(at=0.0)

    def restart(self, now, stats, durable):
        """Begin anew, with what the ConfigMap holds."""
        self.began, self._origin, self.change, self.rolled_back = now, stats, durable, []

    def take(self, change):
        if self.takes and (self.change is None or change.generation > self.change.generation):
            self.change, self.rolled_back, self.before = change, [], self.change

    def roll_back(self, model, at):
        """Go back by itself, as the sidecar's own rule does."""
        now, before = self.change, self.before
        self.rolled_back = [
            RolledBack(
                model=model,
                generation=now.generation,
                rejected=now.parameters.get(model, now.parameters[EVERY]),
                back_to=before.parameters.get(model, before.parameters[EVERY]),
                back_to_generation=before.generation,
                reason="9 of 100 requests missed",
                at=at,
            )
        ]

    def parameters(self, model=""):
        if self.change is None:
            return Parameters(pass_through=True, max_in_flight=1024)
        change = self.before if self.rolled_back else self.change
        return change.parameters.get(model, change.parameters[EVERY])

    def reading(self, now, stats):
        if not self.answers:
            return Reading(now, None, "connection refused")
        own = stats.since(self._origin)
        generation = 0 if self.change is None else self.change.generation
        report = report_of(
            own,
            uptime=now - self.began,
            generation=generation,
            running=self.rolled_back[0].back_to_generation if self.rolled_back else generation,
            parameters=self.parameters(),
            rolled_back=self.rolled_back,
            stalls=Stalls(0, self.stalled),
        )
        return Reading(now, self.spoil(report), note=self.note)


class World:
    """A policy, its target, and what the operator's hands would do: read, deliver, write the status."""

    def __init__(self, wanted=None, *, pods=3, device=GPU, **changes):
        self.device = device
        self.policy = policy_of(wanted, **changes)
        self.controller = Controller()
        self.pods = [SimulatedPod(index) for index in range(pods)]
        self.workload = workload_of(replicas=pods)
        self.missed = ()
        self.workload_events = ()
        self.others = []
        self.durable = None
        self.log = []
        """(when, document)"""
        self.writes = []
        """(when, status)"""
        self.events = []
        self.now = 0.0
        self.offset = 0.0
        """Where this run begins: virtual time goes on over several."""
        self.stats = [Stats(at=0.0) for _ in self.pods]

    # What a test does to it

    def restart_operator(self):
        """Another operator goes on from what the API server holds."""
        self.controller = Controller()
        if self.durable is not None:
            self.controller.restore(RESNET, self.durable)

    def spoil(self, spoil):
        """Change what all pods report."""
        for each in self.pods:
            each.spoil = spoil

    def edit(self, wanted):
        self.policy = replace(self.policy, spec=wanted, generation=self.policy.generation + 1)

    # What the hands do

    def view(self, now, readings):
        policies = [self.policy, *self.others]
        return View(
            now=now,
            wall=EPOCH + now,
            policy=self.policy,
            owners=assign(policies),
            workloads={} if self.workload is None else {RESNET: self.workload},
            pods={RESNET: [each.pod for each in self.pods]},
            readings=readings,
            refused={
                each.pod.uid: "403: not for me" for each in self.pods if not each.takes and self.durable is not None
            },
            missed={RESNET: self.missed},
            workload_events={RESNET: self.workload_events},
        )

    def step(self, now, stats=None):
        self.now = now
        self.stats = stats or [replace(each, at=now) for each in self.stats]
        readings = {each.pod.uid: each.reading(now, own) for each, own in zip(self.pods, self.stats, strict=False)}
        outcome = self.controller.step(self.view(now, readings))
        for document in outcome.documents:
            self.log.append((now, document))
            if document.pods is None:
                self.durable = document.change
            for each in self.pods:
                if document.pods is None or each.pod.uid in document.pods:
                    each.take(document.change)
        if outcome.status != self.policy.status:
            self.writes.append((now, outcome.status))
            self.policy = replace(self.policy, status=outcome.status)
        self.events += [(now, event) for event in outcome.events]
        return outcome

    def run(self, rate, seconds, *, seed=1, every=None):
        """Send a load (requests/s of all pods) for a while; ``every(now)`` is called before each step.

        Each run is a simulation of its own, whose counters go on where the last ended.
        """
        begin, base = self.now, self.stats

        def hook(now, stats):
            at = begin + now
            if every is not None:
                every(at)
            summed = [_on_top(at, own, below) for own, below in zip(stats, base, strict=False)]
            self.step(at, summed)
            estimate = self.device.estimate()
            return [Setting(each.parameters(), estimate) for each in self.pods]

        simulation = Simulation(
            until(Poisson(rate), seconds, Random(seed)) if rate else [],
            self.device,
            slo=self.policy.spec.slo.due,
            parameters=self.pods[0].parameters(),
            estimate=self.device.estimate(),
            replicas=len(self.pods),
            seconds=seconds,
            seed=seed,
        )
        return simulation.every(INTERVAL, hook).run()

    # What a test looks at

    @property
    def status(self):
        return self.policy.status

    def condition(self, kind):
        return next(each for each in self.status["conditions"] if each["type"] == kind)

    def documents(self, start=0.0):
        return [document for at, document in self.log if at >= start]

    def applied(self):
        """Documents for all pods, as (when, parameters of the one model)."""
        return [
            (at, document.change.parameters.get("", document.change.parameters[EVERY]))
            for at, document in self.log
            if document.pods is None
        ]

    def reasons(self, start=0.0):
        return [event.reason for at, event in self.events if at >= start]

    def parameters(self, model=""):
        return self.durable.parameters.get(model, self.durable.parameters[EVERY])


def _on_top(at, own, below):
    models = dict(below.models)
    for name, stats in own.models.items():
        models[name] = _sum(stats, below.models[name]) if name in below.models else stats
    return Stats(at, own.device_busy + below.device_busy, models, own.queued_rows)


def _sum(one, other):
    return combine([one, other])
