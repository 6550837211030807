"""What wild experiments are made of: tiny models and plans, valid texts, and values that no field expects."""

from typing import Any

from jaxscale.memory.plan import MemoryPlan
from jaxscale.optim.rules import RULES
from jaxscale.pipeline.plan import PipelinePlan
from jaxscale.platforms.compiler_options import CompilerOptions
from jaxscale.platforms.platform import Platform
from jaxscale.recipe.kernels import Kernels
from jaxscale.replicas.low_communication import Diloco
from jaxscale.replicas.named import NamedCodec
from jaxscale.sharding.mesh import MeshSpec

DECODER = "Decoder(vocab=257, context=8, layers=2, embed=8, heads=2)"
TEXT = "Text(path=FOLDER / 'text.txt', context=8)"
CHATS = "Chats(path=FOLDER / 'chats.jsonl', folder=FOLDER / 'chat', context=16)"
IMAGES = "Images(path=FOLDER / 'images.npz')"
PHOTOS = "ImageFolder(path=FOLDER / 'photos', size=8, workers=1)"
MODELS = (
    *((model, TEXT) for model in (DECODER, DECODER, DECODER, f"LoRA(model={DECODER}, rank=2)")),
    (f"LoRA(model={DECODER}, rank=2, base='nf4', base_block=8)", TEXT),
    (DECODER, f"Mixture(parts=({TEXT}, {TEXT}), weights=(1.0, 2.0))"),
    (DECODER, "Text(path=FOLDER / 'lines.jsonl', context=8, fields=('text', 'answer'), layout='packed')"),
    (DECODER, CHATS),
    (DECODER, "Arrays(arrays={'tokens': np.zeros((40, 8), int), 'targets': np.ones((40, 8), int)})"),
    (DECODER, "Rows(rows=[{'tokens': [1] * 8, 'targets': [2] * 8}] * 40)"),
    (DECODER, "Text(path=FOLDER / 'table.parquet', context=8, fields=('text',), layout='packed')"),
    (DECODER, "Table(path=FOLDER / 'table.parquet', columns=('tokens', 'targets'))"),
    (DECODER, "Stream(batches=[{'tokens': np.zeros((8, 8), int), 'targets': np.ones((8, 8), int)}] * 3)"),
    ("Pretrained(folder=FOLDER / 'llama')", TEXT),
    ("ViT(classes=10, image=8, patch=4, channels=1, layers=2, embed=8, heads=2)", IMAGES),
    ("ResNet(classes=10, channels=1, stages=(1, 1), width=8)", IMAGES),
    ("ResNet(classes=2, stages=(1, 1), width=8, stem='small')", PHOTOS),
    ("ForeignModel(make=Net, score=CrossEntropy(inputs='images', labels='labels'))", IMAGES),
)
"""Tiny models and their data."""
OPTIMIZERS = ("adamw", "adamw", "adamw", *(name for name in RULES if "one_bit" not in name))
"""Names of the optimizers to begin with."""
PLANS = (
    *("Plan()", "Plan(mesh='data:2')", "Plan(mesh='fsdp:4', zero=3)", "Plan(mesh='fsdp:2,data:2', zero=1)"),
    *("Plan(mesh='tensor:2,data:2')", "Plan(mesh='sequence:2')", "Plan(mesh='replica:2,data:2')"),
    *("Plan(mesh='replica:2', reduce='int8')", "Plan(mesh='replica:2', diloco='every=2')", "Plan(pipeline='1f1b:2x2')"),
    *(
        "Plan(pipeline='2bw:2x2')",
        "Plan(mesh='1')",
        "Plan(precision='bfloat16')",
        "Plan(mesh='data:2', microbatches=2)",
    ),
)
"""Plans to begin with."""
ALONE = (
    "Sampling(tokens=5, temperature=0.5, top_k=3)",
    "Cluster(platform='gpu h100 x 8', scheduler=Slurm(partition='a'), shared='/data')",
    "Cluster(platform='tpu v6e:4x4', scheduler=JobSet(image='a/b:1'))",
    "Cluster(platform='tpu v6e:4x4', scheduler=QueuedResource(project='a', zone='b', runtime='c'))",
    "Cluster(platform='cpu x 2', scheduler=Ssh(hosts=('a', 'b')))",
    "Cluster(platform='cpu x 2', scheduler=Local(processes=2))",
    "Text(path='a.txt')",
)
"""Values outside an experiment."""

