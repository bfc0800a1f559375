#include "tests/client/fake_server.h"

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "formats/half.h"

namespace logitd::testing {
namespace {

std::vector<double> RowOf(const v1::TopKRequest& request, int64_t row) {
  std::vector<double> out(request.vocab());
  for (int64_t i = 0; i < request.vocab(); ++i) {
    const int64_t element = row * request.vocab() + i;
    if (request.dtype() == v1::DTYPE_F32) {
      float value;
      std::memcpy(&value, request.logits().data() + 4 * element, 4);
      out[i] = value;
    } else {
      uint16_t bits;
      std::memcpy(&bits, request.logits().data() + 2 * element, 2);
      out[i] = request.dtype() == v1::DTYPE_BF16 ? formats::BF16ToFloat(bits)
                                                 : formats::F16ToFloat(bits);
    }
  }
  return out;
}

}  // namespace

void ReferenceTopK(const v1::TopKRequest& request, v1::TopKResponse* response) {
  for (int64_t row = 0; row < request.rows(); ++row) {
    std::vector<double> x = RowOf(request, row);
    const int k = request.k_size() == 1 ? request.k(0) : request.k(row);
    double temperature = 1;
    if (request.temperature_size() == 1) temperature = request.temperature(0);
    if (request.temperature_size() > 1) temperature = request.temperature(row);
    const auto nan = std::find_if(x.begin(), x.end(), [](double v) { return std::isnan(v); });
    for (double& value : x) value = nan == x.end() ? value / temperature : 0;
    const double max = *std::max_element(x.begin(), x.end());
    double sum = 0;
    for (double value : x) sum += std::exp(value - max);
    const double lse = max + std::log(sum);
    std::vector<int> order(x.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return x[a] > x[b]; });
    response->add_k(k);
    for (int i = 0; i < k; ++i) {
      response->add_indices(order[i]);
      response->add_probs(static_cast<float>(std::exp(x[order[i]] - lse)));
    }
    response->add_logsumexp(nan == x.end() ? static_cast<float>(lse) : std::nanf(""));
    response->add_status(nan == x.end() ? v1::ROW_STATUS_OK : v1::ROW_STATUS_NAN_LOGIT);
    response->add_status_position(nan == x.end() ? -1 : static_cast<int>(nan - x.begin()));
  }
  v1::Timings* timings = response->mutable_timings();
  timings->set_receive_ns(1000);
  timings->set_copy_ns(200);
  timings->set_queue_ns(30);
  timings->set_kernel_ns(5000);
  timings->set_total_ns(6230);
  timings->set_batch_rows(static_cast<int>(request.rows()));
}

LocalServer::LocalServer(grpc::Service* service) {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
  builder.RegisterService(service);
  builder.RegisterService(&info_);
  server_ = builder.BuildAndStart();
}

grpc::Status FakeServer::SamplerService::TopK(grpc::ServerContext* context,
                                              const v1::TopKRequest* request,
                                              v1::TopKResponse* response) {
  const int call = ++calls;
  const int64_t bytes = static_cast<int64_t>(request->ByteSizeLong());
  int64_t seen = largest_request;
  while (bytes > seen && !largest_request.compare_exchange_weak(seen, bytes)) {
  }
  if (handler != nullptr) return handler(call, context, *request, response);
  ReferenceTopK(*request, response);
  return grpc::Status::OK;
}

FakeServer::FakeServer(Handler handler, const std::string& unix_path) {
  sampler_.handler = std::move(handler);
  v1::GetInfoResponse& info = info_service_.info;
  info.set_version("1.2.3");
  info.set_backend("cpu");
  info.mutable_device()->set_name("fake");
  info.mutable_device()->set_memory_bytes(int64_t{1} << 30);
  info.mutable_limits()->set_max_request_bytes(int64_t{1} << 30);
  info.mutable_limits()->set_max_held_bytes(int64_t{4} << 30);
  info.mutable_limits()->set_max_batch_rows(1 << 16);
  info.mutable_limits()->set_max_vocab(1 << 20);
  info.mutable_limits()->set_max_answer_bytes(1 << 30);
  info.mutable_limits()->set_streams(2);
  v1::Op* op = info.add_ops();
  op->set_name("softmax_topk");
  op->set_method("logitd.v1.Sampler/TopK");
  for (v1::DType dtype : {v1::DTYPE_F32, v1::DTYPE_F16, v1::DTYPE_BF16}) op->add_dtypes(dtype);

  grpc::EnableDefaultHealthCheckService(true);
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(-1);
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
  if (!unix_path.empty()) {
    builder.AddListeningPort("unix:" + unix_path, grpc::InsecureServerCredentials());
  }
  builder.RegisterService(&sampler_);
  builder.RegisterService(&info_service_);
  server_ = builder.BuildAndStart();
}

FakeServer::~FakeServer() { Shutdown(); }

void FakeServer::Shutdown() {
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
  server_.reset();
}

std::string FakeServer::address() const { return "127.0.0.1:" + std::to_string(port_); }

void FakeServer::SetServing(bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(serving);
}

grpc::ServerGenericBidiReactor* StuckServer::Service::CreateReactor(
    grpc::GenericCallbackServerContext*) {
  class Reactor : public grpc::ServerGenericBidiReactor {
   public:
    void OnCancel() override { Finish(grpc::Status::CANCELLED); }
    void OnDone() override { delete this; }
  };
  return new Reactor;
}

StuckServer::StuckServer() {
  grpc::ServerBuilder builder;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port_);
  builder.RegisterCallbackGenericService(&service_);
  server_ = builder.BuildAndStart();
}

StuckServer::~StuckServer() { server_->Shutdown(std::chrono::system_clock::now()); }

std::string StuckServer::address() const { return "127.0.0.1:" + std::to_string(port_); }

}  // namespace logitd::testing
