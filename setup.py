"""What pyproject.toml cannot say: the README as PyPI shows it, where a link into the repository would lead nowhere."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/tilewise/tilewise"
PICTURES = "https://raw.githubusercontent.com/tilewise/tilewise/main"
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\]\([^)]*\))*)\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", re.S)  # in which brackets are no links


def absolute(markdown: str) -> str:
    """The text with every link and picture inside of the repository turned into its address on GitHub."""
    parts = CODE.split(markdown)
    return "".join(part if n % 2 else LINK.sub(_absolute, part) for n, part in enumerate(parts))


def _absolute(link: re.Match[str]) -> str:
    target, text = link["target"], absolute(link["text"])  # a picture may be the text of a link
    if target.startswith("#"):
        target = f"{REPOSITORY}{target}"
    elif not re.match(r"[a-z]+:", target):
        target = f"{PICTURES}/{target}" if link["picture"] else f"{REPOSITORY}/blob/main/{target}"
    return f"{link['picture']}[{text}]({target})"


if __name__ == "__main__":
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(long_description=absolute(readme), long_description_content_type="text/markdown")
