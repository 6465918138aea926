"""A gate that gets another policy keeps what it has learned and who waits."""

from carpool.generation.gate import Gate, Limits
from carpool.generation.kv_budget import KvBudget
from carpool.generation.queues import FairQueue
from carpool.generation.requests import Admit, Request, Slo
from carpool.generation.step_model import StepModel
from carpool.policy.generation import Order


def gate(**limits):
    return Gate(Slo(2.0, 0.05), StepModel(0.0115, 4e-5, 8e-8, 5.5e-5), Limits(**limits))


def request(key, prompt=100, tenant=""):
    return Request(key, 0.001 * key, prompt, tenant=tenant)


def admitted(actions):
    return [action.request.key for action in actions if isinstance(action, Admit)]


def test_requests_that_wait_are_put_in_the_new_order():
    one = gate(max_running=1)
    one.arrive(request(0), 0.0)
    for key, prompt in ((1, 900), (2, 100)):
        assert one.arrive(request(key, prompt), 0.01) == []
    model = one.meter.model
    one.configure(Slo(3.0, 0.04), Limits(order=Order.SHORTEST_PROMPT_FIRST, max_running=2))
    assert (one.slo, one.meter.model) == (Slo(3.0, 0.04), model)
    assert admitted(one.poll(0.02)) == [2]


def test_weights_hold_from_now_on():
    queue = FairQueue()
    for key, tenant in enumerate("ab"):
        made = request(key, tenant=tenant)
        made.cost = 100.0
        queue.put(made, 0.0)
    queue.configure(Order.FCFS, {"b": 4.0})
    assert (queue.tenant("a").weight, queue.tenant("b").weight, queue.tenant("new").weight) == (1.0, 4.0, 1.0)
    assert queue.requests == 2


def test_the_size_of_the_cache_stays_unless_it_is_named():
    budget = KvBudget(80.0)
    budget.report(0.5, 1000.0, 0.0)
    budget.configure(90.0, None)
    assert budget.tokens == 2000.0
    budget.configure(90.0, 5000)
    assert budget.tokens == 5000


def test_a_first_token_that_was_not_seen_teaches_nothing():
    one = gate()
    seen, unseen = request(0), request(1)
    for each in (seen, unseen):
        one.arrive(each, 0.0)
    one.first_token(seen, 0.5)
    one.first_token(unseen, 0.5, seen=False)
    assert len(one.calibration._firsts) == 1
    assert one.meter.decoding == 2
    one.ended(unseen, 0.6, 1)
    assert one.meter.decoding == 1
