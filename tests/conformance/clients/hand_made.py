"""gRPC's interoperability cases by curl and nghttp, which know HTTP/2 and nothing of gRPC: this file writes the messages
and reads the fields. Called as cases.py says, with the program's name before the target.

Neither can end a call early. curl 7.88 also drops an answer that is there before its request has ended, which RFC 9113,
section 8.1, forbids: cases where the server answers that early are for nghttp only.
"""

import dataclasses
import pathlib
import re
import subprocess
import sys
import tempfile
import urllib.parse

import interop_pb2 as pb
from cases import (
    AGGREGATED,
    ECHO_INITIAL,
    ECHO_TRAILING,
    LARGE_RESPONSE,
    RESPONSE_SIZES,
    SERVICE,
    SPECIAL_STATUS,
    STATUS,
    UNKNOWN_SERVICE,
    arguments,
    check,
    echo_status,
    inputs,
    large_request,
    outputs,
    pings,
    reported,
    upload,
)

GRPC = {"content-type": "application/grpc", "te": "trailers"}
LIMIT = 30  # of one exchange, in seconds


@dataclasses.dataclass
class Answer:
    fields: dict  # headers and trailers
    size: int  # of the body
    body: bytes | None  # None: the program does not tell


def message(proto, mark=0):
    """A message as gRPC sends it."""
    data = proto.SerializeToString()
    return bytes([mark]) + len(data).to_bytes(4, "big") + data


class Curl:
    def __init__(self, target, authorities):
        self.url = f"{'https' if authorities else 'http'}://{target}"
        self.options = ["--http2", "--cacert", authorities] if authorities else ["--http2-prior-knowledge"]

    def exchange(self, http_method, path, body, fields):
        with tempfile.TemporaryDirectory() as folder:
            heads, got = pathlib.Path(folder, "heads"), pathlib.Path(folder, "body")
            command = ["curl", "-sS", *self.options, "-D", heads, "-o", got, "-X", http_method]
            for field in fields.items():
                command += ["-H", ": ".join(field)]
            if http_method != "GET":
                command += ["--data-binary", "@-"]
            subprocess.run([*command, self.url + path], input=body, timeout=LIMIT, check=True)
            lines = heads.read_text().splitlines()
            found = dict(line.split(": ", 1) for line in lines if ": " in line)
            found[":status"] = lines[0].split()[1]
            data = got.read_bytes() if got.exists() else b""
            return Answer(found, len(data), data)


class Nghttp:
    def __init__(self, target, authorities):
        self.url = f"{'https' if authorities else 'http'}://{target}"

    def exchange(self, http_method, path, body, fields):
        with tempfile.NamedTemporaryFile() as data:
            data.write(body)
            data.flush()
            command = ["nghttp", "-nv", f"-H:method: {http_method}"]
            command += [f"-H{name}: {value}" for name, value in fields.items()]
            if http_method != "GET":
                command += ["-d", data.name]
            command.append(self.url + path)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=True)
        found = dict(re.findall(r"recv \(stream_id=\d+\) (:?[\w-]+): (.*)", done.stdout))
        sizes = re.findall(r"recv DATA frame <length=(\d+)", done.stdout)
        return Answer(found, sum(map(int, sizes)), None)


class Client:
    def __init__(self, program):
        self.program = program

    def call(self, method, requests, fields={}, path=SERVICE, http_method="POST"):
        body = requests if isinstance(requests, bytes) else b"".join(map(message, requests))
        return self.program.exchange(http_method, path + method, body, {**GRPC, **fields})

    def expect(self, answer, responses, status=(0, "")):
        got = (int(answer.fields["grpc-status"]), urllib.parse.unquote(answer.fields.get("grpc-message", "")))
        check((answer.fields[":status"], answer.fields["content-type"]), ("200", "application/grpc"), "head")
        check(got, status, "status")
        expected = b"".join(map(message, responses))
        check(answer.size, len(expected), "size of the body")
        if answer.body is not None:
            check(answer.body == expected, True, "the body is as expected")

    def outputs(self, sizes):
        return [pb.StreamingOutputCallResponse(payload=pb.Payload(body=bytes(size))) for size in sizes]

    def empty_unary(self):
        self.expect(self.call("EmptyCall", [pb.Empty()]), [pb.Empty()])

    def large_unary(self):
        response = pb.SimpleResponse(payload=pb.Payload(body=bytes(LARGE_RESPONSE)))
        self.expect(self.call("UnaryCall", [large_request()]), [response])

    def client_streaming(self):
        answer = self.call("StreamingInputCall", inputs())
        self.expect(answer, [pb.StreamingInputCallResponse(aggregated_payload_size=AGGREGATED)])

    def server_streaming(self):
        self.expect(self.call("StreamingOutputCall", [outputs()]), self.outputs(RESPONSE_SIZES))

    def ping_pong(self):
        """All pings at once."""
        self.expect(self.call("FullDuplexCall", pings()), self.outputs(RESPONSE_SIZES))

    def empty_stream(self):
        self.expect(self.call("FullDuplexCall", []), [])

    def status_code_and_message(self):
        self.expect_status(STATUS)

    def special_status_message(self):
        self.expect_status(SPECIAL_STATUS)

    def expect_status(self, status):
        echo = echo_status(status)
        self.expect(self.call("UnaryCall", [pb.SimpleRequest(response_status=echo)]), [], status)
        streamed = pb.StreamingOutputCallRequest(response_status=echo)
        self.expect(self.call("FullDuplexCall", [streamed]), [], status)

    def custom_metadata(self):
        metadata = {ECHO_INITIAL[0]: ECHO_INITIAL[1], ECHO_TRAILING[0]: "q6ur"}
        for method, request in (("UnaryCall", large_request()), ("FullDuplexCall", pings()[0])):
            answer = self.call(method, [request], metadata)
            check({name: answer.fields.get(name) for name in metadata}, metadata, "metadata")

    def unimplemented_method(self):
        self.expect_code(self.call("UnimplementedCall", [pb.Empty()]), 12)

    def refused_upload(self):
        self.expect_code(self.call("UnimplementedCall", [upload()]), 12)

    def unimplemented_service(self):
        self.expect_code(self.call("UnimplementedCall", [pb.Empty()], path=UNKNOWN_SERVICE), 12)

    def expect_code(self, answer, code):
        check((answer.fields[":status"], answer.fields.get("grpc-status")), ("200", str(code)), "status")

    def compressed_request_is_refused(self):
        answer = self.call("UnaryCall", message(pb.SimpleRequest(response_size=1), mark=1), {"grpc-encoding": "gzip"})
        self.expect_code(answer, 12)
        check(answer.fields.get("grpc-accept-encoding"), "identity", "grpc-accept-encoding")

    def mark_without_encoding_is_refused(self):
        for encoding in ({}, {"grpc-encoding": "identity"}):
            self.expect_code(self.call("UnaryCall", message(pb.SimpleRequest(response_size=1), mark=1), encoding), 13)

    def other_content_type_is_refused(self):
        answer = self.call("EmptyCall", [pb.Empty()], {"content-type": "application/json"})
        check(answer.fields[":status"], "415", "HTTP status")

    def other_http_method_is_refused(self):
        answer = self.call("EmptyCall", [], http_method="GET")
        check(answer.fields[":status"], "405", "HTTP status")


def main():
    program = {"curl": Curl, "nghttp": Nghttp}[sys.argv.pop(1)]
    target, authorities, names = arguments()
    client = Client(program(target, authorities))
    for name in names:
        with reported(name):
            getattr(client, name)()


if __name__ == "__main__":
    main()
