"""Runs the first examples of clients' documentation against `anec serve` and prints a line for each.

ok: the client's result is right. refused: the client raises its own error, and the server's message in it names what
isn't supported. not applicable: the request is answered, but a small model's text isn't what the example needs.
failed: the rest.

The text of a client has to equal the text of a plain HTTP request, whole and streamed. The models are the built-in
demo, with a chat template that has a place for tools, and a fixture that gives vectors. The demo's texts are
meaningless and don't end, so schemas limit the lengths of texts, and fields beyond a schema are forbidden, or unlikely
by a bias of the logits.

    pip install openai litellm langchain-openai langchain-anthropic langchain-ollama llama-index-llms-openai-like \\
        llama-index-embeddings-openai-like instructor dspy smolagents      (a client that isn't installed is left out)
    cargo build --release
    python tests/oracle/clients.py target/release/anec FOLDER [CLIENT...]

FOLDER takes the bundles and the servers' logs. Exit code: 0 if no example failed, 1 otherwise.
"""

import argparse
import asyncio
import collections
import contextlib
import importlib.metadata
import inspect
import io
import json
import logging
import math
import os
import re
import shutil
import subprocess
import sys
import time
import traceback
import urllib.request
import warnings
from pathlib import Path
from typing import Iterable, Literal

REPOSITORY = Path(__file__).parents[2]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{# <tool_call> #}"
    "{% for m in messages %}<{{ m.role }}> {{ m.content or m.tool_calls | tojson }}\n{% endfor %}<assistant>"
)
# prompts of agents are longer than the demo's 512 tokens
CONTEXT = 4096
TEXT = "It was a fine morning"
USER = [{"role": "user", "content": TEXT}]
TOO_LONG = "sea " * 9000
LENGTH = 16
KEY = "secret"
WORDS = ["the sea", "is singing"]

# no network beside the servers, no telemetry
os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True", LANGSMITH_TRACING="false", ANONYMIZED_TELEMETRY="False", DO_NOT_TRACK="1",
    NO_PROXY="127.0.0.1", OPENAI_API_KEY="any", ANTHROPIC_API_KEY="any",
)


def build(anec, folder):
    """Converts the two models."""
    source = folder / "demo"
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(REPOSITORY / "demo/model", source)
    for name, key, value in (
        ("tokenizer_config.json", "chat_template", TEMPLATE), ("config.json", "max_position_embeddings", CONTEXT),
    ):
        config = json.loads((source / name).read_text())
        (source / name).write_text(json.dumps({**config, key: value}))
    encoder = REPOSITORY / "tests/fixtures/encoders/bert-mean"
    convert = [anec, "convert", "--no-compile", "--no-measure", "--force"]
    for more in (
        ["-m", "demo", "--source", source, "--set", f"context={CONTEXT}", "--out", folder / "demo.anec"],
        [encoder, "--out", folder / "vectors.anec"],
    ):
        subprocess.run(convert + more, check=True, capture_output=True)


@contextlib.contextmanager
def serve(anec, bundle, log, *options):
    """Starts a server on a free port; f32, because then a prompt that continues a kept state has the same logits."""
    command = [anec, "serve", bundle, "--port", "0", "--precision", "f32", *options]
    with log.open("w") as written:
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=written)
    try:
        while not (address := re.search(r"http://[\w.:]+$", log.read_text(), re.M)):
            assert server.poll() is None, log.read_text()
            time.sleep(0.05)
        yield address[0]
    finally:
        server.terminate()
        server.wait()


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


class Refused(Exception):
    """Expected error of the server; its message names what isn't supported."""


class NotApplicable(Exception):
    """Example whose result depends on what the model knows."""


VERDICTS = ("ok", "refused", "not applicable", "failed")


class Checks:
    """Addresses of the servers, reference answers, and verdicts of a client's examples."""

    def __init__(self, root, closed, vectors):
        self.root, self.closed, self.vectors = root, closed, vectors
        self.api, self.closed_api, self.vectors_api = (f"{url}/v1" for url in (root, closed, vectors))
        self.loop = asyncio.new_event_loop()
        self.client, self.rows = None, []
        greedy = {"temperature": 0, "max_tokens": LENGTH}
        answer = post(f"{self.api}/chat/completions", {"messages": USER, **greedy})
        self.text, self.usage = answer["choices"][0]["message"]["content"], answer["usage"]
        assert answer["choices"][0]["finish_reason"] == "length"
        self.plain = post(f"{self.api}/completions", {"prompt": TEXT, **greedy})["choices"][0]["text"]
        embedded = post(f"{self.vectors_api}/embeddings", {"input": WORDS})["data"]
        self.vector = [entry["embedding"] for entry in embedded]
        # a text, a JSON object and an answer end as soon as they may
        marks = [post(f"{root}/tokenize", {"content": mark})["tokens"] for mark in ('"', "}", "<|endoftext|>")]
        self.bias = {str(token): bias for [token], bias in zip(marks, (100, 50, 30))}

    def __call__(self, name):
        """Decorator that runs an example at once."""
        def run(example):
            verdict, reason = "ok", ""
            output = io.StringIO()
            try:
                with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                    result = example()
                    if inspect.isawaitable(result):
                        self.loop.run_until_complete(result)
            except Refused as refusal:
                verdict, reason = "refused", str(refusal)
            except NotApplicable as cause:
                verdict, reason = "not applicable", str(cause)
            except Exception as error:
                verdict, reason = "failed", f"line {own_line(error)}: {type(error).__name__}: {error}"
            self.rows.append((self.client, name, verdict, reason))
            because = f": {' '.join(reason.split())[:300]}" if reason else ""
            print(f"{verdict}: {self.client}: {name}{because}", flush=True)
        return run

    def is_text(self, text):
        assert text == self.text, f"{text!r} instead of {self.text!r}"

    def is_usage(self, prompt, completion):
        assert (prompt, completion) == (self.usage["prompt_tokens"], LENGTH), (prompt, completion)

    def are_vectors(self, vectors):
        for found, expected in zip(vectors, self.vector, strict=True):
            assert len(found) == len(expected) and math.dist(found, expected) < 1e-5, (found, expected)


