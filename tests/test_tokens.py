"""Prompts to token ids: by tokenizer files, as Transformers computes them, and by an engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tokenizer_files
from daemon import serving
from picks import hold
from test_ext_proc import BUFFERED, Fleet, ep, headers, told
from tokenizer_files import CHATS, TEMPLATES

from kvindexd.testing.engine import FakeEngine
from kvindexd.tokens import BadBody, NotConfigured, NoTokens, Tokens, TokenSettings, parse
from kvindexd.v1 import index_pb2 as pb

IDS = json.loads((Path(__file__).parent / "data" / "chat_template_ids.json").read_text())
"""Template -> chat -> token ids as Transformers 5 gives them; null where the template refuses."""
CHAT = "/v1/chat/completions"


def unpack(ids: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(ids) // 4}I", ids))


@contextlib.asynccontextmanager
async def tokens_of(models: dict[str, str], **settings: Any) -> AsyncIterator[Tokens]:
    tokens = Tokens(TokenSettings(models, {}, **settings))
    await tokens.start()
    try:
        yield tokens
    finally:
        await tokens.close()


async def ids_of(tokens: Tokens, path: str, **body: Any) -> list[int]:
    return unpack(await tokens.ids("m", parse(path, json.dumps({"model": "m"} | body).encode())))


# -- local files -----------------------------------------------------------------------------


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
async def test_chat_templates_give_what_transformers_gives(
    tmp_path: Path, template: str, chat: str
) -> None:
    tokenizer_files.make(tmp_path, TEMPLATES[template])
    expected = IDS[template][chat]
    async with tokens_of({"m": str(tmp_path)}) as tokens:
        if expected is None:
            with pytest.raises(NoTokens, match="the chat template refuses"):
                await ids_of(tokens, CHAT, **CHATS[chat])
        else:
            assert await ids_of(tokens, CHAT, **CHATS[chat]) == expected


async def test_arguments_as_text_and_text_as_parts_are_the_same_prompt(tmp_path: Path) -> None:
    tokenizer_files.make(tmp_path, TEMPLATES["qwen2.5"])
    chat = json.loads(json.dumps(CHATS["tools"]))
    call = chat["messages"][1]["tool_calls"][0]["function"]
    call["arguments"] = json.dumps(call["arguments"])
    chat["messages"][0]["content"] = [{"type": "text", "text": chat["messages"][0]["content"]}]
    chat["messages"][1]["content"] = None
    async with tokens_of({"m": str(tmp_path)}) as tokens:
        assert await ids_of(tokens, CHAT, **chat) == IDS["qwen2.5"]["tools"]


async def test_the_other_apis_ask_the_same(tmp_path: Path) -> None:
    tokenizer_files.make(tmp_path, TEMPLATES["llama3"])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    async with tokens_of({"m": str(tmp_path)}) as tokens:
        expected = await ids_of(tokens, CHAT, messages=messages)
        hi = [{"type": "input_text", "text": "Hi"}]
        for body in (
            {"instructions": "Be brief.", "input": "Hi"},
            {"instructions": "Be brief.", "input": [{"role": "user", "content": hi}]},
        ):
            assert await ids_of(tokens, "/v1/responses", **body) == expected
        for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
            body = {"system": system, "messages": messages[1:], "max_tokens": 5}
            assert await ids_of(tokens, "/v1/messages", **body) == expected


async def test_completions(tmp_path: Path) -> None:
    tokenizer_files.make(tmp_path, None, bos=True)
    path = "/prefix/v1/completions?x=1"
    async with tokens_of({"m": str(tmp_path)}) as tokens:
        with_bos = await ids_of(tokens, path, prompt="the <s>")
        assert len(with_bos) == 4
        assert await ids_of(tokens, path, prompt=["the <s>", "b"]) == with_bos
        bare = await ids_of(tokens, path, prompt="the <s>", add_special_tokens=False)
        assert bare == with_bos[1:]
        assert await ids_of(tokens, path, prompt=[5, 6]) == [5, 6]
        assert await ids_of(tokens, path, prompt=[[7], [8]]) == [7]
        with pytest.raises(NoTokens, match="has no chat template"):
            await ids_of(tokens, CHAT, **CHATS["one"])


async def test_what_cannot_be_told_from_the_body_is_said(tmp_path: Path) -> None:
    tokenizer_files.make(tmp_path, TEMPLATES["qwen2.5"])
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    async with tokens_of({"m": str(tmp_path)}) as tokens:
        with pytest.raises(NoTokens, match="image_url"):
            await ids_of(tokens, CHAT, messages=[{"role": "user", "content": image}])
        with pytest.raises(NoTokens, match="previous_response_id"):
            await ids_of(tokens, "/v1/responses", input="x", previous_response_id="r")
        with pytest.raises(BadBody):
            await ids_of(tokens, CHAT)
        # None of that is a fault of the tokenizer.
        assert await ids_of(tokens, CHAT, **CHATS["one"]) == IDS["qwen2.5"]["one"]


async def test_templates_are_sandboxed(tmp_path: Path) -> None:
    tokenizer_files.make(tmp_path, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    async with tokens_of({"m": str(tmp_path)}) as tokens:
        with pytest.raises(NoTokens, match="unsafe"):
            await ids_of(tokens, CHAT, **CHATS["one"])


@pytest.mark.parametrize("content", [None, "{}"])
async def test_a_broken_tokenizer_is_loud_and_tried_again(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    failures: list[str] = []
    tokens = Tokens(TokenSettings({"m": str(tmp_path)}, {}), on_failure=failures.append)
    await tokens.start()
    for _ in range(3):
        with pytest.raises(NoTokens, match=r"the tokenizer of model 'm' does not work.*tokenizer"):
            await ids_of(tokens, CHAT, **CHATS["one"])
    with pytest.raises(NoTokens, match="the tokenizer of model 'm' does not work"):
        await tokens.ids("", parse(CHAT, json.dumps(CHATS["one"]).encode()))
    assert failures == ["m"]
    with pytest.raises(NotConfigured, match=r"tokens\.models"):
        await tokens.ids("other", parse(CHAT, json.dumps(CHATS["one"]).encode()))
    await tokens.close()
    assert capsys.readouterr().out.count("tokenizer_failed") == 1


# -- the engine's endpoint -------------------------------------------------------------------


class Endpoint:
    """A server with /tokenize, as vLLM has it: one token id per byte of what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.connections = 0
        self.delay = 0.0
        self.status = b"200 OK"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                assert head.startswith("post /tokenize ")
                size = int(head.split("content-length:")[1].split()[0])
                self.asked.append(json.loads(await reader.readexactly(size)))
                await asyncio.sleep(self.delay)
                asked = self.asked[-1]
                text = asked.get("prompt") or str(asked.get("messages"))
                body = json.dumps({"count": len(text), "tokens": list(text.encode())}).encode()
                writer.write(
                    b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n" % (self.status, len(body))
                )
                writer.write(body)
                await writer.drain()
        writer.close()


