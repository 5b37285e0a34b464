"""The report in a real browser: sorting, no errors, no network, legible in light and dark, narrow, and on paper."""

from __future__ import annotations

import pytest
from browser import Browser, find
from report_cases import report

from tilewise.bench.report import page
from tilewise.bench.report.compare import compare

pytestmark = pytest.mark.skipif(find() is None, reason="no Chromium here: apt install chromium, and these run")

TABLE = "#prefill-over-length table"
MEDIAN = f"{TABLE} thead th:nth-child(6) button"
A4 = 1046  # CSS pixels between the margins of a page on its side
# The contrast of every piece of text with what is behind it, by the formula of WCAG; what is under the threshold.
CONTRAST = """(() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor, [r, g, b, a] = numbers(color);
      if (a === undefined || a > 0) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const low = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const e = node.parentElement;
    if (!node.data.trim() || e.closest("script, style, title") || !e.getClientRects().length) continue;
    const style = getComputedStyle(e), ink = numbers(e.closest("svg") ? style.fill : style.color).slice(0, 3);
    const [a, b] = [light(ink), light(ground(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push([node.data.trim(), (a + 0.05) / (b + 0.05), e.className]);
  }
  return low;
})()"""
# Elements that reach past the right edge of the page, those inside of something that scrolls left out.
PAST_THE_EDGE = """[...document.body.querySelectorAll("*")].filter((e) => {
  const box = e.getBoundingClientRect();
  if (box.right <= document.documentElement.clientWidth + 1) return false;
  for (let p = e.parentElement; p; p = p.parentElement) if (getComputedStyle(p).overflowX === "auto") return false;
  return true;
}).map((e) => e.tagName + "." + e.className)"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    path = folder / "report.html"
    path.write_text(page.render(report(), compare(report(), report())), encoding="utf-8")
    with Browser(folder / "profile") as opened:
        opened.open(path)
        yield opened


@pytest.fixture
def screen(browser):
    """A wide window with light colours, and the table as it was."""
    browser.resize(1280)
    browser.media("light")
    while browser.ask(f"!!document.querySelector('{TABLE} th[aria-sort]')"):
        browser.ask(f"document.querySelector('{TABLE} th[aria-sort] button').click()")
    return browser


def medians(browser):
    return browser.ask(f"[...document.querySelectorAll('{TABLE} tbody tr')].map(r => Number(r.cells[5].dataset.v))")


def sorted_by(browser):
    return browser.ask(f"document.querySelector('{TABLE} thead th:nth-child(6)').getAttribute('aria-sort')")


def test_sorting_by_click(screen):
    before = medians(screen)
    assert before != sorted(before)
    screen.click(MEDIAN)
    assert medians(screen) == sorted(before)
    assert sorted_by(screen) == "ascending"
    screen.click(MEDIAN)
    assert medians(screen) == sorted(before, reverse=True)
    assert sorted_by(screen) == "descending"
    screen.click(MEDIAN)
    assert medians(screen) == before
    assert sorted_by(screen) is None


def test_sorting_by_keyboard(screen):
    before = medians(screen)
    screen.ask(f"document.querySelector('{TABLE} thead th:nth-child(5) button').focus()")
    screen.press("Tab")
    assert screen.ask(f"document.activeElement === document.querySelector('{MEDIAN}')")
    screen.press("Enter")
    assert medians(screen) == sorted(before)
    screen.press(" ")
    assert medians(screen) == sorted(before, reverse=True)


def test_sorting_words_and_empty_cells(screen):
    kernels = f"[...document.querySelectorAll('{TABLE} tbody tr')].map(r => r.cells[1].textContent)"
    screen.ask(f"document.querySelector('{TABLE} thead th:nth-child(2) button').click()")
    found = screen.ask(kernels)
    assert found == sorted(found)
    ladder = "#ladder table"
    column = f"[...document.querySelectorAll('{ladder} tbody tr')].map(r => r.cells[6].textContent)"
    for _ in range(2):  # up and down: the rung without a time stays last
        screen.ask(f"document.querySelector('{ladder} thead th:nth-child(7) button').click()")
        assert screen.ask(column) == ["2", ""]


def test_no_errors_and_no_network(browser):
    assert browser.heard("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled") == []
    asked = [event["request"]["url"] for event in browser.heard("Network.requestWillBeSent")]
    assert [url.partition(":")[0] for url in asked] == ["file"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_legible(screen, scheme):
    screen.media(scheme)
    dark = screen.ask("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 23)"
    assert dark == (scheme == "dark")
    assert screen.ask(CONTRAST) == []


@pytest.mark.parametrize("width", [400, 768, 1280])
def test_page_never_scrolls_sideways(screen, width):
    screen.resize(width)
    assert screen.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert screen.ask(PAST_THE_EDGE) == []
    if width == 400:  # but wide tables do, each in itself
        inner = f"document.querySelector('{TABLE}').parentElement"
        assert screen.ask(f"{inner}.scrollWidth > {inner}.clientWidth")


def test_on_paper_nothing_is_cut_off(screen):
    screen.resize(A4)
    screen.media("dark", "print")  # a dark screen prints on white all the same
    assert screen.ask("getComputedStyle(document.documentElement).getPropertyValue('--ink').trim()") == "#1b2127"
    assert screen.ask(
        "[...document.querySelectorAll('.scroll')].every(e => getComputedStyle(e).overflowX === 'visible')"
    )
    assert screen.ask(PAST_THE_EDGE) == []
    assert screen.ask("getComputedStyle(document.querySelector('tbody tr')).breakInside") == "avoid"
    assert screen.pdf().startswith(b"%PDF-")


def test_without_script_every_number_is_there(tmp_path, screen):
    """What the script adds is buttons: no text comes or goes."""
    plain = page.render(report(), compare(report(), report()))
    shown = screen.ask("document.body.textContent.length")
    screen.call("Emulation.setScriptExecutionDisabled", value=True)
    path = tmp_path / "plain.html"
    path.write_text(plain, encoding="utf-8")
    screen.events.clear()
    screen.open(path)
    assert screen.ask("document.querySelectorAll('thead button').length") == 0
    assert screen.ask("document.body.textContent.length") == shown