def own_line(error):
    """Last line of this file in an error's traceback."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == __file__]
    return lines[-1] if lines else 0


def raises(kind, act, *words):
    """Checks that an error is of a client's type, and has the server's words."""
    try:
        act()
    except kind as error:
        text = str(error)
        assert all(word in text for word in words), text
        return error
    raise AssertionError(f"no {kind.__name__}")


def refused(kind, act, words):
    """Checks an error as `raises` does; the example is refused."""
    raises(kind, act, words)
    raise Refused(words)


def total(parts):
    """Sum of the parts of a LangChain stream; there have to be several."""
    parts = list(parts)
    assert len(parts) > 3, "it comes in parts"
    whole = parts[0]
    for part in parts[1:]:
        whole += part
    return whole


async def collect(parts):
    return [part async for part in parts]


def schemas():
    """Types of structured answers and arguments."""
    from pydantic import BaseModel, ConfigDict, Field

    class Person(BaseModel):
        """A person."""
        model_config = ConfigDict(extra="forbid")
        name: str = Field(max_length=12)
        age: int = Field(ge=0, le=120)

    class Label(BaseModel):
        """Kind of a message."""
        model_config = ConfigDict(extra="forbid")
        label: Literal["spam", "ham"]

    class Weather(BaseModel):
        """Get the weather in a city."""
        model_config = ConfigDict(extra="forbid")
        city: str = Field(max_length=12)

    return Person, Label, Weather


def litellm(check):
    import litellm
    from litellm import exceptions

    litellm.suppress_debug_info = True
    Person, _, Weather = schemas()
    asked = {"model": "openai/demo", "api_base": check.api, "api_key": "any", "messages": USER, "temperature": 0,
             "num_retries": 0}
    short, long = {**asked, "max_tokens": LENGTH}, {**asked, "max_tokens": 120}
    anthropic = {"model": "anthropic/demo", "api_base": check.root}
    ollama = {"model": "ollama_chat/demo", "api_base": check.root}
    function = {"name": "weather", "description": "Get the weather.", "parameters": Weather.model_json_schema()}
    tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}

    def whole(answer, finish="length"):
        check.is_text(answer.choices[0].message.content)
        check.is_usage(answer.usage.prompt_tokens, answer.usage.completion_tokens)
        assert answer.choices[0].finish_reason == finish, answer

    def streamed(parts):
        parts = list(parts)
        assert len(parts) > 3 and [p.choices[0].finish_reason for p in parts if p.choices][-1] == "length", parts
        whole(litellm.stream_chunk_builder(parts, messages=USER))

    def called(answer):
        [call] = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls" and call.function.name == "weather", answer
        Weather.model_validate_json(call.function.arguments)
        return answer.choices[0].message

    @check("completion")
    def _():
        whole(litellm.completion(**short))

    @check("completion, streamed")
    def _():
        streamed(litellm.completion(**short, stream=True, stream_options={"include_usage": True}))

    @check("acompletion")
    async def _():
        whole(await litellm.acompletion(**short))
        streamed(await collect(await litellm.acompletion(**short, stream=True, stream_options={"include_usage": True})))

    @check("text_completion")
    def _():
        plain = {"model": "text-completion-openai/demo", "prompt": TEXT, "api_base": check.api, "api_key": "any",
                 "max_tokens": LENGTH, "temperature": 0}
        assert litellm.text_completion(**plain).choices[0].text == check.plain
        parts = litellm.text_completion(**plain, stream=True)
        assert "".join(part.choices[0].text or "" for part in parts) == check.plain

    @check("responses")
    def _():
        request = {"model": "openai/demo", "input": TEXT, "api_base": check.api, "api_key": "any",
                   "max_output_tokens": LENGTH, "temperature": 0}
        answer = litellm.responses(**request)
        check.is_text(answer.output[0].content[0].text)
        assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens", answer
        events = list(litellm.responses(**request, stream=True))
        check.is_text("".join(event.delta for event in events if event.type == "response.output_text.delta"))

    @check("response_format of a Pydantic model")
    def _():
        answer = litellm.completion(**long, response_format=Person)
        assert answer.choices[0].finish_reason == "stop"
        Person.model_validate_json(answer.choices[0].message.content)

    @check("tools, and the next answer")
    def _():
        message = called(litellm.completion(**long, **tools))
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "name": "weather", "content": "Sunny."}
        again = {**short, "messages": [*USER, message, result]}
        assert litellm.completion(**again, tools=tools["tools"]).choices[0].message.content
        parts = list(litellm.completion(**long, **tools, stream=True))
        called(litellm.stream_chunk_builder(parts, messages=USER))

    @check("Router")
    def _():
        options = {key: value for key, value in short.items() if key != "messages"}
        router = litellm.Router([{"model_name": "gpt", "litellm_params": options}])
        whole(router.completion(model="gpt", messages=USER))

    @check("embedding, aembedding")
    async def _():
        request = {"model": "openai/vectors", "input": WORDS, "api_base": check.vectors_api, "api_key": "any"}
        check.are_vectors([entry["embedding"] for entry in litellm.embedding(**request).data])
        answer = await litellm.aembedding(**request)
        check.are_vectors([entry["embedding"] for entry in answer.data])
        assert answer.usage.prompt_tokens > 0

    @check("provider anthropic")
    def _():
        whole(litellm.completion(**{**short, **anthropic}))
        streamed(litellm.completion(**{**short, **anthropic}, stream=True, stream_options={"include_usage": True}))
        called(litellm.completion(**{**long, **anthropic}, **tools))

    @check("provider ollama_chat")
    def _():
        whole(litellm.completion(**{**short, **ollama}))
        streamed(litellm.completion(**{**short, **ollama}, stream=True, stream_options={"include_usage": True}))
        answer = litellm.completion(**{**long, **ollama}, response_format=Person)
        Person.model_validate_json(answer.choices[0].message.content)

    @check("errors")
    def _():
        def ask(**more):
            return litellm.completion(**{**short, **more})

        for more in ({}, anthropic):
            raises(exceptions.BadRequestError, lambda: ask(**more, temperature=-1), "temperature")
        closed = {"api_base": check.closed_api}
        raises(exceptions.AuthenticationError, lambda: ask(**closed), "API key")
        raises(exceptions.NotFoundError, lambda: ask(**closed, api_key=KEY, model="openai/x"), "`x`")

    @check("ContextWindowExceededError")
    def _():
        messages = [{"role": "user", "content": TOO_LONG}]
        for more in ({}, anthropic):
            act = lambda: litellm.completion(**{**short, **more, "messages": messages})  # noqa: E731
            raises(exceptions.ContextWindowExceededError, act, str(CONTEXT))


def langchain(check, model, forced):
    """Examples that LangChain's chat models share. `model` makes one of a number of tokens; `forced` forces a call."""
    from langchain_core.messages import HumanMessage
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.tools import tool

    Person, Label, Weather = schemas()
    short, long = model(LENGTH), model(120)

    @tool(args_schema=Weather)
    def weather(city: str) -> str:
        """Get the weather in a city."""
        return f"Sunny in {city}."

    def whole(message):
        check.is_text(message.content if isinstance(message.content, str) else message.text)
        check.is_usage(message.usage_metadata["input_tokens"], message.usage_metadata["output_tokens"])
        about = message.response_metadata
        reason = about.get("finish_reason") or about.get("stop_reason") or about.get("done_reason")
        assert reason in ("length", "max_tokens"), about

    @check("invoke")
    def _():
        whole(short.invoke(TEXT))
        # langchain-ollama puts a line break before each block
        if forced:
            whole(short.invoke([HumanMessage([{"type": "text", "text": TEXT}])]))

    @check("stream")
    def _():
        whole(total(short.stream(TEXT)))

    @check("ainvoke, astream")
    async def _():
        whole(await short.ainvoke(TEXT))
        whole(total(await collect(short.astream(TEXT))))

    @check("batch, chain")
    def _():
        for message in short.batch([TEXT] * 4):
            whole(message)
        chain = ChatPromptTemplate.from_messages([("human", "{text}")]) | short | StrOutputParser()
        check.is_text(chain.invoke({"text": TEXT}))

    if forced:
        @check("bind_tools, and the next answer")
        def _():
            bound = long.bind_tools([weather], **forced)
            message = bound.invoke(TEXT)
            [call] = message.tool_calls
            assert call["name"] == "weather" and not message.invalid_tool_calls, message
            result = weather.invoke(call)
            assert result.content.startswith("Sunny in "), result
            answer = short.bind_tools([weather]).invoke([HumanMessage(TEXT), message, result])
            assert answer.content or answer.tool_calls, answer
            assert total(bound.stream(TEXT)).tool_calls[0]["args"] == call["args"]

    return short, long, Person, Label


