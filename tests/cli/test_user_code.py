"""Mistakes in a user's own model, score, data, schedule and callback: the first line has the user's file and line."""

from pathlib import Path

import numpy as np
import pytest

import jaxscale as jx
from jaxscale.cli import main
from jaxscale.errors import UserError

EXPERIMENT = """
import jax
import numpy as np
from flax import nnx

import jaxscale as jx


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, images):
        hidden = jax.nn.relu(self.hidden(images))
        return self.head(hidden)


def score(module, batch):
    logits = module(batch["images"][:, 0, :, 0])
    return -jax.nn.log_softmax(logits)[:, 0]


def rate(step):
    return 1e-3


def experiment():
    return jx.Experiment(
        name="mine",
        model=jx.models.ForeignModel(lambda rngs: Net(rngs), score),
        data=jx.data.Images("images.npz", scale=1.0),
        optimizer=jx.Optimizer(),
        steps=2,
        batch=4,
        plan=jx.Plan(mesh="1"),
    )
"""
"""An experiment with nothing wrong in it; each mistake replaces a text in it by another."""

MISTAKES = {
    "shapes that do not fit": ("self.head(hidden)", "self.head(hidden @ hidden)", "TypeError: dot_general"),
    "a layer of another size": ("nnx.Linear(8, 3", "nnx.Linear(9, 3", "TypeError: dot_general"),
    "a name that is not there": ("jax.nn.relu(", "jax.nn.rleu(", "AttributeError: module 'jax.nn'"),
    "a layer that is not there": ("self.head(hidden)", "self.tail(hidden)", "AttributeError: 'Net' object"),
    "a variable that is not there": ("return self.head(hidden)", "return self.head(hiden)", "NameError: name 'hiden'"),
    "a branch on a traced value": (
        "hidden = jax.nn.relu(",
        "assert images.sum() > 0; hidden = jax.nn.relu(",
        "TracerBoolConversionError",
    ),
    "an array made a number": ("hidden = jax", "float(images.sum()); hidden = jax", "ConcretizationTypeError"),
    "an array made NumPy's": ("hidden = jax", "np.asarray(images); hidden = jax", "TracerArrayConversionError"),
    "an argument too many": ("module(batch[", "module(1, batch[", "TypeError: Net.__call__() takes 2"),
    "a batch without the array": ('batch["images"]', 'batch["image"]', "KeyError: 'image'"),
    "an index out of dims": (")[:, 0]", ")[:, 0, 0]", "IndexError: Too many indices"),
    "a model that cannot be made": ("nnx.Linear(4, 8, rngs=rngs)", "nnx.Linear(4, 8)", "TypeError: Linear.__init__"),
    "a division by zero": ("return jx.Experiment(", "1 / 0; return jx.Experiment(", "ZeroDivisionError"),
    "an import that fails": ("import numpy as np", "import numpy as np; import nowhere_at_all", "ModuleNotFoundError"),
}


@pytest.fixture(autouse=True)
def folder_of_data(tmp_path, monkeypatch):
    """Current folder with the file of 20 images of 1x4 pixels."""
    monkeypatch.chdir(tmp_path)
    np.savez("images.npz", x=np.ones((20, 1, 4), np.float32), y=np.arange(20) % 3)


def line_of(source: str, mistake: str) -> int:
    return source[: source.index(mistake)].count("\n") + 1


@pytest.mark.parametrize("name", MISTAKES)
def test_the_first_line_has_the_users_file_and_line(name, capfd):
    old, new, message = MISTAKES[name]
    assert old in EXPERIMENT
    source = EXPERIMENT.replace(old, new, 1)
    Path("mine.py").write_text(source)
    code = main(["train", "mine.py"])
    first, *others = capfd.readouterr().err.splitlines()
    assert first.startswith("jaxscale: ")
    assert "mine.py" in first
    assert message in first
    if code == 1:
        line = line_of(source, "self.head(hidden)" if name == "a layer of another size" else new)
        assert first.startswith(f"jaxscale: mine.py:{line}: ")
        assert not any("site-packages" in line or "jaxscale/models" in line for line in others)


