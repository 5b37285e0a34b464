"""The engine's schedule in a model of an H200's costs: what was measured there, and that the defaults are even."""

from __future__ import annotations

import math

import pytest

from tilewise.bench import engine_model
from tilewise.serving import batch, schedule

REQUESTS = 2000


def judged(**options: int) -> engine_model.Latencies:
    """At 70% of what the engine was measured to take."""
    return engine_model.simulate(REQUESTS, 35.6, seed=5, **options)


def fuller(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule that fills steps up to 256 tokens, and spreads a rush over four."""
    monkeypatch.setattr(schedule, "CHEAP_TOKENS", 256)
    monkeypatch.setattr(schedule, "SPREAD", 4)
    monkeypatch.setattr(engine_model, "SPREAD", 4)
    monkeypatch.setattr(batch, "QUARTERED", 256)


def test_the_model_gives_what_was_measured() -> None:
    """docs/results/engine-8b-h200.txt: 50.8 requests/s at once; at 70% 6.26, 10.1 and 10.5 ms between tokens."""
    at_once = engine_model.simulate(256, math.inf, seed=2, token_budget=512)
    assert at_once.requests_per_s == pytest.approx(50.8, rel=0.05)
    assert judged(token_budget=512).between == pytest.approx((6.26, 10.1, 10.5), rel=0.05)


@pytest.mark.parametrize("token_budget", [None, 512])
def test_time_between_tokens_is_even_by_default(token_budget: int | None) -> None:
    p50, _, p99 = judged(token_budget=token_budget).between
    assert p99 <= 1.7 * p50


def test_even_steps_cost_no_throughput(monkeypatch: pytest.MonkeyPatch) -> None:
    now = engine_model.simulate(256, math.inf, seed=2)
    fuller(monkeypatch)
    assert now.requests_per_s > 0.98 * engine_model.simulate(256, math.inf, seed=2).requests_per_s


def test_a_large_budget_takes_prompts_that_come_all_at_once_faster() -> None:
    small, large = (engine_model.simulate(200, math.inf, token_budget=n, seed=3) for n in (256, 2048))
    assert large.requests_per_s > 1.05 * small.requests_per_s
    assert large.between[2] > small.between[2]


def test_one_request_alone() -> None:
    one = engine_model.simulate(1, 1.0, seed=1, costs=engine_model.Costs(decode=2, row=0, mixed=3, token=0))
    assert one.first == (3, 3, 3)
    assert one.between == (2, 2, 2)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = "34 none 64 --requests 20 --decode 2 --row 0 --mixed 3 --token 0"
    engine_model.main(words.split())
    _, free, tight = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (free[0], tight[0]) == ("none", "64")
    assert free[1] == "2.0"
    assert float(tight[-1]) > float(free[-1])
