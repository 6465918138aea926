from __future__ import annotations

from carpool.policy.durations import Duration
from carpool.policy.parameters import Parameters
from carpool.policy.plain import from_plain
from carpool_operator.api.spec import written
from carpool_operator.api.status import Applied, Condition, ConditionStatus, Status


def test_a_status_compares_with_what_the_server_returns():
    status = Status(
        observed_generation=3,
        conditions=(
            Condition(
                type="Ready", status=ConditionStatus.TRUE, reason="AllWell", last_transition_time="2026-11-21T17:16:00Z"
            ),
        ),
        applied=Applied(
            generation=1,
            at="2026-11-21T17:16:00Z",
            target="Deployment/resnet",
            model="*",
            parameters=Parameters(max_batch=8, max_wait=Duration(0.00125)),
            batch="8",
            wait="1.25ms",
        ),
    )
    plain = written(status)
    assert plain["conditions"] == [
        {
            "type": "Ready",
            "status": "True",
            "reason": "AllWell",
            "message": "",
            "lastTransitionTime": "2026-11-21T17:16:00Z",
            "observedGeneration": 0,
        }
    ]
    assert plain["applied"]["parameters"]["maxWait"] == "1ms250us"
    assert from_plain({**plain, "ofANewerOperator": 1}, Status, what="status") == status
