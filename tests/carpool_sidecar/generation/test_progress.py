from __future__ import annotations

from carpool_sidecar.generation.progress import StreamProgress


def test_the_first_token_of_each_choice_is_no_step():
    progress = StreamProgress(choices=2, per_event=1.5)
    assert (progress.advance(1), progress.openings, progress.steps) == (0.0, 1, 0.0)
    assert (progress.advance(3), progress.openings, progress.steps) == (3.0, 0, 1.0)  # one opens, two are later ones


def test_steps_are_those_of_the_choices_that_have_not_ended():
    progress = StreamProgress(choices=2)
    progress.advance(6)
    assert progress.steps == 2.0
    progress.choice_ended()
    progress.advance(3)
    assert progress.steps == 5.0
    progress.choice_ended()
    assert progress.choices == 1, "the last one is kept"


def test_output_tokens_follow_from_events():
    progress = StreamProgress(per_event=2.5)
    progress.events += 4
    assert progress.output_tokens == 10.0


def test_the_steps_of_a_complete_answer_are_scaled_to_the_tokens_that_the_engine_counted():
    progress = StreamProgress(choices=2)
    progress.events = 12
    progress.advance(12)
    assert progress.steps == 5.0
    assert progress.steps_of(22, 2, longest=11.0) == 10.0  # 20 tokens after the first ones came in 10 events
    assert StreamProgress().steps_of(8, 1, longest=8.0) == 7.0
    assert StreamProgress(choices=2).steps_of(8, 2, longest=5.0) == 4.0, "it came whole"
