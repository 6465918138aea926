"""Rules in CEL that the server checks on a BatchingPolicy beyond its types; they match ``PolicySpec.validate``."""

from __future__ import annotations

from msgspec import Struct

from carpool.policy.generation import ClassTarget, Generation, TokenTarget
from carpool.policy.parameters import Parameters
from carpool.policy.spec import NEVER_ACROSS, SLO, Admission, DurationRange, IntRange, Latency
from carpool_operator.api.spec import (
    CA,
    LABEL_KEY,
    RESERVED,
    TLS,
    Auth,
    Header,
    LabelRequirement,
    Metrics,
    OAuth2,
    PolicySpec,
    Prometheus,
    TargetRef,
    TargetSelector,
)
from carpool_operator.workloads import registry

PERCENTILES = Latency.__struct_fields__


class Rule(Struct, frozen=True):
    """A rule that the server evaluates on an object, in CEL.

    ``path`` is the field that an error names, relative to the object. ``message`` is the error; values of the CEL
    expressions ``values`` replace its braces.
    """

    cel: str
    path: str
    message: str
    values: tuple[str, ...] = ()

    def schema(self) -> dict[str, str]:
        """Return the rule in the server's format."""
        rule = {"rule": self.cel}
        if self.values:
            parts = [f"'{part}'" for part in self.message.split("{}")]
            said = [text for pair in zip(parts, self.values, strict=False) for text in pair] + parts[len(self.values) :]
            rule["messageExpression"] = " + ".join(text for text in said if text != "''")
            rule["message"] = self.message.replace("{}", "...")
        else:
            rule["message"] = self.message
        return rule | {"fieldPath": self.path} if self.path else rule


# ------------------------------------------------------------------------------------------------- rules


# The server rejects a rule whose cost it can't bound by the maximum size of strings and lists. It knows no size for the
# results of `string()`, `orValue()`, `optMap()` and `filter()`. So rules use `has()`, and messages contain no numbers.


def _has(path: str) -> str:
    """Return the condition that a field, and all that contain it, are given."""
    root, *steps = path.split(".")
    return " && ".join(f"has({root}.{'.'.join(steps[: end + 1])})" for end in range(len(steps)))


def _if_given(path: str, then: str, otherwise: str = "true") -> str:
    return f"({_has(path)} ? {then} : {otherwise})"


def _with_due(text: str, otherwise: str) -> str:
    """Replace the braces of an expression by the SLO's due time: the highest percentile given, else that of ttft."""
    whole = _if_given("self.slo.ttft.p99", text.format("self.slo.ttft.p99"), otherwise)
    for name in PERCENTILES:
        whole = _if_given(f"self.slo.latency.{name}", text.format(f"self.slo.latency.{name}"), whole)
    return whole


_DUE = _with_due("{}", "''")


def _positive(name: str, *, optional: bool = False) -> Rule:
    unset = f"!has(self.{name}) || " if optional else ""
    return Rule(f"{unset}duration(self.{name}) > duration('0s')", f".{name}", "must be longer than 0s")


def _one_of(first: str, second: str) -> Rule:
    return Rule(f"has(self.{first}) != has(self.{second})", "", f"name one of {first} and {second}")


def _ordered(low: str, high: str) -> Rule:
    return Rule(
        f"!has(self.{low}) || !has(self.{high}) || duration(self.{low}) <= duration(self.{high})",
        f".{low}",
        f"{low} ({{}}) is longer than {high} ({{}}): lower it or raise {high}",
        (f"self.{low}", f"self.{high}"),
    )


def _below_slo(end: str) -> list[Rule]:
    """Return the rules that a bound of the wait is below the SLO, the policy's and each model's."""
    wait = f"bounds.maxWait.{end}"
    # Without an SLO another rule rejects the object, and this one passes.
    own = _if_given(f"self.{wait}", _with_due(f"duration(self.{wait}) < duration({{}})", "true"))
    of_model = _if_given(f"m.{wait}", _with_due(f"duration(m.{wait}) < duration({{}})", "true"))
    return [
        Rule(own, f".{wait}", "{} is not below the SLO of {}: lower it or drop it", (f"self.{wait}", _DUE)),
        _of_models(of_model, f"a model's {wait} is not below the SLO: lower it or drop it"),
    ]


def _of_models(holds: str, message: str) -> Rule:
    """Return the rule that a condition holds for every model ``m``."""
    return Rule(f"!has(self.models) || self.models.all(m, {holds})", ".models", message)


