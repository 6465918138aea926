"""The release workflow can't be run here: it names what exists, runs only code that is pinned, and has few rights."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import inside

ROOT = Path(__file__).parents[2]
FILE = ROOT / ".github/workflows/release.yaml"
TEXT = FILE.read_text()
WORKFLOW = yaml.safe_load(TEXT)
JOBS = WORKFLOW["jobs"]
STEPS = [step for job in JOBS.values() for step in job["steps"]]


def test_every_action_is_pinned_by_commit_with_its_version_beside_it():
    uses = re.findall(r"uses: (.*)", TEXT)
    assert len(uses) == sum("uses" in step for step in STEPS)
    assert [each for each in uses if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)] == []
    commits = dict(each.split("@", 1) for each in uses)
    assert all(each.split("@", 1)[1] == commits[each.split("@", 1)[0]] for each in uses), "one version of each"


def test_rights_are_given_job_by_job():
    assert WORKFLOW["permissions"] == {}
    writers = {
        name: {key for key, right in job["permissions"].items() if right == "write"} for name, job in JOBS.items()
    }
    assert writers == {"build": set(), "scan": set(), "publish": {"contents", "id-token"}, "wheels": {"id-token"}}
    assert all("environment" in JOBS[name] for name, rights in writers.items() if rights)


def test_nothing_is_published_before_it_was_tested_and_scanned():
    assert [step["run"] for step in JOBS["build"]["steps"] if "make test-images" in step.get("run", "")]
    assert set(JOBS["publish"]["needs"]) == set(JOBS["wheels"]["needs"]) == {"build", "scan"}
    assert JOBS["scan"]["needs"] == "build"


def test_it_publishes_the_images_and_architectures_that_are_built():
    standard = [name for name, image in inside.CONTENTS["image"].items() if not image.get("optional")]
    matrix = JOBS["scan"]["strategy"]["matrix"]
    assert sorted(matrix["image"]) == sorted(standard)
    assert sorted(matrix["architecture"]) == sorted(inside.MACHINES)
    script = "\n".join(step.get("run", "") for step in JOBS["publish"]["steps"])
    assert f"for image in {' '.join(matrix['image'])};" in script
    assert f"for architecture in {' '.join(matrix['architecture'])};" in script


def test_it_makes_what_the_makefile_has():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = set(re.findall(r"\bmake ([a-z-]+)", "\n".join(step.get("run", "") for step in STEPS)))
    assert {"setup", "images", "test-images"} <= wanted <= targets


def test_scripts_are_bash_and_take_nothing_from_outside_but_variables():
    for step in STEPS:
        # What a matrix of ours names may stand in a script; anything else goes through the environment.
        inserted = re.findall(r"\$\{\{ *([\w.]+) *\}\}", step.get("run", ""))
        assert all(each.startswith("matrix.") for each in inserted), step
