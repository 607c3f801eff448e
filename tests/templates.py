"""Chat templates in the styles of common models, and a tokenizer with their special tokens."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.architecture.source import ROOT

# In the style of Qwen 2.5: tools in the system message, results between tags in a user's turn.
CHATML = (ROOT / "docs/examples/templates/chatml_tools.jinja").read_text()

# In the style of Qwen 3: thoughts are kept only after the last user, and an empty thought is
# written where there is none in the last turn, or if thinking is off.
QWEN3 = (
    CHATML.replace(
        "{% for message in messages %}",
        """{% set ns = namespace(last=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{% for message in messages %}""",
        1,
    )
    .replace(
        "{{- header('assistant') }}{{ message.content }}\n",
        """{{- header('assistant') }}
{%- set parts = message.content.split('</think>') %}
{%- set thought = parts[0].replace('<think>', '').strip() if parts | length > 1 else '' %}
{%- if loop.index0 > ns.last and (loop.last or thought) -%}
<think>
{{ thought }}
</think>

{% endif %}
{{- parts[-1].lstrip('\n') }}
""",
        1,
    )
    .replace(
        "{{ header('assistant') }}{% endif %}",
        """{{ header('assistant') }}
{%- if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}""",
    )
)

# In the style of Llama 3: one call in a message, written without the message's text.
LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- macro header(role) %}<|start_header_id|>{{ role }}<|end_header_id|>\n\n{% endmacro %}
{{- header('system') }}Environment: ipython{% for tool in tools or [] %}
{{ tool | tojson(indent=4) }}{% endfor %}<|eot_id|>
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}
{{- raise_exception('only one call at once') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- header('assistant') }}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{{- '<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- header('ipython') }}{{ message.content | tojson }}<|eot_id|>
{%- else %}
{{- header(message.role) }}{{ message.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}"""

# In the style of Mistral 7B v0.3: tools before the last user, ids of nine characters.
MISTRAL = """\
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{{- '<s>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]
{%- endif %}[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('ids need 9 characters') }}{% endif %}
{{- call.function | tojson }}{{ ', ' if not loop.last else ']' }}
{%- endfor %}</s>
{%- elif message.role == 'assistant' %} {{ message.content | trim }}</s>
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}
{{- raise_exception('results need an id of 9 characters') }}
{%- endif %}[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": "
{{- message.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""

# In the style of Gemma 4: results, and the text that follows them, belong to the turn of the call.
GEMMA4 = """\
{%- for tool in tools or [] %}<|im_start|>{{ tool | tojson }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|im_start|>user\n{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>model\\n' }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor %}
{%- if message.tool_calls %}<|eot_id|>
{%- for result in messages[loop.index : loop.index + 2] if result.role == 'tool' %}
{{- result.content }};
{%- endfor %}
{%- endif %}{{ message.content }}
{%- if not message.tool_calls %}<|im_end|>
{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}
<|im_start|>model
{% endif %}"""

# In the style of DeepSeek: arguments are JSON text, and results have no turn of their own.
DEEPSEEK = """\
{%- for message in messages %}
{%- if message.role == 'user' %}<|im_start|>{{ message.content }}
{%- elif message.tool_calls %}<|assistant|>{{ message.content }}
{%- for call in message.tool_calls %}{{ call.function.name + ' ' + call.function.arguments }};
{%- endfor %}<|im_end|>
{%- elif message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>
{%- else %}<|assistant|>{{ message.content }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|assistant|>",
)  # fmt: skip
ADDED = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
MERGES = [
    ("Ċ", "Ċ"),
    ("h", "e"),
    ("he", "l"),
    ("l", "o"),
    ("hel", "lo"),
    ("Ġ", "hello"),
    ("1", "2"),
]


def chat_tokenizer(template: str = CHATML, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer with some merges, `SPECIAL` and `ADDED` tokens."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(each) for each in MERGES)]
    vocabulary = {token: number for number, token in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in SPECIAL])
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token=eos,
        chat_template=template,
    )
