"""Writes the skeleton of the next lesson, in all the places that a lesson has.

    python -m teaching.new_lesson "Sharding"

That is a notebook with an opening, a setup, a prediction, exercises and a closing; the exercises'
checks and typical wrong answers; a row of the README's table; a part of the teaching guide. It runs
and passes every test but one, which lists the places where TODO still stands.
"""

import argparse
import re
import sys
from pathlib import Path

import nbformat

from helpers.course.sections import core_and_whole
from teaching import lessons

EXERCISES = (1, 2, 3)

OPENING = """
# {number} · {title}

TODO: what one meets at work that makes this lesson worth its time.

**You will be able to**
- TODO

**Time:** about {minutes} minutes

**You should know** TODO (lesson 00).
"""

SETUP = """
import torch

from helpers import devices
from helpers.checks import check, guess

gpus = devices.lab(2)
"""

PREDICT = """
## TODO: a section

TODO: what the next cell does, and what to look for.

**Predict:** TODO: a question whose answer stands nowhere above.
"""

OUTCOME = """
numbers = torch.arange(4, device=gpus[0])
guess_{n}a.compare(numbers.sum().item())
"""

WHY = """
<details class="why-{n}a"><summary>Why?</summary>

TODO: why it is so. The next cell asserts it.

</details>
"""

EXERCISE = """
### Exercise {n}.{k} · TODO: a title

TODO: what to write, in the units of its budget.

**Difficulty:** 1 of 5 · **Minutes:** 5
"""

STUB = """
def todo_{k}(number):
    raise NotImplementedError  # replace this line by your own
"""

HINT = """
<details><summary>Hint</summary>

TODO

</details>
"""

SOLUTION = """
<details><summary>Solution</summary>

```python
def todo_{k}(number):
    return 2 * number
```

</details>
"""

CLOSING = """
## What to remember

| you see | because | do |
|---|---|---|
| TODO | | |

**Read on** TODO: in PyTorch's documentation, and in the next lesson.
"""

CHECKS = '''"""Checks of lesson {number}: TODO."""

import random
from collections.abc import Callable

from helpers.checks.core import exercise, expect_equal
'''

CHECK = """

@exercise("{n}.{k}", "TODO: a title")
def todo_{k}(answer: Callable[[int], int]) -> dict[str, str]:
    number = random.randint(1, 9)
    expect_equal(answer(number), 2 * number, given=f"{{number}}", hint="TODO: what is off.")
    return {{"TODO: what your code did": f"{{2 * number}}"}}
"""

WRONG = '''"""Typical mistakes in the exercises of lesson {number}, and what the learner must be told."""

WRONG = {{
{entries}
}}
'''

WRONG_ENTRY = '    "{n}.{k}": [("def todo_{k}(number):\\n    return 3 * number", "TODO")],'

ROW = "| [{number} · {title}](notebooks/{stem}.ipynb) | {minutes} | {minutes} | TODO |\n"

PART = """### {number} · {title}
- **Ask:** TODO
- **Goes wrong:** TODO
- **With real GPUs:** TODO

"""