def _crossed(name: str, order: str) -> Rule:
    """Return the rule that one end of a model's range agrees with the policy's other end, where the model uses that."""
    own, outer = f"m.bounds.{name}", f"self.bounds.{name}"
    low = _if_given(f"{own}.max", "true", _if_given(f"{outer}.max", order.format(f"{own}.min", f"{outer}.max")))
    high = _if_given(f"{own}.min", "true", _if_given(f"{outer}.min", order.format(f"{outer}.min", f"{own}.max")))
    holds = f"({_if_given(f'{own}.min', low)} && {_if_given(f'{own}.max', high)})"
    return _of_models(
        holds, f"a model's bounds.{name} has one end, which the policy's other end contradicts: name both"
    )


# A default baseline is not checked: it moves to the nearest allowed value.
_UNWRITTEN = (
    "!has(self.baseline) || (self.baseline.maxBatch == {0.max_batch} && self.baseline.maxInFlight == {0.max_in_flight}"
    " && duration(self.baseline.maxWait) == duration('{0.max_wait}') && !self.baseline.passThrough)"
).format(Parameters())


def _baseline(name: str, widest: int) -> Rule:
    """Return the rule that a whole number of the baseline lies in its bounds, 1 to ``widest`` unless set."""
    low, high, value = f"self.bounds.{name}.min", f"self.bounds.{name}.max", f"self.baseline.{name}"
    above = _if_given(low, f"{low} <= {value}")
    unset = f"({value} <= {widest} || {_if_given(low, f'{value} <= {low}', 'false')})"
    return Rule(
        f"{_UNWRITTEN} || ({above} && {_if_given(high, f'{value} <= {high}', unset)})",
        f".baseline.{name}",
        f"lies outside bounds.{name}, 1 to {widest} unless set: change one of them",
    )


def _baseline_wait() -> Rule:
    low, high, value = "self.bounds.maxWait.min", "self.bounds.maxWait.max", "self.baseline.maxWait"
    above = _if_given(low, f"duration({low}) <= duration({value})")
    # CEL can't halve durations, so compare twice the wait with the whole SLO.
    half = _with_due(f"duration({value}) + duration({value}) <= duration({{}})", "true")
    unset = f"({half} || {_if_given(low, f'duration({value}) <= duration({low})', 'false')})"
    return Rule(
        f"{_UNWRITTEN} || ({above} && {_if_given(high, f'duration({value}) <= duration({high})', unset)})",
        ".baseline.maxWait",
        "{} lies outside bounds.maxWait, 0s to half the SLO unless set: change one of them",
        (value,),
    )


_GROUPS = ", ".join(f"'{kind.name}': '{kind.group}'" for kind in registry.KINDS)
_OF_GROUP = Rule(
    f"{{{_GROUPS}}}[self.kind] == self.group",
    ".group",
    "{} is of the group {}: write that",
    ("self.kind", f"{{{_GROUPS}}}[self.kind]"),
)


