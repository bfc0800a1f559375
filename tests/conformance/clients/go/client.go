// gRPC's interoperability cases by grpc-go. It is called as cases.py says.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "interop"
)

const (
	largeRequest  = 271828
	largeResponse = 314159
	echoInitial   = "x-grpc-test-echo-initial"
	echoTrailing  = "x-grpc-test-echo-trailing-bin"
	initialValue  = "test_initial_metadata_value"
	trailingValue = "\xab\xab\xab"
)

var (
	requestSizes  = []int32{27182, 8, 1828, 45904}
	responseSizes = []int32{31415, 9, 2653, 58979}
)

type client struct {
	connection *grpc.ClientConn
	service    pb.TestServiceClient
}

func payload(size int32) *pb.Payload { return &pb.Payload{Body: make([]byte, size)} }

func large() *pb.SimpleRequest {
	return &pb.SimpleRequest{ResponseSize: largeResponse, Payload: payload(largeRequest)}
}

func ping(i int) *pb.StreamingOutputCallRequest {
	return &pb.StreamingOutputCallRequest{
		ResponseParameters: []*pb.ResponseParameters{{Size: responseSizes[i]}},
		Payload:            payload(requestSizes[i]),
	}
}

func isZeros(got *pb.Payload, size int32) error {
	if !bytes.Equal(got.GetBody(), make([]byte, size)) {
		return fmt.Errorf("response: got %d bytes, expected %d zeros", len(got.GetBody()), size)
	}
	return nil
}

func hasCode(err error, code codes.Code) error {
	if status.Code(err) != code {
		return fmt.Errorf("status: got %v, expected %v", err, code)
	}
	return nil
}

func isEnd(response *pb.StreamingOutputCallResponse, err error) error {
	if err != io.EOF {
		return fmt.Errorf("end: got %v, %v", response, err)
	}
	return nil
}

func emptyUnary(ctx context.Context, c *client) error {
	_, err := c.service.EmptyCall(ctx, &pb.Empty{})
	return err
}

func largeUnary(ctx context.Context, c *client) error {
	response, err := c.service.UnaryCall(ctx, large())
	if err != nil {
		return err
	}
	return isZeros(response.Payload, largeResponse)
}

func clientStreaming(ctx context.Context, c *client) error {
	stream, err := c.service.StreamingInputCall(ctx)
	if err != nil {
		return err
	}
	for _, size := range requestSizes {
		if err := stream.Send(&pb.StreamingInputCallRequest{Payload: payload(size)}); err != nil {
			return err
		}
	}
	response, err := stream.CloseAndRecv()
	if err == nil && response.AggregatedPayloadSize != 74922 {
		return fmt.Errorf("aggregated_payload_size: got %d", response.AggregatedPayloadSize)
	}
	return err
}

func serverStreaming(ctx context.Context, c *client) error {
	request := &pb.StreamingOutputCallRequest{}
	for _, size := range responseSizes {
		request.ResponseParameters = append(request.ResponseParameters, &pb.ResponseParameters{Size: size})
	}
	stream, err := c.service.StreamingOutputCall(ctx, request)
	if err != nil {
		return err
	}
	for _, size := range responseSizes {
		response, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := isZeros(response.Payload, size); err != nil {
			return err
		}
	}
	return isEnd(stream.Recv())
}

