"""Templates by strangers who mean harm: each ends in a TemplateError within 5 s of the processor and 1 GiB of memory.

They run in a process of their own, whose address space is limited: a bomb that goes off takes only that one along.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from localllm.errors import TemplateError
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import Tokenizer
from tests.patience import PATIENCE_S
from tests.thinning import thinned

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
LIMIT_S = 5
LIMIT_BYTES = 1 << 30


def expressions(text: str) -> list[str]:
    return [f"{{{{ {each} }}}}" for line in text.strip().splitlines() for each in line.split(" ;; ")]


ESCAPES = [
    *expressions(r"""
raise_exception.__globals__ ;; strftime_now.__closure__ ;; ''.__class__ ;; ''['__class__']
''.__class__.__mro__[1].__subclasses__() ;; x.__init__ ;; ''|attr('__class__')
('{0.__class__}'|attr('format'))(1) ;; '{0.__class__.__init__}'.format(messages)
'{a.__class__}'.format_map({'a': 1}) ;; ['x']|map('attr', '__class__')|list
['x']|map(attribute='__class__')|list ;; messages|selectattr('__class__')|list ;; messages|groupby('__class__')
[messages]|sort(attribute='__class__') ;; ['a']|join(',', attribute='__class__') ;; cycler.__init__.__globals__
joiner.__init__.__globals__.os ;; lipsum.__globals__['os'].popen('id').read() ;; namespace.__init__.__globals__
namespace.mro() ;; namespace(__class__=1) ;; self.__init__.__globals__ ;; self._TemplateReference__context
messages.append(1) ;; messages[0].update({'role': 'system'}) ;; messages[0].setdefault('a', 1) ;; 'a'.encode()
'a'.translate({97: 'b'}) ;; (5).to_bytes(10**9, 'big')
"""),
    "{% filter attr('__class__') %}x{% endfilter %}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{% for x in [1] %}{{ loop._iterator }}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'a' %}",
    "{% autoescape true %}{{ 'x'|safe }}{% endautoescape %}",
]
LOOP = "{{% set ns = namespace(x={0}) %}}{{% for i in range(100) %}}{{% set ns.x = {1} %}}{{% endfor %}}{{{{ ns.x }}}}"
GROWING = r"""
3 => ns.x ** 9 ;; 3 => ns.x * ns.x ;; 'a' => ns.x ~ ns.x ;; 'a' => ns.x + ns.x ;; 'a' => [ns.x, ns.x]|join
[0] => ns.x + ns.x ;; [0] => [ns.x, ns.x] ;; (0,) => (ns.x, ns.x) ;; {} => {'a': ns.x, 'b': ns.x}
{} => dict(a=ns.x, b=ns.x) ;; {'a': 1} => {'a': ns.x.items(), 'b': ns.x.values()}
"""
BOMBS = [
    *expressions(r"""
