// A call finds the connection it came on by the peer that gRPC names.
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "server/door/connection.h"
#include "server/door/listener.h"

// gRPC's client looks names up with c-ares, which never frees a few bytes of each lookup.
extern "C" const char* __lsan_default_suppressions() { return "leak:libcares.so"; }

namespace logitd::rpc {
namespace {

// Ends every call with OK and notes the connection that its peer's name leads to.
class NotePeers final : public grpc::CallbackGenericService {
 public:
  explicit NotePeers(door::Connections* connections) : connections_(connections) {}

  std::vector<std::shared_ptr<door::Connection>> found() const {
    absl::MutexLock lock(&mutex_);
    return found_;
  }

 private:
  class Reactor final : public grpc::ServerGenericBidiReactor {
   public:
    Reactor() { Finish(grpc::Status::OK); }
    void OnDone() override { delete this; }
  };

  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    auto connection = connections_->Find(context->peer());
    EXPECT_NE(connection, nullptr) << context->peer();
    absl::MutexLock lock(&mutex_);
    found_.push_back(std::move(connection));
    return new Reactor;
  }

  door::Connections* const connections_;
  mutable absl::Mutex mutex_;
  std::vector<std::shared_ptr<door::Connection>> found_ ABSL_GUARDED_BY(mutex_);
};

TEST(PeerNamesTest, LeadToTheConnectionOfACall) {
  const auto connections = door::Connections::Create({});
  NotePeers service(connections.get());
  grpc::ServerBuilder builder;
  builder.RegisterCallbackGenericService(&service);
  const auto acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
      grpc::InsecureServerCredentials());
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  door::Listener listener(connections);
  const std::string path = absl::StrCat(::testing::TempDir(), "/logitd_peers_", getpid());
  ASSERT_TRUE(listener.Listen({"127.0.0.1:0", "localhost:0", "unix:" + path}).ok());
  listener.Start([&](int fd, int listening_fd) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
    connection.fd = fd;
    connection.listener_fd = listening_fd;
    acceptor->HandleNewConnection(&connection);
  });

  // Two connections to each address, and two calls on each.
  std::vector<std::shared_ptr<grpc::Channel>> channels;
  for (const std::string& address : listener.listening()) {
    for (int i = 0; i < 2; ++i) {
      grpc::ChannelArguments arguments;
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      channels.push_back(
          grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
      for (int call = 0; call < 2; ++call) {
        grpc::ClientContext context;
        grpc::CompletionQueue queue;
        grpc::GenericStub stub(channels.back());
        const auto stream = stub.PrepareCall(&context, "/any.Service/Method", &queue);
        stream->StartCall(nullptr);
        grpc::Status status;
        stream->Finish(&status, nullptr);
        void* tag = nullptr;
        bool ok = false;
        for (int step = 0; step < 2; ++step) queue.Next(&tag, &ok);
        EXPECT_TRUE(status.ok()) << status.error_message();
      }
    }
  }
  std::multiset<uint64_t> ids;
  for (const auto& connection : service.found()) ids.insert(connection->id());
  EXPECT_EQ(ids, (std::multiset<uint64_t>{1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6}));
  EXPECT_EQ(connections->open(), 6);
  listener.Stop();
  connections->EndAll();
  server->Shutdown();
}

}  // namespace
}  // namespace logitd::rpc
