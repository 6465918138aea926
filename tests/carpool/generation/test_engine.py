from math import ceil

import pytest
from engines import LLAMA, engine, sequence
from hypothesis import example, given, settings
from hypothesis import strategies as st


def run(machine, now=0.0):
    """Run until nothing is left; return every progress."""
    seen = []
    while (progress := machine.run(now)) is not None:
        now = progress.end
        seen.append(progress)
    return seen


def test_one_sequence_takes_a_prefill_and_a_step_per_further_token():
    machine = engine()
    machine.submit(sequence(0, 100, 3))
    prefill, decode = run(machine)
    assert prefill.end == pytest.approx(LLAMA.seconds(0, 0, 100) + LLAMA.kv_token * 100)
    assert [s.key for s in prefill.first] == [0]
    assert (decode.steps, decode.tokens) == (2, 2)
    assert [s.key for s in decode.finished] == [0]
    # The cache has 100 tokens in the first of the two steps and 101 in the second.
    assert decode.end - prefill.end == pytest.approx(LLAMA.seconds(1, 100, 0) + LLAMA.seconds(1, 101, 0))


def test_a_long_prompt_is_computed_in_pieces_while_others_decode():
    machine = engine(max_batched_tokens=512)
    machine.submit(sequence(0, 10, 50))
    now = machine.run(0.0).end
    machine.submit(sequence(1, 1000, 2))
    pieces = []
    while not (progress := machine.run(now)).first:
        pieces.append(progress.prompt_tokens)
        now = progress.end
        assert progress.tokens == 1
    assert [*pieces, progress.prompt_tokens] == [511, 489]


def test_prompts_first_stops_decoding_meanwhile():
    machine = engine(prefill="first", max_batched_tokens=512)
    machine.submit(sequence(0, 10, 50))
    now = machine.run(0.0).end
    machine.submit(sequence(1, 1000, 2))
    progress = machine.run(now)
    assert (progress.prompt_tokens, progress.tokens) == (1000, 0)


def test_a_stalled_engine_makes_no_step_until_it_is_over():
    machine = engine()
    machine.submit(sequence(0, 100, 3))
    machine.stalled_until = 5.0
    assert machine.run(4.9) is None
    assert machine.run(5.0).end > 5.0


def test_no_more_run_than_the_engine_takes():
    machine = engine(max_running=2)
    for key in range(3):
        machine.submit(sequence(key, 10, 5))
    machine.run(0.0)
    assert machine.load[:2] == (2, 1)


def test_steps_that_are_alike_are_played_as_one_with_the_same_end():
    def ends(until):
        machine = engine()
        for key in range(4):
            machine.submit(sequence(key, 100 + key, 60 + 7 * key))
        now, finished = 0.0, {}
        while (progress := machine.run(now, until(now))) is not None:
            now = progress.end
            finished.update({s.key: now for s in progress.finished})
        return finished

    together, single = ends(lambda _: float("inf")), ends(lambda now: now)
    assert together == pytest.approx(single)


def test_when_the_cache_is_full_the_newest_is_preempted_and_computed_again():
    machine = engine(kv_tokens=320)
    machine.submit(sequence(0, 150, 40))
    machine.submit(sequence(1, 150, 40))
    seen = run(machine)
    preempted = [s.key for progress in seen for s in progress.preempted]
    assert preempted == [1]
    finished = [(s.key, s.generated) for progress in seen for s in progress.finished]
    assert finished == [(0, 40), (1, 40)]
    # Both had 10 tokens then, the first of them from the prefill; so 160 and more were computed once more.
    assert sum(progress.prompt_tokens for progress in seen) > 150 + 150 + 150
    assert [s.key for progress in seen for s in progress.first] == [0, 1]


def test_a_step_of_prompts_does_not_read_the_cache_of_those_that_decode():
    machine = engine(prefill="first")
    machine.submit(sequence(0, 50_000, 50))
    now = machine.run(0.0).end
    machine.submit(sequence(1, 100, 50))
    assert machine.run(now).end - now == pytest.approx(LLAMA.seconds(0, 100, 100))


def test_room_for_the_answer_is_kept_where_prompts_go_first():
    machine = engine(kv_tokens=320, prefill="first")
    machine.submit(sequence(0, 150, 40))
    machine.submit(sequence(1, 150, 40))
    assert not [s for progress in run(machine) for s in progress.preempted]


def test_a_prompt_that_can_never_fit_is_an_error():
    machine = engine(kv_tokens=64)
    machine.submit(sequence(0, 65, 1))
    with pytest.raises(ValueError, match="65 tokens does not fit"):
        machine.run(0.0)


def test_a_slower_engine_takes_longer_and_noise_averages_out():
    slow = engine()
    slow.slowdown = 2.0
    slow.submit(sequence(0, 100, 2))
    assert slow.run(0.0).end == pytest.approx(2 * LLAMA.seconds(0, 0, 100) + 2 * LLAMA.kv_token * 100)
    ends = []
    for seed in range(50):
        machine = engine(seed=seed, noise=0.2)
        machine.submit(sequence(0, 100, 200))
        ends.append(run(machine)[-1].end)
    machine = engine()
    machine.submit(sequence(0, 100, 200))
    assert sum(ends) / 50 == pytest.approx(run(machine)[-1].end, rel=0.02)
    assert len(set(ends)) == 50


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 80)), min_size=1, max_size=12),
    kv=st.integers(20, 60),
    seqs=st.integers(1, 6),
    prefill=st.sampled_from(["chunked", "first"]),
    cancels=st.sets(st.integers(0, 11), max_size=3),
)
# A prompt took the block that a decoding sequence needed in the same step.
@example(
    lengths=[(1, 31), (1, 26), (101, 30), (158, 27), (49, 21), (187, 2), (49, 10)],
    kv=38,
    seqs=5,
    prefill="chunked",
    cancels=set(),
)
def test_blocks_add_up_and_every_sequence_gets_all_its_tokens(lengths, kv, seqs, prefill, cancels):
    machine = engine(kv_tokens=16 * kv, max_running=seqs, prefill=prefill, max_batched_tokens=64)
    sequences = [sequence(key, *length) for key, length in enumerate(lengths)]
    for each in sequences:
        machine.submit(each)
    now, finished, first, steps = 0.0, [], [], 0
    while (progress := machine.run(now)) is not None:
        assert progress.end > now
        now, steps = progress.end, steps + 1
        finished += progress.finished
        first += progress.first
        running, _, share = machine.load
        assert running <= seqs
        assert 0 <= share <= 1
        if steps == 5:
            for key in cancels:
                if key < len(sequences) and sequences[key] not in finished:
                    machine.cancel(sequences[key])
    assert machine.load == (0, 0, 0.0)
    gone = {sequences[key] for key in cancels if key < len(sequences)}
    assert set(sequences) - gone <= set(finished)
    assert len(first) == len(set(first))
    assert all(s.generated == s.output_tokens for s in finished)
    assert machine._free == kv
    assert machine._cached == 0
    assert not any(machine._growth)


@given(prompt=st.integers(1, 100), output=st.integers(2, 100))
def test_a_sequence_holds_the_blocks_of_its_tokens(prompt, output):
    machine = engine(kv_tokens=16 * 64)
    machine.submit(sequence(0, prompt, output))
    now, done = machine.run(0.0).end, 1
    while (progress := machine.run(now, now)) is not None and not progress.finished:
        now, done = progress.end, done + 1
        assert 64 - machine._free == ceil((prompt + done - 1) / 16)
