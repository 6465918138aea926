"""An engine's twin that counts as vLLM does: the plant for what is learned from an engine's own metrics."""

from __future__ import annotations

from random import Random

from carpool.generation.engine import Engine
from carpool.generation.observed import Counters
from carpool.generation.requests import Request
from carpool.generation.simulation import Arrival, Simulation
from carpool_cli.streams.rules import Nothing


class MeteredEngine(Engine):
    """``scrapes``: its counters every ``interval`` seconds of virtual time."""

    def __init__(self, profile, random, *, noise=0.05, interval=15.0, counts_steps=True):
        super().__init__(profile, random, noise=noise)
        self.interval, self.counts_steps = interval, counts_steps
        self.scrapes = []
        self.preempted = 0
        self._sums = dict.fromkeys(("prompts", "gaps", "gap_seconds", "requests", "asked", "answered", "steps"), 0.0)

    def run(self, now, until=float("inf")):
        decoding = self.load[0]
        progress = super().run(now, until)
        if progress is None:
            return None
        sums = self._sums
        sums["prompts"] += progress.prompt_tokens
        sums["gaps"] += progress.tokens
        # Sequences that decode wait for steps of prompts only, too.
        sums["gap_seconds"] += decoding * (progress.end - now)
        sums["steps"] += progress.steps
        sums["requests"] += len(progress.finished)
        sums["asked"] += sum(each.prompt_tokens for each in progress.finished)
        sums["answered"] += sum(each.output_tokens for each in progress.finished)
        self.preempted += len(progress.preempted)
        while progress.end >= self.interval * (len(self.scrapes) + 1):
            self.scrapes.append(self.counters(self.interval * (len(self.scrapes) + 1)))
        return progress

    def counters(self, at):
        sums, (running, waiting, share) = self._sums, self.load
        return Counters(
            at=at,
            prompt_tokens=sums["prompts"],
            gaps=sums["gaps"],
            gap_seconds=sums["gap_seconds"],
            requests=sums["requests"],
            request_prompt_tokens=sums["asked"],
            request_output_tokens=sums["answered"],
            steps=sums["steps"] if self.counts_steps else None,
            running=running,
            waiting=waiting,
            kv_share=share,
            kv_size=float(self.profile.kv_tokens),
            preemptions=float(self.preempted),
        )


def scraped(profile, slo, lengths, rates, *, seconds=60.0, seed=1, **options):
    """Play an engine without a gate at each of ``rates`` for so long; return its scrapes."""
    random, now, arrivals = Random(seed), 0.0, []
    for rate in rates:
        end = now + seconds
        while (now := now + random.expovariate(rate)) < end:
            prompt, output = lengths[len(arrivals) % len(lengths)]
            arrivals.append(Arrival(Request(len(arrivals), now, prompt), output))
        now = end
    engine = MeteredEngine(profile, Random(seed), **options)
    Simulation(arrivals, engine, Nothing(slo, profile), until=now).run()
    return engine.scrapes
