"""Tokenizer files as model repositories have them: real chat templates over a small vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>"]
SPECIALS += ["<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]", "<tool_call>"]

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n\
You are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and \
arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \
\\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful \
assistant.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or \
(message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
    "{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant"
    "<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != "
    "(loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate "
    "user/assistant/user/assistant/...') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant "
    "roles are supported!') }}{% endif %}{% endfor %}"
)
PARTS = """\
{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}{% generation %}{{'<|im_end|>\n'}}{% endgeneration %}{% endfor %}\
{% if thinking is defined and thinking %}{{ '<think>' }}{% endif %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

TEMPLATES = {"qwen2.5": QWEN, "llama3": LLAMA3, "mistral": MISTRAL, "parts": PARTS}

_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Weather in a city, <now> & "later"',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": [{"role": "user", "content": "Hello, what is 2 + 2?"}]},
    "turns": {
        "messages": [
            {"role": "user", "content": "  Bonjour à tous  \n"},
            {"role": "assistant", "content": "Salut !"},
            {"role": "user", "content": "漢字 and 🙂"},
        ]
    },
    "system": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi <|im_end|> there"},
        ],
        "add_generation_prompt": False,
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "Weather in Köln?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {"name": "weather", "arguments": {"city": "Köln"}},
                    }
                ],
            },
            {"role": "tool", "content": "rain"},
        ],
        "tools": [_WEATHER],
        "chat_template_kwargs": {"thinking": True},
    },
}
"""Bodies of chat requests, without their models."""


def make(folder: Path, template: str | None, bos: bool = False) -> None:
    """Write tokenizer.json and tokenizer_config.json. `bos`: <s> before plain prompts."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("Ġ", "a"), ("o", "u"), ("s", "t")]
    words = [*alphabet, *("".join(m) for m in merges)]
    made = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    if bos:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
        )
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False,
                      "single_word": False, "__type": "AddedToken"},
        "eos_token": "</s>",
    }  # fmt: skip
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
