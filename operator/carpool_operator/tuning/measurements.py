"""What is measured of one target besides its models: for capacity, and to report its token streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from carpool_operator.tuning.cold_start import ColdStarts
from carpool_operator.tuning.engines import FleetEngines
from carpool_operator.tuning.target_load import TargetLoad, full_of
from carpool_operator.tuning.token_streams import FleetStreams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from carpool.policy.spec import SLO
    from carpool_operator.api.model import Target, View
    from carpool_operator.tuning.evidence import Sample


class Measurements:
    """Load, cold starts and token streams of one target, those of engines without a sidecar included."""

    def __init__(self) -> None:
        self.load = TargetLoad()
        self.cold_starts = ColdStarts()
        self.streams = FleetStreams()
        self.engines = FleetEngines()
        """Engines without a sidecar."""

    def observe(self, view: View, target: Target, slo: SLO, samples: Sequence[Sample]) -> None:
        """Add the ``samples`` of sidecars, and what the view has of engines without one."""
        pods = view.pods.get(target, ())
        self.cold_starts.observe(pods)
        ready = {pod.uid for pod in pods if pod.ready and not pod.deleting}
        if (engines := view.engines.get(target)) is not None:
            samples = [*samples, *self.engines.observe(view.now, engines, slo)]
        ready |= self.engines.pods
        self.load.observe(view.now, samples, ready, full_of(view.workloads.get(target)))
        streamed = [(each.uid, each.seconds, each.streams) for each in samples if each.streams is not None]
        self.streams.observe(view.now, streamed, ready)
