import os
import random

import numpy as np
import pytest

os.environ["TOKENIZERS_PARALLELISM"] = "true"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Every test has an empty token cache of its own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("JAXSCALE_CACHE", str(folder))
    return folder


@pytest.fixture
def documents():
    """Documents of 1 to 90 characters, some with letters outside ASCII; no two alike."""
    rng = random.Random(7)
    return [f"{i}" + "".join(rng.choices("abcdé \n", k=rng.randint(0, 87))) + "." for i in range(60)]


@pytest.fixture
def corpus(tmp_path, documents):
    path = tmp_path / "corpus.txt"
    path.write_bytes("<>".join(documents).encode())
    return path


@pytest.fixture
def subwords(tmp_path):
    """A byte-level BPE of 300 tokens with an end token, truncation and padding switched on (which must not matter)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|eos|>"],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    model.train_from_iterator(["the cat and the hat that sat on the mat\n" * 3], trainer)
    model.enable_truncation(8)
    model.enable_padding(length=8)
    path = tmp_path / "tokenizer.json"
    model.save(str(path))
    return path


@pytest.fixture
def same():
    def check(left, right):
        assert left.keys() == right.keys()
        for name in left:
            np.testing.assert_array_equal(left[name], right[name], err_msg=name)
            assert left[name].dtype == right[name].dtype

    return check
