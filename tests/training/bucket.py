"""A bucket on this machine, for tests: gs:// for epath through fsspec, and for TensorStore over HTTP.

`Bucket` gives a folder the manners of an object store: no folder exists without an object in it. `serve` answers the
part of Google's JSON API that TensorStore's own gcs driver speaks, over the same folder.
"""

import contextlib
import json
import os
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem


class Bucket(DirFileSystem):
    """Objects of gs://NAME/ or s3://NAME/ as files of ROOT/NAME."""

    cachable = False
    root = None

    def __init__(self, **_):
        super().__init__(path=str(self.root), fs=LocalFileSystem(auto_mkdir=True))

    def _join(self, path):
        return super()._join(re.sub("^[a-z0-9]+://", "", path))

    def _holds(self, path):
        here = Path(self._join(path))
        return here.is_file() or any(file.is_file() for file in here.rglob("*"))

    def mkdir(self, path, *args, **options):
        pass

    makedirs = mkdir

    def exists(self, path, **_):
        return self._holds(path)

    def isdir(self, path):
        return self._holds(path) and super().isdir(path)

    def info(self, path, **options):
        if not self._holds(path):
            raise FileNotFoundError(path)
        return super().info(path, **options)

    def ls(self, path, detail=True, **options):
        if not self._holds(path):
            raise FileNotFoundError(path)
        found = super().ls(path, detail=detail, **options)
        return [item for item in found if self._holds(item["name"] if detail else item)]


@contextlib.contextmanager
def serve(root):
    """The address of a server of the buckets that are folders of `root`."""

    lock, seen = threading.Lock(), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def answer(self, code, body=b"", **headers):
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), str(value))
            self.end_headers()
            self.wfile.write(body)

        def request(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urllib.parse.urlsplit(self.path)
            query = dict(urllib.parse.parse_qsl(url.query))
            match = re.fullmatch(r"(?:/upload)?/storage/v1/b/([^/]+)/o(?:/(.+))?", url.path)
            assert match, self.path
            bucket = root / match[1]
            with lock:
                seen.append(self.command)
                if self.command == "GET" and match[2] is None:
                    return self.list(bucket, query)
                name = query["name"] if self.command == "POST" else urllib.parse.unquote(match[2])
                file = bucket / name
                now = file.stat().st_mtime_ns if file.is_file() else 0
                if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != now:
                    return self.answer(412)
                if self.command == "POST":
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(body)
                    os.utime(file, ns=(later := max(file.stat().st_mtime_ns, now + 1), later))
                    return self.answer(200, json.dumps({"name": name, "generation": str(later)}).encode())
                if not now:
                    return self.answer(404)
                if self.command == "DELETE":
                    file.unlink()
                    return self.answer(204)
                if int(query.get("ifGenerationNotMatch", -1)) == now:
                    return self.answer(304)
                content = file.read_bytes()
                about = {"x_goog_generation": now, "Content_Type": "application/octet-stream"}
                part = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
                if not part:
                    return self.answer(200, content, **about)
                start = int(part[1]) if part[1] else max(len(content) - int(part[2]), 0)
                stop = min(int(part[2]) + 1 if part[1] and part[2] else len(content), len(content))
                if start >= stop:
                    return self.answer(416, Content_Range=f"bytes */{len(content)}", **about)
                about["Content_Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
                return self.answer(206, content[start:stop], **about)

        def list(self, bucket, query):
            names = sorted(str(file.relative_to(bucket)) for file in bucket.rglob("*") if file.is_file())
            names = [n for n in names if n.startswith(query.get("prefix", "")) and n >= query.get("startOffset", "")]
            names = [n for n in names if not query.get("endOffset") or n < query["endOffset"]]
            items = [{"name": n, "size": str((bucket / n).stat().st_size)} for n in names]
            self.answer(200, json.dumps({"items": items}).encode(), Content_Type="application/json")

        do_GET = do_POST = do_DELETE = request  # noqa: N815

    server = ThreadingHTTPServer(("localhost", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://localhost:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
