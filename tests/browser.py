"""Every chapter in a real browser: JupyterLab runs all its cells, and its widgets are moved.

    python tests/browser.py          # every chapter
    python tests/browser.py 01 06    # the chapters whose names start so

JupyterLab serves a copy of the notebooks without outputs, so nothing in the checkout changes and whatever a page
shows comes from this run. First goes a made-up notebook with each fault that is looked for: all must be found.
Screenshots go to dist/browser/. It is no part of `make test`: it needs a browser and a few minutes.
"""
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
from playwright.sync_api import Error, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
SHOTS = ROOT / "dist" / "browser"
sys.path.insert(0, str(ROOT / "notebooks"))

import build  # noqa: E402
import pages  # noqa: E402

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FAULTS, SITE = "00_faults", "the site of make html"
SECONDS = 240                                               # a chapter that runs longer is stuck
QUIET = 8                                                   # as long with nothing running is the end; the first
SETTINGS = {                                                # widget makes JupyterLab pause for 4 s between two cells
    # Cells out of sight stay in the page, so that each can be looked at.
    "notebook-extension/tracker": {"windowingMode": "none", "scrollPastEnd": False},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosave": False},
}
WIDTH, HEIGHT = 1280, 1600                                  # of the window and of a screenshot, pixels

# The formulas of rendered text that MathJax left as they were, marked as wrong, or does not know (shown in red).
FORMULAS = r"""() => [...document.querySelectorAll('.jp-MarkdownOutput')].flatMap(text => {
    const copy = text.cloneNode(true);
    copy.querySelectorAll('code, pre, mjx-container').forEach(node => node.remove());
    const wrong = [...text.querySelectorAll('mjx-merror, mjx-mtext[style*=red]')];
    return [...(copy.textContent.match(/\$[^$]+\$/g) || []),
            ...wrong.map(node => node.dataset.mjxError || node.closest('p, li, td, h2').textContent)];
})"""
PROMPTS = "() => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(prompt => prompt.textContent)"


class Unable(Exception):
    """The surroundings lack something: a sentence for the reader."""


def find_browser():
    """Return the path of an installed Chromium or Chrome; where apt-get may, install Chromium first."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found or not shutil.which("apt-get"):
        return found
    rights = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if rights and (not shutil.which("sudo") or subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode):
        return None
    print("No Chromium here: installing it with apt-get.", flush=True)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([*rights, "apt-get", "update"], **quiet)
    subprocess.run([*rights, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "--yes",
                    "--no-install-recommends", "chromium"], **quiet)
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def faults():
    """A notebook with every fault that `run` must find, and what it must say of each."""
    v4 = nbformat.v4
    raises = {"tags": [build.RAISES]}
    view = {build.VIEW: {"model_id": "0" * 32, "version_major": 2, "version_minor": 0}, "text/plain": "no model"}
    cells = [
        v4.new_markdown_cell("A good one: $d = 2$\n\nAn unknown one: $\\nosuch$\n\nA broken one: $\\frac{1$"),
        v4.new_code_cell("import ipywidgets\nslider, text = ipywidgets.IntSlider(), ipywidgets.HTML('never renewed')\n"
                         "ipywidgets.VBox([slider, text])"),
        v4.new_code_cell(f"from IPython.display import Javascript, display\ndisplay({view!r}, raw=True)"),
        v4.new_code_cell("display(Javascript('console.error(\"of our own making\")'))"),
        v4.new_code_cell("1 / 1", metadata=raises),
        v4.new_code_cell("1 / 0", metadata=raises),
        v4.new_code_cell("int('x')"),
        v4.new_code_cell("print('not reached')"),
    ]
    said = [r"formula: $\frac{1$", "formula: An unknown one", "slider 1 of 1 changes nothing",
            "Error displaying widget", "widget model not found", "of our own making",
            "raised nothing", "ValueError", "was not run"]
    return v4.new_notebook(cells=cells, metadata=build.METADATA), said


def write_copies(names, folder):
    """Write the chapters' notebooks without outputs, and the one with the faults, into `folder`."""
    for name in names:
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        notebook.metadata.pop("widgets", None)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, folder / f"{name}.ipynb")
    nbformat.write(faults()[0], folder / f"{FAULTS}.ipynb")


