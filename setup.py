"""What pyproject.toml cannot say: the README as PyPI shows it, where a link into the repository would lead nowhere."""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/tilewise/tilewise"
PICTURES = "https://raw.githubusercontent.com/tilewise/tilewise/main"
CODE = r"```.*?```|`[^`\n]*`"  # in which brackets are no links
LINK = r"(?P<mark>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\]\([^)]*\))*)\]\((?P<target>[^)\s]+)\)"  # its text may be a picture
TAG = r'(?P<name>src|srcset|href)="(?P<value>[^"\s]+)"'


def absolute(markdown: str) -> str:
    """The text with every link and picture inside of the repository turned into its address on GitHub."""
    return re.sub(f"{CODE}|{LINK}|{TAG}", _absolute, markdown, flags=re.DOTALL)


def _absolute(found: "re.Match[str]") -> str:
    if found["target"]:
        picture = bool(found["mark"])
        return f"{found['mark']}[{absolute(found['text'])}]({_address(found['target'], picture)})"
    if found["value"]:
        return f'{found["name"]}="{_address(found["value"], found["name"] != "href")}"'
    return found[0]


def _address(target: str, picture: bool) -> str:
    if target.startswith("#"):  # PyPI names headings in its own way
        return f"{REPOSITORY}{target}"
    if re.match(r"[a-z]+:", target):
        return target
    return f"{PICTURES}/{target}" if picture else f"{REPOSITORY}/blob/main/{target}"


if __name__ == "__main__":
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(long_description=absolute(readme), long_description_content_type="text/markdown")
