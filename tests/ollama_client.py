"""Drives a running `anec serve` with the official `ollama` client: python ollama_client.py http://HOST:PORT/v1 MODEL"""

import asyncio
import json
import sys

import ollama

base_url, model = sys.argv[1:3]
host = base_url.removesuffix("/v1")
client = ollama.Client(host=host)
USER = [{"role": "user", "content": "Why is the sky blue?"}]
GREEDY = {"temperature": 0, "num_predict": 16}


def models():
    assert [entry.model.split(":")[0] for entry in client.list().models] == [model], client.list()
    assert "completion" in client.show(model).capabilities
    assert client.ps().models[0].model.split(":")[0] == model


def chats():
    whole = client.chat(model=model, messages=USER, options=GREEDY)
    assert whole.message.role == "assistant" and whole.message.content and whole.done, whole
    assert whole["message"]["content"] == whole.message.content and whole.eval_count <= 16, whole
    pieces = list(client.chat(model=model, messages=USER, options=GREEDY, stream=True))
    assert len(pieces) > 3 and "".join(piece.message.content for piece in pieces) == whole.message.content
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]

    async def later():
        return await ollama.AsyncClient(host=host).chat(model=model, messages=USER, options=GREEDY)

    assert asyncio.run(later()).message.content == whole.message.content


def texts():
    whole = client.generate(model=model, prompt="The sea", raw=True, options=GREEDY)
    pieces = client.generate(model=model, prompt="The sea", raw=True, options=GREEDY, stream=True)
    assert whole.response and "".join(piece.response for piece in pieces) == whole.response, whole
    stopped = client.generate(model=model, prompt="The sea", raw=True, options={**GREEDY, "stop": [whole.response[4:8]]})
    assert stopped.response == whole.response[: whole.response.index(whole.response[4:8])], (stopped, whole)


def forms():
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"], "additionalProperties": False}
    answer = client.chat(model=model, messages=USER, format=schema, options={"temperature": 0, "num_predict": 40})
    assert json.loads(answer.message.content)["colour"] in ("red", "blue"), answer


def errors():
    for act, word in (
        (lambda: client.embed(model=model, input="the sea"), "vectors"),
        (lambda: client.chat(model=model, messages=USER, options={"temperature": -1}), "temperature"),
    ):
        try:
            act()
        except ollama.ResponseError as error:
            assert word in error.error and error.status_code == 400, error
        else:
            raise AssertionError(f"no error about {word}")


for step in (models, chats, texts, forms, errors):
    step()
print("all of it works")
