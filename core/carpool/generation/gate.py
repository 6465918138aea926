"""The gate: which requests the engine gets, and when, so that admitted requests meet TTFT and TPOT.

An engine that batches step by step accepts every request, and every sequence slows all others. The gate admits while
the forecast mean time per output token stays within the target, and holds the rest back; requests whose first token
would be too late are refused, at arrival if that is already certain.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from carpool.generation.calibration import Calibration
from carpool.generation.capacity import carried
from carpool.generation.kv_budget import KvBudget
from carpool.generation.meter import MOST_PREFILL, Meter
from carpool.generation.queues import OUTPUT_COST, PROMPT_COST, Expiry, FairQueue
from carpool.generation.requests import Action, Admit, Reason, Refuse, Request, Slo, State
from carpool.policy.generation import Generation, Order

if TYPE_CHECKING:
    from collections.abc import Mapping

    from carpool.generation.capacity import Carried
    from carpool.generation.step_model import StepModel

HEADROOM = 0.9
"""Share of the target up to which requests of batch priority fill the engine."""

TURNS = 20
"""After so many interactive requests, one of batch priority that has waited long is next, if it fits."""

CERTAIN = 3.0
"""Standard deviations from which a forecast counts as certain: one case in a thousand."""

MOST_AHEAD, BATCH_AHEAD = 0.9, 0.1
"""While no answer has a second token: the most seconds of prompts that the engine has to compute, and for batch
priority also the most as a share of the TTFT target, since interactive requests will wait for them."""

PACE_MEMORY = 8.0
"""Seconds over which the rate of admission is measured."""


class Limits(NamedTuple):
    """Configured limits; the gate learns the rest."""

    order: Order = Order.FCFS
    weights: Mapping[str, float] | None = None
    max_running: int | None = None
    max_queued_tokens: int | None = None
    kv_tokens: int | None = None
    """Size of the engine's KV cache, if the engine reports neither it nor its use."""
    kv_budget_percent: float = Generation().kv_budget_percent
    ageing: float = 60.0
    """Seconds after which a request of batch priority gets a turn although interactive ones wait."""


