"""Drives a running `anec serve` with the official `openai` client: python openai_client.py http://HOST:PORT/v1 MODEL

Every check compares with another way to the same text, or with what the API promises. The model may be any.
"""

import json
import math
import sys
import threading

import openai

base_url, model = sys.argv[1:3]
client = openai.OpenAI(base_url=base_url, api_key="any", max_retries=0, timeout=300)
USER = [{"role": "user", "content": "Count from one to ten, in words."}]


def greedy(**more):
    return client.chat.completions.create(model=model, messages=USER, **{"temperature": 0, "max_tokens": 24, **more})


def models():
    listed = client.models.list().data
    assert [m.id for m in listed] == [model], listed
    assert client.models.retrieve(model).object == "model"


def whole_and_streamed():
    whole = greedy()
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens <= 24 and whole.choices[0].finish_reason in ("stop", "length")
    chunks = list(greedy(stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len(chunks) > 3, "it comes in parts"


def stop():
    text = greedy().choices[0].message.content
    word = text.split()[2]
    stopped = greedy(stop=[word, "\u0001never"]).choices[0]
    assert stopped.message.content == text[: text.index(word)], (stopped, text)
    assert stopped.finish_reason == "stop"


def logprobs():
    choice = greedy(logprobs=True, top_logprobs=4).choices[0]
    content = choice.logprobs.content
    assert b"".join(bytes(t.bytes) for t in content).decode() == choice.message.content
    for token in content:
        assert token.token == token.top_logprobs[0].token and len(token.top_logprobs) == 4
        assert sum(math.exp(t.logprob) for t in token.top_logprobs) <= 1 + 1e-6
    legacy = client.completions.create(model=model, prompt="The", max_tokens=5, temperature=0, logprobs=3).choices[0]
    assert "".join(legacy.logprobs.tokens) == legacy.text and legacy.logprobs.text_offset[0] == 0


def several():
    def ask(seed):
        made = client.chat.completions.create(model=model, messages=USER, n=3, seed=seed, temperature=1.2, max_tokens=16)
        assert [c.index for c in made.choices] == [0, 1, 2]
        return [c.message.content for c in made.choices]

    assert ask(1) == ask(1) and len(set(ask(1))) > 1


def json_schema():
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 30}, "people": {"type": "integer", "minimum": 0, "maximum": 9999}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    made = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name a city and how many thousand people live there, as JSON."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
        max_tokens=200,
        temperature=0.5,
        seed=3,
    )
    value = json.loads(made.choices[0].message.content)
    assert set(value) == {"city", "people"} and isinstance(value["people"], int), value
    made = client.chat.completions.create(
        model=model, messages=USER, response_format={"type": "json_object"}, max_tokens=250, seed=1, logit_bias={}
    )
    if made.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(made.choices[0].message.content), dict)


def tools():
    city = {"type": "string", "maxLength": 30}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    weather = {"type": "function", "function": {"name": "weather", "description": "Tomorrow's weather.", "parameters": parameters}}
    messages = [{"role": "user", "content": "What will the weather be in Paris?"}]
    asked = dict(model=model, messages=messages, tools=[weather], max_tokens=100, temperature=0)
    choice = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city"}, call
    parts = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False, stream=True)
    first, *rest = [c for part in parts for c in part.choices[0].delta.tool_calls or []]
    assert first.function.name == "weather" and first.id and not first.function.arguments and first.index == 0
    assert len(rest) > 2 and all(c.index == 0 and c.id is None for c in rest), rest
    assert json.loads("".join(c.function.arguments for c in rest)) == json.loads(call.function.arguments)
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}]
    said = client.chat.completions.create(**asked).choices[0].message
    assert said.content or said.tool_calls
    print("   ", call.function.arguments, "->", repr(said.content), flush=True)


def responses():
    city = {"type": "string", "maxLength": 30}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"], "additionalProperties": False}
    weather = {"type": "function", "name": "weather", "parameters": parameters, "strict": True}
    asked = dict(model=model, input="What will the weather be in Paris?", tools=[weather], tool_choice="required")
    with client.responses.stream(**asked, max_output_tokens=100, temperature=0, parallel_tool_calls=False) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (call,) = stream.get_final_response().output
    assert len(pieces) > 2 and "".join(pieces) == call.arguments, pieces
    assert call.name == "weather" and json.loads(call.arguments).keys() == {"city"}, call


def parallel():
    expected = greedy().choices[0].message.content
    found = []
    threads = [threading.Thread(target=lambda: found.append(greedy().choices[0].message.content)) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == [expected] * 8, found


def cancellation():
    stream = greedy(stream=True, max_tokens=300, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert greedy(max_tokens=2).usage.completion_tokens <= 2, "the server is free again"


def errors():
    for error, call in [
        (openai.NotFoundError, lambda: client.models.retrieve("no such model")),
        (openai.BadRequestError, lambda: greedy(temperature=-3)),
        (openai.BadRequestError, lambda: client.chat.completions.create(model=model, messages=[])),
        (openai.BadRequestError, lambda: greedy(max_tokens=-5)),
    ]:
        try:
            call()
        except error as e:
            assert e.body["message"] and e.body["type"] == "invalid_request_error", e.body
        else:
            raise AssertionError(f"no {error.__name__}")


for check in [models, whole_and_streamed, stop, logprobs, several, json_schema, tools, responses, parallel, cancellation, errors]:
    check()
    print("ok", check.__name__, flush=True)
print("all of it works")
