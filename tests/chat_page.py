"""Use of the server's chat page in a browser: Markdown, settings, an answer, stopping, thinking, colours.

    python tests/chat_page.py http://127.0.0.1:8000

With more than one model at the address: the choice of a model.
"""

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request

base = sys.argv[1]


def fetch(url, body=None, method=None):
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise AssertionError(error.read().decode()) from error


class Browser:
    """A browser by the protocol of WebDriver."""

    def __init__(self):
        self.driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
        port = next(found.group(1) for line in self.driver.stdout if (found := re.search(r"on port (\d+)", line)) and "successfully" in line)
        self.base = f"http://127.0.0.1:{port}/session"
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]}
        wanted = {"capabilities": {"alwaysMatch": {"browserName": "chrome", "goog:chromeOptions": options}}}
        self.base += "/" + fetch(self.base, wanted)["value"]["sessionId"]

    def post(self, path, **body):
        return fetch(f"{self.base}/{path}", body)["value"]

    def script(self, text, *arguments):
        return self.post("execute/sync", script=text, args=arguments)

    def element(self, selector):
        return next(iter(self.post("element", using="css selector", value=selector).values()))

    def click(self, selector):
        self.post(f"element/{self.element(selector)}/click")

    def type(self, selector, text):
        element = self.element(selector)
        self.post(f"element/{element}/clear")
        self.post(f"element/{element}/value", text=text)

    def wait(self, text, *arguments):
        for _ in range(600):
            if found := self.script(text, *arguments):
                return found
            time.sleep(0.05)
        raise AssertionError(f"never true: {text}")

    def close(self):
        fetch(self.base, method="DELETE")
        self.driver.terminate()
        self.driver.wait()


def idle(browser):
    browser.wait("return !running && document.querySelector('#send').textContent === 'Send'")


def markdown(browser):
    html = lambda text: browser.script("return make('div', markdown(arguments[0])).innerHTML", text)
    for text, expected in [
        ("a **b** *c* `d` ~~e~~\nf", "<p>a <strong>b</strong> <em>c</em> <code>d</code> <del>e</del>\nf</p>"),
        ("# A\n## B *c*", "<h1>A</h1><h2>B <em>c</em></h2>"),
        ("- a\n- b\n  1. c\n  2. d\n- e", "<ul><li>a</li><li>b<ol start=\"1\"><li>c</li><li>d</li></ol></li><li>e</li></ul>"),
        ("3. a\n4. b", "<ol start=\"3\"><li>a</li><li>b</li></ol>"),
        ("> a\n> - b", "<blockquote><p>a</p><ul><li>b</li></ul></blockquote>"),
        ("a|b\n-|-\n1|`2`", "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td><code>2</code></td></tr></table>"),
        ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
        ("2 * 3 * 4 and a_b_c", "<p>2 * 3 * 4 and a_b_c</p>"),
        ("[a](https://example.org/?b=c)", '<p><a href="https://example.org/?b=c" target="_blank" rel="noopener noreferrer">a</a></p>'),
        # nothing that a model writes is HTML
        ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
        ("[a](javascript:alert(1))", "<p>[a](javascript:alert(1))</p>"),
        ("`<script>` [<b>](https://a.b/\"onclick=\"c)", '<p><code>&lt;script&gt;</code> <a href="https://a.b/&quot;onclick=&quot;c" target="_blank" rel="noopener noreferrer">&lt;b&gt;</a></p>'),
    ]:
        assert html(text) == expected, f"{text!r}: {html(text)}"
    code = html("```py\nx = '<b>' # **no**\n```\nb")
    assert "<code>x = '&lt;b&gt;' # **no**</code>" in code and "Copy</button>" in code and code.endswith("<p>b</p>"), code
    # a text that isn't complete yet, and one that would take long to read
    assert "<pre>" in html("```\nx") and html("**a") == "<p>**a</p>" and html("") == ""
    for text in ("*" * 20000, "`" * 20000, "[" * 20000, "> " * 300, "- a\n" * 3000, "**a " * 5000, "|" * 20000 + "\n|-"):
        begin = time.time()
        html(text)
        assert time.time() - begin < 5, f"{text[:8]} takes {time.time() - begin} s"


def choice(browser, names):
    """The first model is chosen at first, another one when it is selected, and again at the next visit."""
    shown = "return [at('model').hidden, at('models').value, ...[...at('models').options].map(option => option.value)]"
    browser.post("url", url=base)
    browser.wait("return at('note').textContent.includes('tokens of context')")
    assert browser.script(shown) == [True, names[0], *names]
    browser.script("at('models').value = arguments[0]; at('models').onchange()", names[1])
    assert json.loads(browser.script("return asked()"))["model"] == names[1]
    browser.post("refresh")
    browser.wait("return at('models').value === arguments[0]", names[1])
    browser.script("at('models').value = arguments[0]; at('models').onchange()", names[0])
    browser.type("#text", "Good morning")
    browser.click("#send")
    idle(browser)
    assert browser.script("return messages.length") == 2 and not browser.script("return document.querySelector('.error')")


