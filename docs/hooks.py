"""What mkdocs does besides: pages that lie outside docs/ (benchmarks/, BUILD.md and its like) join the site under their own paths.

Links are written as they work in a checkout. In the site docs/ is the root, so that `docs/` and one `../` fall away.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
PAGES = ("BUILD.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
KINDS = (".md", ".png", ".json")


def on_files(files, config):
    """Adds the pages, and the plots and JSON files that they link to."""
    results = sorted(path for path in (ROOT / "benchmarks").rglob("*") if path.suffix in KINDS)
    for path in [ROOT / page for page in PAGES] + results:
        if path.is_file():
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def in_site(markdown: str, page: str) -> str:
    """A page's links, from how they work in a checkout to how they work in the site. page: its path in the site."""
    if page.startswith("benchmarks/") or page in PAGES:
        return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
    return re.sub(r"\]\(\.\./", "](", markdown)  # docs/ is flat


def on_page_markdown(markdown, page, config, files):
    return in_site(markdown, page.file.src_uri)
