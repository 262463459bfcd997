"""Examples of the README and helpers of openai-python, for clients.py."""

from clients import LENGTH, TEXT, TOO_LONG, USER, CONTEXT, WORDS, collect, raises, refused, schemas


def examples(check):
    """Runs all of them."""
    import openai

    options = {"base_url": check.api, "api_key": "any", "max_retries": 0}
    client, later = openai.OpenAI(**options), openai.AsyncOpenAI(**options)
    Person, _, Weather = schemas()
    asked = {"model": "demo", "messages": USER, "temperature": 0}
    short, long = {**asked, "max_tokens": LENGTH}, {**asked, "max_tokens": 120}
    given = {"model": "demo", "input": TEXT, "temperature": 0, "max_output_tokens": LENGTH}
    function = openai.pydantic_function_tool(Weather, name="weather")

    def whole(answer):
        check.is_text(answer.choices[0].message.content)
        check.is_usage(answer.usage.prompt_tokens, answer.usage.completion_tokens)
        assert answer.choices[0].finish_reason == "length", answer

    @check("responses.create")
    def _():
        answer = client.responses.create(**given)
        check.is_text(answer.output_text)
        assert answer.incomplete_details.reason == "max_output_tokens", answer

    @check("responses.create, streamed")
    def _():
        events = list(client.responses.create(**given, stream=True))
        check.is_text("".join(event.delta for event in events if event.type == "response.output_text.delta"))
        assert events[0].type == "response.created" and events[-1].type == "response.incomplete", events[-1]

    @check("responses.stream")
    def _():
        with client.responses.stream(**given) as stream:
            check.is_text("".join(event.delta for event in stream if event.type == "response.output_text.delta"))

    @check("responses.parse")
    def _():
        answer = client.responses.parse(**{**given, "max_output_tokens": 120}, text_format=Person)
        assert isinstance(answer.output_parsed, Person), answer

    @check("previous_response_id")
    def _():
        first = client.responses.create(**given)
        assert client.responses.create(**{**given, "input": "And?"}, previous_response_id=first.id).output_text

    @check("responses.retrieve, delete")
    def _():
        first = client.responses.create(**given)
        check.is_text(client.responses.retrieve(first.id).output_text)
        client.responses.delete(first.id)
        raises(openai.NotFoundError, lambda: client.responses.retrieve(first.id), first.id)

    @check("chat.completions.create")
    def _():
        whole(client.chat.completions.create(**short))

    @check("chat.completions.create, streamed")
    def _():
        chunks = list(client.chat.completions.create(**short, stream=True))
        check.is_text("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))

    @check("chat.completions.stream")
    def _():
        with client.chat.completions.stream(**short) as stream:
            check.is_text("".join(event.delta for event in stream if event.type == "content.delta"))
            check.is_text(stream.current_completion_snapshot.choices[0].message.content)

    @check("chat.completions.parse")
    def _():
        answer = client.chat.completions.parse(**long, response_format=Person)
        assert isinstance(answer.choices[0].message.parsed, Person), answer

    @check("pydantic_function_tool")
    def _():
        answer = client.chat.completions.parse(**long, tools=[function], tool_choice="required")
        [call] = answer.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Weather), answer

    @check("AsyncOpenAI")
    async def _():
        whole(await later.chat.completions.create(**short))
        chunks = await collect(await later.chat.completions.create(**short, stream=True))
        check.is_text("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))

    @check("logprobs")
    def _():
        choice = client.chat.completions.create(**short, logprobs=True, top_logprobs=2).choices[0]
        check.is_text("".join(entry.token for entry in choice.logprobs.content))

    @check("n, seed")
    def _():
        several = {**short, "temperature": 1, "seed": 3, "n": 2}
        ask = lambda: [choice.message.content for choice in client.chat.completions.create(**several).choices]  # noqa: E731
        first, again = ask(), ask()
        assert first == again and first[0] != first[1], (first, again)

    @check("completions.create")
    def _():
        plain = {"model": "demo", "prompt": TEXT, "max_tokens": LENGTH, "temperature": 0}
        assert client.completions.create(**plain).choices[0].text == check.plain
        assert "".join(c.choices[0].text for c in client.completions.create(**plain, stream=True)) == check.plain

    @check("embeddings.create")
    def _():
        vectors = openai.OpenAI(**{**options, "base_url": check.vectors_api})
        found = vectors.embeddings.create(model="vectors", input=WORDS).data
        check.are_vectors([entry.embedding for entry in found])

    @check("models.list, retrieve")
    def _():
        [model] = list(client.models.list())
        assert client.models.retrieve(model.id).id == model.id

    @check("with_raw_response, with_streaming_response")
    def _():
        raw = client.chat.completions.with_raw_response.create(**short)
        whole(raw.parse())
        assert raw.headers["content-type"].startswith("application/json"), raw.headers
        with client.chat.completions.with_streaming_response.create(**short) as answer:
            assert "choices" in "".join(answer.iter_text())

    @check("extra_body, extra_headers")
    def _():
        whole(client.chat.completions.create(**short, extra_body={"top_k": 5}, extra_headers={"X-Any": "1"}))

    @check("errors")
    def _():
        create = client.chat.completions.create
        raises(openai.BadRequestError, lambda: create(**{**short, "temperature": "hot"}), "temperature")
        raises(openai.BadRequestError, lambda: create(**{**short, "messages": [{"role": "user", "content": TOO_LONG}]}), str(CONTEXT))
        shut = openai.OpenAI(**{**options, "base_url": check.closed_api})
        raises(openai.AuthenticationError, lambda: shut.models.list(), "")

    @check("image_url")
    def _():
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        messages = [{"role": "user", "content": [{"type": "text", "text": TEXT}, image]}]
        refused(openai.BadRequestError, lambda: client.chat.completions.create(**{**short, "messages": messages}), "image")

    for name, act in (
        ("files", lambda: client.files.list()),
        ("images.generate", lambda: client.images.generate(prompt=TEXT)),
        ("audio.speech", lambda: client.audio.speech.create(model="demo", voice="alloy", input=TEXT)),
        ("moderations", lambda: client.moderations.create(input=TEXT)),
        ("batches", lambda: client.batches.list()),
        ("fine_tuning", lambda: client.fine_tuning.jobs.list()),
        ("vector_stores", lambda: client.vector_stores.list()),
    ):
        @check(name)
        def _(act=act):
            refused(openai.NotFoundError, act, "")