def langchain_openai(check):
    import openai
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    options = {"model": "demo", "base_url": check.api, "api_key": "any", "temperature": 0, "max_retries": 0}

    def model(tokens, **more):
        return ChatOpenAI(**{**options, "max_tokens": tokens, "stream_usage": True, **more})

    short, long, Person, _ = langchain(check, model, {"tool_choice": "any", "strict": True})

    @check("with_structured_output")
    def _():
        for method in ("json_schema", "function_calling"):
            assert isinstance(long.with_structured_output(Person, method=method).invoke(TEXT), Person)
        assert isinstance(list(long.with_structured_output(Person).stream(TEXT))[-1], Person)

    @check("logprobs")
    def _():
        content = short.bind(logprobs=True, top_logprobs=2).invoke(TEXT).response_metadata["logprobs"]["content"]
        check.is_text("".join(entry["token"] for entry in content))

    @check("Responses API")
    def _():
        responses = model(LENGTH, use_responses_api=True)
        message = responses.invoke(TEXT)
        check.is_text(message.text)
        check.is_text(total(responses.stream(TEXT)).text)
        assert responses.invoke("And?", previous_response_id=message.response_metadata["id"]).text
        assert isinstance(model(120, use_responses_api=True).with_structured_output(Person).invoke(TEXT), Person)

    @check("OpenAI (completions)")
    async def _():
        plain = OpenAI(**{**options, "max_tokens": LENGTH})
        assert plain.invoke(TEXT) == check.plain and "".join(plain.stream(TEXT)) == check.plain
        assert await plain.ainvoke(TEXT) == check.plain

    @check("OpenAIEmbeddings")
    async def _():
        # with its check of lengths it sends tokens of OpenAI's vocabulary
        options = {"base_url": check.vectors_api, "api_key": "any", "check_embedding_ctx_length": False}
        vectors = OpenAIEmbeddings(model="vectors", **options)
        check.are_vectors(vectors.embed_documents(WORDS))
        check.are_vectors([vectors.embed_query(WORDS[0]), await vectors.aembed_query(WORDS[1])])

    @check("errors")
    def _():
        raises(openai.BadRequestError, lambda: model(LENGTH, temperature=-1).invoke(TEXT), "temperature")
        raises(ContextOverflowError, lambda: short.invoke(TOO_LONG), str(CONTEXT))
        closed = {"base_url": check.closed_api}
        raises(openai.AuthenticationError, lambda: model(LENGTH, **closed).invoke(TEXT), "API key")
        raises(openai.NotFoundError, lambda: model(LENGTH, **closed, api_key=KEY, model="x").invoke(TEXT), "`x`")

    @check("image")
    def _():
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
        message = HumanMessage([{"type": "text", "text": TEXT}, image])
        refused(openai.BadRequestError, lambda: short.invoke([message]), "only text is understood")


