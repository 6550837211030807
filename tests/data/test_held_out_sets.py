"""Named held-out sets: what may stand for one, what is evaluated of it, and what is refused."""

import numpy as np
import pytest

from jaxscale.data import Arrays, ImageFolder, Images, Mixture, Stream, Text
from jaxscale.data.held_out_sets import as_held_out_sets, check_same_arrays, open_held_out_sets
from jaxscale.errors import UserError

NEWS = "no better bot or not. " * 5


@pytest.fixture
def texts(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_CACHE", str(tmp_path / "cache"))
    for name, content in {"plays": "to be or not to be. " * 20, "news": NEWS}.items():
        (tmp_path / f"{name}.txt").write_text(content)
    return tmp_path


def opened(sets, batch=4, process=0, processes=1, tokenizer=None):
    return open_held_out_sets(sets, batch, 0, process=process, processes=processes, tokenizer=tokenizer)


def target_count(data):
    return sum(batch["weights"].sum() for batch in data.evaluation())


def test_a_path_is_read_as_the_training_data_and_held_out_as_a_whole(texts):
    plays = Text(texts / "plays.txt", "char", context=8)
    sets = as_held_out_sets({"news": texts / "news.txt", "both": [texts / "news.txt", texts / "plays.txt"]}, plays)
    assert sets["news"].tokenizer == "char"
    tokenizer = plays.open(4, 0).tokenizer
    news, both = opened(sets, tokenizer=tokenizer).values()
    assert news.tokenizer is tokenizer, "the alphabet of the plays, not of the news"
    assert target_count(news) == len(NEWS) - 1
    assert target_count(both) == len(NEWS) + 400 - 1
    mixed = as_held_out_sets({"news": texts / "news.txt"}, Mixture((plays,), (1.0,)))
    assert mixed == {"news": sets["news"]}
    with pytest.raises(UserError, match="held_out: got 1, which leaves nothing to train on"):
        news.train()
    images, folder = Images("a.npz"), ImageFolder("train")
    assert as_held_out_sets({"x": "b.npz"}, images)["x"].held_out == 1.0
    assert str(as_held_out_sets({"x": "val"}, folder)["x"].held_out_path).endswith("val")


def test_data_is_evaluated_by_its_own_share_and_arrays_as_a_whole(texts):
    half = Text(texts / "news.txt", context=8, held_out=0.5)
    x = np.arange(10.0)
    sets = as_held_out_sets({"half": half, "arrays": {"x": x}, "batches": [{"x": x[:4]}, {"x": x[4:6]}]}, None)
    by_name = opened(sets)
    assert target_count(by_name["half"]) == len(NEWS) // 2 - 1
    assert target_count(by_name["arrays"]) == 10
    assert target_count(by_name["batches"]) == 6
    parts = [opened(sets, process=index, processes=2) for index in range(2)]
    for name, whole in by_name.items():
        shards = [part[name].evaluation() for part in parts]
        for batch, *rows in zip(whole.evaluation(), *shards, strict=True):
            for array, values in batch.items():
                np.testing.assert_array_equal(np.concatenate([each[array] for each in rows]), values)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"a/b": {"x": np.ones(4)}}, "held_out: got the name 'a/b', expected letters, digits"),
        ({"": {"x": np.ones(4)}}, "held_out: got the name ''"),
        (
            {"x": np.ones((4, 2)), "y": np.ones(4)},
            "held_out: got the arrays x, y themselves, expected a dict of sets by",
        ),
        ({"news": 3}, r"held_out\.news: got 3, expected data such as jaxscale\.data\.Text, a path, a dict of arrays"),
        ({"news": {}}, r"held_out\.news: arrays: got an empty dict"),
        ({"news": iter([])}, r"held_out\.news: held_out: got an iterator, which can be evaluated on only once"),
        ({"news": "a.txt"}, r"held_out\.news: got the path a\.txt, but the training data, a Arrays, reads no files"),
    ],
)
def test_what_is_no_set_is_refused(sources, message):
    with pytest.raises(UserError, match=message):
        as_held_out_sets(sources, Arrays({"x": np.ones(4)}))


def test_a_set_that_the_model_of_the_training_data_cannot_read_is_refused(texts):
    plays = Text(texts / "plays.txt", "char", context=8)
    with pytest.raises(UserError, match=r"held_out\.news: its tokenizer is byte, expected that of the training data"):
        as_held_out_sets({"news": Text(texts / "news.txt", context=8)}, plays)
    with pytest.raises(UserError, match=r"held_out\.news: nothing is held out, expected rows to evaluate"):
        opened({"news": Text(texts / "news.txt", context=8, held_out=0.0)})
    with pytest.raises(UserError, match=r"held_out\.news: nothing is held out"):
        opened({"news": Stream([{"x": np.ones(4)}])})
    with pytest.raises(UserError, match=r"held_out\.news: no such file: .*newz\.txt.*did you mean 'news\.txt'"):
        opened(as_held_out_sets({"news": texts / "newz.txt"}, plays))
    (texts / "odd.txt").write_text("naïve rent " * 5)
    odd = as_held_out_sets({"news": texts / "odd.txt"}, plays)
    with pytest.raises(UserError, match=r"held_out\.news: the text contains .* unknown to this alphabet"):
        opened(odd, tokenizer=plays.open(4, 0).tokenizer)
    longer = opened({"news": Text(texts / "news.txt", "char", context=16, held_out=1.0)})
    with pytest.raises(UserError, match=r"held_out\.news: targets is int32\[4, 16\], expected int32\[4, 8\]; tokens"):
        check_same_arrays(longer, next(plays.open(4, 0).train()))
    other = opened(as_held_out_sets({"news": {"x": np.ones(4)}}, None))
    with pytest.raises(UserError, match=r"targets is missing, expected int32.*x is float32\[4\], expected no such"):
        check_same_arrays(other, next(plays.open(4, 0).train()))
