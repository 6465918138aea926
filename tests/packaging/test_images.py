"""What `make images` decides, without making any: the same bytes each time, one list, and no more than is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import build
import inside
import layout
import programs
import sbom

ROOT = Path(__file__).parents[2]
CONTENTS = inside.CONTENTS


def stages():
    """Read the Dockerfile: the instructions of each stage by its name."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    found, name = {}, ""
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            name = rest.rpartition(" AS ")[2]
            found[name] = []
        elif word.isupper() and name:
            found[name].append((word, " ".join(rest.split())))
    return found


def test_the_dockerfile_has_the_same_sources_and_packages():
    sources = stages()["sources"]
    copied = [path for word, rest in sources if word == "COPY" for path in rest.split()[:-1]]
    assert copied == CONTENTS["sources"]["paths"]
    (installed,) = (rest for word, rest in sources if word == "RUN")
    assert installed.partition("--no-install-recommends ")[2].split() == CONTENTS["debian"]["build"]
    assert f"ARG SUITE={CONTENTS['debian']['suite']}\n" in (ROOT / "Dockerfile").read_text()


def test_docker_is_given_what_the_dockerfile_copies():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert [line.removeprefix("!") for line in lines if line.startswith("!")] == CONTENTS["sources"]["paths"]


@pytest.mark.parametrize("name", CONTENTS["image"])
def test_the_dockerfile_makes_the_same_image(name, tmp_path):
    image, found = CONTENTS["image"][name], dict(stages()["bare"] + stages()[name])
    bill = tmp_path / "bill"
    bill.write_text("{}")
    settings = build.settings(name, "amd64", bill, build.Origin("c0ffee", 0))
    assert found["USER"] == settings["user"]
    assert json.loads(found["ENTRYPOINT"]) == settings["entrypoint"]
    assert json.loads(found.get("CMD", "[]")) == settings["cmd"]
    assert dict(pair.split("=") for pair in found["ENV"].split()) == settings["env"]
    assert [f"{port}/tcp" for port in found["EXPOSE"].split()] == settings["ports"]
    assert found["STOPSIGNAL"] == "SIGTERM"
    copied = [rest for word, rest in stages()[name] if word == "COPY"]
    assert copied == [f"--from={name}-trees /carpool/out/{tree} /" for tree in ("base", name)]
    (ran,) = (rest for word, rest in stages()[f"{name}-trees"] if word == "RUN")
    assert ran.split()[1:3] == ["images/inside.py", name]
    assert set(image["programs"]) <= set(inside.scripts(ROOT))


def test_the_sources_are_all_that_the_wheel_is_made_of():
    needed = {Path(path).parts[0] for path in inside.packaged(ROOT)} | {"pyproject.toml", "hatch_build.py", "LICENSE"}
    assert needed <= set(CONTENTS["sources"]["paths"])
    assert not [path for path in CONTENTS["sources"]["paths"] if not (ROOT / path).exists()]


def names(extras):
    return {re.split(r"[\[<>= ]", each)[0] for each in build.requirements(extras)}


def test_an_image_needs_what_its_extra_names_and_no_more():
    assert names("signing") == {"msgspec", "httptools", "prometheus-client", "pyyaml", "uvloop", "cryptography"}
    assert names("onnx,signing") == names("signing") | {"numpy", "onnxruntime"}
    assert {"kopf", "kubernetes"} <= names("operator")
    assert not names("operator") & {"httptools", "uvloop", "carpool-serving"}


LACKING = """
import importlib, sys
from fnmatch import fnmatch

class Removed:
    def find_spec(self, name, path, target=None):
        if any(fnmatch(name, each) for each in sys.argv[2:]):
            raise ModuleNotFoundError(f"{name} is not in the image")

sys.meta_path.insert(0, Removed())
importlib.import_module(sys.argv[1])
"""
"""Imports a module where others are not: those that match a pattern."""


