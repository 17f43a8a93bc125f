"""Write the executed chapters as a static site: dist/html, an index, a page for each chapter and the glossary.

    python notebooks/pages.py

Each page is one file that needs nothing else: no script, no network; style and pictures are in it, formulas are
MathML. A link between chapters becomes a link between pages. The site is written beside dist/html and put in its
place when it is whole.
"""
import base64
import re
import shutil
from functools import partial
from html import escape
from pathlib import Path

import nbformat
from jinja2 import DictLoader
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter
from tqdm import tqdm

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
SITE = ROOT / "dist" / "html"
TITLE = "Batching by hand"
VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"

STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --soft: #666; --box: #f5f5f2; --line: #ddd;
        --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
    :root { --ink: #ddd; --paper: #16181b; --soft: #9a9a9a; --box: #212428; --line: #3a3d42; --link: #7db7f5; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 60rem; padding: 0 1rem 3rem; background: var(--paper); color: var(--ink);
       font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
p, li { max-width: 48rem; }
a { color: var(--link); }
h1, h2, h3 { line-height: 1.25; margin: 2rem 0 .75rem; }
h1 { font-size: 1.8rem; } h2 { font-size: 1.35rem; } h3 { font-size: 1.1rem; }
nav { display: flex; flex-wrap: wrap; justify-content: space-between; gap: .25rem 1.5rem; padding: .75rem 0;
      border-bottom: 1px solid var(--line); }
nav.after { border-bottom: 0; border-top: 1px solid var(--line); margin-top: 3rem; }
pre, code { font: .85rem/1.45 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; }
:not(pre) > code { background: var(--box); padding: .1em .25em; border-radius: 3px; }
pre { margin: .5rem 0; padding: .6rem .75rem; overflow-x: auto; }
.input { overflow-x: auto; } .input pre { overflow: visible; }
.input, main > pre, main > .highlight pre, details pre { background: var(--box); border-radius: 4px; }
.input .highlight { background: none; }
.output pre { padding: .25rem .75rem; border-left: 3px solid var(--line); }
.output pre.error { background: #fdf1ee; color: #222; border-left-color: #d55e00; }  /* light, as pictures are */
.error [style*="188,188,188"] { color: #666 !important; }
.last svg { max-width: 100%; height: auto; }
main img { display: block; max-width: 100%; height: auto; margin: .75rem 0 .25rem; border-radius: 4px; }
.output .html { margin: .25rem 0 .75rem; } .note, .output summary { color: var(--soft); }
details { margin: .5rem 0; } summary { cursor: pointer; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: .75rem 0; }
td, th { border-bottom: 1px solid var(--line); padding: .3rem .75rem .3rem 0; text-align: left; vertical-align: top; }
th { white-space: nowrap; }
.matrix { border: solid currentColor; border-width: 0 1px; border-radius: .6em; padding: 0 .3em; margin: 0 .15em; }
math[display=block] { overflow-x: auto; overflow-y: hidden; padding: .25rem 0; }
.ansi-red-fg, .ansi-red-intense-fg { color: #b3261e; } .ansi-green-fg, .ansi-green-intense-fg { color: #1b6e3c; }
.ansi-blue-fg, .ansi-cyan-fg, .ansi-blue-intense-fg, .ansi-cyan-intense-fg { color: #0b5cad; }
.ansi-yellow-bg { background: #f6e7a1; color: #222; } .ansi-bold { font-weight: bold; }
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<nav aria-label="chapters">{links}</nav>
<main>
{body}
</main>
<nav class="after" aria-label="chapters, again">{links}</nav>
</body>
</html>
"""

# nbconvert walks through the cells and their outputs (null.j2, display_priority.j2); here is what it writes of each.
CELLS = """{%- extends 'base/display_priority.j2' -%}
{% block input %}<div class="input" tabindex="0">{{ cell.source | highlight_code(metadata=cell.metadata) }}</div>
{% endblock %}
{% block execute_result %}{% block data_priority scoped %}{{ super() }}{% endblock %}{% endblock %}
{% block output_group %}<div class="output">{{ super() }}</div>
{% endblock %}
{% block stream %}<pre tabindex="0">{{ output.text | ansi2html }}</pre>{% endblock %}
{% block error %}<pre class="error" tabindex="0">{{ output.traceback | join('\\n') | ansi2html }}</pre>{% endblock %}
{% block data_text %}<pre tabindex="0">{{ output.data['text/plain'] | ansi2html }}</pre>{% endblock %}
{% block data_html %}<div class="html">{{ output.data['text/html'] }}</div>{% endblock %}
{% block data_png %}<img src="data:image/png;base64,{{ output.data['image/png'] | replace('\\n', '') }}"
    alt="{{ output | get_metadata('alt', 'image/png') | default('', true) | e }}">{% endblock %}
{% block markdowncell %}{{ cell.source | markdown2html }}
{% endblock %}"""


def formula(tex, display):
    """MathML of a formula.

    A matrix gets its brackets as borders: browsers stretch real ones only with a font for mathematics, and a phone
    may have none.
    """
    try:
        text = convert(tex, display=display)
    except Exception as error:  # it has a dozen kinds of its own
        raise SystemExit(f"The formula ${tex}$ is not understood: {type(error).__name__}.")
    if unknown := re.search(r">(\\\w*)<", text):
        raise SystemExit(f"The formula ${tex}$ has a command that is not known: {unknown[1]}.")
    text = re.sub(r"&#x([0-9A-F]{5});", lambda code: escape(chr(int(code[1], 16))), text)
    return re.sub(r"<mo>[(]</mo><mtable>(.*?)</mtable><mo>[)]</mo>", r'<mtable class="matrix">\1</mtable>', text)


class Renderer(IPythonRenderer):
    """Markdown as nbconvert writes it, but formulas as MathML and links to files of the site where there are some."""

    def __init__(self, pages, **options):
        super().__init__(escape=False, exclude_anchor_links=True, **options)
        self.pages = pages

    def inline_math(self, body):
        return formula(body, "inline")

    def block_math(self, body):
        return formula(body, "block")

    def link(self, text, url, title=None):
        file, mark, place = url.partition("#")
        return super().link(text, self.pages.get(file, file) + mark + place, title)


class Cells(HTMLExporter):
    """The cells of a notebook as HTML, without a page around them."""

    def __init__(self, pages, **options):
        super().__init__(extra_loaders=[DictLoader({"cells.j2": CELLS})], template_file="cells.j2", **options)
        self.pages = pages

    def default_filters(self):
        yield from super().default_filters()
        yield "markdown2html", partial(markdown, self.pages)


def markdown(pages, source):
    """HTML of Markdown text; a table scrolls in a box of its own."""
    text = MarkdownWithMath(renderer=Renderer(pages)).render(source)
    return text.replace("<table>", '<div class="wide" tabindex="0"><table>').replace("</table>", "</table></div>")


def still(view, state):
    """HTML for a box of sliders without a kernel: their names, and the text that they had made last."""
    names, texts, rest = [], [], [view]
    while rest:
        model = state[rest.pop(0)]
        rest += re.findall(r"IPY_MODEL_(\w+)", str(model["state"].get("children", "")))
        if model["model_name"] in ("IntSliderModel", "SelectionSliderModel"):
            names.append(model["state"]["description"])
        elif model["model_name"] == "HTMLModel":
            texts.append(model["state"]["value"])
    note = f"In the notebook you can drag {', '.join(names)} here. The sliders stand still on a page; they last showed:"
    return f'<p class="note">{escape(note)}</p><div class="wide last">{" ".join(texts)}</div>'


def chapter(path, pages):
    """HTML of an executed chapter's cells."""
    notebook = nbformat.read(path, as_version=4)
    state = notebook.metadata.get("widgets", {}).get(STATE, {}).get("state", {})
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if VIEW in output.get("data", {}):
                output.data = nbformat.from_dict({"text/html": still(output.data[VIEW]["model_id"], state)})
    return Cells(pages).from_notebook_node(notebook)[0]


def title(source):
    """The text of the first heading."""
    return re.search(r"^# (.+)$", source, flags=re.M)[1]


def index(readme, pages):
    """HTML of the README's opening and its section on the chapters."""
    parts = (r"\A.*?(?=\n## )", r"(?<=\n)## Chapters\n.*?(?=\n## )")
    opening, chapters = (re.search(part, readme, flags=re.S)[0] for part in parts)
    return markdown({f"notebooks/{file}": page for file, page in pages.items()}, opening + chapters)


def embed(text):
    """The text with the repository's pictures put in where it names them."""
    def data(match):
        picture = base64.b64encode((ROOT / match[1]).read_bytes()).decode()
        return f'src="data:image/svg+xml;base64,{picture}"'
    return re.sub(r'src="(figures/\w+\.svg)"', data, text)


def links(before, after):
    """What stands above and below a page: the chapters before and after, (file, title) or None, and the index."""
    parts = [("index.html", "All chapters"), ("GLOSSARY.html", "Glossary")]
    if before:
        parts.insert(0, (before[0], f"← {before[1]}"))
    if after:
        parts.append((after[0], f"{after[1]} →"))
    return "".join(f'<a href="{file}">{escape(text)}</a>' for file, text in parts)


def write(site):
    """Write every page into the folder `site`."""
    paths = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
    pages = {path.name: f"{path.stem}.html" for path in paths} | {"GLOSSARY.md": "GLOSSARY.html"}
    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("default", "github-dark"))
    style = f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n{STYLE}"
    glossary, readme = (path.read_text(encoding="utf-8") for path in (FOLDER / "GLOSSARY.md", ROOT / "README.md"))
    titles = [title(nbformat.read(path, as_version=4).cells[0].source) for path in paths]
    named = [(pages[path.name], name) for path, name in zip(paths, titles)]
    every = [("index.html", TITLE, index(readme, pages), None, None),
             ("GLOSSARY.html", "Glossary", markdown(pages, glossary), None, None)]
    for n, path in enumerate(tqdm(paths, desc="pages", unit="chapter")):
        before, after = named[n - 1] if n else None, named[n + 1] if n + 1 < len(named) else None
        every.append((*named[n], chapter(path, pages), before, after))
    for file, name, body, before, after in every:
        page = PAGE.format(title=escape(name), style=style, links=links(before, after), body=embed(body))
        (site / file).write_text(page, encoding="utf-8", newline="\n")


def main():
    unfinished, old = SITE.with_name("html.unfinished"), SITE.with_name("html.old")
    try:
        for folder in (unfinished, old):
            shutil.rmtree(folder, ignore_errors=True)
        unfinished.mkdir(parents=True)
        write(unfinished)
        if SITE.exists():
            SITE.rename(old)
        unfinished.rename(SITE)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise SystemExit(f"The site cannot be written to {SITE}: {error.strerror}.")
    print(f"{SITE.relative_to(ROOT)}/index.html and {len(list(SITE.iterdir())) - 1} more pages")


if __name__ == "__main__":
    main()
