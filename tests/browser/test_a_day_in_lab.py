"""What learners do in JupyterLab: solve an exercise, stop a cell, use the keyboard, dark mode."""

import psutil
import pytest
from wrong_answers import wrong_answers

from teaching import lessons

SLEEPERS = """
def work(rank, world_size):
    import os, time
    print("my process is", os.getpid())
    time.sleep(300)

launch.run(work, 2, timeout_s=300)
"""

# Text and background as rendered: the contrast ratio of WCAG 2.1, section 1.4.3.
CONTRAST = """roots => {
  const number = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const [r, g, b, a = 1] = number(getComputedStyle(node).backgroundColor);
      if (a > 0.5) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const faint = [];
  for (const root of roots) {
    const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    for (let text; text = walk.nextNode();) {
      const node = text.parentElement;
      if (!text.data.trim() || !node.checkVisibility() || node.closest('script,style')) continue;
      const [a, b] = [light(number(getComputedStyle(node).color)), light(ground(node))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < 4) faint.push(`${ratio.toFixed(1)}: ${text.data.trim().slice(0, 60)}`);
    }
  }
  return faint;
}"""


def test_an_exercise_judges_a_wrong_and_a_right_answer_and_counts_as_progress(open_lesson):
    (path,) = (path for path in lessons.NOTEBOOKS if path.name.startswith("04"))
    (wrong, phrase), *_ = wrong_answers("4.1")
    lesson = open_lesson("04")
    lesson.run_all()
    stub, check = lesson.index("stub-4.1"), lesson.index("check-4.1")
    assert "not attempted yet" in lesson.text(check)
    lesson.put(stub, wrong)
    lesson.run(stub)
    lesson.run(check)
    assert "not right yet" in lesson.text(check) and phrase in lesson.text(check)
    lesson.put(stub, lessons.solution(path, "4.1"))
    lesson.run(stub)
    lesson.run(check)
    assert "4.1" in lesson.text(check) and ": right" in lesson.text(check)
    start = open_lesson("00")
    start.run_all()
    told = [
        str(output["data"])
        for cell in start.cells()
        for output in cell["outputs"]
        if "exercises solved" in str(output.get("data", ""))
    ]
    assert told and "1 of 3" in told[0]


def test_the_stop_button_terminates_a_running_launch_and_its_processes(open_lesson):
    lesson = open_lesson("06")
    for number in [n for n, cell in enumerate(lesson.cells()) if "setup" in cell["tags"]]:
        lesson.run(number)
    busy = lesson.index("stub-6.1")
    lesson.put(busy, SLEEPERS)
    lesson.page.keyboard.press("Control+Enter")
    outputs = f"p.content.model.cells.get({busy}).outputs.toJSON()"
    printed = f"{outputs}.map(o => o.text ?? '').join('')"
    lesson.wait_for(f"p => {printed}.split('my process is').length > 2", 120)
    lines = lesson.ask(f"p => {printed}").splitlines()
    ranks = [psutil.Process(int(line.split()[-1])) for line in lines if "my process is" in line]
    assert len(ranks) == 2
    # Hidden panels have this button, too.
    panel = lesson.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    panel.locator("[data-jp-item-name='interrupt']").click()
    lesson.wait_for(f"p => {outputs}.some(o => o.ename === 'KeyboardInterrupt')", 60)
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive


def test_a_lesson_can_be_done_with_the_keyboard_alone(open_lesson):
    lesson = open_lesson("04")
    keyboard = lesson.page.keyboard
    cells = lesson.cells()
    for index, cell in enumerate(cells):
        lesson.wait_for(f"p => p.content.activeCellIndex === {index}", 30)
        keyboard.press("Shift+Enter")
        if cell["kind"] == "code":
            lesson.wait_for(f"p => p.content.model.cells.get({index}).executionCount", 120)
    (explorer,) = [n for n, cell in enumerate(cells) if cell["source"] == "shares_explorer(gpus)"]
    keyboard.press("Escape")
    for index in range(len(cells), explorer, -1):
        lesson.wait_for(f"p => p.content.activeCellIndex === {index}", 30)
        keyboard.press("ArrowUp")
    area = lesson.at(explorer).locator(".jp-OutputArea").first
    picture = area.locator("img").first
    picture.wait_for(timeout=60_000)
    shown = picture.get_attribute("src")
    lesson.page.wait_for_function(
        "cell => cell.contains(document.activeElement)", arg=lesson.at(explorer).element_handle()
    )
    # The buttons of the cell's toolbar may come first.
    for _ in range(12):
        keyboard.press("Tab")
        where = lesson.page.evaluate("document.activeElement.outerHTML.slice(0, 120)")
        if "noUi-handle" in where:
            break
    else:
        pytest.fail(f"the Tab key reaches {where}, not the slider")
    keyboard.press("ArrowRight")
    lesson.page.wait_for_function(
        "([area, shown]) => { const now = area.querySelector('img');"
        " return now && now.src !== shown; }",
        arg=[area.element_handle(), shown],
        timeout=60_000,
    )


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_text_and_tables_have_enough_contrast(open_lesson, theme):
    lesson = open_lesson("04")
    lesson.page.evaluate(
        "theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme
    )
    lesson.page.wait_for_selector(f"body[data-jp-theme-name='{theme}']", state="attached")
    lesson.run_all()
    faint = set()
    for index, _ in enumerate(lesson.cells()):
        cell = lesson.show(index)
        painted = cell.locator(".jp-RenderedHTMLCommon, .jp-RenderedText")
        if painted.count():
            faint.update(painted.evaluate_all(CONTRAST))
    assert not faint
