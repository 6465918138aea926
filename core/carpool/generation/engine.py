"""The simulated engine: iteration-level scheduling like vLLM's and TGI's, in virtual time.

Each step decodes one token of every running sequence, and fills the rest of its token budget with prompts (Yu et al.
2022, "Orca"; Agrawal et al. 2024, "Sarathi-Serve"). The KV cache is allocated in blocks. When none is free, the
newest sequence is preempted and computed again later, prompt and answer (Kwon et al. 2023, "vLLM", 4.5).
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import ceil, inf, sqrt
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from random import Random

    from carpool.generation.profiles import EngineProfile

MOST_ALIKE = 64
"""Steps that are played as one, at most: their duration is taken from the middle one."""


class Sequence:
    """A request inside the engine. ``output_tokens``: the length of its answer, which only the engine knows."""

    __slots__ = (
        "blocks",
        "computed",
        "ends",
        "first_at",
        "generated",
        "key",
        "needed",
        "output_tokens",
        "prompt_tokens",
    )

    def __init__(self, key: int, prompt_tokens: int, output_tokens: int) -> None:
        self.key = key
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.needed = prompt_tokens
        """Tokens to compute before it decodes: the prompt, and after a preemption the answer so far."""
        self.computed = 0
        self.blocks = 0
        self.generated = 0
        self.ends = 0
        """The decode step after which it is complete."""
        self.first_at: float | None = None


class Progress(NamedTuple):
    """The result of one or several steps: ``steps`` that end at ``end``, of ``decoding`` sequences each.

    ``tokens`` counts those of sequences that were decoding before; ``first`` sequences have their first token at
    ``end``.
    """

    end: float
    steps: int
    decoding: int
    tokens: int
    prompt_tokens: int
    first: list[Sequence]
    finished: list[Sequence]
    preempted: list[Sequence]


class Engine:
    """Serves sequences in the order in which they come.

    ``slowdown`` multiplies the duration of every step, ``noise`` is its relative spread. Until
    ``stalled_until`` no step begins, as when code is compiled or weights are loaded.
    """

    def __init__(self, profile: EngineProfile, random: Random, *, noise: float = 0.0) -> None:
        self.profile = profile
        self.slowdown = 1.0
        self.stalled_until = 0.0
        self._random = random
        self._noise = noise
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        """Those that decode, the newest last."""
        self._ends: list[tuple[int, int]] = []
        self._steps = 0
        """Decode steps so far: every running sequence decodes in each."""
        self._growth = [0] * profile.block_tokens
        """How many running sequences need a new block in decode step n, by n modulo the block's size."""
        self._cached = 0
        self._free = profile.kv_tokens // profile.block_tokens

    @property
    def load(self) -> tuple[int, int, float]:
        """Running and waiting sequences, and the share of the KV cache in use, as an engine's ``/metrics`` reports."""
        blocks = self.profile.kv_tokens // self.profile.block_tokens
        return len(self._running), len(self._waiting), 1 - self._free / blocks

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._waiting.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence, wherever it is."""
        if sequence.key in self._running:
            self._settle(sequence)
            self._leave(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
            self._release(sequence)

    def run(self, now: float, until: float = inf) -> Progress | None:
        """Run one step, or several that are alike if they start before ``until``; None without work, or if stalled."""
        if now < self.stalled_until or not (self._running or self._waiting):
            return None
        preempted = self._make_room()
        prompts, started = ([], []) if preempted else self._schedule()
        taken = sum(tokens for _, tokens in prompts)
        decoding = 0 if self.profile.prefill == "first" and taken else len(self._running)
        if not decoding and not taken:
            raise ValueError(f"a prompt of {self._waiting[0].needed} tokens does not fit into the KV cache")
        count = 1 if taken else self._alike(now, until)
        # A step with prompts only does not read the cache of decoding sequences.
        cached = self._cached if decoding else sum(sequence.computed for sequence, _ in prompts)
        end = now + self._seconds(decoding, cached, taken, count)
        finished: list[Sequence] = []
        tokens = 0
        if decoding:
            tokens = decoding * count
            self._decode(count)
            finished = self._complete()
        first = self._start(started, end)
        for sequence in first:
            if sequence.generated >= sequence.output_tokens:
                self._release(sequence)
                finished.append(sequence)
            else:
                self._join(sequence)
        return Progress(
            end, count, decoding, tokens, taken, [s for s in first if s.generated == 1], finished, preempted
        )

    def _schedule(self) -> tuple[list[tuple[Sequence, int]], list[Sequence]]:
        """Add prompts to this step, in order, as far as its tokens and the cache allow."""
        profile = self.profile
        chunked = profile.prefill == "chunked"
        budget = profile.max_batched_tokens - (len(self._running) if chunked else 0)
        # Sequences that decode in the same step need their blocks too.
        free = self._free - (self._growth[self._steps % profile.block_tokens] if chunked else 0)
        taken: list[tuple[Sequence, int]] = []
        started: list[Sequence] = []
        while self._waiting and budget > 0:
            sequence = self._waiting[0]
            if not sequence.computed and len(self._running) + len(started) >= profile.max_running:
                break
            tokens = min(budget, sequence.needed - sequence.computed)
            if profile.prefill == "first":
                # The whole prompt, with room for its answer, so that nothing is ever preempted.
                tokens = sequence.needed
                if (taken and tokens > budget) or not self._fits(sequence):
                    break
            blocks = ceil((sequence.computed + tokens) / profile.block_tokens) - sequence.blocks
            if blocks > free:
                break
            free -= blocks
            self._free -= blocks
            sequence.blocks += blocks
            sequence.computed += tokens
            self._cached += tokens
            budget -= tokens
            taken.append((sequence, tokens))
            if sequence.computed < sequence.needed:
                break
            started.append(self._waiting.popleft())
        return taken, started

    def _fits(self, sequence: Sequence) -> bool:
        """Say whether all running sequences and this one can be completed in the cache."""
        size = self.profile.block_tokens
        reserved = sum(ceil((s.prompt_tokens + s.output_tokens) / size) - s.blocks for s in self._running.values())
        return reserved + ceil((sequence.prompt_tokens + sequence.output_tokens) / size) <= self._free

    def _make_room(self) -> list[Sequence]:
        """Preempt the newest sequences until the others have the blocks for one more token."""
        preempted: list[Sequence] = []
        wanted = self._growth
        if wanted[self._steps % self.profile.block_tokens] > self._free and self._waiting and self._waiting[0].computed:
            # A half-computed prompt is newer than all running sequences.
            self._release(self._waiting[0])
            preempted.append(self._waiting[0])
        while wanted[self._steps % self.profile.block_tokens] > self._free and len(self._running) > 1:
            sequence = next(reversed(self._running.values()))
            self._settle(sequence)
            self._leave(sequence)
            sequence.needed = sequence.prompt_tokens + sequence.generated
            sequence.computed = 0
            self._waiting.appendleft(sequence)
            preempted.append(sequence)
        return preempted

    def _alike(self, now: float, until: float) -> int:
        """Count the decode steps until anything changes: a sequence ends, blocks run out, or ``until`` is past."""
        count = min(MOST_ALIKE, self._ends[0][0] - self._steps) if self._ends else MOST_ALIKE
        size = self.profile.block_tokens
        free, steps = self._free, 0
        while steps < count:
            free -= self._growth[(self._steps + steps) % size]
            if free < 0 and steps:
                break
            steps += 1
        once = self.slowdown * self.profile.step.seconds(len(self._running), self._cached, 0)
        return max(1, min(steps, ceil((until - now) / once) if until < inf else steps))

    def _seconds(self, decoding: int, cached: int, taken: int, count: int) -> float:
        middle = cached + decoding * (count - 1) / 2
        seconds = count * self.slowdown * self.profile.step.seconds(decoding, middle, taken)
        if self._noise:
            seconds *= max(0.2, 1 + self._random.gauss(0.0, self._noise / sqrt(count)))
        return seconds

    def _decode(self, count: int) -> None:
        size = self.profile.block_tokens
        whole, rest = divmod(count, size)
        self._free -= whole * len(self._running) + sum(self._growth[(self._steps + i) % size] for i in range(rest))
        self._cached += count * len(self._running)
        self._steps += count

    def _complete(self) -> list[Sequence]:
        """Remove complete sequences."""
        finished = []
        while self._ends and self._ends[0][0] <= self._steps:
            ends, key = heappop(self._ends)
            sequence = self._running.get(key)
            # The entry of a sequence that was preempted or cancelled since is outdated.
            if sequence is not None and sequence.ends == ends:
                self._settle(sequence)
                self._leave(sequence)
                finished.append(sequence)
        return finished

    def _start(self, started: list[Sequence], end: float) -> list[Sequence]:
        """Give every sequence whose prompt is computed its next token."""
        for sequence in started:
            sequence.generated += 1
            if sequence.first_at is None:
                sequence.first_at = end
        return started

    def _join(self, sequence: Sequence) -> None:
        size = self.profile.block_tokens
        sequence.ends = self._steps + sequence.output_tokens - sequence.generated
        # The next token goes to position `computed`: a new block when that is a multiple of the block's size.
        self._growth[(self._steps - sequence.computed) % size] += 1
        self._running[sequence.key] = sequence
        heappush(self._ends, (sequence.ends, sequence.key))

    def _settle(self, sequence: Sequence) -> None:
        """Update the counts of a running sequence; while it runs they follow from the steps."""
        generated = sequence.output_tokens - (sequence.ends - self._steps)
        sequence.computed += generated - sequence.generated
        sequence.generated = generated
        sequence.blocks = ceil(sequence.computed / self.profile.block_tokens)

    def _leave(self, sequence: Sequence) -> None:
        del self._running[sequence.key]
        self._growth[(self._steps - sequence.computed) % self.profile.block_tokens] -= 1
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        self._free += sequence.blocks
        self._cached -= sequence.computed
        sequence.blocks = 0
        sequence.computed = 0