def langchain_anthropic(check):
    import anthropic
    from langchain_anthropic import ChatAnthropic
    from langchain_core.exceptions import ContextOverflowError
    from langchain_core.messages import HumanMessage

    def model(tokens, **more):
        options = {"model": "demo", "base_url": check.root, "api_key": "any", "temperature": 0, "max_retries": 0}
        return ChatAnthropic(**{**options, "max_tokens": tokens, **more})

    short, long, Person, Label = langchain(check, model, {"tool_choice": "any", "strict": True})

    @check("with_structured_output")
    def _():
        assert isinstance(long.with_structured_output(Person, method="function_calling").invoke(TEXT), Person)
        # the client takes lengths out of schemas
        assert isinstance(long.with_structured_output(Label, method="json_schema").invoke(TEXT), Label)

    @check("get_num_tokens_from_messages")
    def _():
        assert short.get_num_tokens_from_messages([HumanMessage(TEXT)]) == check.usage["prompt_tokens"]

    @check("errors")
    def _():
        raises(anthropic.BadRequestError, lambda: model(LENGTH, temperature=-1).invoke(TEXT), "temperature")
        raises(anthropic.AuthenticationError, lambda: model(LENGTH, base_url=check.closed).invoke(TEXT), "API key")
        closed = {"base_url": check.closed, "api_key": KEY, "model": "x"}
        raises(anthropic.NotFoundError, lambda: model(LENGTH, **closed).invoke(TEXT), "`x`")

    @check("ContextOverflowError")
    def _():
        raises(ContextOverflowError, lambda: short.invoke(TOO_LONG), str(CONTEXT))

    @check("thinking")
    def _():
        thinking = ChatAnthropic(model="demo", base_url=check.root, api_key="any", max_tokens=2000,
                                 thinking={"type": "enabled", "budget_tokens": 1024})
        refused(anthropic.BadRequestError, lambda: thinking.invoke(TEXT), "this model doesn't think")

    @check("tool of Anthropic's servers")
    def _():
        search = short.bind_tools([{"type": "web_search_20250305", "name": "web_search"}])
        refused(anthropic.BadRequestError, lambda: search.invoke(TEXT), "only custom tools are supported")


