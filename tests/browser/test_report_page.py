"""The report in a real browser: headless Chromium opens it from disk."""

import json
import re
import shutil
import tempfile
from dataclasses import replace

import pytest
from playwright.sync_api import sync_playwright

from kvpp_dag.trace.overlap import analyze
from kvpp_dag.trace.report import to_html
from tests.trace.report_data import make_recordings

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = [
    "<script>window.hit = 1</script>",
    "</script><img src=x onerror='window.hit = 1'>",
    "\"quoted\" and 'quoted' &lt;i&gt; \u2028 \u2029",
    "<b>bold</b> %{y} <a href='javascript:window.hit=1'>link</a>",
    "x" * 400,
    "layer 5",
]
RANGE = "document.getElementById('timeline').layout.xaxis.range"
BROADCASTS = "#timeline .barlayer .trace:nth-child(3) .point path"


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium")
    assert path, "No chromium was found on the path; the tests of the page need it."
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=path, headless=True, args=ARGUMENTS
        )
        context.set_default_timeout(120_000)
        yield context
        context.close()


@pytest.fixture(scope="module")
def recordings():
    return make_recordings()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory, recordings):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(to_html(recordings, analyze(recordings)), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser):
    """A function that opens a file as a page; afterwards no page may have complained or asked for anything else."""
    pages, problems, requests = [], [], []

    def open_page(path, *, width=1280, scheme="light", check=True):
        page = browser.new_page()
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.on("console", lambda message: problems.append(message.text) if check else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("#layers .main-svg")
        pages.append((page, path))
        return page

    yield open_page
    expected = [path.as_uri() for _, path in pages]
    for page, _ in pages:
        page.close()
    assert problems == []
    assert requests == expected


def figure(page, name):
    """A summary figure as the page shows it, without the small print."""
    return (
        page.locator("#figures div", has=page.locator(f"dt:text-is('{name}')"))
        .locator("dd")
        .evaluate("e => e.firstChild.textContent")
    )


def milliseconds(ns):
    value = ns / 1e6
    return f"{value:.{1 if value >= 100 else 2 if value >= 10 else 3}f} ms"


def test_opens_from_disk_and_draws_both_streams_of_all_ranks(opened, page_file):
    page = opened(page_file)
    lanes = page.locator("#timeline .ytick").all_text_contents()
    assert [lane.strip() for lane in lanes] == [
        f"rank {rank}, {stream}" for rank in range(2) for stream in ("compute", "transfer")
    ]
    assert page.locator(BROADCASTS).count() == 2 * 12


def test_the_content_security_policy_forbids_requests(opened, page_file, browser):
    fetch = """() => new Promise((done) => {
        document.addEventListener("securitypolicyviolation", (e) => done(e.effectiveDirective));
        fetch("http://127.0.0.1:9/x").catch(() => setTimeout(() => done("tried"), 500));
    })"""
    page = opened(page_file, check=False)
    assert page.evaluate(fetch) == "connect-src"
    control = browser.new_page()
    control.goto("about:blank")
    assert control.evaluate(fetch) == "tried"
    control.close()


def test_hover_says_layer_bytes_owner_slot_and_why_it_started(opened, page_file):
    page = opened(page_file)
    # The chart is drawn for the forward with the most exposed time.
    box = page.locator(BROADCASTS).nth(3).bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    text = page.locator("#timeline .hoverlayer .hovertext").text_content()
    for words in (
        "broadcast[3] on rank 0, transfer stream",
        "layer 3: model.layers.3.self_attn.attn",
        "owner rank 0, slot 1",
        "sent 5,898,240 bytes, needed 2,211,840",
        "submitted by the host at",
        "after broadcast[2] ended at",
    ):
        assert words in text
    page.mouse.move(box["x"], 5)
    page.wait_for_function("!document.querySelector('#timeline .hoverlayer .hovertext')")


def test_drag_zooms_and_double_click_and_buttons_go_back(opened, page_file):
    page = opened(page_file)
    whole = page.evaluate(RANGE)
    plot = page.locator("#timeline .nsewdrag").first.bounding_box()
    y = plot["y"] + plot["height"] / 2
    page.mouse.move(plot["x"] + 0.25 * plot["width"], y)
    page.mouse.down()
    page.mouse.move(plot["x"] + 0.5 * plot["width"], y, steps=8)
    page.mouse.up()
    page.wait_for_function(f"{RANGE}[0] > 0")
    low, high = page.evaluate(RANGE)
    assert low == pytest.approx(0.25 * whole[1], rel=0.05)
    assert high == pytest.approx(0.5 * whole[1], rel=0.05)
    page.get_by_role("button", name="Whole forward").click()
    assert page.evaluate(RANGE) == whole
    page.get_by_role("button", name="Zoom in").click()
    assert page.evaluate(RANGE) == pytest.approx([whole[1] / 4, 3 * whole[1] / 4])
    page.get_by_role("button", name="Later").click()
    assert page.evaluate(RANGE) == pytest.approx([whole[1] / 2, whole[1]])
    page.mouse.dblclick(plot["x"] + 0.9 * plot["width"], y)
    page.wait_for_function(f"Math.abs({RANGE}[0]) < 1e-9")
    assert page.evaluate(RANGE) == pytest.approx(whole)


def test_another_forward_and_another_rank_have_their_own_figures(opened, page_file, recordings):
    analyses = analyze(recordings)
    page = opened(page_file)
    seen = []
    for rank, number in ((0, 2), (0, 1), (1, 1), (1, 2)):
        page.locator("#rank").select_option(str(rank))
        page.locator("#forward").select_option(str(number))
        overlap = next(f for f in analyses[rank] if f.number == number)
        seen.append(figure(page, "Exposed"))
        assert seen[-1] == milliseconds(overlap.exposed_ns)
        assert figure(page, "Duration") == milliseconds(overlap.duration_ns)
        assert figure(page, "If transfers took no time") == milliseconds(overlap.free_transfers_ns)
        assert figure(page, "If compute took no time") == milliseconds(overlap.free_compute_ns)
        assert figure(page, "Overlap") == f"{overlap.overlap_percent:.2f} %"
        path = {step.node for step in overlap.critical_path if step.kind is not None}
        marked = page.locator("#graph .critical[data-node]").evaluate_all(
            "all => all.map(e => e.dataset.node)"
        )
        assert set(marked) == path
        assert 0 < len(path) < 61
    assert len(set(seen)) == 4


def test_a_forward_without_transfers_says_that_nothing_was_waited_for(opened, page_file):
    page = opened(page_file)
    page.locator("#forward").select_option("0")
    assert page.locator("#causes").inner_text() == "Compute waited for no transfer in this forward."
    assert figure(page, "Bytes sent") == "0 B"


def test_everything_can_be_chosen_by_keyboard_with_visible_focus(opened, page_file):
    page = opened(page_file)
    first = figure(page, "Exposed")
    page.locator("#forward").focus()
    page.keyboard.press("ArrowUp")
    assert figure(page, "Exposed") != first
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert figure(page, "Exposed") == first
    page.locator(".skip").focus()
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate("""() => { const e = document.activeElement, s = getComputedStyle(e);
            return [e.id || e.dataset.zoom || e.tagName, s.outlineStyle, parseFloat(s.outlineWidth)]; }""")
        )
    names = [name for name, _, _ in reached]
    assert {"rank", "forward", "previous", "in", "all", "timeline", "graph"} <= {*names}, names
    assert all(style == "solid" and width >= 2 for _, style, width in reached), reached


