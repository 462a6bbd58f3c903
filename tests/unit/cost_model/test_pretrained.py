"""A model that is trained on some tasks ranks candidates of others, is stored, and is refused where it does not fit."""

from __future__ import annotations

import io

import numpy as np
import pytest

from cost_model.evaluate import cross_validate, quality, roofline
from cost_model.features import FEATURES, Features
from cost_model.pretrained import Pretrained, _checksum
from cost_model.sample import Sample

TASKS, EACH = 24, 20


def _samples(seed: int, noise: float = 0.02) -> list[Sample]:
    """Tasks whose times are the estimate's, but for a factor that one feature decides."""
    rng = np.random.default_rng(seed)
    found = []
    for task in range(TASKS):
        scale = 10.0 ** rng.uniform(-6, -3)
        for _ in range(EACH):
            vector = rng.standard_normal(len(FEATURES)).astype(np.float32)
            estimate = scale * 2.0 ** rng.uniform(0, 2)
            seconds = estimate * 2.0 ** (1.5 * (vector[7] > 0) + noise * rng.standard_normal())
            found.append(Sample(f"task{task}", Features(vector, estimate), float(seconds)))
    return found


def _learner(known: list[Sample], seed: int):  # type: ignore[no-untyped-def]
    model = Pretrained.train(known, seed=seed)
    return lambda group: model.predict(
        np.stack([s.features.vector for s in group]), np.array([s.features.seconds for s in group])
    )[0]


def test_what_errs_in_the_same_way_everywhere_is_learned() -> None:
    found = {kind: ranking.mean for kind, ranking in cross_validate(_samples(0), _learner).items()}
    assert found["learned"].tasks == TASKS
    assert found["learned"].pairs > 0.9 > found["roofline"].pairs > 0.6
    assert abs(found["random"].pairs - 0.5) < 0.05 and found["learned"].regret1 < found["roofline"].regret1


def test_no_task_is_ranked_by_a_model_that_has_seen_it() -> None:
    """With one that remembers, the ranking would be right: times are drawn at random."""
    rng = np.random.default_rng(1)
    noise = [Sample(s.group, s.features, float(rng.uniform(1e-5, 1e-4))) for s in _samples(2)]

    def remembering(known: list[Sample], seed: int):  # type: ignore[no-untyped-def]
        seconds = {id(s): s.seconds for s in known}
        return lambda group: np.array([-seconds.get(id(s), 1.0) for s in group])

    assert abs(cross_validate(noise, remembering)["learned"].mean.pairs - 0.5) < 0.05


def test_no_origin_is_ranked_by_a_model_that_has_seen_one_of_its_tasks() -> None:
    known, origins = _samples(7), {f"task{i}": {"abc"[i % 3], "abc"[i % 2]} for i in range(TASKS - 1)}
    asked: list[str] = []

    def listening(taught: list[Sample], seed: int):  # type: ignore[no-untyped-def]
        seen = {s.group for s in taught}

        def scorer(group: list[Sample]) -> np.ndarray:
            mine = origins[group[0].group]
            assert group[0].group not in seen and mine - set().union(*(origins.get(g, set()) for g in seen))
            asked.append(group[0].group)
            return roofline(group)

        return scorer

    found = cross_validate(known, listening, origins=origins, repeats=2)
    assert len(asked) == 2 * sum(map(len, origins.values()))
    assert found["learned"].spread.pairs == 0 and found["learned"].mean.pairs == found["roofline"].mean.pairs
    with pytest.raises(ValueError, match="tasks of two of them"):
        cross_validate(known, listening, origins={name: {"a"} for name in origins})