def langchain_ollama(check):
    import ollama
    from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM

    def model(tokens, **more):
        options = {"model": "demo", "base_url": check.root, "temperature": 0, "num_predict": tokens}
        return ChatOllama(**{**options, "validate_model_on_init": True, **more})

    # Ollama's API has no choice of tools
    short, long, Person, _ = langchain(check, model, None)

    @check("bind_tools, without a call")
    def _():
        def weather(city: str) -> str:
            """Get the weather in a city."""

        message = long.bind_tools([weather]).invoke(TEXT)
        assert message.content or message.tool_calls, message

    @check("with_structured_output")
    def _():
        assert isinstance(long.with_structured_output(Person).invoke(TEXT), Person)
        assert long.with_structured_output(Person, method="json_mode", include_raw=True).invoke(TEXT)["raw"].content

    @check("options")
    def _():
        options = {"num_ctx": 2048, "keep_alive": "5m", "seed": 1, "top_k": 3, "top_p": 0.9, "repeat_penalty": 1.1}
        assert model(LENGTH, stop=["."], **options).invoke(TEXT).content

    @check("OllamaLLM")
    async def _():
        plain = OllamaLLM(model="demo", base_url=check.root, temperature=0, num_predict=LENGTH)
        check.is_text(plain.invoke(TEXT))
        check.is_text("".join(plain.stream(TEXT)))
        check.is_text(await plain.ainvoke(TEXT))

    @check("OllamaEmbeddings")
    async def _():
        vectors = OllamaEmbeddings(model="vectors", base_url=check.vectors)
        check.are_vectors(vectors.embed_documents(WORDS))
        check.are_vectors([vectors.embed_query(WORDS[0]), (await vectors.aembed_documents(WORDS))[1]])

    @check("errors")
    def _():
        raises(ollama.ResponseError, lambda: model(LENGTH, temperature=-1).invoke(TEXT), "temperature", "400")
        raises(ollama.ResponseError, lambda: short.invoke(TOO_LONG), str(CONTEXT), "400")
        raises(ValueError, lambda: model(LENGTH, model="x"), "`x` not found")
        closed = {"base_url": check.closed, "validate_model_on_init": False}
        raises(ollama.ResponseError, lambda: model(LENGTH, **closed).invoke(TEXT), "API key", "401")
        closed["client_kwargs"] = {"headers": {"Authorization": f"Bearer {KEY}"}}
        check.is_text(model(LENGTH, **closed).invoke(TEXT).content)
        raises(ollama.ResponseError, lambda: model(LENGTH, **closed, model="x").invoke(TEXT), "`x`", "404")

    @check("reasoning")
    def _():
        refused(ollama.ResponseError, lambda: model(LENGTH, reasoning=True).invoke(TEXT), "this model doesn't think")


def llama_index(check):
    import openai
    from llama_index.core import Document, VectorStoreIndex
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.llms import ChatMessage
    from llama_index.core.prompts import PromptTemplate
    from llama_index.core.tools import FunctionTool
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    Person, _, Weather = schemas()

    def model(tokens, **more):
        options = {"model": "demo", "api_base": check.api, "api_key": "any", "temperature": 0, "max_retries": 0}
        form = {"is_chat_model": True, "is_function_calling_model": True, "context_window": CONTEXT}
        return OpenAILike(**{**options, **form, "max_tokens": tokens, **more})

    def weather(city: str) -> str:
        """Get the weather in a city."""
        return f"Sunny in {city}."

    short, long = model(LENGTH), model(120)
    messages = [ChatMessage(role="user", content=TEXT)]
    tool = FunctionTool.from_defaults(weather, fn_schema=Weather)
    vectors = OpenAILikeEmbedding(model_name="vectors", api_base=check.vectors_api, api_key="any")

    @check("complete, stream_complete")
    def _():
        check.is_text(short.complete(TEXT).text)
        check.is_text(list(short.stream_complete(TEXT))[-1].text)

    @check("chat, stream_chat")
    def _():
        answer = short.chat(messages)
        check.is_text(answer.message.content)
        check.is_usage(answer.raw.usage.prompt_tokens, answer.raw.usage.completion_tokens)
        check.is_text("".join(part.delta or "" for part in short.stream_chat(messages)))

    @check("acomplete, achat, streamed too")
    async def _():
        check.is_text((await short.acomplete(TEXT)).text)
        check.is_text((await short.achat(messages)).message.content)
        check.is_text((await collect(await short.astream_complete(TEXT)))[-1].text)
        check.is_text("".join([part.delta or "" for part in await collect(await short.astream_chat(messages))]))

    @check("completions instead of chat")
    def _():
        plain = model(LENGTH, is_chat_model=False, is_function_calling_model=False)
        assert plain.complete(TEXT).text == check.plain
        assert list(plain.stream_complete(TEXT))[-1].text == check.plain

    @check("chat_with_tools, predict_and_call")
    def _():
        # the client takes `additionalProperties` out of schemas
        biased = model(120, additional_kwargs={"logit_bias": check.bias})
        answer = biased.chat_with_tools([tool], user_msg=TEXT, tool_required=True)
        [call] = biased.get_tool_calls_from_response(answer)
        assert call.tool_name == "weather" and list(call.tool_kwargs) == ["city"], call
        assert answer.raw.choices[0].finish_reason == "tool_calls"
        last = list(biased.stream_chat_with_tools([tool], user_msg=TEXT, tool_required=True))[-1]
        assert biased.get_tool_calls_from_response(last)[0].tool_kwargs == call.tool_kwargs
        assert biased.predict_and_call([tool], user_msg=TEXT, tool_required=True).response.startswith("Sunny in ")

    @check("structured_predict, as_structured_llm")
    def _():
        assert isinstance(long.structured_predict(Person, PromptTemplate("{text}"), text=TEXT), Person)
        assert isinstance(long.as_structured_llm(Person).chat(messages).raw, Person)
        formed = model(120, should_use_structured_outputs=True)
        assert isinstance(formed.structured_predict(Person, PromptTemplate("{text}"), text=TEXT), Person)
        parts = list(formed.stream_structured_predict(Person, PromptTemplate("{text}"), text=TEXT))
        assert len(parts) > 3 and isinstance(parts[-1], Person), parts

    @check("FunctionAgent, without a call")
    async def _():
        assert str(await FunctionAgent(tools=[tool], llm=short, system_prompt="Be brief.").run(TEXT))

    @check("OpenAILikeEmbedding")
    async def _():
        check.are_vectors(vectors.get_text_embedding_batch(WORDS))
        check.are_vectors([vectors.get_query_embedding(WORDS[0]), await vectors.aget_text_embedding(WORDS[1])])

    @check("VectorStoreIndex, its query and chat engines")
    def _():
        index = VectorStoreIndex.from_documents([Document(text=text) for text in WORDS], embed_model=vectors)
        answer = index.as_query_engine(llm=short, similarity_top_k=1).query(WORDS[0])
        assert answer.response and answer.source_nodes[0].text == WORDS[0], answer
        streamed = index.as_query_engine(llm=short, similarity_top_k=1, streaming=True).query(WORDS[0])
        assert "".join(streamed.response_gen) == answer.response
        assert index.as_chat_engine(llm=short, chat_mode="context").chat(WORDS[0]).response

    @check("errors")
    def _():
        raises(openai.BadRequestError, lambda: model(LENGTH, additional_kwargs={"top_p": 2}).chat(messages), "top_p")
        raises(openai.BadRequestError, lambda: short.complete(TOO_LONG), "context_length_exceeded")
        raises(openai.AuthenticationError, lambda: model(LENGTH, api_base=check.closed_api).chat(messages), "API key")
        closed = {"api_base": check.closed_api, "api_key": KEY, "model": "x"}
        raises(openai.NotFoundError, lambda: model(LENGTH, **closed).chat(messages), "`x`")


