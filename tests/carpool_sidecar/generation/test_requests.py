import json
import tracemalloc

import pytest

from carpool_sidecar.generation.requests import ENDS, PIECE, Api, Endpoint, read, recognise


@pytest.mark.parametrize(
    ("target", "endpoint"),
    [
        (b"/v1/chat/completions", Endpoint(Api.OPENAI)),
        (b"/v1/completions?api-version=2", Endpoint(Api.OPENAI)),
        (b"/openai/v1/chat/completions", Endpoint(Api.OPENAI)),
        (b"/v3/chat/completions", Endpoint(Api.OPENAI)),
        (b"/chat/completions", Endpoint(Api.OPENAI)),
        (b"/v1/responses", Endpoint(Api.RESPONSES)),
        (b"/generate", Endpoint(Api.TGI)),
        (b"/generate_stream", Endpoint(Api.TGI, streams=True)),
        (b"/completion", Endpoint(Api.LLAMA)),
        (b"/v2/models/a%20b/generate", Endpoint(Api.TRITON, False, "a b")),
        (b"/v2/models/m/versions/3/generate_stream", Endpoint(Api.TRITON, True, "m")),
        (b"/v1/embeddings", None),
        (b"/v1/responses/resp_1", None),
        (b"/v1/chat/completionsx", None),
        (b"/v2/models/m/infer", None),
        (b"/generated", None),
        (b"/x/v1/completions", None),
    ],
)
def test_language_models_are_recognised_by_path(target, endpoint):
    assert recognise(target) == endpoint


def asked(target=b"/v1/chat/completions", **body):
    return read(recognise(target), json.dumps(body).encode())


def test_what_is_asked():
    found = asked(model="llama", messages=[{"role": "user", "content": "hi"}], max_tokens=12, stream=True)
    assert (found.model, found.streams, found.max_tokens, found.flexible) == ("llama", True, 12, False)
    assert asked(max_completion_tokens=5, service_tier="flex")[1:3] == (False, 5)
    assert asked(service_tier="flex").flexible
    assert asked(b"/generate", inputs="x", parameters={"max_new_tokens": 20}).max_tokens == 20
    sglang = asked(b"/generate", text="x", sampling_params={"max_new_tokens": 20}, stream=True)
    assert (sglang.streams, sglang.max_tokens) == (True, 20)
    assert asked(b"/completion", prompt="x", n_predict=-1).max_tokens is None
    assert asked(b"/v2/models/a/generate_stream", text_input="x", model="b")[:2] == ("a", True)


def test_what_a_prompt_says_is_not_what_is_asked():
    prompt = '{"model":"x","stream":true,"max_tokens":7} \\"max_tokens\\":8 "max_tokens": 9'
    found = asked(messages=[{"role": "user", "content": prompt}], model="m", max_tokens=3)
    assert (found.model, found.streams, found.max_tokens) == ("m", False, 3)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff" * 20_000, b'{"max_tokens":"12"}', b'{"model":1,"stream":null}'])
def test_what_can_not_be_read_is_not_asked(body):
    assert read(Endpoint(Api.OPENAI), body)[:3] == ("", False, None)


def test_a_long_body_is_read_at_its_ends():
    content = "word " * 100_000
    found = asked(model="m", messages=[{"role": "user", "content": content}], stream=True)
    assert (found.model, found.streams) == ("m", True)
    assert found.prompt_bytes > len(content)
    body = b'{"model":"m","max_tokens":12' + b" " * (2 * ENDS) + b"}"
    assert read(Endpoint(Api.OPENAI), body).max_tokens == 12
    cut = b'{"model":"m",' + b" " * (ENDS - 13 - 15) + b'"max_tokens":12' + b"34" + b" " * (2 * ENDS) + b"}"
    assert read(Endpoint(Api.OPENAI), cut).max_tokens is None  # 1234, cut in the middle


