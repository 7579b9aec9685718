"""Chat templates of models whose files Ollama's converter wrote without one."""

from __future__ import annotations

# A system message stands in front of the first user's.
GEMMA3 = r"""
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else none -%}
{%- set turns = messages if system is none else messages[1:] -%}
{{ bos_token }}
{%- for turn in turns -%}
{%- if (turn['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{{ '<start_of_turn>' + ('model' if turn['role'] == 'assistant' else turn['role']) + '\n' }}
{{- system + '\n\n' if loop.first and system is not none else '' }}
{{- ('' + turn['content']) | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{{ '<start_of_turn>model\n' if add_generation_prompt else '' }}"""

# Harmony, see `chat.harmony`: tools are declared in TypeScript; a thought is kept until its call has led to an answer.
GPT_OSS = r"""
{%- macro type_of(schema) -%}
{%- if schema.type == 'array' -%}{{ type_of(schema['items'] or {}) + '[]' }}
{%- elif schema.type == 'string' and schema.enum -%}{{ '"' + schema.enum | join('" | "') + '"' }}
{%- elif schema.type == 'object' and schema.properties -%}
{{ '{\n' }}
{%- for name, inner in schema.properties.items() -%}
{{ name + ('' if name in (schema.required or []) else '?') + ': ' + type_of(inner) + ('' if loop.last else ', ') }}
{%- endfor -%}
{{ '}' }}
{%- elif schema.type is string -%}{{ 'number' if schema.type == 'integer' else schema.type }}
{%- elif schema.type -%}{{ schema.type | join(' | ') }}
{%- elif schema.oneOf -%}
{%- for inner in schema.oneOf -%}{{ type_of(inner) + ('' if loop.last else ' | ') }}{%- endfor -%}
{%- else -%}any
{%- endif -%}
{{ ' | null' if schema.nullable else '' }}
{%- endmacro -%}

{%- macro declaration(function) -%}
{{ '// ' + function.description + '\n' if function.description else '' }}
{{- 'type ' + function.name + ' = ' }}
{%- if function.parameters and function.parameters.properties -%}
{{ '(_: {\n' }}
{%- for name, schema in function.parameters.properties.items() -%}
{{ '// ' + schema.description + '\n' if schema.description else '' }}
{{- name + ('' if name in (function.parameters.required or []) else '?') + ': ' + type_of(schema) }}
{{- ', // default: ' + schema.default | tojson if schema.default is defined else '' }}
{{- ',\n' }}
{%- endfor -%}
{{ '}) => any;\n\n' }}
{%- else -%}
{{ '() => any;\n\n' }}
{%- endif -%}
{%- endmacro -%}

{%- macro message(role, channel, text, end='<|end|>') -%}
{{ '<|start|>' + role + ('<|channel|>' + channel if channel else '') + '<|message|>' + text + end }}
{%- endmacro -%}

{%- set told = messages[0].role in ('system', 'developer') -%}
{%- set instructions = messages[0].content if told else '' -%}
{{ '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n' }}
{{- 'Knowledge cutoff: 2024-06\nCurrent date: ' + strftime_now('%Y-%m-%d') }}
{{- '\n\nReasoning: ' + reasoning_effort | default('medium') + '\n\n# Valid channels: analysis, commentary, final. ' }}
{{- 'Channel must be included for every message.' }}
{{- "\nCalls to these tools must go to the commentary channel: 'functions'." if tools else '' }}
{{- '<|end|>' }}
{%- if instructions or tools -%}
{{ '<|start|>developer<|message|>' }}
{{- '# Instructions\n\n' + instructions + '\n\n' if instructions else '' }}
{%- if tools -%}
{{ '# Tools\n\n## functions\n\nnamespace functions {\n\n' }}
{%- for tool in tools -%}{{ declaration(tool.function) }}{%- endfor -%}
{{ '} // namespace functions' }}
{%- endif -%}
{{ '<|end|>' }}
{%- endif -%}

{%- set asked = namespace(name=none) -%}
{%- set turns = messages[1:] if told else messages -%}
{%- for turn in turns -%}
{%- if turn.role == 'tool' -%}
{{ message('functions.' + (asked.name or turn.name) + ' to=assistant', 'commentary', turn.content | tojson) }}
{%- elif turn.role != 'assistant' -%}
{{ message('user', none, turn.content) }}
{%- elif turn.tool_calls -%}
{%- set answers = turns[loop.index:] | selectattr('role', 'equalto', 'assistant') | rejectattr('tool_calls') | list -%}
{%- set thought = turn.content or turn.thinking -%}
{{ message('assistant', 'analysis', thought) if thought and not answers else '' }}
{%- for call in turn.tool_calls -%}
{%- set function = call.function or call -%}
{%- set asked.name = function.name -%}
{{ message('assistant to=functions.' + asked.name, 'commentary json', function.arguments | tojson, '<|call|>') }}
{%- endfor -%}
{%- else -%}
{{ message('assistant', 'final', turn.content, '<|end|>' if not loop.last or add_generation_prompt else '<|return|>') }}
{%- endif -%}
{%- endfor -%}
{{ '<|start|>assistant' if add_generation_prompt else '' }}"""
