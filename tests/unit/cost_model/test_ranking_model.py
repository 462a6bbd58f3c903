"""The prior, the bound, and the model that learns."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scheduled import AVX2, TARGET, elementwise, matmul, naive, tiled
from tvm import te

from cost_model.features import extract
from cost_model.gbt import RankingModel
from cost_model.machine import machine
from cost_model.model import CostModel, RooflineModel, Sample, prior_scores, sample
from cost_model.pretrained import Pretrained
from cost_model.roofline import analyse, estimate, prior

FUNC = matmul(96, 256, 128)
TILES = [(r, c) for r in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) for c in (16, 32, 64, 128)]
CANDIDATES = [tiled(FUNC, r, c) for r, c in TILES]


def hidden_truth(rows: int, columns: int) -> float:
    """A machine that the analytic model knows nothing of: it likes flat, wide tiles."""
    return 1e-4 * (1 + abs(math.log2(rows) - 1) + 0.5 * abs(math.log2(columns / 16) - 3))


def accuracy(scores: np.ndarray, seconds: np.ndarray) -> float:
    """Part of the pairs that are put in the right order."""
    faster = seconds[:, None] < seconds[None, :]
    return float((scores[:, None] > scores[None, :])[faster].mean())


SECONDS = np.array([hidden_truth(*t) for t in TILES])


def samples(indices: np.ndarray, group: str = "t") -> list[Sample]:
    return [sample(group, CANDIDATES[i], TARGET, float(SECONDS[i])) for i in indices]


def test_the_bound_counts_work_and_compulsory_bytes() -> None:
    found = analyse(FUNC, TARGET)
    assert found.flops == 2 * 96 * 256 * 128
    assert found.bytes == 4 * (96 * 128 + 128 * 256 + 96 * 256)
    assert found.compute_seconds == pytest.approx(found.flops / machine(TARGET).flops)
    assert machine(TARGET).flops == 2 * machine(AVX2).flops == 2 * 4.2e9 * 2 * 2 * 16
    assert estimate(FUNC, TARGET) == found.seconds == found.compute_seconds
    large = elementwise(1 << 20)
    assert estimate(large, TARGET) == pytest.approx(2 * 4 * 64 * (1 << 20) / machine(TARGET).bandwidth)


def test_of_a_table_the_rows_that_are_read_count() -> None:
    table, rows = te.placeholder((30000, 64), name="table"), te.placeholder((7,), "int64", name="rows")
    func = te.create_prim_func([table, rows, te.compute((7, 64), lambda i, j: table[rows[i], j] + 1.0, name="out")])
    assert 2 * 4 * 7 * 64 <= analyse(func, TARGET).bytes <= 2 * 4 * 7 * 64 + 8 * 7  # numbers of rows may count
    part = te.create_prim_func([table, te.compute((100, 16), lambda i, j: table[i * 2, j] + 1.0, name="out")])
    assert analyse(part, TARGET).bytes == 2 * 4 * 100 * 16


def test_the_bound_is_the_same_before_and_after_scheduling() -> None:
    assert analyse(FUNC, TARGET).bytes == analyse(CANDIDATES[0], TARGET).bytes
    assert analyse(FUNC, TARGET).flops == analyse(CANDIDATES[0], TARGET).flops


def test_without_data_the_ranking_is_the_analytic_one() -> None:
    scores = RankingModel().score(FUNC, TARGET, CANDIDATES)
    seconds = [prior(c, TARGET) for c in CANDIDATES]
    assert (np.argsort(-scores, kind="stable") == np.argsort(seconds, kind="stable")).all()
    assert scores == pytest.approx(RooflineModel().score(FUNC, TARGET, CANDIDATES))
    assert (scores <= 0).all() and len(np.unique(scores)) > 10
    assert RankingModel().score(FUNC, TARGET, [naive(FUNC)])[0] < scores.min()


def test_it_learns_what_the_analytic_model_does_not_know() -> None:
    rng = np.random.default_rng(0)
    shuffled = rng.permutation(len(TILES))
    learned, held_out = shuffled[:28], shuffled[28:]
    model = RankingModel()
    before = accuracy(model.score(FUNC, TARGET, [CANDIDATES[i] for i in held_out]), SECONDS[held_out])
    model.fit(samples(learned))
    after = accuracy(model.score(FUNC, TARGET, [CANDIDATES[i] for i in held_out]), SECONDS[held_out])
    assert before < 0.7 < after
    assert accuracy(model.score(FUNC, TARGET, [CANDIDATES[i] for i in learned]), SECONDS[learned]) > 0.9


def test_failures_rank_last() -> None:
    model = RankingModel()
    wide = [i for i, (_, c) in enumerate(TILES) if c == 128]
    rest = [i for i, (_, c) in enumerate(TILES) if c != 128]
    failed = [Sample("t", extract(CANDIDATES[i], TARGET), math.inf) for i in wide]
    model.fit([*samples(np.array(rest)), *failed])
    scores = model.score(FUNC, TARGET, CANDIDATES)
    assert scores[wide].max() < np.median(scores[rest])


def test_groups_are_never_compared() -> None:
    """A second task, a thousand times slower throughout, must not change the first one's ranking upside down."""
    model = RankingModel()
    indices = np.arange(len(TILES))
    slow = [Sample("slow", s.features, s.seconds * 1000) for s in samples(indices)]
    model.fit([*samples(indices), *slow])
    assert accuracy(model.score(FUNC, TARGET, CANDIDATES), SECONDS) > 0.9