func pingPong(ctx context.Context, c *client) error {
	stream, err := c.service.FullDuplexCall(ctx)
	if err != nil {
		return err
	}
	for i, size := range responseSizes {
		if err := stream.Send(ping(i)); err != nil {
			return err
		}
		response, err := stream.Recv()
		if err != nil {
			return err
		}
		if err := isZeros(response.Payload, size); err != nil {
			return err
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return isEnd(stream.Recv())
}

func emptyStream(ctx context.Context, c *client) error {
	stream, err := c.service.FullDuplexCall(ctx)
	if err != nil {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return isEnd(stream.Recv())
}

func endsWith(ctx context.Context, c *client, code codes.Code, message string) error {
	asked := &pb.EchoStatus{Code: int32(code), Message: message}
	_, unary := c.service.UnaryCall(ctx, &pb.SimpleRequest{ResponseStatus: asked})
	stream, err := c.service.FullDuplexCall(ctx)
	if err != nil {
		return err
	}
	if err := stream.Send(&pb.StreamingOutputCallRequest{ResponseStatus: asked}); err != nil {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	_, streamed := stream.Recv()
	for _, got := range []error{unary, streamed} {
		if status.Code(got) != code || status.Convert(got).Message() != message {
			return fmt.Errorf("status: got %v, expected %v %q", got, code, message)
		}
	}
	return nil
}

func statusCodeAndMessage(ctx context.Context, c *client) error {
	return endsWith(ctx, c, codes.Unknown, "test status message")
}

func specialStatusMessage(ctx context.Context, c *client) error {
	return endsWith(ctx, c, codes.Unknown,
		"\t\ntest with whitespace\r\nand Unicode BMP \u263a and non-BMP \U0001f608\t\n")
}

func echoes(header, trailer metadata.MD) error {
	if got := header.Get(echoInitial); len(got) != 1 || got[0] != initialValue {
		return fmt.Errorf("initial metadata: got %q", got)
	}
	if got := trailer.Get(echoTrailing); len(got) != 1 || got[0] != trailingValue {
		return fmt.Errorf("trailing metadata: got %q", got)
	}
	return nil
}

func customMetadata(ctx context.Context, c *client) error {
	ctx = metadata.AppendToOutgoingContext(ctx, echoInitial, initialValue, echoTrailing, trailingValue)
	var header, trailer metadata.MD
	if _, err := c.service.UnaryCall(ctx, large(), grpc.Header(&header), grpc.Trailer(&trailer)); err != nil {
		return err
	}
	if err := echoes(header, trailer); err != nil {
		return err
	}
	stream, err := c.service.FullDuplexCall(ctx)
	if err != nil {
		return err
	}
	if err := stream.Send(ping(0)); err != nil {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	if _, err := stream.Recv(); err != nil {
		return err
	}
	if err := isEnd(stream.Recv()); err != nil {
		return err
	}
	header, err = stream.Header()
	if err != nil {
		return err
	}
	return echoes(header, stream.Trailer())
}

func unimplementedMethod(ctx context.Context, c *client) error {
	_, err := c.service.UnimplementedCall(ctx, &pb.Empty{})
	return hasCode(err, codes.Unimplemented)
}

func unimplementedService(ctx context.Context, c *client) error {
	_, err := pb.NewUnimplementedServiceClient(c.connection).UnimplementedCall(ctx, &pb.Empty{})
	return hasCode(err, codes.Unimplemented)
}

func refusedUpload(ctx context.Context, c *client) error {
	upload := &pb.SimpleRequest{Payload: payload(4 << 20)}
	for i := 0; i < 5; i++ {
		err := c.connection.Invoke(ctx, "/grpc.testing.TestService/UnimplementedCall", upload, &pb.Empty{})
		if err := hasCode(err, codes.Unimplemented); err != nil {
			return err
		}
	}
	return nil
}

func timeoutOnSleepingServer(ctx context.Context, c *client) error {
	ctx, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	stream, err := c.service.FullDuplexCall(ctx)
	if err == nil {
		// It fails if the deadline has passed; Recv then says so too.
		_ = stream.Send(&pb.StreamingOutputCallRequest{Payload: payload(requestSizes[0])})
		_, err = stream.Recv()
	}
	return hasCode(err, codes.DeadlineExceeded)
}

func cancelAfterBegin(ctx context.Context, c *client) error {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := c.service.StreamingInputCall(ctx)
	cancel()
	if err != nil {
		return err
	}
	_, err = stream.CloseAndRecv()
	return hasCode(err, codes.Canceled)
}

func cancelAfterFirstResponse(ctx context.Context, c *client) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.service.FullDuplexCall(ctx)
	if err != nil {
		return err
	}
	if err := stream.Send(ping(0)); err != nil {
		return err
	}
	if _, err := stream.Recv(); err != nil {
		return err
	}
	cancel()
	_, err = stream.Recv()
	return hasCode(err, codes.Canceled)
}

func compressedRequestIsRefused(ctx context.Context, c *client) error {
	_, err := c.service.UnaryCall(ctx, large(), grpc.UseCompressor(gzip.Name))
	return hasCode(err, codes.Unimplemented)
}

var cases = map[string]func(context.Context, *client) error{
	"empty_unary":                   emptyUnary,
	"large_unary":                   largeUnary,
	"client_streaming":              clientStreaming,
	"server_streaming":              serverStreaming,
	"ping_pong":                     pingPong,
	"empty_stream":                  emptyStream,
	"status_code_and_message":       statusCodeAndMessage,
	"special_status_message":        specialStatusMessage,
	"custom_metadata":               customMetadata,
	"unimplemented_method":          unimplementedMethod,
	"unimplemented_service":         unimplementedService,
	"refused_upload":                refusedUpload,
	"timeout_on_sleeping_server":    timeoutOnSleepingServer,
	"cancel_after_begin":            cancelAfterBegin,
	"cancel_after_first_response":   cancelAfterFirstResponse,
	"compressed_request_is_refused": compressedRequestIsRefused,
}

func run() error {
	if len(os.Args) < 3 {
		return errors.New("usage: client TARGET AUTHORITIES CASE...")
	}
	option := grpc.WithInsecure()
	if os.Args[2] != "" {
		trusted, err := credentials.NewClientTLSFromFile(os.Args[2], "")
		if err != nil {
			return err
		}
		option = grpc.WithTransportCredentials(trusted)
	}
	connection, err := grpc.Dial(os.Args[1], option)
	if err != nil {
		return err
	}
	defer connection.Close()
	c := &client{connection, pb.NewTestServiceClient(connection)}
	for _, name := range os.Args[3:] {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		if err := cases[name](ctx, c); err != nil {
			fmt.Printf("%s failed: %s\n", name, strings.Join(strings.Fields(err.Error()), " "))
		} else {
			fmt.Printf("%s ok\n", name)
		}
		cancel()
	}
	return nil
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
