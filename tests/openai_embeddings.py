"""Asks a running `anec serve` for vectors with the official `openai` client: python openai_embeddings.py http://HOST:PORT/v1 MODEL"""

import math
import sys

import openai

base_url, model = sys.argv[1:3]
client = openai.OpenAI(base_url=base_url, api_key="any", max_retries=0, timeout=300)


def vectors(texts, **more):
    answer = client.embeddings.create(model=model, input=texts, **more)
    assert answer.model == model and answer.usage.prompt_tokens == answer.usage.total_tokens > 0
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return [item.embedding for item in answer.data]


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


[one] = vectors("the sea")
assert abs(sum(value * value for value in one) - 1) < 1e-5, "divided by its length"
both = vectors(["the sea", "is singing"], encoding_format="float")
# the client asks for base64 where nothing is said, and decodes it
assert both[0] == one and len(both) == 2 and cosine(*both) < 0.999
assert vectors([["the", "sea"][0], "the sea"])[1] == one
# the end of a text that is too long is cut off
assert vectors("word " * 5000) == vectors("word " * 6000)
tokens = vectors([5, 6, 7])
assert len(tokens) == 1 and vectors([[5, 6, 7], [8]])[0] == tokens[0]
for wrong in ([], "", ["a", ""], [10**6]):
    try:
        refused = None if wrong == "" or wrong == ["a", ""] else vectors(wrong)
    except openai.BadRequestError as error:
        assert error.type == "invalid_request_error", error
    else:
        assert refused is None, wrong
for path in (client.chat.completions, client.completions):
    try:
        more = {"messages": [{"role": "user", "content": "a"}]} if path is client.chat.completions else {"prompt": "a"}
        path.create(model=model, **more)
    except openai.BadRequestError as error:
        assert "vectors" in str(error), error
    else:
        raise AssertionError("a text was continued")
print("all of it works")
