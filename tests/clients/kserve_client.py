"""`kserve`'s own inference client against a sidecar: run by an interpreter that has it (450 MB), never by ours.

Usage: kserve_client.py http://HOST:PORT MODEL. Exit code 0, or a traceback.
"""

from __future__ import annotations

import asyncio
import sys

import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput


async def v1(url: str, model: str) -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v1"))
    answers = await asyncio.gather(
        *(client.infer(url, {"instances": [[number, 0.5]]}, model_name=model) for number in range(20))
    )
    assert [answer["predictions"] for answer in answers] == [[[number, 0.5]] for number in range(20)]
    assert await client.is_model_ready(url, model)
    await client.close()


async def v2(url: str, model: str) -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(url)
    assert await client.is_server_ready(url)
    assert await client.is_model_ready(url, model)
    for binary in (False, True):
        for datatype, array in (
            ("FP32", np.array([[0.1, -2.5]], np.float32)),
            ("INT64", np.array([[2**53 + 1]], np.int64)),
            ("BYTES", np.array([["grüße", "b"]], np.object_)),
            *([("FP16", np.array([[0.1, 65504.0]], np.float16))] if binary else []),
        ):
            tensor = InferInput("input", list(array.shape), datatype)
            tensor.set_data_from_numpy(array, binary_data=binary)
            wanted = [RequestedOutput("input", parameters={"binary_data": binary})]
            request = InferRequest(model, [tensor], request_id=f"{datatype} 1", request_outputs=wanted)
            answer = await client.infer(url, request, model_name=model)
            got = answer.outputs[0].as_numpy()
            assert answer.id == f"{datatype} 1"
            if datatype == "BYTES":
                texts = [[one.decode() if isinstance(one, bytes) else one for one in row] for row in got]
                assert texts == array.tolist(), got
            else:
                assert got.dtype == array.dtype
                assert got.tobytes() == array.tobytes()
    await client.close()


async def errors(url: str, model: str) -> None:
    client = InferenceRESTClient(RESTConfig(protocol="v1", retries=0))
    assert await status(client, url, {"instances": [[1]]}, "nobody") == 404
    assert await status(client, url, {"instances": 7}, model) == 400
    await client.close()


async def status(client: InferenceRESTClient, url: str, body: dict, model: str) -> int:
    try:
        await client.infer(url, body, model_name=model)
    except httpx.HTTPStatusError as error:
        return error.response.status_code
    return 200


async def main(url: str, model: str) -> None:
    await v1(url, model)
    await v2(url, model)
    await errors(url, model)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
