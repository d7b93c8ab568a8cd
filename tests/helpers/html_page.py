"""Read a page back: its tags must be balanced and must not run anything."""

from html.parser import HTMLParser

VOID = {"meta", "link", "img", "br", "hr"}


class Page(HTMLParser):
    """Text, ids and tags of a page, targets of its links, and everything that could be fetched."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html, self.text = html, ""
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(html)
        assert self.open == []
        assert "script" not in self.tags
        assert len(self.ids) == len(set(self.ids))
        assert {link.removeprefix("#") for link in self.links} <= set(self.ids)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        assert not any(name.startswith("on") for name in given), given
        self.ids += [given["id"]] if "id" in given else []
        target = given.get("src") or given.get("href")
        if target is not None:
            (self.links if tag == "a" else self.fetched).append(target)
        if tag not in VOID and not self.get_starttag_text().endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data.replace("\u00a0", " ") if "style" not in self.open else ""
