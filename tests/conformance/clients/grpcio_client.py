"""gRPC's interoperability cases by grpcio."""

import pathlib
import queue

import grpc

import interop_pb2 as pb
from cases import (
    AGGREGATED,
    DEADLINE,
    ECHO_INITIAL,
    ECHO_TRAILING,
    LARGE_RESPONSE,
    REQUEST_SIZES,
    RESPONSE_SIZES,
    SERVICE,
    SPECIAL_STATUS,
    STATUS,
    UNKNOWN_SERVICE,
    arguments,
    check,
    check_zeros,
    echo_status,
    inputs,
    large_request,
    outputs,
    pings,
    reported,
    upload,
)


class Client:
    def __init__(self, channel):
        def method(kind, path, request, response):
            return getattr(channel, kind)(
                path, request_serializer=request.SerializeToString, response_deserializer=response.FromString
            )

        self.empty = method("unary_unary", SERVICE + "EmptyCall", pb.Empty, pb.Empty)
        self.unary = method("unary_unary", SERVICE + "UnaryCall", pb.SimpleRequest, pb.SimpleResponse)
        self.input = method(
            "stream_unary", SERVICE + "StreamingInputCall", pb.StreamingInputCallRequest, pb.StreamingInputCallResponse
        )
        messages = (pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse)
        self.output = method("unary_stream", SERVICE + "StreamingOutputCall", *messages)
        self.duplex = method("stream_stream", SERVICE + "FullDuplexCall", *messages)
        self.no_method = method("unary_unary", SERVICE + "UnimplementedCall", pb.Empty, pb.Empty)
        self.no_upload = method("unary_unary", SERVICE + "UnimplementedCall", pb.SimpleRequest, pb.Empty)
        self.no_service = method("unary_unary", UNKNOWN_SERVICE + "UnimplementedCall", pb.Empty, pb.Empty)

    def empty_unary(self):
        check(self.empty(pb.Empty(), timeout=DEADLINE), pb.Empty(), "response")

    def large_unary(self):
        check_zeros([self.unary(large_request(), timeout=DEADLINE)], [LARGE_RESPONSE])

    def client_streaming(self):
        response = self.input(iter(inputs()), timeout=DEADLINE)
        check(response.aggregated_payload_size, AGGREGATED, "aggregated_payload_size")

    def server_streaming(self):
        check_zeros(list(self.output(outputs(), timeout=DEADLINE)), RESPONSE_SIZES)

    def ping_pong(self):
        sends = queue.SimpleQueue()
        call = self.duplex(iter(sends.get, None), timeout=DEADLINE)
        responses = []
        for request in pings():
            sends.put(request)
            responses.append(next(call))
        sends.put(None)
        check_zeros(responses + list(call), RESPONSE_SIZES)

    def empty_stream(self):
        check(list(self.duplex(iter(()), timeout=DEADLINE)), [], "responses")

    def status_code_and_message(self):
        self.expect_status(STATUS)

    def special_status_message(self):
        self.expect_status(SPECIAL_STATUS)

    def expect_status(self, status):
        unary = pb.SimpleRequest(response_status=echo_status(status))
        streamed = pb.StreamingOutputCallRequest(response_status=echo_status(status))
        for error in (
            fails(lambda: self.unary(unary, timeout=DEADLINE)),
            fails(lambda: list(self.duplex(iter([streamed]), timeout=DEADLINE))),
        ):
            check((error.code().value[0], error.details()), status, "status")

    def custom_metadata(self):
        metadata = (ECHO_INITIAL, ECHO_TRAILING)
        _, unary = self.unary.with_call(large_request(), metadata=metadata, timeout=DEADLINE)
        duplex = self.duplex(iter(pings()[:1]), metadata=metadata, timeout=DEADLINE)
        check_zeros(list(duplex), RESPONSE_SIZES[:1])
        for call in (unary, duplex):
            initial, trailing = list(call.initial_metadata()), list(call.trailing_metadata())
            check([tuple(m) for m in initial if m[0] == ECHO_INITIAL[0]], [ECHO_INITIAL], "initial metadata")
            check([tuple(m) for m in trailing if m[0] == ECHO_TRAILING[0]], [ECHO_TRAILING], "trailing metadata")

    def unimplemented_method(self):
        error = fails(lambda: self.no_method(pb.Empty(), timeout=DEADLINE))
        check(error.code(), grpc.StatusCode.UNIMPLEMENTED, "status")

    def refused_upload(self):
        for _ in range(5):
            error = fails(lambda: self.no_upload(upload(), timeout=DEADLINE))
            check(error.code(), grpc.StatusCode.UNIMPLEMENTED, "status")

    def unimplemented_service(self):
        error = fails(lambda: self.no_service(pb.Empty(), timeout=DEADLINE))
        check(error.code(), grpc.StatusCode.UNIMPLEMENTED, "status")

    def timeout_on_sleeping_server(self):
        silent = pb.StreamingOutputCallRequest(payload=pb.Payload(body=bytes(REQUEST_SIZES[0])))
        sends = queue.SimpleQueue()
        sends.put(silent)
        error = fails(lambda: list(self.duplex(iter(sends.get, None), timeout=0.001)))
        sends.put(None)
        check(error.code(), grpc.StatusCode.DEADLINE_EXCEEDED, "status")

    def cancel_after_begin(self):
        sends = queue.SimpleQueue()
        call = self.input.future(iter(sends.get, None))
        call.cancel()
        sends.put(None)
        check(call.code(), grpc.StatusCode.CANCELLED, "status")

    def cancel_after_first_response(self):
        sends = queue.SimpleQueue()
        call = self.duplex(iter(sends.get, None), timeout=DEADLINE)
        sends.put(pings()[0])
        check_zeros([next(call)], RESPONSE_SIZES[:1])
        call.cancel()
        sends.put(None)
        check(fails(lambda: next(call)).code(), grpc.StatusCode.CANCELLED, "status")

    def compressed_request_is_refused(self):
        for algorithm in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            error = fails(lambda: self.unary(large_request(), compression=algorithm, timeout=DEADLINE))  # noqa: B023
            check(error.code(), grpc.StatusCode.UNIMPLEMENTED, f"status of {algorithm.name}")


def fails(call):
    """The error of a call that must fail."""
    try:
        answer = call()
    except grpc.RpcError as error:
        return error
    raise AssertionError(f"got {str(answer)[:100]}, expected an error")


def main():
    target, authorities, names = arguments()
    if authorities:
        credentials = grpc.ssl_channel_credentials(pathlib.Path(authorities).read_bytes())
        channel = grpc.secure_channel(target, credentials)
    else:
        channel = grpc.insecure_channel(target)
    with channel:
        client = Client(channel)
        for name in names:
            with reported(name):
                getattr(client, name)()


if __name__ == "__main__":
    main()
