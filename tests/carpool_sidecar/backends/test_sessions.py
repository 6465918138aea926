"""ONNX files on CUDA, tested on a machine without it: what is said without it, and sessions by size."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from carpool.policy.plain import PolicyError
from carpool_sidecar.backends import sessions
from carpool_sidecar.backends.onnx import OnnxBackend
from carpool_sidecar.backends.sessions import Model, padded
from carpool_sidecar.config.settings import Onnx

SAID = "Failed to load libcublas.so.13"


def save(path, node, *weights, rows="batch"):
    def tensor(name):
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 1, 4])

    graph = helper.make_graph([node], "g", [tensor("x")], [tensor("y")], list(weights))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, path)
    return str(path)


def convolution(path, **shape):
    kernel = numpy_helper.from_array(np.array([[[1, 2, 3]]], np.float32), "w")
    return save(path, helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1]), kernel, **shape)


@pytest.fixture
def sized(tmp_path, monkeypatch):
    """A model of convolutions whose sizes have their own sessions, as on CUDA, and the sessions that were opened."""
    opened = []
    genuine = sessions._open
    monkeypatch.setattr(sessions, "_open", lambda *given: opened.append(genuine(*given)) or opened[-1])
    model = Model(convolution(tmp_path / "conv.onnx"))
    model._sized = True
    return model, opened


def rows(count):
    return {"x": np.arange(4 * count, dtype=np.float32).reshape(count, 1, 4)}


@pytest.fixture
def broken_cuda(monkeypatch):
    """A runtime built with CUDA where its libraries are missing, as `onnxruntime-gpu` behaves there."""

    def preload_dlls():
        print(SAID)  # noqa: T201 - as it does

    monkeypatch.setattr(sessions.onnxruntime, "get_available_providers", lambda: [sessions.CUDA, sessions.CPU])
    monkeypatch.setattr(sessions.onnxruntime, "preload_dlls", preload_dlls, raising=False)
    sessions._load_libraries.cache_clear()
    yield
    sessions._load_libraries.cache_clear()


@pytest.mark.filterwarnings("ignore:Specified provider:UserWarning")
def test_cuda_that_can_not_be_used_is_an_error_and_never_a_silent_cpu(broken_cuda, tmp_path, capsys):
    path = convolution(tmp_path / "conv.onnx")
    with pytest.raises(PolicyError, match=r"onnx.device: CUDA can't be used") as error:
        OnnxBackend(Onnx(path=path, device="CUDA"))
    assert SAID in str(error.value)
    assert "Or use CPU" in str(error.value)
    assert capsys.readouterr().out == ""


@pytest.mark.filterwarnings("ignore:Specified provider:UserWarning")
def test_auto_says_that_it_fell_back_to_the_cpu(broken_cuda, tmp_path, caplog):
    path = convolution(tmp_path / "conv.onnx")
    OnnxBackend(Onnx(path=path))
    (record,) = [record for record in caplog.records if record.message == "the model is computed on the CPU"]
    assert SAID in record.detail
    caplog.clear()
    OnnxBackend(Onnx(path=path, device="CPU"))
    assert not caplog.records


def test_half_octaves():
    assert [padded(count) for count in (1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 17, 25, 64, 65)] == [
        1, 2, 3, 4, 6, 6, 8, 12, 12, 16, 24, 32, 64, 96,
    ]  # fmt: skip


def test_sizes_have_sessions_and_merged_batches_are_filled_up(sized):
    model, opened = sized
    alone = [model.run(["y"], {"x": rows(7)["x"][index : index + 1]})[0] for index in range(7)]
    assert len(opened) == 2
    (merged,) = model.run(["y"], rows(7), pad=True)
    assert np.array_equal(merged, np.concatenate(alone))
    assert sorted(model._sessions) == [1, 8]
    (lone,) = model.run(["y"], rows(7))
    assert np.array_equal(lone, merged)
    assert sorted(model._sessions) == [1, 8], "other sizes share a session"


def test_an_output_with_other_rows_than_the_batch_is_not_cut_to_size(tmp_path):
    node = helper.make_node("Concat", ["x", "x"], ["y"], axis=0)
    model = Model(save(tmp_path / "twice.onnx", node))
    model._sized = True
    (twice,) = model.run(None, rows(5), pad=True)
    assert len(twice) == 10


def test_a_size_that_fails_filled_up_is_computed_as_it_came(sized, monkeypatch):
    model, _ = sized

    class Small:
        def run(self, names, arrays):
            raise RuntimeError("out of memory")

    model._sessions[8] = Small()
    assert len(model.run(None, rows(7), pad=True)[0]) == 7
    with pytest.raises(RuntimeError):
        model.run(None, rows(8))


def test_only_so_many_sizes_have_sessions(sized, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_SIZES", 3)
    model, _ = sized
    for count in (1, 2, 3, 4, 6):
        assert len(model.run(None, rows(count))[0]) == count
    assert sorted(model._sessions) == [1, 2, 3]


def test_a_file_that_was_replaced_is_not_mixed_with_the_one_that_was_loaded(sized, tmp_path, caplog):
    model, _ = sized
    before = model.run(None, rows(1))[0]
    save(tmp_path / "other.onnx", helper.make_node("Neg", ["x"], ["y"]))
    (tmp_path / "other.onnx").replace(tmp_path / "conv.onnx")
    for count in (1, 2, 3):
        assert np.array_equal(model.run(None, rows(count))[0][:1], before)
    assert "has changed since it was loaded: restart" in caplog.records[0].error
    (tmp_path / "conv.onnx").unlink()
    assert np.array_equal(model.run(None, rows(4))[0][:1], before)


def test_where_no_more_sessions_can_be_opened_one_computes_and_it_is_not_tried_again(sized, monkeypatch, caplog):
    model, _ = sized
    tried = []

    def fail(*given):
        tried.append(given)
        raise PolicyError("onnx.path", "out of memory")

    monkeypatch.setattr(sessions, "_open", fail)
    for _ in range(3):
        assert model.run(None, rows(2))[0].shape == (2, 1, 4)
    assert len(tried) == 1
    assert "out of memory" in caplog.records[-1].error


def test_warming_makes_the_sessions_that_batches_will_use(sized):
    model, _ = sized
    model.warm(12)
    assert sorted(model._sessions) == [1, 2, 3, 4, 6, 8, 12]


def test_only_convolutions_on_cuda_with_an_open_batch_axis_have_sessions_by_size(tmp_path, monkeypatch):
    class Cuda:
        """A session that says it runs on CUDA."""

        def __init__(self, session):
            self.session = session

        def __getattr__(self, name):
            return getattr(self.session, name)

        def get_providers(self):
            return [sessions.CUDA, sessions.CPU]

    identity = save(tmp_path / "identity.onnx", helper.make_node("Identity", ["x"], ["y"]))
    free, fixed = convolution(tmp_path / "free.onnx"), convolution(tmp_path / "fixed.onnx", rows=2)
    assert not Model(free)._sized
    genuine = sessions._open
    monkeypatch.setattr(sessions, "_open", lambda *given: Cuda(genuine(*given)))
    assert [Model(path)._sized for path in (free, fixed, identity)] == [True, False, False]
