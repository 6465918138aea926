"""The rules people use, each from its published or source algorithm, with whatever is in its favour."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from proof.rivals.aimd import aimd
from proof.rivals.bentoml import bentoml
from proof.rivals.clipper import clipper, clipper_aimd, clipper_quantile
from proof.rivals.nexus import nexus
from proof.rivals.search import random_search, tpe
from proof.rivals.settings import fixed_8, fixed_32, greedy, half_slo
from proof.rivals.tensorflow_serving import tensorflow_serving
from proof.rivals.triton import triton

if TYPE_CHECKING:
    from proof.world import Maker


class Rival(NamedTuple):
    """A rule that Carpool is compared with."""

    name: str
    cite: str
    """Where it is from."""
    maker: Maker


_CLIPPER = "Crankshaw et al., Clipper, NSDI 2017"

RIVALS = {
    rival.name: rival
    for rival in (
        Rival("fixed-8-2ms", "common practice", fixed_8),
        Rival("fixed-32-5ms", "common practice", fixed_32),
        Rival("half-slo", "Shen et al., Nexus, SOSP 2019: 2 l(b) <= SLO", half_slo),
        Rival("nexus", "Shen et al., Nexus, SOSP 2019; uwsampl/nexus at b436191", nexus),
        Rival("clipper", "ucbrise/clipper at 9f25e3f, containers.cpp: exploration and regression", clipper),
        Rival("clipper-aimd", f"{_CLIPPER}, 4.3.1 and 4.3.2: AIMD with delayed batching", clipper_aimd),
        Rival("clipper-quantile", f"{_CLIPPER}, 4.3.1 and 4.3.2: quantile regression", clipper_quantile),
        Rival("bentoml", "bentoml/BentoML at 32230a5, dispatcher.py: CorkDispatcher", bentoml),
        Rival(
            "tf-adaptive", "tensorflow/tensorflow at 457db0a8, adaptive_shared_batch_scheduler.h", tensorflow_serving
        ),
        Rival("aimd", "Chiu and Jain 1989, on the batch size against the SLO", aimd),
        Rival("random", "Bergstra and Bengio, JMLR 2012, online", random_search),
        Rival("tpe", "Bergstra et al., NeurIPS 2011, by Optuna 5.0.0, online", tpe),
        Rival("triton", "triton-inference-server/core at 73aad7c, dynamic_batch_scheduler.cc", triton),
        Rival("greedy", "work-conserving, e.g. Triton's default", greedy),
    )
}
