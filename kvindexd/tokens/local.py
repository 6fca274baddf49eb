"""Token ids by a tokenizer's own files, as Hugging Face repositories have them."""

from __future__ import annotations

import asyncio
import sys
from array import array
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from kvindexd.tokens.bodies import Request, decode
from kvindexd.tokens.chat import Unsupported, chat_of


class TokenizerFailed(Exception):
    """A tokenizer cannot be used at all; the text says what is wrong and what to do."""


class _Encoder(Protocol):
    def encode(self, text: str, special: bool) -> list[int]: ...


class _Fast:
    """The tokenizers library, in the form that lets other threads run meanwhile."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(file))
        # Files carry the settings of whoever trained the model.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._batch = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)

    def encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._batch([text], add_special_tokens=special)[0].ids
        return ids


class LocalTokenizer:
    """One model's tokenizer. Its work is done by `executor`: it takes milliseconds and more."""

    def __init__(self, path: str, executor: Executor) -> None:
        """`path`: a tokenizer.json, or a folder with one (and tokenizer_config.json)."""
        self._path = Path(path)
        self._executor = executor
        self._loaded: tuple[_Encoder, Any] | None = None

    async def load(self) -> None:
        """Read the files now. Raises TokenizerFailed."""
        await asyncio.get_running_loop().run_in_executor(self._executor, self._load)

    async def ids(self, request: Request) -> bytes:
        """Packed little-endian uint32. Raises TokenizerFailed, Unsupported or BadBody."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._ids, request)

    def _load(self) -> tuple[_Encoder, Any]:
        if self._loaded is not None:
            return self._loaded
        folder = self._path if self._path.is_dir() else self._path.parent
        file = folder / "tokenizer.json" if self._path.is_dir() else self._path
        if not file.is_file():
            raise TokenizerFailed(
                f"there is no file {file}; expected a tokenizer.json, or a folder that has one"
            )
        try:
            encoder = _Fast(file)
            template = _template(folder)
        except ImportError as e:
            raise TokenizerFailed(f"{e}; install kvindexd[tokenizers]") from None
        except Exception as e:  # the library raises plain Exception for a file that is none
            raise TokenizerFailed(f"{file} cannot be read: {e}") from None
        self._loaded = encoder, template
        return self._loaded

    def _ids(self, request: Request) -> bytes:
        encoder, template = self._load()
        body = request.body
        if request.kind == "completions":
            special = True if body.add_special_tokens is None else body.add_special_tokens
            ids = encoder.encode(text_of(request), special)
        elif template is None:
            raise Unsupported(f"{self._path} has no chat template")
        else:
            special = bool(body.add_special_tokens)
            ids = encoder.encode(template.render(chat_of(request)), special)
        packed = array("I", ids)
        if sys.byteorder != "little":
            packed.byteswap()
        return packed.tobytes()


def text_of(request: Request) -> str:
    """The prompt of a completions request; of several, the first. Raises Unsupported, BadBody."""
    prompt = decode(request.body.prompt, "prompt")
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise Unsupported("the prompt is no text")
    return prompt


def _template(folder: Path) -> Any:
    """The folder's chat template; None where it has none."""
    from kvindexd.tokens.template import ChatTemplate

    config: dict[str, Any] = {}
    file = folder / "tokenizer_config.json"
    if file.is_file():
        config = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    given = config.get("chat_template")
    own = folder / "chat_template.jinja"
    if own.is_file():
        given = own.read_text(encoding="utf-8")
    if isinstance(given, str):
        given = [{"name": "default", "template": given}]
    if not given:
        return None
    variables = {
        name: text
        for name, value in config.items()
        if name.endswith("_token")
        for text in [value.get("content") if isinstance(value, dict) else value]
        if isinstance(text, str)
    }
    return ChatTemplate({t["name"]: t["template"] for t in given}, variables)
