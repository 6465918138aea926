from __future__ import annotations

import pytest

from words import ALLOWED, MESSAGES, NOTES, ROOT, WORDS, findings, main, messages, notes, prose, wrong


@pytest.mark.parametrize(
    "line",
    [
        "It tells the tuner.", "A request that rides alone", "Requests who wait", "so that the SLO is kept",
        "settings that hold the p99", "t(b) of a model", "on four executors", "a spell of arrivals",
        "device time a request", "Whoever asks", "no setting within reach",
    ],
)  # fmt: skip
def test_a_private_word_is_found(line):
    assert [number for number, _, _ in findings([(7, line)])] == [7]


@pytest.mark.parametrize(
    "line",
    [
        "Requests held in the queue", "parameters stay", "the control plane", "keeps the connection open",
        "probes of the kubelet", "a request that waits", "it reports the SLO", "crowdsourced",
    ],
)  # fmt: skip
def test_plain_words_are_not_found(line):
    assert not [*findings([(1, line)])]


def test_code_and_links_on_a_page_are_not_prose():
    page = "a `told`\n```bash\nexecutors\n```\n[x](company.md) <!-- luck -->\nluck"
    assert [(number, word) for number, word, _ in findings(prose(page))] == [(6, "luck")]


def test_messages_and_help_are_read_and_other_docstrings_are_not():
    source = '"""Told at once."""\n@click.command()\ndef go():\n    """Tell it."""\n    x = {"told": f"{1} told"}\n'
    assert [(number, word) for number, word, _ in findings(messages(source.replace("Tell", "It tells")))] == [
        (4, "tells"),
        (5, "told"),
    ]


def test_comments_and_docstrings_are_read_and_messages_are_not():
    source = '"""In ``company`` of\nluck."""\nx = "told"  # noqa: S1 - told `news`\n"""A field: news."""\n'
    assert sorted((number, word) for number, word, _ in findings(notes(source))) == [
        (2, "luck"),
        (3, "told"),
        (4, "news"),
    ]


def test_help_is_read_once():
    source = '@click.command()\ndef go():\n    """It tells it."""\n'
    assert not [*notes(source)]
    assert [number for number, _, _ in findings(messages(source))] == [3]


def test_notes_are_read_in_their_folders_only(tmp_path):
    for folder in {*NOTES, *MESSAGES, "docs"}:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("# the luck of it\n")
    assert [each.split("/")[0] for each in wrong(tmp_path, ())] == [*NOTES]
    (tmp_path / "tools" / "a.py").write_text('x = "the luck of it"\n')
    assert not [each for each in wrong(tmp_path, ()) if each.startswith("tools")]


def test_names_of_test_functions_are_read_in_tests_only(tmp_path):
    source = "@mark\ndef test_a_row_rides():\n    luck()\n\n\nasync def test_whoever_asks():\n    pass\n"
    for folder in {*NOTES, *MESSAGES}:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(f"{source}\n\ndef told_twice():\n    pass\n")
    assert [each.split(": write")[0] for each in wrong(tmp_path, ())] == [
        "tests/a.py:2: 'rides'",
        "tests/a.py:6: 'whoever'",
    ]


def test_of_charts_examples_and_the_makefile_comments_are_read(tmp_path):
    (tmp_path / "charts" / "templates").mkdir(parents=True)
    (tmp_path / "charts" / "templates" / "a.yaml").write_text("luck: 1\n  # the luck of it\n# `luck`\n")
    (tmp_path / "Makefile").write_text("luck: ## no comment\n# whoever\n")
    found = wrong(tmp_path, ())
    assert [each.split(": write")[0] for each in found] == [
        "Makefile:2: 'whoever'",
        "charts/templates/a.yaml:2: 'luck'",
    ]


def test_a_page_and_a_message_are_named_with_what_to_write(tmp_path):
    (tmp_path / "README.md").write_text("\nThe luck of it\n")
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "a.py").write_text('x = "in company"\n')
    found = wrong(tmp_path, ())
    assert found[0].startswith("README.md:2: 'luck': write: ")
    assert found[1].startswith("cli/a.py:1: 'company': write: ")


def test_an_exception_that_nobody_needs_is_wrong(tmp_path):
    assert wrong(tmp_path, [("README.md", "ride")]) == ["README.md: nobody writes 'ride' there: take it out of ALLOWED"]


def test_the_repository_is_in_plain_words(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["words.py"])
    assert main() == 0, capsys.readouterr().out
    assert all(ALLOWED.values())
    assert all(WORDS.values())
    assert (ROOT / "Makefile").exists()
