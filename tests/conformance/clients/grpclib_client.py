"""gRPC's interoperability cases by grpclib, which is pure Python and has its HTTP/2 from hyper-h2."""

import asyncio
import ssl

from grpclib.client import Channel, StreamStreamMethod, StreamUnaryMethod, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError

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
        self.empty = UnaryUnaryMethod(channel, SERVICE + "EmptyCall", pb.Empty, pb.Empty)
        self.unary = UnaryUnaryMethod(channel, SERVICE + "UnaryCall", pb.SimpleRequest, pb.SimpleResponse)
        self.input = StreamUnaryMethod(
            channel, SERVICE + "StreamingInputCall", pb.StreamingInputCallRequest, pb.StreamingInputCallResponse
        )
        messages = (pb.StreamingOutputCallRequest, pb.StreamingOutputCallResponse)
        self.output = UnaryStreamMethod(channel, SERVICE + "StreamingOutputCall", *messages)
        self.duplex = StreamStreamMethod(channel, SERVICE + "FullDuplexCall", *messages)
        self.no_method = UnaryUnaryMethod(channel, SERVICE + "UnimplementedCall", pb.Empty, pb.Empty)
        self.no_upload = UnaryUnaryMethod(channel, SERVICE + "UnimplementedCall", pb.SimpleRequest, pb.Empty)
        self.no_service = UnaryUnaryMethod(channel, UNKNOWN_SERVICE + "UnimplementedCall", pb.Empty, pb.Empty)

    async def empty_unary(self):
        check(await self.empty(pb.Empty(), timeout=DEADLINE), pb.Empty(), "response")

    async def large_unary(self):
        check_zeros([await self.unary(large_request(), timeout=DEADLINE)], [LARGE_RESPONSE])

    async def client_streaming(self):
        response = await self.input(inputs(), timeout=DEADLINE)
        check(response.aggregated_payload_size, AGGREGATED, "aggregated_payload_size")

    async def server_streaming(self):
        check_zeros(await self.output(outputs(), timeout=DEADLINE), RESPONSE_SIZES)

    async def ping_pong(self):
        responses = []
        async with self.duplex.open(timeout=DEADLINE) as stream:
            for request in pings():
                await stream.send_message(request)
                responses.append(await stream.recv_message())
            await stream.end()
            check(await stream.recv_message(), None, "a response after the last")
        check_zeros(responses, RESPONSE_SIZES)

    async def empty_stream(self):
        async with self.duplex.open(timeout=DEADLINE) as stream:
            await stream.send_request()
            await stream.end()
            check(await stream.recv_message(), None, "a response")

    async def status_code_and_message(self):
        await self.expect_status(STATUS)

    async def special_status_message(self):
        await self.expect_status(SPECIAL_STATUS)

    async def expect_status(self, status):
        unary = pb.SimpleRequest(response_status=echo_status(status))
        streamed = pb.StreamingOutputCallRequest(response_status=echo_status(status))
        for call in (self.unary(unary, timeout=DEADLINE), self.duplex([streamed], timeout=DEADLINE)):
            error = await fails(call)
            check((error.status.value, error.message), status, "status")

    async def custom_metadata(self):
        metadata = [ECHO_INITIAL, ECHO_TRAILING]
        for method, request in ((self.unary, large_request()), (self.duplex, pings()[0])):
            async with method.open(metadata=metadata, timeout=DEADLINE) as stream:
                await stream.send_message(request, end=True)
                await stream.recv_message()
                await stream.recv_trailing_metadata()
            check(stream.initial_metadata.getall(ECHO_INITIAL[0]), [ECHO_INITIAL[1]], "initial metadata")
            check(stream.trailing_metadata.getall(ECHO_TRAILING[0]), [ECHO_TRAILING[1]], "trailing metadata")

    async def unimplemented_method(self):
        error = await fails(self.no_method(pb.Empty(), timeout=DEADLINE))
        check(error.status, Status.UNIMPLEMENTED, "status")

    async def refused_upload(self):
        for _ in range(5):
            error = await fails(self.no_upload(upload(), timeout=DEADLINE))
            check(error.status, Status.UNIMPLEMENTED, "status")

    async def unimplemented_service(self):
        error = await fails(self.no_service(pb.Empty(), timeout=DEADLINE))
        check(error.status, Status.UNIMPLEMENTED, "status")

    async def timeout_on_sleeping_server(self):
        silent = pb.StreamingOutputCallRequest(payload=pb.Payload(body=bytes(REQUEST_SIZES[0])))
        try:
            async with self.duplex.open(timeout=0.001) as stream:
                await stream.send_message(silent)
                await stream.recv_message()
        except asyncio.TimeoutError:
            return  # its own clock
        except GRPCError as error:  # the server's
            return check(error.status, Status.DEADLINE_EXCEEDED, "status")
        raise AssertionError("got an answer, expected none in time")

    async def cancel_after_begin(self):
        async with self.input.open(timeout=DEADLINE) as stream:
            await stream.send_request()
            await stream.cancel()
        await self.empty_unary()  # the connection lives

    async def cancel_after_first_response(self):
        async with self.duplex.open(timeout=DEADLINE) as stream:
            await stream.send_message(pings()[0])
            check_zeros([await stream.recv_message()], RESPONSE_SIZES[:1])
            await stream.cancel()
        await self.empty_unary()


async def fails(call):
    """The error of a call that must fail."""
    try:
        answer = await call
    except GRPCError as error:
        return error
    raise AssertionError(f"got {str(answer)[:100]}, expected an error")


async def run(target, authorities, names):
    host, port = target.rsplit(":", 1)
    tls = None
    if authorities:
        tls = ssl.create_default_context(cafile=authorities)
        tls.set_alpn_protocols(["h2"])
    async with Channel(host, int(port), ssl=tls) as channel:
        client = Client(channel)
        for name in names:
            with reported(name):
                await asyncio.wait_for(getattr(client, name)(), DEADLINE)


if __name__ == "__main__":
    asyncio.run(run(*arguments()))