@pytest.mark.parametrize("name", CONTENTS["image"])
def test_the_programs_of_an_image_need_no_module_that_is_not_in_it(name):
    image, targets = CONTENTS["image"][name], inside.scripts(ROOT)
    ours = {Path(path).parts[1] for path in inside.packaged(ROOT)}
    assert set(image["packages"]) < ours
    removed = [Path(each).name.partition(".")[0] for each in CONTENTS["python"]["remove"]]
    for program in image["programs"]:
        module = targets[program].partition(":")[0]
        command = [sys.executable, "-c", LACKING, module, *(ours - set(image["packages"])), *removed]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not ran.returncode, ran.stderr[-2000:]


def tree(root, order):
    """Write the same files in an order."""
    for name in order:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {name}")
        os.utime(path, (len(name), len(name) + list(order).index(name)))
    (root / "b/run").chmod(0o755)
    (root / "link").symlink_to("a/one")
    return root


def test_a_layer_depends_on_names_modes_and_contents_only(tmp_path):
    files = []
    for number, order in enumerate((["a/one", "a/two", "b/run"], ["b/run", "a/two", "a/one"])):
        files.append(tmp_path / f"{number}.tar")
        inside.pack(tree(tmp_path / str(number), order), files[-1], 1_000)
    assert files[0].read_bytes() == files[1].read_bytes()
    with tarfile.open(files[0]) as tar:
        assert tar.getnames() == ["a", "a/one", "a/two", "b", "b/run", "link"]
        assert {(each.mtime, each.uid, each.gid, each.uname) for each in tar} == {(1_000, 0, 0, "")}
        assert tar.getmember("b/run").mode == 0o755
        assert tar.getmember("link").linkname == "a/one"
        assert tar.extractfile("a/two").read() == b"this is a/two"


def test_an_environment_starts_the_programs_of_its_image(tmp_path):
    package = tmp_path / inside.LIBRARY / "greeting.py"
    package.parent.mkdir(parents=True)
    package.write_text("def hello():\n    print('hello')\n    return 3\n")
    inside.environment(tmp_path, ["greet"], {"greet": "greeting:hello", "other": "nowhere:x"})
    folder = tmp_path / inside.HOME / "bin"
    assert {each.name for each in folder.iterdir()} == {"python", "python3", "greet"}
    assert (folder / "greet").stat().st_mode & stat.S_IXOTH
    ran = subprocess.run(
        [sys.executable, folder / "greet"], env={"PYTHONPATH": str(package.parent)}, capture_output=True, check=False
    )
    assert (ran.returncode, ran.stdout) == (3, b"hello\n")


def test_the_list_of_a_wheels_files_is_what_is_there(tmp_path):
    (tmp_path / "kept.py").write_text("x = 1\n")
    folder = tmp_path / "it-1.dist-info"
    folder.mkdir()
    (folder / "direct_url.json").write_text("{}")
    (folder / "RECORD").write_text(
        "kept.py,sha256=old,9\ngone.py,sha256=old,9\nit-1.dist-info/direct_url.json,sha256=x,2\nit-1.dist-info/RECORD,,\n"
    )
    inside.rewrite(folder / "RECORD")
    lines = (folder / "RECORD").read_text().splitlines()
    assert lines[0] == "it-1.dist-info/RECORD,,"
    assert re.fullmatch(r"kept\.py,sha256=[\w-]{43},6", lines[1])
    assert len(lines) == 2
    assert not (folder / "direct_url.json").exists()


def test_compiled_modules_do_not_depend_on_times(tmp_path):
    found = []
    for number in range(2):
        package = tmp_path / str(number) / "opt/module.py"
        package.parent.mkdir(parents=True)
        package.write_text("def f():\n    return {1, 2}\n")
        os.utime(package, (number, number))
        inside.byte_compile(package.parent, tmp_path / str(number))
        (made,) = package.parent.glob("__pycache__/*.pyc")
        found.append(made.read_bytes())
    assert found[0] == found[1]
    assert b"/opt/module.py" in found[0]
    assert str(tmp_path).encode() not in found[0]


