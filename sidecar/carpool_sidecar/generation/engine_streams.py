"""All token streams of one engine: those under way, their counts, and their admission."""

from __future__ import annotations

from itertools import count
from math import inf
from typing import TYPE_CHECKING

from carpool.generation.requests import Request
from carpool_sidecar.generation.counts import Models
from carpool_sidecar.generation.gatekeeper import Gatekeeper, classes_of, slo_of
from carpool_sidecar.generation.load import Rate, with_streams
from carpool_sidecar.generation.requests import read
from carpool_sidecar.generation.stream import TOO_LATE
from carpool_sidecar.generation.token_sizes import BYTES_PER_TOKEN, MOST, TokenSizes
from carpool_sidecar.http1.messages import find
from carpool_sidecar.protocols.headers import PRIORITY
from carpool_sidecar.protocols.headers import read as read_headers

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable

    from carpool.exchange.token_streams import EngineSays
    from carpool.generation.requests import ClassTargets
    from carpool.policy.spec import BatchingPolicy
    from carpool_sidecar.generation.answers import Ending
    from carpool_sidecar.generation.stream import Stream
    from carpool_sidecar.http1.messages import Headers
    from carpool_sidecar.tuning.replica_load import ReplicaLoad


class StreamTerms:
    """What the policy says of requests: their targets, and their tenants."""

    def __init__(self, policy: BatchingPolicy) -> None:
        self.slo = slo_of(policy)
        """Targets, if there are any."""
        self._classes = classes_of(policy)
        tenants = policy.generation.tenants
        self._tenant = None if tenants is None else tenants.header.lower().encode()

    def targets_of(self, headers: Headers) -> ClassTargets | None:
        """Return the targets of the class that a request asks for, if there is one."""
        priority = find(headers, PRIORITY)
        return None if priority is None else self._classes.get(priority)

    def tenant_of(self, headers: Headers) -> str:
        """Return the name of a request's tenant; "" if there is none."""
        tenant = None if self._tenant is None else find(headers, self._tenant)
        return (tenant or b"").decode("latin-1")

    def met(self, stream: Stream, seconds: float, steps: float, tpot: float | None) -> bool:
        """Whether a complete answer met its targets; one that comes whole must come when its last token was due.

        With batch priority it has none to miss.
        """
        if self.slo is None or stream.ticket.batch:
            return self.slo is not None
        slo = stream.ticket.targets or self.slo
        first_at = stream.progress.first_at
        if first_at is None:
            return seconds <= slo.ttft + (slo.tpot * steps if steps > 0 else 0.0)
        return first_at - stream.ticket.arrival <= slo.ttft and (tpot is None or tpot <= slo.tpot)


