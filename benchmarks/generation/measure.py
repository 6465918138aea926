"""Write the engine profiles from NVIDIA's measured tables: ``python measure.py``.

The package (0.12.0, Apache-2.0) interpolates tables of measured kernels. This samples its estimates for vLLM at a grid
and fits the linear form to them; the package's own files are not copied. Run it in an environment of its own: ``pip
install aiconfigurator-core==0.12.0``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from aiconfigurator_core.sdk.engine import EngineHandle  # type: ignore[import-not-found]
from scipy.optimize import nnls  # type: ignore[import-untyped]

HERE = Path(__file__).parent
SEQUENCES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
MIXED = (0, 8, 32, 64, 128, 256)
CONTEXT = 1152
"""Of the sequences that decode in a mixed step."""

SOURCE = (
    "NVIDIA aiconfigurator-core 0.12.0 (PyPI, Apache-2.0), measured kernel tables for {system}, vLLM, TP{tp}, BF16: "
    "{what}"
)
MEMORY = "KV tokens: (0.9 x {gib} GB x {tp} - weights {weights} GB - {spare} GB) / {token} bytes"

MODELS: dict[str, tuple[str, int, float]] = {
    "8b": ("meta-llama/Meta-Llama-3.1-8B", 131_072, 16.1),
    "70b": ("meta-llama/Meta-Llama-3.1-70B", 327_680, 141.1),
    "moe-30b": ("Qwen/Qwen3-30B-A3B", 98_304, 61.1),
}
"""Name: (model, bytes of KV cache per token, GB of weights in BF16)."""

ENGINES = (
    ("8b", "a100", "a100_sxm", 80, 1),
    ("8b", "h100", "h100_sxm", 80, 1),
    ("8b", "h200", "h200_sxm", 141, 1),
    ("8b", "b200", "b200_sxm", 180, 1),
    ("8b", "l40s", "l40s", 48, 1),
    ("70b", "a100", "a100_sxm", 80, 4),
    ("70b", "h100", "h100_sxm", 80, 4),
    ("moe-30b", "h100", "h100_sxm", 80, 1),
    ("moe-30b", "h200", "h200_sxm", 141, 1),
)


def main() -> None:
    """Sample, fit and write every profile."""
    for model, gpu, system, gib, tp in ENGINES:
        name, token, weights = MODELS[model]
        handle = EngineHandle.compile(name, system, "vllm", tp_size=tp)
        table = sampled(handle)
        # vLLM's defaults for its server: 8,192 tokens and 1,024 sequences from 70 GiB on, other than the A100.
        large = gib > 70 and gpu != "a100"
        spare = 3 * tp
        common = {
            "kvTokens": int((0.9 * gib * tp - weights - spare) * 1e9 / token) // 1000 * 1000,
            "maxRunning": 1024 if large else 256,
            "maxBatchedTokens": 8192 if large else 2048,
        }
        memory = MEMORY.format(gib=gib, tp=tp, weights=weights, spare=spare, token=token)
        for form, step, what in (
            (
                "linear",
                fitted(handle),
                "decode steps of 1 to 256 sequences and prefills of 128 to 8,192 tokens, fitted",
            ),
            ("table", table, "estimates at a grid, rounded to 10 us"),
        ):
            profile = {
                "name": f"{name.rpartition('/')[2]} on {tp if tp > 1 else 'one'} {gpu.upper()}, {form}",
                "source": f"{SOURCE.format(system=system, tp=tp, what=what)}. {memory}",
                **common,
                "step": {"form": form, **step},
            }
            suffix = "-table" if form == "table" else ""
            path = HERE / "profiles" / f"{model}-{gpu}{suffix}.json"
            path.write_text(_written(profile), "utf-8")
            print(path.name, profile["kvTokens"])


def fitted(handle: Any) -> dict[str, float]:  # noqa: ANN401 - a class without type information
    """Fit a + b B + c KV to decode steps, and the slope of prefills, by relative non-negative least squares."""
    points = [(b, s) for b in SEQUENCES if b <= 256 for s in (256, 512, 1024, 2048, 4096) if b * s <= 300_000]
    seconds = np.array([handle.predict_decode_latency(b, s, 2) for b, s in points]) / 1e3
    columns = np.array([[1, b, b * s] for b, s in points], float)
    (a, b, c), _ = nnls(columns / seconds[:, None], np.ones(len(points)))
    tokens = np.array([n for n in PROMPTS if n >= 128], float)
    prefill = np.array([handle.predict_prefill_latency(1, int(n)) for n in tokens]) / 1e3
    powers = np.stack([np.ones_like(tokens), tokens], axis=1)
    (_, d), _ = nnls(powers / prefill[:, None], np.ones(len(tokens)))
    return {"base": _rounded(a), "sequence": _rounded(b), "kvToken": _rounded(c), "promptToken": _rounded(d)}


def sampled(handle: Any) -> dict[str, Any]:  # noqa: ANN401 - likewise
    """Sample decode steps by sequences and context, and what prompt tokens add by their number and the sequences."""
    decode = [[handle.predict_decode_latency(b, s, 2) / 1e3 for s in CONTEXTS] for b in SEQUENCES]
    added = []
    for p in PROMPTS:
        row = []
        for b in MIXED:
            if b:
                alone = handle.predict_decode_latency(b, CONTEXT, 2)
                row.append(max(0.0, handle.mixed_step_latency(p, b, 1024, 256) - alone) / 1e3)
            else:
                row.append(handle.predict_prefill_latency(1, p) / 1e3)
        added.append(row)
    return {
        "sequences": SEQUENCES,
        "contexts": CONTEXTS,
        "decodeSeconds": [[round(value, 5) for value in row] for row in decode],
        "promptTokens": PROMPTS,
        "mixedSequences": MIXED,
        "addedSeconds": [[round(value, 5) for value in row] for row in added],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _written(profile: dict[str, Any]) -> str:
    """Write JSON with a line for each field and each row of a table."""
    step = profile["step"]
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in profile.items() if key != "step"]
    inner = []
    for key, value in step.items():
        if isinstance(value, list) and value and isinstance(value[0], list):
            rows = ",\n".join(f"      {json.dumps(row)}" for row in value)
            inner.append(f"    {json.dumps(key)}: [\n{rows}\n    ]")
        else:
            inner.append(f"    {json.dumps(key)}: {json.dumps(value)}")
    body = ",\n".join(inner)
    return "{\n" + ",\n".join([*lines, f'  "step": {{\n{body}\n  }}']) + "\n}\n"


if __name__ == "__main__":
    main()
