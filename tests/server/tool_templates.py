"""Small chat templates of ours, one for each syntax of calls."""

from __future__ import annotations

import json

AROUND = (
    "{{ bos_token }}{% if tools %}[TOOLS]{{ tools|tojson }}{% endif %}{% for m in messages %}{{ '<|' + m.role + '|>' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
    "CALLS{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# A value in Gemma's literals.
OF = (
    """{% macro of(v) %}{% if v is string %}{{ '<|"|>' + v + '<|"|>' }}{% elif v is boolean or v is none %}"""
    "{{ v|tojson }}{% elif v is mapping %}{{ '{' }}{% for k, x in v|dictsort %}{{ '' if loop.first else ',' }}"
    "{{ k }}:{{ of(x) }}{% endfor %}{{ '}' }}{% elif v is sequence %}{{ '[' }}{% for x in v %}"
    "{{ '' if loop.first else ',' }}{{ of(x) }}{% endfor %}{{ ']' }}{% else %}{{ v }}{% endif %}{% endmacro %}"
)


def _each(*before: str, behind: str = "", opens: str = "", closes: str = "", between: str = "") -> str:
    """Of each call of a turn: texts in quotes, and names of Jinja's."""
    said = "".join(f"{{{{ {part} }}}}" for part in (f"'' if loop.first else {between!r}", *before))
    calls = f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{said}{behind}{{% endfor %}}"
    return f"{{% if m.tool_calls %}}{{{{ {opens!r} }}}}{calls}{{{{ {closes!r} }}}}{{% endif %}}"


def _pairs(begins: str, middle: str, ends: str, last: str) -> str:
    value = "(v if v is string else v|tojson)"
    said = f"{json.dumps(begins)} + k + {json.dumps(middle)} + {value} + {json.dumps(ends)}"
    return f"{{% for k, v in f.arguments.items() %}}{{{{ {said} }}}}{{% endfor %}}{{{{ {json.dumps(last)} }}}}"


_JSON = "f.arguments|tojson"
_NAMED = ("""'{"name": "'""", "f.name", """'", "arguments": '""", _JSON, "'}'")
_LFM = (
    "{% for k, v in f.arguments.items() %}{{ '' if loop.first else ', ' }}{{ k }}="
    "{{ v|tojson if v is string or v is mapping else v }}{% endfor %})"
)
_GEMMA = (
    "{% for k, v in f.arguments|dictsort %}{{ '' if loop.first else ',' }}{{ k }}:{{ of(v) }}{% endfor %}"
    "{{ '}<tool_call|>' }}"
)
_CALLS = {
    "hermes": _each(r"'<tool_call>\n'", *_NAMED, r"'\n</tool_call>'", between="\n"),
    "qwen-xml": _each(
        r"'<tool_call>\n<function='", "f.name", r"'>\n'", between="\n",
        behind=_pairs("<parameter=", ">\n", "\n</parameter>\n", "</function>\n</tool_call>"),
    ),
    "seed": _each(
        r"'<seed:tool_call>\n<function='", "f.name", r"'>\n'", between="\n",
        behind=_pairs("<parameter=", ">", "</parameter>\n", "</function>\n</seed:tool_call>"),
    ),
    "glm": _each(
        "'<tool_call>'", "f.name", r"'\n'", between="\n",
        behind=_pairs("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
    ),
    "glm-line": _each(
        "'<tool_call>'", "f.name",
        behind=_pairs("<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>"),
    ),
    "minimax": _each(
        "'<invoke name=\"'", "f.name", r"""'">\n'""", opens="<minimax:tool_call>\n", closes="</minimax:tool_call>",
        behind=_pairs('<parameter name="', '">', "</parameter>\n", "</invoke>\n"),
    ),
    "gemma": OF + _each("'<|tool_call>call:'", "f.name", "'{'", behind=_GEMMA),
    "lfm": _each("f.name", "'('", behind=_LFM, opens="<|tool_call_start|>[", closes="]<|tool_call_end|>", between=", "),
    "minicpm": _each(
        "f.name", "'('", behind=_LFM, opens="<|tool_call_start|>\n```python\n", closes="\n```\n<|tool_call_end|>",
        between="\n",
    ),
    "granite-list": _each(*_NAMED, opens="<|tool_call|>[", closes="]", between=", "),
    "nemotron-list": _each(*_NAMED, opens="<TOOLCALL>[", closes="]</TOOLCALL>", between=", "),
    "deepseek-function": _each(
        "'<｜tool▁call▁begin｜>function<｜tool▁sep｜>'", "f.name", r"'\n```json\n' + f.arguments",
        r"'\n```<｜tool▁call▁end｜>'", opens="<｜tool▁calls▁begin｜>", closes="<｜tool▁calls▁end｜>", between="\n",
    ),
    "deepseek": _each(
        "'<｜tool▁call▁begin｜>'", "f.name", "'<｜tool▁sep｜>'", _JSON, "'<｜tool▁call▁end｜>'",
        opens="<｜tool▁calls▁begin｜>", closes="<｜tool▁calls▁end｜>",
    ),
    "kimi": _each(
        "'<|tool_call_begin|>functions.'", "f.name", "':' + loop.index0|string", "'<|tool_call_argument_begin|>'",
        _JSON, "'<|tool_call_end|>'", opens="<|tool_calls_section_begin|>", closes="<|tool_calls_section_end|>",
    ),
    "mistral-id": _each("'[TOOL_CALLS]'", "f.name", "'[CALL_ID]'", "c.id", "'[ARGS]'", _JSON),
    "mistral": _each("'[TOOL_CALLS]'", "f.name", "'[ARGS]'", _JSON),
}  # fmt: skip
TEMPLATES = {name: AROUND.replace("CALLS", calls) for name, calls in _CALLS.items()}
# Its model has calls, which it does not render.
WITHOUT_CALLS = AROUND.replace("CALLS", "").replace("[TOOLS]", "List of tools: ")