def main():
    browser = Browser()
    try:
        names = [model["id"] for model in fetch(base + "/v1/models")["data"]]
        if len(names) > 1:
            choice(browser, names)
            return print("chat page: ok")
        browser.post("url", url=base)
        name = fetch(base + "/health")["model"]
        browser.wait("return document.querySelector('#model').textContent === arguments[0]", name)
        markdown(browser)

        browser.click("#open")
        for field, value in (("#system", "You are a bear."), ("#temperature", "0"), ("#max_tokens", "12")):
            browser.type(field, value)
        browser.script("at('theme').value = 'dark'; at('theme').onchange()")
        assert browser.script("return getComputedStyle(document.documentElement).colorScheme") == "dark"
        browser.click("#settings button")
        browser.post("refresh")
        assert browser.script("return SETTINGS.map(name => at(name).value)") == ["You are a bear.", "0", "12", "dark"], "settings are kept"

        asked = [{"role": "system", "content": "You are a bear."}, {"role": "user", "content": "Good morning"}]
        expected = fetch(base + "/v1/chat/completions", {"messages": asked, "temperature": 0, "max_tokens": 12})["choices"][0]["message"]["content"]
        browser.type("#text", "Good morning")
        browser.click("#send")
        idle(browser)
        assert browser.script("return messages") == [asked[1], {"role": "assistant", "content": expected}]
        shown = browser.script("return document.querySelector('.assistant .answer').textContent")
        assert shown.split() == expected.split(), (shown, expected)
        assert "out at" in browser.script("return document.querySelector('.assistant .speed').textContent")

        # an answer that is stopped stays as it is, and ends at the server
        browser.script("at('max_tokens').value = ''; at('temperature').value = '1.5'")
        browser.type("#text", "And then?")
        browser.click("#send")
        browser.wait("return document.querySelectorAll('.answer')[1]?.textContent.length > 5 || !running")
        browser.script("running?.abort()")
        idle(browser)
        assert browser.script("return messages.length") == 4 and not browser.script("return document.querySelector('.error')")
        for _ in range(100):
            if fetch(base + "/health")["active"] == 0:
                break
            time.sleep(0.05)
        else:
            raise AssertionError("the server writes on")

        # an answer of a model that thinks, in pieces that end anywhere
        deltas = [{"reasoning_content": "Two and "}, {"reasoning_content": "two."}, {"content": "It is **fo"}, {"content": "ur**."}]
        lines = "".join(f"data: {json.dumps({'choices': [{'delta': delta}]})}\n\n" for delta in deltas) + "data: [DONE]\n\n"
        pieces = [lines[i : i + 37] for i in range(0, len(lines), 37)]
        browser.script(
            "window.fetch = async () => new Response(new ReadableStream({ start(c) { for (const piece of arguments[0].pieces)"
            " c.enqueue(new TextEncoder().encode(piece)); c.close(); } }))".replace("arguments[0].pieces", json.dumps(pieces))
        )
        browser.type("#text", "2 + 2?")
        browser.click("#send")
        idle(browser)
        last = "document.querySelector('.assistant:last-of-type')"
        assert browser.script(f"return {last}.querySelector('.thinking div').textContent") == "Two and two."
        assert browser.script(f"return {last}.querySelector('.thinking').open") is False, "thinking is folded behind an answer"
        assert browser.script(f"return {last}.querySelector('.answer').innerHTML") == "<p>It is <strong>four</strong>.</p>"
        assert browser.script("return messages[5].content") == "It is **four**."

        # errors are shown, and the message can be sent again
        browser.script("window.fetch = async () => new Response(JSON.stringify({error: {message: '<b>no</b>'}}), {status: 400})")
        browser.type("#text", "More")
        browser.click("#send")
        idle(browser)
        assert browser.script("return document.querySelector('.error').textContent") == "<b>no</b>"
        assert browser.script("return messages.length") == 6
        foreign = browser.script("return performance.getEntriesByType('resource').filter(r => !r.name.startsWith(location.origin)).length")
        assert foreign == 0, "the page needs no network"
        browser.click("#reset")
        assert browser.script("return messages.length + at('talk').childNodes.length") == 0
    finally:
        browser.close()
    print("chat page: ok")


main()
