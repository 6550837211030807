import pytest

from jaxscale.data import source
from jaxscale.errors import UserError


def test_one_path_several_and_globs_keep_their_order(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.txt").write_text("d")
    found = source.find_files((str(tmp_path / "c.md"), str(tmp_path / "**" / "*.txt")))
    assert [path.removeprefix(f"{tmp_path}/") for path in found] == ["c.md", "a.txt", "b.txt", "deep/d.txt"]


def test_a_name_with_brackets_is_a_file_before_it_is_a_glob(tmp_path):
    path = tmp_path / "a[1].txt"
    path.write_text("x")
    assert source.find_files((str(path),)) == [str(path)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("shakespear.txt", "no such file: .*shakespear.txt; did you mean 'shakespeare.txt'"),
        ("nowhere/a.txt", "no such file.*nowhere is missing or empty"),
        (".", "is a folder, expected text files: give a glob"),
        ("*.md", "no file matches .*expected at least one"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, name, message):
    (tmp_path / "shakespeare.txt").write_text("x")
    with pytest.raises(UserError, match=message):
        source.find_files((str(tmp_path / name) if name != "." else str(tmp_path),))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"abc\0def", "is binary: NUL byte at offset 3"),
        ("naïve".encode("latin-1"), "not UTF-8: byte 0xef at offset 2"),
        (b"cut \xc3", "not UTF-8: byte 0xc3 at offset 4"),
    ],
)
def test_what_is_no_text_is_refused_at_its_offset(content, message):
    with pytest.raises(UserError, match=message):
        source.decode(content, "a.txt")


def test_bytes_are_taken_as_they_are():
    assert source.decode("\ufeffa\r\nb".encode(), "a.txt") == "\ufeffa\r\nb"


@pytest.fixture
def fresh_clients():
    """epath keeps one client per scheme for the life of the process."""
    from etils.epath import backend

    backend.fsspec_backend._get_filesystem.cache_clear()
    yield
    backend.fsspec_backend._get_filesystem.cache_clear()


@pytest.mark.usefixtures("fresh_clients")
def test_a_scheme_goes_through_epath(monkeypatch):
    """gs:// with the client replaced by fsspec's file system in memory: no network is needed."""
    from fsspec.implementations.memory import MemoryFileSystem

    class Bucket(MemoryFileSystem):
        def __init__(self, **_):
            super().__init__()

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(path.replace("gs://", "/"))

    monkeypatch.setattr("fsspec.filesystem", lambda name, **_: Bucket())
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    for name in ("a.txt", "b.txt"):
        Bucket().pipe(f"/bucket/{name}", name.encode())
    assert source.find_files(("gs://bucket/a.txt",)) == ["gs://bucket/a.txt"]
    assert source.find_files(("gs://bucket/*.txt",)) == ["gs://bucket/a.txt", "gs://bucket/b.txt"]
    assert source.read("gs://bucket/b.txt") == b"b.txt"
    with pytest.raises(UserError, match=r"no such file: gs://bucket/c.txt; did you mean"):
        source.find_files(("gs://bucket/c.txt",))


@pytest.mark.usefixtures("fresh_clients")
def test_a_missing_client_says_what_to_install(monkeypatch):
    def missing(name, **options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.filesystem", missing)
    with pytest.raises(UserError, match=r"needs another package \(Install s3fs.*jaxscale\[remote\]"):
        source.find_files(("s3://bucket/a.txt",))


@pytest.mark.parametrize("path", ["file:///etc/passwd", "http://host/a.txt", "abc://a/*.txt", "://"])
def test_an_unknown_scheme_is_refused(path):
    with pytest.raises(UserError, match=r"got the scheme .*, expected a local path, gs:// or s3://"):
        source.find_files((path,))


@pytest.mark.usefixtures("fresh_clients")
def test_a_bucket_that_cannot_be_reached_is_one_sentence(monkeypatch):
    def unreachable(name, **options):
        raise RuntimeError("no credentials\nmore lines")

    monkeypatch.setattr("fsspec.filesystem", unreachable)
    with pytest.raises(UserError, match=r"s3://bucket/a.txt cannot be reached: no credentials; check"):
        source.find_files(("s3://bucket/a.txt",))