class Lab:
    """A JupyterLab with settings of its own, serving `folder`: `with Lab(folder, home) as (url, token)`."""

    def __init__(self, folder, home):
        self.folder, self.home = folder, home

    def __enter__(self):
        build.fix_environment()
        token = secrets.token_hex(16)
        for name, setting in SETTINGS.items():
            path = self.home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(setting))
        own = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
               "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
               "IPYTHONDIR": "ipython"}
        environment = os.environ | {name: str(self.home / place) for name, place in own.items()}
        environment["JUPYTER_TOKEN"] = token                # not an argument, which `ps` shows to everyone
        self.log = self.home / "jupyter.log"
        with socket.socket() as free, self.log.open("w") as log:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
            free.close()
            arguments = ["--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}",
                         f"--ServerApp.root_dir={self.folder}"]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *arguments], env=environment, cwd=self.folder,
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
        # The port may have been taken meanwhile; then Jupyter took another, and its own file says which.
        file = self.home / "runtime" / f"jpserver-{self.process.pid}.json"
        end = time.monotonic() + 90
        while time.monotonic() < end and self.process.poll() is None:
            if file.exists() and (text := file.read_text()).endswith("}"):
                return json.loads(text)["url"], token
            time.sleep(0.1)
        self.__exit__()
        lines = self.log.read_text().splitlines() or ["it said nothing"]
        raise Unable(f"JupyterLab did not start on port {port}: {lines[-1]}")

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)     # its kernels too


def until(true, seconds):
    """Ask `true()` again and again until it is so; return whether it came to be so within the time."""
    end = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.1)
    return bool(found)


def run_all(page, name, url, token):
    """Open the notebook in JupyterLab, choose Run All Cells and wait for the last one; return how long that took."""
    page.goto(f"{url}lab/workspaces/{name}/tree/{name}.ipynb?token={token}")
    idle = page.locator(".jp-StatusBar-TextItem", has_text=re.compile(r"Python 3 .*\| Idle"))
    idle.wait_for(timeout=90_000)
    start = shown = time.monotonic()
    page.locator(".lm-MenuBar-itemLabel", has_text=re.compile("^Run$")).click()
    page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()
    if not until(lambda: any(p != "[ ]:" for p in page.evaluate(PROMPTS)), 30):
        raise Unable(f"{name}: JupyterLab began no cell within 30 s of Run All Cells")
    ended = None                                            # since when nothing runs
    while ended is None or time.monotonic() - ended < QUIET:
        prompts = page.evaluate(PROMPTS)
        now, at = time.monotonic(), sum(any(map(str.isdigit, p)) for p in prompts)
        busy = "[*]:" in prompts or not idle.count()
        ended = None if busy else ended or now
        if at == len(prompts) and not busy:
            break
        if now - shown > 5:
            print(f"{name}: {at} of {len(prompts)} cells run", flush=True)
            shown = now
        if now - start > SECONDS:
            raise Unable(f"{name}: code cell {at + 1} of {len(prompts)} has not ended within {SECONDS} s")
        time.sleep(0.2)
    return time.monotonic() - start


def saved(page, path):
    """Save in JupyterLab and read the file."""
    before = path.stat().st_mtime_ns
    page.keyboard.press("Control+s")
    if not until(lambda: path.stat().st_mtime_ns > before, 20):
        raise Unable(f"{path.stem}: JupyterLab did not save the notebook")
    until(lambda: path.read_text().endswith("}\n") or path.read_text().endswith("}"), 5)
    return nbformat.read(path, as_version=4)


def output_faults(notebook):
    """Errors where none belong, none where one belongs, and cells that were not run."""
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        errors = [f"{o.ename}: {o.evalue}" for o in cell.outputs if o.output_type == "error"]
        if cell.execution_count is None:
            yield f"cell {index} was not run"
        elif build.RAISES in build.tags(cell) and not errors:
            yield f"cell {index} is tagged {build.RAISES} and raised nothing"
        elif build.RAISES not in build.tags(cell):
            yield from (f"cell {index} raised {error}" for error in errors)


def widget_faults(page, notebook, shot):
    """Views that are missing, and sliders that change nothing; moves every slider with the keyboard."""
    for index, cell in enumerate(notebook.cells):
        if not any(build.VIEW in o.get("data", {}) for o in cell.get("outputs", [])):
            continue
        outputs = page.locator(".jp-Notebook-cell").nth(index).locator(".jp-OutputArea")
        view = outputs.locator(".jupyter-widgets").first
        until(lambda: view.count() and "Loading widget" not in outputs.first.inner_text(), 10)
        text = " ".join(outputs.first.inner_text().split())
        if not view.count() or "Loading widget" in text or "Error displaying widget" in text:
            yield f"cell {index}: no widget view but {text!r}"
            continue
        view.scroll_into_view_if_needed()
        handles, contents = view.locator(".noUi-handle"), view.locator(".widget-html-content, img, canvas")
        look = lambda: contents.evaluate_all("all => all.map(one => one.outerHTML).join()")  # noqa: E731
        for n in range(handles.count()):
            handles.nth(n).focus()
            for key in ("ArrowRight", "ArrowLeft", "End", "Home"):  # a step may change nothing, the whole way must
                before = look()
                page.keyboard.press(key)
                if until(lambda: look() != before, 6 if key == "ArrowRight" else 3):
                    break
            else:
                yield f"cell {index}: slider {n + 1} of {handles.count()} changes nothing"
        if not handles.count():
            yield f"cell {index}: its widget has no slider to move"
        view.screenshot(path=shot.with_name(f"{shot.name}-widget-{index}.png"))