def test_shapes_and_the_whole_traceback_on_request(monkeypatch, capfd):
    Path("mine.py").write_text(EXPERIMENT.replace("self.head(hidden)", "self.head(hidden @ hidden)"))
    assert main(["train", "mine.py"]) == 1
    assert "in Net.__call__(self: Net, images: float32[4,4]), where hidden: float32[4,8]" in capfd.readouterr().err
    monkeypatch.setenv("JAXSCALE_TRACEBACK", "full")
    with pytest.raises(TypeError, match="dot_general"):
        main(["train", "mine.py"])


STREAMED = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxscale as jx

SEEN = []


class Net(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(4, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        hidden = jax.nn.relu(self.hidden(x))
        return self.head(hidden)


def score(module, batch):
    logits = module(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def rate(step):
    return 1e-2 / (1 + step)


def update(learning_rate):
    return optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(rate), optax.scale(-1.0))


def batches():
    rng = np.random.default_rng(0)
    for step in range(100):
        x = rng.normal(size=(4, 4)).astype(np.float32)
        y = rng.integers(0, 3, 4).astype(np.int32)
        yield {"x": x, "y": y}


MODEL = jx.models.ForeignModel(lambda rngs: Net(rngs), score)


def experiment():
    return jx.Experiment(
        name="mine",
        model=MODEL,
        data=jx.data.Stream(batches),
        optimizer=jx.Optimizer(custom=update, clip=None),
        steps=3,
        batch=4,
        plan=jx.Plan(mesh="1"),
    )
"""
"""An experiment with a stream, a schedule and a rule of the user's own, and nothing wrong in it."""

LOSSES = 'optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])'
RULE = "optax.chain(optax.scale_by_adam(),"
BATCH = 'yield {"x": x, "y": y}'
SPEED = "return 1e-2 / (1 + step)"
OWN_RULE = "custom=update, clip=None"
STREAM_MISTAKES = {
    # the model
    "forgotten self": ("return self.head(hidden)", "return head(hidden)", "return head", "did you mean 'self.head'?"),
    "a call of NumPy": ("jax.nn.relu(self.hidden(x))", "np.exp(self.hidden(x))", "np.exp", "call jnp instead of np"),
    "a loop on a traced value": (
        "hidden = jax",
        "while x.sum() > 1: x /= 2\n        hidden = jax",
        "while",
        "jax.lax.whi",
    ),
    "a range of a traced value": (
        "hidden = jax",
        "list(range(x.size + x.argmax())); hidden = jax",
        "list(",
        "fori_loop",
    ),
    "a mask as an index": (
        "return self.head(hidden)",
        "return self.head(hidden[hidden > 0])",
        "[hidden >",
        "jnp.where(",
    ),
    "an assignment to an array": (
        "return self.head(hidden)",
        "hidden[0] = 0; return hidden",
        "hidden[0]",
        "x.at[idx].set",
    ),
    "a call that returns nothing": ("return self.head(hidden)", "self.head(hidden)", LOSSES, "logits is None"),
    "a call that returns a pair": ("return self.head(hidden)", "return hidden, 0", LOSSES, "logits is a tuple of 2"),
    "a call without the argument": (
        "def __call__(self, x)",
        "def __call__(self)",
        "module(batch",
        "takes 1 positional",
    ),
    "a call with one more argument": (
        "def __call__(self, x)",
        "def __call__(self, x, y)",
        "module(batch",
        "argument: 'y'",
    ),
    "dropout without rngs": ("return self.head(hidden)", "return nnx.Dropout(0.5)(hidden)", "nnx.Dropout", "`rngs`"),
    "tokens that are floats": ("nnx.Linear(4, 8, rngs=rngs)", "nnx.Embed(4, 8, rngs=rngs)", "jax.nn.relu", "integer"),
    "a layer made in a call": (
        "self.head(hidden)",
        "nnx.Linear(8, 3, rngs=nnx.Rngs(0))(hidden)",
        "(hidden)",
        "in __init",
    ),
    "layers in a list": (
        "self.head = nnx",
        "self.more = [nnx.Linear(8, 8, rngs=rngs)]; self.head = nnx",
        "more",
        "nnx.List",
    ),
    "an array of an earlier trace": (
        "hidden = jax",
        "x += sum(SEEN); SEEN.append(x.mean()); hidden = jax",
        "def score",
        "keeps an array of one",
    ),
    "a class that is no module": (
        "class Net(nnx.Module)",
        "class Net",
        "lambda rngs",
        "derive the class from nnx.Module",
    ),
    "a module that exists": ("lambda rngs: Net(rngs)", "Net(nnx.Rngs(0))", "MODEL =", "a function that makes one"),
    "a class instead of a module": (
        "lambda rngs: Net(rngs)",
        "lambda rngs: Net",
        "lambda rngs",
        "call it: Net(rngs=rngs)",
    ),
    "a module as the model": ("model=MODEL", "model=Net(nnx.Rngs(0))", "jx.Experiment(", "ForeignModel(make="),
    # the score
    "a mean": (LOSSES, f"{LOSSES}.mean()", "def score", "Do not take the mean"),
    "no losses": (f"return {LOSSES}", LOSSES, "def score", "returned NoneType for a batch of 4 rows"),
    "losses and logits": (LOSSES, f"{LOSSES}, logits", "def score", "A pair is (losses, weights)"),
    "three results": (LOSSES, f"{LOSSES}, logits, 1", "def score", "only a pair (losses, weights)"),
    "a count of errors": (LOSSES, 'logits.argmax(-1) != batch["y"]', "def score", "bool[4], which has no gradient"),
    "a loss of pairs of rows": (
        LOSSES,
        'logits[:, :1] - batch["y"][None]',
        "def score",
        "a loss for each pair of rows",
    ),
    "arguments in another order": (
        "score(module, batch)",
        "score(batch, module)",
        "MODEL =",
        "expected score(module, b",
    ),
    "the other cross-entropy": (
        LOSSES,
        'optax.softmax_cross_entropy(logits, batch["y"])',
        "optax.softmax",
        "broadcast",
    ),
    # the data
    "no batch": ("range(100)", "range(0)", "def batches", "the iterable has no batch"),
    "no yield": (BATCH, "pass", "def batches", "yield each batch"),
    "an argument of batches": ("def batches()", "def batches(seed)", "def batches", "takes no arguments"),
    "no rows": (BATCH, 'yield {"x": x[:0], "y": y[:0]}', "def batches", "batch 0 has 0 rows, expected 4"),
    "an empty batch": (BATCH, "yield {}", "def batches", "got an empty dict"),
    "a pair as a batch": (BATCH, "yield x, y", "def batches", "got a tuple, expected a dict of arrays"),
    "rows of different lengths": (BATCH, 'yield {"x": [[1], [1, 2]]}', "def batches", "pad the rows to one length"),
    "a number as an array": (BATCH, 'yield {"x": x, "y": 1}', "def batches", "one row for each example"),
    "the last dim as rows": (
        BATCH,
        'yield {"x": x[:3].T, "y": y[:3]}',
        "def batches",
        "expected the rows of the batch",
    ),
    "a file that is not there": ("rng = np", "np.load('nowhere.npy'); rng = np", "np.load", "FileNotFoundError"),
    # the schedule and the rule
    "a rate of text": (OWN_RULE, "schedule=lambda step: 'fast'", "schedule=", "returned 'fast' at step 0"),
    "a rate below 0": (OWN_RULE, "schedule=lambda step: 1 - step", "schedule=", "returned -1 at step 2"),
    "a rate that is NaN": (OWN_RULE, "schedule=lambda step: jnp.nan", "schedule=", "returned nan at step 0"),
    "a branch on the step": (OWN_RULE, "schedule=lambda step: 1 if step < 2 else 0", "schedule=", "jnp.where"),
    "a schedule as a rate": (OWN_RULE, "learning_rate=rate", "optimizer=", "is Optimizer(schedule=...)"),
    "a division by the step": (SPEED, "return 1e-2 / step", "def update", "expected finite numbers"),
    "a schedule without return": (SPEED, "1e-2 / (1 + step)", "def update", "its update raised ValueError: None"),
    "a schedule of two arguments": ("rate(step)", "rate(step, total)", "def update", "argument: 'total'"),
    "a rule that raises": (
        RULE,
        f"{RULE} optax.stateless(lambda u, p: 1 / 0),",
        "optax.stateless",
        "ZeroDivisionError",
    ),
    "updates of other shapes": (
        RULE,
        f"{RULE} optax.stateless(lambda u, p: jax.tree.map(jnp.sum, u)),",
        "def update",
        "expected equal shapes",
    ),
    "updates without names": (
        RULE,
        f"{RULE} optax.stateless(lambda u, p: jax.tree.leaves(u)),",
        "def update",
        "of another structure than gradients",
    ),
    "no rule": ("return optax.chain", "optax.chain", "def update", "optimizer.custom returned a NoneType"),
    "a rule of optax": (
        f"jx.Optimizer({OWN_RULE})",
        "optax.adam(1e-3)",
        "jx.Experiment(",
        "Optimizer(custom=lambda rate",
    ),
    # the file
    "a package that is missing": ("import optax", "import optaxx as optax", "optaxx", "'optaxx'; install it"),
    "a syntax error": ("def rate(step):", "def rate(step)", "def rate", "is not Python: expected ':'"),
    "epochs": ("steps=3", "epochs=3", "jx.Experiment(", "did you mean 'steps', the number of rows times the epochs"),
    "lr": (OWN_RULE, "'adamw', lr=1e-3", "optimizer=", "did you mean 'learning_rate'?"),
    "betas": (OWN_RULE, "betas=(0.9, 0.99)", "optimizer=", "did you mean 'b1' and 'b2'?"),
    "a loss for a score": ("Net(rngs), score", "Net(rngs), loss_fn=score", "MODEL =", "did you mean 'score'?"),
    "labels of floats": ('"y": y', '"y": y.astype(float)', LOSSES, "labels are whole numbers: give them as y.astype"),
    "a schedule of zeros": (OWN_RULE, "schedule=lambda step: 0.0", "schedule=", "returned 0 at the steps 0, 1, 2, so"),
    "a pair as data": ("jx.data.Stream(batches)", "(np.ones(4), np.ones(4))", "jx.Exp", "got 2 arrays without names"),
    "a field with a typo": ("steps=3", "step=3", "jx.Experiment(", "did you mean 'steps'?"),
    "a name with a typo": ("jx.Experiment(", "jx.Experimnt(", "jx.Experimnt(", "did you mean 'Experiment'?"),
    "an experiment with arguments": ("def experiment()", "def experiment(steps)", "def exper", "missing 1 required"),
    "an experiment without return": ("return jx.Experiment", "jx.Experiment", "def exper", "returned a NoneType"),
    "an experiment that waits": (
        "def experiment()",
        "async def experiment()",
        "async def",
        "expected def experiment()",
    ),
    "a call of exit": ("SEEN = []", "raise SystemExit(3)", "raise SystemExit", "SystemExit: 3"),
}
"""A text of the experiment, the mistake in its place, a text of the line to name, and a part of the first line."""


ALWAYS = frozenset(
    {
        "forgotten self", "a call that returns nothing", "a layer made in a call", "a mean", "a loss of pairs of rows",
        "no batch", "rows of different lengths", "a rate below 0", "a division by the step", "updates of other shapes",
        "epochs", "a field with a typo", "an experiment with arguments", "a module as the model",
    }
)  # fmt: skip
"""The mistakes that the quick tests try: one of each kind."""


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in STREAM_MISTAKES]
)
def test_the_first_line_has_the_line_and_what_to_change(name, capfd):
    old, new, place, message = STREAM_MISTAKES[name]
    assert old in STREAMED
    source = STREAMED.replace(old, new, 1)
    Path("mine.py").write_text(source)
    assert main(["train", "mine.py"]) in (1, 2)
    first = capfd.readouterr().err.splitlines()[0]
    line = line_of(source, place)
    assert f"mine.py:{line}: " in first or f"mine.py, line {line}" in first
    assert message in first


