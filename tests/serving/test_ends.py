"""When a sample ends: end tokens, stop lists, stop texts, the number of tokens; which of them comes first."""

from __future__ import annotations

import numpy as np

from tilewise.serving.requests import EXTRA_TOKENS, Ends, Job, Request, Sample
from tilewise.serving.sampling import Sampling

LETTERS = {n: chr(ord("a") + n) for n in range(26)}  # 26 and above are no text


def text_of(tokens: list[int]) -> str:
    return "".join(LETTERS.get(t, "") for t in tokens)


def taken(ends: Ends, tokens: list[int]) -> tuple[int, str | None]:
    """How many of the tokens are taken, one by one, and why no more."""
    reason = None
    for count in range(1, len(tokens) + 1):
        reason = ends.reason(tokens[:count])
        if reason is not None:
            break
    return count, reason


def test_a_stop_list_is_met_as_a_whole():
    """Its last token alone, or all of it in another order, is not it; a part at the very beginning neither."""
    ends = Ends(99, frozenset(), ((3, 4),))
    assert taken(ends, [4, 4, 3, 3, 4, 9]) == (5, "stop")
    assert taken(ends, [4, 3, 5, 4]) == (4, None)
    assert taken(Ends(99, frozenset(), ((3, 4, 5), (7,))), [4, 5, 3, 4, 7, 5]) == (5, "stop")


def test_a_stop_text_may_begin_among_tokens_that_are_no_text():
    """Up to EXTRA_TOKENS of them stand inside it, and it is still found when its last letter comes."""
    ends = Ends(99, frozenset(), (), ("abc",), text_of)
    for silent in range(EXTRA_TOKENS + 1):
        tokens = [25, 0, 1, *[30] * silent, 2, 25]
        assert taken(ends, tokens) == (4 + silent, "stop"), silent
    assert taken(ends, [0, 1, 25, 2]) == (4, None)


def test_a_stop_text_across_tokens_of_several_letters():
    words = {0: "xa", 1: "bcy", 2: "é"}
    decode = lambda tokens: "".join(words[t] for t in tokens)  # noqa: E731
    assert taken(Ends(99, frozenset(), (), ("abc",), decode), [2, 0, 1, 2]) == (3, "stop")
    assert taken(Ends(99, frozenset(), (), ("ééxa",), decode), [2, 2, 0]) == (3, "stop")


def test_the_last_token_allowed_is_taken_and_an_end_there_goes_before_the_number():
    assert taken(Ends(3, frozenset()), [1, 2, 3, 4]) == (3, "length")
    assert taken(Ends(1, frozenset()), [1, 2]) == (1, "length")
    assert taken(Ends(3, frozenset({3})), [1, 2, 3, 4]) == (3, "eos")
    assert taken(Ends(2, frozenset(), ((1, 2),)), [1, 2, 3]) == (2, "stop")
    assert taken(Ends(2, frozenset({2}), ((1, 2),)), [1, 2, 3]) == (2, "eos")


def test_a_job_has_the_prompt_and_what_was_made_of_it():
    """A sample that was sent out comes back with its own tokens to prefill."""
    request = Request(3, np.array([7, 8]), Ends(9, frozenset()), Sampling())
    sample = Sample(request, 1, [5, 6])
    job = Job.of([sample])
    assert job.tokens.tolist() == [7, 8, 5, 6]
    assert (job.age, job.left) == ((3, 1), 4)
    job.done = 3
    assert job.left == 1