_MEMORY = (
    *("none", "dots", "full", "jax:dots_saveable", "sqrt", "periodic:2", "revolve:2", "chain:1MiB", "save:1MiB"),
    *("save:12KiB:flop", "greedy:12KiB", "dtr_static:12KiB", "offload:pofo:12KiB", "fit", "file:FOLDER/memory.json"),
)
_PIPELINES = (
    *("1f1b:2x2", "gpipe:2x4", "interleaved:1x4,v=2", "lockstep:2x4", "zb-h1:2x4", "zb-v:1x2", "chimera:2x2"),
    *("dualpipe-v:1x2", "pipedream:2", "2bw:2x2", "pipemare:2", "auto:2", "1f1b:2x4,stages=1+1,stash=input"),
    *("file:FOLDER/odd.csv", "pipemare:2,anneal=2,correction=0.2,synchronous_steps=1"),
)
TEXT_FORMS: dict[Any, tuple[str, ...]] = {
    MeshSpec: (
        "data:2",
        "fsdp:4",
        "data:2,fsdp:2",
        "tensor:2",
        "replica:2,data:2",
        "data:8",
        "sequence:2",
        "1",
        "pipe:2",
    ),
    PipelinePlan: _PIPELINES,
    MemoryPlan: _MEMORY,
    NamedCodec: (
        *("int8", "int4", "powersgd:2", "topk:0.1", "onebit", "sign", "qsgd:4bit", "dgc:0.1", "gradzip:2", "fp8"),
        *("powersgd:2,start=1", "int8,block=64", "topk:0.1,feedback=false"),
    ),
    Diloco: ("every=2", "every=2,lr=0.7,momentum=0.9,fragments=1", "every=4,fragments=2"),
    Kernels: ("auto", "reference", "attention=chunked", "attention=plain,cross_entropy=chunked", "loss_chunk=4"),
    CompilerOptions: ("default", "overlap", "vmem", "xla_cpu_enable_fast_math=false"),
    Platform: (
        "tpu v5e:4x4",
        "tpu v5p:2x2x4",
        "gpu h100 x 8",
        "gpu a100 x 64",
        "cpu x 2",
        "2 x tpu v5p:2x2x4",
        "local",
    ),
}
"""Valid texts of each class with a text form."""
ORDINARY_FIELDS: dict[str, tuple[str, ...]] = {
    "path": ("FOLDER / 'text.txt'", "FOLDER / 'lines.jsonl'", "(FOLDER / 'text.txt', FOLDER / 'short.txt')"),
    "tokenizer": ("'byte'", "'char'"),
    "stages": ("(1, 1)", "(2,)"),
    "windows": ("(None,)", "(4, None)"),
    "parts": (f"({TEXT}, {TEXT})",),
    "weights": ("(1.0, 3.0)",),
    "arrays": ("{'images': np.zeros((40, 8, 8, 1)), 'labels': np.zeros(40, int)}",),
    "custom": ("adam", "None"),
    "schedule": ("'cosine'", "'constant'", "falling", "missing", "sinking"),
    "train": ("'attention'", "'lora|head'"),
    "groups": (
        "{'embed|head': Optimizer('lion', 0.001)}",
        "{'attention': Optimizer('sgd', 0.1, moments='float32'), 'norm': Optimizer()}",
    ),
    "named": ("(('attention', 'plain'),)", "()"),
    "fields": ("('text',)", "('text', 'answer')", "()"),
    "hosts": ("('a', 'b')",),
    "batch": ("8", "16", "4", "12"),
    "steps": ("1", "4", "100"),
    "make": ("Net",),
    "name": ("'run'", "'a b'", "'ä'"),
    "platform": ("'gpu h100 x 8'", "'tpu v6e:4x4'"),
}
"""Valid values by the name of a field, where the declared type does not suggest any."""

