"""A Kubernetes API server that knows EndpointSlices of one namespace, over TLS and for one token.

    slices_server.py PORT CERTIFICATE KEY TOKEN FILE

FILE is the list of EndpointSlices in the server's answer. Watches stay open without events.
"""

from __future__ import annotations

import http.server
import ssl
import sys
import threading
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


class Server(http.server.BaseHTTPRequestHandler):
    token = b""
    page = b""
    path_served = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if self.headers.get("authorization", "").encode() != b"Bearer " + self.token:
            self.send_error(401)
        elif asked.path != self.path_served:
            self.send_error(403)
        elif "watch" in (query := parse_qs(asked.query)):
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            threading.Event().wait(float(query.get("timeoutSeconds", ["300"])[0]))
        else:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(self.page)))
            self.end_headers()
            self.wfile.write(self.page)


def main(port: str, certificate: str, key: str, token: str, file: str) -> None:
    Server.token, Server.page = token.encode(), Path(file).read_bytes()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with http.server.ThreadingHTTPServer(("", int(port)), Server) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
