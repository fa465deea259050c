"""Pages are plain English, as far as a machine can tell: short sentences, words of the glossary."""

import argparse
import ast
import json
import re
from pathlib import Path

import pytest

from rl_triton_core.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT, ROOT / "adapters", ROOT / "docs", ROOT / "examples" / "notebooks")
PAGES = [path for folder in FOLDERS for suffix in ("md", "ipynb") for path in sorted(folder.glob(f"*.{suffix}"))]
if not (ROOT / "docs").exists():
    pytest.skip("only the package is here", allow_module_level=True)

MOST_WORDS, MOST_COLUMNS, PRINTED = 39, 80, ("output", "diff")
PRIVATE_WORDS = {  # words of our own or out of use, and what to write instead
    "accelerated without a graph": "eager",
    "asks? nobody": "does not check",
    "(?:[Dd]eparture|[Aa]rrival) flags?": "done flag of the step, of the observation",
    "gains? in part": "a part gets faster",
    "(?:it|they) (?:is|are) none": "it is not",
    "hands? over": "return",
    "modules? with(?:out)? a state": "stateful module",
    "perceptrons?": "MLP",
    "pictures": "image observations, figure",
    "(?:a room|[Rr]ooms) (?:imports?|are)": "module",
    "(?<=, )say(?=[,)])": "such as",
    "seams?": "hook",
    "stands? (?:in front|against)": "precedes, prevents",
    "taken for (?:zero|0)": "replaced by 0",
    "afresh": "from zero",
    "anew": "again",
    "arms?": "variant",
    "bare": "plain",
    "[Cc]ontainment": "a NaN stays in its episode",
    "(?:at|a|every|each|no) cuts?": "bootstrapped step",
    "deaths?": "termination",
    "departed|sealed|severed": "done, previous_done",
    "handed|hands? (it |them )?on": "pass",
    "kinds? of calls?": "calls with the same shapes",
    "kin": "similar",
    "[Ll]ikewise": "the same",
    "setting reads": "the parts of a setting",
    "the whole way": "the normal path",
    "windows?": "rollout",
}
OF_KERNELS = {"lanes?": "environment", "plans?": "recorded call"}
OF_TEXT = {"in the place of": "instead of", r"(?<![Oo]ver )(?<!\*)ours(?!\*)": "of this package", "[Dd]rawn": "sampled"}
"""Names of variants and columns in tables, but not in sentences."""
MAY_NAME_KERNELS = {"design.md", "reference.md", "gpu.md", "CONTRIBUTING.md", "CHANGELOG.md"}


def read_prose(path):
    """A page without code, comments, and the targets of links."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"^( *)(```+|~~~+).*?^\1\2 *$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"(?:^\n)(?:^ {4}.*\n)+", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`[^`]*`", "`code`", text)


def find_blocks(text):
    """Paragraphs, items of lists, and cells of tables."""
    found = [""]
    for line in (line.strip() for line in text.splitlines()):
        if line.startswith("|"):
            found += [*line.strip("|").split(" | "), ""]
        elif not line or line.startswith("#"):
            found.append("")
        elif item := re.match(r"(?:[*-]|\d+\.) +(.*)", line):
            found.append(item[1])
        else:
            found[-1] += " " + line
    return [block.strip() for block in found if block.strip()]


def find_words(text, words):
    return [f"{m[0]!r}: {better}" for word, better in words.items() for m in re.finditer(rf"\b(?:{word})\b", text)]


def find_sentences(text):
    return [x for block in find_blocks(text) for x in re.split(r"(?<=[.!?])[*_)\"”]* +(?=[^a-z])", block)]


def test_docstrings_have_no_private_words():
    for path in (path for package in ("rl_triton_core", "adapters") for path in (ROOT / package).rglob("*.py")):
        nodes = [x for x in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(x, ast.Expr)]
        said = " ".join(x.value.value for x in nodes if isinstance(getattr(x.value, "value", None), str))
        assert not find_words(re.sub(r"`+[^`]*`+", "", said), PRIVATE_WORDS), path


def test_help_texts_are_sentences():
    for module in COMMANDS.values():
        parser = argparse.ArgumentParser(add_help=False)
        getattr(module, "add_arguments", id)(parser)
        said = [module.HELP, *(action.help for action in parser._actions)]
        assert not [text for text in said if not re.fullmatch(r"[A-Z][^.]*\b.*\.", text) or len(text.split()) < 4]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_plain_english(path):
    text = read_prose(path)
    private = PRIVATE_WORDS if path.name in MAY_NAME_KERNELS else {**PRIVATE_WORDS, **OF_KERNELS}
    assert not find_words(text, private)
    assert not find_words(re.sub(r"^\|.*$", "", text, flags=re.MULTILINE), OF_TEXT)
    assert not [x for x in find_sentences(text) if re.match(r"\W*What \w", x) and "?" not in x]
    assert not re.search(r"\b[Aa]s (in|for) `(compute_|linear_)", path.read_text(encoding="utf-8"))
    assert not [block for block in find_blocks(text) if block == "."]
    code = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert not [x for kind, block in code if kind not in PRINTED for x in block.splitlines() if len(x) > MOST_COLUMNS]
    long = [sentence for sentence in find_sentences(text) if len(sentence.split()) > MOST_WORDS]
    assert not long or path.name == "CHANGELOG.md", long