@pytest.mark.parametrize(
    ("body", "choices"),
    [
        ({}, 1),
        ({"n": 4}, 4),
        ({"n": 4, "messages": [{"content": "x" * 5 * ENDS}]}, 4),
        ({"n": 2, "best_of": 5}, 5),
        ({"n": 10**8}, 128),
        ({"n": 0}, 1),
        ({"n": None}, 1),
        ({"n": "4"}, 4),
        ({"n": 4.0}, 4),
        ({"n": -4}, 1),
        ({"n": True}, 1),
        ({"n": [4]}, 1),
        ({"n": "4" * 40}, 1),
        ({"tools": [{"n": 4}]}, 1),
        ({"metadata": {"n": 9, "best_of": 9}, "n": 3}, 3),
        ({"prompt": ["a", "b", "c"], "n": 2}, 6),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": []}, 1),
    ],
)
def test_each_choice_is_a_sequence_of_the_engine(body, choices):
    assert asked(b"/v1/completions", **body).choices == choices


def test_nothing_is_built_of_what_is_not_asked_for():
    # The decoder keeps bytes: objects of a body of 10 MB took up to two seconds, in which nothing else runs.
    deep = b"[%b]" % b",".join([b'["a",[[1]]]'] * 50_000)
    tracemalloc.start()
    try:
        found = read(Endpoint(Api.OPENAI), b'{"n":%b,"best_of":2,"prompt":["a"]}' % deep)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(deep)
    finally:
        tracemalloc.stop()
    assert (found.prompts, found.choices) == (1, 2)


def test_prompts_of_a_long_list_are_counted_up_to_the_limit_and_not_built():
    body = b'{"prompt":["a",%b]}' % b",".join([b"1"] * 200_000)
    tracemalloc.start()
    try:
        found = read(Endpoint(Api.OPENAI), body)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()
    assert (found.prompts, found.choices) == (128, 128)


def test_prompts_are_counted_apart_from_the_choices_of_each():
    found = asked(b"/v1/completions", prompt=["a", "b", "c"], n=2)
    assert (found.prompts, found.choices) == (3, 6)


def test_what_can_not_be_parsed_asks_for_one_choice():
    deep = b"[" * 5000 + b"]" * 5000
    for body in (b'{"n":4,', b'{"n":4,"prompt":%b}' % deep, b'{"n":4,"x":%b}' % deep):
        assert read(Endpoint(Api.OPENAI), body).choices == 1
    assert asked(b"/generate", n=4).choices == 1


def test_images_are_no_text():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 500_000}}
    found = asked(messages=[{"role": "user", "content": [image, {"type": "text", "text": "hi"}, image]}])
    assert found.prompt_bytes < 1000


@pytest.mark.parametrize(
    ("target", "part"),
    [
        (b"/v1/chat/completions", {"type": "input_audio", "input_audio": {"data": "UklG+/" * 80_000, "format": "wav"}}),
        (b"/v1/messages", {"type": "image", "source": {"type": "base64", "data": "iVBO" * 120_000 + "=="}}),
        (b"/v1/responses", {"type": "input_file", "file_data": "data:application/pdf;base64," + "A" * 480_000}),
    ],
    ids=["audio", "Anthropic's images", "files"],
)
def test_nor_are_other_parts_in_base64(target, part):
    text = {"type": "text", "text": 'write "data": "' + "word " * 2000}
    found = asked(target, messages=[{"role": "user", "content": [text, part, text, part]}])
    assert 20_000 < found.prompt_bytes < 22_000


@pytest.mark.parametrize("begin", [b'"data":"', b'"url":"data:image/png;base64,'])
def test_they_are_found_wherever_they_begin(begin):
    for before in range(PIECE - 40, PIECE + 2):
        body = b'{"a":"%b",%b%b"}' % (b"x" * before, begin, b"A" * 9000)
        assert read(Endpoint(Api.OPENAI), body).prompt_bytes == len(body) - 9000


def test_members_named_data_that_are_text_are_text():
    found = asked(messages=[{"role": "user", "data": "some words " * 1000}, {"role": "user", "data": "abc"}])
    assert found.prompt_bytes > 11_000


def test_token_ids_are_counted():
    assert asked(b"/v1/completions", prompt=list(range(3000)), model="m").prompt_tokens == 3000
    assert asked(b"/v1/completions", prompt="1, 2, 3").prompt_tokens is None
