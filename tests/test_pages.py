"""`make html`: each page stands alone, says what its notebook says, and leads to the others."""

import importlib.util
import re
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parent.parent
CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
chapter = pytest.mark.parametrize("name", CHAPTERS)
page = pytest.mark.parametrize("name", ["index", "GLOSSARY", *CHAPTERS])

spec = importlib.util.spec_from_file_location("page_builder", ROOT / "notebooks" / "pages.py")
pages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pages)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """{name: (text, soup)} of every page."""
    folder = tmp_path_factory.mktemp("site")
    pages.write(folder)
    texts = {path.stem: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    return {name: (text, BeautifulSoup(text, "html.parser")) for name, text in texts.items()}


def cells(name):
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells


def test_the_pages(site):
    assert sorted(site) == sorted(["index", "GLOSSARY", *CHAPTERS])


@page
def test_nothing_is_fetched(site, name):
    text, soup = site[name]
    assert not soup.find_all(["script", "link", "iframe", "object", "embed", "base"])
    assert all(tag["src"].startswith("data:image/") for tag in soup.find_all(src=True))
    assert not soup.find_all(srcset=True)
    assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//", text)


@page
def test_what_a_phone_and_a_screen_reader_need(site, name):
    _, soup = site[name]
    assert soup.html["lang"] == "en" and len(soup.find_all("h1")) == 1
    assert soup.find("meta", attrs={"name": "viewport"})["content"] == "width=device-width, initial-scale=1"
    assert all(image.get("alt", "").strip() not in ("", "None") for image in soup.find_all("img"))
    assert all(table.parent["class"] == ["wide"] for table in soup.find_all("table"))
    assert all(not fold.has_attr("open") for fold in soup.find_all("details"))
    assert "prefers-color-scheme: dark" in soup.style.text and "color-scheme: light dark" in soup.style.text


@page
def test_links_lead_to_pages(site, name):
    for link in site[name][1].find_all("a", href=True):
        if not link["href"].startswith(("https://", "#")):
            assert unquote(link["href"]).removesuffix(".html") in site, link


def test_the_index_and_the_neighbours(site):
    def links(name, inside):
        return [a["href"] for a in site[name][1].select(f"{inside} a")]

    named = [href for href in links("index", "main") if href[:2].isdigit()]
    assert named == [f"{name}.html" for name in CHAPTERS], "the README's table does not list the chapters"
    for before, after in zip(CHAPTERS, CHAPTERS[1:]):
        assert links(before, "nav")[-1] == f"{after}.html" and links(after, "nav")[0] == f"{before}.html"


@page
def test_every_formula_is_shown(site, name):
    soup = BeautifulSoup(site[name][0], "html.parser")
    for tag in soup.find_all(["pre", "code", "style"]):
        tag.decompose()
    shown = len(soup.find_all("math"))
    for tag in soup.find_all("math"):
        assert tag.get_text(strip=True) and "\\" not in tag.get_text()
        tag.decompose()
    assert not re.search(r"\$[^$\d]+\$|\\[a-z]+\{", soup.main.get_text())
    if name in CHAPTERS:
        text = "\n".join(cell.source for cell in cells(name) if cell.cell_type == "markdown")
        text = re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.S)
        assert shown == len(re.findall(r"\$\$[^$]+\$\$|\$[^$]+\$", text))


@chapter
def test_a_chapter_says_what_its_notebook_says(site, name):
    text, soup = site[name]
    code = [cell for cell in cells(name) if cell.cell_type == "code"]
    assert [box.get_text().strip() for box in soup.select(".input")] == [cell.source.strip() for cell in code]
    outputs = [output for cell in code for output in cell.outputs]
    assert len(soup.select("pre.error")) == sum(output.output_type == "error" for output in outputs)
    assert len(soup.select("main img")) == sum("image/png" in output.get("data", {}) for output in outputs)
    assert len(soup.select(".note")) == sum(pages.VIEW in output.get("data", {}) for output in outputs)
    printed = [output.text.strip() for output in outputs if output.output_type == "stream"]
    boxes = [box.get_text().strip() for box in soup.select(".output > pre:not(.error)")]
    assert [box for box in boxes if box in printed] == printed
    assert "\x1b" not in text and "widget-view" not in text


def test_a_matrix_has_brackets_without_a_font():
    text = pages.formula(r"\begin{pmatrix} 1 & 0 \end{pmatrix} (d, d)", "inline")
    assert text.count('<mtable class="matrix">') == 1 and text.count(">(</mo>") == 1


@pytest.mark.parametrize("tex", [r"\nosuch{1}", r"\begin{pmatrix} 1"])
def test_a_formula_that_cannot_be_shown(tex):
    with pytest.raises(SystemExit) as error:
        pages.formula(tex, "inline")
    assert f"The formula ${tex}$" in str(error.value)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "dist").write_text("a file where the folder should be")
    monkeypatch.setattr(pages, "SITE", tmp_path / "dist" / "html")
    with pytest.raises(SystemExit, match="The site cannot be written to .*html: "):
        pages.main()


def test_the_old_site_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    site = tmp_path / "html"
    site.mkdir()
    (site / "index.html").write_text("old")
    monkeypatch.setattr(pages, "SITE", site)
    monkeypatch.setattr(pages, "ROOT", tmp_path)

    def fails(folder):
        (folder / "index.html").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pages, "write", fails)
    with pytest.raises(SystemExit, match="No space left"):
        pages.main()
    assert (site / "index.html").read_text() == "old"
    monkeypatch.setattr(pages, "write", lambda folder: (folder / "index.html").write_text("new"))
    pages.main()
    assert (site / "index.html").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["html"]