def notebook(number: str, title: str, minutes: int) -> nbformat.NotebookNode:
    """The skeleton of a lesson's notebook, which says that it takes so many minutes."""
    n = int(number)
    made = nbformat.v4.new_notebook(
        metadata={
            "kernelspec": {
                "display_name": "Python 3 (ipykernel)",
                "language": "python",
                "name": "python3",
            },
            "language_info": {"name": "python"},
        }
    )

    def add(kind: str, cell_id: str, source: str, *tags: str) -> None:
        new = nbformat.v4.new_code_cell if kind == "code" else nbformat.v4.new_markdown_cell
        made.cells.append(
            new(source.strip(), id=cell_id, metadata={"tags": [*tags]} if tags else {})
        )

    add(
        "markdown",
        "opening",
        OPENING.format(number=number, title=title, minutes=minutes),
        "opening",
    )
    add("code", "setup", SETUP, "setup")
    add("code", "describe", "devices.describe(2)")
    add("markdown", "todo-predict", PREDICT)
    add("code", "todo-guess", f'guess_{n}a = guess("{n}a")')
    add("code", "todo-outcome", OUTCOME.format(n=n))
    add("markdown", "todo-why", WHY.format(n=n))
    add("code", "todo-proof", "assert numbers.sum() == 6")
    for k in EXERCISES:
        add("markdown", f"exercise-todo-{k}", EXERCISE.format(n=n, k=k), f"exercise-{n}.{k}")
        add("code", f"stub-todo-{k}", STUB.format(k=k), f"stub-{n}.{k}")
        add("code", f"check-todo-{k}", f'check("{n}.{k}", todo_{k})', f"check-{n}.{k}")
        add("markdown", f"hint-todo-{k}", HINT, f"hint-{n}.{k}")
        add("markdown", f"solution-todo-{k}", SOLUTION.format(k=k), f"solution-{n}.{k}")
    add("markdown", "closing", CLOSING, "closing")
    return made


def write(title: str, root: Path = lessons.ROOT) -> list[Path]:
    """Write the next lesson's skeleton below ``root``, and return the files written or changed."""
    numbered = sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    number = f"{len(numbered):02d}"
    stem = f"{number}_{'_'.join(re.findall(r'[a-z0-9]+', title.partition(':')[0].lower()))}"
    path = root / "notebooks" / f"{stem}.ipynb"
    checks = root / "helpers" / "checks" / "lessons" / f"lesson_{number}.py"
    wrong = root / "tests" / "support" / "wrong_answers" / f"lesson_{number}.py"
    readme, guide = root / "README.md", root / "docs" / "teaching.md"
    for new in (path, checks, wrong):
        if new.exists():
            raise FileExistsError(f"{new} is there already: is the last lesson numbered right?")
    n = int(number)
    nbformat.write(notebook(number, title, 0), path)
    minutes, _ = core_and_whole(path)
    nbformat.write(notebook(number, title, minutes), path)
    text = CHECKS.format(number=number) + "".join(CHECK.format(n=n, k=k) for k in EXERCISES)
    checks.write_text(text, encoding="utf-8")
    entries = "\n".join(WRONG_ENTRY.format(n=n, k=k) for k in EXERCISES)
    wrong.write_text(WRONG.format(number=number, entries=entries), encoding="utf-8")
    last_row = re.compile(rf"^\| \[.*\(notebooks/{numbered[-1].name}\).*\n", re.MULTILINE)
    row = ROW.format(number=number, title=title, stem=stem, minutes=minutes)
    _insert(readme, last_row, row, after=True)
    _insert(guide, re.compile(r"^## After the day$", re.M), PART.format(number=number, title=title))
    return [path, checks, wrong, readme, guide]


def _insert(path: Path, place: re.Pattern[str], new: str, *, after: bool = False) -> None:
    text = path.read_text(encoding="utf-8")
    found = place.search(text)
    if found is None:
        raise ValueError(f"{path} has no line like {place.pattern!r} to put the lesson beside")
    at = found.end() if after else found.start()
    path.write_text(text[:at] + new + text[at:], encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="teaching.new_lesson", description=__doc__.split("\n")[0])
    parser.add_argument("title", help='as in "Sharding: DDP to FSDP"; the number is the next one')
    options = parser.parse_args(arguments)
    if not re.search(r"[a-zA-Z0-9]", options.title.partition(":")[0]):
        sys.exit('new_lesson: give the lesson a title: make lesson TITLE="Sharding"')
    for path in write(options.title):
        print(path.relative_to(lessons.ROOT))
    print("Write where TODO stands; make check lists what is left. CONTRIBUTING.md has the recipe.")


if __name__ == "__main__":
    main()
