"""The site: built without a warning, and driven in a headless Chromium at two widths."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest
from pages import NAV

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (1400, 390)
PAGES = [name.removesuffix(".md") + ".html" for name in NAV]

# Code blocks and tables that are cut: wider than their box. On a phone the box may scroll.
CUT = """width => [...document.querySelectorAll(".md-content pre > code, .md-content table")].map(element => {
  const box = element.tagName == "TABLE" ? element.closest(".md-typeset__scrollwrap") || element : element
  const scrolls = ["auto", "scroll"].includes(getComputedStyle(box).overflowX)
  const hidden = box.scrollWidth - box.clientWidth
  return hidden > 1 && (width > 1000 || !scrolls) ? `${hidden} px of ${element.innerText.slice(0, 60)}` : ""
}).filter(Boolean).concat(document.documentElement.scrollWidth > width ? ["the page itself is wider"] : [])"""
FOUND = """() => [...document.querySelectorAll(".md-search-result__item > a")].map(link => link.href)"""

# what a reader types -> the page that should come first
QUERIES = {
    "activation checkpointing": "planning.html",
    "activation recomputation": "cuda-graphs.html",
    "pretrain BERT": "bert.html",
    "bubble": "pipeline.html",
    "checkpoint": "checkpoints.html",
    "command-line options": "reference/configuration.html",
    "command line": "reference/command-line.html",
    "context parallelism": "glossary.html",
    "CUDA graphs": "cuda-graphs.html",
    "CUDA_DEVICE_MAX_CONNECTIONS": "reference/environment.html",
    "DeepEP": "moe.html",
    "distributed optimizer": "optimizer.html",
    "environment variables": "reference/environment.html",
    "evaluate perplexity": "evaluate.html",
    "expert load": "moe.html",
    "expert parallelism": "moe.html",
    "FASTMP_DEBUG": "reference/environment.html",
    "file formats": "reference/file-formats.html",
    "fine-tuning": "finetune.html",
    "fit into memory": "planning.html",
    "flash attention": "attention.html",
    "FSDP2": "fsdp2.html",
    "fused cross entropy": "tutorials/replace-a-loss.html",
    "generate text": "generate.html",
    "glossary": "glossary.html",
    "gradient accumulation": "train.html",
    "H200 measured": "gpu.html",
    "hang": "faults.html",
    "hugging face": "transformers.html",
    "install": "install.html",
    "kubernetes": "many-machines.html",
    "KV cache": "generate.html",
    "learning rate schedule": "learning-rates.html",
    "liger": "from-liger.html",
    "manifest.json": "reference/file-formats.html",
    "megatron checkpoints": "from-megatron.html",
    "metrics.jsonl": "reference/metrics.html",
    "mixture of experts": "moe.html",
    "muon": "muon.html",
    "NaN loss": "troubleshooting.html",
    "NCCL_GRAPH_REGISTER": "troubleshooting.html",
    "nsight": "tutorials/profile-on-h100.html",
    "out of memory": "troubleshooting.html",
    "overlap communication": "how-to/overlap.html",
    "packed documents": "attention.html",
    "pipeline parallelism": "pipeline.html",
    "quickstart": "quickstart.html",
    "reinforcement learning": "reinforcement-learning.html",
    "resume": "checkpoints.html",
    "sequence parallelism": "glossary.html",
    "slurm": "many-machines.html",
    "supported models": "reference/supported.html",
    "tensorboard": "reference/metrics.html",
    "token dispatcher": "moe.html",
    "tokenizer": "data.html",
    "troubleshooting": "troubleshooting.html",
    "zero bubble": "pipeline.html",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("mkdocs", "mkdocstrings", "material"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed (the extra `docs`)")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    return out


@pytest.fixture(scope="module")
def browser(site: Path) -> Iterator[Any]:
    """A headless Chromium of the distribution's packages."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the extra `docs`)")
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH (apt-get install chromium)")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Serve the site on a free port of this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def load(script: str) -> Any:
    """The module docs/`script`.py, which writes a page."""
    spec = importlib.util.spec_from_file_location(f"{script}_page", ROOT / "docs" / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("script", ["configuration", "command_line"])
def test_a_generated_page_is_current(script):
    module = load(script)
    assert module.PAGE.read_text() == module.page(), f"run python docs/{script}.py"


def test_every_command_has_an_example_that_its_parser_accepts():
    module = load("command_line")
    found = {command: parser for command, _, parser in module.parsers(module.cli.COMMANDS) if parser}
    leaves = [command for command in found if not any(other.startswith(f"{command} ") for other in found)]
    assert len(leaves) > 20
    for command in leaves:
        examples = module.examples(found[command])
        assert examples, f"{command}: no example in its --help"
        for example in examples:
            words = shlex.split(example)
            if words[1] == "launch":
                words = [
                    "fastmp",
                    *words[next(i for i, word in enumerate(words) if word in ("train", "script.py")) :],
                ]
            if words[1] == "script.py":
                continue
            parser = found["fastmp train" if words[1] == "train" else command]
            others = parser.parse_known_args(words[1 + command.count(" ") :])[1]
            assert not any(other.startswith("-") for other in others) and len(others) < 2, example


@pytest.mark.exhaustive
def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site):
    for name in PAGES:
        assert (site / name).is_file(), name
    assert "fastmp.ops.bias_gelu" in (site / "api" / "fastmp.ops.html").read_text()
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_nothing_is_cut_no_link_is_dead_and_the_console_is_silent(browser, address):
    """Every page once, at both widths, with the links and anchors that its browser sees."""
    errors: list[str] = []
    windows = {width: browser.new_page(viewport={"width": width, "height": 900}) for width in WIDTHS}
    for page in windows.values():
        page.on("console", lambda message: message.type == "error" and errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("response", lambda reply: reply.status < 400 or errors.append(f"{reply.status}: {reply.url}"))
    faults: dict[str, list[str]] = {name: [] for name in PAGES}
    links: dict[str, set[str]] = {}
    anchors: dict[str, set[str]] = {}
    for name in PAGES:
        for width, page in windows.items():
            page.goto(f"{address}/{name}", wait_until="domcontentloaded")
            page.wait_for_selector("html.js .md-content", state="attached")
            faults[name] += [f"{width}: {cut}" for cut in page.evaluate(CUT, width)]
        faults[name] += errors
        errors.clear()
        links[name] = set(page.evaluate("() => [...document.querySelectorAll('a[href]')].map(a => a.href)"))
        anchors[f"{address}/{name}"] = set(
            page.evaluate("() => [...document.querySelectorAll('[id]')].map(element => element.id)")
        )
    for page in windows.values():
        page.close()
    for name, targets in links.items():
        for target in targets:
            place, part = urldefrag(target)
            if not place.startswith(address):
                continue
            if not (unquote(part) in {"", *anchors[place]} if place in anchors else is_served(place)):
                faults[name].append(f"dead link {target}")
    found = [f"{name}: {fault}" for name, several in faults.items() for fault in several]
    assert not found, "\n".join(found)


@functools.cache
def is_served(place: str) -> bool:
    try:
        urllib.request.urlopen(place).close()
    except urllib.error.HTTPError:
        return False
    return True


def first_result(page: Any, query: str) -> str:
    """Type `query` and return the address of the page that the search shows first."""
    page.fill(".md-search__input", "")
    page.press(".md-search__input", "Backspace")  # the search listens to keys
    page.wait_for_function("() => !document.querySelector('.md-search-result__item')")
    page.fill(".md-search__input", query)
    page.press(".md-search__input", "End")
    page.wait_for_selector(".md-search-result__item > a", state="attached")
    return urldefrag(page.evaluate(FOUND)[0]).url.split("?")[0]


@pytest.mark.exhaustive
def test_the_search_finds_the_right_page_first(browser, address):
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(f"{address}/index.html")
    page.click(".md-search__input")
    found = {query: first_result(page, query).removeprefix(f"{address}/") for query in QUERIES}
    page.close()
    assert len(QUERIES) >= 40
    assert found == QUERIES


@pytest.mark.exhaustive
def test_the_search_works_from_a_disk(browser, site):
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    page.goto(f"file://{site}/index.html")
    page.click(".md-search__input")
    assert first_result(page, "zero bubble").startswith("file://")
    page.close()
