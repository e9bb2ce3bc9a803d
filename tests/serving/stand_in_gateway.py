"""Stands in for the gateway's process: takes its arguments, logs them, and answers two paths.

Run by path. A request for a model named "die" ends it.
"""

import itertools
import json
import os
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def main() -> None:
    arguments = json.loads(sys.stdin.readline())
    value = dict(itertools.pairwise(arguments))
    log("INFO", "arguments", arguments=json.dumps(arguments))
    log("WARN", "noise about images", target="smg::multimodal")
    print("a banner", flush=True)
    if value["--reasoning-parser"] == "broken":
        sys.exit(3)
    server = ThreadingHTTPServer((value["--host"], int(value["--port"])), Answers)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    server.serve_forever()
    log("INFO", "left in peace")


def log(level: str, message: str, **more: Any) -> None:
    print(json.dumps({"level": level, "message": message, "target": "t", **more}), flush=True)


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({"data": [{"id": "m"}, {"id": "poet"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["model"] == "die":
            os._exit(7)
        self.answer({"tokens": [1], "authorization": self.headers["authorization"]})

    def answer(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: Any) -> None:
        log("DEBUG", format % args)


if __name__ == "__main__":
    main()
