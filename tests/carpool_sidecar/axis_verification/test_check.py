"""The decisions of a check, without a server: answers in, trials out."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.policy.spec import SequenceAxis
from carpool_sidecar.axis_verification.check import (
    EVERY_BATCHES,
    EVERY_SECONDS,
    LONE,
    MAX_PAUSE,
    SEEN,
    TRIAL_BYTES,
    TRIAL_ROWS,
    TRIALS,
    Check,
    Kind,
    Live,
)
from carpool_sidecar.axis_verification.samples import MAX_SAMPLES, Sample, Samples, Shelf, digest_of
from carpool_sidecar.protocols import CODECS, route
from carpool_sidecar.protocols.common import Portion
from carpool_sidecar.protocols.headers import read
from carpool_sidecar.protocols.padding import Sequence

V1 = CODECS["v1"]
ROOMY = 1000


def parsed(rows, headers=()):
    endpoint = route(b"/v1/models/m:predict")
    return V1.parse(endpoint, read(headers), json.dumps({"instances": rows}).encode())


def sample(rows, answers=None, headers=(), size=100):
    """A request of rows and its answers: the rows themselves, unless ``answers`` are given."""
    request = parsed(rows, headers)
    body = json.dumps({"predictions": rows if answers is None else answers}).encode()
    (piece,) = V1.split([Portion(request, 0, request.rows)], [], body)
    return Sample(request, read(headers), piece, digest_of(request), size)


def fed(*samples, check=None):
    """A check that saw these samples, and the last of them until there were enough answers."""
    check = check or Check(0.01, Shelf())
    for one in samples:
        assert check.answered_alone(one) is None
    while check.pace.answers < LONE:
        assert check.answered_alone(samples[-1]) is None
    return check


def rows_of(trial):
    message = V1.merge(trial.portions)
    return json.loads(b"".join(message.parts))["instances"]


def next_trial(check, now=0.0, cap=8, room=ROOMY):
    return check.next_trial(now, cap=cap, room=room)


def test_two_trials_of_different_order_verify_it():
    check = fed(sample([1.5]), sample([2.5]))
    one = next_trial(check)
    assert (one.kind, rows_of(one)) == (Kind.MIXED, [1.5, 2.5, 1.5, 1.5])
    assert [json.loads(b"".join(each.parts)) for each in one.expected] == [{"predictions": rows} for rows in
        ([1.5], [2.5], [1.5], [1.5])]  # fmt: skip
    assert next_trial(check) is None  # one at a time
    assert (check.has_agreed(one), check.verified, check.key_of(parsed([9.5]))) == (False, False, None)
    two = next_trial(check)
    assert rows_of(two) == [2.5, 1.5, 2.5, 2.5]
    assert (check.has_agreed(two), check.verified) == (True, True)
    assert check.key_of(parsed([9.5])) == parsed([9.5]).key
    assert (check.samples.kept, next_trial(check)) == ([], None)


def test_more_requests_make_larger_trials_within_the_cap():
    samples = [sample([number + 0.5]) for number in range(6)]
    check = fed(*samples)
    assert rows_of(next_trial(check)) == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 0.5, 0.5]
    for cap, rows in ((5, [0.5, 1.5, 2.5, 0.5, 0.5]), (3, [0.5, 1.5, 0.5]), (2, [0.5, 1.5])):
        assert rows_of(next_trial(fed(*samples), cap=cap)) == rows


def test_parts_of_requests_of_many_rows_are_taken_from_both_ends():
    long = [[number, 0.5] for number in range(8)]
    check = fed(sample(long), sample([[50, 0.5], [51, 0.5], [52, 0.5]]))
    trial = next_trial(check)
    assert rows_of(trial) == [[0, 0.5], [1, 0.5], [50, 0.5], [51, 0.5], [0, 0.5], [1, 0.5], [6, 0.5], [7, 0.5]]
    assert next_trial(fed(sample(long), sample(long[::-1])), cap=64).rows == TRIAL_ROWS


def test_a_trial_of_large_requests_has_two_of_them():
    check = fed(*[sample([number + 0.5], size=TRIAL_BYTES) for number in range(3)])
    assert rows_of(next_trial(check)) == [0.5, 1.5, 0.5, 0.5]


@pytest.mark.parametrize("missing", ["answers", "cap", "room", "time"])
def test_without_answers_room_or_batches_nothing_is_sent(missing):
    check = Check(0.01, Shelf())
    for number in range(LONE - 1):
        check.answered_alone(sample([number + 0.5]))
    if missing != "answers":
        check.answered_alone(sample([99.5]))
    if missing == "time":
        check.said_nothing("it was down", 10.0)
    trial = next_trial(check, 10.0, cap=1 if missing == "cap" else 8, room=3 if missing == "room" else ROOMY)
    assert trial is None
    assert not check.pace.under_way


def test_requests_with_equal_answers_make_no_trial_as_a_mix_up_would_not_show():
    check = fed(*[sample([number + 0.5], [0]) for number in range(2 * LONE)])
    assert next_trial(check) is None
    assert "every answer was the same, so a merged batch would show nothing" in check.evidence
    check.answered_alone(sample([77.5], [1]))
    assert rows_of(next_trial(check)) == [0.5, 77.5, 0.5, 0.5]


def test_requests_that_could_not_share_a_batch_make_no_trial():
    tenants = [sample([number + 0.5], headers=[(b"authorization", b"%d" % number)]) for number in range(4)]
    check = fed(*tenants, sample([[1, 2]]), sample([1]))
    assert next_trial(check) is None
    assert "no two of the requests could share a batch: they differ in a header or in their shape" in check.evidence


def test_one_request_again_and_again_is_merged_with_its_equals_alone():
    check = fed(*[sample([1.5, 2.5])] * SEEN)
    trial = next_trial(check)
    assert (trial.kind, rows_of(trial)) == (Kind.SAME, [1.5, 2.5, 1.5, 2.5, 1.5, 2.5, 1.5, 2.5][: trial.rows])
    assert check.has_agreed(trial) is False
    again, other = parsed([1.5, 2.5]), parsed([1.5, 3.5])
    assert check.key_of(again) == check.key_of(parsed([1.5, 2.5])) not in {None, again.key}
    assert check.key_of(other) is None
    assert check.key_of(parsed([1.5, 2.5], [(b"authorization", b"x")])) is None
    assert next_trial(check) is None
    assert "identical" in check.evidence
    # Once another one comes, all of them are verified.
    check.answered_alone(sample([1.5, 3.5]))
    for _ in range(2):
        check.has_agreed(next_trial(check))
    assert check.key_of(other) == other.key == check.key_of(again)


def test_the_same_request_answered_otherwise_the_next_time_is_a_difference():
    check = Check(0.01, Shelf())
    assert check.answered_alone(sample([1.5], [7])) is None
    assert check.answered_alone(sample([1.5], [8])).batched == "8"


def test_trials_that_fail_are_sent_again_after_longer_and_longer_pauses():
    check = fed(sample([1.5]), sample([2.5]))
    now, pauses = 0.0, []
    for _ in range(9):
        trial = next_trial(check, now)
        assert trial is not None
        check.said_nothing("it was down", now)
        pauses.append(check.pace.try_at - now)
        assert next_trial(check, check.pace.try_at - 0.01) is None
        now = check.pace.try_at
    assert pauses == [1, 2, 4, 8, 16, 32, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]
    assert check.evidence == "not verified yet: it was down"
    check.has_agreed(next_trial(check, now))
    assert check.evidence == "not verified yet: 1 of 2 trial batches agreed"


def test_batches_refused_twice_are_refused_for_good_and_once_is_no_proof():
    check = fed(sample([1.5]), sample([2.5]))
    next_trial(check)
    assert not check.was_rejected("status 500", 0.0)
    check.has_agreed(next_trial(check, 1.0))
    next_trial(check, 1.0)
    assert not check.was_rejected("status 500", 1.0)
    next_trial(check, 2.0)
    assert check.was_rejected("status 500", 2.0)


def test_looks_become_few_where_nothing_new_is_seen():
    def looks(seconds, *, settled):
        check, now, count = Check(0.01, Shelf()), 0.0, 0
        while now < seconds:
            if check.looks(now):
                check.pace.looked(now, settled=settled)
                count += 1
            now += 0.001
        return count

    check = Check(0.01, Shelf())
    for _ in range(LONE):
        assert check.looks(5.0)
        check.pace.looked(5.0, settled=False)
    assert looks(10.0, settled=False) < 200
    assert looks(10.0, settled=True) <= 101


def test_of_live_traffic_the_first_batch_of_each_size_is_checked_and_then_fewer_and_fewer():
    live, checked = Live(), []
    for number in range(5 * EVERY_BATCHES):
        rows = 1 + number % 32 if number < 64 else 32
        if live.due(rows, 0.0):
            live.begun(rows, 0.0)
            checked.append((number, rows))
    assert {(rows - 1).bit_length() for _, rows in checked} >= {1, 2, 3, 4, 5}
    assert len(checked) < 25
    gaps = [later - earlier for (earlier, _), (later, _) in zip(checked[-4:], checked[-3:], strict=False)]
    assert gaps == [EVERY_BATCHES] * 3
    assert not live.due(32, EVERY_SECONDS - 1)
    assert live.due(32, EVERY_SECONDS)


def test_a_live_trial_is_some_rows_of_the_last_member_and_keeps_no_batch():
    check = Check(0.01, Shelf(), asserted=True)
    assert check.key_of(parsed([1])) == parsed([1]).key
    one, other = parsed([1.5]), parsed([10.5, 11.5, 12.5, 13.5, 14.5, 15.5])
    portions = [Portion(one, 0, 1), Portion(other, 1, 6)]
    body = json.dumps({"predictions": [1.5, 11.5, 12.5, 13.5, 14.5, 15.5]}).encode()
    piece = V1.split(portions, [], body)[1]
    assert check.live_trial(portions[1], piece, read([]), 0.0, rows=6, room=3) is None
    trial = check.live_trial(portions[1], piece, read([]), 0.0, rows=6, room=ROOMY)
    assert (trial.kind, rows_of(trial)) == (Kind.LIVE, [11.5, 12.5, 13.5, 14.5])
    assert json.loads(trial.expected[0].parts[0]) == {"predictions": [11.5, 12.5, 13.5, 14.5]}
    assert check.live_trial(portions[1], piece, read([]), 0.0, rows=6, room=ROOMY) is None  # one at a time


# ------------------------------------------------------------------------------------------------------- padding

SEQUENCE = SequenceAxis(pad={"x": 0}, lengths=(4, 8))


def of_length(length, number=0):
    """A request of one row of so many numbers, answered with their sum."""
    row = [number + 1.5] * length
    one = sample([row], [sum(row)])
    one.parsed.fit = V1.fit(one.parsed, Sequence(SEQUENCE))
    return one


def padding(**options):
    return Check(0.01, Shelf(), sequence=SEQUENCE, **options)


def lengths_of(trial):
    return [each.parsed.fit.length for each in trial.portions]


def test_trials_of_several_lengths_verify_rows_and_padding_at_once():
    check = fed(of_length(3), of_length(2), of_length(4), check=padding())
    one = next_trial(check)
    assert (lengths_of(one), one.padded) == ([2, 4, 3, 2, 2], True)
    assert not check.has_agreed(one)
    two = next_trial(check)
    assert (lengths_of(two), two.padded) == ([4, 2, 3, 4, 4], True)
    assert check.has_agreed(two)
    assert (check.verified, check.padding.verified, check.settled, check.samples.kept) == (True, True, True, [])
    assert check.key_of(of_length(1).parsed) == check.key_of(of_length(4).parsed) != check.key_of(of_length(5).parsed)
    assert check.padding.evidence(check.trouble).startswith("verified")


def test_trials_of_one_length_say_nothing_of_padding():
    check = fed(of_length(3), of_length(3, 1), check=padding())
    for _ in range(TRIALS):
        trial = next_trial(check)
        assert not trial.padded
        check.has_agreed(trial)
    assert (check.verified, check.padding.verified, check.settled) == (True, False, False)
    assert check.key_of(of_length(2).parsed) == of_length(2).parsed.key
    assert next_trial(check) is None
    assert check.padding.evidence(check.trouble).startswith("not verified yet: 0 of 2 trial batches agreed")
    check.answered_alone(of_length(2, 2))
    for _ in range(TRIALS):
        trial = next_trial(check)
        assert (set(lengths_of(trial)), trial.padded) == ({2, 3}, True)
        check.has_agreed(trial)
    assert (check.padding.verified, check.settled) == (True, True)


def test_lengths_of_different_buckets_are_in_no_trial_together():
    check = fed(of_length(3), of_length(5), of_length(6), check=padding())
    assert set(lengths_of(next_trial(check))) == {5, 6}


def test_once_padding_is_refuted_rows_of_one_length_are_verified_by_themselves():
    check = fed(of_length(3), of_length(2), of_length(2, 1), check=padding())
    assert next_trial(check).padded
    check.pads_no_more("the answers differ", 0.0)
    assert (
        check.padding.evidence(check.trouble)
        == "refuted, so only requests of equal length share a batch: the answers differ"
    )
    for _ in range(TRIALS):
        trial = next_trial(check)
        assert (set(lengths_of(trial)), trial.padded) == ({2}, False)
        check.has_agreed(trial)
    assert (check.verified, check.padding.verified, check.settled) == (True, False, True)
    assert check.key_of(of_length(2).parsed) == of_length(2).parsed.key


def test_once_nothing_is_left_to_try_no_request_is_kept():
    check = fed(of_length(3), of_length(2), check=padding(asserted=True))
    check.pads_no_more("the answers differ", 0.0)
    assert (check.settled, check.samples.kept) == (True, [])


def test_an_axis_that_is_asserted_leaves_padding_to_be_tried():
    check = fed(of_length(3), of_length(2), check=padding(asserted=True))
    assert check.key_of(of_length(2).parsed) == of_length(2).parsed.key
    for _ in range(TRIALS):
        check.has_agreed(next_trial(check))
    assert check.key_of(of_length(2).parsed) == of_length(2).parsed.fit.key


def test_the_first_batch_of_each_bucket_is_checked_by_itself():
    live = Live()
    for bucket in (0, 16, 32):
        assert live.due(4, 0.0, bucket)
        live.begun(4, 0.0, bucket)
        assert not live.due(4, 0.0, bucket)


# ------------------------------------------------------------------------------------------------------- samples


def test_samples_are_bounded_in_number_and_bytes_over_all_checks():
    shelf = Shelf(room=1000)
    one, other = Samples(shelf), Samples(shelf)
    tolerance = Check(0.01, shelf).tolerance
    for number in range(3 * MAX_SAMPLES):
        one.add(sample([number + 0.5], size=50), tolerance)
    assert (len(one.kept), shelf.held) == (MAX_SAMPLES, 400)
    other.add(sample([0.5], size=300), tolerance)
    assert (len(one.kept), shelf.held) == (MAX_SAMPLES, 700)
    other.add(sample([1.5], size=400), tolerance)  # who began first makes room
    assert (one.kept, len(other.kept), shelf.held) == ([], 2, 700)
    other.add(sample([2.5], size=400), tolerance)  # larger than what is left beside its own
    assert (len(other.kept), shelf.held) == (2, 700)
    other.clear()
    assert shelf.held == 0


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.sampled_from([1, 100, 400, 900, 2000])), max_size=40)
)
def test_whatever_comes_room_is_kept_and_given_back(adds):
    shelf = Shelf(room=1000)
    users = [Samples(shelf) for _ in range(4)]
    tolerance = Check(0.01, shelf).tolerance
    for user, row, size in adds:
        users[user].add(sample([row + 0.5], size=size), tolerance)
        held = [sum(each.size for each in one.kept) for one in users]
        assert sum(held) == shelf.held <= 1000
        assert held == [one.size for one in users]
    for one in users:
        one.clear()
    assert (shelf.held, shelf._users) == (0, {})
