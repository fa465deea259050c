"""The README as a package index shows it: links to files lead to the project's repository, or are plain words.

So are links to its own titles, which an index gives no address.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://)([^)]*)\)")


class ReadmeHook(MetadataHookInterface):
    """What hatchling calls for `tool.hatch.metadata.hooks.custom`."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository = metadata.get("urls", {}).get("Repository")

        def replace(link: re.Match[str]) -> str:
            picture, words, path = link.groups()
            kind = "raw" if picture else "blob"
            leads = repository and not path.startswith("#")
            return f"{picture}[{words}]({repository}/{kind}/HEAD/{path})" if leads else words

        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": LINK.sub(replace, text)}
