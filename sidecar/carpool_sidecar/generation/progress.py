"""The progress of an answer in a stream: its tokens so far, and when they came."""

from __future__ import annotations


class StreamProgress:
    """Tokens of an answer so far, as far as they are visible. Times are monotonic, in seconds."""

    __slots__ = ("choices", "events", "first_at", "last_at", "openings", "per_event", "steps")

    def __init__(self, choices: int = 1, per_event: float = 1.0) -> None:
        self.per_event = per_event
        """Assumed tokens of an event."""
        self.events = 0
        """Events with a token so far."""
        self.choices = choices
        """Choices of a stream that have not ended; the last one is kept."""
        self.openings = choices
        """First tokens that have not arrived: one for each choice."""
        self.steps = 0.0
        """Events after the first, per choice: those of the longest choice."""
        self.first_at: float | None = None
        self.last_at = 0.0

    @property
    def output_tokens(self) -> float:
        """Tokens so far."""
        return self.events * self.per_event

    def advance(self, events: int) -> float:
        """Take events with a token; return the tokens in them that are not the first of a choice."""
        first = min(events, self.openings)
        self.openings -= first
        events -= first
        if events:
            self.steps += events / self.choices
        return events * self.per_event

    def choice_ended(self) -> None:
        """Take note of the end of one of several choices."""
        self.choices = max(1, self.choices - 1)

    def steps_of(self, output: int, choices: int, longest: float) -> float:
        """Return the tokens after the first of a complete answer; of its longest choice, where that is seen.

        ``output``: tokens of all `choices`. ``longest``: the tokens of the longest one, where the answer came whole.
        """
        later = self.events - choices
        if choices == 1 or later <= 0:
            return longest - 1
        return self.steps * (output - choices) / later
