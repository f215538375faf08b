"""Build the course as a site: executed lessons, searchable, with light and dark themes.

    python -m teaching.book build/book --repository https://github.com/owner/name

With the repository's address, which is set by default in GitHub's workflows, each lesson has a
button that opens it on Binder, and links back to the repository.

The site is built with Sphinx and MyST-NB. Neither building the site nor
reading it downloads anything.
"""

import argparse
import html.parser
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import nbformat

from helpers import course
from helpers.course import claims
from teaching import lessons, rendered
from teaching.pages import explorers

PAGES = Path(__file__).parent / "pages"
GLOSSARY = lessons.ROOT / "docs" / "glossary.md"
# Where terms aren't linked: code, links and pictures, formulas, HTML, headings and tables.
_NO_TERMS = re.compile(
    r"```.*?```|`[^`]*`|!?\[[^\]]*\]\([^)]*\)|\$[^$]*\$|<[^>]*>|^(?:#|\|).*?$",
    re.DOTALL | re.MULTILINE,
)
CONFIGURATION: dict[str, Any] = {
    "project": "Multi-GPU PyTorch, hands on",
    "html_title": "Multi-GPU PyTorch, hands on",
    "extensions": ["myst_nb"],
    "html_theme": "sphinx_book_theme",
    "html_theme_options": {
        "use_download_button": False,
        "show_toc_level": 2,
        "navbar_persistent": [],
        # An author and a year aren't worth a line at the bottom of each page.
        "footer_content_items": [],
    },
    "html_static_path": ["_static"],
    "html_css_files": ["site.css"],
    "html_js_files": ["explorers.js"],
    "html_show_sourcelink": False,
    "html_copy_source": False,
    "nb_execution_mode": "off",
    "nb_ipywidgets_js": {},
    "nb_merge_streams": True,
    "nb_output_stderr": "show",
    "nb_code_prompt_show": "The lesson's imports",
    "myst_heading_anchors": 4,
    "language": "en",
}


def build(target: Path, cache: Path, repository: str = "") -> None:
    """Build the site in a new folder, or in place of a site from an earlier call.

    Raises RuntimeError if Sphinx warns or a link is broken, and FileExistsError if the folder
    contains something other than a site.
    """
    from sphinx.application import Sphinx

    if target.exists() and any(target.iterdir()) and not (target / "searchindex.js").exists():
        raise FileExistsError(
            f"{target} contains something other than a site: choose another folder"
        )
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        write_sources(source, cache)
        site = Sphinx(
            str(source),
            None,
            str(target),
            str(Path(scratch) / "doctrees"),
            "html",
            confoverrides=configuration(repository),
            status=None,
            warning=sys.stderr,
            warningiserror=False,
        )
        site.build(force_all=True)
        warned = site._warncount
    if warned:
        raise RuntimeError(f"Sphinx warned {warned} times, see above")
    broken = list(broken_links(target))
    if broken:
        raise RuntimeError("broken links:\n" + "\n".join(broken))


def configuration(repository: str) -> dict[str, Any]:
    """Return Sphinx's configuration, with links to the repository if its address is known."""
    if not repository:
        return CONFIGURATION
    links = {
        "repository_url": repository,
        "repository_branch": "main",
        "path_to_docs": "notebooks",
        "use_repository_button": True,
        "use_issues_button": True,
        # Colab and similar services lack the course's package, so a lesson would fail at its
        # imports.
        "launch_buttons": {
            "binderhub_url": "https://mybinder.org",
            "notebook_interface": "jupyterlab",
        },
    }
    options = {**CONFIGURATION["html_theme_options"], **links}
    return {**CONFIGURATION, "html_theme_options": options}


def write_sources(source: Path, cache: Path) -> None:
    """Write the pages that Sphinx reads: the executed lessons, first page, claims, and glossary."""
    (source / "_static").mkdir(parents=True)
    unused = glossary_terms()
    for path in lessons.NOTEBOOKS:
        print(f"running {path.stem}", flush=True)
        notebook = rendered.run(path, cache)
        answered, took_s = 0, 0.0
        for cell in notebook.cells:
            took_s += explorers.seconds(cell)
            answered += explorers.put_in_page(cell, source / "_static" / "explorers")
            if "setup" in (tags := cell.metadata.get("tags", [])) and "hide-input" not in tags:
                tags.append("hide-input")
            # JupyterLab and MyST create different anchors for headings.
            within = re.compile(r"\]\(#([^)]+)\)")
            if cell.cell_type == "markdown":
                cell.source = within.sub(lambda m: f"](#{_slug(m[1])})", cell.source)
                cell.source = cell.source.replace("](../docs/glossary.md", "](glossary.md")
                cell.source = link_first_uses(cell.source, unused)
            for output in cell.get("outputs", ()):
                if "text/html" in output.get("data", {}):
                    output.data["text/html"] = _as_pages(output.data["text/html"])
        if answered:
            print(f"  {answered} explorer answers, computed in {took_s:.0f} s", flush=True)
        nbformat.write(notebook, source / path.name)
    ledger = claims.read(lessons.ROOT / "notebooks")
    verdicts = [claim.verdict for claim in ledger]
    overview = course.overview(lessons.ROOT / "notebooks")
    links = overview.links or {}
    rows = ["| lesson | core, minutes | everything, minutes |", "|---|---|---|"]
    rows += [
        f"| [{name}]({links[str(name)]}) | {core} | {whole} |"
        for name, core, whole, *_ in overview.rows
    ]
    routes = course.routes(lessons.ROOT / "notebooks")
    ways = [f"| {' | '.join(map(str, row))} |" for row in routes.rows]
    text = (PAGES / "index.md").read_text(encoding="utf-8")
    for name, value in {
        "lessons": "\n".join(rows),
        "routes": "\n".join(
            ["| route | lessons | core, hours | everything, hours |", "|---|---|---|---|", *ways]
        ),
        "count": str(len(ledger)),
        "dated": str(verdicts.count("dated")),
        "false": str(verdicts.count("false")),
        "predicted": str(verdicts.count("predicted")),
        "pages": "\n".join(path.stem for path in lessons.NOTEBOOKS),
    }.items():
        text = text.replace("{" + name + "}", value)
    (source / "index.md").write_text(text, encoding="utf-8")
    (source / "claims.md").write_text(claims_page(ledger), encoding="utf-8")
    for name in ("claims.js", "explorers.js", "site.css"):
        shutil.copy(PAGES / name, source / "_static")
    shutil.copy(lessons.ROOT / "docs" / "eight_gpus.gif", source / "_static")
    entries = GLOSSARY.read_text(encoding="utf-8").replace("](../notebooks/", "](")
    (source / "glossary.md").write_text(entries, encoding="utf-8")
    shutil.copy(lessons.ROOT / "notebooks" / "train.py", source)  # lessons link to it