range(10**9)|list ;; 'a' * 10**10 ;; 10**10 * 'a' ;; [0] * 10**10 ;; ([0] * 100000) * 100000 ;; 9**(9**9)
2**-(10**9) ;; '%1000000000d'|format(1) ;; '%1000000000d' % 1 ;; '%*d' % (1000000000, 1)
'%.1000000000f' % 1.5 ;; '%(a(b))1000000000d' % {'a(b)': 1} ;; '%%(abc %1000000000d) ' % 1
('%(a)s' * 100000) % {'a': 'x' * 100000} ;; '{:1000000000}'.format(1) ;; '{:{}}'.format(1, 1000000000)
('{0}' * 100000).format('x' * 100000) ;; 'a'|center(10**10) ;; 'a'.ljust(10**10) ;; 'a'.zfill(10**10)
'a\n'|indent(10**10) ;; ('a\n' * 100000)|indent(blank=true, width='x' * 100000)
('a\n' * 100000)|indent(first=true, width=99999) ;; ('a' * 100000)|replace('a', 'b' * 100000)
('a' * 100000)|replace(new='b' * 100000, old='a') ;; ('a' * 100000).replace('', 'b' * 100000)
['a' * 100000]|map('replace', 'a', 'b' * 100000)|list ;; ('a' * 100000)|join('b' * 100000)
range(100000)|join('b' * 100000) ;; ('b' * 100000).join('a' * 100000) ;; 5|round(-10**9)
5|round(10**9, 'ceil') ;; [1]|batch(10**9, 0)|list ;; [1]|slice(10**9)|list ;; ([[0]] * 90000)|sum(start=[])
messages|tojson(indent=10**9) ;; ('\U0001f600' * 8000000)|tojson(ensure_ascii=true)
('\U0001f600' * 8000000)|list ;; ('ab ' * 2700000).split() ;; ('a ' * 4000000)|title
('a' * 8000000).rfind('ab' + 'a' * 4000000) ;; ('a' * 4000000).strip('b' * 4000000 + 'a')
strftime_now('%1000000000d')
"""),
    *(LOOP.format(*each.split(" => ")) for line in GROWING.strip().splitlines() for each in line.split(" ;; ")),
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x ~ ns.x }}{% endset %}{% endfor %}",
    *(
        "{% set ns = namespace(x=[]) %}{% for i in range(150) %}{% set ns.x = [ns.x] %}{% endfor %}"
        "{{ ns.x|tojson(indent=" + indent + ") }}"
        for indent in ("99999", "'x' * 100000")
    ),
    "{% set ns = namespace(x=()) %}{% for i in range(3) %}{% for j in range(60000) %}{% set ns.x = (ns.x,) %}"
    "{% endfor %}{% endfor %}{{ {ns.x: 1}|length }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% block b %}{{ self.b() }}{% endblock %}",
    "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "{% macro m() %}{% for a in range(99999) %}" + "x" * 60000 + "{% endfor %}{% endmacro %}{{ m() }}",
    "{% set s = '\\U0001f600' * 8000000 %}" + "".join(f"{{% set a{i} = s[1:] %}}" for i in range(900)),
    "".join(f"{{% set a{i} = 'x' * 8000000 %}}" for i in range(900)),
    "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}",
    "{{ " + "-" * 60000 + "1 }}",
    "{{ " + "+".join("1" * 30000) + " }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "{% for x in [1] %}" * 50 + "{% endfor %}" * 50,
    "{{ x" + ".a" * 30000 + " }}",
    "{{" * 30000,
    "{{ " + "9" * 60000 + " }}",
    "{{ 'a'|center(10**9) }}{% set x = 'a'|replace('a', 'b' * 100000000) %}",
    "x" * 50_000_000,
]
# These run until their time is over, so they are few.
ENDLESS = [
    "{% for a in range(100000) %}{% for b in range(100000) %}aaaaaaaa{% endfor %}{% endfor %}",
    "{% set a = range(99999)|list %}{% for i in a if i not in a %}{% endfor %}",
    "{{ range(99999)|reject('in', range(99999)|list)|list }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "".join(f"{{% set a{i} = range(99999)|list %}}" for i in range(900)),
]

HARNESS = f"""
import json, resource, sys, time
from localllm.text.chat_template import ChatTemplate
from localllm.errors import TemplateError
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
sources = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
before, results = peak(), []
for source in sources:
    start = time.thread_time()
    try:
        outcome = "rendered " + ChatTemplate(source).render({MESSAGES!r})[:60]
    except TemplateError as error:
        outcome = "refused: " + error.why
    except BaseException as error:
        outcome = repr(error)[:200]
    results.append([outcome, time.thread_time() - start])
