from __future__ import annotations

import click
import numpy as np
import pytest

from carpool_cli.load.servers import InputSpec
from carpool_cli.load.tensors import Malformed
from carpool_cli.profiling.arrays import DTYPES, from_tensors, load_npz, random_rows, repeated, to_tensors


@pytest.mark.parametrize("datatype", DTYPES)
def test_arrays_survive_being_tensors(datatype):
    made = random_rows([InputSpec("x", datatype, (2, 3))], 4, seed=1)
    assert made["x"].shape == (4, 2, 3)
    back = from_tensors(to_tensors(made))
    assert back["x"].tolist() == made["x"].tolist()


def test_rows_repeat():
    assert repeated({"x": np.array([[1], [2]])}, 5)["x"].tolist() == [[1], [2], [1], [2], [1]]


def test_what_v2_lacks_is_named():
    with pytest.raises(Malformed, match="complex64"):
        to_tensors({"x": np.zeros(1, np.complex64)})
    with pytest.raises(click.ClickException, match="BF16"):
        random_rows([InputSpec("x", "BF16", ())], 1, seed=1)


@pytest.mark.parametrize("content", [b"", b"text", b"PK"])
def test_a_file_of_another_kind_is_named(content, tmp_path):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(click.ClickException, match=r"a\.npz is no npz file of plain arrays: ."):
        load_npz(tmp_path / "a.npz")


def test_arrays_of_different_lengths_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(2), y=np.zeros(3))
    with pytest.raises(click.ClickException, match="same number of rows"):
        load_npz(tmp_path / "a.npz")
