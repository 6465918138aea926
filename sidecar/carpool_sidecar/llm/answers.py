"""OpenAI's answers, in events and whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from carpool_sidecar.llm.messages import Piece, Token
    from carpool_sidecar.llm.requests import Asked

DONE = b"data: [DONE]\n\n"


class Answer:
    """One answer as it comes. ``identity`` and ``created`` (Unix seconds) are the caller's."""

    def __init__(self, asked: Asked, model: str, identity: str, created: int) -> None:
        kind = "chat.completion" if asked.chat else "text_completion"
        if asked.chat and asked.stream:
            kind = "chat.completion.chunk"
        prefix = "chatcmpl" if asked.chat else "cmpl"
        self._base = {"id": f"{prefix}-{identity}", "object": kind, "created": created, "model": model}
        self._asked = asked
        choices = len(asked.choices)
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._logprobs: list[list[Token]] = [[] for _ in range(choices)]
        self._reasons: list[str | None] = [None] * choices
        self._begun = [False] * choices
        self._prompts = [0] * choices
        self._tokens = 0

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return all(self._reasons)

    def accepted(self, index: int, prompt_tokens: int) -> None:
        """Take note of a prompt's tokens."""
        self._prompts[index] = prompt_tokens

    def add(self, index: int, piece: Piece) -> bytes:
        """Take more of a choice; return the events that say so, none where the answer comes whole."""
        self._tokens += piece.tokens
        if piece.end:
            self._reasons[index] = piece.end
        if not self._asked.stream:
            self._texts[index].append(piece.text)
            self._logprobs[index] += piece.logprobs
            return b""
        events = b""
        if not self._begun[index] and self._asked.chat:
            events += self._event([self._chunk(index, {"role": "assistant", "content": ""})])
        self._begun[index] = True
        if piece.text or piece.logprobs:
            text = {"content": piece.text} if self._asked.chat else piece.text
            events += self._event([self._chunk(index, text, logprobs=piece.logprobs)])
        if piece.end:
            events += self._event([self._chunk(index, {} if self._asked.chat else "", reason=piece.end)])
        if self.complete:
            if self._asked.include_usage:
                events += self._event([], usage=self.usage())
            events += DONE
        return events

    def whole(self) -> bytes:
        """Return the answer in one piece."""
        choices = []
        for index, reason in enumerate(self._reasons):
            text = "".join(self._texts[index])
            content = {"message": {"role": "assistant", "content": text}} if self._asked.chat else {"text": text}
            choices.append(self._choice(index, content, self._logprobs[index], reason))
        return msgspec.json.encode(self._base | {"choices": choices, "usage": self.usage()})

    def usage(self) -> dict[str, int]:
        """Count tokens; a prompt counts once, however many choices it has."""
        prompt = sum(self._prompts[:: self._asked.per_prompt])
        return {"prompt_tokens": prompt, "completion_tokens": self._tokens, "total_tokens": prompt + self._tokens}

    def _chunk(
        self,
        index: int,
        content: dict[str, str] | str,
        *,
        logprobs: list[Token] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        named: dict[str, Any] = {"delta": content} if isinstance(content, dict) else {"text": content}
        return self._choice(index, named, logprobs or [], reason)

    def _choice(self, index: int, content: dict[str, Any], logprobs: list[Token], reason: str | None) -> dict[str, Any]:
        said = self._said(logprobs) if logprobs else None
        return {"index": index, **content, "logprobs": said, "finish_reason": reason}

    def _said(self, tokens: list[Token]) -> dict[str, Any]:
        if not self._asked.chat:
            return {
                "tokens": [token.text for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": None,
                "text_offset": None,
            }
        return {
            "content": [
                {"token": token.text, "logprob": token.logprob, "bytes": list(token.text.encode()), "top_logprobs": []}
                for token in tokens
            ]
        }

    def _event(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        return b"data: %b\n\n" % msgspec.json.encode(self._base | {"choices": choices} | more)


def error_body(message: str, param: str | None, kind: str, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