@pytest.mark.parametrize("count", [1, 8, 30])
def test_quality_is_what_counting_says(count: int) -> None:
    rng = np.random.default_rng(count)
    seconds, scores = rng.uniform(1, 3, count), np.round(rng.standard_normal(count), 1)
    seconds[0] = np.inf if count > 1 else seconds[0]
    right = total = 0.0
    for i in range(count):
        for j in range(count):
            if seconds[i] < 0.95 * seconds[j]:
                total += 1
                right += 1.0 if scores[i] > scores[j] else 0.5 if scores[i] == scores[j] else 0.0
    found = quality(scores, seconds)
    order = sorted(range(count), key=lambda i: -scores[i])
    best8 = min(seconds[i] for i in order[:8])
    assert found.pairs == pytest.approx(right / total if total else 1.0)
    assert found.top8 == float(best8 <= 1.05 * seconds.min()) and found.regret8 >= 0 and np.isfinite(found.regret1)


def test_too_few_tasks_are_told() -> None:
    with pytest.raises(ValueError, match="needs two tasks"):
        cross_validate(_samples(0)[:EACH], _learner)
    with pytest.raises(ValueError, match="at least one task"):
        Pretrained.train([])


def test_it_is_stored_and_equal_samples_give_equal_models() -> None:
    known = _samples(3)
    model = Pretrained.train(known, seed=5)
    rows, estimates = np.stack([s.features.vector for s in known]), np.array([s.features.seconds for s in known])
    for other in (Pretrained.load(model.save()), Pretrained.train(known, seed=5)):
        for a, b in zip(model.predict(rows, estimates), other.predict(rows, estimates), strict=True):
            assert (a == b).all()
    assert len(model.save()) < 1 << 20
    assert (Pretrained.train(known, seed=6).predict(rows, estimates)[0] != model.predict(rows, estimates)[0]).any()


def test_failures_are_the_slowest() -> None:
    known = [Sample(s.group, s.features, np.inf if s.features.vector[7] > 0 else s.seconds) for s in _samples(4)]
    model, asked = Pretrained.train(known), _samples(5)
    scores = model.predict(np.stack([s.features.vector for s in asked]), np.full(len(asked), 1e-5))[0]
    failing = np.array([s.features.vector[7] > 0 for s in asked])
    assert scores[failing].mean() < scores[~failing].mean() - 1
    assert (roofline(asked) == -np.log2([s.features.seconds for s in asked])).all()


def test_other_features_formats_and_damage_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = Pretrained.train(_samples(6)).save()
    with np.load(io.BytesIO(blob)) as stored:
        fields = dict(stored)
    other = io.BytesIO()
    np.savez_compressed(other, **{**fields, "format": np.array(99)})
    for bad, words in ((blob[:50], "must be an archive"), (b"", "must be an archive"), (other.getvalue(), "format 2")):
        with pytest.raises(ValueError, match=words):
            Pretrained.load(bad)
    for changed in ({"member0": fields["member1"]}, {"member4": fields["member0"]}, {"checksum": np.array("0")}):
        other = io.BytesIO()
        np.savez_compressed(other, **{**fields, **changed})
        with pytest.raises(ValueError, match="must match its checksum"):
            Pretrained.load(other.getvalue())
    crafted = {name: values for name, values in fields.items() if name != "checksum"}
    crafted["member0"] = crafted["member0"][:100]
    other = io.BytesIO()
    np.savez_compressed(other, checksum=np.array(_checksum(crafted)), **crafted)
    with pytest.raises(ValueError, match=r"must hold trees that xgboost reads: .*") as caught:
        Pretrained.load(other.getvalue())
    assert "\n" not in str(caught.value)
    monkeypatch.setattr("cost_model.pretrained.LOOP_FEATURES", FEATURES[1:])
    with pytest.raises(ValueError, match="this version's features"):
        Pretrained.load(blob)


def test_tasks_with_few_candidates_teach_and_are_not_ranked() -> None:
    samples = _samples(0)
    few = samples[0].group
    kept = [s for i, s in enumerate(samples) if s.group != few or i < EACH // 2]
    taught: set[str] = set()

    def listening(known: list[Sample], seed: int):  # type: ignore[no-untyped-def]
        taught.update(s.group for s in known)
        return _learner(known, seed)

    found = cross_validate(kept, listening, fewest=EACH)
    assert found["learned"].mean.tasks == len({s.group for s in samples}) - 1 and few in taught
