"""Reruns the commands that pages show, and keeps what a terminal showed, or what they measured.

    python docs/transcripts.py              rerun them all, then: python docs/pages.py
    python docs/transcripts.py NAME …       only these

A transcript is docs/transcripts/NAME.txt: 80 columns, no colours. A picture is docs/images/NAME.svg: with colours, and
narrow enough for a phone. A measured run is bench/results/NAME.json, from which pages.py draws all else; nothing else
should be running on the machine then. Every command runs as typed, in an empty folder. Figures differ from run to run
and from machine to machine; nobody edits them. What the model answers does not differ on the CPU kernels: a test asks
it again what is in ASKED, and fails when a page shows something else. Knows the commands; must not know what they
answer.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import termios
import textwrap
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRANSCRIPTS, IMAGES = ROOT / "docs" / "transcripts", ROOT / "docs" / "images"
RECORDED, RESULTS = TRANSCRIPTS / "recorded.json", ROOT / "bench" / "results"
COLUMNS, NARROW, ROWS, PATIENCE = 80, 46, 60, 900.0

ASK = '"Name three rivers."'
LIST = '"Write a JSON list of five fruits with name and colour."'
TALK = ("Write a JSON list of two fruits.\n", "Now of three.\n", "/drafter none\n", "Now of four.\n", "/quit\n")
# What is typed at the shell, and after it what is typed into the command: each line once the text before it was shown.
COMMANDS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "models": ("paceline models", []),
    "plain": (f"paceline generate {ASK} --stats", []),
    "suffix": (f"paceline generate {ASK} --drafter suffix --stats", []),
    "quickstart": ("python examples/quickstart.py", []),
    "sweep": ("paceline sweep --drafter suffix --num-draft-tokens 1,2,4,8 --num-prompts 4 --rounds 3 --no-show", []),
    "chat": ("paceline chat --max-tokens 80", [("> ", line) for line in TALK]),
    "mistake": ("paceline generate Hello --max-tokns 5", []),
    "check": ("paceline check --drafter suffix --num-prompts 4", []),
}
PICTURES = {"show-drafts": f"paceline generate {LIST} --max-tokens 100 --drafter suffix --show-drafts"}
LENGTHS = ("min_match=1,max_match=3", "min_match=2,max_match=4", "min_match=3,max_match=5", "min_match=5,max_match=5")
MEASURED = {
    "compare_smollm2": "paceline compare --demo edit --rounds 5 --output demo",
    "compare_mixed": "paceline compare --rounds 5 --output mixed",
    "ngram_lengths": f"paceline compare --rounds 3 {' '.join(f'--drafter ngram:{pair}' for pair in LENGTHS)}",
}
QUICK = "Say this three times: the quick brown fox jumps over the lazy dog."
# What the default model was asked in each, one after the other in a conversation, and the most tokens of an answer.
ASKED: dict[str, tuple[list[str], int | None]] = {
    "plain": ([ASK.strip('"')], None),
    "suffix": ([ASK.strip('"')], None),
    "quickstart": ([QUICK], 80),
    "chat": ([line.strip() for line in TALK if not line.startswith("/")], 80),
    "show-drafts": ([LIST.strip('"')], 100),
}
KEEP = {"replace_whitespace": False, "break_long_words": False, "break_on_hyphens": False}
# A terminal's colours by their numbers, light enough for a dark card.
COLOURS = {None: "#e8eef2", 1: "#ff9d8a", 2: "#7fd88f", 3: "#f2c14e", 4: "#8fb8ff", 5: "#e3a0e8", 6: "#6fd3e0"}
STYLES = re.compile(r"\x1b\[([0-9;]*)m")
OTHERS = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b\][^\x07]*\x07|\x1b[=>]")


def run(command: str, typed: list[tuple[str, str]], colours: bool, kept: Path | None = None) -> str:
    """Everything a terminal is sent while the command runs; the results it wrote go to `kept`."""
    with tempfile.TemporaryDirectory() as empty:
        folder = ROOT if "examples/" in command else Path(empty)
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (ROWS, NARROW if colours else COLUMNS))
        look = {"TERM": "xterm-256color"} if colours else {"TERM": "dumb", "NO_COLOR": "1"}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        process = subprocess.Popen(
            ["bash", "-c", command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env={**os.environ, **look, "PATH": path},
            start_new_session=True,
        )
        os.close(theirs)
        shown, left = _talk(ours, list(typed))
        if process.wait(timeout=10) not in (0, 2, 130) or left:
            raise SystemExit(f"{command} ended with {process.returncode}; {len(left)} lines were not typed:\n{shown}")
        if kept is not None:
            [results] = folder.glob("*/results.json")
            kept.write_bytes(results.read_bytes())
    return shown.replace(str(Path.home()), "~")


def _talk(terminal: int, left: list[tuple[str, str]]) -> tuple[str, list[tuple[str, str]]]:
    """Read to the end; type each line when what it waits for has come."""
    shown, seen, end = "", 0, time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece.decode("utf-8", errors="replace")
        if left and left[0][0] in shown[seen:]:
            seen = len(shown)
            os.write(terminal, left.pop(0)[1].encode())
    os.close(terminal)
    return shown, left


def screen(shown: str) -> list[str]:
    """The lines that are left on the screen, with their styles: a line that was erased or overwritten is gone."""
    lines, row = [""], 0
    for part in re.split(r"(\r|\n|\x1b\[[0-9]*A|\x1b\[2?K)", shown.replace("\r\n", "\n")):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\r" or part.endswith("K"):
            lines[row] = ""
        elif re.fullmatch(r"\x1b\[[0-9]*A", part):
            row = max(0, row - int(part[2:-1] or 1))
        else:
            lines[row] += OTHERS.sub("", part)
    return [line.rstrip() for line in lines]


def transcript(name: str) -> str:
    """What was typed and what was shown; long lines of prose are folded between words."""
    command, typed = COMMANDS[name]
    lines = [STYLES.sub("", line) for line in screen(run(command, typed, colours=False))]
    prose = [len(line) > COLUMNS and not line.startswith(" ") for line in lines]
    folded = ["\n".join(textwrap.wrap(line, COLUMNS, **KEEP)) if fold else line for line, fold in zip(lines, prose)]
    return f"$ {command}\n" + re.sub(r"\n{3,}", "\n\n", "\n".join(folded)).strip("\n") + "\n"


def picture(name: str) -> str:
    """The same with its colours, as SVG; nothing in it is fetched from elsewhere."""
    from rich.console import Console
    from rich.text import Text

    command, console = PICTURES[name], Console(width=NARROW)
    lines = [Text.styled(f"$ {command}", "bold"), *map(Text.from_ansi, screen(run(command, [], colours=True)))]
    wrapped = [part for line in lines for part in (line.wrap(console, NARROW) if line.plain else [line])]
    while not wrapped[-1].plain.strip():
        wrapped.pop()
    return draw([list(line.render(console)) for line in wrapped], command)


def draw(lines: list[list[Any]], title: str) -> str:
    """Lines of styled pieces on a dark card."""
    from rich.style import Style

    size, advance, height, edge = 14, 8.43, 20, 16
    wide, high = round(NARROW * advance + 2 * edge), len(lines) * height + 2 * edge
    told = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}">',
        f"  <title>{_safe(title)}</title>",
        "  <style>text { font: 14px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre }",
        "  .b { font-weight: 700 } .i { font-style: italic } .u { text-decoration: underline } .d { opacity: 0.75 }",
        "  </style>",
        f'  <rect width="{wide}" height="{high}" rx="8" fill="#14202b"/>',
    ]
    for row, line in enumerate(lines):
        column, y = 0, edge + row * height + size
        for text, style, _ in line:
            if text.strip():
                style = style or Style()
                marks = {"b": style.bold, "i": style.italic, "u": style.underline, "d": style.dim}
                classes = " ".join(mark for mark, on in marks.items() if on)
                colour = COLOURS.get(style.color.number if style.color else None, COLOURS[None])
                place = f'x="{edge + column * advance:.1f}" y="{y}"'
                told.append(f'  <text {place} fill="{colour}" class="{classes}">{_safe(text)}</text>')
            column += len(text)
    return "\n".join([*told, "</svg>", ""])


def _safe(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def main(words: list[str]) -> int:
    known = [*COMMANDS, *PICTURES, *MEASURED]
    unknown = [name for name in words if name not in known]
    if unknown:
        print(f"{', '.join(unknown)}: no such transcript; known: {', '.join(known)}")
        return 2
    for name in words or known:
        print(name, flush=True)
        if name in MEASURED:
            print(run(MEASURED[name], [], colours=False, kept=RESULTS / f"{name}.json"))
        elif name in COMMANDS:
            (TRANSCRIPTS / f"{name}.txt").write_text(transcript(name), encoding="utf-8")
        else:
            (IMAGES / f"{name}.svg").write_text(picture(name), encoding="utf-8")
    from paceline.bench import machine

    if {*COMMANDS, *PICTURES} & set(words or known):
        RECORDED.write_text(json.dumps(machine.record(), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