def glossary_terms() -> list[str]:
    """Return the glossary's headings."""
    return re.findall(r"^## (.*)$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)


def link_first_uses(markdown: str, terms: list[str]) -> str:
    """Return a lesson's text with the first use of each term linked to the glossary.

    Terms that have been linked are removed from ``terms``. Plurals and capitalized terms count, but
    not parts of longer words.
    """
    for term in list(terms):
        first = f"[{term[0].upper()}{term[0]}]" if term[0].islower() else term[0]
        use = re.compile(rf"(?<![\w-]){first}{re.escape(term[1:])}s?(?![\w-])")
        closed = [match.span() for match in _NO_TERMS.finditer(markdown)]
        for found in use.finditer(markdown):
            if not any(start <= found.start() < end for start, end in closed):
                link = f"[{found[0]}](glossary.md#{_slug(term)})"
                markdown = markdown[: found.start()] + link + markdown[found.end() :]
                terms.remove(term)
                break
    return markdown


def _as_pages(text: str) -> str:
    """Return HTML in which links to notebooks and cells lead to the site's pages and sections."""

    def page(link: re.Match[str]) -> str:
        path = lessons.ROOT / "notebooks" / link[1]
        section = f"#{_slug(lessons.heading_above(path, link[2]))}" if link[2] else ""
        return f"{path.stem}.html{section}"

    return re.sub(r"\b([0-9a-z_]+\.ipynb)(?:#cell-id=([a-z0-9-]+))?", page, text)


def claims_page(ledger: list[claims.Claim]) -> str:
    """Return the ledger as a page: one row per claim, linked to the section that settles it."""
    rows = ["| id | claim | verdict | what holds | lesson |", "|---|---|---|---|---|"]
    for claim in ledger:
        where = f"lesson {claim.lesson}"
        if claim.proof:
            slug = _slug(claim.proof.heading)
            where = f"[{claim.lesson} · {claim.proof.heading}]({claim.proof.notebook}#{slug})"
        cells = (claim.id, claim.claim, claim.status, claim.holds, where)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(
        [
            "# The claims",
            "",
            "What people say about PyTorch on multiple GPUs, and what happens if you run it today. "
            "Each claim is settled by a cell in the linked lesson, which asserts the result. "
            "*Predicted* means that only a cost model shows it.",
            "",
            *rows,
            "",
            '<script src="_static/claims.js"></script>',
            "",
        ]
    )


def _slug(heading: str) -> str:
    """Return a heading's anchor as MyST and GitHub create it; the build warns if it's missing."""
    return re.sub(r"[^\w-]", "", heading.lower().replace("`", "").replace(" ", "-"))


class _Page(html.parser.HTMLParser):
    """A parser that collects a page's ids, links and loaded resources."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids.update(found[name] for name in ("id", "name") if name in found)
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if "src" in found:
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(found.get("href", ""))


def broken_links(site: Path) -> Iterator[str]:
    """Yield broken links within a site, and anything that its pages would fetch from elsewhere."""
    pages = {}
    for path in site.rglob("*.html"):
        if "_static" in path.parts:
            continue  # a theme's templates, which aren't pages
        pages[path.resolve()] = page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for address in (*page.links, *page.loads):
            parts = urlsplit(address)
            if parts.scheme == "data" or parts.scheme == "mailto":
                continue
            if parts.scheme or parts.netloc:
                if address in page.loads:
                    yield f"{name}: loads {address}"
                continue
            aim = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not aim.exists():
                yield f"{name}: {address}"
            elif parts.fragment and aim in pages and unquote(parts.fragment) not in pages[aim].ids:
                yield f"{name}: {address} (no such anchor on that page)"


def _repository_of_the_workflow() -> str:
    """Return the address of the repository whose workflow is running; "" if there's none."""
    name = os.environ.get("GITHUB_REPOSITORY", "")
    return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}" if name else ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="teaching.book", description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path, help="the site's folder")
    parser.add_argument(
        "--repository", default=_repository_of_the_workflow(), help="the repository's URL"
    )
    options = parser.parse_args(arguments)
    try:
        build(options.target, lessons.ROOT / "build" / "executed", options.repository)
    except (FileExistsError, RuntimeError) as error:
        sys.exit(f"book: {error}")
    print(f"{options.target / 'index.html'}: open it in a browser")


if __name__ == "__main__":
    main()