class Streams:
    """The shared state of streams. ``clock`` gives monotonic seconds, as exchanges' times."""

    def __init__(self, policy: BatchingPolicy, *, clock: Callable[[], float], log: logging.Logger) -> None:
        self.terms = StreamTerms(policy)
        self.models = Models()
        self.sizes = TokenSizes()
        self.gatekeeper = Gatekeeper(policy, clock=clock, log=log)
        self.under_way: set[Stream] = set()
        """Requests that wait or are answered."""
        self.faults = 0
        """Streams that are only forwarded, after an error in the sidecar."""
        self.engine: EngineSays | None = None
        """The engine's last metrics."""
        self._single: set[str] = set()
        """Models whose engine gave only one answer to the last request for several."""
        self._clock = clock
        self._log = log
        self._keys = count()
        self.rate = Rate(clock)
        """Rate of requests, refused ones included."""

    def added_to(self, load: ReplicaLoad) -> ReplicaLoad:
        """Return the load of batched models with that of token streams."""
        return with_streams(load, self.gatekeeper.gate, self.rate.per_second())

    def configure(self, policy: BatchingPolicy) -> None:
        """Take another policy."""
        self.terms = StreamTerms(policy)
        self.gatekeeper.configure(policy)

    @property
    def running(self) -> int:
        """Requests with the engine."""
        return len(self.under_way) - self.gatekeeper.queued

    @property
    def kv_tokens(self) -> int:
        """Tokens of the requests with the engine, prompts and answers so far; estimated."""
        return round(
            sum(
                stream.ticket.prompt_tokens + stream.progress.output_tokens
                for stream in self.under_way
                if stream.sent_on
            )
        )

    # Called by streams

    def arrive(self, stream: Stream) -> None:
        """Take a request whose body is here."""
        self.rate.count()
        exchange = stream.exchange
        asked = stream.asked = read(stream.endpoint, exchange.body)
        facts = read_headers(exchange.headers)
        deadline = facts.deadline_s
        batch = asked.flexible or facts.batch
        ticket = Request(
            next(self._keys),
            exchange.received_at,
            asked.prompt_tokens or self.sizes.prompt_tokens(asked.model, asked.prompt_bytes),
            max_tokens=asked.max_tokens,
            tenant=self.terms.tenant_of(exchange.headers),
            batch=batch,
            targets=None if batch else self.terms.targets_of(exchange.headers),
            deadline=inf if deadline is None else exchange.received_at + deadline,
            choices=asked.prompts if asked.model in self._single else asked.choices,
        )
        # Without targets nothing is ended here.
        stream.arrived(ticket, self.sizes.per_event(asked.model), None if self.terms.slo is None else deadline)
        self.under_way.add(stream)
        self.gatekeeper.arrive(stream)

    def begun(self, stream: Stream) -> None:
        """Take note that an answer has begun, with success."""
        self.models.proven(stream.asked.model)

    def shows(self, stream: Stream, *, streams: bool) -> None:
        """Take note whether an answer shows its tokens one by one."""
        self.gatekeeper.shows(stream, streams=streams)

    def begins(self, stream: Stream) -> None:
        """Take note that an answer begins with an event without text."""
        self.gatekeeper.begins(stream)

    def tokens(self, stream: Stream, events: int) -> None:
        """Count events with tokens."""
        now = self._clock()
        counts, progress = self.models.known(stream.asked.model), stream.progress
        if progress.first_at is None:
            progress.first_at = now
            counts.ttft.add(now - stream.ticket.arrival)
            self.gatekeeper.first_token(stream)
        else:
            counts.gaps.add(now - progress.last_at)
        progress.last_at = now
        if later := progress.advance(events):
            self.gatekeeper.progress(stream, later)

    def choice_ended(self, stream: Stream) -> None:
        """Take note of the end of one of several choices."""
        stream.progress.choice_ended()
        self.gatekeeper.choice_ended(stream)

    def left(self, stream: Stream, how: str, said: Ending | None) -> None:
        """Count a request that ended. ``said``: what the engine said at the end of a complete answer."""
        self.under_way.discard(stream)
        model, ticket, progress = stream.asked.model, stream.ticket, stream.progress
        counts = self.models.known(model)
        counts.ended(how)
        judged = not ticket.batch and self.terms.slo is not None
        if said is None:
            counts.missed += judged and how in TOO_LATE
            counts.output_tokens += round(progress.output_tokens)
            self.gatekeeper.ended(stream, round(progress.output_tokens / ticket.choices), complete=False)
            return
        if said.prompt_tokens is not None:
            self.sizes.learn_prompt(model, stream.asked.prompt_bytes, said.prompt_tokens)
        if said.output_tokens is not None and progress.events:
            self.sizes.learn_answer(model, progress.events, said.output_tokens)
        output = self._output(stream, said)
        counts.prompt_tokens += ticket.prompt_tokens if said.prompt_tokens is None else said.prompt_tokens
        counts.output_tokens += output
        now = self._clock()
        counts.durations.add(now - ticket.arrival)
        longest = output / ticket.choices * stream.answer.longest(ticket.choices)
        steps, tpot = progress.steps_of(output, ticket.choices, longest), None
        if progress.first_at is not None and steps > 0:
            tpot = (progress.last_at - progress.first_at) / steps
            counts.tpot.add(tpot)
        hit = self.terms.met(stream, now - ticket.arrival, steps, tpot)
        counts.hits += hit
        counts.met += judged and hit
        counts.missed += judged and not hit
        self.gatekeeper.ended(
            stream, max(1, round(output / ticket.choices)), complete=True, longest=max(1, round(longest))
        )
        self._learn_single(stream)

    def fault(self) -> None:
        """Count an error in looking at a stream; its bytes go on."""
        self.faults += 1
        self._log.exception("a stream is forwarded without being looked at")

    def _output(self, stream: Stream, said: Ending) -> int:
        """Return the tokens of a complete answer: the engine's count, else from its events, else from its bytes."""
        if said.output_tokens is not None:
            return said.output_tokens
        progress = stream.progress
        return round(progress.output_tokens) if progress.events else max(1, round(stream.answer.size / BYTES_PER_TOKEN))

    def _learn_single(self, stream: Stream) -> None:
        """Note whether an engine supports ``n``. Lists of prompts don't show that: TGI answers all of these."""
        asked, ended = stream.asked, stream.answer.choices_ended
        if asked.choices == 1 or asked.prompts > 1 or not ended:
            return
        if ended > 1:
            self._single.discard(asked.model)
        elif len(self._single) < MOST:
            self._single.add(asked.model)