class Gate:
    """The state machine. Events come with ``now`` and return what to do; ``wake_at`` says when to ``poll`` again.

    ``model`` is where learning starts: any guess.
    """

    def __init__(self, slo: Slo, model: StepModel, limits: Limits | None = None) -> None:
        self.slo = slo
        self.limits = limits or Limits()
        self.meter = Meter(model)
        self.kv = KvBudget(self.limits.kv_budget_percent, self.limits.kv_tokens)
        self.pace = Pace()
        self.calibration = Calibration()
        self._interactive = FairQueue(self.limits.order, self.limits.weights)
        self._batch = FairQueue(self.limits.order, self.limits.weights)
        self._expiry = Expiry()
        self._tpots: Counter[float] = Counter()
        """Requests at the engine with their own targets, by the TPOT target."""
        self._passed = 0
        """Interactive requests admitted since the last one of batch priority."""

    def configure(self, slo: Slo, limits: Limits) -> None:
        """Apply other targets and limits; the learned model and waiting requests stay."""
        self.slo, self.limits = slo, limits
        self.kv.configure(limits.kv_budget_percent, limits.kv_tokens)
        for queue in (self._interactive, self._batch):
            queue.configure(limits.order, limits.weights)

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return self._interactive.requests + self._batch.requests

    def waiting(self) -> dict[str, float]:
        """Return the service of every tenant with waiting interactive requests, in token cost over its weight."""
        return self._interactive.waiting(self.meter.steps)

    def arrive(self, request: Request, now: float) -> list[Action]:
        """Queue a request, or refuse it."""
        expected = self.kv.lengths.expected(request)
        request.cost = PROMPT_COST * request.prompt_tokens + OUTPUT_COST * expected * request.choices
        reason, wait = self._hopeless(request, now)
        if reason is not None:
            request.state = State.ENDED
            return [Refuse(request, reason, max(1.0, wait))]
        self._queue(request).put(request, self.meter.steps)
        self._expiry.put(self._due(request), request)
        return self.poll(now)

    def poll(self, now: float) -> list[Action]:
        """Admit the requests that fit, in order, and refuse those that have become too late."""
        actions: list[Action] = [self._expire(request) for request in self._expiry.due(now)]
        while heads := self._heads():
            if self.meter.streams and (late := [head for head in heads if self._late(head, now)]):
                actions += [self._expire(request) for request in late]
                continue
            request = self._next(heads, now)
            if request is None:
                break
            self._queue(request).take(request, self.meter.steps)
            self._passed = 0 if request.batch else self._passed + 1
            request.state = State.PREFILLING
            self.calibration.admitted(request, now, self.meter)
            self.meter.admitted(request)
            if request.targets is not None:
                self._tpots[request.targets.tpot] += 1
            self.pace.admitted(request.cost)
            actions.append(Admit(request))
        self.pace.backlogged = self.queued > 0
        return actions

    def progress(self, now: float, tokens: float, *, seen: bool = True) -> list[Action]:
        """Count ``tokens`` that streams got after their first since the last call.

        Not ``seen``: they are assumed, and the step model does not learn from them.
        """
        self.pace.passed(self.meter.progress(now, tokens, seen=seen))
        if not self.meter.close():
            return []
        self.calibration.window(self.meter.model, self.slo)
        return self.poll(now)

    def first_token(self, request: Request, now: float, *, seen: bool = True) -> list[Action]:
        """Note the first token of a request; not ``seen``: it is assumed to come now, and is not learned from."""
        request.state = State.DECODING
        self.meter.first_token(request)
        self._queue(request).tenant(request.tenant).decodes(request.sequences, self.meter.steps)
        self.calibration.first_token(request, now, self.meter, seen=seen)
        return self.poll(now)

    def choice_ended(self, request: Request, now: float) -> list[Action]:
        """Note the end of a choice of a request that has more of them; the last one ends the request."""
        if request.sequences < 2:
            return []
        if request.state is State.DECODING:
            self._queue(request).tenant(request.tenant).decodes(-1, self.meter.steps)
            self.meter.choice_ended(request)
        request.sequences -= 1
        return self.poll(now)

    def ended(
        self, request: Request, now: float, output_tokens: int, *, complete: bool = True, whole: int | None = None
    ) -> list[Action]:
        """Note the end of a request in any state: complete, cancelled by its client, or failed.

        ``output_tokens`` of each choice, in the mean. ``whole``: those of the longest choice, where the answer came
        whole and its pace was assumed; the step model learns from it.
        """
        request.output_tokens = output_tokens
        if request.state is State.QUEUED:
            self._queue(request).remove(request)
        elif request.state is not State.ENDED:
            if request.state is State.DECODING:
                self._queue(request).tenant(request.tenant).decodes(-request.sequences, self.meter.steps)
            learned = complete and request.state is State.DECODING
            if learned and whole is not None:
                self.meter.learn_answer(request, whole)
            self.meter.ended(request)
            if request.targets is not None:
                self._tpots -= Counter({request.targets.tpot: 1})
            if learned:
                self.calibration.ended(request, self.meter, whole)
                self.kv.lengths.add(request)
            else:
                self.calibration.dropped(request)
        request.state = State.ENDED
        return self.poll(now)

    def report(self, kv_share: float | None, kv_tokens: float | None = None) -> None:
        """Take the engine's report of the share of its KV cache in use, and of the cache's size."""
        if kv_tokens is not None:
            self.kv.guess(kv_tokens)
        if kv_share is not None:
            self.kv.report(kv_share, self.meter.kv, self.meter.steps)

    def carries(self) -> Carried | None:
        """Return the engine's capacity within the targets, if it is known.

        None before enough answers have ended and the step model has learned, or without a target for TPOT.
        """
        load = self.calibration.load()
        if load is None or self.slo.tpot == inf:
            return None
        room = None if self.kv.tokens is None else self.limits.kv_budget_percent / 100 * self.kv.tokens
        target = self.slo.tpot / self.calibration.tpot
        return carried(self.meter.model, load, target, kv_tokens=room, most=self.limits.max_running)

    def wake_at(self, now: float) -> float:
        """Return when the next waiting request becomes too late; ``now`` or before: at once; ``inf``: none does."""
        del now
        return min([self._expiry.next_at(), *(self._latest(head) for head in self._heads())]) + 1e-3

    def _heads(self) -> list[Request]:
        """Return the next interactive request and the next one of batch priority, if any wait."""
        steps = self.meter.steps
        return [head for queue in (self._interactive, self._batch) if (head := queue.head(steps)) is not None]

    def _next(self, heads: list[Request], now: float) -> Request | None:
        """Return the request to admit: the interactive one, unless the other has its turn and fits."""
        last = heads[-1]
        # With a long backlog every request has waited that long: then one gets a turn only every ``TURNS``.
        aged = last.batch and now - last.arrival > self.limits.ageing and self._passed >= TURNS
        order = reversed(heads) if aged else heads[:1]
        return next((request for request in order if self._fits(request)), None)

    def _queue(self, request: Request) -> FairQueue:
        return self._batch if request.batch else self._interactive

    def _due(self, request: Request) -> float:
        """Return when a request's first token is due."""
        ttft = self.slo.ttft if request.targets is None else request.targets.ttft
        return min(request.deadline, inf if request.batch else request.arrival + ttft)

    def _latest(self, request: Request) -> float:
        """Return the latest time to admit a request so that its first token is in time."""
        seconds = self.calibration.ttft * self.meter.first_token_seconds(request.prompt_tokens)
        return self._due(request) - seconds

    def _late(self, request: Request, now: float) -> bool:
        """Whether the first token of the next request is certain to be late, beside the streams that run."""
        latest = self._latest(request)
        return now > latest or self.kv.too_small(request) or self._too_wide(request, latest - request.arrival)

    def _too_wide(self, request: Request, seconds: float) -> bool:
        """Whether ``seconds`` are too few for room for all choices of a request, even with nothing else admitted.

        Others would be held back in vain: of 32 answers of 5 s in the mean, ten end within 2 s, or up to 18. So a
        request with 24 choices finds no room where 32 sequences are the most.
        """
        meter, most = self.meter, self.limits.max_running
        if most is None or request.choices == 1 or seconds == inf or not self.kv.lengths.known:
            return False
        wanted = min(meter.sequences + request.choices - most, meter.sequences)
        if wanted <= 0:
            return False
        mean, deviation = self.kv.ends(meter, seconds / max(1e-4, meter.forecast()))
        return mean + CERTAIN * deviation < wanted

    def _reason(self, request: Request) -> Reason:
        return Reason.DEADLINE if self._due(request) == request.deadline else Reason.TTFT

    def _expire(self, request: Request) -> Refuse:
        """Refuse a waiting request."""
        queue = self._queue(request)
        queue.remove(request)
        request.state = State.ENDED
        return Refuse(request, self._reason(request), max(1.0, self.pace.seconds(queue.cost)))

    def _hopeless(self, request: Request, now: float) -> tuple[Reason | None, float]:
        """Return why an arriving request is refused, and the wait that it would have."""
        limit, queue = self.limits.max_queued_tokens, self._queue(request)
        if limit is not None and queue.full(request, limit):
            return Reason.QUEUE_FULL, 1.0
        if request.deadline <= now:
            return Reason.DEADLINE, 1.0
        if not queue.requests:
            return None, 0.0
        wait = self.pace.seconds(queue.ahead(request, self.meter.steps))
        late = now + wait - self._latest(request)
        return (self._reason(request), late) if late > 0 else (None, 0.0)

    def _fits(self, request: Request) -> bool:
        """Whether one more request keeps every TPOT target and fits the KV cache."""
        meter = self.meter
        if not meter.streams:
            return True
        if self.limits.max_running is not None and meter.sequences + request.choices > self.limits.max_running:
            return False
        if request.max_tokens == 1 and all(stream.max_tokens == 1 for stream in meter.streams.values()):
            # Nothing decodes, so there is no TPOT to keep: the engine gets the prompts of its next steps.
            most = min(MOST_AHEAD, self.slo.ttft * BATCH_AHEAD) if request.batch else MOST_AHEAD
            return meter.ahead * meter.model.prompt_token <= most and self.kv.fits(request, meter)
        if meter.prefill_share() > MOST_PREFILL:
            # Regardless of the step model: in the first second of an overload only prompts may have been seen yet, and
            # the fit then has 0 for a step without prompts.
            return False
        target = self._tpot(request) / self.calibration.tpot * (HEADROOM if request.batch else 1.0)
        return meter.forecast(request.choices, request.prompt_tokens) <= target and self.kv.fits(request, meter)

    def _tpot(self, request: Request) -> float:
        """Return the shortest TPOT target of all requests the engine would have: a step is equally long for all."""
        targets = [*self._tpots, self.slo.tpot if request.targets is None else request.targets.tpot]
        if len(self.meter.streams) > self._tpots.total():
            targets.append(self.slo.tpot)
        return min(targets)


class Pace:
    """The rate at which requests leave the queue: cost per second, over times with waiting requests."""

    def __init__(self) -> None:
        self.backlogged = False
        self._cost = 0.0
        self._seconds = 0.0

    def admitted(self, cost: float) -> None:
        """Count an admission."""
        if self.backlogged:
            self._cost += cost

    def passed(self, seconds: float) -> None:
        """Advance the time; counts older than `PACE_MEMORY` fade."""
        if self.backlogged:
            fade = max(0.0, 1 - seconds / PACE_MEMORY)
            self._cost *= fade
            self._seconds = self._seconds * fade + seconds

    def seconds(self, cost: float) -> float:
        """Return how long the queue takes to admit ``cost``; 0 if it is not known yet."""
        return cost * self._seconds / self._cost if self._cost and self._seconds > 0.5 else 0.0
