"""The page at /, in a real Chromium, on servers of its own with a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline import NGram
from paceline.pieces import MEANINGS
from paceline.server.app import PAGE
from tests.cli.checkpoints import TEMPLATE, write_checkpoint
from tests.server import browser
from tests.server.browser import Browser
from tests.server.serving import serving

LENGTH = 40_000  # tokens the tiny model has room for: an answer that long does not end before it is stopped
KEY = "a key of the tests"
IDLE = "document.body.dataset.state === 'idle'"
TOKENS = "[...document.querySelectorAll('.words .token')].map((one) => [one.textContent, one.className])"


@contextmanager
def served(folder: Path, template: str | None, drafter: Any = None, **settings: Any) -> Iterator[str]:
    """The address of a server whose tiny model has a long context."""
    write_checkpoint(folder, template)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": LENGTH}))
    with serving(folder, drafter, settings, max_model_len=LENGTH) as found:
        yield found.address


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("page") / "chat", TEMPLATE, NGram()) as found:
        yield found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """No template, no drafter, and a key."""
    with served(tmp_path_factory.mktemp("page") / "bare", None, api_key=KEY) as found:
        yield found


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if browser.find() is None:
        pytest.skip("there is no Chromium on this machine")
    with browser.browse(tmp_path_factory.mktemp("profile")) as found:
        yield found


def opened(chromium: Browser, address: str) -> Browser:
    chromium.look(1280, 800)
    chromium.open(f"{address}/")
    chromium.wait("document.querySelector('#health').textContent === 'ready'")
    chromium.said.clear()
    chromium.asked.clear()
    return chromium


@pytest.fixture
def page(chromium: Browser, address: str) -> Browser:
    return opened(chromium, address)


def send(page: Browser, text: str, wait: bool = True, **settings: Any) -> None:
    for name, value in settings.items():
        page.evaluate(f"document.querySelector('[name={name}]').value = {json.dumps(str(value))}")
    page.evaluate("document.querySelector('#prompt').focus()")
    page.type(text)
    page.press("Enter")
    if wait:
        page.wait(f"document.querySelector('#prompt').value === '' && {IDLE}")


def text_of(page: Browser, selector: str) -> list[str]:
    listed: list[str] = page.evaluate(
        f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)"
    )
    return listed


def answer(address: str, **body: Any) -> Any:
    told = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=120)
    assert told.status_code == 200, told.text
    return told.json()


def metric(address: str, name: str) -> float:
    """0 where nobody has counted yet."""
    found = re.search(rf"^{re.escape(name)} (\S+)$", httpx.get(f"{address}/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_every_token_has_the_text_and_the_mark_of_its_origin(page: Browser, address: str) -> None:
    send(page, "the rider in front", max_tokens=120)
    asked = {"messages": [{"role": "user", "content": "the rider in front"}], "temperature": 0, "max_tokens": 120}
    told = answer(address, **asked, return_provenance=True)
    expected = [
        [one["text"], "token accepted d0" if one["kind"] == "accepted" else f"token {one['kind']}"]
        for one in told["choices"][0]["provenance"]
    ]
    assert page.evaluate(TOKENS) == expected
    assert {look for _, look in expected} == {"token accepted d0", "token corrected", "token bonus", "token plain"}
    assert "".join(text_of(page, ".words")) == told["choices"][0]["message"]["content"]
    numbers = dict(zip(text_of(page, "#legend .token"), text_of(page, "#legend .number")))
    looks = [look for _, look in expected]
    assert numbers == {"ngram": str(looks.count("token accepted d0"))} | {
        kind: str(looks.count(f"token {kind}")) for kind in ("corrected", "bonus", "plain")
    }


def test_origins_are_marked_by_more_than_colour(page: Browser) -> None:
    send(page, "the rider in front", max_tokens=120)
    marks = []
    for kind in MEANINGS:
        look = page.evaluate(f"({{...getComputedStyle(document.querySelector('.words .{kind}'))}})")
        marks.append((look["fontStyle"], look["textDecorationLine"], look["textDecorationStyle"]))
    assert len(set(marks)) == len(marks), marks


def test_each_drafter_has_a_mark_of_its_own(page: Browser) -> None:
    marks = page.evaluate(
        """import('/page/answer.js').then(({marks}) => ['one', 'two', 'three', 'four', 'five', 'one'].map((name) => {
          const span = document.createElement('span'); span.className = marks('accepted', name);
          document.body.append(span); return getComputedStyle(span).textDecorationStyle; }))"""
    )
    assert len(set(marks[:4])) == 4 and marks[4] == marks[5] == marks[0], "further ones begin again"


def test_the_page_means_by_an_origin_what_the_terminal_means() -> None:
    script = (PAGE / "answer.js").read_text(encoding="utf-8")
    assert dict(re.findall(r'^  (\w+): "(.+)",$', script, re.MULTILINE)) == MEANINGS


def test_the_mouse_shows_a_tokens_probability_and_alternatives(page: Browser, address: str) -> None:
    send(page, "the line goes on", max_tokens=20)
    place = next(place for place, (text, _) in enumerate(page.evaluate(TOKENS)) if place and text.strip())
    page.point(f".words .token:nth-child({place + 1})")
    page.wait("!document.querySelector('#tip').hidden")
    asked = {"messages": [{"role": "user", "content": "the line goes on"}], "temperature": 0, "max_tokens": 20}
    told = answer(address, **asked, logprobs=True, top_logprobs=5)["choices"][0]["logprobs"]["content"][place]
    share = page.evaluate(f"(100 * Math.exp({told['logprob']})).toFixed(1)")
    tip = page.evaluate("document.querySelector('#tip').innerText")
    assert f"probability {share} %" in tip
    assert len(text_of(page, "#tip li")) == 5
    page.point("header h1")
    page.wait("document.querySelector('#tip').hidden")


def test_the_keyboard_goes_from_token_to_token(page: Browser) -> None:
    send(page, "the line goes on", max_tokens=20)
    page.evaluate("document.querySelector('#log').focus()")
    page.press("Tab")
    focused = "[...document.querySelectorAll('.words .token')].indexOf(document.activeElement)"
    assert page.evaluate(focused) == 0
    for key, place in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", 19), ("Home", 0)):
        page.press(key)
        assert page.evaluate(focused) == place
        assert not page.evaluate("document.querySelector('#tip').hidden")
    assert len(page.evaluate("[...document.querySelectorAll('.words [tabindex=\"0\"]')]")) == 1
    page.press("Tab")
    assert page.evaluate("document.activeElement.id") == "prompt"


@pytest.mark.parametrize("temperature", [0, 1])
def test_side_by_side_the_texts_are_equal(page: Browser, temperature: int) -> None:
    page.evaluate("Math.random = () => 0.25")  # the seed it draws where none was given
    page.point("#compare", click=True)
    send(page, "a line of riders", max_tokens=60, temperature=temperature)
    drafted, plain = text_of(page, ".words")
    assert drafted == plain != ""
    assert text_of(page, ".answer h3") == ["With speculation", "Without"]
    (verdict,) = text_of(page, ".verdict")
    assert re.match(r"Equal texts, token for token \(\d+ tokens\)\. .* tokens/s: ", verdict)
    assert verdict.endswith(f" Both were drawn with seed {2**29}.") == (temperature > 0)
    kinds = page.evaluate(
        "[...document.querySelectorAll('.answer')].map((one) => one.querySelectorAll('.accepted').length)"
    )
    assert kinds[1] == 0 and (kinds[0] > 0 or temperature), "drawn tokens of a random model repeat nothing"
    assert all("tokens/s" in foot for foot in text_of(page, ".foot"))


def test_texts_that_differ_are_said_to_differ(page: Browser) -> None:
    page.evaluate(
        """(() => { const real = fetch; window.fetch = (route, given) => {
          const body = given?.body && JSON.parse(given.body);
          if (body?.speculation) given = {...given, body: JSON.stringify({...body, seed: body.seed + 1})};
          return real(route, given); }; })()"""
    )
    page.point("#compare", click=True)
    send(page, "a line of riders", max_tokens=60, temperature=1, seed=3)
    assert re.fullmatch(r"The texts differ from token \d+ on\.", text_of(page, ".verdict")[0])
    assert page.evaluate("document.querySelector('.verdict').classList.contains('bad')")


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_aborts_the_answer_in_the_engine(page: Browser, address: str, how: str) -> None:
    counted = 'paceline_requests_total{reason="abort"}'
    before = metric(address, counted)
    send(page, "the next rider", wait=False, max_tokens=LENGTH - 100)
    page.wait("document.querySelectorAll('.words .token').length > 3")
    if how == "button":
        page.point("#stop", click=True)
    else:
        page.press("Escape")
    page.wait(IDLE)
    assert text_of(page, ".foot")[0].endswith("stopped")
    assert 0 < len(page.evaluate(TOKENS)) < LENGTH - 100
    page.wait(f"fetch('metrics').then((told) => told.text()).then((text) => text.includes('{counted} {before + 1}'))")
    send(page, "and the next", max_tokens=5)
    assert len(text_of(page, ".words")) == 2, "the conversation goes on"


def test_an_answer_is_laid_out_once_a_frame_however_fast_it_comes(page: Browser) -> None:
    page.evaluate(
        r"""(() => { const real = fetch; window.fetch = (route, given) => {
          if (!route.startsWith('v1/')) return real(route, given);
          const told = (at) => ({choices: [{delta: {content: 'word '}, finish_reason: at < 4999 ? null : 'length',
            provenance: [{token_id: at, text: 'word ', kind: 'plain', drafter: null, round: at, position: 0}]}]});
          const lines = Array.from({length: 5000}, (_, at) => `data: ${JSON.stringify(told(at))}\n\n`);
          return Promise.resolve(new Response(lines.join('') + 'data: [DONE]\n\n')); };
          window.frames_shown = window.feet = 0;
          const frame = () => { window.frames_shown += 1; requestAnimationFrame(frame); }; requestAnimationFrame(frame);
          new MutationObserver((all) => { window.feet += all.filter((one) => one.target.className === 'foot').length; })
            .observe(document.body, {childList: true, subtree: true}); })()"""
    )
    send(page, "the rider")
    assert len(page.evaluate(TOKENS)) == 5000
    assert re.match(r"5000 tokens .*cut at max tokens$", text_of(page, ".foot")[0])
    feet, frames = page.evaluate("[window.feet, window.frames_shown]")
    assert 0 < feet <= frames + 1, "the last is told when the answer has ended"
    ends = "Math.abs(log.scrollHeight - log.scrollTop - log.clientHeight)"
    page.wait(f"(() => {{ const log = document.querySelector('#log'); return {ends} < 40; }})()")


def test_a_reader_who_scrolls_away_is_left_there(page: Browser) -> None:
    log, shown = "document.querySelector('#log')", "document.querySelectorAll('.words .token').length"
    send(page, "the next rider", wait=False, max_tokens=LENGTH - 100)
    page.wait(f"{log}.scrollTop > 400")
    followed = page.evaluate(f"(() => {{ const at = {log}.scrollTop; {log}.scrollTop = 100; return at; }})()")
    page.wait(f"{shown} > {page.evaluate(shown) + 300}")
    assert page.evaluate(f"{log}.scrollTop") == 100
    further = int(followed) + 50  # and still far from the end
    page.wait(f"{log}.scrollHeight - {log}.clientHeight > {further + 200}")
    page.evaluate(f"{log}.scrollTop = {further}")
    page.wait(f"{shown} > {page.evaluate(shown) + 300}")
    assert page.evaluate(f"{log}.scrollTop") == further
    page.press("Escape")
    page.wait(IDLE)
    assert page.evaluate(f"{log}.scrollTop") == further


def test_a_conversation_is_sent_whole_and_can_be_begun_again(page: Browser, address: str) -> None:
    send(page, "the rider", max_tokens=8, system="be brief")
    send(page, "and the wind", max_tokens=8)
    first, second = text_of(page, ".words")
    said = ("system", "be brief"), ("user", "the rider"), ("assistant", first), ("user", "and the wind")
    messages = [{"role": role, "content": content} for role, content in said]
    assert answer(address, messages=messages, temperature=0, max_tokens=8)["choices"][0]["message"]["content"] == second
    page.point("#clear", click=True)
    send(page, "the rider", max_tokens=8)
    assert text_of(page, ".words") == [first]


def test_a_refusal_is_the_servers_sentence_and_nothing_else_is_lost(page: Browser, address: str) -> None:
    send(page, "the rider", top_p=0)
    body = {"messages": [{"role": "user", "content": "the rider"}], "top_p": 0}
    told = httpx.post(f"{address}/v1/chat/completions", json=body).json()["error"]["message"]
    assert text_of(page, ".error") == [told]
    send(page, "the wind", top_p=1, max_tokens=8)
    messages = [{"role": "user", "content": "the wind"}]
    assert (
        text_of(page, ".words")[-1]
        == answer(address, messages=messages, temperature=0, max_tokens=8)["choices"][0]["message"]["content"]
    )


def test_a_server_that_has_gone_is_said_to_have_gone(page: Browser) -> None:
    page.evaluate("window.fetch = () => Promise.reject(new TypeError('gone'))")
    page.point("#compare", click=True)
    send(page, "the rider")
    assert text_of(page, ".verdict") == ["There is nothing to compare."]
    assert text_of(page, ".error") == ["the server cannot be reached"]
    assert text_of(page, "#health") == ["the server cannot be reached"]


def test_an_engine_that_cannot_answer_is_told_of_in_the_servers_words(page: Browser) -> None:
    page.evaluate(
        """(() => { const real = fetch; window.fetch = async (route, given) => {
          const told = (content, status) => new Response(JSON.stringify(content), {status});
          if (route === 'health') return told({error: {message: 'the engine is starting again; before: it fell'}}, 503);
          if (route === 'stats') return told({...(await (await real(route)).json()), ready: false}, 200);
          return real(route, given); }; })()"""
    )
    page.wait("document.querySelector('#health').textContent === 'the engine is starting again; before: it fell'")


def test_the_charts_draw_what_the_answer_counted(page: Browser, address: str) -> None:
    send(page, "the rider in front", max_tokens=120)
    asked = {"messages": [{"role": "user", "content": "the rider in front"}], "temperature": 0, "max_tokens": 120}
    told = answer(address, **asked)["usage"]["speculation"]
    drafted, accepted = told["drafted_tokens"], told["accepted_tokens"]
    assert len(text_of(page, "#acceptance rect")) == len(told["drafted_by_position"])
    assert (
        f"newest answer, {page.evaluate(f'Math.round({100 * accepted / drafted})')} % of {drafted}."
        in (text_of(page, "#acceptance p")[0])
    )
    assert len(text_of(page, "#forwards rect")) == min(48, told["target_forwards"])
    assert f"{told['tokens_per_forward']:.2f} on average" in text_of(page, "#forwards p")[0]
    assert text_of(page, "#speed p")[0].startswith("Newest answer ") and text_of(page, "#speed circle") == [""]


def test_the_servers_own_figures_are_those_of_its_answers(address: str) -> None:
    before = httpx.get(f"{address}/stats").json()
    messages = [{"role": "user", "content": "the rider in front"}]
    told = [answer(address, messages=messages, max_tokens=most, n=2, temperature=0)["usage"] for most in (50, 60)]
    usages = [one["speculation"] for one in told]
    after = httpx.get(f"{address}/stats").json()
    assert (after["model"], after["chat"], after["drafter"]) == ("tiny", True, "ngram")
    assert after["tokens"] - before["tokens"] == sum(one["completion_tokens"] for one in told)
    assert after["forwards"] - before["forwards"] == sum(one["target_forwards"] for one in usages)
    for name in ("drafted", "accepted"):
        grown = sum(after[f"{name}_by_position"]) - sum(before[f"{name}_by_position"])
        assert 0 < grown == sum(one[f"{name}_tokens"] for one in usages)


def test_without_probabilities_none_are_asked_for(page: Browser) -> None:
    page.evaluate("document.querySelector('[name=probabilities]').click()")
    page.evaluate("document.querySelector('[name=speculation]').click()")
    send(page, "the rider in front", max_tokens=40)
    assert {look for _, look in page.evaluate(TOKENS)} == {"token plain"}
    place = next(place for place, (text, _) in enumerate(page.evaluate(TOKENS)) if text.strip())
    page.point(f".words .token:nth-child({place + 1})")
    page.wait("document.querySelector('#tip').innerText.includes('no probability was asked for')")


def test_nothing_comes_from_elsewhere_and_nothing_fails(page: Browser, address: str) -> None:
    page.open(f"{address}/")
    page.wait("document.querySelector('#health').textContent === 'ready'")
    send(page, "the rider", max_tokens=8)
    assert len(page.asked) > 4 and all(one.startswith(f"{address}/") for one in page.asked)
    assert page.said == []


@pytest.mark.parametrize("width", [320, 820, 1280])
def test_the_page_is_never_wider_than_its_window(page: Browser, width: int) -> None:
    page.look(width, 700)
    page.point("#compare", click=True)
    send(page, "rider" * 60, max_tokens=30)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_key_is_asked_for_and_a_model_without_template_completes(chromium: Browser, bare: str) -> None:
    page = opened(chromium, bare)
    assert "no drafter" in text_of(page, "#serving")[0]
    assert text_of(page, "#notice")[0].startswith("This model has no chat template: each prompt is completed")
    assert not page.evaluate("document.querySelector('#notice').hidden")
    send(page, "the rider in front", max_tokens=12)
    assert text_of(page, ".error")[0].startswith("the API key is missing or wrong")
    assert page.evaluate("document.activeElement.name") == "key"
    send(page, "the rider in front", max_tokens=12, key=KEY)
    body = {"prompt": "the rider in front", "temperature": 0, "max_tokens": 12}
    told = httpx.post(f"{bare}/v1/completions", json=body, headers={"Authorization": f"Bearer {KEY}"}).json()
    assert text_of(page, ".words")[-1] == told["choices"][0]["text"]
    place = next(place for place, (text, _) in enumerate(page.evaluate(TOKENS)) if text.strip())
    page.point(f".turn:last-child .token:nth-child({place + 1})")
    page.wait("document.querySelectorAll('#tip li').length > 1")


def test_the_page_has_no_address_of_another_host() -> None:
    for path in PAGE.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//[\w.]+\.\w{2,3}/", text), path.name
