import json
from pathlib import Path

import pytest

from carpool.generation.profiles import EngineProfile, Linear, Table
from carpool.policy.plain import PolicyError, from_plain

PROFILES = Path(__file__).parents[3] / "benchmarks" / "generation" / "profiles"

TABLE = Table(
    sequences=(1, 4),
    contexts=(100, 200),
    decode_seconds=((0.010, 0.020), (0.030, 0.040)),
    prompt_tokens=(100, 200),
    mixed_sequences=(0, 4),
    added_seconds=((0.010, 0.001), (0.020, 0.002)),
)


def test_a_linear_step_adds_up():
    step = Linear(base=0.01, sequence=1e-4, kv_token=1e-7, prompt_token=5e-5)
    assert step.seconds(10, 20_000, 400) == pytest.approx(0.01 + 0.001 + 0.002 + 0.02)


@pytest.mark.parametrize(
    ("sequences", "context", "seconds"),
    [
        (1, 100, 0.010),
        (4, 200, 0.040),
        (2, 100, 0.010 + 0.020 / 3),
        (1, 150, 0.015),
        (1, 50, 0.010),
        (7, 100, 0.050),
    ],
)
def test_a_table_is_linear_between_its_points_and_beyond_the_last(sequences, context, seconds):
    assert TABLE.seconds(sequences, sequences * context, 0) == pytest.approx(seconds)


def test_prompts_add_to_a_step_what_the_table_has_for_the_sequences_beside_them():
    assert TABLE.seconds(0, 0, 100) == pytest.approx(0.010)
    assert TABLE.seconds(4, 400, 200) == pytest.approx(0.030 + 0.002)
    assert TABLE.seconds(100, 10_000, 200) == pytest.approx(TABLE.seconds(100, 10_000, 0) + 0.002)


def test_a_table_with_rows_missing_is_refused_by_name():
    with pytest.raises(PolicyError, match=r"decodeSeconds: takes 3 rows of 2 values"):
        Table(
            sequences=(1, 4, 8),
            contexts=(100, 200),
            decode_seconds=((0.010, 0.020), (0.030, 0.040)),
            prompt_tokens=(100, 200),
            mixed_sequences=(0, 4),
            added_seconds=((0.010, 0.001), (0.020, 0.002)),
        )


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.json")), ids=lambda path: path.stem)
def test_every_profile_is_read_and_a_fuller_step_takes_longer(path):
    profile = from_plain(json.loads(path.read_text("utf-8")), EngineProfile, what=path.name)
    step = profile.step
    assert profile.source
    assert 0 < step.seconds(1, 1000, 0) < step.seconds(64, 64_000, 0) < step.seconds(128, 128_000, 0)
    assert step.seconds(64, 64_000, 512) > step.seconds(64, 64_000, 0)


def test_a_line_is_close_to_the_table_for_a_dense_model_and_far_off_with_experts():
    def error(name):
        line, table = (
            from_plain(json.loads((PROFILES / f"{name}{kind}.json").read_text()), EngineProfile, what="").step
            for kind in ("", "-table")
        )
        return max(abs(line.seconds(b, b * 1024, 0) / table.seconds(b, b * 1024, 0) - 1) for b in (1, 8, 32, 64, 128))

    assert error("8b-h100") < 0.10
    assert error("moe-30b-h200") > 0.20