@pytest.fixture
async def endpoint() -> AsyncIterator[tuple[Endpoint, str]]:
    made = Endpoint()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    yield made, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def test_the_engine_is_asked_once_per_prompt(endpoint: tuple[Endpoint, str]) -> None:
    server, url = endpoint
    async with tokens_of({"m": url}) as tokens:
        for _ in range(2):
            asks = [ids_of(tokens, "/v1/completions", prompt="abc") for _ in range(5)]
            assert await asyncio.gather(*asks) == [[97, 98, 99]] * 5
        assert server.asked == [{"model": "m", "prompt": "abc", "add_special_tokens": True}]
        await ids_of(tokens, CHAT, **CHATS["tools"])
        asked = server.asked[-1]
        assert asked["tools"] == CHATS["tools"]["tools"]
        assert asked["chat_template_kwargs"] == {"thinking": True}
        assert asked["messages"][0] == CHATS["tools"]["messages"][0]
        call = asked["messages"][1]["tool_calls"][0]["function"]
        assert json.loads(call["arguments"]) == {"city": "Köln"}
        assert server.connections == 1


async def test_the_cache_is_bounded(endpoint: tuple[Endpoint, str]) -> None:
    server, url = endpoint
    async with tokens_of({"m": url}, cache_tokens=10) as tokens:
        for text in ("aaaaa", "bbbbb", "ccccc", "bbbbb", "aaaaa"):
            await ids_of(tokens, "/v1/completions", prompt=text)
        assert [a["prompt"][0] for a in server.asked] == ["a", "b", "c", "a"]


