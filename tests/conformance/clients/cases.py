"""What clients of several kinds share: the sizes of gRPC's interoperability cases, and how a client reports.

A client is called with a target, a file of certificate authorities or "", and names of cases. It prints a line for each
case: "NAME ok" or "NAME failed: WHY".
"""

import contextlib
import sys

import interop_pb2 as pb

SERVICE = "/grpc.testing.TestService/"
UNKNOWN_SERVICE = "/grpc.testing.UnimplementedService/"
LARGE_REQUEST = 271828
LARGE_RESPONSE = 314159
REQUEST_SIZES = (27182, 8, 1828, 45904)
RESPONSE_SIZES = (31415, 9, 2653, 58979)
AGGREGATED = 74922
STATUS = (2, "test status message")
SPECIAL_STATUS = (2, "\t\ntest with whitespace\r\nand Unicode BMP \u263a and non-BMP \U0001f608\t\n")
ECHO_INITIAL = ("x-grpc-test-echo-initial", "test_initial_metadata_value")
ECHO_TRAILING = ("x-grpc-test-echo-trailing-bin", b"\xab\xab\xab")
DEADLINE = 60.0  # of calls that must end well, in seconds


def large_request():
    return pb.SimpleRequest(response_size=LARGE_RESPONSE, payload=pb.Payload(body=bytes(LARGE_REQUEST)))


def upload():
    """More than a server's windows take before it has asked for it."""
    return pb.SimpleRequest(payload=pb.Payload(body=bytes(4 << 20)))


def inputs():
    return [pb.StreamingInputCallRequest(payload=pb.Payload(body=bytes(size))) for size in REQUEST_SIZES]


def outputs():
    parameters = [pb.ResponseParameters(size=size) for size in RESPONSE_SIZES]
    return pb.StreamingOutputCallRequest(response_parameters=parameters)


def pings():
    """Requests that ask for one response each."""
    return [
        pb.StreamingOutputCallRequest(
            response_parameters=[pb.ResponseParameters(size=response)], payload=pb.Payload(body=bytes(request))
        )
        for request, response in zip(REQUEST_SIZES, RESPONSE_SIZES)
    ]


def echo_status(status):
    return pb.EchoStatus(code=status[0], message=status[1])


def check(got, expected, what):
    if got != expected:
        raise AssertionError(f"{what}: got {str(got)[:200]!r}, expected {str(expected)[:200]!r}")


def check_zeros(responses, sizes):
    check([len(response.payload.body) for response in responses], list(sizes), "sizes of responses")
    check(any(any(response.payload.body) for response in responses), False, "bytes that are not zero")


@contextlib.contextmanager
def reported(name):
    """Prints what became of the case that runs inside."""
    try:
        yield
        print(f"{name} ok", flush=True)
    except Exception as fault:  # any is the case's result
        print(f"{name} failed: {type(fault).__name__}: {' '.join(str(fault).split())[:300]}", flush=True)


def arguments():
    """target, authorities (a file's name or ""), names of cases"""
    return sys.argv[1], sys.argv[2], sys.argv[3:]
