"""Rules in common use, each from its published or source algorithm, with the choices that favour it."""

from __future__ import annotations

from proof.rivals import aimd, bentoml, clipper, nexus, search, settings, tensorflow_serving, triton
from proof.world import Rival

_CLIPPER = "Crankshaw et al., Clipper, NSDI 2017"

RIVALS = {
    rival.name: rival
    for rival in (
        Rival("fixed-8-2ms", "common practice", settings.fixed_8),
        Rival("fixed-32-5ms", "common practice", settings.fixed_32),
        Rival("half-slo", "Shen et al., Nexus, SOSP 2019: 2 l(b) <= SLO", settings.half_slo),
        Rival("nexus", "Shen et al., Nexus, SOSP 2019; uwsampl/nexus at b436191", nexus.contender),
        Rival("clipper", "ucbrise/clipper at 9f25e3f, containers.cpp: exploration and regression", clipper.code),
        Rival("clipper-aimd", f"{_CLIPPER}, 4.3.1 and 4.3.2: AIMD with delayed batching", clipper.aimd),
        Rival("clipper-quantile", f"{_CLIPPER}, 4.3.1 and 4.3.2: quantile regression", clipper.quantile),
        Rival("bentoml", "bentoml/BentoML at 32230a5, dispatcher.py: CorkDispatcher", bentoml.contender),
        Rival(
            "tf-adaptive",
            "tensorflow/tensorflow at 457db0a8, adaptive_shared_batch_scheduler.h",
            tensorflow_serving.contender,
        ),
        Rival("aimd", "Chiu and Jain 1989, on the batch size against the SLO", aimd.contender),
        Rival("random", "Bergstra and Bengio, JMLR 2012, online", search.random_search),
        Rival("tpe", "Bergstra et al., NeurIPS 2011, by Optuna 5.0.0, online", search.tpe),
        Rival("triton", "triton-inference-server/core at 73aad7c, dynamic_batch_scheduler.cc", triton.contender),
        Rival("greedy", "work-conserving, e.g. Triton's default", settings.greedy),
    )
}
