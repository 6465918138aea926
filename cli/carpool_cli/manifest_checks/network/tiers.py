"""The decision on callers by all policies together: tier by tier, and in each tier's order."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from carpool_cli.manifest_checks.network import admin, calico, cilium, kubernetes
from carpool_cli.manifest_checks.network.rules import DEFAULT, Rule

if TYPE_CHECKING:
    from carpool_cli.manifest_checks.objects import Around, Json, Peer, Subject


class Tier(NamedTuple):
    """The policies of one tier for a pod; the rules in the order in which they decide.

    ``closing``: titles of policies that isolate the pod; ``perhaps``: those that may apply to other pods only.
    """

    place: float
    rules: list[Rule]
    closing: list[str]
    perhaps: list[str]


class Outcome(NamedTuple):
    """The decision on a caller. ``refused``: why it may be rejected; ``""``: it surely is not.

    ``by``: a policy that must be changed for it, because another one that admits it does not suffice.
    """

    admitted: bool
    refused: str = ""
    by: str = ""


def tiers_of(subject: Subject, pod: Json, near: Around) -> list[Tier]:
    """Return the policies of all kinds for a pod, tier by tier."""
    kinds = [of.ingress(subject, pod, near) for of in (kubernetes, cilium, calico, admin)]
    closing = [each for kind in kinds for each in kind.closing]
    perhaps = [each for kind in kinds for each in kind.perhaps]
    rules = [each for kind in kinds for each in kind.rules]
    return [
        Tier(
            place,
            sorted((rule for rule in rules if rule.tier == place), key=lambda rule: rule.order),
            [each.title for each in closing if each.tier == place],
            [each.title for each in perhaps if each.tier == place],
        )
        for place in sorted({each.tier for each in (*closing, *perhaps, *rules)})
    ]


def reached(tiers: list[Tier], caller: Peer, port: int, named: dict[str, int]) -> Outcome:
    """Return whether a caller reaches a port."""
    may_pass, refused, by = False, "", ""
    for tier in tiers:
        lets_in = False
        for rule in tier.rules:
            if not rule.covers(port, named) or not rule.may_reach(caller):
                continue
            sure = rule.certain and rule.reaches(caller)
            if rule.denies:
                refused, by = f"{rule.title} denies it", rule.title
                if sure:
                    return Outcome(may_pass, refused, by)
            elif not sure:
                # A policy that may apply to other pods: if it does not apply to this one, it does not isolate it
                # either.
                lets_in = lets_in or rule.reaches(caller)
                may_pass = True
            elif rule.passes:
                break
            else:
                return Outcome(admitted=True, refused=refused, by=by)
        else:
            titles = [*tier.closing, *tier.perhaps]
            if tier.closing or (tier.perhaps and not lets_in):
                refused = f"no rule of the policies that select the pod ({', '.join(titles)}) admits it"
                by = "" if tier.place == DEFAULT else " and ".join(titles)
            if tier.closing:
                return Outcome(may_pass, refused, by)
    return Outcome(admitted=True, refused=refused, by=by)


def decides(tiers: list[Tier], rule: Rule, port: int, named: dict[str, int]) -> tuple[bool, bool]:
    """Return whether a rule decides on its callers at its port, and whether that is certain."""
    for tier in tiers:
        goes_on = tier.place == rule.tier
        for each in tier.rules:
            if each is rule:
                return True, rule.certain
            if not each.covers(port, named):
                continue
            # After a pass some callers reach the rule's tier; the others are unknown.
            goes_on = goes_on or each.passes
            if each.certain and each.includes(rule):
                if each.passes or (goes_on and tier.place < rule.tier):
                    break
                return False, True
        else:
            if tier.closing and not goes_on:
                return False, True
    return False, True


def gets_in(
    tiers: list[Tier], rule: Rule, port: int, other: int, named: dict[str, int], was: dict[str, int] | None = None
) -> tuple[bool, bool]:
    """Return whether a rule's callers at its port reach the other port, and whether that is certain.

    Rejected callers count as reaching it if another rule admits some of them there; admitted callers only if all of
    them reach it. ``was``: for the model's port, the ports by name without a sidecar. Rules that admit that port are
    assumed to admit the sidecar's, too, as they will after the fix.
    """
    sure, some, behind = True, False, False
    admitted = maybe = False
    """Some rejected callers are, or may be, admitted: selectors of different kinds can't be compared."""
    for tier in tiers:
        goes_on = False
        for each in tier.rules:
            if each is rule:
                behind = True
                continue
            covers = each.covers(other, named)
            if rule.denies and not each.denies:
                admits = each.covers(port, named if was is None else was)
                if not behind and not each.passes and admits:
                    continue  # an earlier rule admits its callers
                covers = covers or (admits and was is not None)
                some = some or covers
                admitted = admitted or (covers and each.certain and rule.includes(each))
                maybe = maybe or (covers and type(each) is not type(rule))
            if not covers or not each.includes(rule):
                narrower = behind and covers and each.denies and each.certain and rule.includes(each)
                if narrower and not rule.denies and decides(tiers, each, other, named)[0]:
                    return False, sure
                goes_on = goes_on or (covers and each.passes and tier.place < rule.tier)
            elif not each.certain:
                sure = False
            elif each.passes or (goes_on and tier.place < rule.tier):
                break
            else:
                return not each.denies or admitted or maybe, sure and (not each.denies or admitted or not maybe)
        else:
            if (tier.closing or tier.perhaps) and not goes_on:
                return some, sure and bool(tier.closing)
        if rule.passes and rule.tier == tier.place:
            return True, sure  # later tiers treat both alike
    return True, sure


def may_be_refused_later(tiers: list[Tier], rule: Rule, port: int, named: dict[str, int]) -> bool:
    """Whether later tiers may reject callers at a port that a rule leaves to them."""
    for tier in tiers:
        if not rule.passes or tier.place <= rule.tier:
            continue
        for each in tier.rules:
            if not each.covers(port, named):
                continue
            if each.denies:
                return True
            if each.certain and each.includes(rule):
                if each.passes:
                    break
                return False
        else:
            if tier.closing:
                return True
    return False


def is_let_in_before(tiers: list[Tier], rule: Rule, port: int, named: dict[str, int]) -> bool:
    """Whether callers that a rule leaves to later tiers are admitted to a port by its own tier."""
    rules = next(tier.rules for tier in tiers if tier.place == rule.tier)
    for each in rules[rules.index(rule) + 1 :]:
        if each.covers(port, named) and each.certain:
            if not (each.denies or each.passes) and (each.includes(rule) or rule.includes(each)):
                return True
            if each.includes(rule):
                return False
    return False
