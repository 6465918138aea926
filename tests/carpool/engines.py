"""Engines and requests for the tests of this room."""

from __future__ import annotations

from random import Random

from carpool.generation.engine import Engine, Sequence
from carpool.generation.gate import Gate, Limits
from carpool.generation.profiles import EngineProfile, Linear
from carpool.generation.requests import Request, Slo
from carpool.generation.simulation import Arrival
from carpool.generation.step_model import StepModel

SLO = Slo(ttft=2.0, tpot=0.05)

LLAMA = Linear(base=0.0115, sequence=39e-6, kv_token=77e-9, prompt_token=55e-6)
"""Llama-3.1-8B on an A100, rounded."""


def profile(**changes) -> EngineProfile:
    values = {"name": "test", "source": "rounded", "kv_tokens": 400_000, "step": LLAMA}
    return EngineProfile(**{**values, **changes})


def engine(seed: int = 0, noise: float = 0.0, **changes) -> Engine:
    return Engine(profile(**changes), Random(seed), noise=noise)


def gate(slo: Slo = SLO, *, wrong: float = 1.0, **limits) -> Gate:
    """Return a gate whose first guess is ``wrong`` times the truth."""
    values = (LLAMA.base, LLAMA.sequence, LLAMA.kv_token, LLAMA.prompt_token)
    return Gate(slo, StepModel(*(wrong * value for value in values)), Limits(**limits))


def sequence(key: int, prompt: int, output: int) -> Sequence:
    return Sequence(key, prompt, output)


def chat(rate: float, seconds: float, seed: int = 0, tenant: str = "", first_key: int = 0) -> list[Arrival]:
    """Poisson arrivals with log-normal lengths, much like conversations: 1,000 tokens in, 210 out."""
    random = Random(seed)
    arrivals: list[Arrival] = []
    at = random.expovariate(rate)
    while at < seconds:
        prompt = min(8000, max(8, int(random.lognormvariate(6.3, 1.1))))
        output = min(2000, max(2, int(random.lognormvariate(5.0, 0.8))))
        arrivals.append(Arrival(Request(first_key + len(arrivals), at, prompt, tenant=tenant), output))
        at += random.expovariate(rate)
    return arrivals
