"""The tables of mutants in docs/reliability.md, and what is said of those that were left."""

from __future__ import annotations

from benchmarks.mutants.results import Module, Mutants


def section(found: Mutants) -> str:
    """Return the table by module, the sums, and every mutant that was left with its reason."""
    head = (
        "| code | mutants | tried | noticed | change nothing | noticed of the others |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: |"
    )
    rows = [_row(one) for one in found.modules]
    made, tried, noticed, equivalent = (
        sum(getattr(one, of) for one in found.modules)
        for of in ("made", "tried", "noticed", "equivalent")
    )
    told = (
        f"{noticed:,} of {tried:,} are noticed, {noticed / tried:.1%}; {equivalent} of the "
        f"{tried - noticed} that are left change nothing, and without them it is "
        f"{noticed / (tried - equivalent):.1%}. {tried / made:.0%} of these modules' mutants were "
        "tried."
    )
    return "\n".join([head, *rows, "", told, "", *_left(found.modules)])


def _row(module: Module) -> str:
    made, tried, equivalent = module.made, module.tried, module.equivalent
    share = f"{module.noticed / (tried - equivalent):.1%}" if tried > equivalent else "-"
    part = f"{tried:,}" if tried == made else f"{tried:,} ({tried / made:.0%})"
    return f"| {module.path} | {made:,} | {part} | {module.noticed:,} | {equivalent} | {share} |"


def _left(modules: tuple[Module, ...]) -> list[str]:
    """Return the table of those that no test noticed; a reason is told where it changes nothing."""
    rows = [
        f"| {module.path.rpartition('/')[2]}:{one.line} | {_code(one.before)} | {_code(one.after)} "
        f"| {one.equivalent or '**a gap**'} |"
        for module in modules
        for one in module.left
    ]
    head = "| place | instead of | stands | which is the same, since |\n| --- | --- | --- | --- |"
    return [head, *rows] if rows else []


def _code(text: str) -> str:
    text = text.strip()
    return f"`{text.replace('|', chr(92) + '|')}`" if text else "nothing"
