"""Drives a running `anec serve` with the official `anthropic` client: python anthropic_client.py http://HOST:PORT/v1 MODEL"""

import sys

import anthropic

base_url, model = sys.argv[1:3]
client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="any", max_retries=0, timeout=300)
USER = [{"role": "user", "content": "Why is the sky blue?"}]


# the client has no parameter for it any more
GREEDY = {"temperature": 0}


def greedy(**more):
    return client.messages.create(**{"model": model, "messages": USER, "max_tokens": 16, "extra_body": GREEDY, **more})


def messages():
    whole = greedy()
    assert whole.type == "message" and whole.role == "assistant" and whole.content[0].type == "text", whole
    assert whole.stop_reason in ("end_turn", "max_tokens") and 0 < whole.usage.output_tokens <= 16, whole
    with client.messages.stream(model=model, messages=USER, max_tokens=16, extra_body=GREEDY) as stream:
        pieces = list(stream.text_stream)
        last = stream.get_final_message()
    assert len(pieces) > 3 and "".join(pieces) == whole.content[0].text, pieces
    assert last.content[0].text == whole.content[0].text and last.usage.output_tokens == whole.usage.output_tokens, last
    kinds = [event.type for event in greedy(stream=True)]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], kinds
    word = whole.content[0].text.split()[2]
    stopped = greedy(stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word), stopped


def counts():
    count = client.messages.count_tokens(model=model, messages=USER).input_tokens
    usage = greedy().usage
    # of a prompt that the server knows, the known part counts apart
    assert count == usage.input_tokens + (usage.cache_read_input_tokens or 0), usage
    assert client.messages.count_tokens(model=model, messages=USER, system="Be brief.").input_tokens > count


def tools():
    schema = {"type": "object", "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["days"], "additionalProperties": False}
    tides = {"name": "tides", "description": "", "input_schema": schema}
    asked = dict(model=model, messages=USER, max_tokens=100, tools=[tides], tool_choice={"type": "tool", "name": "tides"})
    with client.messages.stream(**asked, extra_body=GREEDY) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        last = stream.get_final_message()
    (call,) = last.content
    assert len(pieces) > 2 and last.stop_reason == "tool_use", pieces
    assert call.name == "tides" and call.input.keys() == {"days"}, call


def models():
    assert [entry.id for entry in client.models.list()] == [model]


def errors():
    for more, word in (({"max_tokens": 0}, "max_tokens"), ({"extra_body": {"temperature": -1}}, "temperature"), ({"messages": []}, "messages")):
        try:
            greedy(**more)
        except anthropic.BadRequestError as error:
            assert word in str(error) and error.body["error"]["type"] == "invalid_request_error", error
        else:
            raise AssertionError(f"no error about {word}")


for step in (messages, counts, tools, models, errors):
    step()
print("all of it works")