async def test_a_slow_engine_is_not_waited_for(endpoint: tuple[Endpoint, str]) -> None:
    server, url = endpoint
    server.delay = 30
    async with tokens_of({"m": url}, timeout=0.1) as tokens:
        with pytest.raises(NoTokens, match=r"no token ids within tokens.timeout = 0.1 s"):
            await ids_of(tokens, "/v1/completions", prompt="abc")


async def test_who_stops_waiting_leaves_the_work_to_the_next(
    endpoint: tuple[Endpoint, str],
) -> None:
    server, url = endpoint
    server.delay = 0.2
    async with tokens_of({"m": url}) as tokens:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await ids_of(tokens, "/v1/completions", prompt="abc")
        assert await ids_of(tokens, "/v1/completions", prompt="abc") == [97, 98, 99]
        assert len(server.asked) == 1


async def test_an_engine_that_refuses(endpoint: tuple[Endpoint, str]) -> None:
    server, url = endpoint
    server.status = b"404 Not Found"
    async with tokens_of({"m": url}) as tokens:
        with pytest.raises(NoTokens, match="/tokenize: status 404"):
            await ids_of(tokens, "/v1/completions", prompt="abc")


# -- through the daemon ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat() -> dict[str, Any]:
    return {"model": "adapter", "cache_salt": "pepper"} | CHATS["turns"]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, FakeEngine]]:
    folder = tmp_path_factory.mktemp("tokens")
    tokenizer_files.make(folder / "tokenizer", TEMPLATES["qwen2.5"], bos=True)
    settings = {
        "tokens.models": {"m": str(folder / "tokenizer")},
        "tokens.loras": {"adapter": "m"},
        "ext_proc.budget": 5,
    }
    data = str(folder / "data")
    with FakeEngine() as engine, serving(index__data_dir=data, **settings) as daemon:
        daemon.register("w", engine.endpoint())
        engine.wait_subscribed()
        yield daemon, engine


def test_scoring_text_and_bodies(daemon: tuple[Any, FakeEngine], chat: dict[str, Any]) -> None:
    served, engine = daemon
    text = "The quick brown fox jumps over the lazy dog, again and again and again."
    ids = served.index.ScoreWorkers(
        pb.ScoreWorkersRequest(prompt=pb.Prompt(model="m", text=text)), timeout=10
    ).prompt_tokens
    plain = IDS["qwen2.5"]["turns"]
    hold(served, engine, "w", plain)
    body = json.dumps(chat | {"model": "m", "cache_salt": None}).encode()

    def score(body: bytes, path: str = CHAT) -> pb.WorkerScore:
        prompt = pb.Prompt(model="", openai_body=body, openai_path=path)
        request = pb.ScoreWorkersRequest(prompt=prompt)
        response = served.index.ScoreWorkers(request, timeout=10)
        assert response.prompt_tokens == len(plain)
        return response.scores[0]

    assert ids > 40
    assert score(body).matched_tokens == len(plain) // 16 * 16
    # An adapter and a salt make it another prompt.
    assert score(json.dumps(chat).encode()).matched_tokens == 0
    with pytest.raises(grpc.RpcError) as error:
        score(b"{", CHAT)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    prompt = pb.Prompt(model="other", text="x")
    with pytest.raises(grpc.RpcError) as error:
        served.index.ScoreWorkers(pb.ScoreWorkersRequest(prompt=prompt), timeout=10)
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION


def test_picks_of_chats_are_by_cache(daemon: tuple[Any, FakeEngine], chat: dict[str, Any]) -> None:
    fleet = Fleet(daemon[0], {})
    for name, salt in (("m", None), ("adapter", "pepper")):
        body = json.dumps(chat | {"model": name, "cache_salt": salt}).encode()
        with fleet.stream() as s:
            s.ask(request_headers=headers(_path=CHAT), protocol_config=BUFFERED)
            how = told(s.ask(request_body=ep.HttpBody(body=body, end_of_stream=True)))
        assert (how["by"], how["prompt_tokens"]) == ("cache", len(IDS["qwen2.5"]["turns"]))
    fleet.channel.close()
