"""Kernel resources: the committed table, and the comparison of tables."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.resources import table as kernel_resources
from benchmarks.resources.compile import sources, specs_for
from benchmarks.resources.table import Compiled, Resources, Table, compare, dump, load, make_table
from quasar_kernels.compile_specs import ARCHITECTURES
from quasar_kernels.mount import mount

COMPILERS = {
    "triton": "3.7.1",
    "ptxas": "12.8.93",
    "ptxas for sm_100 and later": "13.1.80",
    "nvcc": "13.0",
}
ROWS = [
    Compiled("scan", 86, Resources(64, 0, 0, 8192)),
    Compiled("scan", 100, Resources(60, 8, 12, 8200)),
    Compiled("a.cu: walk", 86, Resources(255, 0, 0, 0)),
    Compiled("a.cu", 100),
    Compiled("b.cu", 86),
    Compiled("b.cu: product", 100, Resources(168, 0, 0, 1024)),
]
TABLE = make_table(ROWS, COMPILERS)


def with_needs(kernel: str, arch: int, needs: Resources | None) -> Table:
    rows = {key: row for key, row in TABLE.rows.items() if key != (kernel, arch)}
    return replace(TABLE, rows=rows if needs is None else rows | {(kernel, arch): needs})


def test_the_committed_table_lists_every_kernel_for_every_gpu() -> None:
    table = load(kernel_resources.TABLE.read_text())
    mount()
    for arch in ARCHITECTURES:
        listed = {name for name, of in table.rows if of == arch}
        assert {spec.name for spec in specs_for(arch)} == {n for n in listed if ".cu" not in n}
        assert {path.name for path in sources()} == {
            name.partition(":")[0] for name in listed if ".cu" in name
        }
    # a file may lack kernels for a GPU only because wgmma exists in sm_90a alone
    on_hopper = {name.partition(":")[0] for name, arch in table.needs if arch == 90}
    assert {name for name, _ in table.rows.keys() - table.needs} <= on_hopper
    triton = [needs.shared for (name, _), needs in table.needs.items() if ".cu" not in name]
    assert max(triton) <= 99 * 1024
    assert set(table.compilers) == set(COMPILERS)


def test_a_table_survives_its_file() -> None:
    assert load(dump(TABLE)) == TABLE
    assert compare(TABLE, load(dump(TABLE))) == ([], [])


def test_changed_new_and_lost_kernels_are_named() -> None:
    found = with_needs("scan", 86, Resources(64, 0, 24, 8192))
    ((difference,), notes) = compare(TABLE, found)
    assert notes == []
    assert difference == (
        "scan, sm_86: registers 64, stack 0, spills 0, shared 8192"
        " -> registers 64, stack 0, spills 24, shared 8192"
    )
    lost = with_needs("scan", 86, None)
    assert compare(TABLE, lost)[0][0].endswith("shared 8192 -> not listed")
    assert compare(lost, TABLE)[0][0].startswith("scan, sm_86: not listed -> registers 64")
    got = with_needs("a.cu", 100, Resources(90))
    assert compare(TABLE, got)[0][0].startswith("a.cu, sm_100: no kernel -> registers 90")


def test_figures_of_other_compilers_are_not_compared() -> None:
    found = with_needs("scan", 86, Resources(90, 8, 16, 9000))
    other = replace(found, compilers=COMPILERS | {"ptxas": "13.2.0"})
    wrong, (note,) = compare(TABLE, other)
    assert wrong == []
    assert "ptxas is 13.2.0 here and 12.8.93 in the table" in note
    # the other ptxas did not make this one
    assert compare(TABLE, replace(found, compilers=COMPILERS | {"nvcc": "13.1"}))[0]
    blackwell = with_needs("scan", 100, Resources(61, 8, 12, 8200))
    assert compare(TABLE, replace(blackwell, compilers=other.compilers))[0]
    # a missing kernel is a difference with any compiler
    assert compare(TABLE, replace(with_needs("scan", 86, None), compilers=other.compilers))[0]