COSTLY_MISTAKES = {  # one compilation each
    "labels from 1": ("rng.integers(0, 3, 4)", "(rng.integers(0, 3, 4) + 1)", LOSSES, "expected labels from 0 to 2"),
    "a batch with NaN": (
        BATCH,
        'x[:] = np.nan if step == 1 else x; yield {"x": x, "y": y}',
        None,
        "x of the batch of step 2 has numbers that are not finite, in rows 0, 1, 2 and 1 more. ",
    ),
    "weights that are NaN": (
        "nnx.Linear(8, 3,",
        "nnx.Linear(8, 3, bias_init=lambda *_: jnp.nan * jnp.ones(3),",
        None,
        "parameters head/bias",
    ),
    "an error in a later batch": (BATCH, f"1 / (2 - step); {BATCH}", "1 / (2", "ZeroDivisionError: division by zero"),
    "another name in a later batch": (BATCH, 'yield {"x": x, "yz"[step]: y}', "def batches", "but the first batch"),
}


@pytest.mark.parametrize(
    "name",
    [name if name == "labels from 1" else pytest.param(name, marks=pytest.mark.slow) for name in COSTLY_MISTAKES],
)
def test_a_mistake_that_only_steps_show_is_named_too(name, capfd):
    old, new, place, message = COSTLY_MISTAKES[name]
    source = STREAMED.replace(old, new, 1)
    Path("mine.py").write_text(source)
    assert main(["train", "mine.py"]) in (1, 2, 6)
    first = capfd.readouterr().err.splitlines()[0]
    assert message in first
    assert place is None or f"mine.py:{line_of(source, place)}: " in first


