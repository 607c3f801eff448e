"""Chat templates that never end or ask for too much are errors of the model, within seconds."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
from transformers import AutoTokenizer

from rlctl.errors import ConfigError
from rlctl.quickstart import real_path
from rlctl.runtime.data import template_limit
from rlctl.runtime.data.tokenizer import render_prompt

BIG = "range(99999)"
ENDLESS = f"{{% for i in {BIG} %}}{{% for j in {BIG} %}}{{% for k in {BIG} %}}{{% endfor %}}" + (
    "{% endfor %}{% endfor %}"
)


@pytest.fixture(autouse=True)
def no_timer() -> Iterator[None]:
    """Disable the timer of pytest-timeout, beside which templates have no limit."""
    seconds, handler = signal.setitimer(signal.ITIMER_REAL, 0)[0], signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)


@pytest.mark.parametrize(
    "template",
    [
        ENDLESS,
        "{% for i in range(10**9) %}{{ i }}{% endfor %}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ 1 // 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% for a in messages %}{{ a.x.y.z }}{% endfor %}",
        "{{ 'a'.center(17777777) }}",
        "{{ 'a' * 7777777777 }}",
    ],
)
def test_a_hostile_template_is_an_error(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limit, "LIMIT_S", 1.0)
    tokenizer = AutoTokenizer.from_pretrained(real_path("quickstart"))
    tokenizer.chat_template = template
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(ConfigError, match="chat template rejects"):
        render_prompt(tokenizer, [{"role": "user", "content": "hello"}])
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_template_that_is_too_slow_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limit, "LIMIT_S", 0.2)
    tokenizer = AutoTokenizer.from_pretrained(real_path("quickstart"))
    tokenizer.chat_template = ENDLESS.replace("i in", "n in")
    used = []
    for _ in range(3):
        start = time.process_time()
        with pytest.raises(ConfigError, match="it has not ended within"):
            render_prompt(tokenizer, [{"role": "user", "content": "hello"}])
        used.append(time.process_time() - start)
    assert max(used[1:]) < used[0] / 4
