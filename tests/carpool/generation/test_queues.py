from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.generation.queues import CREDIT, MOST_TENANTS, Expiry, FairQueue
from carpool.generation.requests import Request, State
from carpool.policy.generation import Order


def request(key, tenant="", prompt=100, arrival=None):
    made = Request(key, float(key if arrival is None else arrival), prompt, tenant=tenant)
    made.cost = float(prompt)
    return made


def taken(queue, count, steps=0.0):
    order = []
    for _ in range(count):
        head = queue.head(steps)
        queue.take(head, steps)
        order.append(head.key)
    return order


def test_one_tenant_is_served_in_order_of_arrival():
    queue = FairQueue()
    for key in (2, 0, 1):
        queue.put(request(key), 0.0)
    assert taken(queue, 3) == [0, 1, 2]
    assert queue.head(0.0) is None
    assert (queue.requests, queue.prompt_tokens, queue.cost) == (0, 0, 0.0)


def test_short_prompts_overtake_long_ones_but_not_for_ever():
    queue = FairQueue(Order.SHORTEST_PROMPT_FIRST)
    queue.put(request(0, prompt=5000, arrival=0.0), 0.0)
    queue.put(request(1, prompt=100, arrival=1.0), 0.0)
    # 5,000 tokens count as 10 s: what comes later than that is behind, however short.
    queue.put(request(2, prompt=100, arrival=10.5), 0.0)
    assert taken(queue, 3) == [1, 0, 2]


def test_tenants_get_equal_tokens_and_not_equal_requests():
    queue = FairQueue()
    for key in range(20):
        queue.put(request(key, "long", prompt=400), 0.0)
        queue.put(request(100 + key, "short", prompt=100), 0.0)
    order = taken(queue, 20)
    assert sum(key < 100 for key in order) == 4


def test_weights_share_out_tokens():
    queue = FairQueue(weights={"gold": 3.0})
    for key in range(40):
        queue.put(request(key, "gold"), 0.0)
        queue.put(request(100 + key, "other"), 0.0)
    assert sum(key < 100 for key in taken(queue, 20)) == pytest.approx(15, abs=1)


def test_output_tokens_count_while_a_tenant_has_streams():
    queue = FairQueue()
    queue.put(request(0, "a", prompt=10), 0.0)
    queue.put(request(1, "b", prompt=50), 0.0)
    queue.tenant("a").counter(0.0)
    queue.tenant("a").decoding = 2
    # In 100 steps its two streams got 200 tokens, which cost 2 each.
    assert queue.tenant("a").counter(100.0) == 400.0
    assert queue.head(100.0).tenant == "b"


def test_a_tenant_that_was_away_has_saved_up_no_more_than_its_credit():
    queue = FairQueue()
    size = int(CREDIT / 10)
    for key in range(200):
        queue.put(request(key, "steady", size), 0.0)
    taken(queue, 100)
    for key in range(200, 260):
        queue.put(request(key, "new", size), 0.0)
    order = taken(queue, 50)
    # Ten at once, then half of the others.
    assert all(key >= 200 for key in order[:10])
    assert sum(key >= 200 for key in order) == pytest.approx(30, abs=1)


def test_what_comes_before_a_newcomer_of_a_quiet_tenant_is_little():
    queue = FairQueue()
    for key in range(100):
        queue.put(request(key, "flood"), 0.0)
    assert queue.ahead(request(200, "quiet"), 0.0) == 0.0
    assert queue.ahead(request(201, "flood"), 0.0) == 100 * 100
    queue.put(request(200, "quiet"), 0.0)
    # One of its own, and as much of the other tenant.
    assert queue.ahead(request(202, "quiet"), 0.0) == pytest.approx(200)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 300)), min_size=1, max_size=30),
    st.sampled_from(list(Order)),
)
def test_ahead_is_what_is_taken_before_it(waiting, order):
    queue = FairQueue(order)
    for key, (tenant, prompt) in enumerate(waiting):
        queue.put(request(key, tenant, prompt), 0.0)
    newcomer = request(len(waiting), "a", 50)
    forecast = queue.ahead(newcomer, 0.0)
    queue.put(newcomer, 0.0)
    before = 0.0
    while (head := queue.head(0.0)) is not newcomer:
        before += head.cost
        queue.take(head, 0.0)
    # Requests are not divided: each other tenant is off by one at most.
    assert abs(forecast - before) <= 2 * 300


def test_removing_leaves_the_rest_in_order():
    queue = FairQueue()
    requests = [request(key) for key in range(6)]
    for each in requests:
        queue.put(each, 0.0)
    for key in (0, 3):
        queue.remove(requests[key])
    assert {r.key for r in queue} == {1, 2, 4, 5}
    assert taken(queue, 4) == [1, 2, 4, 5]


def test_tenants_that_are_gone_take_no_memory_for_ever():
    queue = FairQueue()
    for key in range(5 * MOST_TENANTS):
        queue.put(request(key, f"tenant-{key}"), 0.0)
        taken(queue, 1)
    assert len(queue._tenants) <= MOST_TENANTS


def test_expiry_gives_what_still_waits_once_and_in_time():
    expiry = Expiry()
    requests = [request(key) for key in range(4)]
    for at, each in zip((5.0, 3.0, inf, 4.0), requests, strict=True):
        expiry.put(at, each)
    assert expiry.next_at() == 3.0
    requests[3].state = State.PREFILLING
    assert [r.key for r in expiry.due(4.5)] == [1]
    assert expiry.next_at() == 5.0
    requests[0].state = State.ENDED
    assert expiry.next_at() == inf