@pytest.mark.parametrize(
    ("old", "new", "place", "message"),
    [
        (LOSSES, f"jax.lax.stop_gradient({LOSSES})", "def score", "the gradient of every parameter is 0 in step 1"),
        (LOSSES, f"jnp.ones(4), {LOSSES}", "def score", "the gradient of every parameter is 0 in step 1"),
        ("optax.scale(-1.0)", "optax.scale(1.0)", "def update", "its updates go up the gradient"),
    ],
)
def test_what_trains_nothing_or_uphill_is_a_warning(old, new, place, message):
    source = STREAMED.replace(old, new, 1)
    Path("mine.py").write_text(source)
    with pytest.warns(UserWarning, match=f"mine.py:{line_of(source, place)}: .*{message}"):
        main(["train", "mine.py"])


def test_train_ends_a_traceback_with_the_users_line():
    source = STREAMED.replace("return self.head(hidden)", "return head(hidden)")
    Path("mine.py").write_text(source)
    experiment, _ = jx.load_file("mine.py")
    with pytest.raises(NameError) as caught:
        jx.train(experiment, quiet=True)
    assert caught.value.__notes__[-1] == (
        f"in your code: mine.py:{line_of(source, 'return head')}: NameError; did you mean 'self.head'?"
    )


def test_a_callback_and_a_metric_with_other_parameters_are_refused_before_the_run():
    Path("mine.py").write_text(STREAMED)
    experiment, _ = jx.load_file("mine.py")
    with pytest.raises(UserError, match=r"test_user_code.py:\d+: callbacks: .* expected one that takes 1 argument"):
        jx.train(experiment, quiet=True, callbacks=[lambda step, loss: None])
    with pytest.raises(UserError, match=r"test_user_code.py:\d+: metrics: mae: .* expected one that takes 2 arguments"):
        jx.train(experiment, quiet=True, metrics={"mae": lambda module: 0})
    assert not Path("runs").exists()
