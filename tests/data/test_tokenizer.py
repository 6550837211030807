import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxscale.data import tokenizer
from jaxscale.data.joined import join_texts, marker_of
from jaxscale.data.tokenizer import Bytes, Characters, Subwords
from jaxscale.errors import UserError


@given(st.text())
def test_bytes_round_trip_any_text(text):
    ids = Bytes().encode(text)
    assert ids.tolist() == list(text.encode())
    assert Bytes().decode(ids) == text


@given(st.text(min_size=1))
def test_characters_are_numbered_as_nanogpt_does(text):
    known = Characters.of([text])
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    assert known.encode(text).tolist() == [number[character] for character in text]
    assert known.decode(known.encode(text)) == text
    assert known.size == len(number)


@pytest.mark.parametrize("stranger", ["z", "!", "\U0001f600"])
def test_an_unknown_character_is_named(stranger):
    with pytest.raises(UserError, match="unknown to this alphabet of 3 characters") as caught:
        Characters("abc").encode("ab" + stranger)
    assert repr(stranger) in str(caught.value)


def test_subwords_equal_the_library_without_its_truncation_and_padding(subwords):
    from tokenizers import Tokenizer

    text = "the cat that sat on the mat <|eos|> with Zoë " * 5
    plain = Tokenizer.from_file(str(subwords))
    assert len(plain.encode(text).ids) == 8  # the file truncates
    plain.no_truncation()
    plain.no_padding()
    ours = tokenizer.load(str(subwords))
    assert ours.encode(text).tolist() == plain.encode(text).ids
    assert ours.decode(ours.encode(text)) == text
    assert ours.size == plain.get_vocab_size()
    assert ours.encode("<|eos|>").tolist() == [plain.token_to_id("<|eos|>")]


def joined(groups, texts):
    ids = [[] for _ in texts]
    order = []
    for group in groups:
        for number, part in zip(group.text_indices, np.split(group.ids, np.cumsum(group.lengths)[:-1]), strict=True):
            ids[number] += part.tolist()
            order.append(number)
    assert order == sorted(order)
    assert sum(group.character_count for group in groups) == sum(map(len, texts))
    return ids


def test_long_texts_are_cut_without_changing_their_ids(subwords):
    """Paragraphs, runs of newlines, spaces after newlines: everything that a cut in the wrong place would change."""
    ours = tokenizer.load(str(subwords))
    line = "the cat sat\n\n on the\n \nmat.\n\n\nand the hat\nthat\n  the mat\n"
    texts = [line * 20_000, "", "a", line * 700]
    groups = list(ours.encode_all(texts))
    assert sum(len(group.text_indices) for group in groups) > 100, "nothing was cut, so nothing was tested"
    assert joined(groups, texts) == [ours.encode(text).tolist() for text in texts]


def test_a_tokenizer_that_sees_across_newlines_gets_the_text_whole():
    """Metaspace puts a mark before every text it is given: pieces would have marks the text has not."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {piece: i for i, piece in enumerate(["▁", "a", "b", "\n", "▁a", "?"])}
    model = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    ours = Subwords(model.to_str())
    text = "ab\na b\n" * 2000
    (group,) = ours.encode_all([text, "a"])
    assert group.text_indices.tolist() == [0, 1]
    assert joined([group], [text, "a"]) == [ours.encode(text).tolist(), ours.encode("a").tolist()]


@pytest.mark.parametrize("known", [Bytes(), Characters("abé")])
def test_many_short_texts_keep_their_own_ids(known):
    texts = ["ab", "", "éa", "b"]
    assert joined(list(known.encode_all(texts)), texts) == [known.encode(text).tolist() for text in texts]


@pytest.mark.parametrize("kind", ["byte", "char", "subword"])
def test_json_carries_a_tokenizer(kind, subwords):
    made = {"byte": Bytes(), "char": Characters("abé"), "subword": tokenizer.load(str(subwords))}[kind]
    again = tokenizer.from_json(json.loads(json.dumps(made.to_json())))
    assert again == made
    assert again.encode("abé").tolist() == made.encode("abé").tolist()
    assert tokenizer.fingerprint(again) == tokenizer.fingerprint(made)


def test_ids_beyond_the_alphabet_decode_to_the_replacement_character():
    assert Characters("ab").decode([0, 7, 1]) == "a\ufffdb"


@pytest.mark.parametrize("content", ["{", "{}", '{"model": {"type": "None"}}'])
def test_a_broken_file_is_named(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"broken.json: not a tokenizer.json of the tokenizers library"):
        tokenizer.load(str(path))


def test_a_huge_file_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "huge.json"
    path.touch()
    os.truncate(path, 8 << 30)
    with pytest.raises(UserError, match=r"huge.json has 8,589,934,592 bytes, expected at most 268,435,456"):
        tokenizer.load(str(path))


def test_an_alphabet_out_of_order_cannot_be_made():
    with pytest.raises(UserError, match="sorted characters"):
        Characters("ba")


def test_short_texts_are_joined_at_a_special_token_without_changing_their_ids():
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = ["the cat sat", " on the", "mat ", "and the hat", "\n", "that", "cat" * 50]
    model.train_from_iterator(words * 9, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    model.add_special_tokens([AddedToken("<strip>", lstrip=True, special=True), AddedToken("<eos>", special=True)])
    ours = Subwords(model.to_str())
    marker = marker_of(model)
    assert marker is not None
    assert marker.text == "<eos>"
    texts = [*words * 40, "this<eos>spells it", "<eos>", *words]
    assert len(list(join_texts(texts, marker, 1024))) < len(texts) / 2
    assert joined(list(ours.encode_all(texts)), texts) == [ours.encode(text).tolist() for text in texts]


def test_texts_with_unknown_characters_keep_their_ids_where_the_marker_is_the_token_for_these():
    from tokenizers import AddedToken, Tokenizer, models

    model = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    model.add_special_tokens([AddedToken("<unk>", special=True)])
    ours, texts = Subwords(model.to_str()), ["a", "b"] * 30 + ["z", "a", "zz"]
    assert joined(list(ours.encode_all(texts)), texts) == [[1], [2]] * 30 + [[0], [1], [0]]


def test_a_tokenizer_that_cannot_encode_a_text_is_an_error_with_its_reason():
    from tokenizers import Tokenizer, models

    ours = Subwords(Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>")).to_str())
    assert ours.encode("a").tolist() == [0]
    with pytest.raises(UserError, match="cannot encode the text"):
        ours.encode("z")
    with pytest.raises(UserError, match="cannot encode the text"):
        list(ours.encode_all(["a", "z"]))


def test_a_tokenizer_that_marks_the_beginning_alone_gets_each_text_by_itself():
    """Metaspace in its scheme "first" puts its mark before a text, and none behind a special token."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    vocab = {piece: i for i, piece in enumerate(["▁", "a", "b", "▁a", "?"])}
    model = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    model.add_special_tokens([AddedToken("<eos>", special=True)])
    ours, texts = Subwords(model.to_str()), ["ab", "a b", "b"] * 30
    assert joined(list(ours.encode_all(texts)), texts) == [ours.encode(text).tolist() for text in texts]


@pytest.mark.parametrize("kind", [Bytes(), Characters("abc")])
def test_half_a_surrogate_pair_is_refused(kind):
    with pytest.raises(UserError, match=r"half a surrogate pair|unknown to this alphabet"):
        kind.encode("a\ud83d")