RULES: dict[type[Struct], list[Rule]] = {
    SLO: [
        Rule(
            "has(self.latency) || has(self.ttft) || has(self.tpot)",
            "",
            "name a latency, e.g. latency: {p99: 50ms}, or for token streams ttft and tpot",
        ),
        Rule("!has(self.tpot) || has(self.ttft)", "", "tpot needs ttft: without it requests wait without bound"),
        Rule(
            "!has(self.classes) || size(self.classes) == 0 || has(self.ttft)",
            "",
            "classes need ttft: requests without a class have to have targets, too",
        ),
        Rule(
            "!has(self.classes) || self.classes.all(c, self.classes.filter(d, d.priority == c.priority).size() == 1)",
            "",
            "a class is named twice",
        ),
    ],
    ClassTarget: [
        Rule("has(self.ttft) || has(self.tpot)", "", "name ttft or tpot, e.g. ttft: {p99: 1s}"),
        Rule("self.priority != 'batch'", ".priority", "batch has no targets"),
    ],
    TokenTarget: [_positive("p99")],
    Latency: [
        Rule(
            " || ".join(f"has(self.{name})" for name in PERCENTILES),
            "",
            f"name at least one of {', '.join(PERCENTILES)}, e.g. p99: 50ms",
        ),
        *(_positive(name, optional=True) for name in PERCENTILES),
        *(_ordered(low, high) for index, low in enumerate(PERCENTILES) for high in PERCENTILES[index + 1 :]),
    ],
    IntRange: [
        Rule(
            "!has(self.min) || !has(self.max) || self.min <= self.max",
            "",
            "min exceeds max: lower it or raise max",
        )
    ],
    DurationRange: [
        Rule(
            "!has(self.min) || !has(self.max) || duration(self.min) <= duration(self.max)",
            "",
            "min {} exceeds max {}: lower it or raise max",
            ("self.min", "self.max"),
        )
    ],
    Admission: [_positive("timeout", optional=True)],
    Metrics: [
        _positive("staleAfter", optional=True),
        Rule(
            "self.source != 'Sidecar' || !has(self.prometheus)",
            ".prometheus",
            "is for source Prometheus: set that, or drop this",
        ),
        Rule(
            "self.source != 'Prometheus' || has(self.prometheus)",
            ".prometheus",
            "source Prometheus needs it: name its url",
        ),
        Rule(
            "!has(self.prometheus) || !has(self.staleAfter) || "
            "duration(self.staleAfter) > duration(self.prometheus.interval)",
            ".staleAfter",
            "{} is not longer than prometheus.interval {}: raise it",
            ("self.staleAfter", "self.prometheus.interval"),
        ),
    ],
    Prometheus: [
        _positive("interval"),
        Rule(
            "!has(self.tls) || self.url.startsWith('https://')",
            ".tls",
            "is for an https url: change url, or drop this",
        ),
    ],
    Auth: [
        Rule(
            "has(self.bearer) ? !has(self.basic) && !has(self.oauth2) : has(self.basic) != has(self.oauth2)",
            "",
            "name one of bearer, basic and oauth2",
        )
    ],
    OAuth2: [
        Rule(
            "!has(self.ca) || self.tokenUrl.startsWith('https://')",
            ".ca",
            "is for an https tokenUrl: change that, or drop this",
        )
    ],
    Header: [
        Rule(
            f"!self.name.matches('(?i)^({'|'.join(sorted(RESERVED))})$')",
            ".name",
            "{} is set by the operator",
            ("self.name",),
        ),
        _one_of("value", "secret"),
    ],
    TargetRef: [_OF_GROUP],
    LabelRequirement: [
        Rule(
            "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
            ".values",
            "In and NotIn need values, Exists and DoesNotExist take none",
        )
    ],
    TargetSelector: [
        _OF_GROUP,
        Rule(
            "(has(self.matchLabels) && size(self.matchLabels) > 0)"
            " || (has(self.matchExpressions) && size(self.matchExpressions) > 0)",
            "",
            "name a label: one without any would select every workload",
        ),
        Rule(
            f"!has(self.matchLabels) || self.matchLabels.all(key, key.matches('{LABEL_KEY}'))",
            ".matchLabels",
            "one of the keys is no label: write name or prefix/name",
        ),
    ],
    CA: [_one_of("secret", "configMap")],
    TLS: [
        Rule(
            "!has(self.ca) || !self.insecureSkipVerify",
            ".insecureSkipVerify",
            "checks nothing, so ca is unused: drop one",
        )
    ],
    PolicySpec: [
        # Without a list there is no field to report at.
        Rule("has(self.targetRefs) || has(self.targetSelector)", "", "name targetRefs or targetSelector"),
        Rule(
            # The server has already filled in the defaults.
            "has(self.slo.ttft) || !has(self.generation) || "
            f"self.generation.kvBudgetPercent == {Generation().kv_budget_percent} && "
            f"self.generation.order == '{Generation().order}' && "
            "!has(self.generation.maxRunning) && !has(self.generation.kvTokens) && "
            "!has(self.generation.tenants) && !has(self.generation.maxQueuedTokens)",
            ".generation",
            "needs slo.ttft: without it there is no gate to bound",
        ),
        *_below_slo("min"),
        *_below_slo("max"),
        _baseline("maxBatch", 64),
        _baseline_wait(),
        _baseline("maxInFlight", 32),
        _crossed("maxBatch", "{} <= {}"),
        _crossed("maxWait", "duration({}) <= duration({})"),
        _crossed("maxInFlight", "{} <= {}"),
        Rule(
            f"!has(self.batchAcross) || self.batchAcross.all(name, !(name in {sorted(NEVER_ACROSS)}))",
            ".batchAcross",
            "names a header that says how a body is to be read: it can not differ",
        ),
    ],
}