def instructor(check):
    import instructor
    import openai
    from instructor.core import IncompleteOutputException, InstructorRetryException
    from pydantic import field_validator

    Person, Label, _ = schemas()

    class Never(Label):
        @field_validator("label")
        @classmethod
        def fails(cls, value):
            raise ValueError(f"{value} is wrong")

    asked = {"messages": USER, "temperature": 0, "max_tokens": 120, "max_retries": 0}
    named = {"model": "demo", **asked}

    def client(mode=instructor.Mode.TOOLS, kind=openai.OpenAI):
        return instructor.from_openai(kind(base_url=check.api, api_key="any", max_retries=0), mode=mode)

    @check("from_provider")
    def _():
        own = instructor.from_provider("openai/demo", base_url=check.api, api_key="any")
        assert isinstance(own.create(response_model=Person, **asked), Person)

    @check("from_openai, modes TOOLS, TOOLS_STRICT, JSON_SCHEMA")
    def _():
        for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
            assert isinstance(client(mode).create(response_model=Person, **named), Person), mode

    @check("modes JSON, MD_JSON")
    def _():
        for mode in (instructor.Mode.JSON, instructor.Mode.MD_JSON):
            act = lambda: client(mode).create(response_model=Person, **named)  # noqa: E731
            raises(IncompleteOutputException, act)
        raise NotApplicable("the schema is only in the prompt")

    @check("mode RESPONSES_TOOLS")
    def _():
        assert isinstance(client(instructor.Mode.RESPONSES_TOOLS).create(response_model=Person, **named), Person)

    @check("create_with_completion")
    def _():
        person, raw = client().create_with_completion(response_model=Person, **named)
        assert isinstance(person, Person) and raw.choices[0].finish_reason == "tool_calls", raw
        assert raw.usage.total_tokens == raw.usage.prompt_tokens + raw.usage.completion_tokens

    @check("Literal, Iterable")
    def _():
        bias = {**named, "max_tokens": 300, "logit_bias": check.bias}
        assert client().create(response_model=Label, **named).label in ("spam", "ham")
        assert client().create(response_model=Literal["spam", "ham"], **bias) in ("spam", "ham")
        people = client().create(response_model=Iterable[Label], **bias)
        assert all(isinstance(entry, Label) for entry in people)

    @check("create_partial")
    def _():
        formed = client(instructor.Mode.JSON_SCHEMA)
        parts = list(formed.create_partial(response_model=Person, **named))
        whole = formed.create(response_model=Person, **named)
        assert len(parts) > 3 and parts[-1].model_dump() == whole.model_dump(), parts
        # a call comes in one part
        assert list(client().create_partial(response_model=Person, **named))[-1].age is not None

    @check("async")
    async def _():
        own = client(kind=openai.AsyncOpenAI)
        assert isinstance(await own.create(response_model=Person, **named), Person)
        assert (await collect(own.create_partial(response_model=Person, **named)))[-1].age is not None

    @check("no response_model")
    def _():
        answer = client().create(response_model=None, **{**named, "max_tokens": LENGTH})
        check.is_text(answer.choices[0].message.content)

    @check("retries after a validator's error")
    def _():
        act = lambda: client().create(response_model=Never, **{**named, "max_retries": 2})  # noqa: E731
        assert raises(InstructorRetryException, act, "is wrong").n_attempts == 3

    @check("errors")
    def _():
        def ask(**more):
            return client().create(response_model=Person, **{**named, **more})

        raises(InstructorRetryException, lambda: ask(temperature=-1), "temperature")
        raises(IncompleteOutputException, lambda: ask(max_tokens=5))


