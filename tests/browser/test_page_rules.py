"""The whole page: its tabs, phones, dark rooms, keyboards, and rules of accessibility.

With SCREENSHOTS=FOLDER all tabs are also drawn there, as the pages show them.
"""

import os
from pathlib import Path

import pytest

TABS = ("steering", "sizes", "many")
LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True},
}


def ready(page, tab):
    """Wait until a tab shows its first picture."""
    if tab == "steering":
        page.locator("#filter-slider").fill("2.2")
        page.wait_for_function("() => document.getElementById('filter-scale').value === '2.20'")
    elif tab == "sizes":
        page.wait_for_function("() => document.querySelector('#answers .named') && !document.querySelector('.busy')")
        page.wait_for_selector("#curve-section:not([hidden])")
    else:
        page.wait_for_selector("#objects li")


def shown(model):
    about = model.describe()
    return [tab for tab, there in zip(TABS, (about["steering"], True, about["finder"]), strict=True) if there]


@pytest.mark.parametrize("look", LOOKS)
def test_no_rule_of_accessibility_is_broken_and_nothing_scrolls_sideways(visit, model, look):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    for tab in shown(model):
        page = visit(tab, **LOOKS[look])
        ready(page, tab)
        found = axe.run(page).response["violations"]
        assert [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found] == []
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        if folder := os.environ.get("SCREENSHOTS"):
            page.screenshot(path=Path(folder) / f"demo-{tab}-{look}.png", full_page=look != "phone")


def test_at_twice_the_zoom_nothing_scrolls_sideways(visit, model):
    for tab in shown(model):
        page = visit(tab, viewport={"width": 600, "height": 450}, device_scale_factor=2)
        ready(page, tab)
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_slider_and_answers_are_on_one_screen_of_a_phone(visit):
    page = visit("sizes", **LOOKS["phone"])
    ready(page, "sizes")
    for place in (0, 200, 500):
        page.evaluate(f"() => scrollTo(0, {place})")
        for name in ("#size", "#answers .way:last-child"):
            box = page.locator(name).bounding_box()
            assert box["y"] >= 0
            assert box["y"] + box["height"] <= 844


def test_tabs_are_chosen_by_mouse_keyboard_and_address(visit, model):
    tabs = shown(model)
    page = visit(tabs[-1])
    assert page.get_attribute(f"#tab-{tabs[-1]}", "aria-selected") == "true"
    page.focus(f"#tab-{tabs[-1]}")
    page.keyboard.press("Home")
    assert page.locator(f"#{tabs[0]}").is_visible()
    assert page.evaluate("() => document.activeElement.id") == f"tab-{tabs[0]}"
    for tab in tabs[1:]:
        page.keyboard.press("ArrowRight")
        assert page.locator(f"#{tab}").is_visible()
        assert page.url.endswith(f"#{tab}")
    page.click(f"#tab-{tabs[0]}")
    assert [page.locator(f"#{tab}").is_visible() for tab in tabs] == [True] + [False] * (len(tabs) - 1)
    ready(page, tabs[0])


def test_what_a_visitor_first_sees_names_the_paper_and_what_moves(visit, model):
    """On one screen, without a click."""
    page = visit("", reduced_motion="no-preference")
    words = page.inner_text("body")
    assert "recognise things at any size" in words
    assert "Ghosh and Gupta" in words
    if "steering" in shown(model):
        box = page.locator("#response-view").bounding_box()
        assert box["y"] + box["height"] <= 900
        page.wait_for_function("() => document.getElementById('filter-slider').farthest > 1.5")
