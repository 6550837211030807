"""Codecs as text, and what they refuse."""

import pytest

from jaxscale.errors import UserError
from jaxscale.replicas import CODECS, Codec
from jaxscale.replicas.codecs.powersgd import PowerSGD
from jaxscale.replicas.codecs.topk import TopK
from jaxscale.values import from_json, to_json
from tests.replicas.replicas import example


@pytest.mark.parametrize(
    "text",
    [
        *(str(example(codec)) for codec in CODECS.values()),
        "powersgd:4,start=100", "topk:0.01,feedback=false", "topk:0.001,block=none", "qsgd:8bit,block=64",
        "dgc:0.001,warmup=400,momentum=0.5,clip=1.0", "gradzip:4,ridge=0.001", "int8,block=128",
    ],
)  # fmt: skip
def test_text_is_read_as_it_is_written(text):
    codec = Codec.parse(text)
    assert str(codec) == text
    assert from_json(Codec, to_json(codec)) == codec
    assert hash(codec) == hash(Codec.parse(text))


def test_spellings():
    assert Codec.parse(" QSGD:4 , block = 64 ") == Codec.parse("qsgd:4bit,block=64")
    assert Codec.parse("powersgd:4") == PowerSGD(4) == PowerSGD(rank=4)
    assert Codec.parse("topk:1e-2") == TopK(0.01)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("powersdg:4", r"unknown codec 'powersdg': expected one of dgc, .*; did you mean 'powersgd'\?"),
        ("powersgd", r"codec 'powersgd': expected the form powersgd:RANK\[,feedback="),
        ("int8:3", r"codec 'int8:3': expected the form int8\[,feedback="),
        ("powersgd:4,strat=1", r"unknown option of codec powersgd 'strat': .*; did you mean 'start'\?"),
        ("powersgd:4,rank=2", r"got 'rank=2', expected each option once: powersgd:RANK"),
        ("powersgd:4,start", r"got 'start', expected each option once"),
        ("powersgd:four", r"codec 'powersgd:four': rank: got 'four', expected a whole number"),
        ("powersgd:0", r"rank: got 0, expected a whole number >= 1"),
        ("gradzip:4,ridge=0", r"ridge: got 0.0, expected 1e-6"),
        ("topk:1.5", r"fraction: got 1.5, expected a number in \(0, 1\]"),
        ("topk:0.0001", r"fraction: got 0.0001, which selects 0 of 1024 elements: use block=16384"),
        ("topk:0.000001", r"which selects 0 of 1024 elements: use block=none"),
        ("topk:0.1,block=100000", r"block: got 100000, expected 1 to 65536 elements"),
        ("qsgd:3bit", r"bits: got 3, expected 4 or 8"),
        ("int4,block=3", r"block: got 3, expected an even number"),
        ("int8,start=-1", r"start: got -1, expected a number of steps >= 0"),
        ("dgc:0.01,feedback=false", r"feedback: got false, expected true"),
        ("dgc:0.01,momentum=1", r"momentum: got 1.0, expected a number in \[0, 1\)"),
        ("dgc:0.01,clip=0", r"clip: got 0.0, expected a norm > 0"),
        ("dgc:0.01,warmup=-2", r"warmup: got -2, expected a number of steps"),
    ],
)
def test_what_is_wrong_is_said(text, why):
    with pytest.raises(UserError, match=why):
        Codec.parse(text)