print(json.dumps([results, peak() - before]))
"""


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, tuple[str, float]]:
    """Of those that this run is about."""
    asked = {item.callspec.params.get("source") for item in request.session.items if hasattr(item, "callspec")}
    sources = [source for source in ESCAPES + BOMBS + ENDLESS if source in asked]
    run = subprocess.run(
        [sys.executable, "-c", HARNESS], input=json.dumps(sources), capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert run.returncode == 0, run.stderr[-2000:]
    results, added_bytes = json.loads(run.stdout)
    assert added_bytes < LIMIT_BYTES
    return {source: (outcome, seconds) for source, (outcome, seconds) in zip(sources, results, strict=True)}


# Each of the endless ones but the first takes the two seconds that it may have; one of them has less in a thread.
OFTEN = [*ESCAPES, *BOMBS, ENDLESS[0]]


@pytest.mark.parametrize(
    "source", thinned(ESCAPES + BOMBS + ENDLESS, OFTEN.__contains__), ids=lambda source: source[:50]
)
def test_a_hostile_template_is_refused_in_time(outcomes: dict[str, tuple[str, float]], source: str) -> None:
    outcome, seconds = outcomes[source]
    assert outcome.startswith("refused: ") and "out of memory" not in outcome
    assert seconds < LIMIT_S


@pytest.mark.parametrize(
    ("source", "why"),
    [(ESCAPES[0], "a template may not read '__globals__' of a function"), (ENDLESS[1], "it ran longer than 0.2 s")],
)
def test_what_is_refused_is_refused_in_a_thread_too(source: str, why: str) -> None:
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(ChatTemplate(source, time_limit_s=0.2).render, MESSAGES).exception()
    assert isinstance(error, TemplateError) and error.why == why


def test_a_rendering_that_waits_for_a_busy_machine_is_not_refused() -> None:
    def now() -> datetime:
        time.sleep(0.5)  # as a thread does that others keep from the processor
        return datetime(2026, 1, 1)

    source = "{{ strftime_now('%Y') }}{% for message in messages %} {{ message.content }}{% endfor %}"
    assert ChatTemplate(source, now=now, time_limit_s=0.2).render(MESSAGES) == "2026 hi"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '%5.1f|%-3s|%(a)s' % {'a': 1} if false else '%5.1f|%-3s' % (1.25, 'x') }}", "  1.2|x  "),
        ("{{ '{:>4}|{0[role]}'.format('x') if false else '{:>4}|{}'.format('x', 2) }}", "   x|2"),
        ("{{ 'a'.center(3) }}{{ 'a'|center(3) }}{{ 'a\nb'|indent(2) }}", " a  a a\n  b"),
        ("{{ 2**10 }} {{ 3 * 'ab' }} {{ [1] * 2 + [2] }} {{ 7 // 2 }} {{ 7 % 4 }}", "1024 ababab [1, 1, 2] 3 3"),
        ("{{ 10**9 * 1.5 }} {{ -(2**9) }} {{ 0.5**2 }} {{ 'a' * -1 }}", "1500000000.0 -512 0.25 "),
        ("{{ {'b': 1}.items()|list }} {{ 'b' in {'b': 1}.keys() }} {{ loop is defined }}", "[('b', 1)] True False"),
        (
            "{% for a in [1, [2, [3]]] recursive %}{{ a if a is number else loop(a) }}{{ loop.length }}{% endfor %}",
            "12223122",
        ),
        ("{{ 'abcdef'[1:4] }} {{ [1, 2, 3][::-1] }} {{ messages[-1:][0].role }}", "bcd [3, 2, 1] user"),
        ("{{ (1, 2) }} {{ {'a': (1,)} }} {{ 1 < 2 < 3 }} {{ 'a' not in 'b' }}", "(1, 2) {'a': (1,)} True True"),
        ("{% for x in [3, 1, 2]|sort if x > 1 %}{{ loop.index }}{{ x }}{% endfor %}", "1223"),
        ("{{ [1, 2]|map('string')|join('-') }} {{ messages|map(attribute='role')|list }}", "1-2 ['user']"),
    ],
)
def test_the_same_operations_in_reasonable_sizes_work(source: str, text: str) -> None:
    assert ChatTemplate(source).render(MESSAGES) == text


def test_a_template_file_of_a_terabyte_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TemplateError, match="too large"):
        ChatTemplate.load(tmp_path, Tokenizer(tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))))