def photograph(page, shot):
    """The whole notebook, a window's height at a time."""
    panel = page.locator(".jp-WindowedPanel-outer").first
    total, step = panel.evaluate("panel => [panel.scrollHeight, panel.clientHeight]")
    for n, top in enumerate(range(0, total, step), start=1):
        panel.evaluate("(panel, top) => { panel.scrollTop = top; }", top)
        page.screenshot(path=shot.with_name(f"{shot.name}-{n:02}.png"))


def stop_kernel(page, name, url, token):
    """End the notebook's kernel, whose memory the next one needs."""
    headers = {"Authorization": f"token {token}"}
    for session in page.request.get(f"{url}api/sessions", headers=headers).json():
        if session["path"] == f"{name}.ipynb":
            page.request.delete(f"{url}api/sessions/{session['id']}", headers=headers)


def run(name, browser_path, url, token, folder, shots):
    """Run one notebook in a browser of its own; return (faults as sentences, seconds its cells took)."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        console = []
        page.on("console", lambda message: message.type == "error" and console.append(message.text))
        page.on("pageerror", lambda error: console.append(str(error)))
        try:
            seconds = run_all(page, name, url, token)
            notebook = saved(page, folder / f"{name}.ipynb")
        except (Error, Unable):
            page.screenshot(path=shots / f"{name}-stuck.png")
            raise
        found = [*output_faults(notebook), *widget_faults(page, notebook, shots / name)]
        until(lambda: not page.evaluate(FORMULAS), 5)
        found += [f"unrendered formula: {text}" for text in page.evaluate(FORMULAS)]
        photograph(page, shots / name)
        found += [f"console error: {text}" for text in console]
        stop_kernel(page, name, url, token)
        browser.close()
        return found, seconds


def site(browser_path, folder, shots):
    """Open the pages of `make html` as a phone and as a desk would, in light and dark, without a network."""
    folder.mkdir()
    pages.write(folder)
    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for width, scheme in ((360, "light"), (360, "dark"), (WIDTH, "light"), (WIDTH, "dark")):
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
            page = context.new_page()
            page.on("console", lambda message: found.append(f"{page.url}: {message.text}"))
            page.on("requestfailed", lambda request: found.append(f"{page.url} asks for {request.url}"))
            for path in sorted(folder.glob("*.html")):
                page.goto(path.as_uri())
                if (needed := page.evaluate("document.documentElement.scrollWidth")) > width:
                    found.append(f"{path.name} is {needed} pixels wide in a window of {width}")
                page.screenshot(path=shots / f"page-{path.stem}-{width}-{scheme}.png")
        browser.close()
    return found, 0


def main(names):
    chapters = sorted(path.stem for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    for name in names:
        if not any(chapter.startswith(name) for chapter in chapters):
            raise Unable(f"No chapter's name starts with {name!r}; notebooks/ holds {chapters}.")
    chapters = [chapter for chapter in chapters if not names or chapter.startswith(tuple(names))]
    browser = find_browser()
    if not browser:
        print("make browser is skipped: there is no Chromium or Chrome, and apt-get may not install one here.")
        return
    try:
        SHOTS.mkdir(parents=True, exist_ok=True)
        for old in SHOTS.glob("*.png"):
            old.unlink()
    except OSError as error:
        raise Unable(f"No screenshots can be kept in {SHOTS}: {error.strerror}.")
    start, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="batching-") as home:
        home = Path(home)
        folder = home / "notebooks"
        folder.mkdir()
        write_copies(chapters, folder)
        with Lab(folder, home) as (url, token), ThreadPoolExecutor(2) as pool:
            jobs = {n: pool.submit(run, n, browser, url, token, folder, SHOTS) for n in [FAULTS, *chapters]}
            jobs[SITE] = pool.submit(site, browser, home / "site", SHOTS)
            for name, job in jobs.items():
                try:
                    found, seconds = job.result()
                except (Error, Unable) as error:
                    found, seconds = [str(error).splitlines()[0]], 0
                if name == FAULTS:
                    said = faults()[1]
                    missed = [fault for fault in said if not any(fault in sentence for sentence in found)]
                    if missed or len(found) != len(said):
                        print(f"{name}: missed {missed}, found {found}", flush=True)
                        failed += 1
                    else:
                        print(f"{name}: all {len(said)} planted faults found", flush=True)
                else:
                    verdict = f"{len(found)} faults" if found else "right"
                    took = f", its cells took {seconds:.0f} s" if seconds else ""
                    print(f"{name}: {verdict}{took}", *found, sep="\n    ", flush=True)
                    failed += bool(found)
    print(f"{len(chapters)} chapters in {time.monotonic() - start:.0f} s, screenshots in {SHOTS.relative_to(ROOT)}/")
    if failed:
        raise Unable(f"{failed} of {len(jobs)} things looked at are not right in a browser.")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Unable as error:
        raise SystemExit(str(error))
