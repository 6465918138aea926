from __future__ import annotations

from click.testing import CliRunner

from carpool_cli.demo.random_model import command
from carpool_sidecar.llm.model_file import describe


def test_it_writes_a_model_that_can_be_served(tmp_path):
    result = CliRunner().invoke(command, [str(tmp_path / "random.gguf")])
    assert result.exit_code == 0, result.output
    assert describe(tmp_path / "random.gguf").context == 4096


def test_what_is_mistyped_is_explained(tmp_path):
    for arguments, said in (
        ([], "Missing argument 'OUT'"),
        ([str(tmp_path / "none" / "a.gguf")], "make it first"),
        ([str(tmp_path / "a.gguf"), "huge"], "'tiny', 'small', 'medium'"),
    ):
        result = CliRunner().invoke(command, arguments)
        assert result.exit_code == 2
        assert said in result.output
