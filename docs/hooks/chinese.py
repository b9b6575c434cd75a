"""Hook: the Chinese pages and the way between the languages.

zh/x.md is the translation of x.md, and so is x.zh.md. A Chinese page gets `<html lang="zh">`, the theme's texts in
Chinese, and the Chinese section first in the navigation. Every page gets a switch of the language in its header
(`extra.alternate`, set here page by page): to its counterpart, or to the other language's home if it has none.

Chinese is written without spaces. For the search, jieba cuts it into words as the index is made, and mkdocs.yml lets
the separator (U+200B) that it puts between them end a word. Without jieba most queries find nothing, and the search
plugin says nothing: this hook warns, which ends a strict build. What a reader asks for the theme's script cuts itself,
by the words of the index; its loop stops one character early, so that it never sees a query's last word: mended here.
"""

import copy
import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure import StructureItem
    from mkdocs.structure.nav import Navigation
    from mkdocs.structure.pages import Page

FOLDER, ENDING = "zh/", ".zh.md"
HOME = "index.md"
# What jieba would cut otherwise. Only words without a shorter one inside: a search finds a word by its beginning.
WORDS = (
    *("分页", "块表", "块池", "槽位", "掩码", "预填充", "批处理", "调度器", "抢占", "重算"),
    *("提示词", "采样器", "分词器", "吞吐", "贪心"),
)
ALTERNATE = re.compile(r'\s*<link rel="alternate" [^>]*hreflang=[^>]*>')
# for (let end = start + 1; end < query.length; end++) if (query.slice(start, end) in index) ...
QUERY_LOOP = re.compile(r"(for\(let (\w+)=(\w+)\+1;\2<)((\w+)\.length;\2\+\+\)\5\.slice\(\3,\2\)in )")
log = logging.getLogger("mkdocs.hooks.chinese")


def on_config(config: "MkDocsConfig") -> None:
    """Teach jieba the field's words."""
    try:
        import jieba
    except ImportError:
        log.warning("jieba is not installed, so that the search finds no Chinese: pip install -e '.[docs]'")
        return
    jieba.setLogLevel(logging.WARNING)
    for word in WORDS:
        jieba.add_word(word)


def on_page_context(context: dict[str, Any], page: "Page", config: "MkDocsConfig", nav: "Navigation") -> dict[str, Any]:
    """Set the language before the theme renders the page: it reads it anew for each."""
    here = page.file.src_uri
    addresses = {other.file.src_uri: other.url for other in nav.pages}
    config.theme["language"] = "zh" if is_chinese(here) else "en"
    config.extra["homepage"] = addresses.get(FOLDER + HOME) if is_chinese(here) else None
    config.extra["alternate"] = [
        {"name": name, "lang": language, "link": addresses[source] or "./"}
        for name, language, source in zip(("English", "中文"), ("en", "zh"), versions(here, addresses), strict=True)
        if source in addresses
    ]
    # Before and after a page stand those of its language.
    same = [other for other in nav.pages if is_chinese(other.file.src_uri) == is_chinese(here)]
    if page in same:  # mkdocs also builds a page that the navigation lacks, with a warning
        at = same.index(page)
        page.previous_page = same[at - 1] if at > 0 else None
        page.next_page = same[at + 1] if at + 1 < len(same) else None
    if is_chinese(here):
        nav = copy.copy(nav)
        nav.items = sorted(nav.items, key=lambda item: not _is_chinese_section(item))  # the others keep their order
        context["nav"] = nav
    return context


def on_post_page(output: str, page: "Page", config: "MkDocsConfig") -> str:
    """Leave the header's links alone.

    The theme's script looks for a sitemap beside each alternate that the page's head names; finding none, it would turn
    every link into that folder into one to the folder itself.
    """
    return ALTERNATE.sub("", output)


def on_post_build(config: "MkDocsConfig") -> None:
    """Let the search see the last word of a query."""
    for worker in Path(config.site_dir).glob("assets/javascripts/workers/search.*.js"):
        worker.write_text(mend(worker.read_text(encoding="utf-8")), encoding="utf-8")


def mend(script: str) -> str:
    """The theme's script with that loop ending where the query does; a script that has no such loop, as it is."""
    return QUERY_LOOP.sub(r"\1=\4", script)


def is_chinese(source: str) -> bool:
    """Whether a page is Chinese, by its source file, relative to docs/."""
    return source.startswith(FOLDER) or source.endswith(ENDING)


def versions(source: str, sources: Collection[str]) -> tuple[str, str]:
    """The English and the Chinese page that belong together, one of which is `source`; homes stand in for the lost."""
    english = source.removeprefix(FOLDER)
    if english.endswith(ENDING):
        english = english.removesuffix(ENDING) + ".md"
    translations = [FOLDER + english, english.removesuffix(".md") + ENDING]
    chinese = next((page for page in translations if page in sources), FOLDER + HOME)
    return english if english in sources else HOME, chinese


def _is_chinese_section(item: "StructureItem") -> bool:
    """Whether all that stands in a section is Chinese pages."""
    children = getattr(item, "children", None) or []
    return bool(children) and all(child.is_page and is_chinese(child.file.src_uri) for child in children)
