"""Reads a page as a strict reader would."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "hr", "input"}
REFERENCES = ("src", "href", "xlink:href", "srcset", "data", "action", "poster")


class PageReader(HTMLParser):
    """Elements, references and text of a page.

    Raises AssertionError for an end tag that ends nothing, or another element than the last begun.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        """Cells of every row of every table."""
        self.feed(page)
        self.close()
        assert not self.open, f"{self.open} are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> ends nothing"
        assert self.open[-1] == tag, f"</{tag}> ends <{self.open[-1]}> at {self.getpos()}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in REFERENCES:
                self.references.append(value or "")

    @property
    def words(self) -> str:
        """All text, blanks drawn together."""
        return " ".join(" ".join(self.text).split())
