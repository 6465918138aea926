from __future__ import annotations

import copy
import json

import pytest

from carpool_operator.injector.undo import changes, undone


def written(old, new):
    return json.loads(json.dumps(list(changes(old, new))))


@pytest.mark.parametrize("members", [None, [], [{"name": "own"}], [{"name": "own"}, {"name": "own"}], "absent"])
def test_what_was_added_to_a_list_goes_and_what_others_added_stays(members):
    old = {"a": 1, **({} if members == "absent" else {"members": members}), "z": 2}
    added = [{"name": "ours"}, {"name": "ours too"}]
    new = {**old, "members": [*(old.get("members") or []), *added]}
    undo = written(old, new)
    assert json.dumps(undone(new, undo)) == json.dumps(old)
    more = copy.deepcopy(new)
    more["members"].append({"name": "theirs"})
    assert undone(more, undo) == {**old, "members": [*(old.get("members") or []), {"name": "theirs"}]}


@pytest.mark.parametrize("members", [None, [], [{"name": "own"}], "absent"])
def test_what_somebody_took_out_since_need_not_go(members):
    old = {} if members == "absent" else {"members": members}
    new = {"members": [*(old.get("members") or []), {"name": "ours"}, {"name": "ours too"}]}
    undo = written(old, new)
    less = {"members": new["members"][:-1]}
    assert undone(less, undo) == old
    assert undone({}, undo) == {}


@pytest.mark.parametrize("labels", [None, {}, {"app": "web"}, "absent"])
def test_mappings_are_as_lists(labels):
    old = {} if labels == "absent" else {"labels": labels}
    new = {"labels": {**(old.get("labels") or {}), "ours": "x"}}
    undo = written(old, new)
    assert undone(new, undo) == old
    more = {"labels": {**new["labels"], "theirs": "y"}}
    assert undone(more, undo) == {"labels": {**(old.get("labels") or {}), "theirs": "y"}}
    assert undone({"labels": {**(old.get("labels") or {}), "theirs": "y"}}, undo)["labels"].keys() >= {"theirs"}


def test_what_was_there_has_to_have_its_place():
    old = {"containers": [{"name": "model", "port": 1}]}
    undo = written(old, {"containers": [{"name": "model", "port": 2}]})
    assert undone({"containers": [{"name": "model", "port": 3}]}, undo) == old
    with pytest.raises(ValueError, match="there is no model any more"):
        undone({"containers": [{"name": "renamed", "port": 2}]}, undo)