NUMBERS = (
    *("0", "-1", "1", "2", "3", "5", "7", "255", "256", "2**31 - 1", "2**31", "2**32", "2**63 - 1", "2**63", "2**64"),
    *("10**18", "-2**63", "10**400", "-10**400", "10**5000", "2**20", "10**6", "65536", "16777216", "1000"),
)
FLOATS = (
    *("0.0", "-0.0", "-1.0", "1.0", "0.5", "nan", "inf", "-inf", "1e308", "-1e308", "5e-324", "1e-300", "1e30", "1e-9"),
    *("0.9999999999999999", "1.0000000000000002", "2.0**53 + 1", "1e16", "0.1"),
)
STRINGS = (
    *(
        "''",
        "' '",
        "'\\0'",
        "'a\\0b'",
        "'a' * 300",
        "'ä' * 200",
        "'²'",
        "'³:²'",
        "'none'",
        "'None'",
        "'true'",
        "'nan'",
        "'inf'",
    ),
    *(
        "'1e400'",
        "'-1'",
        "'0'",
        "'1_000'",
        "' 2 '",
        "'+2'",
        "'2²'",
        "'٣'",
        "'..'",
        "'/'",
        "'a/b'",
        "'~'",
        "'~nobody/x'",
        "'*'",
        "'['",
    ),
    *(
        "'\\ud800'",
        "'\\x1b[31m'",
        "'a\\nb'",
        "'(' * 200",
        "'[' * 5000",
        "'{' * 100",
        "'a' * 2000000",
        "'(a+)+$'",
        "'\\\\'",
        "','",
    ),
    *(
        "':'",
        "'='",
        "'gs://'",
        "'gs://a/b'",
        "'s3://a/b'",
        "'http://a/b'",
        "'file:///etc/passwd'",
        "'/dev/zero'",
        "'/'",
        "'auto'",
    ),
    *(
        "'9' * 5000",
        "'\\u202e'",
        "'%s%n'",
        "'{0.__class__}'",
        "'C:\\\\a'",
        "'/proc/self/mem'",
        "'/dev/stdin'",
        "'1x1'",
        "'a:1'",
    ),
)
ODDITIES = (
    *(
        "None",
        "True",
        "False",
        "object()",
        "Odd()",
        "Odd",
        "int",
        "lambda: 3",
        "lambda *a, **k: None",
        "print",
        "b'a'",
        "b''",
    ),
    *(
        "()",
        "[]",
        "{}",
        "set()",
        "(1,)",
        "(None,)",
        "('a',)",
        "[1, 2]",
        "{'a': 1}",
        "{1: 2}",
        "{None: None}",
        "(1, 'a', None)",
    ),
    *(
        "nested(50)",
        "nested(5000)",
        "cycle()",
        "range(3)",
        "iter([])",
        "3j",
        "np.int64(3)",
        "np.float32(0.5)",
        "np.float64('nan')",
    ),
    *(
        "np.zeros(3)",
        "np.array(2)",
        "np.array([])",
        "np.bool_(True)",
        "np.zeros((2, 2))",
        "np.array(['a', None], dtype=object)",
    ),
    *(
        "jax.ShapeDtypeStruct((2,), 'float32')",
        "Path('a')",
        "Path('')",
        "Path('/dev/zero')",
        "NotImplemented",
        "...",
        "Exception('a')",
    ),
    *(
        "(1,) * 100000",
        "('a',) * 70000",
        "[()] * 3",
        "{'a' * 300: 1}",
        "frozenset({1})",
        "slice(1)",
        "type",
        "Plan()",
        "Plan",
    ),
    *(
        "Decoder",
        "Optimizer()",
        "MeshSpec()",
        "Experiment",
        "np",
        "np.str_('adamw')",
        "bytearray(3)",
        "memoryview(b'a')",
    ),
)