def test_arrow_keys_step_through_what_the_rank_ran(opened, page_file):
    page = opened(page_file)
    page.locator("#timeline").focus()
    texts = []
    for _ in range(3):
        page.keyboard.press("ArrowRight")
        texts.append(page.locator("#selected").inner_text().split("\n")[0])
    assert len(set(texts)) == 3
    assert all("on rank 0" in text for text in texts)
    page.keyboard.press("ArrowLeft")
    assert page.locator("#selected").inner_text().split("\n")[0] == texts[1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_width_needs_sideways_scrolling(opened, page_file, width, scheme):
    page = opened(page_file, width=width, scheme=scheme)
    extent = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    page.locator("details summary").click()
    scrolled, shown = page.evaluate(extent)
    assert scrolled == shown == width
    assert page.evaluate("document.getElementById('graph').scrollWidth") > width
    page.evaluate(
        "document.querySelector('main').append(Object.assign(document.createElement('div'),"
        "{style: 'width: 2000px', textContent: 'x'}))"
    )
    assert page.evaluate(extent)[0] > width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_schemes(opened, page_file, scheme):
    page = opened(page_file, scheme=scheme)
    colours = page.evaluate("""() => ["--panel", "--ink", "--quiet", "--accent", "--page"].map((name) =>
        getComputedStyle(document.documentElement).getPropertyValue(name).trim())""")
    panel, ink, quiet, accent, behind = map(luminance, colours)
    assert (panel > 0.5) == (scheme == "light")
    for text in (ink, quiet, accent):
        for background in (panel, behind):
            bright, dark = max(text, background), min(text, background)
            assert (bright + 0.05) / (dark + 0.05) >= 4.5


def luminance(colour):
    """Relative luminance of #rrggbb as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_kinds_can_be_told_apart_without_colour(opened, page_file):
    page = opened(page_file)
    patterns = {}
    for trace in page.locator("#timeline .barlayer .trace").all():
        point = trace.locator(".point path").first
        fill = point.evaluate("e => getComputedStyle(e).fill")
        pattern = re.search(r"#([^\"')]+)", fill) if "url" in fill else None
        patterns[len(patterns)] = pattern and page.locator(
            f"[id='{pattern[1]}'] path, [id='{pattern[1]}'] circle"
        ).first.evaluate("e => e.tagName + (e.getAttribute('d') ?? '')")
    # compute plain, attend, broadcast and wait patterned, and the outline of the critical path without a fill
    assert patterns[0] is None
    assert len({patterns[1], patterns[2], patterns[3]} - {None}) == 3
    legend = page.locator("#timeline .legendtext").all_text_contents()
    assert legend == ["compute", "attend", "broadcast", "exposed wait", "critical path", "events"]


def test_hostile_names_stay_text(opened, browser, tmp_path):
    recordings = [
        replace(r, forwards=(*r.forwards[:-1], replace(r.forwards[-1], error=HOSTILE[1])))
        for r in make_recordings(layers=len(HOSTILE), names=HOSTILE, clock=HOSTILE[0])
    ]
    path = tmp_path / "hostile.html"
    path.write_text(to_html(recordings, analyze(recordings)), encoding="utf-8")
    for width in (1280, 390):
        page = opened(path, width=width)
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("window.hit") is None
        assert HOSTILE[1] in page.locator("#about").text_content()
        waited = page.locator("#waits td[data-label=Name]").all_text_contents()
        assert len(waited) > 2
        assert {*waited} <= {*HOSTILE}
        assert page.locator("#plan details td[data-label=Name]").all_text_contents() == HOSTILE
        for layer, name in enumerate(HOSTILE):
            page.locator("#timeline").scroll_into_view_if_needed()
            box = page.locator(BROADCASTS).nth(layer).bounding_box()
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            label = page.locator("#timeline .hoverlayer .hovertext", has_text=f"layer {layer}:")
            shown = re.sub(r"\s", "", label.text_content())
            assert re.sub(r"\s", "", name) in shown
            assert label.locator("a").count() == 0
        assert page.locator("img, main b").count() == 0
    control = browser.new_page()
    control.set_content(f"<p>{HOSTILE[1]}</p>")
    control.wait_for_function("window.hit === 1")
    control.close()


def test_printing_is_light_and_fits_the_paper(opened, page_file):
    page = opened(page_file, scheme="dark")
    widths = []

    def note(found):
        widths.append(found)

    page.expose_function("note", note)
    page.evaluate("""window.addEventListener("beforeprint", () => note([
        getComputedStyle(document.documentElement).getPropertyValue("--panel").trim(),
        document.getElementById("timeline").layout.paper_bgcolor,
        document.querySelector("#timeline .main-svg").getBoundingClientRect().width]))""")
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.wait_for_function("!document.documentElement.classList.contains('print')")
    panel, drawn, width = widths[0]
    assert panel == drawn == "#ffffff"
    assert width < 720


def test_recordings_of_other_clocks_are_named_and_not_drawn_beside(opened, tmp_path):
    first, second = make_recordings()
    recordings = [first, replace(second, clock="host-2/monotonic")]
    path = tmp_path / "clocks.html"
    path.write_text(to_html(recordings, analyze(recordings)), encoding="utf-8")
    page = opened(path)
    assert page.locator("#timeline .ytick").count() == 2
    assert (
        page.locator("#timeline-note").inner_text() == "Not here, since stage or clock differ: rank 1."
    )


def test_a_page_without_forwards_says_so(browser, tmp_path):
    recordings = [replace(r, forwards=()) for r in make_recordings()]
    path = tmp_path / "empty.html"
    path.write_text(to_html(recordings, analyze(recordings)), encoding="utf-8")
    page = browser.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    assert "No forward was recorded" in page.locator("#about").inner_text()
    assert page.locator("#plan table").count() == 2
    assert not page.locator("#timeline").is_visible()
    assert errors == []
    assert json.loads(page.locator("#data").text_content())["forwards"] == []
    page.close()