def test_equal_samples_give_equal_models_and_saving_keeps_them() -> None:
    a, b, c = RankingModel(seed=1), RankingModel(seed=1), RankingModel(seed=1)
    for model in (a, b):
        for part in np.array_split(np.arange(len(TILES)), 3):
            model.fit(samples(part))
    scores = a.score(FUNC, TARGET, CANDIDATES)
    assert (scores == b.score(FUNC, TARGET, CANDIDATES)).all()
    c.load(a.save())
    assert (scores == c.score(FUNC, TARGET, CANDIDATES)).all() and c.samples == a.samples == len(TILES)
    assert c.known("t") == len(TILES) and c.known("u") == 0
    extra = samples(np.arange(4), "u")
    for model in (a, c):
        model.fit(extra)
    assert (a.score(FUNC, TARGET, CANDIDATES) == c.score(FUNC, TARGET, CANDIDATES)).all()


def test_a_single_sample_a_group_teaches_nothing() -> None:
    model = RankingModel()
    model.fit([*samples(np.array([0]), "a"), *samples(np.array([1]), "b")])
    assert model.score(FUNC, TARGET, CANDIDATES) == pytest.approx(RooflineModel().score(FUNC, TARGET, CANDIDATES))


def test_the_oldest_samples_make_room() -> None:
    model = RankingModel(capacity=20)
    model.fit(samples(np.arange(len(TILES))))
    assert model.samples == 20


@pytest.mark.parametrize("blob", [b"", b"not an archive", RankingModel().save()[:100]])
def test_a_damaged_state_is_refused(blob: bytes) -> None:
    with pytest.raises(ValueError, match="must be an archive that save"):
        RankingModel().load(blob)


def test_a_state_of_other_features_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = RankingModel().save()
    monkeypatch.setattr("cost_model.gbt.FEATURES", ("something", "else"))
    with pytest.raises(ValueError, match="this version's features"):
        RankingModel().load(blob)


def test_trees_grow_on_what_a_pretrained_model_says() -> None:
    other = matmul(80, 192, 64)
    learned = [sample("other", tiled(other, r, c), TARGET, hidden_truth(r, c)) for r, c in TILES]
    below = Pretrained.train(learned)
    model = RankingModel(pretrained=below)
    held_out = accuracy(model.score(FUNC, TARGET, CANDIDATES), SECONDS)
    assert held_out > accuracy(RankingModel().score(FUNC, TARGET, CANDIDATES), SECONDS) + 0.1
    model.fit(samples(np.arange(0, len(TILES), 2)))
    rest = np.arange(1, len(TILES), 2)
    assert accuracy(model.score(FUNC, TARGET, [CANDIDATES[i] for i in rest]), SECONDS[rest]) > 0.8
    again = RankingModel(pretrained=below)
    again.load(model.save())
    assert (again.score(FUNC, TARGET, CANDIDATES) == model.score(FUNC, TARGET, CANDIDATES)).all()


def test_what_is_uncertain_is_worth_a_trial() -> None:
    below = Pretrained.train([sample(g, CANDIDATES[i], TARGET, s) for g in "abc" for i, s in enumerate(SECONDS)])
    plain, curious = (RankingModel(pretrained=below, explore=e) for e in (0.0, 2.0))
    gained = curious.score(FUNC, TARGET, CANDIDATES) - plain.score(FUNC, TARGET, CANDIDATES)
    assert (gained >= 0).all() and gained.max() > 0


def test_both_models_keep_the_contract() -> None:
    models: list[CostModel] = [RankingModel(), RooflineModel()]
    for model in models:
        assert len(model.score(FUNC, TARGET, [])) == 0
        model.fit([])
        type(model)().load(model.save())


def test_prior_scores_are_zero_at_the_roofline() -> None:
    bound = estimate(FUNC, TARGET)
    assert prior_scores(FUNC, TARGET, [bound, 2 * bound]) == pytest.approx([0.0, -1.0])


def test_weights_of_a_model_larger_than_the_caches_come_from_memory() -> None:
    """A matrix times a vector: 4 MB of weights, which fit into the last cache, and hardly any arithmetic."""
    a, b = te.placeholder((1, 1024), name="a"), te.placeholder((1024, 1024), name="b")
    k = te.reduce_axis((0, 1024), name="k")
    func = te.create_prim_func([a, b, te.compute((1, 1024), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="c")])
    warm, last = analyse(func, TARGET), machine(TARGET).levels[-1].size
    assert analyse(func, TARGET, (1,), int(last)) == warm
    cold = analyse(func, TARGET, (1,), int(last) + 1)
    assert cold.seconds == pytest.approx(4 * (1 << 20) / machine(TARGET).bandwidth) and cold.seconds > 2 * warm.seconds
    assert (cold.flops, cold.bytes) == (warm.flops, warm.bytes)
