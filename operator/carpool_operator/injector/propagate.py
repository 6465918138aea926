"""A Deployment's annotation in its pod template: put there at admission, and taken out again with it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from carpool_operator.api import annotations as names
from carpool_operator.injector.decide import annotations_of

if TYPE_CHECKING:
    from carpool_operator.injector.decide import Json


def asks(deployment: Json) -> bool:
    """Whether a Deployment's own annotations ask for a sidecar; their values are the operator's to judge.

    By presence alone: putting a typo right rolls no pods.
    """
    written = annotations_of(deployment)
    if written.get(names.INJECT) == names.FORBIDDEN:
        return False
    return written.get(names.INJECT) == names.ASKED or any(name.startswith(names.SLO_PREFIX) for name in written)


def propagate(deployment: Json) -> Json:
    """Return the Deployment as it should be: the same object where nothing is to be done.

    What a person wrote in the template stays; only the value put there at admission is taken out.
    """
    template = deployment["spec"]["template"]
    there = annotations_of(template).get(names.INJECT)
    if asks(deployment):
        if there is not None:
            return deployment
        changed = copy.deepcopy(deployment)
        metadata = changed["spec"]["template"].setdefault("metadata", {})
        metadata["annotations"] = {**annotations_of(template), names.INJECT: names.PROPAGATED}
        return changed
    if there != names.PROPAGATED:
        return deployment
    changed = copy.deepcopy(deployment)
    metadata = changed["spec"]["template"]["metadata"]
    del metadata["annotations"][names.INJECT]
    if not metadata["annotations"]:
        del metadata["annotations"]
    return changed