INPUTS = {
    "architecture": "amd64",
    "debian": [
        {"name": "libc6", "version": "2.36-9", "architecture": "amd64", "source": "glibc", "sha256": "aa" * 32},
    ],
    "wheels": {
        "sidecar": [
            {"name": "PyYAML", "version": "6", "license": "MIT", "file": "PyYAML-6.whl", "sha256": "bb" * 32},
            {"name": "long", "version": "1", "license": "x" * 1000, "file": "long-1.whl", "sha256": "cc" * 32},
        ],
        "operator": [{"name": "kopf", "version": "1", "license": "", "file": "kopf-1.whl", "sha256": "dd" * 32}],
    },
}
IMAGE = {"name": "carpool-sidecar", "version": "1", "license": "Apache-2.0", "kind": "sidecar"}


def test_a_bill_of_materials_names_what_is_in_its_image():
    text = sbom.bill(IMAGE, INPUTS, {"base": "11" * 32}, 86_400)
    assert text == sbom.bill(IMAGE, INPUTS, {"base": "11" * 32}, 86_400)
    found = json.loads(text)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert found["metadata"]["timestamp"].startswith("1970-01-02T00:00:00")
    assert {each["purl"]: each["hashes"][0]["content"][:2] for each in found["components"]} == {
        "pkg:deb/debian/libc6@2.36-9?arch=amd64&distro=debian-12&upstream=glibc": "aa",
        "pkg:pypi/pyyaml@6": "bb",
        "pkg:pypi/long@1": "cc",
    }
    assert [each.get("licenses") for each in found["components"] if each["name"] == "PyYAML"] == [
        [{"license": {"id": "MIT"}}]
    ]
    assert text != sbom.bill(IMAGE, INPUTS, {"base": "22" * 32}, 86_400)


def test_images_of_several_architectures_get_one_name(tmp_path):
    (tmp_path / "blobs/sha256").mkdir(parents=True)
    parts = [
        {"digest": f"sha256:{name}", "size": 1, "annotations": {layout.NAME: f"1-{name}"}}
        for name in ("amd64", "arm64")
    ]
    (tmp_path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": parts}))
    digest = layout.join(tmp_path, "1", {"amd64": "1-amd64", "arm64": "1-arm64"})
    assert layout.join(tmp_path, "1", {"amd64": "1-amd64", "arm64": "1-arm64"}) == digest
    whole = json.loads((tmp_path / "blobs" / digest.replace(":", "/")).read_text())
    assert [each["platform"]["architecture"] for each in whole["manifests"]] == ["amd64", "arm64"]
    assert [each["digest"] for each in whole["manifests"]] == ["sha256:amd64", "sha256:arm64"]
    index = json.loads((tmp_path / "index.json").read_text())
    assert [each["annotations"][layout.NAME] for each in index["manifests"]] == ["1-amd64", "1-arm64", "1"]


def test_without_the_rights_to_install_the_command_is_printed(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "umoci" else f"/usr/bin/{name}")
    assert programs.main(["umoci", "skopeo"]) == 1
    assert "sudo apt-get install --yes --no-install-recommends umoci\n" in capsys.readouterr().err
    assert programs.main(["skopeo"]) == 0


def git(folder, *words):
    named = ("-c", "user.name=it", "-c", "user.email=it@example.com")
    said = subprocess.run(["git", *named, *words], cwd=folder, check=True, capture_output=True, text=True)
    return said.stdout.strip()


def test_only_a_commit_that_changes_what_goes_in_changes_the_images(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    git(tmp_path, "init", "--quiet")
    for name, day in (("core", 1), ("docs", 2)):
        (tmp_path / name).write_text("one")
        git(tmp_path, "add", name)
        monkeypatch.setenv("GIT_COMMITTER_DATE", f"@{day * 86_400} +0000")
        git(tmp_path, "commit", "--quiet", "--message", name)
    assert build.origin() == (git(tmp_path, "rev-parse", "HEAD~1"), 86_400)
    (tmp_path / "core").write_text("two")
    assert build.origin().revision.endswith("-modified")


def test_without_git_the_time_has_to_be_given(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "7")
    assert build.origin() == ("unknown", 7)
    monkeypatch.delenv("SOURCE_DATE_EPOCH")
    with pytest.raises(RuntimeError, match="SOURCE_DATE_EPOCH"):
        build.origin()
