import numpy as np

from m4.eval.scoring.delta import Delta, averages
from m4.eval.scoring.export import latex_text
from m4.eval.scoring.levels import ResourceLevels

LEVELS = ResourceLevels(min_test_sentences=30)


def rows():
    made = []
    for system, better in (("moe_64", 3.0), ("a & b", -1.0)):
        for code, name, pairs, copy, sentences in (
            ("pt", "Portuguese", 12563, 2.0, 200),
            ("kea", "Kabuverdianu", 900, 40.0, 200),
            ("gl", "Galician", 250, 2.0, 20),
        ):
            made.append(
                Delta(
                    direction=f"{code}-en", language=code, name=name, side="xx->en", system=system,
                    baseline="bilingual", metric="bleu", train_pairs=pairs, sentences=sentences,
                    baseline_score=20.0, system_score=20.0 + better, copy_score=copy, delta=better,
                    low=better - 2, high=better + 2, p_value=0.01,
                    closely_related=("pt",) if code == "gl" else (),
                    replicates=np.full(1000, better),
                )
            )  # fmt: skip
    return made


def test_a_system_without_a_direction_leaves_its_cells_empty():
    some = [row for row in rows() if (row.system, row.language) != ("a & b", "pt")]
    assert " &  &  \\\\" in latex_text(some, averages(some, LEVELS), LEVELS)


def test_latex_is_escaped_and_its_lines_have_the_columns_that_it_declares():
    made = rows()
    text = latex_text(made, averages(made, LEVELS), LEVELS)
    assert "moe\\_64" in text
    assert "a \\& b" in text
    assert text.count("\\toprule") == text.count("\\bottomrule") == 2
    assert "{tabular}" not in latex_text(made, [], LEVELS)
    for part in text.split("\\begin{")[1:]:
        columns = len(part.partition("{")[2].partition("}")[0])
        lines = [line for line in part.splitlines() if line.endswith("\\\\")]
        assert lines
        assert {line.replace("\\&", "").count("&") + 1 for line in lines} == {columns}
    beyond = [line for line in text.splitlines() if not line.startswith("%")]
    assert set("".join(beyond)) <= set(map(chr, range(32, 127)))
