"""A browser, and JupyterLab with a copy of the lessons, for the duration of the tests."""

import shutil
import sys
from pathlib import Path

import pytest
from browser import lab

from teaching import lessons

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
LACKING = (
    "the browser tests need Chromium and Playwright: install the package chromium (on Debian: "
    "apt-get install chromium) and run make test-browser, which installs Playwright"
)


def pytest_configure(config):
    config.seconds_to_answer = {}


def pytest_sessionstart(session):
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        pytest.exit(LACKING, returncode=1)
    if not any(map(shutil.which, CHROMIUM)):
        pytest.exit(LACKING, returncode=1)


def pytest_terminal_summary(terminalreporter, config):
    for name, seconds in config.seconds_to_answer.items():
        took = ", ".join(f"{second:.2f}" for second in seconds)
        terminalreporter.write_line(f"lesson {name}'s explorer answered after {took} s")


@pytest.fixture(scope="session")
def browser():
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, CHROMIUM)))
    # Root, as in a container, can't use the sandbox. It isn't needed: the pages are our own.
    options = ["--no-sandbox"] if sys.platform == "linux" else []
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=options)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="session")
def address(scratch):
    folder = shutil.copytree(lessons.ROOT / "notebooks", scratch / "notebooks")
    with lab.served(Path(folder), scratch) as found:
        yield found


@pytest.fixture(scope="module")
def open_lesson(browser, address):
    """A function that opens the lesson whose name begins with ``start``, and closes the previous one."""
    pages = []

    def close():
        while pages:
            pages.pop().close()
        lab.end_kernels(address)

    def open_(start, expanded=True, **options):
        close()
        (path,) = (path for path in lessons.NOTEBOOKS if path.name.startswith(start))
        page = browser.new_page(viewport={"width": 1300, "height": 900}, **options)
        pages.append(page)
        return lab.Lesson(page, address, path.name, expanded)

    yield open_
    close()
