#include "server/rpc/rpc_server.h"

#include <grpc/grpc.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/version_info.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <mutex>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/types.h"
#include "kernels/usable_cores.h"
#include "server/door/listener.h"
#include "server/door/sockets.h"
#include "server/engine/devices.h"
#include "server/ops/ops.h"
#include "server/rpc/heads_service.h"
#include "server/rpc/ring_service.h"
#include "server/rpc/services.h"
#include "server/rpc/transport/call_log.h"
#include "server/rpc/transport/call_tracker.h"
#include "server/rpc/transport/turned_away.h"

namespace logitd::rpc {
namespace {

// The services of the ops, each once.
std::vector<std::string> OpServiceNames() {
  std::vector<std::string> names;
  for (const ops::Op& op : ops::kOps) {
    if (!absl::c_linear_search(names, op.service)) names.emplace_back(op.service);
  }
  return names;
}

std::vector<std::unique_ptr<OpService>> MakeOpServices(const CallEnvironment& environment) {
  std::vector<std::unique_ptr<OpService>> services;
  for (const std::string& name : OpServiceNames()) {
    services.push_back(std::make_unique<OpService>(name, environment));
  }
  return services;
}

constexpr int64_t kQuotaSlack = int64_t{128} << 20;

// Time for a new connection to send its preface and settings.
constexpr int kHandshakeMs = 20000;

// Time for a peer to answer a ping.
constexpr absl::Duration kKeepaliveTimeout = absl::Seconds(20);

// Whether gRPC asks for the whole of a message that a call reads, whatever its window.
constexpr bool kGrpcAsksAlways = GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR <= 51;

// Small fields of a message, and of each of its rows.
constexpr int64_t kHeaderBytes = int64_t{64} << 10;
constexpr int64_t kHeaderBytesPerRow = 128;

v1::GetInfoResponse MakeInfo(const RpcServerOptions& options, const engine::Devices& devices,
                             const engine::AdmissionOptions& admission,
                             const engine::EngineOptions& engine) {
  v1::GetInfoResponse info;
  info.set_version(options.version);
  info.set_grpc_version(options.grpc_version);
  info.set_backend(devices.info(0).backend);
  for (int i = 0; i < devices.count(); ++i) {
    const DeviceInfo& device = devices.info(i);
    v1::Device* shown = info.add_devices();
    shown->set_name(device.name);
    shown->set_memory_bytes(device.memory_bytes);
    shown->set_number(device.number);
    shown->set_pci_bus_id(device.pci_bus_id);
    shown->set_numa_node(devices.node(i));
  }
  v1::Limits* limits = info.mutable_limits();
  limits->set_max_request_bytes(options.max_request_bytes);
  limits->set_max_held_bytes(admission.max_held_bytes);
  limits->set_max_batch_rows(engine.max_batch_rows);
  limits->set_max_vocab(kMaxVocab);
  limits->set_max_answer_bytes(engine.slab_answer_bytes);
  limits->set_streams(engine.streams * devices.count());
  limits->set_max_keys(kMaxKeys);
  for (const ops::Op& op : ops::kOps) {
    for (const std::string_view method : {op.method, op.stream_method}) {
      for (const engine::OpTraits* traits : {op.op, op.linear}) {
        if (method.empty() || traits == nullptr) continue;
        v1::Op* served = info.add_ops();
        served->set_name(std::string(traits->name));
        served->set_method(absl::StrFormat("%s/%s", op.service, method));
        for (v1::DType dtype : {v1::DTYPE_F32, v1::DTYPE_F16, v1::DTYPE_BF16}) {
          served->add_dtypes(dtype);
        }
      }
    }
  }
  return info;
}

class RpcServerImpl final : public RpcServer {
 public:
  RpcServerImpl(const RpcServerOptions& options, engine::Admission* admission,
                engine::Engine* engine, engine::Heads* heads, engine::Metrics* metrics)
      : load_(&engine->costs(), metrics, absl::Now, &engine->devices(),
              engine::Load::ShortCallsFor(UsableCores())),
        log_(options.slow_call),
        turned_away_(std::make_shared<TurnedAway>(&load_, metrics, &log_)),
        tracker_(options.peer_timeout, admission->options().retry_delay),
        environment_{.admission = admission,
                     .engine = engine,
                     .heads = heads,
                     .metrics = metrics,
                     .load = &load_,
                     .connections = options.connections.get(),
                     .identities = options.identities,
                     .tracker = &tracker_,
                     .log = &log_,
                     .turned_away = turned_away_.get(),
                     .copier = &copier_,
                     .leases = options.leases,
                     .writer = options.leases == nullptr ? nullptr : &writer_,
                     .max_payload_bytes = options.max_request_bytes},
        op_services_(MakeOpServices(environment_)),
        heads_(options.head_root, options.remote_listen, environment_),
        info_(MakeInfo(options, engine->devices(), admission->options(), engine->options()),
              environment_),
        connections_(options.connections),
        listener_(options.connections, options.tls) {}

