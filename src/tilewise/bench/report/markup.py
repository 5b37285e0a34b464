"""Markup made of elements: whatever is not an element is escaped on its way in."""

from __future__ import annotations

import html

VOID = ("br", "col", "hr", "meta")
Child = object  # Html, text, a number, None for nothing, or a list or tuple of these


class Html(str):
    """Markup, as it goes into a page."""

    __slots__ = ()


def tag(name: str, /, *children: Child, **attributes: object) -> Html:
    """An element. class_="x" is class="x", aria_sort is aria-sort; None and False leave an attribute out."""
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{html.escape(_plain(value))}"')
    start = f"<{' '.join(words)}>"
    return Html(start if name in VOID else f"{start}{join(children)}</{name}>")


def join(children: object) -> Html:
    """Children one after another, escaped unless they are markup."""
    if children is None:
        return Html("")
    if isinstance(children, Html):
        return children
    if isinstance(children, list | tuple):
        return Html("".join(join(child) for child in children))
    return Html(html.escape(_plain(children)))


def _plain(value: object) -> str:
    """Numbers with at most two digits behind the point: pixels need no more."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
