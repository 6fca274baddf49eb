"""What goes through the gateway: chats over shared system prompts, and a tokenizer for them."""

from __future__ import annotations

import asyncio
import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sides import MODEL
from benchmarks.workload import Tokens
from kvindexd.tokens import parse
from kvindexd.tokens.local import LocalTokenizer

ROOT = Path(__file__).parent.parent
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
VOCABULARY = 8_000
_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE trained on this repository's own text, some four characters per token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train([str(p) for p in texts()], trainer)
    specials = ("<|im_start|>", "<|im_end|>")
    made.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))


def texts() -> list[Path]:
    """The repository's prose and code."""
    return [*sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("kvindexd/*/*.py"))]


class Chats:
    """Conversations with a system prompt and some turns behind them, each at home on a worker."""

    def __init__(self, folder: Path, conversations: int, workers: int) -> None:
        self._source = random.Random(7)
        words = re.findall(r"[A-Za-z]{2,}", " ".join(p.read_text() for p in texts()))
        self._words = words
        make_tokenizer(folder)
        self._executor = ThreadPoolExecutor(1)
        self._tokenizer = LocalTokenizer(str(folder), self._executor)
        systems = [self._text(250) for _ in range(8)]
        self.homes = [i % workers for i in range(conversations)]
        self._histories = [
            [
                {"role": "system", "content": systems[i % len(systems)]},
                {"role": "user", "content": self._text(150)},
                {"role": "assistant", "content": self._text(200)},
            ]
            for i in range(conversations)
        ]

    def _text(self, words: int) -> str:
        return " ".join(self._source.choices(self._words, k=words))

    def body(self, conversation: int, *, stream: bool = False) -> bytes:
        """The next turn of a conversation: a question that nobody has asked before."""
        asked = {"role": "user", "content": self._text(60)}
        request: dict[str, Any] = {
            "model": MODEL,
            "messages": [*self._histories[conversation], asked],
            "temperature": 0.7,
            "max_tokens": 256,
            "stream": stream,
            "user": f"w{self.homes[conversation]}",
        }
        return json.dumps(request).encode()

    def bodies(self, count: int, *, stream: bool = False) -> list[bytes]:
        """Turns of conversations chosen at random."""
        chosen = self._source.choices(range(len(self.homes)), k=count)
        return [self.body(i, stream=stream) for i in chosen]

    def token_bodies(self, count: int) -> list[bytes]:
        """The same as completions of token arrays, as clients with a tokenizer send them."""
        out = []
        for body in self.bodies(count):
            request = {"model": MODEL, "prompt": self.tokens(body).tolist(), "max_tokens": 256}
            out.append(json.dumps(request | {"user": json.loads(body)["user"]}).encode())
        return out

    def tokens(self, body: bytes) -> Tokens:
        """What a chat's prompt is for the engine."""
        packed = asyncio.run(self._tokenizer.ids(parse(CHAT, body)))
        return np.frombuffer(packed, "<u4").astype(np.uint32)

    def held(self, conversation: int) -> Tokens:
        """What the home worker of a conversation holds: its turns so far."""
        two = [self.tokens(self.body(conversation)) for _ in range(2)]
        shorter = min(map(len, two))
        same = two[0][:shorter] == two[1][:shorter]
        return two[0][: int(np.argmin(same)) if not same.all() else shorter]

    def close(self) -> None:
        """End the tokenizer's thread."""
        self._executor.shutdown()
