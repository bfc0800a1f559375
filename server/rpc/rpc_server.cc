#include "server/rpc/rpc_server.h"

#include <functional>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/types.h"
#include "kernels/usable_cores.h"
#include "server/engine/devices.h"
#include "server/ops/ops.h"
#include "server/rpc/heads_service.h"
#include "server/rpc/health_service.h"
#include "server/rpc/probe_server.h"
#include "server/rpc/reflection_service.h"
#include "server/rpc/registry.h"
#include "server/rpc/ring_service.h"
#include "server/rpc/services.h"
#include "server/rpc/transport/call_log.h"
#include "server/rpc/transport/call_tracker.h"
#include "server/rpc/transport/turn_jobs.h"

namespace logitd::rpc {
namespace {

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

class RpcServerImpl final : public RpcServer, private http2::ServerEvents {
 public:
  RpcServerImpl(const RpcServerOptions& options, engine::Admission* admission,
                engine::Engine* engine, engine::Heads* heads, engine::Metrics* metrics)
      : door_metrics_(options.door_metrics),
        load_(&engine->costs(), metrics, SteadyClock(), &engine->devices(),
              engine::Load::ShortCallsFor(UsableCores())),
        log_(options.slow_call),
        tracker_(options.peer_timeout, admission->options().retry_delay, options.loops + 1,
                 metrics),
        turn_jobs_(engine, options.loops),
        environment_{.admission = admission,
                     .engine = engine,
                     .heads = heads,
                     .metrics = metrics,
                     .load = &load_,
                     .door_metrics = options.door_metrics.get(),
                     .identities = options.identities,
                     .tracker = &tracker_,
                     .log = &log_,
                     .leases = options.leases,
                     .writer = options.leases == nullptr ? nullptr : &writer_,
                     .turn_jobs = &turn_jobs_,
                     .places = options.places,
                     .max_payload_bytes = options.max_request_bytes},
        heads_(options.head_root, options.remote_listen, environment_),
        info_(MakeInfo(options, engine->devices(), admission->options(), engine->options()),
              environment_),
        health_(environment_),
        probes_(tracker_, options.loops, &health_),
        server_(ServerOptionsOf(options), this) {
    services_ = RegisterOps(environment_, &registry_);
    heads_.Register(&registry_);
    info_.Register(&registry_);
    services_.insert(services_.end(), {"logitd.v1.Heads", "logitd.v1.Server"});
    health_.Register(&registry_);
    RegisterReflection(services_, environment_, &registry_);
  }

  ~RpcServerImpl() override { Shutdown(); }

  absl::Status Listen(const RpcServerOptions& options) {
    if (absl::Status status = server_.Listen(options.listen, options.socket_mode); !status.ok()) {
      return status;
    }
    SetServing(true);
    server_.Start();
    if (options.probe_listen.empty()) return absl::OkStatus();
    return probes_.Listen(options.probe_listen, options.socket_mode);
  }

  const std::vector<std::string>& listening() const override { return server_.listening(); }
  const std::vector<std::string>& probes_listening() const override { return probes_.listening(); }

  void SetServing(bool serving) override {
    health_.Set("", serving);
    for (const std::string& service : services_) health_.Set(service, serving);
    const engine::Devices& devices = environment_.engine->devices();
    for (int i = 0; i < devices.count(); ++i) {
      health_.Set(absl::StrCat("logitd.device.", devices.info(i).number),
                  serving && !devices.lost(i));
    }
  }

  void Drain(absl::Duration receive_timeout) override {
    tracker_.BeginDrain(receive_timeout);
    EachCall([receive_timeout](ServerCall* call) { call->OnDrain(receive_timeout); });
    server_.Drain();
  }

  void RecheckIdentities() override {
    EachCall([](ServerCall* call) { call->OnIdentities(); });
  }

  arena::ServeRing ring_service() override { return MakeRingService(environment_); }

  int calls() const override { return tracker_.alive(); }

  bool loading() const override { return heads_.loading(); }

  http2::Traffic traffic() const override { return server_.traffic(); }

  void RefuseConnections(bool refuse) override { server_.Refuse(refuse); }

  void Shutdown() override {
    server_.Shutdown();
    probes_.Shutdown();
  }

 private:
  static http2::ServerOptions ServerOptionsOf(const RpcServerOptions& options) {
    http2::ServerOptions server = {.loops = options.loops,
                                   .limits = options.limits,
                                   .max_connections = options.max_connections,
                                   .max_held_bytes = options.max_connection_bytes,
                                   .tls = options.tls};
    server.times.send = options.peer_timeout;
    server.times.max_age = options.max_connection_age;
    server.times.max_idle = options.max_connection_idle;
    server.times.keepalive = options.keepalive_time;
    return server;
  }

  void EachCall(std::function<void(ServerCall*)> use) {
    server_.OnEachLoop([this, use = std::move(use)](int loop) { tracker_.ForEach(loop, use); });
  }

  // http2::ServerEvents
  std::shared_ptr<http2::StreamEvents> OnStream(http2::Stream* stream) override {
    return registry_.Start(stream, tracker_);
  }
  void OnOpen(int64_t open) override {
    if (door_metrics_ != nullptr) door_metrics_->OnOpen(open);
  }
  void OnRefused() override {
    if (door_metrics_ != nullptr) door_metrics_->OnRefused();
  }
  void OnCut(http2::Cut cut) override {
    if (door_metrics_ != nullptr) door_metrics_->OnCut(http2::NameOf(cut).name);
  }
  void OnHandshake(http2::HandshakeEnd end) override {
    if (door_metrics_ != nullptr) {
      door_metrics_->OnHandshake(http2::kHandshakeEndNames[static_cast<size_t>(end)]);
    }
  }

  const std::shared_ptr<door::DoorMetrics> door_metrics_;  // null: none
  engine::Load load_;
  const CallLog log_;
  CallTracker tracker_;
  arena::Writer writer_;
  TurnJobs turn_jobs_;
  const CallEnvironment environment_;
  Registry registry_;
  std::vector<std::string> services_;
  HeadsService heads_;
  ServerService info_;
  HealthService health_;
  ProbeServer probes_;
  http2::Server server_;  // ends first: its loops use the others
};

}  // namespace

int64_t MaxMessageBytes(int64_t max_request_bytes, int64_t max_batch_rows) {
  return max_request_bytes + kHeaderBytes + kHeaderBytesPerRow * max_batch_rows;
}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const RpcServerOptions& options,
                                                            engine::Admission* admission,
                                                            engine::Engine* engine,
                                                            engine::Heads* heads,
                                                            engine::Metrics* metrics) {
  auto server = std::make_unique<RpcServerImpl>(options, admission, engine, heads, metrics);
  if (absl::Status status = server->Listen(options); !status.ok()) {
    return status;
  }
  return server;
}

}  // namespace logitd::rpc