  ~RpcServerImpl() override {
    if (server_ != nullptr) Shutdown();
  }

  absl::Status Listen(const RpcServerOptions& options, const engine::AdmissionOptions& admission) {
    if (!door::SocketsAreWatched()) {
      return absl::InternalError("the program was linked so that its sockets cannot be watched");
    }
    static std::once_flag once;
    std::call_once(once, [] {
      // Never undone: after a large answer, grpc_shutdown waits up to ten seconds for a thread that
      // polls for a full socket and that nothing wakes. The end of the process is faster.
      grpc_init();
      grpc::EnableDefaultHealthCheckService(true);
      grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    });
    grpc::ServerBuilder builder;
    for (const std::unique_ptr<OpService>& service : op_services_) {
      builder.RegisterService(service.get());
    }
    builder.RegisterService(&heads_);
    builder.RegisterService(&info_);
    builder.SetMaxReceiveMessageSize(static_cast<int>(
        std::min<int64_t>(admission.max_request_bytes, std::numeric_limits<int>::max())));
    builder.SetMaxSendMessageSize(-1);
    // A compressed message is refused on its headers and never inflated.
    builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
    builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
    // With BDP probing, gRPC's windows are 4 MiB and more from the first frame on. The door gives peers
    // windows of its own, within them: see door::Windows. Without the probe gRPC 1.51 keeps 64 KiB for a
    // connection, and asks for each 32 KiB of a message anew. Newer versions (seen: 1.83) ask for nothing
    // while they believe that the peer has half of such a window left, so they keep their 64 KiB.
    // Tried and dropped, no gain beyond noise from socket to slab or for one row: frames of 1 and
    // 16 MiB, reads of at least 64 KiB, 1 MiB and 4 MiB. A bare socket is no faster at 16 MiB: the
    // kernel's two copies are the cost.
    builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, kGrpcAsksAlways ? 1 : 0);
    // Admission does not bound a peer that lies about its message: gRPC core receives all of an
    // oversized message before it refuses it. The quota bounds what all peers together can make
    // core hold; beyond it core resets streams. Honest calls stay within max_held_bytes and never
    // reach it.
    grpc::ResourceQuota quota("logitd");
    quota.Resize(static_cast<size_t>(TransportBytes(admission.max_held_bytes)));
    builder.SetResourceQuota(quota);
    AddDoor(&builder);
    AddLife(options, &builder);
    if (absl::Status status = listener_.Listen(options.listen, options.socket_mode); !status.ok())
      return status;
    server_ = builder.BuildAndStart();
    if (server_ == nullptr) return absl::UnavailableError("the gRPC server did not start");
    SetServing(true);
    listener_.Start([this](int fd, int listening_fd) {
      grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
      connection.listener_fd = listening_fd;
      connection.fd = fd;
      acceptor_->HandleNewConnection(&connection);
    });
    return absl::OkStatus();
  }

  const std::vector<std::string>& listening() const override { return listener_.listening(); }

  void SetServing(bool serving) override {
    grpc::HealthCheckServiceInterface* health = server_->GetHealthCheckService();
    health->SetServingStatus(serving);
    for (const std::string& service : OpServiceNames()) health->SetServingStatus(service, serving);
    for (const char* service : {"logitd.v1.Heads", "logitd.v1.Server"}) {
      health->SetServingStatus(service, serving);
    }
    const engine::Devices& devices = environment_.engine->devices();
    for (int i = 0; i < devices.count(); ++i) {
      health->SetServingStatus(absl::StrCat("logitd.device.", devices.info(i).number),
                               serving && !devices.lost(i));
    }
  }

