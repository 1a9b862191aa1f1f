"""A server on loopback that answers every POST from a list of JSON objects (the last one for ever), and every GET with nothing."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def serve(*replies, on_call=lambda path: None):
    """The address of a server in a thread; ``on_call`` is told the path of each request before it is answered."""
    left = list(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("content-length") or 0))
            on_call(self.path)
            body = json.dumps(
                left.pop(0) if len(left) > 1 else left[0], separators=(",", ":")
            ).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def choice(tokens, reason, **more):
    """One choice of vLLM's."""
    logprobs = {
        "content": [{"logprob": -0.5}] * len(tokens),
        "token_logprobs": [-0.5] * len(tokens),
    }
    return {
        "choices": [{"token_ids": tokens, "finish_reason": reason, "logprobs": logprobs, **more}]
    }