def dspy(check):
    import dspy
    from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider
    from dspy.utils import exceptions

    class Sentiment(dspy.Signature):
        """Classify the sentiment of a sentence."""
        sentence: str = dspy.InputField()
        sentiment: Literal["positive", "negative", "neutral"] = dspy.OutputField()

    def weather(city: str) -> str:
        """Get the weather in a city."""

    # only of a declared provider's models does it know that they can be held to a schema
    access = AccessPolicy(provider="anec", env_keys=("ANEC_API_KEY",), base_url=check.api)
    supports = ModelSupport(function_calling=True, response_schema=True, reasoning=False)
    register_provider(ProviderDefinition.chat(access, compat=OpenAIChatCompat()), supports=supports, replace=True)

    def model(tokens, name="openai/demo", **more):
        options = {"api_base": check.api, "api_key": "any", "temperature": 0, "cache": False, "num_retries": 0}
        return dspy.LM(name, **{**options, "max_tokens": tokens, **more})

    short, held = model(LENGTH), model(300, "anec/demo", logit_bias=check.bias)
    sentiments = ("positive", "negative", "neutral")

    @check("LM")
    def _():
        check.is_text(short(TEXT)[0])
        usage = short.history[-1]["usage"]
        check.is_usage(usage["prompt_tokens"], usage["completion_tokens"])

    @check("LM, acall")
    async def _():
        check.is_text((await short.acall(TEXT))[0])

    @check("LM, model_type responses")
    def _():
        check.is_text(model(LENGTH, model_type="responses")(TEXT)[0]["text"])

    @check("Predict, JSONAdapter")
    async def _():
        with dspy.context(lm=held, adapter=dspy.JSONAdapter(), track_usage=True):
            prediction = dspy.Predict(Sentiment)(sentence=TEXT)
            assert prediction.sentiment in sentiments and prediction.get_lm_usage()["anec/demo"]["total_tokens"] > 0
            assert (await dspy.Predict(Sentiment).acall(sentence=TEXT)).sentiment == prediction.sentiment

    @check("Predict, ChainOfThought, adapter by default")
    def _():
        # texts without its marks are asked for again, with a schema
        with dspy.context(lm=held):
            assert dspy.Predict(Sentiment)(sentence=TEXT).sentiment in sentiments
            assert isinstance(dspy.ChainOfThought("question -> answer: bool")(question=TEXT).answer, bool)

    @check("streamify")
    async def _():
        with dspy.context(lm=held, adapter=dspy.JSONAdapter()):
            parts = await collect(dspy.streamify(dspy.Predict(Sentiment))(sentence=TEXT))
            assert len(parts) > 3 and parts[-1].sentiment in sentiments, parts

    @check("ReAct")
    def _():
        act = lambda: dspy.ReAct("question -> answer", tools=[weather], max_iters=1)(question=TEXT)  # noqa: E731
        with dspy.context(lm=held):
            raises(exceptions.AdapterParseError, act)
        raise NotApplicable("arguments of tools are a dictionary, so the schema is only in the prompt")

    @check("Embedder")
    def _():
        embedder = dspy.Embedder("openai/vectors", api_base=check.vectors_api, api_key="any", caching=False)
        check.are_vectors(embedder(WORDS).tolist())

    @check("errors")
    def _():
        raises(exceptions.LMInvalidRequestError, lambda: model(LENGTH, temperature=-1)(TEXT), "temperature")
        raises(exceptions.ContextWindowExceededError, lambda: short(TOO_LONG), str(CONTEXT))
        raises(exceptions.LMAuthError, lambda: model(LENGTH, api_base=check.closed_api)(TEXT), "API key")


