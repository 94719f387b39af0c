"""Parts of documents that programs write, each between a comment with its name and the next `<!-- end -->`."""

_END = "<!-- end -->\n"


def with_part(document: str, name: str, text: str) -> str:
    """The document with another text in the place of the part of a name."""
    begin = f"<!-- {name} -->\n"
    before, _, rest = document.partition(begin)
    return f"{before}{begin}\n{text}\n\n{_END}{rest.partition(_END)[2]}"