  void Drain(absl::Duration receive_timeout) override { tracker_.Drain(receive_timeout); }

  void RecheckIdentities() override { tracker_.RecheckIdentities(); }

  arena::ServeRing ring_service() override { return MakeRingService(environment_); }

  int calls() const override { return tracker_.alive(); }

  bool loading() const override { return heads_.loading(); }

  void RefuseConnections(bool refuse) override { listener_.Refuse(refuse); }

  // gRPC (1.51) has no call that ends connections before calls. Server::Shutdown first drops new
  // calls without a look and only then tells the peers. Such a call ends as CANCELLED, which callers
  // do not retry. So the peers see the end of their connections first: every gRPC client turns that
  // into UNAVAILABLE for its open calls, and for calls it opens before it knows.
  void Shutdown() override {
    listener_.Stop();
    connections_->EndAll();
    server_->Shutdown(std::chrono::system_clock::now());
    server_.reset();
    turned_away_->End();
  }

 private:
  // gRPC serves the connections that the listener accepts. What gRPC checks itself gets the limits
  // that the door counts with.
  void AddDoor(grpc::ServerBuilder* builder) {
    using Builder = grpc::ServerBuilder::experimental_type;
    acceptor_ = builder->experimental().AddExternalConnectionAcceptor(
        Builder::ExternalConnectionType::FROM_FD, grpc::InsecureServerCredentials());
    const door::FrameLimits& limits = connections_->options().frames;
    builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, limits.max_streams);
    builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);  // none: the door counts pings
    const auto header_list = static_cast<int>(limits.max_split_list);
    builder->AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, header_list);
#ifdef GRPC_ARG_ABSOLUTE_MAX_METADATA_SIZE  // newer versions advertise this one
    builder->AddChannelArgument(GRPC_ARG_ABSOLUTE_MAX_METADATA_SIZE, header_list);
#endif
    builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  }

  // How long a connection may live. gRPC ends one with GOAWAY: its calls finish, for as long as they
  // take, and its client connects again.
  static void AddLife(const RpcServerOptions& options, grpc::ServerBuilder* builder) {
    const auto add = [builder](const char* name, absl::Duration time) {
      const int64_t ms = absl::ToInt64Milliseconds(time);
      builder->AddChannelArgument(
          name, static_cast<int>(std::min<int64_t>(ms, std::numeric_limits<int>::max())));
    };
    add(GRPC_ARG_MAX_CONNECTION_AGE_MS, options.max_connection_age);
    add(GRPC_ARG_MAX_CONNECTION_IDLE_MS, options.max_connection_idle);
    add(GRPC_ARG_KEEPALIVE_TIME_MS, options.keepalive_time);
    add(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeout);
    builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  }

  engine::Load load_;
  const CallLog log_;
  const std::shared_ptr<TurnedAway> turned_away_;
  CallTracker tracker_;
  Copier copier_;
  arena::Writer writer_;
  const CallEnvironment environment_;
  const std::vector<std::unique_ptr<OpService>> op_services_;
  HeadsService heads_;
  ServerService info_;
  const std::shared_ptr<door::Connections> connections_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  std::unique_ptr<grpc::Server> server_;
  door::Listener listener_;  // ends first: its thread uses the acceptor
};

}  // namespace

int64_t MaxMessageBytes(int64_t max_request_bytes, int64_t max_batch_rows) {
  return max_request_bytes + kHeaderBytes + kHeaderBytesPerRow * max_batch_rows;
}

int64_t TransportBytes(int64_t max_held_bytes) {
  return max_held_bytes + max_held_bytes / 4 + kQuotaSlack;
}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const RpcServerOptions& options,
                                                            engine::Admission* admission,
                                                            engine::Engine* engine,
                                                            engine::Heads* heads,
                                                            engine::Metrics* metrics) {
  auto server = std::make_unique<RpcServerImpl>(options, admission, engine, heads, metrics);
  if (absl::Status status = server->Listen(options, admission->options()); !status.ok()) {
    return status;
  }
  return server;
}

}  // namespace logitd::rpc