def smolagents(check):
    import openai
    from smolagents import CodeAgent, LiteLLMModel, OpenAIModel, ToolCallingAgent, tool

    @tool
    def weather(city: str) -> str:
        """Get the weather.

        Args:
            city: name of the city
        """
        return f"Sunny in {city}."

    def model(tokens, kind=OpenAIModel, name="demo", **more):
        options = {"api_base": check.api, "api_key": "any", "temperature": 0, "max_tokens": tokens}
        return kind(model_id=name, **{**options, **more})

    messages = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
    short, biased = model(LENGTH), model(400, logit_bias=check.bias)

    @check("OpenAIModel")
    def _():
        answer = short(messages)
        check.is_text(answer.content)
        check.is_usage(answer.token_usage.input_tokens, answer.token_usage.output_tokens)

    @check("generate_stream")
    def _():
        parts = list(short.generate_stream(messages))
        assert len(parts) > 3
        check.is_text("".join(part.content or "" for part in parts))
        check.is_usage(parts[-1].token_usage.input_tokens, parts[-1].token_usage.output_tokens)

    @check("LiteLLMModel")
    def _():
        check.is_text(model(LENGTH, LiteLLMModel, "openai/demo")(messages).content)

    @check("tools")
    def _():
        [call] = biased.generate(messages, tools_to_call_from=[weather]).tool_calls
        assert call.function.name == "weather" and list(json.loads(call.function.arguments)) == ["city"], call

    @check("response_format")
    def _():
        _, Label, _ = schemas()
        schema = {"name": "label", "schema": Label.model_json_schema(), "strict": True}
        answer = model(120).generate(messages, response_format={"type": "json_schema", "json_schema": schema})
        Label.model_validate_json(answer.content)

    @check("ToolCallingAgent")
    def _():
        # its one tool gives the final answer
        assert ToolCallingAgent(tools=[], model=biased, max_steps=2, verbosity_level=0).run(TEXT) == ""
        agent = ToolCallingAgent(tools=[weather], model=biased, max_steps=1, verbosity_level=0, stream_outputs=True)
        kinds = [type(step).__name__ for step in agent.run(TEXT, stream=True)]
        assert "ToolOutput" in kinds and kinds[-1] == "FinalAnswerStep", kinds

    @check("CodeAgent")
    def _():
        # its steps run out, and then it asks for a text
        assert CodeAgent(tools=[weather], model=model(60), max_steps=1, verbosity_level=0).run(TEXT)
        raise NotApplicable("the demo writes no code")

    @check("errors")
    def _():
        raises(openai.BadRequestError, lambda: model(LENGTH, temperature=-1)(messages), "temperature")
        long = [{"role": "user", "content": [{"type": "text", "text": TOO_LONG}]}]
        raises(openai.BadRequestError, lambda: short(long), "context_length_exceeded")
        closed = model(LENGTH, api_base=check.closed_api)
        raises(openai.AuthenticationError, lambda: closed(messages), "API key")


# packages of each client, the first of which names it
def openai_python(check):
    from openai_examples import examples

    examples(check)


CLIENTS = {
    openai_python: ["openai"],
    litellm: ["litellm"],
    langchain_openai: ["langchain-openai", "langchain-core", "openai"],
    langchain_anthropic: ["langchain-anthropic", "langchain-core", "anthropic"],
    langchain_ollama: ["langchain-ollama", "langchain-core", "ollama"],
    llama_index: ["llama-index-llms-openai-like", "llama-index-embeddings-openai-like", "llama-index-core"],
    instructor: ["instructor", "openai"],
    dspy: ["dspy", "litellm"],
    smolagents: ["smolagents", "openai", "litellm"],
}


def version(package):
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)


def main():
    names = [packages[0] for packages in CLIENTS.values()]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("anec", type=Path)
    parser.add_argument("folder", type=Path)
    clients = f"clients to run (default: all): {', '.join(names)}"
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=clients)
    arguments = parser.parse_args()
    if unknown := set(arguments.clients) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    anec, folder = arguments.anec.resolve(), arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    build(anec, folder)
    about = subprocess.run([anec, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"{about}, Python {sys.version.split()[0]}")
    bundle, closed = folder / "demo.anec", ("--strict-model", "--api-key", KEY)
    table = []
    with contextlib.ExitStack() as stack:
        def start(name, model, *options):
            return stack.enter_context(serve(anec, model, folder / f"{name}.log", *options))

        vectors = start("vectors", folder / "vectors.anec", "--name", "vectors")
        check = Checks(start("open", bundle), start("closed", bundle, *closed), vectors)
        for examples, packages in CLIENTS.items():
            if arguments.clients and packages[0] not in arguments.clients:
                continue
            if missing := [package for package in packages if not version(package)]:
                print(f"left out: {packages[0]}: {', '.join(missing)} not installed")
                continue
            check.client, before = packages[0], len(check.rows)
            examples(check)
            counts = collections.Counter(verdict for _, _, verdict, _ in check.rows[before:])
            versions = ", ".join(f"{package} {version(package)}" for package in packages)
            table.append([versions, counts.total()] + [counts[verdict] for verdict in VERDICTS])
    print(f"| client | examples | {' | '.join(VERDICTS)} |")
    print("|---" + "|--:" * (len(VERDICTS) + 1) + "|")
    for row in table:
        print("| " + " | ".join(map(str, row)) + " |")
    return any(verdict == "failed" for _, _, verdict, _ in check.rows)


if __name__ == "__main__":
    import clients  # under the name by which others import it, so that there is one class of each exception

    sys.exit(clients.main())
