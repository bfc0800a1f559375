#include "server/rpc/rpc_server.h"

#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "kernels/types.h"
#include "kernels/usable_cores.h"
#include "server/engine/devices.h"
#include "server/ops/ops.h"

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

}  // namespace

int64_t MaxMessageBytes(int64_t max_request_bytes, int64_t max_batch_rows) {
  return max_request_bytes + kHeaderBytes + kHeaderBytesPerRow * max_batch_rows;
}

RpcServer::RpcServer(const RpcServerOptions& options, engine::Admission* admission,
                     engine::Engine* engine, engine::Heads* heads, engine::Metrics* metrics)
    : door_metrics_(options.door_metrics),
      load_(&engine->costs(), metrics, SteadyClock(), &engine->devices(),
            engine::Load::ShortCallsFor(UsableCores())),
      log_(options.slow_call),
      tracker_(options.http2.times.send, admission->options().retry_delay, options.http2.loops + 1,
               metrics),
      turn_jobs_(engine, options.http2.loops),
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
      services_(RegisterOps(environment_, &registry_)),
      heads_(options.head_root, options.remote_listen, environment_),
      health_(environment_),
      probes_(tracker_, options.http2.loops, &health_),
      server_(options.http2, this) {
  heads_.Register(&registry_);
  RegisterServer(MakeInfo(options, engine->devices(), admission->options(), engine->options()),
                 environment_, &registry_);
  services_.insert(services_.end(), {"logitd.v1.Heads", "logitd.v1.Server"});
  health_.Register(&registry_);
  RegisterReflection(services_, environment_, &registry_);
}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(const RpcServerOptions& options,
                                                            engine::Admission* admission,
                                                            engine::Engine* engine,
                                                            engine::Heads* heads,
                                                            engine::Metrics* metrics) {
  std::unique_ptr<RpcServer> server(new RpcServer(options, admission, engine, heads, metrics));
  LOGITD_RETURN_IF_ERROR(server->server_.Listen(options.listen, options.socket_mode));
  server->SetServing(true);
  server->server_.Start();
  if (!options.probe_listen.empty()) {
    LOGITD_RETURN_IF_ERROR(server->probes_.Listen(options.probe_listen, options.socket_mode));
  }
  return server;
}

void RpcServer::SetServing(bool serving) {
  health_.Set("", serving);
  for (const std::string& service : services_) health_.Set(service, serving);
  const engine::Devices& devices = environment_.engine->devices();
  for (int i = 0; i < devices.count(); ++i) {
    health_.Set(absl::StrCat("logitd.device.", devices.info(i).number),
                serving && !devices.lost(i));
  }
}

void RpcServer::EachCall(std::function<void(ServerCall*)> use) {
  server_.OnEachLoop([this, use = std::move(use)](int loop) { tracker_.ForEach(loop, use); });
}

void RpcServer::Drain(absl::Duration receive_timeout) {
  tracker_.BeginDrain(receive_timeout);
  EachCall([receive_timeout](ServerCall* call) { call->OnDrain(receive_timeout); });
  server_.Drain();
}

void RpcServer::RecheckIdentities() {
  EachCall([](ServerCall* call) { call->OnIdentities(); });
}

void RpcServer::Shutdown() {
  server_.Shutdown();
  probes_.Shutdown();
}

std::shared_ptr<http2::StreamEvents> RpcServer::OnStream(http2::Stream* stream) {
  return registry_.Start(stream, tracker_);
}

void RpcServer::OnOpen(int64_t open) {
  if (door_metrics_ != nullptr) door_metrics_->OnOpen(open);
}

void RpcServer::OnRefused() {
  if (door_metrics_ != nullptr) door_metrics_->OnRefused();
}

void RpcServer::OnCut(http2::Cut cut) {
  if (door_metrics_ != nullptr) door_metrics_->OnCut(http2::NameOf(cut).name);
}

void RpcServer::OnHandshake(http2::HandshakeEnd end) {
  if (door_metrics_ != nullptr) {
    door_metrics_->OnHandshake(http2::kHandshakeEndNames[static_cast<size_t>(end)]);
  }
}

}  // namespace logitd::rpc
