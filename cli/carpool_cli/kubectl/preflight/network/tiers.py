"""What becomes of callers, by all policies together: tier by tier, and in the order in which each decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from carpool_cli.kubectl.preflight.network import admin, calico, cilium, kubernetes
from carpool_cli.kubectl.preflight.network.rules import DEFAULT

if TYPE_CHECKING:
    from carpool_cli.kubectl.preflight.network.rules import Rule
    from carpool_cli.kubectl.preflight.scene import Around, Json, Peer, Subject


class Tier(NamedTuple):
    """What policies of one tier say of a pod; the rules in the order in which they decide.

    ``closing``: titles of policies by which it admits only what is named; ``perhaps``: that may be for other pods.
    """

    place: float
    rules: list[Rule]
    closing: list[str]
    perhaps: list[str]


class Outcome(NamedTuple):
    """What becomes of a caller. ``refused``: why it may be kept out; ``""``: it surely is not.

    ``by``: a policy that has to be changed for it, where another one that admits it does not help.
    """

    admitted: bool
    refused: str = ""
    by: str = ""


def tiers_of(subject: Subject, pod: Json, near: Around) -> list[Tier]:
    """Return what policies of all kinds say of a pod, tier by tier."""
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
    """Return whether a caller gets to a port."""
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
                # Of a policy that may be for other pods: where it is not for this one, it does not close it either.
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
    """Return whether a rule decides on callers that it is for, of a port that it is for, and whether that is sure."""
    for tier in tiers:
        goes_on = tier.place == rule.tier
        for each in tier.rules:
            if each is rule:
                return True, rule.certain
            if not each.covers(port, named):
                continue
            # By a pass some callers come to the tier of the rule; of others it says nothing.
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
    """Return whether callers that a rule is for, of a port that it is for, get to the other one, and whether surely.

    Those that it keeps out of the first get in as soon as another rule admits some of them; those that it lets in are
    to get in there as well, all of them. ``was``: of the model's port, the ports by name as they are without a sidecar;
    rules that admit that one are taken to admit the sidecar's, too, as they will once they are put right.
    """
    sure, some, behind = True, False, False
    admitted = maybe = False
    """Some of those that are kept out surely are, or may be: selectors of different kinds can't be compared."""
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
                    continue  # it admits its callers before the rule is reached
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
            return True, sure  # what comes then is the same for both
    return True, sure


def may_be_refused_later(tiers: list[Tier], rule: Rule, port: int, named: dict[str, int]) -> bool:
    """Whether later tiers may keep callers from a port that a rule leaves to those."""
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
    """Whether callers that a rule leaves to later tiers are admitted to a port by its own."""
    rules = next(tier.rules for tier in tiers if tier.place == rule.tier)
    for each in rules[rules.index(rule) + 1 :]:
        if each.covers(port, named) and each.certain:
            if not (each.denies or each.passes) and (each.includes(rule) or rule.includes(each)):
                return True
            if each.includes(rule):
                return False
    return False
