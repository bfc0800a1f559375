"""HTTP/2 by hand: what no gRPC library sends. Only what the attacks of the soak need."""

import socket
import struct
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def literal(name, value):
    """A header field that is neither indexed nor Huffman-coded."""

    def text(data):
        length = len(data)
        if length < 127:
            return bytes([length]) + data
        return b"\x7f" + varint(length - 127) + data

    return b"\x00" + text(name.encode()) + text(value if isinstance(value, bytes) else value.encode())


def request_headers(path, extra=()):
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
    fields += [("te", "trailers"), ("content-type", "application/grpc"), *extra]
    return b"".join(literal(name, value) for name, value in fields)


class Peer:
    """One connection. Every send ends with ConnectionError or False once the server has cut it."""

    def __init__(self, port, timeout=5):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self.next_stream = 1
        self.received = b""
        self.window = {0: 65535}
        self.send(PREFACE + frame(SETTINGS, 0, 0))

    def close(self):
        self.socket.close()

    def send(self, data):
        self.socket.sendall(data)

    def call(self, path, extra=(), end_headers=True):
        """Sends the headers of a call and returns its stream."""
        stream = self.next_stream
        self.next_stream += 2
        self.window[stream] = 65535
        self.send(frame(HEADERS, END_HEADERS if end_headers else 0, stream, request_headers(path, extra)))
        return stream

    def read_frames(self, seconds=0.0):
        """Takes what the server has sent within `seconds`: acknowledges, follows windows, returns the frames."""
        frames = []
        end = time.monotonic() + seconds
        while True:
            self.socket.settimeout(max(0.001, end - time.monotonic()))
            try:
                data = self.socket.recv(1 << 16)
            except (TimeoutError, socket.timeout):
                data = None
            finally:
                self.socket.settimeout(5)
            if data == b"":
                raise ConnectionResetError("the server closed the connection")
            self.received += data or b""
            while len(self.received) >= 9:
                length = int.from_bytes(self.received[:3], "big")
                if len(self.received) < 9 + length:
                    break
                kind, flags, stream = struct.unpack(">BBI", self.received[3:9])
                payload = self.received[9 : 9 + length]
                self.received = self.received[9 + length :]
                self._follow(kind, flags, stream, payload)
                frames.append((kind, flags, stream, payload))
            if data is None or time.monotonic() >= end:
                return frames

    def _follow(self, kind, flags, stream, payload):
        if kind == SETTINGS and not flags & ACK:
            self.send(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            self.window[stream] = self.window.get(stream, 65535) + int.from_bytes(payload, "big")

    def send_data(self, stream, data, chunk=16384, seconds=5.0, end_stream=False):
        """Sends `data` in frames of at most `chunk` bytes as far as the windows allow within `seconds`."""
        sent = 0
        end = time.monotonic() + seconds
        while sent < len(data) and time.monotonic() < end:
            room = min(self.window[0], self.window[stream], len(data) - sent)
            if room <= 0:
                self.read_frames(0.01)
                continue
            batch = bytearray()
            while room > 0 and len(batch) < 1 << 18:
                part = data[sent : sent + min(chunk, room)]
                last = end_stream and sent + len(part) == len(data)
                batch += frame(DATA, END_STREAM if last else 0, stream, part)
                sent += len(part)
                room -= len(part)
                self.window[0] -= len(part)
                self.window[stream] -= len(part)
            self.send(bytes(batch))
            self.read_frames(0)
        return sent


def message(payload):
    """A gRPC message: not compressed, with its length."""
    return struct.pack(">BI", 0, len(payload)) + payload


def field(number, payload):
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def request(rows, vocab, parameter):
    """TopKRequest or SampleRequest over zeros in f32. `parameter`: the bytes of the one field that the method needs."""
    shape = varint(1 << 3) + b"\x01" + varint(2 << 3) + varint(rows) + varint(3 << 3) + varint(vocab)
    return shape + parameter + field(15, bytes(rows * vocab * 4))


def topk_request(rows, vocab):
    return request(rows, vocab, field(16, b"\x01"))  # k


def sample_request(rows, vocab):
    return request(rows, vocab, field(16, struct.pack("<Q", 1)))  # seed
